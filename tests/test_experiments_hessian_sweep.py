import math

import pandas as pd
import pytest
import torch

from lowgrad_utils import classifiers, datasets, grids
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import hessian_sweep
from lowgrad_utils.three_levels import three_levels

TINY = dict(label_smoothing=0.0, width=1.0, size=8, seed=0)


def cell(**changes):
    return {
        "dataset": "mnist",
        "network": "mlp",
        "per_class": 4,
        "learning_rate": 0.1,
        "weight_decay": 5e-4,
        "epochs": 2,
        **TINY,
        **changes,
    }


# --- the paper's grid -----------------------------------------------------------------------------


def test_sample_sizes_are_the_papers():
    sizes = hessian_sweep.sample_sizes()
    assert len(sizes) == 20 and sizes == sorted(set(sizes))
    assert {10, 13, 263, 702, 5000} <= set(sizes)
    assert all(s <= 10 * 500 ** (i / 19) + 1e-6 < s + 1 + 1e-6 for i, s in enumerate(sizes))


def test_learning_rates_are_evenly_spaced_in_logarithm():
    rates = torch.tensor(hessian_sweep.learning_rates(), dtype=torch.float64)
    assert len(rates) == 100 and float(rates[0]) == 1e-4 and float(rates[-1]) == 0.25
    assert float(rates.log().diff().std()) < 1e-5


def test_the_whole_grid_has_18000_trainings():
    cells = hessian_sweep.paper_cells(source="full")
    assert len(cells) == 3 * 3 * 20 * 100
    assert {c["epochs"] for c in cells if c["dataset"] == "cifar10"} == {350}
    assert {c["epochs"] for c in cells if c["dataset"] != "cifar10"} == {200}
    assert {c["width"] for c in cells} == {1.0}


def test_a_size_that_the_shipped_images_do_not_have_names_the_full_set():
    with pytest.raises(ValueError, match="702 images; --source full has more"):
        hessian_sweep.paper_cells(["mnist"], ["vgg11"], [931], [0.1])
    with pytest.raises(ValueError, match=r"cifar10.*300 images"):
        hessian_sweep.paper_cells(["cifar10"], ["vgg11"], [702], [0.1])
    assert len(hessian_sweep.paper_cells(["mnist"], ["vgg11"], [931], [0.1], source="full")) == 1
    with pytest.raises(ValueError, match=r"5000 images$"):
        hessian_sweep.paper_cells(["cifar10"], ["vgg11"], [5001], [0.1], source="full")


@pytest.mark.parametrize("name", hessian_sweep.IMAGE_SETS)
def test_largest_sizes_are_those_of_the_shipped_images(name):
    counts = torch.bincount(datasets.load(name).y_train)
    assert int(counts.min()) == hessian_sweep.LARGEST["shipped"][name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_sets": ["svhn"]}, "dataset is 'svhn'"),
        ({"networks": ["vgg16"]}, "network is 'vgg16'"),
        ({"sizes": [0]}, "sizes is 0"),
        ({"rates": [-0.1]}, "rates is -0.1"),
        ({"seeds": [-1]}, "seeds has -1"),
        ({"width": 0.0}, "width is 0"),
        ({"size": 20}, "size is 20"),
        ({"epochs": 0}, "epochs is 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
        ({"source": "files"}, "source is 'files'"),
    ],
)
def test_bad_parts_of_the_grid_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        hessian_sweep.paper_cells(**{"sizes": [10], "rates": [0.1], **changes})


def test_stored_cells_are_all_different_and_near_the_papers_sizes():
    cells = hessian_sweep.stored_cells()
    assert len({tuple(c.items()) for c in cells}) == len(cells)
    # 100 is ours, in place of the paper's 98.
    assert {c["per_class"] for c in cells} - set(hessian_sweep.sample_sizes()) == {100}


def test_arms_change_what_they_say_and_share_seeds():
    cells = hessian_sweep.arm_cells()
    standard = cells[0]
    names = {
        name: {key for key in standard if c[key] != standard[key]}
        for name, c in zip(hessian_sweep.ARMS, cells)
    }
    assert names["decay 0.01, 120 epochs"] == {"weight_decay", "epochs"}
    assert names["smoothing 0.1"] == {"label_smoothing"} and names["standard"] == set()
    assert len({tuple(c.items()) for c in cells}) == len(cells) == 3 * len(names)
    assert 0 not in {c["seed"] for c in hessian_sweep.seed_cells()}


# --- winners --------------------------------------------------------------------------------------


def table(rows):
    return pd.DataFrame(
        [
            {**cell(learning_rate=rate, **extra), "test_error": e, "test_loss": loss, "diverged": d}
            for rate, e, loss, d, extra in rows
        ]
    )


def test_the_least_test_error_wins_and_ties_go_to_the_smaller_loss():
    rows = [
        (0.01, 0.3, 0.1, False, {}),
        (0.03, 0.2, 0.9, False, {}),
        (0.1, 0.2, 0.8, False, {}),
        (0.25, math.nan, math.nan, True, {}),
        (0.01, 0.5, 0.5, False, {"weight_decay": 1e-2}),
    ]
    chosen = hessian_sweep.winners(table(rows))
    assert [(c["weight_decay"], c["learning_rate"]) for c in chosen] == [(5e-4, 0.1), (1e-2, 0.01)]
    assert chosen[0] == cell() and type(chosen[0]["per_class"]) is int


def test_other_seeds_repeat_the_stored_winners():
    chosen = hessian_sweep.winners(grids.stored("hessian-training"))
    repeated = [{**c, "seed": 0} for c in hessian_sweep.seed_cells()]
    assert len(repeated) == 12 and all(c in chosen for c in repeated)


def test_a_source_is_kept():
    rows = table([(0.1, 0.2, 0.1, False, {"source": "full"})])
    assert hessian_sweep.winners(rows)[0]["source"] == "full"


def test_no_winner_among_diverged_trainings():
    with pytest.raises(ValueError, match=r"every learning rate diverged.*'per_class': 4"):
        hessian_sweep.winners(table([(0.25, math.nan, math.nan, True, {})]))


# --- cells ----------------------------------------------------------------------------------------


def test_batches_are_of_equal_size(monkeypatch):
    sizes = []
    monkeypatch.setattr(classifiers, "fit", lambda *a, batch_size, **k: sizes.append(batch_size))
    for per_class in (4, 13, 26, 100):
        hessian_sweep.train(**cell(per_class=per_class))
    # 40; 130 = 2 * 65; 260 = 2 * 87 + 86; 1000 = 8 * 125.
    assert sizes == [40, 65, 87, 125]


def test_a_diverged_training_says_so():
    row = hessian_sweep.training_cell(**cell(learning_rate=1e6, epochs=20))
    assert row.pop("diverged") is True and all(math.isnan(value) for value in row.values())


def test_cells_that_differ_in_rate_share_images_and_weights():
    short = [hessian_sweep.train(**cell(learning_rate=r)) for r in (1e-9, 2e-9)]
    assert torch.equal(short[0][1][0], short[1][1][0])
    first, second = (torch.cat([p.flatten() for p in s[0].parameters()]) for s in short)
    assert float((first - second).abs().max()) < 1e-6


def test_a_spectrum_cell_agrees_with_the_training_cell():
    spectra = hessian_sweep.spectrum_cell(**cell())
    trained = hessian_sweep.training_cell(**cell())
    assert trained.pop("diverged") is False
    assert trained == {name: spectra[name] for name in trained}


# --- measure --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A small network, its curvature, and its logit derivatives, one by one."""
    x, y = datasets.load("mnist").images(per_class=5, size=8, dtype=torch.float64)
    model = classifiers.build("mlp", channels=1, size=8, hidden=(6,), dtype=torch.float64)
    classifiers.fit(model, x, y, epochs=15, progress=False)
    curvature = LossCurvature(model, (x, y))
    numbers = hessian_sweep.measure(curvature, three_levels(curvature))
    p = curvature.probabilities
    rows = torch.zeros(50, 10, curvature.size, dtype=torch.float64)
    for i, image in enumerate(curvature._inputs):
        logits = model(image[None])[0]
        jacobian = torch.stack(
            [
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(z, list(model.parameters()), retain_graph=True)
                    ]
                )
                for z in logits
            ]
        )
        rows[i] = p[i].sqrt()[:, None] * (jacobian - p[i] @ jacobian)
    return numbers, rows, curvature.labels


def centres_of(rows, labels):
    means = torch.stack([rows[labels == c].mean(0) for c in range(10)])
    return means, torch.stack([torch.cat([m[:c], m[c + 1 :]]) for c, m in enumerate(means)])


def falling(numbers, name, count):
    return torch.tensor([numbers[f"{name}_{k + 1}"] for k in range(count)], dtype=torch.float64)


def test_spectra_agree_with_explicit_matrices(small):
    numbers, rows, labels = small
    means, others = centres_of(rows, labels)
    flat = rows.flatten(0, 1)
    matrices = {
        "G": flat.T @ flat / 50,
        "G1+2": means.flatten(0, 1).T @ means.flatten(0, 1) / 10,
        "G1": 9 * others.mean(1).T @ others.mean(1) / 10,
        "G0": sum(torch.outer(means[c, c], means[c, c]) for c in range(10)) / 10,
    }
    for name, matrix in matrices.items():
        count = hessian_sweep.COUNTS[name]
        expected = torch.linalg.eigvalsh(matrix).flip(0)[:count]
        measured = falling(numbers, name, count)
        # Top eigenpairs of G are asked for to 1e-4 of themselves.
        close = 1e-4 * expected if name == "G" else 1e-9 * expected[0]
        assert bool(((measured - expected).abs() <= close).all()), name
    q = torch.linalg.qr(others.mean(1).T).Q
    ritz = torch.linalg.eigvalsh(q.T @ matrices["G"] @ q).flip(0)
    assert torch.allclose(falling(numbers, "ritz", 10), ritz, rtol=1e-9)
    top = torch.linalg.eigh(matrices["G"]).eigenvectors.flip(1)[:, :8]
    assert torch.allclose(falling(numbers, "inside", 8), (q.T @ top).square().sum(0), atol=1e-3)


def test_evenness_and_coherence_agree_with_loops(small):
    numbers, rows, labels = small
    means, others = centres_of(rows, labels)
    within, sizes, directions, shares = [], [], [], []
    for c in range(10):
        for k in range(10):
            if k != c:
                along = rows[labels == c, k] @ means[c, k]
                within.append(float(along.mean() ** 2 / along.square().mean()))
        lengths = others[c].norm(dim=1)
        sizes.append(float(lengths.mean() ** 2 / lengths.square().mean()))
        directions.append(float(others[c].mean(0).norm() ** 2 / lengths.mean() ** 2))
        shares.append(float(others[c].mean(0).norm() ** 2 / lengths.square().mean()))

    def median(values):
        return float(torch.tensor(values, dtype=torch.float64).median())

    assert numbers["evenness"] == pytest.approx(median(within), rel=1e-9)
    assert numbers["logit_evenness"] == pytest.approx(median(sizes), rel=1e-9)
    assert numbers["coherence"] == pytest.approx(median(directions), rel=1e-9)
    # For one class the share of the centre is the product.
    assert shares == pytest.approx([s * d for s, d in zip(sizes, directions)])
    traces = [float(others[c].mean(0).norm() ** 2) for c in range(10)]
    total = [float(others[c].norm(dim=1).square().mean()) for c in range(10)]
    assert numbers["centre_share"] == pytest.approx(sum(traces) / sum(total), rel=1e-9)
