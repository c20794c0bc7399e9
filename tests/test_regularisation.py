import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.networks import ACTIVATIONS, SCALINGS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.regularisation import (
    add_input_noise,
    jacobian_penalty,
    jacobian_penalty_gradient,
    split_jacobian_penalty,
)
from lowgrad_utils.spiked_data import sample_spiked_data, split_spike

FLOAT = torch.float64
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]
_SIGMA = {
    "relu": torch.nn.ReLU(),
    "elu": torch.nn.ELU(),
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "softplus": torch.nn.Softplus(),
    "sigmoid": torch.nn.Sigmoid(),
    "tanh": torch.nn.Tanh(),
    "erf": torch.erf,
}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def network_with(d, m, activation, scaling="ntk", seed=0):
    """A network whose outer weights are no signs, so that a wrong power of a shows."""
    W = normalise_rows(gaussian(m, d, seed=seed))
    return TwoLayerNetwork(W, gaussian(m, seed=seed + 1), activation, scaling)


def penalty_by_autograd(X, network, strength):
    """The penalty example by example through torch's own derivative, and its second backward."""
    W = network.W.clone().requires_grad_()
    total = 0.0
    for x in X:
        f = network.gamma * network.a @ _SIGMA[network.activation](W @ x)
        (jacobian,) = torch.autograd.grad(f, W, create_graph=True)
        total = total + jacobian.square().sum()
    value = strength * total / (2 * len(X))
    value.backward()
    return float(value.detach()), W.grad.T


def weights_moved(network, direction, step):
    """The network at W + step * direction; rows need not have unit length here."""
    moved = TwoLayerNetwork(network.W, network.a, network.activation, network.scaling)
    object.__setattr__(moved, "W", network.W + step * direction)
    return moved


# --- noise ----------------------------------------------------------------------------------------


def test_noise_is_added_to_the_bulk_and_to_nothing_else():
    clean = sample_spiked_data(300, 400, nu=0.3, alpha=0.7, seed=4)
    noisy = add_input_noise(clean, 2.25, seed=4)
    assert torch.equal(noisy.z, clean.z)
    assert torch.equal(noisy.q, clean.q)
    assert noisy.zeta == clean.zeta
    xi = (noisy.X_B - clean.X_B) / 1.5
    torch.testing.assert_close(xi, (noisy.X - clean.X) / 1.5)
    count = xi.numel()
    assert abs(float(xi.mean())) < 4.5 / math.sqrt(count)
    assert float(xi.square().mean()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / count))
    assert float(xi.pow(4).mean()) == pytest.approx(3, abs=4.5 * math.sqrt(96 / count))
    # The stream is neither that of the data nor that of the weights of the same seed.
    W = torch.randn(500, 400, generator=torch.Generator().manual_seed(4), dtype=FLOAT)
    bulk = clean.X_B / clean.eigenvalues.sqrt()
    for other in (bulk, W[:300]):
        assert abs(float((xi * other).mean())) < 4.5 / math.sqrt(count)


@pytest.mark.parametrize("activation", ["sigmoid", "elu"])
def test_mu_is_that_of_the_noisy_data(activation):
    d = 60
    network = TwoLayerNetwork.random(d, 8, activation=activation, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AssumptionWarning)
        clean = sample_spiked_data(20000, d, nu=0.05, alpha=0.5, seed=1)
    noisy = add_input_noise(clean, 4.0, seed=1)
    slopes = network.sigma.derivative(noisy.X @ network.W.T)
    spread = 4.5 * slopes.std(dim=0) / math.sqrt(20000)
    assert bool(((slopes.mean(dim=0) - network.mu(noisy)).abs() < spread).all())
    assert bool(((slopes.mean(dim=0) - network.mu(clean)).abs() > spread).all())


def test_no_noise_changes_nothing():
    clean = sample_spiked_data(30, 40, nu=0.3)
    assert add_input_noise(clean, 0.0) is clean


def test_noise_depends_on_its_seed_only():
    clean = sample_spiked_data(30, 40, nu=0.3)
    once, again, other = (add_input_noise(clean, 1.0, seed=seed).X for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    generator = torch.Generator().manual_seed(7)
    first, second = (add_input_noise(clean, 1.0, seed=generator).X for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_on_real_data(dtype):
    real = split_spike((1 + gaussian(30, 40)).to(dtype))
    noisy = add_input_noise(real, 1.0, seed=2)
    assert noisy.X.dtype == dtype
    assert noisy.eigenvalues is None
    assert torch.equal(noisy.q, real.q)
    assert noisy.zeta == real.zeta


@pytest.mark.parametrize("tau2", [-0.1, math.nan, math.inf, "much"])
def test_bad_noise(tau2):
    clean = sample_spiked_data(3, 4, nu=0.3)
    with pytest.raises((TypeError, ValueError), match=r"^tau2 is .*a finite number of at least 0"):
        add_input_noise(clean, tau2)


# --- penalty --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("n", "d", "m"), [(6, 9, 11), (40, 5, 3)])
@pytest.mark.filterwarnings("ignore::lowgrad_utils.checks.AssumptionWarning")
def test_value_and_gradient_are_those_of_automatic_differentiation(activation, scaling, n, d, m):
    network = network_with(d, m, activation, scaling, seed=n)
    X = 1.3 * gaussian(n, d, seed=n + 2)
    value, gradient = penalty_by_autograd(X, network, strength=0.7)
    assert jacobian_penalty(X, network, strength=0.7) == pytest.approx(value, rel=1e-12)
    G = jacobian_penalty_gradient(X, network, strength=0.7)
    assert G.shape == (d, m)
    torch.testing.assert_close(G, gradient, rtol=1e-11, atol=1e-14)


# Not ELU: a preactivation within the step of its kink leaves an error of first order.
@given(
    st.sampled_from([name for name in SMOOTH if ACTIVATIONS[name].smoothness == "C2"]),
    st.tuples(st.integers(2, 7), st.integers(2, 7), st.integers(1, 7)),
    st.integers(0, 999),
)
def test_the_gradient_is_a_difference_quotient_of_the_value(activation, sizes, seed):
    n, d, m = sizes
    network, X = network_with(d, m, activation, seed=seed), gaussian(n, d, seed=seed + 2)
    direction = gaussian(m, d, seed=seed + 3)
    right, left = (
        jacobian_penalty(X, weights_moved(network, direction, step)) for step in (1e-5, -1e-5)
    )
    slope = float((jacobian_penalty_gradient(X, network).T * direction).sum())
    assert (right - left) / 2e-5 == pytest.approx(slope, rel=1e-6, abs=1e-8 * (1 + right))


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("activation", SMOOTH)
def test_the_split_is_that_of_full_matrices(real, activation):
    data = sample_spiked_data(45, 60, nu=0.4, alpha=0.3, seed=5)
    data = split_spike(data.X + 0.3) if real else data
    network = network_with(60, 70, activation, seed=6)
    parts = split_jacobian_penalty(data, network, strength=3.0)
    H = data.X @ network.W.T
    values = network.sigma.derivative(H) * network.sigma.second_derivative(H) * network.a**2
    D = torch.diag((data.X**2).sum(dim=1))
    scale = 3.0 * network.gamma**2 / 45
    spike = scale * data.zeta * torch.outer(data.q, data.z) @ D @ values
    X_B = data.X - data.zeta * torch.outer(data.z, data.q)
    torch.testing.assert_close(parts.S3.matrix(), spike)
    torch.testing.assert_close(parts.E2, scale * X_B.T @ D @ values, rtol=1e-9, atol=1e-12)
    gradient = jacobian_penalty_gradient(data.X, network, strength=3.0)
    torch.testing.assert_close(parts.total, gradient)
    assert parts.S3.norm == pytest.approx(float(torch.linalg.svdvals(spike)[0]))


def test_blocks_of_rows_do_not_matter():
    X, network = gaussian(71, 5), network_with(5, 4, "tanh")
    one_by_one = [jacobian_penalty_gradient(x[None], network) for x in X]
    G = jacobian_penalty_gradient(X, network)
    torch.testing.assert_close(G, torch.stack(one_by_one).mean(dim=0))
    values = [jacobian_penalty(x[None], network) for x in X]
    assert jacobian_penalty(X, network) == pytest.approx(sum(values) / 71)


@pytest.mark.parametrize("strength", [0.0, 2.5])
def test_strength_is_a_factor(strength):
    data, network = sample_spiked_data(15, 20, nu=0.3), network_with(20, 9, "softplus")
    one, parts = (split_jacobian_penalty(data, network, strength=s) for s in (1.0, strength))
    torch.testing.assert_close(parts.total, strength * one.total)
    torch.testing.assert_close(parts.E2, strength * one.E2)
    torch.testing.assert_close(parts.S3.matrix(), strength * one.S3.matrix())
    value = jacobian_penalty(data.X, network, strength=strength)
    assert value == pytest.approx(strength * jacobian_penalty(data.X, network))


def test_the_penalty_of_relu_is_flat_and_the_reader_is_told():
    data, network = sample_spiked_data(15, 20, nu=0.3), network_with(20, 9, "relu")
    with pytest.warns(AssumptionWarning, match="penalty of relu is constant between jumps") as seen:
        parts = split_jacobian_penalty(data, network)
    assert seen[0].filename == __file__
    assert not parts.total.any()
    assert not parts.E2.any()
    assert parts.S3.norm == 0
    with pytest.warns(AssumptionWarning, match="penalty of relu") as seen:
        assert not jacobian_penalty_gradient(data.X, network).any()
    assert seen[0].filename == __file__
    # Flat: a small move changes no active neuron; a large one jumps.
    direction = gaussian(9, 20, seed=3)
    here, near, far = (
        jacobian_penalty(data.X, weights_moved(network, direction, s)) for s in (0, 1e-9, 1.0)
    )
    assert here == near
    assert here != far


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_and_weights_that_carry_gradients(dtype):
    X, network = gaussian(7, 5).to(dtype), network_with(5, 4, "tanh")
    W = network.W.to(dtype) / network.W.to(dtype).norm(dim=1, keepdim=True)
    network = TwoLayerNetwork(W.requires_grad_(), network.a.to(dtype), "tanh")
    parts = split_jacobian_penalty(split_spike(X), network)
    assert parts.total.dtype == parts.E2.dtype == parts.S3.v.dtype == dtype
    assert not parts.total.requires_grad
    assert not parts.S3.v.requires_grad
    assert type(jacobian_penalty(X, network)) is float


def test_arguments_are_left_alone():
    data, network = sample_spiked_data(15, 20, nu=0.3), network_with(20, 9, "softplus")
    X, W = data.X.clone(), network.W.clone()
    parts = split_jacobian_penalty(data, network)
    total = parts.total.clone()
    _ = parts.E2
    assert torch.equal(parts.total, total)
    assert torch.equal(data.X, X)
    assert torch.equal(network.W, W)


FUNCTIONS = [
    jacobian_penalty,
    jacobian_penalty_gradient,
    lambda X, network, **strength: split_jacobian_penalty(split_spike(X), network, **strength),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_arguments(function):
    X, network = gaussian(7, 5), network_with(5, 4, "tanh")
    with pytest.raises(ValueError, match=r"^strength is -1, but a finite number of at least 0"):
        function(X, network, strength=-1)
    with pytest.raises(ValueError, match=r"^X has shape \(7, 4\), but any x 5 is needed"):
        function(X[:, :4], network)
    with pytest.raises(TypeError, match=r"^X has dtype torch\.float32, but W has torch\.float64"):
        function(X.float(), network)
