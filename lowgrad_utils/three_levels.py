"""The three levels of logit derivatives: class centres, group means, examples; G0 + G1 + G2 + G3.

All that G0, G1 and G2 are made of are the C^2 group means delta_{c,c'}, so that their spectra are
those of C^2 x C^2 matrices made from the means' inner products.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator

#: Sums of terms by name. The paper's G_{1+2} is all that the group means carry, G0 included.
TERMS = {
    "G0": ("G0",),
    "G1": ("G1",),
    "G2": ("G2",),
    "G0+G1": ("G0", "G1"),
    "G1+2": ("G0", "G1", "G2"),
}


@dataclass(frozen=True, eq=False)
class ThreeLevels:
    """Group means by their inner products, and the terms of G that they make up.

    Attributes:
        gram: <delta_{a,a'}, delta_{b,b'}>, (C*C) x (C*C) in float64, row c * C + c'.
        counts: Examples of each class (C).
        means: The group means themselves, C x C x P, if they were kept.

    Example:
        >>> means = torch.eye(9).double().reshape(3, 3, 9)  # orthonormal ones
        >>> levels = ThreeLevels.of(means, torch.tensor([10, 10, 20]))
        >>> levels.centres[0].tolist()  # (delta_{0,1} + delta_{0,2}) / 2
        [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        >>> levels.eigenvalues("G0")[:4].round(decimals=12).tolist()  # the shares of the classes
        [0.5, 0.25, 0.25, 0.0]
        >>> bool(levels.eigenvectors("G0", 1)[8].abs() > 0.999999)  # delta_{2,2}
        True
        >>> matrix = levels.operator("G1").matrix()
        >>> torch.allclose(torch.linalg.eigvalsh(matrix).flip(0), levels.eigenvalues("G1"))
        True
    """

    gram: Tensor
    counts: Tensor
    means: Tensor | None = None

    @classmethod
    def of(cls, means: Tensor, counts: Tensor) -> "ThreeLevels":
        """Return the levels of group means of classes with these numbers of examples.

        Args:
            means: C x C x P.
            counts: Examples of each class (C).

        Raises:
            ValueError: If the shapes do not belong together, or a class is empty.
        """
        if means.ndim != 3 or means.shape[0] != means.shape[1] or len(counts) != len(means):
            raise ValueError(
                f"means have shape {tuple(means.shape)} for {len(counts)} classes, but C x C x P "
                "for C classes is needed"
            )
        if int(counts.min()) < 1:
            raise ValueError(
                f"counts has {counts.tolist()}, but at least 1 of each class is needed"
            )
        rows = means.flatten(0, 1)
        return cls(_gram(rows), counts.cpu(), means)

    @property
    def classes(self) -> int:
        """C."""
        return len(self.counts)

    @property
    def weights(self) -> Tensor:
        """Shares pi_c = n_c / n of the classes."""
        return self.counts.double() / self.counts.sum()

    @cached_property
    def centre_weights(self) -> Tensor:
        """Coefficients of the class centres in the group means, C x C*C: 1 / (C-1) off c' = c."""
        c = self.classes
        off = (1 - torch.eye(c, dtype=torch.float64)) / (c - 1)
        return torch.stack([torch.eye(c, dtype=torch.float64)[k].kron(off[k]) for k in range(c)])

    @property
    def centres(self) -> Tensor:
        """Class centres delta_c = Ave_{c' != c} delta_{c,c'}, C x P; needs the means."""
        means = self._needed_means()
        c = self.classes
        others = 1 - torch.eye(c, dtype=means.dtype, device=means.device)
        # A product, since a masked copy of the means would need their memory once more.
        return torch.bmm(others[:, None] / (c - 1), means)[:, 0]

    @property
    def centre_gram(self) -> Tensor:
        """<delta_a, delta_b>, C x C."""
        return self.centre_weights @ self.gram @ self.centre_weights.T

    def coefficients(self, term: str) -> Tensor:
        """Return B with term = D^T B B^T D, where the rows of D are the group means.

        B = A^(1/2) of the coefficient matrix A, which is block-diagonal by class: pi_c times the
        projection on the coordinate c' = c (G0), on the direction u_c of all c' != c alike (G1), or
        on what is left of the coordinates c' != c (G2).

        Args:
            term: One of TERMS.

        Raises:
            ValueError: If the term is none of them.

        Source: Papyan 2019, Eqs. 21-28, with weights pi_c for classes of any size.
        """
        checks.choice("term", term, TERMS)
        c = self.classes
        roots = torch.zeros(c * c, c * c, dtype=torch.float64)
        for label, weight in enumerate(self.weights):
            own = torch.zeros(c, c, dtype=torch.float64)
            own[label, label] = 1
            u = (1 - own.diagonal()) / (c - 1) ** 0.5
            projections = {
                "G0": own,
                "G1": torch.outer(u, u),
                "G2": torch.eye(c, dtype=torch.float64) - own - torch.outer(u, u),
            }
            block = slice(label * c, (label + 1) * c)
            roots[block, block] = weight.sqrt() * sum(projections[name] for name in TERMS[term])
        return roots

    def eigenvalues(self, term: str) -> Tensor:
        """Return the C^2 eigenvalues, falling, of a term that may differ from zero.

        Args:
            term: ``G0``, ``G1``, ``G2``, ``G0+G1`` or ``G1+2`` (the paper's name for G0 + G1 + G2).

        Raises:
            ValueError: If the term is none of them.

        Example:
            >>> stream = torch.Generator().manual_seed(0)
            >>> means = torch.randn(3, 3, 20, generator=stream, dtype=torch.float64)
            >>> levels = ThreeLevels.of(means, torch.tensor([10, 20, 30]))
            >>> bool((levels.eigenvalues("G1+2") >= levels.eigenvalues("G1") - 1e-12).all())
            True
        """
        roots = self.coefficients(term)
        return torch.linalg.eigvalsh(roots @ self.gram @ roots).flip(0)

    def eigenvectors(self, term: str, k: int) -> Tensor:
        """Return the k leading orthonormal eigenvectors of a term, P x k; needs the means.

        Args:
            term: As in ``eigenvalues``.
            k: How many.

        Raises:
            ValueError: If the term is unknown or has fewer than k eigenvalues above rounding, or
                the means were not kept.
        """
        k = checks.positive_integer("k", k)
        roots = self.coefficients(term)
        values, vectors = torch.linalg.eigh(roots @ self.gram @ roots)
        values, vectors = values.flip(0), vectors.flip(1)[:, :k]
        # Means in float32 leave rounding of their own precision in the Gram matrix.
        least = len(values) * torch.finfo(self._needed_means().dtype).eps * values[0]
        rank = int((values > least).sum())
        if k > rank:
            raise ValueError(f"k is {k}, but {term} has {rank} eigenvalues above rounding")
        values = values[:k]
        rows = self._needed_means().flatten(0, 1)
        return rows.T @ (roots @ vectors / values.sqrt()).to(rows)

    @property
    def lengths(self) -> Tensor:
        """|delta_{c,c'}|, C x C."""
        return self.gram.diagonal().clamp_min(0).sqrt().reshape(self.classes, self.classes)

    @property
    def cosines(self) -> Tensor:
        """Cosines between the group means off c' = c, C(C-1) x C(C-1), sorted by c, then c'.

        A group mean of length zero has cosine zero with all others.
        """
        kept = ~torch.eye(self.classes, dtype=torch.bool).flatten()
        lengths = self.lengths.flatten()[kept]
        inverse = torch.where(lengths > 0, 1 / lengths, 0)
        return inverse[:, None] * self.gram[kept][:, kept] * inverse

    def organisation(self) -> tuple[float, float]:
        """Return the shares R^2 of the directions' variance that class and logit explain.

        The directions are the C(C-1) group means with c' != c at unit length. Their total sum of
        squares about the grand mean is compared with that of the means over all of one class c, and
        of the means over all of one logit c'. Since c' = c is left out, the shares overlap: if the
        class alone decides, the logit explains 1 / (C-1)^2 by way of it, and the other way round.

        Returns:
            (by class, by logit), from 0 to 1; NaN if all directions are the same.

        Source: after Papyan 2019, Figure 5.

        Example:
            >>> means = torch.zeros(3, 3, 3, dtype=torch.float64)
            >>> for c in range(3):
            ...     means[c, :, c] = 1
            >>> ThreeLevels.of(means, torch.ones(3, dtype=torch.int64)).organisation()
            (1.0, 0.25)
        """
        c, cosines = self.classes, self.cosines
        first, second = torch.nonzero(~torch.eye(c, dtype=torch.bool)).T
        correction = cosines.mean()
        total = cosines.diagonal().mean() - correction
        if total <= 1e-12:
            return float("nan"), float("nan")
        shares = []
        for factor in (first, second):
            means = torch.nn.functional.one_hot(factor, c).double().T / (c - 1)
            shares.append(
                float(((means @ cosines @ means.T).diagonal().mean() - correction) / total)
            )
        return shares[0], shares[1]

    def operator(self, term: str) -> SymmetricOperator:
        """Return a term as an operator on vectors of length P; needs the means.

        Args:
            term: As in ``eigenvalues``.

        Raises:
            ValueError: If the term is unknown, or the means were not kept.
        """
        roots = self.coefficients(term)
        rows = self._needed_means().flatten(0, 1)
        factor = (roots @ roots).to(rows)
        return SymmetricOperator(
            rows.shape[1], rows.dtype, rows.device, lambda v: (v @ rows.T) @ factor @ rows
        )

    def _needed_means(self) -> Tensor:
        if self.means is None:
            raise ValueError(
                "only the inner products of the group means were kept; make the levels with "
                "three_levels(curvature), which keeps the means"
            )
        return self.means


def three_levels(curvature: LossCurvature) -> ThreeLevels:
    """Return the three levels at a classifier's parameters, from C^2 vector-Jacobian products.

    Args:
        curvature: The classifier on its data.

    Raises:
        ValueError: If a class has no example, or the means do not fit in memory.

    Warns:
        AssumptionWarning: If a class has one example: it has no spread within its groups.

    Source: Papyan 2019, Eqs. 21-28.

    Example:
        >>> model = torch.nn.Linear(5, 3).double().eval()
        >>> x = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> levels = three_levels(LossCurvature(model, (x, torch.arange(60) % 3)))
        >>> levels.classes, levels.eigenvalues("G1").shape
        (3, torch.Size([9]))
    """
    single = torch.nonzero(curvature.counts == 1).flatten().tolist()
    if single:
        warnings.warn(
            f"class {', '.join(map(str, single))} has one example, so that its covariances within "
            "groups are zero and G3 has no part of it; give at least two of each class",
            checks.AssumptionWarning,
            stacklevel=2,
        )
    return ThreeLevels.of(curvature.group_means(), curvature.counts)


def within_groups(curvature: LossCurvature, levels: ThreeLevels) -> SymmetricOperator:
    """Return G3 = G - G0 - G1 - G2, the covariances within groups, as an operator.

    Args:
        curvature: The classifier on its data.
        levels: Its three levels, with means.

    Raises:
        ValueError: If the means were not kept.

    Source: Papyan 2019, Eqs. 21-28.

    Example:
        >>> model = torch.nn.Linear(5, 3).double().eval()
        >>> x = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> curvature = LossCurvature(model, (x, torch.arange(60) % 3))
        >>> rest = within_groups(curvature, three_levels(curvature)).matrix()
        >>> terms = explicit_terms(curvature.logit_derivatives(), curvature.labels)
        >>> torch.allclose(rest, terms["G3"])
        True
    """
    full, means = curvature.gauss_newton, levels.operator("G1+2")
    return SymmetricOperator(
        full.size, full.dtype, full.device, lambda v: full.product(v) - means.product(v)
    )


def explicit_terms(derivatives: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return G0, G1, G2, G3 and G as P x P matrices, straight from their definitions.

    Means and covariances are normalised by counts, and classes weighted by their share pi_c:
    G0 = sum pi_c d_cc d_cc^T, G1 = (C-1) sum pi_c d_c d_c^T, G2 = (C-1) sum pi_c Sigma_c,
    G3 = sum pi_c Sigma_cc', G = (1/n) sum d_i,c' d_i,c'^T.

    Args:
        derivatives: delta_{i,c'}, n x C x P.
        labels: Class of each example (n).

    Raises:
        ValueError: If a class has no example, or a label is none of 0 ... C - 1.

    Source: Papyan 2019, Eqs. 21-28.

    Example:
        >>> stream = torch.Generator().manual_seed(0)
        >>> derivatives = torch.randn(12, 3, 7, generator=stream, dtype=torch.float64)
        >>> terms = explicit_terms(derivatives, torch.arange(12) % 3)
        >>> torch.allclose(terms["G"], terms["G0"] + terms["G1"] + terms["G2"] + terms["G3"])
        True
    """
    n, c, size = derivatives.shape
    if labels.shape != (n,) or not bool(((labels >= 0) & (labels < c)).all()):
        raise ValueError(f"labels are not {n} numbers from 0 to {c - 1}, one for each example")
    terms = {name: derivatives.new_zeros(size, size) for name in ("G0", "G1", "G2", "G3")}
    for label in range(c):
        own = derivatives[labels == label]
        if len(own) == 0:
            raise ValueError(f"class {label} has no example; give at least one of each class")
        share = len(own) / n
        means = own.mean(0)
        others = torch.cat([means[:label], means[label + 1 :]])
        centre = others.mean(0)
        terms["G0"] += share * torch.outer(means[label], means[label])
        terms["G1"] += share * (c - 1) * torch.outer(centre, centre)
        terms["G2"] += share * (others - centre).T @ (others - centre)
        spread = (own - means).flatten(0, 1)
        terms["G3"] += spread.T @ spread / n
    flat = derivatives.flatten(0, 1)
    return {**terms, "G": flat.T @ flat / n}


def evenness(curvature: LossCurvature, means: Tensor) -> Tensor:
    """Return h = (E a)^2 / E a^2 of each group, a = <delta_{i,c'}, delta_{c,c'}>, C x C.

    How even the sizes are within a group: 1 if all examples contribute alike along the group mean,
    1/n_c if one alone does, NaN if none does. For a group that has a direction but uneven sizes,
    the mean's square is h times the second moment along it.

    Args:
        curvature: The classifier on its data.
        means: Its group means, C x C x P.

    Raises:
        ValueError: If the means are not C x C x P.

    Source: this book.

    Example:
        >>> model = torch.nn.Linear(5, 3).double().eval()
        >>> one_image = torch.ones(6, 5).double()  # again and again
        >>> curvature = LossCurvature(model, (one_image, torch.arange(6) % 3))
        >>> torch.allclose(evenness(curvature, curvature.group_means()), torch.ones(3, 3).double())
        True
    """
    shape = (curvature.classes, curvature.classes, curvature.size)
    if tuple(means.shape) != shape:
        raise ValueError(f"means have shape {tuple(means.shape)}, but {shape} is needed")
    rows = []
    for label in range(curvature.classes):
        # For logit c' only the product with its own group's mean is wanted.
        along = curvature.derivatives_along(means[label], label).cpu().double()
        own = along.diagonal(dim1=0, dim2=2)
        rows.append(own.mean(0) ** 2 / (own**2).mean(0))
    return torch.stack(rows)


def _gram(rows: Tensor, block: int = 1 << 16) -> Tensor:
    """Return rows @ rows.T, summed in float64 over blocks of columns."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in rows.split(block, dim=1):
        wide = columns.cpu().double()
        total += wide @ wide.T
    return total
