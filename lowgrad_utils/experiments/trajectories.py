"""Mean-field against NTK scaling: at initialisation, in training, and at the edge of stability."""

import math
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lowgrad_utils import checks
from lowgrad_utils.experiments.initialisation import paper_sizes
from lowgrad_utils.gradients import closed_form_gradient
from lowgrad_utils.networks import ACTIVATIONS, SCALINGS, TwoLayerNetwork, gaussian_mean
from lowgrad_utils.spectra import alignment, leading_singular_triplets, principal_angles
from lowgrad_utils.spiked_data import SpikedData, sample_spiked_data, sample_targets
from lowgrad_utils.training import State, gradient_descent, train

Cell = dict[str, Any]

#: Standard deviation of the noise on the targets of Figure 4, which the paper's text leaves open.
NOISE = 0.1
#: Epochs at which the trajectories of Figure 6 are measured: of both parities, because gradient
#: descent beyond its stability goes to and fro with period two.
EPOCHS = (0, 1, 2, 3, 5, 8, 12, 17, 24, 33, 50, 75, 100)
#: The epoch from which the start of training counts as over.
LATE = 5


# --- Figure 4 -------------------------------------------------------------------------------------


def single_index_cell(d: int, seed: int) -> dict[str, float]:
    """Measure one sample of Figure 4: what the gradient's top direction aligns with.

    Isotropic data without a spike, y = sigmoid(omega^T x) + noise, ReLU, squared loss; the two
    scalings share data, targets and weights.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        seed: Seed.

    Returns:
        For each scaling alignments of u_1 with X^T y, X^T r and omega (``ntk_y``, ``ntk_r``,
        ``ntk_omega``, ``mf_y``, ...); ``omega_y``, the alignment of omega with X^T y itself;
        ``output``, |f| / |y| under NTK scaling (under mean field it is smaller by sqrt(m)).
        Rounded to six decimals.

    Source: Low Rank Gradients, Figure 4; the noise and the sizes are ours.
    """
    n, m = paper_sizes(d)
    X, y, omega = isotropic_single_index(n, d, seed=seed)
    values = {"omega_y": alignment(X.T @ y, omega)}
    for prefix, scaling in (("mf", "mean-field"), ("ntk", "ntk")):
        network = TwoLayerNetwork.random(d, m, activation="relu", scaling=scaling, seed=seed)
        f = network(X)
        u = leading_singular_triplets(closed_form_gradient(X, network, f - y), 1).U[:, 0]
        values |= {
            f"{prefix}_y": alignment(u, X.T @ y),
            f"{prefix}_r": alignment(u, X.T @ (f - y)),
            f"{prefix}_omega": alignment(u, omega),
        }
    return _rounded(values | {"output": f.norm() / y.norm()})


def isotropic_single_index(
    n: int, d: int, *, noise: float = NOISE, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw X with independent standard normal entries, y = sigmoid(omega^T x) + noise, and omega.

    Args:
        n: Number of examples; more than d are allowed here.
        d: Number of features.
        noise: Standard deviation of the noise.
        seed: Seed.

    Returns:
        X (n x d), y (length n) and the unit vector omega.

    Raises:
        ValueError: If a size is less than 1 or the noise negative.
    """
    n, d = checks.positive_integer("n", n), checks.positive_integer("d", d)
    stream = checks.random_stream(seed, "isotropic data")
    X = torch.randn(n, d, generator=stream, dtype=torch.float64)
    targets = sample_targets(X, "single-index", noise=noise, seed=seed)
    return X, targets.y, targets.directions[0]


def predicted_alignments(
    ratio: float, *, noise: float = NOISE, offset: float = 0.0
) -> dict[str, float]:
    """Predict the alignments of Figure 4 in the limit, if u_1 is along X^T r.

    With E[x y] = kappa omega (Stein) and an n x d matrix X of independent standard normals,
    |X^T y|^2 / n^2 -> kappa^2 + (d/n) E y^2. A ReLU network under NTK scaling has a linear part
    beta^T x with |beta|^2 -> 1/4, orthogonal to omega, the mean output g / sqrt(2 pi) with g
    standard normal over draws of the outer weights, and Var f -> 1/2 - 1/(2 pi).

    Args:
        ratio: d / n.
        noise: Standard deviation of the noise on the targets.
        offset: g. Alignments fall as it grows (omega's: rise), so that 0 gives medians and -0.674
            and 0.674 quartiles.

    Returns:
        ``mf_y`` = 1, ``mf_omega``, ``ntk_y``, ``ntk_omega``.

    Raises:
        ValueError: If ``ratio`` is not positive or the noise negative.

    Source: derived; Low Rank Gradients, Section 3.4, has no such prediction.

    Example:
        >>> round(predicted_alignments(4 / 3)["mf_omega"], 2)
        0.31
    """
    ratio, noise = checks.positive("ratio", ratio), checks.nonnegative("noise", noise)
    one = torch.ones(1, dtype=torch.float64)
    kappa = float(gaussian_mean(lambda g: torch.sigmoid(g) * (1 - torch.sigmoid(g)), one))
    y_square = float(gaussian_mean(lambda g: torch.sigmoid(g).square(), one)) + noise**2
    mean_f, mean_y = offset / math.sqrt(2 * math.pi), 0.5
    f_square = mean_f**2 + 0.5 - 1 / (2 * math.pi)
    along_y = kappa**2 + ratio * y_square
    along_r = kappa**2 + 0.25 + ratio * (y_square - 2 * mean_f * mean_y + f_square)
    product = along_y - ratio * mean_f * mean_y
    return {
        "mf_y": 1.0,
        "mf_omega": kappa / math.sqrt(along_y),
        "ntk_y": abs(product) / math.sqrt(along_y * along_r),
        "ntk_omega": kappa / math.sqrt(along_r),
    }


# --- training -------------------------------------------------------------------------------------


def training_problem(
    d: int, *, nu: float, activation: str, scaling: str, seed: int = 0
) -> tuple[SpikedData, Tensor, TwoLayerNetwork]:
    """Draw data, triple-index targets and a network for the trajectories of Figures 5 and 6.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent; the bulk is isotropic.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``. Data, targets and weights do not depend on it.
        seed: Seed.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Source: Low Rank Gradients, Figures 5 and 6; the targets are the book's triple-index model.
    """
    n, m = paper_sizes(d)
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation=activation, scaling=scaling, seed=seed)
    return data, sample_targets(data.X, seed=seed).y, network


def matched_step(network: TwoLayerNetwork) -> float:
    """Compute the eta = 1 / (gamma m) at which outputs move as under mean field with eta = 1.

    A step eta / gamma moves the outputs by a multiple of eta gamma m.

    Args:
        network: The network.

    Example:
        >>> matched_step(TwoLayerNetwork.random(40, 100, scaling="ntk"))
        0.1
    """
    return 1 / (network.gamma * network.m)


def direction_cell(
    d: int, activation: str, scaling: str, matched: bool, seed: int
) -> dict[str, float]:
    """Follow the leading direction of one run of Figure 5: nu = 0, squared loss, 100 epochs.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        activation: A key of ``ACTIVATIONS``.
        scaling: A key of ``SCALINGS``.
        matched: Take ``matched_step`` instead of the paper's eta = 1.
        seed: Seed.

    Returns:
        At each epoch t of ``EPOCHS`` ``i_t``, the alignment of u_1 with that of epoch 0, and
        ``l_t``, the loss over the first loss; ``residue``, the least alignment of u_1 with
        X_B^T r_t; ``targets_0`` and ``targets``, the alignment of X_B^T r_t with X_B^T y at
        epoch 0 and its least over the run; ``turn``, the mean angle between a neuron's weights at
        the start and the end, in radians. Rounded to six decimals.
    """
    data, y, network = training_problem(
        d, nu=0.0, activation=activation, scaling=scaling, seed=seed
    )
    eta = matched_step(network) if matched else 1.0
    run = train(data, y, network, epochs=EPOCHS[-1], record=EPOCHS, eta=eta)
    target = data.bulk_times(y)
    targets = [alignment(data.bulk_times(r), target) for r in run.residue]
    values = {f"i_{t}": a for t, a in zip(run.epochs, run.u1_initial)}
    values |= {f"l_{t}": x / run.loss[0] for t, x in zip(run.epochs, run.loss)}
    values |= {
        "residue": run.u1_residue.min(),
        "targets_0": targets[0],
        "targets": min(targets),
        "turn": neuron_angle(network.W, run.network.W),
    }
    return _rounded(values)


def weight_angle_cell(d: int, seed: int) -> dict[str, float]:
    """Measure Figure 5 (c): angles between the weights trained under the two scalings.

    Both runs start from the same weights on the same data (sigmoid, nu = 0, eta = 1).

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        seed: Seed.

    Returns:
        At epochs t = 1, 8, 24 and 100, in radians: mean principal angles between the row spaces
        (``rows_t``), the column spaces (``columns_t``) and the spans of the ten leading right
        singular vectors (``top_t``), and the mean angle between a neuron's two weight vectors
        (``neurons_t``). Rounded to six decimals.
    """
    weights = []
    for scaling in SCALINGS:
        data, y, network = training_problem(
            d, nu=0.0, activation="sigmoid", scaling=scaling, seed=seed
        )
        run = train(data, y, network, record=(1, 8, 24, 100), keep_weights=True)
        weights.append(run.W)
    values = {}
    for t, one, other in zip(run.epochs[1:], weights[0][1:], weights[1][1:]):
        top = [leading_singular_triplets(W, 10).V for W in (one, other)]
        values |= {
            f"rows_{t}": principal_angles(one.T, other.T).mean(),
            f"columns_{t}": principal_angles(one, other).mean(),
            f"top_{t}": principal_angles(*top).mean(),
            f"neurons_{t}": neuron_angle(one, other),
        }
    return _rounded(values)


def neuron_angle(W: Tensor, other: Tensor) -> float:
    """Compute the mean angle between corresponding rows of unit length, in radians.

    Args:
        W: A matrix with rows of unit length, m x d.
        other: Another one of the same shape.

    Example:
        >>> round(neuron_angle(torch.eye(2).double(), torch.eye(2).flip(0).double()), 4)
        1.5708
    """
    cosines = (W * other).sum(dim=1).clamp(-1, 1)
    return float(torch.arccos(cosines).mean())


def spike_sharpness(data: SpikedData, state: State) -> float:
    """Compute the largest curvature of the squared loss for moves of the weights along q.

    Each row v_j = |v_j| w_j moves by b_j tau_j, with tau_j the unit vector along the part of q
    that is orthogonal to w_j. The loss is quadratic in b to second order, with the m x m matrix

        (gamma^2/n) J^T J + diag((gamma/n) sum_i r_i a_j sigma''_ij (x_i^T tau_j)^2 - w_j^T g_j),

    J_ij = a_j sigma'_ij x_i^T tau_j, each divided by the lengths |v_j| of its two neurons; g_j is
    the gradient in w_j. Its top eigenvalue is a lower bound of the Hessian's. Gradient descent
    along it is stable while (eta/gamma) times it is below 2.

    Args:
        data: Data with their spike.
        state: A state of training with the squared loss.

    Source: derived; Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the
        Edge of Stability (2021), for the role of 2.

    Example:
        >>> data, y, network = training_problem(
        ...     40, nu=0.25, activation="tanh", scaling="mean-field")
        >>> state = next(gradient_descent(data.X, y, network))
        >>> spike_sharpness(data, state) > 0
        True
    """
    network, sigma = state.network, state.network.sigma
    W, a, scale = network.W, network.a, network.gamma / data.n
    preactivations, cosines = data.X @ W.T, W @ data.q
    along = (data.X @ data.q)[:, None] - preactivations * cosines
    along /= (1 - cosines.square()).sqrt()
    J = (sigma.derivative(preactivations) * along) * (a / state.lengths)
    bend = (sigma.second_derivative(preactivations) * along.square()).T @ state.residue
    radial = (state.gradient * W.T).sum(dim=0)
    diagonal = (scale * a * bend - radial) / state.lengths.square()
    H = (network.gamma * scale) * (J.T @ J) + torch.diag(diagonal)
    return float(torch.linalg.eigvalsh(H)[-1])


def spike_cell(d: int, nu: float, eta: float, epochs: int, seed: int) -> dict[str, float]:
    """Follow one training run of Figure 6: mean field, tanh, squared loss, weight normalisation.

    Args:
        d: Number of features; n = 0.75 d and m = 1.25 d.
        nu: Spike exponent.
        eta: The step in units of 1/gamma.
        epochs: Number of steps, at least 8. Far beyond the edge of stability a run is chaotic: a
            rounding grows to size one within 100 steps, so that only its first steps can be
            computed again elsewhere.
        seed: Seed.

    Returns:
        At each epoch t of ``EPOCHS``: ``q_t`` and ``r_t``, alignments of u_1 with q and X_B^T r_t,
        and ``h_t``, the step times ``spike_sharpness``. Over the epochs from ``LATE`` on:
        ``rise``, the largest relative rise of the loss in one step; ``flips``, the share of steps
        at which z^T r changes sign; ``z_share``, the largest share of |r|^2 along z; ``loss_0``
        and ``loss``, the first and the last loss. Rounded to six decimals.
    """
    data, y, network = training_problem(
        d, nu=nu, activation="tanh", scaling="mean-field", seed=seed
    )
    values, losses, cosines = {}, [], []
    for state in islice(gradient_descent(data.X, y, network, eta=eta), epochs + 1):
        losses.append(state.loss)
        r = state.residue
        cosines.append(float(data.z @ r / (data.z.norm() * r.norm())))
        if (t := state.epoch) in EPOCHS:
            u = leading_singular_triplets(state.gradient, 1).U[:, 0]
            values[f"q_{t}"] = alignment(u, data.q)
            values[f"r_{t}"] = alignment(u, data.bulk_times(r))
            values[f"h_{t}"] = eta / network.gamma * spike_sharpness(data, state)
    late = cosines[LATE:]
    values |= {
        "rise": max(b / a - 1 for a, b in pairwise(losses[LATE:])),
        "flips": sum(a * b < 0 for a, b in pairwise(late)) / (len(late) - 1),
        "z_share": max(c**2 for c in late),
        "loss_0": losses[0],
        "loss": losses[-1],
    }
    return _rounded(values)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    # A stored trajectory has some forty numbers, and more digits are of no use to anyone.
    return {name: round(float(value), 6) for name, value in values.items()}


# --- what the runs of Figure 6 say ----------------------------------------------------------------


def late_peaks(runs: pd.DataFrame, column: str, *, since: int = LATE) -> pd.Series:
    """Return each run's largest value over the late epochs measured.

    Args:
        runs: Rows of the grid ``figure-6``.
        column: ``"q"``, ``"r"`` or ``"h"``.
        since: The first epoch that counts, at most the last of ``EPOCHS``.

    Raises:
        ValueError: If ``since`` is negative or later than all of ``EPOCHS``.
    """
    if not 0 <= since <= EPOCHS[-1]:
        raise ValueError(f"since is {since}, but an epoch from 0 to {EPOCHS[-1]} is needed")
    return runs[[f"{column}_{t}" for t in EPOCHS if t >= since]].max(axis=1)


def onset(runs: pd.DataFrame, *, level: float = 0.5**0.5, since: int = LATE) -> float:
    """Return the nu at which the median over seeds of the largest late |u_1.q| crosses a level.

    Args:
        runs: Rows of the grid ``figure-6`` with one d and one eta, over several nu.
        level: The level, 45 degrees by default.
        since: The first epoch that counts.

    Returns:
        The nu, interpolated between the grid's values; infinity if the median stays below the
        level on all of them.

    Raises:
        ValueError: If the median is above the level at the smallest nu already.
    """
    medians = late_peaks(runs, "q", since=since).groupby(runs["nu"]).median()
    above = medians.to_numpy() >= level
    if not above.any():
        return math.inf
    if above[0]:
        raise ValueError(
            f"level is {level:g}, but the median at the least nu is {medians.iloc[0]:.2f} already"
        )
    k = int(above.argmax())
    return float(np.interp(level, medians.iloc[k - 1 : k + 1], medians.index[k - 1 : k + 1]))


def predicted_onset(eta: float, n: int, *, length: float = 1.0) -> float:
    """Compute the nu at which descent along q ceases to be stable: eta mu^2 n^(2 nu) = 2 length^2.

    Under mean field the curvature along q is gamma mu^2 zeta^2 at initialisation, with
    mu = E tanh'(g) for a standard normal g; weight normalisation divides it by length^2.

    Args:
        eta: The step in units of 1/gamma.
        n: Number of examples, at least 2.
        length: |v_j| of the parameters v_j behind the rows of W, 1 at initialisation.

    Raises:
        ValueError: If ``eta`` or ``length`` is not positive, or ``n`` is less than 2.

    Example:
        >>> round(predicted_onset(1.0, 300), 3)
        0.149
    """
    if checks.positive_integer("n", n) < 2:
        raise ValueError(f"n is {n}, but at least 2 examples are needed for a power of n")
    mu = float(ACTIVATIONS["tanh"].mu(torch.ones(1, dtype=torch.float64)))
    step = checks.positive("eta", eta) / checks.positive("length", length) ** 2
    return math.log(2 / (step * mu**2)) / (2 * math.log(n))


def early_length(d: int, nu: float, eta: float, seed: int) -> float:
    """Compute the mean length |v_j| to which ``LATE`` steps of a run of Figure 6 have grown.

    Args:
        d: Number of features.
        nu: Spike exponent.
        eta: The step in units of 1/gamma.
        seed: Seed.

    Example:
        >>> early_length(40, 0.1, 1.0, 0) > early_length(40, 0.1, 0.1, 0) > 1
        True
    """
    data, y, network = training_problem(
        d, nu=nu, activation="tanh", scaling="mean-field", seed=seed
    )
    states = gradient_descent(data.X, y, network, eta=eta)
    return float(next(islice(states, LATE, None)).lengths.mean())


# --- cells of the stored grids --------------------------------------------------------------------


def figure_4_cells() -> tuple[Cell, ...]:
    """List the cells of Figure 4: 500 samples, as in the paper, for three sizes and 100 more."""
    sizes = ((100, 500), (200, 500), (400, 500), (800, 100))
    return tuple({"d": d, "seed": seed} for d, samples in sizes for seed in range(samples))


def figure_5_cells() -> tuple[Cell, ...]:
    """List the cells of Figure 5 (a, b): the paper's sigmoid, and two more activations."""
    steps = (("mean-field", False), ("ntk", False), ("ntk", True))
    series = [(d, "sigmoid", *step, 12) for d in (160, 250, 400) for step in steps]
    series += [(250, a, *step, 8) for a in ("tanh", "relu") for step in steps[:2]]
    names = ("d", "activation", "scaling", "matched")
    return tuple(
        dict(zip(names, row)) | {"seed": seed} for *row, seeds in series for seed in range(seeds)
    )


def weight_angle_cells() -> tuple[Cell, ...]:
    """List the cells of Figure 5 (c)."""
    return tuple({"d": 250, "seed": seed} for seed in range(10))


def figure_6_cells() -> tuple[Cell, ...]:
    """List the cells of Figure 6: nu around the edge of stability for four steps, three sizes."""
    series = {
        (250, 1.0): (0.1, 0.275),
        (250, 0.3): (0.15, 0.35),
        (250, 0.1): (0.25, 0.45),
        (250, 0.03): (0.3, 0.525),
        (160, 0.1): (0.375, 0.475),
        (400, 0.1): (0.3, 0.375),
    }
    return tuple(
        {"d": d, "nu": k / 40, "eta": eta, "epochs": 100, "seed": seed}
        for (d, eta), (low, high) in series.items()
        for k in range(round(40 * low), round(40 * high) + 1)
        # A run at d = 400 takes as long as four at d = 250.
        for seed in range(8 if d < 400 else 4)
    )


def figure_6_large_cells() -> tuple[Cell, ...]:
    """List the cells beyond the edge, whose first steps alone can be computed again."""
    return tuple(
        {"d": 250, "nu": nu, "eta": eta, "epochs": 12, "seed": seed}
        for nu, eta, seed in product((0.4, 0.5, 0.6), (1.0, 0.3, 0.1, 0.03), range(8))
    )
