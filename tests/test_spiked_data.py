import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lowgrad_utils import spiked_data
from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, sample_targets, split_spike

FLOAT = torch.float64


def unit(*entries):
    vector = torch.tensor(entries, dtype=FLOAT)
    return vector / vector.norm()


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


@given(st.integers(2, 12), st.integers(1, 6), st.floats(0, 1), st.floats(0, 2), st.integers(0, 99))
def test_data_are_bulk_plus_spike(n, more, nu, alpha, seed):
    data = sample_spiked_data(n, n + more, nu=nu, alpha=alpha, seed=seed)
    assert (data.n, data.d) == (n, n + more) == tuple(data.X.shape)
    assert data.X.dtype == FLOAT
    assert data.zeta == pytest.approx(n**nu)
    assert data.nu == pytest.approx(nu, abs=1e-12)
    assert float(data.q.norm()) == pytest.approx(1)
    spike = data.zeta * data.z[:, None] * data.q[None, :]
    torch.testing.assert_close(data.X - spike, data.X_B)
    r = gaussian(n, seed=seed)
    torch.testing.assert_close(data.bulk_times(r), (data.X - spike).T @ r)
    with pytest.raises(ValueError, match=rf"^r has shape .*, but a vector of length {n} is"):
        data.bulk_times(r[1:])


def test_the_bulk_and_z_do_not_depend_on_the_spike():
    # A slider of nu then moves one data set instead of drawing another.
    low, high = (sample_spiked_data(20, 30, nu=nu, seed=4) for nu in (0.0, 0.7))
    torch.testing.assert_close(low.X_B, high.X_B)
    assert torch.equal(low.z, high.z)
    assert torch.equal(low.q, high.q)


def test_sampled_covariance_is_that_of_the_population():
    n, q = 40_000, unit(1, -2, 0.5, 3)
    with pytest.warns(AssumptionWarning):
        data = sample_spiked_data(n, 4, nu=0.05, alpha=0.7, q=q, seed=11)
    scales = torch.tensor([k**-0.7 for k in (1, 2, 3, 4)], dtype=FLOAT)
    population = torch.diag(scales) + (n**0.05) ** 2 * torch.outer(q, q)
    sample = data.X.T @ data.X / n
    # Wick: Var(x_i x_j) = Sigma_ii Sigma_jj + Sigma_ij^2. Ten entries; 4.5 deviations is p < 1e-4.
    diagonal = population.diagonal()
    deviation = torch.sqrt((torch.outer(diagonal, diagonal) + population**2) / n)
    assert ((sample - population).abs() / deviation).max() < 4.5
    # And sharp enough that a wrong power of zeta or of k would show.
    wrong = population + (n**0.05 - (n**0.05) ** 2) * torch.outer(q, q)
    assert ((sample - wrong).abs() / deviation).max() > 10
    mean = data.X.mean(dim=0) / torch.sqrt(diagonal / n)
    assert mean.abs().max() < 4.5


def test_bulk_and_spike_component_are_independent_normals():
    with pytest.warns(AssumptionWarning):
        data = sample_spiked_data(20_000, 3, nu=0.3, seed=2)
    for column in (data.z, *data.X_B.T):
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-4
    correlation = data.X_B.T @ data.z / math.sqrt(data.n)
    assert correlation.abs().max() < 4.5


def test_uniform_directions_have_no_preferred_axis():
    q = torch.stack([sample_spiked_data(2, 3, nu=0.0, seed=k).q for k in range(600)])
    # q_1 is uniform on [-1, 1] on the sphere in three dimensions (Archimedes).
    for axis in q.T:
        assert stats.kstest(axis.numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-4


def test_preactivation_scale_is_the_explicit_quadratic_form():
    data = sample_spiked_data(6, 9, nu=0.4, alpha=0.8, seed=1)
    W = gaussian(5, 9, seed=3)
    covariance = torch.diag(torch.arange(1, 10, dtype=FLOAT) ** -0.8)
    covariance += data.zeta**2 * torch.outer(data.q, data.q)
    explicit = torch.stack([w @ covariance @ w for w in W]).sqrt()
    torch.testing.assert_close(data.preactivation_scale(W), explicit)
    with pytest.raises(ValueError, match=r"^W has shape \(5, 9\), but any x 8"):
        sample_spiked_data(6, 8, nu=0.4).preactivation_scale(W)
    with pytest.raises(TypeError, match=r"^W has dtype torch\.float32, but X has torch\.float64"):
        data.preactivation_scale(W.float())
    with pytest.raises(ValueError, match="no known covariance; pass mu"):
        split_spike(data.X).preactivation_scale(W)


def test_preactivations_have_that_standard_deviation():
    with pytest.warns(AssumptionWarning):
        data = sample_spiked_data(40_000, 5, nu=0.1, alpha=1.0, seed=8)
    W = TwoLayerNetwork.random(5, 6, seed=8).W
    observed = (data.X @ W.T).square().mean(dim=0).sqrt()
    ratio = observed / data.preactivation_scale(W)
    assert (ratio - 1).abs().max() < 4.5 / math.sqrt(2 * data.n)


def test_the_same_seed_repeats_and_gives_independent_data_and_weights():
    data = sample_spiked_data(30, 40, nu=0.25, seed=7)
    assert torch.equal(data.X, sample_spiked_data(30, 40, nu=0.25, seed=7).X)
    assert not torch.equal(data.X, sample_spiked_data(30, 40, nu=0.25, seed=8).X)
    isotropic = sample_spiked_data(300, 400, nu=0.0, seed=7)
    rows = isotropic.X_B / isotropic.X_B.norm(dim=1, keepdim=True)
    W = TwoLayerNetwork.random(400, 300, seed=7).W
    targets = sample_targets(isotropic.X, seed=7).directions
    # Cosines of independent directions are N(0, 1/400); the same stream would give some of 1.
    for left, right in ((rows, W), (targets, rows), (targets, W), (isotropic.q[None], W)):
        assert (left @ right.T).abs().max() < 6 / 20


def test_the_defaults_are_an_isotropic_bulk_and_seed_0():
    X = sample_spiked_data(3, 5, nu=0.2).X
    assert torch.equal(X, sample_spiked_data(3, 5, nu=0.2, alpha=0.0, seed=0).X)
    chosen = sample_targets(X, "triple-index", noise=0.1, seed=0)
    assert torch.equal(sample_targets(X).y, chosen.y)


def test_a_generator_is_used_and_moves_on():
    generator = torch.Generator().manual_seed(1)
    first, second = (sample_spiked_data(3, 4, nu=0.0, seed=generator).X for _ in range(2))
    assert not torch.equal(first, second)
    again = sample_spiked_data(3, 4, nu=0.0, seed=torch.Generator().manual_seed(1)).X
    assert torch.equal(first, again)


@pytest.mark.parametrize(("n", "warned"), [(9, False), (10, True), (11, True)])
def test_only_n_of_at_least_d_leaves_assumption_1(n, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample_spiked_data(n, 10, nu=0.0)
    assert [w.category for w in caught] == [AssumptionWarning] * warned
    if warned:
        assert f"n = {n} is not below d = 10: Assumption 1" in str(caught[0].message)
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0}, ValueError, r"^n is 0"),
        ({"n": 2.5}, ValueError, r"^n is 2\.5"),
        ({"d": 0}, ValueError, r"^d is 0"),
        ({"nu": -0.1}, ValueError, r"^nu is -0\.1"),
        ({"nu": float("nan")}, ValueError, r"^nu is nan"),
        ({"alpha": -1}, ValueError, r"^alpha is -1"),
        ({"alpha": float("inf")}, ValueError, r"^alpha is inf"),
        ({"q": [1.0, 0, 0, 0]}, TypeError, r"^q is a list"),
        ({"q": unit(1, 2, 3)}, ValueError, r"^q has shape \(3,\), but a vector of length 4"),
        ({"q": 2 * unit(1, 0, 0, 0)}, ValueError, r"^row 0 of q has length 2"),
        ({"q": torch.full((4,), torch.nan, dtype=FLOAT)}, ValueError, r"^q has 4 NaN"),
        ({"seed": -1}, ValueError, r"^seed is -1"),
        ({"seed": 0.5}, TypeError, r"^seed is 0\.5"),
    ],
)
def test_bad_arguments_of_the_sampler(arguments, error, message):
    with pytest.raises(error, match=message):
        sample_spiked_data(**{"n": 3, "d": 4, "nu": 0.1} | arguments)


def test_a_direction_in_float32_is_admitted():
    data = sample_spiked_data(3, 4, nu=0.1, q=unit(1, 2, 3, 4).float())
    assert data.q.dtype == data.X_B.dtype == FLOAT


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"X": gaussian(3)}, ValueError, "^X has shape"),
        ({"X": gaussian(3, 4) * torch.nan}, ValueError, "^X has 12 NaN"),
        ({"z": gaussian(4)}, ValueError, r"^z has shape \(4,\), but a vector of length 3"),
        ({"z": 1.0}, TypeError, "^z is a float"),
        ({"q": gaussian(3)}, ValueError, "^q has shape"),
        ({"q": unit(1, 2, 3, 4) * 1.1}, ValueError, "of q has length 1.1"),
        ({"zeta": 0.0}, ValueError, "^zeta is 0, but a positive"),
        ({"zeta": -1.0}, ValueError, "^zeta is -1"),
        ({"zeta": math.inf}, ValueError, "^zeta is inf"),
        ({"eigenvalues": gaussian(3)}, ValueError, "^eigenvalues has shape"),
        ({"eigenvalues": unit(1, 2, 3, -4)}, ValueError, "^the least of eigenvalues is -0.7"),
        ({"z": gaussian(3).float()}, TypeError, "^z has dtype torch.float32, but X has"),
        ({"eigenvalues": unit(1, 2, 3, 4).float()}, TypeError, "^eigenvalues has dtype"),
    ],
)
def test_data_put_together_by_hand_are_checked(changes, error, message):
    good = {"X": gaussian(3, 4), "z": gaussian(3), "q": unit(1, 2, 3, 4), "zeta": 1.0}
    SpikedData(**good)
    with pytest.raises(error, match=message):
        SpikedData(**good | changes)


@given(st.floats(0, 3), st.integers(1, 8))
def test_bulk_eigenvalues_are_powers(alpha, d):
    values = spiked_data.bulk_eigenvalues(d, alpha)
    assert values.tolist() == pytest.approx([k**-alpha for k in range(1, d + 1)])


def test_bad_bulk_eigenvalues():
    with pytest.raises(ValueError, match=r"^alpha is -0\.5"):
        spiked_data.bulk_eigenvalues(3, -0.5)
    with pytest.raises(ValueError, match=r"^d is 0"):
        spiked_data.bulk_eigenvalues(0, 0.5)


@given(st.integers(0, 99))
def test_split_takes_the_top_right_singular_vector(seed):
    X = gaussian(6, 4, seed=seed)
    data = split_spike(X)
    U, s, Vh = torch.linalg.svd(X)
    assert abs(float(data.q @ Vh[0])) == pytest.approx(1)
    assert data.q.sum() > 0
    assert data.zeta == pytest.approx(float(s[0]) / math.sqrt(6))
    assert float(data.z.norm()) == pytest.approx(math.sqrt(6))
    assert abs(float(data.z @ U[:, 0])) == pytest.approx(math.sqrt(6))
    torch.testing.assert_close(data.X_B @ data.q, torch.zeros(6, dtype=FLOAT))
    torch.testing.assert_close(torch.linalg.svdvals(data.X_B)[:-1], s[1:])
    assert data.eigenvalues is None


def test_split_along_a_given_direction():
    X, q = gaussian(5, 3), unit(1, 2, -2)
    data = split_spike(X, q)
    torch.testing.assert_close(data.zeta * data.z, X @ q)
    assert float(data.z @ data.z) == pytest.approx(5)
    torch.testing.assert_close(data.X_B, X @ (torch.eye(3, dtype=FLOAT) - torch.outer(q, q)))


def test_split_keeps_a_direction_whose_entries_add_up_to_zero():
    data = split_spike(torch.tensor([[2.0, -2.0], [1.0, -1.0]], dtype=FLOAT))
    assert float(data.q.norm()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("X", "q", "error", "message"),
    [
        ([[1.0]], None, TypeError, "^X is a list"),
        (gaussian(3), None, ValueError, "^X has shape"),
        (gaussian(2, 3) / 0, None, ValueError, "^X has 6 NaN"),
        (torch.zeros(2, 3, dtype=FLOAT), None, ValueError, "^X q is 0"),
        (gaussian(2, 3), unit(1, 2), ValueError, "^q has shape"),
        (gaussian(2, 3), 3 * unit(1, 2, 3), ValueError, "of q has length 3"),
        (unit(1, 0)[None], unit(0, 1), ValueError, "^X q is 0, .*choose another direction"),
    ],
)
def test_bad_arguments_of_the_split(X, q, error, message):
    with pytest.raises(error, match=message):
        split_spike(X, q)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 9))
def test_estimated_exponents_come_from_singular_values(n, d, seed):
    X = gaussian(n, d, seed=seed)
    first, second = torch.linalg.svdvals(X)[:2].tolist()
    raw = math.log(first / math.sqrt(n)) / math.log(n)
    assert spiked_data.estimate_nu(X, unit="raw") == pytest.approx(raw, abs=1e-9)
    bulk = math.log(first / second) / math.log(n)
    assert spiked_data.estimate_nu(X) == pytest.approx(bulk, abs=1e-7)
    # Only the raw estimate depends on the units.
    for factor in (255, 1e-9):
        assert spiked_data.estimate_nu(factor * X) == pytest.approx(bulk, abs=1e-7)
    shift = math.log(255) / math.log(n)
    assert spiked_data.estimate_nu(255 * X, unit="raw") == pytest.approx(raw + shift, abs=1e-9)


@pytest.mark.parametrize("shape", [(3, 9), (9, 3)])
def test_the_exponent_takes_the_smaller_gram_matrix(shape, monkeypatch):
    sizes = []
    eigvalsh = torch.linalg.eigvalsh

    def watched(gram):
        sizes.append(len(gram))
        return eigvalsh(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", watched)
    spiked_data.estimate_nu(gaussian(*shape))
    assert sizes == [3]


@pytest.mark.parametrize(
    ("X", "unit_", "message"),
    [
        (gaussian(3, 3), "pixels", r"^unit is 'pixels', but one of bulk, raw"),
        (gaussian(1, 3), "bulk", r"^X has shape \(1, 3\), but two rows"),
        (gaussian(3, 1), "raw", r"^X has shape \(3, 1\), but two rows"),
        (gaussian(2, 2) / 0, "bulk", r"^X has 4 NaN"),
        (torch.ones(4, 3, dtype=FLOAT), "bulk", r"^X has rank one"),
        (torch.outer(gaussian(5), gaussian(4)), "bulk", r"^X has rank one"),
        (torch.zeros(4, 3, dtype=FLOAT), "raw", r"^X is zero"),
    ],
)
def test_no_exponent_without_a_bulk(X, unit_, message):
    with pytest.raises(ValueError, match=message):
        spiked_data.estimate_nu(X, unit=unit_)


LINKS = {
    "single-index": [lambda t: 1 / (1 + math.exp(-t))],
    "triple-index": [lambda t: max(t, 0.0), lambda t: 1 / (1 + math.exp(-t)), math.tanh],
    "triple-index-even": [abs, math.cos, lambda t: (t * t - 1) / math.sqrt(2)],
}


@pytest.mark.parametrize("model", spiked_data.TARGETS)
def test_targets_are_links_of_their_directions(model):
    X = gaussian(8, 10)
    targets = sample_targets(X, model, noise=0.0, seed=3)
    assert targets.directions.shape == (len(LINKS[model]), 10)
    assert targets.directions.norm(dim=1).tolist() == pytest.approx([1] * len(LINKS[model]))
    for i, x in enumerate(X):
        projections = [float(omega @ x) for omega in targets.directions]
        expected = sum(link(t) for link, t in zip(LINKS[model], projections))
        assert float(targets.y[i]) == pytest.approx(expected)


def test_noise_on_the_targets_has_the_wanted_deviation():
    X = gaussian(20_000, 3)
    noisy, clean = (sample_targets(X, noise=noise, seed=5) for noise in (0.3, 0.0))
    assert torch.equal(noisy.directions, clean.directions)
    assert stats.kstest((noisy.y - clean.y).numpy() / 0.3, "norm").pvalue > 1e-4


def test_targets_can_follow_a_given_direction():
    X, q = gaussian(5, 3), unit(1, 2, 2)
    free, bound = sample_targets(X, seed=1), sample_targets(X, along=q, seed=1)
    torch.testing.assert_close(bound.directions[0], q)
    torch.testing.assert_close(bound.directions[1:], free.directions[1:])


def test_targets_keep_the_precision_of_the_data():
    assert sample_targets(gaussian(5, 3).float()).y.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "quadratic"}, "^model is 'quadratic', but one of single-index, triple-index,"),
        ({"noise": -0.1}, r"^noise is -0\.1"),
        ({"along": unit(1, 2)}, "^along has shape"),
        ({"along": torch.zeros(3, dtype=FLOAT)}, "^row 0 of along has length 0"),
        ({"X": gaussian(3)}, "^X has shape"),
        ({"X": gaussian(3, 3) / 0}, "^X has 9 NaN"),
    ],
)
def test_bad_arguments_of_the_targets(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_targets(**{"X": gaussian(5, 3)} | arguments)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9, unique=True))
def test_labels_split_at_the_median(values):
    y = torch.tensor(values, dtype=FLOAT)
    labels = spiked_data.binary_labels(y)
    assert set(labels.tolist()) <= {-1.0, 1.0}
    assert int((labels > 0).sum()) == len(values) // 2
    if len(values) > 1:
        assert y[labels > 0].min() > y[labels < 0].max()
    assert labels.dtype == FLOAT


def test_labels_of_bad_targets():
    with pytest.raises(ValueError, match=r"^y has 1 NaN"):
        spiked_data.binary_labels(torch.tensor([1.0, torch.nan]))


def test_a_spike_that_overflows_and_a_single_example_are_named():
    with pytest.raises(ValueError, match=r"^nu is 1000, but n\^nu overflows"):
        sample_spiked_data(30, 40, nu=1000)
    with pytest.raises(ValueError, match=r"^X has 1 row, but 2 are needed"):
        _ = sample_spiked_data(1, 4, nu=0.5).nu
