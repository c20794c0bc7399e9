"""Weight decay (Proposition 4.1): the gradient's spikes against the bulk lambda W^T."""

import math
from itertools import product

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import Scenario
from lowgrad_utils.experiments.large_spikes import (
    large_spike_scenario,
    lipschitz_constant,
    q_part,
)
from lowgrad_utils.networks import normalise_rows
from lowgrad_utils.random_matrices import spiked_singular_value
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm

#: Sizes d, decay exponents of the bulk and multiples of a spike's norm of the grids.
SIZES, ALPHAS = (250, 400, 640, 1000), (0.0, 0.25, 0.5, 0.75)
FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.75, 0.9, 1.0, 1.2, 1.5)

#: An alignment of 1/sqrt(2) means that u_1 lies halfway, at 45 degrees from the spike.
HALF = math.sqrt(0.5)


def spike_bounds(case: Scenario) -> dict[str, float]:
    """Compute Proposition 4.1's bounds on |S1|, |S12| and |S2| with constants.

    With rho = |r| / sqrt(n), L = sup |sigma'|, b = |z^T r| / (sqrt(n) |r|):

        |S1| <= rho L (|X_B| / sqrt(n)) gamma sqrt(m)
        |S12| <= rho L b zeta gamma sqrt(m)
        |S2| <= rho L (|z| / sqrt(n)) zeta gamma sqrt(m)

    They hold for every case, not only with high probability. The third one uses |sigma'_perp| <= L,
    which is true of every activation of the book.

    Args:
        case: The scenario.

    Returns:
        The bounds by the names ``S1``, ``S12`` and ``S2``.

    Source: Low Rank Gradients, Proposition 4.1; constants derived.

    Example:
        >>> case = large_spike_scenario(40, nu=0.5, activation="tanh")
        >>> case.parts.S2.norm <= spike_bounds(case)["S2"]
        True
    """
    data, network, r = case.data, case.network, case.residue
    root = math.sqrt(data.n)
    common = float(r.norm()) / root * lipschitz_constant(network.activation)
    common *= network.gamma * math.sqrt(network.m)
    aligned = float(abs(data.z @ r) / (root * r.norm()))
    return {
        "S1": common * operator_norm(data.X_B) / root,
        "S12": common * aligned * data.zeta,
        "S2": common * data.zeta * float(data.z.norm()) / root,
    }


def decayed(case: Scenario, decay: float) -> Tensor:
    """Form the gradient with weight decay, G + lambda W^T, d x m.

    Args:
        case: The scenario.
        decay: lambda, at least 0.

    Raises:
        ValueError: If ``decay`` is negative.

    Source: Low Rank Gradients, Section 4 (G + lambda W in the paper's shape).

    Example:
        >>> case = large_spike_scenario(40, nu=0.5)
        >>> torch.equal(decayed(case, 0.0), case.parts.G)
        True
    """
    return torch.add(case.parts.G, case.network.W.T, alpha=checks.nonnegative("decay", decay))


def alignments_under_decay(case: Scenario, decay: float) -> tuple[float, float]:
    """Measure u_1 of the decayed gradient against the two spikes.

    Args:
        case: The scenario.
        decay: lambda, at least 0.

    Returns:
        Alignment of u_1 with X_B^T r and with q.

    Raises:
        ValueError: If ``decay`` is negative.

    Example:
        >>> case = large_spike_scenario(40, nu=1.0, residue="beta=0")
        >>> alignments_under_decay(case, 0.0)[1] > 0.99 > alignments_under_decay(case, 1e3)[1]
        True
    """
    u = leading_singular_triplets(decayed(case, decay), 1).U[:, 0]
    return alignment(u, case.parts.S1.u), alignment(u, case.data.q)


def spike_norm(case: Scenario, spike: str) -> float:
    """Return the norm of S1 (``"residue"``) or of S12 + S2 (``"q"``).

    Args:
        case: The scenario.
        spike: ``"residue"`` or ``"q"``.

    Raises:
        ValueError: If ``spike`` is neither.
    """
    checks.choice("spike", spike, ("residue", "q"))
    return case.parts.S1.norm if spike == "residue" else q_part(case).norm


def decay_threshold(case: Scenario, spike: str) -> float:
    """Find the lambda at which u_1 has turned 45 degrees away from a spike.

    Bisection of the logarithm between 0.2 and 3 times the spike's norm, to about 2 %.

    Args:
        case: The scenario.
        spike: ``"residue"`` (direction X_B^T r, norm |S1|) or ``"q"`` (norm |S12 + S2|).

    Returns:
        The threshold, or 0 if u_1 is not within 45 degrees of the spike already at 0.2.

    Raises:
        ValueError: If ``spike`` is neither.

    Example:
        >>> case = large_spike_scenario(80, nu=1.0, residue="beta=0")
        >>> 0.4 < decay_threshold(case, "q") / spike_norm(case, "q") < 1
        True
    """
    norm = spike_norm(case, spike)
    index = 0 if spike == "residue" else 1
    low, high = 0.2 * norm, 3 * norm
    if alignments_under_decay(case, low)[index] < HALF:
        return 0.0
    for _ in range(6):
        middle = math.sqrt(low * high)
        if alignments_under_decay(case, middle)[index] < HALF:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def predicted_alignment(case: Scenario, decay: float, spike: str) -> float:
    """Predict u_1's alignment with a spike by taking lambda W^T + E for an i.i.d. bulk.

    Rows uniform on the sphere have entries of variance 1/d, so an entry of the bulk has variance
    v = lambda^2 / d + |E|_F^2 / (d m), and the spike has the strength theta = norm / sqrt(v m)
    against a bulk of entries of variance 1/m. It survives iff theta > (d/m)^(1/4), which without
    E is norm > lambda (m/d)^(1/4).

    Args:
        case: The scenario, with d <= m and weights that do not know the data.
        decay: lambda, at least 0.
        spike: ``"residue"`` or ``"q"``.

    Returns:
        The predicted |u_1^T u| for the spike's direction u.

    Raises:
        ValueError: If ``decay`` is negative or ``spike`` unknown.

    Source: Benaych-Georges and Nadakuditi (2012), Section 3.1.

    Example:
        >>> case = large_spike_scenario(80, nu=1.0, residue="beta=0")
        >>> predicted_alignment(case, 10 * spike_norm(case, "q"), "q")
        0.0
    """
    d, m = case.data.d, case.network.m
    decay = checks.nonnegative("decay", decay)
    variance = decay**2 / d + float(case.parts.E.square().sum()) / (d * m)
    theta = spike_norm(case, spike) / math.sqrt(variance * m)
    return math.sqrt(spiked_singular_value(theta, d / m).left)


def normalised_step(W: Tensor, gradient: Tensor, *, step: float, decay: float) -> Tensor:
    """Take one step of decayed gradient descent on W and normalise its rows.

    With unit rows, w - step (g + decay w) = (1 - step decay)(w - step / (1 - step decay) g): after
    normalising, decay is nothing but a longer step.

    Args:
        W: Inner weights, m x d, rows of unit length.
        gradient: G without decay, d x m.
        step: Step size, positive.
        decay: lambda, at least 0.

    Raises:
        ValueError: If shapes do not fit, ``step`` is not positive, ``decay`` is negative, or
            ``step * decay`` is 1 or more, where the step turns the rows around.

    Source: Low Rank Gradients, Sections 3.4 and 4 put together.

    Example:
        >>> case = large_spike_scenario(40, nu=0.5)
        >>> W, G = case.network.W, case.parts.G
        >>> with_decay = normalised_step(W, G, step=0.5, decay=1.0)
        >>> torch.allclose(with_decay, normalised_step(W, G, step=1.0, decay=0.0))
        True
    """
    m, d = checks.unit_rows("W", checks.matrix("W", W)).shape
    checks.matrix("gradient", gradient, rows=d, columns=m)
    step, decay = checks.positive("step", step), checks.nonnegative("decay", decay)
    if step * decay >= 1:
        raise ValueError(f"step * decay is {step * decay:g}, but less than 1 is needed")
    return normalise_rows(W - step * (gradient.T + decay * W))


def bounds_cell(
    d: int, nu: float, alpha: float, activation: str, residue: str, weights: str, seed: int
) -> dict[str, float]:
    """Measure one cell of the grid behind Proposition 4.1's bounds.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        weights: A key of ``WEIGHTS``.
        seed: Seed.

    Returns:
        Plain numbers: norms ``S1``, ``S12``, ``S2``, each with its ``..._bound``; ``unit``, gamma
        sqrt(m); ``z_alignment``, |z^T r| / (sqrt(n) |r|).
    """
    case = _case(d, nu, alpha, activation, residue, weights, seed)
    data, parts, r = case.data, case.parts, case.residue
    values = {
        "S1": parts.S1.norm,
        "S12": parts.S12.norm,
        "S2": parts.S2.norm,
        "unit": case.network.gamma * math.sqrt(case.network.m),
        "z_alignment": abs(data.z @ r) / (data.n**0.5 * r.norm()),
    }
    values |= {f"{name}_bound": bound for name, bound in spike_bounds(case).items()}
    return {name: float(value) for name, value in values.items()}


def threshold_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    residue: str,
    weights: str,
    spike: str,
    seed: int,
) -> dict[str, float]:
    """Measure at which decay a spike is lost.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        weights: A key of ``WEIGHTS``.
        spike: ``"residue"`` or ``"q"``.
        seed: Seed.

    Returns:
        Plain numbers: ``threshold``, as in ``decay_threshold``, and ``norm`` of the spike.
    """
    case = _case(d, nu, alpha, activation, residue, weights, seed)
    return {"threshold": decay_threshold(case, spike), "norm": float(spike_norm(case, spike))}


def power_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    residue: str,
    weights: str,
    power: float,
    seed: int,
) -> dict[str, float]:
    """Measure what is left of the spikes at the decay lambda |W| = gamma sqrt(m) n^power.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        weights: A key of ``WEIGHTS``.
        power: The power of n.
        seed: Seed.

    Returns:
        Plain numbers: ``u1_residue``, ``u1_q``, alignments of u_1 with X_B^T r and with q.
    """
    case = _case(d, nu, alpha, activation, residue, weights, seed)
    along_residue, along_q = alignments_under_decay(case, decay_at(case, power))
    return {"u1_residue": along_residue, "u1_q": along_q}


def decay_at(case: Scenario, power: float) -> float:
    """Compute the lambda with lambda |W| = gamma sqrt(m) n^power.

    Args:
        case: The scenario.
        power: The power of n.

    Example:
        >>> case = large_spike_scenario(40, nu=0.5)
        >>> round(decay_at(case, 0.0) * operator_norm(case.network.W), 6)
        1.0
    """
    network = case.network
    unit = network.gamma * math.sqrt(network.m)
    return unit * case.data.n**power / operator_norm(network.W)


def curve_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    residue: str,
    weights: str,
    spike: str,
    fraction: float,
    seed: int,
) -> dict[str, float]:
    """Measure and predict u_1's alignment with a spike at lambda = fraction times its norm.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``large_spike_scenario``.
        weights: A key of ``WEIGHTS``.
        spike: ``"residue"`` or ``"q"``.
        fraction: lambda over the spike's norm.
        seed: Seed.

    Returns:
        Plain numbers: ``measured`` and ``predicted`` alignment.
    """
    case = _case(d, nu, alpha, activation, residue, weights, seed)
    decay = fraction * spike_norm(case, spike)
    measured = alignments_under_decay(case, decay)[0 if spike == "residue" else 1]
    return {"measured": measured, "predicted": predicted_alignment(case, decay, spike)}


def _case(d, nu, alpha, activation, residue, weights, seed) -> Scenario:
    return large_spike_scenario(
        d, nu=nu, alpha=alpha, activation=activation, weights=weights, residue=residue, seed=seed
    )


def bounds_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind Proposition 4.1's bounds.

    Example:
        >>> sorted({cell["d"] for cell in bounds_cells()})
        [160, 250, 400, 640]
    """
    activations = ("relu", "softplus", "silu", "tanh")
    series = [
        *product((0.0, 0.25, 0.75), (0.0, 0.5), activations, ["offset", "leading"], ["uniform"]),
        *product((0.25, 0.75), [0.0], ["relu", "tanh"], ["beta=0.5"], ["uniform"]),
        # S2 at its bound: slopes that are sign(z), and a residue of constant sign.
        *product((0.25, 0.75), [0.0], ["relu"], ["offset"], ["near-q"]),
    ]
    # Without |r| = O(sqrt n): under NTK scaling a large spike makes the outputs grow.
    broken = [(1.5, 0.0, "relu", "network", "uniform")]
    names = ("nu", "alpha", "activation", "residue", "weights")
    sizes = (160, 250, 400, 640)
    return _cells(names, sizes, series, range(8)) + _cells(names, sizes, broken, range(48))


def threshold_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind the powers of the thresholds.

    Example:
        >>> {cell["spike"] for cell in threshold_cells()} == {"residue", "q"}
        True
    """
    series = [
        *product([0.0], ALPHAS, ["softplus"], ["independent"], ["uniform"], ["residue"]),
        (0.0, 0.5, "softplus", "leading", "uniform", "residue"),
        *product((0.25, 0.5, 0.75), [0.0], ["relu"], ["beta=0"], ["uniform"], ["q"]),
        (0.75, 0.0, "relu", "beta=0.5", "uniform", "q"),
    ]
    names = ("nu", "alpha", "activation", "residue", "weights", "spike")
    return _cells(names, SIZES, series, range(8))


def power_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind the two conditions of Section 4.

    Example:
        >>> max(cell["power"] for cell in power_cells())
        0.875
    """
    generic = ("softplus", "independent", "uniform")
    spiked = ("relu", "beta=0", "uniform")
    series = [
        # lambda |W| = o(gamma sqrt(m)), then o(gamma sqrt(m) n^(-alpha/2)), then far above.
        *((0.0, alpha, *generic, -max(alpha / 4, 0.125)) for alpha in (0.0, 0.5, 0.75)),
        *((0.0, alpha, *generic, -alpha / 2 - 0.125) for alpha in (0.5, 0.75)),
        (0.0, 0.0, *generic, 0.125),
        # On both sides of gamma sqrt(m) n^nu, with the spikes as large as they can be.
        *((nu, 0.0, *spiked, nu + side) for nu in (0.25, 0.5, 0.75) for side in (-0.125, 0.125)),
        *((0.0, 0.5, "softplus", "leading", "uniform", side) for side in (-0.125, 0.125)),
        # Weights with a direction of their own.
        *((nu, 0.0, "relu", "beta=0", "near-q", nu + 0.125) for nu in (0.25, 0.5, 0.75)),
    ]
    names = ("nu", "alpha", "activation", "residue", "weights", "power")
    return _cells(names, SIZES, series, range(8))


def curve_cells() -> tuple[dict, ...]:
    """List the cells of the grid behind the predicted loss of alignment.

    Example:
        >>> {cell["d"] for cell in curve_cells()}
        {1000}
    """
    cases = [
        (0.0, 0.0, "softplus", "independent", "uniform", "residue"),
        (0.0, 0.5, "softplus", "independent", "uniform", "residue"),
        (0.75, 0.0, "relu", "beta=0", "uniform", "q"),
        # Its residue contains the network's output, and so W.
        (0.0, 0.0, "softplus", "network", "uniform", "residue"),
    ]
    series = [(*case, fraction) for case in cases for fraction in FRACTIONS]
    names = ("nu", "alpha", "activation", "residue", "weights", "spike", "fraction")
    return _cells(names, [1000], series, range(8))


def _cells(names, sizes, series, seeds) -> tuple[dict, ...]:
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in product(seeds, sizes, series)
    )
