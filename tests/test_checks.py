import inspect
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils import checks

GOOD = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def test_a_good_matrix_comes_back_itself():
    assert checks.matrix("A", GOOD, rows=2, columns=3) is GOOD
    assert checks.matrix("A", GOOD.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "sizes", "error", "message"),
    [
        ([[1.0]], {}, TypeError, r"^A is a list, .* torch\.as_tensor"),
        (np.ones((2, 2)), {}, TypeError, r"^A is a ndarray, .* torch\.as_tensor"),
        (GOOD.long(), {}, TypeError, r"^A has dtype torch\.int64, but float64 or float32"),
        (GOOD.half(), {}, TypeError, r"^A has dtype torch\.float16"),
        (GOOD[0], {}, ValueError, r"^A has shape \(3,\), but a matrix"),
        (GOOD[None], {}, ValueError, r"^A has shape \(1, 2, 3\), but a matrix"),
        (GOOD, {"rows": 3}, ValueError, r"^A has shape \(2, 3\), but 3 x any is needed"),
        (GOOD, {"columns": 2}, ValueError, r"^A has shape \(2, 3\), but any x 2 is needed"),
        (GOOD / 0, {}, ValueError, r"^A has 6 NaN or infinite entries"),
        (GOOD[:0], {}, ValueError, r"^A has shape \(0, 3\): it is empty"),
    ],
)
def test_a_bad_matrix_gets_one_line_that_names_it(value, sizes, error, message):
    with pytest.raises(error, match=message) as caught:
        checks.matrix("A", value, **sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "length", "error", "message"),
    [
        ((1.0, 2.0), None, TypeError, r"^v is a tuple"),
        (torch.tensor([1, 2]), None, TypeError, r"^v has dtype torch\.int64"),
        (GOOD, None, ValueError, r"^v has shape \(2, 3\), but a vector is needed"),
        (GOOD[0], 2, ValueError, r"^v has shape \(3,\), but a vector of length 2"),
        (torch.tensor(1.0), None, ValueError, r"^v has shape \(\), but a vector"),
        (torch.tensor([1.0, torch.nan, -torch.inf]), 3, ValueError, r"^v has 2 NaN or infinite"),
    ],
)
def test_a_bad_vector_gets_one_line_that_names_it(value, length, error, message):
    with pytest.raises(error, match=message):
        checks.vector("v", value, length=length)


@given(st.integers(0, 5), st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_a_single_bad_entry_is_found_anywhere(position, bad):
    value = GOOD.clone()
    value.view(-1)[position] = bad
    with pytest.raises(ValueError, match="A has 1 NaN or infinite entries"):
        checks.matrix("A", value)


def test_opposite_infinities_do_not_hide_each_other():
    with pytest.raises(ValueError, match="v has 2 NaN"):
        checks.vector("v", torch.tensor([torch.inf, -torch.inf]))


def test_finite_entries_whose_sum_overflows_are_admitted():
    large = torch.full((3,), 1e308, dtype=torch.float64)
    assert checks.vector("v", large) is large


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_rows_admit_rounding_and_nothing_more(dtype):
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows /= rows.norm(dim=1, keepdim=True)
    assert checks.unit_rows("W", rows) is rows
    rows[3] *= 1.001
    with pytest.raises(ValueError, match=r"^row 3 of W has length 1\.001, .*divide each row"):
        checks.unit_rows("W", rows)
    rows[1] *= 0.5
    with pytest.raises(ValueError, match=r"^row 1 of W has length 0\.5, "):
        checks.unit_rows("W", rows)


def test_nonnegative_numbers():
    assert [checks.nonnegative("nu", value) for value in (0, 2, 0.5, np.float64(1))] == [
        0,
        2,
        0.5,
        1,
    ]
    for bad in (-1, -1e-12, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^nu is .*, but a finite number of at least 0"):
            checks.nonnegative("nu", bad)


def test_positive_numbers():
    assert [checks.positive("theta", value) for value in (1, 0.5, np.float64(2))] == [1, 0.5, 2]
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^theta is .*, but a positive, finite number"):
            checks.positive("theta", bad)
    with pytest.raises(TypeError, match=r"^theta is 'two', but a positive, finite number"):
        checks.positive("theta", "two")


def test_tensors_of_one_precision():
    checks.same_dtype(X=GOOD, y=GOOD[0])
    message = r"^y has dtype torch\.float32, but X has torch\.float64; convert one .*double\(\)$"
    with pytest.raises(TypeError, match=message):
        checks.same_dtype(X=GOOD, z=GOOD, y=GOOD.float())


def test_whole_numbers():
    assert checks.positive_integer("n", 3) == checks.positive_integer("n", np.int64(3)) == 3
    assert isinstance(checks.positive_integer("n", 3.0), int)
    for bad in (0, -2, 2.5, True):
        with pytest.raises(ValueError, match=rf"^n is {bad}, but a whole number of at least 1"):
            checks.positive_integer("n", bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "seven", None, [3]])
def test_what_is_no_number_at_all_is_named_too(bad):
    with pytest.raises((TypeError, ValueError), match=r"^n is .*, but a whole number"):
        checks.positive_integer("n", bad)
    if bad is None or isinstance(bad, str | list):
        with pytest.raises((TypeError, ValueError), match=r"^nu is .*, but a finite number"):
            checks.nonnegative("nu", bad)


def test_choice_lists_what_it_admits():
    assert checks.choice("loss", "mse", ["mse", "huber"]) == "mse"
    with pytest.raises(ValueError, match=r"^loss is 'hinge', but one of mse, huber is needed"):
        checks.choice("loss", "hinge", ["mse", "huber"])
    # An unhashable or a half word is no option either.
    with pytest.raises(ValueError, match="loss is"):
        checks.choice("loss", ["mse"], {"mse": 1})
    with pytest.raises(ValueError, match="loss is 'ms'"):
        checks.choice("loss", "ms", iter(["mse"]))


def draw(seed, purpose):
    return torch.randn(4, generator=checks.random_stream(seed, purpose))


def test_streams_repeat_and_differ_by_seed_and_by_purpose():
    assert torch.equal(draw(3, "data"), draw(3, "data"))
    assert torch.equal(draw(3, "data"), draw(np.int64(3), "data"))
    assert not torch.equal(draw(3, "data"), draw(4, "data"))
    assert not torch.equal(draw(3, "data"), draw(3, "network"))


def test_fresh_seeds_change_every_stream_and_zero_changes_none(monkeypatch):
    usual = draw(3, "data")
    monkeypatch.setenv(checks.FRESH_SEEDS_VARIABLE, "0")
    assert torch.equal(draw(3, "data"), usual)
    seen = [usual]
    for k in "12":
        monkeypatch.setenv(checks.FRESH_SEEDS_VARIABLE, k)
        assert torch.equal(draw(3, "data"), draw(3, "data"))
        assert not any(torch.equal(draw(3, "data"), other) for other in seen)
        seen.append(draw(3, "data"))
    monkeypatch.setenv(checks.FRESH_SEEDS_VARIABLE, "-1")
    with pytest.raises(ValueError, match=r"^LOWGRAD_FRESH_SEEDS is '-1', but an integer >= 0"):
        draw(3, "data")


def test_a_generator_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(5)
    assert checks.random_stream(generator, "data") is generator
    assert not torch.equal(draw(generator, "data"), draw(generator, "data"))


def test_streams_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    draw(3, "data")
    assert torch.equal(before, torch.random.get_rng_state())


def test_bad_seeds():
    for bad in (1.0, "1", None, True):
        with pytest.raises(TypeError, match=r"^seed is .*, but an integer or a torch\.Generator"):
            checks.random_stream(bad, "data")
    with pytest.raises(ValueError, match=r"^seed is -1, but an integer of at least 0"):
        checks.random_stream(-1, "data")


def test_the_warning_is_a_user_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="beyond"):
            warnings.warn("beyond the paper", checks.AssumptionWarning, stacklevel=1)


def test_every_public_check_is_documented():
    for name, function in inspect.getmembers(checks, inspect.isfunction):
        if function.__module__ == checks.__name__ and not name.startswith("_"):
            assert "Args:" in function.__doc__ and "Raises:" in function.__doc__, name
