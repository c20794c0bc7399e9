"""Classifiers small enough for explicit matrices, and what their curvature is compared with.

Everything here is made by plain reverse-mode differentiation, one example and one logit at a time,
so that it shares no step with ``curvature``.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.curvature import LossCurvature

#: Width factors at which the networks have 1200 to 8500 parameters for images of 8 x 8.
WIDTHS = {"mlp": 1 / 16, "vgg11": 1 / 64, "resnet18": 1 / 64, "densenet40": 1 / 12}


@dataclass(frozen=True, eq=False)
class SmallClassifier:
    """A network in evaluation mode, float64, with its examples sorted by class.

    Attributes:
        model: The network.
        x: Images, n x channels x 8 x 8.
        labels: Sorted labels (n).
    """

    model: nn.Module
    x: Tensor
    labels: Tensor

    def curvature(self) -> LossCurvature:
        """Return the curvature of the loss on these examples."""
        return LossCurvature(self.model, (self.x, self.labels))

    @property
    def parameters(self) -> list[Tensor]:
        """The network's parameters, in their order."""
        return list(self.model.parameters())


def unequal_images(
    dataset: str, counts: Sequence[int], *, seed: int | torch.Generator = 0
) -> tuple[Tensor, Tensor]:
    """Return images of 8 x 8 in float64, so many of each class, sorted by class, and their labels.

    Args:
        dataset: A name that ``datasets.load`` knows.
        counts: Number of images of each class; classes beyond the last are left out.
        seed: Seed of the choice.

    Example:
        >>> x, labels = unequal_images("mnist", (2, 3, 5))
        >>> x.shape, labels.bincount().tolist()
        (torch.Size([10, 1, 8, 8]), [2, 3, 5])
    """
    counts = [checks.positive_integer("a number of counts", count) for count in counts]
    data = datasets.load(dataset)
    x, y = data.images(per_class=max(counts), size=8, seed=seed, dtype=torch.float64)
    rows = [torch.nonzero(y == label)[:count, 0] for label, count in enumerate(counts)]
    rows = torch.cat(rows)
    return x[rows], y[rows]


def small_classifier(
    network: str,
    dataset: str,
    counts: Sequence[int] = (2, 3, 5, 6),
    *,
    epochs: int = 20,
    width: float | None = None,
    seed: int = 0,
) -> SmallClassifier:
    """Return a narrow network trained for a few epochs on a few images.

    Args:
        network: A name that ``classifiers.build`` knows.
        dataset: A name that ``datasets.load`` knows.
        counts: Number of images of each class.
        epochs: Passes over the images, at learning rate 0.05 for ``mlp`` and 0.01 for others, which
            with one to eight channels may diverge at 0.05; 0 leaves the initial weights.
        width: Factor of the channels, by default that of ``WIDTHS``.
        seed: Of images, weights and batches.

    Example:
        >>> case = small_classifier("mlp", "mnist", epochs=0)
        >>> case.curvature()
        LossCurvature(16 examples of 4 classes, 1212 parameters)
    """
    stages = training_stages(
        network,
        dataset,
        [epochs],
        counts=counts,
        width=width,
        learning_rate=0.05 if network == "mlp" else 0.01,
        seed=seed,
    )
    return next(stages)


def training_stages(
    network: str,
    dataset: str,
    epochs: Iterable[int],
    *,
    counts: Sequence[int] = (2, 3, 5, 6),
    width: float | None = None,
    learning_rate: float = 0.05,
    seed: int = 0,
) -> Iterator[SmallClassifier]:
    """Yield a network after each of these numbers of epochs, at a constant learning rate.

    Batch norms have the statistics of the training images.

    Args:
        network: A name that ``classifiers.build`` knows.
        dataset: A name that ``datasets.load`` knows.
        epochs: Rising numbers of epochs, 0 for the initial weights.
        counts: Number of images of each class.
        width: Factor of the channels, by default that of ``WIDTHS``.
        learning_rate: Of the training, without weight decay.
        seed: Of images, weights and batches.

    Raises:
        ValueError: If the numbers of epochs do not rise.
    """
    x, labels = unequal_images(dataset, counts, seed=seed)
    model = classifiers.build(
        network,
        channels=x.shape[1],
        classes=len(counts),
        width=WIDTHS[network] if width is None else width,
        size=8,
        seed=seed,
        dtype=torch.float64,
    ).eval()
    batches = checks.random_stream(seed, "stages")
    done = 0
    for epoch in epochs:
        if epoch < done:
            raise ValueError(f"epochs has {epoch} after {done}, but rising numbers are needed")
        if epoch > done:
            classifiers.fit(
                model,
                x,
                labels,
                epochs=epoch - done,
                lr=learning_rate,
                weight_decay=0.0,
                batch_size=min(32, max(2, len(x) // 2)),
                milestones=(),
                seed=batches,
                progress=False,
            )
        done = epoch
        yield SmallClassifier(_with_own_statistics(model, x), x, labels)


def _with_own_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy in evaluation mode whose batch norms have the statistics of these images.

    Running averages lag behind weights that change fast. With one to eight channels they can be
    off so far that all probabilities are 0 or 1, and G is zero.
    """
    own = copy.deepcopy(model).train()
    for layer in own.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # a plain average over the one batch that follows
    with torch.no_grad():
        own(x)
    return own.eval()


# --- derivatives made one at a time -------------------------------------------------------------


def jacobian(case: SmallClassifier) -> Tensor:
    """Return dz_{i,k}/dtheta, n x C x P, by one backward pass for each example and logit."""
    rows = []
    for image in case.x:
        logits = case.model(image[None])[0]
        rows.append(torch.stack([_gradient(logit, case.parameters) for logit in logits]))
    return torch.stack(rows)


def loss_gradients(case: SmallClassifier, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the gradient of each example's cross-entropy with these labels, n x P.

    Args:
        case: The network with its examples.
        labels: A label for each example (n); need not be the true ones.
        smoothing: Share of each label given to all classes alike.
    """
    rows = []
    for image, label in zip(case.x, labels):
        loss = nn.functional.cross_entropy(
            case.model(image[None]), label[None], label_smoothing=smoothing
        )
        rows.append(_gradient(loss, case.parameters))
    return torch.stack(rows)


def logit_curvature(logits: Tensor, labels: Tensor) -> Tensor:
    """Return d^2 loss / dz^2 of each example by automatic differentiation, n x C x C.

    Args:
        logits: n x C.
        labels: n.

    Example:
        >>> z = torch.zeros(1, 2, dtype=torch.float64)
        >>> logit_curvature(z, torch.tensor([0]))[0].tolist()
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    hessian = torch.func.hessian(nn.functional.cross_entropy)
    return torch.stack([hessian(z, label) for z, label in zip(logits.detach(), labels)])


def loss_hessian(case: SmallClassifier, directions: Tensor) -> Tensor:
    """Return H V, P x K, the Hessian of the mean cross-entropy by two backward passes.

    Args:
        case: The network with its examples.
        directions: V, P x K.
    """
    loss = nn.functional.cross_entropy(case.model(case.x), case.labels)
    return _second_derivative(loss, case.parameters, directions)


def logit_hessians(case: SmallClassifier, directions: Tensor) -> Tensor:
    """Return R V, R = (1/n) sum_{i,k} (p_i - y_i)_k d^2 z_{i,k}/dtheta^2, what H has beside G.

    R is the Hessian of (1/n) sum_i <r_i, z_i(theta)> with the residues r = p - y held constant.

    Args:
        case: The network with its examples.
        directions: V, P x K.
    """
    logits = case.model(case.x)
    residues = logits.detach().softmax(1)
    residues[torch.arange(len(case.x)), case.labels] -= 1
    return _second_derivative((residues * logits).sum() / len(case.x), case.parameters, directions)


def _gradient(value: Tensor, parameters: list[Tensor]) -> Tensor:
    # A parameter that enters linearly has no second derivative: zeros, not an error.
    pieces = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([piece.flatten() for piece in pieces])


def _second_derivative(value: Tensor, parameters: list[Tensor], directions: Tensor) -> Tensor:
    pieces = torch.autograd.grad(value, parameters, create_graph=True)
    gradient = torch.cat([piece.flatten() for piece in pieces])
    return torch.stack([_gradient(gradient @ v, parameters) for v in directions.T], 1)


def directions(size: int, count: int, *, seed: int | torch.Generator = 0) -> Tensor:
    """Return orthonormal random directions, size x count, through which matrices are compared.

    Two symmetric matrices A, B that differ have Q^T A Q != Q^T B Q with probability one.

    Args:
        size: P.
        count: How many; all of space if it is larger than P.
        seed: Seed of the directions.
    """
    stream = checks.random_stream(seed, "directions")
    draw = torch.randn(size, min(count, size), generator=stream, dtype=torch.float64)
    return torch.linalg.qr(draw)[0]


def layer_directions(
    case: SmallClassifier, count: int, *, seed: int | torch.Generator = 0
) -> Tensor:
    """Return random unit directions, each within one parameter tensor, P x at most ``count``.

    Args:
        case: The network; its tensors are taken at even steps.
        count: How many at most.
        seed: Seed of the directions.
    """
    stream = checks.random_stream(seed, "layers")
    sizes = [parameter.numel() for parameter in case.parameters]
    step = -(-len(sizes) // checks.positive_integer("count", count))
    columns = []
    for chosen in range(0, len(sizes), step):
        column = torch.zeros(sum(sizes), dtype=torch.float64)
        part = torch.randn(sizes[chosen], generator=stream, dtype=torch.float64)
        start = sum(sizes[:chosen])
        column[start : start + sizes[chosen]] = part / part.norm()
        columns.append(column)
    return torch.stack(columns, 1)


def smoothed(case: SmallClassifier) -> SmallClassifier:
    """Return the network with tanh in place of each ReLU layer, at the same weights.

    Args:
        case: A network whose ReLUs are layers, such as ``mlp`` or ``vgg11``.
    """
    model = copy.deepcopy(case.model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.ReLU):
                setattr(parent, name, nn.Tanh())
    return SmallClassifier(model.eval(), case.x, case.labels)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| in Frobenius norm."""
    return float((found - expected).norm() / expected.norm())
