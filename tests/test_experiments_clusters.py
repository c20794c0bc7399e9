"""Clusters of group means: distances, silhouettes and the toy, compared with naive computations."""

import json
import math

import pytest
import torch
from PIL import Image

from lowgrad_utils import classifiers, datasets, trained_networks
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import clusters
from lowgrad_utils.experiments.toy_levels import toy_levels
from lowgrad_utils.three_levels import ThreeLevels, three_levels

CLASSES = 4


@pytest.fixture
def levels():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, CLASSES, 30, generator=generator, dtype=torch.float64)
    means += 2 * torch.randn(CLASSES, 1, 30, generator=generator, dtype=torch.float64)
    return ThreeLevels.of(means, torch.full((CLASSES,), 5))


def off_diagonal(means):
    return torch.stack([means[c, k] for c in range(CLASSES) for k in range(CLASSES) if k != c])


def test_distances_are_those_between_the_vectors(levels):
    rows = off_diagonal(levels.means)
    torch.testing.assert_close(clusters.distances(levels), torch.cdist(rows, rows))
    unit = rows / rows.norm(dim=1, keepdim=True)
    found = clusters.distances(levels, directions=True)
    torch.testing.assert_close(found, torch.cdist(unit, unit), atol=1e-7, rtol=1e-7)


def test_within_between_from_the_vectors(levels):
    centres, within = [], []
    for c in range(CLASSES):
        own = torch.stack([levels.means[c, k] for k in range(CLASSES) if k != c])
        centres.append(own.mean(0))
        within += [float((row - own.mean(0)).square().sum()) for row in own]
    centres = torch.stack(centres)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    expected = math.sqrt(sum(within) / len(within) / between)
    assert clusters.within_between(levels) == pytest.approx(expected, rel=1e-12)


def test_silhouette_as_defined(levels):
    matrix, labels = clusters.distances(levels), clusters.group_labels(CLASSES)[0]
    scores = []
    for i in range(len(labels)):
        own = [float(matrix[i, j]) for j in range(len(labels)) if j != i and labels[j] == labels[i]]
        others = [
            float(matrix[i][labels == c].mean()) for c in range(CLASSES) if c != int(labels[i])
        ]
        a, b = sum(own) / len(own), min(others)
        scores.append((b - a) / max(a, b))
    expected = sum(scores) / len(scores)
    assert clusters.silhouette(matrix, labels) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9])
def test_silhouette_of_clusters_of_a_given_cosine(cosine):
    found = clusters.silhouette(
        clusters.distances(clusters.clusters_of_cosine(6, cosine)), clusters.group_labels(6)[0]
    )
    assert found == pytest.approx(1 - math.sqrt(1 - cosine), abs=1e-12)


@pytest.mark.parametrize("p", [0.3, 0.8, 0.99])
@pytest.mark.parametrize("cosine", [0.0, 0.6])
def test_the_toy_in_closed_form(p, cosine):
    toy = toy_levels(5, p, cosine)
    assert clusters.toy_within_between(5, p, cosine) == pytest.approx(clusters.within_between(toy))
    ratio = float(toy.lengths[0, 0] / toy.lengths[0, 1])
    assert clusters.toy_own_length(5, p) == pytest.approx(ratio)


def test_orthogonal_means_of_one_length_have_the_ratio_of_no_clusters(levels):
    none = clusters.without_structure(clusters.unit_lengths(levels))
    expected = math.sqrt(CLASSES * (CLASSES - 2) / (CLASSES - 1))
    assert clusters.within_between(none) == pytest.approx(expected)
    torch.testing.assert_close(
        clusters.without_structure(levels).lengths, levels.lengths, atol=0, rtol=1e-12
    )


def test_embedding_keeps_two_far_groups_apart_and_repeats():
    whole = 0
    for k in range(5):
        stream = torch.Generator().manual_seed(k)
        points = torch.randn(40, 5, generator=stream, dtype=torch.float64)
        points[20:] += 50
        matrix = torch.cdist(points, points)
        plane = clusters.embed(matrix, perplexity=5, seed=3)
        assert plane.shape == (40, 2)
        assert torch.equal(plane, clusters.embed(matrix, perplexity=5, seed=3))
        labels, score = clusters.clusters_seen(plane, 2)
        assert score > 0.5
        whole += len(set(labels[:20].tolist())) == len(set(labels[20:].tolist())) == 1
    # t-SNE starts at random and may tear a group apart, one set of points in twenty.
    assert whole >= 4


def test_numbers_of_tight_clusters_and_of_none():
    tight = clusters.cluster_numbers(clusters.clusters_of_cosine(10, 0.95))
    assert tight["within_between"] < 0.4
    assert tight["cosine_within"] == pytest.approx(0.95)
    assert min(tight[name] for name in tight if name.startswith("silhouette")) > 0.7
    none = clusters.cluster_numbers(clusters.clusters_of_cosine(10, 0.0))
    assert none["within_between"] == pytest.approx(math.sqrt(80 / 9))
    assert max(none[name] for name in none if name.startswith("silhouette")) < 0.05


def test_bad_input(levels):
    with pytest.raises(ValueError, match="perplexity is 12, but below 12 points"):
        clusters.embed(clusters.distances(levels), perplexity=12)
    with pytest.raises(ValueError, match=r"cosine is 1\.2"):
        clusters.clusters_of_cosine(3, 1.2)
    with pytest.raises(ValueError, match="classes is 1"):
        clusters.clusters_of_cosine(1, 0.2)
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        clusters.toy_own_length(10, 1.5)
    with pytest.raises(ValueError, match="classes is 2"):
        clusters.toy_within_between(2, 0.5)


@pytest.fixture
def picture_folder(tmp_path):
    x, labels = datasets.load("cifar10").images(per_class=3, seed=0)
    for k, (image, label) in enumerate(zip(x, labels.tolist())):
        place = tmp_path / f"class-{label}"
        place.mkdir(exist_ok=True)
        pixels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(place / f"{k:03d}.png")
    return tmp_path, x, labels


def test_a_folder_of_images_gives_what_the_images_give(picture_folder):
    folder, x, labels = picture_folder
    model = classifiers.build("vgg11", width=1 / 16, dtype=torch.float64).eval()
    levels, names = clusters.folder_levels(model, folder)
    assert names == tuple(f"class-{c}" for c in range(10))
    direct = three_levels(LossCurvature(model, (x.double(), labels)))
    torch.testing.assert_close(levels.gram, direct.gram, rtol=1e-6, atol=1e-9)


def test_a_folder_with_other_classes_than_the_model_is_refused(picture_folder):
    folder, _, _ = picture_folder
    model = classifiers.build("mlp", classes=12, width=1 / 16).eval()
    with pytest.raises(ValueError, match="12 logits for 10 subfolders"):
        clusters.folder_levels(model, folder)
    with pytest.raises(datasets.DataError, match="does not exist"):
        clusters.folder_levels(model, folder / "missing")


def test_stored_levels_are_those_of_the_network():
    stored = clusters.stored_levels()
    assert list(stored) == trained_networks.names()
    name = "mnist-vgg11"
    network = trained_networks.load(name)
    live = three_levels(network.curvature())
    levels, fit = stored[name]
    assert (levels.gram - live.gram).norm() < 1e-3 * live.gram.norm()
    assert fit["accuracy"] == pytest.approx(
        classifiers.evaluate(network.model, *network.train_set).accuracy, abs=2e-3
    )


def test_a_changed_store_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "group-means.npz"
    monkeypatch.setattr(clusters, "_store_path", lambda: path)
    with pytest.raises(classifiers.CheckpointError, match="missing"):
        clusters.stored_levels()
    path.write_bytes(b"something else")
    path.with_suffix(".json").write_text(json.dumps({"sha256": "0" * 64, "networks": {}}))
    with pytest.raises(classifiers.CheckpointError, match="not the file"):
        clusters.stored_levels()


def test_group_means_of_other_weights_are_refused(monkeypatch):
    own = clusters._weights_hash
    assert list(clusters.stored_levels()) == trained_networks.names()
    monkeypatch.setattr(
        clusters, "_weights_hash", lambda name: "0" if name == "mnist-resnet18" else own(name)
    )
    with pytest.raises(classifiers.CheckpointError, match="other weights of mnist-resnet18; run"):
        clusters.stored_levels()


def test_a_cell_trains_and_measures():
    cell = clusters.size_cell("mnist", "mlp", 10, size=8, steps=30, seed=1)
    assert {"within_between", "silhouette_tsne", "own_length", "probability"} <= set(cell)
    assert all(math.isfinite(value) for value in cell.values())
    assert cell == clusters.size_cell("mnist", "mlp", 10, size=8, steps=30, seed=1)
    parameters = [tuple(sorted(cell.items())) for cell in clusters.size_cells()]
    assert len(set(parameters)) == len(parameters)
