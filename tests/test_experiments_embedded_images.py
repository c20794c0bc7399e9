import inspect
import math

import numpy as np
import pytest
import scipy.stats
import torch

from lowgrad_utils import datasets
from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.experiments import embedded_images
from lowgrad_utils.experiments.embedded_images import (
    covariance_eigenvalues,
    decay_exponent,
    feature_scenario,
    follow_penalty,
    turning_strength,
)
from lowgrad_utils.gradients import RankOne
from lowgrad_utils.regularisation import PenaltyGradient, split_jacobian_penalty

DOUBLE = torch.float64


def small_features(width=24, count=60):
    """Features with a mean, a leading direction and classes that they tell apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, width, generator=generator) * torch.linspace(0.2, 2, width)
    labels = torch.arange(count) % 10
    x[:, 0] += 0.3 * labels
    # The leading direction knows nothing of the classes: each has three examples of either kind.
    x[:, 1] += 3 * (torch.arange(count) // 10 % 2)
    return datasets.FeatureData("small", "files", "none", x.half(), labels, x[:10].half(), labels)


SMALL = small_features()


def small_case(**changes):
    settings = {"n": 18, "m": 30, "centred": True, "centred_targets": True, "seed": 3}
    return feature_scenario(SMALL, **{**settings, "activation": "sigmoid", **changes})


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7)])
def test_eigenvalues_are_squared_singular_values(shape):
    X = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    expected = torch.linalg.svdvals(X) ** 2 / shape[0]
    torch.testing.assert_close(covariance_eigenvalues(X), expected)


def test_decay_is_the_slope_of_a_regression():
    generator = np.random.default_rng(0)
    eigenvalues = np.sort(generator.lognormal(size=80))[::-1].copy()
    for first, last in ((1, 80), (2, 10), (10, 60)):
        ranks = np.log(np.arange(first, last + 1))
        fit = scipy.stats.linregress(ranks, np.log(eigenvalues[first - 1 : last]))
        assert decay_exponent(torch.tensor(eigenvalues), first, last) == pytest.approx(-fit.slope)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (0, 3, "first is 0"),
        (3, 3, "first is 3 and last is 3, but 1 <= first < last <= 5"),
        (2, 6, "first is 2 and last is 6"),
        (1, 2.5, "last is 2.5"),
        (3, 5, "an eigenvalue of rank 3 to 5 is not positive"),
    ],
)
def test_ranks_that_do_not_fit(first, last, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        decay_exponent(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0]), first, last)


@pytest.mark.parametrize("unit_rows", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("centred_targets", [False, True])
def test_a_scenario_prepares_features_and_targets(unit_rows, centred, centred_targets):
    case = small_case(unit_rows=unit_rows, centred=centred, centred_targets=centred_targets)
    X, labels = SMALL.matrix(n=18, seed=3)
    X, y = X.numpy(), labels.numpy().astype(float)
    if unit_rows:
        X = X / np.sqrt((X**2).sum(axis=1))[:, None]
    X = X - centred * X.mean(axis=0)
    y = y - centred_targets * y.mean()
    assert case.data.X.numpy() == pytest.approx(X)
    q = torch.tensor(np.linalg.svd(X)[2][0])
    assert cosine(case.data.q, q) == pytest.approx(1) and case.data.q.sum() >= 0
    outputs = case.network(case.data.X).numpy()
    assert case.residue.numpy() == pytest.approx(outputs - y)


def total_gradient(case, y, strength):
    """The gradient of loss and penalty by automatic differentiation, d x m."""
    network, X = case.network, case.data.X
    W = network.W.clone().requires_grad_()
    preactivations = X @ W.T
    outputs = network.gamma * network.sigma.value(preactivations) @ network.a
    loss = (outputs - y).square().mean() / 2
    slopes = network.sigma.derivative(preactivations)
    lengths = X.square().sum(dim=1)
    jacobians = network.gamma**2 * lengths * slopes.square().sum(dim=1)
    (loss + strength * jacobians.mean() / 2).backward()
    return W.grad.T


@pytest.mark.parametrize("strength", [0.0, 0.3, 40.0])
def test_the_penalised_gradient_is_that_of_loss_and_penalty(strength):
    case = small_case()
    y = case.network(case.data.X) - case.residue
    U, s, _ = torch.linalg.svd(total_gradient(case, y, strength))
    (row,) = follow_penalty(case, [strength])
    assert row["strength"] == strength
    assert [row["s1"], row["s2"]] == pytest.approx(s[:2].tolist())
    assert row["u1_q"] == pytest.approx(cosine(U[:, 0], case.data.q))
    direction = case.data.X_B.T @ case.residue
    assert row["u1_residue"] == pytest.approx(cosine(U[:, 0], direction))


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match=r"^strength is -1"):
        follow_penalty(small_case(), [-1])


def test_shuffling_changes_who_has_which_target_only():
    plain, shuffled = (small_case(shuffled=flag) for flag in (False, True))
    assert torch.equal(plain.data.X, shuffled.data.X)
    assert torch.equal(plain.network.W, shuffled.network.W)
    targets = [case.network(case.data.X) - case.residue for case in (plain, shuffled)]
    assert not torch.allclose(*targets)
    torch.testing.assert_close(*(y.sort().values for y in targets))


def test_sizes_are_the_papers_proportions_unless_given():
    case = feature_scenario(SMALL)
    assert (case.data.n, case.data.d, case.network.m) == (18, 24, 30)
    assert (case.network.activation, case.network.scaling) == ("relu", "ntk")
    case = feature_scenario(SMALL, n=7, m=5, scaling="mean-field")
    assert (case.data.n, case.network.m, case.network.gamma) == (7, 5, 1 / 5)


def test_pixels_go_the_same_way():
    images = datasets.load("cifar10")
    case = feature_scenario(images, n=12, m=5, seed=2)
    assert torch.equal(case.data.X, images.matrix(n=12, seed=2)[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
def test_the_turn_separates_strengths(activation, seed):
    # All examples, so that the targets are orthogonal to z.
    case = small_case(activation=activation, n=60, seed=seed)
    turn = turning_strength(case, precision=0.01)
    assert 0 < turn < math.inf
    grid = np.geomspace(turn / 5, turn * 5, 41)
    rows = follow_penalty(case, grid)
    turned = [row["u1_q"] >= row["u1_residue"] for row in rows]
    below = [t for t, strength in zip(turned, grid) if strength < turn / 1.02]
    above = [t for t, strength in zip(turned, grid) if strength > turn * 1.0001]
    assert len(below) == len(above) == 20 and not any(below) and all(above)
    # The turn lies between the strength found and that strength over 1 + precision.
    before, after = follow_penalty(case, [turn / 1.0101, turn])
    assert before["u1_q"] < before["u1_residue"] and after["u1_q"] >= after["u1_residue"]


def test_no_turn_and_an_earlier_turn():
    with pytest.warns(AssumptionWarning, match="constant between jumps"):
        assert turning_strength(small_case(activation="relu")) == math.inf
    # With their means the features follow q from the start.
    assert turning_strength(small_case(centred=False, centred_targets=False)) == 0
    case = small_case()
    along_residue = case.parts.S1.matrix() * 1e3
    stuck = PenaltyGradient(along_residue, RankOne(case.data.q, case.parts.S1.v))
    assert turning_strength(case, stuck) == math.inf


def test_a_penalty_at_hand_is_the_one_that_is_used():
    case = small_case()
    penalty = split_jacobian_penalty(case.data, case.network)
    assert follow_penalty(case, [2.0], penalty) == follow_penalty(case, [2.0])
    double = split_jacobian_penalty(case.data, case.network, strength=2.0)
    assert follow_penalty(case, [1.0], double)[0]["s1"] == pytest.approx(
        follow_penalty(case, [2.0], penalty)[0]["s1"]
    )
    assert turning_strength(case, double) == pytest.approx(turning_strength(case, penalty) / 2)


@pytest.mark.parametrize("precision", [0, -1.0, math.nan])
def test_a_precision_is_positive(precision):
    with pytest.raises(ValueError, match=r"^precision is"):
        turning_strength(small_case(), precision=precision)


def test_cells_are_distinct_and_fit_their_functions():
    for function, cells in (
        (embedded_images.feature_cell, embedded_images.feature_cells()),
        (embedded_images.penalty_cell, embedded_images.penalty_cells()),
    ):
        assert len({tuple(cell.items()) for cell in cells}) == len(cells)
        assert all(list(cell) == list(inspect.signature(function).parameters) for cell in cells)
    with pytest.raises(ValueError, match=r"^examples is 'mnist'"):
        embedded_images.feature_cell("mnist", "relu", True, True, False, False, 0)


def test_a_cell_measures_the_scenario_at_its_sizes(monkeypatch):
    monkeypatch.setitem(embedded_images._SIZES, "cifar10-embeddings", (18, 30))
    monkeypatch.setattr(embedded_images, "_load", lambda name: SMALL)
    cell = embedded_images.feature_cell(
        "cifar10-embeddings", "tanh", True, False, False, True, seed=4
    )
    case = small_case(activation="tanh", centred_targets=False, shuffled=True, seed=4)
    assert cell["s1"] == pytest.approx(float(torch.linalg.svdvals(case.parts.G)[0]))
    zeta = float((case.data.X @ case.data.q).norm()) / 18**0.5
    assert cell["nu_raw"] == pytest.approx(math.log(zeta) / math.log(18))


def test_a_penalty_cell_measures_before_and_after(monkeypatch):
    monkeypatch.setitem(embedded_images._SIZES, "cifar10-embeddings", (18, 30))
    monkeypatch.setattr(embedded_images, "_load", lambda name: SMALL)
    cell = embedded_images.penalty_cell("tanh", "ntk", True, False, seed=4)
    case = small_case(activation="tanh", seed=4)
    after = total_gradient(case, case.network(case.data.X) - case.residue, 1e5)
    assert cell["s1_after"] == pytest.approx(float(torch.linalg.svdvals(after)[0]))
    assert cell["u1_q_after"] == pytest.approx(cosine(torch.linalg.svd(after).U[:, 0], case.data.q))
    assert cell["s1_before"] == pytest.approx(float(torch.linalg.svdvals(case.parts.G)[0]))
    assert cell["S1"] == pytest.approx(case.parts.S1.norm)
    assert cell["turning"] == pytest.approx(turning_strength(case))
    pieces = split_jacobian_penalty(case.data, case.network)
    assert cell["S3"] == pytest.approx(float(torch.linalg.svdvals(pieces.S3.matrix())[0]))
    assert cell["E2"] == pytest.approx(float(torch.linalg.svdvals(pieces.E2)[0]))
