"""Filters: how far the rank-two picture of the untied gradient survives weight tying (Remark 1)."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.convolutions import (
    FilterGradient,
    convolutional_network,
    expand_filter,
    filter_gradient,
    tie,
    tie_rank_one,
)
from lowgrad_utils.experiments.initialisation import PSI_1, RESIDUES, Scenario
from lowgrad_utils.gradients import RankOne, closed_form_gradient, decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spectra import operator_norm, principal_angles
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data

#: Sizes d over which the chapter fits exponents.
SIZES = (250, 400, 640, 1000)


@dataclass(frozen=True)
class FilterCase:
    """A filter at initialisation, as a two-layer network with tied weights.

    Attributes:
        w: The filter, a unit vector of length k.
        case: Data, network, residue and the untied gradient's pieces.
        gradient: The filter's gradient and its two given vectors.
    """

    w: Tensor = field(repr=False)
    case: Scenario
    gradient: FilterGradient


def random_filters(k: int, count: int, *, seed: int | torch.Generator = 0) -> Tensor:
    """Draw filters uniformly on the sphere, count x k.

    Args:
        k: Length of a filter.
        count: Number of filters.
        seed: Integer seed or generator.

    Raises:
        ValueError: If a number is not a whole number of at least one.

    Example:
        >>> random_filters(5, 2).shape
        torch.Size([2, 5])
    """
    k, count = checks.positive_integer("k", k), checks.positive_integer("count", count)
    stream = checks.random_stream(seed, "filter")
    return normalise_rows(torch.randn(count, k, generator=stream, dtype=torch.float64))


def _signs(count: int, seed: int) -> Tensor:
    stream = checks.random_stream(seed, "readout")
    return 2.0 * torch.randint(0, 2, (count,), generator=stream).double() - 1


def filter_scenario(
    d: int,
    k: int,
    *,
    nu: float = 0.125,
    alpha: float = 0.0,
    activation: str = "relu",
    residue: str = "network",
    seed: int = 0,
) -> FilterCase:
    """Draw data and one filter with a random readout, and map the untied gradient to the filter.

    Args:
        d: Length of the input; n = 0.75 d examples, m = d - k + 1 positions.
        k: Length of the filter, at most d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk; its eigenvectors are the positions of the input.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES`` (squared loss).
        seed: One integer; data, filter, readout, targets and residue draw from separate streams.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> filter_scenario(40, 5).gradient.g.shape
        torch.Size([5])
    """
    checks.choice("residue", residue, RESIDUES)
    d, k = checks.positive_integer("d", d), checks.positive_integer("k", k)
    if k > d:
        raise ValueError(f"k is {k}, but at most d = {d} is needed")
    data = sample_spiked_data(round(PSI_1 * d), d, nu=nu, alpha=alpha, seed=seed)
    w = random_filters(k, 1, seed=seed)[0]
    network = convolutional_network(w, _signs(d - k + 1, seed), activation=activation)
    r = RESIDUES[residue](data, network, "mse", seed)
    parts = decompose(data, network, r)
    return FilterCase(w, Scenario(data, network, r, parts), filter_gradient(parts))


def _slope_moments(data: SpikedData, network: TwoLayerNetwork) -> tuple[Tensor, Tensor]:
    """Variance and second moment of each neuron's slope."""
    s = data.preactivation_scale(network.W)
    second = network.sigma.mean_square_slope(s)
    return second - network.sigma.mu(s).square(), second


def slope_share(data: SpikedData, network: TwoLayerNetwork) -> float:
    """Compute sqrt( sum_j Var sigma'(w_j^T x) / sum_j E sigma'(w_j^T x)^2 ), between 0 and 1.

    The share of E in the gradient's Frobenius norm for a residue that knows nothing of an
    isotropic bulk: both are sums of independent terms, with sigma'_perp and sigma' as weights.

    Args:
        data: Data with a known covariance.
        network: The network.

    Raises:
        ValueError: If the data's covariance is unknown.

    Example:
        >>> case = filter_scenario(40, 5, activation="relu").case
        >>> round(slope_share(case.data, case.network), 4)
        0.7071
    """
    variance, second = _slope_moments(data, network)
    return math.sqrt(float(variance.sum() / second.sum()))


def sine_to_span(g: Tensor, vectors: Tensor) -> float:
    """Compute the sine of the angle between g and the span of some vectors, between 0 and 1.

    Args:
        g: A vector of length k.
        vectors: One a column, k x l.

    Raises:
        ValueError: If lengths differ or an entry is NaN or infinite.

    Example:
        >>> e = torch.eye(3).double()
        >>> round(sine_to_span(e[0] + e[1], e[:, :1]), 4)
        0.7071
    """
    return math.sin(float(principal_angles(checks.vector("g", g)[:, None], vectors)[0]))


def own_direction(case: FilterCase) -> tuple[float, float]:
    """Measure how much of E's image lies along the filter itself, beside its prediction.

    E[x sigma'_perp(w^T x)] = c w for an isotropic bulk (Stein), so that the image of E has the
    part gamma c mean(r) (sum_j a_j) w.

    Args:
        case: The filter's case; the prediction is for alpha = 0.

    Returns:
        w^T rest and gamma mean(r) sum_j a_j c_j, both over |g|.

    Example:
        >>> measured, predicted = own_direction(filter_scenario(400, 9, residue="offset"))
        >>> measured * predicted > 0
        True
    """
    network, length = case.case.network, float(case.gradient.g.norm())
    c = network.sigma.c(case.case.data.preactivation_scale(network.W))
    predicted = network.gamma * float(case.case.residue.mean()) * float(network.a @ c)
    return float(case.w @ case.gradient.rest) / length, predicted / length


def filter_cell(
    d: int, k: int, nu: float, alpha: float, activation: str, residue: str, seed: int
) -> dict[str, float]:
    """Measure how near a filter's gradient lies to the span of the two given vectors.

    Args:
        d: Length of the input.
        k: Length of the filter, at least 3: two vectors span everything otherwise.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        seed: Seed.

    Returns:
        ``sine`` of the angle between g and the span; ``sine_random``, to two random vectors;
        ``sine_own``, to the span with the filter added; ``rest`` = |rest| / |g|; ``frobenius`` and
        ``operator``, |E| / |G| in both norms; ``predicted``, ``slope_share``; ``own`` and
        ``own_predicted``, ``own_direction``; ``W_norm``, the operator norm of W.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Remark 1.
    """
    if checks.positive_integer("k", k) < 3:
        raise ValueError(f"k is {k}, but at least 3 is needed: two vectors span a plane")
    filtered = filter_scenario(
        d, k, nu=nu, alpha=alpha, activation=activation, residue=residue, seed=seed
    )
    gradient, case = filtered.gradient, filtered.case
    stream = checks.random_stream(seed, "two vectors")
    own, own_predicted = own_direction(filtered)
    g, span = gradient.g, gradient.span
    return {
        "sine": sine_to_span(g, span),
        "sine_random": sine_to_span(g, torch.randn(k, 2, generator=stream, dtype=g.dtype)),
        "sine_own": sine_to_span(g, torch.column_stack([span, filtered.w])),
        "rest": float(gradient.rest.norm() / g.norm()),
        "frobenius": float(case.parts.E.norm() / case.parts.G.norm()),
        "operator": operator_norm(case.parts.E) / operator_norm(case.parts.G),
        "predicted": slope_share(case.data, case.network),
        "own": own,
        "own_predicted": own_predicted,
        "W_norm": operator_norm(case.network.W),
    }


@dataclass(frozen=True)
class ChannelGradients:
    """The gradients of several filters and what a parameter-free model takes them for.

    Attributes:
        filters: Unit vectors, one a row, channels x k.
        g: The gradients, one a column, k x channels.
        shared: The images of S1 + S12, k x channels.
        noise: Standard deviation of E's image in a direction across its filter, for a residue that
            knows nothing: (gamma/n) |r| sqrt( sum_j Var sigma' ), over a channel's positions.
    """

    filters: Tensor = field(repr=False)
    g: Tensor = field(repr=False)
    shared: Tensor = field(repr=False)
    noise: float


def channel_gradients(
    d: int,
    k: int,
    channels: int,
    *,
    nu: float = 0.125,
    activation: str = "softplus",
    readout: str = "signs",
    residue: str = "network",
    seed: int = 0,
) -> ChannelGradients:
    """Compute the gradients of several filters at once.

    Args:
        d: Length of the input; n = 0.75 d.
        k: Length of a filter.
        channels: Number of filters.
        nu: Spike exponent; the bulk is isotropic.
        activation: A key of ``ACTIVATIONS``.
        readout: ``"signs"`` (a random sign for each position and channel) or ``"pooled"`` (one for
            each channel: the positions are averaged).
        residue: A key of ``RESIDUES``.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> channel_gradients(40, 5, 3).g.shape
        torch.Size([5, 3])
    """
    checks.choice("readout", readout, ("signs", "pooled"))
    checks.choice("residue", residue, RESIDUES)
    checks.choice("activation", activation, ACTIVATIONS)
    filters = random_filters(k, channels, seed=seed)
    m = d - k + 1
    signs = _signs(channels * m, seed).reshape(channels, m)
    if readout == "pooled":
        signs = signs[:, :1].expand(channels, m)
    W = torch.cat([expand_filter(w, d) for w in filters])
    network = TwoLayerNetwork(W, signs.flatten(), activation)
    data = sample_spiked_data(round(PSI_1 * d), d, nu=nu, seed=seed)
    r = RESIDUES[residue](data, network, "mse", seed)
    G = closed_form_gradient(data.X, network, r)
    # S1 + S12 = (gamma/n) X^T r (a o mu)^T: all channels have the left factor in common.
    scale, right = network.gamma / data.n, network.a * network.mu(data)
    left = scale * (data.X.T @ r)
    variance = float(_slope_moments(data, network)[0].mean())
    return ChannelGradients(
        filters=filters,
        g=torch.stack([tie(block) for block in G.split(m, dim=1)], dim=1),
        shared=torch.stack([tie_rank_one(RankOne(left, v)) for v in right.split(m)], dim=1),
        noise=scale * float(r.norm()) * math.sqrt(m * variance),
    )


def without_own_direction(gradients: Tensor, filters: Tensor) -> Tensor:
    """Remove from each gradient its part along its own filter, as weight normalisation does.

    Args:
        gradients: One a column, k x channels.
        filters: Unit vectors, one a row, channels x k.

    Raises:
        ValueError: If shapes do not fit or a filter is not of unit length.

    Example:
        >>> w = random_filters(5, 2)
        >>> bool(without_own_direction(w.T, w).abs().max() < 1e-12)
        True
    """
    checks.matrix("gradients", gradients, rows=filters.shape[1], columns=filters.shape[0])
    checks.unit_rows("filters", filters)
    return gradients - filters.T * (filters.T * gradients).sum(dim=0)


def top_two_share(A: Tensor) -> float:
    """Compute (s_1^2 + s_2^2) / |A|_F^2, the share of a matrix in its two leading directions.

    Args:
        A: A matrix.

    Raises:
        ValueError: If A is not a finite matrix, or is zero.

    Example:
        >>> top_two_share(torch.eye(4).double())
        0.5
    """
    energy = torch.linalg.svdvals(checks.matrix("A", A)).square()
    if energy.sum() == 0:
        raise ValueError("A is zero, so it has no directions")
    return float(energy[:2].sum() / energy.sum())


def channel_cell(
    d: int, k: int, channels: int, activation: str, residue: str, readout: str, seed: int
) -> dict[str, float]:
    """Measure how much of the matrix of filter gradients lies in its top two directions.

    Args:
        d: Length of the input.
        k: Length of a filter.
        channels: Number of filters.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        readout: ``"signs"`` or ``"pooled"``.
        seed: Seed.

    Returns:
        ``share`` of the gradients; ``tangent``, without the parts along the filters themselves;
        ``predicted``, the same of ``shared`` plus independent Gaussians of size ``noise`` in place
        of E; and ``gaussian`` of these Gaussians alone.
    """
    case = channel_gradients(
        d, k, channels, activation=activation, residue=residue, readout=readout, seed=seed
    )
    stream = checks.random_stream(seed, "gaussian matrix")
    gaussian = torch.randn(case.g.shape, generator=stream, dtype=case.g.dtype)
    model = case.shared + case.noise * gaussian
    return {
        "share": top_two_share(case.g),
        "tangent": top_two_share(without_own_direction(case.g, case.filters)),
        "predicted": top_two_share(without_own_direction(model, case.filters)),
        "gaussian": top_two_share(gaussian),
    }


def toeplitz_norm(k: int, *, seed: int | torch.Generator = 0, refinement: int = 16) -> float:
    """Compute max_f |sum_l w_l exp(2 pi i f l)| for a random unit filter: its W's norm as d grows.

    Args:
        k: Length of the filter.
        seed: Integer seed or generator.
        refinement: Frequencies per 1/k at which the transform is evaluated.

    Raises:
        ValueError: If a number is not a whole number of at least one.

    Example:
        >>> toeplitz_norm(1)
        1.0
    """
    w = random_filters(k, 1, seed=seed)[0]
    length = k * checks.positive_integer("refinement", refinement)
    return float(torch.fft.rfft(w, n=length).abs().max())


def filter_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``filters``: over d with k = 25 and with k = d/4."""
    names = ("relu", "softplus", "sigmoid")
    series = [
        *product([0.0], names, ("network", "independent", "offset"), ("fixed", "growing")),
        *product([0.5], names, ["independent"], ["growing"]),
    ]
    return tuple(
        dict(
            d=d,
            k=25 if length == "fixed" else d // 4,
            nu=0.125,
            alpha=alpha,
            activation=activation,
            residue=residue,
            seed=seed,
        )
        for seed, d, (alpha, activation, residue, length) in product(range(16), SIZES, series)
    )


def channel_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``filter-channels``: 16 filters, two residues and readouts."""
    series = product(
        range(24), ("relu", "softplus", "tanh"), ("independent", "network"), ("signs", "pooled")
    )
    return tuple(
        dict(d=400, k=32, channels=16, activation=a, residue=r, readout=readout, seed=seed)
        for seed, a, r, readout in series
    )
