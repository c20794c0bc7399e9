"""Hessian and Gauss-Newton matrix compared: top spaces, whole spectra, gradients, the mini-bulk.

The networks are small (images of 8 or 16 pixels, 30 or 50 a class), so that the top eigenpairs of
H and G can be followed through many trainings, and all eigenvalues of an MLP be computed.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator
from lowgrad_utils.eigensolvers import SpectralDensity, orthonormal_columns, top_eigenpairs
from lowgrad_utils.sweeps import grid

Cell = dict[str, Any]

#: Epochs of a training, and those at which it is measured: at initialisation, after one, before the
#: learning rate falls to a tenth (after epoch 20), ten epochs later, at the end.
EPOCHS, MOMENTS = 60, {"start": 0, "one": 1, "before": 20, "after": 30, "end": 60}
#: Width factor, image size and learning rate of the networks.
SMALL = {"mlp": (1 / 4, 8, 0.1), "vgg11": (1 / 8, 16, 0.05), "resnet18": (1 / 8, 8, 0.05)}
#: Images of the mini-batches whose gradients are measured, and of the training's batches.
BATCH = 50


def trained(
    dataset: str,
    network: str,
    per_class: int,
    weight_decay: float,
    seed: int,
    *,
    epochs: int = EPOCHS,
    keep: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[int, nn.Module], tuple[Tensor, Tensor]]:
    """Train a small classifier and return it at the kept epochs, and its images and labels.

    Momentum 0.9, batches of 50, the learning rate of ``SMALL``; a tenth of it after one third of
    the epochs, a hundredth after two thirds.

    Args:
        dataset: ``mnist``, ``fashion_mnist`` or ``cifar10``.
        network: A key of ``SMALL``.
        per_class: Images of each class.
        weight_decay: Multiple of theta in the gradient.
        seed: Seed of images, weights and batches.
        epochs: Passes over the images.
        keep: Epochs at which the network is kept; the last one always is.
        dtype: float32 or float64.

    Returns:
        Networks in evaluation mode by epoch; (x, labels).

    Raises:
        ValueError: On an unknown name or an epoch that there is not.
    """
    width, size, rate = SMALL[checks.choice("network", network, SMALL)]
    x, labels = datasets.load(dataset).images(
        per_class=per_class, size=size, seed=seed, dtype=dtype
    )

    def fresh() -> nn.Module:
        return classifiers.build(
            network, channels=x.shape[1], width=width, size=size, seed=seed, dtype=dtype
        )

    kept = sorted({*keep, epochs})
    networks = {}
    with tempfile.TemporaryDirectory() as folder:
        classifiers.fit(
            fresh(),
            x,
            labels,
            epochs=epochs,
            lr=rate,
            weight_decay=weight_decay,
            batch_size=BATCH,
            seed=seed,
            checkpoints=folder,
            keep=kept,
            progress=False,
        )
        for epoch in kept:
            network_then = fresh().eval()
            path = Path(folder, f"epoch-{epoch:04d}.pt")
            network_then.load_state_dict(classifiers.load_checkpoint(path)[0])
            networks[epoch] = network_then
    return networks, (x, labels)


# --- H against G, and gradients in their top spaces -----------------------------------------------


def share_inside(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return |Q^T g|^2 / |g|^2 of each row g, the share of its square inside a subspace.

    Args:
        vectors: Rows g, K x P.
        basis: Orthonormal columns Q of the subspace, P x r.

    Example:
        >>> share_inside(torch.tensor([[3.0, 4.0]]), torch.eye(2)[:, :1])
        tensor([0.3600])
    """
    return (vectors @ basis).square().sum(1) / vectors.square().sum(1)


def compare(
    model: nn.Module, data: tuple[Tensor, Tensor], *, batches: int, seed: int
) -> dict[str, float]:
    """Return eigenvalues of H and G, how far their top spaces agree, and gradients' shares in them.

    - ``H_k``, ``G_k``: eigenvalues, k = 1 to C; ``lowest``: H's most negative one.
    - ``overlap``, ``overlap_less``: mean squared cosine of the principal angles between the top C
      (top C - 1) eigenspaces of H and G.
    - ``full_H``, ``full_G``, ``full_centres``, ``full_means``, ``full_random``: share of the
      gradient's square in the top C space of H and of G, in the span of the C class centres and of
      the C^2 group means, and in a random space of dimension C. ``batch_...``: the mean of the same
      over mini-batches.
    - ``decay_cosine``: cosine between the gradient and -theta.
    - ``signal``: |g|^2 over the mean of |g_batch|^2.

    Args:
        model: The classifier, in evaluation mode.
        data: Its images and labels.
        batches: How many mini-batches, of ``BATCH`` images drawn without replacement.
        seed: Seed of the mini-batches and the random space.

    Raises:
        ValueError: If ``batches`` is not a positive integer.
    """
    checks.positive_integer("batches", batches)
    curvature = LossCurvature(model, data)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    c = curvature.classes
    stream = checks.random_stream(seed, "gradients")
    centres = curvature.class_centres()
    options = {"start": centres, "tolerance": 1e-3, "seed": seed}
    gauss_newton = top_eigenpairs(curvature.gauss_newton, c, **options)
    hessian = top_eigenpairs(curvature.hessian, c, **options)
    lowest = top_eigenpairs(_negative(curvature.hessian), 1, tolerance=3e-2, seed=seed)
    spaces = {
        "H": hessian.vectors,
        "G": gauss_newton.vectors,
        "centres": orthonormal_columns(centres),
        "means": orthonormal_columns(curvature.group_means().flatten(0, 1)),
        "random": torch.linalg.qr(torch.randn(curvature.size, c, generator=stream))[0].to(centres),
    }
    full = curvature.gradient()
    rows = [torch.randperm(curvature.n, generator=stream)[:BATCH] for _ in range(batches)]
    drawn = torch.stack([curvature.gradient(part) for part in rows])
    cosines = hessian.vectors.T @ gauss_newton.vectors
    shares = {}
    for name, basis in spaces.items():
        shares[f"full_{name}"] = float(share_inside(full[None], basis))
        shares[f"batch_{name}"] = float(share_inside(drawn, basis).mean())
    return {
        **{f"H_{k + 1}": float(hessian.values[k]) for k in range(c)},
        **{f"G_{k + 1}": float(gauss_newton.values[k]) for k in range(c)},
        "lowest": -float(lowest.values[0]),
        "overlap": float(cosines.square().sum()) / c,
        "overlap_less": float(cosines[: c - 1, : c - 1].square().sum()) / (c - 1),
        **shares,
        "decay_cosine": float(-(full @ theta) / (full.norm() * theta.norm())),
        "signal": float(full.square().sum() / drawn.square().sum(1).mean()),
        "loss": curvature.loss,
        "probability": float(
            curvature.probabilities[torch.arange(curvature.n), curvature.labels].mean()
        ),
    }


def training_cell(
    dataset: str, network: str, per_class: int, weight_decay: float, seed: int
) -> dict[str, float]:
    """Train one network and return ``compare`` at each of ``MOMENTS``, as ``<moment>_<name>``.

    Args:
        dataset: See ``trained``, as for the rest.
        network: See there.
        per_class: See there.
        weight_decay: See there.
        seed: See there; also of the mini-batches and the random space.
    """
    networks, data = trained(
        dataset, network, per_class, weight_decay, seed, keep=list(MOMENTS.values())
    )
    result = {}
    for moment, epoch in MOMENTS.items():
        found = compare(networks[epoch], data, batches=20, seed=seed)
        result |= {f"{moment}_{name}": value for name, value in found.items()}
    return result


def training_cells() -> tuple[Cell, ...]:
    """Return the cells of the stored grid: MLPs on three data sets, with and without decay."""
    sets = ["mnist", "fashion_mnist", "cifar10"]
    decays = [5e-4, 0.0]
    cells = grid(dataset=sets, network=["mlp"], per_class=[50], weight_decay=decays, seed=range(6))
    return tuple(cells)


def outliers_of_both(curvature: LossCurvature, *, tolerance: float = 1e-2) -> dict[str, float]:
    """Return how far the C - 1 largest eigenvalues of H and G and their spaces agree.

    ``gap``, ``overlap`` and ``negative`` as in ``by_moment`` and ``compare`` (``overlap_less``).

    Args:
        curvature: A classifier on its images.
        tolerance: Of the residuals of eigenvectors, relative to the eigenvalue; its square is about
            the eigenvalues' own relative error.
    """
    count = curvature.classes - 1
    options = {"start": curvature.class_centres(), "tolerance": tolerance}
    h, g = (
        top_eigenpairs(operator, count, **options)
        for operator in (curvature.hessian, curvature.gauss_newton)
    )
    lowest = top_eigenpairs(_negative(curvature.hessian), 1, tolerance=3e-2)
    return {
        "gap": float(((h.values - g.values).abs() / g.values).max()),
        "overlap": float((h.vectors.T @ g.vectors).square().sum()) / count,
        "negative": float(lowest.values[0] / h.values[0]),
    }


def by_moment(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return the stored trainings as one row a moment, with gaps between H and G.

    Adds to what ``compare`` names: ``gap``, the largest |lambda_k(H) - lambda_k(G)| / lambda_k(G)
    over k < C; ``mean_gap``, the sum of these differences over the sum of the lambda_k(G); and
    ``negative``, H's most negative eigenvalue over its largest, in size.

    Args:
        trainings: A table of ``training_cell``.
    """
    parts = []
    for moment in MOMENTS:
        names = [name for name in trainings if name.startswith(f"{moment}_")]
        part = trainings[names].rename(columns=lambda name, m=moment: name.removeprefix(f"{m}_"))
        h, g = (part[[f"{name}_{k}" for k in range(1, 10)]].to_numpy() for name in "HG")
        added = {
            "moment": moment,
            "gap": (abs(h - g) / g).max(1),
            "mean_gap": abs(h - g).sum(1) / g.sum(1),
            "negative": -part["lowest"] / part["H_1"],
        }
        parts.append(trainings[["dataset", "network", "weight_decay", "seed"]].join(part))
        parts[-1] = parts[-1].assign(**added)
    return pd.concat(parts, ignore_index=True)


def dense_operator(matrix: Tensor) -> SymmetricOperator:
    """Return a symmetric matrix as an operator.

    Args:
        matrix: P x P.
    """
    return SymmetricOperator(len(matrix), matrix.dtype, matrix.device, lambda rows: rows @ matrix)


def noise_shares(curvature: LossCurvature, basis: Tensor) -> dict[str, float]:
    """Return the shares of three second moments inside a subspace: tr Q^T A Q / tr A.

    - ``G``: of the Gauss-Newton matrix, the gradients under labels drawn from the model.
    - ``sampling``: of the covariance of the examples' gradients, which is what the choice of a
      mini-batch adds to the gradient.
    - ``examples``: of the second moment of the examples' gradients -delta_{i,c,c} / sqrt(p_c).

    Args:
        curvature: A small network on its images.
        basis: Orthonormal columns Q, P x r.

    Source: Papyan 2019, Eq. 20 for the examples' gradients.
    """
    derivatives = curvature.logit_derivatives()
    rows = torch.arange(curvature.n)
    own = curvature.probabilities[rows, curvature.labels].sqrt()
    gradients = -derivatives[rows, curvature.labels] / own[:, None]
    sets = {
        "G": derivatives.flatten(0, 1),
        "sampling": gradients - gradients.mean(0),
        "examples": gradients,
    }
    return {
        name: float((vectors @ basis).square().sum() / vectors.square().sum())
        for name, vectors in sets.items()
    }


def _negative(operator: SymmetricOperator) -> SymmetricOperator:
    return SymmetricOperator(
        operator.size, operator.dtype, operator.device, lambda rows: -operator.product(rows)
    )


# --- the mini-bulk --------------------------------------------------------------------------------

#: Regimes in which a mini-bulk is looked for: images of each class, epochs, weight decay.
REGIMES = {
    "initialisation": (50, 0, 5e-4),
    "overlap": (50, 2, 5e-4),
    "trained": (50, 60, 5e-4),
    "strong decay": (50, 60, 1e-2),
    "many examples": (200, 20, 5e-4),
}


def level_spectra(derivatives: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the eigenvalues, falling, of G, of G1+2 (means) and of G3 (within groups).

    From the smaller of D^T D (P x P) and D D^T (nC x nC), in float64; D has the logit derivatives
    as rows. Taking a group's mean from its rows takes G1+2 from G.

    Args:
        derivatives: delta_{i,c'}, n x C x P.
        labels: Class of each example (n), each of 0 to C - 1 at least once.

    Returns:
        ``G`` and ``G3``: all that may differ from zero; ``G1+2``: C^2.

    Example:
        >>> derivatives = torch.randn(12, 3, 7, dtype=torch.float64)
        >>> spectra = level_spectra(derivatives, torch.arange(12) % 3)
        >>> len(spectra["G"]), len(spectra["G1+2"])
        (7, 9)
    """
    n, c = derivatives.shape[:2]
    members = nn.functional.one_hot(labels, c).double().T
    weights = (members / members.sum(1, keepdim=True)).to(derivatives)
    means = torch.einsum("ai,ikp->akp", weights, derivatives)
    rows = (means * (members.sum(1) / n).sqrt().to(means)[:, None, None]).flatten(0, 1)
    return {
        "G": _squared_singular_values(derivatives.flatten(0, 1)) / n,
        "G1+2": _eigenvalues(_gram(rows)),
        "G3": _squared_singular_values((derivatives - means[labels]).flatten(0, 1)) / n,
    }


def standing_apart(full: Tensor, within: Tensor, classes: int) -> dict[str, float]:
    """Return what tells whether about C^2 - C eigenvalues of G stand between outliers and bulk.

    - ``above``: number of eigenvalues of G above the largest of G3; by Weyl at most C^2.
    - ``cliff``: the largest ratio lambda_k / lambda_{k+1} of G's eigenvalues, k from 2 C to 2 C^2;
      ``at``: that k.
    - ``raised``: median of lambda_k(G) / lambda_k(G3) over k from C + 1 to C^2: by how much the
      means raise the eigenvalues where a mini-bulk should be.

    Args:
        full: Eigenvalues of G, falling.
        within: Those of G3.
        classes: C.

    Raises:
        ValueError: If fewer than 2 C^2 + 1 eigenvalues are given.

    Example:
        >>> full = torch.tensor([50.0] * 2 + [10.0] * 2 + [1.0] * 6)
        >>> standing_apart(full, torch.ones(10), 2)["above"]
        4
    """
    if min(len(full), len(within)) <= 2 * classes**2:
        raise ValueError(
            f"{min(len(full), len(within))} eigenvalues are given, but {2 * classes**2 + 1} are "
            f"needed for {classes} classes; take more examples"
        )
    ratios = full[2 * classes - 1 : 2 * classes**2] / full[2 * classes : 2 * classes**2 + 1]
    between = slice(classes, classes**2)
    return {
        "above": int((full > within[0]).sum()),
        "cliff": float(ratios.max()),
        "at": int(ratios.argmax()) + 2 * classes,
        "raised": float((full[between] / within[between]).median()),
    }


def mini_bulk_cell(dataset: str, network: str, regime: str, seed: int) -> dict[str, float]:
    """Return ``standing_apart`` and what goes with it for one small network, all eigenvalues known.

    Args:
        dataset: ``mnist`` or ``fashion_mnist`` for ``mlp``; also ``cifar10`` for ``vgg11``.
        network: ``mlp``, 8 x 8 pixels and one hidden layer of 20, in float64; or ``vgg11`` at
            1/16 of its width, 16 x 16 pixels, 20 images of each class.
        regime: A key of ``REGIMES``.
        seed: Seed of images, weights and batches.

    Returns:
        ``above``, ``cliff``, ``at``, ``raised``; ``G_k``, ``G3_k`` and ``G1+2_k`` at some k; and
        the mean probability of the true class.
    """
    per_class, epochs, weight_decay = REGIMES[checks.choice("regime", regime, REGIMES)]
    model, x, labels = mini_bulk_network(dataset, network, per_class, epochs, weight_decay, seed)
    curvature = LossCurvature(model, (x, labels), memory=4)
    spectra = level_spectra(curvature.logit_derivatives(), curvature.labels)
    values = {
        f"{term}_{k}": float(spectra[term][k - 1])
        for term in ("G", "G3", "G1+2")
        for k in (1, 9, 10, 11, 20, 50, 81, 90, 91, 100, 101, 150)
        if k <= len(spectra[term])
    }
    return {
        **standing_apart(spectra["G"], spectra["G3"], curvature.classes),
        **values,
        "probability": float(
            curvature.probabilities[torch.arange(curvature.n), curvature.labels].mean()
        ),
    }


def mini_bulk_network(
    dataset: str, network: str, per_class: int, epochs: int, weight_decay: float, seed: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network of ``mini_bulk_cell`` in evaluation mode, its images and labels.

    Args:
        dataset: See there.
        network: See there.
        per_class: Images of each class, of which ``vgg11`` takes 20.
        epochs: Passes over the images at a learning rate from 0.1, batches of 50; none if 0.
        weight_decay: Multiple of theta in the gradient.
        seed: Seed of images, weights and batches.
    """
    small = checks.choice("network", network, ("mlp", "vgg11")) == "mlp"
    size, dtype = (8, torch.float64) if small else (16, torch.float32)
    x, labels = datasets.load(dataset).images(
        per_class=per_class if small else 20, size=size, seed=seed, dtype=dtype
    )
    options = {"hidden": (20,)} if small else {"width": 1 / 16}
    model = classifiers.build(
        network, channels=x.shape[1], size=size, seed=seed, dtype=dtype, **options
    )
    if epochs:
        classifiers.fit(
            model,
            x,
            labels,
            epochs=epochs,
            lr=0.1,
            weight_decay=weight_decay,
            batch_size=BATCH,
            seed=seed,
            progress=False,
        )
    return model.eval(), x, labels


def mini_bulk_cells() -> tuple[Cell, ...]:
    """Return the cells of the stored grid: MLPs in every regime."""
    sets = ["mnist", "fashion_mnist"]
    return tuple(grid(seed=range(2), dataset=sets, network=["mlp"], regime=list(REGIMES)))


@dataclass(frozen=True, eq=False)
class GaussianLevels:
    """Gaussian logit derivatives of three levels, of equal classes, with the means they came from.

    delta_{i,c,c'} = centre m_c + group m_{c,c'} + noise z_{i,c'} with independent standard Gaussian
    vectors divided by sqrt(P), so that the three numbers are lengths.

    Attributes:
        derivatives: n x C x P.
        labels: Class of each example (n).
        means: The group means without noise, C x C x P.
        noise: Length of an example about its group mean.
    """

    derivatives: Tensor
    labels: Tensor
    means: Tensor
    noise: float

    @classmethod
    def draw(
        cls,
        classes: int,
        per_class: int,
        size: int,
        *,
        centre: float,
        group: float,
        noise: float,
        seed: int | torch.Generator,
    ) -> "GaussianLevels":
        """Draw them.

        Args:
            classes: C.
            per_class: Examples of each class.
            size: P.
            centre: Length of the class centres.
            group: Length of a group mean about its centre.
            noise: See above.
            seed: Seed, or generator.

        Raises:
            ValueError: If a number is out of range.

        Example:
            >>> drawn = GaussianLevels.draw(3, 5, 40, centre=1, group=1, noise=1, seed=0)
            >>> drawn.derivatives.shape, drawn.predicted_above
            (torch.Size([15, 3, 40]), 9)
        """
        for name, number in {"classes": classes, "per_class": per_class, "size": size}.items():
            checks.positive_integer(name, number)
        for name, number in {"centre": centre, "group": group, "noise": noise}.items():
            checks.nonnegative(name, number)
        stream = checks.random_stream(seed, "Gaussian derivatives")

        def gaussians(*shape: int) -> Tensor:
            return torch.randn(*shape, size, generator=stream, dtype=torch.float64) / size**0.5

        labels = torch.arange(classes).repeat_interleave(per_class)
        means = centre * gaussians(classes, 1) + group * gaussians(classes, classes)
        derivatives = means[labels] + noise * gaussians(len(labels), classes)
        return cls(derivatives, labels, means, noise)

    @property
    def predicted_above(self) -> int:
        """How many eigenvalues of G the means lift out of the bulk.

        The rows of D / sqrt(n) are a matrix of rank C^2, whose squared singular values are the
        eigenvalues of (1/C) sum m m^T, plus independent Gaussians of variance noise^2 / (n P).
        A value stands out if it exceeds noise^2 sqrt(C / (n P)).

        Source: Benaych-Georges and Nadakuditi 2012, for rectangular matrices.
        """
        n, c, size = self.derivatives.shape
        lifted = _eigenvalues(_gram(self.means.flatten(0, 1))) / c
        return int((lifted > self.noise**2 * (c / (n * size)) ** 0.5).sum())


# --- what can go wrong on the way to a spectrum ---------------------------------------------------


def lanczos_without_reorthogonalisation(
    operator: SymmetricOperator, *, steps: int, seed: int | torch.Generator = 0
) -> SpectralDensity:
    """Return the spectral density of one probe by the bare three-term recurrence.

    As ``eigensolvers.spectral_density`` with one probe, but no vector is orthogonalised against
    any but its two predecessors: rounding then brings back directions that were found before.

    Args:
        operator: A.
        steps: Lanczos steps.
        seed: Seed, or generator, of the probe: the same one as there.

    Raises:
        ValueError: If ``steps`` is not a positive integer.
    """
    checks.positive_integer("steps", steps)
    stream = checks.random_stream(seed, "probes")
    vector = torch.randn(operator.size, generator=stream, dtype=torch.float64)
    vector = (vector / vector.norm()).to(operator.device, operator.dtype)
    before, length = torch.zeros_like(vector), 0.0
    diagonal, beside = [], []
    for _ in range(steps):
        image = operator @ vector - length * before
        diagonal.append(float(image @ vector))
        image = image - diagonal[-1] * vector
        length = float(image.norm())
        beside.append(length)
        before, vector = vector, image / length
    values, vectors = eigh_tridiagonal(diagonal, beside[:-1])
    return SpectralDensity(
        torch.from_numpy(values)[None], torch.from_numpy(vectors[0] ** 2)[None], operator.size
    )


def copies(density: SpectralDensity, value: float, *, tolerance: float = 1e-4) -> tuple[int, float]:
    """Return how many Ritz values lie at an eigenvalue, and their total weight.

    Args:
        density: The density of one probe.
        value: The eigenvalue.
        tolerance: Distance that counts as at it, relative.
    """
    near = (density.points[0] - value).abs() <= tolerance * abs(value)
    return int(near.sum()), float(density.weights[0, near].sum())


def density_error(density: SpectralDensity, values: Tensor, *, floor: float = 1e-4) -> float:
    """Return the mean distance of the shares of eigenvalues beyond t in size, over t.

    t runs in equal steps of log t from the largest |lambda| down to ``floor`` times it, so that all
    scales count alike. (Below that are the zeros of a matrix of low rank, which no quadrature tells
    from small eigenvalues.)

    Args:
        density: The estimate.
        values: All eigenvalues.
        floor: See above.

    Raises:
        ValueError: If ``floor`` is not between 0 and 1.

    Example:
        >>> exact = torch.tensor([1.0, 2.0, 4.0, 8.0])
        >>> density_error(SpectralDensity(exact[None], torch.full((1, 4), 0.25), 4), exact)
        0.0
    """
    if not 0 < floor < 1:
        raise ValueError(f"floor is {floor}, but a number between 0 and 1 is needed")
    sizes = values.abs().double()
    grid = torch.logspace(math.log10(floor), 0, 60, dtype=torch.float64)[:-1] * sizes.max()
    exact = (sizes > grid[:, None]).double().mean(1)
    beyond = (density.points.abs() > grid[:, None, None]).double()
    estimated = (beyond * density.weights).sum(2).mean(1)
    return float((estimated - exact).abs().mean())


def batch_power_iteration(
    model: nn.Module, data: tuple[Tensor, Tensor], *, batch: int, steps: int, seed: int
) -> float:
    """Return the top eigenvalue of G by power iteration with another mini-batch at each step.

    Args:
        model: The classifier, in evaluation mode.
        data: Its images and labels.
        batch: Images of a mini-batch, at most all.
        steps: Number of steps; the last one's |G_batch v| is returned.
        seed: Seed of the start and the batches.

    Raises:
        ValueError: If ``batch`` or ``steps`` is not a positive integer, or ``batch`` too large.
    """
    stream = checks.random_stream(seed, "batches")
    x, labels = data
    if checks.positive_integer("batch", batch) > len(x):
        raise ValueError(f"batch is {batch}, but there are {len(x)} images; take at most as many")
    vector, length = None, 0.0
    for _ in range(checks.positive_integer("steps", steps)):
        rows = torch.randperm(len(x), generator=stream)[:batch]
        operator = LossCurvature(model, (x[rows], labels[rows])).gauss_newton
        if vector is None:
            vector = torch.randn(operator.size, generator=stream, dtype=torch.float64)
            vector = (vector / vector.norm()).to(operator.dtype)
        image = operator @ vector
        length = float(image.norm())
        vector = image / length
    return length


def _squared_singular_values(rows: Tensor) -> Tensor:
    return _eigenvalues(_gram(rows) if len(rows) < rows.shape[1] else _gram(rows.T))


def _gram(rows: Tensor, block: int = 1 << 13) -> Tensor:
    """Return rows @ rows.T, summed in float64 over blocks of columns."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in rows.split(block, dim=1):
        wide = columns.double()
        total += wide @ wide.T
    return total


def _eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0)
