"""Input noise: the gradient's pieces under noise, and how much of the residue spike is signal."""

from dataclasses import dataclass
from itertools import product

import torch

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import Scenario, paper_sizes, residue_by_name
from lowgrad_utils.experiments.slopes import slope_deviation
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork
from lowgrad_utils.regularisation import add_input_noise
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import (
    SpikedData,
    bulk_eigenvalues,
    sample_spiked_data,
    sample_targets,
)


@dataclass(frozen=True)
class NoisyScenario(Scenario):
    """A scenario on noisy inputs that remembers the clean ones.

    Attributes:
        clean: The data before the noise; their z, q and zeta are those of the noisy data.
    """

    clean: SpikedData


def noisy_scenario(
    d: int,
    *,
    nu: float,
    tau2: float,
    alpha: float = 0.0,
    activation: str = "relu",
    residue: str = "network",
    seed: int = 0,
) -> NoisyScenario:
    """Draw one experiment of Figure 7 (a, b): noisy inputs, labels of the clean ones.

    NTK scaling, squared loss, rows of W uniform on the sphere. The same seed draws the same clean
    data, weights and noise at every variance.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        tau2: Variance of the noise, at least 0.
        alpha: Decay exponent of the clean bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES`` (``"network"`` is f(x') - y), or ``"beta=..."`` for a
            residue of given alignment with z.
        seed: One integer; everything draws from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Proposition 4.2 and Figure 7 (a, b).

    Example:
        >>> case = noisy_scenario(40, nu=0.125, alpha=0.9, tau2=0.25)
        >>> case.data.X.shape, bool((case.data.X != case.clean.X).all())
        (torch.Size([30, 40]), True)
    """
    n, m = paper_sizes(d)
    clean = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    noisy = add_input_noise(clean, tau2, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    if residue == "network":
        y = sample_targets(clean.X, seed=seed).y
        r = LOSSES["mse"].residue(network(noisy.X), y)
    else:
        r = residue_by_name(clean, network, residue, seed=seed)
    return NoisyScenario(noisy, network, r, decompose(noisy, network, r), clean)


def noise_cell(
    d: int,
    nu: float,
    alpha: float,
    tau2: float,
    activation: str,
    residue: str,
    seed: int,
) -> dict[str, float]:
    """Measure one cell of the grids behind Proposition 4.2 and Figure 7 (a, b).

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the clean bulk.
        tau2: Variance of the noise.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``noisy_scenario``.
        seed: Seed.

    Returns:
        Operator norms ``S1``, ``S12``, ``S2``, ``E`` and ``slopes`` (of sigma'_perp(X' W^T));
        ``u1_q``, ``u1_residue`` and ``u1_clean``, alignments of the gradient's top left singular
        vector with q, X_B'^T r' and the clean X_B^T r'; ``clean``, the alignment of X_B'^T r'
        with X_B^T r'.
    """
    case = noisy_scenario(
        d, nu=nu, alpha=alpha, tau2=tau2, activation=activation, residue=residue, seed=seed
    )
    parts, network, r = case.parts, case.network, case.residue
    slopes = slope_deviation(case.data, network)
    u = leading_singular_triplets(parts.G, 1).U[:, 0]
    noisy_direction, clean_direction = case.data.bulk_times(r), case.clean.bulk_times(r)
    return {
        "S1": parts.S1.norm,
        "S12": parts.S12.norm,
        "S2": parts.S2.norm,
        "E": operator_norm(parts.E),
        "slopes": operator_norm(slopes),
        "u1_q": alignment(u, case.data.q),
        "u1_residue": alignment(u, noisy_direction),
        "u1_clean": alignment(u, clean_direction),
        "clean": alignment(noisy_direction, clean_direction),
    }


def noise_rate_cell(
    d: int,
    nu: float,
    alpha: float,
    rho: float,
    activation: str,
    residue: str,
    seed: int,
) -> dict[str, float]:
    """Measure one cell at noise of variance tau^2 = n^rho.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the clean bulk.
        rho: Exponent of the noise, of either sign.
        activation: A key of ``ACTIVATIONS``.
        residue: As in ``noisy_scenario``.
        seed: Seed.

    Returns:
        What ``noise_cell`` returns.
    """
    tau2 = float(paper_sizes(d)[0]) ** rho
    return noise_cell(d, nu, alpha, tau2, activation, residue, seed)


def predicted_signal(d: int, alpha: float, tau2: float) -> float:
    """Predict which share of |X_B'^T r|^2 is the clean |X_B^T r|^2, for a generic residue.

    For r unrelated to bulk and noise the clean part has the squared length tr(Sigma_hat) |r|^2
    and the noise, almost orthogonal to it, tau^2 d |r|^2.

    Args:
        d: Number of features.
        alpha: Decay exponent of the clean bulk.
        tau2: Variance of the noise.

    Raises:
        ValueError: If a number is out of range.

    Source: this book.

    Example:
        >>> predicted_signal(1000, alpha=0.0, tau2=1.0)
        0.5
    """
    trace = float(bulk_eigenvalues(d, alpha).sum())
    return trace / (trace + checks.nonnegative("tau2", tau2) * d)


def measured_signal(
    d: int, alpha: float, tau2: float, *, residue: str = "generic", seed: int = 0
) -> float:
    """Measure |X_B^T r|^2 / |X_B'^T r|^2, the clean share of the residue spike's squared length.

    Args:
        d: Number of features; n = 0.75 d.
        alpha: Decay exponent of the clean bulk.
        tau2: Variance of the noise.
        residue: ``"generic"`` (independent Gaussian numbers g_i), or ``"bulk"``, which knows the
            leading bulk direction, r_i = (x_B,i)_1 + g_i.
        seed: One integer; data, noise and residue draw from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: this book.

    Example:
        >>> measured_signal(40, alpha=0.5, tau2=0.0)
        1.0
    """
    checks.choice("residue", residue, ("generic", "bulk"))
    clean = sample_spiked_data(paper_sizes(d)[0], d, nu=0.0, alpha=alpha, seed=seed)
    noisy = add_input_noise(clean, tau2, seed=seed)
    stream = checks.random_stream(seed, "residue")
    r = torch.randn(clean.n, generator=stream, dtype=torch.float64)
    if residue == "bulk":
        r = r + clean.X_B[:, 0]
    return float((clean.bulk_times(r).norm() / noisy.bulk_times(r).norm()) ** 2)


#: Variances of the scan behind Figure 7 (a, b).
VARIANCES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 4.0)


def figure_7_noise_cells() -> tuple[dict, ...]:
    """List the cells of Figure 7 (a, b): the paper's sizes, ReLU, 12 seeds, a scan over tau^2."""
    fixed = {"d": 1000, "nu": 1 / 8, "alpha": 8 / 9}
    return tuple(
        {**fixed, "tau2": tau2, "activation": "relu", "residue": "network", "seed": seed}
        for seed, tau2 in product(range(12), VARIANCES)
    )


def noise_rate_cells() -> tuple[dict, ...]:
    """List the cells of the rates of Proposition 4.2: four sizes, 12 seeds."""
    names = ("nu", "alpha", "rho", "activation", "residue")
    steep, wide, slow = (0.125, 8 / 9), (0.375, 0.5), (0.125, 0.5)
    series = [
        *((*steep, rho, a, "offset") for rho in (-0.25, 0.0, 1.75) for a in ("softplus", "relu")),
        *((*wide, rho, a, "offset") for rho in (0.0, 1.0) for a in ("softplus", "relu")),
        # rho < 0 and nu < -rho/2: the bulk's own leading direction outweighs the noise in E.
        *((0.0, 2.0, -0.75, a, "offset") for a in ("softplus", "silu")),
        # Assumption 4.3 broken: mu ~ 1/tau.
        *((*slow, 1.0, a, "offset") for a in ("sigmoid", "tanh")),
        *((*steep, rho, "softplus", "beta=0.5") for rho in (0.0, 0.5, 1.0)),
        *((*steep, rho, "softplus", "beta=0") for rho in (1.0, 1.75)),
        # rho < -alpha: noise below the bulk's smallest eigenvalue.
        (*slow, -1.5, "softplus", "beta=0.5"),
    ]
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in product(range(12), (250, 400, 640, 1000), series)
    )
