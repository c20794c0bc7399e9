"""Gradient spikes against Gauss-Newton outliers: one Jacobian under two weightings.

At initialisation, over training with a frozen kernel, and for C logits on Gaussian mixtures and
images.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowgrad_utils import checks, datasets
from lowgrad_utils.experiments.initialisation import (
    Scenario,
    paper_sizes,
    residue_by_name,
    scenario,
)
from lowgrad_utils.networks import (
    ACTIVATIONS,
    LOSSES,
    SCALINGS,
    TwoLayerNetwork,
    normalise_rows,
)
from lowgrad_utils.random_matrices import (
    marchenko_pastur_edges,
    spiked_singular_value,
    wishart_spike,
)
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, sample_targets
from lowgrad_utils.tangent_kernel import (
    LayerJacobian,
    scalar_jacobian,
    softmax_jacobian,
    softmax_residue,
)

#: Residues of the grid: the network's own, with a mean, without structure, made of the spike,
#: made of the bulk's first coordinate, and the network's own without what the two leading kernel
#: eigenvectors carry.
RESIDUES = ("network", "offset", "independent", "spike", "bulk", "orthogonal")
SIZES, SEEDS = (250, 500, 1000), tuple(range(8))
NUS = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)


def identity_errors(
    loss: str, activation: str, *, divided: bool = True, seed: int = 0
) -> dict[str, float]:
    """Compare modes and components of a small network with explicit matrices made by autograd.

    Ten examples, twelve features, eight neurons (and three logits for ``"softmax"``). For Huber's
    loss every other residue is on its straight part, where l'' = 0.

    Args:
        loss: A key of ``LOSSES``, or ``"softmax"``.
        activation: A key of ``ACTIVATIONS``.
        divided: Divide the residue by sqrt(l''), as the identity says, or not.
        seed: Seed.

    Returns:
        ``eigenvalues`` (largest difference over the largest eigenvalue), ``eigenvectors``
        (largest |G_GN U_k - lambda_k U_k| over it), ``components`` (largest difference of
        <G, U_k> over |G|) and ``outside`` (share of |G|^2 that is in no U_k).

    Raises:
        ValueError: If a name is unknown.
    """
    checks.choice("loss", loss, (*LOSSES, "softmax"))
    n, d, m = 10, 12, 8
    stream = checks.random_stream(seed, "identity")
    X = torch.randn(n, d, generator=stream, dtype=torch.float64)
    network = TwoLayerNetwork.random(d, m, activation=activation, seed=seed)
    if loss == "softmax":
        labels = torch.arange(n) % 3
        A = torch.randn(3, m, generator=stream, dtype=torch.float64)
        jacobian, p = softmax_jacobian(X, network.W, A, activation=activation)
        weights = softmax_residue(p, labels)
        outputs = lambda W: network.sigma.value(X @ W.T) @ A.T  # noqa: E731
        value = lambda z: torch.nn.functional.cross_entropy(z, labels, reduction="none")  # noqa: E731
    else:
        y = torch.randn(n, generator=stream, dtype=torch.float64)
        f = network(X)
        if LOSSES[loss].binary:
            y = y.sign()
        elif loss == "huber":
            y = f + y.sign() * (0.5 + 1.5 * (torch.arange(n) % 2))
        second, r = LOSSES[loss].curvature(f, y), LOSSES[loss].residue(f, y)
        jacobian = scalar_jacobian(X, network, second)
        # Where l'' = 0 the derivative is 0 too, and so is what it could carry of the gradient.
        weights = torch.where(second > 0, r / second.sqrt(), 0.0) if divided else r
        a = network.gamma * network.a
        outputs = lambda W: (network.sigma.value(X @ W.T) @ a)[:, None]  # noqa: E731
        value = lambda z: LOSSES[loss].value(z[:, 0], y)  # noqa: E731
    explicit, gradient = _explicit(outputs, value, network.W)
    modes = jacobian.modes
    rank = int((modes.values > 1e-10 * modes.values[0]).sum())
    U = torch.stack([modes.direction(k).T.flatten() for k in range(1, rank + 1)], 1)
    values, found = torch.linalg.eigvalsh(explicit).flip(0)[:rank], modes.components(weights)[:rank]
    scale, length = float(values[0]), float(gradient.norm())
    return {
        "eigenvalues": float((values - modes.values[:rank]).abs().max()) / scale,
        "eigenvectors": float((explicit @ U - U * modes.values[:rank]).norm(dim=0).max()) / scale,
        "components": float((U.T @ gradient - found).abs().max()) / length,
        "outside": abs(1 - float(found.square().sum()) / length**2),
    }


def _explicit(outputs: Callable, value: Callable, W: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gauss-Newton matrix and the gradient of the mean loss, by autograd alone."""
    J = torch.autograd.functional.jacobian(outputs, W).flatten(2)
    z = outputs(W)
    H = torch.autograd.functional.hessian(lambda z: value(z).mean(), z)
    gradient = torch.autograd.functional.jacobian(lambda V: value(outputs(V)).mean(), W)
    return torch.einsum("icp,icjd,jdq->pq", J, H, J), gradient.flatten()


@dataclass(frozen=True)
class Prediction:
    """What a few numbers say about the Gauss-Newton matrix of a two-layer network, alpha = 0.

    Attributes:
        first: Largest eigenvalue, that of the data spike q (a o mu)^T.
        second: Eigenvalue of q (a o c o W q)^T, or the bulk's edge if it does not leave the bulk.
        edge: Upper edge of the bulk.
        mean: Mean of the bulk's eigenvalues.
        v1_z: Squared cosine of the kernel's first eigenvector with z.
        v2_z2: Squared cosine of the second with its direction, about z^2; 0 in the bulk.
        u1: Squared cosine of the first Gauss-Newton eigenvector with q (a o mu)^T.
    """

    first: float
    second: float
    edge: float
    mean: float
    v1_z: float
    v2_z2: float
    u1: float
    _direction: Tensor = field(repr=False)
    _z: Tensor = field(repr=False)
    _sizes: tuple[float, float] = field(repr=False)

    def share(self, residue: Tensor) -> float:
        """Predict the share of the gradient in the two leading Gauss-Newton directions.

        Eigenvalue times squared cosine with r over both outliers, divided by r . K r / |r|^2;
        what an outlier's vector has beside its own direction counts as spread over the rest.

        Args:
            residue: r, length n.
        """
        unit = residue / residue.norm()
        along = [float(unit @ vector) ** 2 for vector in (self._z, self._direction)]
        generic = max(0.0, 1 - sum(along)) / len(residue)
        total = self.mean + sum(size * a for size, a in zip(self._sizes, along))
        outliers = zip((self.first, self.second), (self.v1_z, self.v2_z2), along)
        top = sum(v * (kept * a + (1 - kept) * generic) for v, kept, a in outliers)
        # z and z^2 are orthogonal only up to n^(-1/2).
        return min(1.0, top / total)


def predict(data: SpikedData, network: TwoLayerNetwork) -> Prediction:
    """Predict outliers of the Gauss-Newton matrix (squared loss) and the kernel's eigenvectors.

    The kernel (gamma^2/n) (X X^T) o (sigma' sigma'^T) is gamma^2 m / n times
    D_mu X X^T D_mu + D_c (1 1^T + (zeta^4/d) z^2 (z^2)^T) D_c + d (E sigma'^2 - mu^2) I
    up to lower order, where mu, c and E sigma'^2 of example i are Gaussian means at the scale
    s_i^2 = 1 + zeta^2 z_i^2 / d that x_i gives to a random neuron: a Marchenko-Pastur bulk,
    shifted, with one spike from the data and one from their squares.

    Args:
        data: Data with an isotropic bulk (alpha = 0).
        network: The network; uniform rows are assumed, and only sizes and sigma are used.

    Raises:
        ValueError: If the bulk is not isotropic.

    Source: derived; laws of Benaych-Georges and Nadakuditi (2011, 2012).
    """
    if data.eigenvalues is None or not bool((data.eigenvalues == 1).all()):
        raise ValueError("the bulk is not isotropic; the closed forms are for alpha = 0")
    n, d, ratio, sigma = data.n, data.d, data.n / data.d, network.sigma
    unit = network.gamma**2 * network.m / n
    s = (1 + (data.zeta * data.z).square() / d).sqrt()
    mu, c = sigma.mu(s), sigma.c(s)
    squares = torch.stack([c, c * (data.zeta * data.z).square() / d**0.5], 1)
    U, roots, _ = torch.linalg.svd(squares, full_matrices=False)
    flat = float((d * s.square() * (network.sigma.mean_square_slope(s) - mu.square())).mean())
    shift = unit * flat - unit * float(roots.square().sum()) / n
    level = float(mu.square().mean()) ** 0.5
    spike = data.zeta * mu * data.z
    seen = spiked_singular_value(float(spike.norm()) / (level * d**0.5), ratio)
    linear = unit * d * (level * seen.value) ** 2
    variance, theta = unit * d * level**2, unit * float(roots[0]) ** 2
    second, kept = variance * marchenko_pastur_edges(ratio)[1] ** 2, 0.0
    edge = second
    if theta > variance * (ratio + ratio**0.5):
        second = wishart_spike(theta, ratio, variance=variance)
        kept = 1 - ratio * variance**2 / (theta - ratio * variance) ** 2
    return Prediction(
        first=shift + linear,
        second=shift + second,
        edge=shift + edge,
        mean=shift + variance,
        v1_z=seen.left,
        v2_z2=kept,
        u1=seen.right * linear / (shift + linear),
        _direction=U[:, 0],
        _z=spike / spike.norm(),
        _sizes=(unit * float(spike.square().sum()), theta),
    )


def orthogonal_residue(jacobian: LayerJacobian, residue: Tensor, k: int) -> Tensor:
    """Return the residue without its part along the kernel's k leading eigenvectors.

    Args:
        jacobian: The Jacobian.
        residue: r, length N.
        k: How many eigenvectors to take away.
    """
    leading = jacobian.modes.weights[:, : checks.positive_integer("k", k)]
    return residue - leading @ (leading.T @ residue)


def bridge_cell(
    d: int, nu: float, alpha: float, activation: str, weights: str, seed: int
) -> dict[str, float]:
    """Measure one network's Gauss-Newton matrix (squared loss, NTK scaling) and its gradients.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        alpha: Decay exponent of the bulk.
        activation: A key of ``ACTIVATIONS``.
        weights: ``"uniform"`` or ``"spike"``, as in ``scenario``.
        seed: Seed.

    Returns:
        ``l1`` to ``l3`` (eigenvalues) and ``mean`` (of those after the second); ``v1_z``,
        ``v2_z2`` (squared cosines of the kernel's first eigenvector with z, of its second with
        z^2); ``u1``, ``u2`` (squared cosines of the first Gauss-Newton eigenvector with
        q (a o mu)^T, of the second with q (a o c o W q)^T); ``in_S12``, ``in_S2``, ``in_H``
        (shares of the gradient's pieces in the two leading directions for the offset residue, H
        the third spike); ``S1_all``, ``S1_top``, ``S1_level`` (share of S1 in all directions, in
        the leading tenth, and its Rayleigh quotient, for the independent residue) with
        ``predicted_S1_all`` and ``predicted_S1_top``; ``predicted_`` before another name for what
        ``predict`` says (alpha = 0); for each residue ``share_`` (of |G|_F^2 in the two leading
        directions), ``predicted_share_`` (but for the orthogonal one), ``in_S1_`` (share of S1
        in them) and ``S1_`` (|S1|_F^2 / |G|_F^2).
    """
    case = scenario(
        d, nu=nu, alpha=alpha, activation=activation, weights=weights, residue="offset", seed=seed
    )
    data, network = case.data, case.network
    jacobian = scalar_jacobian(data.X, network)
    modes, values = jacobian.modes, jacobian.modes.values
    shared, curved = spike_directions(data, network)
    out = {f"l{k + 1}": float(values[k]) for k in range(3)} | {"mean": float(values[2:].mean())}
    out |= {
        "v1_z": squared_cosine(modes.weights[:, 0], data.z),
        "v2_z2": squared_cosine(modes.weights[:, 1], data.z.square()),
        "u1": float(modes.overlaps(data.q, shared)[0].square()),
        # Even sigma' has c = 0, hence no such direction.
        "u2": float(modes.overlaps(data.q, curved)[1].square()) if curved.any() else 0.0,
    }
    for name, (u, v) in gradient_pieces(case, curved).items():
        inside = modes.overlaps(u, v).square() if v.any() else torch.zeros(data.n)
        out[f"in_{name}"] = float(inside[:2].sum())
    found = predict(data, network) if alpha == 0 else None
    for name in ("first", "second", "edge", "mean", "v1_z", "v2_z2", "u1"):
        out[f"predicted_{name}"] = getattr(found, name) if found else math.nan
    for name in RESIDUES:
        r = residue_of(name, data, network, jacobian, seed)
        inside = modes.overlaps(data.bulk_times(r), shared).square()
        out[f"share_{name}"] = float(modes.shares(r)[1])
        if name != "orthogonal":
            out[f"predicted_share_{name}"] = found.share(r) if found else math.nan
        out[f"in_S1_{name}"] = float(inside[:2].sum())
        out[f"S1_{name}"] = residue_spike_share(data, network, jacobian, r)
        if name == "independent":
            out |= {"S1_all": float(inside.sum()), "S1_top": float(inside[: data.n // 10].sum())}
            out["S1_level"] = float(inside @ values)
    spread = residue_spike_spread(data, network)
    out |= {
        "predicted_S1_all": float(spread.sum()),
        "predicted_S1_top": float(spread[: data.n // 10].sum()),
    }
    # Seven decimals keep the stored table small.
    return {name: round(value, 7) for name, value in out.items()}


def residue_spike_spread(data: SpikedData, network: TwoLayerNetwork) -> Tensor:
    """Predict how the residue spike of a generic residue spreads over the Gauss-Newton modes.

    s_k^2 / sum s^2 (how much of X^T r is along the k-th singular direction of X) times
    mu^2 s_k^2 / (mu^2 s_k^2 + tau^2 |x|^2) (how much of U_k is linear), falling in k.

    Args:
        data: The data.
        network: The network, of which sizes and sigma are used.

    Returns:
        The predicted squared cosines, length n.
    """
    squares = torch.linalg.eigvalsh(data.X_B @ data.X_B.T).flip(0).clamp_min(0)
    size = data.X.square().sum(1).mean()
    scale = (size / data.d).sqrt()[None]
    mu = network.sigma.mu(scale)
    noise = size * (network.sigma.mean_square_slope(scale) - mu.square())
    linear = mu.square() * squares
    return squares / squares.sum() * linear / (linear + noise)


def residue_of(
    name: str, data: SpikedData, network: TwoLayerNetwork, jacobian: LayerJacobian, seed: int
) -> Tensor:
    """Return a residue by its name in ``RESIDUES``, length n."""
    checks.choice("name", name, RESIDUES)
    if name == "spike":
        return data.z
    if name == "bulk":
        return data.X_B[:, 0]
    if name == "orthogonal":
        own = residue_by_name(data, network, "network", seed=seed)
        return orthogonal_residue(jacobian, own, 2)
    return residue_by_name(data, network, name, seed=seed)


def residue_spike_share(
    data: SpikedData, network: TwoLayerNetwork, jacobian: LayerJacobian, residue: Tensor
) -> float:
    """Compute |S1|_F^2 / |G|_F^2, the share of the residue spike in the gradient's own norm."""
    spike = network.gamma * data.bulk_times(residue).norm() * network.mu(data).norm() / data.n
    return float(spike.square() / (residue @ (jacobian.kernel @ residue) / data.n))


def spike_directions(data: SpikedData, network: TwoLayerNetwork) -> tuple[Tensor, Tensor]:
    """Return the right vectors a o mu and a o c o W q of the two data-spike directions."""
    c = network.sigma.c(data.preactivation_scale(network.W))
    return network.a * network.mu(data), network.a * c * (network.W @ data.q)


def gradient_pieces(case: Scenario, curved: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the left and right vectors of S12, S2 and of the third spike H."""
    parts, data = case.parts, case.data
    return {
        "S12": (parts.S12.u, parts.S12.v),
        "S2": (parts.S2.u, parts.S2.v),
        "H": (data.bulk_times(case.residue * data.z), curved),
    }


def squared_cosine(u: Tensor, v: Tensor) -> float:
    """Compute (u . v)^2 / (|u|^2 |v|^2)."""
    return float((u @ v).square() / (u.square().sum() * v.square().sum()))


def bridge_cells() -> tuple[dict[str, Any], ...]:
    """Cells of the stored grid: sizes and seeds over nu, activations, decay and weights."""
    series = [
        *product(NUS, [0.0], ("relu", "softplus", "tanh"), ["uniform"]),
        *product((0.125, 0.375), [0.5], ("relu", "softplus", "tanh"), ["uniform"]),
        # W independent of X, but every neuron looks along the spike.
        *product((0.125, 0.375), [0.0], ("relu", "tanh"), ["spike"]),
    ]
    names = ("nu", "alpha", "activation", "weights")
    return tuple(
        {"d": d, **dict(zip(names, row)), "seed": seed}
        for seed, d, row in product(SEEDS, SIZES, series)
    )


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Where gradient descent on W stands after some steps.

    Attributes:
        epoch: Number of steps taken.
        jacobian: Derivatives at the current weights.
        residue: Weights of the derivatives in the gradient, length N.
        accuracy: Share of examples classified right; NaN for a scalar output.
    """

    epoch: int
    jacobian: LayerJacobian = field(repr=False)
    residue: Tensor = field(repr=False)
    accuracy: float = math.nan


def regression_steps(
    X: Tensor, y: Tensor, network: TwoLayerNetwork, *, step: float, drop: int | None = None
) -> Iterator[Step]:
    """Yield gradient descent on W for the squared loss, without normalising its rows.

    Args:
        X: Data, n x d.
        y: Targets, length n.
        network: The network at initialisation; it is not changed.
        step: eta times the largest Gauss-Newton eigenvalue at initialisation. With the kernel
            frozen the residue's part along v_k is multiplied by 1 - eta lambda_k in each step.
        drop: From this epoch on steps are a tenth as long; never if None.

    Raises:
        ValueError: If shapes do not fit or ``step`` is not positive.
    """
    checks.vector("y", y, length=len(checks.matrix("X", X, columns=network.W.shape[1])))
    step, a, sigma = checks.positive("step", step), network.gamma * network.a, network.sigma
    W, largest = network.W.clone(), None
    for epoch in count():
        h = X @ W.T
        jacobian = LayerJacobian(X, a * sigma.derivative(h), len(X))
        residue = sigma.value(h) @ a - y
        yield Step(epoch, jacobian, residue)
        largest = largest or float(jacobian.modes.values[0])
        eta = (step / 10 if drop is not None and epoch >= drop else step) / largest
        W = W - eta * jacobian.combination(residue / len(X)).T


def frozen_residue(start: Step, step: float, epoch: int, drop: int | None = None) -> Tensor:
    """Return the residue after some steps if the kernel stays as it is at the start.

    Args:
        start: The step at epoch 0.
        step: As in ``regression_steps``.
        epoch: Number of steps.
        drop: As in ``regression_steps``.
    """
    modes = start.jacobian.modes
    long = epoch if drop is None else min(epoch, drop)
    scaled = step * modes.values / modes.values[0]
    factors = (1 - scaled) ** long * (1 - scaled / 10) ** (epoch - long)
    return modes.weights @ (factors * (modes.weights.T @ start.residue))


def training_cell(
    d: int, nu: float, activation: str, scaling: str, step: float, drop: int, seed: int
) -> dict[str, float]:
    """Follow the share of the gradient in the two leading directions over training.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        activation: A key of ``ACTIVATIONS``.
        scaling: ``"ntk"``, or ``"mean-field"``, where the targets make features move.
        step: As in ``regression_steps``.
        drop: Epoch from which steps are a tenth as long; 0 for never.
        seed: Seed.

    Returns:
        ``share_t`` (at the current weights), ``frozen_t`` (kernel and residue as if the kernel
        never moved), ``loss_t`` (over the first) and ``spike_t`` (share of the current leading
        direction in the two data-spike directions at the start), t in ``EPOCHS``.
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    y = sample_targets(data.X, seed=seed).y
    left, right = data.q.expand(2, d), torch.stack(spike_directions(data, network))
    out, start, drop = {}, None, drop or None
    for state in regression_steps(data.X, y, network, step=step, drop=drop):
        start = start or state
        if state.epoch in EPOCHS:
            modes, frozen = state.jacobian.modes, frozen_residue(start, step, state.epoch, drop)
            out |= {
                f"share_{state.epoch}": float(modes.shares(state.residue)[1]),
                f"frozen_{state.epoch}": float(start.jacobian.modes.shares(frozen)[1]),
                f"loss_{state.epoch}": float(state.residue.norm() / start.residue.norm()) ** 2,
                f"spike_{state.epoch}": float(modes.inside(left, right)[0]),
            }
        if state.epoch == EPOCHS[-1]:
            return out
    raise AssertionError("regression_steps ended")


#: Epochs at which ``training_cell`` looks.
EPOCHS = (0, 1, 2, 4, 8, 16, 32, 64)


def training_cells() -> tuple[dict[str, Any], ...]:
    """Cells of the stored grid of trainings."""
    small, large, dropped = (0.5, 0), (1.9, 0), (1.9, 32)
    series = [
        *product((0.125, 0.375), ("relu", "tanh"), ("ntk",), (small, large, dropped)),
        *product((0.375,), ("relu", "tanh"), ("mean-field",), (small,)),
    ]
    return tuple(
        dict(d=320, nu=nu, activation=name, scaling=scaling, step=step, drop=drop, seed=seed)
        for seed, (nu, name, scaling, (step, drop)) in product(range(8), series)
    )


# --- C logits -----------------------------------------------------------------------------------


def gaussian_mixture(
    n: int, d: int, classes: int, zeta: float, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw n examples zeta q_c + N(0, I) with orthonormal q_c, c = 0, 1, ... in turn.

    Args:
        n: Number of examples.
        d: Number of features, at least the number of classes.
        classes: Number of components, C.
        zeta: Length of the class means, positive.
        seed: Seed.

    Returns:
        X (n x d) and the component of each example.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> gaussian_mixture(6, 10, 3, 2.0)[1]
        tensor([0, 1, 2, 0, 1, 2])
    """
    n, d = checks.positive_integer("n", n), checks.positive_integer("d", d)
    classes, zeta = checks.positive_integer("classes", classes), checks.positive("zeta", zeta)
    if classes > min(n, d):
        raise ValueError(f"classes is {classes}, but at most {min(n, d)} fit n = {n} and d = {d}")
    stream = checks.random_stream(seed, "mixture")
    axes = torch.linalg.qr(torch.randn(d, classes, generator=stream, dtype=torch.float64)).Q.T
    component = torch.arange(n) % classes
    noise = torch.randn(n, d, generator=stream, dtype=torch.float64)
    return zeta * axes[component] + noise, component


def chosen_labels(X: Tensor, groups: Tensor, kind: str, *, seed: int = 0) -> Tensor:
    """Return labels by kind: the groups themselves, shuffled, or from a random linear teacher.

    Args:
        X: Data, n x d.
        groups: The group of each example, 0 ... C - 1.
        kind: ``"groups"``, ``"shuffled"`` or ``"teacher"`` (argmax of C random projections of
            the data without their group means, so that labels know nothing of the groups).
        seed: Seed.

    Raises:
        ValueError: If the kind is unknown.
    """
    checks.choice("kind", kind, ("groups", "shuffled", "teacher"))
    stream = checks.random_stream(seed, "labels")
    if kind == "groups":
        return groups
    if kind == "shuffled":
        return groups[torch.randperm(len(groups), generator=stream)]
    classes = int(groups.max()) + 1
    rest = X - group_means(X, groups)[groups]
    axes = torch.randn(classes, X.shape[1], generator=stream, dtype=torch.float64)
    return (rest @ axes.to(X).T).argmax(1)


def group_means(X: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of the rows of each group, C x d."""
    member = torch.nn.functional.one_hot(groups).to(X)
    return (member.T @ X) / member.sum(0)[:, None]


def random_classifier(
    d: int, m: int, classes: int, *, scaling: str = "mean-field", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw W (m x d, unit rows) and A (C x m, signs times gamma) of z = A sigma(W x).

    Args:
        d: Number of features.
        m: Number of neurons.
        classes: Number of logits, C.
        scaling: ``"mean-field"``, with logits near zero, or ``"ntk"``, with logits of order one.
        seed: Seed.

    Raises:
        ValueError: If a size is less than 1 or the scaling is unknown.
    """
    sizes = (checks.positive_integer(k, v) for k, v in (("d", d), ("m", m), ("classes", classes)))
    d, m, classes = sizes
    gamma = SCALINGS[checks.choice("scaling", scaling, SCALINGS)](m)
    stream = checks.random_stream(seed, "classifier")
    W = normalise_rows(torch.randn(m, d, generator=stream, dtype=torch.float64))
    signs = torch.randint(0, 2, (classes, m), generator=stream)
    return W, gamma * (2.0 * signs.double() - 1)


def classifier_steps(
    X: Tensor, labels: Tensor, W: Tensor, A: Tensor, *, activation: str, eta: float = 1.0
) -> Iterator[Step]:
    """Yield gradient descent on W for the softmax cross-entropy of z = A sigma(W x).

    Args:
        X: Data, n x d.
        labels: Classes.
        W: Inner weights at the start, m x d; not changed.
        A: Outer weights, C x m, fixed.
        activation: A key of ``ACTIVATIONS``.
        eta: Step in units of C / |A|_F^2, which is 1 for NTK scaling and m for mean field.

    Raises:
        ValueError: If shapes do not fit or ``eta`` is not positive.
    """
    eta = checks.positive("eta", eta) * len(A) / float(A.square().sum())
    for epoch in count():
        jacobian, p = softmax_jacobian(X, W, A, activation=activation)
        residue = softmax_residue(p, labels)
        accuracy = float((p.argmax(1) == labels).double().mean())
        yield Step(epoch, jacobian, residue, accuracy)
        W = W - eta * jacobian.combination(residue / len(X)).T


def spike_terms(jacobian: LayerJacobian, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the data spikes m_g (mean of b over the group)^T of all groups and logits.

    m_g is the mean of the group's examples. For equal probabilities the right vector is
    gamma (a_k - mean a) o mu_g / sqrt(C), with mu_g the mean of sigma'(W x) over the group.

    Args:
        jacobian: Logit derivatives, nC of them.
        groups: The group of each example, length n.

    Returns:
        Left (S x d) and right vectors (S x m), S = groups times logits.

    Raises:
        ValueError: If there is not a group for each example.

    Example:
        >>> X, groups = gaussian_mixture(6, 10, 3, 2.0)
        >>> W, A = random_classifier(10, 8, 3)
        >>> left, right = spike_terms(softmax_jacobian(X, W, A)[0], groups)
        >>> left.shape, right.shape
        (torch.Size([9, 10]), torch.Size([9, 8]))
    """
    n = jacobian.n
    if groups.shape != (n,):
        raise ValueError(f"groups has shape {tuple(groups.shape)}, but one for each of {n} needed")
    classes = len(jacobian.X) // n
    means = group_means(jacobian.X[::classes], groups)
    right = group_means(jacobian.B.view(n, -1), groups)
    return means.repeat_interleave(classes, 0), right.view(len(means) * classes, -1)


def centre_weights(labels: Tensor, classes: int) -> Tensor:
    """Return w_c with delta_c = sum_i w_ci J_i, C x nC: 1/(n_c (C-1)) on c' != c of class c."""
    member = torch.nn.functional.one_hot(labels, classes).double()
    share = member / member.sum(0)
    off = (1 - torch.eye(classes, dtype=torch.float64)) / (classes - 1)
    return (share.T[:, :, None] * off[:, None]).flatten(1)


def centre_identity(
    X: Tensor, labels: Tensor, W: Tensor, A: Tensor, activation: str = "relu"
) -> tuple[float, float]:
    """Measure how far a gradient is from (C-1) sqrt(C) sum_c pi_c delta_c, its value at p = 1/C.

    Args:
        X: Data, n x d.
        labels: Classes, from 0 to C - 1.
        W: Inner weights, m x d.
        A: Outer weights, C x m.
        activation: A key of ``ACTIVATIONS``.

    Returns:
        The difference over the gradient's norm, and the share of its square outside the span of
        the class centres.
    """
    jacobian, p = softmax_jacobian(X, W, A, activation=activation)
    C, weights = len(A), centre_weights(labels, len(A))
    shares = torch.bincount(labels, minlength=C).double() / len(labels)
    residue = softmax_residue(p, labels)
    gradient = jacobian.combination(residue / len(labels))
    centres = jacobian.combination((C - 1) * C**0.5 * (shares @ weights))
    outside = 1 - jacobian.share_in_combinations(residue, weights)
    return float((gradient - centres).norm() / gradient.norm()), abs(outside)


def sum_of_centres(step: Step, labels: Tensor) -> float:
    """Return the squared cosine between the gradient and sum_c pi_c delta_c.

    Args:
        step: The state of a classifier.
        labels: Classes, from 0 to C - 1.
    """
    classes = len(step.residue) // len(labels)
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    weights = shares @ centre_weights(labels, classes)
    return step.jacobian.share_in_combinations(step.residue, weights[None])


def look(step: Step, labels: Tensor, groups: Tensor) -> dict[str, float]:
    """Measure where the gradient and the class centres are in the Gauss-Newton spectrum.

    Args:
        step: The state.
        labels: Classes, from 0 to C - 1.
        groups: The group of each example, whose means are the data spikes.

    Returns:
        With K = C (C - 1): ``share_less``, ``share_C``, ``share_K`` (of the gradient in the
        leading C - 1, C, K directions); ``leading`` (which direction carries most of it);
        ``spikes_C``, ``spikes_K``, ``beyond`` (mean share of the leading C, K directions and of
        the K directions after them in the span of the data spikes); ``centres_C`` (mean share of
        the leading C in the span of the class centres); ``centres_in_spikes`` (mean share of a
        class centre in the data spikes' span); ``gradient_in_centres``; ``gap``
        (lambda_K / lambda_(K+1)); ``accuracy``.
    """
    modes, classes = step.jacobian.modes, len(step.residue) // len(labels)
    K, spikes = classes * (classes - 1), spike_terms(step.jacobian, groups)
    shares, parts = modes.shares(step.residue), modes.components(step.residue).square()
    inside, weights = modes.inside(*spikes), centre_weights(labels, classes)
    in_centres = modes.inside_combinations(weights)
    gradient = step.jacobian.share_in_combinations(step.residue, weights)
    centres = [step.jacobian.share_in_terms(w, *spikes) for w in weights]
    return {
        "share_less": float(shares[classes - 2]),
        "share_C": float(shares[classes - 1]),
        "share_K": float(shares[K - 1]),
        "leading": int(parts.argmax()) + 1,
        "spikes_C": float(inside[:classes].mean()),
        "spikes_K": float(inside[:K].mean()),
        "beyond": float(inside[K : 2 * K].mean()),
        "centres_C": float(in_centres[:classes].mean()),
        "centres_in_spikes": sum(centres) / len(centres),
        "gradient_in_centres": gradient,
        "gap": float(modes.values[K - 1] / modes.values[K]),
        "accuracy": step.accuracy,
    }


class MixturePrediction(NamedTuple):
    """What sizes and strength say about a two-layer classifier on a Gaussian mixture.

    Attributes:
        share: Of the gradient in the leading C (C - 1) Gauss-Newton directions.
        spikes: Mean share of these directions in the span of the data spikes.
    """

    share: float
    spikes: float


def predict_mixture(
    d: int, zeta: float, activation: str, labels: Tensor, groups: Tensor
) -> MixturePrediction:
    """Predict for logits near zero and uniform W, from sizes, zeta and how labels meet groups.

    With p = 1/C the Gauss-Newton matrix is C - 1 copies of that of a scalar output, whose kernel
    has one spike for each group, and the residue of logit c is 1/C minus the class's indicator.

    Args:
        d: Number of features, more than examples.
        zeta: Length of the group means.
        activation: A key of ``ACTIVATIONS``.
        labels: Classes.
        groups: Groups, of about equal sizes.

    Raises:
        ValueError: If there are more examples than features.

    Source: derived; law of Benaych-Georges and Nadakuditi (2012).
    """
    n, classes = len(labels), int(groups.max()) + 1
    scale = torch.tensor([(1 + zeta**2 / d) ** 0.5], dtype=torch.float64)
    sigma = ACTIVATIONS[activation]
    mu, c = float(sigma.mu(scale)), float(sigma.c(scale))
    power = float(sigma.mean_square_slope(scale))
    strength = (zeta**2 + (c / mu) ** 2 * zeta**4 / d) * n / (classes * d)
    seen = spiked_singular_value(strength**0.5, n / d)
    shift = d * float(scale) ** 2 * (power - mu**2)
    linear = d * (mu * seen.value) ** 2
    residue = 1 / classes - torch.nn.functional.one_hot(labels, classes).double()
    known = group_means(residue, groups)[groups]
    met = float(known.square().sum() / residue.square().sum())
    # What of the leading directions is not the groups' is spread over all others.
    top = (linear + shift) * (seen.left * met + (1 - seen.left) * (1 - met) * classes / n)
    total = mu**2 * d * (1 + strength * met) + shift
    along = linear / (linear + shift) * seen.value**2 * seen.left / (1 + strength)
    return MixturePrediction(min(1.0, top / total), along)


def classes_cell(
    d: int, zeta: float, activation: str, kind: str, scaling: str, epochs: int, seed: int
) -> dict[str, float]:
    """Measure a two-layer classifier on a Gaussian mixture of ``CLASSES`` groups.

    Args:
        d: Number of features; n = 0.8 d and m = 1.2 d.
        zeta: Length of the group means.
        activation: A key of ``ACTIVATIONS``.
        kind: Labels, as in ``chosen_labels``.
        scaling: As in ``random_classifier``.
        epochs: Steps of gradient descent (``STEP``) before looking.
        seed: Seed.

    Returns:
        What ``look`` returns, ``predicted_share`` and ``predicted_spikes``.
    """
    n, m = round(0.8 * d), round(1.2 * d)
    X, groups = gaussian_mixture(n, d, CLASSES, zeta, seed=seed)
    labels = chosen_labels(X, groups, kind, seed=seed)
    W, A = random_classifier(d, m, CLASSES, scaling=scaling, seed=seed)
    state = _state(classifier_steps(X, labels, W, A, activation=activation, eta=STEP), epochs)
    found = predict_mixture(d, zeta, activation, labels, groups)
    predicted = {f"predicted_{name}": value for name, value in found._asdict().items()}
    return look(state, labels, groups) | predicted


#: Groups, and logits, of the mixtures; the step of gradient descent in ``classifier_steps``.
CLASSES, STEP = 4, 0.2


def images_cell(
    dataset: str, centred: bool, kind: str, activation: str, epochs: int, seed: int
) -> dict[str, float]:
    """Measure a two-layer classifier (width 256, logits near zero) on 150 images of ten classes.

    Args:
        dataset: ``"mnist"``, ``"fashion_mnist"`` or ``"cifar10"``.
        centred: Subtract the mean image.
        kind: Labels: ``"groups"`` (the true ones) or ``"shuffled"``.
        activation: A key of ``ACTIVATIONS``.
        epochs: Steps of gradient descent before looking.
        seed: Seed; also chooses the images, 15 of each class.

    Returns:
        What ``look`` returns, the groups being the true classes, and ``mean_image``: mean share of
        the leading C - 1 directions in the span of mean image and logits.
    """
    X, groups = datasets.load(dataset).matrix(per_class=15, seed=seed)
    X, groups = X.double(), groups.long()
    if centred:
        X = X - X.mean(0)
    # Of the length that Gaussian data would have, so that one step suits all.
    X = X * (X.shape[1] / X.square().sum(1).mean()).sqrt()
    labels = chosen_labels(X, groups, kind, seed=seed)
    W, A = random_classifier(X.shape[1], 256, 10, seed=seed)
    state = _state(classifier_steps(X, labels, W, A, activation=activation, eta=STEP), epochs)
    one = spike_terms(state.jacobian, torch.zeros_like(groups))
    image = math.nan if centred else float(state.jacobian.modes.inside(*one)[:9].mean())
    return look(state, labels, groups) | {"mean_image": image}


def _state(steps: Iterator[Step], epochs: int) -> Step:
    return next(state for state in steps if state.epoch == epochs)


def classes_cells() -> tuple[dict[str, Any], ...]:
    """Cells of the stored grid of mixtures: at the start over zeta and labels, and over epochs."""
    start = product((1.0, 2.0, 3.0, 6.0, 12.0), ("relu", "tanh"), ("groups", "shuffled", "teacher"))
    series = [(zeta, name, kind, "mean-field", 0) for zeta, name, kind in start]
    series += [(6.0, name, "groups", "ntk", 0) for name in ("relu", "tanh")]
    later = product(("relu", "tanh"), ("groups", "shuffled"), (1, 2, 4, 8, 16, 32))
    series += [(6.0, name, kind, "mean-field", epochs) for name, kind, epochs in later]
    names = ("zeta", "activation", "kind", "scaling", "epochs")
    return tuple(
        {"d": 200, **dict(zip(names, row)), "seed": seed} for seed, row in product(range(8), series)
    )


def images_cells() -> tuple[dict[str, Any], ...]:
    """Cells of the stored grid of images."""
    series = product(("mnist", "fashion_mnist", "cifar10"), (False, True), ("groups", "shuffled"))
    names = ("dataset", "centred", "kind", "activation", "epochs")
    rows = [dict(zip(names, (*row, "relu", 0))) for row in series]
    rows += [dict(zip(names, (name, True, "groups", "relu", 20))) for name in ("mnist", "cifar10")]
    return tuple({**row, "seed": seed} for seed, row in product(range(3), rows))


def share_with_signs(step: Step, k: int, *, draws: int = 20, seed: int = 0) -> float:
    """Return the mean share in the k leading directions if examples get random signs.

    Args:
        step: The state of a classifier or of a scalar network.
        k: Number of directions.
        draws: Number of draws of signs.
        seed: Seed of the signs.

    Raises:
        ValueError: If k or the number of draws is not a whole number of at least one.
    """
    n, k = step.jacobian.n, checks.positive_integer("k", k)
    stream = checks.random_stream(seed, "signs")
    signs = torch.randint(0, 2, (checks.positive_integer("draws", draws), n), generator=stream)
    signs = (2.0 * signs - 1).to(step.residue).repeat_interleave(len(step.residue) // n, 1)
    shares = [step.jacobian.modes.shares(step.residue * one)[k - 1] for one in signs]
    return float(torch.stack(shares).mean())


@torch.no_grad()
def last_layer(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    """Return gradient and Gauss-Newton matrix of a classifier's last linear layer, bias left out.

    Its input is what the network has made of the images, so that these features are the data, and
    their class means the data spikes.

    Args:
        model: A classifier in evaluation mode whose last linear layer gives the logits.
        inputs: n inputs of the model.
        labels: Their classes.

    Raises:
        ValueError: If the model has no linear layer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> last_layer(model, torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 0])).jacobian.X.shape
        torch.Size([10, 4])
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if not layers:
        raise ValueError("the model has no linear layer")
    seen = []
    hook = layers[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        p = model(inputs).double().softmax(1)
    finally:
        hook.remove()
    units = torch.eye(p.shape[1], dtype=p.dtype) - p[:, None]
    B = (p.sqrt()[:, :, None] * units).flatten(0, 1)
    jacobian = LayerJacobian(seen[0].double().repeat_interleave(p.shape[1], 0), B, len(p))
    accuracy = float((p.argmax(1) == labels).double().mean())
    return Step(0, jacobian, softmax_residue(p, labels), accuracy)
