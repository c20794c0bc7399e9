"""A classifier simple enough to know its three levels in closed form: one feature for each class.

Logits are z = W h with theta = W, so that J^T u = u (x) h. All examples of class c share the
feature h_c and the probabilities p_c, and the logit derivatives are their own group means,
delta_{c,c'} = sqrt(p_cc') (e_c' - p_c) (x) h_c. There is no G3: G = G0 + G1 + G2.
"""

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.three_levels import ThreeLevels


def even_probabilities(classes: int, p: float) -> Tensor:
    """Return p_cc' = p for c' = c and a = (1 - p) / (C - 1) for each other logit, C x C.

    Args:
        classes: C, at least 3 (with two classes nothing is left for G2).
        p: Probability of the true class, from 0 to 1; 1/C at initialisation.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> even_probabilities(3, 0.5)[1].tolist()
        [0.25, 0.5, 0.25]
    """
    classes, p = checked_classes(classes), _checked_probability(p)
    table = torch.full((classes, classes), (1 - p) / (classes - 1), dtype=torch.float64)
    return table.fill_diagonal_(p)


def even_gram(classes: int, cosine: float = 0.0) -> Tensor:
    """Return the inner products of C unit features, all pairs at the same cosine, C x C.

    Args:
        classes: C.
        cosine: 0 for orthogonal features, 1 for a single one that all classes share; at least
            -1 / (C - 1), where the features sum to zero.

    Raises:
        ValueError: If there are no such features.
    """
    classes = checked_classes(classes)
    cosine = _checked_cosine(cosine, classes)
    return torch.full((classes, classes), cosine, dtype=torch.float64).fill_diagonal_(1)


def group_means(probabilities: Tensor, feature_gram: Tensor) -> Tensor:
    """Return delta_{c,c'} = sqrt(p_cc') (e_c' - p_c) (x) h_c, C x C x C^2.

    Args:
        probabilities: Row c holds the probabilities of all logits for class c, C x C.
        feature_gram: <h_c, h_d>, C x C. The features are taken as the rows of its square root.

    Raises:
        ValueError: If a row is no probability vector, or the second is no Gram matrix.
    """
    classes = len(checks.matrix("probabilities", probabilities))
    checks.matrix("probabilities", probabilities, columns=classes)
    checks.matrix("feature_gram", feature_gram, rows=classes, columns=classes)
    sums = probabilities.sum(1)
    if probabilities.min() < 0 or (sums - 1).abs().max() > 1e-9:
        raise ValueError(
            f"probabilities has entries from {float(probabilities.min()):g} on and rows that sum "
            f"to {float(sums.min()):g} to {float(sums.max()):g}, but entries of at least 0 and "
            "sums of 1 are needed; divide each row by its sum"
        )
    values, vectors = torch.linalg.eigh(feature_gram)
    if values[0] < -1e-9 * values[-1] or not torch.allclose(feature_gram, feature_gram.T):
        raise ValueError(
            f"feature_gram has the eigenvalue {float(values[0]):g}, or is not symmetric, but inner "
            "products of vectors are needed"
        )
    features = vectors * values.clamp_min(0).sqrt() @ vectors.T
    identity = torch.eye(classes, dtype=probabilities.dtype)
    directions = probabilities.sqrt()[:, :, None] * (identity - probabilities[:, None, :])
    return torch.einsum("clk,cf->clkf", directions, features).flatten(2)


def toy_levels(classes: int, p: float, cosine: float = 0.0) -> ThreeLevels:
    """Return the three levels, with means, of the toy with even probabilities and features.

    Args:
        classes: C.
        p: Probability of the true class.
        cosine: Of two classes' features.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> levels = toy_levels(10, 0.9)
        >>> ratio = levels.eigenvalues("G1")[:10] / levels.eigenvalues("G1+2")[:10]
        >>> ratio.round(decimals=12).unique().tolist()
        [0.9]
    """
    means = group_means(even_probabilities(classes, p), even_gram(classes, cosine))
    return ThreeLevels.of(means, torch.ones(classes, dtype=torch.int64))


def closed_form(classes: int, p: float, cosine: float = 0.0) -> dict[str, list[tuple[float, int]]]:
    """Return the eigenvalues above zero of the toy's terms, each with its multiplicity.

    With a = (1 - p) / (C - 1) and cosine s: G1 has a p^2 (1 + s / (C-1)), C - 1 times, and
    a p^2 (1 - s), once. For s = 0, G0 + G1 has a p and G2 has a / C. For s = 1, G1+2 has
    a (1 + p - a), C - 1 times. Terms that have no short form for this s are left out.

    Args:
        classes: C.
        p: Probability of the true class.
        cosine: s.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> value, count = closed_form(10, 0.91)["G1"][0]  # a = 0.01
        >>> round(value, 6), count
        (0.008281, 9)
    """
    c, p = checked_classes(classes), _checked_probability(p)
    s = _checked_cosine(cosine, c)
    a = (1 - p) / (c - 1)
    terms = {"G1": [(a * p**2 * (1 + s / (c - 1)), c - 1), (a * p**2 * (1 - s), 1)]}
    if s == 0:
        terms |= {"G0": [(a * p * (1 - p), c)], "G0+G1": [(a * p, c)]}
        terms |= {"G2": [(a / c, c * (c - 2))], "G1+2": [(a * p, c), (a / c, c * (c - 2))]}
    if s == 1:
        terms["G1+2"] = [(a * (1 + p - a), c - 1)]
    return terms


def mean_products(classes: int, p: float) -> tuple[float, float]:
    """Return N and S: inner products of the toy's unweighted means e_c' - p_c, features aside.

    With a = (1-p)/(C-1): N = (1-a)^2 + p^2 + (C-2) a^2 is the squared length for c' != c, and
    S = 1 - 2a + 2pa + (C-2) a^2 the product of those of two classes with one logit c'.

    Args:
        classes: C, at least 3.
        p: Probability of the true class, above 0 up to 1.

    Raises:
        ValueError: If one is out of range.
    """
    checked_classes(classes)
    if checks.positive("p", p) > 1:
        raise ValueError(f"p is {p:g}, but a probability above 0 and at most 1 is needed")
    a = (1 - p) / (classes - 1)
    rest = (classes - 2) * a**2
    return (1 - a) ** 2 + p**2 + rest, 1 - 2 * a + 2 * p * a + rest


def likeness(cosine: float) -> float:
    """Return the cosine of two classes' features if it lies between 0 and 1.

    Args:
        cosine: s.

    Raises:
        ValueError: If it does not.
    """
    if checks.nonnegative("cosine", cosine) > 1:
        raise ValueError(f"cosine is {cosine:g}, but a number from 0 to 1 is needed")
    return float(cosine)


def checked_classes(classes: int) -> int:
    """Return the number of classes if there are at least 3, so that something is left for G2.

    Args:
        classes: C.

    Raises:
        ValueError: If there are fewer.
    """
    if checks.positive_integer("classes", classes) < 3:
        raise ValueError(f"classes is {classes}, but at least 3 are needed")
    return int(classes)


def _checked_probability(p: float) -> float:
    if checks.nonnegative("p", p) > 1:
        raise ValueError(f"p is {p:g}, but a probability from 0 to 1 is needed")
    return float(p)


def _checked_cosine(cosine: float, classes: int) -> float:
    least = -1 / (classes - 1)
    if not least <= cosine <= 1:
        raise ValueError(
            f"cosine is {cosine:g}, but for {classes} unit features at one cosine {least:g} to 1 "
            "is needed"
        )
    return float(cosine)
