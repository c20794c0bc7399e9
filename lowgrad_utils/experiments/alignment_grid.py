"""Assumption 6: how the residue at initialisation aligns with the spike, in 192 scenarios."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import paper_sizes
from lowgrad_utils.networks import (
    ACTIVATIONS,
    LOSSES,
    SCALINGS,
    TwoLayerNetwork,
    gaussian_mean,
)
from lowgrad_utils.rates import root_mean_square_rate
from lowgrad_utils.spiked_data import TARGETS, binary_labels, sample_spiked_data, sample_targets

#: The axes of the grid: 4 x 3 x 2 x 2 x 4 = 192 scenarios.
ACTIVATION_NAMES = ("relu", "elu", "softplus", "tanh")
TARGET_NAMES = ("single-index", "triple-index", "triple-index-even")
SCALING_NAMES = ("ntk", "mean-field")
LOSS_NAMES = ("mse", "logistic")
NUS = (0.0, 0.125, 0.25, 0.375)
#: Sizes d (n = 0.75 d, m = 1.25 d) with the number of draws in a block, and the blocks.
SIZES, BLOCKS = {100: 16, 200: 16, 400: 16, 800: 16, 1600: 4}, tuple(range(24))
_ALONG = "-along-q"
#: The name of the extra target whose single direction is q itself.
ALONG_Q = "single-index" + _ALONG

_NOISE = 0.1


class Case(NamedTuple):
    """One residue measured on the data of a cell.

    Attributes:
        activation: A key of ``ACTIVATIONS``.
        target: A key of ``TARGETS``, or ``ALONG_Q``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        loss: ``"mse"`` or ``"logistic"``.
    """

    activation: str
    target: str
    scaling: str
    loss: str

    @property
    def column(self) -> str:
        """Name of the grid's column that holds the case's statistic."""
        return "/".join(self)


#: The 48 cases that share one draw of X, W and a; times the four values of nu they are the 192.
CASES = tuple(
    Case(*names) for names in product(ACTIVATION_NAMES, TARGET_NAMES, SCALING_NAMES, LOSS_NAMES)
)
#: Extra cases outside the 192: a target along the spike.
ALIGNED_CASES = tuple(
    Case("softplus", ALONG_Q, scaling, loss) for scaling, loss in product(SCALING_NAMES, LOSS_NAMES)
)


def alignments(d: int, nu: float, seed: int) -> dict[str, float]:
    """Measure z^T r / (sqrt(n) |r|), with its sign, for every case on one draw of X, W and a.

    No gradient is needed, and the preactivations X W^T serve all cases.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d. The bulk is isotropic (alpha = 0).
        nu: Spike exponent.
        seed: Seed.

    Returns:
        The statistic of each of ``CASES`` and ``ALIGNED_CASES`` under ``Case.column``.

    Source: Low Rank Gradients, Assumption 6 and Appendix B.4.

    Example:
        >>> len(alignments(20, 0.25, 0))
        52
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, m, seed=seed)
    preactivations = data.X @ network.W.T
    sums = {name: ACTIVATIONS[name].value(preactivations) @ network.a for name in ACTIVATION_NAMES}
    targets = {name: sample_targets(data.X, name, seed=seed).y for name in TARGET_NAMES}
    targets[ALONG_Q] = sample_targets(data.X, "single-index", along=data.q, seed=seed).y
    statistics = {}
    for case in (*CASES, *ALIGNED_CASES):
        loss, y = LOSSES[case.loss], targets[case.target]
        f = SCALINGS[case.scaling](m) * sums[case.activation]
        r = loss.residue(f, binary_labels(y) if loss.binary else y)
        statistics[case.column] = float(data.z @ r / (n**0.5 * r.norm()))
    return statistics


def alignment_cell(d: int, nu: float, draws: int, seed: int) -> dict[str, float]:
    """Average over several draws what the chapter needs of ``alignments``.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        draws: Number of independent draws of everything.
        seed: Seed of the block of draws.

    Returns:
        For each case the root mean square under ``Case.column``; ``small`` and ``large``, the
        share of all random-direction cases and draws below a tenth and above three of the derived
        ``predicted_alignment``; ``small_along_q`` and ``large_along_q``, the same for the targets
        along q, against what is derived for a random direction. Rounded to six digits after the
        point, a hundredth of a percent, so that the stored grid stays small.

    Source: Low Rank Gradients, Assumption 6 and Appendix B.4.
    """
    draws = checks.positive_integer("draws", draws)
    table = pd.DataFrame([alignments(d, nu, draws * seed + k) for k in range(draws)])
    result = dict((table**2).mean() ** 0.5)
    for cases, end in ((CASES, ""), (ALIGNED_CASES, "_along_q")):
        predicted = [predicted_alignment(random_direction(case), d, nu) for case in cases]
        scaled = table[[case.column for case in cases]].abs() / predicted
        result |= {f"small{end}": (scaled < 0.1).mean(axis=None)}
        result |= {f"large{end}": (scaled > 3).mean(axis=None)}
    return {name: round(float(value), 6) for name, value in result.items()}


def random_direction(case: Case) -> Case:
    """Return the case itself, or for a target along q the one with a random direction.

    Args:
        case: The case.

    Example:
        >>> random_direction(ALIGNED_CASES[0]).target
        'single-index'
    """
    return case._replace(target=case.target.removesuffix(_ALONG))


def alignment_cells() -> Iterator[dict[str, float]]:
    """Yield the parameters of the stored grid's cells."""
    for seed, (d, draws), nu in product(BLOCKS, SIZES.items(), NUS):
        yield {"d": d, "nu": nu, "draws": draws, "seed": seed}


def signal_strength(case: Case, *, spread: float = 1.0) -> float:
    """Compute kappa in RMS^2 = 1/n + kappa n^(2 nu) / d, the share that a random direction leaves.

    A target's direction omega has omega^T q of size d^(-1/2), so by Stein's lemma
    E[z g(omega^T x)] = zeta (omega^T q) E g'. The network adds gamma zeta sum_j a_j mu w_j^T q,
    of size zeta mu d^(-1/2) under NTK scaling and m^(-1/2) times that under mean field, which is
    left out. The logistic residue is (tanh(f/2) - y) / 2 exactly. The outputs f have a mean over
    the examples, normal over the draw of a, over which the ratio is averaged.

    Args:
        case: A case whose target directions are drawn at random.
        spread: Standard deviation s of omega^T x and w_j^T x; 1 in the limit of an isotropic bulk.

    Raises:
        ValueError: If a name is unknown or ``spread`` is not positive.

    Source: derived here for Low Rank Gradients, Assumption 6.

    Example:
        >>> even = Case("relu", "triple-index-even", "mean-field", "mse")
        >>> round(signal_strength(even), 3)
        0.0
    """
    spread = checks.positive("spread", spread)
    logistic = checks.choice("loss", case.loss, LOSS_NAMES) == "logistic"
    moments = _target_moments(checks.choice("target", case.target, TARGETS), spread)
    mean, variance, slopes = moments[case.loss]
    f_mean, f_variance, mu = _output_moments(case, spread)
    # The mean of f is normal over the signs a: Gauss-Hermite nodes and weights for N(0, 1).
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    weights = weights / weights.sum()
    b = f_mean * nodes
    if logistic:
        f = b[:, None] + f_variance**0.5 * nodes
        outputs = np.tanh(f / 2)
        network = mu * ((1 - outputs**2) / 2) @ weights
        square = variance + mean**2 + outputs**2 @ weights - 2 * mean * (outputs @ weights)
    else:
        network = np.full_like(b, mu)
        square = variance + f_variance + (b - mean) ** 2
    return float(weights @ ((slopes + network**2) / square))


def predicted_alignment(case: Case, d: int, nu: float) -> float:
    """Predict the root mean square of z^T r / (sqrt(n) |r|) over draws: no fit, no simulation.

    sqrt(1/n + kappa n^(2 nu) / d): the first term is what any residue of length sqrt(n) has by
    chance, the second what random directions share with q.

    Args:
        case: A case whose target directions are drawn at random.
        d: Number of features; n = 0.75 d.
        nu: Spike exponent, below 1/2.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: derived here for Low Rank Gradients, Assumption 6.
    """
    n, _ = paper_sizes(d)
    strength = float(n) ** (2 * checks.nonnegative("nu", nu))
    kappa = signal_strength(case, spread=(1 + strength / d) ** 0.5)
    return (1 / n + kappa * strength / d) ** 0.5


def limit_exponent(case: Case, nu: float) -> float:
    """Compute the beta of the limit: 1 - 2 nu, or 1 where nothing shares a direction with q.

    Args:
        case: A case whose target directions are drawn at random.
        nu: Spike exponent, below 1/2.

    Example:
        >>> limit_exponent(Case("tanh", "triple-index-even", "ntk", "mse"), 0.25)
        0.5
    """
    silent = case.scaling == "mean-field" and case.target == "triple-index-even"
    return 1.0 if silent else 1 - 2 * nu


def exponents(grid: pd.DataFrame, cases: Sequence[Case] = CASES) -> pd.DataFrame:
    """Fit beta = -2 (rate of the root mean square) for each scenario of the grid.

    Args:
        grid: The stored grid ``residue-alignment``.
        cases: Which cases; a target along q is compared with a random direction's law.

    Returns:
        One row a scenario: its names, ``nu``, ``beta`` with ``low`` and ``high`` (95 %),
        ``predicted`` (the same fit to ``predicted_alignment`` at the grid's sizes) and ``limit``.
    """
    rows = []
    for nu, part in grid.groupby("nu"):
        sizes = np.unique(part.d)
        for case in cases:
            rate = root_mean_square_rate(part.d, part[case.column], resamples=400)
            law = random_direction(case)
            curve = [predicted_alignment(law, d, nu) for d in sizes]
            slope = np.polyfit(np.log(sizes), np.log(curve), 1)[0]
            betas = (-2 * rate.slope, -2 * rate.high, -2 * rate.low, -2 * slope)
            rows.append((*case, nu, *betas, limit_exponent(law, nu)))
    names = [*Case._fields, "nu", "beta", "low", "high", "predicted", "limit"]
    return pd.DataFrame(rows, columns=names)


def rms_ratios(grid: pd.DataFrame, cases: Sequence[Case] = CASES) -> pd.DataFrame:
    """Divide the measured root mean squares by the derived ones.

    Args:
        grid: The stored grid ``residue-alignment``.
        cases: Which cases; a target along q is compared with a random direction's law.

    Returns:
        One row a scenario and size: the case's names, ``nu``, ``d``, ``measured``, ``derived``
        and ``ratio``.
    """
    rows = []
    for (d, nu), part in grid.groupby(["d", "nu"]):
        for case in cases:
            measured = float((part[case.column] ** 2).mean() ** 0.5)
            derived = predicted_alignment(random_direction(case), d, nu)
            rows.append((*case, nu, d, measured, derived, measured / derived))
    names = [*Case._fields, "nu", "d", "measured", "derived", "ratio"]
    return pd.DataFrame(rows, columns=names)


def _output_moments(case: Case, spread: float) -> tuple[float, float, float]:
    """Return the scale of f's mean over the examples, f's variance, and its slope mu (NTK)."""
    sigma = ACTIVATIONS[checks.choice("activation", case.activation, ACTIVATIONS)]
    if checks.choice("scaling", case.scaling, SCALING_NAMES) == "mean-field":
        return 0.0, 0.0, 0.0
    s = torch.tensor([spread], dtype=torch.float64)
    mean, square = (
        float(gaussian_mean(f, s)) for f in (sigma.value, lambda x: sigma.value(x) ** 2)
    )
    return mean, square - mean**2, float(sigma.mu(s))


@lru_cache(maxsize=128)
def _target_moments(target: str, spread: float) -> dict[str, tuple[float, float, float]]:
    """Return mean, variance and sum_k (E dy/du_k)^2 of the targets, by loss.

    Stein's lemma gives the mean slope of anything, labels too, as E[u_k y] / s: averaged over
    100 000 antithetic pairs, good to about 0.005.
    """
    links = TARGETS[target]
    stream = checks.random_stream(0, "target moments")
    half = torch.randn(100_000, len(links) + 1, generator=stream, dtype=torch.float64)
    u = torch.cat([half, -half])
    y = sum(link(spread * u[:, k]) for k, link in enumerate(links)) + _NOISE * u[:, -1]
    moments = {}
    for loss, values in (("mse", y), ("logistic", binary_labels(y))):
        slopes = (values - values.mean()) @ u[:, : len(links)] / (len(u) * spread)
        moments[loss] = (float(values.mean()), float(values.var()), float(slopes.square().sum()))
    return moments
