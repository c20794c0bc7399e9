"""Image classifiers of Papyan's Hessian measurements: networks, training, checkpoints."""

import hashlib
import io
import json
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from lowgrad_utils import checks, files
from lowgrad_utils.training import DivergenceError

#: The networks that ``build`` knows. Parameters at width 1, 3 x 32 x 32, ten classes: ``vgg11``
#: 9,231,114, ``resnet18`` 11,173,962, ``densenet40`` 1,019,722.
NETWORKS = ("mlp", "vgg11", "resnet18", "densenet40")

# Channels of VGG11's convolutions; "M" halves the image.
_VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
_STORED_EVERY_SECONDS = 5.0


class CheckpointError(ValueError):
    """A stored network or training that is missing, damaged, or belongs to something else."""


# --- networks -----------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network from images to logits: ``layers``, the last of which is linear.

    ``layers[:-1]`` computes the features that the last one classifies.

    Attributes:
        name: One of ``NETWORKS``.
        channels: Channels of an image.
        size: Height and width of an image in pixels.
        classes: Number of logits.
        layers: What the network computes, in order.
    """

    def __init__(self, name: str, channels: int, size: int, classes: int, layers: nn.Sequential):
        super().__init__()
        self.name, self.channels, self.size, self.classes = name, channels, size, classes
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, N x classes.

        Args:
            x: Images, N x channels x size x size.

        Raises:
            ValueError: If they have another shape.
        """
        wanted = (self.channels, self.size, self.size)
        if x.ndim != 4 or x.shape[1:] != wanted:
            shown = " x ".join(map(str, wanted))
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but {self.name} needs N x {shown}; build it for "
                "these images, or give the images another size"
            )
        return self.layers(x)


class _Residual(nn.Module):
    """ReLU(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Dense(nn.Module):
    """The channels of x, then those of body(x)."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class _Mean(nn.Module):
    """The mean of each channel over the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def build(
    name: str,
    *,
    channels: int = 3,
    classes: int = 10,
    width: float = 1.0,
    size: int = 32,
    hidden: Sequence[int] = (),
    seed: int | torch.Generator = 0,
    dtype: torch.dtype = torch.float32,
) -> Classifier:
    """Return a classifier at initialisation, in training mode.

    - ``mlp``: linear layers with ReLU, by default two hidden ones of 256 and 128.
    - ``vgg11``: configuration A with batch norm, one linear layer at the end.
    - ``resnet18``: of CIFAR kind, 3 x 3 stem, four stages of two basic blocks, 1 x 1
      convolutions where the shape changes.
    - ``densenet40``: three blocks of 12 basic layers, growth 12, no bottleneck, no compression.

    None has dropout. Weights are torch's default ones (uniform, fan-in), drawn without touching
    the global generator; float32 and float64 start at the same weights. Images of 28 x 28 are
    padded to 32 x 32 with zeros, so that both sizes have the same parameters.

    Args:
        name: One of ``NETWORKS``.
        channels: Channels of an image.
        classes: Number of classes.
        width: Multiplies the number of channels (of ``densenet40``: the growth rate and the
            stem's channels; of ``mlp``: the hidden layers), rounded, at least 1.
        size: Height and width of an image: 28, or a multiple of 8. Published are 28 and 32.
        hidden: Sizes of the hidden layers of ``mlp`` at width 1, by default 256 and 128.
        seed: Seed, or generator, of the weights.
        dtype: float32 or float64.

    Raises:
        ValueError: On an unknown name, or a number out of range.
        TypeError: If ``dtype`` is another one, or a number is none.

    Source: Papyan 2019, Section 5.1; Simonyan and Zisserman, Very Deep Convolutional Networks;
        He et al., Deep Residual Learning; Huang et al., Densely Connected Convolutional Networks.

    Example:
        >>> network = build("vgg11", channels=1, width=1 / 8, size=28)
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    checks.choice("name", name, NETWORKS)
    channels = checks.positive_integer("channels", channels)
    classes = checks.positive_integer("classes", classes)
    if classes < 2:
        raise ValueError(f"classes is {classes}, but at least 2 are needed")
    size = checks.positive_integer("size", size)
    if size != 28 and size % 8:
        raise ValueError(f"size is {size}, but 28 or a multiple of 8 is needed; pad the images")
    if hidden and name != "mlp":
        raise ValueError(f'hidden is {hidden!r}, but only "mlp" has hidden layers to choose')
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype is {dtype}, but torch.float32 or torch.float64 is needed")
    width = checks.positive("width", width)
    hidden = [checks.positive_integer("a size of hidden", h) for h in hidden or (256, 128)]

    def scaled(count: int) -> int:
        return max(1, round(width * count))

    padding = [nn.ZeroPad2d(2)] if size == 28 else []
    side = 32 if size == 28 else size
    draw = int(torch.randint(2**63 - 1, (), generator=checks.random_stream(seed, "classifier")))
    # torch's initialisers draw from the global generator: fork it, so that nobody notices.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw)
        if name == "mlp":
            body, features = _mlp(channels * side**2, [scaled(count) for count in hidden])
        elif name == "vgg11":
            body, features = _vgg11(channels, side, scaled)
        elif name == "resnet18":
            body, features = _resnet18(channels, scaled)
        else:
            body, features = _densenet40(channels, scaled)
        layers = nn.Sequential(*padding, *body, nn.Linear(features, classes))
    return Classifier(name, channels, size, classes, layers).to(dtype)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a network.

    Args:
        model: Any module.

    Example:
        >>> count_parameters(build("densenet40"))
        1019722
    """
    return sum(parameter.numel() for parameter in model.parameters())


Scaled = Callable[[int], int]


def _mlp(inputs: int, hidden: list[int]) -> tuple[list[nn.Module], int]:
    layers = [nn.Flatten()]
    for before, after in zip([inputs, *hidden], hidden):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers, hidden[-1]


def _vgg11(channels: int, side: int, scaled: Scaled) -> tuple[list[nn.Module], int]:
    layers = []
    for step in _VGG11:
        if step != "M":
            after = scaled(step)
            layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            channels = after
        elif side > 1:
            # Five poolings bring 32 pixels down to one, but 16 pixels are one after four: there
            # the last pooling would leave nothing, and is left out.
            layers.append(nn.MaxPool2d(2))
            side //= 2
    return [*layers, _Mean()], channels


def _convolution(before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, which batch norm would subtract again."""
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)


def _resnet18(channels: int, scaled: Scaled) -> tuple[list[nn.Module], int]:
    before = scaled(64)
    layers = [_convolution(channels, before, 3), nn.BatchNorm2d(before), nn.ReLU()]
    for stage, count in enumerate((64, 128, 256, 512)):
        after = scaled(count)
        layers += [_basic_block(before, after, stride=2 if stage else 1)]
        layers += [_basic_block(after, after, stride=1)]
        before = after
    return [*layers, _Mean()], before


def _basic_block(before: int, after: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        *(_convolution(before, after, 3, stride), nn.BatchNorm2d(after), nn.ReLU()),
        *(_convolution(after, after, 3), nn.BatchNorm2d(after)),
    )
    if stride == 1 and before == after:
        return _Residual(body, nn.Identity())
    projection = nn.Sequential(_convolution(before, after, 1, stride), nn.BatchNorm2d(after))
    return _Residual(body, projection)


def _densenet40(channels: int, scaled: Scaled) -> tuple[list[nn.Module], int]:
    # A stem of 16 channels as in the networks without bottleneck, not of twice the growth.
    growth, count = scaled(12), scaled(16)
    layers = [_convolution(channels, count, 3)]
    for block in range(3):
        if block:
            layers += [nn.BatchNorm2d(count), nn.ReLU(), _convolution(count, count, 1)]
            layers += [nn.AvgPool2d(2)]
        for _ in range(12):
            body = [nn.BatchNorm2d(count), nn.ReLU(), _convolution(count, growth, 3)]
            layers.append(_Dense(nn.Sequential(*body)))
            count += growth
    return [*layers, nn.BatchNorm2d(count), nn.ReLU(), _Mean()], count


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingLog:
    """What ``fit`` saw, one entry an epoch.

    Attributes:
        steps: Number of steps taken by the end of the epoch.
        loss: Mean of the training loss over the epoch's examples, each as its batch came by.
        accuracy: Share of the examples classified correctly, each as its batch came by.
        lr: Learning rate at the epoch's first step.
    """

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    lr: tuple[float, ...]

    def frame(self) -> pd.DataFrame:
        """Return the log as a table, one row an epoch; ``epoch`` counts from 1."""
        columns = {name: list(getattr(self, name)) for name in ("steps", "loss", "accuracy", "lr")}
        return pd.DataFrame({"epoch": range(1, len(self.steps) + 1), **columns})


@dataclass(frozen=True)
class Evaluation:
    """How a network does on a set of images.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: Share of the examples classified correctly.
        error: 1 - accuracy.
        mean_probability: Mean of p_c, the probability given to the true class.
    """

    loss: float
    accuracy: float
    error: float
    mean_probability: float


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    label_smoothing: float = 0.0,
    batch_size: int = 128,
    milestones: Sequence[float] = (1 / 3, 2 / 3),
    factor: float = 0.1,
    seed: int | torch.Generator = 0,
    checkpoints: str | Path | None = None,
    keep: Iterable[int] = (),
    progress: bool = True,
) -> TrainingLog:
    """Train a network in place by stochastic gradient descent, and leave it in eval mode.

    v <- momentum v + (grad + weight_decay theta), theta <- theta - lr v, on the mean cross-entropy
    of each batch. Examples are shuffled anew each epoch; the last batch may be smaller, but one
    of a single example, on which batch norm fails, joins the one before. Defaults are the paper's.

    With ``checkpoints`` a later call with the same arguments, the network at initialisation among
    them, takes up where this one ended, however it ended, and gives the same bits (``latest.pt``
    is written every few seconds, at the end of an epoch). Epochs in ``keep`` are stored there as
    ``epoch-0012.pt``, for ``load_checkpoint``.

    Args:
        model: The network, from images to logits.
        x: Images, the first dimension over the N examples, of the dtype of the network.
        y: Labels 0 to C - 1, integers, length N.
        epochs: Number of passes over the examples; the learning rate changes between them.
        steps: Number of steps, instead of ``epochs``; the learning rate changes between them.
        lr: Learning rate at the beginning.
        momentum: From 0 to below 1.
        weight_decay: Multiple of theta added to the gradient, for all parameters.
        label_smoothing: Share of each label given to all classes alike, from 0 to below 1.
        batch_size: Examples a step.
        milestones: Shares of the training at which the learning rate is multiplied by ``factor``.
        factor: See ``milestones``.
        seed: Seed, or generator, of the shuffling.
        checkpoints: Folder to resume from and to store in, one for each training.
        keep: Epochs to store, 0 is initialisation; needs ``checkpoints``.
        progress: Show a bar with the time left (never while the book is built).

    Raises:
        TypeError: If x, y or a number is of the wrong type.
        ValueError: If x and y do not fit each other or the network, or a number is out of range.
        DivergenceError: If the loss or a weight is no longer finite; stored epochs stay.
        CheckpointError: If ``checkpoints`` belongs to other arguments, or is damaged.

    Source: Papyan 2019, the training of its networks.

    Example:
        >>> from lowgrad_utils.datasets import load
        >>> x, y = load("mnist").images(per_class=10, size=8)
        >>> network = build("mlp", channels=1, size=8)
        >>> log = fit(network, x, y, epochs=20, progress=False)
        >>> log.loss[-1] < log.loss[0], network.training
        (True, False)
    """
    settings = _checked_settings(
        epochs, steps, lr, momentum, weight_decay, label_smoothing, batch_size, milestones, factor
    )
    _check_examples(model, x, y)
    _check_batches(model, len(x), settings["batch_size"])
    generator = checks.random_stream(seed, "batches")
    run = _Run(model, x, y, settings, generator)
    wanted = _kept(keep, run.epochs, checkpoints)
    store = None
    if checkpoints is not None:
        store = _Store(Path(checkpoints), run, wanted)
    hidden = not progress or os.environ.get("LOWGRAD_BOOK") == "1"
    try:
        with tqdm(total=run.steps, initial=run.done, unit="step", disable=hidden) as bar:
            while run.done < run.steps:
                run.epoch(bar)
                if store is not None:
                    store.write(run)
    finally:
        model.eval()
    return TrainingLog(*(tuple(column) for column in zip(*run.rows)))


def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = 500) -> Evaluation:
    """Return loss, accuracy and mean probability of the true class, in eval mode.

    Each module is left in the mode it was in.

    Args:
        model: The network, from images to logits.
        x: Images, the first dimension over the N examples.
        y: Labels 0 to C - 1, integers, length N.
        batch_size: Examples at a time, which changes the memory needed and nothing else.

    Raises:
        TypeError: If x or y is of the wrong type.
        ValueError: If x and y do not fit each other or the network.

    Example:
        >>> network = build("mlp", channels=1, size=8)
        >>> x = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> result = evaluate(network, x, torch.arange(50) % 10)
        >>> 0.05 < result.mean_probability < 0.2
        True
    """
    batch_size = checks.positive_integer("batch_size", batch_size)
    _check_examples(model, x, y)
    loss = correct = probability = 0.0
    with _eval_mode(model), torch.no_grad():
        for images, labels in zip(x.split(batch_size), y.long().split(batch_size)):
            logits = model(_channels_last(images)).double()
            losses = F.cross_entropy(logits, labels, reduction="none")
            loss += float(losses.sum())
            probability += float(torch.exp(-losses).sum())
            correct += int((logits.argmax(1) == labels).sum())
    n = len(x)
    return Evaluation(loss / n, correct / n, 1 - correct / n, probability / n)


class _Run:
    """A training, epoch by epoch."""

    def __init__(self, model, x, y, settings, generator):
        self.model, self.x, self.y = model, x, y.long()
        self.settings, self.generator = settings, generator
        self.sizes = _batch_sizes(len(x), settings["batch_size"])
        if settings["steps"] is None:
            self.epochs = settings["epochs"]
            self.steps = self.epochs * len(self.sizes)
        else:
            self.steps = settings["steps"]
            self.epochs = math.ceil(self.steps / len(self.sizes))
        self.optimiser = torch.optim.SGD(
            model.parameters(),
            lr=settings["lr"],
            momentum=settings["momentum"],
            weight_decay=settings["weight_decay"],
        )
        self.rows: list[tuple[int, float, float, float]] = []

    @property
    def done(self) -> int:
        """Steps taken."""
        return self.rows[-1][0] if self.rows else 0

    def lr(self, step: int) -> float:
        """Return the learning rate at a step; counting epochs, it changes between epochs only."""
        if self.settings["steps"] is None:
            share = (step // len(self.sizes)) / self.epochs
        else:
            share = step / self.steps
        passed = sum(share >= milestone for milestone in self.settings["milestones"])
        return self.settings["lr"] * self.settings["factor"] ** passed

    def epoch(self, bar: tqdm) -> None:
        """Take the steps of one epoch and append its row."""
        start, loss, correct, seen = self.done, 0.0, 0, 0
        order = torch.randperm(len(self.x), generator=self.generator)
        batches = order.split(self.sizes)[: self.steps - start]
        self.model.train()
        for step, batch in enumerate(batches, start):
            value, hits = self._step(step, batch)
            loss, correct, seen = loss + len(batch) * value, correct + hits, seen + len(batch)
            bar.update()
        self._check_weights()
        self.rows.append((start + len(batches), loss / seen, correct / seen, self.lr(start)))
        bar.set_postfix(loss=f"{loss / seen:.3g}", accuracy=f"{correct / seen:.3f}")

    def _step(self, step: int, batch: Tensor) -> tuple[float, int]:
        labels = self.y[batch]
        logits = self.model(_channels_last(self.x[batch]))
        smoothing = self.settings["label_smoothing"]
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DivergenceError(
                f"training diverged at step {step + 1} of {self.steps} (epoch "
                f"{len(self.rows) + 1}): the loss is {value}; a smaller lr than "
                f"{self.settings['lr']:g} helps"
            )
        self.optimiser.zero_grad()
        loss.backward()
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr(step)
        self.optimiser.step()
        return value, int((logits.detach().argmax(1) == labels).sum())

    def _check_weights(self) -> None:
        # The last step's loss was finite, but nothing has looked at what it did to the weights.
        state = self.model.state_dict()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            raise DivergenceError(
                f"training diverged in epoch {len(self.rows) + 1}: the weights are no longer "
                f"finite; a smaller lr than {self.settings['lr']:g} helps"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return what must agree for a stored run to be this one; taken before the first step."""
        model = hashlib.sha256(str(self.model).encode())
        for name, tensor in self.model.state_dict().items():
            model.update(f"{name} {_digest(tensor)}".encode())
        return {
            **self.settings,
            "seed": _digest(self.generator.get_state()),
            "model": model.hexdigest(),
            "x": _digest(self.x),
            "y": _digest(self.y),
        }

    def state(self) -> dict[str, Any]:
        """Return all that a later call needs to go on, as torch's plain values."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "rows": self.rows,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the end of a stored epoch."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        self.rows = list(state["rows"])


class _Store:
    """The folder of a run: ``latest.pt`` to go on from, and the epochs that are kept."""

    def __init__(self, folder: Path, run: _Run, keep: set[int]):
        self.folder, self.keep = folder, keep
        self.latest = folder / "latest.pt"
        self.fingerprint = run.fingerprint()
        self.written = -math.inf
        _make_folder(folder)
        if self.latest.exists():
            self._resume(run)
        else:
            self.write(run)

    def write(self, run: _Run) -> None:
        """Store the end of an epoch: a kept one first, so that ``latest.pt`` never precedes it."""
        epoch = len(run.rows)
        if epoch in self.keep:
            _write(self._path(epoch), _plain(run.model.state_dict()))
        now = time.monotonic()
        if run.done == run.steps or now - self.written > _STORED_EVERY_SECONDS:
            _write(self.latest, {"fingerprint": self.fingerprint, "state": run.state()})
            self.written = now

    def _resume(self, run: _Run) -> None:
        remedy = "name another folder, or delete this one to train again"
        stored = _read(self.latest, remedy)
        try:
            fingerprint, state = dict(stored["fingerprint"]), stored["state"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.latest} was not written by fit; {remedy}") from error
        differing = [
            key for key, value in self.fingerprint.items() if fingerprint.get(key) != value
        ]
        if differing:
            shown = ", ".join(_difference(key, fingerprint, self.fingerprint) for key in differing)
            raise CheckpointError(f"{self.folder} belongs to another training: {shown}; {remedy}")
        for epoch in sorted(self.keep):
            if epoch <= len(state["rows"]) and not self._path(epoch).exists():
                raise CheckpointError(
                    f"{self.folder} is past epoch {epoch}, which keep has, without "
                    f"{self._path(epoch).name}; {remedy}"
                )
        run.restore(state)

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:04d}.pt"


def _difference(key: str, stored: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if key == "model":
        return "its network or initial weights are not those of model (build it anew to resume)"
    if key in ("x", "y", "seed"):
        return f"its {key} is not the one given"
    return f"its {key} is {stored.get(key)}, but {given[key]} is given"


def _channels_last(x: Tensor) -> Tensor:
    """Return images laid out with channels last, which torch keeps through the network.

    Convolutions of few channels are up to a third faster so, and the weights stay as they are.
    """
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's type, shape and entries."""
    array = tensor.detach().contiguous().numpy()
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view("u1").data)
    return digest.hexdigest()


def _batch_sizes(n: int, batch_size: int) -> list[int]:
    """Return the sizes of an epoch's batches."""
    sizes = [batch_size] * (n // batch_size)
    rest = n % batch_size
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and each module back to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# --- checkpoints --------------------------------------------------------------------------------


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    about: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
) -> str:
    """Store a network's weights and buffers in one step, and return the file's SHA-256.

    Args:
        model: The network.
        path: Where the file goes; its folder is made if need be.
        about: What the reader needs to know, such as the arguments of ``build``: plain values,
            lists and dictionaries, as in JSON.
        dtype: ``torch.float16`` halves the file and rounds the weights to 11 bits; None keeps
            them as they are.

    Raises:
        TypeError: If ``about`` holds something else, or ``dtype`` is another one.
        ValueError: If a weight is too large for float16.
        CheckpointError: If the file cannot be written.

    Example:
        >>> network = build("mlp", channels=1, size=8)
        >>> sha256 = save_checkpoint(network, "mlp.pt", {"name": "mlp"})
        >>> state, about = load_checkpoint("mlp.pt", sha256=sha256)
        >>> network.load_state_dict(state), about
        (<All keys matched successfully>, {'name': 'mlp'})
    """
    if dtype not in (None, torch.float16):
        raise TypeError(f"dtype is {dtype}, but None or torch.float16 is needed")
    try:
        text = json.dumps(dict(about), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"about is not made of plain values as in JSON: {error}") from error
    state = _plain(model.state_dict())
    if dtype is not None:
        state = {name: _halved(name, tensor) for name, tensor in state.items()}
    _make_folder(Path(path).parent)
    return _write(Path(path), {"state_dict": state, "about": text})


def load_checkpoint(
    path: str | Path, *, sha256: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load weights and buffers for ``load_state_dict``, and what is known about them.

    Reads what ``save_checkpoint`` wrote, and a kept epoch of ``fit``, about which nothing is
    known. No code in the file is run. Half precision is returned as float32.

    Args:
        path: The file.
        sha256: Its SHA-256, to be compared.

    Raises:
        CheckpointError: If the file is missing, damaged, another one, or no checkpoint.

    Example:
        >>> _ = save_checkpoint(build("mlp", channels=1, size=8), "small.pt", {"size": 8})
        >>> state, about = load_checkpoint("small.pt")
        >>> about, state["layers.1.weight"].shape
        ({'size': 8}, torch.Size([256, 64]))
    """
    path = Path(path)
    remedy = "restore it, or train the network again"
    stored = _read(path, remedy, sha256)
    try:
        state, about = (
            (stored["state_dict"], json.loads(stored["about"]))
            if "state_dict" in stored
            else (stored, {})
        )
        tensors = all(isinstance(tensor, Tensor) for tensor in state.values())
    except (KeyError, TypeError, AttributeError, ValueError):
        tensors = False
    if not tensors:
        raise CheckpointError(f"{path} holds no weights of a network; {remedy}")
    half = torch.float16
    state = {name: t.float() if t.dtype == half else t for name, t in state.items()}
    return state, about


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies, since a tensor that views another one would be stored with all of that."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _halved(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not bool(torch.isfinite(half).all()):
        largest = float(tensor.abs().max())
        raise ValueError(
            f"{name} has an entry of size {largest:.3g}, too large for float16; leave dtype out"
        )
    return half


def _write(path: Path, content: Mapping[str, Any]) -> str:
    """Write a file in one step and return its SHA-256."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error
    return hashlib.sha256(data).hexdigest()


def _read(path: Path, remedy: str, sha256: str | None = None) -> Any:
    """Return what a file holds, after its hash (if known) and its parts' checksums are checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256.lower():
        raise CheckpointError(f"{path} does not have the SHA-256 {sha256}; {remedy}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch reads past a flipped bit in a weight; the checksums in the archive tell.
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile pickle can raise nearly anything
        raise CheckpointError(
            f"{path} is damaged, or no file of torch's plain tensors "
            f"({type(error).__name__}); {remedy}"
        ) from error
    raise CheckpointError(f"{path} is damaged; {remedy}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be a folder: {error.strerror}") from error


# --- arguments ----------------------------------------------------------------------------------


def _check_examples(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Check that images and labels fit each other and the network."""
    checks.matrix("x", x.flatten(1) if isinstance(x, Tensor) and x.ndim > 1 else x)
    if not isinstance(y, Tensor):
        raise TypeError(f"y is a {type(y).__name__}, but a torch tensor of labels is needed")
    if y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise TypeError(f"y has dtype {y.dtype}, but integer labels are needed, as in y.long()")
    if y.ndim != 1 or len(y) != len(x):
        raise ValueError(f"y has shape {tuple(y.shape)}, but one label for each of {len(x)} images")
    weights = next(model.parameters(), None)
    if weights is None:
        raise ValueError("model has no parameters, but a network with weights is needed")
    if weights.dtype != x.dtype:
        raise TypeError(
            f"x has dtype {x.dtype}, but model has {weights.dtype}; convert one of them, as in "
            "x.double() or model.double()"
        )
    with _eval_mode(model), torch.no_grad():
        logits = model(x[:1])
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"model gives shape {tuple(logits.shape)} for one image, but 1 x C logits are needed"
        )
    classes, least, largest = logits.shape[1], int(y.min()), int(y.max())
    if least < 0 or largest >= classes:
        raise ValueError(
            f"y has labels from {least} to {largest}, but model has classes 0 to {classes - 1}"
        )


def _check_batches(model: nn.Module, n: int, batch_size: int) -> None:
    normalises = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if normalises and min(n, batch_size) == 1:
        raise ValueError(
            f"x has {n} images and batch_size is {batch_size}, but batch norm needs at least 2 "
            "images a step"
        )


def _checked_settings(
    epochs, steps, lr, momentum, weight_decay, label_smoothing, batch_size, milestones, factor
) -> dict[str, Any]:
    """Return the settings of a training, all of them plain values."""
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"epochs is {epochs} and steps is {steps}, but exactly one of them is needed"
        )
    milestones = [checks.positive("a milestone", milestone) for milestone in milestones]
    if any(m >= 1 for m in milestones) or sorted(set(milestones)) != milestones:
        raise ValueError(
            f"milestones is {milestones}, but growing shares of the training below 1 are needed"
        )
    return {
        "epochs": None if epochs is None else checks.positive_integer("epochs", epochs),
        "steps": None if steps is None else checks.positive_integer("steps", steps),
        "lr": checks.positive("lr", lr),
        "momentum": _share("momentum", momentum),
        "weight_decay": checks.nonnegative("weight_decay", weight_decay),
        "label_smoothing": _share("label_smoothing", label_smoothing),
        "batch_size": checks.positive_integer("batch_size", batch_size),
        "milestones": milestones,
        "factor": checks.positive("factor", factor),
    }


def _share(name: str, value: float) -> float:
    if checks.nonnegative(name, value) >= 1:
        raise ValueError(f"{name} is {value:g}, but a number from 0 to below 1 is needed")
    return float(value)


def _kept(keep: Iterable[int], epochs: int, checkpoints: str | Path | None) -> set[int]:
    """Return the epochs to store."""
    wanted = {
        0 if epoch == 0 else checks.positive_integer("an epoch of keep", epoch) for epoch in keep
    }
    if wanted and checkpoints is None:
        raise ValueError(f"keep has {sorted(wanted)}, but there is no folder: give checkpoints")
    if wanted and max(wanted) > epochs:
        raise ValueError(f"keep has the epoch {max(wanted)}, but there are {epochs} epochs")
    return wanted
