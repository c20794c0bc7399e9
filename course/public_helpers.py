"""The start of every file of public tests: copied there, so that it stands alone."""

import math  # noqa: F401 (for the tests that follow)

import numpy as np
import torch


def ran(hint, function, *arguments):
    """Return what the function gives; if it raises an error, stop with that and a hint."""
    assert function is not None, "the function is not defined: run the cell of the answer first"
    try:
        return function(*arguments)
    except Exception as error:
        raise AssertionError(f"it raised {type(error).__name__}: {error}. {hint}") from None


def shaped(name, value, *shape):
    """Stop with a helpful line unless `value` is a tensor of finite numbers of this shape."""
    assert value is not None, (
        f"{name} is None: does the function end with 'return ...', or is it still the gap?"
    )
    assert value is not ..., f"{name} is still the gap: write your code in place of '...'"
    assert isinstance(value, torch.Tensor), f"{name} is a {type(value).__name__}, not a tensor"
    found = tuple(value.shape)
    hint = "; it looks transposed" if found == shape[::-1] and found != shape else ""
    assert found == shape, f"{name} has shape {found}, but {shape} is needed{hint}"
    assert torch.isfinite(value).all(), f"{name} has NaN or infinite entries"


def tensor(value):
    """Return any array or list of numbers as a tensor; torch itself refuses reversed arrays."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value).copy())


def close(name, value, expected, hint):
    """Stop with a helpful line unless `value` agrees with `expected` to seven digits."""
    value, expected = tensor(value).double(), tensor(expected).double()
    error = float((value - expected).norm() / (expected.norm() + 1e-300))
    assert error < 1e-7, f"{name} is off by a relative {error:.1e}. {hint}"
