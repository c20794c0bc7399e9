"""Execute and build the whole book, or find that nothing changed since the last build.

    python tools/build_book.py [--root DIR] [--workers N] [--cell-timeout SECONDS]

Exit status 0 means: every notebook ran, Sphinx had no warning, every page of the table of
contents was written just now, and the ledger is complete.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from book_sources import BookError, book_key, left_out, toc_documents
from execute import ANSI, CELL_TIMEOUT, WORKERS, cached_count, execute_book, fill_cache


def build(root: Path, workers: int = WORKERS, cell_timeout: int = CELL_TIMEOUT) -> Path:
    """Bring the book up to date and return the folder with its pages.

    Args:
        root: The folder that holds `_config.yml` and `_toc.yml`.
        workers: How many notebooks run at once.
        cell_timeout: Seconds after which a cell counts as failed.

    Raises:
        BookError: A notebook failed, Sphinx warned, or the ledger is incomplete.
    """
    for path in left_out(root):
        # Said before the minutes of work that would end in a ledger that misses it.
        print(f"Left out, since _toc.yml does not name it: {path}", flush=True)
    html = root / "_build" / "html"
    stamp = root / "_build" / "book.key"
    key = book_key(root)
    if stamp.is_file() and stamp.read_text(encoding="utf8") == key and html.is_dir():
        print("The book is up to date: no source changed since the last build")
        return html
    # Gone before the work starts and written after it: a stamp always means a whole book.
    stamp.unlink(missing_ok=True)
    results = execute_book(root, workers, cell_timeout)
    cached = fill_cache(root, results)
    _run_sphinx(root, html)
    _check_pages(root, html)
    # What Sphinx does not find it runs by itself, under other conditions than ours.
    if cached_count(root) != cached:
        raise BookError("Sphinx executed a notebook by itself: the cache was incomplete")
    stamp.write_text(key, encoding="utf8")
    return html


def _run_sphinx(root: Path, html: Path) -> None:
    start = time.monotonic()
    # Pages of an older table of contents would be served and searched along with the new ones.
    shutil.rmtree(html, ignore_errors=True)
    shutil.rmtree(root / "_build" / "jupyter_execute", ignore_errors=True)
    command = [
        *(sys.executable, "-c", "from jupyter_book.cli.main import main; main()"),
        *("build", ".", "--all", "-W", "-n", "--keep-going"),
    ]
    log = root / "_build" / "sphinx.log"
    print("Sphinx: building the pages", flush=True)
    with log.open("w", encoding="utf8") as out:
        done = subprocess.run(
            command,
            cwd=root,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LOWGRAD_BOOK": "1"},
        )
    if done.returncode:
        lines = dict.fromkeys(ANSI.sub("", done.stderr).splitlines())
        raise BookError("\n".join([*lines, f"Sphinx failed; all it said is in {log}"]))
    print(f"Sphinx: done in {time.monotonic() - start:.0f} s")


def _check_pages(root: Path, html: Path) -> None:
    # Another major version of Jupyter Book ignores _config.yml and still ends with status 0.
    missing = [doc for doc in toc_documents(root) if not (html / f"{doc}.html").is_file()]
    if missing:
        raise BookError(f"Sphinx wrote no page for: {', '.join(missing)}")
    if not (html / "claims.json").is_file():
        raise BookError("Sphinx wrote no claims.json: is the extension 'companion' loaded?")


def main() -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--cell-timeout", type=int, default=CELL_TIMEOUT)
    args = parser.parse_args()
    start = time.monotonic()
    try:
        html = build(args.root.resolve(), args.workers, args.cell_timeout)
    except BookError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Book ready after {time.monotonic() - start:.0f} s. Open {html / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
