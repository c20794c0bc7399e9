"""Spiked data X = X_B + zeta z q^T and the targets drawn on it (Assumptions 1, 2)."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowgrad_utils import checks


@dataclass(frozen=True)
class SpikedData:
    """Data split into bulk and spike: X = X_B + zeta z q^T.

    Attributes:
        X: The data, n x d, one example a row.
        z: Spike component of each example, length n, of size about sqrt(n).
        q: Spike direction, a unit vector of length d.
        zeta: Spike strength; n^nu in the model.
        eigenvalues: Eigenvalues of the bulk covariance along the coordinate axes, length d,
            or None for real data, whose population covariance nobody knows.

    Raises:
        TypeError: If a tensor is not one, not of floating point, or of another dtype than X.
        ValueError: If shapes do not fit, q is not a unit vector, zeta is not positive, or an
            eigenvalue is negative.
    """

    X: Tensor = field(repr=False)
    z: Tensor = field(repr=False)
    q: Tensor = field(repr=False)
    zeta: float
    eigenvalues: Tensor | None = field(repr=False, default=None)

    def __post_init__(self):
        n, d = checks.matrix("X", self.X).shape
        checks.vector("z", self.z, length=n)
        checks.unit_rows("q", checks.vector("q", self.q, length=d)[None])
        checks.same_dtype(X=self.X, z=self.z, q=self.q)
        checks.positive("zeta", self.zeta)
        if self.eigenvalues is not None:
            checks.vector("eigenvalues", self.eigenvalues, length=d)
            checks.same_dtype(X=self.X, eigenvalues=self.eigenvalues)
            checks.nonnegative("the least of eigenvalues", self.eigenvalues.min())

    @property
    def n(self) -> int:
        """Number of examples."""
        return self.X.shape[0]

    @property
    def d(self) -> int:
        """Number of features."""
        return self.X.shape[1]

    @property
    def nu(self) -> float:
        """Spike exponent log(zeta) / log(n), which a single example does not have."""
        if self.n == 1:
            raise ValueError("X has 1 row, but 2 are needed for nu = log(zeta) / log(n)")
        return math.log(self.zeta) / math.log(self.n)

    @property
    def X_B(self) -> Tensor:
        """The bulk X - zeta z q^T, n x d, formed when asked for."""
        return torch.addr(self.X, self.z, self.q, alpha=-self.zeta)

    def bulk_times(self, r: Tensor) -> Tensor:
        """Compute X_B^T r = X^T r - zeta (z^T r) q, length d, without forming X_B.

        Args:
            r: A vector of length n, such as the residue.

        Raises:
            ValueError: If r does not fit.

        Example:
            >>> data = sample_spiked_data(30, 40, nu=0.25)
            >>> r = torch.ones(30).double()
            >>> torch.allclose(data.bulk_times(r), data.X_B.T @ r)
            True
        """
        checks.vector("r", r, length=self.n)
        return self.X.T @ r - self.zeta * (self.z @ r) * self.q

    def preactivation_scale(self, W: Tensor) -> Tensor:
        """Compute s_j = sqrt(w_j^T Sigma w_j), the standard deviation of w_j^T x, length m.

        Args:
            W: Inner weights, m x d.

        Raises:
            TypeError: If W has another dtype than the data.
            ValueError: For real data, whose covariance is unknown, or if W does not fit.

        Example:
            >>> data = sample_spiked_data(30, 40, nu=0.25, alpha=1.0)
            >>> W = torch.eye(40).double()[:2]  # variances 1 and 1/2 of the bulk, and the spike's
            >>> variances = torch.tensor([1, 0.5]).double() + (data.zeta * data.q[:2]) ** 2
            >>> torch.allclose(data.preactivation_scale(W), variances.sqrt())
            True
        """
        checks.matrix("W", W, columns=self.d)
        checks.same_dtype(X=self.X, W=W)
        if self.eigenvalues is None:
            raise ValueError(
                "these data have no known covariance; pass mu, or use the mean over the examples"
            )
        return torch.sqrt(W.square() @ self.eigenvalues + (self.zeta * (W @ self.q)) ** 2)


def bulk_eigenvalues(d: int, alpha: float) -> Tensor:
    """Compute the eigenvalues k^(-alpha), k = 1 ... d, of the bulk covariance.

    Args:
        d: Dimension.
        alpha: Decay exponent, at least 0; 0 is the isotropic bulk.

    Returns:
        Tensor of length d in float64.

    Raises:
        ValueError: If ``d`` is less than 1 or ``alpha`` is negative.

    Source: Low Rank Gradients, Assumption 2.

    Example:
        >>> bulk_eigenvalues(3, 1.0)
        tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64)
    """
    d, alpha = checks.positive_integer("d", d), checks.nonnegative("alpha", alpha)
    return torch.arange(1, d + 1, dtype=torch.float64) ** -alpha


def sample_spiked_data(
    n: int,
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    q: Tensor | None = None,
    seed: int | torch.Generator = 0,
) -> SpikedData:
    """Draw n examples from N(0, diag(k^-alpha) + zeta^2 q q^T) with zeta = n^nu.

    Taking the bulk covariance diagonal loses nothing: q and the weights are drawn uniformly.

    Args:
        n: Number of examples; Assumption 1 asks for n < d.
        d: Number of features.
        nu: Spike exponent, at least 0.
        alpha: Decay exponent of the bulk, at least 0.
        q: Unit spike direction of length d; uniform on the sphere if None.
        seed: Integer seed or generator.

    Returns:
        The data in float64, with z, q and zeta kept.

    Raises:
        ValueError: If a size is less than 1, an exponent is negative, or q is not a unit vector.

    Warns:
        AssumptionWarning: If n >= d.

    Source: Low Rank Gradients, Assumptions 1 and 2.

    Example:
        >>> data = sample_spiked_data(30, 40, nu=0.25, seed=1)
        >>> torch.allclose(data.X, data.X_B + data.zeta * torch.outer(data.z, data.q))
        True
    """
    n, nu = checks.positive_integer("n", n), checks.nonnegative("nu", nu)
    eigenvalues = bulk_eigenvalues(d, alpha)
    d = len(eigenvalues)
    if n >= d:
        warnings.warn(
            f"n = {n} is not below d = {d}: Assumption 1 asks for n/d -> psi_1 < 1, "
            "so the theorems do not cover these data",
            checks.AssumptionWarning,
            stacklevel=2,
        )
    stream = checks.random_stream(seed, "data")
    X = torch.randn(n, d, generator=stream, dtype=torch.float64) * eigenvalues.sqrt()
    z = torch.randn(n, generator=stream, dtype=torch.float64)
    if q is None:
        q = torch.randn(d, generator=stream, dtype=torch.float64)
        q = q / q.norm()
    checks.unit_rows("q", checks.vector("q", q, length=d)[None])
    if q.dtype != X.dtype:
        q = q.to(X) / q.to(X).norm()
    if nu * math.log(n) > 700:
        raise ValueError(f"nu is {nu:g}, but n^nu overflows; at most {700 / math.log(n):.0f} fits")
    zeta = float(n) ** nu
    return SpikedData(X.addr_(z, q, alpha=zeta), z, q, zeta, eigenvalues)


def split_spike(X: Tensor, q: Tensor | None = None) -> SpikedData:
    """Split given data along a direction: z is Xq scaled to length sqrt(n), zeta = |Xq| / sqrt(n).

    Args:
        X: Real data, n x d. Centred or not: that choice is part of the model, so it is yours.
        q: Unit direction of length d; the top right singular vector of X if None.

    Returns:
        SpikedData with no known covariance. X_B is then exactly orthogonal to q.

    Raises:
        TypeError: If X is not a floating-point tensor.
        ValueError: If X is not a finite matrix, q is not a unit vector, or X q = 0.

    Example:
        >>> data = split_spike(torch.tensor([[3.0, 0.0], [4.0, 1.0], [0.0, 2.0]]).double())
        >>> bool((data.X_B @ data.q).abs().max() < 1e-12)
        True
    """
    X = checks.matrix("X", X)
    if q is None:
        q = torch.linalg.eigh(X.T @ X).eigenvectors[:, -1]
        # Not times sign(sum): the entries of a centred direction can add up to exactly 0.
        q = -q if q.sum() < 0 else q
    checks.unit_rows("q", checks.vector("q", q, length=X.shape[1])[None])
    projection = X @ q
    zeta = float(projection.norm()) / math.sqrt(X.shape[0])
    if zeta == 0:
        raise ValueError("X q is 0, so the data have no spike along q; choose another direction")
    return SpikedData(X, projection / zeta, q, zeta)


def estimate_nu(X: Tensor, *, unit: str = "bulk") -> float:
    """Estimate the spike exponent from the two leading eigenvalues of X^T X / n.

    ``unit="bulk"`` computes log sqrt(lambda_1 / lambda_2) / log n: Assumption 2 sets the bulk's
    largest eigenvalue to 1, so the second eigenvalue is the unit. ``unit="raw"`` computes
    log sqrt(lambda_1) / log n, which changes with the units of the data.

    Args:
        X: Data, n x d.
        unit: ``"bulk"`` or ``"raw"``.

    Returns:
        The estimate; negative if the leading singular value is below one unit.

    Raises:
        ValueError: If X is not a finite matrix, has fewer than two rows or columns, has too low
            a rank, or the unit is unknown.

    Source: the estimator behind the paper's 0.784 is not in its text; this one is ours.

    Example:
        >>> X = sample_spiked_data(300, 400, nu=0.5, seed=0).X
        >>> bool(abs(estimate_nu(X, unit="raw") - 0.5) < 0.05)
        True
    """
    checks.choice("unit", unit, ("bulk", "raw"))
    n = checks.matrix("X", X).shape[0]
    if min(X.shape) < 2:
        raise ValueError(f"X has shape {tuple(X.shape)}, but two rows and two columns are needed")
    gram = X.T @ X if X.shape[1] <= n else X @ X.T
    second, first = (torch.linalg.eigvalsh(gram)[-2:] / n).tolist()
    ratio = first
    if unit == "bulk":
        # Rounding leaves a second eigenvalue of either sign where there is none.
        if not second > 1e-12 * first:
            raise ValueError("X has rank one, so it has no bulk to measure its spike by")
        ratio = first / second
    if ratio == 0:
        raise ValueError("X is zero, so it has no spike")
    return 0.5 * math.log(ratio) / math.log(n)


@dataclass(frozen=True)
class Targets:
    """Targets y_i and the directions omega they were made from.

    Attributes:
        y: Targets, length n.
        directions: Unit directions omega, one a row.
    """

    y: Tensor = field(repr=False)
    directions: Tensor = field(repr=False)


Link = Callable[[Tensor], Tensor]

#: Link functions of each target model; y is their sum over independent directions, plus noise.
#: The paper's triple-index model is described in an appendix we do not have, so these are ours:
#: one with links of several kinds, and one with even links only.
TARGETS: dict[str, tuple[Link, ...]] = {
    "single-index": (torch.sigmoid,),
    "triple-index": (torch.relu, torch.sigmoid, torch.tanh),
    "triple-index-even": (torch.abs, torch.cos, lambda t: (t.square() - 1) / math.sqrt(2)),
}


def sample_targets(
    X: Tensor,
    model: str = "triple-index",
    *,
    noise: float = 0.1,
    along: Tensor | None = None,
    seed: int | torch.Generator = 0,
) -> Targets:
    """Draw targets y = sum_k link_k(omega_k^T x) + noise with random unit directions omega_k.

    Args:
        X: Data, n x d.
        model: A key of ``TARGETS``.
        noise: Standard deviation of the Gaussian noise, at least 0.
        along: A unit vector to use as the first direction, such as q; random if None.
        seed: Integer seed or generator.

    Returns:
        Targets and the directions used.

    Raises:
        ValueError: If the model is unknown, ``noise`` is negative, shapes do not fit, or
            ``along`` is not a unit vector.

    Example:
        >>> X = sample_spiked_data(30, 40, nu=0.0).X
        >>> sample_targets(X, "single-index", seed=3).y.shape
        torch.Size([30])
    """
    n, d = checks.matrix("X", X).shape
    links = TARGETS[checks.choice("model", model, TARGETS)]
    noise = checks.nonnegative("noise", noise)
    stream = checks.random_stream(seed, "targets")
    directions = torch.randn(len(links), d, generator=stream, dtype=torch.float64)
    if along is not None:
        directions[0] = checks.unit_rows("along", checks.vector("along", along, length=d)[None])[0]
    directions /= directions.norm(dim=1, keepdim=True)
    y = noise * torch.randn(n, generator=stream, dtype=torch.float64)
    directions = directions.to(X)
    y = y.to(X) + sum(link(X @ omega) for link, omega in zip(links, directions))
    return Targets(y, directions)


def binary_labels(y: Tensor) -> Tensor:
    """Turn real targets into labels -1 and +1, split at their median.

    Args:
        y: Real targets, length n.

    Returns:
        Labels of the same shape and dtype.

    Raises:
        ValueError: If y is not a finite vector.

    Example:
        >>> binary_labels(torch.tensor([0.1, 0.7, 0.2]).double())
        tensor([-1.,  1., -1.], dtype=torch.float64)
    """
    return torch.where(checks.vector("y", y) > y.median(), 1.0, -1.0).to(y)
