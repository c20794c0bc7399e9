"""The ledger as HTML: counts, a filter, one table a paper."""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from lowgrad_utils import claims

from .badges import badge, verdict_of

PAPERS = {
    "lrg": "Low Rank Gradients and Where to Find Them",
    "tlh": "Measurements of Three-Level Hierarchical Structure in the Outliers in the Spectrum of "
    "Deepnet Hessians",
    "new": "Statements of this book",
}
COLUMNS = ("Statement", "Kind", "Predicted", "Measured", "Verdict")

Row = dict[str, Any]
Chapters = dict[str, dict[str, str]]


def ledger_html(rows: list[Row], chapters: Chapters, link: Callable[[Row], str]) -> str:
    """Return the ledger as HTML.

    Args:
        rows: Records as plain data, measured or not.
        chapters: For each part of the book its chapters, titles by name.
        link: A function from a row to the address of the cell that measured it, or "".
    """
    part_of = {name: part for part, titles in chapters.items() for name in titles}
    groups = {paper: [row for row in rows if _paper(row) == paper] for paper in PAPERS}
    tables = "".join(_table(PAPERS[paper], group, part_of, link) for paper, group in groups.items())
    return f'<div class="lg-ledger">{_counts(rows)}{_filter(rows, chapters)}{tables}</div>'


def spelled(rows: Iterable[Row]) -> list[str]:
    """Return the names of letters that the rows spell out and the table shows as letters.

    Example:
        >>> row = {"statement": "|E| <= n^(nu + alpha/2)", "source": "Theorem 3.1"}
        >>> spelled([row | {"predicted": "lambda_1 above 1"}])
        ['alpha', 'lambda', 'nu']
    """
    words = {word for row in rows for word in re.findall(r"[A-Za-z]+", _text(row))}
    return sorted(word for word in words if claims.readable(word) != word)


def _text(row: Row) -> str:
    return f"{row['statement']} {row['source']} {row.get('predicted') or ''}"


def _paper(row: Row) -> str:
    return row["id"].partition(".")[0]


def _counts(rows: list[Row]) -> str:
    counts = Counter(verdict_of(row) for row in rows).most_common()
    # Statements first: most rows are controls, which fail as they must.
    counts.sort(key=lambda pair: pair[0].startswith("control"))
    items = "".join(
        f'<li data-verdict="{html.escape(verdict)}">{badge(verdict)} '
        f'<span class="lg-count">{number}</span></li>'
        for verdict, number in counts
    )
    return f'<ul class="lg-counts" aria-label="Verdicts">{items}</ul>'


def _filter(rows: list[Row], chapters: Chapters) -> str:
    """Return the fields that a script makes work; without one they stay hidden."""
    used = {row["chapter"] for row in rows}
    parts = ""
    for part, titles in chapters.items():
        options = "".join(_option(name, title) for name, title in titles.items() if name in used)
        if options and part:
            whole = _option(part.partition(":")[0], f"All of {part.partition(':')[0]}")
            options = f'<optgroup label="{html.escape(part)}">{whole}{options}</optgroup>'
        parts += options
    known = {_paper(row) for row in rows}
    papers = "".join(_option(paper, title) for paper, title in PAPERS.items() if paper in known)
    fields = (
        '<label>Words <input type="search" data-lg-find data-lg-filter="find"></label>'
        + _select("Paper", "paper", papers)
        + _select("Chapter", "chapter", parts)
        + _select("Kind", "kind", _options(row["kind"] for row in rows))
        + _select("Verdict", "verdict", _options(verdict_of(row) for row in rows))
        + '<button type="button" data-lg-all>Show all</button>'
    )
    return (
        f'<div class="lg-filter" role="search" aria-label="Statements" hidden>{fields}</div>'
        '<p class="lg-status" role="status"></p>'
    )


def _select(label: str, name: str, options: str) -> str:
    every = '<option value="">all</option>'
    return f'<label>{label} <select data-lg-filter="{name}">{every}{options}</select></label>'


def _options(values: Iterable[str]) -> str:
    return "".join(_option(value, value) for value, _ in Counter(values).most_common())


def _option(value: str, text: str) -> str:
    return f'<option value="{html.escape(value)}">{html.escape(text)}</option>'


def _table(title: str, rows: list[Row], part_of: dict[str, str], link: Callable) -> str:
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body = "".join(_row(row, part_of.get(row["chapter"], ""), link(row)) for row in rows)
    return (
        f'<table class="lg-table"><caption>{html.escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(row: Row, part: str, address: str) -> str:
    name = html.escape(row["id"])
    linked = f'<a href="{html.escape(address)}">{name}</a>' if address else name
    # The anchor that links point to is the row's own name.
    said = html.escape(claims.readable(row["statement"]))
    statement = (
        f'<strong id="{name}">{linked}</strong><br>{said}'
        f"<br><small>{html.escape(claims.readable(row['source']))}</small>"
    )
    predicted = html.escape(claims.readable(str(row.get("predicted") or "")))
    measured = html.escape(str(row.get("measured") or ""))
    # One number a line: a row is read by looking for one of them.
    measured = measured.replace("; ", "<br>")
    verdict = badge(verdict_of(row))
    if row.get("other_seeds"):
        verdict += f"<br><small>so in {html.escape(row['other_seeds'])} runs on other seeds</small>"
    cells = (statement, html.escape(row["kind"]), predicted, measured, verdict)
    told = {
        "paper": _paper(row),
        "chapter": row["chapter"],
        "part": part.partition(":")[0],
        "kind": row["kind"],
        "verdict": verdict_of(row),
    }
    if claims.readable(_text(row)) != _text(row):
        # For the filter, which a reader without Greek keys types into; nobody else reads it.
        told["spelled"] = _text(row)
    data = " ".join(f'data-{key}="{html.escape(value)}"' for key, value in told.items())
    filled = zip(COLUMNS, cells, strict=True)
    return (
        f'<tr id="row-{name}" {data}>'
        + "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in filled)
        + "</tr>"
    )
