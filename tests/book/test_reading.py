"""What the script for readers adds to a page, in a real browser."""

import pytest

# Pages with long lines of code, wide formulas and tables of intervals.
PAGES = ["gauss-newton-algebra", "rule-of-thumb", "theorem-3-1", "your-network"]

WIDER_THAN_ITS_BOX = """() => [
  ...[...document.querySelectorAll("div.highlight pre, div.output pre")]
    .filter((box) => box.scrollWidth > box.clientWidth + 1),
  ...[...document.querySelectorAll("div.math")].filter((box) =>
    box.querySelector("mjx-math").getBoundingClientRect().width > box.clientWidth + 1),
].map((box) => box.textContent.trim().slice(0, 60))"""

# Whether a formula is wider than its box, whether that is said, and whether keys can scroll it.
HINTED = """boxes => boxes.map((box) => [
  box.querySelector("mjx-math").getBoundingClientRect().width > box.clientWidth + 1,
  !box.nextElementSibling.hidden,
  box.tabIndex === 0,
])"""

# Where the text of each cell of a table ends, or begins, from the right edge of the cell.
GAPS = """table => [...table.querySelectorAll("tbody td, tbody th")].map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const [text, box] = [range.getBoundingClientRect(), cell.getBoundingClientRect()];
  const words = cell.textContent.trim();
  return { text: words, left: text.left - box.left, right: box.right - text.right };
})"""

# The first letter behind, and the last before, each formula of running text, and whether a line
# ends between the two.
TORN = """() => [...document.querySelectorAll("article p span.math")].flatMap((formula) => {
  const box = formula.closest("a.lg-symbol") ?? formula;
  const found = [];
  const look = (node, sign, at) => {
    if (node?.nodeType !== Node.TEXT_NODE || !sign.test(node.data)) return;
    const range = document.createRange();
    range.setStart(node, at(node)); range.setEnd(node, at(node) + 1);
    const [letter, own] = [range.getBoundingClientRect(), box.getBoundingClientRect()];
    if (letter.top > own.bottom || letter.bottom < own.top) found.push(node.data.slice(0, 20));
  };
  look(box.nextSibling, /^[,.;:)]/, () => 0);
  look(box.previousSibling, /[(]$/, (node) => node.length - 1);
  return found;
})"""


@pytest.mark.parametrize("name", PAGES)
def test_code_and_formulas_fit_a_laptop(name, open_page):
    page = open_page(f"chapters/{name}.html")
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.locator("div.highlight pre").count() and page.locator("div.math").count()
    assert page.evaluate(WIDER_THAN_ITS_BOX) == []


def test_a_formula_that_is_far_too_wide_scrolls_at_its_size_and_says_so(open_page):
    page = open_page("chapters/gauss-newton-algebra.html", width=240)
    sizes = page.locator("div.math > mjx-container").evaluate_all(
        "all => all.map((one) => parseFloat(one.style.fontSize))"
    )
    assert min(sizes) > 0.78 * max(sizes)
    boxes = page.locator("div.math").evaluate_all(HINTED)
    assert {wide for wide, _, _ in boxes} == {True, False}
    assert [each for each in boxes if len(set(each)) > 1] == []


@pytest.mark.parametrize("width", [400, 800, 1300])
def test_no_line_ends_between_a_formula_and_its_comma(width, open_page):
    page = open_page("chapters/rule-of-thumb.html", width=width)
    assert page.locator("span.lg-together span.math").count() > 20
    assert page.evaluate(TORN) == []


def test_numbers_stand_digit_below_digit_and_words_do_not(open_page):
    page = open_page("chapters/theorem-3-1.html")
    table = page.locator("table.dataframe", has_text="leftover at d = 1000")
    cells = table.evaluate(GAPS)
    numbers = [cell for cell in cells if cell["text"][0] in "-0123456789"]
    words = [cell for cell in cells if cell not in numbers]
    assert len(numbers) == 2 * len(words) > 10
    assert len({round(cell["right"]) for cell in numbers}) == 1
    assert len({round(cell["left"]) for cell in words}) == 1
    # On a narrow screen the interval goes below its value, and neither is torn.
    page.set_viewport_size({"width": 400, "height": 900})
    heights = table.locator("td .lg-together").evaluate_all(
        "parts => parts.map((part) => part.getClientRects().length)"
    )
    assert heights and set(heights) == {1}
