"""Which spike leads the gradient: the paper's rule of thumb, a finer one, and what is measured."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from lowgrad_utils import checks
from lowgrad_utils.experiments.alignment_grid import Case, limit_exponent
from lowgrad_utils.experiments.initialisation import (
    RESIDUES,
    paper_sizes,
    residue_with_alignment,
)
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork
from lowgrad_utils.spectra import alignment, leading_singular_triplets
from lowgrad_utils.spiked_data import (
    TARGETS,
    SpikedData,
    binary_labels,
    sample_spiked_data,
    sample_targets,
)

#: Who leads: the residue spike S1, the data spike along q, or neither alone.
WINNERS = ("residue", "spike", "both")
#: From this alignment of the top left singular vector on, a direction leads alone: within 26
#: degrees, so that what is left over is less than half of it.
ALONE = 0.9


def rule_of_thumb(nu: float, alpha: float, beta: float) -> str:
    """Tell who leads by the paper's rule (without input noise or penalties).

    The residue spike iff 2 nu < min(1/2, beta - alpha, 1 - alpha); the data spike iff
    nu > beta / 2 or nu >= 1/2 (this line is restored); both otherwise.

    Args:
        nu: Spike exponent, at least 0.
        alpha: Decay exponent of the bulk, at least 0.
        beta: Alignment exponent of the residue, at least 0.

    Returns:
        One of ``WINNERS``.

    Raises:
        ValueError: If an exponent is negative.

    Source: Low Rank Gradients, Section 5.

    Example:
        >>> rule_of_thumb(0.1, 0.0, 1.0), rule_of_thumb(0.3, 0.0, 0.4), rule_of_thumb(0.3, 0.0, 1.0)
        ('residue', 'spike', 'both')
    """
    nu, alpha = checks.nonnegative("nu", nu), checks.nonnegative("alpha", alpha)
    beta = checks.nonnegative("beta", beta)
    if 2 * nu < min(0.5, beta - alpha, 1 - alpha):
        return "residue"
    return "spike" if nu > beta / 2 or nu >= 0.5 else "both"


def corrected_rule(nu: float, alpha: float, beta: float) -> str:
    """Tell who leads in the limit: |S1| of a generic residue against |S12| and |S2|.

    |S12|/|S1| has the exponent nu - (beta - alpha)/2 and |S2|/|S1| at most 2 nu - (1 - alpha)/2,
    as for a residue with a mean. Where S2 is as large as that, the residue spike leads iff
    2 nu < min(beta - alpha, (1 - alpha)/2), and q otherwise.

    Args:
        nu: Spike exponent, at least 0.
        alpha: Decay exponent of the bulk, at least 0.
        beta: Alignment exponent of the residue, at least 0.

    Returns:
        ``"residue"`` or ``"spike"``.

    Raises:
        ValueError: If an exponent is negative.

    Source: Low Rank Gradients, Theorem 3.1 (derived forms).

    Example:
        >>> corrected_rule(0.2, 0.5, 1.5), corrected_rule(0.1, 0.5, 1.5)
        ('spike', 'residue')
    """
    nu, alpha = checks.nonnegative("nu", nu), checks.nonnegative("alpha", alpha)
    below = 2 * nu < min(checks.nonnegative("beta", beta) - alpha, (1 - alpha) / 2)
    return "residue" if below else "spike"


def winner(along_residue: float, along_q: float) -> str:
    """Tell who leads from the alignments of a top left singular vector.

    Args:
        along_residue: Alignment with X_B^T r.
        along_q: Alignment with q.

    Returns:
        One of ``WINNERS``; ``"both"`` where neither alignment reaches ``ALONE``. If both do
        (then the two directions are within 52 degrees), the larger one counts.

    Example:
        >>> winner(0.95, 0.2), winner(0.2, 0.95), winner(0.7, 0.7)
        ('residue', 'spike', 'both')
    """
    if max(along_residue, along_q) < ALONE:
        return "both"
    return "residue" if along_residue >= along_q else "spike"


class Spikes(NamedTuple):
    """What the two rank-one pieces of the gradient add up to.

    Attributes:
        along_residue: Alignment of the top left singular vector with X_B^T r.
        along_q: Alignment of the same with q.
        s1: Larger singular value of S1 + S12 + S2.
        s2: Smaller one.
    """

    along_residue: float
    along_q: float
    s1: float
    s2: float


def expected_spikes(data: SpikedData, network: TwoLayerNetwork, residue: torch.Tensor) -> Spikes:
    """Predict the gradient's two spikes without the gradient, from a 2 x 2 matrix.

    S1 + S12 + S2 = (gamma/n) [u (a o mu)^T + zeta q (b a o mu + v)^T] with u = X_B^T r and
    b = z^T r. In v = z^T [(r a^T) o sigma'_perp] the slopes are replaced by their linear part
    plus independent noise: v_j = a_j c_j w_j^T X^T (z o r) + noise of variance
    |z o r|^2 (Var sigma'(s g) - c^2 s^2). No n x m matrix is formed.

    Args:
        data: Data of known covariance.
        network: The network.
        residue: r, length n.

    Returns:
        Alignments and singular values.

    Raises:
        ValueError: If shapes do not fit, the residue is zero, or the covariance is unknown.

    Source: this book.

    Example:
        >>> data = sample_spiked_data(60, 80, nu=0.6)
        >>> network = TwoLayerNetwork.random(80, 100, activation="softplus")
        >>> expected_spikes(data, network, torch.ones(60).double()).along_q > 0.9
        True
    """
    r = checks.vector("residue", residue, length=data.n)
    if not r.any():
        raise ValueError("residue is zero, so the gradient has no spikes")
    sigma, s = network.sigma, data.preactivation_scale(network.W)
    mu, c = sigma.mu(s), sigma.c(s)
    weighted = data.z * r
    linear = c * (network.W @ (data.X.T @ weighted))
    variance = sigma.mean_square_slope(s) - mu**2 - (c * s) ** 2
    noise = weighted.square().sum() * variance.clamp(min=0)
    u = data.bulk_times(r)
    left = torch.stack([u, data.q], dim=1)
    # The signs a drop out of all inner products of right factors.
    right = torch.stack([mu, data.zeta * (weighted.sum() * mu + linear)], dim=1)
    gram = right.T @ right
    gram[1, 1] += data.zeta**2 * noise.sum()
    R = torch.linalg.qr(left).R
    values, vectors = torch.linalg.eigh(R @ gram @ R.T)
    along = (R.T @ vectors[:, -1]).abs() / left.norm(dim=0)
    s2, s1 = values.clamp(min=0).sqrt() * (network.gamma / data.n)
    return Spikes(*(float(x) for x in (*along, s1, s2)))


def winner_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    target: str,
    scaling: str,
    loss: str,
    seed: int,
) -> dict[str, float]:
    """Measure who leads in one case, and predict it without the gradient.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        target: A key of ``TARGETS``, or ``"beta=..."`` for a residue of given alignment with z,
            which needs no loss.
        scaling: ``"ntk"`` or ``"mean-field"``.
        loss: A key of ``LOSSES``.
        seed: Seed.

    Returns:
        ``u1_residue`` and ``u1_q``, the measured alignments; ``expected_residue`` and
        ``expected_q`` of ``expected_spikes``; ``z_alignment`` = |z^T r| / (sqrt(n) |r|);
        ``ratio`` = log10 of |S12 + S2| / |S1|; ``rest`` = log10 of |E| over the larger of the two.
        Four digits after the point.

    Source: Low Rank Gradients, Section 5.
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    r = winner_residue(data, network, target, loss, seed)
    parts = decompose(data, network, r)
    top = leading_singular_triplets(parts.G, 1).U[:, 0]
    along_q = parts.S12.v * (parts.S12.u @ data.q) + parts.S2.v * (parts.S2.u @ data.q)
    spike = float(along_q.norm())
    expected = expected_spikes(data, network, r)
    values = {
        "u1_residue": alignment(top, parts.S1.u),
        "u1_q": alignment(top, data.q),
        "expected_residue": expected.along_residue,
        "expected_q": expected.along_q,
        "z_alignment": float(abs(data.z @ r) / (data.n**0.5 * r.norm())),
        "ratio": math.log10(spike / parts.S1.norm),
        "rest": math.log10(
            float(leading_singular_triplets(parts.E, 1).s[0]) / max(spike, parts.S1.norm)
        ),
    }
    return {name: round(value, 4) for name, value in values.items()}


def winner_residue(
    data: SpikedData, network: TwoLayerNetwork, target: str, loss: str, seed: int
) -> torch.Tensor:
    """Draw the residue of a case: of the network on targets, or of prescribed alignment.

    Args:
        data: The data.
        network: The network.
        target: A key of ``TARGETS``, or ``"beta=..."``.
        loss: A key of ``LOSSES``.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown or beta is negative.
    """
    if target.startswith("beta="):
        return residue_with_alignment(data, float(target.removeprefix("beta=")), seed=seed)
    if target == "offset":
        return RESIDUES[target](data, network, loss, seed)
    checks.choice("target", target, (*TARGETS, "offset"))
    chosen = LOSSES[checks.choice("loss", loss, LOSSES)]
    y = sample_targets(data.X, target, seed=seed).y
    return chosen.residue(network(data.X), binary_labels(y) if chosen.binary else y)


def case_exponent(target: str, scaling: str, nu: float) -> float:
    """Return the beta of a case: prescribed, or 1 - 2 nu or 1 as the chapter on Assumption 6 finds.

    Args:
        target: A key of ``TARGETS``, or ``"beta=..."``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        nu: Spike exponent; from 1/2 on beta is 0 unless it is 1.

    Example:
        >>> case_exponent("beta=0.3", "ntk", 0.1), case_exponent("single-index", "ntk", 0.1)
        (0.3, 0.8)
    """
    if target.startswith("beta="):
        return float(target.removeprefix("beta="))
    if target == "offset":
        return 1.0
    return max(0.0, limit_exponent(Case("relu", target, scaling, "mse"), nu))


#: The axes of the grids. No case lies on a threshold of the rule; seed 0 served as a pilot.
NUS, ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6), (0.0, 0.25, 0.5)
ACTIVATION_NAMES = ("relu", "softplus", "tanh")
PRESCRIBED = ("beta=0.15", "beta=0.35", "beta=0.75", "beta=1.1", "beta=1.5", "offset")
SIZE, SEEDS = 400, (1, 2, 3, 4, 5)


def natural_cells() -> Iterator[dict[str, float | str]]:
    """Yield the cells of the grid with residues of networks: 648 cases, 5 seeds."""
    return _cells(tuple(TARGETS), ("ntk", "mean-field"), ("mse", "logistic"))


def prescribed_cells() -> Iterator[dict[str, float | str]]:
    """Yield the cells of the grid with prescribed residues: 324 cases, 5 seeds."""
    return _cells(PRESCRIBED, ("ntk",), ("mse",))


def _cells(targets, scalings, losses) -> Iterator[dict[str, float | str]]:
    names = ("seed", "nu", "alpha", "activation", "target", "scaling", "loss")
    for row in product(SEEDS, NUS, ALPHAS, ACTIVATION_NAMES, targets, scalings, losses):
        seed, *case = row
        yield {"d": SIZE, **dict(zip(names[1:], case)), "seed": seed}


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Add each rule's word and the measured one to a grid of cases.

    Args:
        frame: Rows of ``winner_cell`` with their parameters.

    Returns:
        The frame with ``beta`` and the words (of ``WINNERS``) ``measured``; ``rule``,
        ``corrected`` and ``finer``; and ``rule_own``, the rule with the draw's own exponent
        -2 log(z_alignment) / log(d) in the place of the law's. ``wrong_spike``: the rule names one
        spike and the other leads alone.
    """
    beta = list(map(case_exponent, frame.target, frame.scaling, frame.nu))
    own = -2 * np.log(frame.z_alignment.clip(1e-4, 1)) / np.log(frame.d)
    words = {
        "measured": map(winner, frame.u1_residue, frame.u1_q),
        "rule": map(rule_of_thumb, frame.nu, frame.alpha, beta),
        "rule_own": map(rule_of_thumb, frame.nu, frame.alpha, own),
        "corrected": map(corrected_rule, frame.nu, frame.alpha, beta),
        "finer": map(winner, frame.expected_residue, frame.expected_q),
    }
    judged = frame.assign(beta=beta, **{name: list(word) for name, word in words.items()})
    alone = (judged["rule"] != "both") & (judged["measured"] != "both")
    return judged.assign(wrong_spike=alone & (judged["rule"] != judged["measured"]))


def confusion(frame: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Count cases by a rule's word (rows) and the measured one (columns).

    Args:
        frame: What ``judge`` returns.
        rule: ``"rule"``, ``"rule_own"``, ``"corrected"`` or ``"finer"``.

    Raises:
        ValueError: If the rule is unknown.
    """
    checks.choice("rule", rule, ("rule", "rule_own", "corrected", "finer"))
    table = pd.crosstab(frame[rule], frame["measured"])
    return table.reindex(index=WINNERS, columns=WINNERS, fill_value=0)
