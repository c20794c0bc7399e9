import importlib.util
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils.gradients import RankOne, closed_form_gradient, decompose, loss_gradient
from lowgrad_utils.networks import ACTIVATIONS, LOSSES, SCALINGS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, split_spike

FLOAT = torch.float64
SIZES = st.tuples(st.integers(2, 7), st.integers(2, 7), st.integers(1, 7))
SEEDS = st.integers(0, 999)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def by_autograd(X, y, network, loss, sigma=None):
    """Differentiate (1/n) sum l(gamma a^T sigma(W x_i), y_i), with sigma and l written anew."""
    W = network.W.clone().requires_grad_()
    f = (
        network.gamma
        * torch.nn.functional.linear(
            (sigma or _SIGMA[network.activation])(X @ W.T), network.a[None]
        )[:, 0]
    )
    _LOSS[loss](f, y).mean().backward()
    return W.grad


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
_LOSS = {
    "mse": lambda f, y: (f - y) ** 2 / 2,
    "huber": torch.nn.HuberLoss(reduction="none"),
    "log-cosh": lambda f, y: torch.log(torch.cosh(f - y)),
    "logistic": torch.nn.SoftMarginLoss(reduction="none"),
}


@pytest.mark.parametrize(
    ("activation", "loss", "scaling"), list(product(ACTIVATIONS, LOSSES, SCALINGS))
)
@pytest.mark.parametrize(("n", "d", "m"), [(6, 9, 11), (70, 5, 3)])
def test_the_gradient_is_that_of_automatic_differentiation(activation, loss, scaling, n, d, m):
    seed = n + len(activation) + len(loss)
    X, network = (
        1.5 * gaussian(n, d, seed=seed),
        TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed),
    )
    y = gaussian(n, seed=seed + 1)
    y = y.sign() if loss == "logistic" else y
    expected = by_autograd(X, y, network, loss)
    G = loss_gradient(X, y, network, loss)
    assert G.shape == (d, m)
    torch.testing.assert_close(G, expected.T, rtol=1e-11, atol=1e-14)
    residue = torch.autograd.functional.jacobian(lambda f: _LOSS[loss](f, y).sum(), network(X))
    G = closed_form_gradient(X, network, residue)
    torch.testing.assert_close(G, expected.T, rtol=1e-11, atol=1e-14)


@given(SIZES, SEEDS)
def test_the_gradient_holds_for_any_outer_weights(sizes, seed):
    n, d, m = sizes
    W = normalise_rows(gaussian(m, d, seed=seed))
    network = TwoLayerNetwork(W, 3 * gaussian(m, seed=seed + 1), "softplus", "mean-field")
    X, y = gaussian(n, d, seed=seed + 2), gaussian(n, seed=seed + 3)
    expected = by_autograd(X, y, network, "mse").T
    torch.testing.assert_close(loss_gradient(X, y, network), expected, rtol=1e-9, atol=1e-12)


def test_mse_is_the_default_loss():
    X, y, network = gaussian(3, 4), gaussian(3, seed=1), TwoLayerNetwork.random(4, 5)
    torch.testing.assert_close(loss_gradient(X, y, network), loss_gradient(X, y, network, "mse"))


def problem(n, d, m, seed, *, nu=0.3, alpha=0.4, activation="gelu", scaling="ntk"):
    # Outer weights of several sizes: with a = +-1 a forgotten a would show only half the time.
    data = sample_spiked_data(n, n + d, nu=nu, alpha=alpha, seed=seed)
    W = TwoLayerNetwork.random(n + d, m, seed=seed).W
    network = TwoLayerNetwork(W, 1 + gaussian(m, seed=seed), activation, scaling)
    return data, network, gaussian(n, seed=seed + 1)


def explicit_pieces(data, network, r, mu):
    """Write S1, S12, S2 and E entry for entry as they are defined, with n x m matrices."""
    n, m = data.n, network.m
    gamma = {"ntk": m**-0.5, "mean-field": 1 / m}[network.scaling]
    X_B = data.X - data.zeta * data.z[:, None] * data.q[None, :]
    preactivations = (data.X @ network.W.T).requires_grad_()
    total = network.sigma.value(preactivations).sum()
    slopes = torch.autograd.grad(total, preactivations)[0]
    perp = slopes - torch.ones(n, 1, dtype=FLOAT) @ mu[None]
    weights = r[:, None] * network.a[None]
    mean_part = weights * mu[None]
    spike = data.zeta * torch.outer(data.z, data.q)
    return {
        "G": gamma / n * data.X.T @ (weights * slopes),
        "S1": gamma / n * X_B.T @ mean_part,
        "S12": gamma / n * spike.T @ mean_part,
        "S2": gamma / n * spike.T @ (weights * perp),
        "E": gamma / n * X_B.T @ (weights * perp),
    }


def check_pieces(parts, explicit):
    for name, expected in explicit.items():
        piece = getattr(parts, name)
        formed = piece.matrix() if isinstance(piece, RankOne) else piece
        # The tolerance follows the gradient: a piece is found as a difference of such numbers.
        scale = float(explicit["G"].abs().max())
        torch.testing.assert_close(formed, expected, rtol=1e-9, atol=1e-12 * scale, msg=name)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_piece_is_its_definition(activation, scaling):
    # More examples than sigma' takes at a time.
    data, network, r = problem(70, 4, 5, 3, activation=activation, scaling=scaling)
    covariance = torch.diag(data.eigenvalues) + data.zeta**2 * torch.outer(data.q, data.q)
    s = torch.stack([w @ covariance @ w for w in network.W]).sqrt()
    check_pieces(
        decompose(data, network, r), explicit_pieces(data, network, r, network.sigma.mu(s))
    )


@given(SIZES, SEEDS, st.floats(0, 1), st.floats(0, 2))
def test_pieces_for_any_sizes_and_exponents(sizes, seed, nu, alpha):
    data, network, r = problem(*sizes, seed, nu=nu, alpha=alpha)
    parts = decompose(data, network, r)
    check_pieces(parts, explicit_pieces(data, network, r, network.mu(data)))
    # The four add up to the gradient, however they were found.
    total = sum(piece.matrix() for piece in (parts.S1, parts.S12, parts.S2)) + parts.E
    torch.testing.assert_close(total, closed_form_gradient(data.X, network, r))
    torch.testing.assert_close(parts.G, closed_form_gradient(data.X, network, r))


def test_pieces_of_real_data_use_the_mean_slope_of_the_examples():
    network, r = TwoLayerNetwork.random(5, 6, activation="tanh", seed=1), gaussian(8, seed=2)
    data = split_spike(gaussian(8, 5) + 1)
    mu = network.sigma.derivative(data.X @ network.W.T).mean(dim=0)
    check_pieces(decompose(data, network, r), explicit_pieces(data, network, r, mu))


def test_pieces_with_a_given_mu():
    data, network, r = problem(6, 3, 4, 5)
    mu = gaussian(4, seed=6)
    check_pieces(decompose(data, network, r, mu=mu), explicit_pieces(data, network, r, mu))


def test_mu_moves_weight_between_the_pieces_but_not_their_sums():
    # S12 + S2 and G do not depend on mu: only the split inside does.
    data, network, r = problem(6, 3, 4, 5)
    one, two = (decompose(data, network, r, mu=c * torch.ones(4, dtype=FLOAT)) for c in (0, 0.7))
    torch.testing.assert_close(one.G, two.G)
    sums = [parts.S12.matrix() + parts.S2.matrix() for parts in (one, two)]
    torch.testing.assert_close(*sums)
    assert one.S1.norm == one.S12.norm == 0 < two.S1.norm


@given(SIZES, SEEDS)
def test_sums_of_neighbours_have_rank_one_and_norms_are_singular_values(sizes, seed):
    data, network, r = problem(*sizes, seed)
    parts = decompose(data, network, r)
    for left, right in ((parts.S1, parts.S12), (parts.S12, parts.S2)):
        s = torch.linalg.svdvals(left.matrix() + right.matrix())
        assert (s[1:] <= 1e-12 * (left.norm + right.norm)).all()
    for term in (parts.S1, parts.S12, parts.S2):
        s = torch.linalg.svdvals(term.matrix())
        assert term.norm == pytest.approx(float(s[0]), rel=1e-10, abs=1e-15)
        assert (s[1:] <= 1e-12 * term.norm + 1e-300).all()


@given(SEEDS)
def test_the_order_of_examples_and_neurons_does_not_matter(seed):
    data, network, r = problem(6, 3, 5, seed)
    parts = decompose(data, network, r)
    generator = torch.Generator().manual_seed(seed)
    rows, neurons = (torch.randperm(k, generator=generator) for k in (6, 5))
    moved = SpikedData(data.X[rows], data.z[rows], data.q, data.zeta, data.eigenvalues)
    renamed = TwoLayerNetwork(network.W[neurons], network.a[neurons], "gelu")
    other = decompose(moved, renamed, r[rows])
    for name in ("S1", "S12", "S2"):
        one, two = getattr(parts, name).matrix(), getattr(other, name).matrix()
        torch.testing.assert_close(one[:, neurons], two, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(parts.E[:, neurons], other.E, rtol=1e-9, atol=1e-13)


@given(SEEDS)
def test_a_rotation_of_data_and_weights_rotates_every_piece(seed):
    # A rotated covariance is not diagonal, so the data are taken as real: mu is a sample mean.
    data, network, r = problem(6, 3, 5, seed)
    real = SpikedData(data.X, data.z, data.q, data.zeta)
    turn = torch.linalg.qr(gaussian(9, 9, seed=seed)).Q
    turned = SpikedData(data.X @ turn.T, data.z, turn @ data.q, data.zeta)
    rotated = TwoLayerNetwork(normalise_rows(network.W @ turn.T), network.a, "gelu")
    one, two = decompose(real, network, r), decompose(turned, rotated, r)
    for name in ("S1", "S12", "S2"):
        before, after = getattr(one, name).matrix(), getattr(two, name).matrix()
        torch.testing.assert_close(turn @ before, after, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(turn @ one.E, two.E, rtol=1e-9, atol=1e-12)


@given(SEEDS, st.floats(-3, 3))
def test_every_piece_is_linear_in_the_residue(seed, factor):
    data, network, r = problem(5, 3, 4, seed)
    other = gaussian(5, seed=seed + 7)
    one, two, both = (decompose(data, network, x) for x in (r, other, r + factor * other))
    for name in ("S1", "S12", "S2"):
        parts = [getattr(x, name).matrix() for x in (one, two, both)]
        torch.testing.assert_close(parts[0] + factor * parts[1], parts[2], rtol=1e-9, atol=1e-12)


def test_arguments_come_back_unchanged_and_E_is_formed_once():
    data, network, r = problem(5, 3, 4, 0)
    copies = [x.clone() for x in (data.X, data.z, data.q, network.W, network.a, r)]
    parts = decompose(data, network, r)
    G = parts.G.clone()
    assert parts.E is parts.E
    assert torch.equal(parts.G, G)
    for before, after in zip(copies, (data.X, data.z, data.q, network.W, network.a, r)):
        assert torch.equal(before, after)


def test_weights_that_carry_gradients_are_admitted():
    data, network, r = problem(70, 3, 4, 0)
    tracked = TwoLayerNetwork(network.W.clone().requires_grad_(), network.a, "gelu")
    parts = decompose(data, tracked, r)
    assert torch.equal(parts.E, decompose(data, network, r).E)
    assert not parts.G.requires_grad
    assert not loss_gradient(data.X, r, tracked).requires_grad
    assert tracked.W.grad is None


def test_weights_may_carry_gradients():
    W = NETWORK.W.clone().requires_grad_()
    trained = TwoLayerNetwork(W, NETWORK.a, "gelu")
    y = gaussian(5, seed=3)
    G = loss_gradient(DATA.X, y, trained)
    _LOSS["mse"](trained(DATA.X), y).mean().backward()
    torch.testing.assert_close(G, W.grad.T)
    parts = decompose(DATA, trained, RESIDUE)
    torch.testing.assert_close(parts.E, decompose(DATA, NETWORK, RESIDUE).E)
    assert not G.requires_grad
    assert not closed_form_gradient(DATA.X, trained, RESIDUE).requires_grad
    assert not parts.G.requires_grad


def test_float32_stays_float32_and_near_float64():
    data, network, r = problem(40, 20, 30, 0)
    single = SpikedData(
        data.X.float(), data.z.float(), data.q.float(), data.zeta, data.eigenvalues.float()
    )
    narrow = TwoLayerNetwork(network.W.float(), network.a.float(), "gelu")
    one, two = decompose(data, network, r), decompose(single, narrow, r.float())
    assert two.G.dtype == two.E.dtype == two.S2.v.dtype == torch.float32
    scale = float(one.G.abs().max())
    torch.testing.assert_close(one.E.float(), two.E, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(one.S2.v.float(), two.S2.v, rtol=1e-4, atol=1e-4)


def test_one_thread_and_two_agree_to_rounding():
    data, network, r = problem(300, 100, 250, 2)
    one = decompose(data, network, r)
    torch.set_num_threads(2)
    try:
        two = decompose(data, network, r)
    finally:
        torch.set_num_threads(1)
    scale = float(one.G.abs().max())
    torch.testing.assert_close(one.G, two.G, rtol=0, atol=1e-12 * scale)
    torch.testing.assert_close(one.E, two.E, rtol=0, atol=1e-12 * scale)
    assert one.S2.norm == pytest.approx(two.S2.norm, rel=1e-12)


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("benchmark_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_counter_of_arrays_counts_what_is_alive(benchmark):
    x = gaussian(100, 100)
    with benchmark.LiveArrays() as arrays:
        one = x + 1
        two = x + 2
        two.mul_(one[:, :50].sum())  # A view, a scalar and an operation in place.
        del one
        three = two + x
    assert three.shape == (100, 100)
    assert arrays.peak == 2 * x.nbytes + 8
    assert arrays.shapes == {(100, 100), ()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_at_most_three_large_arrays_are_alive(benchmark, activation):
    data, network, r = problem(300, 100, 500, 0, activation=activation)
    with benchmark.LiveArrays() as arrays:
        decompose(data, network, r)
    assert 2 < arrays.peak / (data.n * network.m * 8) < 3
    assert not arrays.shapes & {(data.n, data.n), (data.d, data.d)}
    assert (data.n, network.m) in arrays.shapes


DATA, NETWORK, RESIDUE = problem(5, 3, 4, 0)


@pytest.mark.parametrize(
    ("residue", "error", "message"),
    [
        (RESIDUE[:4], ValueError, r"^residue has shape \(4,\), but a vector of length 5"),
        (RESIDUE[:, None], ValueError, r"^residue has shape \(5, 1\), but a vector"),
        (RESIDUE * math.nan, ValueError, "^residue has 5 NaN or infinite"),
        ([1.0] * 5, TypeError, "^residue is a list"),
        (RESIDUE.float(), TypeError, "^residue has dtype torch.float32, but W has torch.float64"),
    ],
)
def test_bad_residues(residue, error, message):
    with pytest.raises(error, match=message):
        closed_form_gradient(DATA.X, NETWORK, residue)
    with pytest.raises(error, match=message):
        decompose(DATA, NETWORK, residue)


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (DATA.X[:, :7], ValueError, r"^X has shape \(5, 7\), but any x 8 is needed"),
        (DATA.X.T, ValueError, r"^X has shape \(8, 5\), but any x 8 is needed"),
        (DATA.X[:0], ValueError, r"^X has shape \(0, 8\): it is empty"),
        (DATA.X * math.inf, ValueError, "^X has 40 NaN or infinite"),
        (DATA.X.numpy(), TypeError, "^X is a ndarray"),
        (DATA.X.float(), TypeError, "^X has dtype torch.float32, but W has torch.float64"),
    ],
)
def test_bad_data(X, error, message):
    with pytest.raises(error, match=message):
        closed_form_gradient(X, NETWORK, RESIDUE)
    with pytest.raises(error, match=message):
        loss_gradient(X, RESIDUE, NETWORK)


@pytest.mark.parametrize(
    ("mu", "error", "message"),
    [
        (torch.ones(5, dtype=FLOAT), ValueError, r"^mu has shape \(5,\), .* length 4"),
        (torch.full((4,), math.nan), ValueError, "^mu has 4 NaN"),
        (0.5, TypeError, "^mu is a float"),
        (torch.ones(4), TypeError, "^mu has dtype torch.float32, but W has torch.float64"),
    ],
)
def test_bad_mu(mu, error, message):
    with pytest.raises(error, match=message):
        decompose(DATA, NETWORK, RESIDUE, mu=mu)


def test_bad_losses_and_labels():
    with pytest.raises(ValueError, match=r"^loss is 'hinge', but one of mse, huber, log-cosh,"):
        loss_gradient(DATA.X, RESIDUE, NETWORK, "hinge")
    with pytest.raises(ValueError, match=r"^y has the label .*, but the logistic loss needs"):
        loss_gradient(DATA.X, RESIDUE, NETWORK, "logistic")
    with pytest.raises(ValueError, match=r"^y has shape \(4,\)"):
        loss_gradient(DATA.X, RESIDUE[:4], NETWORK)


def test_data_of_another_width_than_the_network():
    with pytest.raises(ValueError, match=r"^X has shape \(5, 9\), but any x 8 is needed"):
        decompose(sample_spiked_data(5, 9, nu=0.1), NETWORK, RESIDUE)
