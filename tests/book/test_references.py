"""The roles `claim` and `function`, and the pages that map and correct the papers."""

import re

import build_book
import pytest
from book_sources import BookError
from companion.references import exists
from small_books import REGISTRY, ROOT, SETTLE, notebook, write_book

from lowgrad_utils import claims

FIRST = notebook("# First", SETTLE)
ROLE = re.compile(r"\{claim\}`([^`]+)`")


def book_with_page(folder, text):
    """A small book whose page of statements holds this text."""
    root = write_book(folder, REGISTRY, first=FIRST)
    (root / "what-holds.md").write_text(f"# What holds\n\n{text}\n\n```{{ledger}}\n```\n")
    return root


def test_a_claim_shows_its_verdict_and_leads_to_its_box(tmp_path):
    root = book_with_page(tmp_path / "book", "So {claim}`new.sum`, by {function}`decompose`.")
    page = (build_book.build(root) / "what-holds.html").read_text()
    reference = re.search(r'<span class="lg-reference">(.*?)</span></span>', page)[1]
    assert 'href="chapters/first.html#claim-new.sum"' in reference
    assert "lg-verdict-holds" in reference
    assert re.search(r"<code[^>]*lg-function[^>]*>.*?decompose", page)


def test_unknown_claims_and_functions_fail_the_build(tmp_path):
    text = "See {claim}`new.product` and {function}`spectra.no_such_thing`."
    with pytest.raises(BookError) as failure:
        build_book.build(book_with_page(tmp_path / "book", text))
    assert "'new.product' is not in claims.toml" in str(failure.value)
    assert "lowgrad_utils has no 'spectra.no_such_thing'" in str(failure.value)


def test_names_are_looked_up_in_the_package():
    assert exists("decompose")
    assert exists("spectra.bulk_edge")
    assert exists("TwoLayerNetwork.random")
    for name in ("decompos", "spectra.bulk", "no_module.decompose", "TwoLayerNetwork.no"):
        assert not exists(name), name


@pytest.mark.parametrize(
    "page, paper", [("paper-1.md", "lrg."), ("paper-2.md", "tlh."), ("beyond.md", "new.")]
)
def test_a_map_names_every_statement_of_its_paper_once(page, paper):
    named = ROLE.findall((ROOT / page).read_text(encoding="utf8"))
    rows = [id for id in claims.load_registry() if id.startswith(paper) and ".control" not in id]
    assert sorted(named) == sorted(rows)


def test_every_correction_has_its_evidence_and_every_corrected_row_is_listed():
    text = (ROOT / "corrections.md").read_text(encoding="utf8")
    sections = re.split(r"^### ", text, flags=re.M)[1:]
    assert sections
    for section in sections:
        assert ROLE.search(section), section.splitlines()[0]
    corrected = {
        row.id
        for row in claims.load_registry().values()
        if row.id.startswith(("lrg.", "tlh."))
        and not row.control
        and row.expected in ("holds with a correction", "fails")
    }
    assert corrected <= set(ROLE.findall(text))
