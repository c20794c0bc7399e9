"""The excess of G's outliers over the eigenvalues of their approximation (claim C6 of the card).

G = M + B: M, made from the group means, is of low rank and has eigenvalues theta_k with
eigenvectors u_k; B is what is left, the covariances within groups. Predictions of the eigenvalues
lambda_k of G differ in what they need to know of B: its eigenvalues (isotropic theory), how even
the sizes are within groups (rescaled means), or B along the u_k themselves.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq
from torch import Tensor

from lowgrad_utils import checks, classifiers, datasets, trained_networks
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator
from lowgrad_utils.eigensolvers import orthonormal_columns, top_eigenpairs
from lowgrad_utils.experiments import hessian_sweep
from lowgrad_utils.random_matrices import wishart_spike
from lowgrad_utils.rates import Interval, mean_interval
from lowgrad_utils.three_levels import ThreeLevels, evenness, three_levels

Cell = dict[str, Any]

#: What may stand for M: the means of all groups (G0 included), or the class centres alone.
APPROXIMATIONS = ("G1+2", "G1")

#: Outliers that are predicted in a network of C = 10 classes.
OUTLIERS = 9

#: How far below B's largest eigenvalue a root of the secular equation is no longer looked for.
_EDGE = 1e-9

#: Spikes below this share of the largest are counted to the rest.
_NEGLIGIBLE = 1e-9


# --- predictions from a spike and the rest -----------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """A symmetric matrix G = M + B, M = U diag(theta) U^T of rank r.

    Attributes:
        theta: Eigenvalues of M above rounding, falling (r).
        directions: Their eigenvectors U, P x r.
        rest: Eigenvalues b of B, falling (P).
        overlaps: V^T U, P x r, V the eigenvectors of B.
    """

    theta: Tensor
    directions: Tensor
    rest: Tensor
    overlaps: Tensor

    @classmethod
    def of(cls, means: Tensor, rest: Tensor) -> "Split":
        """Return the split of M + B, both P x P and symmetric.

        Raises:
            ValueError: If they are not square, of one size, or M has no eigenvalue above zero.

        Example:
            >>> m = torch.diag(torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64))
            >>> split = Split.of(m, torch.eye(3, dtype=torch.float64))
            >>> split.eigenvalues().tolist()
            [4.0, 1.0, 1.0]
        """
        size = len(checks.matrix("means", means))
        for name, value in (("means", means), ("rest", rest)):
            checks.matrix(name, value, rows=size, columns=size)
        theta, u = torch.linalg.eigh(means)
        theta, u = theta.flip(0), u.flip(1)
        kept = theta > size * torch.finfo(theta.dtype).eps * theta.abs().max()
        if not kept.any():
            raise ValueError("means has no eigenvalue above zero, so that there is no spike")
        b, v = torch.linalg.eigh(rest)
        u = u[:, kept]
        return cls(theta[kept], u, b.flip(0), v.flip(1).T @ u)

    @property
    def couplings(self) -> Tensor:
        """U^T B U, r x r."""
        return self.overlaps.T @ (self.rest[:, None] * self.overlaps)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of G, falling: the measured answer."""
        g = torch.diag(self.rest) + self.overlaps * self.theta @ self.overlaps.T
        return torch.linalg.eigvalsh(g).flip(0)

    def alignment(self) -> Tensor:
        """Return u_k^T B u_k over tr B / P, its mean over all directions (r)."""
        return self.couplings.diagonal() / self.rest.mean()

    def first_order(self) -> Tensor:
        """Return theta_k + u_k^T B u_k = u_k^T G u_k, in the order of theta (r)."""
        return self.theta + self.couplings.diagonal()

    def second_order(self) -> Tensor:
        """Return first order plus sum_j |u_j^T B u_k|^2 / (theta_k - theta_j) (r).

        The sum is over all other eigenvectors of M, those of eigenvalue zero included.
        """
        c = self.couplings
        gaps = self.theta[:, None] - self.theta
        inside = torch.where(gaps != 0, c.square() / gaps, 0).sum(1)
        image = self.overlaps.T @ (self.rest.square()[:, None] * self.overlaps)
        outside = (image.diagonal() - c.square().sum(1)).clamp_min(0) / self.theta
        return self.first_order() + inside + outside

    def ritz(self) -> Tensor:
        """Return the eigenvalues of U^T G U: G restricted to the span of M, falling (r)."""
        return torch.linalg.eigvalsh(torch.diag(self.theta) + self.couplings).flip(0)

    def resolvent(self, x: float) -> Tensor:
        """Return U^T (x - B)^{-1} U for x above b_1, r x r."""
        return self.overlaps.T @ (self.overlaps / (x - self.rest)[:, None])

    def single_roots(self, count: int) -> Tensor:
        """Return the roots x > b_1 of u_k^T (x - B)^{-1} u_k = 1/theta_k, each spike by itself.

        They are the largest eigenvalues of theta_k u_k u_k^T + B: what the other spikes do is left
        out.

        Args:
            count: How many of the leading spikes.
        """
        return torch.tensor(
            [
                self._root(lambda x, k=k: self.theta[k] * self.resolvent(x)[k, k])
                for k in range(_number("count", count, len(self.theta)))
            ],
            dtype=self.theta.dtype,
        )

    def roots(self) -> Tensor:
        """Return all x > b_1 with det(I - theta^(1/2) U^T (x - B)^{-1} U theta^(1/2)) = 0, falling.

        The k-th is where the k-th eigenvalue of that matrix passes 1. They are eigenvalues of G,
        exactly, and all of them above b_1.

        Source: Sylvester's determinant identity and law of inertia.
        """
        start = self._start()
        count = int((torch.linalg.eigvalsh(self._secular_matrix(start)) > 1).sum())
        found = [
            self._root(lambda x, k=k: torch.linalg.eigvalsh(self._secular_matrix(x))[-1 - k])
            for k in range(count)
        ]
        return torch.tensor(found, dtype=self.theta.dtype)

    def _secular_matrix(self, x: float) -> Tensor:
        root = self.theta.sqrt()
        return root[:, None] * self.resolvent(x) * root

    def _start(self) -> float:
        edge = float(self.rest[0])
        return edge + _EDGE * max(abs(edge), float(self.theta[0]))

    def _root(self, function) -> float:
        """Return where a falling function passes 1 above b_1, or b_1 if it stays below."""
        start, end = self._start(), float(self.rest[0] + 2 * self.theta[0])
        if function(start) <= 1:
            return float(self.rest[0])
        return brentq(lambda x: float(function(x)) - 1, start, end, xtol=1e-14 * end)


def network_split(curvature: LossCurvature, approximation: str = "G1+2") -> Split:
    """Return the split of a small network's Gauss-Newton matrix, everything explicit.

    Args:
        curvature: The classifier on its data.
        approximation: What M is: ``G1+2``, then B = G3; or ``G1``, then B = G0 + G2 + G3.

    Raises:
        ValueError: On an unknown approximation, or if the logit derivatives exceed the memory.
    """
    checks.choice("approximation", approximation, APPROXIMATIONS)
    derivatives = curvature.logit_derivatives()
    levels = ThreeLevels.of(_means(derivatives, curvature.labels), curvature.counts)
    return split_derivatives(derivatives, levels, approximation)


def split_derivatives(derivatives: Tensor, levels: ThreeLevels, approximation: str) -> Split:
    """Return the split of the second moment of given vectors delta_{i,c'} (n x C x P).

    Args:
        derivatives: The vectors.
        levels: Their group means.
        approximation: ``G1+2`` or ``G1``.
    """
    theta = levels.eigenvalues(approximation)
    # Smaller ones have eigenvectors that the Gram matrix gives badly; they go to the rest.
    theta = theta[theta > _NEGLIGIBLE * theta[0]]
    u = levels.eigenvectors(approximation, len(theta))
    flat = derivatives.flatten(0, 1)
    b, v = torch.linalg.eigh(flat.T @ flat / len(derivatives) - u * theta @ u.T)
    return Split(theta, u, b.flip(0), v.flip(1).T @ u)


def _means(derivatives: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([derivatives[labels == c].mean(0) for c in range(derivatives.shape[1])])


def leading(rest: Tensor, theta: Tensor, overlaps: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the leading eigenvalues of diag(b) + W diag(theta) W^T, and how much W explains.

    Args:
        rest: b (P).
        theta: Eigenvalues (r).
        overlaps: W, P x r with orthonormal columns.
        count: How many eigenvalues.

    Returns:
        The eigenvalues, falling; and the mean share of their eigenvectors' squared length in the
        span of W.

    Example:
        >>> rest = torch.zeros(3, dtype=torch.float64)
        >>> values, inside = leading(rest, rest[:1] + 2, torch.eye(3).double()[:, :1], 1)
        >>> values.tolist(), inside
        ([2.0], 1.0)
    """
    _number("count", count, len(rest))
    matrix = torch.diag(rest) + overlaps * theta @ overlaps.T
    values, vectors = torch.linalg.eigh(matrix)
    share = (overlaps.T @ vectors[:, -count:]).square().sum() / count
    return values.flip(0)[:count], float(share)


def isotropic(
    theta: Tensor, rest: Tensor, count: int, *, seed: int | torch.Generator = 0
) -> tuple[Tensor, float]:
    """Return what ``leading`` returns when M's directions know nothing of B's.

    The eigenvectors of M are replaced by random orthonormal ones. This is isotropic theory at
    finite size, with B's own eigenvalues and no limit taken.

    Args:
        theta: Eigenvalues of M (r).
        rest: Eigenvalues of B (P).
        count: How many.
        seed: Seed, or generator, of the directions.

    Example:
        >>> rest = torch.zeros(50, dtype=torch.float64)
        >>> values, inside = isotropic(rest[:2] + 3, rest, 2)
        >>> values.round(decimals=9).tolist(), round(inside, 9)
        ([3.0, 3.0], 1.0)
    """
    size, stream = len(checks.vector("rest", rest)), checks.random_stream(seed, "directions")
    gauss = torch.randn(size, len(theta), generator=stream, dtype=rest.dtype)
    return leading(rest, theta, torch.linalg.qr(gauss).Q, count)


def union_eigenvalues(theta: Tensor, leading: Tensor, mean: float, count: int) -> Tensor:
    """Return what ``isotropic`` tends to when P is large and B has few outliers.

    Spikes and outliers of B then do not meet: the largest of all b_j and theta_k + tr B / P.

    Args:
        theta: Eigenvalues of M.
        leading: Leading eigenvalues of B, at least ``count`` of them.
        mean: tr B / P.
        count: How many.

    Example:
        >>> union_eigenvalues(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.5]), 0.25, 2).tolist()
        [3.25, 2.0]
    """
    both = torch.cat([theta + mean, leading.to(theta)])
    return both.sort(descending=True).values[: _number("count", count, len(both))]


def rescaled_eigenvalues(levels: ThreeLevels, even: Tensor) -> Tensor:
    """Return the eigenvalues of sum_{c,c'} pi_c delta_{c,c'} delta_{c,c'}^T / h_{c,c'}, falling.

    If the vectors of a group are its mean times sizes s of mean 1, then their second moment is
    that of the mean times E s^2 = 1/h.

    Args:
        levels: The group means.
        even: Evenness h of each group, C x C, as ``three_levels.evenness`` returns it.

    Raises:
        ValueError: If h is not in (0, 1] for a group with a mean.
    """
    c = levels.classes
    h = checks.matrix("even", even, rows=c, columns=c)
    if not ((h > 0) & (h <= 1 + 1e-6)).all():
        raise ValueError(f"even lies in [{float(h.min()):g}, {float(h.max()):g}], not in (0, 1]")
    roots = (levels.weights[:, None] / h).flatten().sqrt()
    return torch.linalg.eigvalsh(roots[:, None] * levels.gram * roots).flip(0)


def evenness_of(derivatives: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """Return h = (E a)^2 / E a^2, a = <delta_{i,c'}, delta_{c,c'}>, of explicit vectors, C x C.

    Args:
        derivatives: delta_{i,c'}, n x C x P.
        labels: Class of each example (n).
        means: Group means, C x C x P.
    """
    rows = []
    for label, mean in enumerate(means):
        along = (derivatives[labels == label] * mean).sum(2)
        rows.append(along.mean(0) ** 2 / along.square().mean(0))
    return torch.stack(rows)


def _number(name: str, value: int, most: int) -> int:
    if checks.positive_integer(name, value) > most:
        raise ValueError(f"{name} is {value}, but at most {most} is needed")
    return value


# --- Gaussian classes ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GaussianClasses:
    """Vectors that stand for logit derivatives: group means times sizes, plus isotropic noise.

    Attributes:
        derivatives: delta_{i,c'} = s_{i,c'} m_{c,c'} + noise, n x C x P.
        labels: Class of each example (n).
        spikes: pi_c |m_{c,c'}|^2, the eigenvalues of the population's M, C x C.
        sizes: s_{i,c'}, n x C; all 1 if the groups are even.
    """

    derivatives: Tensor
    labels: Tensor
    spikes: Tensor
    sizes: Tensor

    @property
    def levels(self) -> ThreeLevels:
        """The three levels of the sample."""
        return ThreeLevels.of(_means(self.derivatives, self.labels), self.labels.bincount())

    @property
    def ratio(self) -> float:
        """P / N, N = n C the number of vectors."""
        n, c, size = self.derivatives.shape
        return size / (n * c)

    @property
    def evenness(self) -> Tensor:
        """Evenness (E s)^2 / E s^2 of the sizes drawn in each group, C x C."""
        groups = [self.sizes[self.labels == c] for c in range(len(self.spikes))]
        return torch.stack([s.mean(0) ** 2 / s.square().mean(0) for s in groups])

    @property
    def measured_evenness(self) -> Tensor:
        """Evenness of each group along its mean, as one would measure it in a network, C x C."""
        return evenness_of(self.derivatives, self.labels, _means(self.derivatives, self.labels))


def gaussian_classes(
    size: int,
    per_class: int,
    spikes: Tensor,
    *,
    evenness: float = 1.0,
    seed: int | torch.Generator = 0,
) -> GaussianClasses:
    """Draw C classes with C^2 orthogonal group means and noise of variance 1/C in all directions.

    delta_{i,c'} = s_{i,c'} m_{c,c'} + noise. The sizes s are lognormal with mean 1 and
    E s^2 = 1 / evenness; all equal to 1 by default, and then the noise is isotropic.

    Args:
        size: P, at least C^2.
        per_class: Examples of each class, at least 2.
        spikes: C^2 nonnegative numbers: pi_c |m_{c,c'}|^2.
        evenness: Of the sizes, in (0, 1].
        seed: Seed, or generator, of means, sizes and noise.

    Raises:
        ValueError: If the number of spikes is no square or above P, or a number is out of range.

    Example:
        >>> classes = gaussian_classes(50, 20, torch.tensor([9.0, 4.0, 0.0, 0.0]).double())
        >>> classes.derivatives.shape, classes.ratio
        (torch.Size([40, 2, 50]), 0.625)
    """
    spikes = checks.vector("spikes", spikes).double()
    c = math.isqrt(len(spikes))
    if c**2 != len(spikes) or c < 2 or len(spikes) > checks.positive_integer("size", size):
        raise ValueError(
            f"{len(spikes)} spikes are given for size {size}, but C^2 of at most that is needed"
        )
    if float(spikes.min()) < 0:
        raise ValueError(f"spikes has {float(spikes.min()):g}, but numbers >= 0 are needed")
    if checks.positive_integer("per_class", per_class) < 2:
        raise ValueError(f"per_class is {per_class}, but at least 2 are needed")
    if checks.positive("evenness", evenness) > 1:
        raise ValueError(f"evenness is {evenness:g}, but a number in (0, 1] is needed")
    stream = checks.random_stream(seed, "gaussian classes")
    draw = lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)  # noqa: E731
    directions = torch.linalg.qr(draw(size, c**2)).Q.T
    means = ((spikes * c).sqrt()[:, None] * directions).reshape(c, c, size)
    labels = torch.arange(c).repeat_interleave(per_class)
    tau = math.sqrt(-math.log(evenness))
    sizes = torch.exp(tau * draw(len(labels), c) - tau**2 / 2)
    noise = draw(len(labels), c, size) / math.sqrt(c)
    derivatives = sizes[:, :, None] * means[labels] + noise
    return GaussianClasses(derivatives, labels, spikes.reshape(c, c), sizes)


def gaussian_outliers(classes: GaussianClasses, count: int) -> dict[str, Tensor]:
    """Return the leading eigenvalues of G and what is predicted of them.

    With g = P / N and x a spike of the population:

    - ``measured``: lambda_k.
    - ``means``: theta_k, of G1+2; about x + g, since a mean of few examples has noise of its own.
    - ``isotropic``: theta_k plus a Wishart matrix of N - C^2 columns (``wishart_spike``).
    - ``population``: (x + 1)(x + g) / x, which is the same law from the true means.
    - ``sizes``: the same from x E s^2 in place of x, with the sizes that were drawn.
    - ``rescaled``: of the sample's means rescaled by their evenness, and no theory.

    Args:
        classes: The sample.
        count: How many.
    """
    levels, g = classes.levels, classes.ratio
    n, c, size = classes.derivatives.shape
    theta = levels.eigenvalues("G1+2")[: _number("count", count, c**2)]
    # Taking off the means leaves N - C^2 degrees of freedom, and B is divided by N all the same.
    inner, variance = size / (n * c - c**2), 1 - c / n
    squares = torch.stack([classes.sizes[classes.labels == k].square().mean(0) for k in range(c)])

    def law(spikes: Tensor) -> Tensor:
        leading = spikes.flatten().sort(descending=True).values[:count]
        return torch.tensor([wishart_spike(float(x) + g, g) for x in leading], dtype=theta.dtype)

    return {
        "measured": top_of_second_moment(classes.derivatives, count),
        "means": theta,
        "isotropic": torch.tensor(
            [wishart_spike(float(t), inner, variance=variance) for t in theta], dtype=theta.dtype
        ),
        "population": law(classes.spikes),
        "sizes": law(classes.spikes * squares),
        "rescaled": rescaled_eigenvalues(levels, classes.measured_evenness)[:count],
    }


#: Spikes of three Gaussian classes, as multiples of the threshold sqrt(P / N): six are above it.
MULTIPLES = (16.0, 8.0, 5.0, 3.0, 2.0, 1.5, 0.6, 0.3, 0.0)


def gaussian_errors(
    size: int, *, ratio: float, evenness: float = 1.0, seed: int | torch.Generator
) -> dict[str, Tensor]:
    """Return predictions over measured eigenvalues of Gaussian classes, less 1, for six outliers.

    Args:
        size: P.
        ratio: P / N, about: examples are whole.
        evenness: Of the sizes.
        seed: Of the sample.

    Returns:
        As ``gaussian_outliers`` names them; and, of ``isotropic``, ``excess``: the predicted excess
        over the measured one, less 1.

    Example:
        >>> errors = gaussian_errors(100, ratio=0.5, seed=0)
        >>> bool((errors["means"] < 0).all()), errors["isotropic"].abs().median().item() < 0.05
        (True, True)
    """
    c = math.isqrt(len(MULTIPLES))
    per_class = round(
        checks.positive_integer("size", size) / checks.positive("ratio", ratio) / c**2
    )
    spikes = torch.tensor(MULTIPLES, dtype=torch.float64) * math.sqrt(ratio)
    classes = gaussian_classes(size, per_class, spikes, evenness=evenness, seed=seed)
    found = gaussian_outliers(classes, sum(multiple > 1 for multiple in MULTIPLES))
    measured, means = found.pop("measured"), found["means"]
    errors = {name: values / measured - 1 for name, values in found.items()}
    errors["excess"] = (found["isotropic"] - means) / (measured - means) - 1
    return errors


def single_spike(
    multiple: float,
    *,
    size: int,
    ratio: float = 0.5,
    evenness: float = 1.0,
    seed: int | torch.Generator,
) -> dict[str, float]:
    """Return the largest eigenvalue of G for Gaussian classes with one spike, and its laws.

    Args:
        multiple: The spike over its threshold sqrt(P / N).
        size: P.
        ratio: P / N, about.
        evenness: Of the sizes.
        seed: Of the sample.

    Returns:
        As ``gaussian_outliers`` names them, and ``edge``, that of the bulk.
    """
    spikes = torch.zeros(len(MULTIPLES), dtype=torch.float64)
    spikes[0] = multiple * math.sqrt(checks.positive("ratio", ratio))
    per_class = round(size / ratio / len(MULTIPLES))
    classes = gaussian_classes(size, per_class, spikes, evenness=evenness, seed=seed)
    found = {name: float(v[0]) for name, v in gaussian_outliers(classes, 1).items()}
    return {**found, "edge": (1 + math.sqrt(classes.ratio)) ** 2}


def top_of_second_moment(derivatives: Tensor, count: int) -> Tensor:
    """Return the leading eigenvalues of (1/n) sum delta delta^T, from the smaller Gram matrix.

    Args:
        derivatives: delta_{i,c'}, n x C x P.
        count: How many.
    """
    rows = derivatives.flatten(0, 1)
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return torch.linalg.eigvalsh(gram).flip(0)[:count] / len(derivatives)


# --- trained networks ---------------------------------------------------------------------------

#: Images of each class and hidden units of the networks small enough for explicit matrices.
PER_CLASS, HIDDEN = 25, (10,)


def small_network(
    dataset: str, epochs: int, weight_decay: float, label_smoothing: float, seed: int
) -> tuple[classifiers.Classifier, tuple[Tensor, Tensor]]:
    """Return an MLP with one hidden layer on 8 x 8 images, in float64, and its training images.

    Args:
        dataset: ``mnist`` or ``fashion_mnist``.
        epochs: Passes over the images; 0 leaves the network at initialisation.
        weight_decay: Multiple of theta in the gradient.
        label_smoothing: Share of each label given to all classes alike.
        seed: Of images, weights and batches.

    Example:
        >>> network, (x, labels) = small_network("mnist", 0, 0.0, 0.0, seed=0)
        >>> x.shape, classifiers.count_parameters(network)
        (torch.Size([250, 1, 8, 8]), 760)
    """
    x, y = datasets.load(checks.choice("dataset", dataset, ("mnist", "fashion_mnist"))).images(
        per_class=PER_CLASS, size=8, seed=seed, dtype=torch.float64
    )
    model = classifiers.build(
        "mlp", channels=1, size=8, hidden=HIDDEN, seed=seed, dtype=torch.float64
    )
    if epochs:
        classifiers.fit(
            model,
            x,
            y,
            epochs=epochs,
            weight_decay=weight_decay,
            label_smoothing=label_smoothing,
            batch_size=125,
            seed=seed,
            progress=False,
        )
    return model.eval(), (x, y)


def small_network_cell(
    dataset: str, epochs: int, weight_decay: float, label_smoothing: float, seed: int
) -> dict[str, float]:
    """Return what ``predictions`` returns of a small network, and how well it fits its images.

    Args:
        dataset: As for ``small_network``, and so the others.
        epochs: See there.
        weight_decay: See there.
        label_smoothing: See there.
        seed: See there.
    """
    model, data = small_network(dataset, epochs, weight_decay, label_smoothing, seed)
    fit = classifiers.evaluate(model, *data)
    return {
        "train_error": fit.error,
        "train_probability": fit.mean_probability,
        **predictions(LossCurvature(model, data), seed),
    }


def predictions(curvature: LossCurvature, seed: int | torch.Generator) -> dict[str, float]:
    """Return outliers of a small network's G and their predictions, k = 1 ... OUTLIERS.

    - ``G_k``, ``means_k``: eigenvalues of G and of G1+2; ``centres_k``: of G1.
    - ``isotropic_k``: with B's eigenvalues and random directions; ``isotropic_centres_k``: the
      same from G1. ``inside``: mean share of G's eigenvectors in the span of the class centres;
      ``isotropic_inside``: the same with random directions.
    - ``rescaled_k``: of the group means rescaled by their evenness.
    - ``first_k``, ``second_k``: first and second order; ``single_k``: the secular equation of each
      spike by itself; all three sorted. ``ritz_k``, ``ritz_centres_k``: G restricted to the span
      of the group means, and of the class centres.
    - ``alignment_k``: u_k^T B u_k P / tr B.
    - ``edge``, ``edge_centres``: largest eigenvalue of B, for G1+2 and for G1.
    - ``roots``: number of roots of the exact secular equation above b_1, ``root_error``: their
      largest relative distance from G's eigenvalues.
    - ``evenness``: median over c' != c.

    Args:
        curvature: A small network on its data.
        seed: Of the random directions.
    """
    stream = checks.random_stream(seed, "isotropic directions")
    derivatives, labels, k = curvature.logit_derivatives(), curvature.labels, OUTLIERS
    levels = ThreeLevels.of(_means(derivatives, labels), curvature.counts)
    split = split_derivatives(derivatives, levels, "G1+2")
    centres = split_derivatives(derivatives, levels, "G1")
    even = evenness_of(derivatives, labels, levels.means)
    measured, inside = leading(centres.rest, centres.theta, centres.overlaps, k)
    random, random_inside = isotropic(centres.theta, centres.rest, k, seed=stream)
    roots = split.roots()[:k]
    vectors = {
        "G": measured,
        "means": split.theta,
        "centres": centres.theta,
        "isotropic": isotropic(split.theta, split.rest, k, seed=stream)[0],
        "isotropic_centres": random,
        "rescaled": rescaled_eigenvalues(levels, even),
        **_by_overlaps(split),
        "ritz": split.ritz(),
        "ritz_centres": centres.ritz(),
        "alignment": split.alignment(),
    }
    return {
        **_numbered(vectors),
        "inside": inside,
        "isotropic_inside": random_inside,
        "edge": float(split.rest[0]),
        "edge_centres": float(centres.rest[0]),
        "roots": len(roots),
        "root_error": float((roots / measured[: len(roots)] - 1).abs().max()) if len(roots) else 0,
        "evenness": _off_diagonal_median(even),
    }


def small_network_cells() -> list[Cell]:
    """Return the cells of ``small_network_cell`` that are stored.

    Epochs from none to 300, and at 300 without weight decay, with twenty times as much, and with
    smoothed labels; two data sets, six trainings of each.
    """
    arms = [(epochs, 5e-4, 0.0) for epochs in (0, 30, 100, 300)]
    arms += [(300, 0.0, 0.0), (300, 1e-2, 0.0), (300, 5e-4, 0.1)]
    return [
        {
            "dataset": dataset,
            "epochs": epochs,
            "weight_decay": weight_decay,
            "label_smoothing": smoothing,
            "seed": seed,
        }
        for dataset, (epochs, weight_decay, smoothing), seed in product(
            ("mnist", "fashion_mnist"), arms, range(6)
        )
    ]


def network_predictions(
    curvature: LossCurvature, *, directions: int = 12, seed: int | torch.Generator = 0
) -> dict[str, float]:
    """Return what ``predictions`` does for a network of any size, from products only.

    G, M and B are restricted to the span of u_1 ... u_12, of B u_k and G's eigenvectors for the
    leading k, and of the class centres. First and second order lose nothing by that; B's own
    eigenvalues and the secular equation lose what those directions do not hold. ``isotropic_k`` is
    ``union_eigenvalues``. ``ritz_k`` is G restricted to u_1 ... u_12.

    Args:
        curvature: The classifier on its data.
        directions: How many of the u_k, at least OUTLIERS.
        seed: Of the random vectors for tr B.

    Raises:
        ValueError: If ``directions`` is below OUTLIERS.
    """
    if checks.positive_integer("directions", directions) < OUTLIERS:
        raise ValueError(f"directions is {directions}, but at least {OUTLIERS} are needed")
    levels, k = three_levels(curvature), OUTLIERS
    full, even = curvature.gauss_newton, evenness(curvature, levels.means).double()
    top = top_eigenpairs(full, k, start=levels.centres, tolerance=1e-2)
    u = levels.eigenvectors("G1+2", directions)
    theta = levels.eigenvalues("G1+2")
    images = full @ u[:, :k] - u[:, :k] * theta[:k].to(u)
    basis = orthonormal_columns(torch.cat([u.T, images.T, top.vectors.T.to(u), levels.centres]))
    means, whole = restricted(full, levels, basis)
    split = Split.of(means, whole - means)
    inner = basis.T.double()
    total = float(split.rest.sum()) + trace_within(full, levels, basis=basis, seed=seed)
    mean, along = total / curvature.size, split.couplings.diagonal()
    centre_basis = orthonormal_columns(levels.centres)
    vectors = {
        "G": top.values,
        "means": theta,
        "centres": levels.eigenvalues("G1"),
        "isotropic": union_eigenvalues(theta, split.rest, mean, k),
        "rescaled": rescaled_eigenvalues(levels, even.clamp_max(1)),
        **_by_overlaps(split),
        "ritz": _restricted_eigenvalues(whole, inner @ u.double()),
        "ritz_centres": _restricted_eigenvalues(whole, inner @ centre_basis.double()),
        "alignment": along / mean,
    }
    return {
        **_numbered(vectors),
        "inside": float((centre_basis.T @ top.vectors.to(u)).square().sum()) / k,
        "edge": float(split.rest[0]),
        "evenness": _off_diagonal_median(even),
    }


def network_cell(network: str, per_class: int, seed: int) -> dict[str, float]:
    """Return ``network_predictions`` of a shipped network, and how well it fits its images.

    Args:
        network: One of ``trained_networks.names()``.
        per_class: G is that of the loss over so many of the training images of each class.
        seed: Of the random vectors for a trace.
    """
    trained = trained_networks.load(network)
    fit = classifiers.evaluate(trained.model, *trained.train_set)
    x, labels = trained.train_set
    most = checks.positive_integer("per_class", per_class)
    own = [torch.nonzero(labels == c).flatten()[:most] for c in labels.unique()]
    data = (x[torch.cat(own)], labels[torch.cat(own)])
    return {
        "train_error": fit.error,
        "train_probability": fit.mean_probability,
        **network_predictions(LossCurvature(trained.model, data), seed=seed),
    }


#: Shipped networks that are measured, on each data set.
STORED_NETWORKS = ("vgg11", "resnet18")


def network_cells() -> list[Cell]:
    """Return the cells of ``network_cell`` that are stored, the cheapest first."""
    names = product(STORED_NETWORKS, hessian_sweep.IMAGE_SETS)
    return [
        {"network": f"{dataset}-{network}", "per_class": 30, "seed": 0}
        for network, dataset in names
    ]


def restricted(
    full: SymmetricOperator, levels: ThreeLevels, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Q^T M Q and Q^T G Q, K x K in float64, M = G1+2.

    Args:
        full: G.
        levels: Its group means.
        columns: Q, P x K.
    """
    groups = (levels.means.flatten(0, 1) @ columns).double()
    weights = levels.weights.repeat_interleave(levels.classes)
    whole = (columns.T @ (full @ columns)).double()
    return groups.T @ (weights[:, None] * groups), (whole + whole.T) / 2


def trace_within(
    full: SymmetricOperator,
    levels: ThreeLevels,
    *,
    basis: Tensor,
    probes: int = 6,
    seed: int | torch.Generator = 0,
) -> float:
    """Estimate tr B, B = G3, outside the span of some orthonormal vectors.

    Args:
        full: G.
        levels: Its group means.
        basis: P x K with orthonormal columns; the more of B they hold, the better the estimate.
        probes: Number of Gaussian vectors.
        seed: Seed, or generator, of the probes.

    Source: Hutchinson 1990; Meyer et al. 2021 (Hutch++).
    """
    stream = checks.random_stream(seed, "trace")
    count = checks.positive_integer("probes", probes)
    z = torch.randn(full.size, count, generator=stream, dtype=torch.float64).to(basis)
    means, whole = restricted(full, levels, z - basis @ (basis.T @ z))
    return float((whole - means).trace()) / count


# --- reading the stored tables -------------------------------------------------------------------


def columns(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return what a table holds under ``name_1`` to ``name_9``, one row a network.

    Args:
        frame: A table of ``predictions`` or ``network_predictions``.
        name: As there.
    """
    return frame[[f"{name}_{k + 1}" for k in range(OUTLIERS)]].to_numpy(dtype=float)


def predicted_excess(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return predicted over measured excess over G1+2, one row a network, one column an outlier.

    Args:
        frame: As for ``columns``.
        name: The prediction.
    """
    theta, measured = columns(frame, "means"), columns(frame, "G")
    return (columns(frame, name) - theta) / (measured - theta)


def explained(frame: pd.DataFrame, name: str) -> Interval:
    """Return the mean over networks of the median predicted share of the excess, with its interval.

    Args:
        frame: As for ``columns``, at least two networks.
        name: The prediction.
    """
    return mean_interval(np.median(predicted_excess(frame, name), 1))


def relative_errors(frame: pd.DataFrame, values: np.ndarray) -> list[float]:
    """Return the median and the 90 % quantile of |value / lambda - 1|.

    Args:
        frame: As for ``columns``.
        values: Predicted eigenvalues, one row a network; NaN where one does not count.
    """
    wrong = np.abs(values / columns(frame, "G") - 1)
    wrong = wrong[~np.isnan(wrong)]
    return [float(np.quantile(wrong, q)) if len(wrong) else math.nan for q in (0.5, 0.9)]


def secular_errors(split: Split) -> dict[str, tuple[float, int]]:
    """Return how far roots of secular equations are from G's eigenvalues above b_1.

    Args:
        split: M and B.

    Returns:
        ``all``, of the exact equation, and ``each``, of every spike by itself: the largest
        relative distance, and how many eigenvalues have no root.
    """
    edge = float(split.rest[0]) * (1 + 1e-7)
    measured = split.eigenvalues()
    measured = measured[measured > edge]
    alone = split.single_roots(min(len(measured), len(split.theta)))
    found = {"all": split.roots(), "each": alone.sort(descending=True).values}
    result = {}
    for name, values in found.items():
        roots = values[values > edge]
        distance = (roots / measured[: len(roots)] - 1).abs()
        result[name] = (float(distance.max()) if len(roots) else 0.0, len(measured) - len(roots))
    return result


def _by_overlaps(split: Split) -> dict[str, Tensor]:
    """Return the predictions that follow from B along the u_k, sorted."""
    k = OUTLIERS
    found = {
        "first": split.first_order()[:k],
        "second": split.second_order()[:k],
        "single": split.single_roots(k),
    }
    return {name: values.sort(descending=True).values for name, values in found.items()}


def _restricted_eigenvalues(matrix: Tensor, columns: Tensor) -> Tensor:
    q = torch.linalg.qr(columns).Q
    return torch.linalg.eigvalsh(q.T @ matrix @ q).flip(0)


def _numbered(vectors: dict[str, Tensor]) -> dict[str, float]:
    return {f"{name}_{j + 1}": float(v[j]) for name, v in vectors.items() for j in range(OUTLIERS)}


def _off_diagonal_median(matrix: Tensor) -> float:
    return float(matrix[~torch.eye(len(matrix), dtype=torch.bool)].median())
