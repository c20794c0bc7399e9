"""MNIST, Fashion-MNIST and CIFAR-10 (shipped, full, on disk, as features); image folders."""

import errno
import gzip
import hashlib
import http.client
import io
import math
import os
import pickle
import shutil
import struct
import tempfile
import time
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from lowgrad_utils import checks, files


class DataError(ValueError):
    """Data that are missing, damaged, out of reach, or not what their name says."""


@dataclass(frozen=True)
class Archive:
    """What is known of a shipped file before it is read.

    Attributes:
        archive: Its name.
        sha256: Its SHA-256.
        bytes: Its length, which tells a truncated file from another one.
    """

    archive: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Facts(Archive):
    """What is known of a data set of images: its shipped subset, sizes, address.

    Attributes:
        openml: Name and version on OpenML.
        megabytes: About how much a download of the full set is, compressed and as text.
        train: Number of images in the original training split.
        test: Number of images in the original test split.
        shape: Shape of an image, (height, width) or (height, width, 3).
        classes: Names of the ten classes, in the order of the labels.
    """

    openml: tuple[str, int]
    megabytes: tuple[int, int]
    train: int
    test: int
    shape: tuple[int, ...]
    classes: tuple[str, ...]


SETS = {
    "mnist": Facts(
        archive="mnist_subset.npz",
        sha256="68e88f3fdd89b5f6aedf94efed3891d51abd258aabb0aadfc7890c6e0e4a0ebb",
        bytes=1_341_833,
        openml=("mnist_784", 1),
        megabytes=(16, 128),
        train=60_000,
        test=10_000,
        shape=(28, 28),
        classes=tuple("0123456789"),
    ),
    "fashion_mnist": Facts(
        archive="fashion_mnist_subset.npz",
        sha256="194b8da62933ffa5ab73bd340841a47f619931367435ee90f0a3ca684ff28d15",
        bytes=3_544_873,
        openml=("Fashion-MNIST", 1),
        megabytes=(40, 155),
        train=60_000,
        test=10_000,
        shape=(28, 28),
        classes=(
            *("T-shirt", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
    ),
    "cifar10": Facts(
        archive="cifar10_subset.npz",
        sha256="d7761f1a5798b855b08b1bb9e61a7691b7dbbcc761cc301fee45627c99266772",
        bytes=9_884_669,
        openml=("CIFAR_10", 1),
        megabytes=(207, 658),
        train=50_000,
        test=10_000,
        shape=(32, 32, 3),
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
    ),
}

#: Features that a pretrained network computes from the shipped images, by name.
EMBEDDINGS = {
    "cifar10-embeddings": Archive(
        archive="cifar10_embeddings.npz",
        sha256="544cbaf71eadcef9166f2ca11a22959dffbb8672d51dd2eaeffb4889b8c5cd70",
        bytes=5_624_377,
    ),
}

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_STALE_SECONDS = 24 * 3600
# What reading a damaged npz archive can raise; TypeError if it is one bare array.
_DAMAGE = (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images and labels of one data set, pixels as stored (uint8, 0 to 255).

    Attributes:
        name: ``mnist``, ``fashion_mnist`` or ``cifar10``.
        source: ``shipped``, ``full`` or ``files``.
        x_train: uint8 images, N x 28 x 28 or N x 32 x 32 x 3 (channels last).
        y_train: int64 labels 0 to 9, length N.
        x_test: The test images.
        y_test: The test labels.
    """

    name: str
    source: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def matrix(
        self,
        split: str = "train",
        *,
        n: int | None = None,
        per_class: int | None = None,
        units: str = "0-1",
        centre: bool = False,
        seed: int | torch.Generator = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return images as the rows of X (n x d, float64) and their labels (n, int64).

        ``n`` draws images at random without replacement, so that classes differ a little in
        number, as in independent samples; ``per_class`` draws the same number of each. Either way
        rows come in random order, and for one integer seed a smaller ``n`` is the beginning of a
        larger one. Digits as real targets are ``labels.double()``.

        Args:
            split: ``train`` or ``test``.
            n: Number of images; None for all.
            per_class: Number of images of each class, instead of ``n``.
            units: ``0-1`` divides the pixels by 255, ``0-255`` leaves them.
            centre: Subtract from each column its mean over the rows returned.
            seed: Seed, or generator, of the choice.

        Raises:
            ValueError: On an unknown split or unit, on both ``n`` and ``per_class``, or on more
                images than there are.

        Example:
            >>> X, digits = load("mnist").matrix(n=600, seed=1)
            >>> X.shape, X.dtype, float(X.max()), digits.dtype
            (torch.Size([600, 784]), torch.float64, 1.0, torch.int64)
        """
        checks.choice("units", units, ("0-1", "0-255"))
        x, labels = _draw(self, split, n, per_class, seed)
        if units == "0-1":
            x /= 255
        if centre:
            x -= x.mean(0)
        return x, labels

    def positions(
        self,
        split: str = "train",
        *,
        n: int | None = None,
        per_class: int | None = None,
        seed: int | torch.Generator = 0,
    ) -> Tensor:
        """Return the positions, within the split, of the images that ``matrix`` chooses.

        Args:
            split: ``train`` or ``test``.
            n: Number of images; None for all.
            per_class: Number of images of each class, instead of ``n``.
            seed: Seed, or generator, of the choice.

        Raises:
            ValueError: On an unknown split, on both ``n`` and ``per_class``, or on more images
                than there are.

        Example:
            >>> mnist = load("mnist")
            >>> rows = mnist.positions(per_class=10, seed=1)
            >>> bool((mnist.y_train[rows] == mnist.matrix(per_class=10, seed=1)[1]).all())
            True
        """
        return _positions(self, split, n, per_class, seed)

    def images(
        self,
        split: str = "train",
        *,
        n: int | None = None,
        per_class: int | None = None,
        size: int | None = None,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Return images as a network takes them, N x channels x height x width, and labels.

        Pixels are from 0 to 1, and the images are those that ``matrix`` chooses for this seed.

        Args:
            split: ``train`` or ``test``.
            n: Number of images; None for all.
            per_class: Number of images of each class, instead of ``n``.
            size: Height and width: None leaves the original one, 32 pads 28 x 28 with zeros, 16
                and 8 are means over squares of the 32 x 32 image.
            seed: Seed, or generator, of the choice.
            dtype: float32 or float64.

        Raises:
            ValueError: On an unknown size, and as ``matrix`` does.
            TypeError: If ``dtype`` is another one.

        Example:
            >>> x, labels = load("cifar10").images(n=600, size=16, seed=1)
            >>> x.shape, x.dtype, labels.dtype
            (torch.Size([600, 3, 16, 16]), torch.float32, torch.int64)
        """
        side, *colours = self.x_train.shape[2:]
        if size is not None:
            size = checks.positive_integer("size", size)
        if size not in (None, side, 32, 16, 8):
            raise ValueError(f"size is {size!r}, but one of {side}, 32, 16, 8 or None is needed")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype is {dtype}, but torch.float32 or torch.float64 is needed")
        rows, labels = self.matrix(split, n=n, per_class=per_class, seed=seed)
        x = rows.reshape(len(rows), side, side, *(colours or [1])).permute(0, 3, 1, 2)
        if size not in (None, side):
            x = F.pad(x, [(32 - side) // 2] * 4)
            x = F.avg_pool2d(x, 32 // size)
        return x.to(dtype).contiguous(), labels

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.x_train.shape[1:]))
        return (
            f"ImageData({self.name}, {self.source}: {len(self.x_train)} train and "
            f"{len(self.x_test)} test images of {size})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class FeatureData:
    """Features of images under a pretrained network, and the images' labels.

    Row by row they belong to the images of the shipped subset, so one seed of ``matrix`` draws
    the same examples here and there.

    Attributes:
        name: ``cifar10-embeddings``.
        source: ``shipped`` or ``files``.
        network: The network that computed the features.
        x_train: Features as stored (float16), N x d.
        y_train: int64 labels 0 to 9, length N.
        x_test: Features of the test images.
        y_test: The test labels.
    """

    name: str
    source: str
    network: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def matrix(
        self,
        split: str = "train",
        *,
        n: int | None = None,
        per_class: int | None = None,
        centre: bool = False,
        seed: int | torch.Generator = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return features as the rows of X (n x d, float64) and their labels (n, int64).

        Args:
            split: ``train`` or ``test``.
            n: Number of examples; None for all.
            per_class: Number of examples of each class, instead of ``n``.
            centre: Subtract from each column its mean over the rows returned.
            seed: Seed, or generator, of the choice.

        Raises:
            ValueError: On an unknown split, on both ``n`` and ``per_class``, or on more examples
                than there are.

        Example:
            >>> X, labels = load("cifar10-embeddings").matrix(n=600, seed=1)
            >>> X.shape, X.dtype, labels.dtype
            (torch.Size([600, 1280]), torch.float64, torch.int64)
        """
        x, labels = _draw(self, split, n, per_class, seed)
        if centre:
            x -= x.mean(0)
        return x, labels

    def __repr__(self) -> str:
        return (
            f"FeatureData({self.name}, {self.source}: {len(self.x_train)} train and "
            f"{len(self.x_test)} test features of length {self.x_train.shape[1]}, "
            f"{self.network})"
        )


def load(
    name: str,
    *,
    source: str = "shipped",
    folder: str | Path | None = None,
    cache: str | Path | None = None,
) -> ImageData | FeatureData:
    """Load a data set: the shipped subset, the full set, or files already on disk.

    - ``shipped`` needs no network: a balanced subset, checked against its SHA-256.
    - ``full`` downloads from OpenML through scikit-learn once, after saying how much and where to,
      and keeps one checked file in ``cache``. An interrupted download leaves nothing there that
      a later call would read.
    - ``files`` reads the original formats in ``folder``: the four IDX files, gzipped or not, or
      the six CIFAR-10 python batches.

    Full sets are compared with the shipped subset, image by image at its recorded positions, so a
    mixed-up or reordered set is refused. Files with other numbers of images than the original
    are read without this comparison.

    ``cifar10-embeddings`` are features of the shipped CIFAR-10 subset. With ``files`` they are
    read from the ``cifar10_embeddings.npz`` in ``folder`` that
    ``python -m lowgrad_utils.embeddings`` wrote, of any width; there is no ``full`` set of them.

    Args:
        name: ``mnist``, ``fashion_mnist``, ``cifar10`` or ``cifar10-embeddings``.
        source: ``shipped``, ``full`` or ``files``.
        folder: Where the files are, for ``source="files"``.
        cache: Where full sets are kept, for ``source="full"``; by default ``lowgrad_utils`` in
            scikit-learn's data folder.

    Raises:
        DataError: If data are missing, damaged, out of reach, or not what their name says.
        ValueError: On an unknown name or source, or an argument that the source does not use.

    Example:
        >>> load("mnist")
        ImageData(mnist, shipped: 7020 train and 1000 test images of 28 x 28)
    """
    checks.choice("name", name, (*SETS, *EMBEDDINGS))
    checks.choice("source", source, ("shipped", "full", "files"))
    if (folder is not None) != (source == "files"):
        raise ValueError(f'folder is {folder!r}, but source="files" needs one and no other does')
    if cache is not None and source != "full":
        raise ValueError(f'cache is {str(cache)!r}, but only source="full" uses it')
    if name in EMBEDDINGS:
        return _load_features(name, source, folder)
    if source == "shipped":
        arrays = _read_shipped(SETS[name])
    elif source == "full":
        arrays = _read_full(name, _default_cache() if cache is None else Path(cache))
    else:
        arrays = _read_files(name, Path(folder))
    x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[key]) for key in _KEYS)
    return ImageData(name, source, x_train, y_train.long(), x_test, y_test.long())


def load_image_folder(
    folder: str | Path,
    *,
    size: int = 32,
    channels: int = 3,
    per_class: int | None = None,
    seed: int | torch.Generator = 0,
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Load a folder that has one subfolder of PNG or JPEG images a class, as ImageNet has.

    Each image is resized so that its shorter side has ``size`` pixels, bicubic and antialiased, and
    cropped around the centre. Images come class by class.

    Args:
        folder: The folder. Hidden files and files of other kinds are passed over.
        size: Height and width of the images returned.
        channels: 3 for colours, 1 for greys.
        per_class: Number of images of each class, drawn at random without replacement; a smaller
            number draws the beginning of a larger one. None takes all, in the order of the names.
        seed: Seed, or generator, of the choice.

    Returns:
        The images (float32 from 0 to 1, N x channels x size x size), their labels (int64), and
        the names of the classes, sorted.

    Raises:
        DataError: If the folder or its subfolders are missing, a class has too few images, or an
            image is damaged.
        ValueError: If a number is out of range.

    Example:
        >>> for name in ("black", "white"):
        ...     Path("pictures", name).mkdir(parents=True)
        ...     Image.new("RGB", (40, 50), name).save(f"pictures/{name}/one.png")
        >>> x, labels, names = load_image_folder("pictures")
        >>> x.shape, x[:, 0, 0, 0].tolist(), labels.tolist(), names
        (torch.Size([2, 3, 32, 32]), [0.0, 1.0], [0, 1], ('black', 'white'))
    """
    folder, size = Path(folder), checks.positive_integer("size", size)
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels!r}, but 1 (greys) or 3 (colours) is needed")
    if per_class is not None:
        per_class = checks.positive_integer("per_class", per_class)
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist; give one with a subfolder for each class")
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise DataError(f"folder {folder} has no subfolders; put the images of each class in one")
    generator = checks.random_stream(seed, "image folder")
    chosen = [_choose_files(place, per_class, generator) for place in classes]
    pixels = [_read_image(path, size, channels) for paths in chosen for path in paths]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float().div_(255).contiguous()
    labels = torch.repeat_interleave(torch.tensor([len(paths) for paths in chosen]))
    return x, labels, tuple(place.name for place in classes)


def _draw(
    data: ImageData | FeatureData, split: str, n: int | None, per_class: int | None, seed
) -> tuple[Tensor, Tensor]:
    """Return the chosen examples as rows in float64, a copy, with their labels."""
    rows = _positions(data, split, n, per_class, seed)
    x, labels = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    return x[rows].flatten(1).double(), labels[rows]


def _positions(data: ImageData | FeatureData, split: str, n, per_class, seed) -> Tensor:
    """Return the chosen positions, after checking the split's name."""
    checks.choice("split", split, ("train", "test"))
    labels = getattr(data, f"y_{split}")
    return _choose(labels, n, per_class, seed, f"{data.name} ({data.source}, {split})")


def _choose(labels: Tensor, n, per_class, seed, where: str) -> Tensor:
    """Return the chosen positions in random order, or all in their own order."""
    if n is None and per_class is None:
        return torch.arange(len(labels))
    if n is not None and per_class is not None:
        raise ValueError(f"n is {n} and per_class is {per_class}, but only one of them is needed")
    order = torch.randperm(len(labels), generator=checks.random_stream(seed, "images"))
    if n is not None:
        if checks.positive_integer("n", n) > len(labels):
            raise ValueError(f"n is {n}, but {where} has {len(labels)} images")
        return order[:n]
    least = int(torch.bincount(labels, minlength=10).min())
    if checks.positive_integer("per_class", per_class) > least:
        raise ValueError(f"per_class is {per_class}, but a class of {where} has {least} images")
    shuffled = labels[order]
    places = [torch.nonzero(shuffled == label)[:per_class, 0] for label in range(10)]
    return order[torch.cat(places).sort().values]


# --- the shipped subset -------------------------------------------------------------------------


def _read_shipped(facts: Archive) -> dict[str, np.ndarray]:
    """Return the arrays of a shipped archive after checking its SHA-256."""
    path = files.shipped(files.data_folder(facts.archive))
    remedy = f"restore it with `git checkout -- data/{facts.archive}`, or reinstall lowgrad_utils"
    if not path.is_file():
        raise DataError(f"{facts.archive} is missing beside the package; {remedy}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != facts.sha256:
        if not content.startswith(b"PK"):
            what = "is not an npz archive"
        elif len(content) < facts.bytes:
            what = f"is truncated: {len(content)} of {facts.bytes} bytes"
        else:
            what = f"does not have the SHA-256 {facts.sha256}"
        raise DataError(f"{path} {what}; {remedy}")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def _load_features(name: str, source: str, folder: str | Path | None) -> FeatureData:
    """Return features from the shipped archive or from one of the reader's own."""
    facts = EMBEDDINGS[name]
    if source == "full":
        raise ValueError(
            f'source is "full", but {name} are computed, not downloaded; use "shipped", or '
            '"files" with what `python -m lowgrad_utils.embeddings` wrote'
        )
    if source == "shipped":
        arrays = _read_shipped(facts)
    else:
        path = Path(folder) / facts.archive
        remedy = f"write it with `python -m lowgrad_utils.embeddings {folder}`"
        arrays = _read_npz(path, (*_KEYS, "network"), remedy)
        _check_features(path, arrays, remedy)
    x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[key]) for key in _KEYS)
    network = str(arrays["network"])
    return FeatureData(name, source, network, x_train, y_train.long(), x_test, y_test.long())


def _check_features(path: Path, arrays: dict[str, np.ndarray], remedy: str) -> None:
    """Refuse features that are no finite matrices, or are not those of the shipped images."""
    images = _read_shipped(SETS["cifar10"])
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype.kind != "f" or x.ndim != 2 or not np.isfinite(x).all():
            raise DataError(f"x_{split} of {path} is no matrix of finite features; {remedy}")
        if len(x) != len(y) or not np.array_equal(y, images[f"y_{split}"]):
            raise DataError(
                f"{path} does not belong to the shipped images: y_{split} differs; {remedy}"
            )
    widths = [arrays[f"x_{split}"].shape[1] for split in ("train", "test")]
    if widths[0] != widths[1]:
        raise DataError(f"{path} has train and test features of lengths {widths}; {remedy}")


def _read_npz(path: Path, keys: tuple[str, ...], remedy: str) -> dict[str, np.ndarray]:
    """Return arrays of an archive that has no known hash; damage is one line."""
    try:
        # Reading a member to its end checks its CRC, so a flipped bit raises here too.
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; {remedy}") from error
    except _DAMAGE as error:
        raise DataError(f"{path} is damaged ({_one_line(error)}); {remedy}") from error


def _compare_with_shipped(name: str, arrays: dict[str, np.ndarray], remedy: str) -> None:
    """Refuse a full set whose images at the subset's positions are not those of the subset."""
    facts, shipped = SETS[name], _read_shipped(SETS[name])
    for split, count in (("train", facts.train), ("test", facts.test)):
        if len(arrays[f"x_{split}"]) != count:
            continue
        index = shipped[f"{split}_index"]
        for key in (f"x_{split}", f"y_{split}"):
            if not np.array_equal(arrays[key][index], shipped[key]):
                raise DataError(
                    f"{key} is not that of {name}: it differs from the shipped subset at the "
                    f"positions recorded there; {remedy}"
                )


# --- the full set -------------------------------------------------------------------------------


def _default_cache() -> Path:
    from sklearn.datasets import get_data_home

    return Path(get_data_home()) / "lowgrad_utils"


def _read_full(name: str, cache: Path) -> dict[str, np.ndarray]:
    """Return the full set from the cache, downloading it first if it is not there."""
    path = cache / f"{name}.npz"
    if not path.exists():
        _download(name, path)
    remedy = f"delete {path} and load again"
    arrays = _read_npz(path, _KEYS, remedy)
    _compare_with_shipped(name, arrays, remedy)
    return arrays


def _download(name: str, path: Path) -> None:
    """Download the full set and put it at ``path`` in one step, complete and checked."""
    facts = SETS[name]
    compressed, text = facts.megabytes
    print(
        f"Downloading {name} from OpenML, about {compressed} MB compressed ({text} MB if the "
        f"server sends plain text); it will be kept at {path}",
        flush=True,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_up(path)
        _attempt(name, path)
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({_one_line(error)}); free about {3 * text} MB there, "
            "or name another cache"
        ) from error


def _attempt(name: str, path: Path) -> None:
    # scikit-learn keeps what it fetched even if it is truncated or of the wrong hash. Its cache
    # lies in a folder of this attempt only, and goes with it.
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}-partial-", dir=path.parent))
    try:
        arrays = _fetch(name, folder)
        _compare_with_shipped(name, arrays, "nothing was kept; try again, or use another source")
        with open(folder / path.name, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep_up(path: Path) -> None:
    """Remove what killed downloads left, sparing one that may be running beside this one."""
    for attempt in path.parent.glob(f"{path.stem}-partial-*"):
        if time.time() - attempt.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(attempt, ignore_errors=True)


def _fetch(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays that OpenML sends, in the original order and layout."""
    from sklearn.datasets import fetch_openml

    facts = SETS[name]
    openml_name, version = facts.openml
    # The label comes last. Types are named because scikit-learn's own choice, a category, fails
    # with pandas 3.1, which makes numbers of the labels; float32 halves the memory.
    pixels = math.prod(facts.shape)
    types = {**dict.fromkeys(range(pixels), np.float32), pixels: str}
    others = f'load("{name}") reads the shipped subset, source="files" files on disk'
    try:
        with warnings.catch_warnings():
            # Each retry warns; the one line raised below says it all.
            warnings.filterwarnings("ignore", message="A network error|Invalid cache")
            bunch = fetch_openml(
                openml_name,
                version=version,
                as_frame=False,
                parser="pandas",
                read_csv_kwargs={"dtype": types},
                data_home=str(folder),
                n_retries=1,
            )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise  # the disk, not the network: the caller knows the file
        raise DataError(
            f"{name} could not be downloaded ({_one_line(error)}); connect to a network and try "
            f"again. Without one, {others}"
        ) from error
    except (ValueError, KeyError, EOFError, http.client.HTTPException, zlib.error) as error:
        raise DataError(
            f"the download of {name} arrived damaged ({_one_line(error)}); nothing was kept, try "
            f"again. Without a network, {others}"
        ) from error
    return _split(name, bunch.data, bunch.target)


def _split(name: str, data: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return OpenML's rows as images and labels, training split first."""
    facts = SETS[name]
    wanted = (facts.train + facts.test, math.prod(facts.shape))
    if data.shape != wanted or len(target) != wanted[0]:
        raise DataError(
            f"the download of {name} has shape {data.shape} with {len(target)} labels, but "
            f"{wanted} is needed; nothing was kept, try again"
        )
    images = _channels_last(data.astype(np.uint8), facts.shape)
    labels = np.array([str(label).strip("'") for label in target]).astype(np.uint8)
    train = facts.train
    return dict(zip(_KEYS, (images[:train], labels[:train], images[train:], labels[train:])))


def _channels_last(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return flat images as N x height x width (x 3); colours come as three planes in a row."""
    if len(shape) == 2:
        return rows.reshape(-1, *shape)
    height, width, colours = shape
    planes = rows.reshape(-1, colours, height, width)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


# --- files on disk ------------------------------------------------------------------------------


def _read_files(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the original files in ``folder``."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist; give the folder with the files of {name}")
    if name == "cifar10":
        batches = [_read_batch(_find(folder, f"data_batch_{i}")) for i in range(1, 6)]
        train = [np.concatenate(part) for part in zip(*batches)]
        arrays = dict(zip(_KEYS, (*train, *_read_batch(_find(folder, "test_batch")))))
    else:
        arrays = {}
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images = _find(folder, f"{prefix}-images-idx3-ubyte")
            labels = _find(folder, f"{prefix}-labels-idx1-ubyte")
            x, y = _read_idx(images, SETS[name].shape), _read_idx(labels, ())
            if len(x) != len(y):
                raise DataError(
                    f"{images.name} has {len(x)} images, but {labels.name} has {len(y)} labels; "
                    "take both files from the same download"
                )
            _check_labels(labels, y)
            arrays[f"x_{split}"], arrays[f"y_{split}"] = x, y
    _compare_with_shipped(name, arrays, f"the files in {folder} may be those of another set")
    return arrays


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} has neither {name} nor {name}.gz; put the original file there")


def _choose_files(folder: Path, per_class: int | None, generator: torch.Generator) -> list[Path]:
    """Return the images of a class."""
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in (".png", ".jpg", ".jpeg") and not path.name.startswith(".")
    )
    if not paths:
        raise DataError(f"{folder} has no PNG or JPEG image; add some, or remove the folder")
    if per_class is None:
        return paths
    if per_class > len(paths):
        raise DataError(f"per_class is {per_class}, but {folder} has {len(paths)} images")
    return [paths[i] for i in torch.randperm(len(paths), generator=generator)[:per_class]]


def _read_image(path: Path, size: int, channels: int) -> np.ndarray:
    """Return the middle square of an image as size x size x channels, uint8."""
    try:
        with Image.open(path) as image:
            # Pillow would cut off what does not fit in 8 bits.
            if image.mode.startswith(("I", "F")):
                raise ValueError("more than 8 bits a pixel")
            image = ImageOps.fit(image.convert("RGB" if channels == 3 else "L"), (size, size))
    except Exception as error:  # a damaged image can raise nearly anything
        raise DataError(
            f"{path} cannot be read as an image ({_one_line(error)}); replace or remove it"
        ) from error
    return np.asarray(image).reshape(size, size, channels)


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzipped (whatever its name says)."""
    content = path.read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); download it again") from error


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the uint8 array of an IDX file whose items have this shape.

    An IDX file is two zero bytes, the type (8 for uint8), the number of dimensions, each dimension
    as a big-endian 32-bit integer, then the items.
    """
    content = _read_bytes(path)
    magic = bytes([0, 0, 8, 1 + len(shape)])
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}, but {magic.hex()} is needed; "
            "this is not the IDX file its name says, download it again"
        )
    start = 4 + 4 * (1 + len(shape))
    if len(content) < start:
        raise DataError(f"{path} is truncated in its header; download it again")
    size = struct.unpack(f">{1 + len(shape)}I", content[4:start])
    if size[1:] != shape or size[0] == 0:
        raise DataError(f"{path} has items {size}, but some of shape {shape} are needed")
    if len(content) - start != math.prod(size):
        raise DataError(
            f"{path} has {len(content) - start} bytes of data, but its header {size} needs "
            f"{math.prod(size)}; it is truncated or damaged, download it again"
        )
    # A copy, because an array over bytes is read-only and torch wants to own what it may write.
    return np.frombuffer(content, np.uint8, offset=start).reshape(size).copy()


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one CIFAR-10 python batch."""
    try:
        batch = _ArraysOnly(io.BytesIO(_read_bytes(path)), encoding="bytes").load()
        rows, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(
            f"{path} is not a CIFAR-10 python batch, or is truncated ({_one_line(error)}); "
            "download it again"
        ) from error
    pixels = math.prod(SETS["cifar10"].shape)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (pixels,):
        raise DataError(f"{path} has no uint8 data with rows of {pixels}; download it again")
    if labels.shape != (len(rows),):
        raise DataError(f"{path} has {len(rows)} images, but {labels.size} labels")
    _check_labels(path, labels)
    return _channels_last(rows, SETS["cifar10"].shape), labels.astype(np.uint8)


def _check_labels(path: Path, labels: np.ndarray) -> None:
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} has labels other than 0 to 9; download it again")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain containers and numpy arrays; a pickle that asks for more could run code."""

    # The batches were written by an old numpy; the function that rebuilds arrays has moved since,
    # and an array's own recipe names it wherever it is now.
    _rebuild = np.zeros(0).__reduce__()[0]
    _admitted = {  # noqa: RUF012 - never written to
        ("numpy.core.multiarray", "_reconstruct"): _rebuild,
        ("numpy._core.multiarray", "_reconstruct"): _rebuild,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._admitted:
            raise DataError(
                f"asks for {module}.{name}, which no CIFAR-10 batch needs; it is not opened "
                "because it might run code"
            )
        return self._admitted[module, name]


def _one_line(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
