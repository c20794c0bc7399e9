"""The ledger in the book: collects what the notebooks measured, checks it, shows and stores it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from jupyter_cache import get_cache
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from lowgrad_utils import claims
from lowgrad_utils.sweeps import load_grid

from .ledger_table import ledger_html, spelled

LOGGER = logging.getLogger(__name__)
METADATA_KEY = "lowgrad_claim"


class LedgerNode(nodes.General, nodes.Element):
    """Marks where the table goes; it is filled once all notebooks have been read."""


class LedgerDirective(SphinxDirective):
    """`{ledger}`: the table of all statements with their verdicts."""

    def run(self) -> list[nodes.Node]:
        """Return the mark and remember which page holds it."""
        ledger_pages(self.env).add(self.env.docname)
        self.env.companion_ledger_page = self.env.docname
        return [LedgerNode()]


def table_page(env: BuildEnvironment) -> str:
    """Return the name of the page that holds the table, or "" for a book without it."""
    return getattr(env, "companion_ledger_page", "")


def ledger_pages(env: BuildEnvironment) -> set[str]:
    """Return the names of the pages that show the ledger, as a set that can be added to."""
    if not hasattr(env, "companion_ledger_pages"):
        env.companion_ledger_pages = set()
    return env.companion_ledger_pages


def records_in(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records that the outputs of an executed notebook carry.

    Args:
        notebook: The notebook as nested dictionaries.
    """
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", []))
    found = (output.get("metadata", {}).get(METADATA_KEY) for output in outputs)
    return [dict(record) for record in found if record]


def executed(app: Sphinx, source: Path) -> dict[str, Any]:
    """Return a notebook with its outputs.

    Args:
        app: The Sphinx application.
        source: The notebook's file.
    """
    # The cache is where the page's outputs come from too; what Sphinx writes to
    # jupyter_execute is the notebook without them whenever they came from the cache.
    cache = get_cache(app.env.mystnb_config.execution_cache_path)
    return cache.merge_match_into_notebook(nbformat.read(source, as_version=4))[1]


def collect(app: Sphinx, env: BuildEnvironment) -> Iterable[str]:
    """Gather the records of all pages and complain about each problem; a Sphinx event handler.

    Returns:
        The pages whose table has to be written again.
    """
    sources = {doc: Path(env.doc2path(doc)) for doc in sorted(env.found_docs)}
    notebooks = {doc: path for doc, path in sources.items() if path.suffix == ".ipynb"}
    env.companion_documents = {path.stem: doc for doc, path in notebooks.items()}
    records = [
        {**record, "measured_in": path.stem}
        for path in notebooks.values()
        for record in records_in(executed(app, path))
    ]
    registry = _registry(app)
    repeated = _repeated(Path(app.srcdir, "data", "reseeds.csv"))
    for record in records:
        record["other_seeds"] = repeated.get(str(record.get("id")), "")
    # Every problem is a warning of its own, and the book is built with warnings as errors: so
    # all of them are seen at once, together with the pages that show where they come from.
    for problem in claims.audit(records, list(env.companion_documents), registry):
        LOGGER.warning("ledger: %s", problem, type="companion", subtype="ledger")
    order = {claim_id: position for position, claim_id in enumerate(registry)}
    records.sort(key=lambda record: order.get(str(record.get("id")), len(order)))
    env.companion_records = records
    return sorted(ledger_pages(env))


def _repeated(table: Path) -> dict[str, str]:
    """Return for each statement in how many runs on other seeds its verdict was the same."""
    if not table.is_file():
        return {}
    runs = load_grid(table)
    same = (runs["verdict"] == runs["expected"]).groupby(runs["claim"]).agg(["sum", "count"])
    return {claim: f"{row['sum']} of {row['count']}" for claim, row in same.iterrows()}


def _registry(app: Sphinx) -> dict[str, claims.Claim]:
    path = app.config.companion_registry
    try:
        return claims.load_registry(Path(app.srcdir) / path if path else None)
    except claims.RegistryError as error:
        raise ConfigError(f"ledger: {error}") from error


def fill_tables(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the table in place of its mark; a Sphinx event handler."""
    for mark in list(doctree.findall(LedgerNode)):
        rows = ledger_rows(app)
        text = ledger_html(rows, chapters_by_part(app), lambda row: row_link(app, docname, row))
        mark.replace_self(nodes.raw("", text, format="html"))
        # The table shows letters; the search knows the page by their names as well.
        doctree.insert(0, nodes.meta(name="keywords", content=", ".join(spelled(rows))))


def chapters_by_part(app: Sphinx) -> dict[str, dict[str, str]]:
    """Return the titles of all notebooks by name, for each part of the book in reading order."""
    found: dict[str, dict[str, str]] = {}
    names = {doc: name for name, doc in app.env.companion_documents.items()}
    for tree in app.config.external_site_map.root.subtrees:
        for doc in map(str, tree.items):
            if doc in names:
                part = found.setdefault(tree.caption or "", {})
                part[names[doc]] = app.env.titles[doc].astext()
    return found


def ledger_rows(app: Sphinx) -> list[dict[str, Any]]:
    """Return every row of the ledger, with what was measured where it was."""
    measured = {str(record.get("id")): record for record in app.env.companion_records}
    registry = {claim_id: claim.to_dict() for claim_id, claim in _registry(app).items()}
    return list({**registry, **measured}.values())


def row_link(app: Sphinx, docname: str, row: dict[str, Any]) -> str:
    """Return the address, seen from a page, of the box that measured a row, or ""."""
    target = app.env.companion_documents.get(row.get("measured_in", ""))
    if target is None:
        return ""
    return f"{app.builder.get_relative_uri(docname, target)}#claim-{row['id']}"


def write_json(app: Sphinx, error: Exception | None) -> None:
    """Write all records beside the pages as claims.json; a Sphinx event handler."""
    if error is not None or app.builder.format != "html":
        return
    records = [
        {key: value for key, value in record.items() if key != "measured_in"}
        for record in app.env.companion_records
    ]
    text = json.dumps(records, indent=1, ensure_ascii=False)
    Path(app.outdir, "claims.json").write_text(text + "\n", encoding="utf8")
