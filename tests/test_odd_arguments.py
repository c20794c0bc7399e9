"""Arguments that are nearly right get one clear line, or what they mean."""

import numpy as np
import pytest
import torch

import lowgrad_utils as lg
from lowgrad_utils.gradient_law import gradient_law
from lowgrad_utils.third_spike import slope_moments

FLOAT = torch.float64
ONES = torch.ones(30, dtype=FLOAT)
DATA = lg.sample_spiked_data(30, 40, nu=0.25)
NETWORK = lg.TwoLayerNetwork.random(40, 50, activation="softplus")


def _operator(matrix):
    return lg.SymmetricOperator(len(matrix), FLOAT, matrix.device, lambda rows: rows @ matrix)


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (
            lambda: gradient_law(DATA.X, NETWORK, ONES).density(-ONES),
            ValueError,
            "^s has the point -1, but positive ones are needed$",
        ),
        (
            lambda: lg.orthonormal_columns(torch.tensor([[1.0, 2.0], [torch.nan, 0.0]])),
            ValueError,
            "^rows has 1 NaN or infinite entries",
        ),
        (
            lambda: lg.explicit_terms(torch.ones(4, 2, 3), torch.tensor([0, 1, 2, 0])),
            ValueError,
            "^labels are not 4 numbers from 0 to 1",
        ),
        (
            lambda: lg.explicit_terms(torch.ones(4, 2, 3), torch.tensor([0, 1])),
            ValueError,
            "^labels are not 4 numbers",
        ),
        (
            lambda: lg.d_transform(2.0, torch.tensor([1.0, -1.0]), (2, 3)),
            ValueError,
            "^singular_values has -1, but none is below 0$",
        ),
        (
            lambda: lg.predict_spike(2.0, torch.tensor([1.0, -1.0]), (2, 3)),
            ValueError,
            "^singular_values has -1, but none is below 0$",
        ),
        (
            lambda: lg.LOSSES["mse"].residue(ONES, ONES.float()),
            TypeError,
            "^y has dtype torch.float32, but f has torch.float64",
        ),
        (
            lambda: lg.principal_angles(torch.eye(3), torch.eye(3, dtype=FLOAT)),
            TypeError,
            "^B has dtype torch.float64, but A has torch.float32",
        ),
        (
            lambda: lg.spectral_density(_operator(torch.full((5, 5), torch.nan, dtype=FLOAT))),
            ValueError,
            "^a product with A is not finite",
        ),
        (
            lambda: lg.bulk_eigenvalues(torch.ones(2), 0.0),
            TypeError,
            r"^d is tensor\(\[1., 1.\]\), but a whole number of at least 1 is needed$",
        ),
        (lambda: lg.bulk_eigenvalues(5, 10**400), TypeError, "^alpha is 1000.*, but a finite"),
    ],
)
def test_what_will_not_do_is_named(call, error, line):
    with pytest.raises(error, match=line) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_whole_numbers_may_be_written_with_a_point():
    assert torch.equal(lg.sample_spiked_data(30, 40.0, nu=0.25).X, DATA.X)
    s = torch.ones(2, dtype=FLOAT)
    assert torch.equal(slope_moments("tanh", s, 2.0), slope_moments("tanh", s, 2))
    pair = [lg.hidden_spike(DATA, NETWORK, DATA.z, order=k).norm for k in (1, 1.0)]
    assert pair[0] == pair[1] > 0
    sizes, seeds = np.repeat([10, 20, 40], 3), np.tile([0, 1, 2], 3)
    fits = [
        lg.fit_rate(sizes, sizes * (1.0 + seeds), seeds, resamples=resamples)
        for resamples in (100, 100.0)
    ]
    assert fits[0] == fits[1]


def test_matrices_may_require_a_gradient():
    A = torch.randn(150, 160, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    with_gradient = A.clone().requires_grad_()
    assert lg.operator_norm(with_gradient) == pytest.approx(float(torch.linalg.svdvals(A)[0]))
    angles = lg.principal_angles(with_gradient[:, :2], A[:, 2:4])
    assert torch.equal(angles, lg.principal_angles(A[:, :2], A[:, 2:4]))
