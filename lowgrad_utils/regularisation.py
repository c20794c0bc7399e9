"""Regularisers of the gradient: input noise, and a penalty on the Jacobian in the weights."""

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.gradients import RankOne
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spiked_data import SpikedData

# As in ``gradients``: 32 rows of 5000 neurons are what a core's cache holds.
_ROWS = 32


def add_input_noise(
    data: SpikedData, tau2: float, *, seed: int | torch.Generator = 0
) -> SpikedData:
    """Add Gaussian noise to every entry, X' = X + tau Xi, and keep z, q and zeta.

    All of the noise belongs to the bulk: X_B' = X_B + tau Xi, and the bulk's covariance becomes
    Sigma_hat + tau^2 I, so that ``network.mu`` is right for the noisy data. For real data, whose
    covariance is unknown, it stays unknown, and X_B' is no longer orthogonal to q.

    Args:
        data: The clean data.
        tau2: Variance of the noise, at least 0. With 0 the data come back as they are.
        seed: Integer seed or generator; the noise has a stream of its own.

    Returns:
        The noisy data in the dtype of X. Labels are not touched: draw them from the clean X.

    Raises:
        ValueError: If ``tau2`` is negative, NaN or infinite.

    Source: Low Rank Gradients, Section 4 (isotropic Gaussian input noise).

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> clean = sample_spiked_data(30, 40, nu=0.25, alpha=1.0)
        >>> noisy = add_input_noise(clean, 0.25, seed=1)
        >>> noisy.eigenvalues[:2]
        tensor([1.2500, 0.7500], dtype=torch.float64)
    """
    tau2 = checks.nonnegative("tau2", tau2)
    stream = checks.random_stream(seed, "input noise")
    if tau2 == 0:
        return data
    noise = torch.randn(data.X.shape, generator=stream, dtype=torch.float64).to(data.X)
    eigenvalues = None if data.eigenvalues is None else data.eigenvalues + tau2
    X = torch.add(data.X, noise, alpha=math.sqrt(tau2))
    return dataclasses.replace(data, X=X, eigenvalues=eigenvalues)


@dataclass(frozen=True)
class PenaltyGradient:
    """The gradient of the Jacobian penalty, split into S3 + E2.

    Attributes:
        total: The gradient in W, transposed, d x m.
        S3: Its data spike (lambda gamma^2 zeta/n) q z^T D [sigma' o sigma''] diag(a^2), where
            D = diag(|x_i|^2) and sigma', sigma'' are taken at X W^T.
    """

    total: Tensor = field(repr=False)
    S3: RankOne

    @cached_property
    def E2(self) -> Tensor:
        """The bulk's part with X_B^T in place of zeta q z^T, d x m, formed when first asked for."""
        return torch.addr(self.total, self.S3.u, self.S3.v, alpha=-1)


@torch.no_grad()
def jacobian_penalty(X: Tensor, network: TwoLayerNetwork, *, strength: float = 1.0) -> float:
    """Compute (lambda/2n) sum_i |d f(x_i) / d W|_F^2, lambda being ``strength``.

    For one example it is gamma^2 |x|^2 sum_j a_j^2 sigma'(w_j^T x)^2. The derivative is the one
    in the weights; a penalty on d f / d x is another function.

    Args:
        X: Data, n x d.
        network: The network.
        strength: lambda, at least 0.

    Raises:
        TypeError: If X is not a floating-point tensor, or has another dtype than W.
        ValueError: If X does not fit, or ``strength`` is negative.

    Source: Low Rank Gradients, Section 4 (Jacobian penalization).

    Example:
        >>> X, network = torch.eye(3).double(), TwoLayerNetwork.random(3, 4, activation="relu")
        >>> active = int((network.W > 0).sum())
        >>> math.isclose(jacobian_penalty(X, network), active / 4 / (2 * 3))
        True
    """
    strength = _check(X, network, strength)
    total = 0.0
    for rows in X.split(_ROWS):
        slopes = network.sigma.derivative(rows @ network.W.T)
        total += float(rows.square().sum(dim=1) @ (slopes.square() @ network.a.square()))
    return strength * network.gamma**2 * total / (2 * X.shape[0])


@torch.no_grad()
def jacobian_penalty_gradient(
    X: Tensor, network: TwoLayerNetwork, *, strength: float = 1.0
) -> Tensor:
    """Compute the gradient of ``jacobian_penalty`` with respect to W, transposed: d x m.

    It is (lambda gamma^2/n) X^T diag(|x_i|^2) [sigma'(X W^T) o sigma''(X W^T)] diag(a_j^2). The
    last factor is 1 in the paper, where a_j = +-1.

    Args:
        X: Data, n x d.
        network: The network; its width is m.
        strength: lambda, at least 0.

    Raises:
        TypeError: If X is not a floating-point tensor, or has another dtype than W.
        ValueError: If X does not fit, or ``strength`` is negative.

    Warns:
        AssumptionWarning: For ReLU. Its penalty depends on W through which neurons are active and
            is constant between jumps, so the gradient, 0 almost everywhere, does not see it.

    Source: Low Rank Gradients, Proposition 4.3 (its formula is restored).

    Example:
        >>> X, network = torch.eye(3).double(), TwoLayerNetwork.random(3, 4, activation="tanh")
        >>> jacobian_penalty_gradient(X, network).shape
        torch.Size([3, 4])
    """
    strength = _check(X, network, strength)
    return _contract(X, network, _curvatures(X, network), strength)


@torch.no_grad()
def split_jacobian_penalty(
    data: SpikedData, network: TwoLayerNetwork, *, strength: float = 1.0
) -> PenaltyGradient:
    """Split the Jacobian penalty's gradient into its data spike S3 and the bulk's part E2.

    Costs the two matrix products of the gradient itself plus vectors, and one n x m array.

    Args:
        data: Data with their spike, drawn from the model or split by ``split_spike``.
        network: The network.
        strength: lambda, at least 0. With 1, the pieces are the paper's S3 and E2 themselves.

    Returns:
        The gradient as a matrix, S3 as factors, E2 on demand.

    Raises:
        TypeError: If the data have another dtype than W.
        ValueError: If the data do not fit, or ``strength`` is negative.

    Warns:
        AssumptionWarning: For ReLU, as ``jacobian_penalty_gradient``.

    Source: Low Rank Gradients, after Proposition 4.3.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> network = TwoLayerNetwork.random(40, 50, activation="sigmoid")
        >>> parts = split_jacobian_penalty(data, network, strength=10.0)
        >>> torch.allclose(parts.total, parts.S3.matrix() + parts.E2)
        True
    """
    strength = _check(data.X, network, strength)
    curvatures = _curvatures(data.X, network)
    scale = strength * network.gamma**2 * data.zeta / data.n
    spike = RankOne(scale * data.q, network.a.square() * (curvatures.T @ data.z))
    return PenaltyGradient(_contract(data.X, network, curvatures, strength), spike)


def _check(X: Tensor, network: TwoLayerNetwork, strength: float) -> float:
    checks.matrix("X", X, columns=network.W.shape[1])
    checks.same_dtype(W=network.W, X=X)
    return checks.nonnegative("strength", strength)


def _curvatures(X: Tensor, network: TwoLayerNetwork) -> Tensor:
    """Compute |x_i|^2 sigma'(w_j^T x_i) sigma''(w_j^T x_i), n x m."""
    sigma = network.sigma
    if sigma.smoothness == "C0":
        warnings.warn(
            f"the Jacobian penalty of {sigma.name} is constant between jumps, so its gradient is "
            "0 almost everywhere: Proposition 4.3 needs a twice differentiable activation",
            checks.AssumptionWarning,
            stacklevel=4,
        )
    values = X @ network.W.T
    lengths = X.square().sum(dim=1, keepdim=True)
    # In place and a few rows at a time: the temporaries stay small and in cache.
    for rows, length in zip(values.split(_ROWS), lengths.split(_ROWS)):
        rows.copy_(length * sigma.derivative(rows) * sigma.second_derivative(rows))
    return values


def _contract(X: Tensor, network: TwoLayerNetwork, values: Tensor, strength: float) -> Tensor:
    scale = strength * network.gamma**2 / X.shape[0]
    return (X.T @ values).mul_(scale * network.a.square())
