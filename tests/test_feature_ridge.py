import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from lowgrad_utils.feature_ridge import (
    effective_penalty,
    feature_covariance,
    hermite_polynomials,
    hermite_series,
    ridge_path,
    ridge_theory,
)
from lowgrad_utils.networks import ACTIVATIONS

FLOAT = torch.float64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def test_hermite_polynomials_are_scipys():
    x = torch.linspace(-3, 3, 7, dtype=FLOAT)
    ours = hermite_polynomials(x, 6)
    for k in range(7):
        theirs = special.eval_hermitenorm(k, x.numpy()) / math.sqrt(math.factorial(k))
        np.testing.assert_allclose(ours[k], theirs, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_coefficients_are_the_integrals(activation):
    sigma = ACTIVATIONS[activation].value
    series = hermite_series(activation, torch.tensor([0.7, 3.0], dtype=FLOAT), 4)
    for j, s in enumerate((0.7, 3.0)):
        for k in range(5):
            he = special.hermitenorm(k) / math.sqrt(math.factorial(k))

            def integrand(g, s=s, he=he):
                return float(sigma(torch.tensor(s * g, dtype=FLOAT))) * he(g) * stats.norm.pdf(g)

            expected = sum(integrate.quad(integrand, *ends)[0] for ends in ((-9, 0), (0, 9)))
            assert float(series.coefficients[j, k]) == pytest.approx(expected, abs=3e-6)


def arc_cosine_covariance(P):
    """Covariance of ReLU features in closed form (Cho and Saul)."""
    s = P.diagonal().sqrt()
    scale = torch.outer(s, s)
    R = (P / scale).clamp(-1, 1)
    kernel = (1 - R.square()).sqrt() + R * (math.pi - torch.arccos(R))
    return scale * (kernel - 1) / (2 * math.pi)


def test_relu_features_have_the_arc_cosine_covariance():
    W = gaussian(40, 30) / math.sqrt(30)
    signs = torch.sign(gaussian(40, seed=1))
    for spike, tolerance in ((0.0, 1e-5), (9.0, 2e-4)):
        P = W @ W.T + spike * torch.outer(signs, signs)
        expected = arc_cosine_covariance(P)
        ours = feature_covariance(P, "relu")
        assert float((ours - expected).abs().max() / expected.diagonal().max()) < tolerance
        # Both ends of the degree's parity put the tail into the right degrees.
        odd = feature_covariance(P, "relu", 31)
        assert float((odd - expected).abs().max() / expected.diagonal().max()) < tolerance


def test_the_covariance_is_that_of_samples():
    W = gaussian(5, 4)
    F = torch.tanh(gaussian(400_000, 4, seed=2) @ W.T)
    np.testing.assert_allclose(feature_covariance(W @ W.T, "tanh"), torch.cov(F.T), atol=6e-3)


def test_ridge_solves_its_normal_equations():
    F, y = gaussian(20, 6) + 1, gaussian(20, seed=3) + 5
    for penalty, fit in zip((0.1, 2.0), ridge_path(F, y, [0.1, 2.0])):
        # The intercept as one more, unpenalised column.
        A = torch.cat([F, torch.ones(20, 1, dtype=FLOAT)], dim=1)
        shrink = torch.diag(torch.tensor([penalty] * 6 + [0.0], dtype=FLOAT))
        w = torch.linalg.solve(A.T @ A / 20 + shrink, A.T @ y / 20)
        torch.testing.assert_close(fit(F), A @ w)
        torch.testing.assert_close(fit.weights, w[:6])


def test_the_effective_penalty_solves_its_equation_also_below_interpolation():
    t = gaussian(50).square()
    for n in (20, 200):
        for penalty in (1e-4, 0.3):
            kappa = effective_penalty(t, n, penalty)
            df = float((t / (t + kappa)).sum())
            assert kappa * (1 - df / n) == pytest.approx(penalty, rel=1e-6)


def test_the_predicted_error_is_that_of_gaussian_features():
    m, n = 60, 150
    t = torch.linspace(0.1, 3, m, dtype=FLOAT)
    beta = gaussian(m, seed=4) / math.sqrt(m)
    moment = float(beta.square() @ t) + 0.25
    theory = ridge_theory(torch.diag(t), t * beta, moment, n, 0.2)
    errors = []
    for seed in range(40):
        F = gaussian(n, m, seed=10 + seed) * t.sqrt()
        y = F @ beta + 0.5 * gaussian(n, seed=100 + seed)
        w = ridge_path(F, y, [0.2])[0].weights
        errors.append(float((w - beta).square() @ t) + 0.25)
    assert np.mean(errors) == pytest.approx(theory.error, rel=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hermite_series("relu", torch.zeros(2, dtype=FLOAT)), "the least of s is 0"),
        (lambda: hermite_series("cos", torch.ones(2, dtype=FLOAT)), "activation is 'cos'"),
        (lambda: feature_covariance(torch.ones(2, 3, dtype=FLOAT), "relu"), "preactivations has"),
        (lambda: ridge_path(torch.eye(3, dtype=FLOAT), torch.ones(3, dtype=FLOAT), [0.0]),
         "a penalty is 0"),
        (lambda: ridge_path(torch.eye(3, dtype=FLOAT), torch.ones(2, dtype=FLOAT), [1.0]),
         "y has shape"),
        (lambda: effective_penalty(-torch.ones(2, dtype=FLOAT), 5, 0.1), "the least of eigenv"),
        (lambda: ridge_theory(torch.eye(2, dtype=FLOAT), torch.ones(3, dtype=FLOAT), 1, 5, 0.1),
         "covariance has shape"),
        (lambda: ridge_theory(torch.zeros(2, 2, dtype=FLOAT), torch.zeros(2, dtype=FLOAT), 1, 5, 1),
         "covariance has no eigenvalue above 0"),
        (lambda: ridge_theory(-torch.eye(2, dtype=FLOAT), torch.ones(2, dtype=FLOAT), 1, 5, 0.1),
         "covariance has no eigenvalue above -1"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
