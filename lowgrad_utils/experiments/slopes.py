"""ReLU against smooth activations: slopes about their mean, their signs, and the data's scale."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import Scenario, paper_sizes, scenario
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data

#: Sizes d over which the chapter fits exponents.
SIZES = (250, 400, 640, 1000)
#: Pairs (nu, alpha) on either side of 2 nu = 1 - alpha, where the spike takes over the signs.
BELOW = (
    (0.0, 0.0),
    (0.125, 0.0),
    (0.25, 0.0),
    (0.375, 0.0),
    (0.0, 0.5),
    (0.125, 5 / 9),
    (0.25, 0.25),
)
ABOVE = ((0.45, 0.3), (0.375, 0.5), (0.5, 0.5), (0.75, 0.0))


def slope_deviation(data: SpikedData, network: TwoLayerNetwork) -> Tensor:
    """Compute sigma'_perp = sigma'(X W^T) - 1 mu^T, n x m.

    Args:
        data: The data.
        network: The network.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit.

    Source: Low Rank Gradients, Assumption 4.

    Example:
        >>> case = scenario(40, nu=0.25)
        >>> slope_deviation(case.data, case.network).abs().unique()
        tensor([0.5000], dtype=torch.float64)
    """
    checks.matrix("W", network.W, columns=data.d)
    checks.same_dtype(X=data.X, W=network.W)
    return network.sigma.derivative(data.X @ network.W.T) - network.mu(data)


def sign_pattern(data: SpikedData, W: Tensor) -> Tensor:
    """Form sign(z) sign(W q)^T, n x m: the signs of X W^T if the spike alone decided them.

    Args:
        data: The data.
        W: Inner weights, m x d.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If W does not fit.

    Source: Low Rank Gradients, Proposition 3.1.
    """
    checks.matrix("W", W, columns=data.d)
    checks.same_dtype(X=data.X, W=W)
    return torch.outer(data.z.sign(), (W @ data.q).sign())


def mismatches(data: SpikedData, W: Tensor) -> Tensor:
    """Find where sign(X W^T) differs from sign(z) sign(W q)^T, n x m booleans.

    Args:
        data: The data.
        W: Inner weights, m x d.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If W does not fit.

    Source: Low Rank Gradients, Proposition 3.1.
    """
    return sign_pattern(data, W) * (data.X @ W.T) < 0


def mismatch_probability(data: SpikedData, W: Tensor) -> Tensor:
    """Compute P[sign(w_j^T x) != sign(z) sign(w_j^T q)] for each neuron, length m.

    w^T x = g + zeta z (w^T q) with independent g ~ N(0, w^T Sigma_hat w) and z ~ N(0, 1). The
    point (g, zeta z w^T q) leaves the half plane of its second entry's sign with probability
    (1/pi) arctan( sqrt(w^T Sigma_hat w) / (zeta |w^T q|) ).

    Args:
        data: Data with a known covariance.
        W: Inner weights, m x d.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If W does not fit, or the data's covariance is unknown.

    Source: Low Rank Gradients, Proposition 3.1, in the exact form that this book derives.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.0)
        >>> W = torch.eye(2, 40).double()
        >>> expected = torch.atan(1 / data.q[:2].abs()) / torch.pi
        >>> torch.allclose(mismatch_probability(data, W), expected)
        True
    """
    total = data.preactivation_scale(W)
    along = data.zeta * (W @ data.q).abs()
    bulk = (total.square() - along.square()).clamp(min=0).sqrt()
    return torch.atan2(bulk, along) / math.pi


def slope_cell(
    d: int, nu: float, alpha: float, activation: str, weights: str, seed: int
) -> dict[str, float]:
    """Measure the operator norms of sigma'_perp(X W^T) and of W.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        weights: ``"uniform"`` or ``"spike"`` (every row is q).
        seed: Seed.

    Returns:
        ``slopes`` and ``W_norm``.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> cell = slope_cell(40, 2.0, 0.0, "relu", "spike", 0)
        >>> bool(cell["slopes"] <= 0.5 * (30 * 50) ** 0.5)
        True
    """
    checks.choice("weights", weights, ("uniform", "spike"))
    checks.choice("activation", activation, ACTIVATIONS)
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    if weights == "spike":
        rows = normalise_rows(data.q.expand(m, d))
        network = TwoLayerNetwork(rows, network.a, activation)
    deviation = slope_deviation(data, network)
    return {"slopes": operator_norm(deviation), "W_norm": operator_norm(network.W)}


def sign_cell(d: int, nu: float, alpha: float, seed: int) -> dict[str, float]:
    """Compare ReLU's sigma'_perp with sign(z) sign(W q)^T / 2 for uniform weights.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        seed: Seed.

    Returns:
        ``mismatch`` and ``predicted``, the share of entries that differ and its expectation given
        W; ``score``, their distance in standard errors over examples; ``count``, the number of
        entries that differ; ``frobenius`` and ``operator``, the norms of the difference over n.

    Example:
        >>> cell = sign_cell(40, 0.75, 0.0, 0)
        >>> cell["frobenius"] == cell["count"] ** 0.5 / 30
        True
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    W = TwoLayerNetwork.random(d, m, seed=seed).W
    wrong = mismatches(data, W)
    predicted = float(mismatch_probability(data, W).mean())
    # Entries of one example share its z; examples are independent given W.
    shares = wrong.double().mean(dim=1)
    error = float(shares.std()) / n**0.5
    count = float(wrong.sum())
    return {
        "mismatch": count / (n * m),
        "predicted": predicted,
        "score": abs(float(shares.mean()) - predicted) / error if error else 0.0,
        "count": count,
        "frobenius": count**0.5 / n,
        "operator": operator_norm(wrong * sign_pattern(data, W)) / n,
    }


def rescaled(data: SpikedData, factor: float) -> SpikedData:
    """Multiply all data by a positive factor: t X = t X_B + (t zeta) z q^T.

    Args:
        data: The data.
        factor: The factor t.

    Raises:
        ValueError: If ``factor`` is not positive.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> torch.allclose(rescaled(data, 3.0).X_B, 3.0 * data.X_B)
        True
    """
    t = checks.positive("factor", factor)
    eigenvalues = None if data.eigenvalues is None else t**2 * data.eigenvalues
    return SpikedData(t * data.X, data.z, data.q, t * data.zeta, eigenvalues)


def bulk_scale(d: int, alpha: float) -> float:
    """Compute sqrt(tr(Sigma_hat) / d), the size of a preactivation without its spike.

    It is 1 for alpha = 0 and of order d^(-alpha/2) for alpha < 1.

    Args:
        d: Number of features.
        alpha: Decay exponent of the bulk.

    Raises:
        ValueError: If ``d`` is less than 1 or ``alpha`` is negative.

    Example:
        >>> bulk_scale(1000, 0.0), round(bulk_scale(1000, 5 / 9), 3)
        (1.0, 0.216)
    """
    d, alpha = checks.positive_integer("d", d), checks.nonnegative("alpha", alpha)
    return math.sqrt(float((torch.arange(1, d + 1, dtype=torch.float64) ** -alpha).mean()))


def suppression(case: Scenario, factor: float = 1.0) -> dict[str, float]:
    """Measure the residue spike's share in the gradient, on data multiplied by a factor.

    Network and residue stay what they are: only the slopes see the new scale.

    Args:
        case: The scenario.
        factor: The factor, positive.

    Returns:
        ``share`` = |S1| / s_1(G); ``u1_residue``, the alignment of G's top left singular vector
        with X_B^T r; ``S12``, ``S2`` and ``E``, each over |S1|.

    Raises:
        ValueError: If ``factor`` is not positive.

    Source: Low Rank Gradients, Figure 2 (its "relative residue contribution"; our reading).

    Example:
        >>> case = scenario(40, nu=0.25, activation="relu")
        >>> one, ten = (suppression(case, t)["share"] for t in (1.0, 10.0))
        >>> abs(one - ten) < 1e-12
        True
    """
    data = rescaled(case.data, factor)
    parts = decompose(data, case.network, case.residue)
    top = leading_singular_triplets(parts.G, 1)
    S1 = parts.S1.norm
    return {
        "share": S1 / float(top.s[0]),
        "u1_residue": alignment(top.U[:, 0], parts.S1.u),
        "S12": parts.S12.norm / S1,
        "S2": parts.S2.norm / S1,
        "E": operator_norm(parts.E) / S1,
    }


def suppression_cell(
    d: int, nu: float, alpha: float, activation: str, residue: str, scale: str, seed: int
) -> dict[str, float]:
    """Measure ``suppression`` at one size, on data as drawn or with preactivations of size one.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        scale: ``"drawn"``; ``"unit"``, data divided by ``bulk_scale``; ``"sharp"``, ten times that.
        seed: Seed.

    Returns:
        What ``suppression`` returns.

    Raises:
        ValueError: If a name is unknown or a number out of range.
    """
    factors = {"drawn": 1.0, "unit": 1 / bulk_scale(d, alpha), "sharp": 10 / bulk_scale(d, alpha)}
    factor = factors[checks.choice("scale", scale, factors)]
    case = scenario(d, nu=nu, alpha=alpha, activation=activation, residue=residue, seed=seed)
    return suppression(case, factor)


def slope_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``relu-slopes``: norms on either side of the threshold."""
    series = [
        *product(BELOW, ("relu", "softplus", "tanh"), ["uniform"]),
        *product(ABOVE, ["relu"], ["uniform"]),
        *product([(0.125, 0.0), (0.375, 0.0)], ["softplus"], ["spike"]),
    ]
    return tuple(
        dict(d=d, nu=nu, alpha=alpha, activation=activation, weights=weights, seed=seed)
        for seed, d, ((nu, alpha), activation, weights) in product(range(12), SIZES, series)
    )


def sign_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``relu-signs``: above, at and below the threshold."""
    series = (*ABOVE, (1.0, 0.0), (0.5, 0.0), (0.25, 0.5), (0.25, 0.0), (0.125, 5 / 9))
    return tuple(
        dict(d=d, nu=nu, alpha=alpha, seed=seed)
        for seed, d, (nu, alpha) in product(range(24), SIZES, series)
    )


def figure_2_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``figure-2``: the paper's sizes, three scales, and alpha = 0."""
    # The figure itself has more seeds: a network's own residue scatters.
    series = [
        *product(range(96), [5 / 9], ["drawn"]),
        *product(range(24), [5 / 9], ("unit", "sharp")),
        *product(range(24), [0.0], ["drawn"]),
    ]
    return tuple(
        dict(d=1000, nu=0.125, alpha=alpha, activation=a, residue="network", scale=scale, seed=seed)
        for (seed, alpha, scale), a in product(series, ("relu", "elu", "silu", "softplus"))
    )


def suppression_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``relu-suppression``: rates of S2 against S1."""
    series = [
        *product([(0.125, 5 / 9), (0.125, 0.4)], ("relu", "softplus", "silu")),
        # Control: above the threshold of Proposition 3.1.
        ((0.75, 0.0), "relu"),
    ]
    return tuple(
        dict(d=d, nu=nu, alpha=alpha, activation=a, residue="offset", scale="drawn", seed=seed)
        for seed, d, ((nu, alpha), a) in product(range(40), SIZES, series)
    )
