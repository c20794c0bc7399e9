"""Writes small books into empty folders, to see failures that the real book must not have."""

import shutil
from pathlib import Path

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = """
[[claim]]
id = "new.sum"
source = "A small book, Equation 1"
statement = "The sum is two"
hypotheses = "None"
kind = "empirical"
chapter = "first"
status = "settled"
expected = "holds"
reason = "1e-12 is rounding"
controls = []
[claim.rule]
measure = "the error of the sum"
predicted = "two"
holds = ["max error <= 1e-12"]
"""
# Displays what `settle` would, without asking the real registry.
SETTLE = """
from IPython.display import HTML, display
record = dict(
    id="new.sum", source="A small book", statement="The sum is two", kind="empirical",
    chapter="first", predicted="two", measured="0.0", verdict="holds", expected="holds",
    statistics={"max error": 0.0},
)
box = HTML('<div class="lg-claim" id="claim-new.sum">The sum is two: holds</div>')
display(box, metadata={"lowgrad_claim": record})
"""


def notebook(*cells: str) -> nbformat.NotebookNode:
    """Return a notebook; a cell that starts with `#` or `>` is Markdown, any other is code."""
    made = [
        new_markdown_cell(text)
        if text.lstrip().startswith(("# ", "## ", ">"))
        else new_code_cell(text)
        for text in cells
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=made, metadata=metadata)


def write_book(root: Path, registry: str = "", **notebooks: nbformat.NotebookNode) -> Path:
    """Write a book that is configured like the real one but has these notebooks.

    Args:
        root: An empty folder.
        registry: The rows of the ledger, as TOML; by default the real ones.
        **notebooks: Notebooks by name, in reading order.
    """
    (root / "chapters").mkdir(parents=True)
    shutil.copytree(ROOT / "_ext", root / "_ext", ignore=shutil.ignore_patterns("__pycache__"))
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf8"))
    if registry:
        (root / "registry.toml").write_text(registry, encoding="utf8")
        config["sphinx"]["config"]["companion_registry"] = "registry.toml"
    (root / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf8")
    (root / "index.md").write_text("# A small book\n", encoding="utf8")
    (root / "what-holds.md").write_text("# What holds\n\n```{ledger}\n```\n", encoding="utf8")
    pages = [*(f"chapters/{name}" for name in notebooks), "what-holds"]
    toc = {"format": "jb-book", "root": "index", "chapters": [{"file": p} for p in pages]}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf8")
    for name, content in notebooks.items():
        nbformat.write(content, root / "chapters" / f"{name}.ipynb")
    return root
