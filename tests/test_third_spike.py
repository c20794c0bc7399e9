import math

import numpy as np
import pytest
import torch
from torch.special import hermite_polynomial_he

from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, split_spike
from lowgrad_utils.third_spike import (
    hidden_spike,
    norm_spike,
    shared_matrix,
    slope_moments,
    spike_eigenvalues,
    spike_pair,
)

FLOAT = torch.float64


def drawn(nu=0.4, alpha=0.0, activation="softplus", seed=0, d=40):
    n, m = round(0.75 * d), round(1.25 * d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    return data, TwoLayerNetwork.random(d, m, activation=activation, seed=seed)


def residue(data, seed=1):
    return torch.randn(data.n, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", range(5))
def test_moments_are_hermite_coefficients_of_the_slope(activation, order):
    # E sigma'(s g) He_k(g) / s^k by a midpoint rule, fine enough for ReLU's jump at 0.
    step = 1e-4
    g = torch.arange(-100_000, 100_000, dtype=FLOAT) * step + step / 2
    weights = torch.exp(-g.square() / 2) * step / math.sqrt(2 * math.pi)
    polynomial = np.polynomial.hermite_e.hermeval(g.numpy(), [0] * order + [1])
    s = torch.tensor([0.6, 1.0, 2.5], dtype=FLOAT)
    slopes = ACTIVATIONS[activation].derivative(s[:, None] * g)
    expected = slopes @ (weights * torch.as_tensor(polynomial)) / s**order
    torch.testing.assert_close(slope_moments(activation, s, order), expected, atol=1e-6, rtol=1e-6)


def test_even_slopes_have_no_odd_moments():
    s = torch.linspace(0.5, 2, 5, dtype=FLOAT)
    for activation in ("tanh", "sigmoid", "erf"):
        assert float(slope_moments(activation, s, 1).abs().max()) == 0
        assert float(slope_moments(activation, s, 3).abs().max()) < 1e-12
        assert float(slope_moments(activation, s, 2).abs().min()) > 1e-3


@pytest.mark.parametrize("order", [1, 2, 3])
def test_hidden_spikes_against_naive_loops(order):
    data, network = drawn(alpha=0.5, activation="elu")
    r = residue(data)
    s = data.preactivation_scale(network.W)
    left, right = torch.zeros(data.d, dtype=FLOAT), torch.zeros(network.m, dtype=FLOAT)
    polynomial = [None, lambda z: z, lambda z: z**2 - 1, lambda z: z**3 - 3 * z][order]
    for i in range(data.n):
        left += data.X_B[i] * r[i] * polynomial(float(data.z[i]))
    for j in range(network.m):
        moment = slope_moments("elu", s[j : j + 1], order)
        right[j] = network.a[j] * moment * (network.W[j] @ data.q) ** order
    factor = network.gamma * data.zeta**order / data.n / [1, 1, 2, 6][order]
    H = hidden_spike(data, network, r, order=order)
    torch.testing.assert_close(H.matrix(), factor * torch.outer(left, right))


@pytest.mark.parametrize("activation", ["relu", "elu", "softplus", "tanh"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_hidden_spikes_are_projections_of_the_slope(activation, order):
    # Over fresh examples: the slope's regression on He_k(z) has the coefficient of H_k.
    with pytest.warns(match="Assumption 1"):
        data = sample_spiked_data(200_000, 10, nu=0.03, seed=2)
    network = TwoLayerNetwork.random(10, 8, activation=activation, seed=3)
    slopes = ACTIVATIONS[activation].derivative(data.X @ network.W.T)
    values = slopes * hermite_polynomial_he(data.z, order)[:, None] / math.factorial(order)
    s = data.preactivation_scale(network.W)
    coefficient = slope_moments(activation, s, order) * (data.zeta * (network.W @ data.q)) ** order
    expected = coefficient / math.factorial(order)
    error = values.std(dim=0) / data.n**0.5
    assert float(((values.mean(dim=0) - expected) / error).abs().max()) < 5


def test_scale_can_be_given_and_is_needed_for_real_data():
    data, network = drawn()
    r, s = residue(data), data.preactivation_scale(network.W)
    given = hidden_spike(data, network, r, scale=s)
    torch.testing.assert_close(given.matrix(), hidden_spike(data, network, r).matrix())
    real = SpikedData(data.X, data.z, data.q, data.zeta)
    torch.testing.assert_close(hidden_spike(real, network, r, scale=s).matrix(), given.matrix())
    with pytest.raises(ValueError, match="no known covariance"):
        hidden_spike(real, network, r)


def test_norm_spike_is_the_mean_over_weights():
    # With the spike switched off nearly, E_w sigma'(w^T x) is mu at the example's own length.
    data, _ = drawn(nu=0.0, activation="tanh")
    r = residue(data)
    network = TwoLayerNetwork.random(40, 60_000, activation="tanh", seed=5)
    N = norm_spike(data, network, r)
    bulk = data.X_B
    lengths = torch.sqrt(bulk.square().sum(dim=1) / 40 + data.zeta**2 / 40)
    # Bulk and spike together make a preactivation; here the spike is drawn as another coordinate.
    spike = torch.randn(1, 60_000, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    h = bulk @ network.W.T + data.zeta / math.sqrt(40) * spike
    seen = ACTIVATIONS["tanh"].derivative(h).mean(dim=1)
    assert float((seen - network.sigma.mu(lengths)).abs().max()) < 0.01
    deviation = seen - network.sigma.mu(torch.tensor([math.sqrt(41 / 40)], dtype=FLOAT))
    expected = network.gamma / data.n * bulk.T @ (r * deviation)
    assert float((N.u - expected).norm() / expected.norm()) < 0.2
    assert torch.equal(N.v, network.a)


def test_shared_matrix_is_the_spike_part_of_the_second_moment():
    data, _ = drawn()
    r = residue(data)
    matrix = shared_matrix(data, r)
    p = data.X_B.T @ (r * data.z)
    basis = torch.stack([data.q, p / p.norm()])
    bulk = data.X_B.T @ torch.diag(r) @ data.X_B
    rest = (data.X.T @ torch.diag(r) @ data.X - bulk) / data.zeta
    projected = basis @ rest @ basis.T
    # q and p are not quite orthogonal, so that p's share of q adds to each entry.
    overlap = float(data.q @ p / p.norm())
    kappa, length = matrix[0, 0], matrix[0, 1]
    expected = torch.stack([kappa + 2 * overlap * length, overlap * kappa + length])
    expected[1] += overlap**2 * length
    torch.testing.assert_close(projected[0], expected)
    assert float(matrix[1, 1]) == 0


@pytest.mark.parametrize("kind", ["signs", "offset", "gaussian"])
def test_pair_against_the_singular_values_of_the_sum(kind):
    d = 800
    data, network = drawn(nu=0.4, d=d)
    r = {"signs": residue(data).sign(), "offset": 1 + 0.5 * residue(data)}.get(kind, residue(data))
    parts = decompose(data, network, r)
    whole = parts.S2.matrix() + hidden_spike(data, network, r).matrix()
    seen = torch.linalg.svdvals(whole)[:2]
    # S2 holds a sum of n terms about its mean, of relative size n^(-1/2) each in two directions.
    torch.testing.assert_close(spike_pair(data, network, r), seen, rtol=0.12, atol=0.0)


@pytest.mark.parametrize("angle", [0, 30, 60, 80, 90])
@pytest.mark.parametrize("nu", [0.25, 0.45])
def test_spike_eigenvalues_against_the_matrix(angle, nu):
    data, _ = drawn(nu=nu, d=600)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    r = cos + sin * residue(data).sign()
    found = spike_eigenvalues(data, r)
    weigh = lambda X: torch.linalg.eigvalsh(X.T @ (r[:, None] * X))  # noqa: E731
    whole, bulk = weigh(data.X), weigh(data.X_B)
    # Outliers fluctuate by d^(-1/2), edges by d^(-2/3), both in units of the edge.
    unit = found.right_edge
    assert abs(float(bulk[-1]) - found.right_edge) < 0.06 * unit
    assert abs(float(bulk[0]) - found.left_edge) < 0.06 * unit
    assert float(whole[-1]) == pytest.approx(found.right, rel=0.04)
    assert math.isnan(found.left) == (angle < 45)
    if angle > 45:
        assert float(whole[0]) == pytest.approx(found.left, rel=0.08)


def test_bulk_ends_of_a_constant_residue_are_marchenko_and_pasturs():
    data, _ = drawn(d=400)
    found = spike_eigenvalues(data, torch.ones(data.n, dtype=FLOAT))
    assert found.right_edge == pytest.approx(400 * (1 + math.sqrt(0.75)) ** 2)
    assert found.left_edge == 0
    mirrored = spike_eigenvalues(data, -torch.ones(data.n, dtype=FLOAT))
    assert mirrored.left == pytest.approx(-found.right)
    assert math.isnan(mirrored.right) and mirrored.left_edge == pytest.approx(-found.right_edge)


@pytest.mark.parametrize("angle", [50, 60])
def test_the_left_eigenvalue_of_an_infinite_spike(angle):
    data, _ = drawn(nu=3.0, d=2000)
    theta = math.radians(angle)
    r = math.cos(theta) + math.sin(theta) * residue(data).sign()
    found = spike_eigenvalues(data, r)
    # Random signs with weights z^2 are balanced up to n^(-1/2) only.
    limit = 2000 * math.cos(2 * theta) / math.cos(theta)
    assert found.left == pytest.approx(limit, rel=0.12)
    total = data.zeta**2 * float(r @ data.z.square())
    assert found.right == pytest.approx(total, rel=1e-6)


def test_a_weak_spike_stays_in_the_bulk():
    data, _ = drawn(nu=0.0, d=400)
    weak = SpikedData(
        data.X - (1 - 0.1) * torch.outer(data.z, data.q), data.z, data.q, 0.1, data.eigenvalues
    )
    found = spike_eigenvalues(weak, residue(data).sign())
    assert math.isnan(found.left) and math.isnan(found.right)


def test_bad_input_is_named():
    data, network = drawn()
    r = residue(data)
    for function in (hidden_spike, norm_spike, spike_pair):
        with pytest.raises(ValueError, match=r"^residue has shape \(29,\)"):
            function(data, network, r[:-1])
    for function in (shared_matrix, spike_eigenvalues):
        with pytest.raises(ValueError, match=r"^residue has shape \(29,\)"):
            function(data, r[:-1])
        with pytest.raises(TypeError, match=r"^residue has dtype torch.float32"):
            function(data, r.float())
    for order in (0, 7, 1.5, True):
        with pytest.raises(ValueError, match=r"^order is .* from 1 to 6 is needed"):
            hidden_spike(data, network, r, order=order)
    with pytest.raises(ValueError, match=r"^order is -1, but a whole number from 0 to 6"):
        slope_moments("tanh", torch.ones(2, dtype=FLOAT), -1)
    with pytest.raises(ValueError, match=r"^activation is 'swish', but one of"):
        slope_moments("swish", torch.ones(2, dtype=FLOAT), 1)
    with pytest.raises(ValueError, match=r"^s has the entry 0"):
        slope_moments("tanh", torch.zeros(2, dtype=FLOAT), 2)
    with pytest.raises(TypeError, match=r"^s is"):
        slope_moments("tanh", 1.0, 2)
    with pytest.raises(ValueError, match="alpha = 0 is needed"):
        spike_eigenvalues(drawn(alpha=0.5)[0], r)
    with pytest.raises(ValueError, match="alpha = 0 is needed"):
        spike_eigenvalues(split_spike(data.X), r)
    for nothing in (0 * r, torch.where(data.z == data.z[0], 1.0, 0.0).to(FLOAT)):
        data.z[0] = 0
        with pytest.raises(ValueError, match=r"^residue is zero where z is not"):
            spike_eigenvalues(data, nothing)
    with pytest.warns(match="Assumption 1"):
        tall = sample_spiked_data(50, 40, nu=0.2)
    with pytest.raises(ValueError, match=r"^n is 50 and d is 40, but n < d is needed"):
        spike_eigenvalues(tall, torch.ones(50, dtype=FLOAT))
    with pytest.raises(ValueError, match=r"^W has shape \(50, 39\)"):
        norm_spike(data, TwoLayerNetwork.random(39, 50), r)
    with pytest.raises(ValueError, match=r"^s has the entry 0"):
        slope_moments("relu", torch.zeros(2, dtype=FLOAT), 1)
    with pytest.raises(ValueError, match="no known covariance"):
        norm_spike(split_spike(data.X), network, r)
