"""Put the package, and the data that a notebook reads, into the notebook itself.

What comes out needs no clone, no address and no network: folded cells in place of the one that
installs. The first ones hold an archive as text; the last one checks it, unpacks it into a folder
that goes when Python ends, and puts that behind everything else on the path.
"""

import base64
import copy
import hashlib
import io
import json
import lzma
import re
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from book_sources import BookError

ROOT = Path(__file__).resolve().parent.parent
SETUP_CELL = Path(__file__).with_name("setup_cell.py")
UNPACK_CELL = Path(__file__).with_name("unpack_cell.py")
PACKAGE = "lowgrad_utils"
#: Says, beside data that are not all there, why they are not (lowgrad_utils.files looks for it).
NOTE = "CARRIED"
# Graders and readers know by these words what is no part of the text.
TITLE = '# @title Setup, part {part} of {parts}: {what}. Run this first. {{ display-mode: "form" }}'
# Editors give up on lines that are much longer, and slow down over many more lines.
LINE = 4000
# Jupyter's server drops the connection at a message of 10 MiB, and a cell is sent in one.
PART = 1000 * LINE


class Carried(NamedTuple):
    """An archive to be carried.

    Attributes:
        text: The archive in base64.
        sha256: The hash of the archive itself.
        data: The names of the data in it.
    """

    text: str
    sha256: str
    data: tuple[str, ...]


def pack(data: Iterable[str], root: Path = ROOT) -> Carried:
    """Pack the package's sources with some of its data; the same files give the same text.

    Args:
        data: Names below the data folder, such as ``mnist_subset.npz``.
        root: The folder that holds the package and the data.

    Raises:
        BookError: One of the names is no file there.
    """
    names = tuple(sorted(set(data)))
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted((root / PACKAGE).rglob("*"))
        if path.suffix in (".py", ".toml") and "data" not in path.relative_to(root).parts
    }
    if f"{PACKAGE}/__init__.py" not in files:
        raise BookError(f"no {PACKAGE} in {root}: run this from a clone of the book")
    for name in names:
        path = root / "data" / name
        if ".." in Path(name).parts or not path.is_file():
            raise BookError(f"a notebook reads data/{name}, which is no file in {root}")
        files[f"{PACKAGE}/data/{name}"] = path.read_bytes()
    # The licences ask to go with every copy.
    files[f"{PACKAGE}/LICENSE"] = (root / "LICENSE").read_bytes()
    files[f"{PACKAGE}/data/README.md"] = (root / "data" / "README.md").read_bytes()
    files[f"{PACKAGE}/data/{NOTE}"] = "".join(f"{name}\n" for name in names).encode()
    # The archive is stored, since compression over all files finds what they have in common.
    content = lzma.compress(archive(files), preset=9)
    digest = hashlib.sha256(content).hexdigest()
    return Carried(base64.b64encode(content).decode(), digest, names)


def archive(files: dict[str, bytes]) -> bytes:
    """Return a zip file, not compressed, of which the same files give the same bytes.

    Args:
        files: What is in it, by name.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
        for name, content in files.items():
            # A fixed date: the same sources make the same bytes.
            target.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
    return buffer.getvalue()


def carry(notebook: dict[str, Any], carried: Carried, root: Path = ROOT) -> dict[str, Any]:
    """Return a notebook in which cells that carry the package replace the one that installs.

    Args:
        notebook: The notebook as nested dictionaries; it stays as it is.
        carried: What ``pack`` made.
        root: The folder that holds pyproject.toml.

    Raises:
        BookError: The notebook has no cell that installs the package.
    """
    notebook = copy.deepcopy(notebook)
    wanted = SETUP_CELL.read_text(encoding="utf8").strip()
    sources = [source_of(c) if c["cell_type"] == "code" else "" for c in notebook["cells"]]
    places = [k for k, source in enumerate(sources) if source.strip() == wanted]
    if not places:
        raise BookError("a notebook without the cell of tools/setup_cell.py cannot carry anything")
    pieces = [carried.text[k : k + PART] for k in range(0, len(carried.text), PART)]
    notebook["cells"][places[0] : places[0] + 1] = [
        *(
            _folded(f"carried-{part}", _payload(part, len(pieces), piece))
            for part, piece in enumerate(pieces, 1)
        ),
        _folded("unpack", _unpacking(len(pieces), carried, root)),
    ]
    return notebook


def source_of(cell: dict[str, Any]) -> str:
    """Return a cell's text, which files store as a string or as a list of lines."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _folded(name: str, source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": name,
        # Colab's fold, Jupyter's, and the book's.
        "metadata": {
            "cellView": "form",
            "jupyter": {"source_hidden": True},
            "tags": ["remove-cell"],
        },
        "execution_count": None,
        "outputs": [],
        "source": source,
    }


def _payload(part: int, parts: int, piece: str) -> str:
    size = f"the book's package and data, {len(piece) / 1e6:.1f} MB of text"
    title = TITLE.format(part=part, parts=parts + 1, what=size)
    lines = [piece[k : k + LINE] for k in range(0, len(piece), LINE)]
    body = "".join(f'    "{line}"\n' for line in lines)
    return f'{title}\nCARRIED = globals().get("CARRIED", {{}})\nCARRIED[{part}] = (\n{body})'


def _unpacking(parts: int, carried: Carried, root: Path) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf8"))["project"]
    names = [re.split(r"[<>=!~ \[]", each)[0] for each in project["dependencies"]]
    values = {
        "VERSION": project["version"],
        "SHA256": carried.sha256,
        "PACKAGES": " ".join(names),
    }
    text = UNPACK_CELL.read_text(encoding="utf8").strip()
    for name, value in values.items():
        text = text.replace(f'\n{name} = ""', f"\n{name} = {json.dumps(value)}")
    text = text.replace("\nPARTS = 0", f"\nPARTS = {parts}")
    what = "unpack it, until Python ends"
    return f"{TITLE.format(part=parts + 1, parts=parts + 1, what=what)}\n{text}"
