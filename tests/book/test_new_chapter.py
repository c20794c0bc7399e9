"""A new chapter keeps every rule from the start, and nothing that exists is lost."""

import json
import subprocess
import sys

import nbformat
import new_chapter
import notebook_rules
import pytest
from book_sources import BookError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from small_books import ROOT


@pytest.fixture
def root(tmp_path):
    """A folder with the pages that a skeleton links to."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "how-to-read.ipynb").write_text('{"cells": []}')
    for page in ("what-holds.md", "bibliography.md"):
        (tmp_path / page).write_text("# A page\n")
    return tmp_path


def test_a_new_chapter_keeps_the_rules(root):
    path = new_chapter.write_chapter(root, "batch-norm", "Batch norm")
    problems = notebook_rules.notebook_problems(json.loads(path.read_text()))
    assert {problem.partition(": ")[2] for problem in problems} == {"a TODO that is not filled"}
    assert notebook_rules.link_problems(path) == []
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", path], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("name", "title", "word"),
    [
        ("Batch norm", "Batch norm", "single dashes"),
        ("../elsewhere", "Batch norm", "single dashes"),
        ("batch-norm", " ", "without a formula"),
        ("batch-norm", "The $G$", "without a formula"),
        ("how-to-read", "Again", "exists"),
    ],
)
def test_a_bad_name_is_refused(root, name, title, word):
    before = sorted(root.rglob("*"))
    with pytest.raises(BookError, match=word):
        new_chapter.write_chapter(root, name, title)
    assert sorted(root.rglob("*")) == before
    assert (root / "chapters" / "how-to-read.ipynb").read_text() == '{"cells": []}'


def test_the_command_says_what_is_next(capsys):
    assert new_chapter.main([]) == 2
    assert new_chapter.main(["setting", "Again"]) == 1
    assert "setting.ipynb exists" in capsys.readouterr().err


def test_clearing_keeps_the_text_and_drops_what_a_run_left(tmp_path):
    code = new_code_cell("1 + 1", execution_count=3, outputs=[new_output("stream", text="2")])
    code.metadata = {"tags": ["hide-input"], "collapsed": True}
    notebook = new_notebook(cells=[new_markdown_cell("# Title α"), code])
    notebook.metadata = {"kernelspec": new_chapter.METADATA["kernelspec"], "widgets": {"a": 1}}
    path = tmp_path / "a.ipynb"
    nbformat.write(notebook, path)
    notebook_rules.clear(path)
    cleared = nbformat.read(path, as_version=4)
    assert cleared.metadata == new_chapter.METADATA
    assert [cell.source for cell in cleared.cells] == ["# Title α", "1 + 1"]
    assert cleared.cells[1].metadata == {"tags": ["hide-input"]}
    assert (cleared.cells[1].outputs, cleared.cells[1].execution_count) == ([], None)
    text = path.read_text()
    notebook_rules.clear(path)
    assert path.read_text() == text
