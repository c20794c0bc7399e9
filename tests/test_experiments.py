import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils import datasets, experiments
from lowgrad_utils.experiments import scenario
from lowgrad_utils.gradients import closed_form_gradient, loss_gradient
from lowgrad_utils.networks import ACTIVATIONS, LOSSES, SCALINGS, TwoLayerNetwork
from lowgrad_utils.spiked_data import binary_labels, sample_spiked_data, sample_targets

FLOAT = torch.float64


def largest(A):
    return float(torch.linalg.svdvals(A)[0])


def cosine(u, v):
    return abs(float(u @ v)) / float(u.norm() * v.norm())


def test_sizes_are_in_the_proportions_of_the_paper():
    assert experiments.paper_sizes(1000) == (750, 1250)
    assert experiments.paper_sizes(40) == (30, 50)
    with pytest.raises(ValueError, match=r"^d is 0, but a whole number"):
        experiments.paper_sizes(0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_residues_have_the_wanted_alignment_and_length(beta, seed):
    data = sample_spiked_data(60, 80, nu=0.2, seed=seed)
    r = experiments.residue_with_alignment(data, beta, seed=seed)
    assert float(r @ data.z / (r.norm() * data.z.norm())) == pytest.approx(80 ** (-beta / 2))
    assert float(r.norm()) == pytest.approx(math.sqrt(60))


def test_the_rest_of_an_aligned_residue_depends_on_the_seed_only_and_not_on_the_data():
    data = sample_spiked_data(300, 400, nu=0.2, seed=3)
    one, other = (experiments.residue_with_alignment(data, 0.5, seed=s) for s in (3, 4))
    rest = [r - (r @ data.z) / (data.z @ data.z) * data.z for r in (one, other)]
    # Cosines of independent directions are about N(0, 1/300); a shared stream would give 1.
    assert cosine(*rest) < 4.5 / math.sqrt(300)
    assert max(cosine(rest[0], column) for column in data.X.T) < 6 / math.sqrt(300)
    again = experiments.residue_with_alignment(data, 0.5, seed=3)
    assert torch.equal(one, again)


@pytest.mark.parametrize("beta", [-0.1, math.nan, "high"])
def test_bad_alignments(beta):
    data = sample_spiked_data(6, 8, nu=0.2)
    with pytest.raises((TypeError, ValueError), match=r"^beta is .*a finite number of at least 0"):
        experiments.residue_with_alignment(data, beta)
    with pytest.raises((TypeError, ValueError), match=r"^beta is .*a finite number of at least 0"):
        scenario(8, nu=0.2, residue=f"beta={beta}")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scenario_is_the_gradient_of_its_network_on_its_targets(loss, scaling):
    case = scenario(40, nu=0.3, alpha=0.5, activation="silu", loss=loss, scaling=scaling, seed=5)
    data = sample_spiked_data(30, 40, nu=0.3, alpha=0.5, seed=5)
    assert torch.equal(case.data.X, data.X)
    network = TwoLayerNetwork.random(40, 50, activation="silu", scaling=scaling, seed=5)
    assert torch.equal(case.network.W, network.W)
    y = sample_targets(data.X, seed=5).y
    y = binary_labels(y) if loss == "logistic" else y
    torch.testing.assert_close(case.parts.G, loss_gradient(data.X, y, network, loss))
    total = sum(p.matrix() for p in (case.parts.S1, case.parts.S12, case.parts.S2)) + case.parts.E
    torch.testing.assert_close(total, case.parts.G)


def test_weights_of_a_scenario():
    uniform, shifted, spike = (
        scenario(40, nu=0.3, weights=weights, seed=2) for weights in ("uniform", "shifted", "spike")
    )
    q = uniform.data.q
    rows = uniform.network.W + 30**-0.25 * q
    torch.testing.assert_close(shifted.network.W, rows / rows.norm(dim=1, keepdim=True))
    torch.testing.assert_close(spike.network.W, q.expand(50, 40))
    for case in (shifted, spike):
        assert torch.equal(case.network.a, uniform.network.a)
        assert torch.equal(case.data.X, uniform.data.X)


def test_residues_of_a_scenario():
    one, offset, single = (
        scenario(400, nu=0.3, residue=residue, seed=2).residue
        for residue in ("independent", "offset", "one-example")
    )
    assert abs(float(one.mean())) < 4.5 / math.sqrt(300)
    assert float(one.std()) == pytest.approx(1, abs=4.5 / math.sqrt(600))
    torch.testing.assert_close(offset, 1 + one / 2)
    assert single.tolist() == [1.0] + [0.0] * 299
    data = sample_spiked_data(300, 400, nu=0.3, seed=2)
    assert max(cosine(one, column) for column in data.X.T) < 6 / math.sqrt(300)
    assert cosine(one, data.z) < 4.5 / math.sqrt(300)
    # The first numbers of the data's stream fill their first row.
    assert cosine(one, data.X_B.flatten()[:300]) < 4.5 / math.sqrt(300)


def test_the_residue_by_alignment_of_a_scenario():
    case = scenario(40, nu=0.3, residue="beta=0.6", seed=2)
    expected = experiments.residue_with_alignment(case.data, 0.6, seed=2)
    torch.testing.assert_close(case.residue, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": 0}, "^d is 0"),
        ({"nu": -0.1}, r"^nu is -0\.1"),
        ({"alpha": -0.1}, r"^alpha is -0\.1"),
        ({"activation": "swish"}, "^activation is 'swish', but one of"),
        ({"loss": "hinge"}, "^loss is 'hinge', but one of"),
        ({"scaling": "mup"}, "^scaling is 'mup', but one of"),
        ({"weights": "trained"}, "^weights is 'trained', but one of uniform, shifted, spike"),
        ({"residue": "none"}, "^residue is 'none', but one of network, independent, offset,"),
        ({"seed": -1}, "^seed is -1"),
    ],
)
def test_bad_scenarios(changes, message):
    with pytest.raises(ValueError, match=message):
        scenario(**{"d": 8, "nu": 0.2} | changes)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("d", [40, 140])
def test_measurements_are_those_of_the_full_matrices(activation, d):
    case = scenario(d, nu=0.35, alpha=0.4, activation=activation, seed=6)
    parts, r, n = case.parts, case.residue, case.data.n
    S1, S12, S2 = (p.matrix() for p in (parts.S1, parts.S12, parts.S2))
    E = parts.G - S1 - S12 - S2
    U, s, _ = torch.linalg.svd(parts.G)
    X_B = case.data.X - case.data.zeta * torch.outer(case.data.z, case.data.q)
    low = torch.linalg.svdvals(S1 + S12 + S2)
    expected = {
        "S1": largest(S1),
        "S12": largest(S12),
        "S2": largest(S2),
        "E": largest(E),
        "E_2": torch.linalg.svdvals(E)[1],
        "rank_one": largest(S1 + S12),
        "rest": largest(S2 + E),
        "low_1": low[0],
        "low_2": low[1],
        "s1": s[0],
        "s2": s[1],
        "s3": s[2],
        "u1_q": cosine(U[:, 0], case.data.q),
        "u1_residue": cosine(U[:, 0], X_B.T @ r),
        "z_alignment": abs(float(case.data.z @ r)) / (math.sqrt(n) * float(r.norm())),
        "W_norm": largest(case.network.W),
        "r_norm": math.sqrt(float((r**2).sum())),
    }
    measured = experiments.measure(case)
    assert all(type(value) is float for value in measured.values())
    assert measured == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-8)


@given(st.integers(3, 12), st.floats(0, 1), st.integers(0, 99))
def test_two_singular_values_of_the_low_rank_part(d, nu, seed):
    parts = scenario(2 * d, nu=nu, activation="gelu", seed=seed).parts
    whole = parts.S1.matrix() + parts.S12.matrix() + parts.S2.matrix()
    low = experiments.low_rank_singular_values(parts)
    torch.testing.assert_close(low, torch.linalg.svdvals(whole)[:2], rtol=1e-8, atol=1e-13)


def test_a_cell_is_its_scenario_measured():
    cell = experiments.gradient_cell(
        d=40,
        nu=0.3,
        alpha=0.2,
        activation="elu",
        loss="huber",
        residue="offset",
        weights="shifted",
        seed=4,
    )
    case = scenario(
        40,
        nu=0.3,
        alpha=0.2,
        activation="elu",
        loss="huber",
        residue="offset",
        weights="shifted",
        seed=4,
    )
    assert cell == experiments.measure(case)


IMAGES = datasets.load("mnist")


def images_case(**changes):
    return experiments.noisy_image_scenario(IMAGES, **{"n": 40, "m": 30, "seed": 3} | changes)


def test_an_image_scenario_without_noise():
    case = images_case()
    X, classes = IMAGES.matrix(n=40, units="0-1", seed=3)
    torch.testing.assert_close(case.data.X, X)
    Vh = torch.linalg.svd(X).Vh
    assert cosine(case.data.q, Vh[0]) == pytest.approx(1)
    torch.testing.assert_close(case.data.X_B @ case.data.q, torch.zeros(40, dtype=FLOAT))
    torch.testing.assert_close(case.residue, case.network(X) - classes)
    G = closed_form_gradient(X, case.network, case.residue)
    torch.testing.assert_close(case.parts.G, G)
    assert (case.network.scaling, case.network.activation) == ("ntk", "relu")
    assert images_case(activation="tanh").network.activation == "tanh"
    torch.testing.assert_close(images_case(units="0-255").data.X, 255 * X)


def test_noise_on_images_has_the_wanted_variance_and_leaves_q():
    clean, noisy = images_case(), images_case(noise=100.0)
    torch.testing.assert_close(noisy.data.q, clean.data.q)
    noise = noisy.data.X - clean.data.X
    size = noise.numel()
    assert float(noise.square().mean()) == pytest.approx(100, rel=4.5 * math.sqrt(2 / size))
    assert abs(float(noise.mean())) < 45 / math.sqrt(size)
    # Not the stream of the weights.
    W = clean.network.W
    rows = noise / noise.norm(dim=1, keepdim=True)
    assert (rows @ W.T).abs().max() < 6 / math.sqrt(W.shape[1])


def test_centred_targets_have_mean_zero():
    plain, centred = images_case(), images_case(centred_targets=True)
    shift = centred.residue - plain.residue
    classes = IMAGES.matrix(n=40, seed=3)[1].double()
    torch.testing.assert_close(shift, classes.mean().expand(40))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": "percent"}, "units"),
        ({"noise": -1.0}, "^noise is -1"),
        ({"m": 0}, "^m is 0"),
        ({"activation": "swish"}, "^activation is 'swish'"),
    ],
)
def test_bad_image_scenarios(changes, message):
    with pytest.raises(ValueError, match=message):
        images_case(**changes)


def test_the_overlap_with_the_spike_follows_its_law():
    measured, predicted = np.transpose(
        [experiments.spike_overlap(300, 0.2, seed=seed) for seed in range(4)]
    )
    assert measured.mean() == pytest.approx(predicted.mean(), abs=0.02)
    # theta = zeta |z| / sqrt(d) by hand, and the top left singular vector.
    data = sample_spiked_data(225, 300, nu=0.2, seed=0)
    t = 225**0.4 * float(data.z @ data.z) / 300
    assert predicted[0] == pytest.approx(math.sqrt(1 - 0.75 * (1 + t) / (t * (t + 0.75))))
    assert measured[0] == pytest.approx(cosine(torch.linalg.svd(data.X).U[:, 0], data.z))


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_output_variance_is_the_variance_over_signs(activation, scaling):
    options = {"nu": 0.2, "alpha": 0.3, "seed": 3}
    variance = experiments.output_variance(16, activation=activation, scaling=scaling, **options)
    X = sample_spiked_data(12, 16, **options).X
    W = TwoLayerNetwork.random(16, 20, seed=3).W
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for _ in range(4000):
        a = 2.0 * torch.randint(0, 2, (20,), generator=generator).double() - 1
        outputs.append(TwoLayerNetwork(W, a, activation, scaling)(X))
    assert variance == pytest.approx(float(torch.stack(outputs).var(dim=0).mean()), rel=0.1)


@given(st.integers(2, 50), st.floats(0.1, 9))
def test_concentration_of_flat_and_of_peaked_residues(n, scale):
    flat = scale * torch.ones(n, dtype=FLOAT)
    assert experiments.residue_concentration(flat) == pytest.approx(1 / math.log(n))
    peaked = -scale * torch.eye(n, dtype=FLOAT)[0]
    expected = math.sqrt(n) / math.log(n)
    assert experiments.residue_concentration(peaked) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("residue", "message"),
    [
        (torch.ones(1), "^residue is zero or has one entry"),
        (torch.zeros(3), "^residue is zero"),
        (torch.tensor([1.0, math.nan]), "^residue has 1 NaN"),
        (torch.ones(2, 2), "^residue has shape"),
    ],
)
def test_residues_without_a_concentration(residue, message):
    with pytest.raises(ValueError, match=message):
        experiments.residue_concentration(residue)


def test_residues_at_initialisation():
    r = experiments.initial_residue(40, loss="mse", activation="gelu", seed=2)
    X = sample_spiked_data(30, 40, nu=0.0, seed=2).X
    network = TwoLayerNetwork.random(40, 50, activation="gelu", seed=2)
    y = sample_targets(X, seed=2).y
    torch.testing.assert_close(r, network(X) - y)
    logistic = experiments.initial_residue(40, loss="logistic", activation="gelu", seed=2)
    torch.testing.assert_close(logistic.sign(), -binary_labels(y))


def test_cauchy_noise_has_heavy_tails():
    clean, heavy = (
        experiments.initial_residue(800, loss="mse", noise=noise, seed=1)
        for noise in ("gaussian", "cauchy")
    )
    noise = (heavy - clean).abs() / 0.1
    # The median of |Cauchy| is 1, its quartiles tan(pi/8) and tan(3 pi/8).
    quartiles = torch.quantile(noise, torch.tensor([0.25, 0.5, 0.75], dtype=FLOAT))
    np.testing.assert_allclose(quartiles, np.tan(np.pi / 8 * np.arange(1, 4)), rtol=0.25)
    assert experiments.initial_residue(800, loss="huber", noise="cauchy").abs().max() <= 1


def test_bad_initial_residues():
    with pytest.raises(ValueError, match=r"^noise is 'levy', but one of gaussian, cauchy"):
        experiments.initial_residue(8, loss="mse", noise="levy")
    with pytest.raises(ValueError, match=r"^loss is 'hinge', but one of"):
        experiments.initial_residue(8, loss="hinge")
    with pytest.raises(ValueError, match=r"^activation is 'swish', but one of"):
        experiments.initial_residue(8, loss="mse", activation="swish")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_goes_through_an_experiment(activation):
    measured = experiments.measure(scenario(24, nu=0.25, activation=activation))
    assert all(math.isfinite(value) and value >= 0 for value in measured.values())
