"""Verdicts where statements stand: badges on their boxes, and a way from each box to the ledger.

Which statement a row of the ledger is about is written once, in the pages that map the papers: a
line of their tables leads to a box of a chapter (`chapters/relu.ipynb#figure-2`) and names its rows
with the role ``claim``.
"""

import html
import re
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from lowgrad_utils import claims

from . import badges, ledger

BOX = re.compile(r"\]\((?P<document>[\w/-]+)\.ipynb#(?P<anchor>[^)\s]+)\)")
CLAIM = re.compile(r"\{claim\}`([^`]+)`")
MEASURED = re.compile(r'(<div class="lg-claim" id="claim-(?P<id>[^"]+)".*)</div>\s*$', re.DOTALL)


def statement_rows(app: Sphinx) -> dict[tuple[str, str], list[str]]:
    """Return for each box of a chapter the rows of the ledger that are about it.

    Returns:
        Row ids by document and anchor, in the order of the maps.
    """
    found = defaultdict(list)
    for docname in sorted(app.env.found_docs):
        path = Path(app.env.doc2path(docname))
        if path.suffix == ".md":
            for key, row in rows_of_map(path.read_text(encoding="utf8")):
                found[key].append(row)
    return found


def rows_of_map(text: str) -> list[tuple[tuple[str, str], str]]:
    """Return what the tables of a page say: a box, as document and anchor, and a row's id.

    Example:
        >>> rows_of_map("| Lemma | [A](chapters/a.ipynb#lemma-1) | {claim}`lrg.a` |")
        [(('chapters/a', 'lemma-1'), 'lrg.a')]
    """
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [
        ((box["document"], box["anchor"]), row)
        for line in lines
        for box in BOX.finditer(line)
        for row in CLAIM.findall(line)
    ]


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Add verdicts to the boxes of a page, and links to the boxes of what was measured.

    A Sphinx event handler.
    """
    table = ledger.table_page(app.env)
    if not table or docname not in app.env.companion_documents.values():
        return
    page = app.builder.get_relative_uri(docname, table)
    rows = {row["id"]: row for row in ledger.ledger_rows(app)}
    about = statement_rows(app)
    for box in doctree.findall(_is_statement):
        named = [rows[i] for anchor in box["ids"] for i in about.get((docname, anchor), [])]
        if named:
            text = verdicts_html(named, page, lambda row: ledger.row_link(app, docname, row))
            box.append(nodes.raw("", text, format="html"))
    for output in doctree.findall(nodes.raw):
        found = MEASURED.search(output.astext()) if output.get("format") == "html" else None
        if found:
            output.children = [nodes.Text(measured_html(found, page))]


def _is_statement(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and "lg-statement" in node["classes"]


def verdicts_html(rows: list[dict], page: str, link) -> str:
    """Return the line of a statement's box that says what came of it.

    Args:
        rows: The rows of the ledger about it.
        page: The address of the page with the ledger.
        link: A function from a row to the address of the box that measured it, or "".
    """
    items = []
    for row in rows:
        name, verdict = html.escape(row["id"]), badges.verdict_of(row)
        address, statement = html.escape(link(row)), html.escape(claims.readable(row["statement"]))
        name_html = f'<a href="{address}" title="{statement}">{name}</a>' if address else name
        badge = f'<a href="{page}#{name}" aria-label="{verdict}: {name} in the ledger">'
        items.append(f"<li>{name_html} {badge}{badges.badge(verdict)}</a></li>")
    return f'<ul class="lg-statement-verdicts" aria-label="Verdicts">{"".join(items)}</ul>'


def measured_html(found: re.Match, page: str) -> str:
    """Return the box of a measurement with a link to its row of the ledger.

    Args:
        found: What `MEASURED` found in the box's HTML.
        page: The address of the page with the ledger.
    """
    link = f'<a class="lg-row" href="{page}#{found["id"]}">Row in What holds</a>'
    return f"{found[1]}{link}</div>"
