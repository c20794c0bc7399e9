"""Write a chapter that has all its parts and keeps all rules, to be filled in.

    python tools/new_chapter.py NAME "Title"

NAME is the file's name in `chapters/`, such as `batch-norm`. Nothing is overwritten.
"""

import sys
from pathlib import Path

import nbformat
from book_sources import BookError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_rules import ANCHOR_FORM, ROOT, SETUP_CELL

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
#: The parts in reading order; each opens a Markdown cell.
PARTS = (
    "# {title}\n\n**What you will learn.** TODO, in two sentences.\n"
    "Time: about TODO minutes. Before this: [how to read this book](how-to-read.ipynb).",
    "## The statement\n\nTODO where it comes from.\n\n"
    '> <a id="{name}-claim"></a>**Claim (TODO).** TODO, with every hypothesis.',
    "## Why it is true\n\nTODO the idea, in steps that the next cells check.",
    "## Check it\n\nTODO what is measured, over which sizes and seeds, and what to look at.",
    "## Where it breaks\n\nTODO the hypothesis that is broken on purpose, and what happens.",
    "## Exercises\n\n> **Exercise 1 (TODO).** TODO.\n\n<details><summary>Solution</summary>\n\n"
    "TODO, run before it is written.\n\n</details>",
    "## Summary\n\n- TODO\n\n## Further reading\n\n- TODO two to four entries of the "
    "[literature](../bibliography.md), and what the reader finds there.\n\n"
    "Next: [what holds](../what-holds.md).",
)
IMPORTS = "from lowgrad_utils import figures\n\nfigures.use_style()"


def skeleton(name: str, title: str) -> nbformat.NotebookNode:
    """Return a chapter with all its parts and nothing in them.

    Args:
        name: The stem of its file.
        title: Its heading, without a formula.
    """
    first, *rest = (part.format(name=name, title=title) for part in PARTS)
    setup = new_code_cell(SETUP_CELL.read_text(encoding="utf8").strip())
    setup.metadata["tags"] = ["remove-cell"]
    cells = [new_markdown_cell(first), setup, new_code_cell(IMPORTS)]
    cells += [new_markdown_cell(part) for part in rest]
    return new_notebook(cells=cells, metadata=METADATA)


def write_chapter(root: Path, name: str, title: str) -> Path:
    """Write the skeleton of a chapter and return its path.

    Raises:
        BookError: The name or the title is not admitted, or the chapter exists.
    """
    if not ANCHOR_FORM.fullmatch(name):
        raise BookError(f"the name is '{name}', but a-z, 0-9 and single dashes are needed")
    if not title.strip() or "$" in title or "\n" in title:
        raise BookError("the title must be one line of text without a formula")
    path = root / "chapters" / f"{name}.ipynb"
    try:
        with path.open("x", encoding="utf8") as file:
            file.write(nbformat.writes(skeleton(name, title.strip())) + "\n")
    except FileExistsError:
        raise BookError(f"{path.name} exists; choose another name, or go on writing it") from None
    return path


def main(arguments: list[str]) -> int:
    """Write the chapter that was asked for; return the exit status."""
    if len(arguments) != 2:
        print('Usage: python tools/new_chapter.py NAME "Title"', file=sys.stderr)
        return 2
    try:
        path = write_chapter(ROOT, *arguments)
    except BookError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Wrote {path.relative_to(ROOT)}. Name it in _toc.yml: - file: chapters/{path.stem}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
