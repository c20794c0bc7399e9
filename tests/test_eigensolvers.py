import numpy as np
import pytest
import torch
from curvature_examples import FLOAT, example, generator
from scipy import stats

from lowgrad_utils.curvature import LossCurvature, SymmetricOperator
from lowgrad_utils.eigensolvers import (
    ConvergenceError,
    orthonormal_columns,
    rayleigh_ritz,
    spectral_density,
    top_eigenpairs,
)
from lowgrad_utils.three_levels import three_levels


def operator_of(matrix):
    return SymmetricOperator(len(matrix), matrix.dtype, matrix.device, lambda rows: rows @ matrix)


def rotation(size, seed=0):
    return torch.linalg.qr(torch.randn(size, size, generator=generator(seed), dtype=FLOAT)).Q


def with_eigenvalues(values, seed=0):
    q = rotation(len(values), seed)
    return q @ torch.diag(values) @ q.T


def outliers_and_bulk(outliers=(5, 3, 2), size=200):
    """Return a symmetric matrix with three outliers above a bulk, negative part included."""
    bulk = torch.rand(size - len(outliers), generator=generator(), dtype=FLOAT) - 0.3
    return with_eigenvalues(torch.cat([torch.tensor(outliers, dtype=FLOAT), bulk]))


def close(actual, expected, tolerance=1e-10):
    error = float((actual - expected).norm() / expected.norm())
    assert error < tolerance, f"relative error {error:.1e}"


# --- top_eigenpairs -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 12])
def test_top_eigenpairs_are_those_of_the_dense_solver(k):
    matrix = outliers_and_bulk()
    top = top_eigenpairs(operator_of(matrix), k, tolerance=1e-12)
    values, vectors = torch.linalg.eigh(matrix)
    close(top.values, values.flip(0)[:k])
    close(top.vectors.T @ top.vectors, torch.eye(k, dtype=FLOAT))
    overlaps = (top.vectors * vectors.flip(1)[:, :k]).sum(0).abs()
    close(overlaps, torch.ones(k, dtype=FLOAT))
    residuals = (matrix @ top.vectors - top.vectors * top.values).norm(dim=0)
    assert float((top.residuals - residuals).abs().max()) < 1e-12
    assert float(residuals.max()) < 1e-10


def test_residuals_bound_the_errors():
    matrix = outliers_and_bulk()
    top = top_eigenpairs(operator_of(matrix), 5, tolerance=1e-2)
    exact = torch.linalg.eigvalsh(matrix)
    nearest = (exact[:, None] - top.values).abs().min(0).values
    assert bool((nearest <= top.residuals + 1e-12).all()) and float(top.residuals.max()) > 1e-12
    bare = top_eigenpairs(operator_of(matrix), 5, tolerance=1e-2, residuals=False)
    assert bare.residuals is None and torch.equal(bare.values, top.values)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("multiplicity", [2, 4, 10])
def test_copies_of_multiple_eigenvalues_are_found(multiplicity, tolerance):
    outliers = [5.0] * multiplicity + [4, 3]
    operator = operator_of(outliers_and_bulk(outliers))
    top = top_eigenpairs(operator, multiplicity + 1, copies=True, tolerance=tolerance)
    close(top.values, torch.tensor(outliers[:-1], dtype=FLOAT), tolerance)
    close(top.vectors.T @ top.vectors, torch.eye(multiplicity + 1, dtype=FLOAT), 1e-2)


def test_copies_of_negative_eigenvalues():
    values = -torch.tensor([1.0, 1, 1, 2, *range(5, 60)], dtype=FLOAT)
    top = top_eigenpairs(operator_of(with_eigenvalues(values)), 4, copies=True)
    close(top.values, values[:4], 1e-6)


def test_a_warm_start_changes_the_way_not_the_result():
    matrix = outliers_and_bulk()
    plain = top_eigenpairs(operator_of(matrix), 3, tolerance=1e-10)
    centres = plain.vectors.T + 1e-3 * rotation(200)[:3]
    for start in (centres, centres[0], 100 * centres):
        warm = top_eigenpairs(operator_of(matrix), 3, start=start, tolerance=1e-10)
        close(warm.values, plain.values)
    # Directions that add up to nothing are still a span to start in.
    opposite = torch.stack([centres[0], -centres[0]])
    close(top_eigenpairs(operator_of(matrix), 3, start=opposite).values, plain.values, 1e-6)


def test_a_smaller_subspace_takes_fewer_products_at_a_time():
    matrix = outliers_and_bulk()
    exact = torch.linalg.eigvalsh(matrix).flip(0)[:3]
    loose = {"tolerance": 0.9, "residuals": False}
    few = top_eigenpairs(operator_of(matrix), 3, subspace=9, **loose).products
    assert few <= 10 < 20 <= top_eigenpairs(operator_of(matrix), 3, **loose).products
    exactly = top_eigenpairs(operator_of(matrix), 3, subspace=9, tolerance=1e-10)
    close(exactly.values, exact)
    whole = top_eigenpairs(operator_of(matrix), 3, subspace=500)  # no more than the matrix has
    close(whole.values, exact)


def test_the_seed_decides_and_a_generator_goes_on():
    operator = operator_of(outliers_and_bulk())
    first, second = (top_eigenpairs(operator, 2, seed=3) for _ in range(2))
    assert torch.equal(first.vectors, second.vectors) and first.products == second.products
    stream = generator(4)
    before = stream.get_state()
    top_eigenpairs(operator, 2, seed=stream)
    assert not torch.equal(before, stream.get_state())


def test_single_precision():
    matrix = outliers_and_bulk()
    top = top_eigenpairs(operator_of(matrix.float()), 3, tolerance=1e-5)
    assert top.values.dtype == top.vectors.dtype == torch.float32
    close(top.values.double(), torch.tensor([5.0, 3, 2], dtype=FLOAT), 1e-5)


@pytest.mark.parametrize("kind", ["mlp", "vgg11", "gru"])
def test_eigenpairs_of_a_classifier(kind):
    model, inputs, labels = example(kind)
    at = LossCurvature(model, (inputs, labels))
    flat = at.logit_derivatives().flatten(0, 1)
    # The nonzero eigenvalues of D^T D / n are those of the small Gram matrix D D^T / n.
    expected = torch.linalg.eigvalsh(flat @ flat.T / at.n).flip(0)[:4]
    centres = three_levels(at).centres
    top = top_eigenpairs(at.gauss_newton, 4, start=centres, tolerance=1e-12)
    close(top.values, expected)
    ritz = rayleigh_ritz(at.gauss_newton, centres)
    assert bool((ritz.values <= expected[: len(ritz.values)] + 1e-12).all())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 30}, ValueError, "k is 30, but a number below 30"),
        ({"k": 0}, ValueError, "k is 0"),
        ({"k": 2.5}, ValueError, "k is 2.5"),
        ({"k": 3, "tolerance": 0}, ValueError, "tolerance is 0"),
        ({"k": 3, "subspace": 3}, ValueError, "subspace is 3, but a number above k = 3"),
        ({"k": 3, "subspace": 4.5}, ValueError, "subspace is 4.5"),
        ({"k": 3, "products": 0}, ValueError, "products is 0"),
        ({"k": 3, "start": torch.ones(29, dtype=FLOAT)}, ValueError, "start has shape"),
        ({"k": 3, "start": torch.zeros(2, 30, dtype=FLOAT)}, ValueError, "start is zero"),
        ({"k": 3, "start": torch.full((30,), torch.nan)}, ValueError, "start has 30 NaN"),
        ({"k": 3, "start": [1.0] * 30}, TypeError, "start is a list"),
        ({"k": 3, "seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        top_eigenpairs(operator_of(torch.eye(30, dtype=FLOAT)), **options)


def test_what_does_not_converge_says_how_far_it_came():
    crowded = torch.diag(torch.linspace(1, 1.001, 300, dtype=FLOAT))
    with pytest.raises(ConvergenceError, match=r"\d of 3 eigenvalues converged to 1e-12 in \d+"):
        top_eigenpairs(operator_of(crowded), 3, products=25, tolerance=1e-12)
    with pytest.raises(ConvergenceError, match="is A zero"):
        top_eigenpairs(operator_of(torch.zeros(30, 30, dtype=FLOAT)), 3)
    with pytest.raises(ValueError, match="product with A is not finite"):
        top_eigenpairs(operator_of(torch.full((30, 30), torch.nan, dtype=FLOAT)), 3)


# --- projections ----------------------------------------------------------------------------------


def test_rayleigh_ritz_is_the_projected_matrix():
    matrix = outliers_and_bulk()
    basis = torch.randn(6, 200, generator=generator(1), dtype=FLOAT)
    basis[3] = 2 * basis[1] - basis[2]  # a direction too many
    ritz = rayleigh_ritz(operator_of(matrix), basis)
    q = torch.linalg.svd(basis.T, full_matrices=False).U[:, :5]
    close(ritz.values, torch.linalg.eigvalsh(q.T @ matrix @ q).flip(0))
    assert ritz.vectors.shape == (200, 5)
    close(q @ (q.T @ ritz.vectors), ritz.vectors)
    errors = (matrix @ ritz.vectors - ritz.vectors * ritz.values).norm(dim=0)
    close(ritz.residuals, errors)
    exact = torch.linalg.eigvalsh(matrix).flip(0)
    assert bool((ritz.values <= exact[:5]).all())


def test_orthonormal_columns_span_the_rows():
    rows = torch.randn(5, 40, generator=generator(), dtype=FLOAT)
    rows[4] = 1e-9 * (rows[0] + 1e-3 * rows[4])  # short, and nearly parallel to the first
    columns = orthonormal_columns(rows)
    close(columns.T @ columns, torch.eye(5, dtype=FLOAT), 1e-12)
    close(columns @ (columns.T @ rows.T), rows.T)
    rows[2] = 0
    rows[3] = rows[0]
    assert orthonormal_columns(rows).shape == (40, 3)
    with pytest.raises(ValueError, match="all rows are zero"):
        orthonormal_columns(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="basis has shape"):
        rayleigh_ritz(operator_of(torch.eye(4)), torch.ones(2, 5))


# --- the spectral density -------------------------------------------------------------------------


@pytest.mark.parametrize("power", range(1, 12))
def test_moments_of_a_probe_are_exact(power):
    # Gauss quadrature: v^T A^j v exactly, for j up to 2 * steps - 1 = 11.
    matrix = outliers_and_bulk(size=60)
    density = spectral_density(operator_of(matrix), probes=2, steps=6, seed=generator(7))
    stream = generator(7)
    for points, weights in zip(density.points, density.weights):
        probe = torch.randn(60, generator=stream, dtype=FLOAT)
        probe /= probe.norm()
        expected = probe @ torch.linalg.matrix_power(matrix, power) @ probe
        assert float((weights * points**power).sum()) == pytest.approx(float(expected), rel=1e-9)


def test_traces_are_estimated_within_their_error():
    matrix = outliers_and_bulk()
    density = spectral_density(operator_of(matrix), probes=40, steps=20)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    for function in (lambda t: t, torch.square, lambda t: torch.exp(-t)):
        mean, error = density.mean(function)
        assert abs(mean - float(function(eigenvalues).mean())) < 4 * error
    assert np.isnan(spectral_density(operator_of(matrix), probes=1, steps=5).mean(torch.exp)[1])


def test_no_ghosts():
    # Without full orthogonalisation the largest eigenvalue comes back many times in 128 steps.
    matrix = with_eigenvalues(torch.cat([torch.tensor([100.0, 50]), torch.rand(298)]).to(FLOAT))
    density = spectral_density(operator_of(matrix), probes=2, steps=128)
    for points in density.points:
        assert (int((points > 75).sum()), int((points > 25).sum())) == (1, 2)
    close(density.points[:, -1], torch.full((2,), 100.0, dtype=FLOAT))


def test_all_steps_give_the_spectrum():
    matrix = outliers_and_bulk(size=40)
    density = spectral_density(operator_of(matrix), probes=1, steps=100)
    assert density.points.shape == (1, 40)
    close(density.points[0], torch.linalg.eigvalsh(matrix), 1e-9)


def test_a_probe_that_ends_early_keeps_its_weight():
    for matrix, value in ((torch.eye(8, dtype=FLOAT), 1), (torch.zeros(8, 8, dtype=FLOAT), 0)):
        density = spectral_density(operator_of(matrix), probes=3, steps=5)
        assert density.points.shape == density.weights.shape == (3, 5)
        assert density.mean(lambda t: t) == pytest.approx((value, 0), abs=1e-12)
        close(density.weights.sum(1), torch.ones(3, dtype=FLOAT))


def test_the_smooth_density_is_a_sum_of_bumps():
    density = spectral_density(operator_of(outliers_and_bulk()), probes=3, steps=10)
    at = torch.linspace(-3, 8, 4000, dtype=FLOAT)
    smooth = density.smooth(at, width=0.2)
    naive = sum(
        float(w) / 3 * stats.norm.pdf(at.numpy(), float(t), 0.2)
        for t, w in zip(density.points.flatten(), density.weights.flatten())
    )
    close(smooth, torch.from_numpy(naive))
    assert float(torch.trapezoid(smooth, at)) == pytest.approx(1, abs=1e-6)
    powers = torch.linspace(-6, 3, 4000, dtype=FLOAT)
    logarithmic = density.smooth(10**powers, width=0.1, scale="log")
    above = float(density.weights[density.points > 0].sum()) / 3
    assert float(torch.trapezoid(logarithmic, powers)) == pytest.approx(above, abs=1e-4)
    with pytest.raises(ValueError, match="scale is 'logarithmic'"):
        density.smooth(at, width=0.1, scale="logarithmic")
    with pytest.raises(ValueError, match="width is 0"):
        density.smooth(at, width=0)


@pytest.mark.parametrize("name", ["probes", "steps"])
def test_numbers_of_probes_and_steps(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        spectral_density(operator_of(torch.eye(4)), **{name: 0})
