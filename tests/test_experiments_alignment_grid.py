"""Tests of Assumption 6's grid: the statistic by autograd, the derived law by integration."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats

from lowgrad_utils.experiments import alignment_grid as alignment
from lowgrad_utils.experiments.alignment_grid import Case
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork
from lowgrad_utils.spiked_data import binary_labels, sample_spiked_data, sample_targets


def test_there_are_192_scenarios_and_each_has_a_column():
    columns = alignment.alignments(20, 0.125, 0)
    assert len({(*case, nu) for case in alignment.CASES for nu in alignment.NUS}) == 192
    assert list(columns) == [c.column for c in (*alignment.CASES, *alignment.ALIGNED_CASES)]


@pytest.mark.parametrize(
    "case",
    [
        Case("relu", "single-index", "ntk", "mse"),
        Case("tanh", "triple-index-even", "mean-field", "logistic"),
        Case("softplus", alignment.ALONG_Q, "ntk", "logistic"),
    ],
)
def test_the_statistic_is_that_of_the_loss_s_derivative(case):
    d, nu, seed = 40, 0.25, 3
    data = sample_spiked_data(30, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(
        d, 50, activation=case.activation, scaling=case.scaling, seed=seed
    )
    along = data.q if case.target == alignment.ALONG_Q else None
    model = "single-index" if along is not None else case.target
    y = sample_targets(data.X, model, along=along, seed=seed).y
    y = binary_labels(y) if case.loss == "logistic" else y
    f = network(data.X).detach().requires_grad_()
    LOSSES[case.loss].value(f, y).sum().backward()
    r = f.grad.numpy()
    expected = data.z.numpy() @ r / (math.sqrt(30) * np.linalg.norm(r))
    measured = alignment.alignments(d, nu, seed)[case.column]
    assert measured == pytest.approx(expected, rel=1e-10)


def test_a_cell_averages_its_draws():
    cell = alignment.alignment_cell(20, 0.25, 3, 2)
    draws = [alignment.alignments(20, 0.25, seed) for seed in (6, 7, 8)]
    for column in draws[0]:
        square = sum(draw[column] ** 2 for draw in draws) / 3
        assert cell[column] == pytest.approx(math.sqrt(square), abs=1e-6)
    ratios = [
        abs(draw[case.column]) / alignment.predicted_alignment(case, 20, 0.25)
        for draw in draws
        for case in alignment.CASES
    ]
    assert cell["small"] == pytest.approx(sum(x < 0.1 for x in ratios) / 144, abs=1e-6)
    assert cell["large"] == pytest.approx(sum(x > 3 for x in ratios) / 144, abs=1e-6)
    assert 0 < cell["small"] < 1


def test_a_cell_counts_large_values_along_q_against_a_random_direction():
    cell = alignment.alignment_cell(100, 0.25, 2, 1)
    ratios = [
        abs(alignment.alignments(100, 0.25, seed)[case.column])
        / alignment.predicted_alignment(case._replace(target="single-index"), 100, 0.25)
        for seed in (2, 3)
        for case in alignment.ALIGNED_CASES
    ]
    assert min(ratios) < 3 < max(ratios)
    assert sum(2 < x < 3 for x in ratios)
    assert cell["large_along_q"] == pytest.approx(sum(x > 3 for x in ratios) / 8, abs=1e-6)
    assert cell["small_along_q"] == 0


def normal_mean(function):
    return integrate.quad(lambda g: function(g) * stats.norm.pdf(g), -9, 9, limit=200)[0]


def logistic(t):
    return 1 / (1 + math.exp(-t))


SLOPE = normal_mean(lambda g: logistic(g) * (1 - logistic(g)))
SQUARE = normal_mean(lambda g: logistic(g) ** 2) + 0.01


def test_kappa_of_the_targets_alone():
    mse = Case("relu", "single-index", "mean-field", "mse")
    assert alignment.signal_strength(mse) == pytest.approx(SLOPE**2 / SQUARE, rel=0.02)
    # E[g y] for labels y = sign(logistic(g) + 0.1 noise - 1/2), by Stein the mean slope.
    step = normal_mean(lambda g: g * (2 * stats.norm.cdf((logistic(g) - 0.5) / 0.1) - 1))
    labels = alignment.signal_strength(mse._replace(loss="logistic"))
    assert labels == pytest.approx(step**2, rel=0.02)
    # Three directions: relu, logistic and tanh.
    slopes = [0.5, SLOPE, normal_mean(lambda g: 1 - math.tanh(g) ** 2)]
    mean = normal_mean(lambda g: max(g, 0)) + 0.5
    variances = [
        0.5 - 1 / (2 * math.pi),
        SQUARE - 0.26,
        normal_mean(lambda g: math.tanh(g) ** 2),
    ]
    expected = sum(s**2 for s in slopes) / (sum(variances) + 0.01 + mean**2)
    triple = alignment.signal_strength(mse._replace(target="triple-index"))
    assert triple == pytest.approx(expected, rel=0.02)


def test_kappa_with_the_network_s_output():
    # ReLU: f has mean b ~ N(0, (E relu)^2) over the examples and variance 1/2 - (E relu)^2.
    mean = 1 / math.sqrt(2 * math.pi)
    share = normal_mean(
        lambda g: (SLOPE**2 + 0.25) / (SQUARE - 0.25 + 0.5 - mean**2 + (mean * g - 0.5) ** 2)
    )
    case = Case("relu", "single-index", "ntk", "mse")
    assert alignment.signal_strength(case) == pytest.approx(share, rel=0.02)


def test_kappa_averages_over_the_mean_output_and_follows_the_spread():
    # Softplus has a large mean, E softplus = 0.81, and a spread of 1.5 is not that of the limit.
    s = 1.5
    mean = normal_mean(lambda g: math.log1p(math.exp(s * g)))
    variance = normal_mean(lambda g: math.log1p(math.exp(s * g)) ** 2) - mean**2
    slope = normal_mean(lambda g: logistic(s * g) * (1 - logistic(s * g)))
    noise = normal_mean(lambda g: logistic(s * g) ** 2) + 0.01 - 0.25
    expected = normal_mean(lambda g: (slope**2 + 0.25) / (noise + variance + (mean * g - 0.5) ** 2))
    case = Case("softplus", "single-index", "ntk", "mse")
    assert alignment.signal_strength(case, spread=s) == pytest.approx(expected, rel=0.02)
    alone = alignment.signal_strength(case._replace(scaling="mean-field"), spread=s)
    assert alone == pytest.approx(slope**2 / (noise + 0.25), rel=0.03)


def test_kappa_of_logistic_residues_by_simulation():
    # tanh: f is N(0, v) over examples with no mean; an even target adds no slope of its own.
    rng = np.random.default_rng(0)
    f = math.sqrt(normal_mean(lambda g: math.tanh(g) ** 2)) * rng.standard_normal(400_000)
    mu = normal_mean(lambda g: 1 - math.tanh(g) ** 2)
    slope = mu * (1 / (1 + np.cosh(f))).mean()  # d/df of tanh(f/2) is 1 / (1 + cosh f)
    expected = slope**2 / (1 + (np.tanh(f / 2) ** 2).mean())
    case = Case("tanh", "triple-index-even", "ntk", "logistic")
    assert alignment.signal_strength(case) == pytest.approx(expected, rel=0.02)


def test_kappa_is_zero_where_nothing_is_shared():
    for loss in alignment.LOSS_NAMES:
        case = Case("elu", "triple-index-even", "mean-field", loss)
        assert alignment.signal_strength(case) < 1e-4
        assert alignment.limit_exponent(case, 0.25) == 1
        assert alignment.limit_exponent(case._replace(scaling="ntk"), 0.25) == 0.5


def test_the_prediction_joins_chance_and_the_shared_direction():
    case = Case("softplus", "single-index", "ntk", "mse")
    n, d, nu = 1500, 2000, 0.25
    kappa = alignment.signal_strength(case, spread=math.sqrt(1 + n ** (2 * nu) / d))
    expected = math.sqrt(1 / n + kappa * n ** (2 * nu) / d)
    assert alignment.predicted_alignment(case, d, nu) == pytest.approx(expected)


@pytest.fixture
def grid():
    """Return a grid whose root mean squares are twice what is derived, at every size."""
    rows = [
        {"d": d, "nu": nu, "seed": seed}
        | {case.column: 2 * alignment.predicted_alignment(case, d, nu) for case in alignment.CASES}
        for d in (100, 200, 400)
        for nu in (0.0, 0.25)
        for seed in (0, 1)
    ]
    return pd.DataFrame(rows)


def test_exponents_and_ratios_of_a_known_grid(grid):
    table = alignment.exponents(grid)
    assert len(table) == 96
    assert np.allclose(table.beta, table.predicted)
    assert np.allclose(table.low, table.beta)
    assert np.allclose(table[table.nu == 0].predicted, 1, atol=0.01)
    ratios = alignment.rms_ratios(grid)
    assert len(ratios) == 48 * 6
    assert np.allclose(ratios.ratio, 2)


def test_intervals_of_exponents_lie_about_them(grid):
    scatter = np.random.default_rng(0).uniform(0.8, 1.2, len(grid))
    columns = [case.column for case in alignment.CASES]
    grid[columns] = grid[columns].mul(scatter, axis=0)
    table = alignment.exponents(grid)
    assert (table.low < table.beta).all()
    assert (table.beta < table.high).all()


def test_a_target_along_q_is_compared_with_a_random_direction():
    case = alignment.ALIGNED_CASES[0]
    assert case.target == alignment.ALONG_Q
    assert alignment.random_direction(case).target == "single-index"
    assert alignment.random_direction(alignment.CASES[0]) == alignment.CASES[0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("relu", "double-index", "ntk", "mse"), "target is 'double-index'"),
        (Case("step", "single-index", "ntk", "mse"), "activation is 'step'"),
        (Case("relu", "single-index", "ntk", "huber"), "loss is 'huber'"),
        (Case("relu", "single-index", "lazy", "mse"), "scaling is 'lazy'"),
    ],
)
def test_unknown_names_are_refused(case, message):
    with pytest.raises(ValueError, match=message):
        alignment.signal_strength(case)


def test_numbers_out_of_range_are_refused():
    case = alignment.CASES[0]
    with pytest.raises(ValueError, match="spread is 0"):
        alignment.signal_strength(case, spread=0.0)
    with pytest.raises(ValueError, match="nu is -1"):
        alignment.predicted_alignment(case, 100, -1.0)
    with pytest.raises(ValueError, match="draws is 0"):
        alignment.alignment_cell(20, 0.25, 0, 0)
