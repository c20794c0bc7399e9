"""What must go wrong does go wrong, and says so: small books that are broken on purpose."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import build_book
import execute
import nbformat
import psutil
import pytest
from book_sources import BookError, digest, notebook_key, toc_documents
from small_books import REGISTRY, ROOT, SETTLE, notebook, write_book

GOOD = notebook("# First", SETTLE)


@pytest.fixture
def folder(tmp_path):
    """An empty folder with a space in its path."""
    return tmp_path / "a small book"


def test_small_book_builds_and_shows_new_prose_without_computing_again(folder, capsys):
    root = write_book(folder, REGISTRY, first=GOOD)
    html = build_book.build(root)
    records = json.loads((html / "claims.json").read_text())
    assert [record["id"] for record in records] == ["new.sum"]
    assert 'href="chapters/first.html#claim-new.sum"' in (html / "what-holds.html").read_text()
    nbformat.write(notebook("# First", "# Another heading", SETTLE), root / "chapters/first.ipynb")
    capsys.readouterr()
    assert build_book.build(root) == html
    assert "1 of 1 are up to date" in capsys.readouterr().out
    page = (html / "chapters" / "first.html").read_text()
    assert "Another heading" in page
    assert 'id="claim-new.sum"' in page


def test_prints_of_one_cell_share_a_box(folder):
    code = "import sys\nfor k in range(3):\n    print(k)\n    sys.stdout.flush()"
    root = write_book(folder, REGISTRY, first=notebook("# First", code))
    executed = json.loads(execute.execute_book(root)["chapters/first"].read_text())
    assert ["".join(output["text"]) for output in executed["cells"][1]["outputs"]] == ["0\n1\n2\n"]


def test_all_failing_notebooks_are_reported_together(folder, capsys):
    bad = notebook("# Second", "x = 0", "y = 1\n1 / x")
    worse = notebook("# Third", "raise ValueError('no such spike')")
    root = write_book(folder, REGISTRY, second=bad, third=worse, first=GOOD)
    with pytest.raises(BookError) as failure:
        build_book.build(root)
    text = str(failure.value)
    assert "chapters/second.ipynb, cell 3 of 3" in text
    assert "    1 / x" in text
    assert "ZeroDivisionError" in text
    assert "chapters/third.ipynb, cell 2 of 2" in text
    assert "ValueError: no such spike" in text
    assert "\x1b" not in text
    assert "2 of 3 notebooks failed" in text
    # What is finished is kept: the second run repeats only the two that failed.
    capsys.readouterr()
    with pytest.raises(BookError):
        build_book.build(root)
    assert "1 of 3 are up to date, 2 to execute" in capsys.readouterr().out


def test_what_never_ends_or_has_no_kernel_left_is_reported(folder):
    killed = notebook("# Killed", "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    endless = notebook("# Endless", "import time; time.sleep(60)")
    other = notebook("# Other", "1 + 1")
    other.metadata.kernelspec.name = "no-such-kernel"
    root = write_book(folder, REGISTRY, killed=killed, endless=endless, other=other)
    with pytest.raises(BookError) as failure:
        build_book.build(root, cell_timeout=3)
    told = str(failure.value).split("=" * 80)
    for beginning, reason in (
        ("chapters/killed.ipynb, cell 3 of 3", "the kernel died"),
        ("chapters/endless.ipynb, cell 2 of 2", "the cell ran out of time"),
        ("chapters/other.ipynb, before its first cell", "no-such-kernel"),
    ):
        (report,) = [text for text in told if text.strip().startswith(beginning)]
        assert reason in report
    assert "3 of 3 notebooks failed" in told[-1]


def test_an_interrupted_build_leaves_nothing_running(folder):
    root = write_book(folder, REGISTRY, first=notebook("# First", "import time; time.sleep(600)"))
    # Where tests run in the background, a shell may have told all of them to ignore Ctrl-C.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "import execute, pathlib, sys; execute.execute_book(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    build = psutil.Popen(
        [sys.executable, "-c", code, root], env=environment, stderr=subprocess.DEVNULL
    )
    children, end = [], time.monotonic() + 60
    while not any("ipykernel_launcher" in each.cmdline() for each in children):
        assert time.monotonic() < end
        time.sleep(0.2)
        children = build.children(recursive=True)
    build.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs([build, *children], timeout=30)
    for each in left:
        each.kill()
    assert left == []
    assert build.returncode != 0


def test_kernel_that_dies_at_its_start_gets_another_try(folder, monkeypatch):
    root = write_book(folder, REGISTRY, first=GOOD)
    target = execute.result_path(root, "chapters/first", "key")
    real, tries = execute.NotebookClient.execute, []

    def lose_the_port(self, **options):
        tries.append(1)
        if len(tries) < failing_tries:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return real(self, **options)

    monkeypatch.setattr(execute.NotebookClient, "execute", lose_the_port)
    failing_tries = execute.START_ATTEMPTS
    assert execute.execute_one(root, "chapters/first", target, 60).failure == ""
    assert target.is_file()
    tries.clear()
    failing_tries = 100
    report = execute.execute_one(root, "chapters/first", target, 60)
    assert "before its first cell: RuntimeError: Kernel died" in report.failure
    assert len(tries) == execute.START_ATTEMPTS


def _own(text, name):
    """Give the row, or the record, of the small books to another chapter."""
    text = text.replace("new.sum", f"new.{name}")
    return text.replace('chapter="first"', f'chapter="{name}"').replace(
        'chapter = "first"', f'chapter = "{name}"'
    )


def test_incomplete_ledger_stops_the_build(folder):
    cases = {
        "unnamed": ([SETTLE, SETTLE.replace("new.sum", "new.typo")], "new.typo: measured, but not"),
        "twice": ([SETTLE, SETTLE], "new.twice: measured 2 times"),
        "never": (["1 + 1"], "new.never: settled, but never measured"),
        "numbers": (
            [SETTLE.replace('"max error": 0.0', '"max error": 1.0')],
            "new.numbers: .*numbers give",
        ),
        "planned": (["1 + 1"], "new.planned: planned, but its chapter"),
        "whole": ([SETTLE], None),
    }
    rows = {name: _own(REGISTRY, name) for name in cases}
    rows["planned"] = rows["planned"].split("expected")[0].replace("settled", "planned")
    chapters = {
        name: notebook(f"# {name}", *(_own(cell, name) for cell in cells))
        for name, (cells, _) in cases.items()
    }
    root = write_book(folder, "".join(rows.values()), **chapters)
    with pytest.raises(BookError) as failure:
        build_book.build(root)
    told = str(failure.value)
    for name, (_, problem) in cases.items():
        if problem:
            assert re.search(f"WARNING: ledger: {problem}", told), name
    # Whose row is whole is not told of.
    assert "new.whole" not in told
    assert not (root / "_build" / "book.key").exists()


def test_a_notebook_that_the_contents_do_not_name_is_said_before_the_work(folder, capsys):
    root = write_book(folder, REGISTRY, first=notebook("# First", "1 / 0"))
    (root / "chapters" / "draft.ipynb").write_text(nbformat.writes(notebook("# Draft", "1 + 1")))
    with pytest.raises(BookError, match="1 of 1 notebooks failed"):
        build_book.build(root)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Left out, since _toc.yml does not name it: chapters/draft.ipynb"
    assert not any("Left out" in line for line in said[1:])


def test_broken_link_stops_the_build(folder):
    root = write_book(folder, REGISTRY, first=notebook("# First\n\n[x](#Nowhere)", SETTLE))
    with pytest.raises(BookError, match="Nowhere"):
        build_book.build(root)


def test_page_that_is_missing_is_named(folder):
    root = write_book(folder, REGISTRY, first=GOOD)
    (root / "chapters" / "first.ipynb").unlink()
    with pytest.raises(BookError, match="'chapters/first', but neither"):
        build_book.build(root)


def test_folder_without_contents_is_named(tmp_path):
    with pytest.raises(BookError, match=r"no _toc\.yml"):
        toc_documents(tmp_path)


def test_sphinx_that_executes_by_itself_is_noticed(folder, monkeypatch):
    # As if the cache and Sphinx disagreed about which notebook is which.
    monkeypatch.setattr(build_book, "fill_cache", lambda root, results: 0)
    root = write_book(folder, REGISTRY, first=GOOD)
    with pytest.raises(BookError, match="executed a notebook by itself"):
        build_book.build(root)


def test_key_follows_code_tags_data_and_names(tmp_path):
    root = write_book(tmp_path / "book", REGISTRY, first=GOOD)
    keys = [notebook_key(root, "chapters/first", word) for word in ("common", "other")]
    tagged = notebook("# First", SETTLE)
    tagged.cells[1].metadata["tags"] = ["hide-input"]
    for changed in (notebook("# First", SETTLE + "\n1"), notebook("# First", SETTLE, "1"), tagged):
        nbformat.write(changed, root / "chapters/first.ipynb")
        keys.append(notebook_key(root, "chapters/first", "common"))
    assert len(set(keys)) == 5
    data = tmp_path / "data"
    data.mkdir()
    empty = digest([data])
    (data / "a").write_text("1")
    one = digest([data])
    (data / "a").rename(data / "b")
    assert len({empty, one, digest([data])}) == 3


def test_interrupted_result_is_no_result(folder, monkeypatch):
    root = write_book(folder, REGISTRY, first=GOOD)
    target = execute.result_path(root, "chapters/first", "key")

    def killed(self, text, encoding):
        self.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(type(target), "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        execute.execute_one(root, "chapters/first", target, 60)
    assert not target.exists()


def test_only_the_newest_results_stay(folder):
    root = write_book(folder, REGISTRY, first=GOOD)
    for text in range(execute.KEPT_RESULTS + 1):
        code = notebook("# First", SETTLE, repr(text))
        nbformat.write(code, root / "chapters" / "first.ipynb")
        results = execute.execute_book(root)
        assert results["chapters/first"].is_file(), text
    assert len(list(results["chapters/first"].parent.iterdir())) == execute.KEPT_RESULTS


def test_configuration_is_the_one_of_the_book(folder):
    root = write_book(folder, REGISTRY, first=GOOD)
    assert (root / "_ext" / "companion" / "ledger.py").read_bytes() == (
        ROOT / "_ext" / "companion" / "ledger.py"
    ).read_bytes()
