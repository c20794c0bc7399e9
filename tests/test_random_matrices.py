import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from lowgrad_utils import random_matrices as rm
from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.spiked_data import sample_spiked_data

FLOAT = torch.float64
RATIOS = [0.1, 0.5, 0.75, 1.0]
# n is the short side, as in the module: a mix-up of the sides must show.
N, D = 450, 900


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def bulk(n, d, seed=0):
    return gaussian(n, d, seed=seed) / math.sqrt(d)


BULK = bulk(N, D, seed=1)
BULK_VALUES = torch.linalg.svdvals(BULK)


def spiked(theta, seed=0):
    u, v = gaussian(N, seed=seed + 10), gaussian(D, seed=seed + 20)
    u, v = u / u.norm(), v / v.norm()
    U, s, Vh = torch.linalg.svd(BULK + theta * torch.outer(u, v), full_matrices=False)
    return float(s[0]), float(U[:, 0] @ u) ** 2, float(Vh[0] @ v) ** 2


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.75])
def test_sampled_bulks_end_at_the_edges(ratio):
    d = 1000
    s = torch.linalg.svdvals(bulk(round(ratio * d), d, seed=5))
    low, high = rm.marchenko_pastur_edges(ratio)
    # Fluctuations are of order n^(-2/3).
    assert float(s[0]) == pytest.approx(high, rel=0.02)
    assert float(s[-1]) == pytest.approx(low, abs=0.02)


@given(st.floats(0.01, 1), st.floats(0.1, 9))
def test_edges_scale_with_sigma(ratio, sigma):
    edges = rm.marchenko_pastur_edges(ratio, sigma=sigma)
    assert edges == pytest.approx([sigma * (1 - ratio**0.5), sigma * (1 + ratio**0.5)], abs=1e-12)


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_density_has_mass_one_and_the_moments_of_the_bulk(ratio):
    def moment(power):
        def integrand(s):
            return s**power * float(
                rm.marchenko_pastur_density(torch.tensor(s, dtype=FLOAT), ratio)
            )

        return integrate.quad(integrand, *rm.marchenko_pastur_edges(ratio), limit=200)[0]

    assert moment(0) == pytest.approx(1, abs=1e-6)
    # tr(A A^T) / n = 1 and tr((A A^T)^2) / n = 1 + ratio for entries of variance 1/d.
    assert moment(2) == pytest.approx(1, abs=1e-6)
    assert moment(4) == pytest.approx(1 + ratio, abs=1e-6)


def test_the_density_is_that_of_a_sampled_bulk():
    low, high = rm.marchenko_pastur_edges(N / D)
    grid = torch.linspace(low, high, 2001, dtype=FLOAT)
    cumulated = torch.cumulative_trapezoid(rm.marchenko_pastur_density(grid, N / D), grid)
    law = np.interp(BULK_VALUES.sort().values, grid[1:], cumulated)
    # Eigenvalues repel, so the distance is of order log(n)/n, far below n^(-1/2).
    assert np.abs(law - (np.arange(N) + 0.5) / N).max() < 0.01


def test_the_density_is_zero_outside():
    s = torch.tensor([-1.0, 0.0, 0.2, 1.8, 50.0], dtype=FLOAT)
    assert rm.marchenko_pastur_density(s, 0.5).tolist() == [0.0] * 5
    # At ratio 1 the lower edge is 0 and the density ends there at 2/pi... of its square root law.
    near = rm.marchenko_pastur_density(torch.tensor([[1e-6]], dtype=FLOAT), 1.0)
    assert near.shape == (1, 1)
    assert float(near) == pytest.approx(2 / math.pi, rel=1e-6)


@pytest.mark.parametrize("strength", [1.0, 1.3, 2.5, 6.0])
def test_bbp_is_what_a_sampled_spiked_covariance_shows(strength):
    # Features / examples = 1/2: the spike adds strength - 1 to a population eigenvalue of 1.
    n, d = 1600, 800
    zeta = math.sqrt(max(strength - 1, 1e-12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AssumptionWarning)
        data = sample_spiked_data(n, d, nu=0.0, seed=3)
    X = data.X_B + zeta * torch.outer(data.z, data.q)
    top = float(torch.linalg.eigvalsh(X.T @ X / n)[-1])
    # The spike's own sample variance, sqrt(2/n), moves the outlier by as much.
    assert top == pytest.approx(rm.bbp_eigenvalue(strength, d / n), rel=4 * math.sqrt(2 / n))


@given(st.floats(0.05, 4))
def test_bbp_is_continuous_at_its_threshold_and_grows_above(ratio):
    threshold = 1 + math.sqrt(ratio)
    below, above = (rm.bbp_eigenvalue(threshold * (1 + h), ratio) for h in (-1e-7, 1e-7))
    assert below == pytest.approx(threshold**2)
    assert above == pytest.approx(below, rel=1e-6)
    assert rm.bbp_eigenvalue(2 * threshold, ratio) > rm.bbp_eigenvalue(1.5 * threshold, ratio)


@pytest.mark.parametrize("theta", [1.2, 1.6, 3.0, 10.0])
def test_a_spike_shows_where_the_law_says_on_both_sides(theta):
    law = rm.spiked_singular_value(theta, N / D)
    seen = np.mean([spiked(theta, seed) for seed in (0, 1)], axis=0)
    assert seen[0] == pytest.approx(law.value, rel=0.01)
    assert seen[1] == pytest.approx(law.left, abs=0.03)
    assert seen[2] == pytest.approx(law.right, abs=0.03)
    # The longer side carries more noise, so its cosine is the smaller one.
    assert law.right < law.left


def test_a_weak_spike_stays_in_the_bulk():
    law = rm.spiked_singular_value(0.4, N / D)
    assert law == (1 + math.sqrt(0.5), 0.0, 0.0)
    value, left, right = spiked(0.4)
    assert value == pytest.approx(law.value, rel=0.02)
    assert max(left, right) < 0.05


@given(st.floats(0.05, 1))
def test_spikes_leave_continuously(ratio):
    threshold = ratio**0.25
    above = rm.spiked_singular_value(threshold * (1 + 1e-6), ratio)
    assert above.value == pytest.approx(1 + math.sqrt(ratio), rel=1e-5)
    assert above.left == pytest.approx(0, abs=1e-4)
    assert above.right == pytest.approx(0, abs=1e-4)
    strong = rm.spiked_singular_value(1e4, ratio)
    assert strong == pytest.approx((1e4, 1, 1), rel=1e-6)


@given(st.floats(1.01, 9), st.floats(0.05, 1))
def test_the_two_laws_of_a_spike_agree(factor, ratio):
    # Rows of X = X_B + zeta z q^T are examples: eigenvalues of X^T X / n with n < d.
    theta = factor * ratio**0.25
    singular = rm.spiked_singular_value(theta, ratio).value
    # d features, n examples: X / sqrt(d), strength 1 + zeta^2 with theta^2 = ratio zeta^2.
    eigenvalue = rm.bbp_eigenvalue(1 + theta**2 / ratio, 1 / ratio)
    assert singular**2 == pytest.approx(ratio * eigenvalue)


@given(st.integers(1, 5), st.integers(1, 5), st.floats(1.5, 9), st.integers(0, 9))
def test_the_d_transform_is_its_traces(n, d, x, seed):
    A = torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
    A /= torch.linalg.matrix_norm(A, 2)
    left = torch.trace(x * torch.linalg.inv(x**2 * torch.eye(n) - A @ A.T)) / n
    right = torch.trace(x * torch.linalg.inv(x**2 * torch.eye(d) - A.T @ A)) / d
    D_value = rm.d_transform(x, torch.linalg.svdvals(A), (n, d))
    assert D_value == pytest.approx(float(left * right))


@pytest.mark.parametrize("theta", [1.2, 2.0, 5.0])
def test_the_d_transform_of_a_gaussian_bulk_is_the_closed_form(theta):
    law = rm.spiked_singular_value(theta, N / D)
    value = rm.d_transform(law.value, BULK_VALUES, (N, D))
    assert value == pytest.approx(theta**-2, rel=0.01)
    assert rm.predict_spike(theta, BULK_VALUES, (N, D)) == pytest.approx(law.value, rel=0.003)
    assert rm.predict_spike(theta, BULK_VALUES, (N, D)) == pytest.approx(spiked(theta)[0], rel=0.02)


def test_a_prediction_solves_its_equation():
    x = rm.predict_spike(1.7, BULK_VALUES, (N, D))
    assert rm.d_transform(x, BULK_VALUES, (N, D)) == pytest.approx(1.7**-2, rel=1e-9)


def test_a_bulk_that_is_not_gaussian():
    # All singular values 1: D(x) = x/(x^2-1) * [x/(x^2-1)/2 + 1/(2x)] at n/d = 1/2.
    s, theta = torch.ones(40, dtype=FLOAT), 2.0
    x = rm.predict_spike(theta, s, (40, 80))
    phi = x / (x**2 - 1)
    assert phi * (phi / 2 + 1 / (2 * x)) == pytest.approx(1 / theta**2)


def test_below_the_threshold_the_edge_is_predicted():
    edge = float(BULK_VALUES[0])
    assert rm.predict_spike(0.4, BULK_VALUES, (N, D)) == edge
    # The discrete bulk has a root just above its edge; a tiny margin finds it.
    root = rm.predict_spike(0.4, BULK_VALUES, (N, D), margin=1e-9)
    assert edge < root < edge * (1 + N ** (-2 / 3))
    assert rm.predict_spike(5.0, BULK_VALUES, (N, D), margin=10.0) == edge


def test_the_margin_is_that_of_the_shorter_side():
    # A root between the margins of 450 and of 900 rows counts only for the smaller margin.
    s = torch.ones(4, dtype=FLOAT)
    narrow, wide = 16 ** (-2 / 3), 4 ** (-2 / 3)
    theta = rm.d_transform(1 + (narrow + wide) / 2, s, (4, 16)) ** -0.5
    assert rm.predict_spike(theta, s, (4, 16)) == 1.0
    inside = rm.predict_spike(theta, s, (4, 16), margin=narrow)
    assert inside == pytest.approx(1 + (narrow + wide) / 2)


@pytest.mark.parametrize(("share", "outside"), [(0.99, False), (1.01, True)])
def test_the_margin_is_the_two_thirds_power(share, outside):
    s, root = torch.ones(4, dtype=FLOAT), 1 + share * 4 ** (-2 / 3)
    theta = rm.d_transform(root, s, (4, 16)) ** -0.5
    assert rm.predict_spike(theta, s, (4, 16)) == pytest.approx(root if outside else 1.0)


ONES = torch.ones(3, dtype=FLOAT)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rm.marchenko_pastur_edges(0.0), ValueError, r"^ratio is 0, but a positive"),
        (lambda: rm.marchenko_pastur_edges(1.5), ValueError, r"^ratio is 1\.5, .*transpose"),
        (lambda: rm.marchenko_pastur_edges(math.nan), ValueError, r"^ratio is nan"),
        (lambda: rm.marchenko_pastur_edges("half"), TypeError, r"^ratio is 'half'"),
        (lambda: rm.predict_spike(math.inf, ONES, (3, 4)), ValueError, r"^theta is inf"),
        (lambda: rm.marchenko_pastur_edges(0.5, sigma=0), ValueError, r"^sigma is 0"),
        (lambda: rm.marchenko_pastur_density(ONES, 2.0), ValueError, r"^ratio is 2"),
        (lambda: rm.bbp_eigenvalue(0.9, 1.0), ValueError, r"^strength is 0\.9, but at least 1"),
        (lambda: rm.bbp_eigenvalue(2.0, 0.0), ValueError, r"^ratio is 0, but a positive"),
        (lambda: rm.spiked_singular_value(0.0, 0.5), ValueError, r"^theta is 0"),
        (lambda: rm.spiked_singular_value(1.0, 1.1), ValueError, r"^ratio is 1\.1"),
        (lambda: rm.d_transform(1.0, ONES, (3, 4)), ValueError, r"^x is 1, but a point above"),
        (lambda: rm.d_transform(2.0, ONES, (4, 4)), ValueError, r"^singular_values has shape"),
        (lambda: rm.predict_spike(-1.0, ONES, (3, 4)), ValueError, r"^theta is -1"),
        (lambda: rm.predict_spike(1.0, ONES, (4, 5)), ValueError, r"^singular_values has shape"),
        (lambda: rm.predict_spike(1.0, ONES * math.nan, (3, 4)), ValueError, r"3 NaN"),
        (lambda: rm.predict_spike(1.0, [1.0], (1, 4)), TypeError, r"^singular_values is a list"),
        (lambda: rm.predict_spike(1.0, 0 * ONES, (3, 4)), ValueError, r"^singular_values are all"),
        (lambda: rm.predict_spike(1.0, ONES, (3, 4), margin=0), ValueError, r"^margin is 0"),
    ],
)
def test_arguments_out_of_range(call, error, message):
    with pytest.raises(error, match=message):
        call()


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.99))
def test_just_below_the_fourth_root_of_the_ratio_nothing_shows(ratio, share):
    # Between the square root and the fourth root, where a wrong root would show a spike.
    theta = ratio**0.5 + share * (ratio**0.25 - ratio**0.5)
    assert rm.spiked_singular_value(theta, ratio) == (1 + math.sqrt(ratio), 0.0, 0.0)


def wishart(size, columns, seed):
    x = gaussian(size, columns, seed=seed)
    return x @ x.T / columns


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_spike_plus_a_wishart_matrix(ratio):
    size, variance = 800, 0.7
    bulk = variance * wishart(size, round(size / ratio), seed=3)
    u = gaussian(size, seed=4)
    u /= u.norm()
    threshold = variance * (ratio + ratio**0.5)
    for theta in (0.4 * threshold, 2 * threshold, 8 * threshold):
        seen = float(torch.linalg.eigvalsh(bulk + theta * torch.outer(u, u))[-1])
        law = rm.wishart_spike(theta, ratio, variance=variance)
        assert seen == pytest.approx(law, rel=0.03)
        given = rm.additive_spike(theta, torch.linalg.eigvalsh(bulk))
        assert given == pytest.approx(law, rel=0.03)


@given(st.floats(0.05, 20), st.floats(0.05, 5), st.floats(0.1, 5))
def test_the_wishart_law_solves_its_stieltjes_equation(excess, ratio, variance):
    theta = variance * (ratio + math.sqrt(ratio)) * (1 + excess)
    x = rm.wishart_spike(theta, ratio, variance=variance)
    g, s = 1 / theta, variance
    # The Stieltjes transform of Marchenko and Pastur's law: x = 1/g + s / (1 - ratio s g).
    assert x * g * (1 - ratio * s * g) == pytest.approx(1 - ratio * s * g + s * g, rel=1e-9)
    assert x > s * (1 + math.sqrt(ratio)) ** 2


def test_the_wishart_law_is_the_spiked_rectangular_law_of_the_population():
    # Means of noisy examples: a spike t^2 of the population is t^2 + ratio in the means.
    ratio, theta = 0.4, 1.7
    value = rm.spiked_singular_value(theta, ratio).value ** 2
    # There the short side is n with entries of variance 1/d: P = n, N = d.
    assert rm.wishart_spike(theta**2 + ratio, ratio) == pytest.approx(value, rel=1e-12)


def test_a_spike_below_the_threshold_stays_in_a_given_bulk():
    bulk = torch.linalg.eigvalsh(wishart(300, 300, seed=5))
    assert rm.additive_spike(0.5, bulk) == float(bulk[-1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rm.wishart_spike(0.0, 1.0), "theta is 0"),
        (lambda: rm.wishart_spike(1.0, -1.0), "ratio is -1"),
        (lambda: rm.wishart_spike(1.0, 1.0, variance=0.0), "variance is 0"),
        (lambda: rm.additive_spike(1.0, torch.ones(3, dtype=FLOAT)), "all alike"),
        (lambda: rm.additive_spike(-1.0, torch.arange(3.0)), "theta is -1"),
    ],
)
def test_bad_additive_spikes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


POPULATIONS = {
    "outliers and zeros": torch.tensor([50.0, 20, 8, 3.5] + [1.0] * 200 + [0.0] * 96).double(),
    "decaying": torch.arange(1, 301, dtype=FLOAT) ** -0.5,
    "two clusters": torch.tensor([4.0] * 100 + [1.0] * 200).double(),
}


def sample_covariances(population, m, draws=12):
    """Eigenvalues, descending, and squared cosines with coordinate axes, over draws."""
    values, cosines = [], []
    for seed in range(draws):
        Z = gaussian(len(population), m, seed=900 + seed) * population.sqrt()[:, None] / m**0.5
        e, U = torch.linalg.eigh(Z @ Z.T)
        values.append(e.flip(0))
        cosines.append(U.flip(1).T.square())
    return torch.stack(values), torch.stack(cosines)


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0, 2.0])
def test_an_identity_population_gives_marchenko_and_pastur(ratio):
    m, p = 400, round(ratio * 400)
    law = rm.SampleCovariance(2.0 * torch.ones(p).double(), m)
    assert law.count == 0
    assert law.threshold == pytest.approx(2 * (1 + ratio**0.5), rel=1e-9)
    assert law.edge == pytest.approx(2 * (1 + ratio**0.5) ** 2, rel=1e-9)
    # Johnstone's scale for white Wishart matrices.
    johnstone = 2 / m * (m**0.5 + p**0.5) * (m**-0.5 + p**-0.5) ** (1 / 3)
    assert law.edge_scale == pytest.approx(johnstone, rel=1e-9)
    # The singular values of an n x d bulk with ratio min/max, up to their scale.
    short, long = min(p, m), max(p, m)
    s = torch.linspace(0.2, 1.9, 30, dtype=FLOAT)
    scale = (2 * long / m) ** 0.5
    seen = 2 * s * scale * law.density((s * scale).square()) * scale
    wanted = rm.marchenko_pastur_density(s, short / long)
    assert seen.numpy() == pytest.approx(wanted.numpy(), abs=1e-6)


@pytest.mark.parametrize("strength", [2.2, 3.0, 10.0])
def test_one_spike_follows_baik_ben_arous_and_peche(strength):
    p, m = 3000, 4000
    population = torch.ones(p).double()
    population[7] = strength
    law = rm.SampleCovariance(population, m)
    (outlier,) = law.outliers
    assert outlier.value == pytest.approx(rm.bbp_eigenvalue(strength, p / m), rel=2e-3)
    excess, ratio = strength - 1, p / m
    overlap = (1 - ratio / excess**2) / (1 + ratio / excess)
    assert outlier.overlap == pytest.approx(overlap, abs=3e-3)
    below = population.clone()
    below[7] = 1 + 0.9 * ratio**0.5
    assert rm.SampleCovariance(below, m).count == 0


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize("m", [200, 500])
def test_the_law_describes_sampled_covariances(name, m):
    population = POPULATIONS[name]
    law = rm.SampleCovariance(population, m)
    values, cosines = sample_covariances(population, m)
    K, mean = law.count, values.mean(dim=0)
    # A sample eigenvalue of size t fluctuates by t sqrt(2/m), of which 12 draws leave a third.
    for k, outlier in enumerate(law.outliers):
        assert outlier.value == pytest.approx(float(mean[k]), rel=4 * (2 / m / 12) ** 0.5)
        error = 4 * float(cosines[:, k, k].std()) / 12**0.5 + 0.06
        assert outlier.overlap == pytest.approx(float(cosines[:, k, k].mean()), abs=error)
    # Tracy and Widom's mean is -1.2 scales; the bulk ends there, not elsewhere.
    assert abs(float(mean[K]) - law.edge + 1.2 * law.edge_scale) < 1.5 * law.edge_scale
    positive = mean[K : min(int((population > 0).sum()), m)]
    for level in (0.1, 0.5, 0.9):
        # A gap in the spectrum, as between clusters, makes a quantile of it uncertain.
        expected = float(positive.quantile(level))
        assert law.quantile(level) == pytest.approx(expected, rel=0.03)
        several = law.quantiles(torch.tensor([level, level / 2], dtype=FLOAT))
        assert float(several[0]) == pytest.approx(law.quantile(level), rel=2e-3)


def test_equal_outliers_repel_each_other():
    population = torch.tensor([30.0, 30.0] + [1.0] * 200).double()
    law = rm.SampleCovariance(population, 400)
    values, _ = sample_covariances(population, 400, draws=40)
    first, second = law.outliers
    assert first.value == pytest.approx(float(values[:, 0].mean()), rel=0.03)
    assert second.value == pytest.approx(float(values[:, 1].mean()), rel=0.03)
    assert first.overlap == pytest.approx(0.5, abs=0.01)


def test_overlaps_are_shares_and_match_the_sampled_ones():
    population = POPULATIONS["outliers and zeros"]
    law = rm.SampleCovariance(population, 500)
    assert law.overlaps.sum(dim=1).numpy() == pytest.approx(1, abs=1e-12)
    assert bool((law.overlaps >= 0).all())
    _, cosines = sample_covariances(population, 500)
    K = law.count
    seen = cosines[:, :K, K:204].mean(dim=(0, 2))
    assert law.overlaps[:, K:].mean(dim=1).numpy() == pytest.approx(seen.numpy(), rel=0.25)


def test_the_density_of_any_population_has_mass_one_and_its_mean():
    law = rm.SampleCovariance(POPULATIONS["two clusters"], 500)
    x = torch.linspace(1e-4, law.edge * 1.01, 4001, dtype=FLOAT)
    f = law.density(x)
    assert float(torch.trapezoid(f, x)) == pytest.approx(1, abs=2e-3)
    assert float(torch.trapezoid(f * x, x)) == pytest.approx(2, abs=4e-3)
    F = torch.cumulative_trapezoid(f, x)
    assert law.cumulative(x[1:]).numpy() == pytest.approx(F.numpy(), abs=2e-3)


def test_quantiles_too_small_to_be_told_from_zero_stop_at_the_least():
    law = rm.SampleCovariance(torch.logspace(-11, 0, 200, dtype=FLOAT), 250)
    assert law.quantile(0.3) == pytest.approx(1e-8 * law.edge)
    assert law.quantile(0.9) > 1e-3 * law.edge


def test_a_population_of_one_eigenvalue_has_no_bulk():
    law = rm.SampleCovariance(torch.tensor([2.0, 0.0, 0.0]).double(), 50)
    assert (law.count, law.edge, law.edge_scale) == (1, 0.0, 0.0)
    assert law.outliers[0].value == pytest.approx(2.0)
    assert law.outliers[0].overlap == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no bulk"):
        law.quantile(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rm.SampleCovariance(torch.tensor([1.0, -0.5]), 5), "eigenvalue -0.5"),
        (lambda: rm.SampleCovariance(torch.zeros(3), 5), "only zeros"),
        (lambda: rm.SampleCovariance(torch.ones(3), 0), "samples is 0"),
        (lambda: rm.SampleCovariance(torch.ones(3), 9).density(torch.zeros(1)), "above 0"),
        (lambda: rm.SampleCovariance(torch.ones(3), 9).quantile(1.0), "level is 1.0"),
        (lambda: rm.SampleCovariance(torch.ones(3), 9).quantiles(torch.ones(1)), "levels has"),
    ],
)
def test_bad_populations_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
