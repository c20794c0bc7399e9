import math

import numpy as np
import pytest
import torch

from lowgrad_utils.experiments import one_step
from lowgrad_utils.networks import ACTIVATIONS

FLOAT = torch.float64


def autograd_step(p, eta):
    """One step of gradient descent on the squared loss, by autograd."""
    W = p.network.W.clone().requires_grad_()
    f = p.network.gamma * p.network.sigma.value(p.data.X @ W.T) @ p.network.a
    (0.5 * (f - p.y).square().mean()).backward()
    return p.network.W - eta / p.network.gamma * W.grad


def test_a_step_is_gradient_descent():
    p = one_step.problem(40, nu=0.25, activation="softplus", target="both", scaling="ntk")
    ours = one_step.stepped(p.network.W, p.parts.G, 0.7 / p.network.gamma)
    torch.testing.assert_close(ours, autograd_step(p, 0.7))
    rows = one_step.stepped(p.network.W, p.parts.G, 0.7 / p.network.gamma, normalised=True)
    torch.testing.assert_close(rows, ours / ours.norm(dim=1, keepdim=True))


def test_samples_follow_the_population():
    p = one_step.problem(30, nu=0.25, alpha=0.5, target="both", noise=0.5, seed=3)
    sample = p.population.draw(200_000, torch.Generator().manual_seed(1))
    sigma = torch.diag(p.population.eigenvalues) + p.population.zeta**2 * torch.outer(
        p.data.q, p.data.q
    )
    np.testing.assert_allclose(sample.X.T @ sample.X / 200_000, sigma, atol=0.12)
    np.testing.assert_allclose(p.population.covariance_times(torch.eye(30).double()), sigma)
    assert float(sample.y.var()) == pytest.approx(p.population.second_moment, rel=0.03)
    # omega and q are orthogonal, but for alpha > 0 their parts are not quite independent.
    np.testing.assert_allclose(sample.parts.square().mean(dim=0), 1, rtol=0.05)
    slope = torch.linalg.lstsq(sample.X, sample.y[:, None]).solution[:, 0]
    assert float((sample.y - sample.X @ slope).square().mean()) == pytest.approx(
        p.population.linear_floor, rel=0.03
    )


def test_the_four_samples_are_different_and_three_do_not_depend_on_the_gradients_size():
    small, large = (one_step.problem(30, ratio=ratio) for ratio in (0.5, 4.0))
    torch.testing.assert_close(small.fit.X, large.fit.X)
    assert not torch.isclose(large.data.X, large.fit.X[:120]).any()
    assert not torch.isclose(large.validation.X, large.fit.X[:60]).any()


@pytest.mark.parametrize("target", list(one_step.TARGETS))
def test_targets_have_unit_variance(target):
    assert sum(c * c for c in one_step.TARGETS[target]) == pytest.approx(1)


def test_products_with_hermite_polynomials_are_exact():
    p = one_step.problem(12, nu=0.25, alpha=0.5, target="both", seed=5)
    W = one_step.stepped(p.network.W, p.parts.G, 1 / p.network.gamma)
    sample = p.population.draw(400_000, torch.Generator().manual_seed(2))
    for activation in ("relu", "tanh"):
        F = ACTIVATIONS[activation].value(sample.X @ W.T)
        measured = F.T @ sample.parts / len(F)
        ours = one_step.part_products(p.population, W, activation)
        scale = F.std(dim=0)[:, None]
        assert float(((measured - ours) / scale).abs().max()) < 0.02
    assert float(ours.abs().max()) > 0.1


def test_ranks_and_norms_of_the_rules():
    parts = one_step.problem(40, nu=0.25, target="both").parts
    G = parts.G
    U, s, _ = torch.linalg.svd(G, full_matrices=False)
    for k in (1, 2, 3):
        best = one_step.compressed(parts, f"rank-{k}")
        assert float((G - best).norm()) == pytest.approx(float(s[k:].norm()))
        assert int(torch.linalg.matrix_rank(best)) == k
    torch.testing.assert_close(one_step.compressed(parts, "full"), G)
    assert not one_step.compressed(parts, "none").any()
    pieces = G - parts.E
    torch.testing.assert_close(one_step.compressed(parts, "S1+S12+S2"), pieces)
    torch.testing.assert_close(one_step.compressed(parts, "S1+S12"), pieces - parts.S2.matrix())
    flat = one_step.compressed(parts, "orthogonal")
    torch.testing.assert_close(torch.linalg.svdvals(flat), s.norm().expand(40) / math.sqrt(40))
    # The polar factor is the orthogonal matrix with the largest inner product with G.
    torch.testing.assert_close((flat * G).sum(), s.sum() * s.norm() / math.sqrt(40))
    # With fewer examples than features G has zero singular values, which stay 0.
    few = one_step.problem(40, ratio=0.75).parts
    values = torch.linalg.svdvals(one_step.compressed(few, "orthogonal"))
    torch.testing.assert_close(values[:30], few.G.norm().expand(30) / math.sqrt(30))
    assert float(values[30:].max()) < 1e-10 * float(values[0])
    two = one_step.compressed(parts, "orthogonal-2")
    torch.testing.assert_close(two, U[:, :2] @ U[:, :2].T @ flat)
    signs = one_step.compressed(parts, "sign")
    torch.testing.assert_close(signs.norm(), G.norm())
    assert bool((signs * G > 0).all())
    assert int(torch.linalg.matrix_rank(one_step.compressed(parts, "sign-2"))) == 2


def test_weight_spikes_are_predicted_for_an_independent_residue():
    p = one_step.problem(300, seed=2)
    for eta in (0.3, 2.0):
        W = one_step.stepped(p.network.W, p.parts.G, eta / p.network.gamma)
        s = torch.linalg.svd(W, full_matrices=False)
        predicted = one_step.predict_weight_spikes(p, eta)
        assert predicted.values[0] == pytest.approx(float(s.S[0]), rel=0.03)
        cosine = abs(float(s.Vh[0] @ p.parts.S1.u) / float(p.parts.S1.u.norm()))
        assert predicted.residue == pytest.approx(cosine, abs=0.04)
    assert one_step.predict_weight_spikes(p, 0.0).residue == 0


def test_feature_spikes_are_those_of_gaussian_samples():
    t = torch.cat([torch.tensor([40.0, 12.0], dtype=FLOAT), torch.ones(98, dtype=FLOAT)])
    values = []
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        F = torch.randn(200, 100, generator=g, dtype=FLOAT) * t.sqrt()
        values.append(torch.linalg.svdvals(F)[:3] / math.sqrt(200))
    predicted = one_step.predict_feature_spikes(torch.diag(t), 200)
    np.testing.assert_allclose(torch.stack(values).mean(dim=0)[:2], predicted[:2], rtol=0.04)
    assert predicted[2] == 0


def test_functions_of_t_explain_themselves_and_smoothing_is_a_mean():
    t = torch.linspace(-2, 2, 50, dtype=FLOAT)
    v = t**2 - (t**2).mean()
    assert one_step.explained_share(v, [t**2, t]) == pytest.approx(1)
    assert one_step.explained_share(v, [t]) < 1e-10
    # Two functions that are one up to rounding, as phi(t) and phi(-t) of an odd sigma, count once.
    w = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    twice = one_step.explained_share(w, [t, -t * (1 + 1e-15 * w)])
    assert twice == pytest.approx(one_step.explained_share(w, [t]), rel=1e-9)
    noise = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    expected = [float(torch.relu(0.7 * x + 0.5 * noise).mean()) for x in t[::10]]
    ours = one_step.smoothed(t, 0.7, 0.5, "relu")[::10]
    np.testing.assert_allclose(ours, expected, atol=5e-3)


def test_ridge_chooses_on_validation_and_theory_predicts():
    p = one_step.problem(100, seed=1)
    W = one_step.stepped(p.network.W, p.parts.G, 2 / p.network.gamma)
    result = one_step.outcome(p, W)
    F, F_v, F_t = (torch.relu(s.X @ W.T) for s in (p.fit, p.validation, p.test))
    errors = {}
    for penalty in one_step.PENALTIES:
        centred = F - F.mean(dim=0)
        gram = centred.T @ centred / len(F) + penalty * torch.eye(F.shape[1], dtype=FLOAT)
        w = torch.linalg.solve(gram, centred.T @ (p.fit.y - p.fit.y.mean()) / len(F))
        b = p.fit.y.mean() - F.mean(dim=0) @ w
        f = F_t @ w + b
        error = float((f - p.test.y).square().mean())
        errors[float((F_v @ w + b - p.validation.y).square().mean())] = penalty, error, f
    penalty, error, f = errors[min(errors)]
    assert (result.penalty, result.error) == (penalty, pytest.approx(error))
    expected = (p.test.parts * (f - f.mean())[:, None]).mean(dim=0)
    torch.testing.assert_close(result.learnt, expected)
    assert result.predicted == pytest.approx(error, rel=0.15)
    torch.testing.assert_close(result.predicted_learnt, expected, atol=0.1, rtol=0)
    assert one_step.outcome(p, W, theory=False).error == pytest.approx(error)


def test_several_steps_repeat_one():
    p = one_step.problem(40, target="both", nu=0.25)
    W = p.network.W
    for _ in range(2):
        network = type(p.network)(W, p.network.a, "relu", "mean-field")
        q = one_step.Problem(p.population, network, p.data, p.y, 0)
        W = autograd_step(q, 0.5)
        W = W / W.norm(dim=1, keepdim=True)
    torch.testing.assert_close(one_step.descended(p, 0.5, "full", 2), W)


def test_cells_hold_what_they_say():
    cell = one_step.step_cell(40, 0.25, 0.0, "relu", "mean-field", "both", 0.2, 4.0, False, 1.0, 2)
    p = one_step.problem(40, nu=0.25, target="both", seed=2)
    W = autograd_step(p, 1.0)
    assert cell["w1"] == pytest.approx(float(torch.linalg.matrix_norm(W, 2)), abs=2e-6)
    assert cell["risk"] == pytest.approx(one_step.outcome(p, W).error, abs=2e-6)
    assert cell["linear"] == pytest.approx(one_step.linear_error(p), abs=2e-6)
    assert cell["floor"] == pytest.approx(0.54)
    b = p.data.X.T @ p.residue
    assert cell["omega"] == pytest.approx(
        abs(float(b @ p.population.omega)) / float(b.norm()), abs=2e-6
    )
    assert 0 <= cell["shape_2"] <= cell["shape_1"] <= 1


def test_the_degree_cell_adds_up_squares():
    cell = one_step.degree_cell(40, 0.25, "q", 0.5, "softplus", 3)
    p = one_step.problem(40, nu=0.25, activation="softplus", target="q", seed=3)
    products = one_step.part_products(p.population, autograd_step(p, 0.5), "softplus")
    for name, column in zip(one_step.PARTS, products.T):
        assert cell[name] == pytest.approx(float(column @ column), rel=1e-5)


@pytest.mark.parametrize(("nu", "degree"), [(0.0, 1), (0.25, 2), (0.375, 2)])
def test_expected_knowledge_is_the_mean_over_random_weights(nu, degree):
    values = []
    for seed in range(20):
        p = one_step.problem(60, nu=nu, activation="softplus", seed=seed)
        column = one_step.part_products(p.population, p.network.W, "softplus")[:, 2 + degree]
        values.append(float(column @ column))
    error = 3 * np.std(values) / math.sqrt(20)
    expected = one_step.expected_knowledge(60, nu, degree, "softplus")
    # w^T q is Gaussian up to 1/d, and the fourth power notices.
    assert np.mean(values) == pytest.approx(expected, abs=error + 0.1 * expected)


def test_compression_tunes_the_step_on_the_validation_sample():
    cell = one_step.compression_cell(
        40, 0.0, 0.0, "relu", "mean-field", "omega", 4.0, "rank-1", 1, 1
    )
    p = one_step.problem(40, seed=1)
    tried = {}
    for eta in one_step.COMPRESSION_ETAS:
        W = one_step.stepped(
            p.network.W,
            one_step.compressed(p.parts, "rank-1"),
            eta / p.network.gamma,
            normalised=True,
        )
        validation, test = one_step.tuned(p, W)
        assert test == pytest.approx(one_step.outcome(p, W, theory=False).error)
        tried[validation] = {"risk": pytest.approx(test, abs=2e-6), "eta": eta}
    assert cell == tried[min(tried)]


def test_quadratic_shares_add_up_to_the_learnt_share():
    p = one_step.problem(60, seed=3)
    W = one_step.stepped(p.network.W, p.parts.G, 3 / p.network.gamma)
    shares = one_step.quadratic_shares(p, W)
    learnt = one_step.outcome(p, W, theory=False).learnt[one_step.PARTS.index("omega_2")]
    theta = math.sqrt(0.5)
    assert sum(shares[1:]) == pytest.approx(float(learnt) / theta, abs=1e-6)
    b = p.data.X.T @ p.residue
    cosine = float(b @ p.population.omega) / float(b.norm())
    assert shares.ceiling == pytest.approx(cosine**4)
    with pytest.raises(ValueError, match=r"^the target's coefficient of omega_2 is 0"):
        one_step.quadratic_shares(one_step.problem(40, target="q"), p.network.W[:50, :40])


def test_mnist_without_a_step_is_random_features():
    plain = one_step.mnist_cell(False, "none", 0.0, 0)
    centred = one_step.mnist_cell(True, "full", 0.0, 0)
    assert plain["risk"] == centred["risk"]
    assert 0.2 < plain["risk"] < 0.6
    assert plain["u1_q"] > 0.9 > 0.6 > centred["u1_q"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_step.problem(40, target="nothing"), "target is 'nothing'"),
        (lambda: one_step.problem(40, ratio=0), "ratio is 0"),
        (lambda: one_step.problem(40, noise=-1), "noise is -1"),
        (lambda: one_step.expected_knowledge(0, 0.25, 2), "d is 0"),
        (lambda: one_step.expected_knowledge(60, 0.25, 0), "degree is 0"),
        (lambda: one_step.compressed(one_step.problem(40).parts, "rank-x"), "rule is 'rank-x'"),
        (lambda: one_step.descended(one_step.problem(40), 1.0, "full", 0), "steps is 0"),
        (lambda: one_step.predict_weight_spikes(one_step.problem(40), -1), "eta is -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
