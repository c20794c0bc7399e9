import math

import numpy as np
import pytest
import torch

from lowgrad_utils import convolutions
from lowgrad_utils.experiments import filters
from lowgrad_utils.networks import ACTIVATIONS
from lowgrad_utils.spiked_data import sample_spiked_data

FLOAT = torch.float64


def sine_by_least_squares(g, A):
    residual = g - A @ torch.linalg.lstsq(A, g[:, None]).solution[:, 0]
    return float(residual.norm() / g.norm())


def test_filters_are_unit_vectors_of_their_own_stream():
    w = filters.random_filters(400, 3, seed=2)
    torch.testing.assert_close(w.norm(dim=1), torch.ones(3, dtype=FLOAT))
    data = sample_spiked_data(300, 400, nu=0.1, seed=2)
    cosine = (data.X @ w[0]).abs() / data.X.norm(dim=1)
    assert float(cosine.max()) < 6 / math.sqrt(400)
    assert torch.equal(w, filters.random_filters(400, 3, seed=2))


@pytest.mark.parametrize("residue", ["network", "offset", "independent"])
def test_a_scenario_is_a_tied_network(residue):
    filtered = filters.filter_scenario(
        40, 6, nu=0.3, alpha=0.5, activation="silu", residue=residue, seed=3
    )
    case = filtered.case
    assert (case.data.n, case.data.d, case.network.m) == (30, 40, 35)
    expected = convolutions.expand_filter(filtered.w, 40)
    torch.testing.assert_close(case.network.W, expected)
    assert set(case.network.a.tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(filtered.gradient.g, convolutions.tie(case.parts.G))
    assert torch.equal(case.data.X, sample_spiked_data(30, 40, nu=0.3, alpha=0.5, seed=3).X)


@pytest.mark.parametrize("activation", ["relu", "softplus", "sigmoid", "tanh"])
def test_slope_share_by_sampling(activation):
    case = filters.filter_scenario(40, 6, nu=0.4, alpha=0.5, activation=activation, seed=1).case
    stream = torch.Generator().manual_seed(0)
    s = case.data.preactivation_scale(case.network.W)
    slopes = ACTIVATIONS[activation].derivative(
        s * torch.randn(100_000, len(s), generator=stream, dtype=FLOAT)
    )
    share = slopes.var(dim=0).sum() / slopes.square().mean(dim=0).sum()
    predicted = filters.slope_share(case.data, case.network)
    assert predicted == pytest.approx(math.sqrt(float(share)), rel=0.01)


def test_the_sine_is_the_residual_of_least_squares():
    stream = torch.Generator().manual_seed(0)
    g, A = (torch.randn(9, *size, generator=stream, dtype=FLOAT) for size in ((), (3,)))
    assert filters.sine_to_span(g, A) == pytest.approx(sine_by_least_squares(g, A))
    assert filters.sine_to_span(A[:, 0] - 2 * A[:, 1], A) < 1e-7
    assert filters.sine_to_span(torch.eye(4, dtype=FLOAT)[0], torch.eye(4, 4, dtype=FLOAT)[:, 1:])
    with pytest.raises(ValueError, match=r"^g has shape \(9, 3\), but a vector"):
        filters.sine_to_span(A, A)


def test_a_cell_measures_what_it_says():
    cell = filters.filter_cell(60, 7, 0.2, 0.0, "softplus", "offset", 4)
    filtered = filters.filter_scenario(
        60, 7, nu=0.2, activation="softplus", residue="offset", seed=4
    )
    parts, w = filtered.case.parts, filtered.w
    g = convolutions.tie(parts.G)
    span = torch.column_stack(
        [
            convolutions.tie(parts.S1.matrix() + parts.S12.matrix()),
            convolutions.tie(parts.S2.matrix()),
        ]
    )
    assert cell["sine"] == pytest.approx(sine_by_least_squares(g, span))
    widened = torch.column_stack([span, w])
    assert cell["sine_own"] == pytest.approx(sine_by_least_squares(g, widened))
    rest = g - span.sum(dim=1)
    assert cell["rest"] == pytest.approx(float(rest.norm() / g.norm()))
    assert cell["own"] == pytest.approx(float(w @ rest / g.norm()))
    sizes = [torch.linalg.svdvals(A) for A in (parts.E, parts.G, filtered.case.network.W)]
    assert cell["operator"] == pytest.approx(float(sizes[0][0] / sizes[1][0]))
    assert cell["frobenius"] == pytest.approx(float(sizes[0].norm() / sizes[1].norm()))
    assert cell["W_norm"] == pytest.approx(float(sizes[2][0]))
    assert 0 < cell["sine_random"] <= 1
    data, network = filtered.case.data, filtered.case.network
    assert cell["predicted"] == pytest.approx(filters.slope_share(data, network))


def test_the_part_along_the_filter_is_steins_identity():
    # Averaged over many examples, x sigma'_perp(w.x) tends to c w; the filter adds its positions.
    w = filters.random_filters(5, 1, seed=1)[0]
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(400_000, 5, generator=stream, dtype=FLOAT)
    slopes = ACTIVATIONS["softplus"].derivative(x @ w) - 0.5
    c = float(ACTIVATIONS["softplus"].c(torch.ones(1, dtype=FLOAT)))
    assert float(((slopes[:, None] * x).mean(dim=0) - c * w).abs().max()) < 0.002
    pairs = [
        filters.own_direction(
            filters.filter_scenario(300, 9, activation="softplus", residue="offset", seed=s)
        )
        for s in range(12)
    ]
    measured, predicted = np.array(pairs).T
    assert np.corrcoef(measured, predicted)[0, 1] > 0.9
    even = filters.filter_scenario(60, 9, activation="sigmoid", residue="offset", seed=0)
    assert filters.own_direction(even)[1] == 0


def drawn_channels(readout):
    """Data, readout signs (channels x positions) and residue of a small case, and its gradients."""
    case = filters.channel_gradients(
        30, 5, 3, nu=0.2, activation="tanh", readout=readout, residue="independent", seed=2
    )
    data = sample_spiked_data(22, 30, nu=0.2, seed=2)
    signs = filters._signs(3 * 26, 2).reshape(3, 26)
    if readout == "pooled":
        signs = signs[:, :1].expand(3, 26)
    return data, signs, filters.RESIDUES["independent"](data, None, "mse", 2), case


@pytest.mark.parametrize("readout", ["signs", "pooled"])
def test_channels_against_autograd(readout):
    data, signs, r, case = drawn_channels(readout)
    free = case.filters.clone().requires_grad_()
    hidden = torch.tanh(torch.nn.functional.conv1d(data.X[:, None], free[:, None]))
    f = (hidden * signs).sum(dim=(1, 2)) / math.sqrt(78)
    automatic = torch.autograd.grad((r * f).mean(), free)[0]
    torch.testing.assert_close(case.g.T, automatic)


@pytest.mark.parametrize("readout", ["signs", "pooled"])
def test_the_channels_shared_part_is_the_linear_networks_gradient(readout):
    # S1 + S12 is the gradient of the network whose slopes are replaced by their means.
    data, signs, r, case = drawn_channels(readout)
    free = case.filters.clone().requires_grad_()
    linear = torch.nn.functional.conv1d(data.X[:, None], free[:, None])
    W = torch.stack([convolutions.expand_filter(w, 30) for w in case.filters])
    mu = torch.stack([ACTIVATIONS["tanh"].mu(data.preactivation_scale(rows)) for rows in W])
    f = (linear * signs * mu).sum(dim=(1, 2)) / math.sqrt(78)
    automatic = torch.autograd.grad((r * f).mean(), free)[0]
    torch.testing.assert_close(case.shared.T, automatic)
    if readout == "pooled":
        s = torch.linalg.svdvals(case.shared)
        assert float(s[1] / s[0]) < 0.05


def test_the_channels_noise_is_the_size_of_what_the_shared_part_leaves():
    ratios = []
    for seed in range(12):
        case = filters.channel_gradients(
            240, 24, 6, activation="softplus", residue="independent", seed=seed
        )
        rest = filters.without_own_direction(case.g - case.shared, case.filters)
        # A vector across its filter has k - 1 = 23 directions.
        ratios.append(float(rest.square().sum()) / (23 * 6 * case.noise**2))
    # Each is off by about 0.13, sqrt(2 / 138): four standard errors of the mean.
    assert np.mean(ratios) == pytest.approx(1, abs=0.15)


def test_own_directions_are_removed():
    w = filters.random_filters(6, 4, seed=1)
    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    tangent = filters.without_own_direction(gradients, w)
    for j in range(4):
        assert abs(float(tangent[:, j] @ w[j])) < 1e-12
        moved = gradients[:, j] - tangent[:, j]
        torch.testing.assert_close(moved, (gradients[:, j] @ w[j]) * w[j])
    with pytest.raises(ValueError, match=r"^gradients has shape \(6, 4\), but 6 x 3"):
        filters.without_own_direction(gradients, w[:3])
    with pytest.raises(ValueError, match=r"^row 0 of filters has length 2"):
        filters.without_own_direction(gradients, 2 * w)


def test_the_share_of_two_directions():
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0, 1.0], dtype=FLOAT))
    assert filters.top_two_share(A) == pytest.approx(13 / 15)
    with pytest.raises(ValueError, match=r"^A is zero"):
        filters.top_two_share(torch.zeros(3, 2, dtype=FLOAT))


def test_a_channel_cell_measures_what_it_says():
    cell = filters.channel_cell(60, 6, 4, "softplus", "network", "pooled", 1)
    case = filters.channel_gradients(60, 6, 4, readout="pooled", seed=1)
    energy = torch.linalg.svdvals(case.g).square()
    assert cell["share"] == pytest.approx(float(energy[:2].sum() / energy.sum()))
    own = (case.g * case.filters.T).sum(dim=0)
    tangent = torch.linalg.svdvals(case.g - case.filters.T * own).square()
    assert cell["tangent"] == pytest.approx(float(tangent[:2].sum() / tangent.sum()))
    assert 0.5 < cell["gaussian"] < 1


def test_the_predicted_share_lies_between_noise_and_one_direction():
    names = ("softplus", "network")
    cells = [filters.channel_cell(200, 20, 10, *names, "pooled", seed) for seed in range(12)]
    measured, predicted, gaussian = (
        np.array([cell[name] for cell in cells]) for name in ("tangent", "predicted", "gaussian")
    )
    assert gaussian.max() < np.median(predicted) < 0.95
    assert np.corrcoef(measured, predicted)[0, 1] > 0.8
    assert np.median(measured / predicted) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("k", [1, 2, 9])
def test_the_transforms_maximum_is_the_norm_of_a_long_toeplitz_matrix(k):
    w = filters.random_filters(k, 1, seed=3)[0]
    norm = float(torch.linalg.matrix_norm(convolutions.expand_filter(w, 600), 2))
    peak = filters.toeplitz_norm(k, seed=3)
    assert norm <= peak * 1.001
    assert norm == pytest.approx(peak, rel=2e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: filters.random_filters(0, 1), "^k is 0"),
        (lambda: filters.random_filters(3, 1.5), r"^count is 1\.5"),
        (lambda: filters.filter_scenario(8, 9), "^k is 9, but at most d = 8"),
        (lambda: filters.filter_scenario(8, 3, residue="none"), "^residue is 'none'"),
        (lambda: filters.filter_cell(8, 2, 0.1, 0.0, "relu", "network", 0), "^k is 2, but at leas"),
        (lambda: filters.channel_gradients(8, 3, 2, readout="mean"), "^readout is 'mean'"),
        (lambda: filters.channel_gradients(8, 3, 2, activation="swish"), "^activation is 'swish'"),
        (lambda: filters.channel_gradients(8, 3, 2, residue="none"), "^residue is 'none'"),
        (lambda: filters.toeplitz_norm(3, refinement=0), "^refinement is 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cells_are_distinct_and_run():
    cells = filters.filter_cells()
    assert len({tuple(cell.values()) for cell in cells}) == len(cells)
    assert {cell["k"] for cell in cells if cell["d"] == 400} == {25, 100}
    for cell in cells[:21]:
        values = filters.filter_cell(**(cell | {"d": 32, "k": 5}))
        assert all(math.isfinite(value) for value in values.values())


def test_channel_cells_are_distinct_and_run():
    cells = filters.channel_cells()
    assert len({tuple(cell.values()) for cell in cells}) == len(cells)
    for cell in cells[:12]:
        values = filters.channel_cell(**(cell | {"d": 32, "k": 5, "channels": 3}))
        assert all(0 < value <= 1 + 1e-12 for value in values.values())
