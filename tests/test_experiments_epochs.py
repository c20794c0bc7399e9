"""Organisation by epoch: toy, mean Jacobians and temperature, against naive computations."""

import math

import pandas as pd
import pytest
import torch

from lowgrad_utils import classifiers, datasets
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import epochs
from lowgrad_utils.experiments.toy_levels import toy_levels
from lowgrad_utils.three_levels import three_levels


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("p", [0.4, 0.9, 1.0])
@pytest.mark.parametrize("cosine", [0.0, 0.5, 1.0])
def test_the_toys_organisation_in_closed_form(classes, p, cosine):
    # At p = 1 the toy's means are zero; the closed form is their limit.
    p_toy = min(p, 1 - 1e-9)
    expected = toy_levels(classes, p_toy, cosine).organisation()
    assert epochs.toy_organisation(classes, p, cosine) == pytest.approx(expected, abs=1e-6)


def test_the_toys_crossing_is_where_both_shares_are_equal():
    crossings = []
    for cosine in (0.0, 0.3, 0.6, 0.9):
        p = epochs.toy_crossing(10, cosine)
        by_class, by_logit = toy_levels(10, p, cosine).organisation()
        assert by_class == pytest.approx(by_logit, abs=1e-9)
        crossings.append(p)
    assert crossings == sorted(crossings)
    assert epochs.toy_crossing(10, 1.0) == pytest.approx(1)


def test_bad_numbers_of_the_toy():
    with pytest.raises(ValueError, match="classes is 2"):
        epochs.toy_crossing(2, 0.5)
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        epochs.toy_organisation(10, 1.5, 0.5)
    with pytest.raises(ValueError, match="cosine is 2"):
        epochs.toy_crossing(10, 2)


@pytest.fixture
def small():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.arange(24) % 4
    model = classifiers.build(
        "mlp", channels=1, classes=4, size=8, hidden=(6, 5), dtype=torch.float64
    )
    return model.eval(), x, labels


def test_mean_jacobians_against_automatic_differentiation(small):
    model, x, labels = small
    found = epochs.mean_jacobians(model, x, labels)
    parameters = dict(model.named_parameters())

    def logits(theta, images):
        return torch.func.functional_call(model, theta, (images,)).mean(0)

    for c in range(4):
        jacobian = torch.func.jacrev(logits)(parameters, x[labels == c])
        expected = torch.cat([j.flatten(1) for j in jacobian.values()], 1)
        torch.testing.assert_close(found[c], expected)


def test_mean_cotangents_and_weighted_probability_by_loops(small):
    model, x, labels = small
    p = model(x).softmax(1).detach()
    found = epochs.mean_cotangents(p, labels)
    shares = []
    for c in range(4):
        own = [q for q, label in zip(p, labels) if label == c]
        for k in range(4):
            terms = [math.sqrt(q[k]) * (torch.eye(4, dtype=torch.float64)[k] - q) for q in own]
            torch.testing.assert_close(found[c, k], sum(terms) / len(own))
            if k != c:
                weights = [math.sqrt(q[k]) for q in own]
                shares.append(sum(w * q[c] for w, q in zip(weights, own)) / sum(weights))
    expected = float(sum(shares) / len(shares))
    assert epochs.weighted_probability(p, labels) == pytest.approx(expected)


def test_group_means_are_assembled_exactly_if_examples_of_a_class_are_alike():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    x, labels = features.repeat(4, 1), torch.arange(3).repeat(4)
    model = torch.nn.Linear(7, 3).double().eval()
    cotangents, gram = epochs.pieces(model, (x, labels))
    measured = three_levels(LossCurvature(model, (x, labels)))
    torch.testing.assert_close(epochs.assembled(cotangents, gram).gram, measured.gram)
    # One linear layer is the toy itself: a feature for each class, with the 1 of the bias.
    torch.testing.assert_close(epochs.product_gram(gram), gram)
    full = torch.cat([features, torch.ones(3, 1, dtype=torch.float64)], 1)
    unit = full / full.norm(dim=1, keepdim=True)
    expected = float(((unit @ unit.T).sum() - 3) / 6)
    assert epochs.class_cosine(gram) == pytest.approx(expected)


def test_temperature(small):
    model, x, _ = small
    logits = 5 * model(x).detach()
    labels = logits.argmax(1)
    t = epochs.temperature_for(logits, labels, 0.4)
    heated = epochs.Heated(model, t / 5).eval()
    p = heated(x).softmax(1)[torch.arange(24), labels]
    assert float(p.mean().detach()) == pytest.approx(0.4, abs=1e-6)
    with pytest.raises(ValueError, match=r"p is 0\.1, but temperatures give"):
        epochs.temperature_for(logits, labels, 0.1)
    with pytest.raises(ValueError, match="temperature is 0"):
        epochs.Heated(model, 0)


def test_checkpoints_are_those_of_one_training():
    options = {"per_class": 5, "size": 8, "seed": 3, "learning_rate": 0.1}
    found = {
        epoch: [p.detach().clone() for p in model.parameters()]
        for epoch, model, _ in epochs.checkpoints("mnist", "mlp", epochs=(0, 2, 4), **options)
    }
    assert list(found) == [0, 2, 4]
    x, labels = datasets.load("mnist").images(per_class=5, size=8, seed=3)
    model = classifiers.build("mlp", channels=1, width=1 / 16, size=8, seed=3)
    for start, parameter in zip(found[0], model.parameters()):
        assert torch.equal(start, parameter)
    classifiers.fit(model, x, labels, epochs=4, lr=0.1, batch_size=64, seed=3, progress=False)
    for end, parameter in zip(found[4], model.parameters()):
        assert torch.equal(end, parameter)


def test_shuffled_labels_are_as_many_but_others():
    def labels(shuffled):
        training = epochs.checkpoints(
            "mnist", "mlp", per_class=6, size=8, epochs=(1,), shuffled=shuffled
        )
        return next(training)[2][1]

    assert torch.equal(labels(True).bincount(), labels(False).bincount())
    assert float((labels(True) == labels(False)).double().mean()) < 0.4


def test_numbers_of_an_epoch(small):
    model, x, labels = small
    numbers = epochs.epoch_numbers(model, (x, labels))
    levels = three_levels(LossCurvature(model, (x, labels)))
    assert (numbers["class"], numbers["logit"]) == pytest.approx(levels.organisation())
    assert numbers["own_length"] == pytest.approx(float(levels.lengths.diagonal().mean()))
    p = model(x).softmax(1)[torch.arange(24), labels]
    assert numbers["probability"] == pytest.approx(float(p.mean().detach()))
    assert 0 < numbers["means_share"] <= 1 and 0 < numbers["evenness"] <= 1
    # u^T G_{1+2} u / u^T G u, with G itself.
    curvature = LossCurvature(model, (x, labels))
    u = levels.eigenvectors("G1+2", 3)
    expected = torch.stack(
        [(v @ (levels.operator("G1+2") @ v)) / (v @ (curvature.gauss_newton @ v)) for v in u.T]
    )
    assert numbers["means_share"] == pytest.approx(float(expected.mean()))


def test_one_row_an_epoch():
    cell = epochs.epoch_cells()[0]
    row = {f"{name}_{e}": e + k for k, name in enumerate(("class", "logit")) for e in epochs.EPOCHS}
    table = epochs.by_epoch(pd.DataFrame([{**cell, **row, "permuted_class": 0.0}]))
    assert len(table) == len(epochs.EPOCHS)
    assert (table["logit"] - table["epoch"] == 1).all() and set(cell) <= set(table.columns)


def test_the_crossing_is_the_last_one_and_may_be_missing():
    rows = pd.DataFrame(
        {"class": [0, 3, 0, 4.0], "logit": [1, 1, 2, 2.0], "probability": [0.1, 0.2, 0.4, 0.8]}
    )
    assert epochs.crossing(rows) == pytest.approx(0.4 + 0.4 * 2 / 4)
    assert math.isnan(epochs.crossing(rows.head(3)))
    assert math.isnan(epochs.crossing(rows.tail(1)))
