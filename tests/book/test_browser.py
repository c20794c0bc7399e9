"""A real browser opens every page, over http, on a wide and on a narrow screen."""

import pytest
from book_sources import toc_documents
from small_books import ROOT

PAGES = [*toc_documents(ROOT), "genindex", "search"]
WIDTHS = (1300, 400)
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
WIDER_THAN_PAGE = "() => document.documentElement.scrollWidth - window.innerWidth"
BROKEN_PICTURES = """() => [...document.images]
  .filter((image) => !image.hidden && !image.naturalWidth).map((image) => image.alt)"""
REPEATED_IDS = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  return ids.filter((id, k) => ids.indexOf(id) !== k);
}"""
RAW_FORMULAS = """() => [...document.querySelectorAll(".math")]
  .filter((formula) => !formula.querySelector("mjx-container")).map((f) => f.textContent)"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("document", PAGES)
def test_page_is_whole(document, width, open_page):
    page = open_page(f"{document}.html", width)
    assert page.troubles == []
    assert page.locator("mjx-merror").count() == 0
    assert page.evaluate(RAW_FORMULAS) == []
    assert page.evaluate(BROKEN_PICTURES) == []
    assert page.evaluate(REPEATED_IDS) == []
    assert page.evaluate(WIDER_THAN_PAGE) <= 0
    assert page.evaluate(CUT_FORMULAS) == []


def test_some_pages_have_formulas_and_figures(open_page):
    pages = [open_page(f"{document}.html") for document in PAGES]
    assert sum(page.locator("mjx-container").count() > 0 for page in pages) >= 2
    assert sum(page.locator("figure img").count() > 0 for page in pages) >= 2


def _visible_frame(figure):
    frames = figure.locator("img.lg-frame")
    shown = [i for i in range(frames.count()) if frames.nth(i).is_visible()]
    assert len(shown) == 1
    return shown[0]


def test_sliders_follow_the_keyboard(open_page):
    with_slider = 0
    for document in PAGES:
        page = open_page(f"{document}.html", 400)
        figures = page.locator("figure.lg-slider")
        with_slider += figures.count() > 0
        for figure in figures.all():
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
                page.keyboard.press("Home")
                first = _visible_frame(figure)
                page.keyboard.press("ArrowRight")
                assert _visible_frame(figure) != first
                page.keyboard.press("ArrowLeft")
                assert _visible_frame(figure) == first
    assert with_slider >= 2


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
