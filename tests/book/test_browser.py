"""A real browser opens every page, over http, and shows it wide and narrow, light and dark.

Opening a page takes longer than most questions about it, so each is opened once: first it is asked
what it is like as it was opened, and what it becomes last.
"""

import pytest
from axe_rules import faults, unfold
from book_sources import toc_documents
from bs4 import BeautifulSoup
from looks import look, settle
from small_books import ROOT

PAGES = [*toc_documents(ROOT), "genindex", "search"]
EVERY_PAGE = pytest.mark.parametrize("visited", PAGES, indirect=True)
WIDTHS = (1300, 400)
# Each theme once on every page, each width once: together they cost minutes as it is.
LOOKS = {"wide and light": (1300, "light"), "narrow and dark": (400, "dark")}
# What the theme itself does wrong, by look, rule and element, on every page. A fault that is gone
# must leave this list, and one that is new must be mended or be the theme's.
OF_THE_THEME = {
    "wide and light": {
        # The title above the left column stands outside the page's landmarks.
        ("region", ".sidebar-primary-item:has(> .navbar-brand)"),
    },
    "narrow and dark": set(),
}
# Formulas with an end that no scrolling brings into view.
CUT_FORMULAS = """() => [...document.querySelectorAll("div.math")].filter((box) => {
  const scroll = (x) => box.querySelectorAll("mjx-container").forEach((inner) => {
    box.scrollLeft = x;
    inner.scrollLeft = x;
  });
  const parts = [...box.querySelectorAll("mjx-mi, mjx-mo, mjx-mn, mjx-mtext")];
  const ends = (side) => parts.map((part) => part.getBoundingClientRect()[side]);
  scroll(0);
  const left = Math.min(...ends("left"));
  scroll(99999);
  const right = Math.max(...ends("right"));
  const frame = box.getBoundingClientRect();
  return left < frame.left - 1 || right > frame.right + 1;
}).map((box) => box.textContent)"""
# On a telephone half of a bound would look like all of it.
STATEMENTS_THAT_SCROLL = """() => [...document.querySelectorAll(".lg-statement div.math")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.textContent)"""
# Solutions and what else can be unfolded included.
WIDER_THAN_PAGE = """() => {
  const folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((details) => { details.open = true; });
  const more = document.documentElement.scrollWidth - window.innerWidth;
  folded.forEach((details) => { details.open = false; });
  return more;
}"""
BROKEN_PICTURES = """() => [...document.images]
  .filter((image) => !image.hidden && !image.naturalWidth).map((image) => image.alt)"""
REPEATED_IDS = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  return ids.filter((id, k) => ids.indexOf(id) !== k);
}"""
RAW_FORMULAS = """() => [...document.querySelectorAll(".math")]
  .filter((formula) => !formula.querySelector("mjx-container")).map((f) => f.textContent)"""


# Where everything that is seen of a page's own text is, and which colours it has.
PLACES = """() => [...document.querySelectorAll("article, article *")].filter((element) =>
  element.checkVisibility({ opacityProperty: true })
).map((element) => {
  const { x, y, width, height } = element.getBoundingClientRect();
  const { color, backgroundColor, display } = getComputedStyle(element);
  const places = [x, y + window.scrollY, width, height].map((place) => Math.round(place));
  return [element.localName, ...places, color, backgroundColor, display].join(" ");
})"""


@pytest.mark.parametrize("width", WIDTHS)
@EVERY_PAGE
def test_page_is_whole(visited, width):
    look(visited, width)
    assert visited.troubles == []
    assert visited.locator("mjx-merror").count() == 0
    assert visited.evaluate(RAW_FORMULAS) == []
    assert visited.evaluate(BROKEN_PICTURES) == []
    assert visited.evaluate(REPEATED_IDS) == []
    assert visited.evaluate(WIDER_THAN_PAGE) <= 0
    assert visited.evaluate(CUT_FORMULAS) == []
    assert visited.evaluate(STATEMENTS_THAT_SCROLL) == []


def _visible_frame(figure):
    frames = figure.locator("img.lg-frame")
    shown = [i for i in range(frames.count()) if frames.nth(i).is_visible()]
    assert len(shown) == 1
    return shown[0]


@EVERY_PAGE
def test_sliders_follow_the_keyboard(visited):
    look(visited, 400)
    for figure in visited.locator("figure.lg-slider").all():
        ranges = figure.locator("input[type=range]").all()
        # What has no order is a list to choose from, which the browser's own keys open.
        lists = figure.locator("select").all()
        assert ranges or lists
        for choice in lists:
            first = _visible_frame(figure)
            choice.select_option(index=1)
            assert _visible_frame(figure) != first
            choice.select_option(index=0)
            assert _visible_frame(figure) == first
        for knob in ranges:
            assert knob.get_attribute("aria-label") or knob.evaluate("k => k.labels.length")
            knob.focus()
            visited.keyboard.press("Home")
            first = _visible_frame(figure)
            visited.keyboard.press("ArrowRight")
            assert _visible_frame(figure) != first
            visited.keyboard.press("ArrowLeft")
            assert _visible_frame(figure) == first
    assert visited.troubles == []


@pytest.mark.parametrize("name", LOOKS)
@EVERY_PAGE
def test_a_page_breaks_no_rule_of_its_own(visited, name):
    width, scheme = LOOKS[name]
    look(visited, width, scheme)
    assert visited.evaluate("document.documentElement.dataset.theme") == scheme
    unfold(visited)
    assert faults(visited, OF_THE_THEME[name]) == OF_THE_THEME[name]


def test_there_are_formulas_figures_and_sliders_to_ask_about(html):
    pages = [
        BeautifulSoup((html / f"chapters/{name}.html").read_text(), "html.parser")
        for name in ("theorem-3-1", "third-spike")
    ]
    for kind in (".math", "figure img", "figure.lg-slider"):
        assert all(page.select_one(kind) for page in pages), kind


@pytest.mark.parametrize("document", ["index", "chapters/theorem-3-1", "what-holds"])
def test_a_page_that_becomes_narrow_and_dark_is_as_if_opened_so(document, open_page):
    wide = open_page(f"{document}.html", color_scheme="light")
    light = wide.evaluate(PLACES)
    look(wide, 400, "dark")
    opened = open_page(f"{document}.html", 400, color_scheme="dark")
    settle(opened)
    become = wide.evaluate(PLACES)
    assert become == opened.evaluate(PLACES)
    assert become != light


def test_ledger_is_filtered_and_sorted(open_page):
    page = open_page("what-holds.html")
    rows = page.locator(".lg-table tbody tr")
    total = rows.count()
    assert total > 0
    page.locator("[data-lg-find]").fill("no such words anywhere")
    assert page.locator(".lg-table tbody tr:visible").count() == 0
    page.locator("[data-lg-find]").fill("")
    assert page.locator(".lg-table tbody tr:visible").count() == total
    names = ".lg-table:first-of-type tbody tr td:first-child"
    heading = page.locator(".lg-table:first-of-type th button").first
    heading.click()
    ascending = page.locator(names).all_inner_texts()
    heading.click()
    assert page.locator(names).all_inner_texts() == ascending[::-1]
