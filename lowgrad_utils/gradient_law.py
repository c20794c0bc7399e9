"""The law behind the spikes: the spectrum of the gradient from a population matrix T.

Given data and residue, column j of G = (gamma/n) X^T [(r a^T) o sigma'(X W^T)] depends on w_j and
a_j only. Rows w_j are independent, hence so are the columns, with second moment T / m:

    T = (gamma^2 m / n^2) X^T D_r Phi D_r X,    Phi_ik = E_w sigma'(w^T x_i) sigma'(w^T x_k).

G G^T is then close to a sample covariance with population T and m samples. Its outliers are the
spikes S1, S12, S2 and a third one: nothing but T is needed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.networks import ACTIVATIONS, Activation, Function, TwoLayerNetwork
from lowgrad_utils.random_matrices import SampleCovariance

# The expansion stops at an error of 1e-9 relative to the diagonal. Examples of correlation near 1
# and large preactivations need more orders than are affordable: 5 % for such a pair are admitted.
_TOLERANCE, _ADMITTED, _MOST_ORDERS = 1e-9, 0.05, 250

# Mean of the law of the largest eigenvalue of a real symmetric matrix at the edge, in its scale.
_TRACY_WIDOM_MEAN = -1.2065


@torch.no_grad()
def derivative_kernel(
    K: Tensor,
    activation: str,
    *,
    order: int | None = None,
    mean: Tensor | None = None,
    dimension: int | None = None,
) -> Tensor:
    """Compute Phi_ik = E sigma'(h_i) sigma'(h_k) for preactivations h of covariance K.

    Phi_ik = sum_l a_l(s_i) a_l(s_k) P_l(rho_ik), s_i^2 = K_ii, rho the correlations, and
    a_l(s) = E sigma'(s g) p_l(g). For Gaussian h, p_l are the normalised Hermite polynomials and
    P_l(rho) = rho^l. For h = X w with w uniform on the unit sphere of R^dimension, K = X X^T / d,
    p_l are Gegenbauer's polynomials and P_l Legendre's in that dimension: exact at any size.

    Args:
        K: Covariance of the preactivations, n x n.
        activation: A key of ``ACTIVATIONS``.
        order: Keep the orders 0 ... order only, and give what they lack on the diagonal as
            independent noise. None: all orders, that is Phi itself.
        mean: Means of the preactivations, length n; 0 if None.
        dimension: Dimension of the sphere, at least 3; None for Gaussian preactivations.

    Returns:
        Phi, n x n, exact on the diagonal whatever the order.

    Raises:
        TypeError: If a tensor is not one of floating point.
        ValueError: If K is not square with a positive diagonal, a correlation exceeds 1, shapes
            do not fit, ``dimension`` is below 3, the activation is unknown, or too many orders
            would be needed.

    Source: this book; ReLU's arcsine is Cho and Saul's (2009), the expansion over the sphere is
    Schoenberg's (1942).

    Example:
        >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
        >>> derivative_kernel(K, "relu")  # 1/4 + arcsin(1/2) / (2 pi) = 1/3
        tensor([[0.5000, 0.3333],
                [0.3333, 0.5000]], dtype=torch.float64)
    """
    s, rho, mean = _checked(K, mean)
    sigma = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)]
    if order is not None and order != 0:
        order = checks.positive_integer("order", order)
    if dimension is not None and checks.positive_integer("dimension", dimension) < 3:
        raise ValueError(f"dimension is {dimension}, but at least 3 is needed")
    if dimension is not None and mean is not None:
        raise ValueError("dimension is given with a mean, but rows on the sphere have mean 0")
    if activation == "relu" and order is None and mean is None:
        return 0.25 + torch.asin(rho) / (2 * math.pi)
    coefficients, square = _coefficients(sigma, s, mean, dimension)
    Phi, missing = torch.zeros_like(rho), square.clone()
    for k, (a, power) in enumerate(zip(coefficients, _powers(rho, dimension))):
        if order is not None and k > order:
            break
        Phi.addcmul_(torch.outer(a, a), power)
        missing -= a.square()
        if order is None and k > 1 and _negligible(k, missing, power, square):
            break
    Phi.diagonal().copy_(square)
    return Phi


@dataclass(frozen=True)
class GradientOutlier:
    """An outlying singular value of the gradient as the law predicts it.

    Attributes:
        value: The singular value s = sqrt(psi(t)).
        population: Its eigenvalue t of T.
        direction: T's eigenvector, length d.
        overlap: Expected squared cosine between the left singular vector and ``direction``.
    """

    value: float
    population: float
    direction: Tensor = field(repr=False)
    overlap: float


@dataclass(frozen=True)
class GradientLaw:
    """The law of the singular values and left singular vectors of a gradient with population T.

    Attributes:
        T: Population matrix, d x d: G has columns of second moment T / m.
        m: Number of columns.

    Raises:
        TypeError: If T is not a floating-point tensor.
        ValueError: If T is not square, not positive semidefinite beyond rounding, or zero.

    Example:
        >>> law = GradientLaw(torch.diag(torch.tensor([9.0] + [1.0] * 100)).double(), 400)
        >>> round(law.outliers[0].value, 2), round(law.edge, 2), round(law.quantile(0.5), 2)
        (3.05, 1.5, 0.96)
        >>> law.typical_values(3).round(decimals=2).tolist()
        [3.05, 1.48, 1.45]
        >>> e = torch.zeros(101).double()
        >>> e[0] = 1  # the eigenvector of 9
        >>> law.squared_cosines(e).round(decimals=2).tolist()
        [0.97]
    """

    T: Tensor = field(repr=False)
    m: int

    def __post_init__(self):
        checks.matrix("T", self.T, columns=checks.matrix("T", self.T).shape[0])
        checks.positive_integer("m", self.m)
        self.covariance  # noqa: B018  (fails here rather than later)

    @cached_property
    def _eigenpairs(self) -> tuple[Tensor, Tensor]:
        t, V = torch.linalg.eigh(self.T)
        return t.flip(0), V.flip(1)

    @property
    def population(self) -> Tensor:
        """Eigenvalues of T, descending."""
        return self._eigenpairs[0]

    @property
    def vectors(self) -> Tensor:
        """Eigenvectors of T, one a column, in the order of ``population``."""
        return self._eigenpairs[1]

    @cached_property
    def covariance(self) -> SampleCovariance:
        """The law of the eigenvalues of G G^T."""
        return SampleCovariance(self.population, self.m)

    @property
    def edge(self) -> float:
        """Upper edge of the bulk of the singular values."""
        return math.sqrt(self.covariance.edge)

    @property
    def edge_scale(self) -> float:
        """Scale of the fluctuations of the bulk's largest singular value; 0 without a bulk."""
        return self.covariance.edge_scale / (2 * self.edge) if self.edge else 0.0

    @cached_property
    def outliers(self) -> list[GradientOutlier]:
        """The outlying singular values, largest first."""
        return [
            GradientOutlier(math.sqrt(o.value), o.population, self.vectors[:, k], o.overlap)
            for k, o in enumerate(self.covariance.outliers)
        ]

    def density(self, s: Tensor) -> Tensor:
        """Compute the density of the nonzero singular values of the bulk at points s > 0.

        Args:
            s: Points, any shape, positive.

        Raises:
            ValueError: If a point is not positive, or there is no bulk.
        """
        if not bool((s > 0).all()):
            raise ValueError(f"s has the point {float(s.min()):g}, but positive ones are needed")
        return 2 * s * self.covariance.density(s.square())

    def quantile(self, level: float) -> float:
        """Compute a quantile of the nonzero singular values of the bulk.

        Args:
            level: Share below it, between 0 and 1, such as 0.5 for the median.

        Raises:
            ValueError: If the level is not between 0 and 1, or there is no bulk.
        """
        return math.sqrt(self.covariance.quantile(level))

    def typical_values(self, count: int) -> Tensor:
        """Compute where the largest singular values are to be expected.

        First the outliers; the bulk's largest at Tracy and Widom's mean, 1.21 scales below the
        edge; its j-th at the quantile 1 - (j - 1/2) / N of the N in the bulk.

        Args:
            count: How many, at most the number of nonzero ones.

        Returns:
            Singular values, length ``count``.

        Raises:
            ValueError: If there are fewer.
        """
        law, count = self.covariance, checks.positive_integer("count", count)
        size = law.count + (inside := min(len(law.bulk), self.m - law.count))
        if count > size:
            raise ValueError(f"count is {count}, but the gradient has {size} nonzero ones at most")
        values = [outlier.value for outlier in self.outliers][:count]
        if len(values) < count:
            values.append(self.edge + _TRACY_WIDOM_MEAN * self.edge_scale)
        ranks = torch.arange(2, max(2, count - law.count + 1), dtype=torch.float64)
        if len(ranks):
            inner = law.quantiles(1 - (ranks - 0.5) / inside).sqrt().clamp(max=values[-1])
            values += inner.tolist()
        return torch.tensor(values, dtype=torch.float64)

    def squared_cosines(self, direction: Tensor) -> Tensor:
        """Compute the expected squared cosines between left singular vectors and a direction.

        Args:
            direction: A vector of length d, such as q or X_B^T r; it need not be of unit length.

        Returns:
            One number for each outlier.

        Raises:
            ValueError: If the vector does not fit or is zero.
        """
        checks.vector("direction", direction, length=self.T.shape[0])
        length = float(direction.norm())
        if length == 0:
            raise ValueError("direction is zero, but a direction is needed")
        shares = (self.vectors.T @ direction / length).square()
        return self.covariance.overlaps @ shares[: len(self.covariance.population)]


@torch.no_grad()
def gradient_law(
    X: Tensor,
    network: TwoLayerNetwork,
    residue: Tensor,
    *,
    order: int | None = None,
    shift: Tensor | None = None,
    kernel: Tensor | None = None,
) -> GradientLaw:
    """Compute the law of the gradient at weights drawn independently of data and residue.

    Only the network's activation, scaling and width enter, not its weights: those are averaged
    over rows uniform on the sphere. The outer weights must be -1 or +1.

    Args:
        X: Data, n x d.
        network: The network.
        residue: r_i = dl/df at (f(x_i), y_i), length n.
        order: As in ``derivative_kernel``; 1 is the two-term form of this book's statement.
        shift: The shift of the rows, as in ``TwoLayerNetwork.random``; to first order in the
            normalisation that follows it.
        kernel: Phi, n x n, if it is known; ``order`` and ``shift`` are then not used.

    Raises:
        TypeError: If an argument is not a floating-point tensor, or dtypes differ.
        ValueError: If shapes do not fit, an entry is NaN or infinite, the residue is zero, or an
            outer weight is not -1 or +1.

    Source: this book.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data
        >>> X = sample_spiked_data(150, 200, nu=0.25).X
        >>> network = TwoLayerNetwork.random(200, 250, activation="softplus")
        >>> law = gradient_law(X, network, torch.ones(150).double())
        >>> law.outliers[0].value > 3 * law.edge
        True
    """
    n, d = checks.matrix("X", X, columns=network.W.shape[1]).shape
    checks.vector("residue", residue, length=n)
    checks.same_dtype(W=network.W, X=X, residue=residue)
    _check_signs(network)
    if not bool(residue.any()):
        raise ValueError("residue is zero, and so is the gradient")
    if kernel is None:
        K, mean = preactivation_moments(X, shift)
        kernel = derivative_kernel(
            K, network.activation, order=order, mean=mean, dimension=d if shift is None else None
        )
    checks.matrix("kernel", kernel, rows=n, columns=n)
    weighted = X * residue[:, None]
    T = weighted.T @ (kernel @ weighted) * (network.gamma**2 * network.m / n**2)
    return GradientLaw((T + T.T) / 2, network.m)


@torch.no_grad()
def mean_column(X: Tensor, network: TwoLayerNetwork, residue: Tensor) -> Tensor:
    """Compute the mean of G's columns that a residue of the network's own outputs brings.

    For an independent residue the columns have mean 0 over the signs a_j. Given the outputs f,
    which are a sum over neurons, column j is drawn towards them:

        E[g_j | f] = (1/(n m)) X^T D_r Psi N^-1 f,    Psi_ik = E sigma'(h_i) sigma(h_k),
                                                      N_ik = E sigma(h_i) sigma(h_k),

    by linear regression of a_j sigma'(X w_j) on f = gamma sum_j a_j sigma(X w_j). Its part that
    does not depend on the targets is (gamma^2/n) X^T (l'' o E sigma sigma'), what one neuron sees
    of itself in the residue.

    Args:
        X: Data, n x d, d at least 2, no row zero.
        network: The network whose outputs are in the residue; weights uniform on the sphere, outer
            weights -1 and +1.
        residue: r_i = dl/df at (f(x_i), y_i), length n.

    Returns:
        The mean, length d; of order gamma^2 n^(-1/2) times lengths of examples.

    Raises:
        TypeError: If an argument is not a floating-point tensor, or dtypes differ.
        ValueError: If shapes do not fit, an entry is NaN or infinite, an outer weight is not -1
            or +1, d is 1, or a row of X is zero.

    Source: this book.

    Example:
        >>> X = 3 * torch.eye(5).double()
        >>> for activation in ("softplus", "erf"):  # of erf sigma sigma' is odd, with mean 0
        ...     network = TwoLayerNetwork.random(5, 50, activation=activation)
        ...     print(bool(mean_column(X, network, network(X)).norm() > 1e-9))
        True
        False
    """
    n, d = checks.matrix("X", X, columns=network.W.shape[1]).shape
    checks.vector("residue", residue, length=n)
    checks.same_dtype(W=network.W, X=X, residue=residue)
    _check_signs(network)
    if d < 2:
        raise ValueError("X has 1 column, but at least 2 are needed: rows w_j on a sphere")
    if not bool(X.any(dim=1).all()):
        row = int((~X.any(dim=1)).nonzero()[0])
        raise ValueError(f"row {row} of X is zero, whose preactivations are no variables; drop it")
    s, rho, _ = _checked(X @ X.T / d, None)
    value, derivative = network.sigma.value, network.sigma.derivative
    N = _kernel(value, value, s, rho, d)
    # Rounding can make the smallest eigenvalues of nearly equal examples negative.
    N.diagonal().mul_(1 + 1e-10)
    weights = _kernel(derivative, value, s, rho, d) @ torch.linalg.solve(N, network(X))
    return X.T @ (residue * weights) / (n * network.m)


def _check_signs(network: TwoLayerNetwork) -> None:
    if not bool((network.a.abs() == 1).all()):
        strange = network.a[network.a.abs() != 1][0].item()
        raise ValueError(f"a has the entry {strange:g}, but the law needs outer weights -1 and +1")


def _kernel(left: Function, right: Function, s: Tensor, rho: Tensor, dimension: int) -> Tensor:
    """Compute E left(h_i) right(h_k) over the sphere, as ``derivative_kernel`` does for sigma'."""
    x, weights = _nodes(max(1.0, float(s.max())), dimension)
    h = s[:, None] * x.to(s)
    first, second, weights = left(h), right(h), weights.to(s)
    total = torch.zeros_like(rho)
    rests = [first.square() @ weights, second.square() @ weights]
    squares = [rest.clone() for rest in rests]
    for k, (p, power) in enumerate(zip(_polynomials(x, dimension), _powers(rho, dimension))):
        a, b = first @ (weights * p.to(s)), second @ (weights * p.to(s))
        total.addcmul_(torch.outer(a, b), power)
        rests = [rests[0] - a.square(), rests[1] - b.square()]
        if k > 1 and any(_negligible(k, rest, power, whole) for rest, whole in zip(rests, squares)):
            break
    total.diagonal().copy_((first * second) @ weights)
    return total


def preactivation_moments(X: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute covariance and mean of X w, w = (u + shift) / |u + shift|, u on the sphere.

    1/|u + shift| = (1 - shift^T u / |.|^2) / |.| to first order, |.|^2 = 1 + |shift|^2: along the
    shift, normalisation takes away a share |shift|^2 / |.|^2 of the fluctuations.

    Args:
        X: Data, n x d.
        shift: The shift of the rows, length d; None for none.

    Returns:
        The covariance, n x n, and the mean, length n; None without a shift, where it is 0.

    Raises:
        ValueError: If the shift does not fit.

    Example:
        >>> X, shift = torch.eye(2).double(), torch.tensor([0.75, 0.0]).double()
        >>> preactivation_moments(X, shift)[1]  # 0.75 / sqrt(1 + 0.75^2)
        tensor([0.6000, 0.0000], dtype=torch.float64)
    """
    d = X.shape[1]
    if shift is None:
        return X @ X.T / d, None
    along = X @ checks.vector("shift", shift, length=d)
    total = 1 + shift.square().sum()
    effective = (X - torch.outer(along / total, shift)) / total.sqrt()
    return effective @ effective.T / d, along / total.sqrt()


def _checked(K: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check covariance and mean; return standard deviations, correlations and mean."""
    K = checks.matrix("K", K, columns=checks.matrix("K", K).shape[0])
    if not bool((K.diagonal() > 0).all()):
        raise ValueError("K has a diagonal entry that is not positive, but variances are needed")
    s = K.diagonal().sqrt()
    rho = K / torch.outer(s, s)
    if float(rho.abs().max()) > 1 + 1e-6:
        raise ValueError(f"K has a correlation {float(rho.abs().max()):g}, but at most 1 is needed")
    rho = rho.clamp(-1, 1)
    rho.fill_diagonal_(1)
    if mean is not None:
        checks.vector("mean", mean, length=len(s))
        checks.same_dtype(K=K, mean=mean)
    return s, rho, mean


def _negligible(k: int, missing: Tensor, power: Tensor, square: Tensor) -> bool:
    """Whether orders after k, whose squares sum to ``missing``, matter off the diagonal."""
    # Cauchy and Schwarz: relative to the diagonal, later orders add at most this.
    share = (missing.clamp(min=0) / square).sqrt()
    left = power.abs().mul_(torch.outer(share, share)).fill_diagonal_(0).max()
    if k < _MOST_ORDERS or left <= _TOLERANCE:
        return bool(left <= _TOLERANCE)
    if left > _ADMITTED:
        raise ValueError(
            f"K has correlations so close to 1 that {_MOST_ORDERS} orders leave errors of "
            f"{float(left):.2g}; give an order, or examples that differ more"
        )
    return True


def _coefficients(
    sigma: Activation, s: Tensor, mean: Tensor | None, dimension: int | None
) -> tuple[Iterator[Tensor], Tensor]:
    """Return a_k = E sigma'(mean + s g) p_k(g) for each example, k = 0, 1, ...; and E sigma'^2."""
    if sigma.name == "relu" and mean is not None:
        return _jump_coefficients(mean / s), torch.special.ndtr(mean / s)
    # A kink between nodes, as a mean brings, is met by finer panels.
    x, weights = _nodes(max(1.0, float(s.max())) * (1 if mean is None else 8), dimension)
    h = s[:, None] * x.to(s)
    values = sigma.derivative(h if mean is None else h + mean[:, None])
    terms = (values @ (weights * p).to(s) for p in _polynomials(x, dimension))
    return terms, values.square() @ weights.to(s)


def _jump_coefficients(t: Tensor) -> Iterator[Tensor]:
    """Yield E 1(g > -t) he_k(g) = he_{k-1}(-t) phi(t) / sqrt(k) for Gaussian g."""
    yield torch.special.ndtr(t)
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    previous, current, k = torch.zeros_like(t), torch.ones_like(t), 1
    while True:
        yield current * density / math.sqrt(k)
        previous, current = current, (-t * current - math.sqrt(k - 1) * previous) / math.sqrt(k)
        k += 1


def _nodes(fineness: float, dimension: int | None) -> tuple[Tensor, Tensor]:
    """Place nodes and weights for the mean over a coordinate of variance 1 (normal, or sphere).

    Panels of Gauss and Legendre, which meet at 0, where sigma' may have a kink or a jump. On the
    sphere the coordinate is sqrt(d) sin(angle), with weight cos(angle)^(d - 2).
    """
    reach = 12.0
    stretch = 1.0 if dimension is None else math.sqrt(dimension)
    top = reach if dimension is None else math.asin(min(1.0, reach / stretch))
    panels = math.ceil(2 * top * stretch * fineness)
    legendre, legendre_weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(16))
    left = torch.arange(panels, dtype=torch.float64) * (top / panels)
    half = (left[:, None] + (legendre + 1) / 2 * (top / panels)).flatten()
    weights = legendre_weights.repeat(panels)
    if dimension is None:
        x, weights = half, weights * torch.exp(-half.square() / 2)
    else:
        x, weights = stretch * half.sin(), weights * half.cos().pow(dimension - 2)
    weights = weights / (2 * weights.sum())
    return torch.cat([-x.flip(0), x]), torch.cat([weights.flip(0), weights])


def _polynomials(x: Tensor, dimension: int | None) -> Iterator[Tensor]:
    """Yield the orthonormal polynomials at the nodes: Hermite's, or Gegenbauer's."""
    previous, current = torch.zeros_like(x), torch.ones_like(x)
    k, last = 0, 0.0
    while True:
        yield current
        k += 1
        step = _step(k, dimension)
        previous, current = current, (x * current - last * previous) / step
        last = step


def _step(k: int, dimension: int | None) -> float:
    """Compute the off-diagonal entry b_k of x p_{k-1} = b_k p_k + b_{k-1} p_{k-2}."""
    if dimension is None:
        return math.sqrt(k)
    d = dimension
    if k == 1:
        return 1.0
    return math.sqrt(d * k * (k + d - 3) / ((2 * k + d - 2) * (2 * k + d - 4)))


def _powers(rho: Tensor, dimension: int | None) -> Iterator[Tensor]:
    """Yield E p_k(g) p_k(g') / E p_k^2 for coordinates of correlation rho: rho^k, or Legendre's."""
    previous, current, k = torch.zeros_like(rho), torch.ones_like(rho), 0
    while True:
        yield current
        if dimension is None:
            current = current * rho
        else:
            d, new = dimension, rho * current
            if k:
                new = new.mul_(2 * k + d - 2).sub_(previous, alpha=k).div_(k + d - 2)
            previous, current = current, new
        k += 1
