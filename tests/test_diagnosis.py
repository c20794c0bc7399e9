import copy
import math
import warnings

import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowgrad_utils import experiments, figures
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.diagnosis import diagnose, layer_names
from lowgrad_utils.gradients import decompose
from lowgrad_utils.random_matrices import spiked_singular_value
from lowgrad_utils.spectra import alignment, operator_norm

CROSS_ENTROPY = nn.CrossEntropyLoss()


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double().eval()


def mlp():
    return seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))


def with_nan(x, count):
    """Return a copy of which so many rows have an entry that is NaN, or an infinite one."""
    x = x.clone()
    x[:count, -1] = torch.tensor([math.nan, math.inf, -math.inf])[:count]
    return x


LABELS = torch.arange(30) % 4
X = random(30, 8)


class Averaged(nn.Module):
    """A layer, something bent, and the mean over positions as four logits."""

    def __init__(self, layer, channels):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(channels, 4)

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        h = h.mean(1) if isinstance(self.layer, nn.Linear) else h.flatten(2).mean(2)
        return self.head(h)


def autograd_gradient(model, weight, x, y, loss=CROSS_ENTROPY):
    gradient = torch.autograd.grad(loss(model(x), y), weight)[0]
    return gradient.flatten(1).T


CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(3, 5, 3), (7, 6)),
    "uneven": (lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0)), (7, 6)),
    "dilated": (lambda: nn.Conv2d(3, 5, 3, dilation=(1, 2), padding=2, stride=2), (8, 9)),
    "same": (lambda: nn.Conv2d(3, 5, (4, 3), padding="same", bias=False), (6, 7)),
    "circular": (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (6, 7)),
    "reflect": (lambda: nn.Conv2d(3, 5, 3, padding=(2, 1), padding_mode="reflect"), (6, 7)),
    "line": (lambda: nn.Conv1d(3, 5, 4, stride=3, padding=2, dilation=2), (19,)),
    "volume": (lambda: nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=1), (3, 5, 2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradient_of_a_convolution_is_that_of_autograd(name):
    build, size = CONVOLUTIONS[name]
    model = seeded(lambda: Averaged(layer := build(), layer.out_channels))
    x = random(30, model.layer.in_channels, *size)
    found = diagnose(model, "layer", (x, LABELS), CROSS_ENTROPY)
    wanted = autograd_gradient(model, model.layer.weight, x, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)
    positions = model.layer(x).flatten(2).shape[2]
    assert (found.rows, found.examples) == (30 * positions, 30)


def test_gradient_of_a_layer_on_tokens_is_that_of_autograd():
    model = seeded(lambda: Averaged(nn.Linear(8, 6), 6))
    x = random(30, 5, 8)
    found = diagnose(model, model.layer, (x, LABELS), CROSS_ENTROPY)
    wanted = autograd_gradient(model, model.layer.weight, x, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)
    assert (found.layer, found.rows) == ("layer", 150)


def test_batches_give_what_one_batch_gives(monkeypatch):
    model = seeded(lambda: Averaged(nn.Conv2d(3, 5, 3), 5))
    x = random(30, 3, 6, 6)
    whole = diagnose(model, "layer", (x, LABELS), CROSS_ENTROPY)
    loader = DataLoader(TensorDataset(x, LABELS), batch_size=8)
    # A few examples' patches at a time, too.
    monkeypatch.setattr("lowgrad_utils.diagnosis._CHUNK_BYTES", 3 * 8 * (27 + 5) * 16)
    parts = diagnose(model, "layer", loader, CROSS_ENTROPY)
    for name in ("G", "q"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    assert parts.signal_share == pytest.approx(whole.signal_share)
    assert alignment(parts.v, whole.v) == pytest.approx(1)
    assert (parts.rows, parts.examples) == (whole.rows, 30)


def test_a_layer_that_is_called_twice_has_the_rows_of_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    model = seeded(Twice)
    found = diagnose(model, "layer", (X, LABELS), CROSS_ENTROPY)
    wanted = autograd_gradient(model, model.layer.weight, X, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)
    assert found.rows == 60


@pytest.mark.parametrize("centre", [False, True])
def test_pieces_are_those_of_the_definition(centre):
    model = mlp()
    x = X + 0.5
    found = diagnose(model, "2", (x, LABELS), CROSS_ENTROPY, centre=centre)
    h = torch.tanh(model[0](x)).detach()
    p = model(x).softmax(1).detach()
    Delta = (p - F.one_hot(LABELS, 4)) / 30
    moved = h - h.mean(0) if centre else h
    q = torch.linalg.svd(moved, full_matrices=False).Vh[0]
    assert alignment(found.q, q) == pytest.approx(1)
    zeta = float((h @ q).norm()) / 30**0.5
    z = h @ q / zeta
    U, s, Vh = torch.linalg.svd(Delta, full_matrices=False)
    r, mu = U[:, 0], s[0] * Vh[0]
    rest = Delta - torch.outer(r, mu)
    X_B = h - zeta * torch.outer(z, q)
    pieces = {
        "S1": torch.outer(X_B.T @ r, mu),
        "S12": zeta * (z @ r) * torch.outer(q, mu),
        "S2": zeta * torch.outer(q, z @ rest),
        "E": X_B.T @ rest,
    }
    total = sum(pieces.values())
    torch.testing.assert_close(found.G, total, rtol=1e-10, atol=1e-14)
    for name, piece in pieces.items():
        got = found.E if name == "E" else getattr(found, name).matrix()
        torch.testing.assert_close(got, piece, rtol=1e-9, atol=1e-14)
        assert found.pieces[name] == pytest.approx(operator_norm(piece))
        share = float(piece.square().sum() / total.square().sum())
        assert found.shares[name] == pytest.approx(share)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-12)
    assert found.signal_share == pytest.approx(float(s[0] ** 2 / s.square().sum()))
    values = torch.linalg.svdvals(moved).square() / 30
    assert found.input_values == pytest.approx(values[:2].tolist())
    assert found.nu == pytest.approx(0.5 * math.log(values[0] / values[1]) / math.log(30))
    mean = h.mean(0)
    assert found.mean_alignment == pytest.approx(float((q @ mean).abs() / mean.norm()))
    torch.testing.assert_close(found.mean_input, mean)
    bias = torch.autograd.grad(CROSS_ENTROPY(model(x), LABELS), model[2].bias)[0]
    torch.testing.assert_close(found.bias_gradient, bias)
    triplets = torch.linalg.svd(found.G, full_matrices=False)
    pair = [alignment(triplets.U[:, 0], mean), alignment(triplets.Vh[0], bias)]
    assert found.along_means == pytest.approx(pair)
    torch.testing.assert_close(found.singular_values, triplets.S)
    torch.testing.assert_close(found.along_q, (triplets.U.T @ q).abs()[: len(found.along_q)])
    span = torch.linalg.qr(torch.stack([q, X_B.T @ r], 1)).Q
    plane = (span.T @ triplets.U[:, :2]).square().sum() / 2
    assert found.plane == pytest.approx(float(plane))
    assert found.stable_rank == pytest.approx(float((triplets.S**2).sum() / triplets.S[0] ** 2))


# --- the network of the first paper: estimates beside the truth -----------------------------------


class Activation(nn.Module):
    def __init__(self, sigma):
        super().__init__()
        self.sigma = sigma

    def forward(self, x):
        return self.sigma.value(x)


def as_modules(network):
    m, d = network.W.shape
    inner, outer = nn.Linear(d, m, bias=False), nn.Linear(m, 1, bias=False)
    model = nn.Sequential(inner, Activation(network.sigma), outer, nn.Flatten(0)).double().eval()
    with torch.no_grad():
        inner.weight.copy_(network.W)
        outer.weight.copy_((network.gamma * network.a)[None])
    return model


@pytest.mark.parametrize("nu", [0.25, 0.375, 0.45])
@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh"])
def test_estimates_find_the_pieces_of_the_two_layer_network(nu, activation):
    case = experiments.scenario(400, nu=nu, activation=activation, residue="offset", seed=1)
    model = as_modules(case.network)
    loss = lambda f, r: (f * r).mean()  # noqa: E731  (its residue is r)
    found = diagnose(model, "0", (case.data.X, case.residue), loss)
    parts = decompose(case.data, case.network, case.residue)
    torch.testing.assert_close(found.G, parts.G, rtol=1e-10, atol=1e-12 * operator_norm(parts.G))
    # As far as the spike can be seen in the data, which theory says.
    theta = case.data.zeta * float(case.data.z.norm()) / 400**0.5
    predicted = spiked_singular_value(theta, 0.75).right ** 0.5
    assert alignment(found.q, case.data.q) == pytest.approx(predicted, abs=0.03)
    assert alignment(found.v, parts.S1.v) > 0.98
    assert alignment(found.S1.u, parts.S1.u) > 0.97
    for name in ("S1", "S2"):
        assert found.pieces[name] == pytest.approx(getattr(parts, name).norm, rel=0.15)
    assert found.plane > 0.9 and found.outliers in (2, 3)


def test_random_signs_are_a_null():
    # Examples of independent random signs: their gradient is one more draw of the null, so that
    # its rest is above the largest of 9 draws in one case of ten, and 12 of 40 have chance 1e-4.
    model = seeded(lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)))
    above = 0
    for seed in range(40):
        x, signs = random(60, 20, seed=seed), random(60, 1, seed=100 + seed).sign()
        found = diagnose(model, "0", (x, signs), lambda f, r: (f * r).mean(), draws=9, seed=seed)
        above += found.pieces["E"] > found.edge
    assert above < 12
    # A task that the examples share is seen.
    found = diagnose(model, "0", (x, 5 + x[:, :1]), lambda f, y: (f - y).square().mean())
    assert found.outliers >= 1 and found.leader in ("data", "residue")


def test_signs_are_those_of_examples_and_the_seed_decides():
    model = seeded(lambda: Averaged(nn.Conv2d(3, 5, 3), 5))
    x = random(2, 3, 6, 6)
    data = (x, LABELS[:2])
    found = diagnose(model, "layer", data, CROSS_ENTROPY, draws=30)
    # Two examples have two relative signs: all norms are one of two.
    assert len({round(norm, 12) for norm in found.null_norms}) == 2
    again = diagnose(model, "layer", data, CROSS_ENTROPY, draws=30)
    assert again.null_norms == found.null_norms
    other = diagnose(model, "layer", data, CROSS_ENTROPY, draws=30, seed=1)
    assert other.null_norms != found.null_norms


# --- Gauss-Newton ---------------------------------------------------------------------------------


def test_gauss_newton_share_is_that_of_the_matrix():
    model = mlp()
    found = diagnose(model, "2", (X, LABELS), CROSS_ENTROPY, gauss_newton=True)
    h, p = torch.tanh(model[0](X)).detach(), model(X).softmax(1).detach()
    weights = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    # Weights of the last layer, logit by logit: G = mean of (diag(p) - p p^T) kron h h^T.
    matrix = torch.einsum("iab,ic,id->acbd", weights, h, h).reshape(24, 24) / 30
    top = torch.linalg.eigh(matrix).eigenvectors[:, -4:]
    g = found.G.T.reshape(-1)
    share = float((top.T @ g).square().sum() / g.square().sum())
    assert found.gauss_newton == pytest.approx(share, abs=1e-4)
    assert 0 < found.gauss_newton_null < 1
    assert "Gauss-Newton" in found.table().index
    # pandas cuts longer texts.
    assert found.table()["meaning"].str.len().max() < 50
    assert diagnose(model, "2", (X, LABELS), CROSS_ENTROPY).gauss_newton is None


def test_gauss_newton_refuses_another_loss_and_computed_weights():
    model = mlp()
    smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
    with pytest.raises(ValueError, match="loss is not the mean softmax cross-entropy"):
        diagnose(model, "0", (X, LABELS), smooth, gauss_newton=True)
    nn.utils.parametrizations.weight_norm(model[0])
    model.eval()
    found = diagnose(model, "0", (X, LABELS), CROSS_ENTROPY)
    assert found.kind == "ParametrizedLinear"
    with pytest.raises(ValueError, match="no parameter but computed from some"):
        diagnose(model, "0", (X, LABELS), CROSS_ENTROPY, gauss_newton=True)


# --- the model stays as it is ---------------------------------------------------------------------


def _state(model):
    return {
        "weights": {name: t.clone() for name, t in model.state_dict().items()},
        "grads": [p.grad.clone() if p.grad is not None else None for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) for m in model.modules()],
        "random": torch.random.get_rng_state(),
    }


def _same(one, other):
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    torch.testing.assert_close(one["random"], other["random"])
    for a, b in zip(one["grads"], other["grads"]):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert all(one[key] == other[key] for key in ("flags", "modes", "hooks"))


def test_the_model_is_left_as_it_was():
    model = seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Flatten(), nn.Linear(80, 4)),
        )
    )
    x = random(30, 3, 6, 6)
    CROSS_ENTROPY(model(x), LABELS).backward()
    model[5].weight.grad = None
    model[0].bias.requires_grad_(False)
    before = _state(model)
    for name in layer_names(model):
        diagnose(model, name, (x, LABELS), CROSS_ENTROPY, gauss_newton=name == "0")
    _same(before, _state(model))

    def broken(output, targets):
        raise RuntimeError("mine")

    with pytest.raises(ValueError, match=r"loss fails on .*torch.int64 \(targets\): mine"):
        diagnose(model, "0", (x, LABELS), broken)
    with pytest.raises(ValueError, match=r"the model fails on a tensor of shape \(30, 3, 3, 3\)"):
        diagnose(model, "0", (x[:, :, :3, :3], LABELS), CROSS_ENTROPY)
    shuffled = DataLoader(TensorDataset(x, LABELS), batch_size=8, shuffle=True)
    diagnose(model, "0", shuffled, CROSS_ENTROPY)
    _same(before, _state(model))


def test_buffers_that_a_pass_changes_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.calls += 1
            self.last = x.mean(0) + torch.randn(8, dtype=x.dtype)
            return self.layer(x)

    model = seeded(Counting)
    last, before = model.last, _state(model)
    diagnose(model, "layer", (X, LABELS), CROSS_ENTROPY)
    _same(before, _state(model))
    assert model.last is last


def test_hooks_that_are_there_keep_their_effect():
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    found = diagnose(model, "0", (X, LABELS), CROSS_ENTROPY)
    wanted = autograd_gradient(model, model[0].weight, X, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.mean_input, X.mean(0) + 1)


class Tied(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.head, self.how = nn.Linear(8, 8), nn.Linear(8, 4), how
        self.second = self.first if how == "module" else nn.Linear(8, 8)
        if how == "weight":
            self.second.weight = self.first.weight

    def forward(self, x):
        h = self.second(torch.tanh(self.first(x)))
        return self.head(h @ self.first.weight if self.how == "function" else torch.tanh(h))


def test_a_weight_that_is_used_elsewhere_is_refused_and_a_layer_of_two_names_is_not():
    model = seeded(lambda: Tied("module"))
    weight = model.first.weight
    for name, overlap in (("first", True), ("second", False)):
        found = diagnose(model, name, (X, LABELS), CROSS_ENTROPY, gauss_newton=overlap)
        wanted = autograd_gradient(model, weight, X, LABELS)
        torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)
        assert model.first.weight is weight
    with pytest.raises(ValueError, match="weight of layer 'first' is also that of 'second'"):
        diagnose(seeded(lambda: Tied("weight")), "first", (X, LABELS), CROSS_ENTROPY)
    with pytest.raises(ValueError, match="weight of layer 'first' is used elsewhere"):
        diagnose(seeded(lambda: Tied("function")), "first", (X, LABELS), CROSS_ENTROPY)


@pytest.mark.parametrize("order", ["tokens first", "merged", "one by one", "twice"])
def test_signs_are_those_of_examples_however_they_come(order):
    class Layout(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            if order == "tokens first":
                h = self.layer(x.transpose(0, 1)).transpose(0, 1)
            elif order == "merged":
                h = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            elif order == "one by one":
                h = torch.stack([self.layer(tokens) for tokens in x])
            else:
                h = self.layer(self.layer(x))
            return self.head(torch.tanh(h).mean(1))

    x = random(3, 5, 8)
    model = seeded(Layout)
    found = diagnose(model, "layer", (x, LABELS[:3]), CROSS_ENTROPY, draws=40)
    # Three examples have four relative signs.
    norms = {round(norm, 12) for norm in found.null_norms}
    assert len(norms) == 4
    each = [autograd_gradient(model, model.layer.weight, x[[i]], LABELS[[i]]) / 3 for i in range(3)]
    signs = [(1, a, b) for a in (1, -1) for b in (1, -1)]
    Q, V = (torch.eye(8) - torch.outer(u, u) for u in (found.q, found.v))
    wanted = {operator_norm(Q @ sum(s * g for s, g in zip(row, each)) @ V) for row in signs}
    assert sorted(norms) == pytest.approx(sorted(wanted))


def test_a_layer_without_examples_in_front_is_refused():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(x + torch.tanh(self.layer(X[:7])).mean(0))

    with pytest.raises(ValueError, match=r"gets inputs of shape \(7, 8\) for 30 examples"):
        diagnose(seeded(Positions), "layer", (X, LABELS), CROSS_ENTROPY)


def test_frozen_weights_and_changes_in_place_do_not_matter():
    first, rest = (nn.Linear(8, 6), nn.ReLU(True)), (nn.Linear(6, 6), nn.ReLU(True))
    model = seeded(lambda: nn.Sequential(*first, *rest, nn.Linear(6, 4)))
    wanted = [autograd_gradient(model, model[k].weight, X, LABELS) for k in (0, 2, 4)]
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        for k, gradient in zip((0, 2, 4), wanted):
            with torch.no_grad():
                found = diagnose(model, str(k), (X, LABELS), CROSS_ENTROPY)
            torch.testing.assert_close(found.G, gradient, rtol=1e-12, atol=1e-15)


def test_an_input_that_is_changed_later_was_copied():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x):
            x = 1 * x
            h = self.layer(x)
            x.zero_()
            return self.head(h)

    model = seeded(Changing).requires_grad_(False)
    found = diagnose(model, "layer", (X, LABELS), CROSS_ENTROPY)
    same = nn.Sequential(model.layer, model.head).requires_grad_()
    wanted = autograd_gradient(same, model.layer.weight, X, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_summed_in_double(dtype):
    model = mlp()
    exact = diagnose(model, "0", (X, LABELS), CROSS_ENTROPY)
    found = diagnose(copy.deepcopy(model).to(dtype), "0", (X.to(dtype), LABELS), CROSS_ENTROPY)
    assert found.G.dtype == torch.float64
    off = (found.G - exact.G).norm() / exact.G.norm()
    assert off < (1e-5 if dtype == torch.float32 else 0.1)


def test_layers_of_a_transformer_are_seen_in_evaluation_mode():
    layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
    model = seeded(lambda: Averaged(nn.Linear(8, 8), 8))
    model.layer = seeded(layer)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = seeded(layer), seeded(lambda: nn.Linear(8, 4))

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    model = Tokens().requires_grad_(False).eval()
    x = random(30, 5, 8)
    found = diagnose(model, "encoder.linear1", (x, LABELS), CROSS_ENTROPY)
    model.requires_grad_()
    wanted = autograd_gradient(model, model.encoder.linear1.weight, x, LABELS)
    torch.testing.assert_close(found.G, wanted, rtol=1e-10, atol=1e-14)
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ValueError, match=r"'encoder.self_attn.out_proj' is not called as a module"):
        diagnose(model, "encoder.self_attn.out_proj", (x, LABELS), CROSS_ENTROPY)


def test_gradients_pass_a_recurrent_layer_in_evaluation_mode():
    # cuDNN's have no derivative there: without a GPU one sees that it is not asked for.
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.lstm = nn.Linear(8, 6), nn.LSTM(6, 4, batch_first=True)

        def forward(self, x):
            seen.append(torch.backends.cudnn.enabled)
            return self.lstm(self.first(x)[:, None])[0][:, 0]

    seen, model = [], seeded(Recurrent)
    found = diagnose(model, "first", (X, LABELS), CROSS_ENTROPY)
    CROSS_ENTROPY(model(X), LABELS).backward()
    torch.testing.assert_close(found.G, model.first.weight.grad.T, rtol=1e-10, atol=1e-14)
    assert seen[0] is False and seen[-1] is True and torch.backends.cudnn.enabled


# --- tables ---------------------------------------------------------------------------------------


def test_table_and_numbers_say_the_same():
    found = diagnose(mlp(), "0", (X, LABELS), CROSS_ENTROPY)
    table, numbers = found.table(), found.numbers()
    assert table.loc["s₁", "value"] == numbers["s1"] == pytest.approx(found.singular_values[0])
    assert table.loc["share of S₁₂", "value"] == numbers["share_S12"]
    assert table.loc["|u₁ᵀq|", "value"] == numbers["u1_q"]
    assert table.loc["outliers", "value"] == numbers["outliers"]
    assert set(table.columns) == {"value", "meaning"}
    assert numbers["leader"] in ("data", "residue", "neither")
    assert math.isnan(numbers["gauss_newton"])
    assert repr(found) == "Diagnosis(0: Linear, gradient 8 x 6, 30 examples, 30 rows)"


def test_a_table_with_digits_is_text():
    found = diagnose(mlp(), "0", (X, LABELS), CROSS_ENTROPY)
    exact, text = found.table()["value"], found.table(digits=2)["value"]
    assert text["outliers"] == str(found.outliers)
    others = text.drop("outliers")
    # Two significant digits: a small number keeps both.
    assert others.astype(float).to_numpy() == pytest.approx(
        exact[others.index].to_numpy(), rel=0.05
    )
    assert any(value != str(exact[name]) for name, value in others.items())
    small = diagnose(mlp(), "0", (X, LABELS), lambda f, y: 1e-5 * CROSS_ENTROPY(f, y))
    assert float(small.table(digits=2).value["edge"]) == pytest.approx(small.edge, rel=0.05)


@pytest.mark.parametrize("digits", [0, 16, 2.0, True, "3"])
def test_digits_of_a_table_are_checked(digits):
    found = diagnose(mlp(), "0", (X, LABELS), CROSS_ENTROPY)
    with pytest.raises(ValueError, match="but a whole number from 1 to 15 is needed"):
        found.table(digits=digits)


def test_a_bias_gradient_of_rounding_has_no_direction():
    # Softmax does not see a constant on all keys.
    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query, self.head = (nn.Linear(8, k) for k in (6, 6, 4))

        def forward(self, x):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            return self.head((scores.softmax(2) @ x).mean(1))

    model, x = seeded(Keys), random(30, 5, 8)
    found = diagnose(model, "key", (x, LABELS), CROSS_ENTROPY)
    assert not found.bias_gradient.any() and found.along_means[1] == 0
    bias = torch.autograd.grad(CROSS_ENTROPY(model(x), LABELS), model.query.bias)[0]
    other = diagnose(model, "query", (x, LABELS), CROSS_ENTROPY)
    torch.testing.assert_close(other.bias_gradient, bias)


def test_a_rank_one_gradient_has_no_rest():
    model = seeded(lambda: nn.Linear(8, 4))
    x = random(1, 8).expand(5, 8)
    y = torch.tensor([0, 0, 0, 0, 0])
    found = diagnose(model, "", (x, y), CROSS_ENTROPY)
    assert found.shares["S12"] == pytest.approx(1)
    assert found.stable_rank == pytest.approx(1) and found.nu == math.inf
    assert found.outliers == 1
    assert found.leader == "data" and repr(found).startswith("Diagnosis(the model: Linear")
    with pytest.raises(ValueError, match="inputs of the layer are all alike: no direction"):
        diagnose(model, "", (x, y), CROSS_ENTROPY, centre=True)


# --- one clear line -------------------------------------------------------------------------------


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_1 = nn.Linear(8, 6)
        self.encoder_2 = nn.Linear(6, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.depthwise = nn.Conv1d(6, 6, 1, groups=3)
        self.single = nn.Linear(6, 1)
        self.unused = nn.Linear(6, 6)
        self.silent = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.encoder_2(torch.tanh(self.encoder_1(x))))
        self.silent(h)
        with torch.no_grad():
            g = self.lstm(h[:, None])[0][:, 0]
        return self.head(h + g)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (
            "encoder",
            "layer is 'encoder', but one of the model's 5 layers is needed, such as encode",
        ),
        ("nothing like it", "such as encoder_1, encoder_2, unused, silent"),
        ("lstm", "layer 'lstm' is a LSTM, but a Linear, Conv1d, Conv2d or Conv3d is needed"),
        ("depthwise", "has groups=3: its gradient is 3 matrices, not one"),
        ("single", "one input or one output: its gradient is a single vector"),
        ("unused", "layer 'unused' is not called as a module on these data"),
        ("silent", "no gradient reaches layer 'silent'"),
        (nn.Linear(2, 2), "layer is a Linear that is no part of the model"),
    ],
)
def test_a_layer_that_will_not_do_is_named(layer, line):
    with pytest.raises(ValueError, match=line) as caught:
        diagnose(seeded(Zoo), layer, (X, LABELS), CROSS_ENTROPY)
    assert "\n" not in str(caught.value)


def test_quantised_lazy_and_overridden_layers_are_refused():
    model = mlp().float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
        except (AttributeError, RuntimeError):  # torch is about to move it elsewhere
            quantised = None
    if quantised is not None:
        with pytest.raises(ValueError, match="but the model has no Linear, Conv1d"):
            diagnose(quantised, "1.0", (X.float(), LABELS), CROSS_ENTROPY)
    lazy = nn.Sequential(nn.LazyLinear(4)).eval()
    with pytest.raises(ValueError, match="has no weights yet: call the model once"):
        diagnose(lazy, "0", (X, LABELS), CROSS_ENTROPY)
    scaled = seeded(lambda: nn.Sequential(Scaled(8, 4)))
    with pytest.raises(ValueError, match="a Scaled, does not compute x W"):
        diagnose(scaled, "0", (X, LABELS), CROSS_ENTROPY)


@pytest.mark.parametrize(
    ("data", "error", "line"),
    [
        (X, TypeError, "data is a Tensor, but a pair"),
        (
            TensorDataset(X, LABELS),
            TypeError,
            "data is a TensorDataset, but .* as from a DataLoader",
        ),
        ([X], TypeError, "data gives a Tensor, but a pair"),
        ([], ValueError, "data has no examples: the loader is empty"),
        ((X[:0], LABELS[:0]), ValueError, "data has a batch without examples"),
        ((X[:1], LABELS[:1]), ValueError, "data has 1 example, but at least 2 are needed"),
        (
            list(TensorDataset(X, LABELS)),
            ValueError,
            "data gives single examples, but batches are needed",
        ),
        ((X, LABELS[:9]), ValueError, "data gives 30 inputs, but 9 targets"),
        ([({"x": X}, LABELS)], TypeError, "inputs that are a dict, but a tensor is needed"),
        ((X.float(), LABELS), TypeError, "inputs have dtype torch.float32, but the model's param"),
        ((with_nan(X, 2), LABELS), ValueError, "loss of a batch is nan: 2 of 30 .* NaN .* inputs"),
        ([(X, LABELS), (with_nan(X, 3), LABELS)], ValueError, "nan: 3 of 30 examples have NaN"),
        ((X.numpy(), LABELS.numpy()), TypeError, "inputs that are a ndarray, but a tensor"),
        ((X.long(), LABELS), ValueError, "the model fails on a tensor .* torch.int64: mat1"),
        ((X, LABELS.double()), ValueError, "loss fails on .*float64 .targets.: .*use y.long"),
        ((X, LABELS.int()), ValueError, "loss fails on .*int32 .targets.: .*use y.long"),
        ((X, torch.eye(4).long()[LABELS]), ValueError, r"loss fails .*, use y.argmax\(dim=1\)"),
        ((X, LABELS[:, None]), ValueError, r"loss fails .*, use y.squeeze\(1\)"),
        ((X, LABELS + 1), ValueError, "between 1 and 4, but 0 to 3 are needed"),
        ([{"x": X, "y": LABELS}], TypeError, r"dict, .*\[\(b\['x'\], b\['y'\]\) for b in loader"),
        ([(X, LABELS, X)], TypeError, r"a tuple, .*keep two of each, as in \[\(b\[0\], b\[1\]\)"),
        ((1e200 * X, LABELS), ValueError, "square of its inputs or signals, is infinite"),
    ],
)
def test_data_that_will_not_do_are_named(data, error, line):
    with pytest.raises(error, match=line):
        diagnose(mlp(), "0", data, CROSS_ENTROPY)


@pytest.mark.parametrize(
    ("loss", "error", "line"),
    [
        ("mse", TypeError, "loss is a str, but a function"),
        (nn.CrossEntropyLoss(reduction="sum"), ValueError, "loss has reduction 'sum'"),
        (lambda f, y: f.sum(1), ValueError, r"loss returns shape \(30,\), but one number"),
        (lambda f, y: 1.0, TypeError, "loss returns a float, but a tensor"),
        (lambda f, y: f.sum() * 0, ValueError, "the gradient of layer '0' is zero|all zero"),
        (lambda f, y: f.detach().sum(), ValueError, "no gradient reaches layer '0'"),
        (nn.CrossEntropyLoss, TypeError, r"loss is the class .* is needed: CrossEntropyLoss\(\)"),
        (lambda f, y: (f + 0j).sum(), TypeError, "loss returns torch.complex128"),
        (lambda f: f.sum(), ValueError, "loss fails on a tensor .* takes 1 positional argument"),
    ],
)
def test_losses_that_will_not_do_are_named(loss, error, line):
    with pytest.raises(error, match=line):
        diagnose(mlp(), "0", (X, LABELS), loss)


def test_a_shape_that_binary_losses_do_not_take_comes_with_its_remedy():
    one = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    for targets in ((LABELS > 1).double(), (LABELS > 1).long()):
        with pytest.raises(ValueError, match=r"use y.float\(\)\[:, None\]$"):
            diagnose(one, "0", (X, targets), nn.BCEWithLogitsLoss())


def test_a_softmax_before_cross_entropy_is_named():
    ends = nn.Sequential(nn.Linear(8, 4), nn.Softmax(1)).double().eval()
    with pytest.warns(UserWarning, match="leave the last softmax out"):
        diagnose(ends, "0", (X, LABELS), CROSS_ENTROPY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Another loss may want probabilities; logarithms of them are logits.
        diagnose(ends, "0", (X, LABELS), lambda f, y: f.square().mean())
        logs = nn.Sequential(nn.Linear(8, 4), nn.LogSoftmax(1)).double().eval()
        diagnose(logs, "0", (X, LABELS), CROSS_ENTROPY)


def test_other_arguments_are_checked():
    model, data = mlp(), (X, LABELS)
    with pytest.raises(TypeError, match=r"model is a function, but a torch.nn.Module is needed"):
        diagnose(lambda x: x, "0", data, CROSS_ENTROPY)
    with pytest.raises(TypeError, match="layer is a int, but a name or a module is needed"):
        diagnose(model, 0, data, CROSS_ENTROPY)
    with pytest.raises(ValueError, match="draws is 0"):
        diagnose(model, "0", data, CROSS_ENTROPY, draws=0)
    with pytest.raises(ValueError, match=r"takes 3.*e-06 GB, but memory is 1e-06"):
        diagnose(model, "0", data, CROSS_ENTROPY, memory=1e-6)
    with pytest.raises(TypeError, match="gauss_newton is 'no', but True or False is needed"):
        diagnose(model, "0", data, CROSS_ENTROPY, gauss_newton="no")
    model[1].train()
    with pytest.raises(ValueError, match=r"module '1' is in train mode.*call model.eval\(\) first"):
        diagnose(model, "0", data, CROSS_ENTROPY)


def test_signals_that_are_not_finite_are_named():
    # The square root of 0 is finite, its slope is not.
    loss = lambda f, y: (0 * f).sqrt().mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"'0' has NaN or infinite inputs or signals: .* slopes"):
        diagnose(mlp(), "0", (X, LABELS), loss)


def test_infinite_inputs_of_a_finite_loss_are_counted():
    # tanh(inf) is 1.
    infinite = with_nan(X, 3)[1:]
    with pytest.raises(ValueError, match=r"'0' has NaN .*: 2 of 29 examples .* infinite inputs"):
        diagnose(mlp(), "0", (infinite, LABELS[1:]), CROSS_ENTROPY)


def test_what_is_not_finite_though_the_inputs_are_is_named():
    mse, y = nn.MSELoss(), random(30, 4, seed=1)
    with pytest.raises(ValueError, match="is nan: 1 of 30 examples have NaN or infinite targets"):
        diagnose(mlp(), "0", (X, with_nan(y, 1)), mse)
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
    line = "inputs and targets are finite, but the model's '2.weight' is not; train"
    with pytest.raises(ValueError, match=f"the loss of a batch is (inf|nan): {line}"):
        diagnose(model, "0", (X, LABELS), CROSS_ENTROPY)
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))
    model[0].running_mean[3] = math.nan
    with pytest.raises(ValueError, match=r"the model's '0.running_mean' is not"):
        diagnose(model, "1", (X, LABELS), CROSS_ENTROPY)
    with pytest.raises(ValueError, match=r"is inf: .* weights are finite, but the loss is not"):
        diagnose(mlp(), "0", (X, y), lambda f, y: mse(f, 1e200 * y))


def test_one_hot_labels_are_targets_but_no_labels():
    # torch's cross-entropy takes probabilities, one-hot ones among them.
    one_hot = torch.eye(4).double()[LABELS]
    found = diagnose(mlp(), "0", (X, one_hot), CROSS_ENTROPY)
    expected = diagnose(mlp(), "0", (X, LABELS), CROSS_ENTROPY)
    torch.testing.assert_close(found.G, expected.G)
    with pytest.raises(ValueError, match=r"one label for each input is needed; use y.argmax"):
        diagnose(mlp(), "0", (X, one_hot), CROSS_ENTROPY, gauss_newton=True)


def test_the_gradient_is_that_of_the_curvature_module():
    model = mlp()
    found = diagnose(model, "0", (X, LABELS), CROSS_ENTROPY)
    other = LossCurvature(model, (X, LABELS), parameters=["0.weight"]).gradient()
    torch.testing.assert_close(found.G.T.reshape(-1), other, rtol=1e-10, atol=1e-14)


# --- the figure -----------------------------------------------------------------------------------


def test_the_figure_says_what_was_found(capsys):
    found = diagnose(mlp(), "0", (X, LABELS), CROSS_ENTROPY)
    fig = figures.diagnosis_figure(found)
    spectrum, parts = fig.axes
    points = spectrum.lines[0].get_ydata()
    assert points == pytest.approx(found.singular_values.tolist())
    heights = torch.tensor([bar.get_height() for bar in parts.patches]).reshape(3, -1)
    torch.testing.assert_close(heights[0].double(), found.along_q**2)
    torch.testing.assert_close(heights.sum(0), torch.ones_like(heights[0]))
    plt.close(fig)
    figures.diagnosis(found)
    shown = capsys.readouterr().out
    assert f"{found.outliers} of 6 singular values of the 8 x 6 gradient of layer '0' " in shown
    assert fig.get_suptitle() == "0: Linear"
    both = diagnose(mlp(), "2", (X, LABELS), CROSS_ENTROPY, gauss_newton=True)
    fig = figures.diagnosis_figure(both)
    assert f"{both.gauss_newton:.0%} of ‖G‖_F², {both.gauss_newton_null:.0%}" in fig.get_suptitle()
    plt.close(fig)
    with pytest.raises(TypeError, match="found is a dict, but what diagnose returns is needed"):
        figures.diagnosis_figure({})
