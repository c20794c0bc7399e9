"""What a page loads: our style, no other host, and no script that complains."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from .ledger import ledger_pages

STATIC = Path(__file__).parent / "static"
OTHER_HOST = re.compile(r"^(https?:)?//")


def add_static_folder(app: Sphinx, config: Any) -> None:
    """Let Sphinx copy the folder with style and script; a Sphinx event handler."""
    config.html_static_path.append(str(STATIC))


def keep_to_this_host(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Drop scripts that live elsewhere and add ours where it is needed; a Sphinx event handler.

    Pages with widgets would load two scripts from a public host. In the book the widgets' place
    is taken by pictures, so nothing is lost.
    """
    if pagename in ledger_pages(app.env):
        app.add_js_file("companion.js", loading_method="defer")
    for kind in ("script_files", "css_files"):
        context[kind] = [f for f in context[kind] if not _elsewhere(f)]


def _elsewhere(asset: Any) -> bool:
    return bool(OTHER_HOST.match(str(getattr(asset, "filename", asset) or "")))
