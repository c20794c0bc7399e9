"""Tests of figures: style, text alternatives, the spectrum plot and the slider."""

import base64
import io
import itertools
import os
import shutil
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import TABLEAU_COLORS, to_hex
from PIL import Image

from lowgrad_utils import figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page(HTMLParser):
    """Collects elements with their attributes and the text directly inside them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in ("img", "input"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1]["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


@pytest.fixture(autouse=True)
def leave_no_figure_open():
    with plt.rc_context():
        yield
    assert plt.get_fignums() == []


@pytest.fixture
def shown(monkeypatch):
    """Return the list that collects what is displayed, each as its data by type."""
    outputs = []
    monkeypatch.setattr(figures, "display", lambda o: outputs.append(o._repr_mimebundle_()))
    return outputs


@pytest.fixture
def building(monkeypatch):
    monkeypatch.setenv(figures.BOOK_VARIABLE, "1")


@pytest.fixture
def reading(monkeypatch):
    monkeypatch.delenv(figures.BOOK_VARIABLE, raising=False)


def draw(nu, noise=0.0):
    """Draw a figure that differs for each pair of parameters."""
    figure, axis = plt.subplots(figsize=(3, 2))
    axis.plot([0, 1], [nu, noise])
    axis.set_ylim(-1, 5)
    return figure


def picture(source):
    head, data = source.split(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


# --- style and single figures ---------------------------------------------------------------------


def linear_rgb(colour):
    """Return the channels of an sRGB colour in proportion to their light."""
    channels = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    """Return the relative luminance of WCAG 2."""
    return linear_rgb(colour) @ [0.2126, 0.7152, 0.0722]


def test_the_style_is_readable_and_changes_what_is_drawn():
    figures.use_style()
    figure, axis = plt.subplots()
    colours = [to_hex(axis.plot([0, k])[0].get_color()) for k in range(len(figures.PALETTE))]
    plt.close(figure)
    assert colours == [colour.lower() for colour in figures.PALETTE.values()]
    # A line on white: WCAG asks 3 : 1 of graphics; the two palest come last and are for areas.
    contrast = [1.05 / (luminance(colour) + 0.05) for colour in colours]
    assert min(contrast[:3]) > 3
    assert plt.rcParams["font.size"] >= 10
    assert figure.get_constrained_layout()


# What is seen without one kind of cones, as matrices in linear RGB: Machado, Oliveira and Fernandes
# (2009), "A physiologically-based model for simulation of color vision deficiency", severity 1.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]


def lab(linear):
    """Return a colour's CIELAB coordinates, in which distances are those that are seen."""
    ratios = TO_XYZ @ linear / [0.95047, 1, 1.08883]
    f = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def least_distance(colours, kind):
    seen = [lab(np.clip(np.array(BLINDNESS[kind]) @ linear_rgb(c), 0, 1)) for c in colours]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_stay_apart_under_every_colour_blindness(kind):
    # A step of 2.3 is just seen when colours touch; thin lines apart need several times that.
    assert least_distance(figures.PALETTE.values(), kind) > 15


def test_matplotlibs_own_colours_would_not_stay_apart():
    assert least_distance(TABLEAU_COLORS.values(), "deuteranopia") < 8


def test_a_figure_is_shown_with_its_alternative(shown):
    figure = draw(1.0)
    assert figures.show(figure, alt='Line "a" < b & c.', caption="|S₁| < 1 & σ′") is None
    assert not plt.fignum_exists(figure.number)
    (data,) = shown
    page = Page(data["text/html"])
    (image,) = page.all("img")
    assert (page.elements[0]["tag"], page.elements[0]["class"]) == ("figure", "lg-figure")
    assert image["alt"] == data["text/plain"] == 'Line "a" < b & c.'
    assert page.all("figcaption")[0]["text"] == "|S₁| < 1 & σ′"
    size = picture(image["src"]).size
    assert size == (int(image["width"]), int(image["height"])) == (330, 220)


def test_the_image_is_the_figure(shown):
    figure = plt.figure(figsize=(2, 1), facecolor="black")
    figure.add_axes([0, 0, 0.5, 1]).set_facecolor("red")
    figure.axes[0].set(xticks=[], yticks=[], frame_on=True)
    figures.show(figure, alt="Half red.", caption="Half red.")
    image = picture(Page(shown[0]["text/html"]).all("img")[0]["src"]).convert("RGB")
    assert image.getpixel((50, 50)) == (255, 0, 0)
    # Whatever the figure's own ground, a page's may be dark: images stand on white.
    assert image.getpixel((200, 50)) == (255, 255, 255)


@pytest.mark.parametrize(("inches", "least"), [(6.5, 0), (9, 594), (13, 640)])
def test_only_figures_of_several_panels_keep_a_width(shown, inches, least):
    figures.show(plt.figure(figsize=(inches, 1)), alt="a", caption="c")
    (image,) = Page(shown[0]["text/html"]).all("img")
    assert f"min-width:{least}px" in image["style"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alt": " "}, ValueError, "alt is empty; say in words"),
        ({"alt": None}, TypeError, "alt is NoneType, but text is needed"),
        ({"caption": ""}, ValueError, "caption is empty"),
        ({"fig": "figure"}, TypeError, "a Matplotlib figure is needed, but str was given"),
    ],
)
def test_a_figure_without_words_is_refused(shown, change, error, message):
    figure = draw(1.0)
    with pytest.raises(error, match=message):
        figures.show(**{"fig": figure, "alt": "a", "caption": "c", **change})
    plt.close(figure)
    assert shown == []


# --- the spectrum ---------------------------------------------------------------------------------


def spectrum(values, **options):
    figure, axis = plt.subplots()
    figures.spectrum(axis, values, **options)
    figure.draw_without_rendering()
    plt.close(figure)
    return axis


def test_each_outlier_is_seen_beside_a_large_bulk():
    bulk = np.linspace(0.1, 0.9, 1000)
    axis = spectrum(torch.tensor([*bulk, 3.0, 2.0]), marks={"|S₁|": 2.9, "|S₂|": 4.0}, edge=1.0)
    counts = [bar.get_height() for bar in axis.patches]
    assert sum(counts) == 1002
    bottom, top = axis.get_ylim()
    assert (axis.get_yscale(), 0 < bottom < 1, top >= max(counts)) == ("log", True, True)
    # A bar of one value has a visible height: at least 4 % of the axis.
    one, low, high = np.log([1, bottom, top])
    assert (one - low) / (high - low) > 0.04
    ticks = next(line for line in axis.lines if line.get_marker() == "|")
    assert sorted(ticks.get_xdata()) == pytest.approx([2.0, 3.0])
    lines = {line.get_label(): line for line in axis.lines if line is not ticks}
    positions = {label: line.get_xdata()[0] for label, line in lines.items()}
    assert positions == {"|S₁| = 2.9": 2.9, "|S₂| = 4": 4.0, "edge = 1": 1.0}
    left, right = axis.get_xlim()
    assert axis.get_xscale() == "log"
    assert 0 < left < 0.1 < 4.0 < right
    assert axis.get_xlim()[1] > 4
    # Lines differ in style too, not in colour alone.
    assert len({line._unscaled_dash_pattern[1] for line in lines.values()}) == 3
    assert [t.get_text() for t in axis.get_legend().get_texts()] == list(lines)


def test_a_spectrum_without_outliers_keeps_its_size():
    figure, axes = plt.subplots(2, 2, layout="constrained")
    for axis, top in zip(axes.flat, (0.9, 0.9, 2.0, 2.0)):
        figures.spectrum(axis, [0.3, 0.5, top], edge=1.0)
    figure.canvas.draw()
    widths = [axis.get_position().width for axis in axes.flat]
    plt.close(figure)
    assert min(widths) > 0.3


def test_a_spectrum_without_an_edge_shows_its_largest_values():
    axis = spectrum(list(range(1, 11)))
    assert sorted(axis.lines[0].get_xdata()) == [5, 6, 7, 8, 9, 10]
    assert axis.get_legend() is None


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "singular_values must be finite numbers of at least 0"),
        ([1.0, np.nan], {}, "singular_values must be"),
        ([1.0, -1.0], {}, "singular_values must be"),
        ([1.0], {"edge": np.inf}, "mark 'edge' is at inf"),
        ([1.0], {"marks": {"S": -1}}, "mark 'S' is at -1, but a finite number >= 0"),
    ],
)
def test_a_spectrum_that_is_none_is_refused(values, options, message):
    figure, axis = plt.subplots()
    plt.close(figure)
    with pytest.raises(ValueError, match=message):
        figures.spectrum(axis, values, **options)


# --- the slider in a book -------------------------------------------------------------------------


def test_a_slider_in_a_book_holds_every_frame(shown, building):
    result = figures.slider(draw, alt="A line to {nu}.", caption="c", nu=np.array([0.1, 0.25, 1.0]))
    assert result is None
    page = Page(shown[0]["text/html"])
    frames = page.all("img")
    assert page.elements[0]["class"] == "lg-slider"
    assert [frame["alt"] for frame in frames] == [
        "A line to 0.1.",
        "A line to 0.25.",
        "A line to 1.0.",
    ]
    assert ["hidden" in frame for frame in frames] == [False, True, True]
    assert {frame["class"] for frame in frames} == {"lg-frame"}
    assert len({frame["src"] for frame in frames}) == 3
    (control,) = page.all("input")
    assert (control["type"], control["min"], control["max"]) == ("range", "0", "2")
    assert (control["aria-label"], control["aria-valuetext"]) == ("ν", "ν = 0.1")
    assert page.all("output")[0]["text"] == "ν = 0.1"
    assert shown[0]["text/plain"] == "A line to 0.1. (3 frames over nu)"


def test_two_parameters_and_a_function_for_the_text(shown, building):
    figures.slider(
        draw,
        alt=lambda nu, noise: f"Line from {nu} to {noise:g}.",
        caption="c",
        nu=[0.1, 0.2],
        noise=[1, 2, 3],
    )
    page = Page(shown[0]["text/html"])
    alts = [frame["alt"] for frame in page.all("img")]
    assert alts[:4] == [
        f"Line from {a} to {b}." for a, b in ((0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1))
    ]
    assert [control["aria-label"] for control in page.all("input")] == ["ν", "noise"]


def test_frames_lose_no_more_than_shades(shown, building):
    def draw_red(nu):
        figure = plt.figure(figsize=(2, 1))
        figure.add_axes([0, 0, 0.5, 1], frame_on=False, xticks=[], yticks=[]).imshow(
            [[nu]], cmap="viridis", vmin=0, vmax=1, aspect="auto"
        )
        return figure

    figures.slider(draw_red, alt="{nu}", caption="c", nu=[0.0, 0.3])
    for frame, colour in zip(Page(shown[0]["text/html"]).all("img"), plt.cm.viridis([0.0, 0.3])):
        image = picture(frame["src"]).convert("RGB")
        seen = np.array(image.getpixel((50, 50))) / 255
        assert np.abs(seen - colour[:3]).max() < 9 / 255
        # 16 levels of each colour: more would cost a third of the page.
        assert all(level % 17 == 0 for level in image.getpixel((50, 50)))
        assert image.getpixel((200, 50)) == (255, 255, 255)


def test_frames_are_small_and_pages_ask_no_other_host(shown, building):
    def spectrum_at(nu):
        figures.use_style()
        rng = np.random.default_rng(0)
        figure, axis = plt.subplots()
        figures.spectrum(axis, rng.uniform(0, 1, 500), marks={"|S₁|": 1 + nu}, edge=1.0)
        return figure

    figures.slider(spectrum_at, alt="{nu}", caption="c", nu=[0.5, 1.0])
    page = Page(shown[0]["text/html"])
    for frame in page.all("img"):
        assert len(frame["src"]) < 15_000
        assert picture(frame["src"]).width > 600
    assert "http" not in shown[0]["text/html"]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"nu": []}, ValueError, "nu has no values, but a list of at least one is needed"),
        ({"mu": [1]}, TypeError, "draw cannot be called with nu, mu by name: .*'mu'"),
        ({"alt": "At {mu}."}, ValueError, "alt names 'mu', but the parameters are nu"),
        ({"alt": ""}, ValueError, "alt is empty"),
        ({"alt": lambda nu: ""}, ValueError, "alt is empty"),
        ({"caption": " "}, ValueError, "caption is empty"),
        ({"draw": lambda nu: None}, TypeError, "draw returned NoneType for {'nu': 1}, but a M"),
    ],
)
def test_a_slider_that_cannot_work_is_refused(monkeypatch, shown, live, change, error, message):
    monkeypatch.setenv(figures.BOOK_VARIABLE, "" if live else "1")
    arguments = {"draw": draw, "alt": "At {nu}.", "caption": "c", "nu": [1, 2], **change}
    with pytest.raises(error, match=message):
        figures.slider(arguments.pop("draw"), **arguments)
    assert shown == []


@pytest.mark.parametrize("live", [False, True])
def test_a_slider_without_parameters_is_refused(monkeypatch, live):
    monkeypatch.setenv(figures.BOOK_VARIABLE, "" if live else "1")
    with pytest.raises(ValueError, match="slider got no parameters, but one or more"):
        figures.slider(lambda: draw(1), alt="a", caption="c")


def explorer(kind, shape, nu):
    """Draw a figure over two lists of texts and one of numbers."""
    return draw(nu, len(kind) + len(shape))


EXPLORER = {"kind": ["a", "b<c"], "shape": ["x", "y", "z"], "nu": [0, 0.5]}


def test_texts_have_a_list_to_choose_from(shown, building):
    figures.slider(explorer, alt="{kind} {shape} {nu}", caption="c", **EXPLORER)
    page = Page(shown[0]["text/html"])
    assert [frame["alt"] for frame in page.all("img")] == [
        f"{kind} {shape} {nu}" for kind in ("a", "b<c") for shape in "xyz" for nu in (0, 0.5)
    ]
    assert [control["aria-label"] for control in page.all("select")] == ["kind", "shape"]
    assert [control["aria-label"] for control in page.all("input")] == ["ν"]
    assert [option["text"] for option in page.all("option")] == ["a", "b<c", "x", "y", "z"]
    assert [option["value"] for option in page.all("option")] == ["0", "1", "0", "1", "2"]
    assert ["selected" in option for option in page.all("option")] == [True, False] * 2 + [False]


# --- the slider in a live kernel ------------------------------------------------------------------


def test_a_live_slider_draws_on_demand(shown, reading):
    drawn = []

    def record(nu, noise):
        drawn.append((nu, noise))
        return draw(nu, noise)

    box = figures.slider(record, alt="{nu}, {noise}", caption="<c>", nu=[1, 2], noise=[3, 4])
    first, second, image, _ = box.children
    assert (first.description, second.description) == ("ν", "noise")
    assert [label for label, _ in second.options] == ["3", "4"]
    assert drawn == [(1, 3)]
    before = Page(image.value)
    second.value = 1
    assert Page(image.value).all("img")[0]["alt"] == "1, 4"
    first.value = 1
    assert drawn == [(1, 3), (1, 4), (2, 4)]
    after = Page(image.value)
    assert (before.all("img")[0]["alt"], after.all("img")[0]["alt"]) == ("1, 3", "2, 4")
    assert before.all("img")[0]["src"] != after.all("img")[0]["src"]
    assert after.all("figcaption")[0]["text"] == "<c>"
    assert shown == []


def test_a_live_slider_chooses_texts_from_a_list(shown, reading):
    box = figures.slider(explorer, alt="{kind} {shape} {nu}", caption="c", **EXPLORER)
    kind, shape, nu, image, _ = box.children
    assert [type(control).__name__ for control in (kind, shape, nu)] == [
        "Dropdown",
        "Dropdown",
        "SelectionSlider",
    ]
    shape.value = 2
    kind.value = 1
    assert Page(image.value).all("img")[0]["alt"] == "b<c z 0"
    nu.value = 1
    assert Page(image.value).all("img")[0]["alt"] == "b<c z 0.5"


# --- the table ------------------------------------------------------------------------------------

TABLE = pd.DataFrame(
    {
        "case": ["b & <c>", "a", None, "d"],
        "slope": [-0.50004, 10.0, np.nan, -0.5],
        "count": [2, 10, 9, 1],
        "sure": [True, False, True, True],
    }
)


def test_a_table_shows_every_entry_with_few_digits(shown):
    assert figures.table(TABLE, caption="Slopes & <counts>.", digits=2) is None
    (data,) = shown
    page = Page(data["text/html"])
    assert page.elements[0]["class"] == "lg-figure lg-sortable"
    heads, cells = page.all("th"), page.all("td")
    assert [head["text"] for head in heads] == ["case", "slope", "count", "sure"]
    assert [head["data-kind"] for head in heads] == ["text", "number", "number", "text"]
    assert {head["scope"] for head in heads} == {"col"}
    assert [cell["text"] for cell in cells[:8]] == [
        "b & <c>", "-0.50", "2", "True", "a", "10.00", "10", "False",
    ]  # fmt: skip
    assert [cell["text"] for cell in cells[8:12]] == ["–", "–", "9", "True"]
    # Sorting goes by the exact value, which two digits would hide.
    assert [cell["data-value"] for cell in cells[1::4]] == ["-0.50004", "10", "", "-0.5"]
    assert page.all("figcaption")[0]["text"] == "Slopes & <counts>."
    (box,) = [e for e in page.all("div") if e.get("role") == "region"]
    assert (box["tabindex"], box["aria-label"]) == ("0", "Slopes & <counts>.")
    assert "http" not in data["text/html"]
    assert data["text/plain"].splitlines()[2].split() == ["a", "10.00", "10", "False"]


def test_infinite_entries_sort_as_numbers(shown):
    figures.table(pd.DataFrame({"x": [np.inf, 1.0, -np.inf]}), caption="c")
    cells = Page(shown[0]["text/html"]).all("td")
    # What JavaScript's Number() reads; "inf" would be NaN.
    assert [cell["data-value"] for cell in cells] == ["Infinity", "1", "-Infinity"]
    assert [cell["text"] for cell in cells] == ["inf", "1.000", "-inf"]


def test_what_is_missing_is_a_dash(shown):
    figures.table(pd.DataFrame({"x": ["a", None, np.nan, pd.NA]}, dtype=object), caption="c")
    cells = Page(shown[0]["text/html"]).all("td")
    assert [cell["text"] for cell in cells] == ["a", "–", "–", "–"]
    # A dash would sort before letters.
    assert [cell.get("data-value") for cell in cells] == [None, "", "", ""]
    assert shown[0]["text/plain"].split() == ["x", "a", "–", "–", "–"]


def test_a_named_index_is_shown_and_a_plain_one_is_not(shown):
    frame = TABLE.set_index(["case", "count"])
    figures.table(frame, caption="c")
    figures.table(frame["slope"].reset_index(drop=True).to_frame(), caption="c")
    heads = [[head["text"] for head in Page(d["text/html"]).all("th")] for d in shown]
    assert heads == [["case", "count", "slope", "sure"], ["slope"]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"frame": [1, 2]}, TypeError, "frame is list, but a pandas DataFrame is needed"),
        ({"frame": TABLE.head(0)}, ValueError, r"frame has shape \(0, 4\): it is empty"),
        ({"caption": " "}, ValueError, "caption is empty"),
        ({"digits": -1}, ValueError, "digits is -1, but a whole number from 0 to 15"),
        ({"digits": 1.5}, ValueError, "digits is 1.5"),
        ({"digits": True}, ValueError, "digits is True"),
    ],
)
def test_a_table_that_is_none_is_refused(shown, change, error, message):
    arguments = {"frame": TABLE, "caption": "c", **change}
    with pytest.raises(error, match=message):
        figures.table(arguments.pop("frame"), **arguments)
    assert shown == []


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        message = f"no browser: none of {', '.join(BROWSERS)} is installed"
        # Where tests are meant to be complete, a missing browser is a failure.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, which containers run as.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, shown, building):
    """Open a narrow page with sliders of one, two and three parameters, and a table."""
    figures.slider(draw, alt="One {nu}.", caption="first", nu=[0.25, 1, 2])
    figures.slider(draw, alt="Two {nu} {noise}.", caption="second", nu=[0, 4], noise=[1, 2])
    figures.slider(explorer, alt="{kind} {shape} {nu}", caption="third", **EXPLORER)
    figures.table(TABLE, caption="fourth")
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    # The theme colours captions for the page's ground, not for an output's.
    style = "<style>figcaption { color: #eee } .output { color: rgb(1, 2, 3) }</style>"
    outputs = "".join(f'<div class="output">{data["text/html"]}</div>' for data in shown)
    page.set_content(f"<!doctype html><title>t</title>{style}{outputs}")
    yield page
    assert page.problems == []
    page.close()


def visible(page, index):
    """Return the text alternatives of the images that one slider shows."""
    frames = page.locator("figure.lg-slider").nth(index).locator("img.lg-frame")
    return [frame.get_attribute("alt") for frame in frames.all() if frame.is_visible()]


def test_arrow_keys_move_one_slider_and_no_other(page):
    assert (visible(page, 0), visible(page, 1)) == (["One 0.25."], ["Two 0 1."])
    control = page.get_by_label("ν").first
    control.focus()
    page.keyboard.press("ArrowRight")
    assert (visible(page, 0), visible(page, 1)) == (["One 1."], ["Two 0 1."])
    assert control.get_attribute("aria-valuetext") == "ν = 1"
    assert page.locator("output").first.inner_text() == "ν = 1"
    page.keyboard.press("End")
    assert visible(page, 0) == ["One 2."]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert visible(page, 0) == ["One 0.25."]
    assert page.locator("output").first.inner_text() == "ν = 0.25"


def test_two_controls_choose_one_frame(page):
    page.get_by_label("noise").focus()
    page.keyboard.press("ArrowRight")
    assert visible(page, 1) == ["Two 0 2."]
    page.get_by_label("ν").nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert visible(page, 1) == ["Two 4 2."]
    assert visible(page, 0) == ["One 0.25."]


def test_lists_and_a_slider_choose_one_frame_together(page):
    assert visible(page, 2) == ["a x 0"]
    page.get_by_label("shape").select_option("z")
    assert visible(page, 2) == ["a z 0"]
    page.get_by_label("kind").focus()
    page.keyboard.press("ArrowDown")
    assert visible(page, 2) == ["b<c z 0"]
    page.get_by_label("ν").nth(2).focus()
    page.keyboard.press("ArrowRight")
    assert visible(page, 2) == ["b<c z 0.5"]
    assert visible(page, 1) == ["Two 0 1."]


def column(page, position):
    return page.locator(f"tbody tr td:nth-child({position})").all_inner_texts()


def test_a_table_is_sorted_by_its_heads(page):
    head = page.locator("th").nth(1)
    assert head.get_attribute("aria-sort") is None
    page.get_by_role("button", name="slope").click()
    # As numbers by their exact values, not as texts; the missing one last.
    assert column(page, 2) == ["-0.500", "-0.500", "10.000", "–"]
    assert column(page, 1) == ["b & <c>", "d", "a", "–"]
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert column(page, 1) == ["a", "d", "b & <c>", "–"]
    assert head.get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="case").focus()
    page.keyboard.press("Space")
    assert column(page, 1) == ["a", "b & <c>", "d", "–"]
    assert head.get_attribute("aria-sort") is None
    page.get_by_role("button", name="count").click()
    assert column(page, 3) == ["1", "2", "9", "10"]


def test_a_focused_head_is_seen(page):
    page.locator("[role=region]").focus()
    page.keyboard.press("Tab")
    style = "e => [document.activeElement === e, getComputedStyle(e).outlineStyle]"
    button = page.get_by_role("button", name="case")
    assert button.evaluate(style) == [True, "solid"]
    page.keyboard.press("Tab")
    assert button.evaluate(style) == [False, "none"]


def test_the_page_stays_narrow_readable_and_clean(page):
    # Narrower than the image, which is 330 pixels wide.
    page.set_viewport_size({"width": 300, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 300
    colour = page.locator("figcaption").first.evaluate("e => getComputedStyle(e).color")
    assert colour == "rgb(1, 2, 3)"
    assert page.locator("img:visible").first.evaluate("e => e.naturalWidth") == 330
    names = page.evaluate("Object.keys(window)")
    page.goto("about:blank")
    assert names == page.evaluate("Object.keys(window)")


def test_a_figure_of_several_panels_scrolls_in_its_own_box(browser, shown, building):
    figures.show(plt.figure(figsize=(9, 3)), alt="Wide.", caption="first")
    figures.slider(
        lambda nu: plt.figure(figsize=(12, 3)), alt="Wide {nu}.", caption="second", nu=[1, 2]
    )
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.set_content("<!doctype html>" + "".join(data["text/html"] for data in shown))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    widths = page.locator("img:visible").evaluate_all("e => e.map(i => i.clientWidth)")
    assert widths == [594, 640]
    for box in page.locator(".lg-wide").all():
        assert box.evaluate("b => { b.scrollLeft = 999; return b.scrollLeft; }") > 150
    # Controls and captions stay where they are.
    for part in page.locator("figcaption, input").all():
        assert part.bounding_box()["width"] <= 400
    page.close()


def test_without_scripts_the_first_frame_is_there(browser, shown, building):
    figures.slider(draw, alt="One {nu}.", caption="first", nu=[0.25, 1])
    figures.table(TABLE, caption="second")
    page = browser.new_context(java_script_enabled=False).new_page()
    page.set_content("".join(data["text/html"] for data in shown))
    assert visible(page, 0) == ["One 0.25."]
    assert page.locator("th").all_inner_texts() == list(TABLE.columns)
    assert page.locator("button").count() == 0
    page.close()
