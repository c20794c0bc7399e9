import json

import pytest
import torch

from lowgrad_utils import classifiers, datasets, files, trained_networks
from lowgrad_utils.classifiers import CheckpointError

CELL = {
    "dataset": "mnist",
    "network": "mlp",
    "per_class": 3,
    "learning_rate": 0.1,
    "width": 1 / 32,
    "size": 8,
    "seed": 2,
}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of its own, with one network in it."""
    monkeypatch.setattr(trained_networks, "folder", lambda: tmp_path)
    model = classifiers.build("mlp", channels=1, width=1 / 32, size=8, seed=5)
    assert trained_networks.store(model, CELL) == "mnist-mlp"
    return tmp_path, model


def test_a_network_comes_back_with_its_images(shelf):
    _, model = shelf
    network = trained_networks.load("mnist-mlp")
    x, labels = datasets.load("mnist").images(per_class=3, size=8, seed=2)
    torch.testing.assert_close(network.train_set[0], x, rtol=0, atol=0)
    assert torch.equal(network.train_set[1], labels)
    assert torch.equal(network.test_set[1], datasets.load("mnist").y_test)
    assert not network.model.training
    state = network.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert network.about == CELL
    assert repr(network).startswith("TrainedNetwork(mnist-mlp: ")
    at = network.curvature(memory=0.5)
    assert (at.n, at.counts.tolist(), at._bytes) == (30, [3] * 10, 5e8)


def test_positions_do_not_depend_on_the_stream(shelf, monkeypatch):
    before = trained_networks.load("mnist-mlp").train_set[0]
    monkeypatch.setenv("LOWGRAD_FRESH_SEEDS", "1")
    assert torch.equal(trained_networks.load("mnist-mlp").train_set[0], before)


def test_a_second_network_joins_and_a_new_one_replaces(shelf):
    folder, _ = shelf
    other = classifiers.build("mlp", channels=1, width=1 / 32, size=8, seed=6)
    trained_networks.store(other, CELL | {"dataset": "fashion_mnist"})
    trained_networks.store(other, CELL)
    assert trained_networks.names() == ["fashion_mnist-mlp", "mnist-mlp"]
    weight = next(trained_networks.load("mnist-mlp").model.parameters())
    assert torch.equal(weight, next(other.parameters()))
    assert not list(folder.glob("*.partial"))


def test_what_is_missing_or_damaged_is_named(shelf):
    folder, _ = shelf
    with pytest.raises(ValueError, match="name is 'mnist-vgg', but one of mnist-mlp is needed"):
        trained_networks.load("mnist-vgg")
    path = folder / "mnist-mlp.pt"
    kept = path.read_bytes()
    path.write_bytes(kept[:-1])
    with pytest.raises(CheckpointError, match=r"mnist-mlp.pt does not have the SHA-256"):
        trained_networks.load("mnist-mlp")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"mnist-mlp.pt cannot be read"):
        trained_networks.load("mnist-mlp")
    manifest = folder / "networks.json"
    for text in ("{", "[]", json.dumps({"mnist-mlp": {}})):
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=r"networks.json is missing or damaged"):
            trained_networks.load("mnist-mlp")
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"networks.json is missing or damaged"):
        trained_networks.names()


def test_the_shipped_networks_are_those_of_the_manifest():
    wanted = {
        f"{data}-{network}"
        for data in ("mnist", "fashion_mnist", "cifar10")
        for network in ("vgg11", "resnet18", "densenet40")
    }
    assert set(trained_networks.names()) == wanted
    size = sum(path.stat().st_size for path in trained_networks.folder().iterdir())
    assert size < 10e6


@pytest.mark.parametrize("name", ["mnist-vgg11", "cifar10-resnet18", "fashion_mnist-densenet40"])
def test_shipped_networks_know_their_images(name):
    network = trained_networks.load(name)
    on_train = classifiers.evaluate(network.model, *network.train_set)
    # The wrong images, or an order of channels of its own, would leave one in ten.
    assert on_train.accuracy > 0.9
    assert network.train_set[1].bincount().tolist() == [100] * 10


def test_the_folder_of_a_wheel_comes_first(tmp_path, monkeypatch):
    assert trained_networks.folder().name == "networks"
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "package")
    assert trained_networks.folder() == tmp_path / "data" / "networks"
    (tmp_path / "package" / "data").mkdir(parents=True)
    assert trained_networks.folder() == tmp_path / "package" / "data" / "networks"
