"""Ridge regression on the features of a wide layer: the fit, and what its test error should be.

Features are sigma(W x) for Gaussian x, so that their covariance and their products with Hermite
polynomials of a direction are exact series; a deterministic equivalent of ridge regression then
predicts the test error without any fitted constant.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from torch import Tensor
from torch.special import hermite_polynomial_he

from lowgrad_utils import checks
from lowgrad_utils.networks import ACTIVATIONS

# The trapezoid rule's nodes: 0.005 apart, which resolves smooth sigma(s g) for s up to 100. Beyond,
# sigma has a kink (relative error 1e-5) or a jump (1e-3) for all that the features can tell.
_COUNT, _REACH = 3601, 9.0
# A few neurons at a time keep the values at the nodes in cache.
_BLOCK = 64


class HermiteSeries(NamedTuple):
    """Coefficients of sigma(s_j g) in Hermite polynomials, one row a neuron.

    Attributes:
        coefficients: alpha_jl = E sigma(s_j g) he_l(g), l = 0 ... degree, he_l of unit variance.
        even: Mean square of sigma's even part left beyond the degree, length m.
        odd: The same for its odd part.
    """

    coefficients: Tensor
    even: Tensor
    odd: Tensor


def hermite_polynomials(x: Tensor, degree: int) -> Tensor:
    """Compute the Hermite polynomials he_0 ... he_degree with E he_k(g) he_l(g) = (k == l).

    Args:
        x: Points, any shape.
        degree: The largest degree, at least 1.

    Returns:
        The polynomials along a new first dimension.

    Raises:
        ValueError: If ``degree`` is not a whole number of at least 1.

    Example:
        >>> hermite_polynomials(torch.tensor([2.0]).double(), 2)[2] * 2**0.5
        tensor([3.], dtype=torch.float64)
    """
    degrees = range(checks.positive_integer("degree", degree) + 1)
    return torch.stack(
        [hermite_polynomial_he(x, k) / math.sqrt(math.factorial(k)) for k in degrees]
    )


def hermite_series(activation: str, s: Tensor, degree: int = 30) -> HermiteSeries:
    """Expand sigma(s_j g) in Hermite polynomials of g ~ N(0, 1) by the trapezoid rule.

    Args:
        activation: A key of ``ACTIVATIONS``.
        s: Standard deviations s_j, length m, above 0.
        degree: The last degree kept apart.

    Raises:
        ValueError: If the activation is unknown, an entry of s is not positive, or ``degree``
            is not a whole number of at least 1.

    Example:
        >>> series = hermite_series("relu", torch.ones(1).double(), 2)
        >>> series.coefficients[0, 1]  # E sigma'(g) = 1/2
        tensor(0.5000, dtype=torch.float64)
    """
    sigma = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)].value
    checks.positive("the least of s", checks.vector("s", s).min())
    nodes = torch.linspace(-_REACH, _REACH, _COUNT, dtype=torch.float64)
    weights = torch.exp(-nodes.square() / 2)
    weights /= weights.sum()
    basis = hermite_polynomials(nodes, degree).T
    parts = []
    for block in s.double().split(_BLOCK):
        values = sigma(block[:, None] * nodes)
        # The nodes are symmetric: the flipped row holds sigma(-s g).
        mirror = values.flip(1)
        coefficients = (values * weights) @ basis
        squares = coefficients.square()
        even = (((values + mirror) / 2).square()) @ weights - squares[:, 0::2].sum(dim=1)
        odd = (((values - mirror) / 2).square()) @ weights - squares[:, 1::2].sum(dim=1)
        parts.append((coefficients, even.clamp(min=0), odd.clamp(min=0)))
    return HermiteSeries(*(torch.cat(column) for column in zip(*parts)))


def feature_covariance(preactivations: Tensor, activation: str, degree: int = 30) -> Tensor:
    """Compute the covariance of sigma(h_1) ... sigma(h_m) for h ~ N(0, P).

    C_jk = sum_l alpha_jl alpha_kl R_jk^l with R the correlations of P (Mehler's formula). What
    lies beyond ``degree`` is put into the next even and the next odd degree, so that the diagonal
    is exact.

    Args:
        preactivations: P, m x m, symmetric with a positive diagonal.
        activation: A key of ``ACTIVATIONS``.
        degree: The last degree kept apart.

    Returns:
        C, m x m.

    Raises:
        ValueError: If P is not square, a variance is out of range, or a name is unknown.

    Example:
        >>> feature_covariance(torch.eye(2).double(), "relu")[0, 0]  # 1/2 - 1/(2 pi)
        tensor(0.3408, dtype=torch.float64)
    """
    m = checks.matrix("preactivations", preactivations).shape[0]
    checks.matrix("preactivations", preactivations, columns=m)
    checks.positive("the least variance of preactivations", preactivations.diagonal().min())
    s = preactivations.diagonal().sqrt()
    series = hermite_series(activation, s, degree)
    R = preactivations / torch.outer(s, s)
    total, power = torch.zeros_like(R), R.clone()
    for l in range(1, degree + 1):  # noqa: E741
        column = series.coefficients[:, l]
        total += torch.outer(column, column) * power
        power = power * R
    # power is now R^(degree + 1).
    later = (series.even, series.odd) if degree % 2 else (series.odd, series.even)
    for rest in later:
        total += torch.outer(rest.sqrt(), rest.sqrt()) * power
        power = power * R
    return total


class RidgeFit(NamedTuple):
    """A linear function of features: f(x) = intercept + weights^T (features - centre).

    Attributes:
        weights: One a feature.
        centre: The features' means on the sample.
        intercept: The targets' mean on the sample.
    """

    weights: Tensor
    centre: Tensor
    intercept: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Predict from features, one example a row."""
        return (features - self.centre) @ self.weights + self.intercept


def ridge_path(features: Tensor, y: Tensor, penalties: list[float]) -> list[RidgeFit]:
    """Minimise (1/n) |y - b - F w|^2 + penalty |w|^2, the intercept b being free.

    Args:
        features: F, n x m.
        y: Targets, length n.
        penalties: Positive numbers.

    Returns:
        One fit for each penalty.

    Raises:
        ValueError: If shapes do not fit, an entry is NaN or infinite, or a penalty is not positive.

    Example:
        >>> F, y = torch.eye(3).double(), torch.tensor([1.0, 2.0, 6.0]).double()
        >>> torch.allclose(ridge_path(F, y, [1e-9])[0](F), y)
        True
    """
    n = checks.matrix("features", features).shape[0]
    checks.vector("y", y, length=n)
    penalties = [checks.positive("a penalty", penalty) for penalty in penalties]
    centre, intercept = features.mean(dim=0), y.mean()
    centred = features - centre
    values, vectors = torch.linalg.eigh(centred.T @ centred / n)
    target = vectors.T @ (centred.T @ (y - intercept)) / n
    return [
        RidgeFit(vectors @ (target / (values.clamp(min=0) + penalty)), centre, intercept)
        for penalty in penalties
    ]


def effective_penalty(eigenvalues: Tensor, n: int, penalty: float) -> float:
    """Solve kappa (1 - (1/n) sum_k t_k / (t_k + kappa)) = penalty.

    Ridge regression on n examples acts on each population direction as ridge regression on
    infinitely many with this larger penalty.

    Args:
        eigenvalues: t_k >= 0 of the features' population covariance.
        n: Number of examples.
        penalty: The ridge penalty, positive.

    Raises:
        ValueError: If ``n`` is less than 1, the penalty is not positive, or an eigenvalue is
            negative.

    Source: the self-consistent equation behind deterministic equivalents of ridge regression, as
        in Loureiro et al., Learning curves of generic features maps (2021).

    Example:
        >>> t = torch.ones(10).double()
        >>> kappa = effective_penalty(t, 20, 0.1)
        >>> round(kappa * (1 - 10 / 20 / (1 + kappa)), 12)
        0.1
    """
    t = checks.vector("eigenvalues", eigenvalues)
    checks.nonnegative("the least of eigenvalues", t.min())
    n, penalty = checks.positive_integer("n", n), checks.positive("penalty", penalty)
    gap = lambda k: k * (1 - float((t / (t + k)).sum()) / n) - penalty  # noqa: E731
    # k (1 - df / n) >= k - sum(t) / n, so that the root lies below penalty + sum(t) / n.
    return float(brentq(gap, penalty * (1 - 1e-12), 2 * (penalty + float(t.sum()) / n)))


@dataclass(frozen=True)
class RidgeTheory:
    """What ridge regression on n examples of given features should do.

    Attributes:
        error: Expected squared error on fresh examples, label noise included.
        penalty: The effective penalty kappa.
        weights: Expected weights (C + kappa)^-1 E[features y], length m.
    """

    error: float
    penalty: float
    weights: Tensor = field(repr=False)


def ridge_theory(
    covariance: Tensor, products: Tensor, second_moment: float, n: int, penalty: float
) -> RidgeTheory:
    """Predict ridge regression's test error from the population.

    With b = E[features y], kappa the effective penalty and df_2 = sum_k t_k^2 / (t_k + kappa)^2,

        error = (kappa^2 b^T C^-1 (C + kappa)^-1 C (C + kappa)^-1 C^-1 b + E y^2 - b^T C^-1 b)
                / (1 - df_2 / n).

    Args:
        covariance: C of the features, m x m.
        products: b, length m; features and y both centred.
        second_moment: E y^2 of the centred targets, noise included.
        n: Number of examples.
        penalty: The ridge penalty, positive.

    Raises:
        ValueError: If shapes do not fit, a number is out of range, or the covariance is zero.

    Source: Loureiro et al., Learning curves of generic features maps (2021): exact for Gaussian
        features, conjectured for those that behave as such.

    Example:
        >>> one = torch.ones(1, 1).double()
        >>> round(ridge_theory(one, one[0], 1.25, 10_000, 0.5).error, 2)  # 0.25 + (0.5/1.5)^2
        0.36
    """
    m = checks.vector("products", products).shape[0]
    checks.matrix("covariance", covariance, rows=m, columns=m)
    second_moment = checks.positive("second_moment", second_moment)
    t, vectors = torch.linalg.eigh(covariance)
    if not t[-1] > 0:
        raise ValueError(
            f"covariance has no eigenvalue above {float(t[-1]):g}, but a positive one is needed: "
            "do the features vary?"
        )
    t = t.clamp(min=1e-12 * float(t[-1]))
    kappa = effective_penalty(t, n, penalty)
    b = vectors.T @ products
    bias = kappa**2 * float((b.square() / (t * (t + kappa).square())).sum())
    unseen = max(second_moment - float((b.square() / t).sum()), 0.0)
    degrees = float((t / (t + kappa)).square().sum())
    error = (bias + unseen) / (1 - degrees / n)
    return RidgeTheory(error, kappa, vectors @ (b / (t + kappa)))
