"""The toy: its means against a linear classifier's own, its closed forms against matrices."""

import pytest
import torch

from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.experiments import toy_levels
from lowgrad_utils.three_levels import explicit_terms


def explicit(classes, p, cosine):
    means = toy_levels.group_means(
        toy_levels.even_probabilities(classes, p), toy_levels.even_gram(classes, cosine)
    )
    return explicit_terms(means, torch.arange(classes))


def test_means_are_those_of_a_linear_classifier():
    classes = 4
    features = torch.randn(classes, classes, generator=torch.Generator().manual_seed(0)).double()
    features = torch.linalg.qr(features)[0] * torch.tensor([1.0, 2.0, 0.5, 3.0])[:, None]
    model = torch.nn.Linear(classes, classes, bias=False).double().eval()
    at = LossCurvature(model, (features, torch.arange(classes)))
    toy = toy_levels.group_means(at.probabilities, features @ features.T)
    # The toy's features are the model's up to a rotation, which only inner products survive.
    grams = [m.flatten(0, 1) @ m.flatten(0, 1).T for m in (toy, at.group_means())]
    torch.testing.assert_close(grams[0], grams[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("classes", [3, 5])
@pytest.mark.parametrize("p", [0.2, 0.7, 0.99])
@pytest.mark.parametrize("cosine", [0.0, 0.4, 1.0, -0.2])
def test_closed_forms_are_the_eigenvalues_of_the_matrices(classes, p, cosine):
    terms = explicit(classes, p, cosine)
    sums = {**terms, "G0+G1": terms["G0"] + terms["G1"]}
    sums["G1+2"] = sums["G0+G1"] + terms["G2"]
    closed = toy_levels.closed_form(classes, p, cosine)
    assert set(closed) >= {"G1"} and (cosine not in (0, 1) or "G1+2" in closed)
    for name, pairs in closed.items():
        values = [value for value, count in pairs for _ in range(count)]
        values = torch.tensor(values + [0.0] * (classes**2 - len(values)), dtype=torch.float64)
        found = torch.linalg.eigvalsh(sums[name])
        if name == "G1+2" and cosine == 1:
            # One feature: the rest of the C^2 - 1 directions carry nothing.
            assert values.count_nonzero() == classes - 1
        torch.testing.assert_close(found, values.sort().values, rtol=0, atol=1e-14)


def test_toy_levels_has_the_spectra_of_the_explicit_terms():
    levels, terms = toy_levels.toy_levels(4, 0.8, 0.3), explicit(4, 0.8, 0.3)
    for name in ("G0", "G1", "G2"):
        torch.testing.assert_close(
            levels.eigenvalues(name), torch.linalg.eigvalsh(terms[name]).flip(0), atol=1e-14, rtol=0
        )
    assert float(terms["G3"].abs().max()) == 0
    torch.testing.assert_close(terms["G"], levels.operator("G1+2").matrix(), atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: toy_levels.toy_levels(2, 0.5), "classes is 2, but at least 3"),
        (lambda: toy_levels.toy_levels(4, 1.5), "p is 1.5"),
        (lambda: toy_levels.toy_levels(4, 0.5, 1.1), "cosine is 1.1"),
        (lambda: toy_levels.toy_levels(5, 0.5, -0.3), "-0.25 to 1"),
        (lambda: toy_levels.closed_form(4, -0.1), "p is -0.1"),
        (
            lambda: toy_levels.group_means(torch.ones(3, 3).double(), torch.eye(3).double()),
            "divide each row by its sum",
        ),
        (
            lambda: toy_levels.group_means(torch.eye(3).double(), -torch.eye(3).double()),
            "feature_gram has the eigenvalue -1",
        ),
        (
            lambda: toy_levels.group_means(torch.eye(3).double(), torch.eye(4).double()),
            "feature_gram has shape",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
