import math

import numpy as np
import pandas as pd
import pytest
import torch

from lowgrad_utils.experiments import scenario
from lowgrad_utils.experiments import spike_prediction as sp
from lowgrad_utils.networks import ACTIVATIONS, normalise_rows
from lowgrad_utils.spectra import alignment
from lowgrad_utils.third_spike import hidden_spike


@pytest.fixture(scope="module")
def case():
    return scenario(160, nu=0.375, activation="softplus", residue="independent", seed=1)


def test_low_rank_is_the_decomposition_of_the_sum(case):
    whole = case.parts.G - case.parts.E
    for third in (False, True):
        matrix = whole + third * hidden_spike(case.data, case.network, case.residue).matrix()
        found = sp.low_rank(case, third=third)
        assert len(found.s) == 2 + third
        torch.testing.assert_close((found.U * found.s) @ found.V.T, matrix)
    even = scenario(60, nu=0.25, activation="tanh")
    assert len(sp.low_rank(even).s) == 2


def test_measured_triplets_agree_with_a_full_decomposition(case):
    U, s, Vh = torch.linalg.svd(case.parts.G)
    seen = sp.measured(case)
    torch.testing.assert_close(seen.values, s[:3])
    assert float(seen.along_q[0]) == pytest.approx(alignment(U[:, 0], case.data.q))
    assert float(seen.along_residue[1]) == pytest.approx(alignment(U[:, 1], case.parts.S1.u))
    right = case.network.a * (case.network.W @ case.data.q)
    assert float(sp.right_cosines(case)[1, 1]) == pytest.approx(alignment(Vh[1], right))


def test_the_exact_equation_is_exact_and_needs_its_cross_terms(case):
    s = torch.linalg.svdvals(case.parts.G)[:2]
    torch.testing.assert_close(sp.secular_equation(case).roots(), s, rtol=1e-12, atol=0)
    plain = sp.secular_equation(case).roots(cross=False)
    assert (plain / s - 1).abs().max() > 1e-3


def test_every_route_is_close_far_above_the_edge():
    case = scenario(240, nu=0.45, activation="softplus", residue="independent", seed=1)
    seen, law = sp.measured(case), sp.from_law(case, sp.law_of(case))
    for route in (sp.from_pieces(case), sp.from_free_bulk(case), law):
        torch.testing.assert_close(route.values[:2], seen.values[:2], rtol=0.08, atol=0)
        torch.testing.assert_close(route.along_q[:2], seen.along_q[:2], rtol=0, atol=0.08)


@pytest.mark.parametrize("weights", ["uniform", "shifted"])
def test_right_cosines_of_strong_outliers(weights):
    case = scenario(240, nu=0.45, activation="softplus", residue="offset", weights=weights, seed=2)
    law = sp.law_of(case, weights=weights)
    predicted = sp.right_cosines_from_law(case, law, weights=weights)
    torch.testing.assert_close(predicted[0], sp.right_cosines(case)[0], rtol=0, atol=0.1)
    assert predicted[0].max() > 0.8


def test_the_wrong_bulks_have_wrong_edges(case):
    free = sp.from_free_bulk(case)
    # E hides H, which its edge then shows.
    assert sp.from_free_bulk(case, third=False).edge > 1.3 * free.edge
    rest = case.parts.G - (low := sp.low_rank(case)).U * low.s @ low.V.T
    assert free.edge == pytest.approx(float(torch.linalg.svdvals(rest)[0]))
    entries = rest.square().mean().sqrt()
    expected = entries * (math.sqrt(rest.shape[0]) + math.sqrt(rest.shape[1]))
    assert sp.from_independent_entries(case).edge == pytest.approx(float(expected))


def test_the_law_takes_another_residue(case):
    flat = torch.ones(case.data.n).double()
    other = sp.from_law(case, sp.law_of(case, residue=flat))
    assert abs(other.values[0] / sp.measured(case).values[0] - 1) > 0.2
    with pytest.raises(ValueError, match="weights is 'spike', but one of uniform, shifted"):
        sp.law_of(case, weights="spike")


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_right_cosines_use_the_moments_of_random_rows(shift):
    """The predicted inner products, against the mean over many rows."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(3, 60, generator=stream, dtype=torch.float64)
    q = normalise_rows(torch.randn(1, 60, generator=stream, dtype=torch.float64))[0]
    rows = normalise_rows(torch.randn(100_000, 60, generator=stream, dtype=torch.float64))
    rows = normalise_rows(rows + shift * q)
    slopes = ACTIVATIONS["softplus"].derivative(x @ rows.T)
    moments, squares = sp.right_moments(x, q, "softplus", shift * q if shift else None)
    torch.testing.assert_close(slopes.mean(1), moments[0], rtol=0, atol=3e-3)
    torch.testing.assert_close(slopes @ (rows @ q) / rows.shape[0], moments[1], rtol=0, atol=3e-3)
    assert float((rows @ q).square().mean()) == pytest.approx(squares[1], abs=3e-3)


def test_gaussian_moments_of_relu_are_closed_forms():
    mean, s = torch.tensor([0.0, 0.5, -1.0]).double(), torch.tensor([1.0, 2.0, 0.5]).double()
    mu, c = sp.gaussian_moments("relu", mean, s)
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(mu, normal.cdf(mean / s), rtol=0, atol=3e-3)
    torch.testing.assert_close(c, normal.log_prob(mean / s).exp() / s, rtol=0, atol=3e-3)


def test_spikes_are_seen_and_named(case):
    data, r = case.data, case.residue
    basis = sp.spike_space(case)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3).double())
    columns = [data.bulk_times(r * data.z), data.q, data.bulk_times(r)]
    stray = torch.randn(data.d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    U = normalise_rows(torch.stack([*columns, stray]))
    assert sp.visible_spikes((U @ basis).square()) == "pqr"
    assert sp.visible_spikes(0.4 * (U @ basis).square()) == ""
    assert sp.letters(321) == "pqr"


def test_a_cell_repeats_the_single_routes():
    setting = dict(nu=0.25, alpha=0.5, activation="tanh", residue="offset")
    cell = sp.prediction_cell(120, **setting, weights="shifted", scaling="mean-field", seed=2)
    case = scenario(120, **setting, weights="shifted", scaling="mean-field", seed=2)
    law = sp.from_law(case, sp.law_of(case, weights="shifted"))
    assert cell["law_1"] == pytest.approx(float(law.values[0]), rel=1e-4)
    assert cell["free_1"] == pytest.approx(float(sp.from_free_bulk(case).values[0]), rel=1e-4)
    assert cell["exact"] < 1e-11 and cell["turned"] < 1e-9 and cell["missing"] == 0
    assert cell["permuted_1"] != cell["law_1"]
    s = torch.linalg.svdvals(case.parts.G)
    assert cell["next"] == pytest.approx(float(s[int(cell["outliers"])]), rel=1e-4)


def test_a_size_repeats_the_comparison():
    cell = sp.size_cell(90, 0.375, "tanh", "offset", 3)
    case = scenario(90, nu=0.375, activation="tanh", residue="offset", seed=3)
    assert cell["s_1"] == pytest.approx(float(torch.linalg.svdvals(case.parts.G)[0]), rel=1e-4)
    assert cell["law_1"] == pytest.approx(sp.law_of(case).outliers[0].value, rel=1e-4)


def test_long_form_sorts_values_by_the_law():
    cells = [sp.prediction_cell(100, 0.375, 0.0, "softplus", "offset", "uniform", "ntk", 1)]
    frame = pd.DataFrame(cells).assign(
        d=100,
        nu=0.375,
        alpha=0.0,
        activation="softplus",
        residue="offset",
        weights="uniform",
        scaling="ntk",
        seed=1,
    )
    rows = sp.long_form(frame)
    assert rows.regime.tolist()[:1] == ["above"]
    assert len(rows) == min(int(cells[0]["outliers"]) + 1, 3)
    assert rows.unit.iloc[0] == pytest.approx(1 / math.sqrt(250))
    expected = abs(cells[0]["s_1"] / cells[0]["free_1"] - 1) * math.sqrt(250)
    assert sp.errors(rows, "free").iloc[0] == pytest.approx(expected)
    assert rows.angle.iloc[0] >= abs(cells[0]["q_1"] - cells[0]["law_q_1"])
    with pytest.raises(ValueError, match="route is 'exact', but one of law, pieces"):
        sp.errors(rows, "exact")


def test_rows_that_took_the_same_steps_have_the_law_of_a_trained_network():
    case, kernel = sp.trained_scenario(100, activation="softplus", steps=15, rows=1500, seed=1)
    start = scenario(100, nu=0.375, activation="softplus", scaling="mean-field", seed=1)
    assert case.residue.square().sum() < 0.5 * start.residue.square().sum()
    torch.testing.assert_close(case.network.W.norm(dim=1), torch.ones(125).double())
    # The network's own rows are one sample of the kernel, the fresh ones another.
    slopes = case.network.sigma.derivative(case.data.X @ case.network.W.T)
    own = slopes @ slopes.T / 125
    assert (own - kernel).norm() < 2 * kernel.norm() / 125**0.5
    assert (own - sp.kernel_of(case)).norm() > 0.3 * kernel.norm()
    seen = sp.measured(case).values[:2]
    moved, uniform = (
        sp.from_law(case, law) for law in (sp.law_of(case, kernel=kernel), sp.law_of(case))
    )
    torch.testing.assert_close(moved.values[:2], seen, rtol=0.15, atol=0)
    assert (uniform.values[:2] / seen - 1).abs().max() > 0.3


def test_a_population_without_bulk_has_no_spread(case):
    few = case.residue * (torch.arange(case.data.n) < 3)
    law = sp.compare(case, sp.law_of(case, residue=few))
    assert law["edge"] == law["spread"] == 0 and law["outliers"] == 3


def test_a_phase_names_what_left_vectors_show():
    cell = sp.phase_cell(120, 0.375, 0.0, "softplus", "independent", 1)
    case = scenario(120, nu=0.375, activation="softplus", residue="independent", seed=1)
    U = torch.linalg.svd(case.parts.G).U[:, :8]
    squares = (U.T @ sp.spike_space(case)).square()
    assert sp.letters(cell["code"]) == sp.visible_spikes(squares)
    assert cell["q"] == pytest.approx(alignment(U[:, 0], case.data.q), abs=1e-4)
    assert cell["r"] == pytest.approx(alignment(U[:, 0], case.parts.S1.u), abs=1e-4)
    law = sp.law_of(case)
    predicted = math.sqrt(float(law.squared_cosines(case.data.q)[0]))
    assert cell["law_q"] == pytest.approx(predicted, abs=1e-4)
    assert cell["permuted_q"] != cell["law_q"]


def test_the_lines_of_the_exponents():
    assert sp.asymptotic_line(0.5, "network", even=True) == 0.125
    assert sp.asymptotic_line(0.5, "independent", even=False) == 0.25
    with pytest.raises(ValueError, match="residue is 'own', but one of network"):
        sp.asymptotic_line(0.5, "own", even=False)
    frame = pd.DataFrame(
        {"nu": [0.3, 0.3], "alpha": [0.0, 0.0], "activation": ["tanh", "relu"],
         "residue": ["offset", "offset"], "r": [0.95, 0.1], "q": [0.1, 0.99],
         "law_r": [0.7, 0.1], "law_q": [0.7, 0.95], "permuted_r": [0.1, 0.1],
         "permuted_q": [0.0, 0.95], "code": [12, 213], "law_code": [1, 0],
         "permuted_code": [1, 2]}
    )  # fmt: skip
    judged = sp.judge_phases(frame)
    assert judged.leader.tolist() == ["residue", "spike"]
    assert judged.law_leader.tolist() == ["both", "spike"]
    assert judged["count"].tolist() == [2, 3]
    assert judged.law_count.tolist() == [1, 0]
    assert judged.exponent_leader.tolist() == ["residue", "spike"]


def test_the_grids_have_distinct_cells():
    for cells in map(list, (sp.prediction_cells(), sp.phase_cells(), sp.size_cells())):
        assert len({tuple(cell.values()) for cell in cells}) == len(cells)
    assert np.isclose(sp.margin(1000), 0.01)


def test_a_crossing_is_where_the_predicted_leader_changes():
    nu = sp.crossing_cell(80, 0.0, "softplus", "offset", 1)["crossing"]
    leads = []
    for step in (-0.02, 0.02):
        case = scenario(80, nu=nu + step, activation="softplus", residue="offset", seed=1)
        prediction = sp.from_law(case, sp.law_of(case))
        leads.append(bool(prediction.along_q[0] > prediction.along_residue[0]))
    assert leads == [False, True]
