"""Two directives for pure pages that show what notebooks computed, so that nothing goes stale.

``{excerpt} chapters/how-to-read landing`` shows the output of the one cell that carries this tag;
``{verdicts}`` says in a line how many statements have which verdict.
"""

from collections import Counter
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from . import badges, ledger

LOGGER = logging.getLogger(__name__)


class ExcerptNode(nodes.General, nodes.Element):
    """Marks where another page's output goes; it is filled once all notebooks have been read."""


class VerdictsNode(nodes.General, nodes.Element):
    """Marks where the counts go; they are known once all notebooks have been read."""


class ExcerptDirective(SphinxDirective):
    """`{excerpt} DOCUMENT TAG`: what the cell with this tag displays."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the mark and remember that this page shows results."""
        ledger.ledger_pages(self.env).add(self.env.docname)
        node = ExcerptNode(document=self.arguments[0], tag=self.arguments[1])
        self.set_source_info(node)
        return [node]


class VerdictsDirective(SphinxDirective):
    """`{verdicts}`: how many statements have which verdict."""

    def run(self) -> list[nodes.Node]:
        """Return the mark and remember that this page shows results."""
        ledger.ledger_pages(self.env).add(self.env.docname)
        return [VerdictsNode()]


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put outputs and counts in place of their marks; a Sphinx event handler."""
    for mark in list(doctree.findall(ExcerptNode)):
        try:
            text = _excerpt(app, mark["document"], mark["tag"])
        except ValueError as error:
            LOGGER.warning("excerpt: %s", error, location=mark, type="companion")
            text = ""
        mark.replace_self(nodes.raw("", text, format="html"))
    for mark in list(doctree.findall(VerdictsNode)):
        mark.replace_self(nodes.raw("", counts_html(ledger.ledger_rows(app)), format="html"))


def _excerpt(app: Sphinx, document: str, tag: str) -> str:
    if document not in app.env.found_docs:
        raise ValueError(f"there is no page '{document}'")
    notebook = ledger.executed(app, Path(app.env.doc2path(document)))
    cells = [c for c in notebook["cells"] if tag in c.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{len(cells)} cells of '{document}' have the tag '{tag}', one must")
    shown = [o["data"]["text/html"] for o in cells[0].outputs if "text/html" in o.get("data", {})]
    if not shown:
        raise ValueError(f"the cell '{tag}' of '{document}' displays no HTML")
    return "".join(shown)


def counts_html(rows: list[dict]) -> str:
    """Return how many statements have which verdict, controls left out, as one paragraph.

    Args:
        rows: Rows of the ledger with their verdicts.
    """
    verdicts = [badges.verdict_of(row) for row in rows if ".control" not in row["id"]]
    counts = Counter(verdicts)
    parts = ", ".join(f"{badges.badge(name)} {count}" for name, count in counts.most_common())
    number = f"{len(verdicts)} statement{'' if len(verdicts) == 1 else 's'}"
    return f'<p class="lg-verdicts"><strong>{number}</strong>: {parts}.</p>'
