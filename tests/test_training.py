import dataclasses
import math
import re
import warnings

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from lowgrad_utils.gradients import closed_form_gradient, decompose
from lowgrad_utils.networks import TwoLayerNetwork, normalise_rows
from lowgrad_utils.spiked_data import sample_spiked_data
from lowgrad_utils.training import (
    NORMALISATIONS,
    DivergenceError,
    DivergenceWarning,
    gradient_descent,
    train,
)

FLOAT = torch.float64
SIGMA = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "softplus": torch.nn.Softplus()}
LOSS = {
    "mse": lambda f, y: ((f - y) ** 2).mean() / 2,
    "huber": torch.nn.HuberLoss(),
    "log-cosh": lambda f, y: torch.log(torch.cosh(f - y)).mean(),
    "logistic": torch.nn.SoftMarginLoss(),
}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def problem(activation="tanh", scaling="mean-field", *, d=24, nu=0.2, seed=0):
    data = sample_spiked_data(18, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, 30, activation=activation, scaling=scaling, seed=seed)
    return data, gaussian(18, seed=seed + 1), network


def take(states, count):
    return [state for state, _ in zip(states, range(count))]


def by_optimiser(X, y, network, loss, eta, steps, project):
    """Train with autograd and torch.optim.SGD, and normalise each row after each step."""
    gamma = {"ntk": network.m**-0.5, "mean-field": 1 / network.m}[network.scaling]
    W = network.W.clone().requires_grad_()
    optimiser = torch.optim.SGD([W], lr=eta / gamma)
    weights, losses = [], []
    for _ in range(steps):
        optimiser.zero_grad()
        value = LOSS[loss](gamma * SIGMA[network.activation](X @ W.T) @ network.a, y)
        value.backward()
        weights.append(W.detach().clone())
        losses.append(value.item())
        with torch.no_grad():
            if project:
                for j in range(network.m):
                    W.grad[j] -= (W.grad[j] @ W[j]) * W[j]
            optimiser.step()
            for j in range(network.m):
                W[j] /= W[j].norm()
    return weights, losses


def by_torch_weight_norm(X, y, network, loss, eta, steps):
    """Train torch's own weight normalisation of a linear layer, its length frozen at 1."""
    gamma = {"ntk": network.m**-0.5, "mean-field": 1 / network.m}[network.scaling]
    layer = torch.nn.Linear(network.W.shape[1], network.m, bias=False, dtype=FLOAT)
    layer.weight.data = network.W.clone()
    layer = weight_norm(layer, dim=0)
    length, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    assert torch.allclose(length, torch.ones_like(length))
    optimiser = torch.optim.SGD([v], lr=eta / gamma)
    weights, losses, lengths = [], [], []
    for _ in range(steps):
        optimiser.zero_grad()
        value = LOSS[loss](gamma * SIGMA[network.activation](layer(X)) @ network.a, y)
        value.backward()
        weights.append(layer.weight.detach().clone())
        lengths.append(v.detach().norm(dim=1))
        losses.append(value.item())
        optimiser.step()
    return weights, losses, lengths


@pytest.mark.parametrize("scaling", ["mean-field", "ntk"])
@pytest.mark.parametrize(("activation", "loss"), list(zip([*SIGMA, "tanh"], LOSS)))
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_training_is_that_of_torch(normalisation, activation, loss, scaling):
    data, y, network = problem(activation, scaling)
    y = y.sign() if loss == "logistic" else y
    if normalisation == "weight-norm":
        weights, losses, lengths = by_torch_weight_norm(data.X, y, network, loss, 0.7, 6)
    else:
        project = normalisation == "tangent"
        weights, losses = by_optimiser(data.X, y, network, loss, 0.7, 6, project)
        lengths = [torch.ones(network.m, dtype=FLOAT)] * 6
    states = gradient_descent(data.X, y, network, eta=0.7, loss=loss, normalisation=normalisation)
    for epoch, state in enumerate(take(states, 6)):
        assert state.epoch == epoch
        torch.testing.assert_close(state.network.W, weights[epoch], rtol=1e-9, atol=1e-11)
        assert state.loss == pytest.approx(losses[epoch], rel=1e-9)
        torch.testing.assert_close(state.lengths, lengths[epoch], rtol=1e-9, atol=0)
        X, r = data.X, state.residue
        torch.testing.assert_close(state.gradient, closed_form_gradient(X, state.network, r))
    # Weights that hardly moved would agree whatever the update is.
    assert float((weights[5] - weights[0]).norm(dim=1).mean()) > 0.05


def test_the_network_at_the_start_is_not_changed():
    data, y, network = problem()
    before = network.W.clone()
    run = train(data, y, network, epochs=3)
    assert torch.equal(network.W, before)
    assert not torch.equal(run.network.W, before)


@pytest.mark.parametrize("other", ["tangent", "weight-norm"])
def test_normalisations_agree_to_first_order_of_the_step(other):
    data, y, network = problem("sigmoid", "ntk")

    def distance(eta, one, two):
        ends = [
            take(gradient_descent(data.X, y, network, eta=eta, normalisation=k), 3)[2].network.W
            for k in (one, two)
        ]
        return float((ends[0] - ends[1]).norm()) / float((ends[0] - network.W).norm())

    # Their relative distance is of the order of the step: a tenth of it, a tenth of the distance.
    coarse, fine = (distance(eta, "rows", other) for eta in (0.01, 0.001))
    assert fine < 0.01
    assert fine / coarse == pytest.approx(0.1, rel=0.1)


def test_normalising_after_the_step_is_a_projected_step_of_another_length():
    data, y, network = problem("sigmoid", "ntk")
    first, second = take(gradient_descent(data.X, y, network, eta=0.3, normalisation="rows"), 2)
    g, h = first.gradient.T, 0.3 / network.gamma
    for j in range(network.m):
        w = network.W[j]
        radial = float(w @ g[j])
        moved = w - h / (1 - h * radial) * (g[j] - radial * w)
        torch.testing.assert_close(second.network.W[j], moved / moved.norm())


def test_a_trajectory_records_what_its_states_are():
    data, y, network = problem("tanh", "ntk", nu=0.3)
    run = train(data, y, network, epochs=7, record=[2, 7, 5], eta=0.4, keep_weights=True)
    assert run.epochs == [0, 2, 5, 7]
    assert run.diverged is None
    states = take(gradient_descent(data.X, y, network, eta=0.4), 8)
    first = torch.linalg.svd(states[0].gradient).U[:, 0]
    for row, epoch in enumerate(run.epochs):
        state = states[epoch]
        U, s, _ = torch.linalg.svd(state.gradient)
        r = state.residue
        X_B = data.X - data.zeta * data.z[:, None] * data.q[None]
        parts = decompose(data, state.network, r)

        def cosine(u, v):
            return float(u @ v) / float(u.norm() * v.norm())

        expected = {
            "loss": state.loss,
            "s1": float(s[0]),
            "u1_q": abs(cosine(U[:, 0], data.q)),
            "u1_residue": abs(cosine(U[:, 0], X_B.T @ r)),
            "u1_initial": abs(cosine(U[:, 0], first)),
            "S1": float(torch.linalg.matrix_norm(parts.S1.matrix(), 2)),
            "S12": float(torch.linalg.matrix_norm(parts.S12.matrix(), 2)),
            "S2": float(torch.linalg.matrix_norm(parts.S2.matrix(), 2)),
            "S12_S2": float(torch.linalg.matrix_norm(parts.S12.matrix() + parts.S2.matrix(), 2)),
            "z_residue": cosine(data.z, r),
        }
        for name, value in expected.items():
            assert float(getattr(run, name)[row]) == pytest.approx(value, rel=1e-8), name
        assert abs(cosine(run.u1[row], U[:, 0])) == pytest.approx(1, abs=1e-10)
        assert torch.equal(run.W[row], state.network.W)
        assert torch.equal(run.residue[row], state.residue)
    assert torch.equal(run.network.W, states[7].network.W)
    assert float(run.z_residue.min()) < 0 or float(run.z_residue.max()) > 0


def test_every_epoch_is_recorded_by_default_and_weights_are_not():
    data, y, network = problem()
    run = train(data, y, network, epochs=4)
    assert run.epochs == [0, 1, 2, 3, 4]
    assert run.W is None
    assert run.u1.shape == (5, 24)
    assert run.loss.dtype == FLOAT


def test_training_is_the_same_each_time():
    data, y, network = problem()
    one, other = (train(data, y, network, epochs=5) for _ in range(2))
    assert torch.equal(one.u1, other.u1)
    assert torch.equal(one.network.W, other.network.W)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_rows_stay_on_the_sphere(normalisation):
    data, y, network = problem("softplus", "ntk")
    run = train(data, y, network, epochs=60, eta=3.0, normalisation=normalisation)
    assert float((run.network.W.norm(dim=1) - 1).abs().max()) < 1e-14


def test_small_steps_lower_the_loss_and_a_solved_problem_stays():
    data, y, network = problem("tanh", "ntk")
    run = train(data, y, network, epochs=30, eta=0.01)
    assert bool((run.loss.diff() < 0).all())
    still = train(data, network(data.X) + 1e-9 * y, network, epochs=3, eta=0.01)
    torch.testing.assert_close(still.network.W, network.W, rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_steps_beyond_all_numbers_are_named_and_the_record_kept(normalisation):
    data, y, network = problem()
    with pytest.warns(DivergenceWarning, match=r"^training diverged at epoch 1: the weights"):
        run = train(data, y, network, epochs=9, eta=1e200, normalisation=normalisation)
    assert run.epochs == [0]
    assert run.diverged.endswith("no longer finite; a smaller eta helps")
    for values in (run.loss, run.u1, run.u1_q, run.S1, run.network.W):
        assert bool(torch.isfinite(values).all())


def test_a_loss_that_grows_too_much_is_named_with_its_epoch():
    data, y, network = problem("softplus", "ntk")
    losses = [s.loss for s in take(gradient_descent(data.X, y, network, eta=20.0), 12)]
    epoch = next(t for t, loss in enumerate(losses) if loss > 1.5 * losses[0])
    assert epoch >= 1
    limit = re.escape(f"{1.5 * losses[0]:.3g}")
    line = rf"^training diverged at epoch {epoch}: the loss is .*, beyond its limit of {limit};"
    with pytest.warns(DivergenceWarning, match=line):
        run = train(data, y, network, epochs=12, eta=20.0, growth=1.5)
    assert run.epochs == list(range(epoch))
    with pytest.raises(DivergenceError, match=line):
        take(gradient_descent(data.X, y, network, eta=20.0, growth=1.5), 12)


def test_a_perfect_fit_does_not_diverge_with_its_rounding():
    data, _, network = problem()
    losses = [s.loss for s in take(gradient_descent(data.X, network(data.X), network), 5)]
    assert losses[0] == 0
    assert 0 < max(losses) < 1e-28


def test_where_the_fit_is_exact_directions_are_undefined():
    # tanh(0) = 0: the network fits targets of zero at inputs of zero whatever its weights.
    data, _, network = problem()
    still = dataclasses.replace(data, X=0 * data.X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = train(still, torch.zeros(18, dtype=FLOAT), network, epochs=3)
    assert run.epochs == [0, 1, 2, 3] and run.diverged is None
    for name in ("u1", "u1_q", "u1_residue", "u1_initial", "z_residue"):
        assert bool(getattr(run, name).isnan().all()), name
    for name in ("loss", "s1", "S1", "S12", "S2", "S12_S2", "residue"):
        assert not getattr(run, name).any(), name
    torch.testing.assert_close(run.network.W, network.W, rtol=1e-14, atol=0)


def test_a_fit_that_is_exact_at_first_only_is_recorded():
    data, _, network = problem()
    run = train(data, network(data.X), network, epochs=2)
    assert run.loss[0] == 0 and bool(run.u1[0].isnan().all())
    # From there on the residue is rounding: it has a direction, but nothing to compare it with.
    assert bool((run.loss[1:] > 0).all()) and bool(run.u1_q[1:].isfinite().all())
    assert bool(run.u1_initial.isnan().all())


def test_targets_beyond_all_losses_are_named_at_once():
    data, y, network = problem()
    with pytest.raises(ValueError, match=r"^the loss at the start is inf, but a finite one"):
        gradient_descent(data.X, 1e200 * y, network)


BAD = [
    ({"eta": 0}, r"^eta is 0, but a positive, finite number"),
    ({"eta": math.nan}, r"^eta is nan, but a positive, finite number"),
    ({"eta": "fast"}, r"^eta is 'fast', but a positive, finite number"),
    ({"epochs": 0}, r"^epochs is 0, but a whole number of at least 1"),
    ({"epochs": 2.5}, r"^epochs is 2.5, but a whole number of at least 1"),
    ({"loss": "hinge"}, r"^loss is 'hinge', but one of mse, huber"),
    ({"normalisation": "batch"}, r"^normalisation is 'batch', but one of rows, tangent"),
    ({"growth": 1}, r"^growth is 1, but a multiple above 1"),
    ({"growth": math.inf}, r"^growth is inf, but a positive, finite number"),
    ({"record": [0, 11]}, r"^record has the epoch 11, but there are 10 epochs"),
    ({"record": [-1]}, r"^an epoch of record is -1, but a whole number"),
    ({"record": [0.5]}, r"^an epoch of record is 0.5, but a whole number"),
    ({"loss": "logistic"}, r"^y has the label"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_named(arguments, message):
    data, y, network = problem()
    with pytest.raises((TypeError, ValueError), match=message):
        train(data, y, network, **{"epochs": 10} | arguments)


def test_bad_tensors_are_named_at_once():
    data, y, network = problem()
    with pytest.raises(ValueError, match=r"^y has shape \(17,\), but a vector of length 18"):
        gradient_descent(data.X, y[:17], network)
    with pytest.raises(ValueError, match=r"^X has shape \(18, 23\)"):
        gradient_descent(data.X[:, :23], y, network)
    with pytest.raises(ValueError, match=r"^y has .*NaN or infinite"):
        train(data, y / 0, network)


def test_a_progress_bar_is_shown_on_request_but_never_in_the_book(capsys, monkeypatch):
    data, y, network = problem()
    monkeypatch.delenv("LOWGRAD_BOOK", raising=False)
    train(data, y, network, epochs=2)
    assert capsys.readouterr().err == ""
    train(data, y, network, epochs=2, progress=True)
    assert "3/3" in capsys.readouterr().err
    monkeypatch.setenv("LOWGRAD_BOOK", "1")
    train(data, y, network, epochs=2, progress=True)
    assert capsys.readouterr().err == ""


def test_float32_trains_in_float32():
    data, y, network = problem()
    X = data.X.float()
    small = TwoLayerNetwork(
        normalise_rows(network.W.float()), network.a.float(), "tanh", "mean-field"
    )
    state = take(gradient_descent(X, y.float(), small), 4)[3]
    assert state.network.W.dtype == torch.float32
    exact = take(gradient_descent(data.X, y, network), 4)[3]
    torch.testing.assert_close(state.network.W.double(), exact.network.W, rtol=1e-3, atol=1e-5)
