import math

import pytest
import torch

from lowgrad_utils.experiments import spike_law
from lowgrad_utils.gradient_law import GradientLaw
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_targets
from lowgrad_utils.training import gradient_descent


def test_own_and_foreign_residues_are_what_they_say():
    own = spike_law.law_case(40, nu=0.25, activation="tanh", residue="own", seed=3)
    y = sample_targets(own.data.X, seed=3).y
    assert torch.equal(own.residue, LOSSES["mse"].residue(own.network(own.data.X), y))
    foreign = spike_law.law_case(40, nu=0.25, activation="tanh", residue="foreign", seed=3)
    assert torch.equal(own.network.W, foreign.network.W)
    assert torch.equal(own.data.X, foreign.data.X)
    outputs = [case.residue + y for case in (own, foreign)]
    # Two networks share the data's structure, not the noise.
    assert not torch.allclose(*outputs, atol=0.1)


def test_signs_and_named_residues():
    assert bool((spike_law.law_case(40, nu=0.0, residue="sign").residue.abs() == 1).all())
    assert spike_law.law_case(40, nu=0.0, residue="one-example").residue.tolist()[:2] == [1, 0]
    with pytest.raises(ValueError, match="residue is 'mine'"):
        spike_law.law_case(40, nu=0.0, residue="mine")
    with pytest.raises(ValueError, match="source is 'imagenet'"):
        spike_law.image_case("imagenet")


def test_errors_are_zero_for_what_the_law_expects_and_see_a_factor():
    law = spike_law.law_case(120, nu=0.375, seed=1).law()
    s = law.typical_values(90)
    found = spike_law.compare(law, s)
    assert found["count"] == len(law.outliers)
    for name in ("s1", "s2", "top"):
        assert found[name] == pytest.approx(0, abs=1e-9)
    assert abs(found["median"]) < 0.03 and found["distance"] < 0.02
    doubled = spike_law.compare(law, 2 * s)
    for name in ("s1", "s2", "top"):
        assert doubled[name] == pytest.approx(math.log(2))
    assert doubled["distance"] > 0.1
    with pytest.raises(ValueError, match="in the bulk"):
        spike_law.compare(law, s[:4])


def test_cells_measure_both_forms():
    cell = spike_law.law_cell(60, 0.25, 0.5, "elu", "logistic", "mean-field", "own", 1)
    assert {"full_s1", "linear_top", "u1_q", "u2_residue_expected"} <= set(cell)
    assert all(math.isfinite(value) for value in cell.values())
    assert set(spike_law.size_cell(60, 0.25, "relu", 1)) < set(cell)


def test_paired_rows_and_altered_signs():
    case = spike_law.law_case(100, nu=0.25, seed=2)
    W = spike_law.paired_rows(case.network)
    assert W.shape == case.network.W.shape
    assert torch.equal(W[:62], W[63:125])
    same = spike_law.altered_errors(case)
    assert same == spike_law.compare(case.law(), torch.linalg.svdvals(case.G))
    # All signs +1 keep the law: columns then have a mean, which T contains.
    plus = spike_law.altered_errors(case, a=torch.ones_like(case.network.a))
    assert abs(plus["s1"]) < 0.05
    assert spike_law.altered_errors(case, W=W)["median"] < -0.1


def test_fresh_rows_take_the_steps_of_the_network():
    """With the network's own rows as fresh ones, Phi would be that of its rows at each epoch."""
    errors = spike_law.training_errors("tanh", "mean-field", epochs=(0, 2), d=80, rows=4000, seed=1)
    assert set(errors) == {0, 2}
    # At epoch 0 both laws are those of uniform rows, but for the sampling of 4000 of them.
    first = errors[0]
    assert first["moved"]["s1"] == pytest.approx(first["uniform"]["s1"], abs=0.02)
    assert first["state"]["moved"] == 0 < errors[2]["state"]["moved"]
    assert abs(errors[2]["moved"]["s1"]) < 0.1 < abs(errors[2]["uniform"]["s1"])
    case = spike_law.law_case(80, nu=0.25, activation="tanh", scaling="mean-field", seed=1)
    y = sample_targets(case.data.X, seed=1).y
    states = gradient_descent(case.data.X, y, case.network, eta=0.3, normalisation="rows")
    start = next(states)
    assert start.loss == pytest.approx(errors[0]["state"]["loss"])
    # The columns' spread from their gradient, whose leading singular vectors are T's but for noise.
    fresh = TwoLayerNetwork.random(80, 4000, activation="tanh", scaling="mean-field", seed=10_001)
    G = closed_form_gradient(case.data.X, fresh, start.residue)
    inside = G - sum(
        torch.outer(u, u @ G) for u in torch.linalg.svd(G)[0].T[: int(first["moved"]["count"])]
    )
    length = inside.norm(dim=0).square()
    assert first["columns"]["spread"] == pytest.approx(
        float(length.std() / length.mean()), rel=1e-6
    )


def test_training_and_own_cells_are_flat():
    cell = spike_law.own_cell(60, "softplus", 1)
    assert {"slope", "size", "rest", "shift_6", "expected_1"} <= set(cell)
    assert cell["rest"] <= cell["size"]
    assert {cell["seed"] for cell in spike_law.training_cells()} == set(range(5))
    assert len(spike_law.late_cells()) == 9
    for cells in (spike_law.cells(), spike_law.size_cells(), spike_law.image_cells()):
        assert len({tuple(cell.items()) for cell in cells}) == len(cells)


def test_late_cells_follow_mean_field(monkeypatch):
    seen = {}

    def few(activation, scaling, *, epochs, seed):
        seen.update(activation=activation, scaling=scaling, epochs=epochs, seed=seed)
        return {
            9: {
                "uniform": {"s1": 1.0},
                "moved": {"s1": 2.0},
                "state": {},
                "columns": {"spread": 3.0},
            }
        }

    monkeypatch.setattr(spike_law, "training_errors", few)
    assert spike_law.late_cell("relu", 4) == {"moved_s1_9": 2.0, "columns_spread_9": 3.0}
    assert seen == {
        "activation": "relu",
        "scaling": "mean-field",
        "epochs": spike_law.LATE,
        "seed": 4,
    }


def test_the_law_of_a_case_is_that_of_its_T():
    case = spike_law.law_case(60, nu=0.25, seed=1)
    law = case.law()
    assert isinstance(law, GradientLaw) and law.m == case.network.m
    other = TwoLayerNetwork.random(60, 75, activation="softplus", seed=77)
    assert other.W.shape == case.network.W.shape  # T does not depend on the weights drawn.
    assert law.edge == spike_law.LawCase(case.data, other, case.residue, case.G).law().edge
