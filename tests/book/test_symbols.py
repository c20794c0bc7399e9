"""The table of symbols: read rightly, and every chapter's symbols lead to it."""

import json
from pathlib import Path

import nbformat
import pytest
from book_sources import notebooks, page_source
from bs4 import BeautifulSoup
from companion import symbols
from companion.plain_math import plain, plain_text
from small_books import ROOT

TABLE = symbols.read_table(
    symbols.section_of(nbformat.read(page_source(ROOT, symbols.PAGE), as_version=4))
)
CHAPTERS = [document for document in notebooks(ROOT) if document != symbols.PAGE]
SMALL = r"""
### In Parts I and III: one thing

| symbol | word | in the package |
|---|---|---|
| $n$, $d$ | examples, features | `data.n` |
| $G$ | gradient: in $W$, $d \times m$ | |
| $\zeta = n^\nu$, $c \ne 0$ | spike strength | |
| $S_1$ | [residue spike](gradient.ipynb#decomposition) | |

### In Part II: another

| symbol | word |
|---|---|
| $G$ | Gauss-Newton matrix |
| $\Delta$ ([algebra](algebra.ipynb)) | logit derivatives |
"""


@pytest.fixture(scope="module")
def small():
    return symbols.read_table(SMALL)


@pytest.fixture(scope="module")
def pages(html):
    names = [symbols.PAGE, *CHAPTERS]
    return {p: BeautifulSoup((html / f"{p}.html").read_text(), "html.parser") for p in names}


def titles(known):
    return {latex: symbol.title for latex, symbol in known.items()}


def test_a_letter_means_what_it_means_in_its_part(small):
    assert titles(small.for_chapter("gradient", "I"))["G"] == "G: gradient: in W, d × m"
    assert titles(small.for_chapter("law", "III"))["G"] == "G: gradient: in W, d × m"
    assert titles(small.for_chapter("levels", "II")) == {"G": "G: Gauss-Newton matrix"}


def test_a_row_that_names_chapters_is_for_these_alone(small):
    assert r"\Delta" in small.for_chapter("algebra", "II")
    assert r"\Delta" not in small.for_chapter("levels", "II")
    # Also where the chapter is in another part than the table.
    assert r"\Delta" in small.for_chapter("algebra", "I")


def test_words_go_with_symbols_and_lead_home(small):
    known = small.for_chapter("gradient", "I")
    assert titles(known)["d"] == "d: features"
    assert known["n"].anchor == known["d"].anchor == "symbol-examples"
    assert known["S_1"].home == ("gradient", "decomposition")
    assert known["S_1"].title == "S₁: residue spike"


@pytest.mark.parametrize(
    ("formula", "symbol"),
    [
        ("G", "G"),
        (r"\zeta", r"\zeta"),
        (r"\zeta \le 1", r"\zeta"),
        (r"\zeta = 6", r"\zeta"),
        (r"n = 0.75\,d", "n"),
        (r"c \ne 0", r"c \ne 0"),
        # Another letter, or more than the letter.
        ("c", None),
        ("c = n/d", None),
        ("G_1", None),
        ("n, d", None),
        (r"n\nu", None),
        (r"\zeta^2", None),
        ("G^\\top", None),
    ],
)
def test_which_formulas_mean_a_symbol(small, formula, symbol):
    found = symbols.meant(formula, small.for_chapter("gradient", "I"))
    assert (found.latex if found else None) == symbol


def test_letters_in_commands_and_other_indices_do_not_occur(small):
    known = small.for_chapter("gradient", "I")
    occurring = {s.latex for s in symbols.occurring([r"\frac{\gamma}{n} X^\top S_1 S_{12}"], known)}
    assert occurring == {"n", "S_1"}
    hidden = [r"\operatorname{diag}(r)", r"\mathrm{d}x", r"G_1", "G'", r"\nabla", r"\mathbb d"]
    assert symbols.occurring(hidden, known) == []


def test_formulas_as_plain_text():
    assert plain(r"\lVert r\rVert") == "‖r‖"
    assert plain(r"\sigma'_\perp") == "σ'⊥"
    assert plain(r"G_{1+2}") == "G₁₊₂"
    assert plain(r"n^\nu") == "n^ν"
    assert plain_text(r"mean of $\delta_{c,c'}$ over $c' \ne c$") == "mean of δ_{c,c'} over c' ≠ c"


def test_no_symbol_shows_a_command():
    assert TABLE.rows
    for symbol in TABLE.symbols():
        assert "\\" not in symbol.title and "$" not in symbol.title, symbol.title


def test_no_symbol_has_two_meanings_in_a_chapter():
    for part in ("I", "II", "III"):
        general = [s.latex for s in TABLE.symbols() if part in s.parts and not s.chapters]
        assert len(set(general)) == len(general), part
    named = [(s.latex, chapter) for s in TABLE.symbols() for chapter in s.chapters]
    assert len(set(named)) == len(named)
    assert {chapter for _, chapter in named} <= {Path(document).name for document in CHAPTERS}


def test_rows_have_the_anchors_that_links_lead_to(pages):
    rows = {row["id"]: row for row in pages[symbols.PAGE].select("tr.lg-symbol-row")}
    assert set(rows) == {symbol.anchor for symbol in TABLE.symbols()}
    for symbol in TABLE.symbols():
        # The row's first cell holds the symbol itself.
        formulas = [f.text[2:-2] for f in rows[symbol.anchor].select("td:first-child span.math")]
        known = [symbols.normal(f) for f in formulas]
        assert symbol.latex in known or symbol.latex in map(symbols.head, known), symbol.title


@pytest.mark.parametrize("document", CHAPTERS)
def test_first_uses_lead_to_the_table(document, pages):
    links = pages[document].select("a.lg-symbol")
    assert links, "no formula of this chapter has a symbol of the table in how-to-read.ipynb"
    table = {(symbol.anchor, symbol.title): symbol for symbol in TABLE.symbols()}
    seen = []
    for link in links:
        page, _, anchor = link["href"].partition("#")
        assert page == "how-to-read.html"
        symbol = table[anchor, link["title"]]
        assert link["aria-label"] == link["title"]
        assert symbol.latex in (
            symbols.normal(link.text.strip()[2:-2]),
            symbols.head(link.text.strip()[2:-2]),
        )
        seen.append((anchor, symbol.word))
        # Not in headings, not within another link.
        assert not link.find_parents(["h1", "h2", "h3", "a"])
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("document", CHAPTERS)
def test_the_list_holds_what_occurs(document, pages):
    lists = pages[document].select("details.lg-symbols")
    assert len(lists) == 1
    assert not lists[0].has_attr("open")
    shown = {item.a["href"].partition("#")[2] for item in lists[0].select("li")}
    linked = {a["href"].partition("#")[2] for a in pages[document].select("a.lg-symbol")}
    assert linked <= shown
    assert shown <= {symbol.anchor for symbol in TABLE.symbols()}


def test_notebooks_know_nothing_of_it():
    for document in CHAPTERS:
        text = page_source(ROOT, document).read_text(encoding="utf8")
        assert "lg-symbol" not in text and "how-to-read.ipynb#symbol" not in text


def test_every_symbol_is_used_somewhere(pages):
    shown = {
        item.a["href"].partition("#")[2]
        for document in CHAPTERS
        for item in pages[document].select("details.lg-symbols li")
    }
    unused = {symbol.anchor for symbol in TABLE.symbols()} - shown
    # Signs, which are read off other formulas than they are written in.
    assert unused <= {"symbol-alignment-of-the-directions", "symbol-operator-norm"}


def test_words_of_the_lists_are_not_in_the_index_of_the_search(html):
    index = json.loads((html / "searchindex.js").read_text()[len("Search.setIndex(") : -1])
    pages = index["terms"]["interpol"]
    assert len([pages] if isinstance(pages, int) else pages) < len(CHAPTERS) / 2
