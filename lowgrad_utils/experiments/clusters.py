"""Figures 3 and 4 of the second paper: are the group means tight clusters around class centres?

``python -m lowgrad_utils.experiments.clusters`` stores the inner products of the group means of the
shipped networks.
"""

import hashlib
import io
import json
import math
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets, files, trained_networks
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import toy_levels
from lowgrad_utils.sweeps import grid
from lowgrad_utils.three_levels import ThreeLevels, three_levels


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


def within_between(levels: ThreeLevels) -> float:
    """Return the spread of the group means about their class centres over that of the centres.

    (Ave_{c, c' != c} |delta_{c,c'} - delta_c|^2 / Ave_c |delta_c - Ave delta_c|^2)^(1/2): well
    below 1 for tight clusters around centres far apart, (C (C-2) / (C-1))^(1/2) for orthogonal
    means of one length, which have no clusters.

    Args:
        levels: The three levels of a classifier.
    """
    c, centres = levels.classes, levels.centre_gram
    spread = float(levels.gram.diagonal().sum() - levels.lengths.diagonal().square().sum())
    within = spread / (c * (c - 1)) - float(centres.diagonal().mean())
    between = float(centres.diagonal().mean() - centres.mean())
    return max(within / between, 0) ** 0.5


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
    first, second = group_labels(levels.classes)
    cosines = levels.cosines
    same = (first[:, None] == first) & (second[:, None] != second)
    other = (first[:, None] != first) & (second[:, None] != second)
    euclidean, directions = distances(levels), distances(levels, directions=True)
    plane = embed(euclidean)
    return {
        "within_between": within_between(levels),
        "cosine_within": float(cosines[same].mean()),
        "cosine_between": float(cosines[other].mean()),
        "silhouette": silhouette(euclidean, first),
        "silhouette_directions": silhouette(directions, first),
        "silhouette_tsne": silhouette(torch.cdist(plane, plane), first),
    }


# --- what to compare with -------------------------------------------------------------------------


def unit_lengths(levels: ThreeLevels) -> ThreeLevels:
    """Return group means of the same directions at length 1.

    Args:
        levels: The three levels of a classifier, no group mean of length zero.
    """
    inverse = 1 / levels.lengths.flatten()
    return ThreeLevels(inverse[:, None] * levels.gram * inverse, levels.counts)


def without_structure(levels: ThreeLevels) -> ThreeLevels:
    """Return group means of the same lengths in orthogonal directions: no clusters at all.

    What Gaussian vectors of these lengths come to in a space of many dimensions.

    Args:
        levels: The three levels of a classifier.
    """
    return ThreeLevels(torch.diag(levels.gram.diagonal()), levels.counts)


def clusters_of_cosine(classes: int, cosine: float) -> ThreeLevels:
    """Return unit group means with one cosine within each class and 0 between classes.

    Their silhouette by class is 1 - (1 - cosine)^(1/2): all distances within a class are
    (2 - 2 cosine)^(1/2), all others 2^(1/2).

    Args:
        classes: C, at least 2.
        cosine: From 0 to 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> levels = clusters_of_cosine(10, 0.75)
        >>> round(silhouette(distances(levels), group_labels(10)[0]), 12)
        0.5
    """
    if checks.positive_integer("classes", classes) < 2:
        raise ValueError(f"classes is {classes}, but at least 2 are needed")
    if checks.nonnegative("cosine", cosine) > 1:
        raise ValueError(f"cosine is {cosine:g}, but a number from 0 to 1 is needed")
    block = torch.full((classes, classes), float(cosine), dtype=torch.float64).fill_diagonal_(1)
    gram = torch.block_diag(*[block] * classes)
    return ThreeLevels(gram, torch.ones(classes, dtype=torch.int64))


def clusters_seen(plane: Tensor, clusters: int) -> tuple[Tensor, float]:
    """Return the clusters that k-means finds in the plane, and their silhouette there.

    What an eye does that is told to look for so many clusters.

    Args:
        plane: K x 2.
        clusters: How many.
    """
    found = KMeans(clusters, n_init=10, random_state=0).fit_predict(plane.numpy())
    labels = torch.from_numpy(found.astype(np.int64))
    return labels, silhouette(torch.cdist(plane, plane), labels)


def toy_within_between(classes: int, p: float, cosine: float = 0.0) -> float:
    """Return ``within_between`` of the closed-form toy, for even probabilities and features.

    With N of ``toy_levels.mean_products``: within^2 = a (N - p^2 C / (C-1)) and
    between^2 = a p^2 (C - 1 + s) / (C-1); at p = 1 the ratio is ((C-2) / (C-1+s))^(1/2).

    Args:
        classes: C, at least 3.
        p: Probability of the true class, above 0 up to 1.
        cosine: s, of the features of two classes, from 0 to 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> round(toy_within_between(10, 1.0), 12) == round((8 / 9) ** 0.5, 12)
        True
    """
    length, _ = toy_levels.mean_products(classes, p)
    toy_levels.likeness(cosine)
    within = length - p**2 * classes / (classes - 1)
    return (within * (classes - 1) / (p**2 * (classes - 1 + cosine))) ** 0.5


def toy_own_length(classes: int, p: float) -> float:
    """Return |delta_{c,c}| / |delta_{c,c'}| of the closed-form toy, (C p (1-p) / N)^(1/2).

    N tends to 2 as p tends to 1, so that the ratio vanishes like the square root of 1 - p.

    Args:
        classes: C, at least 3.
        p: Probability of the true class, above 0 up to 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> [round(toy_own_length(10, p), 3) for p in (0.1, 0.9, 0.99, 0.999)]
        [1.0, 0.709, 0.224, 0.071]
    """
    length, _ = toy_levels.mean_products(classes, p)
    return (classes * p * (1 - p) / length) ** 0.5


# --- any folder of images -------------------------------------------------------------------------


def folder_levels(
    model: nn.Module,
    folder: str | Path,
    *,
    size: int = 32,
    channels: int = 3,
    per_class: int | None = None,
    seed: int | torch.Generator = 0,
    memory: float = 2.0,
) -> tuple[ThreeLevels, tuple[str, ...]]:
    """Return the levels of a classifier on a folder with one subfolder of images a class.

    This is the way from ImageNet and a pretrained network to Figures 3 to 5. Images have pixels
    from 0 to 1: a network that wants them standardised gets a layer in front that does so.

    Args:
        model: A classifier in evaluation mode whose logits are in the order of the subfolders'
            names. For ten of its thousand classes, wrap it so that it returns their logits.
        folder: See ``datasets.load_image_folder``.
        size: Height and width of the images.
        channels: 3 or 1.
        per_class: Images of each class, None for all.
        seed: Chooses them.
        memory: Gigabytes for the work on the examples.

    Returns:
        The levels, with means, and the names of the classes.

    Raises:
        DataError: If the folder is not such a folder.
        ValueError: If the model is not in evaluation mode, or does not fit the images.
    """
    x, labels, names = datasets.load_image_folder(
        folder, size=size, channels=channels, per_class=per_class, seed=seed
    )
    first = next(model.parameters(), None)
    curvature = LossCurvature(
        model, (x if first is None else x.to(first.dtype), labels), memory=memory
    )
    if curvature.classes != len(names):
        raise ValueError(
            f"model has {curvature.classes} logits for {len(names)} subfolders of images; one "
            "logit for each is needed"
        )
    return three_levels(curvature), names


# --- over sample sizes ----------------------------------------------------------------------------


def size_cell(
    dataset: str, network: str, per_class: int, *, size: int = 16, steps: int = 250, seed: int = 0
) -> dict[str, float]:
    """Train one narrow network and return ``cluster_numbers``, how well it fits, and lengths.

    Width 1/16, batches of equal size of at most 128 (batch norm would take its statistics from a
    last batch of two), learning rate 0.05, weight decay 5e-4. ``own_length`` is the mean of
    |delta_{c,c}|, ``other_length`` that of |delta_{c,c'}|.

    Args:
        dataset: ``mnist``, ``fashion_mnist`` or ``cifar10``.
        network: A name of ``classifiers.NETWORKS``.
        per_class: Images of each class.
        size: Height and width of the images.
        steps: Steps of the training.
        seed: Chooses images, weights and batches.
    """
    x, labels = datasets.load(dataset).images(per_class=per_class, size=size, seed=seed)
    model = classifiers.build(network, channels=x.shape[1], width=1 / 16, size=size, seed=seed)
    batch = math.ceil(len(x) / math.ceil(len(x) / 128))
    classifiers.fit(
        model, x, labels, steps=steps, lr=0.05, batch_size=batch, seed=seed, progress=False
    )
    levels = three_levels(LossCurvature(model, (x, labels)))
    result = classifiers.evaluate(model, x, labels)
    off = ~torch.eye(levels.classes, dtype=torch.bool)
    return {
        "accuracy": result.accuracy,
        "probability": result.mean_probability,
        **cluster_numbers(levels),
        "own_length": float(levels.lengths.diagonal().mean()),
        "other_length": float(levels.lengths[off].mean()),
    }


def size_cells() -> tuple[dict, ...]:
    """Return the cells of the stored grid, cheapest first."""
    sets = ["mnist", "fashion_mnist", "cifar10"]
    cells = []
    for per_class, seeds in ((13, [0, 1]), (100, [0, 1]), (263, [0])):
        cells += grid(network=["vgg11"], dataset=sets, per_class=[per_class], seed=seeds)
    cells += grid(network=["vgg11"], dataset=sets[:2], per_class=[702], seed=[0])
    return tuple(cells)


# --- the shipped networks -------------------------------------------------------------------------


def store_levels() -> list[str]:
    """Store the Gram matrices of the shipped networks' group means; return the networks' names."""
    arrays, about, weights = {}, {}, {}
    for name in trained_networks.names():
        network = trained_networks.load(name)
        arrays[name] = three_levels(network.curvature()).gram.numpy()
        result = classifiers.evaluate(network.model, *network.train_set)
        about[name] = {"accuracy": result.accuracy, "probability": result.mean_probability}
        weights[name] = _weights_hash(name)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    files.write_whole(_store_path(), data)
    facts = {
        "command": "python -m lowgrad_utils.experiments.clusters",
        "sha256": hashlib.sha256(data).hexdigest(),
        "networks": about,
        "weights": weights,
    }
    text = json.dumps(facts, indent=2) + "\n"
    files.write_whole(_store_path().with_suffix(".json"), text.encode())
    return list(arrays)


def stored_levels() -> dict[str, tuple[ThreeLevels, dict[str, float]]]:
    """Load the levels of the shipped networks, without means, and their fit to the images.

    Returns:
        For each network its levels, and ``accuracy`` and mean ``probability`` of the true class.

    Raises:
        CheckpointError: If the file is missing, not the one that was stored, or made from other
            weights than the shipped ones.

    Example:
        >>> levels, fit = stored_levels()["mnist-vgg11"]
        >>> levels.gram.shape, fit["accuracy"] > 0.95
        (torch.Size([100, 100]), True)
    """
    path = _store_path()
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise classifiers.CheckpointError(
            f"{path} is missing or damaged; restore it with git, or reinstall"
        ) from error
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise classifiers.CheckpointError(f"{path} is not the file that was stored; restore it")
    changed = [name for name, sha256 in facts["weights"].items() if sha256 != _weights_hash(name)]
    if changed:
        raise classifiers.CheckpointError(
            f"{path} was made from other weights of {', '.join(changed)}; run {facts['command']}"
        )
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    found = {}
    for name, fit in facts["networks"].items():
        gram = torch.from_numpy(arrays[name].astype(np.float64))
        counts = torch.ones(round(len(gram) ** 0.5), dtype=torch.int64)
        found[name] = (ThreeLevels(gram, counts), fit)
    return found


def _store_path() -> Path:
    return trained_networks.folder() / "group-means.npz"


def _weights_hash(name: str) -> str:
    """Return the SHA-256 of a shipped network's file; empty if there is none."""
    path = trained_networks.folder() / f"{name}.pt"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


if __name__ == "__main__":
    print(*store_levels(), sep="\n")
