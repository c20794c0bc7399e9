import math

import numpy as np
import pytest
import torch

from lowgrad_utils.experiments import input_noise, scenario
from lowgrad_utils.gradients import loss_gradient
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_spiked_data, sample_targets

FLOAT = torch.float64


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


def test_without_noise_a_case_is_the_scenario():
    case = input_noise.noisy_scenario(40, nu=0.3, alpha=0.5, tau2=0.0, activation="silu", seed=5)
    plain = scenario(40, nu=0.3, alpha=0.5, activation="silu", seed=5)
    assert torch.equal(case.parts.G, plain.parts.G)
    assert torch.equal(case.clean.X, case.data.X)


def test_noise_moves_inputs_and_not_labels():
    case = input_noise.noisy_scenario(40, nu=0.3, alpha=0.5, tau2=0.49, activation="elu", seed=5)
    clean = sample_spiked_data(30, 40, nu=0.3, alpha=0.5, seed=5)
    assert torch.equal(case.clean.X, clean.X)
    noise = (case.data.X - clean.X) / 0.7
    assert float(noise.square().mean()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / 1200))
    y = sample_targets(clean.X, seed=5).y
    network = TwoLayerNetwork.random(40, 50, activation="elu", seed=5)
    torch.testing.assert_close(case.parts.G, loss_gradient(case.data.X, y, network))
    # The noise is that of the seed at every variance.
    other = input_noise.noisy_scenario(40, nu=0.3, alpha=0.5, tau2=4.0, activation="elu", seed=5)
    torch.testing.assert_close((other.data.X - clean.X) / 2, noise)


@pytest.mark.parametrize("residue", ["offset", "independent", "one-example", "beta=0.6"])
def test_residues_by_name_are_those_of_a_scenario(residue):
    case = input_noise.noisy_scenario(40, nu=0.3, tau2=1.0, residue=residue, seed=2)
    assert torch.equal(case.residue, scenario(40, nu=0.3, residue=residue, seed=2).residue)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau2": -1.0}, "^tau2 is -1"),
        ({"nu": -0.1}, r"^nu is -0\.1"),
        ({"activation": "swish"}, "^activation is 'swish', but one of"),
        ({"residue": "none"}, "^residue is 'none', but one of network, independent, offset,"),
        ({"residue": "beta=-1"}, "^beta is -1"),
    ],
)
def test_bad_cases(changes, message):
    with pytest.raises(ValueError, match=message):
        input_noise.noisy_scenario(**{"d": 8, "nu": 0.2, "tau2": 1.0} | changes)


@pytest.mark.parametrize(("d", "activation"), [(40, "relu"), (140, "relu"), (40, "erf")])
def test_measurements_are_those_of_the_full_matrices(d, activation):
    fixed = {"nu": 0.2, "alpha": 0.6, "tau2": 0.3, "activation": activation, "residue": "network"}
    case = input_noise.noisy_scenario(d, seed=3, **fixed)
    parts, r, W = case.parts, case.residue, case.network.W
    U = torch.linalg.svd(parts.G).U
    spike = case.data.zeta * torch.outer(case.data.z, case.data.q)
    noisy, clean = (case.data.X - spike).T @ r, (case.clean.X - spike).T @ r
    # E sigma'(w^T x) for a preactivation of variance s^2: 1/2, or 2 / sqrt(pi (1 + 2 s^2)).
    variances = torch.arange(1, d + 1, dtype=FLOAT) ** -0.6 + 0.3
    s2 = W.square() @ variances + (case.data.zeta * W @ case.data.q) ** 2
    mu = 0.5 if activation == "relu" else 2 / (math.pi * (1 + 2 * s2)).sqrt()
    slopes = case.network.sigma.derivative(case.data.X @ W.T) - mu
    expected = {
        "S1": largest(parts.S1.matrix()),
        "S12": largest(parts.S12.matrix()),
        "S2": largest(parts.S2.matrix()),
        "E": largest(parts.E),
        "slopes": largest(slopes),
        "u1_q": cosine(U[:, 0], case.data.q),
        "u1_residue": cosine(U[:, 0], noisy),
        "u1_clean": cosine(U[:, 0], clean),
        "clean": cosine(noisy, clean),
    }
    assert input_noise.noise_cell(d, seed=3, **fixed) == pytest.approx(expected, rel=1e-8)


def test_a_rate_cell_has_noise_of_the_wanted_power():
    by_rate = input_noise.noise_rate_cell(40, 0.2, 0.6, -0.5, "tanh", "offset", 1)
    assert by_rate == input_noise.noise_cell(40, 0.2, 0.6, 30**-0.5, "tanh", "offset", 1)


@pytest.mark.parametrize(("alpha", "tau2"), [(0.0, 0.5), (0.5, 1.0), (1.0, 0.2)])
def test_the_share_is_predicted_and_measured(alpha, tau2):
    d = 300
    predicted = input_noise.predicted_signal(d, alpha, tau2)
    trace = sum(k**-alpha for k in range(1, d + 1))
    assert predicted == pytest.approx(trace / (trace + d * tau2))
    shares = [input_noise.measured_signal(d, alpha, tau2, seed=s) for s in range(12)]
    assert sum(shares) / 12 == pytest.approx(predicted, rel=0.25)


def test_a_residue_may_know_the_leading_direction_of_the_bulk():
    # A decay so fast that e_1 is the bulk: r = x_1 + g has then |X_B^T r| = x_1^T (x_1 + g), and
    # E |X_B^T r|^2 = n (n + 3), n of it for g alone, beside d times n (1 + 1) of noise.
    d, n = 80, 60
    generic, knowing = (
        np.array([input_noise.measured_signal(d, 20.0, 1.0, residue=r, seed=s) for s in range(40)])
        for r in ("generic", "bulk")
    )
    assert generic.mean() == pytest.approx(1 / (1 + d), rel=0.6)
    assert knowing.mean() == pytest.approx((n + 3) / (n + 3 + 2 * d), rel=0.15)


def test_bad_shares():
    with pytest.raises(ValueError, match=r"^residue is 'network', but one of generic, bulk"):
        input_noise.measured_signal(10, 0.5, 1.0, residue="network")
    for share in (input_noise.measured_signal, input_noise.predicted_signal):
        with pytest.raises(ValueError, match=r"^tau2 is -1"):
            share(10, 0.5, -1.0)


@pytest.mark.parametrize("cells", [input_noise.noise_rate_cells, input_noise.figure_7_noise_cells])
def test_grids_repeat_no_cell(cells):
    listed = [tuple(cell.items()) for cell in cells()]
    assert len(set(listed)) == len(listed)
