import math

import pytest
import torch
from torch.special import hermite_polynomial_he

from lowgrad_utils.experiments import hidden_spikes, scenario
from lowgrad_utils.experiments.hidden_spikes import spike_scenario
from lowgrad_utils.gradients import RankOne
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_spiked_data
from lowgrad_utils.third_spike import hidden_spike, slope_moments

FLOAT = torch.float64


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


def minus(A, *terms):
    return A - sum(torch.outer(t.u, t.v) for t in terms)


def spikes_of(case, orders=(1, 2, 3, 4)):
    return [hidden_spike(case.data, case.network, case.residue, order=k) for k in orders]


@pytest.mark.parametrize("angle", [0.0, 30.0, 45.0, 60.0, 90.0])
def test_a_residue_has_the_angle_it_says(angle):
    data = sample_spiked_data(3000, 4000, nu=0.0, seed=1)
    r = hidden_spikes.residue_at_angle(data, angle, seed=2)
    assert cosine(data.z, r * data.z) == pytest.approx(math.cos(math.radians(angle)), abs=0.04)
    assert float(r.square().mean()) == pytest.approx(1, abs=0.06)
    assert (float(r.min()) >= -1e-12) == (angle <= 45)


def test_a_scenario_with_another_residue_is_the_books_scenario():
    case = spike_scenario(40, nu=0.3, activation="elu", residue="offset", seed=4)
    other = scenario(40, nu=0.3, activation="elu", residue="offset", seed=4)
    assert torch.equal(case.parts.G, other.parts.G)
    assert torch.equal(case.residue, other.residue)


def test_the_permuted_spike_has_the_norm_of_h_and_another_direction():
    case = spike_scenario(400, nu=0.3, seed=1)
    H, other = spikes_of(case, [1])[0], hidden_spikes.permuted_spike(case, seed=1)
    assert other.norm == pytest.approx(H.norm, rel=0.2)
    assert cosine(other.u, H.u) < 0.2 and cosine(other.v, H.v) < 0.2
    even = hidden_spikes.permuted_spike(spike_scenario(40, nu=0.3, activation="tanh"))
    assert even.norm > 0


@pytest.mark.parametrize(("activation", "order"), [("relu", 1), ("elu", 2), ("tanh", 2)])
def test_norm_ratio_against_the_terms_themselves(activation, order):
    squares = []
    for seed in range(30):
        case = spike_scenario(120, nu=0.4, activation=activation, seed=seed)
        squares.append((spikes_of(case, [order])[0].norm / case.parts.S1.norm) ** 2)
    squares = torch.tensor(squares)
    error = float(squares.std()) / 30**0.5
    expected = hidden_spikes.norm_ratio(120, 0.4, activation, order) ** 2
    # The ratio of means is not the mean of ratios, up to a relative 1/d.
    assert abs(float(squares.mean()) - expected) < 3 * error + 0.02 * expected


@pytest.mark.parametrize("activation", hidden_spikes.CURVED + hidden_spikes.EVEN)
def test_the_first_order_is_the_first_moment_that_is_not_zero(activation):
    s = torch.ones(1, dtype=FLOAT)
    k = hidden_spikes.first_order(activation)
    assert all(abs(float(slope_moments(activation, s, j))) < 1e-12 for j in range(1, k))
    assert abs(float(slope_moments(activation, s, k))) > 1e-3


@pytest.mark.parametrize("activation", ["relu", "elu", "softplus", "tanh"])
def test_shifted_means_against_a_fine_midpoint_rule(activation):
    network = TwoLayerNetwork.random(3, 4, activation=activation)
    shift = torch.tensor([-2.0, -0.3, 0.0, 1.1], dtype=FLOAT)
    u = (torch.arange(200_000, dtype=FLOAT) + 0.5) / 100_000 - 1
    weights = (1 - u.square()) ** 23.5
    weights /= weights.sum()
    for s in (2.0, 7.0, 15.0):
        expected = ACTIVATIONS[activation].derivative(shift[:, None] + s * u) @ weights
        found = hidden_spikes.shifted_mean(network, shift, torch.tensor(s, dtype=FLOAT), 50)
        assert float((found - expected).abs().max()) < 2e-4


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_rest_populations_against_many_fresh_neurons(activation, order):
    d = 60
    case = spike_scenario(d, nu=0.45, activation=activation, residue="offset", seed=3)
    data, r = case.data, case.residue
    network = TwoLayerNetwork.random(d, 30_000, activation=activation, seed=9)
    W, s = network.W, data.preactivation_scale(network.W)
    # Column by column, without the package's spikes: the slope minus its projections on z.
    columns = ACTIVATIONS[activation].derivative(data.X @ W.T)
    for k in range(order + 1):
        weights = slope_moments(activation, s, k) * (data.zeta * (W @ data.q)) ** k
        columns -= torch.outer(hermite_polynomial_he(data.z, k), weights) / math.factorial(k)
    columns = data.X_B.T @ (r[:, None] * columns)
    expected = case.network.gamma**2 / data.n**2 * case.network.m * columns @ columns.T / 30_000
    found = hidden_spikes.rest_population(case, order)
    error = torch.linalg.eigvalsh(found - expected).abs().max()
    # Sampling: 2 (d / 30 000)^(1/2) = 0.09.
    assert float(error) < 0.1 * float(torch.linalg.eigvalsh(expected).max())


@pytest.mark.parametrize("activation", ["elu", "tanh"])
def test_hidden_cell_measures_what_it_says(activation):
    cell = hidden_spikes.hidden_cell(40, 0.4, 0.5, activation, "offset", 2)
    case = spike_scenario(40, nu=0.4, alpha=0.5, activation=activation, residue="offset", seed=2)
    spikes, E = spikes_of(case), case.parts.E
    norms = {f"H{k}": largest(spike.matrix()) for k, spike in enumerate(spikes, 1)}
    U, s, Vh = torch.linalg.svd(E)
    norms |= {"E": float(s[0]), "E_2": float(s[1]), "S1": largest(case.parts.S1.matrix())}
    norms |= {f"E_H{k}": largest(minus(E, *spikes[:k])) for k in (1, 2, 4)}
    norms["E_other"] = largest(minus(E, hidden_spikes.permuted_spike(case, seed=2)))
    first = spikes[0 if activation == "elu" else 1]
    directions = {"left": cosine(U[:, 0], first.u), "right": cosine(Vh[0], first.v)}
    p = case.data.X_B.T @ (case.residue * case.data.z)
    directions["left_1"] = cosine(U[:, 0], p)
    directions["right_1"] = cosine(Vh[0], case.network.a * (case.network.W @ case.data.q))
    for name, value in (norms | directions).items():
        assert cell[name] == pytest.approx(value, abs=1e-10), name
    assert cell["N"] > 0 and cell["E_law"] > 0


def test_the_law_knows_e_and_what_is_left_of_it():
    for activation in ("softplus", "tanh"):
        nu = 0.375 if activation == "softplus" else 0.45
        cells = [
            hidden_spikes.hidden_cell(400, nu, 0.0, activation, "angle=90", seed)
            for seed in range(3)
        ]
        mean = {name: sum(cell[name] for cell in cells) / 3 for name in cells[0]}
        assert mean["E"] == pytest.approx(mean["E_law"], rel=0.06)
        assert mean["E_H2"] == pytest.approx(mean["E_H2_law"], rel=0.08)
        assert mean["left"] == pytest.approx(mean["left_law"], abs=0.04)
        assert mean["right"] == pytest.approx(mean["right_law"], abs=0.04)


def test_outlier_cell_measures_what_it_says():
    cell = hidden_spikes.outlier_cell(120, 0.4, "softplus", "angle=90", 1)
    case = spike_scenario(120, nu=0.4, residue="angle=90", seed=1)
    H, edge = spikes_of(case, [1])[0], cell["edge"]
    s = torch.linalg.svdvals(case.parts.G) / edge
    assert [cell[f"s{k}"] for k in (1, 2, 3, 4)] == pytest.approx(s[:4].tolist())
    pair = torch.linalg.svdvals(case.parts.S2.matrix() + H.matrix())[:2] / edge
    assert [cell["large"], cell["small"]] == pytest.approx(pair.tolist())
    limit = 1 + hidden_spikes.MARGIN
    assert cell["seen"] == int((s > limit).sum())
    side = torch.linalg.svdvals(minus(case.parts.G, case.parts.S12, case.parts.S2)) / edge
    assert cell["bulk_side"] == int((side > limit).sum())
    assert cell["seen"] <= cell["bulk_side"] + 1
    norms = [case.parts.S1.norm, case.parts.S2.norm, H.norm]
    assert cell["norms"] == sum(norm > limit * edge for norm in norms)


def test_grids_have_no_cell_twice():
    for cells in (hidden_spikes.hidden_cells(), hidden_spikes.outlier_cells()):
        assert len({tuple(cell.items()) for cell in cells}) == len(cells)


def test_pair_values_and_subtraction():
    stream = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(7, generator=stream, dtype=FLOAT) for _ in range(4))
    first, second = RankOne(a, b), RankOne(c, d)
    whole = first.matrix() + second.matrix()
    expected = torch.linalg.svdvals(whole)[:2]
    torch.testing.assert_close(hidden_spikes.pair_values(first, second), expected)
    assert largest(hidden_spikes.without(whole, first, second)) < 1e-12


def test_bad_input_is_named():
    data = sample_spiked_data(30, 40, nu=0.1)
    for angle in (-1, 91):
        with pytest.raises(ValueError, match=rf"^angle is {angle}, but 0 to 90 degrees"):
            hidden_spikes.residue_at_angle(data, angle)
    with pytest.raises(TypeError, match=r"^angle is 'wide'"):
        spike_scenario(40, nu=0.1, residue="angle=wide")
    with pytest.raises(ValueError, match=r"^residue is 'big', but one of"):
        spike_scenario(40, nu=0.1, residue="big")
    with pytest.raises(ValueError, match=r"^activation is 'swish', but one of"):
        hidden_spikes.first_order("swish")


def test_eigenvalue_cell_measures_what_it_says():
    cell = hidden_spikes.eigenvalue_cell(60, 0.4, "knows-z", 3)
    data = sample_spiked_data(45, 60, nu=0.4, seed=3)
    r = (data.z.square() - 1).sign()
    whole = torch.linalg.eigvalsh(data.X.T @ torch.diag(r) @ data.X) / 60
    bulk = torch.linalg.eigvalsh(data.X_B.T @ torch.diag(r) @ data.X_B) / 60
    ends = {"right": whole[-1], "second": whole[-2], "left": whole[0]}
    ends |= {"bulk_right": bulk[-1], "bulk_left": bulk[0]}
    assert {name: cell[name] for name in ends} == pytest.approx(
        {name: float(value) for name, value in ends.items()}
    )
    p, kappa = data.X_B.T @ (r * data.z), data.zeta * float(r @ data.z.square())
    root = math.sqrt(kappa**2 + 4 * float(p @ p))
    pair = {"right_pair": (kappa + root) / 2, "left_pair": (kappa - root) / 2}
    for name, value in pair.items():
        assert cell[name] == pytest.approx(data.zeta * value / 60)
    with pytest.raises(ValueError, match=r"^residue is 'big', but one of angle, knows-z"):
        hidden_spikes.eigenvalue_cell(60, 0.4, "big", 3)


def test_interlacing_excess_is_that_of_the_definition():
    case = spike_scenario(40, nu=0.5, residue="offset", seed=1)
    whole = torch.linalg.svdvals(case.parts.G)
    side = torch.linalg.svdvals(case.parts.S1.matrix() + case.parts.E)
    excess = max(float(whole[k + 1] - side[k]) for k in range(39)) / float(whole[0])
    assert hidden_spikes.interlacing_excess(case) == pytest.approx(excess, abs=1e-12)
    assert excess < 1e-12
