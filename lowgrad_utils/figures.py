"""Plot style, accessible figures and tables, the spectrum plot, a slider that needs no kernel.

Captions and alternative texts are plain text with Unicode symbols (ν, σ′, S₁, |S₁|): formulas in
displayed HTML are typeset by some front ends and shown raw by others.
"""

import base64
import html
import inspect
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from cycler import cycler
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lowgrad_utils.diagnosis import Diagnosis

#: Okabe and Ito's palette, told apart under every common colour blindness; yellow, too pale for
#: lines on white, is left out.
PALETTE = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
}

#: The environment variable that says that the book is being built.
BOOK_VARIABLE = "LOWGRAD_BOOK"

_GREEK = {
    "alpha": "α", "beta": "β", "eta": "η", "lam": "λ", "nu": "ν", "sigma": "σ", "tau": "τ",
    "theta": "θ", "zeta": "ζ",
}  # fmt: skip

# As wide as the book's text column. Twice that would be sharper, but a slider has many frames:
# this keeps one at 4 to 15 KB.
_DPI = 110
_LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
# Images have a white ground of their own, so that a dark page does not swallow the axes.
_IMAGE_STYLE = (
    "max-width:100%;height:auto;background:#fff;border-radius:4px;padding:4px;box-sizing:border-box"
)
# On a narrow screen a figure of several panels would shrink until nobody reads it, so one that is
# wider than the first number keeps this share of its width and is scrolled sideways in its box. The
# text column of a wide screen is wider than the last number, so that nothing is scrolled there.
_ONE_PANEL, _LEAST_SHARE, _LEAST_WIDTH = 800, 0.6, 640
# The theme's caption colour suits the page but not an output's ground in dark mode, and its thin
# type is hard to read on either.
_CAPTION_STYLE = (
    "color:inherit;font-weight:400;text-align:left;font-size:.9em;line-height:1.4;margin:.3em 0"
)


def use_style() -> None:
    """Set Matplotlib's defaults: colour-blind safe colours, readable type, constrained layout.

    Example:
        >>> use_style()
        >>> plt.rcParams["axes.prop_cycle"].by_key()["color"][0]
        '#0072B2'
    """
    plt.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=list(PALETTE.values())),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.dpi": _DPI,
            "figure.facecolor": "white",
            "figure.figsize": (6.4, 3.6),
            "font.size": 11,
            "legend.frameon": False,
            "savefig.facecolor": "white",
        }
    )


def show(fig: Figure, *, alt: str, caption: str) -> None:
    """Display a figure with a text alternative and a caption, and close it.

    Args:
        fig: The figure.
        alt: What a reader who does not see the image should know: what is drawn and what it shows.
        caption: The visible caption, plain text.

    Raises:
        ValueError: If ``alt`` or ``caption`` is empty.
        TypeError: If ``fig`` is not a Matplotlib figure, or a text is not text.

    Example:
        >>> show(plt.figure(), alt="An empty figure.", caption="Nothing is drawn.")
        An empty figure.
    """
    alt, caption = _text("alt", alt), _text("caption", caption)
    display(_Output(_figure("lg-figure", _wide(_image(fig, alt)), caption), alt))


def spectrum(
    axis: Axes,
    singular_values: Any,
    *,
    marks: Mapping[str, float] | None = None,
    edge: float | None = None,
    bins: int = 60,
) -> None:
    """Draw a histogram of singular values with labelled vertical lines.

    Both axes are logarithmic and each value above the edge (without an edge, each of the six
    largest) has a tick of its own under the axis, so that a single outlier is seen beside a bulk
    of hundreds, however far out it lies. Values below a thousandth of the largest are left out:
    mostly the zeros of a matrix that has not full rank.

    Args:
        axis: The axes to draw on.
        singular_values: Singular values in any order (list, NumPy or torch).
        marks: Positions to mark, such as ``{"|S₁|": 0.4, "|S₂|": 0.1}``.
        edge: The upper edge of the bulk, or None.
        bins: The number of bins.

    Raises:
        ValueError: If there are no singular values, or one is negative, NaN or infinite.

    Source: Low Rank Gradients, Figure 1 (singular values with |S1| and |S2| marked).

    Example:
        >>> figure, axis = plt.subplots()
        >>> spectrum(axis, [0.1, 0.2, 0.2, 0.9], marks={"|S₁|": 0.9}, edge=0.25)
        >>> [text.get_text() for text in axis.get_legend().get_texts()]
        ['|S₁| = 0.9', 'edge = 0.25']
        >>> plt.close(figure)
    """
    values = np.sort(_numbers("singular_values", singular_values))
    # The axis must reach marks beyond all values, so they are placed before the bins.
    positions = {label: _position(label, value) for label, value in (marks or {}).items()}
    if edge is not None:
        positions["edge"] = _position("edge", edge)
    right = 1.3 * max(values[-1], *positions.values(), np.finfo(float).tiny)
    left = min([1e-3 * right, *(0.8 * x for x in positions.values() if x > 0)])
    axis.hist(values, bins=np.geomspace(left, right, bins + 1), color="#9aa5b1", log=True)
    axis.set_xscale("log")
    outliers = values[-6:] if edge is None else values[values > edge]
    axis.plot(
        outliers,
        np.full(len(outliers), -0.02),
        marker="|",
        markersize=9,
        markeredgewidth=1.5,
        linestyle="none",
        color="black",
        # Without a point it would count as lying at the figure's corner, and squeeze the axes.
        clip_on=len(outliers) == 0,
        transform=axis.get_xaxis_transform(),
    )
    colours = itertools.cycle(PALETTE[name] for name in ("blue", "vermillion", "green", "purple"))
    # A line's style tells it from the others where its colour does not.
    styles = itertools.cycle(_LINE_STYLES[1:])
    for label, position in positions.items():
        colour, style = ("black", "-") if label == "edge" else (next(colours), next(styles))
        axis.axvline(
            position,
            color=colour,
            linestyle=style,
            linewidth=1.6,
            label=f"{label} = {position:.3g}",
        )
    axis.set_xlim(left, right)
    axis.set_ylim(bottom=0.7)
    axis.set_xlabel("singular value")
    axis.set_ylabel("number")
    # Under the ticks of the outliers the numbers need a little more room.
    axis.tick_params(axis="x", pad=7)
    if positions:
        # The lines run through every corner, so the legend needs a ground of its own.
        axis.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize="small")


def diagnosis_figure(found: Diagnosis) -> Figure:
    """Draw a layer's gradient: singular values, and what the left singular vectors are made of.

    Args:
        found: What ``diagnose`` returned.

    Returns:
        A figure of two panels, to show or to hand to a slider.
    """
    if not isinstance(found, Diagnosis):
        raise TypeError(f"found is a {type(found).__name__}, but what diagnose returns is needed")
    # Not everybody calls use_style first, without which labels would be cut off.
    panels = {"width_ratios": (1.4, 1), "layout": "constrained"}
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), **panels)
    values = found.singular_values.cpu().numpy()
    left.plot(np.arange(1, len(values) + 1), values, "o", color="#6b7785", markersize=4)
    # Zeros of rounding, and pieces that are nearly none, would stretch the axis.
    least = max(1e-4 * values[0], 0.5 * values[-1])
    norms = found.pieces
    colours = ("blue", "vermillion", "green")
    for (name, label), colour, style in zip(_PIECES.items(), colours, _LINE_STYLES[1:]):
        text = f"‖{label}‖ = {norms[name]:.2g}"
        height = max(norms[name], least)
        left.axhline(height, color=PALETTE[colour], linestyle=style, label=text)
    left.axhline(found.edge, color="black", label=f"edge = {found.edge:.2g}")
    left.set(xlabel="k", ylabel="singular value k of G", yscale="log", ylim=(0.9 * least, None))
    left.set_xscale("log" if len(values) > 50 else "linear")
    left.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize="small", loc="lower left")
    k = np.arange(1, len(found.top.s) + 1)
    q, p = (np.asarray(x.cpu()) ** 2 for x in (found.along_q, found.along_residue))
    right.bar(k, q, color=PALETTE["blue"], label="q: inputs")
    right.bar(k, p, bottom=q, color=PALETTE["orange"], hatch="//", label="p: $X_B^T r$")
    right.bar(k, 1 - q - p, bottom=q + p, color="#dde1e6", label="the rest")
    right.set(xlabel="k", ylabel="share of uₖ", xticks=k, ylim=(0, 1.3), yticks=[0, 0.5, 1])
    right.legend(ncols=3, fontsize="small", loc="upper center", columnspacing=1, handlelength=1.2)
    title = f"{found.layer or 'the model'}: {found.kind}"
    if found.gauss_newton is not None:
        title += (
            f".  In the Gauss-Newton directions: {found.gauss_newton:.0%} of ‖G‖_F², "
            f"{found.gauss_newton_null:.0%} with random signs"
        )
    fig.suptitle(title, fontsize="medium")
    return fig


def diagnosis(found: Diagnosis) -> None:
    """Show ``diagnosis_figure`` with a text alternative and a caption of its own.

    Args:
        found: What ``diagnose`` returned.
    """
    fig = diagnosis_figure(found)
    size = " x ".join(map(str, found.G.shape))
    leader = {"data": "q", "residue": "p", "neither": "neither q nor p"}[found.leader]
    whose = f"layer {found.layer!r}" if found.layer else "the model"
    verb = "is" if found.outliers == 1 else "are"
    spectrum_text = (
        f"{found.outliers} of {len(found.singular_values)} singular values of the {size} gradient "
        f"of {whose} {verb} above the edge"
    )
    show(
        fig,
        alt=f"{spectrum_text}; the first left singular vector is closest to {leader}.",
        caption=(
            f"{spectrum_text}, the largest norm of E when examples get random signs. Right: "
            "squared cosines of the leading left singular vectors with q, the leading direction of "
            "the layer's inputs, and with p, that of X_Bᵀr; q and p are orthogonal."
        ),
    )


_PIECES = {"S1": "S₁", "S12": "S₁₂", "S2": "S₂"}


def slider(
    draw: Callable[..., Figure],
    *,
    alt: str | Callable[..., str],
    caption: str,
    **parameters: Sequence[Any],
) -> Any:
    """Show a figure as a function of one or more parameters.

    A parameter of numbers has a slider, one of texts a list to choose from. In a live kernel this
    is a widget that draws on demand. While the book is built (environment variable
    ``LOWGRAD_BOOK``) every frame is drawn now and the page switches between the images, with no
    kernel and no request to anywhere.

    Args:
        draw: Called with one value of each parameter by name; returns a new figure.
        alt: Text alternative of a frame: a format string such as ``"Spectrum at ν = {nu}."`` or a
            function of the parameters.
        caption: The visible caption, plain text.
        **parameters: Names, each with its values in order; every combination is a frame, of 4 to
            15 KB in the page.

    Returns:
        The widget in a live kernel (so end a cell with the call), None while the book is built.

    Raises:
        ValueError: If there are no parameters, one has no values, ``alt`` is empty for a frame or
            names an unknown parameter, or the caption is empty.
        TypeError: If ``draw`` cannot be called with these names or returns no figure.

    Example:
        >>> def draw(nu):
        ...     figure, axis = plt.subplots()
        ...     axis.axvline(nu)
        ...     return figure
        >>> widget = slider(draw, alt="A line at {nu}.", caption="A line.", nu=[0.1, 0.2])
    """
    caption = _text("caption", caption)
    if not parameters:
        raise ValueError("slider got no parameters, but one or more with their values are needed")
    parameters = {name: _plain(values) for name, values in parameters.items()}
    for name, values in parameters.items():
        if not values:
            raise ValueError(f"{name} has no values, but a list of at least one is needed")
    try:
        inspect.signature(draw).bind(**dict.fromkeys(parameters))
    except TypeError as error:
        raise TypeError(
            f"draw cannot be called with {', '.join(parameters)} by name: {error}"
        ) from error
    # Every frame's text is made before any is drawn: a mistake shows up at once.
    frames = [dict(zip(parameters, values)) for values in itertools.product(*parameters.values())]
    alts = [_frame_alt(alt, frame) for frame in frames]
    if not os.environ.get(BOOK_VARIABLE):
        return _live_slider(draw, alts, caption, parameters)
    images = [
        _image(
            _drawn(draw, frame), text, f' class="lg-frame"{" hidden" if index else ""}', coarse=True
        )
        for index, (frame, text) in enumerate(zip(frames, alts))
    ]
    controls = [_control_html(name, values) for name, values in parameters.items()]
    frames_box = _wide("".join(images))
    content = f"{frames_box}<div>{''.join(controls)}</div><script>{_SCRIPT}</script>"
    plain = f"{alts[0]} ({len(frames)} frames over {', '.join(parameters)})"
    display(_Output(_figure("lg-slider", content, caption), plain))
    return None


def table(frame: pd.DataFrame, *, caption: str, digits: int = 3) -> None:
    """Display a table that a reader sorts by its column heads, with no kernel.

    A click on a head (or Enter, or the space bar) sorts by that column, a second one the other
    way round. Columns of numbers sort as numbers, by ten digits of them. A value that is missing
    is shown as a dash and stays at the end. Wide or long tables scroll in a box of their own.
    Where scripts are stripped the table is shown as it is.

    Args:
        frame: The table. An index with a name (or names) is shown as columns, any other is not.
        caption: The visible caption, plain text.
        digits: Digits after the point of numbers that are not whole.

    Raises:
        TypeError: If ``frame`` is not a DataFrame, or the caption is not text.
        ValueError: If the frame is empty, the caption is, or ``digits`` is not a whole number
            between 0 and 15.

    Example:
        >>> rates = pd.DataFrame({"case": ["a", "b"], "slope": [-0.5, 0.25]})
        >>> table(rates, caption="Two rates.", digits=2)
        case  slope
           a  -0.50
           b   0.25
    """
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"frame is {type(frame).__name__}, but a pandas DataFrame is needed")
    caption = _text("caption", caption)
    if isinstance(digits, bool) or not isinstance(digits, int) or not 0 <= digits <= 15:
        raise ValueError(f"digits is {digits!r}, but a whole number from 0 to 15 is needed")
    named = any(name is not None for name in frame.index.names)
    shown = frame.reset_index(drop=not named)
    if shown.empty:
        raise ValueError(f"frame has shape {frame.shape}: it is empty, rows and columns are needed")
    page = _figure("lg-figure lg-sortable", _table_html(shown, caption, digits), caption)
    # na_rep does not reach None and pd.NA among objects.
    dashed = shown.apply(lambda v: v.where(v.notna(), _DASH) if v.dtype == object else v)
    plain = dashed.to_string(index=False, na_rep=_DASH, float_format=f"{{:.{digits}f}}".format)
    display(_Output(page, plain))


# --- images ---------------------------------------------------------------------------------------


class _Output:
    """A displayed output: HTML where it can be shown, otherwise its text alternative."""

    def __init__(self, page: str, plain: str):
        self.data = {"text/html": page, "text/plain": plain}

    def __repr__(self) -> str:
        return self.data["text/plain"]

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.data


def _image(fig: Figure, alt: str, attributes: str = "", *, coarse: bool = False) -> str:
    """Return the figure as an ``<img>`` that holds its own data, and close the figure.

    A coarse image has 16 levels of each colour, which nobody sees and which saves a third.
    """
    if not isinstance(fig, Figure):
        raise TypeError(f"a Matplotlib figure is needed, but {type(fig).__name__} was given")
    png, webp = io.BytesIO(), io.BytesIO()
    # The PNG is only a way to the pixels, so it is not compressed.
    fig.savefig(png, format="png", dpi=_DPI, facecolor="white", pil_kwargs={"compress_level": 0})
    plt.close(fig)
    # A third of the PNG's size. Lossless, because lossy is both larger and blurred for line art;
    # there, quality is the effort: 20 takes a fifth of the usual time for 2 % more bytes.
    picture = Image.open(png).convert("RGB")
    if coarse:
        picture = picture.point([(level + 8) // 17 * 17 for level in range(256)] * 3)
    picture.save(webp, "WebP", lossless=True, quality=20)
    data = base64.b64encode(webp.getvalue()).decode()
    wide = picture.width > _ONE_PANEL
    least = min(_LEAST_WIDTH, round(_LEAST_SHARE * picture.width)) if wide else 0
    # Width and height reserve the place, so that the page does not jump when a frame is switched.
    return (
        f'<img alt="{html.escape(alt)}" width="{picture.width}" height="{picture.height}" '
        f'style="min-width:{least}px;{_IMAGE_STYLE}" src="data:image/webp;base64,{data}"'
        f"{attributes}>"
    )


def _wide(images: str) -> str:
    """Return images in a box that scrolls sideways where they are wider than the page."""
    return f'<div class="lg-wide" style="max-width:100%;overflow-x:auto">{images}</div>'


def _drawn(draw: Callable[..., Figure], frame: Mapping[str, Any]) -> Figure:
    figure = draw(**frame)
    if not isinstance(figure, Figure):
        raise TypeError(
            f"draw returned {type(figure).__name__} for {frame}, but a Matplotlib figure is needed"
        )
    return figure


def _figure(name: str, content: str, caption: str) -> str:
    return (
        f'<figure class="{name}" style="margin:.5em 0">{content}'
        f'<figcaption style="{_CAPTION_STYLE}">{html.escape(caption)}</figcaption></figure>'
    )


# --- arguments ------------------------------------------------------------------------------------


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, but text is needed")
    if not value.strip():
        raise ValueError(f"{name} is empty; say in words what the figure shows")
    return value


def _numbers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=float)
    array = array.ravel()
    if array.size == 0 or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite numbers of at least 0, one or more")
    return array


def _position(label: str, value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"mark '{label}' is at {number:g}, but a finite number >= 0 is needed")
    return number


def _plain(values: Sequence[Any]) -> list[Any]:
    """Return a parameter's values as Python's own numbers, which format strings show shortest."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _frame_alt(alt: str | Callable[..., str], frame: Mapping[str, Any]) -> str:
    if callable(alt):
        return _text("alt", alt(**frame))
    try:
        return _text("alt", _text("alt", alt).format(**frame))
    except (KeyError, IndexError) as error:
        raise ValueError(f"alt names {error}, but the parameters are {', '.join(frame)}") from error


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


# --- the slider -----------------------------------------------------------------------------------

# The script finds its own figure, so that a page can hold several sliders and nothing is global.
_SCRIPT = """
(() => {
  const figure = document.currentScript.closest("figure");
  const frames = [...figure.querySelectorAll("img.lg-frame")];
  const controls = [...figure.querySelectorAll(".lg-control")];
  const update = () => {
    let index = 0;
    for (const control of controls) {
      const texts = JSON.parse(control.dataset.texts);
      if (control.type === "range") {
        const text = control.dataset.name + " = " + texts[control.value];
        control.setAttribute("aria-valuetext", text);
        control.parentElement.querySelector("output").textContent = text;
      }
      index = index * texts.length + Number(control.value);
    }
    frames.forEach((frame, k) => { frame.hidden = k !== index; });
  };
  controls.forEach((control) => control.addEventListener("input", update));
  update();
})();
"""


def _categorical(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values)


def _label(name: str) -> str:
    """Return what a reader sees for a parameter: the paper's letter where it is a Greek one."""
    return _GREEK.get(name, name.replace("_", " "))


def _control_html(name: str, values: Sequence[Any]) -> str:
    name = _label(name)
    texts = [_value_text(value) for value in values]
    first = html.escape(f"{name} = {texts[0]}")
    # Browsers restore a form's state on reload; autocomplete="off" keeps controls and frame
    # together.
    shared = (
        f'class="lg-control" autocomplete="off" aria-label="{html.escape(name)}" '
        f'data-name="{html.escape(name)}" data-texts="{html.escape(json.dumps(texts))}"'
    )
    if _categorical(values):
        options = "".join(
            f'<option value="{k}"{"" if k else " selected"}>{html.escape(text)}</option>'
            for k, text in enumerate(texts)
        )
        return (
            '<div style="display:inline-block;margin:.2em 1.2em .2em 0">'
            f"<label>{html.escape(name)} <select {shared} "
            'style="font:inherit;min-height:24px;max-width:100%">'
            f"{options}</select></label></div>"
        )
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:.2em .8em">'
        f'<input {shared} type="range" min="0" max="{len(values) - 1}" step="1" value="0" '
        f'aria-valuetext="{first}" style="flex:1 1 12em;max-width:30em;height:24px;margin:0">'
        # The slider speaks its value itself; the output's own announcement would repeat it.
        f'<output aria-live="off" style="font-variant-numeric:tabular-nums">{first}</output></div>'
    )


def _live_slider(
    draw: Callable[..., Figure],
    alts: Sequence[str],
    caption: str,
    parameters: Mapping[str, Sequence[Any]],
) -> widgets.VBox:
    controls = [_live_control(name, values) for name, values in parameters.items()]
    picture = widgets.HTML()
    # A widget's callback would lose an error of `draw`; here it is shown below the figure.
    errors = widgets.Output()

    def update(_change: object = None) -> None:
        positions = [control.value for control in controls]
        frame = {name: values[k] for (name, values), k in zip(parameters.items(), positions)}
        index = np.ravel_multi_index(positions, [len(values) for values in parameters.values()])
        image = _wide(_image(_drawn(draw, frame), alts[index]))
        picture.value = _figure("lg-slider", image, caption)

    update()
    for control in controls:
        control.observe(errors.capture(clear_output=True)(update), names="value")
    return widgets.VBox([*controls, picture, errors])


def _live_control(name: str, values: Sequence[Any]) -> widgets.Widget:
    name = _label(name)
    # Options are (text, position): values themselves need not be hashable or distinct.
    options = [(_value_text(value), k) for k, value in enumerate(values)]
    if _categorical(values):
        return widgets.Dropdown(options=options, description=name)
    return widgets.SelectionSlider(options=options, description=name, continuous_update=False)


# --- the table ------------------------------------------------------------------------------------

# Where a front end keeps the colour of its ground: heads that stay in place need one of their own.
_GROUND = (
    "var(--pst-color-background,var(--jp-layout-color0,var(--colab-primary-surface-color,"
    "var(--vscode-editor-background,Canvas))))"
)
_HEAD_STYLE = (
    f"position:sticky;top:0;background:{_GROUND};padding:.3em .6em;vertical-align:bottom;"
    # A border would scroll away with the rows.
    "white-space:nowrap;box-shadow:inset 0 -2px currentColor"
)
_CELL_STYLE = "padding:.15em .6em;white-space:nowrap"
#: What a table shows where there is no value.
_DASH = "–"
_NUMBER_STYLE = f"{_CELL_STYLE};text-align:right;font-variant-numeric:tabular-nums"

# The buttons are made by the script: where scripts are stripped, heads are plain text instead of
# buttons that do nothing. Missing values stay at the end in both orders.
_TABLE_SCRIPT = """
(() => {
  const table = document.currentScript.closest("figure").querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const numeric = head.dataset.kind === "number";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.style.cssText = "all:unset;cursor:pointer;font-weight:600";
    button.style.textDecoration = "underline dotted";
    button.addEventListener("focus", () => {
      button.style.outline = button.matches(":focus-visible") ? "2px solid" : "";
    });
    button.addEventListener("blur", () => { button.style.outline = ""; });
    const mark = document.createElement("span");
    mark.setAttribute("aria-hidden", "true");
    head.replaceChildren(button, mark);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
        const difference = numeric ? x - y : x.localeCompare(y);
        return up ? difference : -difference;
      };
      for (const other of heads) {
        other.removeAttribute("aria-sort");
        other.querySelector("span").textContent = "";
      }
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      mark.textContent = up ? " \u2191" : " \u2193";
      body.append(...[...rows].sort(order));
    });
  });
})();
"""


def _number_text(value: Any, digits: int) -> str:
    if pd.isna(value):
        return _DASH
    return f"{value:.{digits}f}" if isinstance(value, float | np.floating) else str(value)


def _cell_html(value: Any, numeric: bool, digits: int) -> str:
    if not numeric:
        # Not pd.isna, which takes a list apart. An empty key sorts behind every text.
        if value is None or value is pd.NA or value != value:
            return f'<td style="{_CELL_STYLE}" data-value="">{_DASH}</td>'
        return f'<td style="{_CELL_STYLE}">{html.escape(str(value))}</td>'
    # Scripts read "Infinity" as a number, but not "inf".
    exact = "" if pd.isna(value) else f"{value:.10g}".replace("inf", "Infinity")
    return (
        f'<td style="{_NUMBER_STYLE}" data-value="{exact}">'
        f"{html.escape(_number_text(value, digits))}</td>"
    )


def _table_html(frame: pd.DataFrame, caption: str, digits: int) -> str:
    kinds = [
        pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)
        for dtype in frame.dtypes
    ]
    heads = "".join(
        f'<th scope="col" style="{_HEAD_STYLE};text-align:{"right" if numeric else "left"}" '
        f'data-kind="{"number" if numeric else "text"}">{html.escape(str(name))}</th>'
        for name, numeric in zip(frame.columns, kinds)
    )
    rows = "".join(
        "<tr>" + "".join(_cell_html(*pair, digits) for pair in zip(row, kinds)) + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    return (
        # A box that scrolls must be reachable by keyboard, and then needs a name.
        f'<div role="region" aria-label="{html.escape(caption)}" tabindex="0" '
        'style="overflow:auto;max-width:100%;max-height:28em">'
        '<table style="border-collapse:collapse;color:inherit;margin:0">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<script>{_TABLE_SCRIPT}</script>"
    )
