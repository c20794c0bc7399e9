"""Predicting the gradient's outliers: values and angles by five routes, and their phases."""

import math
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments import spike_law
from lowgrad_utils.experiments.initialisation import (
    Scenario,
    paper_sizes,
    residue_by_name,
    scenario,
)
from lowgrad_utils.experiments.spike_winner import winner
from lowgrad_utils.gradient_law import (
    GradientLaw,
    GradientOutlier,
    derivative_kernel,
    gradient_law,
    preactivation_moments,
)
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import ACTIVATIONS, TwoLayerNetwork
from lowgrad_utils.random_matrices import Spike, spiked_singular_value
from lowgrad_utils.secular import SecularEquation, free_spike
from lowgrad_utils.spectra import SingularTriplets, leading_singular_triplets
from lowgrad_utils.spiked_data import sample_spiked_data, sample_targets
from lowgrad_utils.third_spike import hidden_spike
from lowgrad_utils.training import gradient_descent

Cell = dict[str, float | str]
#: How many leading singular values are predicted.
COUNT = 3
#: From this multiple of the edge on an outlier counts as far above the threshold.
FAR = 1.5
#: The routes by their names in tables.
ROUTES = ("law", "pieces", "free", "free_E", "iid", "permuted")
# The step of training, in units of 1/gamma.
_STEP = 0.3


class Prediction(NamedTuple):
    """Leading singular values of the gradient with the angles of their left vectors.

    Attributes:
        values: ``COUNT`` of them, falling; the edge where no outlier is predicted.
        along_q: |u_k^T q|, 0 where no outlier is predicted.
        along_residue: |u_k^T X_B^T r| / |X_B^T r|, the same.
        outliers: How many of them are outliers.
        edge: The bulk's edge.
    """

    values: Tensor
    along_q: Tensor
    along_residue: Tensor
    outliers: int
    edge: float


def margin(n: int) -> float:
    """Return n^(-2/3), the share of its edge by which an outlier must exceed it.

    Args:
        n: The number of examples, the least of the three sizes.

    Example:
        >>> round(margin(1000), 6)
        0.01
    """
    return checks.positive_integer("n", n) ** (-2 / 3)


def measured(case: Scenario) -> Prediction:
    """Measure what is predicted: the gradient's leading singular triplets.

    Args:
        case: The scenario.

    Returns:
        As for a prediction; every value counts as an outlier and the edge is the last one.
    """
    top = leading_singular_triplets(case.parts.G, COUNT)
    return _along(case, top.U, top.s, float(top.s[-1]))


def low_rank(case: Scenario, *, third: bool = True) -> SingularTriplets:
    """Compute the singular triplets of S1 + S12 + S2, and of H if ``third``, from the factors.

    Args:
        case: The scenario.
        third: Whether H counts as a piece. It is 0 where sigma' is even.

    Returns:
        Two or three triplets, those of singular value 0 left out.

    Example:
        >>> case = scenario(40, nu=0.25, activation="tanh")
        >>> whole = case.parts.G - case.parts.E
        >>> bool(torch.isclose(low_rank(case).s[0], torch.linalg.svdvals(whole)[0]))
        True
    """
    terms = [case.parts.S1, case.parts.S12, case.parts.S2]
    if third:
        terms.append(hidden_spike(case.data, case.network, case.residue))
    left, R = torch.linalg.qr(torch.stack([term.u for term in terms], dim=1))
    right, P = torch.linalg.qr(torch.stack([term.v for term in terms], dim=1))
    U, s, Vh = torch.linalg.svd(R @ P.T)
    kept = s > 1e-12 * s[0]
    return SingularTriplets(left @ U[:, kept], s[kept], right @ Vh[kept].T)


def secular_equation(case: Scenario) -> SecularEquation:
    """Write the exact equation of G = E + (S1 + S12 + S2) in the resolvent of E.

    Args:
        case: The scenario.

    Example:
        >>> case = scenario(40, nu=0.25, activation="tanh")
        >>> root = secular_equation(case).roots()[0]
        >>> bool(torch.isclose(root, torch.linalg.svdvals(case.parts.G)[0]))
        True
    """
    spikes = low_rank(case, third=False)
    root = spikes.s.sqrt()  # Balanced, or small roots lose digits to large ones.
    return SecularEquation(case.parts.E, spikes.U * root, spikes.V * root)


def from_pieces(case: Scenario) -> Prediction:
    """Predict from the pieces alone, as if there were no bulk: the triplets of S1 + S12 + S2 + H.

    Args:
        case: The scenario.
    """
    spikes = low_rank(case)
    return _along(case, spikes.U, spikes.s, 0.0)


def from_free_bulk(case: Scenario, *, third: bool = True) -> Prediction:
    """Predict by the D-transform of the measured bulk, as if spikes were independent of it.

    Args:
        case: The scenario.
        third: Whether H is taken out of the bulk (E - H) and counted as a spike, or left in (E).
    """
    spikes = low_rank(case, third=third)
    bulk = torch.linalg.svdvals(_rest(case, spikes))

    def shown(theta: float) -> Spike:
        return free_spike(theta, bulk, tuple(case.parts.G.shape))

    return _spiked(case, spikes, float(bulk[0]), shown)


def from_independent_entries(case: Scenario) -> Prediction:
    """Predict with a wrong bulk: independent entries with the mean square of E - H (a control).

    Args:
        case: The scenario.
    """
    spikes = low_rank(case)
    d, m = case.parts.G.shape
    sigma = float(torch.linalg.norm(_rest(case, spikes))) / math.sqrt(d)

    def shown(theta: float) -> Spike:
        spike = spiked_singular_value(theta / sigma, d / m)
        return spike._replace(value=sigma * spike.value)

    return _spiked(case, spikes, sigma * (1 + math.sqrt(d / m)), shown)


def _rest(case: Scenario, spikes: SingularTriplets) -> Tensor:
    return case.parts.G - (spikes.U * spikes.s) @ spikes.V.T


def _spiked(
    case: Scenario, spikes: SingularTriplets, edge: float, shown: Callable[[float], Spike]
) -> Prediction:
    """Predict each spike by itself: its value, and its direction shortened by its left cosine."""
    seen = [shown(theta) for theta in spikes.s.tolist()]
    seen = [spike for spike in seen if spike.left > 0]
    values = spikes.s.new_tensor([spike.value for spike in seen])
    shrink = spikes.s.new_tensor([math.sqrt(spike.left) for spike in seen])
    return _along(case, spikes.U[:, : len(seen)] * shrink, values, edge)


def _along(case: Scenario, U: Tensor, values: Tensor, edge: float) -> Prediction:
    """Gather a prediction from left vectors, shortened where they are expected to be turned."""
    residue = case.parts.S1.u / case.parts.S1.u.norm()
    return _padded(values, (U.T @ case.data.q).abs(), (U.T @ residue).abs(), edge)


def _padded(values: Tensor, along_q: Tensor, along_residue: Tensor, edge: float) -> Prediction:
    """Fill up with the edge, and with no alignment."""
    found = min(len(values), COUNT)
    padded = [values.new_full((COUNT,), edge), *(values.new_zeros(COUNT) for _ in range(2))]
    for target, row in zip(padded, (values, along_q, along_residue)):
        target[:found] = row[:found]
    return Prediction(*padded, found, edge)


# --- the law of the gradient ----------------------------------------------------------------------


def law_of(
    case: Scenario,
    *,
    weights: str = "uniform",
    residue: Tensor | None = None,
    kernel: Tensor | None = None,
) -> GradientLaw:
    """Form the law of a scenario's gradient: from X, r and the distribution of W's rows.

    Args:
        case: The scenario.
        weights: How its W was drawn, ``"uniform"`` or ``"shifted"`` as in ``scenario``.
        residue: A residue to use in the place of the scenario's own.
        kernel: ``kernel_of`` the same, if it is at hand.

    Raises:
        ValueError: If ``weights`` is neither, or the residue does not fit.
    """
    r = case.residue if residue is None else residue
    kernel = kernel_of(case, weights=weights) if kernel is None else kernel
    return gradient_law(case.data.X, case.network, r, kernel=kernel)


def kernel_of(case: Scenario, *, weights: str = "uniform") -> Tensor:
    """Compute Phi for a scenario's data and the distribution of its W.

    Args:
        case: The scenario.
        weights: As for ``law_of``.
    """
    K, mean = preactivation_moments(case.data.X, _shift(case, weights))
    # Uniform rows lie on a sphere; shifted ones are taken as Gaussian.
    dimension = case.data.d if mean is None else None
    return derivative_kernel(K, case.network.activation, mean=mean, dimension=dimension)


def _shift(case: Scenario, weights: str) -> Tensor | None:
    checks.choice("weights", weights, ("uniform", "shifted"))
    return case.data.n**-0.25 * case.data.q if weights == "shifted" else None


def from_law(case: Scenario, law: GradientLaw) -> Prediction:
    """Predict values and left angles by the law; outliers count from edge (1 + n^(-2/3)) on.

    Args:
        case: The scenario, of which only q and X_B^T r are used.
        law: Its law.
    """
    count = len(_beyond(case, law))
    values = case.residue.new_tensor([spike.value for spike in law.outliers[:count]])
    along_q = law.squared_cosines(case.data.q).sqrt()
    along_residue = law.squared_cosines(case.parts.S1.u).sqrt()
    return _padded(values, along_q[:count], along_residue[:count], law.edge)


def _beyond(case: Scenario, law: GradientLaw) -> list[GradientOutlier]:
    threshold = law.edge * (1 + margin(case.data.n))
    return [spike for spike in law.outliers if spike.value > threshold]


def right_cosines(case: Scenario) -> Tensor:
    """Measure |v_k^T b| / |b| of the gradient's right vectors for b = a and b = a o (Wq).

    Args:
        case: The scenario.

    Returns:
        COUNT x 2.
    """
    V = leading_singular_triplets(case.parts.G, COUNT).V
    b = torch.stack([case.network.a, case.network.a * (case.network.W @ case.data.q)], dim=1)
    return (V.T @ (b / b.norm(dim=0))).abs()


def right_cosines_from_law(case: Scenario, law: GradientLaw, *, weights: str = "uniform") -> Tensor:
    """Predict the same: cos^2 = psi'(l) corr^2(t^T g, f), f = a or a w^T q, over random w.

    E g a f = (gamma/n) X^T D_r E[sigma'(Xw) f], with Stein's lemma for f = w^T q.

    Args:
        case: The scenario.
        law: Its law.
        weights: How W was drawn.

    Returns:
        COUNT x 2, 0 where no outlier is predicted.
    """
    data, network = case.data, case.network
    right, squares = right_moments(data.X, data.q, network.activation, _shift(case, weights))
    factor = network.gamma / data.n * network.m**0.5
    predicted = case.residue.new_zeros(COUNT, 2)
    for k, spike in enumerate(_beyond(case, law)[:COUNT]):
        on_examples = case.residue * (data.X @ spike.direction)
        slope = spike.overlap * spike.value**2 / spike.population  # psi'(l)
        for column, (moments, square) in enumerate(zip(right, squares)):
            shared = (factor * on_examples @ moments) ** 2 / (spike.population * square)
            predicted[k, column] = (slope * shared).clamp(max=1).sqrt()
    return predicted


def right_moments(
    X: Tensor, q: Tensor, activation: str, shift: Tensor | None = None
) -> tuple[list[Tensor], list[float]]:
    """Compute E sigma'(w^T x_i) f(w) and E f(w)^2 over random rows w, for f = 1 and f = w^T q.

    Args:
        X: Data, n x d.
        q: A unit vector.
        activation: A key of ``ACTIVATIONS``.
        shift: The shift of the rows, None for none; to first order in their normalisation.

    Returns:
        Two vectors of length n, and two numbers.
    """
    K, mean = preactivation_moments(torch.cat([X, q[None]]), shift)
    mean = K.new_zeros(len(K)) if mean is None else mean
    mu, c = gaussian_moments(activation, mean[:-1], K.diagonal()[:-1].sqrt())
    squares = [1.0, float(mean[-1] ** 2 + K[-1, -1])]
    return [mu, mean[-1] * mu + c * K[-1, :-1]], squares


def gaussian_moments(activation: str, mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Compute E sigma'(h) and E[sigma'(h)(h - mean)] / s^2 for h ~ N(mean, s^2), entrywise.

    The second is E sigma''(h) by Stein's lemma, for ReLU too.

    Args:
        activation: A key of ``ACTIVATIONS``.
        mean: Means.
        s: Standard deviations, positive.

    Example:
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> [round(float(x), 4) for x in gaussian_moments("softplus", zero, one)]
        [0.5, 0.2066]
    """
    derivative = ACTIVATIONS[checks.choice("activation", activation, ACTIVATIONS)].derivative
    nodes = torch.linspace(-9, 9, 1800, dtype=torch.float64)  # even, so that none lies at a jump
    weight = torch.exp(-nodes.square() / 2)
    weight = weight / weight.sum()
    slopes = derivative(mean[:, None] + s[:, None] * nodes)
    return slopes @ weight, slopes @ (weight * nodes) / s


# --- the grid of errors ---------------------------------------------------------------------------


def prediction_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    residue: str,
    weights: str,
    scaling: str,
    seed: int,
) -> dict[str, float]:
    """Measure one gradient's outliers and predict them by every route.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        weights: ``"uniform"`` or ``"shifted"``.
        scaling: A key of ``SCALINGS``.
        seed: Seed.

    Returns:
        For k = 1 ... ``COUNT`` the singular value ``s_k`` and its predictions ``law_k``,
        ``pieces_k``, ``free_k`` (bulk E - H), ``free_E_k`` (bulk E), ``iid_k`` and ``permuted_k``
        (controls); left cosines ``q_k``, ``r_k``, predicted ``law_q_k``, ``law_r_k``,
        ``free_q_k``, ``free_r_k``; right cosines ``a_k``, ``w_k`` with a and a o (Wq), predicted
        ``law_a_k``, ``law_w_k``; the law's ``edge``, its ``spread`` (Tracy and Widom's scale of
        the largest singular value, a share of the edge), ``outliers``, and ``next``, the first
        singular value that is none; ``exact`` and ``uncoupled``, the largest relative errors of
        the exact equation and of the same without cross terms; ``missing``, roots that it lacks.
    """
    case = scenario(
        d,
        nu=nu,
        alpha=alpha,
        activation=activation,
        residue=residue,
        weights=weights,
        scaling=scaling,
        seed=seed,
    )
    kernel = kernel_of(case, weights=weights)
    law = law_of(case, kernel=kernel)
    stream = checks.random_stream(seed, "permutation")
    shuffled = case.residue[torch.randperm(case.data.n, generator=stream)]
    routes = {
        "pieces": from_pieces(case),
        "free": (free := from_free_bulk(case)),
        "free_E": from_free_bulk(case, third=False),
        "iid": from_independent_entries(case),
        "permuted": from_law(case, law_of(case, residue=shuffled, kernel=kernel)),
    }
    values = compare(case, law, weights=weights)
    for name, route in routes.items():
        values |= _numbered(name, route.values)
    values |= _numbered("free_q", free.along_q) | _numbered("free_r", free.along_residue)
    whole = torch.linalg.svd(case.parts.G, full_matrices=False)
    values |= {"next": float(whole.S[int(values["outliers"])])}
    return {
        name: _digits(value) for name, value in (values | _secular_errors(case, *whole)).items()
    }


def compare(case: Scenario, law: GradientLaw, *, weights: str = "uniform") -> dict[str, float]:
    """Set the law's predictions beside the gradient.

    Args:
        case: The scenario.
        law: Its law.
        weights: How its W was drawn.

    Returns:
        ``s_k``, ``q_k``, ``r_k``, ``a_k``, ``w_k``, the same with ``law_`` (``law_k`` for s),
        ``edge``, ``spread`` and ``outliers`` as in ``prediction_cell``.
    """
    seen, predicted = measured(case), from_law(case, law)
    values = _numbered("s", seen.values) | _numbered("law", predicted.values)
    for prefix, route in {"": seen, "law_": predicted}.items():
        values |= _numbered(f"{prefix}q", route.along_q)
        values |= _numbered(f"{prefix}r", route.along_residue)
    right = {"": right_cosines(case), "law_": right_cosines_from_law(case, law, weights=weights)}
    for prefix, cosines in right.items():
        values |= _numbered(f"{prefix}a", cosines[:, 0]) | _numbered(f"{prefix}w", cosines[:, 1])
    count = len(_beyond(case, law))
    # A population of low rank, as after long training, is all outliers: there is no edge.
    spread = law.edge_scale / law.edge if law.edge else 0.0
    return values | {"edge": law.edge, "spread": spread, "outliers": count}


def trained_scenario(
    d: int,
    *,
    activation: str,
    nu: float = 0.375,
    steps: int = 30,
    rows: int = 2000,
    seed: int = 0,
) -> tuple[Scenario, Tensor]:
    """Train a scenario's W (mean field, squared loss), and fresh rows by the same residues.

    Given the residues, a row moves by itself: fresh rows that took the same steps are a sample
    of what the trained rows were drawn from, and their mean of sigma' sigma' is Phi after training.

    Args:
        d: Number of features.
        activation: A key of ``ACTIVATIONS``.
        nu: Spike exponent.
        steps: Steps of gradient descent with normalised rows, of size 0.3/gamma.
        rows: Number of fresh rows.
        seed: Seed.

    Returns:
        The trained scenario, and Phi over the fresh rows, n x n.

    Example:
        >>> case, kernel = trained_scenario(40, activation="tanh", steps=2, rows=100)
        >>> case.network.m, kernel.shape
        (50, torch.Size([30, 30]))
    """
    checks.positive_integer("steps", steps)
    kind = {"activation": activation, "scaling": "mean-field"}
    start = scenario(d, nu=nu, **kind, seed=seed)
    data, X = start.data, start.data.X
    y = sample_targets(X, seed=seed).y
    fresh = TwoLayerNetwork.random(d, rows, **kind, seed=seed + 10_000)
    states = gradient_descent(X, y, start.network, eta=_STEP, normalisation="rows")
    for state in islice(states, steps):
        slopes = fresh.sigma.derivative(X @ fresh.W.T)
        columns = X.T @ (state.residue[:, None] * slopes)
        fresh = spike_law.follow(fresh, columns, _STEP / data.n)
    state, slopes = next(states), fresh.sigma.derivative(X @ fresh.W.T)
    parts = decompose(data, state.network, state.residue)
    return Scenario(data, state.network, state.residue, parts), slopes @ slopes.T / rows


def _numbered(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}_{k}": float(value) for k, value in enumerate(values, start=1)}


def _digits(value: float) -> float:
    """Keep five significant digits, so that stored grids stay small."""
    return float(f"{value:.5g}")


def _secular_errors(case: Scenario, U: Tensor, s: Tensor, Vh: Tensor) -> dict[str, float]:
    """Compare the exact equation with the gradient's singular values above the bulk E."""
    equation = secular_equation(case)
    found = equation.triplets()
    count = int((s > equation.edge * (1 + 1e-9)).sum())
    shared = min(count, len(found.s))
    turned = torch.zeros(1)
    if shared:
        # |u - u_k| with the better sign; 1 - |cosine| would lose half the digits.
        pairs = [*zip(found.U.T[:shared], U.T), *zip(found.V.T[:shared], Vh)]
        turned = torch.stack([(x - (x @ y).sign() * y).norm() for x, y in pairs])
    return {
        "exact": _largest_error(found.s, s, shared),
        "turned": float(turned.max()),
        "missing": abs(count - len(found.s)),
        "uncoupled": _largest_error(equation.roots(cross=False), s, shared),
    }


def _largest_error(roots: Tensor, s: Tensor, count: int) -> float:
    """Return the largest relative error of the first ``count`` roots, 1 for one that is missing."""
    errors = (roots[:count] / s[: len(roots[:count])] - 1).abs().tolist()
    return max([*errors, *[1.0] * (count - len(errors)), 0.0])


NUS, ALPHAS = (0.0, 0.125, 0.25, 0.375, 0.45), (0.0, 0.5)
ACTIVATION_NAMES = ("relu", "softplus", "silu", "tanh")
#: Residues with their scalings: only a network's own residue feels the scaling.
RESIDUE_KINDS = (
    ("independent", "ntk"),
    ("offset", "ntk"),
    ("network", "ntk"),
    ("network", "mean-field"),
)
SIZE, LARGER, SEEDS = 300, (500, 800), (1, 2, 3, 4)
#: Seeds of the trained networks: 1 to 4 were the pilot's.
TRAINED_SEEDS = (5, 6, 7, 8)


def prediction_cells() -> Iterator[Cell]:
    """Yield the cells: 220 settings at d = 300, eight of them at two more sizes, four seeds."""
    names = ("nu", "alpha", "activation", "residue", "scaling", "weights")
    uniform = product(NUS, ALPHAS, ACTIVATION_NAMES, RESIDUE_KINDS, ["uniform"])
    shifted = product(NUS, ALPHAS, ("softplus", "tanh"), RESIDUE_KINDS[:3], ["shifted"])
    larger = product((0.125, 0.375), [0.0], ("softplus", "tanh"), RESIDUE_KINDS[:2], ["uniform"])
    by_size = {SIZE: [*uniform, *shifted]}
    by_size |= dict(zip(LARGER, [list(larger)] * len(LARGER)))
    for seed in SEEDS:
        for d, rows in by_size.items():
            for nu, alpha, activation, kind, weights in rows:
                row = (nu, alpha, activation, *kind, weights)
                yield {"d": d, **dict(zip(names, row)), "seed": seed}


def size_cell(d: int, nu: float, activation: str, residue: str, seed: int) -> dict[str, float]:
    """Set the law beside one gradient (alpha = 0, uniform W), for its error over sizes.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        seed: Seed.

    Returns:
        What ``compare`` returns, to five digits.
    """
    case = scenario(d, nu=nu, activation=activation, residue=residue, seed=seed)
    return {name: _digits(value) for name, value in compare(case, law_of(case)).items()}


def size_cells() -> Iterator[Cell]:
    """Yield the cells: eight settings at three sizes, forty seeds."""
    names = ("nu", "activation", "residue")
    settings = (0.125, 0.375), ("softplus", "tanh"), ("independent", "offset")
    for seed, d in product(range(1, 41), (150, 300, 600)):
        for row in product(*settings):
            yield {"d": d, **dict(zip(names, row)), "seed": seed}


def long_form(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn the grid into one row for each of the first ``COUNT`` singular values.

    Args:
        frame: Rows of ``prediction_cell``, or of ``compare``, with their parameters.

    Returns:
        Parameters, ``k``, the measured ``s`` and every route's value; ``regime`` by the law:
        ``"above"`` from ``FAR`` edges on, ``"near"`` between that and edge (1 + n^(-2/3)),
        ``"below"`` for the first value that is no outlier (later ones are left out); ``unit`` =
        1/sqrt(2m), the standard deviation of a singular value whose column entries are Gaussian;
        ``angle`` and ``right_angle``, the larger error of the law's two cosines on each side.
    """
    shared = ["d", "nu", "alpha", "activation", "residue", "scaling", "weights", "seed"]
    shared = [name for name in [*shared, "edge", "spread", "outliers"] if name in frame]
    names = [name[:-2] for name in frame if name.endswith("_1")]
    parts = [
        frame[shared].assign(k=k, **{name: frame[f"{name}_{k}"] for name in names})
        for k in range(1, COUNT + 1)
    ]
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.k <= rows.outliers + 1]
    regime = np.where(rows.law > FAR * rows.edge, "above", "near")
    regime = np.where(rows.k > rows.outliers, "below", regime)
    unit = (2 * (1.25 * rows.d).round()) ** -0.5
    angle = np.maximum((rows.q - rows.law_q).abs(), (rows.r - rows.law_r).abs())
    right = np.maximum((rows.a - rows.law_a).abs(), (rows.w - rows.law_w).abs())
    return rows.assign(regime=regime, unit=unit, angle=angle, right_angle=right)


def errors(rows: pd.DataFrame, route: str = "law") -> pd.Series:
    """Return |s / predicted - 1| in units of 1/sqrt(2m) for the outliers of a long table.

    Args:
        rows: What ``long_form`` returns; values that are no outliers are left out.
        route: ``"law"``, ``"pieces"``, ``"free"``, ``"free_E"``, ``"iid"`` or ``"permuted"``.

    Raises:
        ValueError: If the table does not hold the route.
    """
    known = [name for name in ROUTES if name in rows]
    rows = rows[rows.regime != "below"]
    predicted = rows[checks.choice("route", route, known)]
    # A piece can be missing altogether: its prediction is 0, off by more than any number.
    return (rows.s / predicted.clip(lower=1e-9 * rows.s) - 1).abs() / rows.unit


# --- phases ---------------------------------------------------------------------------------------


def spike_space(case: Scenario) -> Tensor:
    """Return an orthonormal basis of X_B^T r, q and X_B^T (r o z), d x 3, in this order.

    Args:
        case: The scenario.
    """
    data, r = case.data, case.residue
    columns = [data.bulk_times(r), data.q, data.bulk_times(r * data.z)]
    return torch.linalg.qr(torch.stack([v / v.norm() for v in columns], dim=1)).Q


def visible_spikes(squares: Tensor) -> str:
    """Name the spikes that are seen: ``r`` X_B^T r, ``q``, ``p`` X_B^T (r o z).

    A left singular vector shows a spike if half of its squared length lies in the space of the
    three; its name is the direction with the largest share.

    Args:
        squares: Squared cosines with the basis of ``spike_space``, one row a vector.

    Example:
        >>> visible_spikes(torch.tensor([[0.9, 0.05, 0.0], [0.1, 0.3, 0.3], [0.0, 0.1, 0.2]]))
        'rq'
    """
    seen = squares[squares.sum(dim=1) >= 0.5]
    return "".join("rqp"[int(k)] for k in seen.argmax(dim=1))


def phase_cell(
    d: int, nu: float, alpha: float, activation: str, residue: str, seed: int
) -> dict[str, float]:
    """Count and name the spikes that the gradient shows, and predict both by the law.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        seed: Seed.

    Returns:
        ``code``, the ``visible_spikes`` of the first 8 left singular vectors as digits (r 1, q 2,
        p 3; 0 for none); ``q`` and ``r``, the first one's cosines; the same predicted by the law,
        ``law_code``, ``law_q``, ``law_r``, and by the law of a permuted residue, ``permuted_code``
        and so on; ``closest``, the least distance from 1/2 of a measured or predicted share.
    """
    case = scenario(d, nu=nu, alpha=alpha, activation=activation, residue=residue, seed=seed)
    basis, kernel = spike_space(case), kernel_of(case)
    stream = checks.random_stream(seed, "permutation")
    shuffled = case.residue[torch.randperm(case.data.n, generator=stream)]
    laws = {
        "law_": law_of(case, kernel=kernel),
        "permuted_": law_of(case, residue=shuffled, kernel=kernel),
    }
    U = leading_singular_triplets(case.parts.G, _SEEN).U
    wanted = [*basis.T, case.parts.S1.u / case.parts.S1.u.norm(), case.data.q]
    squares = {"": torch.stack([(U.T @ v).square() for v in wanted], dim=1)}
    for name, law in laws.items():
        rows = torch.stack([law.squared_cosines(v)[:_SEEN] for v in wanted], dim=1)
        # A law without outliers shows nothing.
        squares[name] = rows if len(rows) else torch.zeros(1, 5).double()
    shares = torch.cat([squares[""], squares["law_"]])[:, :3].sum(1)
    values = {"closest": float((shares - 0.5).abs().min())}
    for name, square in squares.items():
        values[f"{name}code"] = _code(visible_spikes(square[:, :3]))
        values[f"{name}r"], values[f"{name}q"] = square[0, 3:].sqrt().tolist()
    return {name: round(value, 4) for name, value in values.items()}


#: How many left singular vectors are looked at, and the letters of their names as digits.
_SEEN, _CODES = 8, {"r": "1", "q": "2", "p": "3"}


def _code(names: str) -> int:
    return int("".join(_CODES[name] for name in names) or "0")


def letters(code: int) -> str:
    """Turn a stored code back into the letters of ``visible_spikes``.

    Args:
        code: Such as 123.

    Example:
        >>> letters(123), letters(0)
        ('rqp', '')
    """
    names = {digit: name for name, digit in _CODES.items()}
    return "".join(names[digit] for digit in str(int(code)) if digit != "0")


PHASE_NUS = tuple(round(0.075 * k, 3) for k in range(9))
PHASE_ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8)
PHASE_RESIDUES = ("network", "offset", "independent")
PHASE_SIZE, PHASE_SEEDS = 320, tuple(range(1, 9))


def phase_cells() -> Iterator[Cell]:
    """Yield the cells of the phase diagram: 540 settings, eight seeds."""
    names = ("nu", "alpha", "activation", "residue")
    for seed in PHASE_SEEDS:
        for row in product(PHASE_NUS, PHASE_ALPHAS, ACTIVATION_NAMES, PHASE_RESIDUES):
            yield {"d": PHASE_SIZE, **dict(zip(names, row)), "seed": seed}


def asymptotic_line(alpha: float, residue: str, *, even: bool) -> float:
    """Return the nu from which on q leads for n to infinity, by exponents alone.

    (1 - alpha)/4 where z^T r is of order n^(1/2 + nu) (the network's own residue), or where S2
    meets its bound (a residue with a mean and c != 0); (1 - alpha)/2 otherwise.

    Args:
        alpha: Decay exponent of the bulk, below 1.
        residue: One of ``PHASE_RESIDUES``.
        even: Whether sigma' is even, so that c = 0.

    Example:
        >>> asymptotic_line(0.0, "offset", even=False), asymptotic_line(0.0, "offset", even=True)
        (0.25, 0.5)
    """
    checks.choice("residue", residue, PHASE_RESIDUES)
    early = residue == "network" or (residue == "offset" and not even)
    return (1 - checks.nonnegative("alpha", alpha)) / (4 if early else 2)


def judge_phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Add words and counts, measured and predicted, to the grid of phases.

    Args:
        frame: Rows of ``phase_cell``.

    Returns:
        The frame with ``leader``, ``law_leader`` and ``permuted_leader``, words of
        ``spike_winner.WINNERS``; ``exponent_leader``, by ``asymptotic_line``; ``count``,
        ``law_count`` and ``permuted_count`` of visible spikes.
    """
    judged = frame.copy()
    for name in ("", "law_", "permuted_"):
        judged[f"{name}leader"] = list(map(winner, frame[f"{name}r"], frame[f"{name}q"]))
        judged[f"{name}count"] = [len(letters(code)) for code in frame[f"{name}code"]]
    lines = [
        asymptotic_line(alpha, residue, even=activation == "tanh")
        for alpha, residue, activation in zip(frame.alpha, frame.residue, frame.activation)
    ]
    return judged.assign(exponent_leader=np.where(frame.nu > lines, "spike", "residue"))


def crossing_cell(
    d: int, alpha: float, activation: str, residue: str, seed: int
) -> dict[str, float]:
    """Find the nu from which on q leads by the law at a given size, by bisection.

    Data of one seed share X_B, z and q for every nu, so that the predicted cosines change
    continuously.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        seed: Seed.

    Returns:
        ``crossing``, to 0.001: where the first left vector's predicted cosines with q and with
        X_B^T r are equal; 0 or 1 if q leads always or never below 1.
    """
    n, m = paper_sizes(d)
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    low, high = 0.0, 1.0
    for _ in range(10):
        nu = (low + high) / 2
        data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
        r = residue_by_name(data, network, residue, seed=seed)
        law = gradient_law(data.X, network, r)
        leads = law.squared_cosines(data.q)[0] > law.squared_cosines(data.bulk_times(r))[0]
        low, high = (low, nu) if leads else (nu, high)
    return {"crossing": round((low + high) / 2, 4)}


def crossing_cells() -> Iterator[Cell]:
    """Yield the cells: three residues, four sizes, four seeds, softplus, alpha = 0."""
    for seed, d, residue in product(SEEDS, (125, 250, 500, 1000), PHASE_RESIDUES):
        yield {"d": d, "alpha": 0.0, "activation": "softplus", "residue": residue, "seed": seed}
