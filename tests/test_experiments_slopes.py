import math

import pytest
import torch

from lowgrad_utils.experiments import scenario, slopes
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_spiked_data, split_spike

FLOAT = torch.float64


def drawn(nu=0.4, alpha=0.5, activation="relu", seed=0):
    data = sample_spiked_data(30, 40, nu=nu, alpha=alpha, seed=seed)
    return data, TwoLayerNetwork.random(40, 50, activation=activation, seed=seed)


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh"])
def test_slopes_have_mean_zero_over_fresh_examples(activation):
    network = TwoLayerNetwork.random(20, 25, activation=activation, seed=1)
    q = torch.eye(20, dtype=FLOAT)[3]
    with pytest.warns(match="Assumption 1"):
        data = sample_spiked_data(40_000, 20, nu=0.1, alpha=0.5, q=q, seed=1)
    deviation = slopes.slope_deviation(data, network)
    # Standard error at most 0.5 / 200 per neuron.
    assert float(deviation.mean(dim=0).abs().max()) < 5 * 0.5 / 200


def test_mismatches_against_naive_loops():
    data, network = drawn()
    wrong = slopes.mismatches(data, network.W)
    for i in range(data.n):
        for j in range(network.m):
            preactivation = float(network.W[j] @ data.X[i])
            spike = float(data.z[i]) * float(network.W[j] @ data.q)
            assert bool(wrong[i, j]) == ((preactivation > 0) != (spike > 0))


def test_relu_deviates_from_the_sign_pattern_by_one_where_a_sign_is_wrong():
    data, network = drawn()
    gap = slopes.slope_deviation(data, network) - 0.5 * slopes.sign_pattern(data, network.W)
    assert torch.equal(gap.abs() > 0.5, slopes.mismatches(data, network.W))
    assert set(gap.abs().round(decimals=9).unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("nu", [0.0, 0.6])
def test_mismatch_probability_by_monte_carlo(nu, alpha):
    data, network = drawn(nu=nu, alpha=alpha, seed=3)
    stream = torch.Generator().manual_seed(1)
    draws = 40_000
    bulk = torch.randn(draws, 40, generator=stream, dtype=FLOAT) * data.eigenvalues.sqrt()
    z = torch.randn(draws, 1, generator=stream, dtype=FLOAT)
    W = network.W[:6]
    spike = data.zeta * z * (W @ data.q)
    share = ((bulk @ W.T + spike) * spike < 0).double().mean(dim=0)
    predicted = slopes.mismatch_probability(data, W)
    assert float((share - predicted).abs().max()) < 5 * 0.5 / math.sqrt(draws)


def test_mismatch_probability_at_its_ends():
    data = sample_spiked_data(30, 40, nu=0.5, q=torch.eye(40, dtype=FLOAT)[0])
    W = torch.eye(2, 40, dtype=FLOAT)
    along, across = slopes.mismatch_probability(data, W).tolist()
    assert along == pytest.approx(math.atan(1 / data.zeta) / math.pi)
    assert across == pytest.approx(0.5)


@pytest.mark.parametrize(
    "function", [slopes.sign_pattern, slopes.mismatches, slopes.mismatch_probability]
)
def test_bad_weights_are_named(function):
    data, _ = drawn()
    with pytest.raises(ValueError, match=r"^W has shape \(3, 39\), but any x 40 is needed"):
        function(data, torch.ones(3, 39, dtype=FLOAT))
    with pytest.raises(TypeError, match=r"^W has dtype torch.float32, but X has torch.float64"):
        function(data, torch.ones(3, 40))


def test_other_bad_input_is_named():
    data, network = drawn()
    with pytest.raises(ValueError, match="no known covariance"):
        slopes.mismatch_probability(split_spike(data.X), network.W)
    with pytest.raises(ValueError, match=r"^W has shape"):
        slopes.slope_deviation(data, TwoLayerNetwork.random(39, 50))
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"^factor is .*a positive, finite number"):
            slopes.rescaled(data, factor)
    with pytest.raises(ValueError, match=r"^alpha is -1, but"):
        slopes.bulk_scale(10, -1)
    with pytest.raises(ValueError, match=r"^weights is 'shifted', but one of uniform, spike"):
        slopes.slope_cell(40, 0.1, 0.0, "relu", "shifted", 0)
    with pytest.raises(ValueError, match=r"^activation is 'swish', but one of"):
        slopes.slope_cell(40, 0.1, 0.0, "swish", "uniform", 0)
    with pytest.raises(ValueError, match=r"^scale is 'large', but one of drawn, unit, sharp"):
        slopes.suppression_cell(40, 0.1, 0.0, "relu", "network", "large", 0)


def test_slope_cell_measures_what_it_says():
    data, network = drawn(nu=0.3, activation="silu", seed=2)
    cell = slopes.slope_cell(40, 0.3, 0.5, "silu", "uniform", 2)
    slope = ACTIVATIONS["silu"].derivative(data.X @ network.W.T) - 0.5
    assert cell == pytest.approx({"slopes": largest(slope), "W_norm": largest(network.W)})
    along_q = slopes.slope_cell(40, 0.3, 0.5, "silu", "spike", 2)
    assert along_q["W_norm"] == pytest.approx(math.sqrt(50))
    column = ACTIVATIONS["silu"].derivative(data.X @ data.q) - 0.5
    assert along_q["slopes"] == pytest.approx(math.sqrt(50) * float(column.norm()))


def test_sign_cell_measures_what_it_says():
    data, network = drawn(nu=0.6, alpha=0.0, seed=2)
    cell = slopes.sign_cell(40, 0.6, 0.0, 2)
    gap = 0.5 * (data.X @ network.W.T).sign()
    gap = gap - 0.5 * torch.outer(data.z.sign(), (network.W @ data.q).sign())
    assert cell["count"] == int((gap != 0).sum())
    assert cell["mismatch"] == pytest.approx(float((gap != 0).double().mean()))
    assert cell["frobenius"] == pytest.approx(float(gap.norm()) / 30)
    assert cell["operator"] == pytest.approx(largest(gap) / 30)
    predicted = float(slopes.mismatch_probability(data, network.W).mean())
    assert cell["predicted"] == pytest.approx(predicted)
    error = float((gap != 0).double().mean(dim=1).std()) / math.sqrt(30)
    assert cell["score"] == pytest.approx(abs(cell["mismatch"] - predicted) / error)


def test_equal_signs_have_no_score():
    cell = slopes.sign_cell(40, 6.0, 0.0, 0)
    assert (cell["count"], cell["score"], cell["operator"]) == (0.0, 0.0, 0.0)


def test_rescaled_data_keep_z_and_multiply_the_rest():
    data, network = drawn(activation="tanh")
    large = slopes.rescaled(data, 2.5)
    torch.testing.assert_close(large.X, 2.5 * data.X)
    assert torch.equal(large.z, data.z)
    assert large.zeta == pytest.approx(2.5 * data.zeta)
    expected = 2.5 * data.preactivation_scale(network.W)
    torch.testing.assert_close(large.preactivation_scale(network.W), expected)
    assert slopes.rescaled(split_spike(data.X), 2.0).eigenvalues is None


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.5])
def test_bulk_scale_is_the_mean_variance_of_uniform_weights(alpha):
    naive = math.sqrt(sum(k**-alpha for k in range(1, 101)) / 100)
    assert slopes.bulk_scale(100, alpha) == pytest.approx(naive)


@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_suppression_is_measured_on_the_scaled_gradient(activation):
    case = scenario(40, nu=0.3, alpha=0.5, activation=activation, seed=4)
    values = slopes.suppression(case, 3.0)
    X, network, r = 3.0 * case.data.X, case.network, case.residue
    slope = network.sigma.derivative(X @ network.W.T)
    G = network.gamma / 30 * X.T @ (torch.outer(r, network.a) * slope)
    U, s, _ = torch.linalg.svd(G)
    bulk = 3.0 * case.data.X_B
    S1 = network.gamma / 30 * torch.outer(bulk.T @ r, 0.5 * network.a)
    E = network.gamma / 30 * bulk.T @ (torch.outer(r, network.a) * (slope - 0.5))
    spike = 3.0 * case.data.zeta * torch.outer(case.data.z, case.data.q)
    S2 = network.gamma / 30 * spike.T @ (torch.outer(r, network.a) * (slope - 0.5))
    S12 = network.gamma / 30 * spike.T @ torch.outer(r, 0.5 * network.a)
    norm = largest(S1)
    direction = bulk.T @ r
    assert values["share"] == pytest.approx(norm / float(s[0]))
    aligned = abs(float(U[:, 0] @ direction)) / float(direction.norm())
    assert values["u1_residue"] == pytest.approx(aligned)
    for name, piece in {"S12": S12, "S2": S2, "E": E}.items():
        assert values[name] == pytest.approx(largest(piece) / norm)


def test_scales_of_a_suppression_cell():
    case = scenario(40, nu=0.125, alpha=0.5, activation="silu", residue="offset", seed=1)
    for scale, factor in {"drawn": 1.0, "unit": 1.0, "sharp": 10.0}.items():
        factor = factor if scale == "drawn" else factor / slopes.bulk_scale(40, 0.5)
        cell = slopes.suppression_cell(40, 0.125, 0.5, "silu", "offset", scale, 1)
        assert cell == pytest.approx(slopes.suppression(case, factor))


@pytest.mark.parametrize(
    ("cells", "function"),
    [
        (slopes.slope_cells, slopes.slope_cell),
        (slopes.sign_cells, slopes.sign_cell),
        (slopes.figure_2_cells, slopes.suppression_cell),
        (slopes.suppression_cells, slopes.suppression_cell),
    ],
)
def test_cells_are_distinct_and_run(cells, function):
    listed = cells()
    assert len({tuple(cell.values()) for cell in listed}) == len(listed)
    series = {tuple(v for k, v in c.items() if k not in ("d", "seed")): c for c in listed}
    for cell in series.values():
        values = function(**(cell | {"d": 16}))
        assert all(math.isfinite(value) for value in values.values())


def test_pairs_lie_on_the_side_of_the_threshold_that_their_name_says():
    assert all(2 * nu < 1 - alpha for nu, alpha in slopes.BELOW)
    assert all(2 * nu > 1 - alpha for nu, alpha in slopes.ABOVE)
