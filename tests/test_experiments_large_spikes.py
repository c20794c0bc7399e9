import math

import pytest
import torch

from lowgrad_utils.experiments import large_spikes
from lowgrad_utils.experiments.large_spikes import large_spike_scenario
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spiked_data import sample_spiked_data, sample_targets

FLOAT = torch.float64


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


def autograd_gradient(X, network, residue):
    """The gradient in W of sum_i r_i f(x_i) / n, which needs no formula."""
    W = network.W.clone().requires_grad_()
    f = network.gamma * network.sigma.value(X @ W.T) @ network.a
    return torch.autograd.grad((residue * f).mean(), W)[0].T


@pytest.mark.parametrize("weights", large_spikes.WEIGHTS)
@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
def test_remainder_is_the_gradient_on_the_bulk_side(weights, activation):
    case = large_spike_scenario(40, nu=0.6, activation=activation, weights=weights, seed=3)
    slopes = case.network.sigma.derivative(case.data.X @ case.network.W.T)
    bracket = torch.outer(case.residue, case.network.a) * slopes
    scale = case.network.gamma / case.data.n
    torch.testing.assert_close(large_spikes.remainder(case), scale * case.data.X_B.T @ bracket)
    part = large_spikes.q_part(case)
    expected = scale * case.data.zeta * torch.outer(case.data.q, case.data.z @ bracket)
    torch.testing.assert_close(part.matrix(), expected)


def test_the_gradient_of_a_scenario_is_that_of_autograd():
    case = large_spike_scenario(40, nu=0.6, activation="silu", weights="near-q", seed=3)
    G = autograd_gradient(case.data.X, case.network, case.residue)
    torch.testing.assert_close(case.parts.G, G)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_bound_holds(activation, alpha):
    for seed, weights in enumerate(large_spikes.WEIGHTS):
        case = large_spike_scenario(
            40, nu=0.5, alpha=alpha, activation=activation, weights=weights, seed=seed
        )
        bound = large_spikes.remainder_bound(case)
        norms = case.residue.norm() * largest(case.data.X_B)
        by_hand = norms * large_spikes.lipschitz_constant(activation) / case.data.n
        # gamma sqrt(m) = 1 under NTK scaling.
        assert bound == pytest.approx(float(by_hand))
        assert largest(large_spikes.remainder(case)) <= bound


def test_the_bound_is_attained():
    # One neuron, always on, and a residue along the bulk's top singular vector: no step loses.
    data = sample_spiked_data(30, 40, nu=0.5, seed=1)
    r = large_spikes.leading_residue(data)
    X_B = data.X_B
    expected = largest(X_B) * float(r.norm())
    assert float((X_B.T @ r).norm()) == pytest.approx(expected)
    assert float(r.norm()) == pytest.approx(math.sqrt(30))


def test_lipschitz_constants():
    known = {"relu": 1.0, "elu": 1.0, "softplus": 1.0, "sigmoid": 0.25, "tanh": 1.0}
    known |= {"erf": 2 / math.sqrt(math.pi), "gelu": 1.1289, "silu": 1.0998}
    for name in ACTIVATIONS:
        assert large_spikes.lipschitz_constant(name) == pytest.approx(known[name], abs=1e-4)
    # No pair of points is steeper.
    t = torch.linspace(-9, 9, 4001, dtype=FLOAT)
    for name, sigma in ACTIVATIONS.items():
        steepest = (sigma.value(t).diff() / t.diff()).abs().max()
        assert float(steepest) <= large_spikes.lipschitz_constant(name) + 1e-9
    with pytest.raises(ValueError, match=r"^activation is 'cube'"):
        large_spikes.lipschitz_constant("cube")


def test_weights():
    cases = {w: large_spike_scenario(40, nu=0.75, weights=w, seed=2) for w in large_spikes.WEIGHTS}
    data, uniform = cases["uniform"].data, cases["uniform"].network
    drawn = TwoLayerNetwork.random(40, 50, seed=2)
    assert torch.equal(uniform.W, drawn.W)
    for case in cases.values():
        assert torch.equal(case.network.a, drawn.a)
        torch.testing.assert_close(case.network.W.norm(dim=1), torch.ones(50, dtype=FLOAT))
    along_q = {w: case.network.W @ data.q for w, case in cases.items()}
    assert float(along_q["orthogonal"].abs().max()) < 1e-12
    assert float(along_q["spike"].min()) == pytest.approx(1.0)
    assert float(along_q["near-q"].min()) > 0.5 and float(along_q["near-q"].max()) < 0.9
    # Each row from the data is one of the examples; not all rows are the same.
    overlaps = cases["data"].network.W @ normalise_rows(data.X).T
    torch.testing.assert_close(overlaps.max(dim=1).values, torch.ones(50, dtype=FLOAT))
    assert len(set(overlaps.argmax(dim=1).tolist())) > 10


def test_trained_weights_are_five_normalised_steps():
    case = large_spike_scenario(40, nu=0.5, activation="softplus", weights="trained", seed=4)
    data = sample_spiked_data(30, 40, nu=0.5, seed=4)
    y = sample_targets(data.X, seed=4).y
    network = TwoLayerNetwork.random(40, 50, activation="softplus", seed=4)
    W, first = network.W, None
    for _ in range(5):
        stepped = TwoLayerNetwork(normalise_rows(W), network.a, "softplus")
        r = stepped(data.X) - y
        first = r.norm() if first is None else first
        W = normalise_rows(W - autograd_gradient(data.X, stepped, r).T / data.zeta**2)
    torch.testing.assert_close(case.network.W, W)
    trained = TwoLayerNetwork(normalise_rows(W), network.a, "softplus")
    torch.testing.assert_close(case.residue, trained(data.X) - y)
    assert case.residue.norm() < first


@pytest.mark.parametrize("beta", [0.5, 1.4])
def test_quadratic_residues_know_the_square(beta):
    data = sample_spiked_data(300, 400, nu=0.5, seed=5)
    r = large_spikes.quadratic_residue(data, beta)
    assert float(r.norm()) == pytest.approx(math.sqrt(300))
    assert cosine(r, data.z) == pytest.approx(400 ** (-beta / 2))
    rest = r - (r @ data.z) / (data.z @ data.z) * data.z
    assert cosine(rest, data.z.square() - 1) > 0.9


def test_unseen_residue_leaves_relu_neurons_along_q_without_a_gradient():
    # Neurons exactly along q are off unless the bulk outweighs the spike.
    case = large_spike_scenario(100, nu=1.5, weights="spike", residue="unseen", seed=6)
    seen = (case.data.X @ case.data.q > 0) & (case.residue != 0)
    assert int(seen.sum()) <= 1
    assert case.parts.S12.norm > 10
    assert large_spikes.q_part(case).norm < 0.1 * case.parts.S12.norm


def test_turned_weights_have_the_angle_and_keep_the_rest():
    case = large_spikes.turned_scenario(40, nu=0.75, cosine=0.6, activation="tanh", seed=1)
    flat = large_spikes.turned_scenario(40, nu=0.75, cosine=0.0, activation="tanh", seed=1)
    torch.testing.assert_close(case.network.W @ case.data.q, torch.full((50,), 0.6, dtype=FLOAT))
    rest = case.network.W - 0.6 * case.data.q
    torch.testing.assert_close(rest / 0.8, flat.network.W)
    orthogonal = large_spike_scenario(
        40, nu=0.75, activation="tanh", weights="orthogonal", residue="beta=0.5", seed=1
    )
    torch.testing.assert_close(flat.parts.G, orthogonal.parts.G)


def test_measurements_agree_with_full_decompositions():
    case = large_spike_scenario(40, nu=0.6, activation="softplus", weights="data", seed=7)
    values = large_spikes.measure_large_spike(case)
    p, r = case.parts, case.residue
    U, s, _ = torch.linalg.svd(p.G)
    assert values["s1"] == pytest.approx(float(s[0]))
    assert values["u1_q"] == pytest.approx(cosine(U[:, 0], case.data.q))
    assert values["E_L"] == pytest.approx(largest(p.S1.matrix() + p.E))
    # Weyl: G is E_L plus a matrix of rank one.
    assert float(s[1]) <= values["E_L"]
    assert values["q_part"] == pytest.approx(largest(p.S12.matrix() + p.S2.matrix()))
    slopes = case.network.sigma.derivative(case.data.X @ case.network.W.T)
    perpendicular = slopes - case.network.mu(case.data)
    left = (case.data.z @ (torch.outer(r, case.network.a) * perpendicular)).norm()
    right = math.sqrt(30) * r.norm() * largest(case.network.W) * math.log(30)
    assert values["equation_7"] == pytest.approx(float(left / right))
    assert values["mu_rms"] == pytest.approx(float(case.network.mu(case.data).norm()) / 50**0.5)
    assert values["gamma_r"] == pytest.approx(float(r.norm()) / 50**0.5)
    cell = large_spikes.large_spike_cell(40, 0.6, 0.0, "softplus", "network", "data", 7)
    assert cell == values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "flat"}, r"^weights is 'flat', but one of uniform, orthogonal"),
        ({"residue": "odd"}, r"^residue is 'odd', but one of network, .*unseen.*beta="),
        ({"residue": "beta=-1"}, r"^beta is -1, but a finite number of at least 0"),
        ({"activation": "cube"}, r"^activation is 'cube'"),
        ({"nu": -0.5}, r"^nu is -0.5"),
        ({"d": 0}, r"^d is 0"),
    ],
)
def test_bad_scenarios(change, message):
    with pytest.raises(ValueError, match=message):
        large_spike_scenario(**({"d": 40, "nu": 0.5} | change))


def test_bad_angles_and_alignments():
    for cosine_, message in ((1.5, "at most 1"), (-0.1, "at least 0")):
        with pytest.raises(ValueError, match=rf"^cosine is {cosine_}, but .*{message}"):
            large_spikes.turned_scenario(40, nu=0.5, cosine=cosine_)
    with pytest.raises(ValueError, match=r"^beta is -1"):
        large_spikes.quadratic_residue(sample_spiked_data(6, 8, nu=0.5), -1.0)


def test_cells_are_distinct_and_run():
    for cells in (large_spikes.large_spike_cells(), large_spikes.figure_3_cells()):
        assert len({tuple(cell.items()) for cell in cells}) == len(cells)
    kinds = {
        (c["weights"], c["residue"], c["activation"]): c for c in large_spikes.large_spike_cells()
    }
    for cell in kinds.values():
        measured = large_spikes.large_spike_cell(**(cell | {"d": 12}))
        assert all(math.isfinite(value) for value in measured.values())
