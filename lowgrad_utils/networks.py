"""Two-layer networks, activations with their Gaussian means, and losses with their residues."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from lowgrad_utils import checks
from lowgrad_utils.spiked_data import SpikedData

_SQRT_2PI = math.sqrt(2 * math.pi)
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation with two derivatives and their means over a centred Gaussian.

    Attributes:
        name: Its name, a key of ``ACTIVATIONS``.
        value: sigma.
        derivative: sigma'.
        second_derivative: sigma'' where it exists; ReLU's is 0 except for a point mass at 0.
        smoothness: ``"C2"``, ``"C1"`` (sigma' Lipschitz) or ``"C0"`` (sigma' jumps).
    """

    name: str
    value: Function = field(repr=False)
    derivative: Function = field(repr=False)
    second_derivative: Function = field(repr=False)
    smoothness: str
    _mean_derivative: Function | None = field(repr=False, default=None)
    _mean_second_derivative: Function | None = field(repr=False, default=None)
    _mean_square_slope: Function | None = field(repr=False, default=None)

    def mu(self, s: Tensor) -> Tensor:
        """Average sigma' over a centred Gaussian: mu = E sigma'(s g), g ~ N(0, 1), entrywise.

        Args:
            s: Standard deviations of the preactivation, at least 0.

        Raises:
            TypeError: If s is not a floating-point tensor.
            ValueError: If an entry is negative, NaN or infinite.

        Example:
            >>> ACTIVATIONS["relu"].mu(torch.tensor([0.5, 2.0]).double())
            tensor([0.5000, 0.5000], dtype=torch.float64)
        """
        s = _standard_deviations(s)
        return (self._mean_derivative or _by_quadrature(self.derivative))(s)

    def c(self, s: Tensor) -> Tensor:
        """Average sigma'' over a centred Gaussian: c = E sigma''(s g), g ~ N(0, 1), entrywise.

        For ReLU, sigma'' is a point mass at 0 and c(s) = 1 / (s sqrt(2 pi)).

        Args:
            s: Standard deviations of the preactivation, at least 0.

        Raises:
            TypeError: If s is not a floating-point tensor.
            ValueError: If an entry is negative, NaN or infinite.

        Example:
            >>> ACTIVATIONS["relu"].c(torch.tensor([0.5, 1.0]).double())
            tensor([0.7979, 0.3989], dtype=torch.float64)
        """
        s = _standard_deviations(s)
        return (self._mean_second_derivative or _by_quadrature(self.second_derivative))(s)

    def mean_square_slope(self, s: Tensor) -> Tensor:
        """Average sigma'^2 over a centred Gaussian: E sigma'(s g)^2, g ~ N(0, 1), entrywise.

        Args:
            s: Standard deviations of the preactivation, at least 0.

        Raises:
            TypeError: If s is not a floating-point tensor.
            ValueError: If an entry is negative, NaN or infinite.

        Example:
            >>> ACTIVATIONS["relu"].mean_square_slope(torch.tensor([2.0]).double())
            tensor([0.5000], dtype=torch.float64)
        """
        s = _standard_deviations(s)
        square = lambda x: self.derivative(x).square()  # noqa: E731
        return (self._mean_square_slope or _by_quadrature(square))(s)


def gaussian_mean(function: Function, s: Tensor) -> Tensor:
    """Compute E function(s g), g ~ N(0, 1), for smooth functions by the trapezoid rule.

    Its nodes on [-9, 9] are 0.1 / max(1, s) apart: sigma' of the book's activations changes on
    a scale of 1/s, and the rule's error falls exponentially with the number of nodes on that
    scale. It is good to about 1e-13; a fixed number of nodes is not (8001 are off by 22 % for
    tanh at s = 1000, 64 of Gauss and Hermite by up to 7e-2 already at s = 10). Where a function
    jumps it is not: sigma'^2 of ReLU would come out 4 % wrong, so activations have closed forms.

    Args:
        function: A smooth function of one variable.
        s: Standard deviations, any shape, at most 1e5.

    Returns:
        The means, in the shape of s.

    Raises:
        ValueError: If s has an entry above 1e5, which would need too many nodes.
    """
    widest = max(1.0, float(s.detach().max()))
    if widest > 1e5:
        raise ValueError(f"s has the entry {widest:g}, but at most 1e5 is needed for quadrature")
    count = 1 + math.ceil(18 * widest / 0.1)
    # The step from the count: the difference of two nodes would lose four digits to rounding.
    nodes = torch.linspace(-9, 9, count, dtype=torch.float64, device=s.device)
    weights = torch.exp(-nodes.square() / 2) * (18 / (count - 1)) / _SQRT_2PI
    # A few neurons at a time: their values at the nodes stay in cache, those of all m would not.
    blocks = s.double().flatten().split(min(64, max(1, 500_000 // count)))
    means = torch.cat([function(block[:, None] * nodes) @ weights for block in blocks])
    return means.reshape(s.shape).to(s)


def _by_quadrature(function: Function) -> Function:
    return lambda s: gaussian_mean(function, s)


def _standard_deviations(s: Tensor) -> Tensor:
    if not (isinstance(s, Tensor) and s.is_floating_point()):
        raise TypeError(f"s is {s!r}, but a floating-point tensor of standard deviations is needed")
    if s.numel() == 0:
        raise ValueError(f"s has shape {tuple(s.shape)}: it is empty, entries are needed")
    if not bool((s >= 0).all() and torch.isfinite(s).all()):
        raise ValueError("s has negative, NaN or infinite entries; standard deviations are needed")
    return s


def _constant(value: float) -> Function:
    return lambda s: torch.full_like(s, value)


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / _SQRT_2PI


def _elu_tail(s: Tensor) -> Tensor:
    # exp(s^2/2) Phi(-s) through erfcx, since the first factor overflows from s = 38.
    return 0.5 * torch.special.erfcx(s / math.sqrt(2))


def _softplus(x: Tensor) -> Tensor:
    # By default torch drops exp(-x) from x = 20 on: an error of 2e-9, which float64 can see.
    return F.softplus(x, threshold=40)


def _silu_second(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return p * (1 - p) * (2 + x * (1 - 2 * p))


def _silu_first(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return p * (1 + x * (1 - p))


def _sigmoid_first(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return p * (1 - p)


def _sigmoid_second(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return p * (1 - p) * (1 - 2 * p)


def _tanh_second(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return -2 * t * (1 - t.square())


def _gelu_c(s: Tensor) -> Tensor:
    v = 1 + s.square()
    return (2 - s.square() / v) / (_SQRT_2PI * v.sqrt())


_HALF, _ZERO = _constant(0.5), _constant(0.0)

#: The activations of the book by name. Where sigma' is 1/2 plus an odd function, mu is 1/2 for
#: every s; where sigma'' is odd, c is 0.
ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation(
            "relu",
            torch.relu,
            lambda x: (x > 0).to(x),
            torch.zeros_like,
            "C0",
            _HALF,
            lambda s: 1 / (_SQRT_2PI * s),
            _HALF,
        ),
        Activation(
            "elu",
            F.elu,
            lambda x: torch.exp(x.clamp(max=0)),
            lambda x: torch.where(x < 0, torch.exp(x.clamp(max=0)), 0.0),
            "C1",
            lambda s: 0.5 + _elu_tail(s),
            _elu_tail,
            lambda s: 0.5 + _elu_tail(2 * s),
        ),
        Activation("silu", F.silu, _silu_first, _silu_second, "C2", _HALF),
        Activation(
            "gelu",
            F.gelu,
            lambda x: torch.special.ndtr(x) + x * _normal_density(x),
            lambda x: (2 - x.square()) * _normal_density(x),
            "C2",
            _HALF,
            _gelu_c,
        ),
        Activation("softplus", _softplus, torch.sigmoid, _sigmoid_first, "C2", _HALF),
        Activation("sigmoid", torch.sigmoid, _sigmoid_first, _sigmoid_second, "C2", None, _ZERO),
        Activation(
            "tanh",
            torch.tanh,
            lambda x: 1 - torch.tanh(x).square(),
            _tanh_second,
            "C2",
            None,
            _ZERO,
        ),
        Activation(
            "erf",
            torch.erf,
            lambda x: (2 / math.sqrt(math.pi)) * torch.exp(-x.square()),
            lambda x: (-4 / math.sqrt(math.pi)) * x * torch.exp(-x.square()),
            "C2",
            lambda s: 2 / torch.sqrt(math.pi * (1 + 2 * s.square())),
            _ZERO,
        ),
    )
}


@dataclass(frozen=True)
class Loss:
    """A loss l(f, y), its residue r = dl/df and its curvature l'' in f.

    Attributes:
        name: Its name, a key of ``LOSSES``.
        bounded: Whether the residue is bounded whatever f and y are.
        binary: Whether labels must be -1 or +1.
    """

    name: str
    bounded: bool
    binary: bool
    _value: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    _residue: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    _curvature: Callable[[Tensor, Tensor], Tensor] = field(repr=False)

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute l(f_i, y_i) for each example, length n.

        Args:
            f: Predictions, length n.
            y: Targets, length n; -1 or +1 for the logistic loss.

        Raises:
            TypeError: If dtypes differ.
            ValueError: If shapes differ, an entry is NaN or infinite, or a label is outside the
                loss's domain.

        Example:
            >>> f, y = torch.tensor([0.5, 0.0]).double(), torch.tensor([1.0, -1.0]).double()
            >>> LOSSES["mse"].value(f, y)
            tensor([0.1250, 0.5000], dtype=torch.float64)
        """
        return self._value(f, self._labels(f, y))

    def residue(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the residue r_i = dl/df at (f_i, y_i), length n.

        Args:
            f: Predictions, length n.
            y: Targets, length n; -1 or +1 for the logistic loss.

        Raises:
            TypeError: If dtypes differ.
            ValueError: If shapes differ, an entry is NaN or infinite, or a label is outside the
                loss's domain.

        Source: Low Rank Gradients, Section 2 (the residue vector).

        Example:
            >>> f, y = torch.tensor([0.5, 0.0]).double(), torch.tensor([1.0, -1.0]).double()
            >>> LOSSES["mse"].residue(f, y)
            tensor([-0.5000,  1.0000], dtype=torch.float64)
        """
        return self._residue(f, self._labels(f, y))

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the second derivative l'' in f at (f_i, y_i), length n.

        Args:
            f: Predictions, length n.
            y: Targets, length n; -1 or +1 for the logistic loss.

        Raises:
            TypeError: If dtypes differ.
            ValueError: If shapes differ, an entry is NaN or infinite, or a label is outside the
                loss's domain.

        Example:
            >>> LOSSES["logistic"].curvature(torch.zeros(2), torch.tensor([1.0, -1.0]))
            tensor([0.2500, 0.2500])
        """
        return self._curvature(f, self._labels(f, y))

    def _labels(self, f: Tensor, y: Tensor) -> Tensor:
        checks.vector("y", y, length=len(checks.vector("f", f)))
        checks.same_dtype(f=f, y=y)
        if self.binary and not bool((y.abs() == 1).all()):
            strange = y[y.abs() != 1][0].item()
            raise ValueError(
                f"y has the label {strange:g}, but the {self.name} loss needs labels -1 and +1; "
                "binary_labels makes them"
            )
        return y


#: The losses of the book by name.
LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            "mse",
            False,
            False,
            lambda f, y: 0.5 * (f - y).square(),
            lambda f, y: f - y,
            lambda f, y: torch.ones_like(f),
        ),
        Loss(
            "huber",
            True,
            False,
            lambda f, y: F.huber_loss(f, y, reduction="none"),
            lambda f, y: (f - y).clamp(-1, 1),
            lambda f, y: ((f - y).abs() < 1).to(f),
        ),
        Loss(
            "log-cosh",
            True,
            False,
            # log cosh t = |t| + log((1 + exp(-2|t|)) / 2), which does not overflow.
            lambda f, y: (f - y).abs() + _softplus(-2 * (f - y).abs()) - math.log(2),
            lambda f, y: torch.tanh(f - y),
            # Not 1 - tanh^2, which cancels for large residues.
            lambda f, y: torch.cosh(f - y).pow(-2),
        ),
        Loss(
            "logistic",
            True,
            True,
            lambda f, y: _softplus(-y * f),
            lambda f, y: -y * torch.sigmoid(-y * f),
            lambda f, y: torch.sigmoid(f) * torch.sigmoid(-f),
        ),
    )
}

#: gamma as a function of the width m.
SCALINGS: dict[str, Callable[[int], float]] = {
    "ntk": lambda m: 1 / math.sqrt(m),
    "mean-field": lambda m: 1 / m,
}


@dataclass(frozen=True)
class TwoLayerNetwork:
    """The network f(x) = gamma a^T sigma(W x) with rows of W of unit length.

    Attributes:
        W: Inner weights, m x d, rows of unit length.
        a: Outer weights, length m, -1 or +1 in the paper.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` (gamma = 1/sqrt(m)) or ``"mean-field"`` (gamma = 1/m).

    Raises:
        TypeError: If W or a is not a floating-point tensor, or they differ in dtype.
        ValueError: If a row of W is not of unit length, shapes do not fit, an entry is NaN or
            infinite, or a name is unknown.

    Source: Low Rank Gradients, Equation 1 and Assumption 3.

    Example:
        >>> network = TwoLayerNetwork.random(40, 50, activation="tanh", seed=2)
        >>> network(torch.zeros(1, 40).double())
        tensor([0.], dtype=torch.float64)
    """

    W: Tensor = field(repr=False)
    a: Tensor = field(repr=False)
    activation: str = "relu"
    scaling: str = "ntk"

    def __post_init__(self):
        checks.unit_rows("W", checks.matrix("W", self.W).detach())
        checks.vector("a", self.a, length=self.W.shape[0])
        checks.same_dtype(W=self.W, a=self.a)
        checks.choice("activation", self.activation, ACTIVATIONS)
        checks.choice("scaling", self.scaling, SCALINGS)

    @classmethod
    def random(
        cls,
        d: int,
        m: int,
        *,
        activation: str = "relu",
        scaling: str = "ntk",
        shift: Tensor | None = None,
        seed: int | torch.Generator = 0,
    ) -> "TwoLayerNetwork":
        """Draw rows of W uniformly on the sphere and a from {-1, +1}.

        Args:
            d: Number of features.
            m: Number of neurons.
            activation: A key of ``ACTIVATIONS``.
            scaling: A key of ``SCALINGS``.
            shift: A vector of length d added to each uniform row before it is normalised again,
                such as n^(-1/4) q in panels (b, c) of Figure 1.
            seed: Integer seed or generator.

        Raises:
            ValueError: If a size is less than 1, ``shift`` does not fit or a name is unknown.

        Example:
            >>> network = TwoLayerNetwork.random(40, 50, shift=torch.ones(40).double(), seed=3)
            >>> network.W.shape, network.m, bool((network.W.mean(dim=1) > 0).all())
            (torch.Size([50, 40]), 50, True)
        """
        d, m = checks.positive_integer("d", d), checks.positive_integer("m", m)
        stream = checks.random_stream(seed, "network")
        W = normalise_rows(torch.randn(m, d, generator=stream, dtype=torch.float64))
        if shift is not None:
            W = normalise_rows(W + checks.vector("shift", shift, length=d))
        signs = torch.randint(0, 2, (m,), generator=stream)
        return cls(W, 2.0 * signs.double() - 1, activation, scaling)

    @property
    def m(self) -> int:
        """Number of neurons."""
        return self.W.shape[0]

    @property
    def gamma(self) -> float:
        """The scaling constant gamma."""
        return SCALINGS[self.scaling](self.m)

    @property
    def sigma(self) -> Activation:
        """The activation with its derivatives."""
        return ACTIVATIONS[self.activation]

    def __call__(self, X: Tensor) -> Tensor:
        """Compute f(x_i) = gamma a^T sigma(W x_i) for each row of X, length n.

        Args:
            X: Data, n x d.

        Raises:
            TypeError: If X has another dtype than W.
            ValueError: If X does not have d columns, or has NaN or infinite entries.
        """
        checks.matrix("X", X, columns=self.W.shape[1])
        checks.same_dtype(W=self.W, X=X)
        return self.gamma * (self.sigma.value(X @ self.W.T) @ self.a)

    def mu(self, data: SpikedData) -> Tensor:
        """Compute mu_j = E sigma'(w_j^T x), length m.

        The expectation is over N(0, Sigma) where Sigma is known, and over the examples where the
        data are real: mu_j = (1/n) sum_i sigma'(w_j^T x_i).

        Args:
            data: The data.

        Raises:
            TypeError: If W has another dtype than the data.
            ValueError: If W does not fit the data.

        Source: Low Rank Gradients, Assumption 4.3.

        Example:
            >>> from lowgrad_utils.spiked_data import sample_spiked_data
            >>> network = TwoLayerNetwork.random(40, 3, activation="softplus")
            >>> network.mu(sample_spiked_data(30, 40, nu=0.25))  # softplus' is 1/2 and an odd part
            tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
        """
        if data.eigenvalues is None:
            return self.sigma.derivative(data.X @ self.W.T).mean(dim=0)
        return self.sigma.mu(data.preactivation_scale(self.W))


def normalise_rows(W: Tensor) -> Tensor:
    """Divide each row of W by its Euclidean norm.

    Args:
        W: A matrix without zero rows, m x d.

    Raises:
        ValueError: If W is not a finite matrix or a row is zero.

    Example:
        >>> normalise_rows(torch.tensor([[3.0, 4.0]]).double())
        tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    lengths = checks.matrix("W", W).norm(dim=1, keepdim=True)
    if bool((lengths == 0).any()):
        raise ValueError(f"row {int(lengths.argmin())} of W is zero and cannot be normalised")
    return W / lengths
