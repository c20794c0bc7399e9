"""Where the shipped data lie, and how a file is written so that it is never half there."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent


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
