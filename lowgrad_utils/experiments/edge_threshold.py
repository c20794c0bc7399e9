"""A threshold at the bulk edge: which directions it selects, and whether they tell classes apart.

A direction v is judged by what it does to the logits of an image, J_i v, a vector of length C. That
needs neither the image's label nor the network's answer. Weighted by sqrt(p) and centred by p it
becomes the products <delta_{i,c'}, v>, which do know the answer.
"""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.func import functional_call, jvp

from lowgrad_utils import checks, classifiers, trained_networks
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import orthonormal_columns, top_eigenpairs
from lowgrad_utils.three_levels import three_levels, within_groups

#: Sets of directions that are compared.
SETS = ("outlier", "bulk", "random", "centres")
_IMAGES, _RANDOM_SETS = 300, 3


def logit_changes(model: nn.Module, images: Tensor, vectors: Tensor, chunk: int = 250) -> Tensor:
    """Return J_i v_k, how the logits of each image change along each direction, K x n x C.

    Args:
        model: A classifier in evaluation mode.
        images: n inputs.
        vectors: K x P, in the order of ``model.parameters()``.
        chunk: Images at a time.

    Raises:
        ValueError: If the vectors are not of length P.

    Example:
        >>> model = torch.nn.Linear(2, 3, bias=False).double()
        >>> along = torch.eye(6, dtype=torch.float64)[:1]
        >>> logit_changes(model, torch.tensor([[5.0, 7.0]], dtype=torch.float64), along).tolist()
        [[[5.0, 0.0, 0.0]]]
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    size = sum(p.numel() for p in parameters.values())
    rows = []
    for vector in checks.matrix("vectors", vectors, columns=size):
        pieces = vector.split([p.numel() for p in parameters.values()])
        tangent = {k: v.view(p.shape) for (k, p), v in zip(parameters.items(), pieces)}
        parts = []
        for part in images.split(chunk):
            function = partial(_logits, model, part)
            parts.append(jvp(function, (parameters,), (tangent,))[1])
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _logits(model: nn.Module, images: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return functional_call(model, parameters, (images,))


def centred(changes: Tensor) -> Tensor:
    """Return changes of logits without their mean over the logits, which softmax does not see."""
    return changes - changes.mean(-1, keepdim=True)


def weighted(changes: Tensor, probabilities: Tensor) -> Tensor:
    """Return <delta_{i,c'}, v_k> = sqrt(p_c') (J_i v_k - p^T J_i v_k)_c', K x n x C.

    Args:
        changes: J_i v_k, K x n x C.
        probabilities: n x C.
    """
    mean = (probabilities * changes).sum(-1, keepdim=True)
    return probabilities.sqrt() * (changes - mean)


def as_features(changes: Tensor) -> Tensor:
    """Return what all directions do to an image as one row for each image, n x (K C)."""
    return changes.transpose(0, 1).flatten(1).double()


def share_between(features: Tensor, labels: Tensor) -> float:
    """Return tr S_B / tr S_T: the share of the features' variance that lies between classes.

    0 if all class means agree, 1 if the images of a class do. It is F / (1 + F) of Fisher's ratio
    F of between- to within-class variance, and no classifier is fitted.

    Args:
        features: n x F.
        labels: Class of each image.

    Example:
        >>> share_between(torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1]))
        1.0
    """
    deviations = features - features.mean(0)
    between = sum(
        int((labels == label).sum()) * deviations[labels == label].mean(0).square().sum()
        for label in labels.unique()
    )
    return float(between / deviations.square().sum())


def predictions(train: Tensor, labels: Tensor, test: Tensor) -> dict[str, Tensor]:
    """Return the classes of test images by two classifiers fitted on the training images' features.

    ``nearest``: the nearest class mean, of features at unit variance. ``linear``: linear
    discriminant analysis with Ledoit and Wolf's shrinkage.

    Args:
        train: n x F features of training images.
        labels: Their classes.
        test: Features of the images to be classified.
    """
    models = {
        "nearest": NearestCentroid(),
        "linear": LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    }
    found = {}
    for name, model in models.items():
        fitted = make_pipeline(StandardScaler(), model).fit(train.numpy(), labels.numpy())
        found[name] = torch.from_numpy(fitted.predict(test.numpy()))
    return found


def selected(values: Tensor, edge: float) -> int:
    """Return how many of the falling eigenvalues lie above an edge.

    Example:
        >>> selected(torch.tensor([5.0, 3.0, 1.0]), 2.0)
        2
    """
    return int((values > edge).sum())


def largest_gap(values: Tensor) -> int:
    """Return the number of eigenvalues above the largest ratio between one and the next.

    Args:
        values: Falling positive eigenvalues, at least two.

    Raises:
        ValueError: If there are fewer than two, or one is not positive.

    Example:
        >>> largest_gap(torch.tensor([9.0, 8.0, 1.0, 0.9]))
        2
    """
    if len(values) < 2 or values.min() <= 0:
        raise ValueError("at least two positive eigenvalues are needed for a gap between them")
    return int((values[:-1] / values[1:]).argmax()) + 1


def isotropic_edge(trace: float, size: int, vectors: int) -> float:
    """Return the Marchenko-Pastur edge (tr / P) (1 + sqrt(P / N))^2 of N vectors in R^P.

    Args:
        trace: Trace of their second moment.
        size: P.
        vectors: N.
    """
    trace = checks.positive("trace", trace)
    return trace / size * (1 + (size / vectors) ** 0.5) ** 2


def random_directions(count: int, size: int, seed: int | torch.Generator, dtype) -> Tensor:
    """Return unit vectors in random directions, count x P.

    Args:
        count: How many.
        size: P.
        seed: Seed, or generator.
        dtype: Of the vectors.
    """
    stream = checks.random_stream(seed, "directions")
    rows = torch.randn(count, size, generator=stream, dtype=torch.float64)
    return (rows / rows.norm(dim=1, keepdim=True)).to(dtype)


def judge(
    model: nn.Module,
    vectors: Tensor,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
) -> dict[str, float]:
    """Return how well some directions tell the classes of test images apart.

    - ``between``: ``share_between`` of the centred J_i v; ``between_weighted`` of the products with
      logit derivatives.
    - ``nearest``, ``linear``: share of test images classified correctly from the centred J_i v.
    - ``sizes``: the same, linear, from one number for each direction, |J_i v|.
    - ``right_on_errors``: ``linear`` on the test images that the network gets wrong;
      ``echo_on_errors``: how often it gives the network's own wrong answer there.

    Args:
        model: A classifier in evaluation mode.
        vectors: Directions, K x P.
        train: Training images and labels, to fit on.
        test: Test images and labels.
    """
    changes = [centred(logit_changes(model, images, vectors)) for images, _ in (train, test)]
    with torch.no_grad():
        logits = model(test[0])
    answers, truth = logits.argmax(1), test[1]
    by_vector = predictions(as_features(changes[0]), train[1], as_features(changes[1]))
    lengths = [change.norm(dim=2, keepdim=True) for change in changes]
    by_size = predictions(as_features(lengths[0]), train[1], as_features(lengths[1]))["linear"]
    wrong = answers != truth
    linear = by_vector["linear"]
    weights = weighted(changes[1], logits.softmax(1))
    return {
        "between": share_between(as_features(changes[1]), truth),
        "between_weighted": share_between(as_features(weights), truth),
        **{name: _share(found == truth) for name, found in by_vector.items()},
        "sizes": _share(by_size == truth),
        "right_on_errors": _share(linear[wrong] == truth[wrong]),
        "echo_on_errors": _share(linear[wrong] == answers[wrong]),
    }


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


def edges(curvature: LossCurvature, values: Tensor, probes: Tensor) -> dict[str, float]:
    """Return bulk edges and how many of the leading eigenvalues each selects.

    ``within``: the largest eigenvalue of G3, what is left of G without the group means. ``gap``:
    the largest ratio. ``isotropic``: the edge that G3's trace would have if all directions were
    alike; P times the mean of v^T G3 v over random unit vectors estimates that trace.

    Args:
        curvature: A classifier on its training images.
        values: Leading eigenvalues of G, falling.
        probes: Random unit vectors, K x P.
    """
    levels = three_levels(curvature)
    inside = within_groups(curvature, levels)
    within = float(top_eigenpairs(inside, 1, tolerance=1e-2, residuals=False).values[0])
    trace = float((inside.product(probes) * probes).sum(1).mean()) * curvature.size
    isotropic = isotropic_edge(trace, curvature.size, curvature.n * curvature.classes)
    return {
        "within_edge": within,
        "within_trace": trace,
        "isotropic_edge": isotropic,
        "top_of_centres": float(levels.eigenvalues("G1")[0]),
        "by_within": selected(values, within),
        "by_gap": largest_gap(values),
        "by_isotropic": selected(values, isotropic),
    }


def threshold_cell(name: str, trained: bool, seed: int) -> dict[str, Any]:
    """Return what a threshold at the bulk edge selects in a shipped network, and what it is worth.

    Outliers are the C - 1 leading eigenvectors of G, bulk the next C - 1, random as many random
    directions (three draws, of which the mean is returned, and the largest as ``most``), centres
    an orthonormal basis of the class centres.

    Args:
        name: A shipped network.
        trained: With its weights, or at an initialisation.
        seed: Of the random directions and of the initialisation.
    """
    network = trained_networks.load(name)
    model = network.model
    if not trained:
        model = classifiers.build(
            network.about["network"],
            channels=network.train_set[0].shape[1],
            width=network.about["width"],
            size=network.about["size"],
            seed=seed,
        ).eval()
    train, test = network.train_set, tuple(x[:_IMAGES] for x in network.test_set)
    curvature = LossCurvature(model, train, memory=4)
    c = curvature.classes
    top = top_eigenpairs(curvature.gauss_newton, 2 * c - 2, tolerance=1e-2, residuals=False)
    basis = orthonormal_columns(curvature.class_centres())
    inside = (basis.T @ top.vectors).square().sum(0)
    random = random_directions(_RANDOM_SETS * (c - 1), curvature.size, seed, curvature.dtype)
    # Classifiers are fitted on some of the training images, in random order of their classes.
    order = torch.randperm(len(train[0]), generator=checks.random_stream(seed, "images"))
    fit = tuple(x[order[:_IMAGES]] for x in train)
    sets = {"outlier": [top.vectors[:, : c - 1].T], "bulk": [top.vectors[:, c - 1 :].T]}
    sets |= {"random": list(random.split(c - 1)), "centres": [basis.T]}
    judged = {k: [judge(model, rows, fit, test) for rows in v] for k, v in sets.items()}
    on_test = classifiers.evaluate(model, *test)
    return {
        "test_accuracy": on_test.accuracy,
        "train_accuracy": classifiers.evaluate(model, *train).accuracy,
        **{f"G_{k + 1}": float(value) for k, value in enumerate(top.values)},
        **{f"inside_{k + 1}": float(share) for k, share in enumerate(inside)},
        **edges(curvature, top.values, random[:4]),
        **_summary(judged),
    }


def _summary(judged: dict[str, Iterable[dict[str, float]]]) -> dict[str, float]:
    """Return means over the draws of each set, and for more than one draw the largest."""
    numbers = {}
    for name, draws in judged.items():
        for key in draws[0]:
            values = torch.tensor([draw[key] for draw in draws], dtype=torch.float64)
            numbers[f"{name}_{key}"] = float(values.mean())
            if len(draws) > 1:
                numbers[f"most_{name}_{key}"] = float(values.max())
    return numbers


def threshold_cells() -> tuple[dict[str, Any], ...]:
    """Return the cells: nine shipped networks, trained and not, cheapest networks first."""
    sets = ("mnist", "fashion_mnist", "cifar10")
    arms = [("vgg11", True), ("vgg11", False), ("resnet18", True), ("resnet18", False)]
    arms += [("densenet40", True), ("densenet40", False)]
    return tuple(
        {"name": f"{dataset}-{network}", "trained": trained, "seed": 0}
        for (network, trained), dataset in product(arms, sets)
    )
