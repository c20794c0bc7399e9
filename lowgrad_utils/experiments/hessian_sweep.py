"""The sweep of the second paper (Eq. 29): train, choose the learning rate, measure the spectra.

``lowgrad_utils.hessian`` runs any part of it from the command line.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import orthonormal_columns, rayleigh_ritz, top_eigenpairs
from lowgrad_utils.experiments.clusters import cluster_numbers
from lowgrad_utils.sweeps import grid
from lowgrad_utils.three_levels import ThreeLevels, evenness, three_levels
from lowgrad_utils.training import DivergenceError

Cell = dict[str, Any]

IMAGE_SETS = ("mnist", "fashion_mnist", "cifar10")
CONVOLUTIONAL = ("vgg11", "resnet18", "densenet40")

#: Width factor and image size of networks that train in seconds to minutes on one core.
NARROW = {"vgg11": (1 / 8, 32), "resnet18": (1 / 8, 16), "densenet40": (1 / 4, 16)}

#: Images of the smallest class of each training set.
LARGEST = {
    "shipped": {"mnist": 702, "fashion_mnist": 702, "cifar10": 300},
    "full": {"mnist": 5421, "fashion_mnist": 6000, "cifar10": 5000},
}

#: How many eigenvalues of each kind a cell measures.
COUNTS = {"G": 15, "G1+2": 30, "G1": 10, "G0": 10, "ritz": 10}


def sample_sizes() -> list[int]:
    """Return the paper's 20 sample sizes per class, floor(10 * 500^(i/19)).

    Source: Papyan 2019, Eq. 29.

    Example:
        >>> sample_sizes()[:3], 702 in sample_sizes(), sample_sizes()[-1]
        ([10, 13, 19], True, 5000)
    """
    # Without the small addition 500^(19/19) rounds to just below 500.
    return [math.floor(10 * 500 ** (i / 19) + 1e-9) for i in range(20)]


def learning_rates() -> list[float]:
    """Return the paper's 100 learning rates, evenly spaced in logarithm from 1e-4 to 0.25.

    Source: Papyan 2019, Eq. 29.

    Example:
        >>> rates = learning_rates()
        >>> len(rates), rates[0], rates[-1]
        (100, 0.0001, 0.25)
    """
    return [float(f"{1e-4 * 2500 ** (i / 99):.6g}") for i in range(100)]


def train(
    dataset: str,
    network: str,
    per_class: int,
    learning_rate: float,
    weight_decay: float,
    label_smoothing: float,
    epochs: int,
    width: float,
    size: int,
    seed: int,
    source: str = "shipped",
    **options: Any,
) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train one network as the paper does, and return it with its training and test images.

    The seed chooses images, initial weights and batches; cells that differ in the learning rate or
    weight decay share all three. Batches are of equal size, at most 128: 130 images make two of
    65, since batch norm would take its statistics from a last batch of two.

    Args:
        dataset: ``mnist``, ``fashion_mnist`` or ``cifar10``.
        network: ``vgg11``, ``resnet18``, ``densenet40`` or ``mlp``.
        per_class: Training images of each class.
        learning_rate: At the beginning; a tenth after one and two thirds of the epochs.
        weight_decay: Multiple of theta in the gradient.
        label_smoothing: Share of each label given to all classes alike.
        epochs: Passes over the images.
        width: Factor of the channels.
        size: Height and width of the images.
        seed: See above.
        source: Where ``datasets.load`` takes the images from.
        **options: Passed on to ``classifiers.fit``.

    Returns:
        The network in evaluation mode, (x, labels) and (x_test, labels_test).

    Raises:
        DivergenceError: If the loss is no longer finite.
        ValueError: On a name or number that is not admitted.

    Source: Papyan 2019, Section 5.1.
    """
    data = datasets.load(dataset, source=source)
    x, y = data.images(per_class=per_class, size=size, seed=seed)
    model = classifiers.build(network, channels=x.shape[1], width=width, size=size, seed=seed)
    classifiers.fit(
        model,
        x,
        y,
        epochs=epochs,
        lr=learning_rate,
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
        batch_size=math.ceil(len(x) / math.ceil(len(x) / 128)),
        seed=seed,
        **{"progress": False, **options},
    )
    return model, (x, y), data.images("test", size=size)


def training_cell(**cell: Any) -> dict[str, Any]:
    """Train one network and return how well it fits and generalises.

    Args:
        **cell: Arguments of ``train``.

    Returns:
        ``diverged``; and train and test error, loss and mean probability of the true class, NaN if
        it diverged.
    """
    try:
        model, train_set, test_set = train(**cell)
    except DivergenceError:
        names = ("train_error", "train_loss", "train_probability", "test_error", "test_loss")
        return {"diverged": True, **dict.fromkeys(names, math.nan)}
    return {"diverged": False, **_fit(model, train_set, test_set)}


def spectrum_cell(**cell: Any) -> dict[str, Any]:
    """Train one network and return the spectra behind Figures 6 and 7.

    Args:
        **cell: Arguments of ``train``.

    Returns:
        What ``training_cell``, ``measure`` and ``clusters.cluster_numbers`` return.
    """
    model, train_set, test_set = train(**cell)
    curvature = LossCurvature(model, train_set, memory=6)
    levels = three_levels(curvature)
    return {
        **_fit(model, train_set, test_set),
        **measure(curvature, levels),
        **cluster_numbers(levels),
    }


def _fit(
    model: nn.Module, train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Return how well a network fits its images and generalises."""
    on_train = classifiers.evaluate(model, *train_set)
    on_test = classifiers.evaluate(model, *test_set)
    return {
        "train_error": on_train.error,
        "train_loss": on_train.loss,
        "train_probability": on_train.mean_probability,
        "test_error": on_test.error,
        "test_loss": on_test.loss,
    }


def measure(curvature: LossCurvature, levels: ThreeLevels) -> dict[str, float]:
    """Return eigenvalues of G and of its terms, and what decides how far they agree.

    - ``G_k``, ``G1+2_k``, ``G1_k``, ``G0_k``: eigenvalues, k from 1; ``ritz_k``: those of G
      restricted to the span of the class centres, 0 beyond its dimension.
    - ``inside_k``: the share of G's k-th eigenvector that lies in that span, |Q^T u_k|^2.
    - ``evenness``: median over c' != c of ``three_levels.evenness``.
    - ``centre_share``: share of the group means' second moment (c' != c) in the centres, which is
      tr G1 / tr (G1 + G2). For one class it is the product of the next two.
    - ``logit_evenness``: (E |delta_{c,c'}|)^2 / E |delta_{c,c'}|^2 over c' != c, median over c: 1
      if the group means of a class are equally long.
    - ``coherence``: |E delta_{c,c'}|^2 / (E |delta_{c,c'}|)^2 over c' != c, median over c: 1 if
      they all point the same way.
    - ``own_length``: mean of |delta_{c,c}|; ``other_length``: of |delta_{c,c'}|, c' != c.
    - ``by_class``, ``by_logit``: ``ThreeLevels.organisation``.

    Args:
        curvature: A trained classifier on its training images.
        levels: Its three levels, with means.
    """
    c = levels.classes
    full = curvature.gauss_newton
    top = top_eigenpairs(full, COUNTS["G"], start=levels.centres, tolerance=1e-4, residuals=False)
    ritz = rayleigh_ritz(full, levels.centres)
    inside = (orthonormal_columns(levels.centres).T @ top.vectors).square().sum(0)
    spectra = {"G": top.values, "ritz": ritz.values} | {
        term: levels.eigenvalues(term) for term in ("G1+2", "G1", "G0")
    }
    by_class, by_logit = levels.organisation()
    off = ~torch.eye(c, dtype=torch.bool)
    traces = {term: float(levels.eigenvalues(term).sum()) for term in ("G1", "G2")}
    lengths = levels.lengths[off].reshape(c, c - 1)
    longest = lengths.mean(1) ** 2
    return {
        **{
            # A narrow network's centres may span less than C dimensions.
            f"{name}_{k + 1}": float(spectra[name][k]) if k < len(spectra[name]) else 0.0
            for name, count in COUNTS.items()
            for k in range(count)
        },
        **{f"inside_{k + 1}": float(share) for k, share in enumerate(inside)},
        "evenness": float(evenness(curvature, levels.means)[off].median()),
        "centre_share": traces["G1"] / (traces["G1"] + traces["G2"]),
        "logit_evenness": float((longest / lengths.square().mean(1)).median()),
        "coherence": float((levels.centre_gram.diagonal() / longest).median()),
        "own_length": float(levels.lengths.diagonal().mean()),
        "other_length": float(levels.lengths[off].mean()),
        "by_class": by_class,
        "by_logit": by_logit,
    }


# --- the part of the grid that is stored --------------------------------------------------------

_RATES = {
    "vgg11": (0.01, 0.03, 0.06, 0.1, 0.25),
    "resnet18": (0.01, 0.03, 0.06, 0.1, 0.25),
    "densenet40": (0.03, 0.1, 0.25),
}
_SIZES = {"vgg11": (13, 26, 51, 100, 263), "resnet18": (13, 26, 51, 100, 263)}
_SIZES["densenet40"] = (13, 100, 263)


def stored_cells() -> tuple[Cell, ...]:
    """Return the cells whose trainings are stored, cheapest networks first.

    Three sets and three narrow networks over sample sizes and learning rates at the paper's weight
    decay, and an arm at twenty times that decay; 30 epochs, or 300 steps if those are more.
    """
    cells = []
    for network in CONVOLUTIONAL:
        width, size = NARROW[network]
        rates = _RATES[network]
        for dataset in IMAGE_SETS:
            large = () if dataset == "cifar10" else (702,)
            arms = {5e-4: (*_SIZES[network], *large), 1e-2: (13, 100, 263)}
            if network == "densenet40":
                del arms[1e-2]  # its trainings take six times as long
            for weight_decay, sizes in arms.items():
                few = rates if weight_decay == 5e-4 else (0.03, 0.1, 0.25)
                cells += [
                    _cell(dataset, network, per_class, rate, weight_decay, width, size)
                    for per_class in sizes
                    for rate in few
                ]
    return tuple(cells)


#: What each arm changes about the VGG11 of MNIST, 100 images per class, learning rate 0.1.
ARMS: dict[str, Cell] = {
    "standard": {},
    "decay 0": {"weight_decay": 0.0},
    "decay 0.01": {"weight_decay": 1e-2},
    "smoothing 0.1": {"label_smoothing": 0.1},
    "12 epochs": {"epochs": 12},
    "120 epochs": {"epochs": 120},
    "decay 0.01, 120 epochs": {"weight_decay": 1e-2, "epochs": 120},
    "decay 0.02, 120 epochs": {"weight_decay": 2e-2, "epochs": 120},
    "decay 0.02": {"weight_decay": 2e-2},
    "60 epochs": {"epochs": 60},
    "240 epochs": {"epochs": 240},
}


def arm_cells() -> tuple[Cell, ...]:
    """Return the cells of the arms that change one or two things about a training, three seeds."""
    width, size = NARROW["vgg11"]
    standard = _cell("mnist", "vgg11", 100, 0.1, 5e-4, width, size)
    return tuple({**standard, **arm, "seed": seed} for seed in range(3) for arm in ARMS.values())


#: Learning rates of ``seed_cells``: those with the least test error on the images of seed 0.
_WINNING_RATES = {
    ("mnist", "vgg11"): 0.06,
    ("fashion_mnist", "vgg11"): 0.03,
    ("cifar10", "vgg11"): 0.03,
    ("mnist", "resnet18"): 0.06,
    ("fashion_mnist", "resnet18"): 0.03,
    ("cifar10", "resnet18"): 0.25,
}


def seed_cells() -> tuple[Cell, ...]:
    """Return the cells that repeat a training on other images and weights: seeds 1 and 2."""
    return tuple(
        _cell(dataset, network, 100, rate, 5e-4, *NARROW[network], seed=seed)
        for seed in (1, 2)
        for (dataset, network), rate in _WINNING_RATES.items()
    )


def _cell(
    dataset: str,
    network: str,
    per_class: int,
    learning_rate: float,
    weight_decay: float,
    width: float,
    size: int,
    *,
    epochs: int | None = None,
    seed: int = 0,
) -> Cell:
    batches = math.ceil(10 * per_class / 128)
    return {
        "dataset": dataset,
        "network": network,
        "per_class": per_class,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "label_smoothing": 0.0,
        "epochs": max(30, math.ceil(300 / batches)) if epochs is None else epochs,
        "width": width,
        "size": size,
        "seed": seed,
    }


def winners(trainings: pd.DataFrame) -> list[Cell]:
    """Return the cells whose learning rate has the least test error, ties to the smaller test loss.

    Args:
        trainings: A table of ``training_cell``; cells alike but for the learning rate compete.

    Raises:
        ValueError: If all learning rates of a competition diverged.

    Source: Papyan 2019, Section 5.1.
    """
    names = [*_cell("mnist", "vgg11", 10, 0.1, 0.0, 1.0, 32), "source"]
    names = [name for name in names if name in trainings]
    fixed = [name for name in names if name != "learning_rate"]
    chosen = []
    for key, rows in trainings.groupby(fixed, sort=False):
        finite = rows[~rows["diverged"]]
        if finite.empty:
            raise ValueError(f"every learning rate diverged for {dict(zip(fixed, key))}")
        best = finite.sort_values(["test_error", "test_loss"]).head(1).to_dict("records")[0]
        chosen.append(
            {name: getattr(best[name], "item", lambda v=best[name]: v)() for name in names}
        )
    return chosen


def paper_cells(
    image_sets: Sequence[str] = IMAGE_SETS,
    networks: Sequence[str] = CONVOLUTIONAL,
    sizes: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    width: float = 1.0,
    size: int = 32,
    epochs: int | None = None,
    weight_decay: float = 5e-4,
    source: str = "shipped",
) -> list[Cell]:
    """Return cells of the paper's own grid, by default all of it, at full width.

    Args:
        image_sets: Some of IMAGE_SETS.
        networks: Some of CONVOLUTIONAL.
        sizes: Images of each class; the paper's 20 if None.
        rates: Learning rates; the paper's 100 if None.
        seeds: Seeds of images, weights and batches.
        width: Factor of the channels.
        size: Height and width of the images.
        epochs: Passes over the images; the paper's 200, and 350 of CIFAR-10, if None.
        weight_decay: Multiple of theta in the gradient.
        source: Where the images come from, ``shipped`` or ``full``.

    Raises:
        ValueError: On an unknown name, a number out of range, or a sample size that the source
            does not have.

    Source: Papyan 2019, Eq. 29 and Section 5.1.

    Example:
        >>> len(paper_cells(source="full", sizes=[10, 13]))
        1800
    """
    for name in image_sets:
        checks.choice("dataset", name, IMAGE_SETS)
    for name in networks:
        checks.choice("network", name, CONVOLUTIONAL)
    checks.choice("source", source, tuple(LARGEST))
    sizes = sample_sizes() if sizes is None else sizes
    for name in image_sets:
        for per_class in sizes:
            checks.positive_integer("sizes", per_class)
            if per_class > LARGEST[source][name]:
                hint = "; --source full has more" if source == "shipped" else ""
                raise ValueError(
                    f"sizes has {per_class}, but a class of {name} ({source}) has "
                    f"{LARGEST[source][name]} images{hint}"
                )
    for rate in rates or ():
        checks.positive("rates", rate)
    for seed in seeds:
        if seed < 0:
            raise ValueError(f"seeds has {seed}, but whole numbers from 0 are needed")
    checks.positive("width", width)
    checks.nonnegative("weight_decay", weight_decay)
    if checks.positive_integer("size", size) not in (8, 16, 32):
        raise ValueError(f"size is {size}, but 8, 16 or 32 pixels are needed")
    cells = grid(
        dataset=dict.fromkeys(image_sets),
        network=dict.fromkeys(networks),
        per_class=dict.fromkeys(sizes),
        learning_rate=dict.fromkeys(learning_rates() if rates is None else rates),
        seed=dict.fromkeys(seeds),
    )
    fixed = {"weight_decay": weight_decay, "width": width, "size": size}
    return [
        {**_cell(**row, **fixed, epochs=_epochs(row["dataset"], epochs)), "source": source}
        for row in cells
    ]


def _epochs(image_set: str, epochs: int | None) -> int:
    if epochs is not None:
        return checks.positive_integer("epochs", epochs)
    return 350 if image_set == "cifar10" else 200
