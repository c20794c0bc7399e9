"""Second moments of loss gradients under labels of the model, of the data, or of anything else.

With the label c' an example's loss gradient is g_{i,c'} = -delta_{i,c'} / sqrt(p_ic'). Labels with
probabilities q_ic' give (1/n) sum_i sum_c' q_ic' g g^T = (1/n) sum w_ic' delta delta^T with weights
w = q / p. For q = p, w = 1: that is G. All Frobenius norms come from the n C x n C matrix of
<delta, delta>^2.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import top_eigenpairs
from lowgrad_utils.experiments.hessian_sweep import IMAGE_SETS
from lowgrad_utils.experiments.small_classifiers import (
    directions,
    relative_error,
    small_classifier,
)


def squared_products(derivatives: Tensor) -> Tensor:
    """Return <delta_a, delta_b>^2 of all pairs of logit derivatives, n C x n C.

    Args:
        derivatives: delta_{i,c'}, n x C x P.
    """
    rows = derivatives.flatten(0, 1)
    return (rows @ rows.T).square()


def distance_from_gauss_newton(squares: Tensor, weights: Tensor) -> float:
    """Return |M - G| / |G| in Frobenius norm, M = (1/n) sum w_ic' delta_{i,c'} delta_{i,c'}^T.

    Args:
        squares: ``squared_products`` of the derivatives.
        weights: w = q / p, n x C.

    Example:
        >>> squares = squared_products(torch.eye(4, dtype=torch.float64).reshape(2, 2, 4))
        >>> distance_from_gauss_newton(squares, torch.tensor([[2.0, 0.0], [1.0, 1.0]]).double())
        0.7071067811865476
    """
    excess = weights.flatten() - 1
    return float(((excess @ squares @ excess) / squares.sum()).clamp_min(0).sqrt())


def training_weights(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return w for the training labels, 1 / p at the label and 0 elsewhere: the empirical Fisher.

    Args:
        probabilities: p, n x C.
        labels: n.
    """
    return torch.nn.functional.one_hot(labels, probabilities.shape[1]) / probabilities


def sampled_weights(
    probabilities: Tensor,
    samples: int,
    *,
    labels_from: Tensor | None = None,
    seed: int | torch.Generator = 0,
) -> Tensor:
    """Return w for labels drawn at random, so many for each example.

    Args:
        probabilities: p, n x C.
        samples: Labels drawn for each example.
        labels_from: Probabilities q to draw from, n x C; those of the model if None.
        seed: Of the draws.
    """
    stream = checks.random_stream(seed, "labels")
    q = probabilities if labels_from is None else labels_from
    drawn = torch.multinomial(
        q, checks.positive_integer("samples", samples), replacement=True, generator=stream
    )
    counts = torch.zeros_like(probabilities).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=probabilities.dtype)
    )
    return counts / samples / probabilities


def expected_sampling_error(squares: Tensor, probabilities: Tensor, samples: int) -> float:
    """Return the root mean square of |M - G| / |G| for so many labels of the model per example.

    Draws are independent: E |M - G|^2 = (1 / (n^2 S)) sum_i (sum_c' p |g_{i,c'}|^4 - |G_i|^2), with
    G_i = sum_c' delta_{i,c'} delta_{i,c'}^T.

    Args:
        squares: ``squared_products`` of the derivatives.
        probabilities: p, n x C.
        samples: S.
    """
    n, c = probabilities.shape
    own = squares.reshape(n, c, n, c).diagonal(dim1=0, dim2=2)  # C x C x n: pairs of one example
    fourth = squares.diagonal().reshape(n, c) / probabilities
    variance = fourth.sum() - own.sum()
    return float((variance / samples / squares.sum()).sqrt())


def odds_bound(probabilities: Tensor, labels: Tensor) -> float:
    """Return max_i (1 - p_i) / p_i, p_i at the label: the empirical Fisher is at most this times G.

    Args:
        probabilities: p, n x C.
        labels: n.

    Example:
        >>> odds_bound(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
        0.3333333432674408
    """
    others = probabilities.clone()
    rows = torch.arange(len(labels))
    own = probabilities[rows, labels]
    # 1 - p as the sum of the others keeps its digits where p is close to 1.
    others[rows, labels] = 0
    return float((others.sum(1) / own).max())


def largest_ratio(derivatives: Tensor, weights: Tensor) -> float:
    """Return the largest v^T M v / v^T G v over v, M as in ``distance_from_gauss_newton``.

    Directions in which G is below rounding are left out; those of M lie among the others.

    Args:
        derivatives: delta_{i,c'}, n x C x P, of a network with few examples.
        weights: w, n x C.
    """
    rows = derivatives.flatten(0, 1)
    # G = D^T D / n. With D = U s V^T, M in the basis V / s is U^T w U, on the same scale as G = 1.
    u, s, _ = torch.linalg.svd(rows, full_matrices=False)
    u = u[:, s > 1e-10 * s[0]]
    return float(torch.linalg.eigvalsh(u.T * weights.flatten() @ u)[-1])


def smoothed_ratio(curvature: LossCurvature, smoothing: float) -> tuple[float, float]:
    """Return the largest v^T M v / v^T G v, and tr M / tr G, M of gradients of a smoothed loss.

    With smoothed labels y = (1 - s) e_c + s / C the gradient is
    J^T (p - y) = -sum_k (y_k / sqrt(p_k)) delta_k.

    Args:
        curvature: A network on few examples.
        smoothing: s, from 0 (the empirical Fisher itself) to 1.
    """
    p, derivatives = curvature.probabilities, curvature.logit_derivatives()
    y = torch.full_like(p, smoothing / curvature.classes)
    y[torch.arange(curvature.n), curvature.labels] += 1 - smoothing
    coefficients = y / p.sqrt()
    gradients = torch.einsum("nk,nkp->np", coefficients, derivatives)
    u, s, _ = torch.linalg.svd(derivatives.flatten(0, 1), full_matrices=False)
    u = u[:, s > 1e-10 * s[0]].reshape(curvature.n, curvature.classes, -1)
    image = torch.einsum("nk,nkr->nr", coefficients, u)
    return (
        float(torch.linalg.matrix_norm(image, 2) ** 2),
        float(gradients.square().sum() / derivatives.square().sum()),
    )


# --- over training ------------------------------------------------------------------------------

#: Numbers of epochs at which networks are looked at, from initial weights to interpolation.
EPOCHS = (0, 20, 50, 100, 200, 400)
_COUNTS = (4, 7, 10, 13, 16)


def moments_cell(epochs: int, dataset: str, seed: int) -> dict[str, float]:
    """Train an MLP on 50 images of five unequal classes and compare second moments with G.

    Args:
        epochs: Passes over the images.
        dataset: A name that ``datasets.load`` knows.
        seed: Of images, weights and batches.

    Returns:
        ``accuracy`` and ``probability`` (mean of the true class's) on the training images;
        ``distance`` |F - G| / |G| and ``trace_ratio`` tr F / tr G of the empirical Fisher F;
        ``odds`` and ``ratio``, the bound of F over G and the largest ratio; ``sampling_error``, as
        expected for one label of the model per example; ``rest``, |H - G| / |G| in Frobenius norm
        (estimated from 40 random directions), and ``eigenvalue_gap``, the largest
        |lambda_k(H) / lambda_k(G) - 1| for k < C.
    """
    case = small_classifier("mlp", dataset, _COUNTS, epochs=epochs, width=1 / 8, seed=seed)
    curvature = case.curvature()
    p, labels = curvature.probabilities, curvature.labels
    derivatives = curvature.logit_derivatives()
    squares, weights = squared_products(derivatives), training_weights(p, labels)
    lengths = derivatives.square().sum(2)
    probes = directions(curvature.size, 40, seed=seed)
    full = curvature.gauss_newton @ probes
    leading = [
        top_eigenpairs(operator, curvature.classes - 1, seed=seed).values
        for operator in (curvature.hessian, curvature.gauss_newton)
    ]
    return {
        "accuracy": float((p.argmax(1) == labels).double().mean()),
        "probability": float(p[torch.arange(len(p)), labels].mean()),
        "distance": distance_from_gauss_newton(squares, weights),
        "trace_ratio": float((lengths * weights).sum() / lengths.sum()),
        "odds": odds_bound(p, labels),
        "ratio": largest_ratio(derivatives, weights),
        "sampling_error": expected_sampling_error(squares, p, 1),
        "rest": relative_error(curvature.hessian @ probes, full),
        "eigenvalue_gap": float((leading[0] / leading[1] - 1).abs().max()),
    }


def moments_cells(seeds: range = range(5)) -> tuple[dict[str, Any], ...]:
    """Return the cells of the grid ``label-moments``, shortest trainings first.

    Args:
        seeds: Seeds of the trainings.
    """
    return tuple(
        {"epochs": epochs, "dataset": dataset, "seed": seed}
        for epochs, dataset, seed in product(EPOCHS, IMAGE_SETS, seeds)
    )
