import math

import pytest
import torch

from lowgrad_utils.experiments import jacobian, scenario
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.regularisation import jacobian_penalty_gradient
from lowgrad_utils.spiked_data import sample_spiked_data

FLOAT = torch.float64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


@pytest.mark.parametrize("scaling", ["ntk", "mean-field"])
@pytest.mark.parametrize("weights", ["uniform", "orthogonal"])
def test_a_case_is_the_gradient_of_its_network_on_a_residue_that_knows_nothing(scaling, weights):
    case = jacobian.penalty_scenario(
        60, nu=0.6, alpha=0.5, activation="tanh", scaling=scaling, weights=weights, seed=4
    )
    data = sample_spiked_data(45, 60, nu=0.6, alpha=0.5, seed=4)
    assert torch.equal(case.data.X, data.X)
    drawn = TwoLayerNetwork.random(60, 75, activation="tanh", scaling=scaling, seed=4)
    W = drawn.W
    if weights == "orthogonal":
        W = W - torch.outer(W @ data.q, data.q)
        W = W / W.norm(dim=1, keepdim=True)
        assert float((case.network.W @ data.q).abs().max()) < 1e-14
    torch.testing.assert_close(case.network.W, W)
    assert case.network.scaling == scaling
    expected = closed_form_gradient(data.X, case.network, case.residue)
    torch.testing.assert_close(case.parts.G, expected)
    assert max(cosine(case.residue, column) for column in data.X.T) < 6 / math.sqrt(45)


def test_bad_cases():
    with pytest.raises(ValueError, match=r"^weights is 'shifted', but one of uniform, orthogonal"):
        jacobian.penalty_scenario(8, nu=0.2, weights="shifted")
    with pytest.raises(ValueError, match=r"^scaling is 'mup', but one of"):
        jacobian.penalty_scenario(8, nu=0.2, scaling="mup")


@pytest.mark.parametrize("inputs", [False, True])
def test_automatic_differentiation_agrees_with_difference_quotients(inputs):
    X, network = gaussian(4, 5), TwoLayerNetwork.random(5, 3, activation="softplus", seed=2)

    def value(W):
        slopes = torch.sigmoid(X @ W.T)
        if inputs:
            rows = network.gamma * (slopes * network.a) @ W
            return float(rows.square().sum()) / 8
        squares = X.square().sum(dim=1) * slopes.square().sum(dim=1)
        return network.gamma**2 * float(squares.sum()) / 8

    G = jacobian.penalty_gradient_by_autograd(X, network, inputs=inputs)
    for k in range(15):
        step = torch.zeros(15, dtype=FLOAT)
        step[k] = 1e-5
        step = step.reshape(3, 5)
        quotient = (value(network.W + step) - value(network.W - step)) / 2e-5
        assert quotient == pytest.approx(float(G.T.flatten()[k]), rel=1e-6, abs=1e-9)


def test_the_share_of_large_products():
    case = jacobian.penalty_scenario(40, nu=0.3, activation="tanh")
    t = torch.tanh(case.data.X @ case.network.W.T)
    product = (2 * t * (1 - t**2) ** 2).abs()
    # 2 t (1 - t^2)^2 is largest at t^2 = 1/5.
    supremum = 2 * math.sqrt(0.2) * 0.8**2
    expected = float((product > 0.1 * supremum).double().mean())
    assert jacobian.share_of_large_products(case) == pytest.approx(expected, abs=2e-3)


def test_a_direction_outside_is_found_wherever_it_stands():
    A = torch.diag(torch.arange(1.0, 13.0).double())
    eye = torch.eye(12, dtype=FLOAT)
    for k in range(12):
        assert jacobian.share_outside(A, 3 * eye[k]) == pytest.approx(float(k >= 6))
    assert jacobian.share_outside(A, eye[11] + eye[0]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"^direction is zero"):
        jacobian.share_outside(A, 0 * eye[0])
    with pytest.raises(ValueError, match=r"^direction has shape \(3,\)"):
        jacobian.share_outside(A, torch.ones(3, dtype=FLOAT))


@pytest.mark.parametrize("guess", [0.01, 0.5, 20.0])
def test_the_critical_strength_is_found_from_any_guess(guess):
    # The direction e_0 has singular value 5; seven others have lambda: it sinks at lambda = 5.
    spike, bulk = torch.zeros(8, dtype=FLOAT), torch.ones(8, dtype=FLOAT)
    spike[0], bulk[0] = 5.0, 0.0
    bulk = bulk + 1e-3 * torch.arange(8.0).double() * (bulk > 0)
    critical = jacobian.critical_strength(
        torch.diag(spike), torch.diag(bulk), torch.eye(8, dtype=FLOAT)[0], guess=guess
    )
    # Six leading places: it goes when the sixth largest of the seven, 1.002 lambda, passes 5.
    assert critical == pytest.approx(5 / 1.002, rel=0.03)


def test_strengths_that_do_not_exist_are_named():
    eye = torch.eye(8, dtype=FLOAT)
    G = torch.diag(torch.arange(8.0).double())
    with pytest.raises(ValueError, match=r"^direction is in the bulk of G already"):
        jacobian.critical_strength(G, eye, eye[1], guess=1.0)
    with pytest.raises(ValueError, match=r"^direction is outside the bulk at a thousand times"):
        jacobian.critical_strength(G, 0 * eye, eye[7], guess=1.0)
    with pytest.raises(ValueError, match=r"^guess is 0"):
        jacobian.critical_strength(G, eye, eye[7], guess=0)


def test_a_penalty_cell_is_measured_on_full_matrices():
    fixed = {"nu": 0.4, "alpha": 0.5, "activation": "softplus"}
    cell = jacobian.penalty_cell(60, **fixed, weights="uniform", scaling="ntk", seed=1)
    case = jacobian.penalty_scenario(60, **fixed, seed=1)
    data, W = case.data, case.network.W
    p = torch.sigmoid(data.X @ W.T)
    M = data.X.square().sum(dim=1)[:, None] * p * p * (1 - p) / (75 * 45)
    X_B = data.X - data.zeta * torch.outer(data.z, data.q)
    s = torch.linalg.svdvals(X_B.T @ M)
    U = torch.linalg.svd(data.X.T @ M).U
    expected = {
        "S1": float(torch.linalg.svdvals(case.parts.S1.matrix())[0]),
        "S3": float(data.zeta * (M.T @ data.z).norm()),
        "E2": float(s[0]),
        "E2_3": float(s[2]),
        "E2_rms": float(s.square().mean().sqrt()),
        "top_q": cosine(U[:, 0], data.q),
        "top_mean": cosine(U[:, 0], X_B.T @ data.X.square().sum(dim=1)),
    }
    critical = cell.pop("critical")
    assert cell == pytest.approx(expected, rel=1e-8)
    penalty = jacobian_penalty_gradient(data.X, case.network)
    below, above = (
        jacobian.share_outside(case.parts.G + x * critical * penalty, case.parts.S1.u)
        for x in (0.9, 1.1)
    )
    assert below > 0.5 > above


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_a_cell_of_the_figure_is_measured_on_full_matrices(strength):
    cell = jacobian.penalised_gradient_cell(40, 0.375, 0.0, "sigmoid", strength, 3)
    case = scenario(40, nu=0.375, activation="sigmoid", seed=3)
    penalty = jacobian_penalty_gradient(case.data.X, case.network, strength=strength)
    U, s, _ = torch.linalg.svd(case.parts.G + penalty)
    v = case.parts.S1.u / case.parts.S1.u.norm()
    q = case.data.q
    S3 = torch.outer(q, q @ penalty) - torch.outer(q, (q @ case.data.X_B.T) @ _M(case, strength))
    expected = {
        "S1": case.parts.S1.norm,
        "S3": float(torch.linalg.svdvals(S3)[0]),
        "E2": float(torch.linalg.svdvals(penalty - S3)[0]),
        "s1": float(s[0]),
        "s2": float(s[1]),
        "s3": float(s[2]),
        "u1_q": cosine(U[:, 0], q),
        "u1_residue": cosine(U[:, 0], v),
        "outside": float((U[:, :6].T @ v).square().sum()),
        "at": float(s[:6][(U[:, :6].T @ v).abs().argmax()]),
    }
    assert cell == pytest.approx(expected, rel=1e-8, abs=1e-12)


def _M(case, strength):
    p = torch.sigmoid(case.data.X @ case.network.W.T)
    products = p * (1 - p) * p * (1 - p) * (1 - 2 * p)
    return strength / (50 * 30) * case.data.X.square().sum(dim=1)[:, None] * products


@pytest.mark.parametrize("cells", [jacobian.penalty_cells, jacobian.figure_7_jacobian_cells])
def test_grids_repeat_no_cell(cells):
    listed = [tuple(cell.items()) for cell in cells()]
    assert len(set(listed)) == len(listed)
