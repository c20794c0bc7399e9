"""What the book is made of: the pages of its table of contents and the keys of its results."""

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
import yaml

# What decides how a page looks once its notebook has run, beside the pages themselves.
PAGE_SOURCES = ("_config.yml", "_toc.yml", "_ext", "tools")

# Raised with every change to what is kept beside a notebook's outputs.
RESULT_FORMAT = "2"


class BookError(Exception):
    """Something that stops the build, said in words that need no traceback."""


def toc_documents(root: Path) -> list[str]:
    """Return the documents that `_toc.yml` names, in reading order and without suffix.

    Args:
        root: The folder that holds `_toc.yml`.

    Raises:
        BookError: The file is missing or does not name a root page.

    Example:
        >>> toc_documents(Path("."))[0]  # doctest: +SKIP
        'index'
    """
    path = root / "_toc.yml"
    if not path.is_file():
        raise BookError(f"no _toc.yml in {root}: run this from a clone of the book")
    toc = yaml.safe_load(path.read_text(encoding="utf8"))
    if not isinstance(toc, dict) or "root" not in toc:
        raise BookError("_toc.yml: no 'root' page named")
    return [toc["root"], *_entries(toc)]


def _entries(node: dict) -> Iterator[str]:
    for part in node.get("parts", []):
        yield from _entries(part)
    for entry in [*node.get("chapters", []), *node.get("sections", [])]:
        if "file" in entry:
            yield str(entry["file"]).removesuffix(".ipynb").removesuffix(".md")
        yield from _entries(entry)


def page_source(root: Path, document: str) -> Path:
    """Return the file behind a document, `.ipynb` or `.md`.

    Raises:
        BookError: Neither file exists.
    """
    for suffix in (".ipynb", ".md"):
        path = root / (document + suffix)
        if path.is_file():
            return path
    raise BookError(f"_toc.yml names '{document}', but neither .ipynb nor .md exists")


def notebooks(root: Path) -> list[str]:
    """Return the documents of the table of contents that are notebooks."""
    return [doc for doc in toc_documents(root) if page_source(root, doc).suffix == ".ipynb"]


def left_out(root: Path) -> list[str]:
    """Return the notebooks in `chapters` that the table of contents does not name."""
    named = {f"{doc}.ipynb" for doc in notebooks(root)}
    found = sorted(path.relative_to(root).as_posix() for path in root.glob("chapters/*.ipynb"))
    return [path for path in found if path not in named]


def chapter_names(root: Path) -> list[str]:
    """Return the stems of all notebooks, the names by which the ledger knows its chapters."""
    return [Path(doc).name for doc in notebooks(root)]


def digest(paths: Iterable[Path], *words: str) -> str:
    """Return a SHA-256 over words, and over the names and bytes of files and folders."""
    total = hashlib.sha256("\0".join(words).encode())
    for top in paths:
        for path in _files(top):
            total.update(f"\0{path.relative_to(top.parent).as_posix()}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _files(top: Path) -> list[Path]:
    if top.is_file():
        return [top]
    return sorted(p for p in top.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def installed_versions() -> list[str]:
    """Return `name==version` of every package here, the interpreter's version in front."""
    found = {
        f"{dist.metadata['Name']}=={dist.version}".lower()
        for dist in importlib.metadata.distributions()
    }
    return [sys.version.split()[0], *sorted(found)]


def kernel_key(root: Path) -> str:
    """Return the part of every notebook's key that is the same for all of them.

    It changes with anything in `lowgrad_utils` (the registry of claims included), with the data
    and with the version of any installed package.
    """
    return digest([*_package(), root / "data"], RESULT_FORMAT, *installed_versions())


def _package() -> list[Path]:
    spec = importlib.util.find_spec("lowgrad_utils")
    return [Path(p) for p in spec.submodule_search_locations] if spec else []


def data_folder() -> Path:
    """Return the folder from which lowgrad_utils reads its data, without importing it.

    Raises:
        BookError: There is no lowgrad_utils here.
    """
    for package in _package():
        # The rule of lowgrad_utils.files.
        inside = package / "data"
        return inside if inside.is_dir() else package.parent / "data"
    raise BookError("lowgrad_utils is not installed here: run 'make env'")


def notebook_key(root: Path, document: str, common: str) -> str:
    """Return the key under which one notebook's results are kept.

    It changes with the code, its tags and the kernel, and not with the prose: results that the
    text around them cannot alter should not be computed again.
    """
    notebook = nbformat.read(page_source(root, document), as_version=4)
    code = [
        (cell.source, cell.metadata.get("tags", []))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return digest([], json.dumps([code, notebook.metadata.get("kernelspec", {})]), common)


def book_key(root: Path) -> str:
    """Return the key of the whole built book: pages, their results and how they are shown."""
    pages = [page_source(root, doc) for doc in toc_documents(root)]
    looks = [root / name for name in PAGE_SOURCES if (root / name).exists()]
    return digest([*pages, *looks], kernel_key(root))
