import math

import pytest
import torch

from lowgrad_utils.experiments import weight_decay
from lowgrad_utils.experiments.large_spikes import large_spike_scenario
from lowgrad_utils.networks import ACTIVATIONS, LOSSES
from lowgrad_utils.spiked_data import sample_targets

FLOAT = torch.float64


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bounds_hold(activation):
    for seed, residue in enumerate(("network", "offset", "leading", "beta=0", "unseen")):
        for weights in ("uniform", "near-q", "data"):
            case = large_spike_scenario(
                40, nu=0.5, alpha=0.5, activation=activation, weights=weights, residue=residue,
                seed=seed,
            )  # fmt: skip
            bounds = weight_decay.spike_bounds(case)
            for name in ("S1", "S12", "S2"):
                assert 0 < getattr(case.parts, name).norm <= bounds[name] * (1 + 1e-12)


def test_the_bounds_by_hand():
    case = large_spike_scenario(40, nu=0.5, activation="sigmoid", residue="offset", seed=2)
    data, r = case.data, case.residue
    # gamma sqrt(m) = 1 and L = 1/4.
    bounds = weight_decay.spike_bounds(case)
    assert bounds["S1"] == pytest.approx(0.25 * float(r.norm()) * largest(data.X_B) / 30)
    assert bounds["S12"] == pytest.approx(0.25 * abs(float(data.z @ r)) * data.zeta / 30)
    along_z = float(r.norm() * data.z.norm())
    assert bounds["S2"] == pytest.approx(0.25 * along_z * data.zeta / 30)


def test_the_bound_on_the_residue_spike_is_attained():
    # tanh whose preactivations are tiny has slope 1 = L everywhere.
    case = large_spike_scenario(400, nu=0.0, alpha=4.0, activation="tanh", residue="leading")
    ratio = case.parts.S1.norm / weight_decay.spike_bounds(case)["S1"]
    assert 0.98 < ratio <= 1


def test_the_decayed_gradient_is_that_of_the_penalised_loss():
    case = large_spike_scenario(40, nu=0.5, activation="softplus", seed=3)
    y = sample_targets(case.data.X, seed=3).y
    W = case.network.W.clone().requires_grad_()
    f = case.network.gamma * case.network.sigma.value(case.data.X @ W.T) @ case.network.a
    objective = LOSSES["mse"].value(f, y).mean() + 0.7 / 2 * W.square().sum()
    gradient = torch.autograd.grad(objective, W)[0].T
    torch.testing.assert_close(weight_decay.decayed(case, 0.7), gradient)


def test_alignments_agree_with_a_full_decomposition():
    case = large_spike_scenario(40, nu=0.5, residue="beta=0.5", seed=3)
    U = torch.linalg.svd(case.parts.G + 0.4 * case.network.W.T)[0]
    along_residue, along_q = weight_decay.alignments_under_decay(case, 0.4)
    assert along_residue == pytest.approx(cosine(U[:, 0], case.parts.S1.u))
    assert along_q == pytest.approx(cosine(U[:, 0], case.data.q))


@pytest.mark.parametrize("spike", ["residue", "q"])
def test_the_threshold_is_where_the_alignment_is_half(spike):
    nu, residue = (0.0, "independent") if spike == "residue" else (1.0, "beta=0")
    case = large_spike_scenario(120, nu=nu, activation="softplus", residue=residue, seed=1)
    parts = case.parts
    norm = largest(parts.S1.matrix() if spike == "residue" else (parts.G - parts.S1.matrix()
                                                                  - parts.E))  # fmt: skip
    assert weight_decay.spike_norm(case, spike) == pytest.approx(norm)
    threshold = weight_decay.decay_threshold(case, spike)
    index = 0 if spike == "residue" else 1
    before, after = (
        weight_decay.alignments_under_decay(case, threshold * factor)[index]
        for factor in (1 / 1.03, 1.03)
    )
    assert after < math.sqrt(0.5) <= before
    # The law of a spike in a bulk: 0.681, with the scatter of a small size.
    assert 0.5 < threshold / norm < 0.9


def test_no_threshold_without_a_spike():
    case = large_spike_scenario(40, nu=0.0, residue="independent", seed=1)
    assert weight_decay.decay_threshold(case, "q") == 0.0


def test_the_prediction_meets_a_spike_planted_in_gaussian_weights():
    # The law itself, on a matrix made of independent entries instead of a gradient.
    generator = torch.Generator().manual_seed(5)
    d, m = 400, 500
    case = large_spike_scenario(d, nu=0.0, residue="independent", activation="softplus", seed=5)
    norm = case.parts.S1.norm
    variance = float(case.parts.E.square().sum()) / (d * m)
    u, v = case.parts.S1.u / case.parts.S1.u.norm(), case.parts.S1.v / case.parts.S1.v.norm()
    for fraction in (0.3, 0.6):
        decay = fraction * norm
        noise = torch.randn(d, m, generator=generator, dtype=FLOAT)
        bulk = math.sqrt(decay**2 / d + variance) * noise
        U = torch.linalg.svd(torch.addr(bulk, norm * u, v), full_matrices=False)[0]
        predicted = weight_decay.predicted_alignment(case, decay, "residue")
        assert predicted == pytest.approx(cosine(U[:, 0], u), abs=0.06)
    below = weight_decay.predicted_alignment(case, 0.94 * norm, "residue")
    assert below > 0 == weight_decay.predicted_alignment(case, 0.95 * norm, "residue")


def test_the_prediction_adds_the_remainder_to_the_bulk():
    case = large_spike_scenario(60, nu=0.25, residue="independent", seed=3)
    p = case.parts
    E = p.G - p.S1.matrix() - p.S12.matrix() - p.S2.matrix()
    decay = 0.1 * p.S1.norm
    # Strength squared against entries of variance 1/m, m = 75; E makes up half of the bulk here.
    t = p.S1.norm**2 / (75 * (decay**2 / 60 + float(E.square().mean())))
    expected = 1 - 0.8 * (1 + t) / (t * (t + 0.8))
    predicted = weight_decay.predicted_alignment(case, decay, "residue")
    assert predicted**2 == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("at", [0.21, 0.5, 2.9])
def test_a_threshold_is_found_anywhere_in_the_bracket(monkeypatch, at):
    case = large_spike_scenario(40, nu=0.5, residue="beta=0", seed=1)
    norm = weight_decay.spike_norm(case, "q")
    turned = lambda _, decay: (0.0, float(decay < at * norm))  # noqa: E731
    monkeypatch.setattr(weight_decay, "alignments_under_decay", turned)
    assert weight_decay.decay_threshold(case, "q") == pytest.approx(at * norm, rel=0.025)


def test_decay_at_a_power():
    case = large_spike_scenario(40, nu=0.5, weights="near-q", seed=1)
    decay = weight_decay.decay_at(case, 0.5)
    # gamma sqrt(m) = 1 under NTK scaling.
    assert decay * largest(case.network.W) == pytest.approx(math.sqrt(30))


def test_with_unit_rows_decay_is_a_longer_step():
    case = large_spike_scenario(40, nu=0.5, activation="tanh", seed=1)
    W, G = case.network.W, case.parts.G
    stepped = weight_decay.normalised_step(W, G, step=0.5, decay=0.8)
    by_hand = W - 0.5 * (G.T + 0.8 * W)
    torch.testing.assert_close(stepped, by_hand / by_hand.norm(dim=1, keepdim=True))
    longer = weight_decay.normalised_step(W, G, step=0.5 / (1 - 0.4), decay=0.0)
    torch.testing.assert_close(stepped, longer)
    plain = weight_decay.normalised_step(W, G, step=0.5, decay=0.0)
    assert (stepped - plain).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2.0, "decay": 0.5}, r"^step \* decay is 1, but less than 1"),
        ({"step": 0.0}, r"^step is 0"),
        ({"decay": -1.0}, r"^decay is -1"),
        ({"gradient": torch.ones(50, 40, dtype=FLOAT)}, r"^gradient has shape .*40 x 50"),
        ({"W": torch.ones(50, 40, dtype=FLOAT)}, r"^row 0 of W has length"),
    ],
)
def test_bad_steps(change, message):
    case = large_spike_scenario(40, nu=0.5)
    arguments = {"W": case.network.W, "gradient": case.parts.G, "step": 0.5, "decay": 0.5} | change
    with pytest.raises(ValueError, match=message):
        weight_decay.normalised_step(
            arguments.pop("W"), arguments.pop("gradient"), **arguments
        )  # fmt: skip


def test_bad_arguments():
    case = large_spike_scenario(40, nu=0.5)
    for function in (weight_decay.decayed, weight_decay.alignments_under_decay):
        with pytest.raises(ValueError, match=r"^decay is -1, but a finite number of at least 0"):
            function(case, -1.0)
    with pytest.raises(ValueError, match=r"^spike is 'S1', but one of residue, q"):
        weight_decay.decay_threshold(case, "S1")
    with pytest.raises(ValueError, match=r"^decay is -1"):
        weight_decay.predicted_alignment(case, -1.0, "q")


CELLS = {
    weight_decay.bounds_cell: weight_decay.bounds_cells,
    weight_decay.threshold_cell: weight_decay.threshold_cells,
    weight_decay.power_cell: weight_decay.power_cells,
    weight_decay.curve_cell: weight_decay.curve_cells,
}


@pytest.mark.parametrize("cell", CELLS, ids=lambda f: f.__name__)
def test_cells_are_distinct_and_run(cell):
    cells = CELLS[cell]()
    assert len({tuple(c.items()) for c in cells}) == len(cells)
    for parameters in cells[:: len(cells) // 7]:
        measured = cell(**(parameters | {"d": 24}))
        assert all(math.isfinite(value) for value in measured.values())


def test_cells_measure_what_they_say():
    setting = dict(nu=0.5, alpha=0.0, activation="relu", residue="beta=0", weights="uniform")
    case = large_spike_scenario(40, **setting, seed=4)
    setting["seed"] = 4
    measured = weight_decay.bounds_cell(40, **setting)
    assert measured["S2"] == case.parts.S2.norm
    assert measured["unit"] == pytest.approx(1.0)
    assert measured["z_alignment"] == pytest.approx(
        abs(float(case.data.z @ case.residue)) / math.sqrt(30) / float(case.residue.norm())
    )
    assert measured["S1_bound"] == pytest.approx(weight_decay.spike_bounds(case)["S1"])
    decay = 0.5 * weight_decay.spike_norm(case, "q")
    curve = weight_decay.curve_cell(40, **setting, spike="q", fraction=0.5)
    U = torch.linalg.svd(case.parts.G + decay * case.network.W.T)[0]
    assert curve["measured"] == pytest.approx(cosine(U[:, 0], case.data.q))
    assert curve["predicted"] == weight_decay.predicted_alignment(case, decay, "q")
    power = weight_decay.power_cell(40, **setting, power=0.25)
    decay = 30**0.25 / largest(case.network.W)
    U = torch.linalg.svd(case.parts.G + decay * case.network.W.T)[0]
    assert power["u1_q"] == pytest.approx(cosine(U[:, 0], case.data.q))
    assert power["u1_residue"] == pytest.approx(cosine(U[:, 0], case.parts.S1.u))
    threshold = weight_decay.threshold_cell(40, **setting, spike="q")
    assert threshold["threshold"] == weight_decay.decay_threshold(case, "q")
