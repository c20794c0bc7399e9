"""Hessian against Gauss-Newton, spectra and the mini-bulk, each computed another way."""

import pandas as pd
import pytest
import torch

from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import spectral_density
from lowgrad_utils.experiments import density
from lowgrad_utils.three_levels import explicit_terms


@pytest.fixture(scope="module")
def linear():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.double().eval(), (x, torch.arange(30) % 3)


def test_level_spectra_agree_with_explicit_matrices(linear):
    curvature = LossCurvature(*linear)
    derivatives = curvature.logit_derivatives()
    terms = explicit_terms(derivatives, curvature.labels)
    spectra = density.level_spectra(derivatives, curvature.labels)
    for name, matrix in {"G": terms["G"], "G3": terms["G3"]}.items():
        expected = torch.linalg.eigvalsh(matrix).flip(0)[:20]
        torch.testing.assert_close(spectra[name][:20], expected, rtol=1e-9, atol=1e-12)
    means = terms["G0"] + terms["G1"] + terms["G2"]
    expected = torch.linalg.eigvalsh(means).flip(0)[:9]
    torch.testing.assert_close(spectra["G1+2"], expected, rtol=1e-9, atol=1e-12)


def test_level_spectra_do_not_depend_on_the_side_of_the_gram_matrix():
    drawn = density.GaussianLevels.draw(3, 4, 50, centre=1, group=1, noise=1, seed=0)
    wide = density.level_spectra(drawn.derivatives, drawn.labels)
    padded = torch.cat([drawn.derivatives, torch.zeros(12, 3, 1, dtype=torch.float64)], 2)
    tall = density.level_spectra(padded[:, :, -30:], drawn.labels)
    direct = padded[:, :, -30:].flatten(0, 1)
    expected = torch.linalg.svdvals(direct)[:20] ** 2 / 12
    torch.testing.assert_close(tall["G"][:20], expected)
    expected = torch.linalg.svdvals(drawn.derivatives.flatten(0, 1)) ** 2 / 12
    torch.testing.assert_close(wide["G"], expected)


def test_standing_apart_counts_a_shelf_and_its_cliff():
    full = torch.tensor([100.0] * 3 + [10.0] * 6 + [1.0] * 20)
    found = density.standing_apart(full, torch.ones(29), 3)
    assert (found["above"], found["cliff"], found["at"]) == (9, 10.0, 9)
    with pytest.raises(ValueError, match="19 are needed"):
        density.standing_apart(full[:15], full[:15], 3)


def test_predicted_count_is_all_without_noise_and_none_in_a_sea_of_it():
    few = density.GaussianLevels.draw(3, 20, 300, centre=1, group=1, noise=0.1, seed=0)
    many = density.GaussianLevels.draw(3, 20, 300, centre=1, group=1, noise=100, seed=0)
    assert (few.predicted_above, many.predicted_above) == (9, 0)
    with pytest.raises(ValueError, match="noise"):
        density.GaussianLevels.draw(3, 20, 300, centre=1, group=1, noise=-1, seed=0)


def test_bare_lanczos_has_ghosts_of_the_right_weight():
    values = torch.cat([torch.linspace(0, 1, 300), torch.tensor([50.0])]).double()
    operator = density.dense_operator(torch.diag(values))
    bare = density.lanczos_without_reorthogonalisation(operator, steps=60, seed=1)
    kept = spectral_density(operator, probes=1, steps=60, seed=1)
    (many, weight), (one, right) = (density.copies(d, 50.0) for d in (bare, kept))
    assert many > 1 and one == 1
    assert weight == pytest.approx(right, rel=1e-9)


def test_density_error_sees_a_wrong_weight():
    values = torch.linspace(0.1, 1, 40, dtype=torch.float64)
    operator = density.dense_operator(torch.diag(values))
    good = spectral_density(operator, probes=200, steps=40)
    assert density.density_error(good, values) < 0.01
    assert density.density_error(good, 10 * values) > 0.1
    with pytest.raises(ValueError, match="floor"):
        density.density_error(good, values, floor=0)


def test_noise_shares_agree_with_gradients_one_by_one(linear):
    curvature = LossCurvature(*linear)
    basis = torch.linalg.qr(torch.randn(curvature.size, 3, dtype=torch.float64))[0]
    each = torch.stack([curvature.gradient(torch.tensor([i])) for i in range(30)])
    inside = (each @ basis).square().sum() / each.square().sum()
    found = density.noise_shares(curvature, basis)
    assert found["examples"] == pytest.approx(float(inside))
    G = curvature.gauss_newton.matrix()
    assert found["G"] == pytest.approx(float((basis.T @ G @ basis).trace() / G.trace()))


def test_outliers_of_both_agree_with_all_eigenvectors(linear):
    curvature = LossCurvature(*linear)
    found = density.outliers_of_both(curvature, tolerance=1e-10)
    h, g = (torch.linalg.eigh(a.matrix()) for a in (curvature.hessian, curvature.gauss_newton))
    top_h, top_g = h.eigenvalues[-2:], g.eigenvalues[-2:]
    assert found["gap"] == pytest.approx(float(((top_h - top_g).abs() / top_g).max()), rel=1e-6)
    cosines = h.eigenvectors[:, -2:].T @ g.eigenvectors[:, -2:]
    assert found["overlap"] == pytest.approx(float(cosines.square().sum()) / 2, rel=1e-6)
    expected = float(-h.eigenvalues[0] / h.eigenvalues[-1])
    assert found["negative"] == pytest.approx(expected, rel=0.1)


def test_compare_agrees_with_all_eigenvectors_and_gradients(linear):
    curvature = LossCurvature(*linear)
    found = density.compare(*linear, batches=2, seed=0)
    h, g = (torch.linalg.eigh(a.matrix()) for a in (curvature.hessian, curvature.gauss_newton))
    for name, eigen in {"H": h, "G": g}.items():
        values = [found[f"{name}_{k}"] for k in (1, 2, 3)]
        assert values == pytest.approx(eigen.eigenvalues.flip(0)[:3].tolist(), rel=1e-4)
    cosines = h.eigenvectors[:, -2:].T @ g.eigenvectors[:, -2:]
    assert found["overlap_less"] == pytest.approx(float(cosines.square().sum()) / 2, abs=1e-3)
    model, (x, labels) = linear
    loss = torch.nn.functional.cross_entropy(model(x), labels)
    gradient = torch.cat([d.flatten() for d in torch.autograd.grad(loss, model.parameters())])
    inside = (h.eigenvectors[:, -3:].T @ gradient).square().sum() / gradient.square().sum()
    assert found["full_H"] == pytest.approx(float(inside), abs=1e-3)
    # The 30 examples are fewer than a mini-batch, which then has all of them.
    assert found["batch_H"] == pytest.approx(found["full_H"])
    assert found["signal"] == pytest.approx(1)
    with pytest.raises(ValueError, match="batches"):
        density.compare(*linear, batches=0, seed=0)


def test_by_moment_takes_the_largest_gap_of_each_training():
    cell = {"dataset": "mnist", "network": "mlp", "weight_decay": 0.0, "seed": 0}
    for shift, moment in enumerate(density.MOMENTS):
        cell |= {f"{moment}_G_{k}": 20.0 - k for k in range(1, 11)}
        cell |= {f"{moment}_H_{k}": 20.0 - k + shift * (k == 9) for k in range(1, 11)}
        cell[f"{moment}_lowest"] = -1.9
    found = density.by_moment(pd.DataFrame([cell])).set_index("moment")
    assert found.gap.tolist() == pytest.approx([shift / 11 for shift in range(5)])
    assert found.mean_gap.tolist() == pytest.approx([shift / 135 for shift in range(5)])
    assert found.negative.tolist() == pytest.approx([0.1] * 5)


def test_power_iteration_on_the_full_batch_finds_the_top_eigenvalue(linear):
    top = torch.linalg.eigvalsh(LossCurvature(*linear).gauss_newton.matrix())[-1]
    found = density.batch_power_iteration(*linear, batch=30, steps=200, seed=0)
    assert found == pytest.approx(float(top), rel=1e-6)
    with pytest.raises(ValueError, match="30 images"):
        density.batch_power_iteration(*linear, batch=31, steps=2, seed=0)


def test_training_keeps_epochs_and_refuses_unknown_networks():
    networks, (x, labels) = density.trained("mnist", "mlp", 5, 0.0, 0, epochs=2, keep=[0, 1])
    assert list(networks) == [0, 1, 2] and len(x) == len(labels) == 50
    assert not any(model.training for model in networks.values())
    with pytest.raises(ValueError, match="network"):
        density.trained("mnist", "lenet", 5, 0.0, 0)
    with pytest.raises(ValueError, match="regime"):
        density.mini_bulk_cell("mnist", "mlp", "frozen", 0)
