"""The book builds from its sources: every page, every notebook, every row of the ledger."""

import functools
import json
import time
from pathlib import Path

import build_book
from book_sources import chapter_names, kernel_key, notebook_key, notebooks, toc_documents
from bs4 import BeautifulSoup
from execute import NOTEBOOK_BUDGET, execution_report, result_path
from small_books import ROOT

from lowgrad_utils import claims

RECORD_KEYS = {
    *("id", "source", "statement", "kind", "chapter"),
    *("predicted", "measured", "verdict", "expected"),
}


def test_every_page_of_the_contents_is_built(html):
    generated = {"genindex", "search"}
    pages = {p.relative_to(html).with_suffix("").as_posix() for p in html.rglob("*.html")}
    pages = {page for page in pages if not page.startswith("_")}
    assert pages - generated == set(toc_documents(ROOT))
    assert generated <= pages


def test_build_again_does_nothing(html, capsys):
    start = time.monotonic()
    assert build_book.build(ROOT) == html
    assert "up to date" in capsys.readouterr().out
    assert time.monotonic() - start < 10


def _results():
    common = kernel_key(ROOT)
    for document in notebooks(ROOT):
        yield document, result_path(ROOT, document, notebook_key(ROOT, document, common))


def test_every_notebook_was_executed_to_its_end(html):
    for document, path in _results():
        code = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert code, document
        counts = [cell["execution_count"] for cell in code if "".join(cell["source"]).strip()]
        assert counts == list(range(1, len(counts) + 1)), document
        kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
        assert "error" not in kinds, document


def test_notebooks_keep_their_budget(html):
    slow = {doc: execution_report(path).seconds for doc, path in _results()}
    assert {doc: s for doc, s in slow.items() if s > NOTEBOOK_BUDGET} == {}


def test_outputs_are_shown(html):
    for document in notebooks(ROOT):
        page = BeautifulSoup((html / f"{document}.html").read_text(), "html.parser")
        executed = json.loads(dict(_results())[document].read_text())["cells"]
        shown = [
            cell
            for cell in executed
            if cell.get("outputs") and "remove-cell" not in cell["metadata"].get("tags", [])
        ]
        assert len(page.select("div.cell_output")) == len(shown), document


def _records(html: Path) -> list[dict]:
    return json.loads((html / "claims.json").read_text(encoding="utf8"))


def test_ledger_is_complete(html):
    records = _records(html)
    assert claims.audit(records, chapter_names(ROOT)) == []
    settled = {row.id for row in claims.load_registry().values() if row.status == "settled"}
    assert {record["id"] for record in records} == settled
    for record in records:
        assert set(record) >= RECORD_KEYS, record["id"]
        assert record["verdict"] == record["expected"], record["id"]


def _anchors(page):
    soup = BeautifulSoup(page.read_text(), "html.parser")
    return {element["id"] for element in soup.select("[id]")}


def test_page_shows_every_row_of_the_ledger(html):
    page = BeautifulSoup((html / "what-holds.html").read_text(), "html.parser")
    rows = {row["id"].removeprefix("row-"): row for row in page.select("tr[id^=row-]")}
    registry = claims.load_registry()
    assert set(rows) == set(registry)
    measured = {record["id"]: record for record in _records(html)}
    anchors = functools.cache(lambda target: _anchors(html / target))
    for claim_id, row in rows.items():
        verdict = measured[claim_id]["verdict"] if claim_id in measured else "planned"
        prefix = "control " if claim_id in measured and registry[claim_id].control else ""
        assert row.select_one(".lg-verdict").text == prefix + verdict
        link = row.select_one("a[href]")
        assert (link is not None) == (claim_id in measured), claim_id
        if link is not None:
            target, _, anchor = link["href"].partition("#")
            assert anchor in anchors(target), claim_id
    counts = [int(count.text) for count in page.select(".lg-counts .lg-count")]
    assert sum(counts) == len(registry)
