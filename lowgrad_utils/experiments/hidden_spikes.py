"""The third spike: what is hidden in E, and whether the gradient shows two outliers or three."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.special import hermite_polynomial_he

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import (
    Scenario,
    paper_sizes,
    residue_by_name,
)
from lowgrad_utils.gradient_law import derivative_kernel, gradient_law
from lowgrad_utils.gradients import RankOne, decompose
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.random_matrices import SampleCovariance
from lowgrad_utils.spectra import (
    alignment,
    count_outliers,
    leading_singular_triplets,
    operator_norm,
)
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data
from lowgrad_utils.third_spike import (
    hidden_spike,
    norm_spike,
    shared_matrix,
    slope_moments,
    spike_eigenvalues,
    spike_pair,
)

#: Sizes d over which exponents are fitted.
SIZES = (250, 400, 640, 1000)
#: Activations with c != 0, whose E has a third spike, and with even sigma', where c = 0.
CURVED, EVEN = ("relu", "elu", "silu", "gelu", "softplus"), ("tanh", "sigmoid", "erf")
#: Share of the edge by which a value must exceed it to be called an outlier: twice the natural
#: fluctuation n^(-2/3) at the smallest size, so that a value at the edge is never counted.
MARGIN = 0.06


def residue_at_angle(data: SpikedData, angle: float, *, seed: int = 0) -> Tensor:
    """Draw r_i = cos(angle) + sin(angle) e_i with random signs e_i, so that r o z has that angle.

    The mean of r_i^2 is 1. The angle between z and r o z tends to ``angle``: 0 for a constant
    residue, 90 for one without a mean. Up to 45 degrees the residue has one sign.

    Args:
        data: Data with their spike.
        angle: In degrees, from 0 to 90.
        seed: Seed of the signs.

    Raises:
        ValueError: If the angle is not between 0 and 90.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> residue_at_angle(data, 0.0).unique()
        tensor([1.], dtype=torch.float64)
    """
    if not 0 <= angle <= 90:
        raise ValueError(f"angle is {angle:g}, but 0 to 90 degrees are needed")
    stream = checks.random_stream(seed, "residue")
    signs = torch.randn(data.n, generator=stream, dtype=torch.float64).sign()
    return math.cos(math.radians(angle)) + math.sin(math.radians(angle)) * signs


def spike_scenario(
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    activation: str = "softplus",
    scaling: str = "ntk",
    residue: str = "angle=90",
    seed: int = 0,
) -> Scenario:
    """Draw data, network and residue, and split the gradient, as ``scenario`` does.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        residue: ``"angle=..."`` in degrees, a key of ``RESIDUES`` or ``"beta=..."``.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> case = spike_scenario(40, nu=0.25, residue="angle=0")
        >>> float(case.residue.std())
        0.0
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    if residue.startswith("angle="):
        r = residue_at_angle(data, checks.nonnegative("angle", residue[6:]), seed=seed)
    else:
        r = residue_by_name(data, network, residue, seed=seed)
    return Scenario(data, network, r, decompose(data, network, r))


def without(A: Tensor, *terms: RankOne) -> Tensor:
    """Subtract rank-one terms from a matrix.

    Args:
        A: Matrix, d x m.
        *terms: Terms of the same shape.

    Example:
        >>> term = RankOne(torch.ones(2).double(), torch.ones(3).double())
        >>> without(term.matrix(), term).abs().max()
        tensor(0., dtype=torch.float64)
    """
    rest = A.clone()
    for term in terms:
        rest.addr_(term.u, term.v, alpha=-1)
    return rest


def first_order(activation: str) -> int:
    """Tell the least k with E sigma^(k+1) != 0: 2 where sigma' is even, otherwise 1.

    Args:
        activation: A key of ``ACTIVATIONS``.

    Raises:
        ValueError: If it is none of those classified here.

    Example:
        >>> first_order("relu"), first_order("tanh")
        (1, 2)
    """
    return 1 if checks.choice("activation", activation, CURVED + EVEN) in CURVED else 2


def norm_ratio(d: int, nu: float, activation: str, order: int) -> float:
    """Compute the expected |H_k|/|S1|: zeta^k sqrt(E e_k(s)^2 t^(2k) / (k! E mu(s)^2)).

    t = w^T q is one coordinate of a uniform point of the sphere and s^2 = 1 + zeta^2 t^2. As
    zeta^2/d -> 0 it is (|e_k(1)|/mu(1)) sqrt((2k - 1)!!/k!) (zeta^2/d)^(k/2).

    Args:
        d: Number of features; n = 0.75 d, alpha = 0, a residue independent of X_B and z.
        nu: Spike exponent.
        activation: A key of ``ACTIVATIONS``.
        order: k, from 1 to 6.

    Example:
        >>> small, large = norm_ratio(10**9, 0.375, "relu", 1), norm_ratio(10**10, 0.375, "relu", 1)
        >>> round(math.log10(large / small), 2)
        -0.12
    """
    t, weights = sphere_coordinate(d, 257)
    zeta = float(paper_sizes(d)[0]) ** nu
    s = torch.sqrt(1 + (zeta * t).square())
    above = weights @ (slope_moments(activation, s, order) * (zeta * t) ** order).square()
    below = math.factorial(order) * (weights @ slope_moments(activation, s, 0).square())
    return float(above / below) ** 0.5


def permuted_spike(case: Scenario, *, seed: int = 0) -> RankOne:
    """Form H with the entries of z in another order and another direction in place of q.

    Where c = 0 the third derivative's mean takes its place, so that there is something to form.

    Args:
        case: The scenario.
        seed: Seed of the order and of the direction.

    Example:
        >>> case = spike_scenario(40, nu=0.25)
        >>> alignment(permuted_spike(case).u, hidden_spike(*case_arguments(case)).u) < 0.9
        True
    """
    data, stream = case.data, checks.random_stream(seed, "permutation")
    z = data.z[torch.randperm(data.n, generator=stream)]
    q = torch.randn(data.d, generator=stream, dtype=torch.float64)
    s = data.preactivation_scale(case.network.W)
    c = slope_moments(case.network.activation, s, first_order(case.network.activation))
    v = case.network.a * c * (case.network.W @ (q / q.norm()))
    return RankOne(case.network.gamma * data.zeta / data.n * data.bulk_times(case.residue * z), v)


def case_arguments(case: Scenario) -> tuple[SpikedData, TwoLayerNetwork, Tensor]:
    """Return data, network and residue, which the functions of ``third_spike`` take."""
    return case.data, case.network, case.residue


def rest_population(case: Scenario, order: int) -> Tensor:
    """Form T for a column of E - H_1 - ... - H_order, given data and residue.

    For the columns of G itself, T is ``gradient_law``'s (gamma^2 m / n^2) X^T D_r Phi D_r X.
    The slope sigma'(w^T x_i) loses phi_i = sum_k e_k (zeta w^T q)^k He_k(z_i) / k!, which depends
    on w through t = w^T q alone, as does the slope's mean m_i given t: with averages over t the
    kernel is Phi - E m phi^T - E phi m^T + E phi phi^T. Exact for alpha = 0 but for quadrature;
    otherwise w^T Sigma_hat w is replaced by its mean.

    Args:
        case: The scenario with known covariance, W uniform and the residue independent of it.
        order: How many orders to subtract; 0 leaves E.
    """
    data, network = case.data, case.network
    t, weights = sphere_coordinate(data.d, 49)
    along = data.X @ data.q
    across = (data.X.square().sum(dim=1) - along.square()).clamp(min=0).sqrt()
    scale = torch.outer(across, torch.sqrt(1 - t.square()))
    m = shifted_mean(network, torch.outer(along, t), scale, data.d - 1)
    strength = data.zeta * t
    s = torch.sqrt(data.eigenvalues.mean() + strength.square())
    phi = sum(
        torch.outer(
            hermite_polynomial_he(data.z, k),
            slope_moments(network.activation, s, k) * strength**k,
        )
        / math.factorial(k)
        for k in range(order + 1)
    )
    cross = (m * weights) @ phi.T
    kernel = derivative_kernel(data.X @ data.X.T / data.d, network.activation, dimension=data.d)
    kernel = kernel - cross - cross.T + (phi * weights) @ phi.T
    weighted = data.X_B * case.residue[:, None]
    return (network.gamma / data.n) ** 2 * network.m * (weighted.T @ kernel @ weighted)


def sphere_coordinate(dimension: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights for one coordinate of a uniform point of the unit sphere.

    Its density is proportional to (1 - t^2)^((dimension - 3)/2).

    Args:
        dimension: Of the space, at least 6.
        nodes: Number of equidistant nodes.

    Example:
        >>> t, weights = sphere_coordinate(50, 49)
        >>> round(float(weights @ t.square()), 9)
        0.02
    """
    end = min(6.5 / math.sqrt(dimension), 1 - 1e-9)
    t = torch.linspace(-end, end, nodes, dtype=torch.float64)
    weights = (1 - t.square()) ** ((dimension - 3) / 2)
    return t, weights / weights.sum()


def shifted_mean(network: TwoLayerNetwork, shift: Tensor, scale: Tensor, dimension: int) -> Tensor:
    """Compute E sigma'(shift + scale u), u one coordinate of a uniform point of a sphere.

    By parts, E (dimension - 3) u sigma(shift + scale u) / (scale (1 - u^2)), because sigma is
    continuous where ReLU's slope jumps: the trapezoid rule then errs by 1e-4 at most.

    Args:
        network: The network, for its activation.
        shift: Offsets of the preactivation.
        scale: Its scales, positive, of a shape that fits.
        dimension: Of the space, at least 6.

    Example:
        >>> network, one = TwoLayerNetwork.random(3, 4), torch.ones(1).double()
        >>> round(float(shifted_mean(network, 0 * one, one, 50)), 3)
        0.5
    """
    u, weights = sphere_coordinate(dimension, 201)
    weights = weights * (dimension - 3) * u / (1 - u.square())
    # A node at a time: the values of all nodes would not fit into a cache.
    total = sum(w * network.sigma.value(shift + scale * x) for x, w in zip(u, weights))
    return total / scale


def hidden_cell(
    d: int, nu: float, alpha: float, activation: str, residue: str, seed: int
) -> dict[str, float]:
    """Measure what is hidden in E, and what is left of it without its spikes (NTK scaling).

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As for ``spike_scenario``.
        seed: Seed.

    Returns:
        Norms ``S1``, ``H1`` to ``H4``, ``N``; ``E`` and ``E_2`` (its two largest singular values);
        the norms of E without spikes, ``E_H1`` (without the first), ``E_H2`` (two), ``E_H4``
        (four), ``E_N`` (four and N) and ``E_other`` (without ``permuted_spike``); alignments of
        E's top singular pair: ``left`` and ``right`` with its first spike, ``left_1`` and
        ``right_1`` with X_B^T (r o z) and a o Wq, ``left_other`` and ``right_other`` with
        ``permuted_spike``; and the law's ``E_law``, ``E_H1_law``, ``E_H2_law``, ``left_law`` and
        ``right_law``.
    """
    case = spike_scenario(d, nu=nu, alpha=alpha, activation=activation, residue=residue, seed=seed)
    spikes = [hidden_spike(*case_arguments(case), order=k) for k in (1, 2, 3, 4)]
    first, norm = spikes[first_order(activation) - 1], norm_spike(*case_arguments(case))
    E, S1 = case.parts.E, case.parts.S1.norm
    top = leading_singular_triplets(E, 2)
    values = {"S1": S1, "N": norm.norm, "E": top.s[0], "E_2": top.s[1]}
    values |= {f"H{k}": spike.norm for k, spike in enumerate(spikes, 1)}
    values |= {f"E_H{k}": operator_norm(without(E, *spikes[:k])) for k in (1, 2, 4)}
    values["E_N"] = operator_norm(without(E, *spikes, norm))
    other = permuted_spike(case, seed=seed)
    values["E_other"] = operator_norm(without(E, other))
    # Of the first order even where c = 0, so that H itself has no direction.
    order_1 = RankOne(spikes[0].u, case.network.a * (case.network.W @ case.data.q))
    for label, term in (("", first), ("_1", order_1), ("_other", other)):
        values[f"left{label}"] = alignment(top.U[:, 0], term.u)
        values[f"right{label}"] = alignment(top.V[:, 0], term.v)
    return {k: float(v) for k, v in (values | rest_law(case, first)).items()}


def rest_law(case: Scenario, first: RankOne) -> dict[str, float]:
    """Predict the norms of E without spikes, and how E's top singular pair aligns with its first.

    If T's leading eigenvalue l lies past the threshold, s = sqrt(psi(l)), and a left direction u
    is seen with the squared cosine l psi'(l)/psi(l) times that of u with T's eigenvector. The
    right vector of E has the squared cosine psi'(l) with u^T E; the spike's share of that row is
    what u^T T u loses when the spike is subtracted, over l.

    Args:
        case: The scenario.
        first: E's first spike.

    Returns:
        ``E_law``, ``E_H1_law`` and ``E_H2_law``; ``left_law``, ``right_law`` (0 below the
        threshold).
    """
    order = first_order(case.network.activation)
    populations = [rest_population(case, k) for k in (0, 1, 2)]
    law = sample_law(case, populations[0])
    names = ("E_law", "E_H1_law", "E_H2_law")
    values = {name: largest_value(case, T) for name, T in zip(names, populations)}
    values |= {"left_law": 0.0, "right_law": 0.0}
    if law.outliers and first.norm:
        top = law.outliers[0]
        u = leading_singular_triplets(populations[0], 1).U[:, 0]
        lost = float(u @ (populations[0] - populations[order]) @ u) / top.population
        slope = top.overlap * top.value / top.population
        values["left_law"] = top.overlap**0.5 * alignment(u, first.u)
        values["right_law"] = (slope * max(lost, 0.0)) ** 0.5
    return values


def largest_value(case: Scenario, T: Tensor) -> float:
    """Predict the largest singular value: that of the first outlier, or the edge without one.

    Args:
        case: The scenario.
        T: A population matrix, d x d.
    """
    law = sample_law(case, T)
    return math.sqrt(law.outliers[0].value if law.outliers else law.edge)


def sample_law(case: Scenario, T: Tensor) -> SampleCovariance:
    """Return the law of T's sample covariance over the m neurons; its values are squares.

    Args:
        case: The scenario.
        T: A population matrix, d x d.
    """
    return SampleCovariance(torch.linalg.eigvalsh(T).clamp(min=0), case.network.m)


def outlier_cell(d: int, nu: float, activation: str, residue: str, seed: int) -> dict[str, float]:
    """Count the outliers of G and of S1 + E, beside every prediction (alpha = 0, NTK scaling).

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        activation: A key of ``ACTIVATIONS``.
        residue: As for ``spike_scenario``.
        seed: Seed.

    Returns:
        ``edge``, the norm that the law predicts for E without its first two spikes. Over it:
        ``s1`` to ``s4`` of G, and ``law_1`` to ``law_4`` as predicted (1 for what stays in the
        bulk); ``large`` and ``small``, the singular values of S2 + H, and ``large_pair`` and
        ``small_pair`` as the 2 x 2 matrix has them; ``S1``, ``S2`` and ``H``. Counts beyond
        ``MARGIN``: ``seen`` and ``law``, ``bulk_side`` of S1 + E, ``norms`` of |S1|, |S2|, |H|.
    """
    case = spike_scenario(d, nu=nu, activation=activation, residue=residue, seed=seed)
    parts, H = case.parts, hidden_spike(*case_arguments(case))
    law = gradient_law(case.data.X, case.network, case.residue).covariance
    edge = largest_value(case, rest_population(case, 2))
    s = leading_singular_triplets(parts.G, 4).s / edge
    side = leading_singular_triplets(without(parts.G, parts.S12, parts.S2), 4).s / edge
    predicted = [outlier.value**0.5 / edge for outlier in law.outliers[:4]]
    predicted += [1.0] * (4 - len(predicted))
    norms = [parts.S1.norm / edge, parts.S2.norm / edge, H.norm / edge]
    pair, expected = pair_values(parts.S2, H) / edge, spike_pair(*case_arguments(case)) / edge
    values = {"edge": edge, "large": pair[0], "small": pair[1]}
    values |= {"large_pair": expected[0], "small_pair": expected[1]}
    values |= {"S1": norms[0], "S2": norms[1], "H": norms[2]}
    values |= {f"s{k + 1}": s[k] for k in range(4)}
    values |= {f"law_{k + 1}": predicted[k] for k in range(4)}
    for name, numbers in (("seen", s), ("law", predicted), ("bulk_side", side), ("norms", norms)):
        numbers = torch.as_tensor(numbers, dtype=torch.float64)
        values[name] = count_outliers(numbers, 1.0, margin=MARGIN)
    return {name: float(value) for name, value in values.items()}


def pair_values(first: RankOne, second: RankOne) -> Tensor:
    """Compute the two singular values of a sum of two rank-one terms from their factors.

    Args:
        first: One term.
        second: The other, of the same shape.

    Example:
        >>> e = torch.eye(3).double()
        >>> pair_values(RankOne(2 * e[0], e[0]), RankOne(e[1], 3 * e[1]))
        tensor([3.0000, 2.0000], dtype=torch.float64)
    """
    left, right = (
        torch.linalg.qr(torch.stack(pair, dim=1)).R
        for pair in ((first.u, second.u), (first.v, second.v))
    )
    return torch.linalg.svdvals(left @ right.T)


def eigenvalue_cell(d: int, nu: float, residue: str, seed: int) -> dict[str, float]:
    """Compare the extreme eigenvalues of X^T D_r X and of its bulk with their prediction.

    Args:
        d: Number of features; n = 0.75 d, alpha = 0.
        nu: Spike exponent.
        residue: ``"angle=..."`` in degrees, or ``"knows-z"`` (the sign of z^2 - 1).
        seed: Seed.

    Returns:
        In units of d: ``right``, ``left`` (largest and smallest eigenvalue), ``bulk_right``,
        ``bulk_left`` (those of X_B^T D_r X_B), each also as predicted (``..._law``; an outlier
        that is not predicted is NaN); ``right_pair`` and ``left_pair`` from the 2 x 2 matrix; and
        ``second``, the second largest eigenvalue.

    Raises:
        ValueError: If the residue is unknown.

    Example:
        >>> cell = eigenvalue_cell(40, 0.5, "angle=0", 0)
        >>> cell["second"] <= cell["bulk_right"] < cell["right"], cell["left_law"]
        (True, nan)
    """
    data = sample_spiked_data(paper_sizes(d)[0], d, nu=nu, seed=seed)
    if residue == "knows-z":
        r = (data.z.square() - 1).sign()
    else:
        checks.choice("residue", residue.partition("=")[0], ("angle", "knows-z"))
        r = residue_at_angle(data, checks.nonnegative("angle", residue[6:]), seed=seed)
    law = spike_eigenvalues(data, r)
    whole, bulk = (torch.linalg.eigvalsh(X.T @ (r[:, None] * X)) for X in (data.X, data.X_B))
    values = {"right": whole[-1], "second": whole[-2], "left": whole[0]}
    values |= {"bulk_right": bulk[-1], "bulk_left": bulk[0]}
    values |= {"right_law": law.right, "left_law": law.left}
    pair = data.zeta * torch.linalg.eigvalsh(shared_matrix(data, r))
    values |= {"right_pair": pair[1], "left_pair": pair[0]}
    values |= {"bulk_right_law": law.right_edge, "bulk_left_law": law.left_edge}
    return {name: float(value) / d for name, value in values.items()}


def interlacing_excess(case: Scenario) -> float:
    """Compute the largest s_(k+1)(G) - s_k(S1 + E) over s_1(G), positive only by rounding.

    Args:
        case: The scenario.

    Example:
        >>> interlacing_excess(spike_scenario(40, nu=0.5)) < 1e-12
        True
    """
    parts = case.parts
    whole = torch.linalg.svdvals(parts.G)
    side = torch.linalg.svdvals(without(parts.G, parts.S12, parts.S2))
    return float((whole[1:] - side[:-1]).max() / whole[0])


def hidden_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``hidden-spikes``: exponents, and all activations at d = 1000."""
    nus = (0.0, 0.125, 0.25, 0.375, 0.45)
    series = [
        *product(nus, [0.0], ("softplus", "tanh"), ["angle=90"]),
        *product([0.375], [0.0], ("relu", "elu"), ["angle=90"]),
    ]
    single = [
        *product([0.375], [0.0], ("softplus", "tanh"), ("offset", "network")),
        *product([0.375], [0.0], ("silu", "gelu", "sigmoid", "erf"), ("angle=90", "offset")),
        *product([0.375], [0.0], ("relu", "elu"), ["offset"]),
        *product([0.375], [0.5], ("softplus", "relu", "tanh"), ["angle=90"]),
    ]
    names = ("nu", "alpha", "activation", "residue")
    rows = [*product(SIZES, series), *product([1000], single)]
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed} for seed in range(5) for d, row in rows
    )


def outlier_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid ``third-outlier``: angles, sizes and activations."""
    angles = [f"angle={angle}" for angle in (0, 30, 45, 60, 75, 80, 85, 90)]
    rows = [
        *product([1000], (0.25, 0.375, 0.45), ["softplus"], angles),
        *product(SIZES, [0.375], ["softplus"], ("angle=60", "angle=90", "offset", "network")),
        *product([1000], [0.375], ("relu", "silu", "elu", "tanh"), (*angles[::3], "angle=90")),
        *product([1000], [0.45], ["tanh"], ("angle=0", "angle=90")),
        # Residues that know z (the second is a multiple of it): here even slopes share a vector.
        *product([1000], [0.375], ["tanh"], ("network", "beta=0")),
    ]
    # Some series share cells; where z^T D_r z is zero in the mean, its scatter asks for more seeds.
    many = product(SIZES, [0.375], ["softplus"], ["angle=90"], range(4, 16))
    cells = [(*row, seed) for seed in range(4) for row in dict.fromkeys(rows)]
    names = ("d", "nu", "activation", "residue", "seed")
    return tuple(dict(zip(names, cell)) for cell in (*cells, *many))
