import math

import numpy as np
import pandas as pd
import pytest
import torch

from lowgrad_utils import trained_networks
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import excess
from lowgrad_utils.three_levels import ThreeLevels, evenness, explicit_terms, three_levels

FLOAT = torch.float64


def symmetric(size, rank, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, rank, generator=generator, dtype=FLOAT)
    return scale * x @ x.T / size


MEANS, REST = symmetric(40, 5, seed=1, scale=6.0), symmetric(40, 60, seed=2)
SPLIT = excess.Split.of(MEANS, REST)
TRUE = torch.linalg.eigvalsh(MEANS + REST).flip(0)


@pytest.fixture(scope="module")
def network():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(excess, "HIDDEN", (4,))
        model, (x, labels) = excess.small_network("mnist", 20, 5e-4, 0.0, seed=3)
    # Unequal classes, so that a weight 1/C in place of pi_c would show.
    kept = torch.cat([torch.nonzero(labels == c).flatten()[: 5 + 2 * c] for c in range(10)])
    return LossCurvature(model, (x[kept], labels[kept]))


def test_a_split_keeps_the_sum_and_finds_the_rank():
    assert SPLIT.theta.shape == (5,)
    torch.testing.assert_close(SPLIT.eigenvalues(), TRUE)
    torch.testing.assert_close(SPLIT.couplings, SPLIT.directions.T @ REST @ SPLIT.directions)


def test_first_order_is_a_rayleigh_quotient_of_the_sum():
    u = SPLIT.directions
    quotients = torch.stack([c @ (MEANS + REST) @ c for c in u.T])
    torch.testing.assert_close(SPLIT.first_order(), quotients)
    torch.testing.assert_close(
        SPLIT.alignment() * REST.trace() / 40, torch.stack([c @ REST @ c for c in u.T])
    )


def test_second_order_is_the_taylor_polynomial_in_the_rest():
    # Third differences of the true eigenvalues vanish as t^3.
    errors = []
    for t in (0.02, 0.01):
        split = excess.Split.of(MEANS, t * REST)
        true = torch.linalg.eigvalsh(MEANS + t * REST).flip(0)[:5]
        errors.append(float((split.second_order() - true).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.1)


def test_roots_of_the_secular_equation_are_all_eigenvalues_above_the_rest():
    roots = SPLIT.roots()
    assert len(roots) == int((SPLIT.rest[0] * (1 + 1e-7) < TRUE).sum()) >= 3
    torch.testing.assert_close(roots, TRUE[: len(roots)], rtol=1e-11, atol=0)


def test_a_single_root_is_the_top_eigenvalue_with_that_spike_alone():
    for k, root in enumerate(SPLIT.single_roots(3)):
        u = SPLIT.directions[:, k]
        alone = REST + SPLIT.theta[k] * torch.outer(u, u)
        assert float(root) == pytest.approx(float(torch.linalg.eigvalsh(alone)[-1]), rel=1e-8)


def test_no_root_without_a_spike_that_reaches_the_rest():
    # u is orthogonal to the top of B and theta is small.
    means = torch.diag(torch.tensor([0.0, 0.1, 0.0], dtype=FLOAT))
    rest = torch.diag(torch.tensor([5.0, 1.0, 1.0], dtype=FLOAT))
    split = excess.Split.of(means, rest)
    assert len(split.roots()) == 0
    assert split.single_roots(1).tolist() == [5.0]


@pytest.mark.parametrize("approximation", excess.APPROXIMATIONS)
def test_a_networks_split_is_made_of_its_terms(network, approximation):
    derivatives = network.logit_derivatives()
    terms = explicit_terms(derivatives, network.labels)
    split = excess.network_split(network, approximation)
    means = {"G1+2": terms["G0"] + terms["G1"] + terms["G2"], "G1": terms["G1"]}[approximation]
    rebuilt = split.directions * split.theta @ split.directions.T
    # Spikes below 1e-9 of the largest are counted to the rest.
    slack = 2e-9 * float(split.theta[0])
    torch.testing.assert_close(rebuilt, means, rtol=0, atol=slack)
    rest = torch.linalg.eigvalsh(terms["G"] - means).flip(0)
    torch.testing.assert_close(split.rest, rest, rtol=0, atol=slack)


def test_random_directions_keep_both_spectra_and_know_nothing():
    size = 300
    rest = torch.linspace(0, 1, size, dtype=FLOAT)
    theta = torch.tensor([5.0, 3.0], dtype=FLOAT)
    values, inside = excess.isotropic(theta, rest, 2, seed=0)
    # To leading order theta + mean + variance / theta.
    expected = theta + rest.mean() + rest.var() / theta
    torch.testing.assert_close(values, expected, rtol=0.02, atol=0)
    assert inside > 0.9
    other = excess.isotropic(theta, rest, 2, seed=1)[0]
    assert not torch.equal(values, other)


def test_union_of_spikes_and_outliers_is_the_limit_of_random_directions():
    rest = torch.zeros(1500, dtype=FLOAT)
    rest[:3] = torch.tensor([4.0, 2.0, 1.0], dtype=FLOAT)
    theta = torch.tensor([3.0, 1.5], dtype=FLOAT)
    drawn = excess.isotropic(theta, rest, 4, seed=0)[0]
    limit = excess.union_eigenvalues(theta, rest[:3], float(rest.mean()), 4)
    torch.testing.assert_close(drawn, limit, rtol=0.01, atol=0)


def test_rescaled_means_carry_the_second_moment_of_groups_that_only_change_size():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 3, 30, generator=generator, dtype=FLOAT)
    labels = torch.tensor([0] * 8 + [1] * 12 + [2] * 5)
    sizes = torch.rand(25, 3, generator=generator, dtype=FLOAT) + 0.1
    derivatives = sizes[:, :, None] * means[labels]
    curvature_free = torch.stack([derivatives[labels == c].mean(0) for c in range(3)])
    levels = ThreeLevels.of(curvature_free, labels.bincount())
    even = excess.evenness_of(derivatives, labels, levels.means)
    naive = torch.tensor(
        [[float(s.mean() ** 2 / s.square().mean()) for s in sizes[labels == c].T] for c in range(3)]
    )
    torch.testing.assert_close(even, naive.double(), rtol=1e-6, atol=0)
    flat = derivatives.flatten(0, 1)
    expected = torch.linalg.eigvalsh(flat.T @ flat / 25).flip(0)[:9]
    torch.testing.assert_close(excess.rescaled_eigenvalues(levels, even), expected)


def test_explicit_evenness_agrees_with_the_matrix_free_one(network):
    levels = three_levels(network)
    explicit = excess.evenness_of(network.logit_derivatives(), network.labels, levels.means)
    torch.testing.assert_close(explicit, evenness(network, levels.means))


def test_gaussian_classes_have_the_moments_they_claim():
    spikes = torch.tensor([6.0, 3.0, 2.0, 1.0], dtype=FLOAT)
    classes = excess.gaussian_classes(60, 4000, spikes, evenness=0.6, seed=1)
    flat = classes.derivatives.flatten(0, 1)
    # G tends to sum_g x_g E s^2 u_g u_g^T + identity.
    values = torch.linalg.eigvalsh(flat.T @ flat / len(classes.labels)).flip(0)
    torch.testing.assert_close(values[:4], spikes / 0.6 + 1, rtol=0.08, atol=0)
    assert float(values[4:].mean()) == pytest.approx(1, rel=0.01)
    assert float(classes.evenness.mean()) == pytest.approx(0.6, abs=0.05)
    assert float(classes.sizes.mean()) == pytest.approx(1, abs=0.02)
    top = excess.top_of_second_moment(classes.derivatives, 3)
    torch.testing.assert_close(top, values[:3])


def test_top_of_second_moment_works_on_either_side():
    classes = excess.gaussian_classes(80, 5, torch.zeros(4, dtype=FLOAT), seed=0)
    flat = classes.derivatives.flatten(0, 1)
    expected = torch.linalg.eigvalsh(flat.T @ flat / 10).flip(0)[:4]
    torch.testing.assert_close(excess.top_of_second_moment(classes.derivatives, 4), expected)


def test_the_laws_of_gaussian_classes_agree_with_each_other_and_the_sample():
    spikes = torch.tensor([20.0, 10.0, 5.0, 0.0], dtype=FLOAT)
    found = excess.gaussian_outliers(excess.gaussian_classes(600, 300, spikes, seed=2), 3)
    for name in ("isotropic", "population", "sizes"):
        torch.testing.assert_close(found[name], found["measured"], rtol=0.04, atol=0)
    assert bool((found["means"] < 0.97 * found["measured"]).all())
    torch.testing.assert_close(found["population"], found["sizes"])


def test_predictions_agree_with_explicit_matrices(network):
    found = excess.predictions(network, 0)
    terms = explicit_terms(network.logit_derivatives(), network.labels)
    means = terms["G0"] + terms["G1"] + terms["G2"]
    for name, matrix in (("G", terms["G"]), ("means", means), ("centres", terms["G1"])):
        expected = torch.linalg.eigvalsh(matrix).flip(0)[: excess.OUTLIERS]
        got = [found[f"{name}_{k}"] for k in range(1, excess.OUTLIERS + 1)]
        np.testing.assert_allclose(got, expected, rtol=1e-8)
    levels = three_levels(network)
    q = torch.linalg.qr(levels.centres.T).Q
    vectors = torch.linalg.eigh(terms["G"]).eigenvectors[:, -excess.OUTLIERS :]
    inside = float((q.T @ vectors).square().sum()) / excess.OUTLIERS
    assert found["inside"] == pytest.approx(inside, rel=1e-8)
    assert found["edge"] == pytest.approx(float(torch.linalg.eigvalsh(terms["G3"])[-1]), rel=1e-9)
    assert found["root_error"] < 1e-9 and found["roots"] >= 1
    assert found["isotropic_inside"] < 0.2


def test_products_alone_give_the_same(network):
    explicit, products = excess.predictions(network, 0), excess.network_predictions(network)
    exact = ("G", "means", "centres", "rescaled", "first", "second", "ritz_centres")
    for name in exact:
        for k in range(1, excess.OUTLIERS + 1):
            assert products[f"{name}_{k}"] == pytest.approx(explicit[f"{name}_{k}"], rel=1e-5)
    for k in range(1, excess.OUTLIERS + 1):
        # What is known of B is restricted to some directions, and a trace is estimated.
        assert products[f"single_{k}"] == pytest.approx(explicit[f"single_{k}"], rel=0.02)
        assert products[f"isotropic_{k}"] == pytest.approx(explicit[f"isotropic_{k}"], rel=0.06)
        assert products[f"alignment_{k}"] == pytest.approx(explicit[f"alignment_{k}"], rel=0.05)
    assert products["edge"] == pytest.approx(explicit["edge"], rel=0.01)
    assert products["evenness"] == pytest.approx(explicit["evenness"], rel=1e-9)


def test_secular_errors_count_what_is_missing():
    found = excess.secular_errors(SPLIT)
    assert found["all"][0] < 1e-10 and found["all"][1] == 0
    top = [
        float(torch.linalg.eigvalsh(REST + t * torch.outer(u, u))[-1])
        for t, u in zip(SPLIT.theta, SPLIT.directions.T)
    ]
    above = int((SPLIT.rest[0] * (1 + 1e-7) < TRUE).sum())
    wrong = max(abs(x / y - 1) for x, y in zip(sorted(top, reverse=True), TRUE[:above].tolist()))
    assert found["each"][0] == pytest.approx(wrong, rel=1e-6)


def test_tables_are_read():
    rows = {f"{name}_{k}": [value] * 2 for k in range(1, 10) for name, value in TABLE.items()}
    frame = pd.DataFrame(rows)
    frame.loc[1, "half_1"] = np.nan
    assert excess.columns(frame, "means").shape == (2, 9)
    np.testing.assert_allclose(excess.predicted_excess(frame.head(1), "half"), 0.5)
    assert excess.explained(frame, "all").value == pytest.approx(1)
    assert excess.relative_errors(frame, excess.columns(frame, "half")) == pytest.approx([0.25] * 2)


TABLE = {"means": 1.0, "G": 2.0, "half": 1.5, "all": 2.0}


def test_a_single_spike_and_its_edge():
    found = excess.single_spike(0.2, size=300, seed=0)
    assert found["measured"] == pytest.approx(found["edge"], rel=0.05)
    strong = excess.single_spike(6.0, size=300, seed=0)
    assert strong["measured"] == pytest.approx(strong["population"], rel=0.1)
    assert strong["measured"] > 1.5 * strong["edge"]


def test_errors_of_gaussian_classes():
    errors = excess.gaussian_errors(300, ratio=0.5, seed=1)
    assert errors["isotropic"].abs().max() < 0.1 and errors["means"].max() < -0.05
    assert errors["rescaled"].abs().median() > 3 * errors["isotropic"].abs().median()
    sized = excess.gaussian_errors(300, ratio=0.5, evenness=0.5, seed=1)
    assert sized["sizes"].abs().median() < 0.1 < sized["isotropic"].abs().median()


def test_the_trace_outside_some_directions_is_estimated(network):
    rest = explicit_terms(network.logit_derivatives(), network.labels)["G3"]
    q = torch.linalg.eigh(rest).eigenvectors[:, -10:]
    true = float(rest.trace() - (q.T @ rest @ q).trace())
    found = excess.trace_within(network.gauss_newton, three_levels(network), basis=q, probes=30)
    assert found == pytest.approx(true, rel=0.1)


def test_cells_run_and_are_declared_once(monkeypatch):
    monkeypatch.setattr(excess, "HIDDEN", (2,))
    cells = excess.small_network_cells()
    assert len({tuple(cell.items()) for cell in cells}) == len(cells) == 84
    names = [cell["network"] for cell in excess.network_cells()]
    assert len(set(names)) == len(names) and set(names) <= set(trained_networks.names())
    cell = excess.small_network_cell("fashion_mnist", 0, 5e-4, 0.0, seed=1)
    again = excess.small_network_cell("fashion_mnist", 0, 5e-4, 0.0, seed=1)
    assert cell == again
    assert all(math.isfinite(value) for value in cell.values())


def test_a_network_cell_measures_the_shipped_network(monkeypatch, network):
    class Shipped:
        model, train_set = network._model, (network._inputs, network.labels)

    monkeypatch.setattr(trained_networks, "load", lambda name: Shipped())
    cell = excess.network_cell("any", 5, 0)
    kept = torch.cat([torch.nonzero(network.labels == c).flatten()[:5] for c in range(10)])
    part = LossCurvature(network._model, (network._inputs[kept], network.labels[kept]))
    assert cell["G_1"] == pytest.approx(excess.predictions(part, 0)["G_1"], rel=1e-5)
    assert 0 <= cell["train_error"] < 0.9


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: excess.Split.of(MEANS, REST[:39]), "rest has shape"),
        (lambda: excess.Split.of(-MEANS, REST), "means has no eigenvalue above zero"),
        (lambda: SPLIT.single_roots(6), "count is 6, but at most 5"),
        (lambda: excess.gaussian_classes(50, 10, torch.ones(5, dtype=FLOAT)), "5 spikes"),
        (lambda: excess.gaussian_classes(3, 10, torch.ones(4, dtype=FLOAT)), "4 spikes"),
        (lambda: excess.gaussian_classes(50, 1, torch.ones(4, dtype=FLOAT)), "per_class is 1"),
        (lambda: excess.gaussian_classes(50, 9, -torch.ones(4, dtype=FLOAT)), "spikes has -1"),
        (
            lambda: excess.gaussian_classes(50, 9, torch.ones(4, dtype=FLOAT), evenness=1.5),
            "evenness is 1.5",
        ),
        (lambda: excess.small_network("cifar10", 1, 0.0, 0.0, 0), "dataset is 'cifar10'"),
        (lambda: excess.isotropic(TRUE[:2], TRUE, 41), "count is 41, but at most 40"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unknown_approximation_is_named(network):
    with pytest.raises(ValueError, match="approximation is 'G3'"):
        excess.network_split(network, "G3")


def test_too_few_directions_are_named(network):
    with pytest.raises(ValueError, match="directions is 8, but at least 9"):
        excess.network_predictions(network, directions=8)


def test_evenness_out_of_range_is_named():
    levels = ThreeLevels.of(torch.ones(2, 2, 3, dtype=FLOAT), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"even lies in \[2, 2\]"):
        excess.rescaled_eigenvalues(levels, 2 * torch.ones(2, 2, dtype=FLOAT))
