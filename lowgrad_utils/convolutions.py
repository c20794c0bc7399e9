"""One-dimensional convolutions as two-layer networks with tied weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from lowgrad_utils import checks
from lowgrad_utils.gradients import Decomposition, RankOne
from lowgrad_utils.networks import TwoLayerNetwork


@dataclass(frozen=True)
class FilterGradient:
    """The gradient of a filter and what the pieces of the untied gradient contribute to it.

    Attributes:
        g: The filter's gradient, length k.
        residue_term: Contribution of S1 + S12, length k.
        spike_term: Contribution of S2, length k.
    """

    g: Tensor = field(repr=False)
    residue_term: Tensor = field(repr=False)
    spike_term: Tensor = field(repr=False)

    @property
    def rest(self) -> Tensor:
        """The contribution of E, g - residue_term - spike_term, length k."""
        return self.g - self.residue_term - self.spike_term

    @property
    def span(self) -> Tensor:
        """The two given vectors as columns, k x 2."""
        return torch.stack([self.residue_term, self.spike_term], dim=1)


def expand_filter(w: Tensor, d: int) -> Tensor:
    """Form the weights W of a valid convolution with stride 1: W[j, j + l] = w[l].

    Each row holds the filter once, one place further to the right than the row above, so that rows
    have unit length if w has.

    Args:
        w: Filter, length k.
        d: Length of the input, at least k.

    Returns:
        W, m x d with m = d - k + 1.

    Raises:
        TypeError: If w is not a floating-point tensor.
        ValueError: If w is not a finite vector, or is longer than d.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> expand_filter(torch.tensor([1.0, 2.0]), 3)
        tensor([[1., 2., 0.],
                [0., 1., 2.]])
    """
    k, d = len(checks.vector("w", w)), checks.positive_integer("d", d)
    if k > d:
        raise ValueError(f"w has length {k}, but at most d = {d} is needed")
    W = w.new_zeros(d - k + 1, d)
    for offset, weight in enumerate(w):
        W.diagonal(offset).fill_(weight)
    return W


def convolutional_network(
    w: Tensor, a: Tensor, *, activation: str = "relu", scaling: str = "ntk"
) -> TwoLayerNetwork:
    """Build f(x) = gamma a^T sigma(w * x), a filter read out by a, as a two-layer network.

    Args:
        w: Filter of unit length, k numbers.
        a: Outer weights, one for each of the m positions; the input has length m + k - 1.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.

    Raises:
        TypeError: If w or a is not a floating-point tensor, or dtypes differ.
        ValueError: If w is not of unit length, or a name is unknown.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> network = convolutional_network(torch.tensor([0.6, 0.8]), torch.ones(4))
        >>> network.W.shape
        torch.Size([4, 5])
    """
    k, m = len(checks.vector("w", w)), len(checks.vector("a", a))
    return TwoLayerNetwork(expand_filter(w, m + k - 1), a, activation, scaling)


def tie(G: Tensor) -> Tensor:
    """Sum a gradient along its diagonals: g_l = sum_j G[j + l, j], the tied weights' gradient.

    The transpose of ``expand_filter``, by the chain rule: w_l stands in W[j, j + l] for every j.

    Args:
        G: Gradient in W, transposed: d x m with m <= d.

    Returns:
        The filter's gradient, length k = d - m + 1.

    Raises:
        TypeError: If G is not a floating-point tensor.
        ValueError: If G is not a finite matrix, or has more columns than rows.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> tie(torch.tensor([[1.0, 0.0], [2.0, 3.0], [0.0, 4.0]]))
        tensor([4., 6.])
    """
    d, m = checks.matrix("G", G).shape
    if m > d:
        raise ValueError(f"G has shape {d} x {m}, but at most as many columns as rows are needed")
    return torch.stack([G.diagonal(-offset).sum() for offset in range(d - m + 1)])


def tie_rank_one(term: RankOne) -> Tensor:
    """Compute ``tie(u v^T)`` without forming the matrix: g_l = sum_j u_(j + l) v_j.

    That is the correlation of u with v, which the paper writes as a convolution with v reversed.

    Args:
        term: Factors u of length d and v of length m <= d.

    Returns:
        Vector of length k = d - m + 1.

    Raises:
        ValueError: If v is longer than u.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> tie_rank_one(RankOne(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0])))
        tensor([21., 32.])
    """
    u, v = checks.vector("u", term.u), checks.vector("v", term.v)
    if len(v) > len(u):
        raise ValueError(f"v has length {len(v)}, but at most that of u, {len(u)}, is needed")
    return F.conv1d(u[None, None], v[None, None])[0, 0]


def filter_gradient(parts: Decomposition) -> FilterGradient:
    """Map the untied gradient and its rank-one pieces to the filter.

    Args:
        parts: The gradient's decomposition at tied weights.

    Returns:
        The filter's gradient, and the images of S1 + S12 (one correlation, since the two share
        their right factor) and of S2.

    Source: Low Rank Gradients, Remark 1.

    Example:
        >>> from lowgrad_utils.gradients import decompose
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> data = sample_spiked_data(20, 30, nu=0.25)
        >>> w, a = torch.tensor([0.6, 0.8], dtype=torch.float64), torch.ones(29).double()
        >>> network = convolutional_network(w, a)
        >>> filter_gradient(decompose(data, network, torch.ones(20).double())).g.shape
        torch.Size([2])
    """
    shared = RankOne(parts.S1.u + parts.S12.u, parts.S1.v)
    return FilterGradient(tie(parts.G), tie_rank_one(shared), tie_rank_one(parts.S2))
