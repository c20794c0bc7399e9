"""Leading singular triplets, outliers against an edge, alignments and principal angles."""

import math
from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from lowgrad_utils import checks


class SingularTriplets(NamedTuple):
    """Leading singular triplets in descending order: A v_k = s_k u_k.

    Attributes:
        U: Left singular vectors, one a column.
        s: Singular values.
        V: Right singular vectors, one a column.
    """

    U: Tensor
    s: Tensor
    V: Tensor


def leading_singular_triplets(A: Tensor, k: int, *, seed: int = 0) -> SingularTriplets:
    """Compute the k largest singular values of A with their vectors.

    Uses Lanczos bidiagonalisation through ARPACK, with a start vector from ``seed`` so that the
    answer is the same each time; small matrices, or many triplets, take a full decomposition.

    Args:
        A: Matrix, d x m.
        k: How many, from 1 to min(d, m).
        seed: Seed of the start vector, which numpy draws (ARPACK works on its arrays) whatever
            A's device; it changes the result by rounding only.

    Returns:
        U (d x k), s (k, descending), V (m x k). A vector's sign is arbitrary.

    Raises:
        ValueError: If A is not a finite matrix, or k is out of range.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 3.0, 2.0]).double())
        >>> leading_singular_triplets(A, 2).s
        tensor([3., 2.], dtype=torch.float64)
    """
    A = checks.matrix("A", A).detach()
    smaller = min(A.shape)
    k = checks.positive_integer("k", k)
    if k > smaller:
        raise ValueError(f"k is {k}, but a matrix of shape {tuple(A.shape)} has {smaller} at most")
    largest = float(torch.linalg.vector_norm(A, torch.inf))
    if largest == 0:
        # ARPACK cannot start on a zero matrix, whose singular vectors are any orthonormal ones.
        U, V = (torch.eye(size, k, dtype=A.dtype, device=A.device) for size in A.shape)
        return SingularTriplets(U, A.new_zeros(k), V)
    if smaller <= 100 or k > smaller // 5:
        U, s, Vh = torch.linalg.svd(A, full_matrices=False)
        return SingularTriplets(U[:, :k], s[:k], Vh[:k].T)
    start = np.random.default_rng(seed).standard_normal(smaller).astype(_numpy_dtype(A))
    # Lanczos squares A: entries of 1e-160 (1e-20 in float32) would vanish, large ones overflow.
    scale = 2.0 ** (math.frexp(largest)[1] - 1)  # A power of two divides without rounding.
    U, s, Vh = scipy.sparse.linalg.svds(_as_operator(A, scale), k=k, v0=start)
    order = np.argsort(s)[::-1]
    return SingularTriplets(
        *(torch.as_tensor(x.copy()).to(A) for x in (U[:, order], scale * s[order], Vh[order].T))
    )


def operator_norm(A: Tensor) -> float:
    """Compute the largest singular value of A.

    Args:
        A: Matrix, d x m.

    Raises:
        ValueError: If A is not a finite matrix.

    Example:
        >>> operator_norm(torch.diag(torch.tensor([1.0, 3.0]).double()))
        3.0
    """
    return float(leading_singular_triplets(A, 1).s[0])


def bulk_edge(A: Tensor, *, outliers: int = 0) -> float:
    """Compute the upper edge of a bulk: its largest singular value after given outliers.

    The edge of the gradient's bulk is read off the rest E, not off G with its spikes. E can have
    one outlier of its own (a third rank-one term, unless sigma' is even): ``outliers=1`` skips it.

    Args:
        A: Matrix, d x m, such as E.
        outliers: How many of its largest singular values do not belong to the bulk.

    Raises:
        ValueError: If A is not a finite matrix, or ``outliers`` is not a whole number, negative or
            too large.

    Example:
        >>> bulk_edge(torch.diag(torch.tensor([5.0, 3.0, 2.0]).double()), outliers=1)
        3.0
    """
    smaller = min(checks.matrix("A", A).shape)
    if not isinstance(outliers, int | np.integer) or not 0 <= outliers < smaller:
        raise ValueError(
            f"outliers is {outliers!r}, but a whole number from 0 to {smaller - 1} is needed for "
            f"a matrix of shape {tuple(A.shape)}"
        )
    return float(leading_singular_triplets(A, outliers + 1).s[-1])


def count_outliers(singular_values: Tensor, edge: float, *, margin: float = 0.0) -> int:
    """Count the singular values above edge (1 + margin).

    The largest value of a bulk of size n fluctuates about its edge by a share of order n^(-2/3)
    (Tracy and Widom), which is the natural margin when the edge comes from theory.

    Args:
        singular_values: Singular values in any order.
        edge: The bulk's upper edge, positive.
        margin: Share of the edge to leave free, at least 0.

    Raises:
        ValueError: If the edge is not positive, the margin is negative, or a singular value is
            NaN or infinite.

    Example:
        >>> count_outliers(torch.tensor([3.0, 2.2, 2.0, 1.0]), 2.0, margin=0.05)
        2
    """
    checks.vector("singular_values", singular_values)
    threshold = checks.positive("edge", edge) * (1 + checks.nonnegative("margin", margin))
    return int((singular_values > threshold).sum())


def alignment(u: Tensor, v: Tensor) -> float:
    """Compute |u^T v| / (|u| |v|), the alignment of two directions, between 0 and 1.

    Args:
        u: A vector.
        v: A vector of the same length.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If lengths differ, an entry is NaN or infinite, or a vector is zero.

    Source: Low Rank Gradients, Figures 4 to 6 (normalised inner product).

    Example:
        >>> alignment(torch.tensor([1.0, 1.0]), torch.tensor([0.0, -2.0]))  # doctest: +ELLIPSIS
        0.7071...
    """
    checks.vector("v", v, length=len(checks.vector("u", u)))
    checks.same_dtype(u=u, v=v)
    product = float(u.norm()) * float(v.norm())
    if product == 0:
        raise ValueError("one of the vectors is zero, so it has no direction to align with")
    return min(abs(float(u @ v)) / product, 1.0)


def principal_angles(A: Tensor, B: Tensor) -> Tensor:
    """Compute the principal angles between the column spaces of A and B, ascending, in radians.

    Args:
        A: Matrix whose columns span the first space, d x k.
        B: Matrix whose columns span the second, d x l.

    Returns:
        min(k, l) angles between 0 and pi/2; of matrices of lower rank, as many as the smaller
        rank, none for a zero matrix: dependent columns add no direction.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If the matrices are not finite or have different numbers of rows.

    Example:
        >>> e = torch.eye(3).double()
        >>> principal_angles(e[:, :1], e[:, 1:])
        tensor([1.5708], dtype=torch.float64)
    """
    checks.matrix("B", B, rows=checks.matrix("A", A).shape[0])
    checks.same_dtype(A=A, B=B)
    bases = (scipy.linalg.orth(M.detach().cpu().numpy()) for M in (A, B))
    large, small = sorted(bases, key=_columns)[::-1]
    overlap = large.T @ small
    # scipy.linalg.subspace_angles (1.17) takes the arcsine where the arccosine is due, and the
    # arccosine where the arcsine is, if small and large angles come together: half of the digits.
    cosines = scipy.linalg.svdvals(overlap)
    sines = scipy.linalg.svdvals(small - large @ overlap)[::-1]
    return torch.as_tensor(np.arctan2(sines, cosines)).to(A)


def _columns(matrix: np.ndarray) -> int:
    return matrix.shape[1]


def _as_operator(A: Tensor, scale: float) -> scipy.sparse.linalg.LinearOperator:
    """Wrap A / scale so that the eigensolver multiplies on A's device and with torch's threads."""

    def times(matrix: Tensor):
        return lambda x: (matrix @ torch.as_tensor(x / scale).to(A)).cpu().numpy()

    return scipy.sparse.linalg.LinearOperator(
        A.shape, matvec=times(A), rmatvec=times(A.T), matmat=times(A), dtype=_numpy_dtype(A)
    )


def _numpy_dtype(A: Tensor) -> np.dtype:
    return np.dtype(str(A.dtype).removeprefix("torch."))
