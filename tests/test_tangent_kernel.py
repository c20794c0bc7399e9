import pytest
import torch

from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import ACTIVATIONS, LOSSES, TwoLayerNetwork
from lowgrad_utils.tangent_kernel import (
    LayerJacobian,
    scalar_jacobian,
    softmax_jacobian,
    softmax_residue,
)

FLOAT = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed))


def setting(activation="softplus", n=7, d=5, m=6):
    return random(n, d), TwoLayerNetwork.random(d, m, activation=activation, seed=1)


def autograd_jacobian(X, network):
    """df(x_i)/dW of each example, n x d x m, which needs no formula."""
    W = network.W.clone().requires_grad_()
    f = network.gamma * network.sigma.value(X @ W.T) @ network.a
    rows = [torch.autograd.grad(value, W, retain_graph=True)[0].T for value in f]
    return torch.stack(rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_kernel_and_combinations_are_those_of_autograd(activation):
    X, network = setting(activation)
    J, jacobian = autograd_jacobian(X, network), scalar_jacobian(X, network)
    torch.testing.assert_close(jacobian.kernel, J.flatten(1) @ J.flatten(1).T / len(X))
    weights, u, v = random(len(X), seed=2), random(5, seed=3), random(6, seed=4)
    torch.testing.assert_close(jacobian.combination(weights), torch.einsum("i,idm->dm", weights, J))
    along = torch.einsum("idm,d,m->i", J, u, v) / (u.norm() * v.norm())
    torch.testing.assert_close(jacobian.along(u, v), along)


@pytest.mark.parametrize("loss", ["mse", "log-cosh", "logistic"])
def test_modes_are_the_eigenpairs_of_the_explicit_gauss_newton_matrix(loss):
    X, network = setting("tanh")
    y = random(len(X), seed=2).sign()
    f = network(X)
    second = LOSSES[loss].curvature(f, y)
    modes = scalar_jacobian(X, network, second).modes
    J = autograd_jacobian(X, network).flatten(1)
    explicit = J.T @ (second[:, None] * J) / len(X)
    expected = torch.linalg.eigvalsh(explicit).flip(0)[: len(X)]
    torch.testing.assert_close(modes.values, expected)
    vectors = torch.stack([modes.direction(k).flatten() for k in range(1, len(X) + 1)], 1)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(X), dtype=FLOAT))
    torch.testing.assert_close(explicit @ vectors, vectors * modes.values)
    residue = LOSSES[loss].residue(f, y)
    G = closed_form_gradient(X, network, residue)
    found = modes.components(residue / second.sqrt())
    torch.testing.assert_close(found, vectors.T @ G.flatten())
    share = found.square().cumsum(0) / G.square().sum()
    torch.testing.assert_close(modes.shares(residue / second.sqrt()), share)
    assert share[-1] == pytest.approx(1)


def test_shares_in_spans_are_those_of_a_projection():
    X, network = setting()
    jacobian = scalar_jacobian(X, network)
    J = autograd_jacobian(X, network).flatten(1)
    left, right = random(3, 5, seed=7), random(3, 6, seed=8)
    left, right = torch.cat([left, left[:1]]), torch.cat([right, 2 * right[:1]])  # one too many
    weights = random(2, len(X), seed=9)
    spans = {
        "terms": torch.stack([torch.outer(a, b).flatten() for a, b in zip(left, right)][:3]),
        "sums": weights @ J,
    }
    vector = random(len(X), seed=10)
    total = vector @ J
    found = {
        "terms": (jacobian.modes.inside(left, right), jacobian.share_in_terms(vector, left, right)),
        "sums": (
            jacobian.modes.inside_combinations(weights),
            jacobian.share_in_combinations(vector, weights),
        ),
    }
    for name, rows in spans.items():
        basis = torch.linalg.qr(rows.T).Q
        inside, share = found[name]
        for k in range(len(X)):
            direction = jacobian.modes.direction(k + 1).flatten()
            assert inside[k] == pytest.approx(float((basis.T @ direction).square().sum()))
        assert share == pytest.approx(float((basis.T @ total).square().sum() / (total @ total)))
    single = jacobian.modes.overlaps(left[0], right[0]).square()
    torch.testing.assert_close(jacobian.modes.inside(left[:1], right[:1]), single)


def test_logit_derivatives_are_those_of_the_curvature_module():
    d, m, classes, n = 4, 5, 3, 9
    W, A, X = random(m, d), random(classes, m, seed=1), random(n, d, seed=2)
    labels = torch.arange(n) // 3  # sorted, as LossCurvature keeps them
    model = torch.nn.Sequential(
        torch.nn.Linear(d, m, bias=False), torch.nn.Tanh(), torch.nn.Linear(m, classes, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.copy_(W)
        model[2].weight.copy_(A)
    at = LossCurvature(model.eval(), (X, labels), parameters=["0.weight"])
    jacobian, p = softmax_jacobian(X, W, A, activation="tanh")
    torch.testing.assert_close(p, at.probabilities)
    expected = at.logit_derivatives().view(n * classes, m, d).transpose(1, 2)
    rows = torch.einsum("id,im->idm", jacobian.X, jacobian.B)
    torch.testing.assert_close(rows, expected)
    explicit = torch.linalg.eigvalsh(at.gauss_newton.matrix()).flip(0)
    torch.testing.assert_close(jacobian.modes.values[:20], explicit[:20], atol=1e-12, rtol=1e-9)
    residue = softmax_residue(p, labels)
    gradient = jacobian.combination(residue / n).T.flatten()
    torch.testing.assert_close(gradient, at.gradient())
    # The gradient does not see the part along sqrt(p).
    other = residue + (random(n, seed=3)[:, None] * p.sqrt()).flatten()
    torch.testing.assert_close(jacobian.combination(other / n).T.flatten(), at.gradient())


def test_rank_is_counted_above_rounding():
    X = torch.eye(3, dtype=FLOAT)[[0, 0, 1]]
    jacobian = LayerJacobian(X, torch.ones(3, 2, dtype=FLOAT), 3)
    modes = jacobian.modes
    assert modes.overlaps(X[0], torch.ones(2, dtype=FLOAT))[2] == 0
    with pytest.raises(ValueError, match="k is 3, but the matrix has 2 eigenvalues"):
        modes.direction(3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda j: LayerJacobian(j.X, j.B[1:], 7), "B has shape"),
        (lambda j: LayerJacobian(j.X, j.B, 0), "n is 0"),
        (lambda j: j.combination(j.X[:, 0][1:]), "weights has shape"),
        (lambda j: j.along(0 * j.X[0], j.B[0]), "u or v is zero"),
        (lambda j: j.share_in_terms(0 * j.X[:, 0], j.X[:1], j.B[:1]), "is zero"),
        (lambda j: j.modes.shares(0 * j.X[:, 0]), "the gradient is zero"),
        (lambda j: j.modes.inside(j.X[:2], j.B[:1]), "right has shape"),
        (lambda j: softmax_residue(torch.full((3, 3), 1 / 3), torch.eye(3)), "use .*y.argmax"),
        (lambda j: softmax_residue(torch.full((3, 3), 1 / 3), torch.ones(3)), "use y.long"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(scalar_jacobian(*setting()))


def test_negative_curvature_is_refused():
    X, network = setting()
    with pytest.raises(ValueError, match="least of curvature"):
        scalar_jacobian(X, network, -torch.ones(len(X), dtype=FLOAT))
