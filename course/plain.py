"""Plain values: numbers, texts, arrays, and lists and dictionaries of them, as lines of JSON.

What crosses from a submission to the checks crosses in this form and in no other. A number is a
number again on the other side, whatever class it had and whatever that class says of itself.
"""

import base64
import json
import os
import stat
from typing import Any

import numpy as np

# A million numbers are 8 MB: far more than any question asks for.
LARGEST = 1_000_000
LONGEST_TEXT = 1000
DEEPEST = 4


class NotPlain(Exception):
    """A value that is none of these; the message says what it was."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value in a form that JSON can hold.

    Args:
        value: A number, a text, an array, a torch tensor, None, or lists, tuples and
            dictionaries of these.
        depth: How deep inside another value it lies.

    Raises:
        NotPlain: It is something else, has complex numbers, or is too large or too deep.

    Example:
        >>> decode(encode({"x": np.eye(2), "y": (1, 2.5)}))
        {'x': array([[1., 0.],
               [0., 1.]]), 'y': [1, 2.5]}
    """
    if value is None:
        return None
    if depth > DEEPEST:
        raise NotPlain(f"lists in lists, deeper than {DEEPEST}")
    if isinstance(value, str):
        return {"text": value[:LONGEST_TEXT]}
    # A size or a switch arrives as what it was; a class of somebody's own arrives as a number.
    if type(value) in (bool, int) and abs(value) < 2**53:
        return {"whole": value}
    if isinstance(value, dict):
        return {"dict": [[str(k)[:100], encode(v, depth + 1)] for k, v in _few(value.items())]}
    if isinstance(value, list | tuple):
        return {"list": [encode(v, depth + 1) for v in _few(value)]}
    return _encode_array(value)


def _few(values: Any) -> list:
    values = list(values)
    if len(values) > 1000:
        raise NotPlain(f"{len(values)} values in a list; make it an array")
    return values


def _encode_array(value: Any) -> dict:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, bool | int | float | np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "buif":
        kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise NotPlain(f"a value of type {kind[:60]}, but a number, an array or a tensor is needed")
    if value.size > LARGEST:
        raise NotPlain(f"an array of {value.size} numbers, more than {LARGEST}")
    content = np.ascontiguousarray(value, dtype="<f8").tobytes()
    return {"shape": list(value.shape), "data": base64.b64encode(content).decode()}


def decode(form: Any, depth: int = 0) -> Any:
    """Return the value that `encode` was given, arrays and broken numbers in float64.

    Args:
        form: What JSON held; anything at all, since a submission can write what it likes.
        depth: How deep inside another value it lies.

    Raises:
        NotPlain: It is not what `encode` makes.
    """
    if form is None:
        return None
    try:
        if depth > DEEPEST or not isinstance(form, dict):
            raise ValueError
        if set(form) == {"text"} and isinstance(form["text"], str):
            return form["text"][:LONGEST_TEXT]
        if set(form) == {"whole"} and type(form["whole"]) in (bool, int):
            return form["whole"] if abs(form["whole"]) < 2**53 else float("nan")
        if set(form) == {"dict"}:
            return {str(key): decode(value, depth + 1) for key, value in form["dict"]}
        if set(form) == {"list"} and isinstance(form["list"], list):
            return [decode(value, depth + 1) for value in form["list"]]
        data = np.frombuffer(base64.b64decode(form["data"], validate=True), dtype="<f8")
        array = data.reshape([int(size) for size in form["shape"]]).astype(float)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise NotPlain("something that is no answer") from None
    return float(array) if array.ndim == 0 else array


def lines(path: str, largest: int) -> list[dict]:
    """Return the objects in a file of JSON lines, without the lines that are none.

    Args:
        path: The file.
        largest: The bytes that are looked at; the rest is ignored.
    """
    found = []
    try:
        # The one who wrote it may have put a link to somebody else's file here, or a pipe that
        # nobody writes to.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            text = file.read(largest) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError:
        return found
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
