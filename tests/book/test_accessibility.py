"""Pages can be read by everybody: axe-core's rules, contrast, the keyboard, and paper.

What every page is asked is in `test_browser.py`.
"""

import io
import re
import unicodedata

import pytest
from axe_rules import faults, unfold
from looks import look
from pypdf import PdfReader

# --- axe-core ------------------------------------------------------------------------------------


def test_the_rules_are_tried(open_page):
    page = open_page("index.html")
    page.evaluate("""() => {
      const bad = '<img src="favicon.ico"><p style="color:#999">pale</p>';
      document.querySelector("article").insertAdjacentHTML("beforeend", bad);
    }""")
    assert {rule for rule, _ in faults(page)} >= {"image-alt", "color-contrast"}


# --- contrast ------------------------------------------------------------------------------------

# axe-core gives up where grounds are mixed or covered; here every text of our own boxes counts.
OUR_BOXES = (
    ".lg-statement, .lg-claim, .lg-figure, .lg-slider, .lg-ledger, .lg-tools, .lg-reference, "
    "table.dataframe, div.cell_output pre, details > summary"
)
CONTRASTS = """(boxes) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((value, k) => (value * a + below[k] * (255 - a)) / 255);
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 255 ? own.slice(0, 3) : over(own, ground(element.parentElement));
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((value) => {
      const x = value / 255;
      return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const box of document.querySelectorAll(boxes)) {
    for (const element of [box, ...box.querySelectorAll("*")]) {
      const texts = [...element.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
      if (!texts.length || !element.checkVisibility()) continue;
      const below = ground(element);
      const [a, b] = [over(rgba(getComputedStyle(element).color), below), below].map(light);
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      found.push([ratio, element.outerHTML.slice(0, 120)]);
    }
  }
  return found;
}"""


def pictures_grounds(page):
    grounds = page.locator(".lg-wide img").evaluate_all(
        "images => images.map((i) => getComputedStyle(i).backgroundColor)"
    )
    return [min(map(int, re.findall(r"\d+", ground)[:3])) for ground in grounds]


@pytest.mark.parametrize(
    ("document", "pictures"), [("what-holds", 0), ("paper-1", 0), ("chapters/theorem-3-1", 3)]
)
def test_text_in_our_boxes_and_pictures_stand_out(document, pictures, open_page):
    page = open_page(f"{document}.html")
    for scheme in ("light", "dark"):
        look(page, 1300, scheme)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        unfold(page)
        found = page.evaluate(CONTRASTS, OUR_BOXES)
        assert len(found) > 50, scheme
        assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == [], scheme
        # Pictures have a light ground of their own.
        grounds = pictures_grounds(page)
        assert len(grounds) >= pictures, scheme
        assert [ground for ground in grounds if ground <= 200] == [], scheme


# --- the keyboard --------------------------------------------------------------------------------

# Where the focus is now, and whether one can see it.
FOCUS = """() => {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  const ringed = style.outlineStyle !== "none" || style.boxShadow !== "none";
  const all = [...document.querySelectorAll("*")];
  return {
    place: all.indexOf(element), name: element.outerHTML.slice(0, 100),
    seen: box.width > 0 && box.height > 0 && ringed,
    inside: !!element.closest("article"),
  };
}"""


def test_the_first_stop_skips_to_the_text(open_page):
    page = open_page("chapters/setting.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to main content"
    assert page.evaluate(FOCUS)["seen"]
    page.keyboard.press("Enter")
    assert page.url.endswith("#main-content")
    # From here on, stops are in the page's own part.
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main')")


@pytest.mark.parametrize("document", ["index", "chapters/theorem-3-1", "what-holds"])
@pytest.mark.parametrize("width", [1300, 400])
def test_stops_follow_the_page_and_are_seen(document, width, open_page):
    page = open_page(f"{document}.html", width)
    stops = []
    for _ in range(60):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(FOCUS))
    places = [stop["place"] for stop in stops]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert [stop["name"] for stop in stops if not stop["seen"]] == []


def test_solutions_and_hidden_cells_open_by_key(open_page):
    page = open_page("chapters/setting.html")
    for summary in page.locator("article details > summary").all():
        folded = summary.evaluate("s => !s.parentElement.open")
        summary.focus()
        page.keyboard.press("Enter")
        assert summary.evaluate("s => s.parentElement.open") == folded


def test_the_ledger_is_filtered_by_key(open_page):
    page = open_page("what-holds.html")
    rows = page.locator(".lg-table tbody tr:visible")
    total = rows.count()
    page.locator("[data-lg-find]").focus()
    page.keyboard.type("relu")
    assert 0 < rows.count() < total
    assert all("relu" in text.lower() for text in rows.all_inner_texts())


def test_a_picture_opens_in_full_size_by_key(open_page):
    page = open_page("chapters/theorem-3-1.html", 400)
    figure = page.locator("figure:has(> .lg-wide)").first
    drawn = int(figure.locator("img").first.get_attribute("width"))
    button = figure.get_by_role("button", name="Enlarge")
    button.focus()
    page.keyboard.press("Enter")
    viewer = page.get_by_role("dialog")
    assert viewer.locator("img").get_attribute("alt") == figure.locator("img").get_attribute("alt")
    assert viewer.locator("img").bounding_box()["width"] >= 0.74 * drawn
    # The keys scroll it, and Escape leads back.
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('dialog')")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.lg-viewer > div').scrollLeft > 0")
    assert faults(page) == set()
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    assert button.evaluate("b => document.activeElement === b")


def test_wide_boxes_scroll_by_key_and_only_they_are_stops(open_page):
    for width, scrolls in ((400, True), (1300, False)):
        page = open_page("chapters/theorem-3-1.html", width)
        box = page.locator(".lg-wide").first
        assert box.evaluate("b => b.scrollWidth > b.clientWidth") == scrolls
        assert box.get_attribute("tabindex") == ("0" if scrolls else None)
    # The last page is the wide one, where the hint has nothing to say.
    assert page.locator(".lg-tools span:visible").count() == 0


def test_tables_of_pandas_say_what_their_heads_are(open_page):
    page = open_page("chapters/theorem-3-1.html", 400)
    tables = page.locator("table.dataframe")
    assert tables.count() > 2
    assert page.locator("table.dataframe th:empty").count() == 0
    assert page.locator("table.dataframe th:not([scope])").count() == 0
    for table in tables.all():
        box = table.locator("xpath=ancestor::*[contains(@class, 'output ')][1]")
        scrolls = box.evaluate("b => b.scrollWidth > b.clientWidth + 1")
        assert (box.get_attribute("aria-label") == "Table, scrolls sideways") == scrolls
        assert (box.get_attribute("tabindex") == "0") == scrolls


def test_a_column_of_numbers_with_a_dash_is_one_of_numbers(open_page):
    page = open_page("chapters/theorem-3-1.html")
    dashes = page.locator("table.dataframe td:text-is('–')")
    assert dashes.count() > 0
    assert all("lg-number" in dash.get_attribute("class") for dash in dashes.all())


# --- paper ---------------------------------------------------------------------------------------

# A4 without its margins, in CSS pixels.
PAPER_WIDTH = 673
BEYOND_PAPER = """() => [...document.querySelectorAll("article *")].filter((element) =>
  element.checkVisibility() && !element.closest("mjx-assistive-mml, svg") &&
  element.getBoundingClientRect().right > window.innerWidth + 1
).map((element) => element.outerHTML.slice(0, 120))"""
WORDS = """() => {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  document.querySelectorAll("mjx-container, .headerlink, .lg-tools, .copybtn").forEach(
    (e) => e.remove());
  return document.querySelector("article").innerText;
}"""


def words(text):
    """Return the words of three letters and more, with ligatures taken apart."""
    return set(re.findall(r"[a-z]{3,}", unicodedata.normalize("NFKC", text).lower()))


@pytest.mark.parametrize("document", ["chapters/theorem-3-1", "chapters/your-network"])
def test_a_chapter_is_whole_on_paper(document, open_page):
    # From a dark screen, since paper must not become dark.
    page = open_page(f"{document}.html", color_scheme="dark")
    data = page.pdf(format="A4")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("article details:not([open])").count() > 0
    printed = [sheet.extract_text() for sheet in PdfReader(io.BytesIO(data)).pages]
    text = " ".join(printed)
    expected = words(page.evaluate(WORDS))
    assert len(expected) > 500
    missing = {word for word in expected if word not in words(text)}
    assert len(missing) <= 0.01 * len(expected), sorted(missing)
    # A chapter of so many words and figures; empty sheets would be more.
    assert 8 <= len(printed) <= 60
    assert sum(len(sheet) < 20 for sheet in printed) == 0
    for unwanted in ("Skip to main content", "Enlarge", "code cell source", "Previous"):
        assert unwanted not in text


@pytest.mark.parametrize("document", ["chapters/theorem-3-1", "chapters/bridge", "what-holds"])
def test_nothing_is_beyond_the_edge_of_paper(document, open_page):
    page = open_page(f"{document}.html")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": PAPER_WIDTH, "height": 1000})
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(300)
    assert page.evaluate(BEYOND_PAPER) == []
    for hidden in (
        ".bd-sidebar-primary",
        ".bd-sidebar-secondary",
        ".lg-tools",
        "input[type=range]",
    ):
        assert page.locator(f"{hidden}:visible").count() == 0
