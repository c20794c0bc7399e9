"""Tests of the rules for the leading spike, and of the spikes predicted without the gradient."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from lowgrad_utils.experiments import spike_winner as winner
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_spiked_data


@pytest.mark.parametrize(
    ("nu", "alpha", "beta", "rule", "corrected"),
    [
        (0.1, 0.0, 1.0, "residue", "residue"),
        (0.24, 0.0, 1.0, "residue", "residue"),
        (0.26, 0.0, 1.0, "both", "spike"),
        (0.1, 0.9, 1.5, "both", "spike"),  # 2 nu > 1 - alpha
        (0.2, 0.5, 1.5, "residue", "spike"),  # (1 - alpha)/2 < 2 nu < 1 - alpha
        (0.1, 0.5, 0.6, "both", "spike"),  # 2 nu > beta - alpha
        (0.1, 0.5, 0.8, "residue", "residue"),
        (0.3, 0.0, 0.5, "spike", "spike"),
        (0.5, 0.0, 2.0, "spike", "spike"),
        (0.49, 0.0, 2.0, "both", "spike"),
    ],
)
def test_each_term_of_the_rules_decides_somewhere(nu, alpha, beta, rule, corrected):
    assert winner.rule_of_thumb(nu, alpha, beta) == rule
    assert winner.corrected_rule(nu, alpha, beta) == corrected


@pytest.mark.parametrize("rule", [winner.rule_of_thumb, winner.corrected_rule])
@pytest.mark.parametrize("name", ["nu", "alpha", "beta"])
def test_negative_exponents_are_refused(rule, name):
    exponents = {"nu": 0.1, "alpha": 0.0, "beta": 1.0} | {name: -0.1}
    with pytest.raises(ValueError, match=f"{name} is -0.1"):
        rule(**exponents)


def test_the_winner_is_alone_from_nine_tenths_on():
    assert winner.winner(0.9, 0.1) == "residue"
    assert winner.winner(0.1, 0.9) == "spike"
    assert winner.winner(0.899, 0.1) == winner.winner(0.1, 0.899) == "both"
    assert winner.winner(0.95, 0.93) == "residue"


def test_the_2x2_matrix_is_exact_when_the_slopes_are_constant(monkeypatch):
    # With sigma' constant the gradient is X^T r (a o mu)^T: rank one, nothing is approximated.
    data = sample_spiked_data(30, 40, nu=0.3, alpha=0.5, seed=1)
    network = TwoLayerNetwork.random(40, 50, activation="softplus", seed=1)
    slopes = {
        "derivative": lambda x: torch.full_like(x, 0.5),
        "mu": lambda s: torch.full_like(s, 0.5),
        "c": torch.zeros_like,
        "mean_square_slope": lambda s: torch.full_like(s, 0.25),
    }
    flat = type("Flat", (), {name: staticmethod(f) for name, f in slopes.items()})
    monkeypatch.setattr(TwoLayerNetwork, "sigma", property(lambda self: flat))
    r = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = winner.expected_spikes(data, network, r)
    G = data.X.T @ torch.outer(r, 0.5 * network.a) * network.gamma / 30
    U, s, _ = torch.linalg.svd(G)
    bulk = data.X_B.T @ r
    assert expected.s1 == pytest.approx(float(s[0]), rel=1e-10)
    assert expected.s2 < 1e-8 * expected.s1
    assert expected.along_q == pytest.approx(float(abs(U[:, 0] @ data.q)), rel=1e-8)
    assert expected.along_residue == pytest.approx(
        float(abs(U[:, 0] @ bulk) / bulk.norm()), rel=1e-8
    )


@pytest.mark.parametrize("activation", ["softplus", "tanh", "relu"])
@pytest.mark.parametrize("nu", [0.1, 0.3])
def test_the_predicted_spikes_are_those_of_the_three_pieces(activation, nu):
    data = sample_spiked_data(300, 400, nu=nu, seed=2)
    network = TwoLayerNetwork.random(400, 500, activation=activation, seed=2)
    r = winner.winner_residue(data, network, "offset", "mse", 2)
    expected = winner.expected_spikes(data, network, r)
    parts = decompose(data, network, r)
    whole = parts.S1.matrix() + parts.S12.matrix() + parts.S2.matrix()
    U, s, _ = torch.linalg.svd(whole)
    # The linear slopes leave out a few percent.
    assert expected.s1 == pytest.approx(float(s[0]), rel=0.05)
    assert expected.s2 == pytest.approx(float(s[1]), rel=0.1)
    assert expected.along_q == pytest.approx(float(abs(U[:, 0] @ data.q)), abs=0.05)


def test_a_zero_residue_has_no_spikes():
    data = sample_spiked_data(30, 40, nu=0.3)
    with pytest.raises(ValueError, match="residue is zero"):
        winner.expected_spikes(data, TwoLayerNetwork.random(40, 50), torch.zeros(30).double())


def test_a_cell_measures_the_gradient_of_its_case():
    case = {"activation": "tanh", "target": "triple-index", "scaling": "mean-field", "loss": "mse"}
    cell = winner.winner_cell(60, 0.4, 0.25, **case, seed=3)
    data = sample_spiked_data(45, 60, nu=0.4, alpha=0.25, seed=3)
    network = TwoLayerNetwork.random(60, 75, activation="tanh", scaling="mean-field", seed=3)
    r = winner.winner_residue(data, network, "triple-index", "mse", 3)
    W = network.W.clone().requires_grad_()
    f = network.gamma * torch.tanh(data.X @ W.T) @ network.a
    # dL/dW for dL/df = r / n, by autograd.
    (f @ r / 45).backward()
    U, _, _ = torch.linalg.svd(W.grad.T)
    bulk = data.X_B.T @ r
    along_residue = float(abs(U[:, 0] @ bulk) / bulk.norm())
    assert cell["u1_q"] == pytest.approx(float(abs(U[:, 0] @ data.q)), abs=1e-4)
    assert cell["u1_residue"] == pytest.approx(along_residue, abs=1e-4)
    z_alignment = float(abs(data.z @ r) / (math.sqrt(45) * r.norm()))
    assert cell["z_alignment"] == pytest.approx(z_alignment, abs=1e-4)
    parts = decompose(data, network, r)
    spike = torch.linalg.matrix_norm(parts.S12.matrix() + parts.S2.matrix(), 2)
    assert cell["ratio"] == pytest.approx(math.log10(spike / parts.S1.norm), abs=1e-4)
    rest = torch.linalg.matrix_norm(parts.E, 2) / max(spike, parts.S1.norm)
    assert cell["rest"] == pytest.approx(math.log10(rest), abs=1e-4)


def test_residues_and_exponents_of_cases():
    data = sample_spiked_data(30, 40, nu=0.3)
    network = TwoLayerNetwork.random(40, 50)
    r = winner.winner_residue(data, network, "beta=0.6", "mse", 0)
    cosine = float(abs(data.z @ r) / (data.z.norm() * r.norm()))
    assert cosine == pytest.approx(40**-0.3)
    assert float(winner.winner_residue(data, network, "offset", "mse", 0).mean()) > 0.5
    logistic = winner.winner_residue(data, network, "single-index", "logistic", 0)
    assert float(logistic.abs().max()) < 1
    with pytest.raises(ValueError, match="target is 'none'"):
        winner.winner_residue(data, network, "none", "mse", 0)
    assert winner.case_exponent("offset", "ntk", 0.4) == 1
    assert winner.case_exponent("triple-index", "mean-field", 0.4) == pytest.approx(0.2)
    assert winner.case_exponent("triple-index-even", "mean-field", 0.4) == 1
    assert winner.case_exponent("triple-index", "ntk", 0.6) == 0


def test_the_grids_have_the_cases_that_the_chapter_counts():
    natural, prescribed = (list(c()) for c in (winner.natural_cells, winner.prescribed_cells))
    assert (len(natural), len(prescribed)) == (5 * 648, 5 * 324)
    assert len({tuple(cell.values()) for cell in natural}) == len(natural)


def frame(**changes):
    row = {
        "d": 400,
        "nu": 0.1,
        "alpha": 0.0,
        "target": "beta=1",
        "scaling": "ntk",
        "u1_residue": 0.95,
        "u1_q": 0.1,
        "expected_residue": 0.95,
        "expected_q": 0.1,
        "z_alignment": 400**-0.5,
    }
    return pd.DataFrame([row, {**row, **changes}])


def test_cases_are_judged():
    same, other = winner.judge(frame(u1_q=0.97, u1_residue=0.1)).to_dict("records")
    words = ("measured", "rule", "rule_own", "corrected", "finer")
    assert [same[name] for name in words] == ["residue"] * 5
    assert (same["wrong_spike"], same["beta"]) == (False, 1.0)
    assert (other["measured"], other["rule"], other["wrong_spike"]) == ("spike", "residue", True)
    # A draw that is aligned by chance has an exponent of its own: 0.15 < 2 nu.
    own = winner.judge(frame(z_alignment=400**-0.075))
    assert list(own["rule_own"]) == ["residue", "spike"]
    # Here 2 nu = 0.2 is just below the draw's 0.25.
    assert list(winner.judge(frame(z_alignment=400**-0.125))["rule_own"]) == ["residue"] * 2
    assert list(winner.judge(frame(target="triple-index"))["beta"]) == [1.0, 0.8]
    assert not winner.judge(frame(u1_residue=0.7, u1_q=0.7))["wrong_spike"].any()
    # More than aligned, and not at all, still have a word.
    assert len(winner.judge(frame(z_alignment=1.1))) == len(winner.judge(frame(z_alignment=0))) == 2


def test_a_confusion_table_has_all_words():
    table = winner.confusion(winner.judge(frame(u1_q=0.97, u1_residue=0.1)), "rule")
    assert list(table.index) == list(table.columns) == list(winner.WINNERS)
    assert np.array_equal(table.to_numpy(), [[1, 1, 0], [0, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match="rule is 'best'"):
        winner.confusion(winner.judge(frame()), "best")
