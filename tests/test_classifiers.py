import io
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn import functional as F

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.classifiers import CheckpointError, build, evaluate, fit
from lowgrad_utils.training import DivergenceError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def examples(n=24, channels=1, size=8, classes=10, dtype=torch.float32, seed=0):
    """Noisy copies of one random image a class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    images = torch.rand(classes, channels, size, size, generator=generator, dtype=dtype)
    noise = torch.rand(n, channels, size, size, generator=generator, dtype=dtype)
    return (images[y] + noise) / 2, y


def small(name="vgg11", seed=0, **arguments):
    return build(name, **{"channels": 1, "size": 8, "width": 1 / 16, "seed": seed, **arguments})


def same_state(model, other):
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


# --- networks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vgg11", 9_231_114),
        ("resnet18", 11_173_962),
        ("densenet40", 1_019_722),
        ("mlp", 3072 * 256 + 256 + 256 * 128 + 128 + 1290),
    ],
)
def test_published_sizes(name, count):
    assert classifiers.count_parameters(build(name)) == count
    assert classifiers.count_parameters(build(name, size=28)) == count


class Parts:
    """The layers of a network one after another, each computed from its formula in eval mode."""

    def __init__(self, model):
        kinds = nn.Conv2d | nn.BatchNorm2d | nn.Linear
        self.layers = [layer for layer in model.modules() if isinstance(layer, kinds)]

    def conv(self, x):
        layer, out = self.layers.pop(0), 0
        kernel, stride = layer.weight.shape[-1], layer.stride[0]
        pad = kernel // 2
        padded = F.pad(x, [pad] * 4)
        height = (x.shape[2] + 2 * pad - kernel) // stride + 1
        for i in range(kernel):
            for j in range(kernel):
                rows = slice(i, i + stride * (height - 1) + 1, stride)
                columns = slice(j, j + stride * (height - 1) + 1, stride)
                part = padded[:, :, rows, columns]
                out = out + torch.einsum("nchw,kc->nkhw", part, layer.weight[:, :, i, j])
        return out if layer.bias is None else out + layer.bias[:, None, None]

    def norm(self, x):
        layer = self.layers.pop(0)
        scale = layer.weight / (layer.running_var + 1e-5).sqrt()
        shift = layer.bias - scale * layer.running_mean
        return scale[:, None, None] * x + shift[:, None, None]

    def linear(self, x):
        layer = self.layers.pop(0)
        return x @ layer.weight.T + layer.bias


def relu(x):
    return x * (x > 0)


def halved(x, reduce):
    n, c, h, w = x.shape
    return reduce(x.reshape(n, c, h // 2, 2, w // 2, 2), (3, 5))


def by_hand_vgg11(parts, x):
    for convolutions in (1, 1, 2, 2, 2):
        for _ in range(convolutions):
            x = relu(parts.norm(parts.conv(x)))
        if x.shape[-1] > 1:
            x = halved(x, torch.amax)
    return parts.linear(x.mean((2, 3)))


def by_hand_resnet18(parts, x):
    x = relu(parts.norm(parts.conv(x)))
    for stage in range(4):
        for block in range(2):
            inner = parts.norm(parts.conv(relu(parts.norm(parts.conv(x)))))
            if stage > 0 and block == 0:
                x = parts.norm(parts.conv(x))
            x = relu(inner + x)
    return parts.linear(x.mean((2, 3)))


def by_hand_densenet40(parts, x):
    x = parts.conv(x)
    for block in range(3):
        if block:
            x = halved(parts.conv(relu(parts.norm(x))), torch.mean)
        for _ in range(12):
            x = torch.cat([x, parts.conv(relu(parts.norm(x)))], 1)
    return parts.linear(relu(parts.norm(x)).mean((2, 3)))


def by_hand_mlp(parts, x):
    x = relu(parts.linear(x.reshape(len(x), -1)))
    return parts.linear(relu(parts.linear(x)))


def excite(model):
    """Move batch norm's numbers away from 0 and 1, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
                tensor.data += 0.5 * noise
    return model.eval()


@pytest.mark.parametrize("size", [16, 28])
@pytest.mark.parametrize("name", classifiers.NETWORKS)
def test_networks_are_the_published_ones(name, size):
    model = excite(build(name, size=size, width=1 / 8, classes=7, dtype=torch.float64))
    x = torch.rand(2, 3, size, size, dtype=torch.float64)
    parts = Parts(model)
    with torch.no_grad():
        expected = globals()[f"by_hand_{name}"](parts, F.pad(x, [2] * 4) if size == 28 else x)
        assert parts.layers == []
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)
        assert expected.shape == (2, 7)


def test_widths():
    assert build("densenet40", width=0.25).layers[1].body[2].out_channels == 3
    assert build("vgg11", width=1 / 8).layers[0].out_channels == 8
    assert build("resnet18", width=0.001).layers[0].out_channels == 1
    sizes = [layer.out_features for layer in build("mlp", hidden=[20, 10], width=0.5).layers[1::2]]
    assert sizes == [10, 5, 10]


def test_weights_depend_on_the_seed_only():
    before = torch.random.get_rng_state()
    first, again, other = small(), small(), small(seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert same_state(first, again) and not same_state(first, other)
    assert same_state(first.double(), small(dtype=torch.float64))
    generator = torch.Generator().manual_seed(3)
    assert not same_state(small(seed=generator), small(seed=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", classifiers.NETWORKS)
def test_derivatives_by_torch_func(name, dtype):
    model = excite(build(name, size=8, width=1 / 8, dtype=dtype))
    x = torch.rand(3, 3, 8, 8, dtype=dtype)
    weights = {key: value.detach() for key, value in model.named_parameters()}

    def logits(weights):
        return functional_call(model, weights, (x,))

    generator = torch.Generator().manual_seed(2)
    tangents = {
        key: torch.randn(2, *value.shape, generator=generator, dtype=dtype)
        for key, value in weights.items()
    }
    moved = vmap(lambda tangent: jvp(logits, (weights,), (tangent,))[1])(tangents)
    out, pull = vjp(logits, weights)
    cotangents = torch.randn(2, *out.shape, generator=generator, dtype=dtype)
    pulled = vmap(lambda cotangent: pull(cotangent)[0])(cotangents)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-11
    for i in range(2):
        tangent = {key: value[i] for key, value in tangents.items()}
        single = jvp(logits, (weights,), (tangent,))[1]
        torch.testing.assert_close(moved[i], single, rtol=tolerance, atol=tolerance)
        left = (cotangents[i] * single).sum()
        right = sum((pulled[key][i] * tangent[key]).sum() for key in tangent)
        torch.testing.assert_close(left, right, rtol=tolerance, atol=10 * tolerance)
        if dtype == torch.float64:
            # Small enough that hardly any ReLU switches between the two points.
            h = 1e-8
            ends = [{k: w + s * h * tangent[k] for k, w in weights.items()} for s in (1, -1)]
            difference = (logits(ends[0]) - logits(ends[1])) / (2 * h)
            torch.testing.assert_close(difference, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", classifiers.NETWORKS)
def test_second_derivatives_and_gradients_of_single_examples(name):
    model = excite(build(name, size=8, width=1 / 8, dtype=torch.float64))
    x, y = torch.rand(3, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2])
    weights = {key: value.detach() for key, value in model.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x,)), y)

    whole = grad(loss)(weights, x, y)
    single = vmap(lambda x, y: grad(loss)(weights, x[None], y[None]))(x, y)
    tangents = {key: torch.randn(2, *value.shape).double() for key, value in weights.items()}
    gradient = lambda weights: grad(loss)(weights, x, y)  # noqa: E731
    products = vmap(lambda tangent: jvp(gradient, (weights,), (tangent,))[1])(tangents)
    for key in weights:
        torch.testing.assert_close(single[key].mean(0), whole[key], rtol=1e-9, atol=1e-12)
    sides = [
        float(sum((tangents[key][i] * products[key][1 - i]).sum() for key in weights))
        for i in range(2)
    ]
    assert math.isclose(*sides, rel_tol=1e-8) and sides[0] != 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "vgg"}, ValueError, "name is 'vgg', but one of mlp, vgg11"),
        ({"channels": 0}, ValueError, "channels is 0"),
        ({"classes": 1}, ValueError, "classes is 1, but at least 2"),
        ({"width": 0}, ValueError, "width is 0"),
        ({"size": 30}, ValueError, "size is 30, but 28 or a multiple of 8"),
        ({"hidden": [3]}, ValueError, 'hidden is .*only "mlp"'),
        ({"name": "mlp", "hidden": [0]}, ValueError, "a size of hidden is 0"),
        ({"dtype": torch.float16}, TypeError, "dtype is torch.float16"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_networks_that_cannot_be_built(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        build(**{"name": "vgg11", **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 16, 16), (1, 8, 8)])
def test_images_that_do_not_fit_the_network(shape):
    with pytest.raises(ValueError, match=r"x has shape .* needs N x 1 x 8 x 8"):
        small()(torch.zeros(shape))


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_training_is_its_formula(momentum):
    x, y = examples(10, dtype=torch.float64)
    model = small("mlp", dtype=torch.float64)
    weights = [w.detach().clone() for w in model.parameters()]
    velocity = [torch.zeros_like(w) for w in weights]
    log = fit(
        *(model, x, y),
        **{"epochs": 4, "lr": 0.5, "momentum": momentum, "weight_decay": 0.1},
        **{"batch_size": 4, "label_smoothing": 0.2, "factor": 0.5, "seed": 3, "progress": False},
    )
    generator = checks.random_stream(3, "batches")
    targets = 0.8 * F.one_hot(y, 10).double() + 0.2 / 10
    # Shares 0, 1/4, 1/2, 3/4 of the training lie before, before, after 1/3, after 2/3.
    for epoch, lr in enumerate([0.5, 0.5, 0.25, 0.125]):
        losses, hits = [], 0
        for batch in torch.randperm(10, generator=generator).split([4, 4, 2]):
            leaves = [w.requires_grad_() for w in weights]
            z = x[batch].reshape(len(batch), -1)
            for i in (0, 2):
                z = relu(z @ leaves[i].T + leaves[i + 1])
            z = z @ leaves[4].T + leaves[5]
            loss = -(targets[batch] * (z - z.logsumexp(1, keepdim=True))).sum(1)
            gradients = torch.autograd.grad(loss.mean(), leaves)
            losses += loss.tolist()
            hits += int((z.argmax(1) == y[batch]).sum())
            velocity = [momentum * v + g + 0.1 * w for v, g, w in zip(velocity, gradients, weights)]
            weights = [(w - lr * v).detach() for w, v in zip(weights, velocity)]
        assert math.isclose(log.loss[epoch], np.mean(losses), rel_tol=1e-10)
        assert log.accuracy[epoch] == hits / 10
        assert log.lr[epoch] == lr
    for ours, theirs in zip(model.parameters(), weights):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-12)
    assert not model.training
    assert log.frame()["epoch"].tolist() == [1, 2, 3, 4]
    assert log.frame()["steps"].tolist() == [3, 6, 9, 12]


@pytest.mark.parametrize(("name", "size"), [("vgg11", 16), ("densenet40", 8), ("mlp", 28)])
def test_training_learns_digits(name, size):
    data = datasets.load("mnist")
    x, y = data.images(per_class=50, size=size)
    test = data.images("test", n=300, size=size)
    model = build(name, channels=1, size=size, width=1 / 8)
    before = evaluate(model, *test)
    log = fit(model, x, y, epochs=12, batch_size=32, progress=False)
    after = evaluate(model, *test)
    assert before.error > 0.75 and after.error < 0.45
    assert log.accuracy[-1] > 0.7 and log.loss[-1] < log.loss[0] / 2


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [(9, 4, [4, 5]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (5, 4, [5]), (3, 1, [1] * 3)],
)
def test_batches(n, batch_size, sizes):
    x, y = examples(n)
    model, seen = small("mlp"), []
    model.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0]) if module.training else None
    )
    fit(model, x, y, epochs=2, batch_size=batch_size, progress=False)
    assert [len(batch) for batch in seen] == 2 * sizes
    epochs = [torch.cat(seen[: len(sizes)]), torch.cat(seen[len(sizes) :])]
    for epoch in epochs:  # each image once, in another order each time
        assert sorted(epoch.sum((1, 2, 3)).tolist()) == sorted(x.sum((1, 2, 3)).tolist())
    assert n == 3 or not torch.equal(*epochs)


def test_a_schedule_in_steps():
    x, y = examples(10)
    model, rates = small("mlp"), []
    original = torch.optim.SGD.step

    def step(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        log = fit(model, x, y, steps=8, lr=1.0, batch_size=4, milestones=(0.5,), progress=False)
    assert rates == [1.0] * 4 + [0.1] * 4
    assert log.steps == (3, 6, 8) and log.lr == (1.0, 1.0, 0.1)


def test_training_repeats_to_the_bit():
    state = torch.random.get_rng_state()
    models = [small("resnet18") for _ in range(3)]
    logs = [
        fit(model, X, Y, epochs=2, batch_size=8, seed=seed, progress=False)
        for model, seed in zip(models, (0, 0, 1))
    ]
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_state(models[0], models[1]) and not same_state(models[0], models[2])
    assert logs[0] == logs[1] != logs[2]


def test_two_threads_differ_by_rounding():
    x, y = examples(8, dtype=torch.float64)
    models = [small(dtype=torch.float64) for _ in range(2)]
    fit(models[0], x, y, epochs=2, progress=False)
    torch.set_num_threads(2)
    try:
        fit(models[1], x, y, epochs=2, progress=False)
    finally:
        torch.set_num_threads(1)
    for one, two in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


def test_the_layout_of_images_in_memory_does_not_matter():
    x, y = examples(12, channels=3)
    models = [small(channels=3) for _ in range(2)]
    fit(models[0], x, y, epochs=1, progress=False)
    fit(models[1], x.to(memory_format=torch.channels_last), y.int(), epochs=1, progress=False)
    assert same_state(*models)


def test_the_bar_is_shown_or_not(capsys, monkeypatch):
    x, y = examples(4)
    fit(small("mlp"), x, y, epochs=2)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "accuracy=" in shown
    fit(small("mlp"), x, y, epochs=2, progress=False)
    monkeypatch.setenv("LOWGRAD_BOOK", "1")
    fit(small("mlp"), x, y, epochs=2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"epochs": None}, ValueError, "epochs is None and steps is None, but exactly one"),
        ({"steps": 3}, ValueError, "epochs is 2 and steps is 3"),
        ({"epochs": 0}, ValueError, "epochs is 0"),
        ({"epochs": None, "steps": 1.5}, ValueError, "steps is 1.5"),
        ({"lr": 0}, ValueError, "lr is 0"),
        ({"lr": math.inf}, ValueError, "lr is inf"),
        ({"lr": "fast"}, TypeError, "lr is 'fast'"),
        ({"momentum": 1}, ValueError, "momentum is 1, but .* below 1"),
        ({"weight_decay": -1}, ValueError, "weight_decay is -1"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing is 1"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": 1}, ValueError, "batch_size is 1, but batch norm needs at least 2"),
        ({"milestones": (0.6, 0.3)}, ValueError, r"milestones is \[0.6, 0.3\], but growing"),
        ({"milestones": (0.5, 1.0)}, ValueError, "milestones is .* below 1"),
        ({"milestones": (0.0,)}, ValueError, "a milestone is 0"),
        ({"factor": 0}, ValueError, "factor is 0"),
        ({"seed": 0.5}, TypeError, "seed is 0.5"),
        ({"keep": [1]}, ValueError, r"keep has \[1\], .*give checkpoints"),
        ({"keep": [3], "checkpoints": "run"}, ValueError, "keep has the epoch 3, but .* 2 epochs"),
        ({"keep": [-1], "checkpoints": "run"}, ValueError, "an epoch of keep is -1"),
        ({"x": examples(1)[0], "y": examples(1)[1]}, ValueError, "x has 1 images"),
    ],
)
def test_settings_that_cannot_be(changes, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = examples()
    arguments = {"model": small(), "x": x, "y": y, "epochs": 2, "progress": False, **changes}
    before = {key: value.clone() for key, value in arguments["model"].state_dict().items()}
    with pytest.raises(error, match=words) as caught:
        fit(**arguments)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in arguments["model"].state_dict().items())


X, Y = examples()


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (X.numpy(), Y, TypeError, "x is a ndarray, but a torch tensor"),
        (X, Y.numpy(), TypeError, "y is a ndarray, but a torch tensor"),
        (X.mul(255).byte(), Y, TypeError, "x has dtype torch.uint8"),
        (X.double(), Y, TypeError, "x has dtype torch.float64, but model has torch.float32"),
        (X, Y.float(), TypeError, "y has dtype torch.float32, but integer labels"),
        (X, Y > 3, TypeError, "y has dtype torch.bool"),
        (X, Y[:-1], ValueError, r"y has shape \(23,\), but one label for each of 24"),
        (X, Y[:, None], ValueError, r"y has shape \(24, 1\)"),
        (X[:0], Y[:0], ValueError, "x has shape .* it is empty"),
        (X / X.round(), Y, ValueError, "NaN or infinite"),
        (X, Y + 1, ValueError, "y has labels from 1 to 10, but model has classes 0 to 9"),
        (X, Y - 1, ValueError, "y has labels from -1 to 8"),
        (X.repeat(1, 3, 1, 1), Y, ValueError, "x has shape .* needs N x 1 x 8 x 8"),
        (X[..., :7], Y, ValueError, "x has shape .* needs N x 1 x 8 x 8"),
    ],
)
def test_examples_that_do_not_fit(x, y, error, words):
    for function in (lambda: fit(small(), x, y, epochs=1), lambda: evaluate(small(), x, y)):
        with pytest.raises(error, match=words) as caught:
            function()
        assert "\n" not in str(caught.value)


def test_models_that_are_no_classifiers():
    with pytest.raises(ValueError, match="model has no parameters"):
        evaluate(nn.Flatten(), X, Y)
    with pytest.raises(ValueError, match=r"model gives shape \(1, 2, 6, 6\) for one image"):
        evaluate(nn.Conv2d(1, 2, 3), X, Y)


# --- resuming -----------------------------------------------------------------------------------

SETTINGS = {"epochs": 5, "batch_size": 8, "keep": [0, 2, 5], "progress": False}


@pytest.fixture
def eager(monkeypatch):
    """Store each epoch, however fast it is."""
    monkeypatch.setattr(classifiers, "_STORED_EVERY_SECONDS", 0.0)


def interrupt(model, x, y, step, **settings):
    """Train until a step is half done."""
    seen = []

    def hook(module, inputs):
        seen.append(module.training)
        if sum(seen) == step:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, **settings)
    handle.remove()


@pytest.fixture
def whole(tmp_path):
    model = small()
    log = fit(model, X, Y, checkpoints=tmp_path / "whole", **SETTINGS)
    return model, log, tmp_path / "whole"


def kept(folder):
    return {path.name: path.read_bytes() for path in folder.glob("epoch-*")}


@pytest.mark.parametrize("often", [0.0, 1e9])
@pytest.mark.parametrize("unit", [{}, {"epochs": None, "steps": 14}])
def test_a_resumed_training_is_an_uninterrupted_one(tmp_path, monkeypatch, often, unit):
    monkeypatch.setattr(classifiers, "_STORED_EVERY_SECONDS", often)
    settings = {**SETTINGS, **unit}
    model, folder = small(), tmp_path / "resumed"
    log = fit(model, X, Y, checkpoints=tmp_path / "whole", **settings)
    for step in (1, 5, 4):
        interrupt(small(), X, Y, step, checkpoints=folder, **settings)
    assert "epoch-0005.pt" not in kept(folder)
    resumed = small()
    assert fit(resumed, X, Y, checkpoints=folder, **settings) == log
    assert same_state(resumed, model) and not resumed.training
    assert kept(folder) == kept(tmp_path / "whole") and len(kept(folder)) == 3
    # A training that has come to its end is only read.
    again = small()
    interrupted = []
    again.register_forward_pre_hook(lambda module, _: interrupted.append(module.training))
    assert fit(again, X, Y, checkpoints=folder, **settings) == log
    assert same_state(again, model) and not any(interrupted)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import os, signal
import torch
import test_classifiers as t
torch.set_num_threads(1)
t.classifiers._STORED_EVERY_SECONDS = 0.0
replace, count = os.replace, 0
def killed(*paths):
    global count
    count += 1
    if count == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = killed
t.fit(t.small(), t.X, t.Y, checkpoints={folder!r}, **t.SETTINGS)
"""


def test_a_killed_training_resumes(whole, tmp_path):
    model, log, folder = *whole[:2], tmp_path / "killed"
    script = KILLED.format(tests=str(ROOT / "tests"), folder=str(folder))
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert [path.name for path in folder.glob("*.partial")] == ["epoch-0002.pt.partial"]
    resumed = small()
    assert fit(resumed, X, Y, checkpoints=folder, **SETTINGS) == log
    assert same_state(resumed, model)
    assert kept(folder) == kept(whole[2])
    assert list(folder.glob("*.partial")) == []


def test_kept_epochs_are_plain_weights(whole, tmp_path):
    model, _, folder = whole
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == ["epoch-0000.pt", "epoch-0002.pt", "epoch-0005.pt", "latest.pt"]
    first = torch.load(folder / "epoch-0000.pt", weights_only=True)
    assert all(torch.equal(first[key], value) for key, value in small().state_dict().items())
    last, about = classifiers.load_checkpoint(folder / "epoch-0005.pt")
    assert all(torch.equal(last[key], value) for key, value in model.state_dict().items())
    assert about == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.2}, "its lr is 0.1, but 0.2 is given"),
        ({"epochs": 6}, "its epochs is 5, but 6 is given"),
        ({"seed": 1}, "its seed is not the one given"),
        ({"x": X + 1e-6}, "its x is not the one given"),
        ({"y": Y.roll(1)}, "its y is not the one given"),
        ({"model": small(seed=1)}, "initial weights are not those of model"),
        ({"model": small("mlp")}, "initial weights are not those of model"),
        ({"keep": [1]}, r"is past epoch 1, which keep has, without epoch-0001\.pt"),
    ],
)
def test_the_folder_of_another_training_is_refused(whole, changes, words):
    folder = whole[2]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    arguments = {"model": small(), "x": X, "y": Y, "checkpoints": folder, **SETTINGS, **changes}
    with pytest.raises(CheckpointError, match=words) as caught:
        fit(**arguments)
    assert "\n" not in str(caught.value)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    if "model" not in changes:
        assert same_state(arguments["model"], small())


def flipped(content):
    """Flip a bit in the middle of the largest tensor, which torch alone would read."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        part = max(archive.infolist(), key=lambda part: part.file_size)
    start = part.header_offset
    name, extra = struct.unpack("<HH", content[start + 26 : start + 30])
    place = start + 30 + name + extra + part.file_size // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("owned",))


def saved(value):
    path = Path("saved.pt")
    torch.save(value, path)
    return path.read_bytes()


DAMAGES = [
    lambda content: content[:-100],
    lambda content: b"",
    lambda content: b"<html>" + content[:1000],
    flipped,
    lambda content: pickle.dumps(Malicious()),
    lambda content: saved({"state_dict": Malicious(), "fingerprint": {}, "state": Malicious()}),
    lambda content: saved([1, 2]),
    lambda content: saved({"state_dict": {"a": 1}, "about": "{}"}),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(whole, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    latest = whole[2] / "latest.pt"
    latest.write_bytes(damage(latest.read_bytes()))
    with pytest.raises(CheckpointError, match=r"latest\.pt .*train again") as caught:
        fit(small(), X, Y, checkpoints=whole[2], **SETTINGS)
    assert "\n" not in str(caught.value)
    classifiers.save_checkpoint(small(), "weights.pt", {})
    path = Path("weights.pt")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"weights\.pt .*train the network again") as caught:
        classifiers.load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not Path("owned").exists()


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match="taken cannot be a folder"):
        fit(small(), X, Y, checkpoints=tmp_path / "taken", **SETTINGS)


def test_divergence_is_one_line_and_leaves_the_last_good_checkpoint(tmp_path, eager):
    # The first steps go well, then a jump in the rate ends them.
    settings = {**SETTINGS, "milestones": (0.3,), "factor": 1e30}
    model = small("mlp")
    with pytest.raises(DivergenceError, match=r"diverged .*epoch 3.*smaller lr") as caught:
        fit(model, X, Y, checkpoints=tmp_path, **settings)
    assert "\n" not in str(caught.value) and not model.training
    stored = torch.load(tmp_path / "latest.pt", weights_only=True)["state"]
    assert len(stored["rows"]) == 2
    assert all(bool(torch.isfinite(value).all()) for value in stored["model"].values())
    assert sorted(kept(tmp_path)) == ["epoch-0000.pt", "epoch-0002.pt"]


def test_a_last_step_that_breaks_the_weights_is_noticed():
    with pytest.raises(DivergenceError, match="weights are no longer finite"):
        fit(small("mlp"), 1e20 * X, Y, steps=1, lr=1e30, progress=False)


# --- evaluation and checkpoints -----------------------------------------------------------------


def test_evaluation_is_its_definition():
    model = excite(small())
    model.train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    result = evaluate(model, X, Y, batch_size=7)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        logits = model.eval()(X).double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    true = p[np.arange(len(Y)), Y.numpy()]
    hits = (p.argmax(1) == Y.numpy()).mean()
    wanted = (-np.log(true).mean(), hits, 1 - hits, true.mean())
    got = (result.loss, result.accuracy, result.error, result.mean_probability)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_evaluation_and_training_agree():
    x, y = examples(8)
    model = small("mlp")
    before = evaluate(model, x, y)
    log = fit(model, x, y, epochs=1, progress=False)
    assert math.isclose(log.loss[0], before.loss, rel_tol=1e-5)


def test_checkpoints_come_back(tmp_path):
    model, path = excite(small()), tmp_path / "new" / "weights.pt"
    about = {"name": "vgg11", "width": 1 / 16, "errors": [0.1, None]}
    sha256 = classifiers.save_checkpoint(model, path, about)
    assert [p.name for p in path.parent.iterdir()] == ["weights.pt"]
    state, read = classifiers.load_checkpoint(path, sha256=sha256.upper())
    other = small(seed=5)
    other.load_state_dict(state)
    assert same_state(model, other) and read == about
    with pytest.raises(CheckpointError, match="does not have the SHA-256 0000"):
        classifiers.load_checkpoint(path, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"nothing\.pt cannot be read"):
        classifiers.load_checkpoint(tmp_path / "nothing.pt")
    # The same network gives the same file.
    assert classifiers.save_checkpoint(model, tmp_path / "again.pt", about) == sha256


def test_half_precision(tmp_path):
    model = build("vgg11", width=1 / 4)
    classifiers.save_checkpoint(model, tmp_path / "full.pt", {})
    classifiers.save_checkpoint(model, tmp_path / "half.pt", {}, dtype=torch.float16)
    sizes = [(tmp_path / name).stat().st_size for name in ("full.pt", "half.pt")]
    assert 0.49 < sizes[1] / sizes[0] < 0.55
    state, _ = classifiers.load_checkpoint(tmp_path / "half.pt")
    for key, value in model.state_dict().items():
        assert state[key].dtype == value.dtype
        torch.testing.assert_close(state[key], value, rtol=2**-11, atol=2**-25)
    model.layers[0].bias.data[0] = 1e5
    with pytest.raises(ValueError, match=r"layers\.0\.bias has .* 1e\+05, too large for float16"):
        classifiers.save_checkpoint(model, tmp_path / "half.pt", {}, dtype=torch.float16)


def test_what_cannot_be_stored(tmp_path):
    with pytest.raises(TypeError, match="about is not made of plain values"):
        classifiers.save_checkpoint(small(), tmp_path / "a.pt", {"x": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"dtype is torch\.float64, but None"):
        classifiers.save_checkpoint(small(), tmp_path / "a.pt", {}, dtype=torch.float64)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match="could not be written"):
        classifiers.save_checkpoint(small(), tmp_path / "folder.pt", {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        classifiers.load_checkpoint(tmp_path / "folder.pt")
