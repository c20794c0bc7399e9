"""Asks axe-core about an opened page."""

from axe_playwright_python.base import AXE_SCRIPT
from looks import settle

# Rules are not tried on what is hidden, so solutions and cells are unfolded. Most of the time goes
# into thousands of small parts that look the same everywhere. So a block of code keeps its coloured
# words if it brings a kind of word that no earlier block had, and a formula in a line keeps its
# parts if it is one of the first; the others keep their text.
UNFOLD = """() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const known = new Set();
  document.querySelectorAll(".highlight pre").forEach((code) => {
    const kinds = [...code.querySelectorAll("span")].map((word) => word.className);
    if (kinds.every((kind) => known.has(kind))) code.textContent = code.textContent;
    kinds.forEach((kind) => known.add(kind));
  });
  document.querySelectorAll("span.math mjx-container").forEach((formula, k) => {
    const text = formula.querySelector("math");
    if (k > 20 && text) formula.textContent = text.textContent;
  });
}"""
# Names each broken element by the list of what is known, or by itself if it is not there.
FAULTS = """async (known) => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.flatMap(({ id, impact, nodes }) => nodes.map(({ target, html }) => {
    const element = document.querySelector(target[0]);
    const found = known.find(([rule, selector]) => rule === id && element?.matches(selector));
    return found ?? [id, `${impact}: ${target.join(" ")}: ${html.slice(0, 200)}`];
  }));
}"""


def unfold(page):
    """Show what is folded in an opened page, and less of what looks the same everywhere."""
    if not getattr(page, "unfolded", False):
        page.evaluate(UNFOLD)
        settle(page)
        page.unfolded = True


def faults(page, known=()):
    """Return what breaks a rule: pairs of `known`, or a rule and the element."""
    if not page.evaluate("!!window.axe"):
        page.evaluate(AXE_SCRIPT)
    return {tuple(fault) for fault in page.evaluate(FAULTS, [list(pair) for pair in known])}
