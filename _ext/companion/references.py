"""Two roles for pure pages: a statement's verdict with a link, and a name that must exist.

``{claim}`lrg.thm-3.2` `` shows the row's id, linked to the box that measured it, and its verdict.
``{function}`decompose` `` shows a name of ``lowgrad_utils`` as code, after looking it up; with
dots it is a module's, such as ``spectra.bulk_edge``.
"""

import html
from pkgutil import resolve_name

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from . import badges, ledger

LOGGER = logging.getLogger(__name__)
PACKAGE = "lowgrad_utils"


class ClaimNode(nodes.Inline, nodes.Element):
    """Marks where a verdict goes; it is filled once all notebooks have been read."""


class ClaimRole(SphinxRole):
    """`{claim}`: a row of the ledger with its verdict."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the mark and remember that this page shows verdicts."""
        ledger.ledger_pages(self.env).add(self.env.docname)
        node = ClaimNode(claim=self.text)
        self.set_source_info(node)
        return [node], []


class FunctionRole(SphinxRole):
    """`{function}`: a name of the package, checked."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the name as code, with a warning if the package does not have it."""
        if not exists(self.text):
            LOGGER.warning(
                "%s has no '%s'", PACKAGE, self.text, location=self.get_location(), type="companion"
            )
        return [nodes.literal(text=self.text, classes=["lg-function"])], []


def exists(name: str) -> bool:
    """Tell whether the package has this name.

    Args:
        name: A public name, or the dotted name of one in a module of the package.
    """
    try:
        resolve_name(f"{PACKAGE}.{name}")
    except (ImportError, AttributeError, ValueError):
        return False
    return True


def fill_claims(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put id and verdict in place of each mark; a Sphinx event handler."""
    marks = list(doctree.findall(ClaimNode))
    rows = {row["id"]: row for row in ledger.ledger_rows(app)} if marks else {}
    for mark in marks:
        row = rows.get(mark["claim"])
        if row is None:
            LOGGER.warning(
                "ledger: '%s' is not in claims.toml", mark["claim"], location=mark, type="companion"
            )
            mark.replace_self(nodes.literal(text=mark["claim"]))
            continue
        text = _claim_html(row, ledger.row_link(app, docname, row))
        mark.replace_self(nodes.raw("", text, format="html"))


def _claim_html(row: dict, address: str) -> str:
    name = html.escape(row["id"])
    name = f'<a href="{html.escape(address)}">{name}</a>' if address else name
    return f'<span class="lg-reference">{name} {badges.badge(badges.verdict_of(row))}</span>'
