import dataclasses
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets._openml
import torch
from PIL import Image

from lowgrad_utils import datasets, files
from lowgrad_utils.datasets import DataError

ROOT = Path(__file__).parent.parent
TRAIN, TEST, SHAPE = 30, 20, (4, 4)


# --- a small set of our own, with a shipped subset and an OpenML that serves it -----------------


def tiny_arrays():
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(256, size=(TRAIN, *SHAPE), dtype=np.uint8),
        "y_train": np.arange(TRAIN, dtype=np.uint8) % 10,
        "x_test": generator.integers(256, size=(TEST, *SHAPE), dtype=np.uint8),
        "y_test": np.arange(TEST, dtype=np.uint8) % 10,
    }


def use_tiny_set(patch, package):
    """Make "mnist" the tiny set, its subset lying in the folder ``package``/data."""
    arrays, index = tiny_arrays(), np.array([1, 5, 17])
    subset = {key: value[index] for key, value in arrays.items()}
    content = io.BytesIO()
    np.savez(content, **subset, train_index=index, test_index=index)
    (package / "data").mkdir(parents=True, exist_ok=True)
    (package / "data" / "mnist_subset.npz").write_bytes(content.getvalue())
    facts = dataclasses.replace(
        datasets.SETS["mnist"],
        sha256=hashlib.sha256(content.getvalue()).hexdigest(),
        bytes=len(content.getvalue()),
        train=TRAIN,
        test=TEST,
        shape=SHAPE,
    )
    patch.setitem(datasets.SETS, "mnist", facts)
    patch.setattr(files, "_PACKAGE", package)
    return arrays


class Reply(io.BytesIO):
    """What urlopen returns: a stream with headers. ``end`` is called when the stream runs dry."""

    def __init__(self, content, end=None):
        super().__init__(content)
        self.end = end

    def info(self):
        return {}

    def read(self, size=-1):
        content = super().read(size)
        if self.end is not None and (not content or size < 0):
            self.end()
        return content


class OpenML:
    """Stands in for the network below scikit-learn: answers each address, or breaks off."""

    def __init__(self, arrays, share=1.0, end=None):
        pixels = np.concatenate([arrays["x_train"], arrays["x_test"]]).reshape(TRAIN + TEST, -1)
        labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
        names = [f"pixel{i + 1}" for i in range(pixels.shape[1])]
        head = ["@RELATION tiny", *(f"@ATTRIBUTE {name} real" for name in names)]
        head += ["@ATTRIBUTE class {0,1,2,3,4,5,6,7,8,9}", "@DATA"]
        rows = [",".join(map(str, [*row, label])) for row, label in zip(pixels, labels)]
        self.arff = "\n".join([*head, *rows, ""]).encode()
        self.md5 = hashlib.md5(self.arff).hexdigest()
        self.served = self.arff[: int(share * len(self.arff))]
        self.end = end
        self.features = [
            {
                "index": str(i),
                "name": name,
                "data_type": "nominal" if name == "class" else "numeric",
                "is_target": str(name == "class").lower(),
                "number_of_missing_values": "0",
                "is_ignore": "false",
                "is_row_identifier": "false",
            }
            for i, name in enumerate([*names, "class"])
        ]
        self.addresses = []

    def __call__(self, request, *args, **kwargs):
        address = request.full_url
        self.addresses.append(address)
        if address.endswith(".arff"):
            return Reply(self.served, self.end)
        if "/list/" in address:
            answer = {"data": {"dataset": [{"did": 1, "version": 1, "status": "active"}]}}
        elif "/features/" in address:
            answer = {"data_features": {"feature": self.features}}
        elif "/qualities/" in address:
            answer = {}
        else:
            answer = {
                "data_set_description": {
                    "id": "1",
                    "name": "mnist_784",
                    "version": "1",
                    "format": "ARFF",
                    "status": "active",
                    "url": "https://openml.invalid/data/tiny.arff",
                    "md5_checksum": self.md5,
                    "description": "tiny",
                }
            }
        return Reply(json.dumps(answer).encode())


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    return use_tiny_set(monkeypatch, tmp_path / "package")


def connect(monkeypatch, network):
    monkeypatch.setattr(sklearn.datasets._openml, "urlopen", network)
    return network


def same(data, arrays):
    return all(np.array_equal(getattr(data, key).numpy(), value) for key, value in arrays.items())


def refuse(words, **arguments):
    with pytest.raises(ValueError, match=words) as caught:
        datasets.load(**{"name": "mnist", **arguments})
    assert "\n" not in str(caught.value)


# --- shipped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "train", "test"),
    [
        ("mnist", (28, 28), 702, 100),
        ("fashion_mnist", (28, 28), 702, 100),
        ("cifar10", (32, 32, 3), 300, 50),
    ],
)
def test_shipped_subsets_are_balanced_and_typed(name, shape, train, test):
    data = datasets.load(name)
    assert data.x_train.shape == (10 * train, *shape) and data.x_test.shape == (10 * test, *shape)
    assert data.x_train.dtype == data.x_test.dtype == torch.uint8
    assert data.y_train.dtype == data.y_test.dtype == torch.int64
    assert torch.bincount(data.y_train).tolist() == [train] * 10
    assert torch.bincount(data.y_test).tolist() == [test] * 10
    assert len(datasets.SETS[name].classes) == 10
    assert repr(data).startswith(f"ImageData({name}, shipped: {10 * train} train")


@pytest.mark.parametrize("name", [*datasets.SETS, *datasets.EMBEDDINGS])
def test_the_readme_of_the_data_agrees_with_the_table(name):
    facts = {**datasets.SETS, **datasets.EMBEDDINGS}[name]
    row = next(
        line
        for line in (ROOT / "data" / "README.md").read_text().splitlines()
        if line.startswith(f"| `{facts.archive}`")
    )
    assert facts.sha256 in row
    assert f"{facts.bytes:,}" in row


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-100], r"truncated: \d+ of \d+ bytes; restore it with `git"),
        (lambda content: content[:50] + b"?" + content[51:], "does not have the SHA-256"),
        (lambda content: content + b"?", "does not have the SHA-256"),
        (lambda content: b"<html>not found</html>", "is not an npz archive; restore"),
        (lambda content: b"", "is not an npz archive; restore"),
    ],
)
def test_a_damaged_archive_is_refused(tiny, tmp_path, damage, words):
    assert len(datasets.load("mnist").x_train) == 3
    path = tmp_path / "package" / "data" / "mnist_subset.npz"
    path.write_bytes(damage(path.read_bytes()))
    refuse(words)


def test_a_missing_archive_says_how_to_get_it_back(tiny, tmp_path):
    (tmp_path / "package" / "data" / "mnist_subset.npz").unlink()
    refuse("mnist_subset.npz is missing.*git checkout.*or reinstall")


def test_data_are_found_beside_the_package_and_inside_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "package" / "inner")
    assert len(datasets.load("mnist").x_train) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "emnist"}, "name is 'emnist', but one of mnist, fashion_mnist, cifar10"),
        ({"source": "web"}, "source is 'web', but one of shipped, full, files"),
        ({"source": "files"}, "folder is None"),
        ({"folder": "x"}, "folder is 'x'"),
        ({"cache": "x"}, "cache is 'x'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    refuse(words, **arguments)


# --- matrices -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist():
    return datasets.load("mnist")


def test_a_matrix_of_all_images_keeps_their_order(mnist):
    x, labels = mnist.matrix("test", units="0-255")
    assert x.dtype == torch.float64
    assert np.array_equal(x.numpy(), mnist.x_test.numpy().reshape(1000, 784).astype(float))
    assert torch.equal(labels, mnist.y_test)
    assert torch.equal(mnist.matrix("test")[0] * 255, x)


def test_n_images_are_distinct_belong_to_their_labels_and_nest(mnist):
    x, labels = mnist.matrix(n=600, seed=3, units="0-255")
    known = {image.numpy().tobytes(): int(y) for image, y in zip(mnist.x_train, mnist.y_train)}
    rows = [row.to(torch.uint8).numpy().tobytes() for row in x]
    assert [known[row] for row in rows] == labels.tolist()
    assert len(set(rows)) == 600
    assert torch.equal(mnist.matrix(n=50, seed=3, units="0-255")[0], x[:50])
    assert not torch.equal(mnist.matrix(n=600, seed=4, units="0-255")[0], x)
    assert labels.unique().tolist() == list(range(10))


def test_per_class_is_balanced_and_mixed(mnist):
    _, labels = mnist.matrix(per_class=7, seed=1)
    assert torch.bincount(labels).tolist() == [7] * 10
    assert not torch.equal(labels, labels.sort().values)
    x, _ = mnist.matrix(per_class=702)
    assert len(x) == 7020


def test_centring_takes_the_mean_of_the_rows_returned(mnist):
    plain, centred = (mnist.matrix(n=100, seed=1, centre=c)[0] for c in (False, True))
    assert torch.allclose(centred, plain - plain.mean(0))
    assert centred.mean(0).abs().max() < 1e-12 < plain.mean(0).max()


def test_a_generator_goes_on(mnist):
    generator = torch.Generator().manual_seed(0)
    first, second = (mnist.matrix(n=20, seed=generator)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"split": "validation"}, "split is 'validation'"),
        ({"units": "0-2"}, "units is '0-2'"),
        ({"n": 7021}, r"n is 7021, but mnist \(shipped, train\) has 7020 images"),
        ({"per_class": 703}, "per_class is 703.*has 702 images"),
        ({"n": 5, "per_class": 5}, "only one of them"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_matrices_that_cannot_be(mnist, arguments, words):
    with pytest.raises(ValueError, match=words):
        mnist.matrix(**arguments)


# --- features -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def features():
    return datasets.load("cifar10-embeddings")


def test_shipped_features_belong_to_the_shipped_images(features):
    images = datasets.load("cifar10")
    assert features.x_train.shape == (3000, 1280) and features.x_test.shape == (500, 1280)
    assert features.x_train.dtype == torch.float16
    # What ReLU6 gives, averaged: the network's last layer was cut off at the right place.
    assert features.x_train.min() == 0 and 5 < features.x_train.max() <= 6
    x, labels = features.matrix(n=50, seed=3)
    assert torch.equal(labels, images.matrix(n=50, seed=3)[1])
    everything, _ = features.matrix()
    assert x.dtype == torch.float64
    places = [int((everything == row).all(1).nonzero()) for row in x]
    pixels = images.matrix(units="0-255")[0][places]
    assert torch.equal(pixels, images.matrix(n=50, seed=3, units="0-255")[0])
    assert repr(features) == (
        "FeatureData(cifar10-embeddings, shipped: 3000 train and 500 test features of length "
        "1280, efficientnet-lite0)"
    )


def test_features_tell_the_classes_apart(features):
    (x, y), (x_test, y_test) = features.matrix(), features.matrix("test")
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    right = (torch.cdist(x_test, means).argmin(1) == y_test).double().mean()
    # Chance is 0.1; the nearest mean of the raw pixels is right for 0.29 of them.
    assert right > 0.6


def test_centred_features_of_each_split(features):
    x, labels = features.matrix("test", per_class=5, centre=True)
    assert x.mean(0).abs().max() < 1e-12 and torch.bincount(labels).tolist() == [5] * 10
    with pytest.raises(ValueError, match=r"n is 501, but cifar10-embeddings \(shipped, test\)"):
        features.matrix("test", n=501)
    with pytest.raises(ValueError, match="split is 'both'"):
        features.matrix("both")


def write_features(folder, **changes):
    """Features of two columns in the shipped images' order."""
    images, generator = datasets.load("cifar10"), np.random.default_rng(0)
    arrays = {"network": np.array("two")}
    for split in ("train", "test"):
        labels = getattr(images, f"y_{split}").numpy()
        arrays |= {f"x_{split}": generator.random((len(labels), 2)), f"y_{split}": labels}
    arrays |= changes
    kept = {key: value for key, value in arrays.items() if value is not None}
    np.savez(folder / "cifar10_embeddings.npz", **kept)
    return arrays


def test_features_of_the_readers_own_have_any_width(tmp_path):
    arrays = write_features(tmp_path)
    data = datasets.load("cifar10-embeddings", source="files", folder=tmp_path)
    assert data.network == "two" and data.source == "files"
    assert np.array_equal(data.matrix("test")[0].numpy(), arrays["x_test"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": np.full((3000, 2), np.nan)}, "x_train of .* is no matrix of finite features"),
        ({"x_test": np.ones((500, 2), int)}, "x_test of .* is no matrix of finite features"),
        ({"x_test": np.ones(500)}, "x_test of .* is no matrix of finite features"),
        ({"x_test": np.ones((500, 3))}, r"train and test features of lengths \[2, 3\]"),
        ({"y_test": np.zeros(500, int)}, "not belong to the shipped images: y_test differs"),
        ({"x_test": np.ones((499, 2))}, "not belong to the shipped images: y_test differs"),
        ({"network": None}, "is damaged.*network"),
        ({"x_train": np.array([{}, {}])}, "is damaged"),
    ],
)
def test_features_that_do_not_fit(tmp_path, changes, words):
    write_features(tmp_path, **changes)
    refuse(
        words + ".*write it with `python -m lowgrad_utils.embeddings",
        name="cifar10-embeddings",
        source="files",
        folder=tmp_path,
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[: len(content) // 2], "is damaged"),
        (lambda content: content.replace(b"PK\x03\x04", b"PK\x03\x05", 1), "is damaged"),
        (lambda content: b"", "is damaged"),
        (lambda content: content[content.index(b"\x93NUMPY") :], "is damaged"),
        (None, "does not exist"),
    ],
)
def test_damaged_features_are_one_line(tmp_path, damage, words):
    write_features(tmp_path)
    path = tmp_path / "cifar10_embeddings.npz"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    refuse(words, name="cifar10-embeddings", source="files", folder=tmp_path)


def test_damaged_shipped_features_are_refused(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    content = (ROOT / "data" / "cifar10_embeddings.npz").read_bytes()
    (tmp_path / "data" / "cifar10_embeddings.npz").write_bytes(content[:-1])
    monkeypatch.setattr(files, "_PACKAGE", tmp_path)
    refuse(
        "truncated: 5624376 of 5624377 bytes; restore it with `git checkout -- data/cifar10_emb",
        name="cifar10-embeddings",
    )


def test_features_are_not_downloaded():
    refuse('source is "full", but .* computed', name="cifar10-embeddings", source="full")


# --- images for networks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "choice"), [("mnist", {"n": 7}), ("cifar10", {"per_class": 2}), ("cifar10", {"n": 5})]
)
def test_images_are_the_rows_of_matrix(name, choice):
    data = datasets.load(name)
    x, labels = data.images("test", seed=3, dtype=torch.float64, **choice)
    rows, expected = data.matrix("test", seed=3, **choice)
    assert labels.tolist() == expected.tolist()
    pixels = rows.numpy().reshape(len(rows), *data.x_test.shape[1:])
    for i in range(len(rows)):
        planes = [pixels[i]] if name == "mnist" else [pixels[i, :, :, c] for c in range(3)]
        assert np.array_equal(x[i].numpy(), np.stack(planes))
    single = data.images("test", seed=3, **choice)[0]
    assert single.dtype == torch.float32 and torch.equal(single, x.float())
    assert single.is_contiguous()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("size", [32, 16, 8])
def test_images_of_other_sizes(name, size):
    data = datasets.load(name)
    full = data.images(n=4, dtype=torch.float64)[0].numpy()
    x = data.images(n=4, size=size, dtype=torch.float64)[0].numpy()
    assert x.shape[2:] == (size, size)
    margin = (32 - full.shape[2]) // 2
    padded = np.pad(full, [(0, 0), (0, 0), (margin, margin), (margin, margin)])
    square = 32 // size
    for i in range(size):
        for j in range(size):
            rows = slice(square * i, square * (i + 1))
            columns = slice(square * j, square * (j + 1))
            np.testing.assert_allclose(x[:, :, i, j], padded[:, :, rows, columns].mean((2, 3)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"size": 30}, ValueError, "size is 30, but one of 28, 32, 16, 8 or None"),
        ({"size": 0}, ValueError, "size is 0"),
        ({"dtype": torch.uint8}, TypeError, "dtype is torch.uint8"),
        ({"n": 3, "per_class": 1}, ValueError, "only one of them is needed"),
        ({"per_class": 10**6}, ValueError, "per_class is 1000000, but a class of mnist"),
        ({"split": "validation"}, ValueError, "split is 'validation'"),
    ],
)
def test_images_that_cannot_be(arguments, error, words):
    with pytest.raises(error, match=words):
        datasets.load("mnist").images(**arguments)


# --- a folder of images -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two classes of flat images, each of its own grey, with what is to be passed over."""
    for label, name in enumerate(["cats", "dogs"]):
        place = tmp_path / "set" / name
        place.mkdir(parents=True)
        for i, suffix in enumerate(["png", "JPEG", "jpg", "PNG"]):
            grey = 100 * label + 20 * i
            picture = Image.new("RGB", (50 - i, 40), (grey, grey, 200))
            picture.save(place / f"{i}.{suffix}", quality=100)
        (place / "notes.txt").write_text("no image")
        (place / ".hidden.png").write_text("no image")
    (tmp_path / "set" / ".cache").mkdir()
    (tmp_path / "set" / "list.csv").write_text("no folder")
    return tmp_path / "set"


def test_a_folder_of_images(folder):
    x, labels, names = datasets.load_image_folder(folder, size=8)
    assert names == ("cats", "dogs") and labels.tolist() == [0] * 4 + [1] * 4
    assert x.shape == (8, 3, 8, 8) and x.dtype == torch.float32
    greys = torch.tensor([0, 20, 40, 60, 100, 120, 140, 160])
    # JPEG rounds colours by a few levels.
    assert ((255 * x[:, 0] - greys[:, None, None]).abs() < 4).all()
    assert ((255 * x[:, 2] - 200).abs() < 4).all()
    grey, _, _ = datasets.load_image_folder(folder, size=8, channels=1)
    assert grey.shape == (8, 1, 8, 8)
    assert (255 * grey[0] - 0.114 * 200).abs().max() < 1


def test_the_shorter_side_is_resized_and_the_middle_taken(tmp_path):
    (tmp_path / "a").mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(20, 60, 3), dtype=np.uint8)
    wide, tall = Image.fromarray(pixels), Image.fromarray(pixels.transpose(1, 0, 2))
    wide.save(tmp_path / "a" / "1.png")
    tall.save(tmp_path / "a" / "2.png")
    x, _, _ = datasets.load_image_folder(tmp_path, size=10)
    expected = [
        wide.resize((30, 10), Image.Resampling.BICUBIC).crop((10, 0, 20, 10)),
        tall.resize((10, 30), Image.Resampling.BICUBIC).crop((0, 10, 10, 20)),
    ]
    for image, picture in zip(x, expected):
        difference = 255 * image.permute(1, 2, 0).numpy() - np.asarray(picture, float)
        assert np.abs(difference).max() <= 1.01  # Pillow's positions are rounded


def test_images_of_a_folder_are_drawn_by_the_seed(folder):
    drawn = [datasets.load_image_folder(folder, size=8, per_class=n, seed=1) for n in (2, 3)]
    assert drawn[0][1].tolist() == [0, 0, 1, 1]
    assert torch.equal(drawn[0][0], drawn[1][0][[0, 1, 3, 4]])
    assert len({tuple(image.flatten().tolist()) for image in drawn[1][0]}) == 6
    seeds = {
        tuple(datasets.load_image_folder(folder, size=8, per_class=1, seed=s)[0][:, 0, 0, 0])
        for s in range(6)
    }
    assert len(seeds) > 1


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        (shutil.rmtree, {}, "set does not exist"),
        (lambda f: [shutil.rmtree(f / name) for name in ("cats", "dogs")], {}, "no subfolders"),
        (lambda f: (f / "birds").mkdir(), {}, "birds has no PNG or JPEG image"),
        (lambda f: (f / "dogs" / "2.jpg").unlink(), {"per_class": 4}, "dogs has 3 images"),
        (lambda f: truncate(f / "cats" / "1.JPEG"), {}, r"cats/1\.JPEG cannot be read"),
        (lambda f: truncate(f / "cats" / "0.png"), {}, r"cats/0\.png cannot be read"),
        (lambda f: (f / "cats" / "0.png").write_text("<html>"), {}, r"cats/0\.png cannot be"),
        (lambda f: (f / "cats" / "0.png").write_bytes(b""), {}, r"cats/0\.png cannot be read"),
        (
            lambda f: Image.new("I;16", (9, 9)).save(f / "cats" / "0.png"),
            {},
            "more than 8 bits a pixel",
        ),
    ],
)
def test_folders_that_cannot_be_read(folder, damage, arguments, words):
    damage(folder)
    with pytest.raises(DataError, match=words) as caught:
        datasets.load_image_folder(folder, **arguments)
    assert "\n" not in str(caught.value)


def test_arguments_of_a_folder(folder):
    for arguments in ({"size": 0}, {"channels": 2}, {"per_class": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))} is"):
            datasets.load_image_folder(folder, **arguments)


# --- full ---------------------------------------------------------------------------------------


def test_a_full_set_is_announced_downloaded_once_and_read_again(
    tiny, tmp_path, monkeypatch, capsys
):
    network = connect(monkeypatch, OpenML(tiny))
    cache = tmp_path / "cache"
    assert same(datasets.load("mnist", source="full", cache=cache), tiny)
    assert re.search(r"mnist.*about 16 MB.*kept at .*mnist\.npz", capsys.readouterr().out)
    assert "mnist_784/limit/2/data_version/1" in network.addresses[0]
    assert [path.name for path in cache.iterdir()] == ["mnist.npz"]
    count = len(network.addresses)
    assert same(datasets.load("mnist", source="full", cache=cache), tiny)
    assert len(network.addresses) == count
    assert capsys.readouterr().out == ""


def test_no_network_is_one_line_and_leaves_nothing(tiny, tmp_path, monkeypatch, recwarn):
    def unreachable(request, *args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    connect(monkeypatch, unreachable)
    refuse("could not be downloaded.*Name or service.*connect", source="full", cache=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
    assert [str(w.message) for w in recwarn if "Retrying" in str(w.message)] == []


def cut():
    raise ConnectionResetError("connection reset")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (cut, "could not be downloaded.*connection reset"),
        # A server that stops early without an error: what arrived is a whole gzip file to
        # scikit-learn, which keeps it.
        (None, "arrived damaged.*nothing was kept, try again"),
    ],
)
def test_a_download_that_dies_midway_leaves_nothing(tiny, tmp_path, monkeypatch, end, words):
    cache = tmp_path / "cache"
    connect(monkeypatch, OpenML(tiny, share=0.5, end=end))
    refuse(words, source="full", cache=cache)
    assert list(cache.iterdir()) == []
    connect(monkeypatch, OpenML(tiny))
    assert same(datasets.load("mnist", source="full", cache=cache), tiny)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import os, signal
import pytest, sklearn.datasets._openml
import test_datasets as t
patch = pytest.MonkeyPatch()
arrays = t.use_tiny_set(patch, Path({package!r}))
end = lambda: os.kill(os.getpid(), signal.SIGKILL)
if {where!r} == "download":
    t.connect(patch, t.OpenML(arrays, share=0.5, end=end))
else:
    t.connect(patch, t.OpenML(arrays))
    # Half of the archive is on the disk when the process dies.
    def savez(file, **arrays):
        file.write(b"PK" + bytes(1000)); file.flush(); end()
    patch.setattr(t.np, "savez", savez)
t.datasets.load("mnist", source="full", cache={cache!r})
"""


@pytest.mark.parametrize("where", ["download", "writing"])
def test_a_killed_download_is_never_taken_for_good(tiny, tmp_path, monkeypatch, where):
    cache = tmp_path / "cache"
    script = KILLED.format(
        tests=str(ROOT / "tests"), package=str(tmp_path / "other"), cache=str(cache), where=where
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (left,) = cache.iterdir()
    assert left.name.startswith("mnist-partial-")
    network = connect(monkeypatch, OpenML(tiny))
    assert same(datasets.load("mnist", source="full", cache=cache), tiny)
    assert any(address.endswith(".arff") for address in network.addresses)
    # What the killed one left might belong to a running one until it is a day old.
    assert left.exists()
    (cache / "mnist.npz").unlink()
    day_before_yesterday = time.time() - 2 * 24 * 3600
    os.utime(left, (day_before_yesterday, day_before_yesterday))
    datasets.load("mnist", source="full", cache=cache)
    assert [path.name for path in cache.iterdir()] == ["mnist.npz"]


def test_another_set_under_the_name_is_refused_and_not_kept(tiny, tmp_path, monkeypatch):
    reordered = {key: value[::-1] for key, value in tiny.items()}
    connect(monkeypatch, OpenML(reordered))
    refuse("x_train is not that of mnist.*nothing was kept", source="full", cache=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_a_set_with_missing_rows_is_refused(tiny, tmp_path, monkeypatch):
    network = connect(monkeypatch, OpenML(tiny))
    network.served = network.arff.rsplit(b"\n", 2)[0] + b"\n"
    network.md5 = hashlib.md5(network.served).hexdigest()
    refuse(r"has shape \(49, 16\) with 49 labels", source="full", cache=tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(tiny_arrays()["x_train"].tobytes()[:20], bytes(20)),
        lambda content: b"",
    ],
)
def test_a_cached_file_damaged_later_is_refused(tiny, tmp_path, monkeypatch, damage):
    connect(monkeypatch, OpenML(tiny))
    datasets.load("mnist", source="full", cache=tmp_path)
    path = tmp_path / "mnist.npz"
    path.write_bytes(damage(path.read_bytes()))
    refuse(r"mnist\.npz is damaged.*delete .*mnist\.npz and load", source="full", cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_one_line(tiny, tmp_path, monkeypatch):
    connect(monkeypatch, OpenML(tiny))
    (tmp_path / "taken").write_text("a file")
    refuse("could not be written.*another cache", source="full", cache=tmp_path / "taken")


def test_no_space_is_not_taken_for_no_network(tiny, tmp_path, monkeypatch):
    def full(request, *args, **kwargs):
        raise OSError(28, "No space left on device")

    connect(monkeypatch, full)
    refuse("could not be written.*No space left.*free about", source="full", cache=tmp_path)


# --- files --------------------------------------------------------------------------------------


def idx(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@pytest.fixture
def idx_folder(tiny, tmp_path):
    folder = tmp_path / "idx"
    folder.mkdir()
    for key, name in IDX_NAMES.items():
        (folder / name).write_bytes(idx(tiny[key]))
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_gzipped_or_not(tiny, idx_folder, zipped):
    if zipped:
        for path in list(idx_folder.iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    data = datasets.load("mnist", source="files", folder=idx_folder)
    assert same(data, tiny) and data.source == "files"
    assert data.y_train.dtype == torch.int64


IMAGES, LABELS = IDX_NAMES["x_train"], IDX_NAMES["y_train"]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (IMAGES, lambda c: c[:-1], r"has 479 bytes of data, but its header \(30, 4, 4\) needs 480"),
        (IMAGES, lambda c: c + b"?", "has 481 bytes"),
        (IMAGES, lambda c: c[:10], "truncated in its header"),
        (IMAGES, lambda c: b"", "begins with nothing, but 00000803"),
        (IMAGES, lambda c: b"<html>" + c, "begins with 3c68746d, but 00000803 is needed"),
        (IMAGES, lambda c: c[:3] + b"\x01" + c[4:], "begins with 00000801"),
        (IMAGES, lambda c: c[:12] + struct.pack(">I", 5) + c[16:], r"items \(30, 4, 5\)"),
        (IMAGES, lambda c: gzip.compress(c)[:-20], "truncated or damaged"),
        (LABELS, lambda c: idx(np.zeros(29, np.uint8)), "30 images, but .* has 29 labels"),
        (LABELS, lambda c: c[:-1] + b"\x0a", "labels other than 0 to 9"),
        (IMAGES, lambda c: idx(255 - tiny_arrays()["x_train"]), "x_train is not that of mnist"),
    ],
)
def test_damaged_idx_files(idx_folder, name, damage, words):
    path = idx_folder / name
    path.write_bytes(damage(path.read_bytes()))
    refuse(words, source="files", folder=idx_folder)


def test_missing_files_and_folder(idx_folder, tmp_path):
    (idx_folder / LABELS).unlink()
    refuse(f"has neither {LABELS} nor {LABELS}.gz", source="files", folder=idx_folder)
    refuse("does not exist", source="files", folder=tmp_path / "nowhere")


def python_2_pickle(rows, labels):
    """A batch as CIFAR-10's authors wrote it: protocol 2, byte strings, numpy's old module."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    raw = rows.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR"
        b"(K\x01"
        + (b"M" + struct.pack("<H", rows.shape[0]) + b"M" + struct.pack("<H", rows.shape[1]))
        + b"\x86cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    items = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + items + b"u."


@pytest.fixture
def batches(tmp_path):
    generator = np.random.default_rng(1)
    images = generator.integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(10, size=12)
    # A row is the red plane, then the green, then the blue one.
    rows = np.concatenate([images[..., c].reshape(12, -1) for c in range(3)], axis=1)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        part = slice(2 * i, 2 * i + 2)
        (tmp_path / name).write_bytes(python_2_pickle(rows[part], labels[part].tolist()))
    return tmp_path, images, labels


def test_cifar10_batches_in_the_layout_of_their_authors(batches):
    folder, images, labels = batches
    data = datasets.load("cifar10", source="files", folder=folder)
    assert np.array_equal(data.x_train.numpy(), images[:10])
    assert np.array_equal(data.x_test.numpy(), images[10:])
    assert data.y_train.tolist() == labels[:10].tolist()
    assert data.y_test.tolist() == labels[10:].tolist()


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("owned",))


BATCH = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({b"data": Malicious()}, 3), r"asks for \w+.mkdir.*might run code"),
        (pickle.dumps(BATCH, 3)[:-500], "not a CIFAR-10 python batch, or is truncated"),
        (pickle.dumps([1, 2], 3), "not a CIFAR-10 python batch"),
        (b"", "not a CIFAR-10 python batch"),
        (pickle.dumps({**BATCH, b"data": [[1] * 3072]}, 3), "no uint8 data with rows of 3072"),
        (pickle.dumps({**BATCH, b"labels": [1]}, 3), "2 images, but 1 labels"),
        (pickle.dumps({**BATCH, b"labels": [1, 10]}, 3), "labels other than 0 to 9"),
    ],
)
def test_damaged_or_hostile_batches(batches, content, words, monkeypatch):
    folder = batches[0]
    monkeypatch.chdir(folder)
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=words):
        datasets.load("cifar10", source="files", folder=folder)
    assert not (folder / "owned").exists()
