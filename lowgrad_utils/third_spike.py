"""The spikes hidden in the rest E: H, its higher orders, and the matrix that S2 and H share.

For a neuron w the slope sigma'(w^T x) is a function of x = x_B + zeta z q. Its projection on the
k-th Hermite polynomial of z has the coefficient (zeta w^T q)^k E sigma^(k+1)(w^T x) / k!, so each
order leaves a rank-one term in E. The first is the third spike H; the second is what remains of
it where sigma' is even.

To first order S2, H and the bulk are the parts of one matrix, M = X^T D_r X: S2 + H + bulk is
(gamma/n) M W^T D_(a o c). So M's eigenvalues outside its bulk decide what is seen of S2 and H.
"""

import math
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from torch import Tensor
from torch.special import hermite_polynomial_he

from lowgrad_utils import checks
from lowgrad_utils.gradients import RankOne
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork
from lowgrad_utils.spiked_data import SpikedData


def slope_moments(activation: str, s: Tensor, order: int) -> Tensor:
    """Compute e_k(s) = E sigma^(k+1)(s g), g ~ N(0, 1), entrywise: e_0 = mu and e_1 = c.

    Gaussian means solve the heat equation, d/ds E f(s g) = s E f''(s g), so that
    e_(k+2) = e_k' / s. The derivative is automatic, and needs no derivative of sigma: ReLU's
    orders come from c(s) = 1 / (s sqrt(2 pi)).

    Args:
        activation: A key of ``ACTIVATIONS``.
        s: Standard deviations of the preactivation, positive.
        order: k, from 0 to 6.

    Raises:
        TypeError: If s is not a floating-point tensor.
        ValueError: If the activation is unknown, an entry of s is not positive and finite (for
            mu it may be 0), or the order is not a whole number from 0 to 6.

    Example:
        >>> s = torch.tensor([1.0], dtype=torch.float64)
        >>> round(float(slope_moments("relu", s, 3)) * math.sqrt(2 * math.pi), 12)
        -1.0
        >>> float(slope_moments("softplus", s, 2))
        0.0
    """
    sigma = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)]
    if isinstance(order, bool) or order not in range(7):
        raise ValueError(f"order is {order!r}, but a whole number from 0 to 6 is needed")
    order = int(order)
    first = sigma.c if order % 2 else sigma.mu
    with torch.enable_grad():
        variable = s.detach().requires_grad_() if isinstance(s, Tensor) else s
        moment = first(variable)
        if order > 0 and not bool((s > 0).all()):
            raise ValueError("s has the entry 0, but positive standard deviations are needed")
        for _ in range(order // 2):
            # A closed form that does not depend on s has the derivative 0.
            if not moment.requires_grad:
                return torch.zeros_like(s)
            (slope,) = torch.autograd.grad(moment.sum(), variable, create_graph=True)
            moment = slope / variable
    return moment.detach()


def hidden_spike(
    data: SpikedData,
    network: TwoLayerNetwork,
    residue: Tensor,
    *,
    order: int = 1,
    scale: Tensor | None = None,
) -> RankOne:
    """Form H_k = (gamma zeta^k / (k! n)) X_B^T (r o He_k(z)) (a o e_k o (Wq)^k)^T, hidden in E.

    H_1 is the third spike H = (gamma zeta / n) X_B^T (r o z) (a o c o Wq)^T. Costs two
    matrix-vector products.

    Args:
        data: Data with their spike.
        network: The network; W independent of X for H_k to mean anything.
        residue: r, length n.
        order: k, from 1 to 6.
        scale: Standard deviations of w_j^T x, length m; ``data.preactivation_scale`` if None.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit, the order is out of range, or the data's covariance is
            unknown and no ``scale`` is given.

    Source: this book, the chapter on the third spike.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> r = torch.ones(30).double()
        >>> network = TwoLayerNetwork.random(40, 50, activation="tanh")
        >>> hidden_spike(data, network, r).norm, hidden_spike(data, network, r, order=2).norm > 0
        (0.0, True)
    """
    checks.vector("residue", residue, length=data.n)
    checks.matrix("W", network.W, columns=data.d)
    checks.same_dtype(X=data.X, W=network.W, residue=residue)
    if isinstance(order, bool) or order not in range(1, 7):
        raise ValueError(f"order is {order!r}, but a whole number from 1 to 6 is needed")
    order = int(order)
    if scale is None:
        scale = data.preactivation_scale(network.W)
    moments = slope_moments(
        network.activation, checks.vector("scale", scale, length=network.m), order
    )
    factor = network.gamma * data.zeta**order / (math.factorial(order) * data.n)
    left = data.bulk_times(residue * hermite_polynomial_he(data.z, order))
    return RankOne(factor * left, network.a * moments * (network.W @ data.q) ** order)


def norm_spike(data: SpikedData, network: TwoLayerNetwork, residue: Tensor) -> RankOne:
    """Form N = (gamma/n) X_B^T (r o (mu(t) - mu(t_0))) a^T, what long and short examples leave.

    t_i^2 = (|x_B,i|^2 + zeta^2) / d is the variance of w^T x_i over uniform rows w with the
    spike's part at its mean, t_0^2 = (tr Sigma_hat + zeta^2) / d its mean. E holds this term
    because S1 has the mean slope of each neuron, and none of each example.

    Args:
        data: Data with a known covariance.
        network: The network.
        residue: r, length n.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit, or the data's covariance is unknown.

    Source: this book, the chapter on the third spike.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> network = TwoLayerNetwork.random(40, 50, activation="relu")
        >>> norm_spike(data, network, torch.ones(30).double()).norm
        0.0
    """
    checks.vector("residue", residue, length=data.n)
    checks.matrix("W", network.W, columns=data.d)
    checks.same_dtype(X=data.X, W=network.W, residue=residue)
    if data.eigenvalues is None:
        raise ValueError("these data have no known covariance, so their mean norm is unknown")
    lengths = torch.linalg.vector_norm(data.X_B, dim=1)
    shared = data.zeta**2
    t = torch.sqrt((lengths.square() + shared) / data.d)
    mean = torch.sqrt((data.eigenvalues.sum() + shared) / data.d)
    deviation = network.sigma.mu(t) - network.sigma.mu(mean)
    left = (network.gamma / data.n) * data.bulk_times(residue * deviation)
    return RankOne(left, network.a)


def shared_matrix(data: SpikedData, residue: Tensor) -> Tensor:
    """Form [[kappa, |p|], [|p|, 0]], the matrix that S2 and H share.

    kappa = zeta z^T D_r z and p = X_B^T (r o z). In the orthonormal bases q, p/|p| on the left
    and the nearly orthogonal a o c o Wq, a o c o Wp/|p| on the right, S2 + H is (gamma zeta / n)
    times this matrix, to first order in the slopes.

    Args:
        data: Data with their spike.
        residue: r, length n.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit.

    Source: this book, the chapter on the third spike.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> shared_matrix(data, torch.zeros(30).double())
        tensor([[0., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    checks.vector("residue", residue, length=data.n)
    checks.same_dtype(X=data.X, residue=residue)
    weighted = residue * data.z
    kappa = data.zeta * float(weighted @ data.z)
    length = float(data.bulk_times(weighted).norm())
    return data.X.new_tensor([[kappa, length], [length, 0.0]])


def spike_pair(data: SpikedData, network: TwoLayerNetwork, residue: Tensor) -> Tensor:
    """Predict the two singular values of S2 + H from ``shared_matrix``, descending.

    They are (gamma zeta / n) |a o c o Wq| times the absolute eigenvalues of the matrix,
    (|kappa| +- sqrt(kappa^2 + 4 |p|^2)) / 2 up to sign: both |p| if kappa = 0, and kappa and
    |p|^2 / kappa if kappa is large.

    Args:
        data: Data with a known covariance.
        network: The network, W independent of X.
        residue: r, length n.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit, or the data's covariance is unknown.

    Source: this book, the chapter on the third spike.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> network = TwoLayerNetwork.random(40, 50, activation="softplus")
        >>> large, small = spike_pair(data, network, torch.ones(30).double())
        >>> bool(large > small)
        True
    """
    c = slope_moments(network.activation, data.preactivation_scale(network.W), 1)
    factor = network.gamma * data.zeta / data.n * (c * (network.W @ data.q)).norm()
    values = torch.linalg.eigvalsh(shared_matrix(data, residue)).abs()
    return factor * values.sort(descending=True).values


class SpikeEigenvalues(NamedTuple):
    """Where the spike leaves eigenvalues of X^T D_r X, and where their bulk ends.

    Attributes:
        right: The eigenvalue above the bulk, NaN if there is none.
        left: The eigenvalue below the bulk, NaN if there is none.
        right_edge: Upper end of the bulk, at least 0.
        left_edge: Lower end of the bulk, at most 0.
    """

    right: float
    left: float
    right_edge: float
    left_edge: float


def spike_eigenvalues(data: SpikedData, residue: Tensor) -> SpikeEigenvalues:
    """Predict the eigenvalues of X^T D_r X outside its bulk, and the bulk's ends.

    With S(h) = (1/d) sum_i r_i / (1 + r_i h) the bulk is parametrised by
    lambda(h) = d (S(h) - 1/h), and the spike adds lambda(h) at the roots of
    -(h/d) sum_i z_i^2 r_i / (1 + r_i h) = 1 / zeta^2. The left side is 0 at h = 0 and convex where
    all 1 + r_i h > 0, so there is one root on the side of each sign that the residue has: one if
    it has one sign, two otherwise. A root is an outlier if
    (1/d) sum_i (r_i h / (1 + r_i h))^2 < 1. For small h this is the matrix of ``shared_matrix``.

    Args:
        data: Data with an isotropic bulk (alpha = 0) and n < d.
        residue: r, length n, independent of X_B; it may know z.

    Returns:
        Eigenvalues and ends, in units of the matrix X^T D_r X itself.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If shapes do not fit, the residue is zero where z is not, n is not below d, or
            the bulk is not isotropic.

    Source: this book, the chapter on the third spike; the bulk's law is Marchenko and Pastur's
        (1967), with signed weights.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.5)
        >>> found = spike_eigenvalues(data, torch.ones(30).double())
        >>> found.right > found.right_edge > 0, found.left
        (True, nan)
    """
    r = checks.vector("residue", residue, length=data.n)
    checks.same_dtype(X=data.X, residue=residue)
    if data.eigenvalues is None or not bool((data.eigenvalues == 1).all()):
        raise ValueError("the data's bulk is not isotropic, but alpha = 0 is needed")
    if data.n >= data.d:
        raise ValueError(f"n is {data.n} and d is {data.d}, but n < d is needed")
    if not bool((r * data.z).any()):
        raise ValueError("residue is zero where z is not, so the spike adds nothing")
    values, edges = [], []
    # h < 0 belongs to eigenvalues above the bulk.
    for side, largest in ((-1, float(r.max())), (1, float(-r.min()))):
        value, edge = _one_side(data, r, side, largest)
        values.append(value)
        edges.append(edge)
    return SpikeEigenvalues(*values, *edges)


def _one_side(data: SpikedData, r: Tensor, side: int, largest: float) -> tuple[float, float]:
    """Return the outlier (or NaN) and the end of the bulk on one side; h has the sign ``side``."""
    if largest <= 0:
        # No example of this sign: zeros of a matrix without full rank end the bulk here.
        return math.nan, 0.0
    d, weights = data.d, data.z.square()

    def eigenvalue(h: float) -> float:
        return float((r / (1 + r * h)).sum()) - d / h

    def spread(h: float) -> float:
        return float((r * h / (1 + r * h)).square().sum()) / d - 1

    def pull(h: float) -> float:
        return -h * float((weights * r / (1 + r * h)).sum()) / d - data.zeta**-2

    # Both are below 0 at h = 0, infinite at the pole of the largest residue, and change sign once.
    # The root of a large spike lies close to 0, but not below d / (zeta^2 sum z_i^2 |r_i|).
    least = d / (data.zeta**2 * float((weights * r.abs()).sum()))
    near, pole = side * min(1e-9 / largest, 0.1 * least), side * (1 - 1e-9) / largest
    end = float(brentq(spread, near, pole, xtol=1e-14 / largest))
    if pull(end) <= 0:
        return math.nan, eigenvalue(end)
    root = float(brentq(pull, near, end, xtol=1e-13 * abs(near), maxiter=500))
    return eigenvalue(root), eigenvalue(end)
