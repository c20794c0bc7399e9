"""Laws of random matrices the book tests against: Marchenko-Pastur, BBP, the D-transform.

The rectangular bulk is n x d with independent entries of variance 1/d and ratio = n/d <= 1, so
that its singular values fill [1 - sqrt(ratio), 1 + sqrt(ratio)].

``SampleCovariance`` is the general law, for columns of any population covariance.
"""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from lowgrad_utils import checks

# How far above the real axis Silverstein's equation is solved, relative to the bulk's edge.
_HEIGHT = 1e-10


class Spike(NamedTuple):
    """What a rank-one term of norm theta becomes once a bulk is added to it.

    Attributes:
        value: The singular value seen.
        left: Squared cosine between the seen and the true vector on the side of length n.
        right: The same on the side of length d.
    """

    value: float
    left: float
    right: float


def marchenko_pastur_edges(ratio: float, *, sigma: float = 1.0) -> tuple[float, float]:
    """Compute the edges sigma (1 -+ sqrt(ratio)) of the singular values of an i.i.d. bulk.

    Args:
        ratio: n/d, in (0, 1].
        sigma: Standard deviation of an entry times sqrt(d), positive.

    Raises:
        ValueError: If ``ratio`` is not in (0, 1] or ``sigma`` is not positive.

    Source: Marchenko and Pastur (1967).

    Example:
        >>> marchenko_pastur_edges(0.25)
        (0.5, 1.5)
    """
    root = math.sqrt(_ratio(ratio))
    sigma = checks.positive("sigma", sigma)
    return sigma * (1 - root), sigma * (1 + root)


def marchenko_pastur_density(s: Tensor, ratio: float) -> Tensor:
    """Compute the density of the singular values s of the n x d bulk (n of them).

    f(s) = sqrt((s_+^2 - s^2)(s^2 - s_-^2)) / (pi ratio s) between the edges, 0 outside.

    Args:
        s: Points, any shape.
        ratio: n/d, in (0, 1].

    Raises:
        ValueError: If ``ratio`` is not in (0, 1].

    Source: Marchenko and Pastur (1967), whose law is that of s^2.

    Example:
        >>> s = torch.linspace(0, 2, 200_001, dtype=torch.float64)
        >>> density = marchenko_pastur_density(s, 0.25)
        >>> round(float(torch.trapezoid(density, s)), 4)  # all of it lies from 0.5 to 1.5
        1.0
        >>> bool((density[(s < 0.5) | (s > 1.5)] == 0).all())
        True
    """
    low, high = marchenko_pastur_edges(ratio)
    inside = ((high**2 - s.square()) * (s.square() - low**2)).clamp(min=0)
    return torch.where(s > 0, inside.sqrt() / (math.pi * ratio * s.clamp(min=1e-300)), 0.0)


def bbp_eigenvalue(strength: float, ratio: float) -> float:
    """Compute where a population eigenvalue ``strength`` > 1 appears in the sample covariance.

    l (1 + ratio / (l - 1)) above the threshold l > 1 + sqrt(ratio), the bulk edge below it.
    Here ratio is features / examples and the rest of the population covariance is the identity.

    Args:
        strength: Population eigenvalue l, at least 1.
        ratio: Features / examples, positive.

    Raises:
        ValueError: If ``strength`` is below 1 or ``ratio`` is not positive.

    Source: Baik, Ben Arous and Peche (2005).

    Example:
        >>> bbp_eigenvalue(3.0, 1.0)
        4.5
    """
    ratio, strength = checks.positive("ratio", ratio), checks.positive("strength", strength)
    if strength < 1:
        raise ValueError(f"strength is {strength:g}, but at least 1 is needed")
    if strength <= 1 + math.sqrt(ratio):
        return (1 + math.sqrt(ratio)) ** 2
    return strength * (1 + ratio / (strength - 1))


def spiked_singular_value(theta: float, ratio: float) -> Spike:
    """Compute what theta u v^T plus the n x d bulk shows: its singular value and alignments.

    sqrt((1 + theta^2)(ratio + theta^2)) / theta above the threshold theta > ratio^(1/4); below
    it the bulk's edge, with no alignment left.

    Args:
        theta: Norm of the rank-one term, positive.
        ratio: n/d, in (0, 1].

    Returns:
        The singular value and the squared cosines on both sides.

    Raises:
        ValueError: If ``theta`` is not positive or ``ratio`` is not in (0, 1].

    Source: Benaych-Georges and Nadakuditi (2012), Section 3.1.

    Example:
        >>> spiked_singular_value(1.0, 0.25).value  # doctest: +ELLIPSIS
        1.5811...
    """
    theta = checks.positive("theta", theta)
    c, t = _ratio(ratio), theta**2
    if theta <= c**0.25:
        return Spike(1 + math.sqrt(c), 0.0, 0.0)
    value = math.sqrt((1 + t) * (c + t)) / theta
    return Spike(value, 1 - c * (1 + t) / (t * (t + c)), 1 - (c + t) / (t * (t + 1)))


def d_transform(x: float, singular_values: Tensor, shape: tuple[int, int]) -> float:
    """Compute D(x) = phi(x) phi~(x) of a bulk given by its singular values.

    phi(x) = (1/n) sum_k x / (x^2 - s_k^2) over the n rows, phi~ the same over the d columns with
    d - n zeros. A rank-one term of norm theta shows where D(x) = 1/theta^2, if that has a root.

    Args:
        x: A point above the largest singular value.
        singular_values: The min(n, d) singular values of the bulk.
        shape: (n, d).

    Raises:
        ValueError: If x is not above them all, one is negative, or their number does not fit.

    Source: Benaych-Georges and Nadakuditi (2012), Section 2.3.

    Example:
        >>> round(d_transform(2.0, torch.ones(1).double(), (1, 2)), 6)  # 2/3 times (2/3 + 1/2)/2
        0.388889
    """
    s = checks.vector("singular_values", singular_values, length=min(shape))
    if float(s.min()) < 0:
        raise ValueError(f"singular_values has {float(s.min()):g}, but none is below 0")
    if not x > float(s.max()):
        raise ValueError(f"x is {x:g}, but a point above the bulk's {float(s.max()):g} is needed")
    total = float((x / (x**2 - s.square())).sum())
    left, right = (total + (size - len(s)) / x for size in shape)
    return left * right / (shape[0] * shape[1])


def predict_spike(
    theta: float, singular_values: Tensor, shape: tuple[int, int], *, margin: float | None = None
) -> float:
    """Predict the singular value of a rank-one term of norm theta added to a given bulk.

    Solves D(x) = 1/theta^2 above the bulk. A finite bulk always has a root just above its edge,
    so a root counts only beyond edge (1 + margin); otherwise the edge is returned.

    Args:
        theta: Norm of the rank-one term, positive.
        singular_values: The min(n, d) singular values of the bulk.
        shape: (n, d).
        margin: Share of the edge; min(n, d)^(-2/3) if None.

    Returns:
        The predicted singular value, or the edge if the term stays in the bulk.

    Raises:
        ValueError: If ``theta`` or ``margin`` is not positive, the sizes do not fit, or the bulk
            is zero.

    Source: Benaych-Georges and Nadakuditi (2012), Theorem 2.8.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> bulk = torch.randn(200, 400, generator=generator, dtype=torch.float64) / 20
        >>> s = torch.linalg.svdvals(bulk)
        >>> abs(predict_spike(3.0, s, (200, 400)) - spiked_singular_value(3.0, 0.5).value) < 0.02
        True
        >>> predict_spike(0.1, s, (200, 400)) == float(s[0])
        True
    """
    theta = checks.positive("theta", theta)
    edge = float(checks.vector("singular_values", singular_values, length=min(shape)).max())
    if not edge > 0:
        raise ValueError("singular_values are all 0, but a bulk is needed")
    margin = checks.positive("margin", min(shape) ** (-2 / 3) if margin is None else margin)
    start = edge * (1 + margin)
    gap = lambda x: d_transform(x, singular_values, shape) - theta**-2  # noqa: E731
    # |theta u v^T + bulk| <= theta + edge, so the root cannot lie beyond.
    if gap(start) <= 0:
        return edge
    return float(brentq(gap, start, 2 * (theta + edge), xtol=1e-12 * edge))


def wishart_spike(theta: float, ratio: float, *, variance: float = 1.0) -> float:
    """Compute where a spike theta > 0 of a symmetric matrix shows once a Wishart bulk is added.

    theta + s / (1 - ratio s / theta) above the threshold theta > s (ratio + sqrt(ratio)), with
    s = variance; below it the bulk's edge s (1 + sqrt(ratio))^2. The bulk is X X^T / N with P x N
    independent entries of that variance and ratio = P / N, independent of the spike's direction.

    Args:
        theta: Eigenvalue of the low-rank term, positive.
        ratio: P / N, positive.
        variance: Of an entry of X, positive.

    Raises:
        ValueError: If a number is not positive.

    Source: Benaych-Georges and Nadakuditi (2011), Theorem 2.1 with the Marchenko-Pastur law.

    Example:
        >>> wishart_spike(4.0, 1.0)  # 4 + 1 / (1 - 1/4)
        5.333333333333333
    """
    theta, ratio = checks.positive("theta", theta), checks.positive("ratio", ratio)
    variance = checks.positive("variance", variance)
    if theta <= variance * (ratio + math.sqrt(ratio)):
        return variance * (1 + math.sqrt(ratio)) ** 2
    return theta + variance / (1 - ratio * variance / theta)


def additive_spike(theta: float, eigenvalues: Tensor, *, margin: float | None = None) -> float:
    """Predict the eigenvalue of a rank-one term theta u u^T added to a given symmetric bulk.

    Solves (1/P) sum_j 1 / (x - b_j) = 1/theta above the bulk, for u independent of its
    eigenvectors. As in ``predict_spike`` a root counts only beyond the edge by ``margin``.

    Args:
        theta: Eigenvalue of the rank-one term, positive.
        eigenvalues: All P eigenvalues b_j of the bulk, zeros included.
        margin: Share of the bulk's width b_1 - b_P; P^(-2/3) if None.

    Returns:
        The predicted eigenvalue, or the edge b_1 if the term stays in the bulk.

    Raises:
        ValueError: If ``theta`` or ``margin`` is not positive, or the bulk is a single point.

    Source: Benaych-Georges and Nadakuditi (2011), Theorem 2.1.

    Example:
        >>> bulk = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        >>> x = additive_spike(10.0, bulk)
        >>> round(float((1 / (x - bulk)).mean()), 9)
        0.1
    """
    theta = checks.positive("theta", theta)
    b = checks.vector("eigenvalues", eigenvalues)
    edge, width = float(b.max()), float(b.max() - b.min())
    if not width > 0:
        raise ValueError("eigenvalues are all alike, but a bulk is needed")
    start = edge + width * checks.positive(
        "margin", len(b) ** (-2 / 3) if margin is None else margin
    )
    gap = lambda x: float((1 / (x - b)).mean()) - 1 / theta  # noqa: E731
    # |theta u u^T| = theta, so that the root cannot lie beyond theta + b_1.
    if gap(start) <= 0:
        return edge
    return float(brentq(gap, start, edge + 2 * theta, xtol=1e-13 * (edge + theta)))


class SampleOutlier(NamedTuple):
    """What a population eigenvalue above the threshold shows in the sample covariance.

    Attributes:
        value: The sample eigenvalue.
        population: The population eigenvalue.
        overlap: Squared cosine between the sample and the population eigenvector.
    """

    value: float
    population: float
    overlap: float


class SampleCovariance:
    """The law of the eigenvalues of (1/m) T^(1/2) Z Z^T T^(1/2) for any population covariance T.

    Z is d x m with independent entries of mean 0 and variance 1. The bulk obeys Silverstein's
    equation z = -1/u + (1/m) sum_k t_k / (1 + t_k u) for u(z), the Stieltjes transform of the
    m x m companion. Population eigenvalues t above its threshold l* = -1/u* are outliers: u* is
    where dz/du = 0 above the bulk, and z(u*) the edge. Such a t appears at
    psi(t) = t (1 + (1/m) sum_j t_j / (t - t_j)).

    A population of finitely many eigenvalues is all atoms. The outliers are therefore the largest
    K <= sqrt(m) such that t_K lies above the threshold of the rest, and its psi above the edge by
    at least twice the scale of its fluctuations. Corrections of relative order 1/m: each outlier
    takes one of the m samples from the bulk; and two outliers act on each other as Gaussian noise
    of variance t_j t_k / m in a 2 x 2 matrix does, so that equal ones repel each other instead of
    falling back into the bulk.

    Args:
        population: Eigenvalues t_k >= 0 of T in any order; zeros (up to rounding) drop out.
        samples: m.

    Attributes:
        population: The positive eigenvalues, descending.
        samples: m.
        count: Number K of outliers.
        threshold: The population eigenvalue l* from which on there are outliers.
        edge: Upper edge of the bulk of the sample eigenvalues.
        edge_scale: Scale of the fluctuations of its largest one: (largest - edge) / edge_scale
            has the law of Tracy and Widom (real), of mean -1.21 and standard deviation 1.27.
            edge_scale^3 = l*^3 (1 + (1/m) sum (t / (l* - t))^3) / m^2. Without a bulk these
            three are 0.

    Raises:
        TypeError: If ``population`` is not a floating-point tensor.
        ValueError: If an eigenvalue is negative beyond rounding, or all are 0.

    Source: Silverstein (1995); outliers: Baik and Silverstein (2006), Paul (2007), Bai and Yao
        (2012); fluctuations: El Karoui (2007), Lee and Schnelli (2016).

    Example:
        >>> law = SampleCovariance(torch.tensor([9.0] + [1.0] * 100).double(), 400)
        >>> round(law.edge, 3), round(law.outliers[0].value, 3)
        (2.246, 9.281)
        >>> x = torch.tensor([0.5, 1.0, 2.0]).double()
        >>> law.density(x).round(decimals=3).tolist(), law.cumulative(x).round(decimals=3).tolist()
        ([0.843, 0.616, 0.209], [0.188, 0.555, 0.966])
        >>> law.quantiles(torch.tensor([0.1, 0.9]).double()).round(decimals=2).tolist()
        [0.4, 1.75]
    """

    def __init__(self, population: Tensor, samples: int):
        t = checks.vector("population", population).double().sort(descending=True).values
        self.samples = checks.positive_integer("samples", samples)
        rounding = 1e-12 * float(t.abs().max())
        if float(t[-1]) < -rounding:
            raise ValueError(f"population has the eigenvalue {float(t[-1]):g}, but 0 is the least")
        if not float(t[0]) > 0:
            raise ValueError("population has only zeros, but a covariance is needed")
        self.population = t[t > rounding]
        most = min(math.isqrt(self.samples), len(self.population), self.samples - 1)
        self.count = next((k for k in range(most, 0, -1) if self._stands_out(k)), 0)
        self.threshold, self.edge, self.edge_scale = self._ends(self.count)

    @property
    def bulk(self) -> Tensor:
        """The population eigenvalues below the threshold."""
        return self.population[self.count :]

    @cached_property
    def outliers(self) -> list[SampleOutlier]:
        """The outliers, largest first."""
        W = self.overlaps
        return [
            SampleOutlier(value, float(t), float(W[k, k]))
            for k, (value, t) in enumerate(zip(self._values(), self.population[: self.count]))
        ]

    @cached_property
    def overlaps(self) -> Tensor:
        """Expected squared cosines of sample (rows, K) and population eigenvectors (all columns).

        With bulk eigenvectors l t_j / (m (l - t_j)^2) over 1 + (1/m) sum t_j / (l - t_j), with
        other outliers what two by two matrices mix. Rows sum to 1, unless zeros of the population
        dropped out, whose eigenvectors get nothing.
        """
        K, m, t = self.count, self.samples, self.population
        rows = []
        for k in range(K):
            row = torch.zeros_like(t)
            size, gap = float(t[k]), t[k] - self.bulk
            norm = 1 + float((self.bulk / gap).sum()) / m
            row[K:] = size * self.bulk / (m * gap.square() * norm)
            cosine, _ = _mixing((t[k] - t[:K]).abs(), (t[k] * t[:K] / m).sqrt())
            # The odds of each neighbour against t_k itself: 1 for an equal one.
            odds = (1 - cosine) / (1 + cosine)
            odds[k] = 1
            row[:K] = (1 - row[K:].sum()) * odds / odds.sum()
            rows.append(row)
        return torch.stack(rows) if rows else t.new_zeros(0, len(t))

    def density(self, x: Tensor) -> Tensor:
        """Compute the density of the positive sample eigenvalues of the bulk at points x > 0.

        Args:
            x: Points, any shape, positive.

        Returns:
            The density, with mass 1.

        Raises:
            ValueError: If a point is not positive, or there is no bulk.
        """
        u, points, bulk, left = self._solve(x.reshape(-1))
        zeros = max(0.0, 1 - len(bulk) / left) * _HEIGHT / (points.square() + _HEIGHT**2)
        share = min(len(bulk), left) / left
        values = (u.imag - zeros).clamp(min=0) / (math.pi * share * self.edge)
        return values.reshape(x.shape)

    def cumulative(self, x: Tensor) -> Tensor:
        """Compute the share of the bulk's positive sample eigenvalues below points x > 0.

        From the potential of the law, without integrating the density:
        F = (arg u + x Im u - (1/m) sum_k arg(1 + t_k u)) / pi, less the companion's zeros.

        Args:
            x: Points, any shape, positive.

        Raises:
            ValueError: If a point is not positive, or there is no bulk.
        """
        u, points, bulk, left = self._solve(x.reshape(-1))
        angles = (1 + bulk * u[:, None]).angle().sum(dim=1) / left
        below = (u.angle() + points * u.imag - angles) / math.pi
        zeros = max(0.0, 1 - len(bulk) / left)
        return ((below - zeros) / (1 - zeros)).clamp(0, 1).reshape(x.shape)

    def quantile(self, level: float) -> float:
        """Compute a quantile of the positive sample eigenvalues of the bulk.

        Eigenvalues below 1e-8 of the edge are not told from each other: it is the least returned.

        Args:
            level: Share below it, between 0 and 1, such as 0.5 for the median.

        Raises:
            ValueError: If the level is not between 0 and 1, or there is no bulk.

        Example:
            >>> law = SampleCovariance(torch.ones(100).double(), 400)
            >>> round(law.quantile(0.5), 2)  # of Marchenko and Pastur's law with ratio 1/4
            0.92
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}, but a number between 0 and 1 is needed")
        self._needed_bulk()
        below = lambda s: float(self.cumulative(torch.tensor([s**2]).double())) - level  # noqa: E731
        least = 1e-4 * self.edge**0.5
        return (brentq(below, least, self.edge**0.5, rtol=1e-6) if below(least) < 0 else least) ** 2

    def quantiles(self, levels: Tensor) -> Tensor:
        """Compute many quantiles at once, by interpolation between 400 points: good to 1e-3.

        Args:
            levels: Shares below them, each between 0 and 1.

        Raises:
            ValueError: If a level is not between 0 and 1, or there is no bulk.
        """
        checks.vector("levels", levels)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError("levels has an entry outside (0, 1), but shares are needed")
        root, below = self._table
        return torch.as_tensor(np.interp(levels.numpy(), below, root)).square()

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Roots s, denser towards both ends of the bulk, and the shares below s^2."""
        self._needed_bulk()
        angle = torch.linspace(0, math.pi, 401, dtype=torch.float64)[1:]
        s = self.edge**0.5 * (1 - angle.cos()) / 2
        return s.numpy(), self.cumulative(s.square()).cummax(dim=0).values.numpy()

    def _solve(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Solve for u in units of the edge; return points, bulk and its samples in these, too."""
        points = checks.vector("x", x).double()
        if not bool((points > 0).all()):
            raise ValueError("x has entries that are not positive, but points above 0 are needed")
        left = self.samples - self.count
        bulk = self._needed_bulk() * (left / self.samples / self.edge)
        points = points / self.edge
        return _companion(points, bulk, left), points, bulk, left

    def _needed_bulk(self) -> Tensor:
        if not len(self.bulk):
            raise ValueError("population consists of outliers only, so that there is no bulk")
        return self.bulk

    def _stands_out(self, k: int) -> bool:
        """Whether the k-th population eigenvalue is an outlier if those after it are the bulk."""
        rest, size = self.population[k:], float(self.population[k - 1])
        gap = size - rest
        # The condition (1/m) sum (t/(l-t))^2 < 1 of psi' > 0, less the samples of k - 1 outliers.
        if not bool((gap > 0).all()) or float((rest / gap).square().sum()) >= self.samples - k + 1:
            return False
        _, edge, scale = self._ends(k)
        return self._position(size, rest) > edge + 2 * scale

    def _ends(self, k: int) -> tuple[float, float, float]:
        """Compute threshold, edge and the edge's scale with k outliers; zeros without a bulk."""
        bulk, m = self.population[k:], self.samples
        if not len(bulk):
            return 0.0, 0.0, 0.0
        t, left = bulk / bulk[0], m - k
        # Of y = l / t_1 - 1 > 0: decreasing, positive at the lower end, negative at the upper.
        excess = lambda y: float((t / (1 - t + y)).square().sum()) / left - 1  # noqa: E731
        low, high = 0.5 / math.sqrt(left), math.sqrt(len(t) / left) * (1 + 1e-9)
        size = float(bulk[0]) * (1 + brentq(excess, low, high, xtol=1e-15))
        cubes = float((bulk / (size - bulk)).pow(3).sum())
        edge = self._position(size, bulk) - size * k / m
        return size, edge, size * ((left + cubes) / m**3) ** (1 / 3)

    def _position(self, size: float, bulk: Tensor) -> float:
        """Compute psi(l), where this bulk makes a population eigenvalue l appear."""
        return size * (1 + float((bulk / (size - bulk)).sum()) / self.samples)

    def _values(self) -> list[float]:
        t, values = self.population[: self.count], []
        for k, size in enumerate(t):
            apart = (size - t).abs()
            # Of a pair, the larger is pushed up and the smaller down by the same amount.
            push = (_mixing(apart, (size * t / self.samples).sqrt())[1] - apart) / 2
            push = torch.where(torch.arange(len(t)) > k, push, -push)
            push[k] = 0
            values.append(self._position(float(size), self.bulk) + float(push.sum()))
        # Near the threshold repulsion must not carry an outlier into the bulk.
        return [max(value, self.edge) for value in values]


def _mixing(gap: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Average what a symmetric 2 x 2 matrix of Gaussian noise does to two eigenvalues.

    With off-diagonal noise of standard deviation ``size`` and diagonal noise sqrt(2) times that,
    (difference of the diagonal, twice the off-diagonal) is a point of the plane with mean
    (gap, 0) and standard deviation 2 size on either axis. Its polar angle is twice the angle by
    which the eigenvectors turn, its radius (Rice's law) the gap between the eigenvalues.

    Returns:
        Mean cosine of the polar angle, and mean radius.
    """
    a = (gap / (2 * size)).square() / 4
    i0, i1 = torch.special.i0e(a), torch.special.i1e(a)
    cosine = (math.pi / 2 * a).sqrt() * (i0 + i1)
    return cosine, size * math.sqrt(2 * math.pi) * ((1 + 2 * a) * i0 + 2 * a * i1)


def _companion(x: Tensor, t: Tensor, m: int) -> Tensor:
    """Solve x + i0 = -1/u + (1/m) sum_k t_k / (1 + t_k u) for u in the upper half plane.

    Newton's method from x + 10i, where u = -1/z is close, down to the real axis; x and t should be
    of order 1. The solution in the upper half plane is unique, so that whatever Newton converges
    to there is right; where it does not, it tries again in smaller steps.
    """
    # A few points at a time: each meets every population eigenvalue.
    if len(x) > (most := max(1, 100_000 // len(t))):
        return torch.cat([_companion(block, t, m) for block in x.split(most)])
    u, bad = _descend(x, t, m, 0.6)
    for shrink in (0.85, 0.95):
        if bad.any():
            u[bad], still = _descend(x[bad], t, m, shrink)
            bad[bad.clone()] = still
    return u


def _descend(x: Tensor, t: Tensor, m: int, shrink: float) -> tuple[Tensor, Tensor]:
    """Follow u from x + 10i to the real axis; return it and where the equation is not met."""
    imaginary = 10.0
    u = -1 / torch.complex(x, torch.full_like(x, imaginary))
    while imaginary > _HEIGHT:
        imaginary = max(imaginary * shrink, _HEIGHT)
        z = torch.complex(x, torch.full_like(x, imaginary))
        for _ in range(3):
            ratio = t / (1 + t * u[:, None])
            gap = -1 / u + ratio.sum(dim=1) / m - z
            step = gap / (u.square().reciprocal() - ratio.square().sum(dim=1) / m)
            # At most nine tenths of the way to the real axis.
            down = (step.imag / (0.9 * u.imag)).clamp(min=1)
            u = u - step / down
    ratio = t / (1 + t * u[:, None])
    gap = -1 / u + ratio.sum(dim=1) / m - z
    return u, gap.abs() > 1e-6 * (x.abs() + 1 / u.abs())


def _ratio(ratio: float) -> float:
    number = checks.positive("ratio", ratio)
    if number > 1:
        raise ValueError(f"ratio is {ratio:g}, but n/d in (0, 1] is needed; transpose the bulk")
    return number
