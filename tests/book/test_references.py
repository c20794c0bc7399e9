"""The roles `claim` and `function`, and the pages that map and correct the papers."""

import re

import build_book
import pytest
from book_sources import BookError, notebooks, page_source
from bs4 import BeautifulSoup
from companion.references import exists
from companion.verdicts import rows_of_map
from notebook_rules import OPENING, page_markdown
from small_books import REGISTRY, ROOT, SETTLE, notebook, write_book

from lowgrad_utils import claims

MAPS = ("paper-1.md", "paper-2.md", "beyond.md")
ROLE = re.compile(r"\{claim\}`([^`]+)`")


LEMMA = '> <a id="lemma-1"></a>**Lemma 1 (Sum).** It is two.'
ROW = "| Lemma 1 | [First](chapters/first.ipynb#lemma-1) | {claim}`new.sum` |"


def book_with_page(folder, text):
    """A small book with a statement and a page of statements that holds this text."""
    root = write_book(folder, REGISTRY, first=notebook("# First", LEMMA, SETTLE))
    (root / "what-holds.md").write_text(f"# What holds\n\n{text}\n\n```{{ledger}}\n```\n")
    return root


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages of a small book that uses both roles and maps its statement."""
    table = f"| a | b | c |\n|---|---|---|\n{ROW}"
    text = f"So {{claim}}`new.sum`, by {{function}}`decompose`.\n\n{table}"
    return build_book.build(book_with_page(tmp_path_factory.mktemp("small") / "book", text))


def test_a_claim_shows_its_verdict_and_leads_to_its_box(built):
    page = (built / "what-holds.html").read_text()
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


def test_maps_lead_to_every_statement_of_a_chapter_but_what_is_only_proved():
    mapped = {box for page in MAPS for box, _ in rows_of_map((ROOT / page).read_text())}
    boxes = set()
    for document in notebooks(ROOT):
        for line in page_markdown(page_source(ROOT, document)).splitlines():
            opening = OPENING.match(line)
            if opening and opening["anchor"]:
                boxes.add((document, opening["anchor"]))
    assert boxes - mapped == {
        ("chapters/spike-law", "proposition-l-1"),
        ("chapters/clusters", "derivation-sixty-degrees"),
    }


def test_a_statement_shows_the_verdicts_of_its_rows(built):
    page = BeautifulSoup((built / "chapters/first.html").read_text(), "html.parser")
    shown = page.find(id="lemma-1").select_one(".lg-statement-verdicts")
    assert shown.select_one(".lg-verdict").text == "holds"
    addresses = [link["href"] for link in shown.select("a")]
    assert addresses == ["#claim-new.sum", "../what-holds.html#new.sum"]
    box = page.find(id="claim-new.sum")
    assert box.select_one("a.lg-row")["href"] == "../what-holds.html#new.sum"


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
