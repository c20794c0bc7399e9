"""Laws of random matrices the book tests against: Marchenko-Pastur, BBP, the D-transform.

The rectangular bulk is n x d with independent entries of variance 1/d and ratio = n/d <= 1, so
that its singular values fill [1 - sqrt(ratio), 1 + sqrt(ratio)].
"""

import math
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from torch import Tensor

from lowgrad_utils import checks


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
        ValueError: If x is not above them all, or their number does not fit the shape.

    Source: Benaych-Georges and Nadakuditi (2012), Section 2.3.
    """
    s = checks.vector("singular_values", singular_values, length=min(shape))
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


def _ratio(ratio: float) -> float:
    number = checks.positive("ratio", ratio)
    if number > 1:
        raise ValueError(f"ratio is {ratio:g}, but n/d in (0, 1] is needed; transpose the bulk")
    return number
