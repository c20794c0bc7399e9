"""A page shows another page's output and the counts of verdicts, or the build stops."""

import build_book
import pytest
from book_sources import BookError
from small_books import REGISTRY, SETTLE, notebook, write_book

SHOWN = "from IPython.display import HTML, display\ndisplay(HTML('<figure>the picture</figure>'))"


def book(folder, index):
    """Write a book with a settled row, a cell tagged `landing` and this first page."""
    first = notebook("# First", SETTLE, SHOWN)
    first.cells[-1].metadata["tags"] = ["landing"]
    root = write_book(folder, REGISTRY, first=first)
    (root / "index.md").write_text(f"# A small book\n\n{index}\n")
    return root


def test_the_first_page_shows_picture_and_counts(tmp_path):
    index = "```{verdicts}\n```\n\n```{excerpt} chapters/first landing\n```"
    html = build_book.build(book(tmp_path / "book", index))
    page = (html / "index.html").read_text()
    assert "<figure>the picture</figure>" in page
    assert "<strong>1 statement</strong>" in page
    assert 'lg-verdict-holds">holds</span> 1.' in page


def test_an_excerpt_that_is_not_there_stops_the_build(tmp_path, capfd):
    wrong = ("chapters/first nothing", "chapters/none landing")
    index = "\n\n".join(f"```{{excerpt}} {arguments}\n```" for arguments in wrong)
    with pytest.raises(BookError) as failure:
        build_book.build(book(tmp_path / "book", index))
    told = str(failure.value) + capfd.readouterr().out
    assert "0 cells of 'chapters/first' have the tag 'nothing'" in told
    assert "there is no page 'chapters/none'" in told
