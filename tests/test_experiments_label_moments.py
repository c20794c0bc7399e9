"""Second moments under other labels: sums of squares against explicit matrices."""

import pytest
import torch

from lowgrad_utils.experiments import label_moments, small_classifiers


@pytest.fixture(scope="module")
def case():
    return small_classifiers.small_classifier("mlp", "mnist", (1, 2, 3), epochs=10, width=1 / 8)


def moment(gradients, weights):
    """(1/n) sum_i sum_k weights_ik g g^T, with gradients by label (C x n x P)."""
    rows = (weights.T.sqrt()[:, :, None] * gradients).flatten(0, 1)
    return rows.T @ rows / gradients.shape[1]


@pytest.fixture(scope="module")
def explicit(case):
    """Loss gradients for every label, by label, and probabilities."""
    labels = [torch.full_like(case.labels, k) for k in range(3)]
    gradients = torch.stack([small_classifiers.loss_gradients(case, k) for k in labels])
    return gradients, case.curvature().probabilities


def test_distances_are_those_of_explicit_matrices(case, explicit):
    gradients, p = explicit
    squares = label_moments.squared_products(case.curvature().logit_derivatives())
    G = moment(gradients, p)
    stream = torch.Generator().manual_seed(0)
    q = torch.rand(p.shape, generator=stream, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(case.labels, 3).double()
    pairs = [
        (q / p, q),
        (label_moments.training_weights(p, case.labels), one_hot),
    ]
    for weights, shares in pairs:
        expected = (moment(gradients, shares) - G).norm() / G.norm()
        found = label_moments.distance_from_gauss_newton(squares, weights)
        assert found == pytest.approx(float(expected), rel=1e-9)


def test_expected_error_is_the_mean_over_draws(case):
    at = case.curvature()
    squares, p = label_moments.squared_products(at.logit_derivatives()), at.probabilities
    weights = [label_moments.sampled_weights(p, 3, seed=k) for k in range(400)]
    errors = [label_moments.distance_from_gauss_newton(squares, w) ** 2 for w in weights]
    expected = label_moments.expected_sampling_error(squares, p, 3) ** 2
    assert torch.tensor(errors).mean().item() == pytest.approx(expected, rel=0.15)


def test_sampled_weights_are_shares_over_probabilities():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64)
    weights = label_moments.sampled_weights(p, 20000)
    torch.testing.assert_close(weights * p, p, atol=0.02, rtol=0)
    torch.testing.assert_close((weights * p).sum(1), torch.ones(2).double())
    uniform = label_moments.sampled_weights(p, 20000, labels_from=torch.full_like(p, 1 / 3))
    torch.testing.assert_close(uniform * p, torch.full_like(p, 1 / 3), atol=0.02, rtol=0)


def test_the_largest_ratio_is_the_odds_and_bounds_the_matrix(case, explicit):
    gradients, p = explicit
    at = case.curvature()
    weights = label_moments.training_weights(p, case.labels)
    own = torch.nn.functional.one_hot(case.labels, 3).double()
    odds = label_moments.odds_bound(p, case.labels)
    assert odds == pytest.approx(float(((1 - (p * own).sum(1)) / (p * own).sum(1)).max()))
    assert label_moments.largest_ratio(at.logit_derivatives(), weights) == pytest.approx(odds)
    slack = odds * moment(gradients, p) - moment(gradients, own)
    assert float(torch.linalg.eigvalsh(slack)[0]) >= -1e-12


def test_smoothed_ratio_is_a_chi_square_divergence(case):
    at = case.curvature()
    ratio, trace = label_moments.smoothed_ratio(at, 0.1)
    y = torch.nn.functional.one_hot(case.labels, 3) * 0.9 + 0.1 / 3
    assert ratio == pytest.approx(float((y**2 / at.probabilities).sum(1).max() - 1))
    gradients = small_classifiers.loss_gradients(case, case.labels, 0.1)
    full = at.gauss_newton.matrix().trace()
    assert trace == pytest.approx(float(gradients.square().sum() / at.n / full))
    plain = label_moments.smoothed_ratio(at, 0.0)[0]
    assert plain == pytest.approx(label_moments.odds_bound(at.probabilities, at.labels))


def test_a_cell_measures_what_it_says():
    cell = label_moments.moments_cell(0, "mnist", 0)
    assert cell["ratio"] == pytest.approx(cell["odds"])
    assert cell["trace_ratio"] == pytest.approx(1, abs=0.2) and cell["probability"] < 0.3
    assert label_moments.moments_cells(range(1))[0] == {"epochs": 0, "dataset": "mnist", "seed": 0}
