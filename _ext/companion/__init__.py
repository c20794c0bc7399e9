"""The Sphinx extension of this book: statements, the ledger, and pages that ask no other host."""

from typing import Any

from sphinx.application import Sphinx

from . import (
    anchors,
    assets,
    landing,
    launch,
    ledger,
    literature,
    references,
    statements,
    symbols,
    verdicts,
)

# Raised with every change to what this package puts into a page, or pages would stay as they were.
ENV_VERSION = 14


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything with Sphinx."""
    app.add_config_value("companion_registry", "", "env")
    app.add_config_value("companion_release", "", "html")
    app.add_transform(statements.StatementTransform)
    app.add_transform(anchors.AnchorTransform)
    app.add_node(ledger.LedgerNode)
    app.add_directive("ledger", ledger.LedgerDirective)
    app.add_node(landing.ExcerptNode)
    app.add_directive("excerpt", landing.ExcerptDirective)
    app.add_node(landing.VerdictsNode)
    app.add_directive("verdicts", landing.VerdictsDirective)
    app.add_node(references.ClaimNode)
    app.add_role("claim", references.ClaimRole())
    app.add_role("function", references.FunctionRole())
    symbols.setup(app)
    app.add_css_file("companion.css")
    app.add_js_file("reading.js", loading_method="defer")
    app.connect("config-inited", assets.add_static_folder)
    app.connect("env-updated", ledger.collect)
    app.connect("doctree-resolved", statements.add_search_names)
    app.connect("doctree-resolved", ledger.fill_tables)
    app.connect("doctree-resolved", references.fill_claims)
    app.connect("doctree-resolved", landing.fill)
    app.connect("doctree-resolved", verdicts.fill)
    # After every other extension has added its scripts.
    app.connect("html-page-context", assets.keep_to_this_host, priority=900)
    # After the theme has made its buttons.
    app.connect("html-page-context", launch.open_the_release, priority=900)
    app.connect("build-finished", ledger.write_json)
    app.connect("build-finished", literature.write_bib)
    return {"version": "1", "env_version": ENV_VERSION, "parallel_read_safe": False}
