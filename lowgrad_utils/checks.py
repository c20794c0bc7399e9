"""Argument checks shared by the public functions: one line, naming the argument and the remedy."""

import math
import os
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

#: The environment variable that exchanges every stream of random numbers for a fresh one.
FRESH_SEEDS_VARIABLE = "LOWGRAD_FRESH_SEEDS"


class AssumptionWarning(UserWarning):
    """Something legal that leaves an assumption of the paper, so that its theorems say nothing."""


def matrix(
    name: str, value: Tensor, *, rows: int | None = None, columns: int | None = None
) -> Tensor:
    """Return ``value`` if it is a finite floating-point matrix of the wanted size.

    Args:
        name: The argument's name, for the message.
        value: The tensor to check.
        rows: The number of rows needed, or None for any.
        columns: The number of columns needed, or None for any.

    Raises:
        TypeError: If ``value`` is not a floating-point tensor.
        ValueError: If it has the wrong number of dimensions, the wrong size, or NaN or infinity.
    """
    _floating(name, value)
    if value.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but a matrix is needed")
    wanted = (rows, columns)
    if any(w is not None and w != size for w, size in zip(wanted, value.shape)):
        shown = " x ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {shown} is needed")
    return _finite(name, value)


def vector(name: str, value: Tensor, *, length: int | None = None) -> Tensor:
    """Return ``value`` if it is a finite floating-point vector of the wanted length.

    Args:
        name: The argument's name, for the message.
        value: The tensor to check.
        length: The length needed, or None for any.

    Raises:
        TypeError: If ``value`` is not a floating-point tensor.
        ValueError: If it is not a vector of this length, or has NaN or infinity.
    """
    _floating(name, value)
    if value.ndim != 1 or (length is not None and len(value) != length):
        wanted = "a vector" if length is None else f"a vector of length {length}"
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {wanted} is needed")
    return _finite(name, value)


def unit_rows(name: str, value: Tensor) -> Tensor:
    """Return the matrix ``value`` if each row has length 1 (Assumption 3.2 of the paper).

    Args:
        name: The argument's name, for the message.
        value: The matrix to check.

    Raises:
        ValueError: If a row's length is off by more than rounding; names the worst row.
    """
    lengths = torch.linalg.vector_norm(value, dim=1)
    off = (lengths - 1).abs()
    worst = int(off.argmax())
    if off[worst] > 1e3 * torch.finfo(value.dtype).eps:
        raise ValueError(
            f"row {worst} of {name} has length {lengths[worst]:.6g}, off by {off[worst]:.1e}, but "
            "rows of unit length are needed; divide each row by its norm, or call normalise_rows"
        )
    return value


def same_dtype(**tensors: Tensor) -> None:
    """Check that all tensors have the dtype of the first; each is named by its keyword.

    Args:
        **tensors: The tensors.

    Raises:
        TypeError: If one differs.
    """
    (first, reference), *others = tensors.items()
    for name, value in others:
        if value.dtype != reference.dtype:
            raise TypeError(
                f"{name} has dtype {value.dtype}, but {first} has {reference.dtype}; "
                "convert one of them, as in x.double()"
            )


def nonnegative(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and at least zero.

    Args:
        name: The argument's name, for the message.
        value: The number to check.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is negative, NaN or infinite.
    """
    return _finite_number(name, value, lambda x: x >= 0, "a finite number of at least 0 is needed")


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and greater than zero.

    Args:
        name: The argument's name, for the message.
        value: The number to check.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is zero, negative, NaN or infinite.
    """
    return _finite_number(name, value, lambda x: x > 0, "a positive, finite number is needed")


def positive_integer(name: str, value: int) -> int:
    """Return ``value`` as an int if it is a whole number of at least one.

    Args:
        name: The argument's name, for the message.
        value: The number to check.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not whole, or less than one.
    """
    wanted = "a whole number of at least 1 is needed"
    number = _number(name, value, wanted)
    if isinstance(value, bool) or not number.is_integer() or number < 1:
        raise ValueError(f"{name} is {value!r}, but {wanted}")
    return int(number)


def choice(name: str, value: str, options: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``options``.

    Args:
        name: The argument's name, for the message.
        value: The word to check.
        options: The words admitted.

    Raises:
        ValueError: If it is none of them; lists them all.
    """
    known = list(options)
    if value not in known:
        raise ValueError(f"{name} is {value!r}, but one of {', '.join(known)} is needed")
    return value


def random_stream(seed: int | torch.Generator, purpose: str) -> torch.Generator:
    """Return a generator for one purpose: the given one, or a new one from (seed, purpose).

    Data and weights drawn with the same integer seed must be independent. Plain
    ``manual_seed(seed)`` in both places would hand them the same Gaussians, and W would be X.
    With the environment variable ``LOWGRAD_FRESH_SEEDS`` set to k > 0, every integer seed gives
    another stream, the k-th set of fresh ones: so a whole chapter is repeated on other draws.

    Args:
        seed: An integer of at least 0, or a generator to go on with.
        purpose: What is drawn, such as ``"data"``.

    Raises:
        ValueError: If the integer is negative.
        TypeError: If ``seed`` is neither.
    """
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {seed!r}, but an integer or a torch.Generator is needed")
    if seed < 0:
        raise ValueError(f"seed is {seed}, but an integer of at least 0 is needed")
    words = [int(seed), zlib.crc32(purpose.encode())]
    fresh = _fresh_seeds()
    state = np.random.SeedSequence([*words, fresh] if fresh else words)
    return torch.Generator().manual_seed(int(state.generate_state(1, np.uint64)[0] >> 1))


def _fresh_seeds() -> int:
    text = os.environ.get(FRESH_SEEDS_VARIABLE, "0")
    if not text.isdecimal():
        raise ValueError(f"{FRESH_SEEDS_VARIABLE} is {text!r}, but an integer >= 0 is needed")
    return int(text)


def _number(name: str, value: float, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} is {repr(value)[:60]}, but {wanted}") from None


def _finite_number(name: str, value: float, admits: Callable[[float], bool], wanted: str) -> float:
    number = _number(name, value, wanted)
    if not (math.isfinite(number) and admits(number)):
        raise ValueError(f"{name} is {number:g}, but {wanted}")
    return number


def _floating(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}, but a torch tensor is needed; "
            "torch.as_tensor converts arrays and lists"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} has dtype {value.dtype}, but float64 or float32 is needed")


def _finite(name: str, value: Tensor) -> Tensor:
    if value.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: it is empty, entries are needed")
    # The sum is finite unless an entry is not (or the sum overflows): one pass, no mask in memory.
    if not torch.isfinite(value.sum()):
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise ValueError(f"{name} has {bad} NaN or infinite entries; remove or repair them")
    return value
