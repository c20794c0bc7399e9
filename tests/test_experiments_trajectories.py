import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats

from lowgrad_utils.experiments import trajectories
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.training import gradient_descent, train

FLOAT = torch.float64
EPOCHS = trajectories.EPOCHS


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


def naive_gradient(X, y, W, a, gamma, sigma):
    W = W.clone().requires_grad_()
    f = gamma * sigma(X @ W.T) @ a
    (((f - y) ** 2).mean() / 2).backward()
    return W.grad.T, (f - y).detach()


# --- Figure 4 ---


def test_a_sample_of_figure_4_is_what_it_says():
    cell = trajectories.single_index_cell(40, 3)
    X, y, omega = trajectories.isotropic_single_index(30, 40, seed=3)
    for prefix, scaling, gamma in (("mf", "mean-field", 1 / 50), ("ntk", "ntk", 50**-0.5)):
        network = TwoLayerNetwork.random(40, 50, scaling=scaling, seed=3)
        G, r = naive_gradient(X, y, network.W, network.a, gamma, torch.relu)
        u = torch.linalg.svd(G).U[:, 0]
        expected = {"y": cosine(u, X.T @ y), "r": cosine(u, X.T @ r), "omega": cosine(u, omega)}
        for name, value in expected.items():
            assert cell[f"{prefix}_{name}"] == pytest.approx(value, abs=2e-6)
    assert cell["output"] == pytest.approx(float((r + y).norm() / y.norm()), abs=2e-6)
    assert cell["omega_y"] == pytest.approx(cosine(X.T @ y, omega), abs=2e-6)


def test_isotropic_data_are_standard_normal_and_may_have_more_examples_than_features():
    X, y, omega = trajectories.isotropic_single_index(4000, 20, noise=0.0, seed=1)
    assert float((X.T @ X / 4000 - torch.eye(20)).abs().max()) < 0.12
    torch.testing.assert_close(y, torch.sigmoid(X @ omega))
    with pytest.raises(ValueError, match=r"^n is 0, but a whole number"):
        trajectories.isotropic_single_index(0, 20)


def test_predicted_alignments_are_those_of_long_samples():
    # The integrals by another quadrature, and the network's moments from one wide network.
    kappa = integrate.quad(lambda g: stats.logistic.pdf(g) * stats.norm.pdf(g), -12, 12)[0]
    square = integrate.quad(lambda g: stats.logistic.cdf(g) ** 2 * stats.norm.pdf(g), -12, 12)[0]
    predicted = trajectories.predicted_alignments(2.0, noise=0.3)
    total = kappa**2 + 2 * (square + 0.09)
    assert predicted["mf_omega"] == pytest.approx(kappa / math.sqrt(total), rel=1e-6)
    measured = []
    for seed in range(4):
        X, y, omega = trajectories.isotropic_single_index(400, 800, noise=0.3, seed=seed)
        network = TwoLayerNetwork.random(800, 1000, scaling="ntk", seed=seed)
        a = network.a
        f = network.gamma * torch.relu(X @ network.W.T) @ a
        offset = float(a.sum()) / math.sqrt(len(a))
        p = trajectories.predicted_alignments(2.0, noise=0.3, offset=offset)
        b, c = X.T @ (f - y), X.T @ y
        measured.append([cosine(b, c) - p["ntk_y"], cosine(c, omega) - p["mf_omega"]])
    # Single samples scatter by about 1 / sqrt(400).
    assert np.abs(measured).max() < 0.15
    assert np.abs(np.mean(measured, axis=0)).max() < 0.07


@pytest.mark.parametrize("bad", [0, -1, math.inf])
def test_bad_ratios_are_named(bad):
    with pytest.raises(ValueError, match=r"^ratio is .*a positive, finite number"):
        trajectories.predicted_alignments(bad)


# --- training ---


def test_scalings_differ_only_by_the_scale_of_the_targets():
    data, y, ntk = trajectories.training_problem(
        40, nu=0.2, activation="tanh", scaling="ntk", seed=1
    )
    mean_field = TwoLayerNetwork(ntk.W, ntk.a, "tanh", "mean-field")
    eta = trajectories.matched_step(ntk)
    one = train(data, math.sqrt(50) * y, ntk, epochs=10, eta=eta)
    other = train(data, y, mean_field, epochs=10, eta=trajectories.matched_step(mean_field))
    torch.testing.assert_close(one.network.W, other.network.W, rtol=0, atol=1e-12)
    assert trajectories.matched_step(mean_field) == pytest.approx(1)


def test_a_run_of_figure_5_is_what_it_says():
    cell = trajectories.direction_cell(40, "sigmoid", "ntk", False, 2)
    data, y, network = trajectories.training_problem(
        40, nu=0.0, activation="sigmoid", scaling="ntk", seed=2
    )
    directions, losses, targets, residue = [], [], [], []
    states = gradient_descent(data.X, y, network)
    for _, state in zip(range(101), states):
        if state.epoch in EPOCHS:
            directions.append(torch.linalg.svd(state.gradient).U[:, 0])
            losses.append(state.loss)
            X_B = data.X - data.zeta * torch.outer(data.z, data.q)
            targets.append(cosine(X_B.T @ state.residue, X_B.T @ y))
            residue.append(cosine(X_B.T @ state.residue, directions[-1]))
    for k, t in enumerate(EPOCHS):
        assert cell[f"i_{t}"] == pytest.approx(cosine(directions[k], directions[0]), abs=2e-6)
        assert cell[f"l_{t}"] == pytest.approx(losses[k] / losses[0], abs=2e-6)
    assert cell["targets_0"] == pytest.approx(targets[0], abs=2e-6)
    assert cell["targets"] == pytest.approx(min(targets), abs=2e-6)
    assert cell["residue"] == pytest.approx(min(residue), abs=2e-6)
    turns = [math.acos(float(w @ v)) for w, v in zip(network.W, state.network.W)]
    assert cell["turn"] == pytest.approx(np.mean(turns), abs=2e-6)
    matched = trajectories.direction_cell(40, "sigmoid", "ntk", True, 2)
    assert matched["l_1"] > 1.2 * cell["l_100"] and matched["i_1"] != cell["i_1"]


def test_angles_between_the_weights_of_both_scalings():
    cell = trajectories.weight_angle_cell(40, 1)
    ends = []
    for scaling in ("ntk", "mean-field"):
        data, y, network = trajectories.training_problem(
            40, nu=0.0, activation="sigmoid", scaling=scaling, seed=1
        )
        ends.append(train(data, y, network, epochs=8).network.W)
    cosines = torch.linalg.svdvals(torch.linalg.qr(ends[0]).Q.T @ torch.linalg.qr(ends[1]).Q)
    expected = torch.arccos(cosines.clamp(max=1)).mean()
    assert cell["columns_8"] == pytest.approx(float(expected), abs=1e-4)
    top = [torch.linalg.svd(W).Vh[:10] for W in ends]
    expected = torch.arccos(torch.linalg.svdvals(top[0] @ top[1].T).clamp(max=1)).mean()
    assert cell["top_8"] == pytest.approx(float(expected), abs=1e-4)
    # More neurons than features: both row spaces are the whole space.
    assert cell["rows_100"] == 0
    assert cell["neurons_100"] > cell["neurons_1"] > 0


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_sharpness_along_the_spike_is_that_of_automatic_differentiation(activation):
    data, y, network = trajectories.training_problem(
        16, nu=0.4, activation=activation, scaling="mean-field", seed=3
    )
    *_, state = (s for _, s in zip(range(4), gradient_descent(data.X, y, network)))
    assert float(state.lengths.min()) > 1.001
    sigma = {"tanh": torch.tanh, "softplus": torch.nn.Softplus()}[activation]
    V, tangents = state.lengths[:, None] * state.network.W, []
    for w in state.network.W:
        t = data.q - (data.q @ w) * w
        tangents.append(t / t.norm())
    tangents = torch.stack(tangents)

    def loss(b):
        moved = V + b[:, None] * tangents
        W = moved / moved.norm(dim=1, keepdim=True)
        f = sigma(data.X @ W.T) @ network.a / network.m
        return ((f - y) ** 2).mean() / 2

    H = torch.autograd.functional.hessian(loss, torch.zeros(network.m, dtype=FLOAT))
    expected = float(torch.linalg.eigvalsh(H)[-1])
    assert trajectories.spike_sharpness(data, state) == pytest.approx(expected, rel=1e-9)


def test_a_run_of_figure_6_is_what_it_says():
    cell = trajectories.spike_cell(40, 0.6, 0.5, 12, 1)
    data, y, network = trajectories.training_problem(
        40, nu=0.6, activation="tanh", scaling="mean-field", seed=1
    )
    run = train(data, y, network, epochs=12, eta=0.5)
    assert {name for name in cell if name.startswith("q_")} == {f"q_{t}" for t in EPOCHS if t <= 12}
    for t in (0, 1, 5, 12):
        assert cell[f"q_{t}"] == pytest.approx(float(run.u1_q[t]), abs=2e-6)
        assert cell[f"r_{t}"] == pytest.approx(float(run.u1_residue[t]), abs=2e-6)
    states = list(zip(range(13), gradient_descent(data.X, y, network, eta=0.5)))
    sharpness = trajectories.spike_sharpness(data, states[5][1])
    assert cell["h_5"] == pytest.approx(0.5 * 50 * sharpness, abs=2e-6)
    late_loss, late_z = run.loss[5:].tolist(), run.z_residue[5:].tolist()
    rises = [late_loss[k + 1] / late_loss[k] - 1 for k in range(7)]
    flips = sum(math.copysign(1, late_z[k]) != math.copysign(1, late_z[k + 1]) for k in range(7))
    # A run in which the early rises are larger, and some steps flip and some do not.
    assert float((run.loss[1:6] / run.loss[:5]).max()) - 1 > max(rises)
    assert 0 < flips < 7
    assert cell["rise"] == pytest.approx(max(rises), abs=2e-6)
    assert cell["flips"] == pytest.approx(flips / 7, abs=2e-6)
    assert cell["z_share"] == pytest.approx(max(c * c for c in late_z), abs=2e-6)
    assert (cell["loss_0"], cell["loss"]) == pytest.approx(
        (float(run.loss[0]), float(run.loss[-1])), abs=2e-6
    )


def runs(rows):
    """Rows of a grid with u1_q rising to a peak at epoch 24 and a decoy before LATE."""
    columns = {f"q_{t}": 0.0 for t in EPOCHS} | {"q_1": 0.99}
    return pd.DataFrame([columns | {"nu": nu, "q_24": peak} for nu, peak in rows])


def test_the_onset_is_where_the_median_crosses():
    frame = runs([(0.1, 0.2), (0.1, 0.1), (0.1, 0.9), (0.2, 0.6), (0.3, 0.8), (0.4, 0.3)])
    assert trajectories.late_peaks(frame, "q").tolist() == [0.2, 0.1, 0.9, 0.6, 0.8, 0.3]
    assert trajectories.onset(frame, level=0.7) == pytest.approx(0.25)
    assert trajectories.onset(frame, level=0.95) == math.inf
    with pytest.raises(ValueError, match=r"^level is 0\.1, but the median at .* is 0\.20 already"):
        trajectories.onset(frame, level=0.1)
    # Before LATE the decoy, after epoch 24 nothing.
    assert trajectories.late_peaks(frame, "q", since=1).tolist() == [0.99] * 6
    assert trajectories.onset(frame, level=0.7, since=24) == pytest.approx(0.25)
    assert trajectories.onset(frame, level=0.7, since=33) == math.inf
    for since in (-1, 101):
        with pytest.raises(ValueError, match=rf"^since is {since}, but an epoch from 0 to 100"):
            trajectories.late_peaks(frame, "q", since=since)


def test_the_predicted_onset_solves_its_equation():
    mu = integrate.quad(lambda g: stats.norm.pdf(g) / math.cosh(g) ** 2, -12, 12)[0]
    for eta, n in ((1.0, 188), (0.03, 300)):
        nu = trajectories.predicted_onset(eta, n)
        assert eta * mu**2 * n ** (2 * nu) == pytest.approx(2, rel=1e-9)
        nu = trajectories.predicted_onset(eta, n, length=1.5)
        assert eta * mu**2 * n ** (2 * nu) / 1.5**2 == pytest.approx(2, rel=1e-9)
    with pytest.raises(ValueError, match=r"^n is 1, but at least 2"):
        trajectories.predicted_onset(1.0, 1)
    with pytest.raises(ValueError, match=r"^eta is 0, but a positive"):
        trajectories.predicted_onset(0, 100)
    with pytest.raises(ValueError, match=r"^length is -1, but a positive"):
        trajectories.predicted_onset(1, 100, length=-1)


def test_lengths_are_those_after_the_first_steps():
    data, y, network = trajectories.training_problem(
        40, nu=0.2, activation="tanh", scaling="mean-field", seed=4
    )
    square = torch.ones(50, dtype=FLOAT)
    states = gradient_descent(data.X, y, network, eta=0.8)
    for _, state in zip(range(trajectories.LATE), states):
        for j, (w, g) in enumerate(zip(state.network.W, state.gradient.T)):
            across = g - (g @ w) * w
            square[j] += (0.8 * 50) ** 2 * across @ across / square[j]
    expected = float(square.sqrt().mean())
    assert trajectories.early_length(40, 0.2, 0.8, 4) == pytest.approx(expected, rel=1e-9)
