"""What one large gradient step buys: spikes of the weights, features, and ridge regression.

Four samples are drawn from one population: the gradient is taken on the first, ridge regression
on the features is fitted on the second, its penalty is chosen on the third, and errors are
measured on the fourth.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.datasets import load
from lowgrad_utils.eigensolvers import orthonormal_columns
from lowgrad_utils.experiments.initialisation import PSI_2
from lowgrad_utils.feature_ridge import (
    RidgeFit,
    feature_covariance,
    hermite_polynomials,
    hermite_series,
    ridge_path,
    ridge_theory,
)
from lowgrad_utils.gradients import Decomposition, decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork, normalise_rows
from lowgrad_utils.random_matrices import wishart_spike
from lowgrad_utils.spectra import alignment
from lowgrad_utils.spiked_data import SpikedData, bulk_eigenvalues, split_spike

Cell = dict[str, Any]

#: The parts of a target, each of unit variance: t = omega^T x and t = q^T x over their standard
#: deviations, he_2(t) = (t^2 - 1)/sqrt(2), he_3(t) = (t^3 - 3t)/sqrt(6).
PARTS = ("omega_1", "omega_2", "omega_3", "q_1", "q_2")

_HALF = math.sqrt(0.5)
#: Targets by name: the coefficients of ``PARTS``. Squares add up to 1. "omega+1" has the mean 1.
TARGETS: dict[str, tuple[float, ...]] = {
    "omega": (_HALF, _HALF, 0.0, 0.0, 0.0),
    "omega+1": (_HALF, _HALF, 0.0, 0.0, 0.0),
    "omega-linear": (1.0, 0.0, 0.0, 0.0, 0.0),
    "omega-even": (0.0, 1.0, 0.0, 0.0, 0.0),
    "omega-odd": (_HALF, 0.0, _HALF, 0.0, 0.0),
    "q": (0.0, 0.0, 0.0, _HALF, _HALF),
    "q-even": (0.0, 0.0, 0.0, 0.0, 1.0),
    "both": (0.5, 0.5, 0.0, 0.5, 0.5),
}

#: Sizes of the samples in units of d: for ridge regression, for choosing its penalty, for errors.
FIT, VALIDATION, TEST = 4, 2, 16
#: Penalties among which the validation sample chooses, and the one that is kept fixed.
PENALTIES = tuple(10 ** (k / 2) for k in range(-6, 5))
FIXED_PENALTY = 0.1
#: The step eta/gamma: eta = 0 leaves random features.
ETAS = (0.0, 0.06, 0.2, 0.5, 1.0, 3.0, 10.0)
#: Steps among which the validation sample chooses when gradients are compressed.
COMPRESSION_ETAS = (0.3, 1.0, 3.0, 10.0)
#: The number of features of the grids, and their seeds.
SIZE, SEEDS = 240, tuple(range(12))
#: Rules and lengths of the steps on MNIST.
MNIST_RULES = ("full", "rank-1", "rank-2", "rank-10", "rank-30", "orthogonal")
MNIST_LENGTHS = (0.3, 1.0, 3.0)


class Sample(NamedTuple):
    """Examples with their targets.

    Attributes:
        X: The examples, n x d.
        z: Their spike components, length n.
        parts: The values of ``PARTS``, n x 5.
        y: The targets, length n.
    """

    X: Tensor
    z: Tensor
    parts: Tensor
    y: Tensor


@dataclass(frozen=True)
class Population:
    """Where all samples come from: N(0, Sigma_hat + zeta^2 q q^T), and targets on it.

    Attributes:
        eigenvalues: Of the bulk covariance, length d.
        q: The spike direction.
        zeta: The spike strength.
        omega: The other direction of the targets, orthogonal to q.
        target: A key of ``TARGETS``.
        noise: Standard deviation of the label noise.
    """

    eigenvalues: Tensor = field(repr=False)
    q: Tensor = field(repr=False)
    zeta: float
    omega: Tensor = field(repr=False)
    target: str
    noise: float

    @property
    def coefficients(self) -> Tensor:
        """Coefficients of ``PARTS`` in the target."""
        return torch.tensor(TARGETS[self.target], dtype=torch.float64)

    @property
    def second_moment(self) -> float:
        """Variance of the targets, noise included."""
        return float(self.coefficients.square().sum()) + self.noise**2

    @property
    def linear_floor(self) -> float:
        """Error of the best linear function of x: the target's nonlinear part and the noise."""
        nonlinear = self.coefficients[[1, 2, 4]]
        return float(nonlinear.square().sum()) + self.noise**2

    def covariance_times(self, v: Tensor) -> Tensor:
        """Compute Sigma v for a vector or the columns of a matrix."""
        spread = self.eigenvalues[:, None] * v if v.ndim == 2 else self.eigenvalues * v
        along = self.zeta**2 * (self.q @ v)
        return spread + (torch.outer(self.q, along) if v.ndim == 2 else along * self.q)

    def scale(self, v: Tensor) -> float:
        """Compute the standard deviation of v^T x."""
        return math.sqrt(float(v @ self.covariance_times(v)))

    def draw(self, n: int, stream: torch.Generator) -> Sample:
        """Draw n examples with their targets.

        Args:
            n: Number of examples.
            stream: Where the random numbers come from.
        """
        d = len(self.q)
        z = torch.randn(n, generator=stream, dtype=torch.float64)
        X = torch.randn(n, d, generator=stream, dtype=torch.float64) * self.eigenvalues.sqrt()
        X.addr_(z, self.q, alpha=self.zeta)
        along_omega = hermite_polynomials(X @ self.omega / self.scale(self.omega), 3)
        along_q = hermite_polynomials(X @ self.q / self.scale(self.q), 2)
        parts = torch.cat([along_omega[1:], along_q[1:]]).T
        y = parts @ self.coefficients + float(self.target.endswith("+1"))
        y = y + self.noise * torch.randn(n, generator=stream, dtype=torch.float64)
        return Sample(X, z, parts, y)


@dataclass(frozen=True)
class Problem:
    """A network at initialisation with its population and four samples.

    Attributes:
        population: Where the samples come from.
        network: The network.
        data: The gradient's sample, split into bulk and spike.
        y: Its targets.
        seed: Seed of the other three samples, which are drawn when asked for.
    """

    population: Population
    network: TwoLayerNetwork
    data: SpikedData
    y: Tensor = field(repr=False)
    seed: int

    @cached_property
    def fit(self) -> Sample:
        """The sample that ridge regression is fitted on."""
        return self._draw(FIT, "fit")

    @cached_property
    def validation(self) -> Sample:
        """The sample that chooses its penalty."""
        return self._draw(VALIDATION, "validation")

    @cached_property
    def test(self) -> Sample:
        """The sample on which errors are measured."""
        return self._draw(TEST, "test")

    def _draw(self, size: int, purpose: str) -> Sample:
        stream = checks.random_stream(self.seed, f"one step: {purpose}")
        return self.population.draw(size * self.data.d, stream)

    @cached_property
    def residue(self) -> Tensor:
        """The residue r = f - y of the squared loss at initialisation."""
        return self.network(self.data.X) - self.y

    @cached_property
    def parts(self) -> Decomposition:
        """The gradient and its pieces at initialisation."""
        return decompose(self.data, self.network, self.residue)


def problem(
    d: int,
    *,
    nu: float = 0.0,
    alpha: float = 0.0,
    activation: str = "relu",
    scaling: str = "mean-field",
    target: str = "omega",
    noise: float = 0.2,
    ratio: float = 4.0,
    seed: int = 0,
) -> Problem:
    """Draw a population, a network and four independent samples.

    Args:
        d: Number of features; m = 1.25 d neurons.
        nu: Spike exponent: zeta = n^nu with n the size of the gradient's sample.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        target: A key of ``TARGETS``.
        noise: Standard deviation of the label noise.
        ratio: n/d of the gradient's sample. The first paper's Assumption 1 asks for less than 1;
            with more examples the gradient knows omega better.
        seed: One integer; everything draws from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> problem(40, target="q", nu=0.25).parts.G.shape
        torch.Size([40, 50])
    """
    checks.choice("target", target, TARGETS)
    d, noise = checks.positive_integer("d", d), checks.nonnegative("noise", noise)
    n, m = round(checks.positive("ratio", ratio) * d), round(PSI_2 * d)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    stream = checks.random_stream(seed, "one step: directions")
    q, omega = torch.randn(2, d, generator=stream, dtype=torch.float64)
    q = q / q.norm()
    omega = omega - (omega @ q) * q
    zeta = float(n) ** checks.nonnegative("nu", nu)
    population = Population(
        bulk_eigenvalues(d, alpha), q, zeta, omega / omega.norm(), target, noise
    )
    first = population.draw(n, checks.random_stream(seed, "one step: gradient"))
    data = SpikedData(first.X, first.z, q, zeta, population.eigenvalues)
    return Problem(population, network, data, first.y, seed)


# --- the step ---------------------------------------------------------------------------------


#: Ways to replace a step's gradient G. "none" takes no step, "rank-k" is G's best approximation
#: of rank k, "S1+S12" and "S1+S12+S2" are the first paper's pieces, "orthogonal" makes all nonzero
#: singular values of G equal, "sign" takes the sign of each entry; both keep G's Frobenius norm.
#: "orthogonal-2" and "sign-2" keep two singular directions of these, G's own two for the first.
RULES = (
    "none",
    "full",
    "rank-1",
    "rank-2",
    "rank-3",
    "rank-10",
    "rank-30",
    "S1+S12",
    "S1+S12+S2",
    "orthogonal",
    "orthogonal-2",
    "sign",
    "sign-2",
)


def compressed(parts: Decomposition, rule: str) -> Tensor:
    """Replace the gradient of a step by one of the ``RULES``.

    Args:
        parts: The gradient with its pieces.
        rule: One of ``RULES``.

    Returns:
        A matrix of the gradient's shape.

    Raises:
        ValueError: If the rule is unknown.

    Source: GaLore (Zhao et al., 2024) projects gradients onto leading singular directions.

    Example:
        >>> parts = problem(40).parts
        >>> int(torch.linalg.matrix_rank(compressed(parts, "rank-2")))
        2
    """
    checks.choice("rule", rule, RULES)
    G = parts.G
    if rule in ("none", "full"):
        return G if rule == "full" else torch.zeros_like(G)
    if rule.startswith("S1"):
        total = parts.S1.matrix() + parts.S12.matrix()
        return total if rule == "S1+S12" else total + parts.S2.matrix()
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    if rule.startswith("rank"):
        return _truncated(U, s, Vh, int(rule.split("-")[1]))
    if rule.startswith("orthogonal"):
        # Below d examples G leaves directions out, for which rounding would choose partners.
        rank = int((s > max(G.shape) * torch.finfo(s.dtype).eps * s[0]).sum())
        height = s.norm() / math.sqrt(rank)
        return _truncated(U, height.expand(len(s)), Vh, 2 if rule.endswith("2") else rank)
    signs = torch.sign(G) * (s.norm() / math.sqrt(G.numel()))
    return signs if rule == "sign" else _truncated(*torch.linalg.svd(signs, full_matrices=False), 2)


def _truncated(U: Tensor, s: Tensor, Vh: Tensor, k: int) -> Tensor:
    return (U[:, :k] * s[:k]) @ Vh[:k]


def stepped(W: Tensor, gradient: Tensor, step: float, *, normalised: bool = False) -> Tensor:
    """Take one gradient step, W - step G^T, with rows normalised again or not.

    Args:
        W: Inner weights, m x d.
        gradient: G, d x m.
        step: eta / gamma.
        normalised: Divide the rows by their lengths.

    Raises:
        ValueError: If shapes do not fit or ``step`` is negative.

    Example:
        >>> p = problem(40)
        >>> torch.equal(stepped(p.network.W, p.parts.G, 0.0), p.network.W)
        True
    """
    m, d = checks.matrix("W", W).shape
    checks.matrix("gradient", gradient, rows=d, columns=m)
    moved = torch.add(W, gradient.T, alpha=-checks.nonnegative("step", step))
    return normalise_rows(moved) if normalised else moved


def descended(p: Problem, eta: float, rule: str, steps: int) -> Tensor:
    """Take several steps on the same sample, each with its own gradient, rows normalised.

    Args:
        p: The problem.
        eta: Each step in units of 1/gamma.
        rule: One of ``RULES``, applied to each gradient.
        steps: Number of steps.

    Raises:
        ValueError: If ``steps`` is not a whole number of at least 1, or as in ``compressed``.

    Example:
        >>> p = problem(40)
        >>> once = stepped(p.network.W, p.parts.G, 0.5 / p.network.gamma, normalised=True)
        >>> torch.allclose(descended(p, 0.5, "full", 1), once)
        True
    """
    network = p.network
    for _ in range(checks.positive_integer("steps", steps)):
        parts = decompose(p.data, network, network(p.data.X) - p.y)
        G = compressed(parts, rule)
        W = stepped(network.W, G, eta / network.gamma, normalised=True)
        network = TwoLayerNetwork(W, network.a, network.activation, network.scaling)
    return network.W


# --- spikes of the weights --------------------------------------------------------------------


class WeightSpikes(NamedTuple):
    """Two leading singular values of the updated weights and where the first one points.

    Attributes:
        values: s_1 and s_2 of W1.
        residue: Alignment of its top right singular vector (a direction of x) with X_B^T r.
        q: The same with q.
    """

    values: tuple[float, float]
    residue: float
    q: float


def predict_weight_spikes(p: Problem, eta: float) -> WeightSpikes:
    """Predict the spikes of W1 = W0 - (eta/gamma) G^T from its products with G's right factors.

    Let V be an orthonormal basis of span{a o mu, v_S2}, the right factors of S1 + S12 + S2, and
    K = W1^T V (d x 2). The rest W1^T (I - V V^T) is taken for independent entries of variance
    v = 1/d + h^2 |G - G V V^T|_F^2 / (d (m - 2)), h = eta/gamma, so that

        s_k^2 = kappa_k + m v / (1 - d v / kappa_k)

    with kappa_k the eigenvalues of K^T K, beyond kappa = v (d + sqrt(d m)); u_k has the squared
    cosine 1 - d m v^2 / (kappa_k - d v)^2 with K's own direction.

    Args:
        p: The problem.
        eta: The step in units of 1/gamma.

    Source: Benaych-Georges and Nadakuditi (2011), Theorem 2.1 with the Marchenko-Pastur law;
        derived for weights that are not independent of the gradient.

    Example:
        >>> p = problem(80)
        >>> W = stepped(p.network.W, p.parts.G, 4 / p.network.gamma)
        >>> s = torch.linalg.svdvals(W)[0]
        >>> bool(abs(predict_weight_spikes(p, 4.0).values[0] / s - 1) < 0.05)
        True
    """
    d, m = p.parts.G.shape
    h = checks.nonnegative("eta", eta) / p.network.gamma
    V = torch.linalg.qr(torch.stack([p.parts.S1.v, p.parts.S2.v], dim=1)).Q
    GV = p.parts.G @ V
    rest = float(p.parts.G.square().sum() - GV.square().sum())
    v = 1 / d + h**2 * rest / (d * (m - 2))
    U, roots, _ = torch.linalg.svd(p.network.W.T @ V - h * GV, full_matrices=False)
    kappas = roots.square().tolist()
    values = tuple(math.sqrt(wishart_spike(kappa, d / m, variance=m * v)) for kappa in kappas)
    cosine = 0.0
    if kappas[0] > v * (d + math.sqrt(d * m)):
        cosine = math.sqrt(1 - d * m * v**2 / (kappas[0] - d * v) ** 2)
    u = U[:, 0]
    return WeightSpikes(
        values, cosine * alignment(u, p.parts.S1.u), cosine * alignment(u, p.data.q)
    )


def measure_weight_spikes(p: Problem, W: Tensor) -> WeightSpikes:
    """Measure what ``predict_weight_spikes`` predicts.

    Args:
        p: The problem.
        W: The updated weights, m x d.
    """
    _, s, Vh = torch.linalg.svd(W, full_matrices=False)
    return WeightSpikes(
        tuple(s[:2].tolist()), alignment(Vh[0], p.parts.S1.u), alignment(Vh[0], p.data.q)
    )


# --- features -----------------------------------------------------------------------------------


def features(X: Tensor, W: Tensor, activation: str) -> Tensor:
    """Compute sigma(X W^T), n x m.

    Args:
        X: Examples, n x d.
        W: Weights, m x d; rows of any length.
        activation: A key of ``ACTIVATIONS``.
    """
    return ACTIVATIONS[activation].value(X @ W.T)


def part_products(population: Population, W: Tensor, activation: str) -> Tensor:
    """Compute E sigma(w_j^T x) p(x) for each of ``PARTS``, m x 5, exactly.

    For jointly normal h = w_j^T x and t with correlation rho, E sigma(h) he_k(t) =
    rho^k E sigma(s_j g) he_k(g): a neuron knows a polynomial of degree k of a direction to the
    k-th power of its correlation with it.

    Args:
        population: The population.
        W: Weights, m x d, independent of the examples that the mean is over.
        activation: A key of ``ACTIVATIONS``.

    Example:
        >>> p = problem(40)
        >>> part_products(p.population, p.network.W, "tanh")[:, 1].abs().max() < 1e-12
        tensor(True)
    """
    spread = population.covariance_times(W.T)
    s = (W.T * spread).sum(dim=0).sqrt()
    series = hermite_series(activation, s, 3).coefficients
    columns = []
    for direction, degrees in ((population.omega, (1, 2, 3)), (population.q, (1, 2))):
        rho = direction @ spread / (population.scale(direction) * s)
        columns += [rho**k * series[:, k] for k in degrees]
    return torch.stack(columns, dim=1)


def expected_knowledge(d: float, nu: float, degree: int, activation: str = "relu") -> float:
    """Compute the mean over random weights of |E sigma(W x) he_k(t)|^2, t along the spike q.

    For w^T q = g / sqrt(d), g ~ N(0, 1), a row has s^2 = 1 + zeta^2 g^2 / d and the correlation
    rho = sqrt((1 + zeta^2) / d) g / s with t; m E_g alpha_k(s)^2 rho^2k is left (alpha = 0,
    zeta = n^nu, n = 4 d, m = 1.25 d as in ``degree_cell``).

    Args:
        d: Number of features; need not be whole, and may be huge.
        nu: Spike exponent.
        degree: k, at least 1.
        activation: A key of ``ACTIVATIONS``.

    Raises:
        ValueError: If a number is out of range or the activation is unknown.

    Example:
        >>> values = [expected_knowledge(d, 0.25, 1) for d in (1e8, 1e10)]
        >>> round(math.log(values[1] / values[0], 100), 2)  # 1 + k (2 nu - 1)
        0.5
    """
    d, nu = checks.positive("d", d), checks.nonnegative("nu", nu)
    g = torch.linspace(-9, 9, 361, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2)
    weights /= weights.sum()
    strength = (4.0 * d) ** (2 * nu)
    s = (1 + strength * g.square() / d).sqrt()
    known = hermite_series(activation, s, degree).coefficients[:, degree]
    rho = math.sqrt((1 + strength) / d) * g / s
    return float(PSI_2 * d * weights @ (known * rho**degree).square())


def population_covariance(population: Population, W: Tensor, activation: str) -> Tensor:
    """Compute the covariance of the features over the population, m x m.

    Args:
        population: The population.
        W: Weights, m x d, independent of the examples that the mean is over.
        activation: A key of ``ACTIVATIONS``.
    """
    return feature_covariance(W @ population.covariance_times(W.T), activation)


def predict_feature_spikes(covariance: Tensor, n: int, count: int = 3) -> Tensor:
    """Predict the leading singular values of centred features over sqrt(n).

    A population eigenvalue t_k shows at t_k (1 + (1/n) sum_{j != k} t_j / (t_k - t_j)).

    Args:
        covariance: The population covariance of the features.
        n: Number of examples.
        count: How many.

    Returns:
        Predicted singular values, for those that are outliers; 0 for the others.

    Source: Baik and Silverstein (2006); Bai and Yao (2012) for a general bulk.
    """
    t = torch.linalg.eigvalsh(covariance).flip(0)
    values = torch.zeros(count, dtype=t.dtype)
    for k in range(count):
        others = torch.cat([t[:k], t[k + 1 :]])
        gaps = t[k] - others
        if float((others.square() / gaps.square()).sum()) < n:
            values[k] = (t[k] * (1 + (others / gaps).sum() / n)).clamp(min=0).sqrt()
    return values


def explained_share(v: Tensor, shapes: Iterable[Tensor]) -> float:
    """Compute the share of a centred vector that some functions explain, by least squares.

    Args:
        v: A vector over examples.
        shapes: The functions' values there, one vector each; the constant is added.
    """
    # phi(t) and phi(-t) are one function if sigma is odd.
    basis = orthonormal_columns(torch.stack([torch.ones_like(v), *shapes]))
    return float((basis.T @ v).square().sum() / v.square().sum())


def smoothed(t: Tensor, shift: float, spread: float, activation: str) -> Tensor:
    """Compute phi(t) = E sigma(shift t + spread g), what the mean over neurons sees of t.

    Args:
        t: Positions along a direction, length n.
        shift: Coefficient of t in the preactivation.
        spread: Standard deviation of the rest of the preactivation.
        activation: A key of ``ACTIVATIONS``.
    """
    nodes = torch.linspace(-6, 6, 121, dtype=torch.float64)
    weights = torch.exp(-nodes.square() / 2)
    weights /= weights.sum()
    values = ACTIVATIONS[activation].value(shift * t[:, None] + spread * nodes)
    return values @ weights


# --- ridge regression -------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Ridge regression on features: measured and predicted.

    Attributes:
        error: Test error with the penalty chosen on the validation sample.
        penalty: That penalty.
        fixed: Test error with ``FIXED_PENALTY``.
        learnt: E f p over the test sample for each of ``PARTS`` p.
        predicted: Predicted test error at the chosen penalty, NaN where there is no theory.
        predicted_fixed: The same at ``FIXED_PENALTY``.
        predicted_learnt: Predicted E f p.
    """

    error: float
    penalty: float
    fixed: float
    learnt: Tensor
    predicted: float
    predicted_fixed: float
    predicted_learnt: Tensor


def chosen(fits: list[RidgeFit], F: Tensor, y: Tensor) -> int:
    """Return the index of the fit with the least error on a sample.

    Args:
        fits: Fits with several penalties.
        F: Features of the sample.
        y: Its targets.
    """
    errors = [float((fit(F) - y).square().mean()) for fit in fits]
    return errors.index(min(errors))


def outcome(
    p: Problem,
    W: Tensor,
    *,
    theory: bool = True,
    covariance: Tensor | None = None,
    fit: Sample | None = None,
) -> Outcome:
    """Fit ridge regression on the features of given weights and predict what it does.

    Args:
        p: The problem.
        W: Weights, m x d.
        theory: Compute the predictions, too.
        covariance: The features' population covariance, if it is at hand.
        fit: The sample to fit on; the problem's own, independent of W, if None.

    Example:
        >>> p = problem(40)
        >>> outcome(p, p.network.W, theory=False).penalty in PENALTIES
        True
    """
    fit = fit or p.fit
    sigma = p.network.activation
    fits = ridge_path(features(fit.X, W, sigma), fit.y, [*PENALTIES, FIXED_PENALTY])
    best = chosen(fits[:-1], features(p.validation.X, W, sigma), p.validation.y)
    F = features(p.test.X, W, sigma)
    values, fixed_values = fits[best](F), fits[-1](F)
    error, fixed = (float((f - p.test.y).square().mean()) for f in (values, fixed_values))
    learnt = p.test.parts.T @ (values - values.mean()) / len(values)
    nothing = Outcome(
        error, PENALTIES[best], fixed, learnt, math.nan, math.nan, torch.full_like(learnt, math.nan)
    )
    if not theory:
        return nothing
    C = population_covariance(p.population, W, sigma) if covariance is None else covariance
    products = part_products(p.population, W, sigma)
    b, n = products @ p.population.coefficients, len(fit.y)
    moment = p.population.second_moment
    at_best = ridge_theory(C, b, moment, n, PENALTIES[best])
    at_fixed = ridge_theory(C, b, moment, n, FIXED_PENALTY)
    return Outcome(
        error,
        PENALTIES[best],
        fixed,
        learnt,
        at_best.error,
        at_fixed.error,
        products.T @ at_best.weights,
    )


def linear_error(p: Problem) -> float:
    """Measure the test error of ridge regression on x itself, the penalty chosen on validation.

    Args:
        p: The problem.
    """
    fits = ridge_path(p.fit.X, p.fit.y, list(PENALTIES))
    best = chosen(fits, p.validation.X, p.validation.y)
    return float((fits[best](p.test.X) - p.test.y).square().mean())


# --- cells --------------------------------------------------------------------------------------


def step_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    scaling: str,
    target: str,
    noise: float,
    ratio: float,
    normalised: bool,
    eta: float,
    seed: int,
) -> dict[str, float]:
    """Measure and predict one step of one network: weights, features and ridge regression.

    Args:
        d: Number of features.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        target: A key of ``TARGETS``.
        noise: Standard deviation of the label noise.
        ratio: n/d of the gradient's sample.
        normalised: Divide the rows of the updated weights by their lengths.
        eta: The step in units of 1/gamma.
        seed: Seed.

    Returns:
        ``risk`` (the test error), ``penalty``, ``fixed``, ``linear`` (ridge regression on x) and
        ``floor`` (the best linear function), with predictions ``p_risk`` and ``p_fixed``;
        ``learnt_...`` and ``p_learnt_...`` for each of ``PARTS``; ``w1``, ``w2`` (singular values
        of the weights), ``w_residue``, ``w_q`` and predictions ``p_w1`` ... (0 where rows are
        normalised); ``f1``, ``f2``, ``f3`` (of the centred features over sqrt(n)) and ``p_f1``
        ...; ``shape_1`` and ``shape_2``, the shares of their two top left singular vectors that
        the two functions phi(+-t) of the weights' own spike direction explain; ``omega`` and
        ``q``, the alignments of X^T r. Rounded to six decimals.
    """
    p = problem(
        d,
        nu=nu,
        alpha=alpha,
        activation=activation,
        scaling=scaling,
        target=target,
        noise=noise,
        ratio=ratio,
        seed=seed,
    )
    W = stepped(p.network.W, p.parts.G, eta / p.network.gamma, normalised=normalised)
    C = population_covariance(p.population, W, activation)
    o = outcome(p, W, covariance=C)
    values = {
        "risk": o.error,
        "p_risk": o.predicted,
        "penalty": o.penalty,
        "fixed": o.fixed,
        "p_fixed": o.predicted_fixed,
        "linear": linear_error(p),
        "floor": p.population.linear_floor,
    }
    for k, name in enumerate(PARTS):
        values[f"learnt_{name}"] = o.learnt[k]
        values[f"p_learnt_{name}"] = o.predicted_learnt[k]
    values |= _weight_values(p, W, eta, normalised) | _feature_values(p, W, C)
    spike = p.parts.S1.u + p.parts.S12.u
    values["omega"] = alignment(spike, p.population.omega)
    values["q"] = alignment(spike, p.data.q)
    return {name: round(float(value), 6) for name, value in values.items()}


def _weight_values(p: Problem, W: Tensor, eta: float, normalised: bool) -> dict[str, float]:
    seen = measure_weight_spikes(p, W)
    predicted = WeightSpikes((0.0, 0.0), 0.0, 0.0) if normalised else predict_weight_spikes(p, eta)
    values = {}
    for prefix, spikes in (("", seen), ("p_", predicted)):
        values |= {f"{prefix}w{k + 1}": s for k, s in enumerate(spikes.values)}
        values |= {f"{prefix}w_residue": spikes.residue, f"{prefix}w_q": spikes.q}
    return values


def _feature_values(p: Problem, W: Tensor, covariance: Tensor) -> dict[str, float]:
    sigma, X = p.network.activation, p.fit.X
    F = features(X, W, sigma)
    U, s, _ = torch.linalg.svd((F - F.mean(dim=0)) / math.sqrt(len(F)), full_matrices=False)
    predicted = predict_feature_spikes(covariance, len(F))
    values = {f"f{k + 1}": s[k] for k in range(3)}
    values |= {f"p_f{k + 1}": predicted[k] for k in range(3)}
    _, roots, Vh = torch.linalg.svd(W, full_matrices=False)
    direction, m = Vh[0], len(W)
    scale = p.population.scale(direction)
    t = X @ direction / scale
    shift = float(roots[0]) / math.sqrt(m) * scale
    variance = float((W * p.population.covariance_times(W.T).T).sum()) / m
    spread = math.sqrt(max(variance - shift**2, 1e-12))
    shapes = [smoothed(t, sign * shift, spread, sigma) for sign in (1, -1)]
    values |= {f"shape_{k + 1}": explained_share(U[:, k], shapes) for k in range(2)}
    return values


def compression_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    scaling: str,
    target: str,
    ratio: float,
    rule: str,
    steps: int,
    seed: int,
) -> dict[str, float]:
    """Measure ridge regression after one or more compressed steps, rows normalised each time.

    Step size and penalty are chosen together on the validation sample, for each rule anew.

    Args:
        d: Number of features.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        target: A key of ``TARGETS``.
        ratio: n/d of the gradient's sample.
        rule: One of ``RULES``.
        steps: Number of steps.
        seed: Seed.

    Returns:
        ``risk``, the test error, and ``eta``, the step chosen. Rounded to six decimals.
    """
    p = problem(
        d,
        nu=nu,
        alpha=alpha,
        activation=activation,
        scaling=scaling,
        target=target,
        ratio=ratio,
        seed=seed,
    )
    etas = (0.0,) if rule == "none" else COMPRESSION_ETAS
    tried = [(*tuned(p, descended(p, eta, rule, steps)), eta) for eta in etas]
    _, error, eta = min(tried)
    return {"risk": round(error, 6), "eta": eta}


def tuned(p: Problem, W: Tensor) -> tuple[float, float]:
    """Fit ridge regression on features; return validation and test error of the best penalty.

    Args:
        p: The problem.
        W: Weights, m x d.
    """
    best, sigma = _best_fit(p, W), p.network.activation
    return tuple(
        float((best(features(sample.X, W, sigma)) - sample.y).square().mean())
        for sample in (p.validation, p.test)
    )


def _best_fit(p: Problem, W: Tensor) -> RidgeFit:
    sigma = p.network.activation
    fits = ridge_path(features(p.fit.X, W, sigma), p.fit.y, list(PENALTIES))
    return fits[chosen(fits, features(p.validation.X, W, sigma), p.validation.y)]


class QuadraticShares(NamedTuple):
    """Where the learnt share of he_2(omega^T x) comes from, rho the cosine of omega and X^T r.

    Attributes:
        ceiling: rho^4, the most that functions of t = u^T x can reach, u along X^T r.
        along: The part through rho^2 he_2(t).
        mixed: The part through sqrt(2) rho sqrt(1 - rho^2) t s, s = v^T x.
        across: The part through (1 - rho^2) he_2(s).
    """

    ceiling: float
    along: float
    mixed: float
    across: float


def quadratic_shares(p: Problem, W: Tensor) -> QuadraticShares:
    """Split the learnt share of he_2(omega^T x) by omega = rho u + sqrt(1 - rho^2) v.

    For an isotropic bulk and no spike to speak of, he_2(omega^T x) is the sum of the three
    functions that ``QuadraticShares`` names; the share of each is E f p / theta over the test
    sample.

    Args:
        p: A problem with alpha = 0, nu = 0 and a target that is quadratic in omega^T x.
        W: Weights, m x d.

    Raises:
        ValueError: If the target has no part he_2(omega^T x).

    Example:
        >>> p = problem(40)
        >>> shares = quadratic_shares(p, p.network.W)
        >>> max(abs(share) for share in shares[1:]) < 0.3 < shares.ceiling
        True
    """
    theta = float(p.population.coefficients[PARTS.index("omega_2")])
    checks.positive("the target's coefficient of omega_2", theta)
    omega = p.population.omega
    u = p.data.X.T @ p.residue
    u = u / u.norm()
    rho = float(omega @ u)
    v = normalise_rows((omega - rho * u)[None])[0]
    t, s = p.test.X @ u, p.test.X @ v
    f = _best_fit(p, W)(features(p.test.X, W, p.network.activation))
    f = f - f.mean()
    rest = 1 - rho**2
    along = rho**2 * (t.square() - 1) * _HALF
    mixed = math.sqrt(2 * rest) * rho * t * s
    across = rest * (s.square() - 1) * _HALF
    shares = (float((f * part).mean()) / theta for part in (along, mixed, across))
    return QuadraticShares(rho**4, *shares)


def degree_cell(
    d: int, nu: float, target: str, eta: float, activation: str, seed: int
) -> dict[str, float]:
    """Measure how much the features know of each of ``PARTS`` (mean field, n = 4 d, alpha = 0).

    Args:
        d: Number of features.
        nu: Spike exponent.
        target: A key of ``TARGETS``.
        eta: The step in units of 1/gamma.
        activation: A key of ``ACTIVATIONS``.
        seed: Seed.

    Returns:
        For each part its |E features p|^2, exact over fresh examples, to six digits.
    """
    p = problem(d, nu=nu, activation=activation, target=target, seed=seed)
    W = stepped(p.network.W, p.parts.G, eta / p.network.gamma)
    known = part_products(p.population, W, activation).square().sum(dim=0)
    return {name: float(f"{float(value):.6g}") for name, value in zip(PARTS, known)}


def mnist_cell(centred: bool, rule: str, length: float, seed: int) -> dict[str, float]:
    """Measure ridge regression on features of MNIST after one step: digits as real targets.

    600 images for the gradient, 1500 for ridge regression, 600 for its penalty, all different;
    errors on the shipped test images. 400 ReLU neurons, NTK scaling, rows normalised.

    Args:
        centred: Subtract the mean from the digits of the gradient's sample (the test error of
            ridge regression, which has an intercept, does not depend on it otherwise).
        rule: One of ``RULES``.
        length: Root mean square length by which the full gradient would move a row of W.
        seed: Seed.

    Returns:
        ``risk`` (test error over the variance of the test digits), ``validation`` (the same on that
        sample), ``u1_q`` and ``u1_residue`` of the gradient. Rounded to six decimals.
    """
    images = load("mnist")
    X, digits = images.matrix(n=sum(_MNIST_SIZES), seed=seed)
    y = digits.double()
    first, fit, validation = (slice(a, b) for a, b in _MNIST_SLICES)
    network = TwoLayerNetwork.random(X.shape[1], 400, activation="relu", seed=seed)
    data = split_spike(X[first])
    targets = y[first] - y[first].mean() if centred else y[first]
    parts = decompose(data, network, network(data.X) - targets)
    step = checks.nonnegative("length", length) * math.sqrt(network.m) / float(parts.G.norm())
    W = stepped(network.W, compressed(parts, rule), step, normalised=True)
    fits = ridge_path(features(X[fit], W, "relu"), y[fit], list(PENALTIES))
    F = features(X[validation], W, "relu")
    best = fits[chosen(fits, F, y[validation])]
    x_test, test_digits = images.matrix("test", seed=seed)
    errors = {
        "risk": (best(features(x_test, W, "relu")), test_digits.double()),
        "validation": (best(F), y[validation]),
    }
    values = {name: (f - t).square().mean() / t.var() for name, (f, t) in errors.items()}
    u = torch.linalg.svd(parts.G, full_matrices=False).U[:, 0]
    values |= {"u1_q": alignment(u, data.q), "u1_residue": alignment(u, parts.S1.u)}
    return {name: round(float(value), 6) for name, value in values.items()}


_MNIST_SIZES = (600, 1500, 600)
_MNIST_SLICES = ((0, 600), (600, 2100), (2100, 2700))

_NAMES = ("nu", "alpha", "activation", "scaling", "target", "noise", "ratio", "normalised")
_RESIDUE_SERIES = (
    (0.0, 0.0, "relu", "mean-field", "omega", 0.2, 4.0, False),
    (0.0, 0.0, "relu", "mean-field", "omega", 0.2, 0.75, False),
    (0.0, 0.0, "softplus", "mean-field", "omega", 0.2, 4.0, False),
    (0.0, 0.0, "tanh", "mean-field", "omega-odd", 0.2, 4.0, False),
    (0.0, 0.0, "relu", "ntk", "omega", 0.2, 4.0, False),
    (0.0, 0.0, "relu", "ntk", "omega", 0.2, 0.75, False),
    (0.0, 0.5, "relu", "mean-field", "omega", 0.2, 4.0, False),
    (0.0, 0.0, "relu", "mean-field", "omega", 1.0, 4.0, False),
    (0.0, 0.0, "relu", "mean-field", "omega", 0.2, 4.0, True),
    (0.0, 0.0, "relu", "mean-field", "omega-even", 0.2, 4.0, False),
)
_SPIKE_SERIES = (
    (0.25, 0.0, "relu", "mean-field", "q", 0.2, 4.0, False),
    (0.25, 0.0, "relu", "mean-field", "q", 0.2, 0.75, False),
    (0.25, 0.0, "softplus", "mean-field", "q", 0.2, 4.0, False),
    (0.25, 0.0, "tanh", "mean-field", "q", 0.2, 4.0, False),
    (0.125, 0.0, "relu", "mean-field", "q-even", 0.2, 4.0, False),
    (0.25, 0.0, "relu", "mean-field", "q-even", 0.2, 4.0, False),
    (0.375, 0.0, "relu", "mean-field", "omega+1", 0.2, 4.0, False),
    (0.375, 0.0, "relu", "mean-field", "omega+1", 0.2, 4.0, True),
    (0.25, 0.0, "relu", "mean-field", "both", 0.2, 4.0, False),
    (0.25, 0.5, "relu", "mean-field", "both", 0.2, 4.0, False),
)


def _step_cells(series: tuple[tuple, ...]) -> tuple[Cell, ...]:
    return tuple(
        {"d": SIZE, **dict(zip(_NAMES, row)), "eta": eta, "seed": seed}
        for seed, row, eta in product(SEEDS, series, ETAS)
    )


def residue_cells() -> tuple[Cell, ...]:
    """List the cells of the grid in which the residue spike leads.

    Example:
        >>> {cell["nu"] for cell in residue_cells()}
        {0.0}
    """
    return _step_cells(_RESIDUE_SERIES)


def spike_cells() -> tuple[Cell, ...]:
    """List the cells of the grid with a data spike.

    Example:
        >>> min(cell["nu"] for cell in spike_cells())
        0.125
    """
    return _step_cells(_SPIKE_SERIES)


#: Sizes, seeds and cases (nu, target, eta, activation) of the grid behind the exponents.
DEGREE_SIZES, DEGREE_SEEDS = (160, 240, 360, 540), tuple(range(32))
_DEGREE_SERIES = (
    (0.0, "omega", 0.0, "relu"),
    (0.0, "omega", 1.0, "relu"),
    (0.0, "omega-even", 1.0, "relu"),
    (0.125, "q", 0.0, "relu"),
    (0.25, "q", 0.0, "relu"),
    (0.375, "q", 0.0, "relu"),
    (0.1, "q-even", 1.0, "relu"),
    (0.125, "q-even", 1.0, "relu"),
)


def degree_cells() -> tuple[Cell, ...]:
    """List the cells of the grid behind the exponents.

    Example:
        >>> len(degree_cells())
        1024
    """
    names = ("nu", "target", "eta", "activation")
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in product(DEGREE_SEEDS, DEGREE_SIZES, _DEGREE_SERIES)
    )


_COMPRESSION_NAMES = ("nu", "alpha", "activation", "scaling", "target", "ratio")
_COMPRESSION_SERIES = (
    (0.0, 0.0, "relu", "mean-field", "omega", 4.0),
    (0.0, 0.0, "relu", "mean-field", "omega", 0.75),
    (0.0, 0.0, "relu", "ntk", "omega", 4.0),
    (0.0, 0.0, "tanh", "mean-field", "omega-odd", 4.0),
    (0.05, 0.5, "relu", "mean-field", "omega", 4.0),
    (0.125, 8 / 9, "relu", "ntk", "omega", 0.75),
    (0.125, 0.0, "relu", "mean-field", "q-even", 4.0),
    (0.25, 0.0, "relu", "mean-field", "both", 4.0),
    (0.25, 0.0, "softplus", "mean-field", "both", 4.0),
)
_SINGLE_RULES = tuple(rule for rule in RULES if rule not in ("rank-10", "rank-30"))
_LONGER_RULES = ("full", "rank-1", "rank-2", "orthogonal")


def compression_cells() -> tuple[Cell, ...]:
    """List the cells of the grid of single compressed steps.

    Example:
        >>> {cell["steps"] for cell in compression_cells()}
        {1}
    """
    return _compression_cells(_COMPRESSION_SERIES, _SINGLE_RULES, 1)


def longer_cells() -> tuple[Cell, ...]:
    """List the cells of the grid of five compressed steps.

    Example:
        >>> {cell["steps"] for cell in longer_cells()}
        {5}
    """
    return _compression_cells(_COMPRESSION_SERIES[:1] + _COMPRESSION_SERIES[7:], _LONGER_RULES, 5)


def _compression_cells(series, rules, steps) -> tuple[Cell, ...]:
    return tuple(
        {"d": SIZE, **dict(zip(_COMPRESSION_NAMES, row)), "rule": rule, "steps": steps, "seed": s}
        for s, row, rule in product(SEEDS, series, rules)
    )


def mnist_cells() -> tuple[Cell, ...]:
    """List the cells of the grid on MNIST.

    Example:
        >>> {cell["rule"] for cell in mnist_cells()} <= set(RULES)
        True
    """
    moved = product((False, True), MNIST_RULES, MNIST_LENGTHS, SEEDS)
    cells = [*product((False, True), ["none"], [0.0], SEEDS), *moved]
    return tuple(dict(zip(("centred", "rule", "length", "seed"), cell)) for cell in cells)
