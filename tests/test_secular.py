import numpy as np
import pytest
import torch

from lowgrad_utils.random_matrices import spiked_singular_value
from lowgrad_utils.secular import SecularEquation, free_spike
from lowgrad_utils.spectra import alignment


def example(shape=(40, 60), norms=(4.0, 2.5, 0.1), seed=0):
    """A bulk of norm about 2 and correlated low-rank factors."""
    stream = torch.Generator().manual_seed(seed)
    d, m = shape
    draw = lambda *size: torch.randn(*size, generator=stream, dtype=torch.float64)  # noqa: E731
    B = draw(d, m) / max(shape) ** 0.5
    # Right factors that know the bulk, so that the cross terms matter.
    U = torch.linalg.qr(draw(d, len(norms))).Q * torch.tensor(norms).double().sqrt()
    V = torch.linalg.qr(draw(m, len(norms)) + 2 * B.T @ U).Q * torch.tensor(norms).double().sqrt()
    return B, U, V


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (50, 50)])
def test_the_roots_are_all_singular_values_above_the_bulk(shape):
    B, U, V = example(shape)
    equation = SecularEquation(B, U, V)
    s = torch.linalg.svdvals(B + U @ V.T)
    above = s[s > torch.linalg.svdvals(B)[0] * (1 + 1e-9)]
    assert 1 <= len(above) < 3
    torch.testing.assert_close(equation.roots(), above, rtol=1e-13, atol=0)


def test_the_vectors_are_singular_vectors():
    B, U, V = example()
    G = B + U @ V.T
    found = SecularEquation(B, U, V).triplets()
    torch.testing.assert_close(G @ found.V, found.U * found.s, rtol=0, atol=1e-12)
    torch.testing.assert_close(G.T @ found.U, found.V * found.s, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.U.norm(dim=0), torch.ones(len(found.s)).double())


def test_the_matrix_is_made_of_resolvents():
    B, U, V = example()
    x = 3.0
    left = np.linalg.inv(x**2 * np.eye(40) - (B @ B.T).numpy())
    right = np.linalg.inv(x**2 * np.eye(60) - (B.T @ B).numpy())
    u, v, b = U.numpy(), V.numpy(), B.numpy()
    naive = np.block(
        [[x * u.T @ left @ u, u.T @ left @ b @ v], [v.T @ b.T @ left @ u, x * v.T @ right @ v]]
    )
    np.testing.assert_allclose(SecularEquation(B, U, V).matrix(x).numpy(), naive, atol=1e-12)
    plain = SecularEquation(B, U, V).matrix(x, cross=False).numpy()
    np.testing.assert_allclose(plain[:3, :3], naive[:3, :3], atol=1e-12)
    assert not plain[:3, 3:].any()


def test_without_cross_terms_the_roots_are_wrong():
    B, U, V = example()
    top = torch.linalg.svdvals(B + U @ V.T)[0]
    assert abs(SecularEquation(B, U, V).roots(cross=False)[0] / top - 1) > 1e-3


def test_a_term_that_lowers_the_bulk_has_no_root():
    B, *_ = example()
    left, _, right = torch.linalg.svd(B, full_matrices=False)
    equation = SecularEquation(B, -0.1 * left[:, :1], right[:1].T)
    assert len(equation.roots()) == 0
    assert equation.triplets().U.shape == (40, 0)


def test_a_free_spike_agrees_with_the_closed_form_of_independent_entries():
    stream = torch.Generator().manual_seed(0)
    shape = (300, 500)
    B = torch.randn(*shape, generator=stream, dtype=torch.float64) / shape[1] ** 0.5
    for theta in (1.5, 3.0):
        spike = free_spike(theta, torch.linalg.svdvals(B), shape)
        np.testing.assert_allclose(spike, spiked_singular_value(theta, 0.6), rtol=0.01)
        turned = free_spike(theta, torch.linalg.svdvals(B), shape[::-1])
        np.testing.assert_allclose(turned, (spike.value, spike.right, spike.left), rtol=1e-12)


def test_a_free_spike_predicts_angles_on_another_bulk():
    stream = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(*size, generator=stream, dtype=torch.float64)  # noqa: E731
    bulk = torch.linspace(0.1, 1, 400).double()
    left, right = torch.linalg.qr(draw(400, 400)).Q, torch.linalg.qr(draw(600, 400)).Q
    u, v = draw(400), draw(600)
    u, v = u / u.norm(), v / v.norm()
    U, s, Vh = torch.linalg.svd(left * bulk @ right.T + 1.5 * torch.outer(u, v))
    spike = free_spike(1.5, bulk, (400, 600))
    assert abs(spike.value / s[0] - 1) < 0.03
    assert abs(spike.left**0.5 - alignment(U[:, 0], u)) < 0.05
    assert abs(spike.right**0.5 - alignment(Vh[0], v)) < 0.05


def test_below_the_threshold_a_free_spike_has_no_angle():
    assert free_spike(1e-3, torch.ones(20).double(), (20, 30)) == (1.0, 0.0, 0.0)


def test_bad_input_is_named():
    B, U, V = example()
    with pytest.raises(ValueError, match="U has shape"):
        SecularEquation(B, U[:-1], V)
    with pytest.raises(ValueError, match="V has shape"):
        SecularEquation(B, U, V[:, :2])
    with pytest.raises(TypeError, match="V has dtype"):
        SecularEquation(B, U, V.float())
    with pytest.raises(ValueError, match="bulk is all 0"):
        SecularEquation(0 * B, U, V)
    with pytest.raises(ValueError, match="theta"):
        free_spike(-1.0, torch.ones(5).double(), (5, 6))
