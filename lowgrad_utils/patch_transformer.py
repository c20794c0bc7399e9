"""A small transformer on patches of Fashion-MNIST, shipped at several epochs of its training.

``python -m lowgrad_utils.patch_transformer`` trains it again (about two minutes on one core) and
stores the checkpoints and their hashes in ``data/networks``.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowgrad_utils import checks, classifiers, datasets, files, trained_networks
from lowgrad_utils.trained_networks import TrainedNetwork

#: Epochs after which the shipped network was stored; 0 is initialisation.
EPOCHS = (0, 1, 5, 40)

#: How it was trained: arguments of ``PatchTransformer`` and of ``classifiers.fit``.
TRAINING: dict[str, Any] = {
    "dataset": "fashion_mnist",
    "width": 32,
    "blocks": 2,
    "heads": 4,
    "epochs": EPOCHS[-1],
    "lr": 0.05,
    "weight_decay": 5e-4,
    "batch_size": 64,
    "seed": 0,
}

_SIZE, _PATCH, _CLASSES = 28, 7, 10


class PatchTransformer(nn.Module):
    """A transformer encoder on the 16 patches of 7 x 7 pixels of an image, before a linear layer.

    Layer norm comes first in each part of a block, and the mean over tokens before the logits.
    Every product with weights is a linear layer of its own, ``blocks.0.query`` for one, so that
    all of them can be diagnosed. There is no dropout.

    Args:
        width: Length of a token's vector; a multiple of ``heads``.
        blocks: Number of blocks, each of attention and of a network with 4 width hidden neurons.
        heads: Number of heads.
        seed: Seed, or generator, of the weights, torch's default ones.

    Raises:
        ValueError: If a number is not a whole one of at least 1, or width is no multiple of heads.

    Example:
        >>> PatchTransformer(width=8, blocks=1, heads=2)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        *,
        width: int = 32,
        blocks: int = 2,
        heads: int = 4,
        seed: int | torch.Generator = 0,
    ):
        super().__init__()
        width, heads = (
            checks.positive_integer("width", width),
            checks.positive_integer("heads", heads),
        )
        if width % heads:
            raise ValueError(f"width is {width}, but a multiple of heads = {heads} is needed")
        blocks = checks.positive_integer("blocks", blocks)
        draw = int(torch.randint(2**63 - 1, (), generator=checks.random_stream(seed, "classifier")))
        tokens = (_SIZE // _PATCH) ** 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw)
            self.embedding = nn.Linear(_PATCH**2, width)
            self.positions = nn.Parameter(0.1 * torch.randn(tokens, width))
            self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, N x 10, of images, N x 1 x 28 x 28."""
        if x.shape[1:] != (1, _SIZE, _SIZE):
            raise ValueError(f"x has shape {tuple(x.shape)}, but N x 1 x 28 x 28 is needed")
        patches = F.unfold(x, _PATCH, stride=_PATCH).transpose(1, 2)
        tokens = self.blocks(self.embedding(patches) + self.positions)
        return self.head(self.norm(tokens).mean(1))


class _Block(nn.Module):
    """x + attention(norm(x)), and that plus a network of the norm of it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        mixed = (scores.softmax(3) @ value).transpose(1, 2).flatten(2)
        x = x + self.output(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def load(epoch: int = EPOCHS[-1]) -> TrainedNetwork:
    """Load the shipped network after an epoch, after checking the hash of its file.

    Args:
        epoch: One of ``EPOCHS``.

    Returns:
        The network in evaluation mode with its training and test images; its weights are rounded
        to half precision, and float32.

    Raises:
        ValueError: If there is no such epoch.
        CheckpointError: If the file is missing, damaged, or not the one that was stored.

    Example:
        >>> load()
        TrainedNetwork(fashion_mnist-patches, epoch 40: 27914 parameters, 7020 training images)
    """
    if epoch not in EPOCHS:
        raise ValueError(f"epoch is {epoch!r}, but one of {', '.join(map(str, EPOCHS))} is needed")
    state, about = classifiers.load_checkpoint(_path(epoch), sha256=_hashes().get(str(epoch), ""))
    model = PatchTransformer(**{name: about[name] for name in ("width", "blocks", "heads")})
    model.load_state_dict(state)
    data = datasets.load(about["dataset"])
    return TrainedNetwork(
        f"{about['dataset']}-patches, epoch {epoch}",
        model.eval(),
        data.images(),
        data.images("test"),
        about,
    )


def store(training: dict[str, Any] | None = None, *, progress: bool = True) -> dict[str, str]:
    """Train the network, store it after each of its epochs, and return the hashes.

    Args:
        training: As ``TRAINING``, the default.
        progress: Show a bar.
    """
    training = dict(TRAINING if training is None else training)
    settings = dict(training)
    data = datasets.load(settings.pop("dataset"))
    form = {name: settings.pop(name) for name in ("width", "blocks", "heads")}
    model = PatchTransformer(**form, seed=settings["seed"])
    kept = [epoch for epoch in EPOCHS if epoch <= settings["epochs"]]
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        classifiers.fit(
            model, *data.images(), **settings, checkpoints=folder, keep=kept, progress=progress
        )
        for epoch in kept:
            path = Path(folder) / f"epoch-{epoch:04d}.pt"
            model.load_state_dict(classifiers.load_checkpoint(path)[0])
            hashes[str(epoch)] = classifiers.save_checkpoint(
                model, _path(epoch), {**training, "epoch": epoch}, dtype=torch.float16
            )
    command = "python -m lowgrad_utils.patch_transformer"
    text = json.dumps({"command": command, **training, "sha256": hashes}, indent=2) + "\n"
    files.write_whole(_manifest_path(), text.encode())
    return hashes


def _path(epoch: int) -> Path:
    return trained_networks.folder() / f"patch-transformer-{epoch}.pt"


def _manifest_path() -> Path:
    return trained_networks.folder() / "patch-transformer.json"


def _hashes() -> dict[str, str]:
    try:
        return dict(json.loads(_manifest_path().read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise classifiers.CheckpointError(
            f"{_manifest_path()} is missing or damaged; restore it with git, or reinstall"
        ) from None


if __name__ == "__main__":
    print("\n".join(f"epoch {epoch}: {sha256}" for epoch, sha256 in store().items()))
