import warnings

import pytest
import torch
from curvature_examples import COUNTS, FLOAT, KINDS, example, generator, naive_derivatives
from torch import nn

from lowgrad_utils import AssumptionWarning
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import top_eigenpairs
from lowgrad_utils.three_levels import (
    TERMS,
    ThreeLevels,
    evenness,
    explicit_terms,
    three_levels,
    within_groups,
)

SMALL = [kind for kind in KINDS if kind not in ("densenet40", "resnet18", "vgg11")]


def close(actual, expected, tolerance=1e-10):
    error = float((actual - expected).norm() / expected.norm())
    assert error < tolerance, f"relative error {error:.1e}"


def levels_of(kind, **options):
    model, inputs, labels = example(kind, **options)
    at = LossCurvature(model, (inputs, labels))
    return at, three_levels(at), naive_derivatives(model, at._inputs)


def naive_terms(derivatives, labels, classes):
    """Return G0, G1, G2, G3 by loops over classes and logits, covariances as E vv^T - m m^T."""
    size = derivatives.shape[2]
    terms = {name: torch.zeros(size, size, dtype=FLOAT) for name in ("G0", "G1", "G2", "G3")}
    for c in range(classes):
        own = derivatives[labels == c]
        share = len(own) / len(labels)
        means = [own[:, k].mean(0) for k in range(classes)]
        others = [means[k] for k in range(classes) if k != c]
        centre = sum(others) / (classes - 1)
        second = sum(torch.outer(m, m) for m in others) / (classes - 1)
        terms["G0"] += share * torch.outer(means[c], means[c])
        terms["G1"] += share * (classes - 1) * torch.outer(centre, centre)
        terms["G2"] += share * (classes - 1) * (second - torch.outer(centre, centre))
        for k in range(classes):
            moment = own[:, k].T @ own[:, k] / len(own)
            terms["G3"] += share * (moment - torch.outer(means[k], means[k]))
    return terms


def combined(terms, name):
    return sum(terms[part] for part in TERMS[name])


def means_of(classes=4, size=30, seed=0):
    return torch.randn(classes, classes, size, generator=generator(seed), dtype=FLOAT)


@pytest.mark.parametrize("kind", SMALL)
def test_terms_are_their_definitions_for_classes_of_any_size(kind):
    at, levels, derivatives = levels_of(kind)
    naive = naive_terms(derivatives, at.labels, 3)
    explicit = explicit_terms(derivatives, at.labels)
    for name, term in naive.items():
        close(explicit[name], term)
    close(explicit["G"], sum(naive.values()))
    for name in TERMS:
        matrix = combined(naive, name)
        close(levels.operator(name).matrix(), matrix)
        values = torch.linalg.eigvalsh(matrix).flip(0)
        # The nine that may differ from zero, the smallest of them by rounding.
        assert float((levels.eigenvalues(name) - values[:9]).abs().max()) < 1e-10 * values[0]
        assert float(values[9:].abs().max()) < 1e-10 * values[0]
    v = torch.randn(at.size, generator=generator(), dtype=FLOAT)
    close(within_groups(at, levels) @ v, naive["G3"] @ v)


@pytest.mark.parametrize("kind", ["vgg11", "resnet18", "densenet40"])
def test_products_of_terms_of_convolutional_networks(kind):
    at, levels, derivatives = levels_of(kind)
    v = torch.randn(at.size, generator=generator(), dtype=FLOAT)
    flat = derivatives.flatten(0, 1)
    second_moment = (flat @ v) @ flat / at.n
    between = levels.operator("G1+2") @ v
    within = sum(
        (spread @ v) @ spread / at.n
        for c in range(3)
        for spread in (derivatives[at.labels == c] - levels.means[c]).unbind(1)
    )
    close(between + within, second_moment)
    close(within_groups(at, levels) @ v, within)
    close(sum(levels.operator(name) @ v for name in ("G0", "G1", "G2")), between)


@pytest.mark.parametrize("term", TERMS)
def test_eigenvectors_are_those_of_the_matrix(term):
    levels = ThreeLevels.of(means_of(), torch.tensor([10, 20, 30, 40]))
    operator, rank = levels.operator(term), {"G0": 4, "G1": 4, "G2": 8, "G0+G1": 8}.get(term, 16)
    vectors = levels.eigenvectors(term, rank)
    close(vectors.T @ vectors, torch.eye(rank, dtype=FLOAT))
    close(operator @ vectors, vectors * levels.eigenvalues(term)[:rank])
    with pytest.raises(ValueError, match=f"{term.replace('+', '.')} has {rank} eigenvalues above"):
        levels.eigenvectors(term, rank + 1)


def test_ranks_and_orderings():
    at, levels, derivatives = levels_of("mlp")
    whole = torch.linalg.eigvalsh(explicit_terms(derivatives, at.labels)["G"]).flip(0)[:9]
    g12, g1 = levels.eigenvalues("G1+2"), levels.eigenvalues("G1")
    assert bool((whole >= g12 - 1e-12).all() and (g12 >= g1 - 1e-12).all())
    ranks = {term: int((levels.eigenvalues(term) > 1e-12 * whole[0]).sum()) for term in TERMS}
    # sum_k sqrt(p_k) delta_k = 0 may lower them, never raise them.
    bounds = {"G0": 3, "G1": 3, "G2": 3, "G0+G1": 6, "G1+2": 9}
    assert all(ranks[term] <= bounds[term] for term in TERMS) and ranks["G1"] >= 2


def test_centres_and_lengths_are_those_of_the_means():
    at, levels, _ = levels_of("mlp")
    close(levels.centres, at.class_centres())
    close(levels.centre_gram, levels.centres @ levels.centres.T)
    close(levels.lengths, levels.means.norm(dim=2))
    close(levels.weights, torch.tensor(COUNTS, dtype=FLOAT) / 15)
    rows = torch.stack([levels.means[c, k] for c in range(3) for k in range(3) if k != c])
    close(levels.cosines, nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2))


def test_a_mean_of_length_zero_has_cosine_zero():
    means = means_of()
    means[1, 2] = 0
    cosines = ThreeLevels.of(means, torch.ones(4, dtype=torch.int64)).cosines
    row = 3 + 1  # class 1: logits 0, 2, 3
    assert torch.equal(cosines[row], torch.zeros(12, dtype=FLOAT))
    assert bool(cosines.isfinite().all())


def naive_organisation(means):
    """Return R^2 by class and by logit from sums of squares of unit vectors."""
    c = len(means)
    pairs = [(a, b) for a in range(c) for b in range(c) if a != b]
    units = torch.stack([means[a, b] / means[a, b].norm() for a, b in pairs])
    total = (units - units.mean(0)).square().sum()
    shares = []
    for position in (0, 1):
        explained = 0
        for label in range(c):
            own = torch.tensor([pair[position] == label for pair in pairs])
            explained += own.sum() * (units[own].mean(0) - units.mean(0)).square().sum()
        shares.append(float(explained / total))
    return shares


@pytest.mark.parametrize("seed", range(3))
def test_organisation_is_an_analysis_of_variance(seed):
    means = means_of(seed=seed)
    means += 2 * torch.randn(4, 1, 30, generator=generator(seed + 5), dtype=FLOAT)
    levels = ThreeLevels.of(means, torch.tensor([10, 20, 30, 40]))
    assert levels.organisation() == pytest.approx(naive_organisation(means), rel=1e-10)


def test_organisation_of_one_direction_is_undefined():
    shares = ThreeLevels.of(torch.ones(3, 3, 4), torch.tensor([1, 2, 3])).organisation()
    assert shares == pytest.approx((float("nan"),) * 2, nan_ok=True)


@pytest.mark.parametrize("kind", ["mlp", "tanh", "gru"])
def test_evenness_is_a_ratio_of_moments(kind):
    at, levels, derivatives = levels_of(kind)
    result = evenness(at, levels.means)
    for c in range(3):
        for k in range(3):
            own = derivatives[at.labels == c, k]
            along = torch.stack([d @ own.mean(0) for d in own])
            expected = along.mean() ** 2 / along.square().mean()
            assert float(result[c, k]) == pytest.approx(float(expected), rel=1e-10)
    assert bool((result <= 1 + 1e-12).all())
    with pytest.raises(ValueError, match="means have shape"):
        evenness(at, levels.means[:, :, :-1])


def test_the_toy_of_orthogonal_class_features():
    # delta_cc' = sqrt(a) (e_c' - p_c) (x) h_c: eig G1 = a p^2, eig(G0 + G1) = a p, eig G2 = a / C.
    classes, p = 5, 0.7
    a = (1 - p) / (classes - 1)
    means = torch.zeros(classes, classes, classes, classes, dtype=FLOAT)
    for c in range(classes):
        probabilities = torch.full((classes,), a, dtype=FLOAT)
        probabilities[c] = p
        # For the own logit sqrt(p), and sqrt(a) for the others.
        scale = probabilities.sqrt()[:, None]
        means[c, :, :, c] = scale * (torch.eye(classes, dtype=FLOAT) - probabilities)
    levels = ThreeLevels.of(means.flatten(2), torch.full((classes,), 7))
    expected = {"G1": (a * p**2, 5), "G0+G1": (a * p, 5), "G2": (a / classes, 15)}
    for term, (value, count) in expected.items():
        values = levels.eigenvalues(term)
        close(values[:count], torch.full((count,), value, dtype=FLOAT))
        assert float(values[count:].abs().max()) < 1e-12
    # Five equal eigenvalues: one starting vector may miss some, a search for copies may not.
    top = top_eigenpairs(levels.operator("G1"), 5, copies=True)
    close(top.values, torch.full((5,), a * p**2, dtype=FLOAT), 1e-6)


def test_single_precision():
    _, exact, _ = levels_of("mlp")
    _, rough, _ = levels_of("mlp", dtype=torch.float32)
    assert rough.gram.dtype == FLOAT
    close(rough.eigenvalues("G1")[:3], exact.eigenvalues("G1")[:3], 1e-5)
    assert rough.eigenvectors("G1", 2).dtype == torch.float32


def test_a_class_of_one_example_is_legal_and_said():
    model, inputs, labels = example("tanh", counts=(3, 1, 5))
    at = LossCurvature(model, (inputs, labels))
    with pytest.warns(AssumptionWarning, match="class 1 has one example.*within groups are zero"):
        levels = three_levels(at)
    naive = naive_terms(naive_derivatives(model, at._inputs), at.labels, 3)
    close(levels.operator("G1+2").matrix(), naive["G0"] + naive["G1"] + naive["G2"])
    close(within_groups(at, levels).matrix(), naive["G3"])
    assert evenness(at, levels.means)[1] == pytest.approx(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at.group_means()
        levels_of("tanh")


def test_a_class_without_example_is_named():
    model, inputs, labels = example("tanh", counts=(3, 0, 5))
    at = LossCurvature(model, (inputs, labels))
    with pytest.raises(ValueError, match="class 1 of 3 has no example"):
        three_levels(at)
    with pytest.raises(ValueError, match="class 1 has no example"):
        explicit_terms(at.logit_derivatives(), at.labels)


def test_bad_input():
    levels = ThreeLevels.of(means_of(), torch.tensor([1, 2, 3, 4]))
    for call in (levels.eigenvalues, levels.operator, lambda term: levels.eigenvectors(term, 1)):
        with pytest.raises(ValueError, match="term is 'G3', but one of G0, G1, G2"):
            call("G3")
    with pytest.raises(ValueError, match="k is 0"):
        levels.eigenvectors("G1", 0)
    with pytest.raises(ValueError, match="C x C x P"):
        ThreeLevels.of(means_of(), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="at least 1 of each class"):
        ThreeLevels.of(means_of(), torch.tensor([1, 2, 3, 0]))
    bare = ThreeLevels(levels.gram, levels.counts)
    close(bare.eigenvalues("G2"), levels.eigenvalues("G2"))
    for call in (
        lambda: bare.centres,
        lambda: bare.operator("G1"),
        lambda: bare.eigenvectors("G1", 1),
    ):
        with pytest.raises(ValueError, match="only the inner products"):
            call()


# --- a newcomer's classifier ---------------------------------------------------------------------


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x))


def test_five_lines_for_a_classifier_of_ones_own():
    stream = generator()
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 5, generator=stream), torch.arange(64) % 4
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mine()

    # The five lines (after the imports of this file).
    at = LossCurvature(model.eval(), loader)
    levels = three_levels(at)
    outliers = top_eigenpairs(at.gauss_newton, 4, start=levels.centres)
    explained = levels.eigenvalues("G1")[:4]
    print(outliers.values, explained)

    values = torch.linalg.eigvalsh(at.gauss_newton.matrix().double()).flip(0)[:4]
    close(outliers.values.double(), values, 1e-4)
    assert bool((explained <= values + 1e-6).all()) and float(explained[0]) > 0.01 * values[0]
