"""The Jacobian penalty: its pieces against the residue spike, and when that spike is swallowed."""

import itertools
import math

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import (
    RESIDUES,
    Scenario,
    paper_sizes,
    scenario,
)
from lowgrad_utils.experiments.large_spikes import WEIGHTS
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.regularisation import split_jacobian_penalty
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import sample_spiked_data

#: Left singular directions among which a spike is looked for: the gradient has at most three of
#: its own, the penalty up to three more.
TOP = 6
#: A direction is outside the bulk if more than half of its square lies in the leading space.
OUTSIDE = 0.5


def penalty_scenario(
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    activation: str = "sigmoid",
    scaling: str = "ntk",
    weights: str = "uniform",
    seed: int = 0,
) -> Scenario:
    """Draw one experiment behind Proposition 4.4, with a residue that knows nothing, r_i = g_i.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        weights: ``"uniform"``, or ``"orthogonal"`` (rows uniform on the sphere orthogonal to q,
            so that preactivations stay O(1) at every nu).
        seed: One integer; everything draws from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Proposition 4.4.

    Example:
        >>> case = penalty_scenario(40, nu=0.6, alpha=0.5, weights="orthogonal")
        >>> bool((case.network.W @ case.data.q).abs().max() < 1e-12)
        True
    """
    checks.choice("weights", weights, ("uniform", "orthogonal"))
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    if weights == "orthogonal":
        rows = WEIGHTS["orthogonal"](data, network, seed)
        network = TwoLayerNetwork(rows, network.a, activation, scaling)
    r = RESIDUES["independent"](data, network, "mse", seed)
    return Scenario(data, network, r, decompose(data, network, r))


def penalty_gradient_by_autograd(
    X: Tensor, network: TwoLayerNetwork, *, inputs: bool = False
) -> Tensor:
    """Differentiate (1/2n) sum_i |J_i|^2 in W by automatic differentiation through J_i.

    Args:
        X: Data, n x d; one backward pass a row, so few rows.
        network: The network.
        inputs: Whether J_i is the derivative of f(x_i) in the inputs, not in the weights.

    Returns:
        The gradient, transposed: d x m.

    Raises:
        ValueError: If X does not fit.

    Example:
        >>> from lowgrad_utils.regularisation import jacobian_penalty_gradient
        >>> X, network = torch.eye(3).double(), TwoLayerNetwork.random(3, 4, activation="tanh")
        >>> G = penalty_gradient_by_autograd(X, network)
        >>> torch.allclose(G, jacobian_penalty_gradient(X, network))
        True
    """
    X, W = X.clone().requires_grad_(), network.W.clone().requires_grad_()
    f = TwoLayerNetwork(W, network.a, network.activation, network.scaling)(X)
    if inputs:
        squares = torch.autograd.grad(f.sum(), X, create_graph=True)[0].square().sum()
    else:
        rows = (torch.autograd.grad(value, W, create_graph=True)[0] for value in f)
        squares = sum(row.square().sum() for row in rows)
    return torch.autograd.grad(squares / (2 * len(X)), W)[0].T


def share_of_large_products(case: Scenario) -> float:
    """Compute the share of entries of sigma' o sigma'' above a tenth of its supremum in size.

    Args:
        case: The scenario, whose preactivations X W^T are looked at.

    Source: Low Rank Gradients, the hypothesis of Proposition 4.4 (a constant fraction).

    Example:
        >>> 0.8 < share_of_large_products(penalty_scenario(40, nu=0.1, activation="softplus")) <= 1
        True
    """
    sigma = case.network.sigma

    def product(x: Tensor) -> Tensor:
        return (sigma.derivative(x) * sigma.second_derivative(x)).abs()

    supremum = product(torch.linspace(-10, 10, 4001, dtype=torch.float64)).max()
    large = product(case.data.X @ case.network.W.T) > 0.1 * supremum
    return float(large.double().mean())


def share_outside(A: Tensor, direction: Tensor) -> float:
    """Compute the share of a direction that lies in the span of A's leading left singular vectors.

    That is |U^T v|^2 / |v|^2 with the ``TOP`` leading ones: near 1 for a spike outside the bulk,
    wherever it stands among other spikes, and near 0 once the bulk has swallowed it.

    Args:
        A: Matrix, d x m.
        direction: v, length d, not zero.

    Raises:
        ValueError: If v does not fit or is zero.

    Example:
        >>> A = torch.diag(torch.arange(9.0).double())
        >>> share_outside(A, torch.eye(9).double()[8]), share_outside(A, torch.eye(9).double()[1])
        (1.0, 0.0)
    """
    length = float(checks.vector("direction", direction, length=A.shape[0]).norm())
    if length == 0:
        raise ValueError("direction is zero, so it lies nowhere; a nonzero vector is needed")
    U = leading_singular_triplets(A, min(TOP, *A.shape)).U
    return float((U.T @ (direction / length)).square().sum())


def critical_strength(G: Tensor, penalty: Tensor, direction: Tensor, *, guess: float) -> float:
    """Find the strength at which ``direction`` sinks into the bulk of G + lambda * penalty.

    Bisection of log lambda on ``share_outside`` = ``OUTSIDE``, starting from a bracket around
    ``guess`` that widens until it holds the crossing.

    Args:
        G: Gradient of the loss, d x m; ``direction`` must be outside its bulk.
        penalty: Gradient of the penalty at lambda = 1, d x m.
        direction: The direction to follow, length d.
        guess: Order of magnitude of the answer, positive.

    Returns:
        lambda to 3 %.

    Raises:
        ValueError: If the direction is inside the bulk already without a penalty, or outside it
            at a strength of a thousand times the guess.
    """
    low = high = checks.positive("guess", guess)

    def outside(strength: float) -> bool:
        return share_outside(torch.add(G, penalty, alpha=strength), direction) > OUTSIDE

    if not share_outside(G, direction) > OUTSIDE:
        raise ValueError("direction is in the bulk of G already, so no strength is critical")
    while not outside(low):
        low /= 2
    while outside(high):
        high *= 2
        if high > 1000 * guess:
            raise ValueError("direction is outside the bulk at a thousand times the guess still")
    while high > 1.03 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if outside(middle) else (low, middle)
    return math.sqrt(low * high)


def penalty_cell(
    d: int, nu: float, alpha: float, activation: str, weights: str, scaling: str, seed: int
) -> dict[str, float]:
    """Measure one cell of the grid behind Proposition 4.4, at lambda = 1.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        weights: ``"uniform"`` or ``"orthogonal"``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        seed: Seed.

    Returns:
        Operator norms ``S1`` and ``S3``; singular values of E2:
        ``E2``, ``E2_3`` (the third; the first two can be outliers of its own) and ``E2_rms``
        (root mean square of all d); ``critical``, the strength at which X_B^T r sinks into the
        bulk of G + lambda (S3 + E2); ``top_q`` and ``top_mean``, alignments of the penalty's top
        left singular vector with q and with X_B^T (|x_i|^2)_i.
    """
    case = penalty_scenario(
        d, nu=nu, alpha=alpha, activation=activation, weights=weights, scaling=scaling, seed=seed
    )
    data, parts = case.data, case.parts
    penalty = split_jacobian_penalty(data, case.network)
    s = leading_singular_triplets(penalty.E2, 3).s
    top = leading_singular_triplets(penalty.total, 1).U[:, 0]
    critical = critical_strength(
        parts.G, penalty.total, parts.S1.u, guess=parts.S1.norm / float(s[2])
    )
    return {
        "S1": parts.S1.norm,
        "S3": penalty.S3.norm,
        "E2": float(s[0]),
        "E2_3": float(s[2]),
        "E2_rms": float(penalty.E2.norm()) / d**0.5,
        "critical": critical,
        "top_q": alignment(top, data.q),
        "top_mean": alignment(top, data.bulk_times(data.X.square().sum(dim=1))),
    }


def penalised_gradient_cell(
    d: int, nu: float, alpha: float, activation: str, strength: float, seed: int
) -> dict[str, float]:
    """Measure one cell of Figure 7 (c, d): the gradient with a penalty of this strength.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        strength: lambda.
        seed: Seed.

    Returns:
        ``S1``, and ``S3`` and ``E2`` times lambda; ``s1`` ... ``s3`` of the whole; ``u1_q``,
        ``u1_residue``, alignments of its top left singular vector with q and X_B^T r;
        ``outside``, the share of X_B^T r outside the bulk, and ``at``, the singular value of the
        leading direction that is best aligned with it.
    """
    case = scenario(d, nu=nu, alpha=alpha, activation=activation, seed=seed)
    penalty = split_jacobian_penalty(case.data, case.network, strength=strength)
    direction = case.parts.S1.u
    top = leading_singular_triplets(case.parts.G + penalty.total, TOP)
    shares = (top.U.T @ (direction / direction.norm())).square()
    return {
        "S1": case.parts.S1.norm,
        "S3": penalty.S3.norm,
        "E2": operator_norm(penalty.E2),
        "s1": float(top.s[0]),
        "s2": float(top.s[1]),
        "s3": float(top.s[2]),
        "u1_q": alignment(top.U[:, 0], case.data.q),
        "u1_residue": alignment(top.U[:, 0], direction),
        "outside": float(shares.sum()),
        "at": float(top.s[shares.argmax()]),
    }


#: Strengths of the scan behind Figure 7 (c, d).
STRENGTHS = (0.0, 0.1, 0.3, 1.0, 3.0, 6.0, 10.0, 15.0, 20.0, 30.0)


def figure_7_jacobian_cells() -> tuple[dict, ...]:
    """List the cells of Figure 7 (c, d): the paper's sizes, sigmoid, 12 seeds, a scan of lambda."""
    fixed = {"d": 1000, "nu": 3 / 8, "alpha": 0.0, "activation": "sigmoid"}
    return tuple(
        {**fixed, "strength": strength, "seed": seed}
        for seed, strength in itertools.product(range(12), STRENGTHS)
    )


def penalty_cells() -> tuple[dict, ...]:
    """List the cells of the rates of Proposition 4.4: four sizes, 8 seeds."""
    names = ("nu", "alpha", "activation", "weights", "scaling")
    small = ((0.125, 0.0), (0.375, 0.0))
    uniform, orthogonal = ("uniform", "ntk"), ("orthogonal", "ntk")
    series = [
        *((*pair, a, *uniform) for pair in small for a in ("sigmoid", "tanh", "softplus", "silu")),
        *((*pair, "softplus", *uniform) for pair in ((0.125, 0.5), (0.4, 0.5))),
        # Beyond nu = 1/2, below and above 1/2 + alpha/2.
        *((0.6, 0.5, a, *uniform) for a in ("sigmoid", "tanh", "softplus")),
        *((0.6, 0.5, a, *orthogonal) for a in ("softplus", "silu")),
        *((0.6, 0.0, a, *orthogonal) for a in ("sigmoid", "tanh")),
        # NTK scaling given up.
        (0.375, 0.0, "tanh", "uniform", "mean-field"),
    ]
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in itertools.product(range(8), (250, 400, 640, 1000), series)
    )
