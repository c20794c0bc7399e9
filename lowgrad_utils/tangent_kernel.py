"""One Jacobian, two weightings: the gradient and the Gauss-Newton matrix of a layer.

The derivative of one output in the weights of a linear layer, transposed, is x b^T: the layer's
input times what comes back. Kept as these two factors, N derivatives need no N x d x m array.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork


@dataclass(frozen=True)
class LayerJacobian:
    """N derivatives J_i = x_i b_i^T (d x m) of a layer, in a mean over n examples.

    The Gauss-Newton matrix is (1/n) sum_i J_i J_i^T, each J_i read as a vector of length d m, and
    a gradient is (1/n) sum_i r_i J_i: the same J_i with other weights.

    Attributes:
        X: Inputs of the layer, N x d, one for each derivative.
        B: What comes back, N x m; for a scalar output sqrt(l''_i) gamma a o sigma'(W x_i).
        n: Number of examples, by which sums are divided; N / C for C logits.

    Raises:
        TypeError: If X or B is not a floating-point tensor, or they differ in dtype.
        ValueError: If they have different numbers of rows, an entry is NaN or infinite, or n is
            not a whole number of at least one.

    Example:
        >>> X, B = torch.eye(3).double(), torch.ones(3, 2).double()
        >>> jacobian = LayerJacobian(X, B, 3)
        >>> jacobian.modes.values
        tensor([0.6667, 0.6667, 0.6667], dtype=torch.float64)
        >>> weights = torch.ones(3).double() / 3
        >>> jacobian.combination(weights)
        tensor([[0.3333, 0.3333],
                [0.3333, 0.3333],
                [0.3333, 0.3333]], dtype=torch.float64)
        >>> round(jacobian.share_in_terms(weights, X[:1], B[:1]), 12)  # in e_1 (1, 1), one row of 3
        0.333333333333
    """

    X: Tensor = field(repr=False)
    B: Tensor = field(repr=False)
    n: int

    def __post_init__(self):
        checks.matrix("B", self.B, rows=checks.matrix("X", self.X).shape[0])
        checks.same_dtype(X=self.X, B=self.B)
        checks.positive_integer("n", self.n)

    @cached_property
    def kernel(self) -> Tensor:
        """Inner products <J_i, J_k> / n = (X X^T) o (B B^T) / n, N x N."""
        return (self.X @ self.X.T).mul_(self.B @ self.B.T).div_(self.n)

    @cached_property
    def modes(self) -> "GaussNewtonModes":
        """The eigenvalues and eigenvectors of the Gauss-Newton matrix, from the kernel's."""
        values, weights = torch.linalg.eigh(self.kernel)
        return GaussNewtonModes(values.flip(0).clamp_min(0), weights.flip(1), self)

    def combination(self, weights: Tensor) -> Tensor:
        """Compute sum_i w_i J_i, d x m; with w = r / n this is a gradient.

        Args:
            weights: Length N.

        Raises:
            ValueError: If the weights do not fit.
        """
        checks.vector("weights", weights, length=len(self.X))
        return self.X.T @ (weights[:, None] * self.B)

    def along(self, u: Tensor, v: Tensor) -> Tensor:
        """Compute <J_i, u v^T> / (|u| |v|) for each i, length N, without forming J_i.

        Args:
            u: Length d.
            v: Length m.

        Raises:
            ValueError: If a vector does not fit, or is zero.
        """
        checks.vector("u", u, length=self.X.shape[1])
        checks.vector("v", v, length=self.B.shape[1])
        lengths = float(u.norm() * v.norm())
        if lengths == 0:
            raise ValueError("u or v is zero, so u v^T has no direction")
        return (self.X @ u) * (self.B @ v) / lengths

    def share_in_terms(self, weights: Tensor, left: Tensor, right: Tensor) -> float:
        """Compute the share of |sum_i w_i J_i|_F^2 in the span of S terms left_s right_s^T.

        Args:
            weights: Length N.
            left: S x d.
            right: S x m.

        Raises:
            ValueError: If shapes do not fit, or the sum is zero.
        """
        products, gram = self._terms(left, right)
        return self._share(weights, products @ weights, gram)

    def share_in_combinations(self, weights: Tensor, combinations: Tensor) -> float:
        """Compute the share of |sum_i w_i J_i|_F^2 in the span of S sums of the J_i.

        Args:
            weights: Length N.
            combinations: Their weights, S x N, such as those of class centres.

        Raises:
            ValueError: If shapes do not fit, or the sum is zero.
        """
        products, gram = self._combinations(combinations)
        return self._share(weights, products @ weights, gram)

    def _terms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return <left_s right_s^T, J_i> (S x N) and the inner products of the terms."""
        checks.matrix("left", left, columns=self.X.shape[1])
        checks.matrix("right", right, rows=len(left), columns=self.B.shape[1])
        products = (left @ self.X.T) * (right @ self.B.T)
        return products, (left @ left.T) * (right @ right.T)

    def _combinations(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        checks.matrix("combinations", weights, columns=len(self.X))
        products = self.n * (weights @ self.kernel)
        return products, products @ weights.T

    def _share(self, weights: Tensor, products: Tensor, gram: Tensor) -> float:
        checks.vector("weights", weights, length=len(self.X))
        total = self.n * float(weights @ (self.kernel @ weights))
        if not total > 0:
            raise ValueError("the sum of weighted derivatives is zero; it has no share anywhere")
        return float(_projected(products[:, None], gram)[0]) / total


@dataclass(frozen=True)
class GaussNewtonModes:
    """Eigenpairs of (1/n) sum_i J_i J_i^T: U_k = (n lambda_k)^(-1/2) sum_i v_ki J_i.

    Attributes:
        values: Eigenvalues lambda_k, N of them, falling; all others are zero.
        weights: Eigenvectors v_k of the kernel, N x N, one a column.
        jacobian: The derivatives.

    Example:
        >>> network = TwoLayerNetwork.random(5, 6, activation="tanh", seed=0)
        >>> X, residue = torch.eye(4, 5).double(), torch.ones(4).double()
        >>> jacobian = scalar_jacobian(X, network)
        >>> modes, G = jacobian.modes, jacobian.combination(residue / 4)
        >>> along = torch.stack([(G * modes.direction(k)).sum() for k in (1, 2, 3, 4)])
        >>> torch.allclose(modes.components(residue), along)
        True
        >>> round(float(modes.shares(residue)[-1]), 12)  # the gradient is made of these directions
        1.0
    """

    values: Tensor
    weights: Tensor = field(repr=False)
    jacobian: LayerJacobian = field(repr=False)

    def direction(self, k: int) -> Tensor:
        """Compute the k-th eigenvector U_k as a d x m matrix of Frobenius norm 1.

        Args:
            k: From 1.

        Raises:
            ValueError: If k is out of range, or the eigenvalue is zero to rounding.
        """
        rank = int((self._roots > 0).sum())
        if not 1 <= checks.positive_integer("k", k) <= rank:
            raise ValueError(f"k is {k}, but the matrix has {rank} eigenvalues above rounding")
        return self.jacobian.combination(self.weights[:, k - 1] / self._roots[k - 1])

    def components(self, residue: Tensor) -> Tensor:
        """Compute <G, U_k> = sqrt(lambda_k / n) (r . v_k) of the gradient G = (1/n) sum r_i J_i.

        Args:
            residue: r, length N.

        Raises:
            ValueError: If r does not fit.
        """
        checks.vector("residue", residue, length=len(self.values))
        return (self.values / self.jacobian.n).sqrt() * (residue @ self.weights)

    def shares(self, residue: Tensor) -> Tensor:
        """Compute the share of |G|_F^2 in the span of U_1 ... U_k for each k, length N.

        Args:
            residue: r, length N.

        Raises:
            ValueError: If r does not fit, or the gradient is zero.
        """
        squares = self.components(residue).square()
        total = squares.sum()
        if total == 0:
            raise ValueError("the gradient is zero, so that no share of it can be told")
        return squares.cumsum(0) / total

    def overlaps(self, u: Tensor, v: Tensor) -> Tensor:
        """Compute the cosines <U_k, u v^T> / (|u| |v|) of all eigenvectors, length N.

        They are 0 where the eigenvalue is zero to rounding.

        Args:
            u: Length d.
            v: Length m.

        Raises:
            ValueError: If a vector does not fit, or is zero.
        """
        products = self.jacobian.along(u, v) @ self.weights
        return torch.where(self._roots > 0, products / self._roots, 0.0)

    def inside(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute the share of each U_k in the span of S terms left_s right_s^T, length N.

        Args:
            left: S x d.
            right: S x m.

        Raises:
            ValueError: If shapes do not fit.
        """
        return self._inside(*self.jacobian._terms(left, right))

    def inside_combinations(self, combinations: Tensor) -> Tensor:
        """Compute the share of each U_k in the span of S sums of the J_i, length N.

        Args:
            combinations: Their weights, S x N, such as those of class centres.

        Raises:
            ValueError: If shapes do not fit.
        """
        return self._inside(*self.jacobian._combinations(combinations))

    def _inside(self, products: Tensor, gram: Tensor) -> Tensor:
        along = torch.where(self._roots > 0, products @ self.weights / self._roots, 0.0)
        return _projected(along, gram)

    @cached_property
    def _roots(self) -> Tensor:
        """sqrt(n lambda_k), 0 where lambda_k is rounding."""
        rounding = len(self.values) * torch.finfo(self.values.dtype).eps * self.values[0]
        kept = torch.where(self.values > rounding, self.values, 0.0)
        return (self.jacobian.n * kept).sqrt()


def _projected(products: Tensor, gram: Tensor) -> Tensor:
    """Return |P_V t|^2 for columns of <v_s, t>, S x K, from the inner products of the v_s."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1] * 100
    return ((vectors[:, kept].T @ products).square() / values[kept, None]).sum(0)


@torch.no_grad()
def scalar_jacobian(
    X: Tensor, network: TwoLayerNetwork, curvature: Tensor | None = None
) -> LayerJacobian:
    """Return the derivatives sqrt(l''_i) gamma x_i (a o sigma'(W x_i))^T of f(x_i) in W.

    The residue that goes with them is r_i / sqrt(l''_i).

    Args:
        X: Data, n x d.
        network: The network.
        curvature: l''_i of ``Loss.curvature``, length n, at least 0; 1 if None, as for the
            squared loss.

    Raises:
        ValueError: If shapes do not fit, an entry is NaN or infinite, or l'' is negative.

    Example:
        >>> network = TwoLayerNetwork.random(3, 4, seed=0)
        >>> scalar_jacobian(torch.eye(3).double(), network).kernel.shape
        torch.Size([3, 3])
    """
    checks.matrix("X", X, columns=network.W.shape[1])
    checks.same_dtype(X=X, W=network.W)
    B = network.gamma * network.a * network.sigma.derivative(X @ network.W.T)
    if curvature is not None:
        checks.vector("curvature", curvature, length=len(X))
        checks.nonnegative("the least of curvature", curvature.min())
        B *= curvature.sqrt()[:, None]
    return LayerJacobian(X, B, len(X))


@torch.no_grad()
def softmax_jacobian(
    X: Tensor, W: Tensor, A: Tensor, *, activation: str = "relu"
) -> tuple[LayerJacobian, Tensor]:
    """Return the logit derivatives of z(x) = A sigma(W x) in W, and the probabilities.

    delta_{i,c'} = sqrt(p_c') J_i^T (e_c' - p_i) = x_i (sqrt(p_c') (a_c' - sum_k p_k a_k) o
    sigma'(W x_i))^T, where a_c' is row c' of A; row i C + c' of the Jacobian.

    Args:
        X: Data, n x d.
        W: Inner weights, m x d.
        A: Outer weights, C x m, the scaling included.
        activation: A key of ``ACTIVATIONS``.

    Returns:
        The Jacobian with N = n C rows, and p, n x C.

    Raises:
        ValueError: If shapes do not fit, an entry is NaN or infinite, or the name is unknown.

    Source: Papyan 2019, Eqs. 13-16.

    Example:
        >>> W, A = torch.eye(4, 5).double(), torch.eye(3, 4).double()
        >>> jacobian, p = softmax_jacobian(torch.eye(2, 5).double(), W, A, activation="tanh")
        >>> jacobian.X.shape, jacobian.B.shape, p.sum(1)
        (torch.Size([6, 5]), torch.Size([6, 4]), tensor([1., 1.], dtype=torch.float64))
    """
    checks.matrix("W", W, columns=checks.matrix("X", X).shape[1])
    checks.matrix("A", A, columns=len(W))
    sigma = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)]
    h = X @ W.T
    p = (sigma.value(h) @ A.T).softmax(1)
    centred = A - (p @ A)[:, None]
    B = p.sqrt()[:, :, None] * centred * sigma.derivative(h)[:, None]
    return LayerJacobian(X.repeat_interleave(len(A), 0), B.flatten(0, 1), len(X)), p


def softmax_residue(p: Tensor, labels: Tensor) -> Tensor:
    """Return the weights of the logit derivatives that make the gradient, length n C.

    -1 / sqrt(p_c) for the true class c and 0 for every other logit, since
    delta_{i,c} = -sqrt(p_c) grad l_i. (Adding a multiple of sqrt(p) changes nothing.)

    Args:
        p: Probabilities, n x C.
        labels: True classes, length n, integers from 0 to C - 1.

    Raises:
        ValueError: If shapes do not fit, or labels are no integers.

    Source: Papyan 2019, Eq. 20.

    Example:
        >>> softmax_residue(torch.tensor([[0.25, 0.75]]), torch.tensor([0]))
        tensor([-2.,  0.])
    """
    checks.matrix("p", p, rows=len(labels))
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}, but a vector of "
            "integers is needed; use y.long(), or y.argmax(dim=1) of one-hot labels"
        )
    own = labels[:, None]
    return torch.zeros_like(p).scatter_(1, own, -p.gather(1, own).rsqrt()).flatten()
