"""Small trained classifiers that are shipped, with the images they were trained on.

One for each of three data sets and three narrow networks, 100 images per class, at the learning
rate with the least test error. ``python -m lowgrad_utils.hessian networks`` trains them again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets, files
from lowgrad_utils.curvature import LossCurvature


@dataclass(frozen=True, eq=False, repr=False)
class TrainedNetwork:
    """A trained classifier and its images.

    Attributes:
        name: Such as ``mnist-vgg11``.
        model: The network in evaluation mode, float32.
        train_set: The images it was trained on (N x channels x size x size) and their labels.
        test_set: Test images and labels.
        about: How it was trained: the arguments of ``experiments.hessian_sweep.train``.
    """

    name: str
    model: nn.Module
    train_set: tuple[Tensor, Tensor]
    test_set: tuple[Tensor, Tensor]
    about: dict[str, Any]

    def curvature(self, *, memory: float = 2.0) -> LossCurvature:
        """Return the curvature of its training loss.

        Args:
            memory: Gigabytes for the work on the examples.
        """
        return LossCurvature(self.model, self.train_set, memory=memory)

    def __repr__(self) -> str:
        return (
            f"TrainedNetwork({self.name}: {classifiers.count_parameters(self.model)} parameters, "
            f"{len(self.train_set[0])} training images)"
        )


def folder() -> Path:
    """Where the networks are: data/networks, beside or inside the package."""
    return files.data_folder("networks")


def names() -> list[str]:
    """Return the names of the shipped networks."""
    return list(_manifest())


def load(name: str) -> TrainedNetwork:
    """Load a shipped network, after checking the hash of its file, and the images it knows.

    Args:
        name: A data set and a network, such as ``cifar10-resnet18``; ``names()`` lists them.

    Raises:
        ValueError: If the name is unknown.
        CheckpointError: If the file is missing, damaged, or not the one that was stored.

    Example:
        >>> load("mnist-vgg11")
        TrainedNetwork(mnist-vgg11: 145754 parameters, 1000 training images)
    """
    manifest = _manifest()
    entry = manifest[checks.choice("name", name, manifest)]
    path = files.shipped(folder() / f"{name}.pt")
    state, about = classifiers.load_checkpoint(path, sha256=entry["sha256"])
    data = datasets.load(about["dataset"])
    x, labels = data.images(size=about["size"])
    model = classifiers.build(
        about["network"], channels=x.shape[1], width=about["width"], size=about["size"]
    )
    model.load_state_dict(state)
    # Positions, not the seed of their choice: the network stays with the images it was trained on.
    rows = torch.tensor(about.pop("positions"))
    return TrainedNetwork(
        name,
        model.eval(),
        (x[rows], labels[rows]),
        data.images("test", size=about["size"]),
        about,
    )


def store(model: nn.Module, cell: Mapping[str, Any]) -> str:
    """Store a network that ``experiments.hessian_sweep.train`` trained, and return its name.

    Args:
        model: The network.
        cell: The arguments it was trained with.
    """
    name = f"{cell['dataset']}-{cell['network']}"
    data = datasets.load(cell["dataset"])
    positions = data.positions(per_class=cell["per_class"], seed=cell["seed"]).tolist()
    path = folder() / f"{name}.pt"
    sha256 = classifiers.save_checkpoint(model, path, {**cell, "positions": positions})
    manifest = _manifest() if _manifest_path().is_file() else {}
    manifest[name] = {"sha256": sha256, "bytes": path.stat().st_size, **cell}
    text = json.dumps(dict(sorted(manifest.items())), indent=2) + "\n"
    files.write_whole(_manifest_path(), text.encode())
    return name


def _manifest_path() -> Path:
    return folder() / "networks.json"


def _manifest() -> dict[str, Any]:
    try:
        manifest = json.loads(_manifest_path().read_text(encoding="utf-8"))
        whole = all("sha256" in entry for entry in manifest.values())
    except (OSError, ValueError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise classifiers.CheckpointError(
            f"{_manifest_path()} is missing or damaged; restore it with git, or reinstall"
        )
    return manifest
