"""Where the shipped data lie, and how a file is written so that it is never half there."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent
# Lies beside the data of a notebook that carries the package, with no more data than it reads.
_CARRIED = "CARRIED"


def data_folder(*names: str) -> Path:
    """Return the folder of the shipped data, or one inside it.

    In a wheel the data lie inside the package, in a clone beside it.

    Args:
        names: Folders below it.

    Example:
        >>> data_folder("grids").parts[-2:]
        ('data', 'grids')
    """
    inside = _PACKAGE / "data"
    return (inside if inside.is_dir() else _PACKAGE.parent / "data").joinpath(*names)


def shipped(path: Path) -> Path:
    """Return the path of a shipped file that is to be read.

    Args:
        path: The path.

    Raises:
        FileNotFoundError: If it is one of those that a notebook carrying the package left out.

    Example:
        >>> shipped(data_folder("mnist_subset.npz")).is_file()
        True
    """
    if not path.exists() and data_folder(_CARRIED).is_file():
        raise FileNotFoundError(
            f"{path.name} is not here: this notebook carries only the data that its own cells "
            "read; install lowgrad_utils, or open the notebook in a clone of the book, for all"
        )
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, so that an interruption leaves the old one or the new one.

    Args:
        path: The file; its folder must exist.
        content: What it shall hold.

    Raises:
        OSError: If it cannot be written; an older file is then as it was.
    """
    unfinished = path.with_name(path.name + ".partial")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
