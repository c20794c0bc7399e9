"""Eigenvalues of matrices known by their products: the largest, projections, and the density."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.curvature import SymmetricOperator


class ConvergenceError(RuntimeError):
    """An eigensolver that ran out of steps, or could not start."""


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """The largest eigenvalues of a symmetric operator.

    Attributes:
        values: k eigenvalues, falling.
        vectors: P x k orthonormal eigenvectors.
        residuals: |A v - lambda v| of each, which bounds the error of lambda; None if they were
            not asked for.
        products: Products with A that were needed.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor | None
    products: int


def top_eigenpairs(
    operator: SymmetricOperator,
    k: int,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    subspace: int | None = None,
    products: int = 2000,
    residuals: bool = True,
    copies: bool = False,
    seed: int | torch.Generator = 0,
) -> Eigenpairs:
    """Return the k largest eigenvalues of A and their eigenvectors, by ARPACK's Lanczos method.

    From one starting vector an eigenvalue of multiplicity m may come back fewer than m times, and
    smaller ones in place of the rest. Trained networks have simple eigenvalues; toys and symmetric
    data may not: there use ``copies``, or a small operator's ``matrix()``.

    Args:
        operator: A.
        k: How many, less than P.
        start: A vector (P), or rows in whose span to start, in a random direction: class centres
            make a good one. By default a random vector.
        tolerance: Of the residuals, relative to the eigenvalue.
        subspace: Lanczos vectors kept, above k: the first cycle takes one product more, each later
            one as many less k. By default 2 k + 1, at least 20; fewer are faster where little
            accuracy is needed and the eigenvalues lie apart.
        products: Number of products after which to give up.
        residuals: Compute them, at the cost of k more products.
        copies: Search what is left of A for further copies of multiple eigenvalues, which takes
            some 20 products or more.
        seed: Seed of the random vector.

    Raises:
        ValueError: If k is not below P, ``subspace`` not above k, ``start`` has the wrong length,
            NaN or only zeros, or a product with A is not finite.
        ConvergenceError: If not all k converged; says how many did.

    Example:
        >>> a = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
        >>> operator = SymmetricOperator(30, torch.float64, a.device, lambda rows: rows @ a)
        >>> top_eigenpairs(operator, 3).values.round(decimals=6).tolist()
        [30.0, 29.0, 28.0]
    """
    k = checks.positive_integer("k", k)
    if k >= operator.size:
        raise ValueError(
            f"k is {k}, but a number below {operator.size}, the size of the matrix, is needed"
        )
    checks.positive("tolerance", tolerance)
    checks.positive_integer("products", products)
    if subspace is not None and not k < checks.positive_integer("subspace", subspace):
        raise ValueError(f"subspace is {subspace}, but a number above k = {k} is needed")
    stream = checks.random_stream(seed, "eigenvectors")
    first = _start(operator, start, stream)
    values, vectors, used = _arpack(operator, k, first, tolerance, products, subspace)
    while copies:
        rest = _without(operator, values, vectors)
        value, vector, more = _arpack(rest, 1, _start(operator, None, stream), tolerance, products)
        used += more
        if value[0] <= values[-1] + tolerance * abs(values[-1]):
            break
        order = torch.cat([values, value]).argsort(descending=True)[:k]
        values = torch.cat([values, value])[order]
        vectors = torch.cat([vectors, vector], 1)[:, order.to(operator.device)]
    errors = None
    if residuals:
        errors = (operator @ vectors - vectors * values.to(vectors)).norm(dim=0).cpu()
    return Eigenpairs(values, vectors, errors, used)


def _finite_product(operator: SymmetricOperator, vector: Tensor) -> Tensor:
    image = operator @ vector
    if not torch.isfinite(image.sum()):
        raise ValueError("a product with A is not finite: its parameters or data have overflown")
    return image


def _arpack(
    operator: SymmetricOperator,
    k: int,
    first: Tensor,
    tolerance: float,
    products: int,
    subspace: int | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Return k eigenvalues, falling, their eigenvectors, and the number of products."""
    counted = 0

    def product(vector: np.ndarray) -> np.ndarray:
        nonlocal counted
        counted += 1
        column = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1))
        return _finite_product(operator, column.to(operator.dtype)).cpu().numpy()

    # ARPACK computes in the vectors' own precision.
    start = first.cpu().to(operator.dtype).numpy()
    matrix = LinearOperator((operator.size, operator.size), matvec=product, dtype=start.dtype)
    subspace = min(operator.size, subspace or max(2 * k + 1, 20))
    restarts = max(1, products // subspace)
    try:
        values, vectors = eigsh(
            matrix, k, which="LA", v0=start, tol=tolerance, ncv=subspace, maxiter=restarts
        )
    except ArpackNoConvergence as error:
        raise ConvergenceError(
            f"{len(error.eigenvalues)} of {k} eigenvalues converged to {tolerance:g} in {counted} "
            "products; allow more products, a larger tolerance, or ask for fewer eigenvalues"
        ) from error
    except ArpackError as error:
        raise ConvergenceError(f"ARPACK could not start: is A zero? It says: {error}") from error
    order = np.argsort(values)[::-1].copy()
    vectors = torch.from_numpy(vectors[:, order]).to(operator.device)
    return torch.from_numpy(values[order]), vectors, counted


def _without(operator: SymmetricOperator, values: Tensor, vectors: Tensor) -> SymmetricOperator:
    """Return A with these eigenvalues moved below all of themselves."""
    shift = (values - values[-1] + values.abs().max()).to(vectors)
    return SymmetricOperator(
        operator.size,
        operator.dtype,
        operator.device,
        lambda rows: operator.product(rows) - (rows @ vectors * shift) @ vectors.T,
    )


def rayleigh_ritz(operator: SymmetricOperator, basis: Tensor) -> Eigenpairs:
    """Return the eigenpairs of A restricted to a span: eig(Q^T A Q), Q an orthonormal basis.

    By Cauchy's interlacing, the k-th value is at most the k-th eigenvalue of A.

    Args:
        operator: A.
        basis: Rows that span the subspace (K x P); directions below rounding are dropped.

    Raises:
        ValueError: If the rows are not of length P, or are all zero.

    Example:
        >>> a = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
        >>> operator = SymmetricOperator(30, torch.float64, a.device, lambda rows: rows @ a)
        >>> rayleigh_ritz(operator, torch.eye(30, dtype=torch.float64)[[4, 9]]).values.tolist()
        [10.0, 5.0]
    """
    q = orthonormal_columns(checks.matrix("basis", basis, columns=operator.size))
    image = operator @ q
    small = (q.T @ image).cpu().double()
    values, rotation = torch.linalg.eigh((small + small.T) / 2)
    values, rotation = values.flip(0), rotation.flip(1).to(q)
    vectors = q @ rotation
    residuals = (image @ rotation - vectors * values.to(q)).norm(dim=0)
    return Eigenpairs(values.cpu(), vectors, residuals.cpu(), q.shape[1])


def orthonormal_columns(rows: Tensor) -> Tensor:
    """Return an orthonormal basis (P x r) of the span of the rows (K x P), r their numerical rank.

    From the K x K Gram matrix of the normalised rows, in float64.

    Args:
        rows: K x P.

    Raises:
        ValueError: If all rows are zero, or one has NaN or infinity.

    Example:
        >>> orthonormal_columns(torch.tensor([[3.0, 0.0], [6.0, 0.0]])).shape
        torch.Size([2, 1])
    """
    lengths = checks.matrix("rows", rows).norm(dim=1)
    rows = rows[lengths > 0] / lengths[lengths > 0, None]
    if len(rows) == 0:
        raise ValueError("all rows are zero, so they span nothing; at least one other is needed")
    values, vectors = torch.linalg.eigh((rows @ rows.T).cpu().double())
    kept = values > len(rows) * 10 * torch.finfo(rows.dtype).eps * values[-1]
    columns = rows.T @ (vectors[:, kept] / values[kept].sqrt()).to(rows)
    # A second pass, since the Gram matrix squares the condition number.
    return torch.linalg.qr(columns).Q


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """Spectral density of A, as a few weighted points for each random probe.

    The mean over probes of sum_j w_j f(theta_j) estimates tr f(A) / P, without bias for polynomials
    f of degree up to 2 * steps - 1.

    Attributes:
        points: Ritz values theta, probes x steps, rising.
        weights: Their weights w, probes x steps; those of a probe sum to 1.
        size: P.

    Example:
        >>> a = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
        >>> operator = SymmetricOperator(30, torch.float64, a.device, lambda rows: rows @ a)
        >>> density = spectral_density(operator, probes=200, steps=5)
        >>> mean, error = density.mean(lambda x: x)  # the trace over 30 is 15.5
        >>> abs(mean - 15.5) < 3 * error < 1
        True
        >>> x = torch.linspace(-20, 50, 500, dtype=torch.float64)
        >>> round(float(torch.trapezoid(density.smooth(x, width=2.0), x)), 6)
        1.0
    """

    points: Tensor
    weights: Tensor
    size: int

    def mean(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """Return the estimate of tr f(A) / P and its standard error (NaN for a single probe).

        Args:
            function: f, of a tensor of eigenvalues, entry by entry.
        """
        values = (self.weights * function(self.points)).sum(1)
        error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        return float(values.mean()), error

    def smooth(self, at: Tensor, *, width: float, scale: str = "linear") -> Tensor:
        """Return the density at some points, each Ritz value widened to a Gaussian.

        Args:
            at: Where: eigenvalues if ``linear``; positive eigenvalues if ``log``.
            width: Standard deviation of the Gaussian, in eigenvalues or in powers of ten.
            scale: ``linear``: density per eigenvalue. ``log``: density of log10 lambda, of the
                positive Ritz values.

        Returns:
            The density, mean over probes, of the length of ``at``.

        Raises:
            ValueError: If ``scale`` is another one, or ``width`` is not positive.
        """
        checks.choice("scale", scale, ("linear", "log"))
        checks.positive("width", width)
        points, weights = self.points.flatten(), self.weights.flatten() / len(self.points)
        if scale == "log":
            points, weights, at = points[points > 0].log10(), weights[points > 0], at.log10()
        bumps = torch.exp(-0.5 * ((at[:, None] - points) / width) ** 2)
        return bumps @ weights / (width * (2 * torch.pi) ** 0.5)


def spectral_density(
    operator: SymmetricOperator,
    *,
    probes: int = 4,
    steps: int = 60,
    seed: int | torch.Generator = 0,
) -> SpectralDensity:
    """Return the spectral density of A by Lanczos from random probes (stochastic Lanczos).

    A probe's tridiagonal matrix T = Q^T A Q has eigenvalues theta and eigenvectors s; the weight of
    theta_j is the square of the first component of s_j, the rule of Gauss quadrature. Each new
    Lanczos vector is orthogonalised against all earlier ones, twice: without that the largest
    eigenvalues come back as ghosts.

    Args:
        operator: A.
        probes: Number of random unit vectors.
        steps: Lanczos steps of each; fewer if an invariant subspace is reached.
        seed: Seed, or generator, of the probes.

    Raises:
        ValueError: If probes or steps are not whole numbers of at least 1, or a product with A is
            not finite.

    Source: Papyan 2018 (FastLanczos); Ubaru, Chen, Saad 2017.

    Example:
        >>> a = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
        >>> operator = SymmetricOperator(30, torch.float64, a.device, lambda rows: rows @ a)
        >>> density = spectral_density(operator, probes=1, steps=30)
        >>> torch.allclose(density.points[0], torch.arange(1.0, 31.0, dtype=torch.float64))
        True
    """
    stream = checks.random_stream(seed, "probes")
    steps = min(checks.positive_integer("steps", steps), operator.size)
    points, weights = [], []
    for _ in range(checks.positive_integer("probes", probes)):
        probe = torch.randn(operator.size, generator=stream, dtype=torch.float64, device="cpu")
        diagonal, beside = _lanczos(operator, probe.to(operator.device, operator.dtype), steps)
        values, vectors = eigh_tridiagonal(diagonal, beside)
        # A probe that ended early gets points of no weight, so that all have the same number.
        missing = steps - len(values)
        points.append(np.pad(values, (0, missing), mode="edge"))
        weights.append(np.pad(vectors[0] ** 2, (0, missing)))
    return SpectralDensity(
        torch.from_numpy(np.stack(points)), torch.from_numpy(np.stack(weights)), operator.size
    )


def _lanczos(operator: SymmetricOperator, probe: Tensor, steps: int) -> tuple[list, list]:
    """Return diagonal and off-diagonal of T after so many steps, all vectors kept orthogonal."""
    basis = torch.zeros(steps, operator.size, dtype=operator.dtype, device=operator.device)
    diagonal, beside = [], []
    vector = probe / probe.norm()
    for step in range(steps):
        basis[step] = vector
        image = _finite_product(operator, vector)
        diagonal.append(float(image @ vector))
        for _ in range(2):
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        length = float(image.norm())
        scale = max(map(abs, diagonal + beside))
        if step + 1 == steps or length <= 10 * torch.finfo(operator.dtype).eps * scale:
            break
        beside.append(length)
        vector = image / length
    return diagonal, beside


def _start(operator: SymmetricOperator, start: Tensor | None, stream: torch.Generator) -> Tensor:
    """Return a random vector, or a random one in the span of the given rows."""
    if start is None:
        return torch.randn(operator.size, generator=stream, dtype=torch.float64, device="cpu")
    rows = start[None] if isinstance(start, Tensor) and start.ndim == 1 else start
    rows = checks.matrix("start", rows, columns=operator.size)
    lengths = rows.norm(dim=1, keepdim=True)
    if not (lengths > 0).any():
        raise ValueError("start is zero; give a direction, or leave it out for a random one")
    # Directions of class centres with equal weights may add up to nothing: they are a simplex.
    weights = torch.randn(len(rows), generator=stream, dtype=torch.float64, device="cpu")
    units = rows / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return weights.to(rows) @ units
