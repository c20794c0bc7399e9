import math
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from curvature_examples import (
    COUNTS,
    FLOAT,
    KINDS,
    TOKENS,
    example,
    flat,
    generator,
    gradient_of,
    naive_derivatives,
    naive_gauss_newton,
    naive_hessian_product,
    naive_loss,
    sorted_by_class,
)
from torch import nn

from lowgrad_utils import curvature
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator

each_kind = pytest.mark.parametrize("kind", KINDS)
# DenseNet40 has too many layers for matrices of its own size.
each_small_kind = pytest.mark.parametrize("kind", [k for k in KINDS if k != "densenet40"])


def close(actual, expected, tolerance=1e-10):
    error = float(((actual - expected).norm() / expected.norm()).detach())
    assert error < tolerance, f"relative error {error:.1e}"


def at_example(kind="tanh", **options):
    model, inputs, labels = example(kind, **options)
    return LossCurvature(model, (inputs, labels)), model, *sorted_by_class(inputs, labels)


def vectors(count, size, dtype=FLOAT):
    return torch.randn(count, size, generator=generator(9), dtype=FLOAT).to(dtype)


class Function(nn.Module):
    """A module that computes any function of the logits of a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(5, 3, dtype=FLOAT), function

    def forward(self, x):
        return self.function(self.linear(x))


# --- against derivatives computed in another way -------------------------------------------------


@each_kind
def test_logit_derivatives_and_their_means(kind):
    at, model, inputs, labels = at_example(kind)
    naive = naive_derivatives(model, inputs)
    close(at.logit_derivatives(), naive)
    groups = torch.stack([naive[labels == c].mean(0) for c in range(3)])
    close(at.group_means(), groups)
    others = ~torch.eye(3, dtype=torch.bool)
    close(at.class_centres(), torch.stack([groups[c][others[c]].mean(0) for c in range(3)]))
    directions = vectors(2, at.size)
    close(at.derivatives_along(directions), torch.einsum("ncp,kp->knc", naive, directions))
    close(
        at.derivatives_along(directions, 1),
        torch.einsum("ncp,kp->knc", naive[labels == 1], directions),
    )


@each_small_kind
def test_the_gauss_newton_matrix(kind):
    at, model, inputs, _ = at_example(kind)
    expected = naive_gauss_newton(model, inputs)
    if at.size < 300:
        close(at.gauss_newton.matrix(), expected)
    block = vectors(3, at.size).T
    close(at.gauss_newton @ block, expected @ block)
    close(at.gauss_newton @ block[:, 0], expected @ block[:, 0])


@each_kind
def test_products_with_the_hessian(kind):
    at, model, inputs, labels = at_example(kind)
    block = vectors(2, at.size)
    expected = [naive_hessian_product(model, inputs, labels, v) for v in block]
    close(at.hessian @ block.T, torch.stack(expected, 1))


@pytest.mark.parametrize("kind", ["mlp", "tanh", "normalised", "lstm", "transformer"])
def test_the_hessian_is_the_difference_of_gradients(kind):
    model, inputs, labels = example(kind)
    at, step = LossCurvature(model, (inputs, labels)), 1e-5
    v = vectors(1, at.size)[0]
    gradients = []
    for sign in (1, -1):
        moved, _, _ = example(kind)
        theta = flat(moved.parameters()).detach() + sign * step * v
        nn.utils.vector_to_parameters(theta, moved.parameters())
        gradients.append(gradient_of(naive_loss(moved, inputs, labels), moved))
    close(at.hessian @ v, (gradients[0] - gradients[1]) / (2 * step), 1e-7)


def test_the_hessian_matrix_is_that_of_torch():
    at, model, inputs, labels = at_example("tanh")
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def loss(theta):
        pieces = theta.split([shape.numel() for shape in shapes.values()])
        parameters = {n: piece.view(s) for (n, s), piece in zip(shapes.items(), pieces)}
        return nn.functional.cross_entropy(
            torch.func.functional_call(model, parameters, (inputs,)), labels
        )

    theta = flat(model.parameters()).detach()
    close(at.hessian.matrix(), torch.autograd.functional.hessian(loss, theta))


@each_kind
def test_loss_and_gradient(kind):
    at, model, inputs, labels = at_example(kind)
    loss = naive_loss(model, inputs, labels)
    assert at.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    close(at.gradient(), gradient_of(loss, model))
    rows = torch.tensor([1, 8, 3])
    close(at.gradient(rows), gradient_of(naive_loss(model, inputs[rows], labels[rows]), model))
    close(at.logit_derivatives(rows), naive_derivatives(model, inputs[rows]))


def test_sizes_and_order():
    at, model, inputs, labels = at_example("tanh")
    assert (at.n, at.classes, at.size) == (15, 3, 39)
    assert at.counts.tolist() == list(COUNTS)
    assert torch.equal(at.labels, labels)
    close(at.probabilities, model(inputs).softmax(1))
    assert repr(at) == "LossCurvature(15 examples of 3 classes, 39 parameters)"


def test_a_class_that_the_data_lack_has_no_mean_but_products_exist():
    model, inputs, labels = example("tanh", counts=(4, 0, 5))
    at = LossCurvature(model, (inputs, labels))
    close(at.gauss_newton.matrix(), naive_gauss_newton(model, inputs))
    for means in (at.class_centres, at.group_means):
        with pytest.raises(ValueError, match="class 1 of 3 has no example"):
            means()
    with pytest.raises(ValueError, match="label is 1, but one of \\[0, 2\\] is needed"):
        at.derivatives_along(vectors(1, at.size), 1)


@pytest.mark.parametrize("kind", ["tanh", "vgg11", "lstm"])
def test_single_precision_is_good_where_probabilities_are_nearly_one(kind):
    # Logits of size 20: 1 - p is far below the rounding of a single-precision p, and all of G.
    model, inputs, _ = example(kind, scale=20)
    labels = model(inputs).argmax(1)
    rough, _, _ = example(kind, scale=20, dtype=torch.float32)
    rough.load_state_dict({name: t.to(torch.float32) for name, t in model.state_dict().items()})
    exact = LossCurvature(model, (inputs, labels))
    single = LossCurvature(
        rough, (inputs if kind in TOKENS else inputs.float(), labels), memory=0.5
    )
    v = vectors(1, exact.size)[0]
    tolerance = 2e-4  # logits of 20 are known to 2e-6, and small probabilities relatively to that
    assert single.loss == pytest.approx(exact.loss, rel=tolerance)
    close(single.gradient().double(), exact.gradient(), tolerance)
    close((single.gauss_newton @ v.float()).double(), exact.gauss_newton @ v, tolerance)
    close((single.hessian @ v.float()).double(), exact.hessian @ v, tolerance)
    close(single.logit_derivatives().double(), exact.logit_derivatives(), tolerance)


def test_large_margins_on_either_side():
    # Confidently wrong (loss 60) and confidently right (loss e^-60).
    labels = torch.tensor([0, 1])
    logits = torch.tensor([[0.0, 60, 1], [0, 60, 1]], dtype=FLOAT)
    expected = torch.tensor([60, math.exp(-60) + math.exp(-59)], dtype=FLOAT)
    for row in (0, 1):
        loss = curvature._total_loss(logits[row : row + 1], labels[row : row + 1])
        torch.testing.assert_close(loss, expected[row], rtol=1e-12, atol=0)


# --- ways through memory -------------------------------------------------------------------------


@each_small_kind
def test_a_small_memory_gives_the_same(kind):
    model, inputs, labels = example(kind)
    large, small = LossCurvature(model, (inputs, labels)), LossCurvature(model, (inputs, labels))
    small._bytes = 2 * 5 * curvature._GRAPHS_IN_HESSIAN * small._bytes_per_example
    assert (large._pass_size >= 15, small._pass_size, small._fits(3.5)) == (True, 2, False)
    block = vectors(2, large.size)
    close(small.gauss_newton @ block.T, large.gauss_newton @ block.T, 1e-12)
    close(small.hessian @ block.T, large.hessian @ block.T, 1e-12)
    close(small.gradient(), large.gradient(), 1e-12)
    close(small.class_centres(), large.class_centres(), 1e-12)
    close(small.derivatives_along(block, 1), large.derivatives_along(block, 1), 1e-12)


def test_chunks_of_the_size_of_a_pass_are_kept_and_give_the_same(monkeypatch):
    at, _, _, _ = at_example("mlp")
    v = vectors(1, at.size)[0]
    expected = at.gauss_newton @ v, at.hessian @ v
    monkeypatch.setattr(curvature, "_PASS_BYTES", 4 * at._bytes_per_example)
    at.__dict__.pop("_kept_gradients")
    close(at.gauss_newton @ v, expected[0], 1e-12)
    assert [len(part) for part, _, _ in vars(at)["_kept_maps"]][:-1] == [4] * ((at.n - 1) // 4)
    close(at.hessian @ v, expected[1], 1e-12)


class Clipped(torch.autograd.Function):
    """max(x, 0) with a backward pass of its own, as older code has it: without transforms."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


def test_a_function_with_a_backward_pass_of_its_own():
    torch.manual_seed(0)
    first, last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            return self.last(Clipped.apply(self.first(x)))

    x, labels = torch.randn(9, 4).double(), torch.arange(9) % 3
    usual = LossCurvature(nn.Sequential(first, nn.ReLU(), last).eval(), (x, labels))
    own = LossCurvature(Own().eval(), (x, labels))
    v = vectors(1, own.size)[0]
    close(own.gauss_newton @ v, usual.gauss_newton @ v, 1e-12)
    close(own.hessian @ v, usual.hessian @ v, 1e-12)


@pytest.mark.parametrize("kind", ["mlp", "vgg11", "transformer", "gru"])
def test_a_traced_network_gives_the_same(kind, monkeypatch):
    at, _, _, _ = at_example(kind)
    v = vectors(1, at.size)[0]
    before = at.gauss_newton @ v
    monkeypatch.setattr(curvature, "_WORK_BEFORE_TRACING", 20 * at.size)
    traced = []
    monkeypatch.setattr(
        at, "_linearised", lambda part: traced.append(LossCurvature._linearised(at, part)) or None
    )
    at.__dict__.pop("_kept_maps")
    for _ in range(3):
        at.gauss_newton @ v
    assert len(traced) == 1 and traced[0] is not None
    close(traced[0](v), at._pushforward(at._all)(v), 1e-12)
    monkeypatch.undo()
    close(at.gauss_newton @ v, before, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["tanh", "vgg11", "lstm"])
def test_two_backward_passes_are_a_forward_derivative(kind, dtype):
    at, _, _, _ = at_example(kind, dtype=dtype)
    # In single precision torch has no forward derivative of an LSTM.
    assert at._has_forward_derivative == (not (kind == "lstm" and dtype == torch.float32))
    v = vectors(1, at.size, dtype)[0]
    twice = at._twice_backward(at._all)(v)
    close(twice, at._pushforward(at._all)(v), 1e3 * torch.finfo(dtype).eps)


def test_what_is_kept_is_used_again_and_given_up_for_the_other():
    at, model, _, _ = at_example("tanh")
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    v = vectors(1, at.size)[0]
    at.hessian @ v
    calls.clear()
    at.hessian @ v
    assert calls == []
    at.gauss_newton @ v
    assert "_kept_gradients" not in vars(at)
    at.hessian @ v
    assert "_kept_maps" not in vars(at)
    handle.remove()


def test_memory_that_is_shared_counts_once():
    x = torch.ones(1000, requires_grad=True)
    # Both products save the same tensor, as blocks of a DenseNet do.
    assert curvature._saved_bytes(lambda: (x * x.detach(), x * x.detach())) == 4000


def test_the_process_stays_within_its_memory():
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("the peak of a process can be reset on Linux only")
    script = """
        import torch
        from lowgrad_utils import classifiers
        from lowgrad_utils.curvature import LossCurvature
        torch.set_num_threads(1)

        def status(name):
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) * 1024e-9 for line in lines if line.startswith(name))

        stream = torch.Generator().manual_seed(0)
        model = classifiers.build("vgg11", width=1 / 8).eval()
        x, y = torch.randn(300, 3, 32, 32, generator=stream), torch.arange(300) % 10

        def work(n, memory):
            at = LossCurvature(model, (x[:n], y[:n]), memory=memory)
            at.gauss_newton @ torch.ones(at.size)
            at.hessian @ torch.ones(at.size)
            return at._bytes_per_example * n / 1e9

        work(8, 1)  # what torch takes for itself
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
        print(work(300, 0.1), status("VmHWM") - before)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    saved, used = map(float, result.stdout.split())
    # All at once would take more than three times what the forward pass saves: the test can fail.
    assert 3 * saved > 0.15 and used < 0.1


def test_results_too_large_for_the_memory_are_refused():
    model, inputs, labels = example("tanh")
    at = LossCurvature(model, (inputs, labels), memory=1e-6)
    with pytest.raises(ValueError, match=r"logit derivatives take 1\.4e-05 GB .45 vectors of 39."):
        at.logit_derivatives()
    with pytest.raises(ValueError, match="group means take"):
        at.group_means()
    assert at.class_centres().shape == (3, 39)


def test_class_centres_are_one_pass_over_the_examples(monkeypatch):
    at, model, _, _ = at_example("vgg11")
    examples, backward = [], []
    plain = LossCurvature._derivative
    monkeypatch.setattr(at, "_derivative", lambda *a: backward.append(1) or plain(*a))
    assert at._pass_size > 15  # measured once, with passes of its own
    with model.register_forward_hook(lambda _, inputs, __: examples.append(len(inputs[0]))):
        at.class_centres()
        assert (sum(examples), len(backward)) == (15, 3)
        at.gradient()
        assert (sum(examples), len(backward)) == (30, 4)


# --- operators -----------------------------------------------------------------------------------


def test_operators_say_what_they_need():
    at, _, _, _ = at_example("tanh")
    with pytest.raises(ValueError, match=r"39 rows of torch.float64 are needed"):
        at.gauss_newton @ torch.ones(38, dtype=FLOAT)
    with pytest.raises(ValueError, match=r"dtype torch.float32"):
        at.gauss_newton @ torch.ones(39)
    for wrong in ([1.0] * 39, torch.ones(39, 1, 1, dtype=FLOAT)):
        with pytest.raises(TypeError, match="a vector of length 39"):
            at.gauss_newton @ wrong
    with pytest.raises(ValueError, match="30000 rows, but at most 20000"):
        SymmetricOperator(30_000, FLOAT, torch.device("cpu"), lambda rows: rows).matrix()
    with pytest.raises(ValueError, match="vectors has shape"):
        at.derivatives_along(torch.ones(2, 38, dtype=FLOAT))
    with pytest.raises(TypeError, match=r"vectors have dtype torch.float32"):
        at.derivatives_along(torch.ones(2, 39))


@pytest.mark.parametrize("label", [-1, 3, 1.5])
def test_a_label_is_one_of_the_classes(label):
    at, _, _, _ = at_example("tanh")
    with pytest.raises(ValueError, match="one of \\[0, 1, 2\\] is needed"):
        at.derivatives_along(vectors(1, at.size), label)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 1], TypeError, "a tensor of dtype int64"),
        (torch.tensor([True, False]), TypeError, "a tensor of dtype int64"),
        (torch.tensor([0.0]), TypeError, "a tensor of dtype int64"),
        (torch.tensor([], dtype=torch.int64), ValueError, "rows has 0 positions"),
        (torch.tensor([15]), ValueError, "all from 0 to 14"),
        (torch.tensor([-1]), ValueError, "all from 0 to 14"),
    ],
)
def test_rows_are_positions(rows, error, message):
    at, _, _, _ = at_example("tanh")
    for function in (at.gradient, at.logit_derivatives):
        with pytest.raises(error, match=message):
            function(rows)


# --- models of the reader's own ------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model, inputs, labels = example("vgg11")
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    at = LossCurvature(model, (inputs, labels))
    at.gauss_newton @ at.gradient()
    at.hessian @ at.class_centres()[0]
    at.group_means()
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert torch.equal(random, torch.random.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled()


def test_some_of_the_parameters():
    at, model, inputs, labels = at_example("tanh")
    part = LossCurvature(model, (inputs, labels), parameters=["2.bias", "0.weight"])
    # In the model's order: 0.weight is 0 to 19, 2.bias the last three.
    rows = torch.tensor([*range(20), 36, 37, 38])
    assert part.size == 23
    close(part.gauss_newton.matrix(), at.gauss_newton.matrix()[rows][:, rows])
    close(part.hessian.matrix(), at.hessian.matrix()[rows][:, rows])
    close(part.gradient(), at.gradient()[rows])
    close(part.group_means(), at.group_means()[..., rows])


def test_a_frozen_part_is_left_out_by_name():
    model, inputs, labels = example("tanh")
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"2 parameters have no gradient .*'0.weight' first"):
        LossCurvature(model, (inputs, labels))
    at = LossCurvature(model, (inputs, labels), parameters=["2.weight", "2.bias"])
    assert at.gradient().norm() > 0
    # A frozen one can be asked for, and stays frozen.
    assert LossCurvature(model, (inputs, labels), parameters=["0.bias"]).gradient().norm() > 0
    assert not model[0].bias.requires_grad


def test_parameters_in_any_layout():
    model, inputs, labels = example("tanh")
    close_to = LossCurvature(model, (inputs, labels))
    other, _, _ = example("tanh")
    other[0].weight.data = other[0].weight.data.T.contiguous().T
    assert not other[0].weight.is_contiguous()
    at = LossCurvature(other, (inputs, labels))
    v = vectors(1, at.size)[0]
    close(at.gauss_newton @ v, close_to.gauss_newton @ v)
    close(at.hessian @ v, close_to.hessian @ v)
    close(at.class_centres(), close_to.class_centres())


def test_a_parameter_that_does_nothing_has_derivative_zero():
    model, inputs, labels = example("tanh")
    model.unused = nn.Linear(1, 1, bias=False, dtype=FLOAT).eval()
    model.forward = lambda x: nn.Sequential.forward(model[:3], x)
    at = LossCurvature(model, (inputs, labels))
    assert at.size == 40
    v = vectors(1, 40)[0]
    for product in (at.gauss_newton @ v, at.hessian @ v, at.gradient()):
        assert product[-1] == 0 and product[:-1].norm() > 0


def test_a_default_device_of_the_reader_does_not_matter():
    # Whatever is made here names its device; on the meta device there are no numbers.
    at, _, _, _ = at_example("tanh")
    expected = at.gauss_newton @ at.gradient()
    with torch.device("meta"):
        again = LossCurvature(at._model, (at._inputs, at.labels))
        product = again.gauss_newton @ again.gradient()
        again.hessian @ product
        again.class_centres(), again.group_means(), again.logit_derivatives()
        again.derivatives_along(product[None])
    close(product, expected)


@pytest.mark.parametrize(("kind", "used"), [("lstm", False), ("gru", False), ("vgg11", True)])
def test_cudnn_is_left_out_where_it_has_no_derivative(kind, used):
    # In evaluation mode its recurrent layers have none. No GPU is needed to see what is asked for.
    model, inputs, labels = example(kind)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    at = LossCurvature(model, (inputs, labels))
    at.gauss_newton @ at.gradient()
    assert len(seen) > 1 and set(seen) == {used}
    assert torch.backends.cudnn.enabled


def test_batches_of_a_loader_are_gathered_once():
    at, model, inputs, labels = at_example("tanh")
    data = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator())
    mixed = LossCurvature(model, loader)
    # Two products see the same examples, whatever the loader would shuffle next.
    v = vectors(1, at.size)[0]
    assert torch.equal(mixed.gauss_newton @ v, mixed.gauss_newton @ v)
    close(mixed.gauss_newton @ v, at.gauss_newton @ v)
    once = LossCurvature(model, iter([(inputs[:5], labels[:5]), (inputs[5:], labels[5:])]))
    close(once.class_centres(), at.class_centres())
    assert LossCurvature(model, [inputs, labels]).n == 15
    assert LossCurvature(model, (inputs, labels.int())).labels.dtype == torch.int64


def test_instance_norm_is_fine():
    stack = nn.Sequential(nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(8, 3))
    model = stack.double().eval()
    _, inputs, labels = example("tanh")
    at = LossCurvature(model, (inputs[:, None], labels))
    close(at.gauss_newton.matrix(), naive_gauss_newton(model, at._inputs))


# --- bad input -----------------------------------------------------------------------------------


def batch_norm(**options):
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 3)).double()


def dropout():
    return nn.Sequential(nn.Linear(5, 4), nn.Dropout(), nn.Linear(4, 3)).double()


def replaced():
    """A model that got a new layer, which starts in train mode."""
    model, _, _ = example("tanh")
    model[2] = nn.Linear(4, 3, dtype=FLOAT)
    return model


def layer_in_train_mode(model, name):
    model.eval()
    model.get_submodule(name).train()
    return model


def mixed():
    model, _, _ = example("tanh")
    model[0].float()
    return model


def broken():
    model = nn.Linear(5, 3).double().eval()
    nn.init.constant_(model.weight, torch.nan)
    return model


WRONG_MODELS = {
    "train mode": (lambda: nn.Linear(5, 3).double(), ValueError, "the model is in train mode"),
    "a layer": (replaced, ValueError, "module '2' is in train mode.*model.eval"),
    "dropout": (
        lambda: layer_in_train_mode(dropout(), "1"),
        ValueError,
        "module '1'.*dropout is active",
    ),
    "batch norm": (
        lambda: layer_in_train_mode(batch_norm(), "1"),
        ValueError,
        "would update its statistics",
    ),
    "no statistics": (
        lambda: batch_norm(track_running_stats=False).eval(),
        ValueError,
        "'1'.*of the batch",
    ),
    "functional dropout": (
        lambda: Function(lambda z: nn.functional.dropout(z, 0.1)).eval(),
        ValueError,
        "again",
    ),
    "functional batch norm": (
        lambda: Function(lambda z: z - z.mean(0)).eval(),
        ValueError,
        "others of its batch",
    ),
    "float16": (lambda: nn.Linear(5, 3).half().eval(), TypeError, "torch.float16.*float32"),
    "bfloat16": (lambda: nn.Linear(5, 3).bfloat16().eval(), TypeError, "torch.bfloat16"),
    "mixed": (mixed, TypeError, "dtype torch.float32, torch.float64, but"),
    "float32 model": (lambda: nn.Linear(5, 3).eval(), TypeError, "inputs have dtype torch.float64"),
    "no module": (lambda: torch.sin, TypeError, "a torch.nn.Module is needed"),
    "no parameters": (lambda: nn.ReLU().eval(), ValueError, "has no parameters"),
    "NaN": (lambda: Function(lambda z: z / 0 * 0).eval(), ValueError, "15 of 15 .*NaN or infinite"),
    "infinite": (
        lambda: Function(lambda z: z / 0).eval(),
        ValueError,
        "NaN or infinite logits: inputs and the model's weights are finite, but they overflow",
    ),
    "NaN weights": (broken, ValueError, "inputs are finite, but the model's 'weight' is not"),
    "tuple": (lambda: Function(lambda z: (z,)).eval(), TypeError, "returns a tuple, but a tensor"),
    "dict": (lambda: Function(lambda z: {"logits": z}).eval(), TypeError, "returns a dict"),
    "single logit": (lambda: Function(lambda z: z[:, :1]).eval(), ValueError, "at least 2 logits"),
    "vector": (lambda: Function(lambda z: z[:, 0]).eval(), ValueError, "shape \\(15,\\)"),
    "sequence": (lambda: Function(lambda z: z[:, None]).eval(), ValueError, "shape \\(15, 1, 3"),
    "fewer rows": (lambda: Function(lambda z: z[1:]).eval(), ValueError, "for 15 inputs"),
    "float32 logits": (lambda: Function(lambda z: z.float()).eval(), TypeError, "logits of dtype"),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_models_that_cannot_be_measured(name):
    make, error, message = WRONG_MODELS[name]
    _, inputs, labels = example("linear")
    with pytest.raises(error, match=message) as caught:
        LossCurvature(make(), (inputs, labels))
    assert "\n" not in str(caught.value)


X, Y = torch.ones(4, 5, dtype=FLOAT), torch.tensor([0, 1, 2, 0])
WRONG_DATA = {
    "labels too large": ((X, Y + 1), ValueError, "between 1 and 3, but the model has 3 logits"),
    "negative labels": ((X, Y - 100), ValueError, "labels 0 to 2 are needed"),
    "float labels": ((X, Y.double()), TypeError, "labels have dtype torch.float64.*y.long"),
    "boolean labels": ((X, Y > 0), TypeError, "labels have dtype torch.bool"),
    "too few labels": ((X, Y[:3]), ValueError, "labels have shape \\(3,\\)"),
    "one-hot labels": ((X, torch.eye(3)[Y]), ValueError, r"\(4, 3\).*use y.argmax\(dim=1\)"),
    "rows of zeros": ((X, torch.zeros(4, 3)), ValueError, "for each input is needed$"),
    "rows of numbers": ((X, torch.arange(12).reshape(4, 3)), ValueError, "input is needed$"),
    "empty tensors": ((X[:0], Y[:0]), ValueError, "data has no examples"),
    "empty loader": ([], ValueError, "data has no examples"),
    "empty batches": ([(X[:0], Y[:0])], ValueError, "data has no examples"),
    "inputs alone": (X, TypeError, "data is a Tensor, but a pair"),
    "nothing": (None, TypeError, "data is a NoneType"),
    "labels in a column": ((X, Y[:, None]), ValueError, r"\(4, 1\).*use y.squeeze\(1\)$"),
    "one label of 1": ((X[:1], torch.ones(1, 1).long()), ValueError, r"use y.squeeze\(1\)$"),
    "three parts": ([(X, Y, Y)], TypeError, r"Tensor, Tensor\), but .*\(b\[0\], b\[1\]\) for b in"),
    "dictionaries": ([{"x": X, "y": Y}], TypeError, r"dict, but a pair.*\(b\['x'\], b\['y'\]\)"),
    "wrong inputs": (
        (X[:, :4], Y),
        ValueError,
        r"fails on inputs of shape \(4, 4\) and torch",
    ),
    "whole numbers": ((X.long(), Y), ValueError, "fails on inputs of .* and torch.int64: "),
    "a data set": ([(X[0], 1), (X[1], 0)], TypeError, "\\(Tensor, int\\).*use a DataLoader"),
    "arrays": ((X.numpy(), Y.numpy()), TypeError, "data gives a ndarray"),
    "shapes": ([(X, Y), (X[:, :4], Y)], ValueError, "different batches have shapes"),
    "NaN": ((X * torch.nan, Y), ValueError, "4 of 4 .* logits: 4 of 4 .* infinite inputs; remove"),
    "a NaN": (
        (torch.where(torch.eye(4, 5) * Y[:, None] > 0, torch.nan, X), Y),
        ValueError,
        "^2 of 4 examples .* logits: 2 of 4 examples have NaN or infinite inputs; remove",
    ),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_data_that_cannot_be_used(name):
    data, error, message = WRONG_DATA[name]
    with pytest.raises(error, match=message):
        LossCurvature(nn.Linear(5, 3, dtype=FLOAT).eval(), data)


def test_a_softmax_at_the_end_is_named():
    linear = nn.Linear(5, 3, dtype=FLOAT)
    with pytest.warns(UserWarning, match="leave the last softmax out"):
        LossCurvature(nn.Sequential(linear, nn.Softmax(1)).eval(), (X, Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossCurvature(nn.Sequential(linear, nn.LogSoftmax(1)).eval(), (X, Y))
        LossCurvature(nn.Sequential(linear, nn.Sigmoid()).eval(), (X, Y))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": 0}, ValueError, "memory is 0"),
        ({"memory": "much"}, TypeError, "memory is 'much'"),
        ({"parameters": ["wait"]}, ValueError, "'wait', but the model has weight, bias"),
        ({"parameters": []}, ValueError, "parameters is empty"),
        ({"parameters": "weight"}, TypeError, "a list of names is needed"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        LossCurvature(nn.Linear(5, 3, dtype=FLOAT).eval(), (X, Y), **options)


@pytest.mark.parametrize("tied", ["module", "weight"])
def test_a_shared_layer_is_used_everywhere_and_stays(tied):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
            self.second = self.first if tied == "module" else nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model = Shared().double().eval()
    weight = model.first.weight
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(12) % 3
    own = LossCurvature(model, (x, y), parameters=["first.weight"]).gradient()
    assert model.first.weight is weight and model.second.weight is weight
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weight)[0]
    torch.testing.assert_close(own, wanted.flatten())
