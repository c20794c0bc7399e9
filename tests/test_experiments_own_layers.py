import copy
import math

import pytest
import torch
from torch.nn import functional as F

from lowgrad_utils import experiments
from lowgrad_utils.diagnosis import diagnose, layer_names
from lowgrad_utils.experiments import own_layers
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spectra import operator_norm
from lowgrad_utils.spiked_data import sample_spiked_data


@pytest.mark.parametrize("activation", ["relu", "silu", "erf"])
def test_modules_are_the_network(activation):
    data = sample_spiked_data(30, 40, nu=0.25)
    network = TwoLayerNetwork.random(40, 50, activation=activation, scaling="mean-field")
    model = own_layers.as_modules(network)
    torch.testing.assert_close(model(data.X), network(data.X))
    r = torch.linspace(-1, 2, 30, dtype=torch.float64)
    own_layers.with_residue(model(data.X), r).backward()
    wanted = closed_form_gradient(data.X, network, r)
    torch.testing.assert_close(model[0].weight.grad.T, wanted)


def test_sine_is_predicted():
    ratios = []
    for seed in range(4):
        cell = own_layers.estimate_cell(300, 0.125, "softplus", "independent", seed)
        ratios.append(cell["v_sine"] / cell["v_predicted"])
    assert abs(sum(ratios) / 4 - 1) < 0.1


def test_predicted_sine_of_a_toy():
    network = TwoLayerNetwork.random(3, 2, activation="tanh")
    slopes = torch.tensor([[1.0, 2.0], [3.0, 2.0]]).double()
    r = torch.tensor([1.0, 2.0]).double()
    # Variances 2 and 0, means 2 and 2, sum r^4 / |r|^4 = 17/25.
    wanted = math.sqrt(2 * 17 / 25 / 8)
    assert own_layers.predicted_signal_sine(network, slopes, r) == pytest.approx(wanted)


def test_a_cell_compares_with_the_truth():
    case = experiments.scenario(250, nu=0.375, activation="softplus", residue="offset", seed=2)
    model = own_layers.as_modules(case.network)
    found = diagnose(model, "0", (case.data.X, case.residue), own_layers.with_residue, seed=2)
    cell = own_layers.estimate_cell(250, 0.375, "softplus", "offset", 2)
    assert cell["S1"] == pytest.approx(found.S1.norm / case.parts.S1.norm)
    assert cell["outliers"] == found.outliers and cell["plane"] == found.plane
    assert cell["q"] == pytest.approx(float((found.q @ case.data.q).abs()))
    values = torch.linalg.svdvals(case.parts.E)
    assert cell["edge"] == pytest.approx(found.edge / float(values[0]))
    above = torch.linalg.svdvals(case.parts.G) > values[1] * (1 + 188 ** (-2 / 3))
    assert cell["outliers_true"] == int(above.sum())


@pytest.mark.parametrize("network", ["mnist-vgg11", "mnist-resnet18", own_layers.PATCHES])
def test_numbers_of_layers_are_those_of_the_networks(network):
    model, (x, y) = own_layers.network_at(network, "untrained", seed=1)
    assert len(layer_names(model)) == own_layers.LAYERS[network.split("-")[1]]
    assert y.bincount().tolist() == [100] * 10 and len(x) == 1000
    assert not model.training


def test_a_layer_cell_is_a_diagnosis():
    cell = own_layers.layer_cell(own_layers.PATCHES, "epoch 1", 13, 0)
    model, (x, y) = own_layers.network_at(own_layers.PATCHES, "epoch 1")
    found = diagnose(model, "head", (x, y), F.cross_entropy)
    assert cell["s1"] == pytest.approx(float(found.top.s[0]))
    assert cell["edge"] == pytest.approx(found.edge)
    centred = diagnose(model, "head", (x, y), F.cross_entropy, centre=True)
    assert cell["centred_u1_q"] == pytest.approx(float(centred.along_q[0]))
    assert cell["leads_q"] == (found.leader == "data")
    shares = own_layers.gauss_newton_cell(own_layers.PATCHES, 13, 0)
    assert 0 < shares["gauss_newton"] <= 1 and 0 < shares["gauss_newton_null"] < 1
    assert len(own_layers.gauss_newton_cells()) == 3 * (21 + 9) + 14
    assert all(isinstance(value, float) for value in cell.values())


def test_unknown_states_are_named():
    with pytest.raises(ValueError, match="state is 'epoch 2', but one of epoch 0, epoch 1"):
        own_layers.network_at(own_layers.PATCHES, "epoch 2")
    with pytest.raises(ValueError, match="state is 'epoch 1', but one of trained, untrained"):
        own_layers.network_at("mnist-vgg11", "epoch 1")


def test_cells_are_all_layers_once():
    cells = own_layers.layer_cells()
    assert len(cells) == len({tuple(cell.values()) for cell in cells}) == 6 * (21 + 9) + 4 * 14


@pytest.mark.parametrize("kind", ["vectors", "tokens", "patches"])
def test_blocks_are_exact_and_the_populations_are_not(kind):
    errors = own_layers.block_errors(kind, 0)
    assert set(errors) == {"G", "S1", "S12", "S2", "E", "shares"}
    assert max(errors.values()) < 1e-11
    assert own_layers.population_share_error(0, d=100) > 1e-3
    with pytest.raises(ValueError, match="kind is 'x', but one of vectors, tokens, patches"):
        own_layers.block_errors("x", 0)


def test_an_error_in_the_blocks_would_be_seen(monkeypatch):
    wrong = own_layers.diagnose

    def centred(*args, **kwargs):
        return wrong(*args, centre=True, **kwargs)

    monkeypatch.setattr(own_layers, "diagnose", centred)
    errors = own_layers.block_errors("vectors", 0)
    # Another q gives other blocks, which add up as well.
    assert errors["S2"] > 1e-3 and errors["G"] < 1e-12 and errors["shares"] < 1e-12


def test_batch_statistics_are_those_of_training():
    model, (x, y) = own_layers.network_at("mnist-vgg11", "trained")
    x, y = x[:40].double(), y[:40]
    model = model.double()
    other = own_layers.with_batch_statistics(model)
    training = copy.deepcopy(model).train()
    torch.testing.assert_close(other(x), training(x))
    assert not model.training and model.layers[1].running_mean is not None
    F.cross_entropy(training(x), y).backward()
    found = diagnose(other, "layers.4", (x, y), F.cross_entropy)
    wanted = training.layers[4].weight.grad.flatten(1).T
    torch.testing.assert_close(found.G, wanted, rtol=1e-9, atol=1e-12)
    # Batch norm takes the mean away, so that no bias gets a gradient.
    stored = diagnose(model, "layers.4", (x, y), F.cross_entropy)
    assert found.bias_gradient.norm() < 1e-10 < stored.bias_gradient.norm()


def test_a_cell_with_batch_statistics():
    cell = own_layers.batch_norm_cell("mnist-vgg11", 7, 0)
    model, (x, y) = own_layers.network_at("mnist-vgg11", "trained")
    other = own_layers.with_batch_statistics(model)
    found = diagnose(other, layer_names(model)[7], (x[::2], y[::2]), F.cross_entropy)
    assert cell["u1_mean"] == pytest.approx(found.along_means[0])
    assert len(own_layers.batch_norm_cells()) == 3 * (20 + 8)


@pytest.mark.parametrize("seed", range(3))
def test_the_estimated_rest_has_lost_the_third_spike_of_the_mean(seed):
    case = experiments.scenario(400, nu=0.375, activation="softplus", residue="offset", seed=seed)
    data, network, r, E = case.data, case.network, case.residue, case.parts.E
    model = own_layers.as_modules(network)
    found = diagnose(model, "0", (data.X, r), own_layers.with_residue)
    c = network.sigma.c(data.preactivation_scale(network.W))
    left = (network.gamma * data.zeta / data.n) * r.mean() * data.bulk_times(data.z)
    without = operator_norm(E - torch.outer(left, network.a * c * (network.W @ data.q)))
    assert found.pieces["E"] == pytest.approx(without, rel=0.1)
    assert operator_norm(E) > 1.4 * without
