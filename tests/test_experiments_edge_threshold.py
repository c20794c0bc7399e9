import pytest
import torch
from torch import nn

from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import orthonormal_columns
from lowgrad_utils.experiments import edge_threshold
from lowgrad_utils.three_levels import explicit_terms


@pytest.fixture
def small():
    """A smooth network with 4 inputs and 3 classes, and 21 images in classes of 4, 10 and 7."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, x, torch.repeat_interleave(torch.arange(3), torch.tensor([4, 10, 7]))


def _directions(model, count, seed=2):
    size = sum(p.numel() for p in model.parameters())
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).double()


def test_logit_changes_are_finite_differences(small):
    model, x, _ = small
    vectors = _directions(model, 2)
    changes = edge_threshold.logit_changes(model, x, vectors, chunk=8)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for vector, change in zip(vectors, changes):
        ends = []
        for step in (1e-5, -1e-5):
            nn.utils.vector_to_parameters(theta + step * vector, model.parameters())
            ends.append(model(x).detach())
        torch.testing.assert_close(change, (ends[0] - ends[1]) / 2e-5, rtol=1e-7, atol=1e-8)


def test_weighted_changes_are_products_with_logit_derivatives(small):
    model, x, y = small
    vectors = _directions(model, 3)
    curvature = LossCurvature(model, (x, y))
    expected = torch.einsum("ncp,kp->knc", curvature.logit_derivatives(), vectors)
    p = model(x).softmax(1).detach()
    changes = edge_threshold.logit_changes(model, x, vectors)
    torch.testing.assert_close(edge_threshold.weighted(changes, p), expected)
    # A change of all logits alike is no change of the answer.
    shifted = edge_threshold.weighted(edge_threshold.centred(changes), p)
    torch.testing.assert_close(shifted, expected)


def test_logit_changes_refuse_vectors_of_another_length(small):
    model, x, _ = small
    with pytest.raises(ValueError, match="vectors"):
        edge_threshold.logit_changes(model, x, torch.zeros(2, 5, dtype=torch.float64))


def test_features_keep_an_image_in_one_row():
    changes = torch.arange(12.0).reshape(2, 3, 2)
    rows = edge_threshold.as_features(changes)
    assert rows[1].tolist() == [2, 3, 8, 9]


def test_share_between_is_one_minus_the_share_within():
    stream = torch.Generator().manual_seed(0)
    features = torch.randn(30, 4, generator=stream).double()
    labels = torch.arange(30) % 3
    features += labels[:, None]
    within = 0.0
    for label in range(3):
        own = features[labels == label]
        within += float(((own - own.mean(0)) ** 2).sum())
    total = float(((features - features.mean(0)) ** 2).sum())
    assert edge_threshold.share_between(features, labels) == pytest.approx(1 - within / total)


def test_predictions_find_classes_that_are_there_and_none_that_are_not():
    stream = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    noise = torch.randn(600, 5, generator=stream).double()
    means = 6 * torch.eye(3, 5, dtype=torch.float64)[labels]
    apart = edge_threshold.predictions(noise[:300] + means, labels, noise[300:] + means)
    alike = edge_threshold.predictions(noise[:300], labels, noise[300:])
    assert set(apart) == {"nearest", "linear"}
    for name in apart:
        assert (apart[name] == labels).double().mean() > 0.99
        assert (alike[name] == labels).double().mean() < 0.45


def test_thresholds_count_what_lies_above():
    values = torch.tensor([9.0, 8.0, 1.0, 0.9])
    assert edge_threshold.selected(values, 0.95) == 3
    assert edge_threshold.largest_gap(values) == 2
    with pytest.raises(ValueError, match="two positive"):
        edge_threshold.largest_gap(torch.tensor([1.0, 0.0]))


def test_isotropic_edge_is_where_isotropic_noise_ends():
    vectors = torch.randn(600, 1200, generator=torch.Generator().manual_seed(0)).double()
    gram = vectors @ vectors.T / 600
    edge = edge_threshold.isotropic_edge(float(gram.diagonal().sum()), 1200, 600)
    assert float(torch.linalg.eigvalsh(gram)[-1]) == pytest.approx(edge, rel=0.02)


def test_edges_are_those_of_the_explicit_terms(small):
    model, x, y = small
    curvature = LossCurvature(model, (x, y))
    terms = explicit_terms(curvature.logit_derivatives(), curvature.labels)
    values = torch.linalg.eigvalsh(terms["G"]).flip(0)[:8]
    # All directions in turn, so that the trace is exact.
    found = edge_threshold.edges(curvature, values, torch.eye(curvature.size).double())
    within = float(torch.linalg.eigvalsh(terms["G3"])[-1])
    assert found["within_edge"] == pytest.approx(within, rel=1e-3)
    assert found["within_trace"] == pytest.approx(float(terms["G3"].trace()))
    assert found["by_within"] == int((values > within).sum())


def test_random_directions_are_unit_vectors_of_their_seed():
    first = edge_threshold.random_directions(3, 50, 0, torch.float32)
    assert torch.equal(first, edge_threshold.random_directions(3, 50, 0, torch.float32))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(3))
    assert not torch.equal(first, edge_threshold.random_directions(3, 50, 1, torch.float32))


def test_judge_finds_classes_only_where_labels_follow_the_images(small):
    model, x, y = small
    x = x + 3 * torch.eye(3, 4, dtype=torch.float64)[y]
    rows = orthonormal_columns(LossCurvature(model, (x, y)).class_centres()).T
    found = edge_threshold.judge(model, rows, (x, y), (x, y))
    assert found["between"] > 0.5 and found["nearest"] > 0.8
    other = y[torch.randperm(21, generator=torch.Generator().manual_seed(0))]
    assert edge_threshold.judge(model, rows, (x, other), (x, other))["between"] < 0.3


def test_cells_are_all_networks_trained_and_not():
    cells = edge_threshold.threshold_cells()
    assert len(cells) == 18 and len({tuple(c.values()) for c in cells}) == 18
