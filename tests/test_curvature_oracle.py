"""Products and explicit matrices against curvlinops, an independent implementation.

It comes with ``make test`` and ``make env`` in a folder of its own, beside the environment: see
tools/project.py. Nothing here is skipped where it is missing.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowgrad_utils import classifiers
from lowgrad_utils.curvature import LossCurvature

PEERS = Path(sys.prefix) / "peers"
PINS = Path(__file__).parent.parent / "constraints.txt"


@pytest.fixture
def curvlinops(monkeypatch):
    if not (PEERS / "complete.txt").is_file():
        pytest.fail("curvlinops is missing: run 'make env' once")
    monkeypatch.syspath_prepend(str(PEERS))
    import curvlinops

    return curvlinops


def _unlike_initialisation(model):
    """Give batch norms statistics, and all parameters values, as a training would leave them."""
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer += 0.5 * torch.rand(buffer.shape, generator=stream, dtype=torch.float64)
    return model.eval()


def _linear():
    return nn.Linear(6, 4).double(), (6,)


def _smooth():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), (6,)


def _narrow(name, width):
    model = classifiers.build(name, classes=4, width=width, size=8, dtype=torch.float64)
    return model, (3, 8, 8)


CASES = {
    "linear": _linear,
    "tanh": _smooth,
    "mlp": lambda: _narrow("mlp", 1 / 128),
    "vgg11": lambda: _narrow("vgg11", 1 / 256),
    "resnet18": lambda: _narrow("resnet18", 1 / 256),
    "densenet40": lambda: _narrow("densenet40", 1 / 32),
}


@pytest.fixture(params=CASES)
def case(request):
    """A network, its images in classes of 3, 8, 1 and 5, and their labels."""
    model, shape = CASES[request.param]()
    stream = torch.Generator().manual_seed(7)
    x = torch.randn(17, *shape, generator=stream, dtype=torch.float64)
    y = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 8, 1, 5]))
    order = torch.randperm(17, generator=stream)
    return _unlike_initialisation(model), x[order], y[order]


def _theirs(kind, model, x, y):
    # In batches of unlike size, since their mean is what goes wrong first.
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    operator = getattr(kind[0], kind[1])
    return operator(model, nn.CrossEntropyLoss(), list(model.parameters()), batches)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gauss_newton", "GGNLinearOperator"), ("hessian", "HessianLinearOperator")],
)
def test_products_and_matrices_agree(curvlinops, case, ours, theirs):
    model, x, y = case
    other = _theirs((curvlinops, theirs), model, x, y)
    size = other.shape[1]
    stream = torch.Generator().manual_seed(1)
    columns = torch.randn(size, 2, generator=stream, dtype=torch.float64)
    expected = other @ columns
    # Two or three images at a time, and all at once.
    few = 12e-9 * LossCurvature(model, (x, y))._bytes_per_example
    for memory in (few, 2.0):
        operator = getattr(LossCurvature(model, (x, y), memory=memory), ours)
        assert torch.dist(operator @ columns, expected) <= 1e-10 * expected.norm()
    # The matrix of the deepest network, of 8449 parameters, is left to its products.
    if size < 400:
        expected = other @ torch.eye(size, dtype=torch.float64)
        assert torch.dist(operator.matrix(), expected) <= 1e-10 * expected.norm()
    # Zeros would agree with zeros.
    assert expected.norm() > 1e-3


def test_the_two_matrices_differ_where_the_network_is_not_linear(curvlinops, case):
    model, x, y = case
    if isinstance(model, nn.Linear):
        return
    first, second = (
        _theirs((curvlinops, name), model, x, y)
        for name in ("GGNLinearOperator", "HessianLinearOperator")
    )
    v = torch.randn(first.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.dist(first @ v, second @ v) > 1e-4 * (first @ v).norm()


def test_torch_is_the_pinned_one_and_the_only_one():
    pinned = [line for line in PINS.read_text().splitlines() if line.startswith("torch==")]
    assert pinned == ["torch==" + torch.__version__.partition("+")[0]]
    assert not Path(torch.__file__).is_relative_to(PEERS)
    assert not list(PEERS.glob("torch*"))
