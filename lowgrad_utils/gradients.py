"""The inner-layer gradient in closed form and its pieces S1, S12, S2 and E."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.networks import LOSSES, TwoLayerNetwork
from lowgrad_utils.spiked_data import SpikedData

# 32 rows of 5000 neurons are 1.3 MB in float64: what a core's cache holds.
_ROWS = 32


@dataclass(frozen=True)
class RankOne:
    """The matrix u v^T kept as its two factors.

    Attributes:
        u: Left factor, length d.
        v: Right factor, length m.

    Example:
        >>> term = RankOne(torch.tensor([3.0, 4.0]), torch.tensor([2.0]))
        >>> term.norm
        10.0
    """

    u: Tensor = field(repr=False)
    v: Tensor = field(repr=False)

    @property
    def norm(self) -> float:
        """Operator norm |u| |v|, which is also its only singular value."""
        return float(self.u.norm() * self.v.norm())

    def matrix(self) -> Tensor:
        """Form u v^T, d x m."""
        return torch.outer(self.u, self.v)


@dataclass(frozen=True)
class Decomposition:
    """The gradient G = S1 + S12 + S2 + E.

    Attributes:
        G: The gradient, d x m.
        S1: Residue spike (gamma/n) (X_B^T r) (a o mu)^T.
        S12: Interpolant (gamma zeta/n) (z^T r) q (a o mu)^T.
        S2: Data spike (gamma zeta/n) q z^T[(r a^T) o sigma'_perp(X W^T)].
    """

    G: Tensor = field(repr=False)
    S1: RankOne
    S12: RankOne
    S2: RankOne

    @cached_property
    def E(self) -> Tensor:
        """The rest E = G - S1 - S12 - S2, d x m, formed when first asked for."""
        E = self.G.clone()
        for term in (self.S1, self.S12, self.S2):
            E.addr_(term.u, term.v, alpha=-1)
        return E


@torch.no_grad()
def closed_form_gradient(X: Tensor, network: TwoLayerNetwork, residue: Tensor) -> Tensor:
    """Compute G = (gamma/n) X^T [(r a^T) o sigma'(X W^T)], the gradient in W, transposed.

    Args:
        X: Data, n x d.
        network: The network; its width is m.
        residue: r_i = dl/df at (f(x_i), y_i), length n.

    Returns:
        G, d x m. The paper writes the update with m x d; its left singular vectors are ours.

    Raises:
        TypeError: If an argument is not a floating-point tensor, or dtypes differ.
        ValueError: If shapes do not fit, or an entry is NaN or infinite.

    Source: Low Rank Gradients, Proposition 2.1 with lambda = 0.

    Example:
        >>> X = torch.eye(3).double()
        >>> network = TwoLayerNetwork.random(3, 4, activation="tanh", seed=0)
        >>> closed_form_gradient(X, network, torch.ones(3).double()).shape
        torch.Size([3, 4])
    """
    slopes = _slopes(X, network, residue)
    return _contract(X, network, residue, slopes)


@torch.no_grad()
def loss_gradient(X: Tensor, y: Tensor, network: TwoLayerNetwork, loss: str = "mse") -> Tensor:
    """Compute the gradient of (1/n) sum_i l(f(x_i), y_i) with respect to W, transposed: d x m.

    Args:
        X: Data, n x d.
        y: Targets, length n.
        network: The network.
        loss: A key of ``LOSSES``.

    Raises:
        TypeError: If an argument is not a floating-point tensor, or dtypes differ.
        ValueError: If shapes do not fit, an entry is NaN or infinite, a label is outside the
            loss's domain, or the loss is unknown.

    Source: Low Rank Gradients, Proposition 2.1 with lambda = 0.

    Example:
        >>> X, y = torch.eye(3).double(), torch.ones(3).double()
        >>> network = TwoLayerNetwork.random(3, 4, activation="tanh", seed=0)
        >>> residue = network(X) - y
        >>> expected = closed_form_gradient(X, network, residue)
        >>> torch.equal(loss_gradient(X, y, network, "mse"), expected)
        True
    """
    residue = LOSSES[checks.choice("loss", loss, LOSSES)].residue(network(X), y)
    return closed_form_gradient(X, network, residue)


@torch.no_grad()
def decompose(
    data: SpikedData, network: TwoLayerNetwork, residue: Tensor, *, mu: Tensor | None = None
) -> Decomposition:
    """Split the gradient into residue spike, interpolant, data spike and the rest.

    Costs the two matrix products of the gradient itself plus vectors: sigma'(X W^T) is used once
    for the data spike and then overwritten on its way to G.

    Args:
        data: Data with their spike.
        network: The network.
        residue: r_i = dl/df at (f(x_i), y_i), length n.
        mu: mu_j = E sigma'(w_j^T x), length m; ``network.mu(data)`` if None.

    Returns:
        G as a matrix, the three rank-one terms as factors, E on demand.

    Raises:
        TypeError: If an argument is not a floating-point tensor, or dtypes differ.
        ValueError: If shapes do not fit, or an entry is NaN or infinite.

    Source: Low Rank Gradients, Section 3.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> network = TwoLayerNetwork.random(40, 50, activation="tanh")
        >>> parts = decompose(data, network, torch.ones(30).double())
        >>> total = parts.S1.matrix() + parts.S12.matrix() + parts.S2.matrix() + parts.E
        >>> torch.allclose(parts.G, total)
        True
    """
    slopes = _slopes(data.X, network, residue)
    if mu is None:
        # For real data the mean over the examples is at hand; network.mu would form X W^T again.
        mu = slopes.mean(dim=0) if data.eigenvalues is None else network.mu(data)
    mu = checks.vector("mu", mu, length=network.m)
    checks.same_dtype(W=network.W, mu=mu)
    scale = network.gamma / data.n
    weighted = data.z * residue
    spread = network.a * (slopes.T @ weighted - weighted.sum() * mu)
    shared = network.a * mu
    return Decomposition(
        G=_contract(data.X, network, residue, slopes),
        S1=RankOne(scale * data.bulk_times(residue), shared),
        S12=RankOne((scale * data.zeta * weighted.sum()) * data.q, shared),
        S2=RankOne((scale * data.zeta) * data.q, spread),
    )


def _slopes(X: Tensor, network: TwoLayerNetwork, residue: Tensor) -> Tensor:
    """Compute sigma'(X W^T), n x m, after the checks that every gradient needs."""
    checks.matrix("X", X, columns=network.W.shape[1])
    checks.vector("residue", residue, length=X.shape[0])
    checks.same_dtype(W=network.W, X=X, residue=residue)
    slopes = X @ network.W.T
    # In place and a few rows at a time: the temporaries of sigma', up to five of them, stay small
    # and in cache.
    for rows in slopes.split(_ROWS):
        rows.copy_(network.sigma.derivative(rows))
    return slopes


def _contract(X: Tensor, network: TwoLayerNetwork, residue: Tensor, slopes: Tensor) -> Tensor:
    """Compute (gamma/n) X^T [(r a^T) o slopes], overwriting ``slopes`` to save an n x m array."""
    slopes.mul_(residue[:, None])
    return (X.T @ slopes).mul_((network.gamma / X.shape[0]) * network.a)
