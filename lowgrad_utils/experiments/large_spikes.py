"""Large spikes (Theorem 3.2, Figure 3): the gradient's part along q, for many kinds of weights."""

import math
from collections.abc import Callable
from itertools import islice, product

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import (
    RESIDUES,
    Scenario,
    paper_sizes,
    residue_by_name,
)
from lowgrad_utils.gradients import RankOne, decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, sample_targets
from lowgrad_utils.training import gradient_descent

#: Sizes d, residues and weights of the grids; the activations whose mean slope vanishes as the
#: spike grows.
SIZES, BETAS = (250, 400, 640, 1000), ("beta=0", "beta=0.5", "beta=1")
DEPENDENT, EVEN = ("orthogonal", "near-q", "data", "trained"), ("tanh", "sigmoid", "erf")


def _orthogonal(data: SpikedData, network: TwoLayerNetwork, seed: int) -> Tensor:
    return normalise_rows(network.W - torch.outer(network.W @ data.q, data.q))


def _from_data(data: SpikedData, network: TwoLayerNetwork, seed: int) -> Tensor:
    stream = checks.random_stream(seed, "rows from the data")
    return normalise_rows(data.X[torch.randint(data.n, (network.m,), generator=stream)])


def _trained(data: SpikedData, network: TwoLayerNetwork, seed: int) -> Tensor:
    """Take five steps of gradient descent with normalised rows on the squared loss."""
    y = sample_targets(data.X, seed=seed).y
    # Along q the loss has curvature of order gamma^2 m zeta^2 = zeta^2, so that 1 / zeta^2 is a
    # stable step; eta is in units of 1 / gamma.
    eta = network.gamma / data.zeta**2
    states = gradient_descent(data.X, y, network, eta=eta, normalisation="rows")
    return next(islice(states, 5, None)).network.W


#: Weights by name, from data, a network with uniform rows, and a seed. All but "uniform" know the
#: data: "orthogonal" and "near-q" (uniform plus q, a cosine of 0.71) and "spike" through q, "data"
#: (rows are normalised examples) and "trained" (five steps of descent) through X itself.
WEIGHTS: dict[str, Callable[[SpikedData, TwoLayerNetwork, int], Tensor]] = {
    "uniform": lambda data, network, seed: network.W,
    "orthogonal": _orthogonal,
    "near-q": lambda data, network, seed: normalise_rows(network.W + data.q),
    "spike": lambda data, network, seed: normalise_rows(data.q.expand(network.m, data.d)),
    "data": _from_data,
    "trained": _trained,
}


def quadratic_residue(data: SpikedData, beta: float = 1.4) -> Tensor:
    """Compute a residue of length sqrt(n) that knows z^2 well and z little.

    r = sqrt(n) (c e + sqrt(1 - c^2) h) with e along z, c = d^(-beta/2) and h along z^2 - 1 less
    its part along z. Knowing z^2 is what makes the data spike S2 large.

    Args:
        data: Data with their spike component z.
        beta: Alignment exponent, at least 0.

    Raises:
        ValueError: If ``beta`` is negative.

    Source: Low Rank Gradients, Equation 7 (the case that it is for).

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.5)
        >>> r = quadratic_residue(data, beta=1.0)
        >>> round(float(r @ data.z / (r.norm() * data.z.norm())) ** 2, 6)
        0.025
    """
    cosine = data.d ** (-checks.nonnegative("beta", beta) / 2)
    along = data.z / data.z.norm()
    square = data.z.square() - 1
    square = square - (square @ along) * along
    return data.n**0.5 * (cosine * along + (1 - cosine**2) ** 0.5 * square / square.norm())


def unseen_residue(data: SpikedData) -> Tensor:
    """Compute a residue that lives where neurons along +q are off: r_i = 1 if z_i < 0, else 0.

    It meets Assumption 5, and Assumption 6 with beta = 0.

    Args:
        data: Data with their spike component z.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.5)
        >>> bool((unseen_residue(data)[data.z > 0] == 0).all())
        True
    """
    return (data.z < 0).to(data.z)


def leading_residue(data: SpikedData) -> Tensor:
    """Compute the residue of length sqrt(n) along the top left singular vector of the bulk X_B.

    It makes |X_B^T r| as large as it can be, |X_B| |r|, and so meets the upper end of |S1|.

    Args:
        data: Data with their spike.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.5)
        >>> r = leading_residue(data)
        >>> round(float(data.bulk_times(r).norm() / r.norm()) / operator_norm(data.X_B), 6)
        1.0
    """
    return data.n**0.5 * leading_singular_triplets(data.X_B, 1).U[:, 0]


_BUILT: dict[str, Callable[[SpikedData], Tensor]] = {
    "quadratic": quadratic_residue,
    "unseen": unseen_residue,
    "leading": leading_residue,
}


def large_spike_scenario(
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    activation: str = "relu",
    weights: str = "uniform",
    residue: str = "network",
    seed: int = 0,
) -> Scenario:
    """Draw one experiment of Theorem 3.2 with weights that may know the data.

    Squared loss, NTK scaling and triple-index targets, as in Figure 3.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        weights: A key of ``WEIGHTS``.
        residue: A key of ``RESIDUES``, ``"beta=..."`` for a given alignment, ``"quadratic"``,
            ``"unseen"`` or ``"leading"``.
        seed: One integer; data, network, targets and residue draw from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Theorem 3.2 and Figure 3.

    Example:
        >>> case = large_spike_scenario(40, nu=0.75, weights="orthogonal")
        >>> bool((case.network.W @ case.data.q).abs().max() < 1e-12)
        True
    """
    choose = WEIGHTS[checks.choice("weights", weights, WEIGHTS)]
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    network = TwoLayerNetwork(choose(data, network, seed), network.a, activation)
    r = _residue(data, network, residue, seed)
    return Scenario(data, network, r, decompose(data, network, r))


def _residue(data: SpikedData, network: TwoLayerNetwork, name: str, seed: int) -> Tensor:
    if name in _BUILT:
        return _BUILT[name](data)
    if not name.startswith("beta="):
        checks.choice("residue", name, [*RESIDUES, *_BUILT, "beta=..."])
    return residue_by_name(data, network, name, seed=seed)


def turned_scenario(
    d: int,
    *,
    nu: float,
    cosine: float,
    activation: str = "relu",
    residue: str = "beta=0.5",
    seed: int = 0,
) -> Scenario:
    """Draw an experiment in which every neuron is at the same angle to q.

    w_j = cosine q + sqrt(1 - cosine^2) v_j with v_j uniform on the sphere orthogonal to q.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent; the bulk is isotropic.
        cosine: w_j^T q, between 0 and 1.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> case = turned_scenario(40, nu=0.75, cosine=0.6)
        >>> torch.allclose(case.network.W @ case.data.q, torch.full((50,), 0.6).double())
        True
    """
    if checks.nonnegative("cosine", cosine) > 1:
        raise ValueError(f"cosine is {cosine:g}, but at most 1 is needed")
    case = large_spike_scenario(
        d, nu=nu, activation=activation, weights="orthogonal", residue=residue, seed=seed
    )
    rest = (1 - cosine**2) ** 0.5 * case.network.W
    W = normalise_rows(rest + cosine * case.data.q)
    network = TwoLayerNetwork(W, case.network.a, activation)
    r = _residue(case.data, network, residue, seed)
    return Scenario(case.data, network, r, decompose(case.data, network, r))


def lipschitz_constant(activation: str) -> float:
    """Compute L = sup |sigma'|, the Lipschitz constant of the activation.

    Largest value on a grid of step 1e-3 over [-40, 40], good to 1e-6; beyond it every sigma' of
    the book is constant to rounding.

    Args:
        activation: A key of ``ACTIVATIONS``.

    Raises:
        ValueError: If the activation is unknown.

    Source: Low Rank Gradients, Assumption 4.2.

    Example:
        >>> [round(lipschitz_constant(name), 4) for name in ("relu", "sigmoid", "silu")]
        [1.0, 0.25, 1.0998]
    """
    sigma = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)]
    t = torch.arange(-40_000, 40_001, dtype=torch.float64) / 1000
    return float(sigma.derivative(t).abs().max())


def remainder(case: Scenario) -> Tensor:
    """Form E_L = G - S12 - S2 = S1 + E, the gradient less its q part, d x m.

    Args:
        case: The scenario.

    Source: Low Rank Gradients, Theorem 3.2.

    Example:
        >>> case = large_spike_scenario(40, nu=0.75)
        >>> torch.allclose(remainder(case), case.parts.S1.matrix() + case.parts.E)
        True
    """
    part = q_part(case)
    return torch.addr(case.parts.G, part.u, part.v, alpha=-1)


def q_part(case: Scenario) -> RankOne:
    """Add up S12 + S2 = (gamma zeta/n) q (z^T [(r a^T) o sigma'(X W^T)]), of rank one.

    The sum does not depend on mu, although each term does.

    Args:
        case: The scenario.

    Source: Low Rank Gradients, Section 3.

    Example:
        >>> case = large_spike_scenario(40, nu=0.75)
        >>> together = case.parts.S12.matrix() + case.parts.S2.matrix()
        >>> torch.allclose(q_part(case).matrix(), together)
        True
    """
    q, S12, S2 = case.data.q, case.parts.S12, case.parts.S2
    return RankOne(q, (q @ S12.u) * S12.v + (q @ S2.u) * S2.v)


def remainder_bound(case: Scenario) -> float:
    """Compute the bound (gamma/n) |X_B| L |r| sqrt(m) on |E_L|, with constant 1.

    E_L = (gamma/n) X_B^T [(r a^T) o sigma'(X W^T)], and the bracket has entries of at most
    L |r_i|, so its Frobenius norm is at most L |r| sqrt(m). Neither smoothness of sigma' nor
    independence of W and X is used.

    Args:
        case: The scenario.

    Source: Low Rank Gradients, Theorem 3.2 (its display is restored).

    Example:
        >>> case = large_spike_scenario(40, nu=0.75)
        >>> operator_norm(remainder(case)) <= remainder_bound(case)
        True
    """
    network, data = case.network, case.data
    L = lipschitz_constant(network.activation)
    scale = network.gamma / data.n * network.m**0.5
    return scale * operator_norm(data.X_B) * L * float(case.residue.norm())


def measure_large_spike(case: Scenario) -> dict[str, float]:
    """Measure what Theorem 3.2 speaks of.

    Args:
        case: The scenario.

    Returns:
        Plain numbers: ``E_L`` and its ``bound``; norms ``S12``, ``S2`` and ``q_part`` (of S12 +
        S2); ``s1`` of G, whose other singular values are at most |E_L| (Weyl); ``u1_q``, the
        alignment of G's top left singular vector with q; ``gamma_r``, gamma |r|; ``mu_rms``, |mu| /
        sqrt(m); ``equation_7``, the left side of Equation 7 over its right side,
        sqrt(n) |r| |W| log n.
    """
    data, network, parts, r = case.data, case.network, case.parts, case.residue
    top = leading_singular_triplets(parts.G, 1)
    right = data.n**0.5 * r.norm() * operator_norm(network.W) * math.log(data.n)
    values = {
        "E_L": operator_norm(remainder(case)),
        "bound": remainder_bound(case),
        "S12": parts.S12.norm,
        "S2": parts.S2.norm,
        "q_part": q_part(case).norm,
        "s1": top.s[0],
        "u1_q": alignment(top.U[:, 0], data.q),
        "gamma_r": network.gamma * r.norm(),
        "mu_rms": parts.S1.v.norm() / network.m**0.5,
        "equation_7": parts.S2.v.norm() / right,
    }
    return {name: float(value) for name, value in values.items()}


def large_spike_cell(
    d: int, nu: float, alpha: float, activation: str, residue: str, weights: str, seed: int
) -> dict[str, float]:
    """Measure one cell of the grids behind Theorem 3.2 and Figure 3.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        weights: A key of ``WEIGHTS``.
        seed: Seed.

    Returns:
        What ``measure_large_spike`` returns.
    """
    case = large_spike_scenario(
        d, nu=nu, alpha=alpha, activation=activation, weights=weights, residue=residue, seed=seed
    )
    return measure_large_spike(case)


def large_spike_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind Theorem 3.2: sizes by seeds by series.

    Example:
        >>> len({tuple(cell) for cell in large_spike_cells()})
        1
    """
    smooth_or_not = ("relu", "softplus")
    series = [
        # The rate, with residues of given beta; independent weights.
        *product((0.5, 0.75, 1.0), [0.0], smooth_or_not, BETAS, ["uniform"]),
        *product([0.625], [0.0], [*smooth_or_not, "silu"], ["beta=0.5"], ["uniform"]),
        *product([0.75], [0.5], ["relu"], ["beta=0.5"], ["uniform", "near-q"]),
        # Weights that know the data.
        *product((0.5, 0.75), [0.0], ["relu"], ["beta=0.5"], DEPENDENT),
        *product([0.75], [0.0], ["softplus"], ["beta=0.5"], DEPENDENT),
        *product([0.75], [0.0], ["relu"], ["network"], ["uniform", *DEPENDENT]),
        # Below beta/2, without and with Equation 7.
        *product([0.5], [0.0], smooth_or_not, ["beta=1.4", "quadratic"], ["uniform"]),
        # S12 and S2 cancel: a residue that no neuron sees.
        *product([0.75], [0.0], smooth_or_not, ["unseen"], ["near-q"]),
        *product((0.5, 0.75, 1.0), [0.0], ["tanh"], ["beta=0.5"], ["uniform"]),
    ]
    # Where all neurons see z with one sign, or z^T r is as small as chance, S12 + S2 scatters with
    # the residue: more seeds.
    scattered = [
        *((*row, "beta=0.5", "near-q") for row in product((0.5, 0.75), [0.0], ["relu"])),
        (0.75, 0.0, "softplus", "beta=0.5", "near-q"),
        (0.75, 0.5, "relu", "beta=0.5", "near-q"),
        *product((0.75, 1.0), [0.0], smooth_or_not, ["beta=1"], ["uniform"]),
    ]
    return _cells(SIZES, series, range(8)) + _cells(SIZES, scattered, range(8, 24))


def saturated_cells() -> tuple[dict, ...]:
    """List the cells of the control: slopes that die out along q, so that mu tends to 0.

    Few examples stay active, a share of about 1 / zeta, and E_L scatters with them: many seeds.

    Example:
        >>> {cell["weights"] for cell in saturated_cells()}
        {'near-q'}
    """
    series = product([0.625], [0.0], EVEN, ["beta=0.5"], ["near-q"])
    return _cells(SIZES, list(series), range(48))


def figure_3_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind Figure 3: panels by seeds at d = 1000.

    Example:
        >>> {cell["nu"] for cell in figure_3_cells()}
        {0.75}
    """
    activations = ("relu", "elu", "softplus", "silu", "tanh", "sigmoid")
    weights = ("uniform", "orthogonal", "near-q", "data")
    return _cells(
        [1000], list(product([0.75], [0.0], activations, ["network"], weights)), range(16)
    )


def _cells(sizes, series, seeds) -> tuple[dict, ...]:
    names = ("nu", "alpha", "activation", "residue", "weights")
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in product(seeds, sizes, series)
    )
