"""Hidden tests: what they ask a submission for, and what they say of its answers.

A hidden test is a cell of an assignment's source with two functions:

    def calls(rng):             # the calls it wants made, with arguments drawn from rng
        return [call("layer_gradient", X=rng.normal(size=(5, 7)), gamma=0.5)]

    def check(calls, answers):  # an AssertionError is a failure, and its text the reason
        for wanted, G in zip(calls, answers):
            near(G, expected(**wanted.arguments), name="G")

Answers are plain values by then (`plain.py`): this process never sees the submission itself.
"""

import math
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import plain
import torch

import lowgrad_utils


@dataclass(frozen=True)
class Call:
    """Something wanted from a submission.

    Attributes:
        name: A function or a variable of the notebook.
        arguments: Arguments by name, plain values; arrays arrive as float64 tensors. None asks
            for the value of a variable.
        optional: Whether a check is made also if this call gave nothing; it then gets `Missing`.
    """

    name: str
    arguments: dict[str, Any] | None
    optional: bool = False

    def form(self) -> dict[str, Any]:
        """Return the form in which it is sent to the process that runs submissions."""
        arguments = None if self.arguments is None else plain.encode(self.arguments)
        return {"name": self.name, "arguments": arguments}


def call(name: str, **arguments: Any) -> Call:
    """Ask for what the function `name` returns for these arguments."""
    return Call(name, {key: plain.decode(plain.encode(each)) for key, each in arguments.items()})


def variable(name: str) -> Call:
    """Ask for the value of the variable `name`."""
    return Call(name, None)


@dataclass(frozen=True)
class Missing:
    """What a check gets for an optional call that gave nothing.

    Attributes:
        reason: What went wrong, in one line.
    """

    reason: str


def optional(wanted: Call) -> Call:
    """Let the check decide whether it needs this call.

    Where students choose what they answer, a test asks for every choice, and looks at one.
    """
    return replace(wanted, optional=True)


def near(answer: Any, expected: Any, *, tolerance: float = 1e-8, name: str = "the answer") -> None:
    """Check that an answer has the expected shape, and values to a relative error.

    Args:
        answer: A plain value.
        expected: A number, an array or a tensor.
        tolerance: The largest admitted |answer - expected| / |expected|, in Euclidean norm.
        name: What to call it in the reason.

    Raises:
        AssertionError: It is something else.

    Example:
        >>> near([1.0, 2.0], np.array([1.0, 2.0]))
        >>> near(np.ones(2), np.ones(3), name="r")
        Traceback (most recent call last):
        AssertionError: r has shape (2,), but (3,) is expected
    """
    expected = np.asarray(expected, dtype=float)
    value = array(answer, expected.shape, name=name)
    error = float(np.linalg.norm(value - expected)) / (float(np.linalg.norm(expected)) or 1.0)
    assert error <= tolerance, f"{name} is off by a relative {error:.1e}"


def array(answer: Any, shape: tuple[int, ...], *, name: str = "the answer") -> np.ndarray:
    """Return an answer as an array of finite numbers of a given shape.

    Raises:
        AssertionError: It is none.
    """
    if isinstance(answer, list) and all(isinstance(each, int | float) for each in answer):
        answer = np.array(answer)
    assert isinstance(answer, int | float | np.ndarray), f"{name} is no number and no array"
    value = np.asarray(answer, dtype=float)
    # A vector of one number passes for that number.
    value = value.reshape(shape) if shape == () and value.size == 1 else value
    assert value.shape == tuple(shape), f"{name} has shape {value.shape}, but {shape} is expected"
    assert np.isfinite(value).all(), f"{name} has entries that are NaN or infinite"
    return value


TOOLS = {
    "math": math,
    "np": np,
    "torch": torch,
    "lg": lowgrad_utils,
    "call": call,
    "variable": variable,
    "optional": optional,
    "Missing": Missing,
    "near": near,
    "array": array,
}


@dataclass(frozen=True)
class HiddenTest:
    """One hidden test and the calls it wants.

    Attributes:
        question: The question it belongs to.
        title: What it tests, in a few words.
        points: What it is worth.
        calls: The calls it wants.
        check: Its check.
    """

    question: str
    title: str
    points: float
    calls: list[Call]
    check: Any = field(repr=False)

    def verdict(self, answers: list[dict[str, Any]]) -> str:
        """Return why the answers are not right, in one line, empty if they are.

        Args:
            answers: For each call the object {"value": plain form} or {"problem": text}.
        """
        values = [_value(answer) for answer in answers]
        for wanted, value in zip(self.calls, values):
            if isinstance(value, Missing) and not wanted.optional:
                return value.reason
        try:
            self.check(self.calls, values)
        except AssertionError as failure:
            return " ".join(str(failure).split())[:300] or "not as expected"
        except Exception as error:
            # A test meets answers nobody thought of: those are wrong answers, not errors.
            return f"not as expected ({type(error).__name__})"
        return ""


def _value(answer: dict[str, Any]) -> Any:
    if "problem" in answer or "value" not in answer:
        return Missing(str(answer.get("problem", "no answer"))[:300])
    try:
        value = plain.decode(answer["value"])
    except plain.NotPlain as error:
        return Missing(f"it returned {error}")
    return Missing("it returned nothing") if value is None else value


def load(archive: dict[str, Any], seed: int) -> list[HiddenTest]:
    """Return the hidden tests of an assignment, with their random instances drawn.

    Args:
        archive: What `views.autograder` makes of an assignment.
        seed: Decides the instances.
    """
    tests = []
    for number, entry in enumerate(archive["hidden"]):
        space = dict(TOOLS)
        exec(compile(archive["common"], "<hidden tests>", "exec"), space)
        exec(compile(entry["code"], f"<{entry['title']}>", "exec"), space)
        rng = np.random.default_rng([seed, number, zlib.crc32(entry["title"].encode())])
        wanted = list(space["calls"](rng))
        tests.append(
            HiddenTest(entry["question"], entry["title"], entry["points"], wanted, space["check"])
        )
    return tests
