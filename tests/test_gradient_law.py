import math

import numpy as np
import pytest
import torch

from lowgrad_utils.gradient_law import (
    GradientLaw,
    derivative_kernel,
    gradient_law,
    mean_column,
)
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spiked_data import sample_spiked_data

FLOAT = torch.float64
K = torch.tensor([[1.0, 0.5, 0.2], [0.5, 4.0, -0.4], [0.2, -0.4, 0.3]], dtype=FLOAT)


def stream(seed):
    return torch.Generator().manual_seed(seed)


def pairs(matrix):
    return [(i, k) for i in range(len(matrix)) for k in range(len(matrix))]


def by_quadrature(K, activation, i, k):
    """E sigma'(h_i) sigma'(h_k) with 200 x 200 nodes of Gauss and Hermite."""
    nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(200))
    f = ACTIVATIONS[activation].derivative
    if i == k:
        return float((f(K[i, i].sqrt() * nodes).square() * weights).sum()) / math.sqrt(2 * math.pi)
    L = torch.linalg.cholesky(K[[i, k]][:, [i, k]])
    first, second = L[0, 0] * nodes, L[1, 0] * nodes[:, None] + L[1, 1] * nodes
    return float(weights @ (f(first)[:, None] * f(second)) @ weights) / (2 * math.pi)


@pytest.mark.parametrize("activation", ["softplus", "silu", "gelu", "sigmoid", "tanh", "erf"])
def test_kernel_equals_two_dimensional_quadrature(activation):
    Phi = derivative_kernel(K, activation)
    # At s = 2, sigma' of tanh varies on a scale of 1/4: 200 nodes are good to a few 1e-6.
    for i, k in pairs(K):
        assert float(Phi[i, k]) == pytest.approx(by_quadrature(K, activation, i, k), abs=1e-5)


def test_kernel_of_erf_has_its_closed_form():
    Phi = derivative_kernel(K, "erf")
    for i, k in pairs(K):
        both = K[[i, k]][:, [i, k]]
        wanted = 4 / math.pi / math.sqrt(float(torch.det(torch.eye(2) + 2 * both)))
        assert float(Phi[i, k]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("dimension", [None, 40])
def test_orders_of_relu_add_up_to_the_arcsine(dimension):
    # Positive homogeneity of degree 0 makes sphere and Gaussian agree.
    series = derivative_kernel(K, "relu", order=150, dimension=dimension)
    assert series.numpy() == pytest.approx(derivative_kernel(K, "relu").numpy(), abs=1e-12)


def test_kernel_over_the_sphere_equals_many_fresh_rows():
    X = 2 * torch.randn(5, 8, generator=stream(0), dtype=FLOAT)
    W = normalise_rows(torch.randn(200_000, 8, generator=stream(1), dtype=FLOAT))
    for activation in ACTIVATIONS:
        slopes = ACTIVATIONS[activation].derivative(X @ W.T)
        products = slopes[:, None] * slopes
        error = 4.5 * products.std(dim=2) / len(W) ** 0.5 + 1e-12
        Phi = derivative_kernel(X @ X.T / 8, activation, dimension=8)
        assert bool(((products.mean(dim=2) - Phi).abs() < error).all()), activation


def test_a_mean_is_counted():
    mean, count = torch.tensor([0.5, -1.0, 2.0], dtype=FLOAT), 200_000
    h = torch.randn(count, 3, generator=stream(2), dtype=FLOAT) @ torch.linalg.cholesky(K).T + mean
    for activation in ACTIVATIONS:
        slopes = ACTIVATIONS[activation].derivative(h).T
        products = slopes[:, None] * slopes
        error = 4.5 * products.std(dim=2) / count**0.5 + 1e-12
        Phi = derivative_kernel(K, activation, mean=mean)
        assert bool(((products.mean(dim=2) - Phi).abs() < error).all()), activation


@pytest.mark.parametrize("activation", ["softplus", "tanh"])
def test_low_orders_are_mean_slope_and_curvature(activation):
    s = K.diagonal().sqrt()
    mu, c = ACTIVATIONS[activation].mu(s), ACTIVATIONS[activation].c(s)
    zero, one = (derivative_kernel(K, activation, order=order) for order in (0, 1))
    off = ~torch.eye(3, dtype=torch.bool)
    assert zero[off].numpy() == pytest.approx(torch.outer(mu, mu)[off].numpy(), abs=1e-10)
    linear = torch.outer(mu, mu) + torch.outer(c, c) * K
    assert one[off].numpy() == pytest.approx(linear[off].numpy(), abs=1e-10)
    # Missing orders are noise: the diagonal stays.
    full = derivative_kernel(K, activation).diagonal()
    assert one.diagonal().numpy() == pytest.approx(full.numpy(), abs=1e-10)


def case(activation="softplus", d=240, nu=0.3, alpha=0.0, scaling="ntk", seed=0):
    n, m = round(0.75 * d), round(1.25 * d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    r = torch.randn(n, generator=stream(seed), dtype=FLOAT).sign()
    networks = [
        TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=50 + k)
        for k in range(8)
    ]
    return data, r, networks


def test_T_is_the_second_moment_of_the_columns():
    data, r, _ = case(d=24)
    network = TwoLayerNetwork.random(24, 100_000, activation="softplus", seed=3)
    G = closed_form_gradient(data.X, network, r)
    T = gradient_law(data.X, network, r).T
    # 100 000 columns leave 0.5 % of the diagonal's size.
    assert float((G @ G.T - T).abs().max()) < 0.02 * float(T.diagonal().max())


@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh"])
@pytest.mark.parametrize(("alpha", "scaling"), [(0.0, "ntk"), (0.5, "mean-field")])
def test_law_predicts_gradients(activation, alpha, scaling):
    data, r, networks = case(activation, alpha=alpha, scaling=scaling)
    law = gradient_law(data.X, networks[0], r)
    values, cosines = [], []
    for network in networks:
        U, s, _ = torch.linalg.svd(closed_form_gradient(data.X, network, r), full_matrices=False)
        values.append(s)
        cosines.append((U.T @ data.q).square()[: len(law.outliers)])
    mean, K = torch.stack(values).mean(dim=0), len(law.outliers)
    # A singular value fluctuates by 1/sqrt(2m) = 4 %, the mean of 8 by 1.4 %.
    # The last outliers are those next to the edge, where neighbours mix.
    assert [o.value for o in law.outliers[:4]] == pytest.approx(
        mean[: min(K, 4)].tolist(), rel=0.05
    )
    assert float(mean[K]) == pytest.approx(law.edge, abs=3 * law.edge_scale)
    rank = min(law.T.shape[0], data.n)
    assert law.quantile(0.5) == pytest.approx(float(mean[K:rank].median()), rel=0.02)
    seen = torch.stack(cosines).mean(dim=0)
    assert law.squared_cosines(data.q)[:2].numpy() == pytest.approx(seen[:2].numpy(), abs=0.1)


def test_shifted_rows_have_their_own_law():
    data, r, networks = case("softplus")
    shift = data.n**-0.25 * data.q
    shifted = [
        TwoLayerNetwork.random(240, 300, activation="softplus", shift=shift, seed=70 + k)
        for k in range(8)
    ]
    gradients = [closed_form_gradient(data.X, network, r) for network in shifted]
    mean = torch.stack([torch.linalg.svdvals(G) for G in gradients]).mean(dim=0)
    law = gradient_law(data.X, networks[0], r, shift=shift)
    uniform = gradient_law(data.X, networks[0], r)
    assert law.outliers[0].value == pytest.approx(float(mean[0]), rel=0.03)
    assert law.outliers[1].value == pytest.approx(float(mean[1]), rel=0.05)
    assert abs(uniform.outliers[1].value / float(mean[1]) - 1) > 0.2


def test_density_counts_the_singular_values():
    data, r, networks = case("relu", d=400)
    law = gradient_law(data.X, networks[0], r)
    s = torch.linalg.svdvals(closed_form_gradient(data.X, networks[0], r))[: data.n]
    middle = law.quantile(0.3), law.quantile(0.7)
    grid = torch.linspace(*middle, 200, dtype=FLOAT)
    assert float(torch.trapezoid(law.density(grid), grid)) == pytest.approx(0.4, abs=1e-3)
    assert float(((s > middle[0]) & (s < middle[1])).double().mean()) == pytest.approx(
        0.4, abs=0.02
    )


def test_typical_values_descend_from_the_outliers_through_the_bulk():
    data, r, networks = case("softplus")
    law = gradient_law(data.X, networks[0], r)
    values, K = law.typical_values(60), len(law.outliers)
    assert bool((values.diff() <= 0).all())
    assert values[:K].tolist() == [outlier.value for outlier in law.outliers]
    assert law.typical_values(K).tolist() == values[:K].tolist()
    assert law.typical_values(1).tolist() == values[:1].tolist()
    assert float(values[K]) == pytest.approx(law.edge - 1.2065 * law.edge_scale)
    s = torch.linalg.svdvals(closed_form_gradient(data.X, networks[0], r))
    assert values[30:].numpy() == pytest.approx(s[30:60].numpy(), rel=0.05)
    with pytest.raises(ValueError, match="count is 181"):
        law.typical_values(data.n + 1)


@pytest.mark.parametrize("activation", ["softplus", "relu"])
def test_a_residue_of_its_own_outputs_pulls_the_mean_column(activation):
    def slopes(own):
        found = []
        for seed in range(80):
            data = sample_spiked_data(45, 60, nu=0.2, seed=seed)
            network, other = (
                TwoLayerNetwork.random(60, 75, activation=activation, seed=k * 1000 + seed)
                for k in (1, 2)
            )
            r = network(data.X) - torch.randn(45, generator=stream(seed), dtype=FLOAT)
            b = mean_column(data.X, network, r)
            # Along T's leading eigenvectors the mean of the columns is mostly noise.
            V = gradient_law(data.X, network, r).vectors[:, :2]
            b = b - V @ (V.T @ b)
            G = closed_form_gradient(data.X, network if own else other, r)
            found.append(float(G.mean(dim=1) @ b / b.square().sum()))
        return np.mean(found), np.std(found) / len(found) ** 0.5

    mean, error = slopes(own=True)
    # Relative corrections are of order 1/d.
    assert mean == pytest.approx(1, abs=4 * error + 0.05) and error < 0.1
    mean, error = slopes(own=False)
    assert mean == pytest.approx(0, abs=4 * error)


def test_for_erf_no_column_is_pulled():
    data, r, _ = case(d=40)
    network = TwoLayerNetwork.random(40, 50, activation="erf", seed=1)
    # sigma sigma' is odd, and so is every mixed moment.
    assert float(mean_column(data.X, network, r).norm()) < 1e-10


def test_bad_input_is_named():
    data, r, networks = case(d=24)
    network, X = networks[0], data.X
    gaussian_a = TwoLayerNetwork(network.W, 0.5 * network.a, "softplus")
    line, with_zero = TwoLayerNetwork.random(1, 5), X.clone()
    with_zero[7] = 0
    for call, message in [
        (lambda: derivative_kernel(K, "swish"), "activation is 'swish'"),
        (lambda: derivative_kernel(K[:2], "relu"), "K has shape"),
        (lambda: derivative_kernel(-K, "relu"), "K has a diagonal entry"),
        (lambda: derivative_kernel(K + 5 * (1 - torch.eye(3)), "relu"), "K has a correlation"),
        (lambda: derivative_kernel(K, "relu", order=-1), "order is -1"),
        (lambda: derivative_kernel(K, "relu", dimension=2), "dimension is 2"),
        (lambda: derivative_kernel(K, "relu", dimension=9, mean=K[0]), "dimension is given"),
        (lambda: derivative_kernel(K, "relu", mean=K[0, :2]), "mean has shape"),
        (lambda: gradient_law(X, network, 0 * r), "residue is zero"),
        (lambda: gradient_law(X, network, r[:3]), "residue has shape"),
        (lambda: gradient_law(X, gaussian_a, r), "a has the entry"),
        (lambda: gradient_law(X, network, r, shift=r), "shift has shape"),
        (lambda: gradient_law(X, network, r, kernel=K), "kernel has shape"),
        (lambda: mean_column(X, network, r[:3]), "residue has shape"),
        (lambda: mean_column(X, gaussian_a, r), "a has the entry"),
        (lambda: mean_column(X[:, :1], line, r), "X has 1 column, but at least 2"),
        (lambda: mean_column(with_zero, network, r), "row 7 of X is zero"),
        (lambda: GradientLaw(K[:2], 5), "T has shape"),
        (lambda: GradientLaw(K, 5).squared_cosines(0 * K[0]), "direction is zero"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
