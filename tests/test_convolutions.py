import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lowgrad_utils import convolutions
from lowgrad_utils.gradients import RankOne, closed_form_gradient, decompose
from lowgrad_utils.networks import ACTIVATIONS, normalise_rows
from lowgrad_utils.spiked_data import sample_spiked_data

FLOAT = torch.float64


def gaussians(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def unit(k, seed=0):
    return normalise_rows(gaussians(1, k, seed=seed))[0]


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 100))
def test_the_matrix_is_torchs_convolution(k, extra, seed):
    d = k + extra
    w, X = gaussians(k, seed=seed), gaussians(3, d, seed=seed + 1)
    W = convolutions.expand_filter(w, d)
    assert W.shape == (d - k + 1, d)
    torch.testing.assert_close(X @ W.T, F.conv1d(X[:, None], w[None, None])[:, 0])
    assert int((W != 0).sum()) == k * (d - k + 1)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 100))
def test_tying_is_the_transpose_of_expanding(k, extra, seed):
    d = k + extra
    G, w = gaussians(d, d - k + 1, seed=seed), gaussians(k, seed=seed + 1)
    inner = (G.T * convolutions.expand_filter(w, d)).sum()
    torch.testing.assert_close(convolutions.tie(G) @ w, inner)


def test_tying_by_naive_loops():
    G = gaussians(9, 6)
    naive = [sum(float(G[j + offset, j]) for j in range(6)) for offset in range(4)]
    assert convolutions.tie(G).tolist() == pytest.approx(naive)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 100))
def test_a_rank_one_term_without_its_matrix(m, extra, seed):
    term = RankOne(gaussians(m + extra, seed=seed), gaussians(m, seed=seed + 1))
    expected = convolutions.tie(term.matrix())
    torch.testing.assert_close(convolutions.tie_rank_one(term), expected)
    reversed_v = term.v.flip(0)
    full = [
        sum(float(term.u[i] * reversed_v[t - i]) for i in range(m + extra) if 0 <= t - i < m)
        for t in range(m - 1, m + extra)
    ]
    assert convolutions.tie_rank_one(term).tolist() == pytest.approx(full, abs=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scaling", ["ntk", "mean-field"])
@pytest.mark.parametrize("k", [1, 4, 40])
def test_the_filters_gradient_is_autograds(activation, scaling, k):
    X = sample_spiked_data(30, 40, nu=0.25, seed=k).X
    w, a, r = unit(k), gaussians(41 - k, seed=1), gaussians(30, seed=2)
    options = {"activation": activation, "scaling": scaling}
    network = convolutions.convolutional_network(w, a, **options)
    free = w.clone().requires_grad_()
    hidden = ACTIVATIONS[activation].value(F.conv1d(X[:, None], free[None, None])[:, 0])
    m = 41 - k
    f = hidden @ a / (math.sqrt(m) if scaling == "ntk" else m)
    torch.testing.assert_close(network(X), f.detach())
    automatic = torch.autograd.grad((r * f).mean(), free)[0]
    torch.testing.assert_close(convolutions.tie(closed_form_gradient(X, network, r)), automatic)


def test_the_parts_of_a_filters_gradient():
    data = sample_spiked_data(30, 40, nu=0.3, alpha=0.5, seed=1)
    network = convolutions.convolutional_network(unit(7), gaussians(34), activation="tanh")
    parts = decompose(data, network, gaussians(30, seed=3))
    gradient = convolutions.filter_gradient(parts)
    tie = convolutions.tie
    torch.testing.assert_close(gradient.g, tie(parts.G))
    both = parts.S1.matrix() + parts.S12.matrix()
    torch.testing.assert_close(gradient.residue_term, tie(both))
    torch.testing.assert_close(gradient.spike_term, tie(parts.S2.matrix()))
    torch.testing.assert_close(gradient.rest, tie(parts.E))
    expected = torch.column_stack([tie(both), tie(parts.S2.matrix())])
    torch.testing.assert_close(gradient.span, expected)


def test_float32_stays_float32():
    w = unit(5).float()
    assert convolutions.expand_filter(w, 8).dtype == torch.float32
    assert convolutions.tie(torch.ones(8, 4)).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convolutions.expand_filter(gaussians(9), 8), "^w has length 9, but at most d = 8"),
        (lambda: convolutions.expand_filter(gaussians(3), 0), "^d is 0, but a whole number"),
        (lambda: convolutions.expand_filter(gaussians(3, 2), 8), r"^w has shape \(3, 2\)"),
        (lambda: convolutions.tie(gaussians(3, 4)), "^G has shape 3 x 4, but at most as many"),
        (lambda: convolutions.tie(gaussians(3)), r"^G has shape \(3,\), but a matrix"),
        (
            lambda: convolutions.tie_rank_one(RankOne(gaussians(3), gaussians(4))),
            "^v has length 4, but at most that of u, 3",
        ),
        (
            lambda: convolutions.convolutional_network(2 * unit(3), gaussians(4)),
            "^row 0 of W has length 2",
        ),
        (
            lambda: convolutions.convolutional_network(unit(3), gaussians(4), activation="swish"),
            "^activation is 'swish'",
        ),
        (lambda: convolutions.tie(torch.full((3, 2), math.nan)), "^G has 6 NaN"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_list_is_no_filter():
    with pytest.raises(TypeError, match=r"^w is a list, but a torch tensor is needed"):
        convolutions.expand_filter([1.0, 2.0], 8)
