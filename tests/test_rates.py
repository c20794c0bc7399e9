import numpy as np
import pytest
from scipy import stats

from lowgrad_utils import rates

SIZES = np.array([250, 500, 1000, 1500, 2000])


def noisy(generator, slope, seeds, spread=0.2):
    return SIZES[:, None] ** slope * np.exp(spread * generator.normal(size=(len(SIZES), seeds)))


def test_slope_and_intercept_are_those_of_ordinary_least_squares():
    generator = np.random.default_rng(1)
    # Unequal numbers of seeds, so that weighting by size instead of by measurement would show.
    sizes = np.repeat(SIZES, [2, 9, 3, 5, 12])
    values = 3.0 * sizes**-0.7 * np.exp(generator.normal(size=len(sizes)))
    rate = rates.fit_rate(sizes, values)
    reference = stats.linregress(np.log(sizes), np.log(values))
    assert rate.slope == pytest.approx(reference.slope, rel=1e-12)
    assert rate.intercept == pytest.approx(reference.intercept, rel=1e-12)
    assert (rate.sizes, rate.seeds) == (5, 2)
    assert rate.low < rate.slope < rate.high


def test_an_exact_power_law_has_an_interval_of_no_length():
    rate = rates.fit_rate(SIZES, np.repeat(2.0 * SIZES[:, None] ** -1.5, 4, axis=1))
    assert [rate.slope, rate.low, rate.high] == pytest.approx([-1.5] * 3, abs=1e-12)
    assert rate.predict(10_000) == pytest.approx(2e-6)


def test_the_seed_is_the_unit_of_resampling():
    generator = np.random.default_rng(2)
    values = noisy(generator, -0.5, 6)
    sizes = np.repeat(SIZES, 6)
    seeds = np.tile(np.arange(6), len(SIZES))
    once = rates.fit_rate(sizes, values.ravel(), seeds)
    # Ten copies of a measurement tell nothing new; taken for new seeds they shorten the interval.
    copies = rates.fit_rate(np.tile(sizes, 10), np.tile(values.ravel(), 10), np.tile(seeds, 10))
    fooled = rates.fit_rate(np.tile(sizes, 10), np.tile(values.ravel(), 10))
    assert (copies.low, copies.high) == pytest.approx((once.low, once.high), rel=1e-9)
    assert fooled.high - fooled.low < 0.5 * (once.high - once.low)


def test_the_bootstrap_seed_decides_and_the_order_of_rows_does_not():
    values = noisy(np.random.default_rng(3), -0.5, 5).ravel()
    sizes, seeds = np.repeat(SIZES, 5), np.tile(np.arange(5), 5)
    order = np.random.default_rng(4).permutation(25)
    first = rates.fit_rate(sizes, values, seeds, seed=7)
    shuffled = rates.fit_rate(sizes[order], values[order], seeds[order], seed=7)
    assert (shuffled.low, shuffled.high) == pytest.approx((first.low, first.high), rel=1e-12)
    assert rates.fit_rate(sizes, values, seeds, seed=8).low != first.low


def test_a_higher_level_has_a_longer_interval():
    values = noisy(np.random.default_rng(5), -0.5, 5)
    narrow, wide = (rates.fit_rate(SIZES, values, level=level) for level in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("fit", [rates.fit_rate, rates.root_mean_square_rate])
def test_a_power_law_as_factor_shifts_the_interval_and_a_scale_does_nothing(fit):
    values = noisy(np.random.default_rng(7), -0.5, 4, spread=1.0)
    plain, shifted = fit(SIZES, values), fit(SIZES, 5.0 * values * SIZES[:, None] ** -3.0)
    assert (shifted.low, shifted.slope, shifted.high) == pytest.approx(
        (plain.low - 3, plain.slope - 3, plain.high - 3), rel=1e-9
    )
    assert shifted.intercept == pytest.approx(plain.intercept + np.log(5), rel=1e-9)


def test_the_stretch_is_that_of_welchs_test_for_two_groups_of_unequal_size():
    generator = np.random.default_rng(8)
    groups = [generator.normal(0, 1, size=3), generator.normal(0, 3, size=11)]
    freedom = stats.ttest_ind(*groups, equal_var=False).df
    # The variance of the difference of means: unbiased, and as resampling sees it.
    unbiased, resampled = (sum(np.var(g, ddof=ddof) / len(g) for g in groups) for ddof in (1, 0))
    want = np.sqrt(unbiased / resampled) * stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975)
    assert rates._stretch(groups, np.array([-1.0, 1.0]), rates._mean, 0.95) == pytest.approx(want)


def covered(fit, draw, truth, repetitions=400):
    """Share of repetitions whose 95% interval holds the truth, and three binomial errors."""
    hits = np.mean([fit(draw(np.random.default_rng([9, i]))).contains(truth) for i in
                    range(repetitions)])  # fmt: skip
    return hits, 3 * np.sqrt(0.95 * 0.05 / repetitions)


@pytest.mark.parametrize("seeds", [3, 10])
def test_coverage_of_fit_rate(seeds):
    hits, error = covered(
        lambda values: rates.fit_rate(SIZES, values, resamples=500),
        lambda generator: noisy(generator, -0.5, seeds),
        -0.5,
    )
    assert abs(hits - 0.95) < error


def test_coverage_of_root_mean_square_rate():
    hits, error = covered(
        lambda values: rates.root_mean_square_rate(SIZES, values, resamples=500),
        lambda generator: SIZES[:, None] ** -0.5 * generator.normal(size=(len(SIZES), 10)),
        -0.5,
    )
    # 0.93 is what the documentation admits for ten Gaussian seeds.
    assert 0.93 - error < hits < 0.95 + error


def test_root_mean_square_of_constant_sign_and_size_is_the_plain_rate():
    values = np.repeat(SIZES[:, None] ** -0.8, 3, axis=1)
    signs = np.where(np.arange(3) % 2, -1.0, 1.0)
    assert rates.root_mean_square_rate(SIZES, values * signs).slope == pytest.approx(-0.8)
    assert rates.root_mean_square_rate(SIZES, values * signs).intercept == pytest.approx(
        0, abs=1e-9
    )


def test_coverage_of_mean_interval():
    draws = np.random.default_rng(6).normal(3.0, 2.0, size=(2000, 4))
    ends = np.array([rates.mean_interval(row)[1:] for row in draws])
    hits = np.mean((ends[:, 0] < 3) & (ends[:, 1] > 3))
    assert abs(hits - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 2000)


def test_mean_interval_agrees_with_scipy():
    values = [1.0, 4.0, 2.5, 7.0]
    reference = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert rates.mean_interval(values, level=0.9) == pytest.approx((3.625, *reference))


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_share_interval_covers_at_least_its_level_exactly_computed(share):
    n = 30
    counts = np.arange(n + 1)
    ends = np.array([rates.share_interval(int(k), n)[1:] for k in counts])
    inside = (ends[:, 0] <= share) & (share <= ends[:, 1])
    assert 0.95 <= stats.binom.pmf(counts, n, share)[inside].sum() < 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rates.fit_rate([1, 2], np.ones((2, 3))), "2 distinct sizes.*at least 3"),
        (lambda: rates.fit_rate([1, 2, 3], np.zeros((3, 3))), "9 entries that are not positive"),
        (lambda: rates.fit_rate([1, 2, 3], np.full((3, 2), np.nan)), "values has 6 NaN"),
        (lambda: rates.fit_rate([1, 2, 3], np.ones((3, 1))), "1 seed, but at least 2"),
        (lambda: rates.fit_rate([1, 2, 0], np.ones((3, 2))), "positive sizes"),
        (lambda: rates.fit_rate([1, 2, 3], np.ones(4)), r"shapes \(3,\), \(4,\), \(4,\)"),
        (lambda: rates.fit_rate([1, 2, 3], np.ones((3, 2)), level=95), "level is 95"),
        (lambda: rates.fit_rate([1, 2, 3], np.ones((3, 2)), resamples=5), "resamples is 5"),
        (lambda: rates.root_mean_square_rate([1, 2, 3], np.zeros((3, 2))), "size 1 are 0"),
        (lambda: rates.mean_interval([1.0]), "at least 2"),
        (lambda: rates.mean_interval([1.0, np.inf]), "values has 1 NaN"),
        (lambda: rates.share_interval(5, 4), "successes is 5.*n = 4"),
        (lambda: rates.share_interval(-1, 4), "successes is -1"),
        (lambda: rates.share_interval(0, 0), "n is 0"),
    ],
)
def test_bad_input_gets_one_clear_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
