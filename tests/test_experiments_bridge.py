import math

import pytest
import torch

from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import bridge
from lowgrad_utils.networks import TwoLayerNetwork
from lowgrad_utils.spiked_data import sample_spiked_data, sample_targets
from lowgrad_utils.tangent_kernel import scalar_jacobian, softmax_jacobian

FLOAT = torch.float64


def random_like(A):
    return 0.3 * torch.randn(A.shape, dtype=FLOAT, generator=torch.Generator().manual_seed(0))


def averaged_kernel(data, activation, draws, m):
    """The kernel averaged over many random networks."""
    total = 0
    for seed in range(draws):
        network = TwoLayerNetwork.random(data.d, m, activation=activation, seed=seed)
        total = total + scalar_jacobian(data.X, network).kernel
    return total / draws


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_prediction_against_the_kernel_of_a_very_wide_network(activation):
    data = sample_spiked_data(225, 300, nu=0.3, seed=3)
    network = TwoLayerNetwork.random(300, 375, activation=activation, seed=3)
    values, vectors = torch.linalg.eigh(averaged_kernel(data, activation, 10, 3000))
    found = bridge.predict(data, network)
    assert found.first == pytest.approx(float(values[-1]), rel=0.04)
    assert found.mean == pytest.approx(float(values[:-2].mean()), rel=0.04)
    # An edge fluctuates by n^(-2/3) = 0.03, and rows differ in scale, which the formula averages.
    assert found.edge == pytest.approx(float(values[-3]), rel=0.1)
    assert found.v1_z == pytest.approx(bridge.squared_cosine(vectors[:, -1], data.z), abs=0.02)


def test_prediction_of_the_second_spike_at_a_larger_size():
    data = sample_spiked_data(600, 800, nu=0.375, seed=1)
    network = TwoLayerNetwork.random(800, 1000, activation="relu", seed=1)
    modes, found = scalar_jacobian(data.X, network).modes, bridge.predict(data, network)
    assert found.second == pytest.approx(float(modes.values[1]), rel=0.15)
    squares = bridge.squared_cosine(modes.weights[:, 1], data.z.square())
    assert found.v2_z2 == pytest.approx(squares, abs=0.05)
    even = TwoLayerNetwork.random(800, 1000, activation="tanh", seed=1)
    assert bridge.predict(data, even).second == bridge.predict(data, even).edge


def test_predicted_shares_lie_between_none_and_all():
    data = sample_spiked_data(150, 200, nu=0.375, seed=0)
    network = TwoLayerNetwork.random(200, 250, seed=0)
    found, jacobian = bridge.predict(data, network), scalar_jacobian(data.X, network)
    assert found.share(data.z) > 0.98
    for name in bridge.RESIDUES:
        r = bridge.residue_of(name, data, network, jacobian, 0)
        assert 0 <= found.share(r) <= 1
    orthogonal = bridge.residue_of("orthogonal", data, network, jacobian, 0)
    assert float(jacobian.modes.shares(orthogonal)[1]) < 1e-20


def test_cell_measures_what_explicit_matrices_say():
    cell = bridge.bridge_cell(24, 0.375, 0.0, "softplus", "uniform", 2)
    case = bridge.scenario(24, nu=0.375, activation="softplus", residue="offset", seed=2)
    n = case.data.n
    slopes = case.network.a * case.network.sigma.derivative(case.data.X @ case.network.W.T)
    J = torch.einsum("id,im->idm", case.data.X, case.network.gamma * slopes).flatten(1)
    values, vectors = torch.linalg.eigh(J.T @ J / n)
    U = vectors[:, -2:]
    assert cell["l1"] == pytest.approx(float(values[-1]))
    assert cell["share_offset"] == pytest.approx(
        float((U.T @ case.parts.G.flatten()).square().sum() / case.parts.G.square().sum())
    )
    for name, key in (("S1", "in_S1_offset"), ("S12", "in_S12"), ("S2", "in_S2")):
        term = getattr(case.parts, name).matrix().flatten()
        inside = float((U.T @ term).square().sum() / (term @ term))
        assert cell[key] == pytest.approx(inside)
    S1 = case.parts.S1.matrix().square().sum() / case.parts.G.square().sum()
    assert cell["S1_offset"] == pytest.approx(float(S1))
    with pytest.raises(ValueError, match="not isotropic"):
        bridge.predict(sample_spiked_data(15, 20, nu=0.2, alpha=0.5), case.network)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_spread_of_the_residue_spike_at_a_larger_size(alpha):
    cell = bridge.bridge_cell(400, 0.125, alpha, "softplus", "uniform", 0)
    assert cell["predicted_S1_all"] == pytest.approx(cell["S1_all"], abs=0.05)
    assert cell["predicted_S1_top"] == pytest.approx(cell["S1_top"], abs=0.1)
    assert math.isnan(cell["predicted_first"]) == (alpha > 0)


def test_steps_are_gradient_descent_and_a_linear_network_stays_frozen():
    data = sample_spiked_data(15, 20, nu=0.2, seed=0)
    network = TwoLayerNetwork.random(20, 25, activation="tanh", seed=0)
    y = sample_targets(data.X, seed=0).y
    steps = bridge.regression_steps(data.X, y, network, step=0.7, drop=1)
    W, eta = network.W.clone(), None
    for epoch in range(3):
        state = next(steps)
        W.requires_grad_()
        f = network.gamma * torch.tanh(data.X @ W.T) @ network.a
        torch.testing.assert_close(state.residue, (f - y).detach())
        gradient = torch.autograd.grad((0.5 * (f - y).square()).mean(), W)[0]
        eta = eta or 0.7 / float(state.jacobian.modes.values[0])
        W = (W - (eta if epoch < 1 else eta / 10) * gradient).detach()


def test_frozen_residue_repeats_the_update():
    data = sample_spiked_data(15, 20, nu=0.2, seed=0)
    network = TwoLayerNetwork.random(20, 25, seed=0)
    y = sample_targets(data.X, seed=0).y
    start = next(bridge.regression_steps(data.X, y, network, step=0.7))
    K, r = start.jacobian.kernel, start.residue
    largest = torch.linalg.eigvalsh(K)[-1]
    for epoch in range(5):
        torch.testing.assert_close(bridge.frozen_residue(start, 0.7, epoch, 3), r)
        r = r - (0.7 if epoch < 3 else 0.07) / largest * (K @ r)


def test_classifier_steps_are_gradient_descent():
    X, groups = bridge.gaussian_mixture(12, 8, 3, 2.0)
    W, A = bridge.random_classifier(8, 6, 3, scaling="ntk")
    steps = bridge.classifier_steps(X, groups, W, A, activation="tanh", eta=0.5)
    for _ in range(3):
        state = next(steps)
        V = W.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(torch.tanh(X @ V.T) @ A.T, groups)
        gradient = torch.autograd.grad(loss, V)[0]
        found = state.jacobian.combination(state.residue / 12).T
        torch.testing.assert_close(found, gradient)
        W = W - 0.5 * gradient  # |A|_F^2 = C under NTK scaling


def test_at_equal_probabilities_the_gradient_is_in_the_span_of_the_class_centres():
    X, groups = bridge.gaussian_mixture(24, 20, 3, 2.0, seed=1)
    W, A = bridge.random_classifier(20, 15, 3, seed=1)
    W, A = torch.cat([W, W]), torch.cat([A, -A], 1)  # z = 0, but not its derivative
    for kind in ("groups", "shuffled", "teacher"):
        labels = bridge.chosen_labels(X, groups, kind, seed=1)
        step = next(bridge.classifier_steps(X, labels, W, A, activation="relu"))
        found = bridge.look(step, labels, groups)
        assert found["gradient_in_centres"] == pytest.approx(1, abs=1e-12)
        assert max(bridge.centre_identity(X, labels, W, A)) < 1e-12
        assert bridge.sum_of_centres(step, labels) == pytest.approx(1, abs=1e-12)
    assert min(bridge.centre_identity(X, labels, W, A + random_like(A))) > 1e-3


def test_centres_and_spikes_by_loops():
    X, groups = bridge.gaussian_mixture(12, 8, 3, 2.0)
    labels = bridge.chosen_labels(X, groups, "shuffled")
    W, A = bridge.random_classifier(8, 6, 3)
    jacobian, _ = softmax_jacobian(X, W, A, activation="tanh")
    delta = torch.einsum("id,im->idm", jacobian.X, jacobian.B).view(12, 3, 8, 6)
    weights = bridge.centre_weights(labels, 3)
    left, right = bridge.spike_terms(jacobian, groups)
    for c in range(3):
        others = [k for k in range(3) if k != c]
        centre = delta[labels == c][:, others].mean((0, 1))
        torch.testing.assert_close(jacobian.combination(weights[c]), centre)
        for k in range(3):
            torch.testing.assert_close(left[3 * c + k], X[groups == c].mean(0))
            b = jacobian.B.view(12, 3, 6)[groups == c, k].mean(0)
            torch.testing.assert_close(right[3 * c + k], b)


def test_labels_know_the_groups_or_not():
    X, groups = bridge.gaussian_mixture(400, 500, 4, 5.0)
    assert torch.equal(bridge.chosen_labels(X, groups, "groups"), groups)
    shuffled = bridge.chosen_labels(X, groups, "shuffled")
    assert torch.equal(shuffled.bincount(), groups.bincount())
    for kind in ("shuffled", "teacher"):
        labels = bridge.chosen_labels(X, groups, kind)
        assert 0.15 < float((labels == groups).double().mean()) < 0.35
    torch.testing.assert_close(
        bridge.group_means(X, groups).norm(dim=1).mean().item(), 5.0, atol=1.5, rtol=0
    )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_mixture_prediction_at_a_larger_size(activation):
    cell = bridge.classes_cell(300, 8.0, activation, "groups", "mean-field", 0, 0)
    assert cell["predicted_share"] == pytest.approx(cell["share_K"], abs=0.05)
    assert cell["predicted_spikes"] == pytest.approx(cell["spikes_K"], abs=0.05)
    assert math.isfinite(cell["gap"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: bridge.gaussian_mixture(4, 8, 5, 1.0), "classes is 5, but at most 4"),
        (lambda: bridge.gaussian_mixture(4, 8, 2, 0.0), "zeta is 0"),
        (lambda: bridge.random_classifier(8, 6, 3, scaling="large"), "scaling is 'large'"),
        (lambda: bridge.chosen_labels(torch.ones(2, 2), torch.tensor([0, 1]), "x"), "kind is 'x'"),
        (lambda: bridge.residue_of("own", None, None, None, 0), "name is 'own'"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize("loss", ["mse", "log-cosh", "logistic", "softmax"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_identity_holds_to_rounding(loss, activation):
    errors = [bridge.identity_errors(loss, activation, seed=s) for s in range(5)]
    assert max(max(e.values()) for e in errors) < 1e-10


def test_identity_fails_with_wrong_weights_or_without_curvature():
    for seed in range(5):
        wrong = bridge.identity_errors("logistic", "tanh", divided=False, seed=seed)
        assert wrong["components"] > 0.05
        assert wrong["eigenvalues"] < 1e-10
        straight = bridge.identity_errors("huber", "tanh", seed=seed)
        assert straight["outside"] > 0.05


def test_identity_names_a_bad_loss():
    with pytest.raises(ValueError, match="loss is 'l1'"):
        bridge.identity_errors("l1", "tanh")


def test_last_layer_is_that_of_the_curvature_module():
    stream = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    model = torch.nn.Sequential(*layers).double().eval()
    x, labels = torch.randn(12, 5, dtype=FLOAT, generator=stream), torch.arange(12) // 4
    at = LossCurvature(model, (x, labels), parameters=["2.weight"])
    step = bridge.last_layer(model, x, labels)
    expected = torch.linalg.eigvalsh(at.gauss_newton.matrix()).flip(0)
    torch.testing.assert_close(step.jacobian.modes.values[:18], expected, atol=1e-12, rtol=1e-9)
    gradient = step.jacobian.combination(step.residue / 12).T.flatten()
    torch.testing.assert_close(gradient, at.gradient())
    with pytest.raises(ValueError, match="no linear layer"):
        bridge.last_layer(torch.nn.Tanh(), x, labels)


def test_random_signs_leave_the_share_of_the_examples_squares():
    X, groups = bridge.gaussian_mixture(12, 20, 3, 4.0, seed=1)
    W, A = bridge.random_classifier(20, 15, 3, scaling="ntk", seed=1)
    step = next(bridge.classifier_steps(X, groups, W, A, activation="tanh"))
    modes, own = step.jacobian.modes, torch.eye(12, dtype=FLOAT).repeat_interleave(3, 1)
    # One example alone keeps its share, whatever its sign.
    alone = own[0] * step.residue
    single = bridge.Step(0, step.jacobian, alone)
    assert bridge.share_with_signs(single, 2) == pytest.approx(float(modes.shares(alone)[1]))
    # Over many draws cross terms cancel and the examples' squares are left.
    squares = sum(modes.components(row * step.residue).square() for row in own)
    expected = float(squares[:6].sum() / squares.sum())
    found = bridge.share_with_signs(step, 6, draws=300)
    assert found == pytest.approx(expected, abs=0.03)
    assert abs(float(modes.shares(step.residue)[5]) - expected) > 0.1
    with pytest.raises(ValueError, match="draws is 0"):
        bridge.share_with_signs(step, 6, draws=0)
