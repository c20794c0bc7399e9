import math

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils import spectra

FLOAT = torch.float64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def spiked(d, m, values=(), seed=0):
    """Gaussian noise with a known few directions on top of it."""
    U = torch.linalg.qr(gaussian(d, 6, seed=seed + 1)).Q[:, : len(values)]
    V = torch.linalg.qr(gaussian(m, 6, seed=seed + 2)).Q[:, : len(values)]
    noise = gaussian(d, m, seed=seed) / (math.sqrt(d) + math.sqrt(m))
    return noise + U @ torch.diag(torch.tensor(values, dtype=FLOAT)) @ V.T


# Below 100 a full decomposition is taken, above it Lanczos: both, tall, wide and square.
SHAPES = [(5, 8), (8, 5), (1, 6), (6, 1), (120, 160), (160, 120), (130, 130)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(FLOAT, 1e-10), (torch.float32, 2e-5)])
def test_triplets_are_those_of_the_full_decomposition(shape, k, dtype, tolerance):
    k = min(k, *shape)
    A = spiked(*shape, values=(6.0, 4.0, 3.0)[: min(3, *shape)]).to(dtype)
    U, s, V = spectra.leading_singular_triplets(A, k)
    full = torch.linalg.svd(A.to(FLOAT), full_matrices=False)
    assert U.dtype == s.dtype == V.dtype == dtype
    assert (U.shape, s.shape, V.shape) == ((shape[0], k), (k,), (shape[1], k))
    np.testing.assert_allclose(s, full.S[:k], rtol=tolerance)
    assert (s[1:] <= s[:-1]).all()
    identity = torch.eye(k, dtype=dtype)
    loose = 20 * tolerance
    torch.testing.assert_close(U.T @ U, identity, rtol=0, atol=loose)
    torch.testing.assert_close(V.T @ V, identity, rtol=0, atol=loose)
    # Belonging together, sign included: A v = s u and A^T u = s v.
    torch.testing.assert_close(A @ V, U * s, rtol=0, atol=loose * float(s[0]))
    torch.testing.assert_close(A.T @ U, V * s, rtol=0, atol=loose * float(s[0]))
    for j in range(min(k, 3)):
        assert abs(float(U[:, j].to(FLOAT) @ full.U[:, j])) == pytest.approx(1, abs=loose)
        assert abs(float(V[:, j].to(FLOAT) @ full.Vh[j])) == pytest.approx(1, abs=loose)


@pytest.mark.parametrize("k", [24, 25, 60, 120])
def test_many_triplets(k):
    A = spiked(120, 130)
    s = spectra.leading_singular_triplets(A, k).s
    np.testing.assert_allclose(s, torch.linalg.svdvals(A)[:k], rtol=1e-9)


def test_triplets_repeat_and_do_not_depend_on_the_start():
    A = spiked(150, 140, values=(3.0, 2.0))
    one, same = (spectra.leading_singular_triplets(A, 2) for _ in range(2))
    assert torch.equal(one.U, same.U)
    other = spectra.leading_singular_triplets(A, 2, seed=9)
    np.testing.assert_allclose(one.s, other.s, rtol=1e-10)


def test_large_matrices_take_lanczos_from_a_start_of_the_seed(monkeypatch):
    starts = []
    svds = scipy.sparse.linalg.svds

    def watched(*arguments, v0, **options):
        starts.append(v0)
        return svds(*arguments, v0=v0, **options)

    monkeypatch.setattr(scipy.sparse.linalg, "svds", watched)
    for seed in (0, 0, 1):
        spectra.leading_singular_triplets(spiked(150, 140), 2, seed=seed)
    assert len(starts) == 3  # A full decomposition would cost ten times as much.
    assert np.array_equal(starts[0], starts[1])
    assert not np.allclose(starts[0], starts[2])
    # From a start of equal entries, singular vectors orthogonal to it could stay unseen.
    assert np.std(starts[0]) > 0.5


def test_one_thread_and_two_agree_to_rounding():
    A = spiked(300, 280, values=(3.0,))
    one = spectra.leading_singular_triplets(A, 2).s
    torch.set_num_threads(2)
    try:
        two = spectra.leading_singular_triplets(A, 2).s
    finally:
        torch.set_num_threads(1)
    np.testing.assert_allclose(one, two, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "size"), [(FLOAT, 1e-200), (FLOAT, 1e200), (torch.float32, 1e-25)]
)
def test_triplets_of_matrices_whose_squares_leave_the_range(dtype, size):
    A = spiked(130, 150, values=(3.0, 2.0)).to(dtype)
    s = spectra.leading_singular_triplets(size * A, 2).s
    np.testing.assert_allclose(s / size, torch.linalg.svdvals(A)[:2], rtol=1e-5)


def test_triplets_of_low_rank():
    # The tail is 0 to rounding; Lanczos must neither fail nor invent values.
    u, v = gaussian(150), gaussian(140, seed=1)
    U, s, V = spectra.leading_singular_triplets(torch.outer(u, v), 3)
    assert float(s[0]) == pytest.approx(float(u.norm() * v.norm()))
    assert (s[1:] < 1e-6 * s[0]).all()
    assert abs(float(U[:, 0] @ u / u.norm())) == pytest.approx(1)
    assert abs(float(V[:, 0] @ v / v.norm())) == pytest.approx(1)


@pytest.mark.parametrize("size", [5, 150])
def test_a_zero_matrix_has_norm_zero(size):
    A = torch.zeros(size, size + 3, dtype=FLOAT)
    assert spectra.operator_norm(A) == 0
    U, s, V = spectra.leading_singular_triplets(A, 2)
    assert s.tolist() == [0, 0]
    for vectors, length in ((U, size), (V, size + 3)):
        assert vectors.shape == (length, 2)
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(2, dtype=FLOAT))


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_the_operator_norm_is_the_largest_stretch(d, m, seed):
    A = gaussian(d, m, seed=seed)
    norm = spectra.operator_norm(A)
    assert norm == pytest.approx(float(torch.linalg.matrix_norm(A, 2)))
    assert norm == pytest.approx(spectra.operator_norm(A.T))
    assert norm == pytest.approx(spectra.operator_norm(-3 * A) / 3)


def test_the_operator_norm_of_a_large_matrix():
    A = spiked(200, 150)
    expected = float(torch.linalg.matrix_norm(A, 2))
    assert spectra.operator_norm(A) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("A", "k", "error", "message"),
    [
        (gaussian(3), 1, ValueError, r"^A has shape \(3,\), but a matrix"),
        (gaussian(3, 4) / 0, 1, ValueError, "^A has 12 NaN"),
        (gaussian(3, 4).numpy(), 1, TypeError, "^A is a ndarray"),
        (gaussian(3, 4)[:0], 1, ValueError, "^A has shape .* empty"),
        (gaussian(3, 4), 0, ValueError, "^k is 0"),
        (gaussian(3, 4), 1.5, ValueError, r"^k is 1\.5"),
        (gaussian(3, 4), 4, ValueError, r"^k is 4, but a matrix of shape \(3, 4\) has 3 at most"),
        (gaussian(4, 3), 4, ValueError, r"^k is 4, but a matrix of shape \(4, 3\) has 3 at most"),
    ],
)
def test_bad_arguments_of_the_triplets(A, k, error, message):
    with pytest.raises(error, match=message):
        spectra.leading_singular_triplets(A, k)


@pytest.mark.parametrize("shape", [(5, 8), (120, 160)])
def test_the_edge_is_the_largest_value_after_the_outliers(shape):
    A = spiked(*shape, values=(6.0, 4.0, 3.0))
    s = torch.linalg.svdvals(A)
    assert spectra.bulk_edge(A) == pytest.approx(float(s[0]), rel=1e-10)
    for outliers in (0, 1, 3, 4):
        edge = spectra.bulk_edge(A, outliers=outliers)
        assert edge == pytest.approx(float(s[outliers]), rel=1e-10)


@pytest.mark.parametrize("outliers", [-1, 3, 0.5, None])
def test_outliers_that_a_matrix_cannot_have(outliers):
    with pytest.raises(ValueError, match=rf"^outliers is {outliers}, but a whole number from 0 to"):
        spectra.bulk_edge(gaussian(3, 4), outliers=outliers)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0.1, 5), st.floats(0, 1))
def test_outliers_are_those_above_edge_and_margin(values, edge, margin):
    expected = sum(value > edge * (1 + margin) for value in values)
    s = torch.tensor(values, dtype=FLOAT)
    assert spectra.count_outliers(s, edge, margin=margin) == expected


def test_a_value_at_the_edge_is_no_outlier():
    s = torch.tensor([2.0, 1.0], dtype=FLOAT)
    assert spectra.count_outliers(s, 2.0) == 0
    assert spectra.count_outliers(s, 2.0 * (1 - 1e-9)) == 1
    assert spectra.count_outliers(s, 1.0) == 1
    assert spectra.count_outliers(s, 1.0, margin=1.0) == 0


def test_bad_edges():
    s = torch.ones(2)
    for edge in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^edge is .*, but a positive, finite number"):
            spectra.count_outliers(s, edge)
    with pytest.raises(ValueError, match=r"^margin is -0\.1"):
        spectra.count_outliers(s, 1.0, margin=-0.1)
    with pytest.raises(ValueError, match=r"^singular_values has 1 NaN"):
        spectra.count_outliers(torch.tensor([math.nan, 3.0]), 1.0)


@given(st.integers(2, 6), st.integers(0, 99), st.floats(-9, 9).filter(lambda x: abs(x) > 1e-3))
def test_alignment_is_the_cosine_without_sign_and_scale(n, seed, factor):
    u, v = gaussian(n, seed=seed), gaussian(n, seed=seed + 1)
    x, y = u.numpy(), v.numpy()
    cosine = np.dot(x, y) / math.sqrt(np.dot(x, x) * np.dot(y, y))
    assert spectra.alignment(u, v) == pytest.approx(abs(cosine))
    assert spectra.alignment(v, factor * u) == pytest.approx(abs(cosine))
    assert spectra.alignment(u, factor * u) == pytest.approx(1)
    assert spectra.alignment(u, u) <= 1


def test_alignments_of_mixed_precision():
    with pytest.raises(TypeError, match=r"^v has dtype torch\.float32, but u has torch\.float64"):
        spectra.alignment(gaussian(3), gaussian(3).float())


@pytest.mark.parametrize(
    ("u", "v", "message"),
    [
        (gaussian(3), gaussian(4), r"^v has shape \(4,\), but a vector of length 3"),
        (gaussian(3, 1), gaussian(3), r"^u has shape \(3, 1\)"),
        (gaussian(3) / 0, gaussian(3), "^u has 3 NaN"),
        (gaussian(3), torch.zeros(3, dtype=FLOAT), "one of the vectors is zero"),
    ],
)
def test_bad_vectors(u, v, message):
    with pytest.raises(ValueError, match=message):
        spectra.alignment(u, v)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_principal_angles_are_those_of_orthonormal_bases(k, l, seed):  # noqa: E741
    A, B = gaussian(7, k, seed=seed), gaussian(7, l, seed=seed + 1)
    cosines = torch.linalg.svdvals(torch.linalg.qr(A).Q.T @ torch.linalg.qr(B).Q)
    angles = spectra.principal_angles(A, B)
    torch.testing.assert_close(angles, torch.arccos(cosines.clamp(max=1)), rtol=1e-6, atol=1e-7)
    assert (angles[1:] >= angles[:-1]).all()
    # Spaces have angles, not bases.
    mixed = spectra.principal_angles(A @ gaussian(k, k, seed=seed + 2), B)
    torch.testing.assert_close(mixed, angles, rtol=1e-5, atol=1e-6)


def test_principal_angles_chosen_by_hand():
    e, turn = torch.eye(4, dtype=FLOAT), 0.3
    turned = torch.stack([math.cos(turn) * e[0] + math.sin(turn) * e[2], e[1]], dim=1)
    expected = torch.tensor([0.0, turn], dtype=FLOAT)
    torch.testing.assert_close(spectra.principal_angles(e[:, :2], turned), expected)


def test_small_and_large_principal_angles_together_keep_their_digits():
    expected = torch.tensor([1e-12, 1e-9, 1e-5, 0.3, 1.2, math.pi / 2 - 1e-9], dtype=FLOAT)
    k = len(expected)
    Q = torch.linalg.qr(gaussian(40, 2 * k)).Q
    A, B = Q[:, :k], Q[:, :k] * expected.cos() + Q[:, k:] * expected.sin()
    found = spectra.principal_angles(A, B @ gaussian(k, k, seed=1))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(spectra.principal_angles(B, A), found, rtol=1e-3, atol=1e-14)


def test_dependent_columns_add_no_angle():
    A, B = gaussian(7, 2), gaussian(7, 3, seed=1)
    dependent = torch.cat([A, A @ gaussian(2, 2, seed=2)], dim=1)
    angles = spectra.principal_angles(A, B)
    torch.testing.assert_close(spectra.principal_angles(dependent, B), angles)
    torch.testing.assert_close(spectra.principal_angles(B, dependent), angles)
    assert spectra.principal_angles(0 * A, B).shape == (0,)


def test_spaces_of_different_dimension_have_no_angles():
    with pytest.raises(ValueError, match=r"^B has shape \(3, 1\), but 4 x any is needed"):
        spectra.principal_angles(gaussian(4, 2), gaussian(3, 1))
    with pytest.raises(ValueError, match=r"^A has 4 NaN"):
        spectra.principal_angles(gaussian(4, 1) / 0, gaussian(4, 1))
