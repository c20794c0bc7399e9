import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch.nn import functional as F

from lowgrad_utils.networks import (
    ACTIVATIONS,
    LOSSES,
    SCALINGS,
    TwoLayerNetwork,
    gaussian_mean,
    normalise_rows,
)
from lowgrad_utils.spiked_data import sample_spiked_data, split_spike

FLOAT = torch.float64
# Away from 0, where ReLU and ELU have a kink.
POINTS = torch.cat([torch.linspace(-6, -0.05, 40), torch.linspace(0.05, 6, 40)]).to(FLOAT)

REFERENCE = {
    "relu": lambda x: x.clamp(min=0),
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    "erf": torch.erf,
}

each_activation = pytest.mark.parametrize("name", ACTIVATIONS)
each_loss = pytest.mark.parametrize("name", LOSSES)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def derivative(function, x):
    x = x.clone().requires_grad_()
    value = function(x).sum()
    # A function whose graph does not reach x, such as a constant, has derivative 0.
    if not value.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(value, x)[0]


def tensor(*values):
    return torch.tensor(values, dtype=FLOAT)


def test_the_names_are_those_of_the_book():
    assert set(ACTIVATIONS) == set(REFERENCE)
    assert set(LOSSES) == {"mse", "huber", "log-cosh", "logistic"}
    assert all(key == value.name for key, value in (ACTIVATIONS | LOSSES).items())
    assert {k: a.smoothness for k, a in ACTIVATIONS.items() if a.smoothness != "C2"} == {
        "relu": "C0",
        "elu": "C1",
    }


@each_activation
def test_values_are_the_textbook_formulas(name):
    torch.testing.assert_close(ACTIVATIONS[name].value(POINTS), REFERENCE[name](POINTS))


@each_activation
def test_derivatives_are_those_of_automatic_differentiation(name):
    sigma = ACTIVATIONS[name]
    first = derivative(sigma.value, POINTS)
    torch.testing.assert_close(sigma.derivative(POINTS), first, rtol=1e-12, atol=1e-14)
    # From sigma' of the reference, so that both derivatives do not rest on one formula.
    second = derivative(lambda x: _first(REFERENCE[name], x), POINTS)
    torch.testing.assert_close(sigma.second_derivative(POINTS), second, rtol=1e-8, atol=1e-10)


@each_activation
def test_at_the_kink_the_derivative_is_the_one_torch_trains_with(name):
    sigma, origin = ACTIVATIONS[name], tensor(0.0)
    torch.testing.assert_close(sigma.derivative(origin), derivative(sigma.value, origin))


def _first(function, x):
    return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]


@each_activation
def test_derivatives_survive_large_arguments_and_float32(name):
    sigma = ACTIVATIONS[name]
    for x in (tensor(-800.0, 800.0), tensor(-800.0, 800.0).float()):
        for function in (sigma.value, sigma.derivative, sigma.second_derivative):
            assert torch.isfinite(function(x)).all()
            assert function(x).dtype == x.dtype


def test_softplus_is_exact_beyond_torchs_threshold():
    # torch's own leaves out exp(-x) from x = 20 on, and tells automatic differentiation so.
    x = torch.linspace(15, 40, 26, dtype=FLOAT)
    excess = derivative(ACTIVATIONS["softplus"].value, x) - 1
    torch.testing.assert_close(excess, -1 / (1 + torch.exp(x)), rtol=1e-4, atol=3e-16)
    logistic = LOSSES["logistic"].value(-x, torch.ones_like(x)) - x
    torch.testing.assert_close(logistic, torch.log1p(torch.exp(-x)), rtol=0, atol=1e-14)


def quad(function, s):
    """Integrate function(s g) over the normal law, split where the integrand is narrow."""

    def integrand(g):
        x = torch.tensor(s * g, dtype=FLOAT)
        return float(function(x)) * math.exp(-g * g / 2) / math.sqrt(2 * math.pi)

    inner = min(30 / s, 12)
    pieces = [(-12, -inner), (-inner, 0), (0, inner), (inner, 12)]
    options = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 400}
    return sum(integrate.quad(integrand, a, b, **options)[0] for a, b in pieces if a < b)


@each_activation
@pytest.mark.parametrize("s", [0.1, 1.0, 3.0, 10.0, 60.0])
def test_mu_and_c_are_the_integrals(name, s):
    sigma = ACTIVATIONS[name]
    assert float(sigma.mu(tensor(s))) == pytest.approx(quad(sigma.derivative, s), abs=1e-12)
    if name != "relu":  # Its sigma'' is a point mass, which no quadrature sees: Stein below.
        c = quad(sigma.second_derivative, s)
        assert float(sigma.c(tensor(s))) == pytest.approx(c, abs=1e-12)


@each_activation
@pytest.mark.parametrize("s", [0.1, 1.0, 2.7, 10.0, 60.0])
def test_mean_square_slope_is_the_integral(name, s):
    sigma = ACTIVATIONS[name]
    expected = quad(lambda x: sigma.derivative(x).square(), s)
    assert float(sigma.mean_square_slope(tensor(s))) == pytest.approx(expected, abs=1e-12)


@each_activation
@pytest.mark.parametrize("s", [0.05, 0.7, 4.0, 30.0])
def test_c_obeys_steins_identity(name, s):
    # E sigma''(s g) = E g sigma'(s g) / s, which holds for ReLU's jump too.
    sigma = ACTIVATIONS[name]
    stein = quad(lambda x: x / s * sigma.derivative(x), s) / s
    assert float(sigma.c(tensor(s))) == pytest.approx(stein, abs=2e-10)


@each_activation
def test_mu_obeys_steins_identity_too(name):
    # E sigma'(s g) = E g sigma(s g) / s.
    sigma, s = ACTIVATIONS[name], 1.7
    stein = quad(lambda x: x / s * sigma.value(x), s) / s
    assert float(sigma.mu(tensor(s))) == pytest.approx(stein, abs=1e-10)


@each_activation
def test_mu_is_the_mean_over_samples(name):
    g, s = gaussian(100_000, seed=3), tensor(0.5, 2.0)
    slopes = ACTIVATIONS[name].derivative(g[:, None] * s)
    deviation = slopes.std(dim=0) / math.sqrt(len(g))
    assert ((slopes.mean(dim=0) - ACTIVATIONS[name].mu(s)).abs() < 4.5 * deviation + 1e-12).all()


@each_activation
def test_mu_keeps_shape_precision_and_the_value_at_rest(name):
    sigma = ACTIVATIONS[name]
    s = torch.linspace(0.1, 3, 150, dtype=FLOAT)  # More than one block of the quadrature.
    for mean in (sigma.mu, sigma.c):
        # Up to the order of summation, a value does not depend on its neighbours.
        alone = torch.cat([mean(x[None]) for x in s])
        torch.testing.assert_close(mean(s), alone, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(mean(s.reshape(10, 15)), mean(s).reshape(10, 15))
        assert mean(s.float()).dtype == torch.float32
    rest = sigma.derivative(tensor(-1e-300, 1e-300)).mean()
    assert float(sigma.mu(tensor(0.0))) == pytest.approx(float(rest), abs=1e-12)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_standard_deviations_out_of_range(bad):
    for mean in (ACTIVATIONS["relu"].mu, ACTIVATIONS["tanh"].c):
        with pytest.raises(ValueError, match=r"^s has negative, NaN or infinite"):
            mean(tensor(1.0, bad))


@pytest.mark.parametrize("bad", [1.0, torch.tensor([1, 2])])
def test_standard_deviations_of_the_wrong_type(bad):
    # Whole numbers used to come back as means rounded to whole numbers.
    with pytest.raises(TypeError, match=r"^s is .*floating-point tensor"):
        ACTIVATIONS["sigmoid"].mu(bad)


@given(st.integers(0, 4), st.floats(0.1, 5))
def test_gaussian_moments(power, s):
    moment = [1, 0, s**2, 0, 3 * s**4][power]
    mean = gaussian_mean(lambda x: x**power, tensor(s))
    assert float(mean) == pytest.approx(moment, abs=1e-9 * max(1, s**4))


def targets_for(name, f, seed):
    y = 2 * gaussian(len(f), seed=seed)
    return torch.where(y > 0, 1.0, -1.0).to(FLOAT) if LOSSES[name].binary else y


@each_loss
@given(seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_residues_and_curvatures_are_those_of_automatic_differentiation(name, seed, scale):
    f = scale * gaussian(20, seed=seed)
    y = targets_for(name, f, seed + 100)
    residue = LOSSES[name].residue(f, y)
    expected = derivative(lambda f: LOSSES[name].value(f, y), f)
    torch.testing.assert_close(residue, expected, rtol=1e-10, atol=1e-12)
    assert residue.abs().max() <= 1 or not LOSSES[name].bounded
    curvature = LOSSES[name].curvature(f, y)
    expected = derivative(lambda f: LOSSES[name].residue(f, y), f)
    # Where autograd takes 1 - tanh^2, rounding is left of a small number.
    torch.testing.assert_close(curvature, expected, rtol=1e-10, atol=1e-12)
    assert bool((curvature >= 0).all())


def test_losses_are_the_textbook_formulas():
    f = gaussian(50, seed=1) * 3
    y = gaussian(50, seed=2)
    torch.testing.assert_close(LOSSES["mse"].value(f, y), (f - y) ** 2 / 2)
    torch.testing.assert_close(LOSSES["log-cosh"].value(f, y), torch.log(torch.cosh(f - y)))
    t = (f - y).abs()
    huber = torch.where(t <= 1, t**2 / 2, t - 0.5)
    torch.testing.assert_close(LOSSES["huber"].value(f, y), huber)
    signs = y.sign()
    cross = F.binary_cross_entropy_with_logits(f, (signs + 1) / 2, reduction="none")
    torch.testing.assert_close(LOSSES["logistic"].value(f, signs), cross)


@each_loss
def test_losses_do_not_overflow(name):
    f, y = tensor(1e4, -1e4), tensor(1.0, 1.0)
    assert torch.isfinite(LOSSES[name].value(f, y)).all()
    assert torch.isfinite(LOSSES[name].residue(f, y)).all()
    assert torch.isfinite(LOSSES[name].curvature(f, y)).all()
    assert LOSSES[name].bounded == (LOSSES[name].residue(f, y).abs().max() <= 1)


@each_loss
@pytest.mark.parametrize("method", ["value", "residue", "curvature"])
@pytest.mark.parametrize(
    ("f", "y", "error", "message"),
    [
        (tensor(1.0, 2.0), tensor(1.0), ValueError, r"^y has shape \(1,\), .* length 2"),
        # A column of predictions against a row of targets would broadcast to a matrix.
        (tensor(1.0, 2.0)[:, None], tensor(1.0, 1.0), ValueError, r"^f has shape \(2, 1\)"),
        (tensor(1.0), tensor(1.0)[:, None], ValueError, r"^y has shape \(1, 1\)"),
        (tensor(1.0, math.nan), tensor(1.0, 1.0), ValueError, "^f has 1 NaN"),
        (tensor(1.0), tensor(math.inf), ValueError, "^y has 1 NaN or inf"),
        (tensor(1.0), torch.tensor([1]), TypeError, "^y has dtype torch.int64"),
        ([1.0], tensor(1.0), TypeError, "^f is a list"),
    ],
)
def test_bad_predictions_and_targets(name, method, f, y, error, message):
    with pytest.raises(error, match=message):
        getattr(LOSSES[name], method)(f, y)


@pytest.mark.parametrize("label", [0.0, 2.0, 0.5])
@pytest.mark.parametrize("method", ["value", "residue", "curvature"])
def test_labels_outside_the_logistic_domain(label, method):
    message = rf"^y has the label {label:g}, but the logistic loss needs .*binary_labels"
    with pytest.raises(ValueError, match=message):
        getattr(LOSSES["logistic"], method)(tensor(0.0, 0.0), tensor(-1.0, label))


@pytest.mark.parametrize(("scaling", "gamma"), [("ntk", 0.5), ("mean-field", 0.25)])
def test_the_network_is_its_formula(scaling, gamma):
    assert set(SCALINGS) == {"ntk", "mean-field"}
    network = TwoLayerNetwork.random(3, 4, activation="gelu", scaling=scaling, seed=1)
    assert (network.m, network.gamma) == (4, gamma)
    X = gaussian(5, 3)
    for x, f in zip(X, network(X)):
        neurons = [float(a) * REFERENCE["gelu"](w @ x) for a, w in zip(network.a, network.W)]
        torch.testing.assert_close(f, gamma * sum(neurons))


def test_random_weights_are_uniform_on_the_sphere_and_signs_fair():
    network = TwoLayerNetwork.random(3, 5000, seed=2)
    torch.testing.assert_close(network.W.norm(dim=1), torch.ones(5000, dtype=FLOAT))
    for column in network.W.T:  # Archimedes: uniform on [-1, 1] in three dimensions.
        assert stats.kstest(column.numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-4
    assert set(network.a.tolist()) == {-1.0, 1.0}
    assert abs(float(network.a.sum())) < 4.5 * math.sqrt(5000)
    assert network.W.dtype == network.a.dtype == FLOAT


def test_random_networks_repeat_by_seed():
    one, same, other = (TwoLayerNetwork.random(6, 9, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.W, same.W)
    assert torch.equal(one.a, same.a)
    assert not torch.equal(one.W, other.W)


def test_the_defaults_of_a_random_network():
    default = TwoLayerNetwork.random(6, 9)
    chosen = TwoLayerNetwork.random(6, 9, activation="relu", scaling="ntk", shift=None, seed=0)
    assert torch.equal(default.W, chosen.W)
    assert (default.activation, default.gamma) == ("relu", 1 / 3)
    bare = TwoLayerNetwork(chosen.W, chosen.a)
    assert (bare.activation, bare.scaling) == ("relu", "ntk")


def test_the_weights_are_not_the_data_of_the_same_seed():
    bulk = sample_spiked_data(20, 400, nu=0.0, seed=1).X_B
    W = TwoLayerNetwork.random(400, 20, seed=1).W
    # Cosines of independent directions are about N(0, 1/400); one stream would give W = X.
    assert (W @ bulk.T / bulk.norm(dim=1)).abs().max() < 6 / 20


def test_a_shift_is_added_to_unit_rows_before_they_are_normalised_again():
    q = normalise_rows(gaussian(1, 7, seed=9))[0]
    plain, shifted = (TwoLayerNetwork.random(7, 5, shift=s, seed=4) for s in (None, 0.3 * q))
    expected = plain.W + 0.3 * q
    torch.testing.assert_close(shifted.W, expected / expected.norm(dim=1, keepdim=True))
    assert torch.equal(shifted.a, plain.a)


@each_activation
def test_mu_of_a_network_follows_what_is_known_of_the_data(name):
    data = sample_spiked_data(20, 30, nu=0.3, alpha=0.5, seed=2)
    network = TwoLayerNetwork.random(30, 8, activation=name, seed=2)
    covariance = torch.diag(data.eigenvalues) + data.zeta**2 * torch.outer(data.q, data.q)
    s = torch.stack([w @ covariance @ w for w in network.W]).sqrt()
    torch.testing.assert_close(network.mu(data), network.sigma.mu(s))
    # No population for real data: the mean over the examples instead.
    real = split_spike(data.X)
    slopes = derivative(network.sigma.value, data.X @ network.W.T)
    torch.testing.assert_close(network.mu(real), slopes.mean(dim=0))


ROWS = normalise_rows(gaussian(4, 3))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"W": ROWS.numpy()}, TypeError, r"^W is a ndarray, .* torch\.as_tensor"),
        ({"W": ROWS[0]}, ValueError, r"^W has shape \(3,\), but a matrix"),
        ({"W": 2 * ROWS}, ValueError, "^row . of W has length 2, .*normalise_rows"),
        ({"W": ROWS * math.nan}, ValueError, "^W has 12 NaN"),
        ({"a": torch.ones(3, dtype=FLOAT)}, ValueError, r"^a has shape \(3,\), .* length 4"),
        ({"a": tensor(1, 1, 1, math.inf)}, ValueError, "^a has 1 NaN or infinite"),
        ({"a": torch.ones(4)}, TypeError, "^a has dtype torch.float32, but W has torch.float64"),
        ({"activation": "swish"}, ValueError, "^activation is 'swish', but one of relu, elu"),
        ({"scaling": "mup"}, ValueError, "^scaling is 'mup', but one of ntk, mean-field is"),
    ],
)
def test_bad_networks(changes, error, message):
    with pytest.raises(error, match=message):
        TwoLayerNetwork(**{"W": ROWS, "a": torch.ones(4, dtype=FLOAT)} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": 0}, "^d is 0"),
        ({"m": 1.5}, "^m is 1.5"),
        ({"shift": tensor(1.0)}, r"^shift has shape \(1,\), but a vector of length 3"),
        ({"activation": "swish"}, "^activation is 'swish'"),
        ({"scaling": "mup"}, "^scaling is 'mup'"),
        ({"seed": -3}, "^seed is -3"),
    ],
)
def test_bad_random_networks(changes, message):
    with pytest.raises(ValueError, match=message):
        TwoLayerNetwork.random(**{"d": 3, "m": 4} | changes)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (gaussian(5, 4), r"^X has shape \(5, 4\), but any x 3 is needed"),
        (gaussian(3), r"^X has shape \(3,\), but a matrix"),
        (gaussian(5, 3) / 0, "^X has 15 NaN"),
    ],
)
def test_bad_inputs_of_a_network(X, message):
    with pytest.raises(ValueError, match=message):
        TwoLayerNetwork.random(3, 4)(X)


def test_data_of_another_precision_than_the_network():
    with pytest.raises(TypeError, match=r"^X has dtype torch\.float32, but W has torch\.float64"):
        TwoLayerNetwork.random(3, 4)(gaussian(5, 3).float())


def test_no_standard_deviations():
    for name in ("relu", "tanh"):
        with pytest.raises(ValueError, match=r"^s has shape \(0,\): it is empty"):
            ACTIVATIONS[name].mu(tensor())


def test_weights_may_carry_gradients():
    W = ROWS.clone().requires_grad_()
    TwoLayerNetwork(W, torch.ones(4, dtype=FLOAT))(gaussian(5, 3)).sum().backward()
    assert W.grad.abs().sum() > 0


@given(st.integers(1, 5), st.integers(1, 5), st.floats(1e-3, 1e3))
def test_normalised_rows_point_where_they_did(rows, columns, scale):
    W = scale * gaussian(rows, columns, seed=rows)
    unit = normalise_rows(W)
    assert unit.norm(dim=1).tolist() == pytest.approx([1] * rows)
    torch.testing.assert_close(unit * W.norm(dim=1, keepdim=True), W)


def test_a_zero_row_cannot_be_normalised():
    with pytest.raises(ValueError, match=r"^row 1 of W is zero"):
        normalise_rows(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize(("name", "rise"), [("tanh", 2.0), ("sigmoid", 1.0)])
def test_wide_preactivations_see_the_whole_rise_of_the_activation(name, rise):
    # mu(s) = density of s g at 0 times the rise of sigma, to second order in 1/s.
    s = tensor([300.0, 1000.0, 3000.0])
    limit = rise / (s * math.sqrt(2 * math.pi))
    torch.testing.assert_close(ACTIVATIONS[name].mu(s), limit, rtol=1e-4, atol=0)


def test_too_wide_a_preactivation_is_named():
    with pytest.raises(ValueError, match=r"^s has the entry 1e\+06, but at most 1e5"):
        ACTIVATIONS["tanh"].mu(tensor([1.0, 1e6]))
