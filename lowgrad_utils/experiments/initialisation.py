"""One scenario at initialisation: data, network, residue, and the gradient's pieces measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.datasets import ImageData
from lowgrad_utils.gradients import Decomposition, RankOne, decompose
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork, normalise_rows
from lowgrad_utils.random_matrices import spiked_singular_value
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import (
    SpikedData,
    binary_labels,
    sample_spiked_data,
    sample_targets,
    split_spike,
)

#: n/d and m/d of the paper's figures: n, d, m = 750, 1000, 1250.
PSI_1, PSI_2 = 0.75, 1.25


@dataclass(frozen=True)
class Scenario:
    """Data, network, residue and the gradient's pieces at initialisation.

    Attributes:
        data: The spiked data.
        network: The network at initialisation.
        residue: r, length n.
        parts: The gradient's decomposition.
    """

    data: SpikedData
    network: TwoLayerNetwork
    residue: Tensor = field(repr=False)
    parts: Decomposition


def paper_sizes(d: int) -> tuple[int, int]:
    """Compute (n, m) = (0.75 d, 1.25 d), the proportions of the paper's figures.

    Args:
        d: Number of features.

    Raises:
        ValueError: If ``d`` is not a whole number of at least one.

    Example:
        >>> paper_sizes(1000)
        (750, 1250)
    """
    d = checks.positive_integer("d", d)
    return round(PSI_1 * d), round(PSI_2 * d)


def _residue_on(X: Tensor, y: Tensor, network: TwoLayerNetwork, loss: str) -> Tensor:
    """Compute the residue on real targets, made binary where the loss needs labels."""
    chosen = LOSSES[checks.choice("loss", loss, LOSSES)]
    return chosen.residue(network(X), binary_labels(y) if chosen.binary else y)


def _from_network(data: SpikedData, network: TwoLayerNetwork, loss: str, seed: int) -> Tensor:
    return _residue_on(data.X, sample_targets(data.X, seed=seed).y, network, loss)


def _gaussian(data: SpikedData, seed: int) -> Tensor:
    stream = checks.random_stream(seed, "residue")
    return torch.randn(data.n, generator=stream, dtype=torch.float64)


#: Residues by name. Any r is the residue of some targets (y = f - r for the squared loss), so a
#: hypothesis about r can be met or broken on purpose.
RESIDUES: dict[str, Callable[[SpikedData, TwoLayerNetwork, str, int], Tensor]] = {
    "network": _from_network,
    "independent": lambda data, network, loss, seed: _gaussian(data, seed),
    "offset": lambda data, network, loss, seed: 1 + 0.5 * _gaussian(data, seed),
    "one-example": lambda data, network, loss, seed: torch.eye(1, data.n, dtype=torch.float64)[0],
}


def residue_with_alignment(data: SpikedData, beta: float, *, seed: int = 0) -> Tensor:
    """Draw a residue of length sqrt(n) whose cosine with z is d^(-beta/2).

    Assumption 6's statistic |z^T r| / (sqrt(n) |r|) is then d^(-beta/2) |z| / sqrt(n), and the
    last factor tends to 1.

    Args:
        data: Data with their spike component z.
        beta: Alignment exponent, at least 0.
        seed: Seed of the part orthogonal to z.

    Raises:
        ValueError: If ``beta`` is negative.

    Source: Low Rank Gradients, Assumption 6.
    """
    cosine = data.d ** (-checks.nonnegative("beta", beta) / 2)
    along, noise = data.z / data.z.norm(), _gaussian(data, seed)
    noise = noise - (noise @ along) * along
    return data.n**0.5 * (cosine * along + (1 - cosine**2) ** 0.5 * noise / noise.norm())


def residue_by_name(
    data: SpikedData, network: TwoLayerNetwork, name: str, *, loss: str = "mse", seed: int = 0
) -> Tensor:
    """Draw the residue of a name that a cell can hold.

    Args:
        data: The data.
        network: The network.
        name: A key of ``RESIDUES``, or ``"beta=..."`` for a residue of given alignment.
        loss: A key of ``LOSSES``, for the network's own residue.
        seed: Seed.

    Raises:
        ValueError: If the name is unknown, or the exponent is not a number of at least 0.
    """
    if name.startswith("beta="):
        beta = checks.nonnegative("beta", name.removeprefix("beta="))
        return residue_with_alignment(data, beta, seed=seed)
    return RESIDUES[checks.choice("residue", name, [*RESIDUES, "beta=..."])](
        data, network, loss, seed
    )


def scenario(
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    activation: str = "relu",
    loss: str = "mse",
    scaling: str = "ntk",
    weights: str = "uniform",
    residue: str = "network",
    seed: int = 0,
) -> Scenario:
    """Draw one experiment of the paper's figures at initialisation and split its gradient.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        loss: A key of ``LOSSES``; labels are made binary where it needs them.
        scaling: ``"ntk"`` or ``"mean-field"``.
        weights: ``"uniform"`` (W_S), ``"shifted"`` (W_S + n^(-1/4) 1 q^T, normalised) or
            ``"spike"`` (every row is q).
        residue: A key of ``RESIDUES``, or ``"beta=..."`` for a residue of given alignment.
        seed: One integer; data, network, targets and residue draw from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Figure 1; the targets are the book's own triple-index model.

    Example:
        >>> scenario(40, nu=0.25, activation="tanh").parts.G.shape
        torch.Size([40, 50])
    """
    checks.choice("weights", weights, ("uniform", "shifted", "spike"))
    checks.choice("loss", loss, LOSSES)
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    shift = n**-0.25 * data.q if weights == "shifted" else None
    network = TwoLayerNetwork.random(
        d, m, activation=activation, scaling=scaling, shift=shift, seed=seed
    )
    if weights == "spike":
        rows = normalise_rows(data.q.expand(m, d))
        network = TwoLayerNetwork(rows, network.a, activation, scaling)
    r = residue_by_name(data, network, residue, loss=loss, seed=seed)
    return Scenario(data, network, r, decompose(data, network, r))


def measure(case: Scenario) -> dict[str, float]:
    """Measure norms, singular values and alignments of a gradient and its pieces.

    Args:
        case: The scenario.

    Returns:
        Plain numbers: operator norms ``S1``, ``S12``, ``S2``, ``E``, ``rank_one`` (of S1 + S12)
        and ``rest`` (of S2 + E); ``E_2``, the second singular value of E, since E can have an
        outlier of its own; ``low_1``, ``low_2`` (singular values of S1 + S12 + S2);
        ``s1``, ``s2``, ``s3`` (of G); ``u1_q``, ``u1_residue`` (alignment of G's top left
        singular vector with q and X_B^T r); ``z_alignment`` (|z^T r| / (sqrt(n) |r|));
        ``W_norm`` and ``r_norm``.
    """
    data, parts, r = case.data, case.parts, case.residue
    top = leading_singular_triplets(parts.G, 3)
    rank_one = RankOne(parts.S1.u + parts.S12.u, parts.S1.v)
    rest = torch.addr(parts.E, parts.S2.u, parts.S2.v)
    low = low_rank_singular_values(parts)
    error = leading_singular_triplets(parts.E, 2).s
    values = {
        "S1": parts.S1.norm,
        "S12": parts.S12.norm,
        "S2": parts.S2.norm,
        "E": float(error[0]),
        "E_2": float(error[1]),
        "rank_one": rank_one.norm,
        "rest": operator_norm(rest),
        "low_1": low[0],
        "low_2": low[1],
        "u1_q": alignment(top.U[:, 0], data.q),
        "u1_residue": alignment(top.U[:, 0], parts.S1.u),
        "z_alignment": abs(data.z @ r) / (data.n**0.5 * r.norm()),
        "W_norm": operator_norm(case.network.W),
        "r_norm": r.norm(),
    }
    values |= {f"s{k + 1}": s for k, s in enumerate(top.s)}
    return {name: float(value) for name, value in values.items()}


def low_rank_singular_values(parts: Decomposition) -> Tensor:
    """Compute the two singular values of S1 + S12 + S2 from its factors, descending.

    The sum is U V^T with U = [u_S1, q] and V = [a o mu, v_2]; with U = Q R and V = P T its
    singular values are those of the 2 x 2 matrix R T^T.

    Args:
        parts: The decomposition.

    Example:
        >>> parts = scenario(40, nu=0.25, activation="tanh").parts
        >>> whole = parts.S1.matrix() + parts.S12.matrix() + parts.S2.matrix()
        >>> low = low_rank_singular_values(parts)
        >>> bool(torch.allclose(low, torch.linalg.svdvals(whole)[:2]))
        True
    """
    U = torch.stack([parts.S1.u, parts.S12.u, parts.S2.u], dim=1)
    V = torch.stack([parts.S1.v, parts.S12.v, parts.S2.v], dim=1)
    return torch.linalg.svdvals(torch.linalg.qr(U).R @ torch.linalg.qr(V).R.T)[:2]


def gradient_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    loss: str,
    residue: str,
    weights: str,
    seed: int,
) -> dict[str, float]:
    """Measure one cell of the grids behind Theorem 3.1 and Figure 1 (NTK scaling).

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        loss: A key of ``LOSSES``.
        residue: A key of ``RESIDUES``, or ``"beta=..."``.
        weights: ``"uniform"``, ``"shifted"`` or ``"spike"``.
        seed: Seed.

    Returns:
        What ``measure`` returns.
    """
    return measure(
        scenario(
            d,
            nu=nu,
            alpha=alpha,
            activation=activation,
            loss=loss,
            residue=residue,
            weights=weights,
            seed=seed,
        )
    )


def noisy_image_scenario(
    images: ImageData,
    *,
    n: int = 600,
    m: int = 1000,
    units: str = "0-1",
    centred_targets: bool = False,
    noise: float = 0.0,
    activation: str = "relu",
    seed: int = 0,
) -> Scenario:
    """Draw the experiment of Figure 8 (c, d): images as data, their classes as real targets.

    The spike direction q is the top right singular vector of the clean, uncentred images, with or
    without noise, so that one direction is followed throughout. NTK scaling and squared loss.

    Args:
        images: The data set.
        n: Number of images drawn.
        m: Number of neurons.
        units: ``"0-1"`` or ``"0-255"``, the range of a pixel.
        centred_targets: Subtract the mean from the targets 0 ... 9.
        noise: Variance of the Gaussian noise added to each pixel, at least 0.
        activation: A key of ``ACTIVATIONS``.
        seed: Seed; images, noise and network draw from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Figure 8 (c, d); n, m, units and targets are not in its text.
    """
    X, classes = images.matrix(n=n, units=units, seed=seed)
    y = classes.double()
    if centred_targets:
        y = y - y.mean()
    q = split_spike(X).q
    stream = checks.random_stream(seed, "input noise")
    scale = checks.nonnegative("noise", noise) ** 0.5
    X = X + scale * torch.randn(X.shape, generator=stream, dtype=X.dtype)
    return regression_scenario(split_spike(X, q), y, m=m, activation=activation, seed=seed)


def regression_scenario(
    data: SpikedData,
    y: Tensor,
    *,
    m: int,
    activation: str,
    scaling: str = "ntk",
    seed: int = 0,
) -> Scenario:
    """Draw a network for given data and real targets, with squared loss, and split its gradient.

    Args:
        data: Data with their spike.
        y: Targets, length n.
        m: Number of neurons.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        seed: Seed of the network.

    Raises:
        ValueError: If a name is unknown, m is less than 1, or y does not fit.
    """
    network = TwoLayerNetwork.random(data.d, m, activation=activation, scaling=scaling, seed=seed)
    residue = LOSSES["mse"].residue(network(data.X), y)
    return Scenario(data, network, residue, decompose(data, network, residue))


def spike_overlap(d: int, nu: float, *, seed: int = 0) -> tuple[float, float]:
    """Measure how well X X^T's top eigenvector shows z, beside the prediction for an i.i.d. bulk.

    X / sqrt(d) is an i.i.d. bulk plus a rank-one term of norm zeta |z| / sqrt(d), so the law of
    spiked rectangular matrices gives the overlap in closed form.

    Args:
        d: Number of features; n = 0.75 d.
        nu: Spike exponent; the bulk is isotropic (alpha = 0).
        seed: Seed.

    Returns:
        Measured and predicted |u_1^T z| / |z|.

    Source: Low Rank Gradients, the remark after Assumption 5; Benaych-Georges and Nadakuditi.

    Example:
        >>> measured, predicted = spike_overlap(200, 0.75)
        >>> bool(min(measured, predicted) > 0.99)
        True
    """
    n, _ = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    theta = data.zeta * float(data.z.norm()) / d**0.5
    top = leading_singular_triplets(data.X, 1)
    return alignment(top.U[:, 0], data.z), spiked_singular_value(theta, n / d).left ** 0.5


def output_variance(
    d: int, *, nu: float = 0.0, alpha: float = 0.0, activation: str, scaling: str, seed: int = 0
) -> float:
    """Compute the mean over examples of Var_a f(x_i) = gamma^2 sum_j sigma(w_j^T x_i)^2.

    The variance is over the signs a alone, given W and X, so that it needs no sampling.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        seed: Seed.

    Source: Low Rank Gradients, the remark after Assumption 3.

    Example:
        >>> variance = output_variance(100, activation="sigmoid", scaling="mean-field")
        >>> 0.25 / 125 < variance < 0.3 / 125
        True
    """
    n, m = paper_sizes(d)
    X = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed).X
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    features = network.sigma.value(X @ network.W.T)
    return float(network.gamma**2 * features.square().sum(dim=1).mean())


def residue_concentration(residue: Tensor) -> float:
    """Compute max_i |r_i| sqrt(n) / (|r| log n), which Assumption 5 keeps bounded as n grows.

    Args:
        residue: r, length n, not zero.

    Raises:
        ValueError: If ``residue`` is not a finite vector of two entries or more, or is zero.

    Source: Low Rank Gradients, Assumption 5 (its formula is restored).

    Example:
        >>> round(residue_concentration(torch.ones(100).double()), 3)
        0.217
    """
    n = len(checks.vector("residue", residue))
    norm = float(residue.norm())
    if n < 2 or norm == 0:
        raise ValueError("residue is zero or has one entry, so its concentration is undefined")
    return float(residue.abs().max()) * math.sqrt(n) / (norm * math.log(n))


def initial_residue(
    d: int, *, loss: str, activation: str = "softplus", noise: str = "gaussian", seed: int = 0
) -> Tensor:
    """Draw the residue of a network at initialisation on isotropic data without training.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        loss: A key of ``LOSSES``.
        activation: A key of ``ACTIVATIONS``.
        noise: ``"gaussian"`` or ``"cauchy"`` noise on the targets; the second breaks Assumption 5
            for losses whose residue is not bounded.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown.

    Example:
        >>> initial_residue(40, loss="huber").abs().max() <= 1
        tensor(True)
    """
    checks.choice("noise", noise, ("gaussian", "cauchy"))
    n, m = paper_sizes(d)
    X = sample_spiked_data(n, d, nu=0.0, seed=seed).X
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    y = sample_targets(X, seed=seed).y
    if noise == "cauchy":
        heavy = torch.empty(n, dtype=torch.float64)
        y = y + 0.1 * heavy.cauchy_(generator=checks.random_stream(seed, "heavy tails"))
    return _residue_on(X, y, network, loss)
