"""Figures 3 and 4 of the second paper: are the group means tight clusters around class centres?"""

import numpy as np
import torch
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.three_levels import ThreeLevels


def group_labels(classes: int) -> tuple[Tensor, Tensor]:
    """Return class c and logit c' of the C(C-1) group means with c' != c, sorted by c, then c'.

    Args:
        classes: C.

    Example:
        >>> [labels.tolist() for labels in group_labels(3)]
        [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    first, second = torch.nonzero(~torch.eye(classes, dtype=torch.bool)).T
    return first, second


def distances(levels: ThreeLevels, *, directions: bool = False) -> Tensor:
    """Return the distances between the C(C-1) group means with c' != c.

    Args:
        levels: The three levels of a classifier.
        directions: Between the means at unit length, sqrt(2 - 2 cos), instead.
    """
    if directions:
        products = levels.cosines
    else:
        kept = ~torch.eye(levels.classes, dtype=torch.bool).flatten()
        products = levels.gram[kept][:, kept]
    squares = products.diagonal()
    squared = squares[:, None] + squares - 2 * products
    return squared.clamp_min(0).fill_diagonal_(0).sqrt()


def embed(matrix: Tensor, *, perplexity: float = 10, seed: int | torch.Generator = 0) -> Tensor:
    """Return a t-SNE embedding in the plane of points known by their distances, K x 2.

    Args:
        matrix: Distances, K x K.
        perplexity: About how many neighbours a point has.
        seed: Seed of the random start.

    Raises:
        ValueError: If the perplexity is not below the number of points.
    """
    if checks.positive("perplexity", perplexity) >= len(matrix):
        raise ValueError(f"perplexity is {perplexity}, but below {len(matrix)} points is needed")
    stream = checks.random_stream(seed, "t-SNE")
    start = torch.randn(len(matrix), 2, generator=stream, dtype=torch.float64) * 1e-4
    model = TSNE(perplexity=perplexity, metric="precomputed", init=start.numpy(), random_state=0)
    return torch.from_numpy(np.asarray(model.fit_transform(matrix.numpy()), dtype=np.float64))


def silhouette(matrix: Tensor, labels: Tensor) -> float:
    """Return the mean silhouette of a labelling: 1 for tight, far clusters, below 0 for none.

    Args:
        matrix: Distances, K x K.
        labels: Cluster of each point.

    Source: Rousseeuw 1987, as in scikit-learn.
    """
    # Rounding can leave a distance of a point to itself, which scikit-learn refuses.
    matrix = matrix.clone().fill_diagonal_(0)
    return float(silhouette_score(matrix.numpy(), labels.numpy(), metric="precomputed"))


def cluster_numbers(levels: ThreeLevels) -> dict[str, float]:
    """Return what tells whether a class's group means are a tight cluster, in four ways.

    - ``within_between``: root mean square distance of delta_{c,c'} to its centre delta_c, over that
      of the centres to their mean.
    - ``cosine_within``, ``cosine_between``: mean cosine between group means of one class, and of
      different classes and logits.
    - ``silhouette``, ``silhouette_directions``, ``silhouette_tsne``: of the classes, by distances
      in R^P, by directions, and in a t-SNE embedding of those distances in R^P.

    Args:
        levels: The three levels of a classifier.
    """
    c = levels.classes
    first, second = group_labels(c)
    centres = levels.centre_gram
    spread = float(levels.gram.diagonal().sum() - levels.lengths.diagonal().square().sum())
    within = spread / (c * (c - 1)) - float(centres.diagonal().mean())
    between = float(centres.diagonal().mean() - centres.mean())
    cosines = levels.cosines
    same = (first[:, None] == first) & (second[:, None] != second)
    other = (first[:, None] != first) & (second[:, None] != second)
    euclidean, directions = distances(levels), distances(levels, directions=True)
    plane = embed(euclidean)
    return {
        "within_between": max(within / between, 0) ** 0.5,
        "cosine_within": float(cosines[same].mean()),
        "cosine_between": float(cosines[other].mean()),
        "silhouette": silhouette(euclidean, first),
        "silhouette_directions": silhouette(directions, first),
        "silhouette_tsne": silhouette(torch.cdist(plane, plane), first),
    }
