"""Write chapters that carry the package and their data: they run anywhere, with no address.

    python tools/colab.py [--out FOLDER] [CHAPTER ...]

What a chapter reads was noted when the book executed it, so chapters that were not executed yet
are executed now.
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import address
from book_sources import BookError, notebooks, page_source
from carrying import ROOT, Carried, carry, pack, source_of
from execute import WORKERS, execute_book, execution_report

OUT = ROOT / "_build" / "colab"
TITLE = "Low-Rank Structure in Deep Learning: an executable companion"
PAGE_LINK = re.compile(
    r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]"
    r"\((?P<path>[\w./-]+\.(?:ipynb|md))(?P<anchor>#[^)\s]*)?\)"
)


def chapter(
    root: Path, document: str, carried: Carried, where: address.Address | None
) -> dict[str, Any]:
    """Return a chapter that carries the package.

    Args:
        root: The project's folder.
        document: The chapter's name in `_toc.yml`.
        carried: The package with the data that it reads.
        where: Where the book is published; None leaves links to other chapters as text.
    """
    path = page_source(root, document)
    notebook = carry(json.loads(path.read_text(encoding="utf8")), carried, root)
    named: dict[str, str] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = _with_links(source_of(cell), path, root, where, named)
    notebook["cells"].insert(1, _text("about", _about(root, path.stem, carried.data, where)))
    if named:
        rows = "\n".join(f"- {title}: `{name}`" for name, title in sorted(named.items()))
        notebook["cells"].append(
            _text("named", f"## Chapters named here, and the files they are in\n\n{rows}")
        )
    notebook["metadata"]["colab"] = {"name": path.name, "provenance": [], "toc_visible": True}
    return notebook


def _text(name: str, source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def _with_links(
    source: str,
    path: Path,
    root: Path,
    where: address.Address | None,
    named: dict[str, str],
) -> str:
    """Return Markdown whose links lead somewhere from a file that lies alone.

    Args:
        source: The Markdown of a cell.
        path: The notebook that it is in.
        root: The project's folder.
        where: Where the book is published.
        named: Takes up the chapters whose links became text: file and title.
    """

    def replace(link: re.Match) -> str:
        target = (path.parent / link["path"]).resolve()
        name = target.relative_to(root.resolve()).as_posix()
        if where and target.suffix == ".ipynb":
            return f"[{link['text']}]({where.colab(name)})"
        if where:
            return f"[{link['text']}]({where.file(name)}{link['anchor'] or ''})"
        if target.suffix == ".ipynb" and target != path.resolve():
            named[target.name] = _title(target)
        return link["text"]

    return PAGE_LINK.sub(replace, source)


def _title(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    return source_of(cells[0]).splitlines()[0].removeprefix("# ")


def _about(root: Path, name: str, data: tuple[str, ...], where: address.Address | None) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf8"))["project"]
    size = sum((root / "data" / each).stat().st_size for each in data) / 1e6
    files = "1 file" if len(data) == 1 else f"{len(data)} files"
    what = f"the data that its cells read ({files}, {size:.1f} MB)" if data else "no data"
    published, links = "", " Links to other chapters are plain text here."
    if where:
        published, links = f" It is published at [{where.repository}]({where.repository}).", ""
    return (
        f"*This file is the chapter `{name}` of the book **{TITLE}**, version "
        f"{project['version']}, made to run by itself, in Colab or any Jupyter.*"
        f"{published} It carries the package `lowgrad_utils` and {what}. The "
        "folded cells below unpack them until Python ends and change nothing that is installed; "
        "numpy, torch and the other packages of Colab are used as they are. "
        f"Run all cells from the top.{links} Code under the MIT licence, text and figures under "
        "CC BY 4.0, data sets under their own licences, which travel along."
    )


def write(
    root: Path, out: Path, chosen: list[str], where: address.Address | None
) -> dict[str, tuple[int, int]]:
    """Write notebooks that carry the package; return size and number of data files of each.

    Args:
        root: The project's folder.
        out: The folder to write to; other notebooks in it go away if all are written.
        chosen: Names of chapters; all if there are none.
        where: Where the book is published.

    Raises:
        BookError: A chapter is unknown, does not run, or reads what is not there.
    """
    documents = {Path(doc).name: doc for doc in notebooks(root)}
    unknown = [name for name in chosen if name not in documents]
    if unknown:
        raise BookError(
            f"no chapter is called {', '.join(unknown)}: name some of {', '.join(documents)}"
        )
    results = execute_book(root, WORKERS, only=[documents[n] for n in chosen] or None)
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for document, result in results.items():
        carried = pack(execution_report(result).data, root)
        content = chapter(root, document, carried, where)
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        target = out / f"{Path(document).name}.ipynb"
        part = target.with_suffix(".part")
        part.write_text(text, encoding="utf8")
        part.replace(target)
        written[target.stem] = (len(text.encode()), len(carried.data))
    if not chosen:
        for path in out.glob("*.ipynb"):
            if path.stem not in written:
                path.unlink()
    return written


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    try:
        written = write(ROOT, args.out, args.chapters, address.current())
    except (BookError, address.AddressError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"  {'notebook':<26}{'MB':>6}{'data files':>12}")
    for name, (size, files) in written.items():
        print(f"  {name:<26}{size / 1e6:>6.1f}{files:>12}")
    total = sum(size for size, _ in written.values()) / 1e6
    print(f"{len(written)} notebooks, {total:.1f} MB, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
