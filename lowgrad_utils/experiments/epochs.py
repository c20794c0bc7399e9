"""Figure 5 of the second paper: group means organised by logit first, by class later, and why."""

import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import toy_levels
from lowgrad_utils.sweeps import grid
from lowgrad_utils.three_levels import ThreeLevels, three_levels

Cell = dict[str, Any]

#: Epochs that a cell measures; closer at first, where the fit happens.
EPOCHS = (0, 2, 3, 4, 6, 8, 11, 15, 22, 60)


# --- the closed-form toy --------------------------------------------------------------------------


def toy_organisation(classes: int, p: float, cosine: float) -> tuple[float, float]:
    """Return R^2 by class and by logit of the toy's group means, in closed form.

    With a = (1-p)/(C-1), N = (1-a)^2 + p^2 + (C-2) a^2 (a mean's squared length) and
    S = 1 - 2a + 2pa + (C-2) a^2 (the product of two means of one logit, features aside):
    grand mean's square g = p^2 (1-s) / (C-1); class p^2 C / (C-1), logit (N + (C-2) s S) / (C-1),
    both less g, over N - g.

    Args:
        classes: C, at least 3.
        p: Probability of the true class, above 0 up to 1.
        cosine: s, of the features of two classes, from 0 to 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> by_class, by_logit = toy_organisation(10, 1.0, 1.0)
        >>> round(by_class, 12) == round(by_logit, 12)
        True
    """
    length, same_logit = toy_levels.mean_products(classes, p)
    toy_levels.likeness(cosine)
    grand = p**2 * (1 - cosine) / (classes - 1)
    by_class = p**2 * classes / (classes - 1)
    by_logit = (length + (classes - 2) * cosine * same_logit) / (classes - 1)
    total = length - grand
    return (by_class - grand) / total, (by_logit - grand) / total


def toy_crossing(classes: int, cosine: float) -> float:
    """Return the p at which the toy is as much organised by class as by logit.

    It solves C p^2 = N + (C-2) s S, see ``toy_organisation``; 1 if s = 1, and p grows with s.

    Args:
        classes: C, at least 3.
        cosine: s, of the features of two classes, from 0 to 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> [round(toy_crossing(10, s), 2) for s in (0.0, 0.5, 0.75, 1.0)]
        [0.32, 0.74, 0.88, 1.0]
    """
    toy_levels.checked_classes(classes)
    toy_levels.likeness(cosine)

    def lead(p: float) -> float:
        length, same_logit = toy_levels.mean_products(classes, p)
        return classes * p**2 - length - (classes - 2) * cosine * same_logit

    # The logit leads at p = 1/C. At p = 1 the lead is (C-2)(1-s), zero only for equal features.
    low, high = 1 / classes, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lead(middle) < 0 else (low, middle)
    return high


# --- the pieces of a network that the toy has -----------------------------------------------------


def mean_jacobians(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Return the mean Jacobian of the logits over each class, C x C x P.

    Args:
        model: A classifier in evaluation mode.
        x: Inputs.
        labels: Their classes, each at least once.
    """
    parameters = list(model.parameters())
    rows = []
    for label in range(int(labels.max()) + 1):
        logits = model(x[labels == label]).mean(0)
        rows += [
            torch.cat([g.flatten() for g in torch.autograd.grad(z, parameters, retain_graph=True)])
            for z in logits
        ]
    return torch.stack(rows).unflatten(0, (-1, logits.shape[0]))


def mean_cotangents(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return v_{c,c'} = Ave_{i in c} sqrt(p_ic') (e_c' - p_i), C x C x C in float64.

    With the Jacobian alike for all examples of a class, delta_{c,c'} = J_c^T v_{c,c'}.

    Args:
        probabilities: n x C.
        labels: Classes of the n examples, each at least once.
    """
    p = probabilities.double()
    identity = torch.eye(p.shape[1], dtype=torch.float64)
    own = (p[labels == label] for label in range(p.shape[1]))
    return torch.stack([(q.T.sqrt()[:, :, None] * (identity[:, None] - q)).mean(1) for q in own])


def jacobian_gram(jacobians: Tensor) -> Tensor:
    """Return the inner products <J_{c,k}, J_{d,l}> of centred logits, C x C x C x C in float64.

    Centred over the logits, since e_c' - p sums to zero and never sees their mean.

    Args:
        jacobians: Mean Jacobians of the classes, C x C x P.
    """
    rows = (jacobians - jacobians.mean(1, keepdim=True)).double()
    flat = rows.flatten(0, 1)
    classes = len(rows)
    return (flat @ flat.T).reshape(classes, classes, classes, classes)


def assembled(cotangents: Tensor, gram: Tensor) -> ThreeLevels:
    """Return the levels of the group means J_c^T v_{c,c'}.

    Args:
        cotangents: v_{c,c'}, C x C x C.
        gram: See ``jacobian_gram``.
    """
    classes = len(cotangents)
    products = torch.einsum("cak,ckdl,dbl->cadb", cotangents, gram, cotangents)
    ones = torch.ones(classes, dtype=torch.int64)
    return ThreeLevels(products.reshape(classes**2, classes**2), ones)


def pieces(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what ``assembled`` takes: the mean cotangents v_{c,c'} and the Jacobians' Gram.

    Args:
        model: A classifier in evaluation mode.
        data: Images and labels.
    """
    x, labels = data
    with torch.no_grad():
        p = model(x).softmax(1)
    return mean_cotangents(p, labels), jacobian_gram(mean_jacobians(model, x, labels))


def product_gram(gram: Tensor) -> Tensor:
    """Return the Gram matrix of the toy nearest to a network's: a feature for each class.

    <J_{c,k}, J_{d,l}> = (delta_kl - 1/C) H_cd, with H_cd = sum_k <J_{c,k}, J_{d,k}> / (C - 1).

    Args:
        gram: See ``jacobian_gram``.
    """
    classes = len(gram)
    centring = torch.eye(classes, dtype=gram.dtype) - 1 / classes
    products = torch.einsum("ckdk->cd", gram) / (classes - 1)
    return torch.einsum("cd,kl->ckdl", products, centring)


def class_cosine(gram: Tensor) -> float:
    """Return the mean cosine of two classes' Jacobians, the toy's s.

    Of tr <J_c, J_d> over the logits, between -1 and 1.

    Args:
        gram: See ``jacobian_gram``.
    """
    products = torch.einsum("ckdk->cd", gram)
    lengths = products.diagonal().sqrt()
    cosines = products / lengths / lengths[:, None]
    classes = len(cosines)
    return float((cosines.sum() - classes) / (classes * (classes - 1)))


def weighted_probability(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean of p_c as the group means weigh the examples, by sqrt(p_ic').

    Ave_{c' != c} of sum_i sqrt(p_ic') p_ic / sum_i sqrt(p_ic'): below the plain mean of p_c, as
    the doubtful examples have the large derivatives.

    Args:
        probabilities: n x C.
        labels: Classes of the n examples.
    """
    p = probabilities.double()
    classes = p.shape[1]
    shares = []
    for label in range(classes):
        own = p[labels == label]
        weights = own.sqrt()
        along = (weights * own[:, [label]]).sum(0) / weights.sum(0)
        shares.append((along.sum() - along[label]) / (classes - 1))
    return float(torch.stack(shares).mean())


class Heated(nn.Module):
    """A classifier whose logits are divided by a temperature: z / T, the same parameters.

    Args:
        model: The classifier.
        temperature: T > 0. Above 1 the probabilities are more even.
    """

    def __init__(self, model: nn.Module, temperature: float):
        super().__init__()
        self.model, self.temperature = model, checks.positive("temperature", temperature)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, n x C."""
        return self.model(x) / self.temperature


def temperature_for(logits: Tensor, labels: Tensor, p: float) -> float:
    """Return the temperature at which the mean probability of the true class is p.

    Args:
        logits: n x C.
        labels: Classes of the n examples.
        p: Between 1/C and the share classified correctly.

    Raises:
        ValueError: If no temperature between 1e-3 and 1e3 gives it.
    """
    logits, low, high = logits.double(), math.log(1e-3), math.log(1e3)

    def reached(log_temperature: float) -> float:
        shares = (logits / math.exp(log_temperature)).softmax(1)
        return float(shares[torch.arange(len(labels)), labels].mean())

    if not reached(high) <= p <= reached(low):
        raise ValueError(
            f"p is {p:g}, but temperatures give {reached(high):.3f} to {reached(low):.3f}"
        )
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > p else (low, middle)
    return math.exp(low)


# --- a training, epoch by epoch -------------------------------------------------------------------


def checkpoints(
    dataset: str,
    network: str,
    *,
    per_class: int = 30,
    size: int = 16,
    width: float = 1 / 16,
    epochs: Iterable[int] = EPOCHS,
    learning_rate: float = 0.05,
    shuffled: bool = False,
    seed: int = 0,
) -> Iterator[tuple[int, nn.Module, tuple[Tensor, Tensor]]]:
    """Train a network and yield epoch, network in evaluation mode, and its images and labels.

    Batches of 64, weight decay 5e-4, the learning rate falls at one and two thirds.

    Args:
        dataset: ``mnist``, ``fashion_mnist`` or ``cifar10``.
        network: A name of ``classifiers.NETWORKS``.
        per_class: Images of each class.
        size: Height and width of the images.
        width: Factor of the channels.
        epochs: The epochs wanted; the last one ends the training.
        learning_rate: At the beginning.
        shuffled: Hand out the labels at random before training.
        seed: Chooses images, weights and batches.
    """
    x, labels = datasets.load(dataset).images(per_class=per_class, size=size, seed=seed)
    if shuffled:
        order = torch.randperm(len(labels), generator=checks.random_stream(seed, "shuffled"))
        labels = labels[order]
    model = classifiers.build(network, channels=x.shape[1], width=width, size=size, seed=seed)
    wanted = sorted(epochs)
    with tempfile.TemporaryDirectory() as folder:
        classifiers.fit(
            model,
            x,
            labels,
            epochs=wanted[-1],
            lr=learning_rate,
            batch_size=64,
            seed=seed,
            checkpoints=folder,
            keep=wanted,
            progress=False,
        )
        for epoch in wanted:
            state, _ = classifiers.load_checkpoint(Path(folder, f"epoch-{epoch:04d}.pt"))
            model.load_state_dict(state)
            yield epoch, model.eval(), (x, labels)


def epoch_numbers(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return how the group means of a network are organised, and the toy's account of it.

    - ``probability``, ``weighted``: mean p_c, and ``weighted_probability``; ``accuracy``.
    - ``class``, ``logit``: ``ThreeLevels.organisation``, measured.
    - ``own_class``, ``own_logit``: the same of J_c^T v_{c,c'}, from the classes' mean Jacobians.
    - ``product_class``, ``product_logit``: the same with ``product_gram``, as if J_c = I (x) h_c.
    - ``cosine``: ``class_cosine``; ``features``: mean cosine of two classes' mean features.
    - ``toy_class``, ``toy_logit``, ``crossing``: ``toy_organisation`` at ``weighted`` and
      ``cosine``, and ``toy_crossing``.
    - ``means_share``: mean over the 3 leading eigenvectors u of G_{1+2} of
      u^T G_{1+2} u / u^T G u; ``centre_share``: median of the eigenvalues' ratios G1 / G_{1+2}.
    - ``evenness``: median over c' != c of (E sqrt(p_ic'))^2 / E p_ic' within groups.
    - ``own_length``, ``other_length``: mean of |delta_{c,c}|, and of |delta_{c,c'}|.

    Args:
        model: A classifier in evaluation mode, of ``classifiers``.
        data: Images and labels.
    """
    curvature = LossCurvature(model, data, memory=4)
    levels = three_levels(curvature)
    p, labels, c = curvature.probabilities.double(), curvature.labels, curvature.classes
    gram = jacobian_gram(mean_jacobians(model, *data))
    cosine, weighted = class_cosine(gram), weighted_probability(p, labels)
    measured, cotangents = levels.organisation(), mean_cotangents(p, labels)
    own = assembled(cotangents, gram).organisation()
    product = assembled(cotangents, product_gram(gram)).organisation()
    toy = toy_organisation(c, weighted, min(max(cosine, 0.0), 1.0))
    leading = levels.eigenvectors("G1+2", 3)
    second = curvature.derivatives_along(leading.T).double().square().sum((1, 2)) / curvature.n
    values = levels.eigenvalues("G1+2")
    off = ~torch.eye(c, dtype=torch.bool)
    groups = [p[labels == label] for label in range(c)]
    even = torch.stack([q.sqrt().mean(0) ** 2 / q.mean(0) for q in groups])
    return {
        "probability": float(p[torch.arange(len(p)), labels].mean()),
        "weighted": weighted,
        "accuracy": float((p.argmax(1) == labels).double().mean()),
        "class": measured[0],
        "logit": measured[1],
        "own_class": own[0],
        "own_logit": own[1],
        "product_class": product[0],
        "product_logit": product[1],
        "cosine": cosine,
        "features": _feature_cosine(model, data),
        "toy_class": toy[0],
        "toy_logit": toy[1],
        "crossing": toy_crossing(c, min(max(cosine, 0.0), 1.0)),
        "means_share": float((values[:3] / second).mean()),
        "centre_share": float((levels.eigenvalues("G1") / values)[: c - 1].median()),
        "evenness": float(even[off].median()),
        "own_length": float(levels.lengths.diagonal().mean()),
        "other_length": float(levels.lengths[off].mean()),
    }


def _feature_cosine(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the mean cosine of two classes' mean features, with the 1 that the bias sees."""
    x, labels = data
    with torch.no_grad():
        features = model.layers[:-1](x).double()
    features = torch.cat([features, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    means = torch.stack([features[labels == c].mean(0) for c in range(int(labels.max()) + 1)])
    unit = means / means.norm(dim=1, keepdim=True)
    return float(((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1)))


def epoch_cell(**cell: Any) -> dict[str, float]:
    """Train one network and return ``epoch_numbers`` by epoch, names ending in ``_<epoch>``.

    Besides: ``late_p_class``, ``late_p_logit``, the organisation of J_c^T v_{c,c'} with v of the
    last and J of the first epoch, and ``late_features_...`` the other way round.
    ``permuted_class``, ``permuted_logit``: of the last epoch, by classes handed out at random.

    Args:
        **cell: Arguments of ``checkpoints``.
    """
    numbers, found = {}, []
    for epoch, model, data in checkpoints(**cell):
        values = epoch_numbers(model, data)
        numbers |= {f"{name}_{epoch}": value for name, value in values.items()}
        if epoch in (EPOCHS[0], EPOCHS[-1]):
            found.append(pieces(model, data))
    (early, early_gram), (late, late_gram) = found
    for name, levels in {
        "late_p": assembled(late, early_gram),
        "late_features": assembled(early, late_gram),
    }.items():
        by_class, by_logit = levels.organisation()
        numbers |= {f"{name}_class": by_class, f"{name}_logit": by_logit}
    x, labels = data
    order = torch.randperm(len(labels), generator=checks.random_stream(cell["seed"], "permuted"))
    permuted = three_levels(LossCurvature(model, (x, labels[order]), memory=4)).organisation()
    return numbers | {"permuted_class": permuted[0], "permuted_logit": permuted[1]}


def epoch_cells() -> tuple[Cell, ...]:
    """Return the cells of the stored grid, cheapest first."""
    sets = ["mnist", "fashion_mnist", "cifar10"]
    plain = {"learning_rate": 0.05, "shuffled": False}
    cells = grid(dataset=sets, network=["mlp"], seed=range(4))
    # Without batch norm it takes a larger rate to fit within these epochs.
    cells = [{**cell, **plain, "learning_rate": 0.1} for cell in cells]
    cells += [{**cell, **plain} for cell in grid(dataset=sets, network=["vgg11"], seed=range(3))]
    cells += [
        {**cell, **plain, "shuffled": True}
        for cell in grid(dataset=["mnist", "cifar10"], network=["vgg11"], seed=[0])
    ]
    cells += [
        {**cell, "shuffled": False}
        for cell in grid(dataset=["mnist"], network=["vgg11"], seed=[0], learning_rate=[0.01, 0.2])
    ]
    cells += [{**cell, **plain} for cell in grid(dataset=sets, network=["resnet18"], seed=range(3))]
    return tuple(cells)


def by_epoch(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the stored grid with one row an epoch.

    Args:
        frame: One row a training, columns as ``epoch_cell`` names them.
    """
    parameters = list(epoch_cells()[0])
    names = [c.removesuffix("_0") for c in frame.columns if c.endswith("_0")]
    parts = []
    for epoch in EPOCHS:
        part = frame[parameters + [f"{name}_{epoch}" for name in names]]
        part = part.set_axis([*parameters, *names], axis=1)
        parts.append(part.assign(epoch=epoch))
    return pd.concat(parts, ignore_index=True)


def crossing(
    rows: pd.DataFrame, left: str = "class", right: str = "logit", along: str = "probability"
) -> float:
    """Return where one share exceeds another for good, linear between epochs.

    Args:
        rows: One training, one row an epoch, in their order.
        left: Column of the share that ends up larger.
        right: Column of the other one.
        along: Column in which the place is given.

    Returns:
        NaN if ``left`` is not larger at the end, or never was smaller.

    Example:
        >>> rows = {"class": [0.0, 0.4, 0.8], "logit": [0.6, 0.6, 0.2], "epoch": [0, 1, 2]}
        >>> round(crossing(pd.DataFrame(rows), along="epoch"), 2)
        1.25
    """
    lead = (rows[left] - rows[right]).to_numpy()
    behind = [k for k, value in enumerate(lead) if value <= 0]
    if lead[-1] <= 0 or not behind:
        return math.nan
    k, x = behind[-1], rows[along].to_numpy()
    return float(x[k] + (x[k + 1] - x[k]) * lead[k] / (lead[k] - lead[k + 1]))
