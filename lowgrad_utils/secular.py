"""Singular values of a bulk plus a few rank-one terms: the exact equation and the free one.

G = B + U V^T with k columns in U and V. Written as a symmetric matrix of size d + m,

    [0 G; G^T 0] = [0 B; B^T 0] + W J W^T,   W = diag(U, V),   J = [0 I; I 0],

so that Sylvester's identity leaves an equation of size 2k in the resolvent of the bulk.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from scipy.optimize import brentq
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.random_matrices import Spike, predict_spike
from lowgrad_utils.spectra import SingularTriplets

# Roots are looked for above ‖B‖ by this share: nearer than that, 1/(x - ‖B‖) is all rounding.
_START = 1e-9


@dataclass(frozen=True)
class SecularEquation:
    """det(J - M(x)) = 0, whose roots above ‖B‖ are the singular values of B + U V^T there.

    M(x) = [x U^T R U, U^T R B V; V^T B^T R U, x V^T R~ V] with the resolvents R = (x^2 - B B^T)^-1
    and R~ = (x^2 - B^T B)^-1. The blocks U^T R B V are the cross terms: what the bulk couples
    between left and right factors.

    Attributes:
        bulk: B, d x m.
        U: Left factors, d x k.
        V: Right factors, m x k.

    Raises:
        TypeError: If dtypes differ or an argument is no floating-point tensor.
        ValueError: If shapes do not fit, an entry is NaN or infinite, or the bulk is zero.

    Example:
        >>> stream = torch.Generator().manual_seed(0)
        >>> B = 0.1 * torch.randn(6, 8, generator=stream, dtype=torch.float64)
        >>> U, V = torch.eye(6, 1).double(), torch.eye(8, 1).double()
        >>> root = SecularEquation(B, U, V).roots()[0]
        >>> bool(torch.isclose(root, torch.linalg.svdvals(B + U @ V.T)[0]))
        True
    """

    bulk: Tensor = field(repr=False)
    U: Tensor = field(repr=False)
    V: Tensor = field(repr=False)

    def __post_init__(self):
        d, m = checks.matrix("bulk", self.bulk).shape
        k = checks.matrix("U", self.U, rows=d).shape[1]
        checks.matrix("V", self.V, rows=m, columns=k)
        checks.same_dtype(bulk=self.bulk, U=self.U, V=self.V)
        if not self.bulk.any():
            raise ValueError("bulk is all 0, so that it has no resolvent to write an equation in")

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.linalg.svd(self.bulk, full_matrices=False)

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The factors in the singular spaces of the bulk, and what of them lies outside."""
        left, _, right = self._svd
        u, v = left.T @ self.U, right @ self.V
        # The longer side has directions where B is 0; they count with 1/x.
        return u, v, self.U - left @ u, self.V - right.T @ v

    @property
    def edge(self) -> float:
        """The largest singular value of the bulk."""
        return float(self._svd[1][0])

    def matrix(self, x: float, *, cross: bool = True) -> Tensor:
        """Compute M(x), 2k x 2k.

        Args:
            x: A point above ``edge``.
            cross: False leaves the cross terms out, which is right only on average.
        """
        s, (u, v, u_null, v_null) = self._svd[1], self._parts
        weights = 1 / (x**2 - s**2)
        on_left = x * (u.T * weights) @ u + u_null.T @ u_null / x
        on_right = x * (v.T * weights) @ v + v_null.T @ v_null / x
        between = (u.T * (weights * s)) @ v if cross else torch.zeros_like(on_left)
        return torch.cat(
            [torch.cat([on_left, between], dim=1), torch.cat([between.T, on_right], dim=1)]
        )

    def roots(self, *, cross: bool = True) -> Tensor:
        """Return the roots above the bulk, falling; at most k.

        By inertia, J - M(x) has k + (number of singular values of G above x) negative
        eigenvalues, and its eigenvalues grow with x: the i-th root is where number k + i is 0.

        Args:
            cross: As for ``matrix``.
        """
        k, start = self.U.shape[1], self.edge * (1 + _START)
        end = 2 * (self.edge + float(torch.linalg.norm(self.U) * torch.linalg.norm(self.V)))
        found = []
        for index in range(k, 2 * k):

            def gap(x: float, index: int = index) -> float:
                return float(torch.linalg.eigvalsh(self._difference(x, cross))[index])

            if gap(start) >= 0:
                break
            found.append(brentq(gap, start, end, xtol=1e-15 * end, rtol=1e-14))
        return torch.tensor(found, dtype=self.bulk.dtype)

    def triplets(self) -> SingularTriplets:
        """Return roots and singular vectors: (x - B^) W c with c in the kernel of J - M(x)."""
        (left, s, right), (u, v, u_null, v_null) = self._svd, self._parts
        roots = self.roots()
        columns = []
        for x in roots.tolist():
            values, vectors = torch.linalg.eigh(self._difference(x, True))
            c = vectors[:, values.abs().argmin()]
            a, b = c[: self.U.shape[1]], c[self.U.shape[1] :]
            weights = 1 / (x**2 - s**2)
            on_left = left @ (weights * (x * (u @ a) + s * (v @ b))) + u_null @ a / x
            on_right = right.T @ (weights * (s * (u @ a) + x * (v @ b))) + v_null @ b / x
            columns.append((on_left / on_left.norm(), on_right / on_right.norm()))
        empty = self.bulk.new_zeros
        U = torch.stack([c[0] for c in columns], 1) if columns else empty(self.bulk.shape[0], 0)
        V = torch.stack([c[1] for c in columns], 1) if columns else empty(self.bulk.shape[1], 0)
        return SingularTriplets(U, roots, V)

    def _difference(self, x: float, cross: bool) -> Tensor:
        M = self.matrix(x, cross=cross)
        k = self.U.shape[1]
        swap = torch.eye(2 * k, dtype=M.dtype, device=M.device).roll(k, dims=0)
        return swap - M


def free_spike(
    theta: float, singular_values: Tensor, shape: tuple[int, int], *, margin: float | None = None
) -> Spike:
    """Predict value and angles of a rank-one term of norm theta, independent of a given bulk.

    The value x solves D(x) = 1/theta^2 (``random_matrices.predict_spike``); the squared cosines
    with the true vectors are -2 phi(x) / (theta^2 D'(x)) on the left, and the same with phi~ on
    the right. Both are 0 where x is the bulk's edge.

    Args:
        theta: Norm of the rank-one term, positive.
        singular_values: The min(n, d) singular values of the bulk.
        shape: (n, d).
        margin: Share of the edge that a root must be above it; min(n, d)^(-2/3) if None.

    Raises:
        ValueError: If ``theta`` or ``margin`` is not positive, the sizes do not fit, or the bulk
            is zero.

    Source: Benaych-Georges and Nadakuditi (2012), Theorems 2.8 and 2.9.

    Example:
        >>> spike = free_spike(3.0, torch.ones(50).double(), (50, 60))
        >>> round(spike.value, 3), spike.left > spike.right > 0.8
        (3.281, True)
    """
    x = predict_spike(theta, singular_values, shape, margin=margin)
    s = singular_values
    if not x > float(s.max()):
        return Spike(x, 0.0, 0.0)
    gap = x**2 - s.square()
    phi, slope = [], []
    for size in shape:
        rest = size - len(s)
        phi.append(float((x / gap).sum() + rest / x) / size)
        slope.append(float((1 / gap - 2 * x**2 / gap.square()).sum() - rest / x**2) / size)
    D_slope = phi[0] * slope[1] + phi[1] * slope[0]
    left, right = (-2 * value / (theta**2 * D_slope) for value in phi)
    return Spike(x, left, right)
