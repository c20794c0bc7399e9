"""Small networks: one-at-a-time derivatives against central differences and torch.func."""

import pytest
import torch
from torch import nn

from lowgrad_utils.experiments import small_classifiers
from lowgrad_utils.experiments.small_classifiers import SmallClassifier


@pytest.fixture(scope="module")
def case():
    """A smooth network, so that differences of functions converge."""
    stream = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream, dtype=torch.float64))
    x = torch.randn(7, 4, generator=stream, dtype=torch.float64)
    return SmallClassifier(model, x, torch.tensor([0, 0, 1, 1, 2, 2, 2]))


def logits_at(case, theta):
    names = [name for name, _ in case.model.named_parameters()]
    pieces = theta.split([p.numel() for p in case.parameters])
    shaped = [piece.view(p.shape) for piece, p in zip(pieces, case.parameters)]
    return torch.func.functional_call(case.model, dict(zip(names, shaped)), (case.x,))


def parameters_of(case):
    return torch.cat([p.detach().flatten() for p in case.parameters])


def test_jacobian_is_that_of_torch_func(case):
    expected = torch.func.jacfwd(lambda theta: logits_at(case, theta))(parameters_of(case))
    torch.testing.assert_close(small_classifiers.jacobian(case), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_gradients_are_central_differences(case, smoothing):
    labels = torch.tensor([2, 1, 0, 0, 1, 2, 1])
    theta, step = parameters_of(case), 1e-5
    v = torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def losses(point):
        return nn.functional.cross_entropy(
            logits_at(case, point), labels, reduction="none", label_smoothing=smoothing
        )

    expected = (losses(theta + step * v) - losses(theta - step * v)) / (2 * step)
    found = small_classifiers.loss_gradients(case, labels, smoothing) @ v
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_hessian_and_rest_are_those_of_torch_func(case):
    theta = parameters_of(case)
    identity = torch.eye(len(theta), dtype=torch.float64)
    hessian = torch.func.hessian(
        lambda point: nn.functional.cross_entropy(logits_at(case, point), case.labels)
    )(theta)
    torch.testing.assert_close(small_classifiers.loss_hessian(case, identity), hessian)
    second = torch.func.jacfwd(torch.func.jacrev(lambda point: logits_at(case, point)))(theta)
    residue = logits_at(case, theta).softmax(1) - nn.functional.one_hot(case.labels, 3)
    rest = torch.einsum("nk,nkpq->pq", residue, second) / len(case.x)
    torch.testing.assert_close(small_classifiers.logit_hessians(case, identity), rest)


def test_logit_curvature_is_diagonal_minus_product():
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = z.softmax(1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    found = small_classifiers.logit_curvature(z, torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(found, expected)


def test_stages_go_on_from_each_other_and_leave_earlier_ones_alone():
    first, second = small_classifiers.training_stages("mlp", "mnist", [0, 30])
    at_start = small_classifiers.small_classifier("mlp", "mnist", epochs=0)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, at_start.parameters))
    assert second.curvature().loss < first.curvature().loss
    assert not first.model.training and not second.model.training


def test_layer_directions_stay_in_their_tensor():
    case = small_classifiers.small_classifier("vgg11", "mnist", epochs=0)
    found = small_classifiers.layer_directions(case, 5)
    torch.testing.assert_close(found.norm(dim=0), torch.ones(found.shape[1]).double())
    ends = torch.tensor([p.numel() for p in case.parameters]).cumsum(0)
    owners = [torch.bucketize(torch.nonzero(v)[:, 0], ends, right=True) for v in found.T]
    assert 1 < found.shape[1] <= 5
    assert all(len(owner.unique()) == 1 for owner in owners)
    assert len({int(owner[0]) for owner in owners}) == found.shape[1]


def test_smoothed_has_no_relu_and_the_same_weights():
    case = small_classifiers.small_classifier("mlp", "mnist", epochs=0)
    smooth = small_classifiers.smoothed(case)
    kinds = [type(layer) for layer in smooth.model.modules()]
    assert nn.ReLU not in kinds and kinds.count(nn.Tanh) == 2
    assert all(torch.equal(a, b) for a, b in zip(case.parameters, smooth.parameters))
    assert not torch.equal(case.model(case.x), smooth.model(smooth.x))


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="epochs has 1 after 2, but rising"):
        list(small_classifiers.training_stages("mlp", "mnist", [2, 1]))
    with pytest.raises(ValueError, match="a number of counts is 0"):
        small_classifiers.unequal_images("mnist", (3, 0))
