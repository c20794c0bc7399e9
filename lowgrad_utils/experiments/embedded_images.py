"""Figure 8 (a, b): a network on features of images, and the same under a Jacobian penalty."""

import functools
import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowgrad_utils import checks, datasets
from lowgrad_utils.datasets import FeatureData, ImageData
from lowgrad_utils.experiments.initialisation import (
    Scenario,
    measure,
    paper_sizes,
    regression_scenario,
)
from lowgrad_utils.regularisation import PenaltyGradient, split_jacobian_penalty
from lowgrad_utils.spectra import alignment, leading_singular_triplets, operator_norm
from lowgrad_utils.spiked_data import split_spike

#: The strength of the penalty in Figure 8 (b).
PAPER_STRENGTH = 1e5

# n and m of the grids' cells: 0.75 d and 1.25 d for the features, as in the paper's other figures.
_SIZES = {"cifar10-embeddings": (960, 1600), "cifar10": (600, 1000)}

_load = functools.cache(datasets.load)


def covariance_eigenvalues(X: Tensor) -> Tensor:
    """Compute the nonzero eigenvalues of X^T X / n in descending order, as many as min(n, d).

    Args:
        X: Data, n x d.

    Raises:
        ValueError: If X is not a finite matrix.

    Example:
        >>> covariance_eigenvalues(torch.diag(torch.tensor([1.0, 2.0]).double()))
        tensor([2.0000, 0.5000], dtype=torch.float64)
    """
    n, d = checks.matrix("X", X).shape
    gram = X.T @ X if d <= n else X @ X.T
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0) / n


def decay_exponent(eigenvalues: Tensor, first: int, last: int) -> float:
    """Estimate alpha: minus the least-squares slope of log eigenvalue on log rank.

    Args:
        eigenvalues: Eigenvalues in descending order, the spike's included.
        first: The first rank used; 1 is the largest eigenvalue.
        last: The last rank used.

    Raises:
        ValueError: If the ranks are not 1 <= first < last <= the number of eigenvalues, or an
            eigenvalue among them is not positive.

    Source: Low Rank Gradients gives alpha = 0.6 for its embeddings without an estimator; this one
        is ours.

    Example:
        >>> ranks = torch.arange(1, 101).double()
        >>> round(decay_exponent(7 * ranks**-0.6, 2, 50), 6)
        0.6
    """
    checks.vector("eigenvalues", eigenvalues)
    first, last = checks.positive_integer("first", first), checks.positive_integer("last", last)
    if not first < last <= len(eigenvalues):
        raise ValueError(
            f"first is {first} and last is {last}, but 1 <= first < last <= {len(eigenvalues)} "
            "is needed"
        )
    chosen = eigenvalues[first - 1 : last]
    if not bool((chosen > 0).all()):
        raise ValueError(f"an eigenvalue of rank {first} to {last} is not positive; take fewer")
    ranks = np.log(np.arange(first, last + 1))
    return -float(np.polyfit(ranks, chosen.log().numpy(), 1)[0])


def feature_scenario(
    examples: ImageData | FeatureData,
    *,
    n: int | None = None,
    m: int | None = None,
    centred: bool = False,
    centred_targets: bool = False,
    unit_rows: bool = False,
    shuffled: bool = False,
    activation: str = "relu",
    scaling: str = "ntk",
    seed: int = 0,
) -> Scenario:
    """Draw the experiment of Figure 8 (a): features as data, class numbers 0-9 as real targets.

    The spike direction q is the top right singular vector of the data as the network sees them.

    Args:
        examples: Features or images (pixels 0 to 1).
        n: Number of examples; 0.75 d if None.
        m: Number of neurons; 1.25 d if None.
        centred: Subtract from each feature its mean over the examples.
        centred_targets: Subtract the mean from the targets.
        unit_rows: Divide each example by its length, before centring.
        shuffled: Give the targets to the examples at random.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        seed: Seed; examples, shuffling and network draw from separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Figure 8 (a); sizes, targets, activation and preparation of the
        features are not in its text.

    Example:
        >>> case = feature_scenario(_load("cifar10-embeddings"), n=60, m=50, centred=True)
        >>> case.parts.G.shape
        torch.Size([1280, 50])
    """
    usual_n, usual_m = paper_sizes(examples.x_train[0].numel())
    X, classes = examples.matrix(n=usual_n if n is None else n, seed=seed)
    y = classes.double()
    if shuffled:
        y = y[torch.randperm(len(y), generator=checks.random_stream(seed, "shuffled targets"))]
    if unit_rows:
        X = X / X.norm(dim=1, keepdim=True)
    if centred:
        X = X - X.mean(dim=0)
    if centred_targets:
        y = y - y.mean()
    # Lanczos, because the full decomposition of 3072 pixels would take longer than the rest.
    q = leading_singular_triplets(X, 1).V[:, 0]
    data = split_spike(X, q if q.sum() >= 0 else -q)
    return regression_scenario(
        data,
        y,
        m=usual_m if m is None else m,
        activation=activation,
        scaling=scaling,
        seed=seed,
    )


def feature_cell(
    examples: str,
    activation: str,
    centred: bool,
    centred_targets: bool,
    unit_rows: bool,
    shuffled: bool,
    seed: int,
) -> dict[str, float]:
    """Measure one cell of the grid behind Figure 8 (a).

    Features have n, d, m = 960, 1280, 1600, pixels 600, 3072, 1000.

    Args:
        examples: ``"cifar10-embeddings"`` or ``"cifar10"``.
        activation: A key of ``ACTIVATIONS``.
        centred: As in ``feature_scenario``.
        centred_targets: As in ``feature_scenario``.
        unit_rows: As in ``feature_scenario``.
        shuffled: As in ``feature_scenario``.
        seed: Seed.

    Returns:
        What ``measure`` returns, and ``nu_raw``, log(zeta) / log(n).
    """
    n, m = _SIZES[checks.choice("examples", examples, _SIZES)]
    case = feature_scenario(
        _load(examples),
        n=n,
        m=m,
        centred=centred,
        centred_targets=centred_targets,
        unit_rows=unit_rows,
        shuffled=shuffled,
        activation=activation,
        seed=seed,
    )
    return measure(case) | {"nu_raw": case.data.nu}


def follow_penalty(
    case: Scenario, strengths: Iterable[float], penalty: PenaltyGradient | None = None
) -> list[dict[str, float]]:
    """Follow the gradient's top as the Jacobian penalty grows.

    Args:
        case: The network without penalty.
        strengths: Values of lambda, at least 0.
        penalty: ``split_jacobian_penalty`` of the case at strength 1, if it is at hand.

    Returns:
        For each lambda: ``strength``; ``s1`` and ``s2``, the leading singular values of
        G + lambda grad R; ``u1_q`` and ``u1_residue``, alignments of the top left singular
        vector with q and X_B^T r.

    Raises:
        ValueError: If a strength is negative.

    Source: Low Rank Gradients, Figure 8 (b).
    """
    penalty = penalty or split_jacobian_penalty(case.data, case.network)
    rows = []
    for strength in strengths:
        total = case.parts.G + checks.nonnegative("strength", strength) * penalty.total
        top = leading_singular_triplets(total, 2)
        rows.append(
            {
                "strength": float(strength),
                "s1": float(top.s[0]),
                "s2": float(top.s[1]),
                "u1_q": alignment(top.U[:, 0], case.data.q),
                "u1_residue": alignment(top.U[:, 0], case.parts.S1.u),
            }
        )
    return rows


def turning_strength(
    case: Scenario, penalty: PenaltyGradient | None = None, *, precision: float = 0.05
) -> float:
    """Find the lambda at which the top left singular vector turns from X_B^T r to q.

    Bisects log lambda, from 10 times below to 10 times above |S1| / |S3|, until the ends are
    within a factor 1 + ``precision``.

    Args:
        case: The network without penalty.
        penalty: ``split_jacobian_penalty`` of the case at strength 1, if it is at hand.
        precision: Relative precision, positive.

    Returns:
        The smallest lambda with |u_1^T q| >= |u_1^T X_B^T r| / |X_B^T r|; 0 if q leads already at
        the lower end, infinity if it does not at the upper end or the penalty has no gradient.

    Raises:
        ValueError: If ``precision`` is not positive.
    """
    checks.positive("precision", precision)
    penalty = penalty or split_jacobian_penalty(case.data, case.network)
    if penalty.S3.norm == 0:
        return math.inf

    def turned(log_strength: float) -> bool:
        total = case.parts.G + math.exp(log_strength) * penalty.total
        u = leading_singular_triplets(total, 1).U[:, 0]
        return alignment(u, case.data.q) >= alignment(u, case.parts.S1.u)

    centre = math.log(case.parts.S1.norm / penalty.S3.norm)
    low, high = centre - math.log(10), centre + math.log(10)
    if turned(low):
        return 0.0
    if not turned(high):
        return math.inf
    while high - low > math.log1p(precision):
        middle = (low + high) / 2
        low, high = (low, middle) if turned(middle) else (middle, high)
    return math.exp(high)


def penalty_cell(
    activation: str, scaling: str, centred: bool, unit_rows: bool, seed: int
) -> dict[str, float]:
    """Measure one cell of the grid behind Figure 8 (b), n, d, m = 960, 1280, 1600.

    Args:
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"`` or ``"mean-field"``.
        centred: Centre features and targets.
        unit_rows: As in ``feature_scenario``.
        seed: Seed.

    Returns:
        Norms ``S1``, and ``S3`` and ``E2`` per unit of lambda; what ``follow_penalty`` returns,
        at lambda = 0 with the ending ``_before``, at the paper's 1e5 with ``_after``;
        ``turning``, the ``turning_strength``.
    """
    n, m = _SIZES["cifar10-embeddings"]
    case = feature_scenario(
        _load("cifar10-embeddings"),
        n=n,
        m=m,
        centred=centred,
        centred_targets=centred,
        unit_rows=unit_rows,
        activation=activation,
        scaling=scaling,
        seed=seed,
    )
    penalty = split_jacobian_penalty(case.data, case.network)
    before, after = follow_penalty(case, (0.0, PAPER_STRENGTH), penalty)
    values = {
        "S1": case.parts.S1.norm,
        "S3": penalty.S3.norm,
        "E2": operator_norm(penalty.E2),
        "turning": turning_strength(case, penalty),
    }
    for row, ending in ((before, "before"), (after, "after")):
        values |= {f"{name}_{ending}": row[name] for name in row if name != "strength"}
    return values


def feature_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid behind Figure 8 (a): preparations, activations and controls."""
    names = ("examples", "activation", "centred", "centred_targets", "unit_rows", "shuffled")
    features, both = "cifar10-embeddings", (False, True)
    activations = ("relu", "sigmoid", "softplus")
    series = [
        *product([features], activations, both, both, [False], [False]),
        # Control: targets that know nothing of the images.
        *product([features], ("relu", "sigmoid"), [True], [True], [False], [True]),
        # Other units, and other data.
        *(
            (*row, same, same, unit, False)
            for row, unit in (((features, "relu"), True), (("cifar10", "relu"), False))
            for same in both
        ),
    ]
    return tuple(dict(zip(names, row)) | {"seed": seed} for seed, row in product(range(12), series))


def penalty_cells() -> tuple[dict[str, Any], ...]:
    """List the cells of the grid behind Figure 8 (b): activations, scalings and units."""
    names = ("activation", "scaling", "centred", "unit_rows")
    series = [
        *product(("sigmoid", "tanh", "softplus", "silu"), ["ntk"], [True], [False]),
        ("sigmoid", "ntk", False, False),
        ("sigmoid", "mean-field", True, False),
        ("sigmoid", "ntk", True, True),
        ("tanh", "ntk", True, True),
        ("sigmoid", "mean-field", True, True),
    ]
    return tuple(dict(zip(names, row)) | {"seed": seed} for seed, row in product(range(12), series))
