"""Rates fitted over sizes and seeds, and the intervals that decide claims."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from lowgrad_utils import checks


class Interval(NamedTuple):
    """An estimate with the two ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Rate:
    """A power law value ~ exp(intercept) * size^slope with a confidence interval for the slope.

    Attributes:
        slope: The fitted exponent.
        low: Lower end of the interval for the slope.
        high: Upper end of the interval for the slope.
        intercept: Natural logarithm of the fitted value at size 1.
        level: Confidence level of the interval, for example 0.95.
        sizes: Number of distinct sizes.
        seeds: Least number of seeds at any size.

    Example:
        >>> rate = fit_rate([100, 100, 200, 200, 400, 400], [10, 10, 5, 5, 2.5, 2.5])
        >>> round(rate.slope, 6), round(float(rate.predict(800)), 6)
        (-1.0, 1.25)
    """

    slope: float
    low: float
    high: float
    intercept: float
    level: float
    sizes: int
    seeds: int

    def predict(self, size: ArrayLike) -> np.ndarray:
        """Return the fitted value exp(intercept) * size^slope.

        Args:
            size: A size, or several.
        """
        return np.exp(self.intercept + self.slope * np.log(np.asarray(size, dtype=float)))

    def contains(self, slope: float) -> bool:
        """Return whether a slope lies in [low, high].

        Args:
            slope: Such as the one that a statement predicts.
        """
        return bool(self.low <= slope <= self.high)

    def __str__(self) -> str:
        return f"{self.slope:.3f} [{self.low:.3f}, {self.high:.3f}]"


def fit_rate(
    sizes: ArrayLike,
    values: ArrayLike,
    seeds: ArrayLike | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Rate:
    """Fit log value = intercept + slope * log size by least squares, with a seed bootstrap.

    Seeds are resampled with replacement within each size. The percentiles of the resampled slopes
    are then stretched about the estimate, because a plain percentile interval is too short when
    seeds are few (it covers 0.88 instead of 0.95 with 5 seeds); see ``_stretch``. The interval is
    about noise between seeds: it does not know that a power law may bend at finite sizes.

    Args:
        sizes: One size for each value, or for each row of a two-dimensional ``values``.
        values: Positive measurements, one for each pair of size and seed; or a matrix with a row
            for each size and a column for each seed.
        seeds: A label for each value. Values with the same size and seed are averaged (in the
            logarithm), so that the seed stays the unit. None: every value is a seed of its own.
        level: Confidence level, between 0 and 1.
        resamples: Number of bootstrap resamples, at least 100.
        seed: Seed of the bootstrap.

    Returns:
        The slope with its interval, and the intercept.

    Raises:
        ValueError: On fewer than 3 sizes, a size with fewer than 2 seeds, nonpositive or
            nonfinite sizes or values, or lengths that do not fit.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(4, 10))
        >>> d = np.array([250, 500, 1000, 2000])
        >>> fit_rate(d, d[:, None] ** -0.5 * np.exp(0.1 * noise)).contains(-0.5)
        True
    """
    sizes, values, seeds = _aligned(sizes, values, seeds)
    if (values <= 0).any():
        raise ValueError(
            f"values has {(values <= 0).sum()} entries that are not positive, but their logarithm "
            "is needed; for values of either sign use root_mean_square_rate"
        )
    return _fit(sizes, np.log(values), seeds, _mean, level, resamples, seed)


def root_mean_square_rate(
    sizes: ArrayLike,
    values: ArrayLike,
    seeds: ArrayLike | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Rate:
    """Fit the rate of sqrt(mean over seeds of value^2), for values that change sign.

    An inner product of random directions is of size d^-beta with either sign, and close to 0 now
    and then: logarithms of single values are dominated by these accidents, the root mean square
    is not. Interval and result are those of ``fit_rate``; values with the same size and seed are
    first squared and averaged. With Gaussian values the interval covers 0.94 (5 seeds) and 0.93
    (10 seeds) at level 0.95.

    Args:
        sizes: As for ``fit_rate``, like the arguments that follow.
        values: Measured values, which may be negative or 0.
        seeds: Seed of each value.
        level: Confidence level of the interval.
        resamples: Number of resamples of the seeds.
        seed: Seed of the resampling.

    Raises:
        ValueError: As ``fit_rate``, or if all values of one size are 0.

    Example:
        >>> d = np.array([250, 500, 1000, 2000])
        >>> inner = d[:, None] ** -0.5 * np.random.default_rng(0).normal(size=(4, 20))
        >>> root_mean_square_rate(d, inner).contains(-0.5)
        True
    """
    sizes, values, seeds = _aligned(sizes, values, seeds)
    for size in np.unique(sizes):
        if not values[sizes == size].any():
            raise ValueError(f"all values at size {size:g} are 0: their rate has no logarithm")
    return _fit(sizes, values**2, seeds, _log_root_mean, level, resamples, seed)


def mean_interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Return the mean with its Student-t interval, mean +- t_(n-1) s / sqrt(n).

    Args:
        values: At least two finite numbers, independent of each other (one a seed).
        level: Confidence level, between 0 and 1.

    Raises:
        ValueError: On fewer than 2 values, NaN or infinity, or a level outside (0, 1).

    Example:
        >>> [round(end, 3) for end in mean_interval([1.0, 2.0, 3.0])]
        [2.0, -0.484, 4.484]
    """
    values = _numbers("values", values)
    _check_level(level)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"values has shape {values.shape}, but a list of at least 2 is needed")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    return Interval(float(values.mean()), float(values.mean() - half), float(values.mean() + half))


def share_interval(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Return successes / n with its exact (Clopper-Pearson) interval.

    The exact interval covers at least ``level`` for every true share, also at 0 of n and n of n.

    Args:
        successes: Number of successes, between 0 and ``n``.
        n: Number of independent trials, at least 1.
        level: Confidence level, between 0 and 1.

    Raises:
        ValueError: If a count is not whole or out of range, or the level outside (0, 1).

    Example:
        >>> [round(end, 3) for end in share_interval(10, 10)]
        [1.0, 0.692, 1.0]
    """
    n = checks.positive_integer("n", n)
    _check_level(level)
    if successes != 0:
        successes = checks.positive_integer("successes", successes)
    if successes > n:
        raise ValueError(f"successes is {successes}, but at most n = {n} is needed")
    ends = stats.binomtest(successes, n).proportion_ci(level, method="exact")
    return Interval(successes / n, float(ends.low), float(ends.high))


def _fit(sizes, values, seeds, point, level, resamples, seed) -> Rate:
    """Fit ``point`` of the values of each size on log size; see ``fit_rate`` for the interval."""
    _check_level(level)
    resamples = checks.positive_integer("resamples", resamples)
    if resamples < 100:
        raise ValueError(f"resamples is {resamples}, but at least 100 are needed")
    distinct = np.unique(sizes)
    if len(distinct) < 3:
        raise ValueError(f"sizes has {len(distinct)} distinct sizes, but at least 3 are needed")
    groups = [_one_a_seed(values[sizes == size], seeds[sizes == size]) for size in distinct]
    counts = np.array([len(group) for group in groups])
    if counts.min() < 2:
        few = distinct[counts.argmin()]
        raise ValueError(f"size {few:g} has 1 seed, but at least 2 are needed at every size")

    # Least squares over all (size, seed) is linear in the points of the sizes, weighted by counts.
    x = np.log(distinct)
    x_mean = np.average(x, weights=counts)
    weights = counts * (x - x_mean) / (counts @ (x - x_mean) ** 2)
    points = np.array([point(group) for group in groups])
    slope = float(weights @ points)

    generator = np.random.default_rng(seed)
    resampled = np.array(
        [point(group[generator.integers(len(group), size=(resamples, len(group)))])
         for group in groups]
    )  # fmt: skip
    tails = np.quantile(weights @ resampled, [(1 - level) / 2, (1 + level) / 2]) - slope
    low, high = slope + tails * _stretch(groups, weights, point, level)
    intercept = np.average(points, weights=counts) - slope * x_mean
    return Rate(
        slope, float(low), float(high), float(intercept), level, len(distinct), int(counts.min())
    )


def _mean(group: np.ndarray) -> np.ndarray:
    return group.mean(axis=-1)


def _log_root_mean(group: np.ndarray) -> np.ndarray:
    # A resample may consist of zeros only; the smallest float stands for log 0 there.
    return 0.5 * np.log(np.maximum(group.mean(axis=-1), np.finfo(float).tiny))


def _stretch(groups, weights, point, level) -> float:
    """Return by how much a percentile interval over few seeds must be lengthened.

    Two factors. Resampling n values sees their variance with divisor n, not n - 1; and it takes
    the variance for known, where Student's t has tails that are longer by t / z. The degrees of
    freedom are Welch and Satterthwaite's, as the sizes differ in variance.

    Source: Hesterberg, What Teachers Should Know About the Bootstrap (The American Statistician,
    2015), on the narrowness of percentile intervals and their expansion.
    """
    counts = np.array([len(group) for group in groups])
    # The point's derivative is 1 for the mean, and 1 / (2 mean) for the logarithm of the root mean.
    scale = np.array([1.0 if point is _mean else 0.5 / group.mean() for group in groups])
    variances = np.array([group.var(ddof=1) for group in groups])
    parts = weights**2 * scale**2 * variances / counts
    if parts.sum() == 0:
        return 1.0
    freedom = parts.sum() ** 2 / (parts**2 / (counts - 1)).sum()
    shrunk = (parts * (counts - 1) / counts).sum()
    tail = (1 + level) / 2
    return float(np.sqrt(parts.sum() / shrunk) * stats.t.ppf(tail, freedom) / stats.norm.ppf(tail))


def _one_a_seed(values: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    labels, inverse = np.unique(seeds, return_inverse=True)
    return np.bincount(inverse, weights=values) / np.bincount(inverse, minlength=len(labels))


def _aligned(sizes, values, seeds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sizes, values and seed labels as three vectors of one length."""
    sizes, values = _numbers("sizes", sizes), _numbers("values", values)
    if (sizes <= 0).any():
        raise ValueError(f"sizes has an entry {sizes.min():g}, but positive sizes are needed")
    if values.ndim == 2 and seeds is None and sizes.shape == values.shape[:1]:
        sizes, values = np.repeat(sizes, values.shape[1]), values.ravel()
    seeds = np.arange(values.size) if seeds is None else np.asarray(seeds)
    if not (sizes.ndim == 1 and sizes.shape == values.shape == seeds.shape):
        raise ValueError(
            f"sizes, values and seeds have shapes {sizes.shape}, {values.shape}, {seeds.shape}, "
            "but one size, value and seed for each measurement is needed"
        )
    return sizes, values, seeds


def _numbers(name: str, value: ArrayLike) -> np.ndarray:
    numbers = np.asarray(value, dtype=float)
    if not np.isfinite(numbers).all():
        bad = (~np.isfinite(numbers)).sum()
        raise ValueError(f"{name} has {bad} NaN or infinite entries; remove or repair them")
    return numbers


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but a number between 0 and 1 is needed, such as 0.95")
