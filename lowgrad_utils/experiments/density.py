"""Hessian and Gauss-Newton matrix compared: top spaces, whole spectra, gradients, the mini-bulk.

The networks are small (images of 8 or 16 pixels, 30 or 50 a class), so that the top eigenpairs of
H and G can be followed through many trainings, and all eigenvalues of an MLP be computed.
"""

import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowgrad_utils import checks, classifiers, datasets
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator
from lowgrad_utils.eigensolvers import orthonormal_columns, top_eigenpairs
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
    - ``training_H``, ``training_length``: of the gradient with batch norm by the statistics of the
      images themselves, as in training: its share in the top C space of H, its length over |g|.

    Args:
        model: The classifier, in evaluation mode.
        data: Its images and labels.
        batches: How many mini-batches, of ``BATCH`` images drawn without replacement.
        seed: Seed of the mini-batches and the random space.
    """
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
        **_in_training_mode(model, data, full, hessian.vectors),
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
    """Return the cells of the stored grid, cheapest first: MLPs, then convolutional networks."""
    sets = ["mnist", "fashion_mnist", "cifar10"]
    small = grid(
        dataset=sets, network=["mlp"], per_class=[50], weight_decay=[5e-4, 0.0], seed=range(6)
    )
    large = grid(
        seed=[0],
        dataset=sets,
        network=["vgg11", "resnet18"],
        per_class=[30],
        weight_decay=[5e-4],
    )
    return (*small, *large)


def _in_training_mode(
    model: nn.Module, data: tuple[Tensor, Tensor], gradient: Tensor, basis: Tensor
) -> dict[str, float]:
    x, labels = data
    copy = deepcopy(model).train()  # a copy, since batch norm updates its statistics
    loss = nn.functional.cross_entropy(copy(x), labels)
    flat = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(copy.parameters())))
    return {
        "training_H": float(share_inside(flat[None], basis)),
        "training_length": float(flat.norm() / gradient.norm()),
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
    """Return the cells of the stored grid: MLPs in every regime, then trained VGGs."""
    small = grid(
        seed=range(3), dataset=["mnist", "fashion_mnist"], network=["mlp"], regime=list(REGIMES)
    )
    large = grid(
        seed=[0],
        dataset=["mnist", "fashion_mnist", "cifar10"],
        network=["vgg11"],
        regime=["trained", "strong decay"],
    )
    return (*small, *large)


def gaussian_derivatives(
    classes: int, per_class: int, size: int, *, centre: float, group: float, noise: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return Gaussian logit derivatives of three levels, n x C x P, and labels.

    delta_{i,c,c'} = centre m_c + group m_{c,c'} + noise z_{i,c'} with independent standard Gaussian
    vectors divided by sqrt(P), so that the three numbers are lengths.

    Args:
        classes: C.
        per_class: Examples of each class.
        size: P.
        centre: Length of the class centres.
        group: Length of a group mean about its centre.
        noise: Length of an example about its group mean.
        seed: Seed.

    Example:
        >>> gaussian_derivatives(3, 5, 40, centre=1, group=1, noise=1, seed=0)[0].shape
        torch.Size([15, 3, 40])
    """
    stream = checks.random_stream(seed, "Gaussian derivatives")

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, size, generator=stream, dtype=torch.float64) / size**0.5

    labels = torch.arange(classes).repeat_interleave(per_class)
    means = centre * draw(classes, 1) + group * draw(classes, classes)
    return means[labels] + noise * draw(len(labels), classes), labels


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
