"""The law behind the spikes: gradients beside the law of their population matrix T."""

import math
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.datasets import load
from lowgrad_utils.experiments.initialisation import RESIDUES, paper_sizes
from lowgrad_utils.gradient_law import GradientLaw, gradient_law, mean_column
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import ACTIVATIONS, LOSSES, TwoLayerNetwork, normalise_rows
from lowgrad_utils.spiked_data import (
    SpikedData,
    binary_labels,
    sample_spiked_data,
    sample_targets,
    split_spike,
)
from lowgrad_utils.training import gradient_descent

#: (nu, alpha) of the grid over activations, and (scaling, residue): the network's own residue or
#: that of another network, which knows nothing of W.
POINTS = ((0.125, 0.0), (0.375, 0.0), (0.25, 0.5))
KINDS = (("ntk", "own"), ("ntk", "foreign"), ("mean-field", "own"))
#: Sizes and activations over which errors are fitted.
SIZES, FEW = (250, 400, 640, 1000), ("softplus", "relu", "tanh")
#: Epochs at which training is compared with laws.
EPOCHS = (0, 1, 3, 10, 20)
#: Epochs until training in mean field has nearly stopped.
LATE = (0, 20, 50, 100)
#: Forms of the kernel that are compared: all orders, and mean and slope only (two terms).
FORMS = {"full": None, "linear": 1}


@dataclass(frozen=True)
class LawCase:
    """One gradient with what its law needs.

    Attributes:
        data: Data with their spike.
        network: The network whose gradient is taken.
        residue: The residue.
        G: The gradient, d x m.
    """

    data: SpikedData
    network: TwoLayerNetwork
    residue: Tensor = field(repr=False)
    G: Tensor = field(repr=False)

    def law(self, order: int | None = None) -> GradientLaw:
        """Compute the law of this gradient, by orders of the kernel up to ``order``."""
        return gradient_law(self.data.X, self.network, self.residue, order=order)


def law_case(
    d: int,
    *,
    nu: float,
    alpha: float = 0.0,
    activation: str = "softplus",
    loss: str = "mse",
    scaling: str = "ntk",
    residue: str = "foreign",
    seed: int = 0,
) -> LawCase:
    """Draw data, a network with uniform rows and a residue, and take the gradient.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        loss: A key of ``LOSSES``; triple-index targets, made binary where it needs labels.
        scaling: ``"ntk"`` or ``"mean-field"``.
        residue: ``"own"`` (of the network), ``"foreign"`` (of another network on the same
            targets), ``"sign"`` (random signs), or a key of ``RESIDUES``.
        seed: One integer; all draws use separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> law_case(40, nu=0.25).G.shape
        torch.Size([40, 50])
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, alpha=alpha, seed=seed)
    y = sample_targets(data.X, seed=seed).y
    return _case(data, y, m, activation, loss, scaling, residue, seed)


def image_case(
    source: str,
    *,
    n: int = 450,
    m: int = 900,
    activation: str = "relu",
    loss: str = "mse",
    residue: str = "foreign",
    seed: int = 0,
) -> LawCase:
    """Draw examples of a shipped data set, their classes 0 ... 9 as targets, and the gradient.

    Args:
        source: ``"mnist"`` (pixels in 0-1, d = 784) or ``"cifar10-embeddings"`` (d = 1280).
        n: Number of examples.
        m: Number of neurons.
        activation: A key of ``ACTIVATIONS``.
        loss: A key of ``LOSSES``.
        residue: As in ``law_case``.
        seed: One integer; all draws use separate streams of it.

    Raises:
        ValueError: If a name is unknown or a number out of range.
    """
    checks.choice("source", source, ("mnist", "cifar10-embeddings"))
    X, classes = load(source).matrix(n=n, seed=seed)
    data = split_spike(X)
    return _case(data, classes.double(), m, activation, loss, "ntk", residue, seed)


def _case(data, y, m, activation, loss, scaling, residue, seed) -> LawCase:
    chosen = LOSSES[checks.choice("loss", loss, LOSSES)]
    checks.choice("residue", residue, ("own", "foreign", "sign", *RESIDUES))
    kind = {"activation": activation, "scaling": scaling}
    network = TwoLayerNetwork.random(data.d, m, **kind, seed=seed)
    if residue in ("own", "foreign"):
        # Another stream of the same seed would be the same network.
        other = TwoLayerNetwork.random(data.d, m, **kind, seed=seed + 10_000)
        outputs = (network if residue == "own" else other)(data.X)
        r = chosen.residue(outputs, binary_labels(y) if chosen.binary else y)
    elif residue == "sign":
        stream = checks.random_stream(seed, "residue")
        r = torch.randn(data.n, generator=stream, dtype=torch.float64).sign()
    else:
        r = RESIDUES[residue](data, network, loss, seed)
    return LawCase(data, network, r, closed_form_gradient(data.X, network, r))


def compare(law: GradientLaw, singular_values: Tensor) -> dict[str, float]:
    """Compare a law with the singular values of one gradient.

    Args:
        law: The law.
        singular_values: Singular values of G, descending.

    Returns:
        ``count``, the number K of outliers; ``s1``, ``s2``, log of measured over expected;
        ``top``, the same for the bulk's largest value, ``median`` for its median;
        ``distance``, the largest difference of the bulk's distribution functions.

    Raises:
        ValueError: If there are fewer than 4 values beyond the outliers.
    """
    checks.vector("singular_values", singular_values)
    K = law.covariance.count
    bulk = singular_values[K : K + min(len(law.covariance.bulk), law.m - K)]
    if len(bulk) < 4:
        raise ValueError(f"singular_values has {len(bulk)} in the bulk, but at least 4 are needed")
    expected = law.typical_values(max(2, K + 1))
    errors = torch.log(singular_values[: len(expected)] / expected)
    below = law.covariance.cumulative(bulk.square())
    ranks = (torch.arange(len(bulk), 0, -1, dtype=torch.float64) - 0.5) / len(bulk)
    return {
        "count": float(K),
        **{f"s{k + 1}": float(errors[k]) for k in range(2)},
        "top": float(errors[K]),
        "median": math.log(float(bulk.median()) / law.quantile(0.5)),
        "distance": float((below - ranks).abs().max()),
    }


def angle_errors(case: LawCase, law: GradientLaw, U: Tensor) -> dict[str, float]:
    """Compare squared cosines of the two leading left singular vectors with the law's.

    Args:
        case: The gradient's case.
        law: Its law.
        U: Left singular vectors, leading first.

    Returns:
        For k = 1, 2 and x among ``T`` (T's k-th eigenvector), ``q`` and ``residue`` (X_B^T r):
        ``u{k}_{x}`` and ``u{k}_{x}_expected``, which is 0 where the law has no k-th outlier.
    """
    values = {}
    for k in range(2):
        named = {"T": law.vectors[:, k], "q": case.data.q}
        named["residue"] = case.data.bulk_times(case.residue)
        for name, x in named.items():
            seen = float((U[:, k] @ x) / x.norm()) ** 2
            expected = float(law.squared_cosines(x)[k]) if k < len(law.outliers) else 0.0
            values |= {f"u{k + 1}_{name}": seen, f"u{k + 1}_{name}_expected": expected}
    return values


def measure_law(case: LawCase, forms: tuple[str, ...] = tuple(FORMS)) -> dict[str, float]:
    """Measure a gradient against the law of each form of the kernel.

    Args:
        case: The case.
        forms: Keys of ``FORMS``.

    Returns:
        What ``compare`` returns, prefixed by the form (``full_s1``, ``linear_top``, ...), and what
        ``angle_errors`` returns for the full form.
    """
    # Of the Gram matrix on the shorter side: three times as fast as the singular values.
    eigenvalues, U = torch.linalg.eigh(case.G @ case.G.T)
    s = eigenvalues.flip(0)[: min(case.G.shape)].clamp(min=0).sqrt()
    values = {}
    for form in forms:
        law = case.law(FORMS[form])
        values |= {f"{form}_{name}": value for name, value in compare(law, s).items()}
        if form == "full":
            values |= angle_errors(case, law, U.flip(1))
    return values


def law_cell(
    d: int,
    nu: float,
    alpha: float,
    activation: str,
    loss: str,
    scaling: str,
    residue: str,
    seed: int,
) -> dict[str, float]:
    """Measure one cell of the grids over sizes, activations, losses and residues.

    Arguments are those of ``law_case``, the result is that of ``measure_law``.
    """
    return measure_law(
        law_case(
            d,
            nu=nu,
            alpha=alpha,
            activation=activation,
            loss=loss,
            scaling=scaling,
            residue=residue,
            seed=seed,
        )
    )


def image_cell(source: str, activation: str, seed: int) -> dict[str, float]:
    """Measure one cell of the grid over real data, with the network's own residue."""
    return measure_law(image_case(source, activation=activation, residue="own", seed=seed))


def altered_errors(
    case: LawCase, *, W: Tensor | None = None, a: Tensor | None = None
) -> dict[str, float]:
    """Compare the gradient at other weights, with the residue kept, with the law of the case.

    Args:
        case: The case.
        W: Inner weights instead of the network's, rows of unit length.
        a: Outer weights instead of the network's.

    Returns:
        What ``compare`` returns.
    """
    network = case.network
    W, a = (network.W if W is None else W), (network.a if a is None else a)
    altered = TwoLayerNetwork(W, a, network.activation, network.scaling)
    G = closed_form_gradient(case.data.X, altered, case.residue)
    return compare(case.law(), torch.linalg.svdvals(G))


def paired_rows(network: TwoLayerNetwork) -> Tensor:
    """Return W with its first half of rows in the place of the second half, too."""
    half = (network.m + 1) // 2
    return torch.cat([network.W[:half]] * 2)[: network.m]


def own_cell(d: int, activation: str, seed: int) -> dict[str, float]:
    """Compare the gradients of two networks with the same residue, which one of them made.

    Args:
        d: Number of features; nu = 1/4, alpha = 0, squared loss, NTK scaling.
        activation: A key of ``ACTIVATIONS``.
        seed: Seed.

    Returns:
        ``slope`` of the measured mean column on ``mean_column``, both without their parts along
        the two leading eigenvectors of T, whose noise is larger; ``size`` and ``rest``, sqrt(m)
        times the length of ``mean_column`` over the edge, with these parts and without;
        ``shift_k`` for k = 1 ... 6, log of the k-th singular value with its own residue over that
        with the other network's, and ``expected_k``, the same by the laws of T + m b b^T and T.
    """
    case = law_case(d, nu=0.25, activation=activation, residue="own", seed=seed)
    X, r, m = case.data.X, case.residue, case.network.m
    other = TwoLayerNetwork.random(d, m, activation=activation, seed=seed + 10_000)
    law, b = case.law(), mean_column(X, case.network, r)
    leading = law.vectors[:, :2]
    rest = b - leading @ (leading.T @ b)
    own = torch.linalg.svdvals(case.G)[:6].log()
    foreign = torch.linalg.svdvals(closed_form_gradient(X, other, r))[:6].log()
    moved = GradientLaw(law.T + m * torch.outer(b, b), m).typical_values(6).log()
    expected = moved - law.typical_values(6).log()
    return {
        "slope": float((case.G.mean(dim=1) @ rest) / rest.square().sum()),
        "size": math.sqrt(m) * float(b.norm()) / law.edge,
        "rest": math.sqrt(m) * float(rest.norm()) / law.edge,
        **{f"shift_{k + 1}": float(own[k] - foreign[k]) for k in range(6)},
        **{f"expected_{k + 1}": float(expected[k]) for k in range(6)},
    }


def follow(fresh: TwoLayerNetwork, columns: Tensor, step: float) -> TwoLayerNetwork:
    """Let fresh rows take a network's step: w - step a X^T D_r sigma'(X w), normalised.

    Args:
        fresh: The fresh rows and their signs.
        columns: X^T D_r sigma'(X w) of each row, d x rows, with the network's residue r.
        step: eta / n for a step of eta / gamma, with gamma of the network, not of the fresh rows.

    Example:
        >>> fresh = TwoLayerNetwork.random(4, 3)
        >>> torch.equal(follow(fresh, torch.zeros(4, 3).double(), 0.1).W, normalise_rows(fresh.W))
        True
    """
    moved = normalise_rows(fresh.W - (columns * (step * fresh.a)).T)
    return TwoLayerNetwork(moved, fresh.a, fresh.activation, fresh.scaling)


def training_errors(
    activation: str,
    scaling: str,
    *,
    eta: float = 0.3,
    epochs: tuple[int, ...] = EPOCHS,
    d: int = 240,
    nu: float = 0.25,
    rows: int = 6000,
    seed: int = 0,
) -> dict[int, dict[str, dict[str, float]]]:
    """Compare gradients along training with two laws.

    Gradient descent with normalised rows on the squared loss, triple-index targets. ``"uniform"``
    is the law of uniform rows with the residue of the epoch. ``"moved"`` replaces Phi by the mean
    over fresh rows (w, a), which took the same steps with the network's residues and gamma: given
    those, each row moves by itself, so that the moved rows are independent again.

    Args:
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        eta: Step in units of 1/gamma.
        epochs: Epochs at which to compare.
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        rows: Number of fresh rows.
        seed: Seed.

    Returns:
        For each epoch what ``compare`` returns for ``"uniform"`` and ``"moved"``; under
        ``"state"`` the ``loss`` and ``moved``, the relative change of W; under ``"columns"`` their
        ``spread``, standard deviation over mean of |P g|^2 for the columns g of the fresh rows,
        where P takes away the directions of the outliers: small if quadratic forms concentrate.
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    X, y = data.X, sample_targets(data.X, seed=seed).y
    kind = {"activation": activation, "scaling": scaling}
    network = TwoLayerNetwork.random(d, m, **kind, seed=seed)
    fresh = TwoLayerNetwork.random(d, rows, **kind, seed=seed + 10_000)
    errors = {}
    for state in gradient_descent(X, y, network, eta=eta, normalisation="rows"):
        slopes = network.sigma.derivative(X @ fresh.W.T)
        columns = X.T @ (state.residue[:, None] * slopes)
        if state.epoch in epochs:
            s = torch.linalg.svdvals(state.gradient)
            fixed = (X, state.network, state.residue)
            distance = float((state.network.W - network.W).norm() / network.W.norm())
            law = gradient_law(*fixed, kernel=slopes @ slopes.T / rows)
            inside = (law.vectors[:, len(law.outliers) :].T @ columns).square().sum(dim=0)
            spread = float(inside.std() / inside.mean())
            errors[state.epoch] = {
                "uniform": compare(gradient_law(*fixed), s),
                "moved": compare(law, s),
                "state": {"loss": state.loss, "moved": distance},
                "columns": {"spread": spread},
            }
        if state.epoch == max(epochs):
            return errors
        fresh = follow(fresh, columns, eta / n)


def training_cell(activation: str, scaling: str, eta: float, seed: int) -> dict[str, float]:
    """Measure one cell of the grid over training.

    Arguments and meaning are those of ``training_errors``; names are ``moved_s1_10`` and so on.
    """
    errors = training_errors(activation, scaling, eta=eta, seed=seed)
    return _flat(errors, ("uniform", "moved", "state"))


def late_cell(activation: str, seed: int) -> dict[str, float]:
    """Measure one cell of the grid over the end of training in mean field, as ``training_cell``."""
    errors = training_errors(activation, "mean-field", epochs=LATE, seed=seed)
    return _flat(errors, ("moved", "state", "columns"))


def _flat(errors: dict[int, dict[str, dict[str, float]]], kinds: tuple[str, ...]) -> dict:
    return {
        f"{kind}_{name}_{epoch}": value
        for epoch, found in errors.items()
        for kind in kinds
        for name, value in found[kind].items()
    }


def own_cells() -> tuple[dict, ...]:
    """Build the grid of the network's own residue."""
    return tuple(
        {"d": 300, "activation": activation, "seed": seed}
        for seed, activation in product(range(30), ("softplus", "relu", "silu"))
    )


def training_cells() -> tuple[dict, ...]:
    """Build the grid over training: mean field, and NTK scaling with small steps."""
    return tuple(
        {"activation": activation, "scaling": scaling, "eta": eta, "seed": seed}
        for seed, activation, (scaling, eta) in product(
            range(5), FEW, (("mean-field", 0.3), ("ntk", 0.02))
        )
    )


def late_cells() -> tuple[dict, ...]:
    """Build the grid over the end of training."""
    return tuple({"activation": name, "seed": seed} for seed, name in product(range(3), FEW))


def cells() -> tuple[dict, ...]:
    """Build the grid over activations, losses, points and residues, at d = 300."""
    return tuple(
        {
            "d": 300,
            "nu": nu,
            "alpha": alpha,
            "activation": activation,
            "loss": loss,
            "scaling": scaling,
            "residue": residue,
            "seed": seed,
        }
        for seed, activation, loss, (nu, alpha), (scaling, residue) in product(
            range(2), ACTIVATIONS, LOSSES, POINTS, KINDS
        )
    )


def size_cell(d: int, nu: float, activation: str, seed: int) -> dict[str, float]:
    """Measure one cell of the grid over sizes: the full form, a residue of another network."""
    return measure_law(law_case(d, nu=nu, activation=activation, seed=seed), ("full",))


def size_cells() -> tuple[dict, ...]:
    """Build the grid over sizes: squared loss, NTK scaling, alpha = 0."""
    return tuple(
        {"d": d, "nu": nu, "activation": activation, "seed": seed}
        for seed, d, activation, nu in product(range(24), SIZES, FEW, (0.125, 0.375))
    )


def image_cells() -> tuple[dict, ...]:
    """Build the grid over MNIST and features of CIFAR-10."""
    return tuple(
        {"source": source, "activation": activation, "seed": seed}
        for seed, source, activation in product(
            range(3), ("mnist", "cifar10-embeddings"), ("relu", "silu", "softplus", "tanh")
        )
    )
