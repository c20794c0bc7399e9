"""Short formulas as plain text, for places that hold nothing else: a tooltip, an index."""

import re
import unicodedata

SIGNS = {
    "ell": "ℓ",
    "partial": "∂",
    "circ": "∘",
    "cdot": "·",
    "times": "×",
    "ge": "≥",
    "le": "≤",
    "ne": "≠",
    "perp": "⊥",
    "top": "ᵀ",
    "lVert": "‖",
    "rVert": "‖",
    "lvert": "|",
    "rvert": "|",
    "sqrt": "√",
    "approx": "≈",
}
BELOW = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ"))
ABOVE = dict(zip("0123456789+-=()nik", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵏ"))
# A hat follows its letter.
HAT = "\N{COMBINING CIRCUMFLEX ACCENT}"
SCRIPT = re.compile(r"([_^])(?:\{([^{}]*)\}|(.))")


def plain(latex: str) -> str:
    r"""Return a short formula in letters and signs of Unicode.

    Example:
        >>> plain(r"S_{12}"), plain(r"\delta_{c,c'}"), plain(r"X_B^\top r"), plain(r"\hat\Sigma")
        ('S₁₂', "δ_{c,c'}", 'X_Bᵀr', 'Σ̂')
    """
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", latex)
    text = re.sub(r"\\(?:mathcal|mathbb|mathrm|operatorname|text) ?\{?(\w+)\}?", r"\1", text)
    text = re.sub(r"\\hat\\?(\w+)", lambda m: _named(m[1]) + HAT, text)
    # A space that only ends a name goes, one around a relation or a sign stays.
    text = re.sub(r"\\(ge|le|ne|approx|times)\b", lambda m: SIGNS[m[1]], text)
    text = re.sub(r"\\([A-Za-z]+)(?: (?=[\w\\(]))?", lambda m: _named(m[1]), text)
    text = re.sub(r"\\[,;! ]", "", text)
    text = SCRIPT.sub(lambda m: _script(m[1], m[2] if m[2] is not None else m[3]), text)
    return text.strip()


def _named(name: str) -> str:
    size = "CAPITAL" if name[0].isupper() else "SMALL"
    letter = "LAMDA" if name.lower() == "lambda" else name.upper()
    try:
        return SIGNS.get(name) or unicodedata.lookup(f"GREEK {size} LETTER {letter}")
    except KeyError:
        return name


def _script(mark: str, inner: str) -> str:
    table = BELOW if mark == "_" else ABOVE
    if all(letter in table for letter in inner):
        return "".join(table[letter] for letter in inner)
    if inner in ("ᵀ", "⊥", "'"):
        return inner
    return f"{mark}{{{inner}}}" if len(inner) > 1 else mark + inner


def plain_text(markdown: str) -> str:
    """Return a piece of Markdown with its formulas, links and code as plain text.

    Example:
        >>> plain_text(r"group mean, `at.group_means()`, of [class](x.md) $c$")
        'group mean, at.group_means(), of class c'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"\$([^$]+)\$", lambda m: plain(m[1]), text)
    return text.replace("`", "").replace("*", "").strip()
