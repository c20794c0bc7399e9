"""Gradient descent on the inner weights with rows kept on the unit sphere, and what it records."""

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from lowgrad_utils import checks
from lowgrad_utils.gradients import decompose
from lowgrad_utils.networks import LOSSES, Loss, TwoLayerNetwork
from lowgrad_utils.spectra import alignment, leading_singular_triplets
from lowgrad_utils.spiked_data import SpikedData

#: How a step keeps each row on the unit sphere; g is a row's gradient, P = I - w w^T projects on
#: the sphere's tangent space, h = eta / gamma.
#:
#: * ``"rows"``: w <- (w - h g) / |w - h g|, a step of gradient descent and then normalisation;
#: * ``"tangent"``: w <- (w - h P g) / |w - h P g|, the same with the gradient projected first;
#: * ``"weight-norm"``: Salimans and Kingma's w = v / |v| with length 1, gradient descent on v from
#:   v_0 = w_0. The gradient in v is P g / |v|, and |v|^2 grows by h^2 |P g|^2 / |v|^2 each step,
#:   so its steps get shorter.
#:
#: All three move w by -h P g + O(h^2). The first is the second with the step h / (1 - h w^T g).
#: The paper cites Salimans and Kingma, so theirs is the default.
NORMALISATIONS = ("rows", "tangent", "weight-norm")

# The variable that a build of the book sets; a progress bar would end up in the page.
_BOOK_VARIABLE = "LOWGRAD_BOOK"


class DivergenceError(ArithmeticError):
    """Training left the finite numbers, or its loss grew without need; says where."""


class DivergenceWarning(UserWarning):
    """A trajectory ends early because training diverged."""


@dataclass(frozen=True)
class State:
    """Where training stands before the step of an epoch.

    Attributes:
        epoch: Number of steps taken so far.
        network: The network.
        residue: r = dl/df at the network's outputs, length n.
        gradient: G, d x m.
        loss: (1/n) sum_i l(f(x_i), y_i).
        lengths: |v_j| of the parameters v_j behind the rows w_j = v_j / |v_j|, length m; 1 unless
            the normalisation is ``"weight-norm"``.
    """

    epoch: int
    network: TwoLayerNetwork
    residue: Tensor = field(repr=False)
    gradient: Tensor = field(repr=False)
    loss: float
    lengths: Tensor = field(repr=False)


@dataclass(frozen=True)
class Trajectory:
    """What ``train`` recorded, one entry an epoch recorded.

    A direction that is zero has no alignment: where the fit is exact, u1 and all alignments are
    NaN, and the norms 0.

    Attributes:
        epochs: The epochs recorded: 0 is initialisation, t is after t steps.
        loss: The loss.
        u1: Leading left singular vector of G, one a row; its sign is arbitrary.
        s1: Largest singular value of G.
        u1_q: Alignment |u1^T q|.
        u1_residue: Alignment of u1 with X_B^T r_t.
        u1_initial: Alignment of u1 with the u1 of epoch 0.
        S1: Norm of the residue spike.
        S12: Norm of the interpolant.
        S2: Norm of the data spike.
        S12_S2: Norm of S12 + S2, both along q.
        z_residue: Cosine z^T r_t / (|z| |r_t|), with its sign.
        residue: The residue r_t, one a row.
        network: The network at the last epoch reached.
        W: The inner weights, one m x d matrix an epoch recorded, or None unless asked for.
        diverged: What became infinite or too large and at which epoch, or None.
    """

    epochs: list[int]
    loss: Tensor
    u1: Tensor = field(repr=False)
    s1: Tensor = field(repr=False)
    u1_q: Tensor = field(repr=False)
    u1_residue: Tensor = field(repr=False)
    u1_initial: Tensor = field(repr=False)
    S1: Tensor = field(repr=False)
    S12: Tensor = field(repr=False)
    S2: Tensor = field(repr=False)
    S12_S2: Tensor = field(repr=False)
    z_residue: Tensor = field(repr=False)
    residue: Tensor = field(repr=False)
    network: TwoLayerNetwork = field(repr=False)
    W: Tensor | None = field(repr=False)
    diverged: str | None


def gradient_descent(
    X: Tensor,
    y: Tensor,
    network: TwoLayerNetwork,
    *,
    eta: float = 1.0,
    loss: str = "mse",
    normalisation: str = "weight-norm",
    growth: float = 1e6,
) -> Iterator[State]:
    """Yield the states of gradient descent on W with step eta / gamma, without end.

    The outer weights stay as they are; every row of W stays of length 1, see ``NORMALISATIONS``.
    Nothing is random.

    Args:
        X: Data, n x d.
        y: Targets, length n.
        network: The network at initialisation; it is not changed.
        eta: The step in units of 1/gamma.
        loss: A key of ``LOSSES``.
        normalisation: One of ``NORMALISATIONS``.
        growth: Training counts as diverged when the loss exceeds this multiple of the first one.

    Yields:
        The state at epoch 0, 1, 2, ...

    Raises:
        TypeError: If an argument is not a floating-point tensor, dtypes differ, or ``eta`` or
            ``growth`` is no number.
        ValueError: If shapes do not fit, an entry is NaN or infinite, the loss at the start is
            infinite, ``eta`` is not positive, ``growth`` is not above 1, or a name is unknown.
        DivergenceError: At the epoch at which the weights or the loss become infinite, or the
            loss exceeds ``growth`` times its first value (or times rounding, if that is larger).

    Source: Low Rank Gradients, Section 3.4; Salimans and Kingma, Weight Normalization.

    Example:
        >>> X = torch.eye(3).double()
        >>> network = TwoLayerNetwork.random(3, 4, activation="tanh", scaling="mean-field")
        >>> states = gradient_descent(X, torch.ones(3).double(), network)
        >>> first, second = next(states), next(states)
        >>> second.epoch, second.loss < first.loss
        (1, True)
    """
    step = checks.positive("eta", eta) / network.gamma
    growth = checks.positive("growth", growth)
    if growth <= 1:
        raise ValueError(f"growth is {growth:g}, but a multiple above 1 is needed")
    chosen = LOSSES[checks.choice("loss", loss, LOSSES)]
    checks.choice("normalisation", normalisation, NORMALISATIONS)
    # Checked now, not at the first state: a generator would wait with it.
    first = float(chosen.value(network(X), y).mean())
    if not math.isfinite(first):
        raise ValueError(f"the loss at the start is {first}, but a finite one is needed: scale y")
    # A fit that is perfect but for rounding may not count as diverging with its next rounding.
    zero = float(chosen.value(torch.zeros_like(y), y).mean())
    limit = growth * max(first, torch.finfo(y.dtype).eps * zero)
    return _states(X, y, network, step, chosen, normalisation, limit)


def train(
    data: SpikedData,
    y: Tensor,
    network: TwoLayerNetwork,
    *,
    epochs: int = 100,
    record: Iterable[int] | None = None,
    eta: float = 1.0,
    loss: str = "mse",
    normalisation: str = "weight-norm",
    growth: float = 1e6,
    keep_weights: bool = False,
    progress: bool = False,
) -> Trajectory:
    """Train the inner weights and record the gradient's leading direction and its spikes.

    If training diverges, a ``DivergenceWarning`` says where and why, the trajectory keeps what was
    recorded until then, and its ``diverged`` holds the same line.

    Args:
        data: Data with their spike.
        y: Targets, length n.
        network: The network at initialisation; it is not changed.
        epochs: Number of steps.
        record: Epochs to record, between 0 and ``epochs``; all of them if None. Epoch 0 is always
            recorded, since ``u1_initial`` needs it.
        eta: The step in units of 1/gamma.
        loss: A key of ``LOSSES``.
        normalisation: One of ``NORMALISATIONS``.
        growth: Training counts as diverged when the loss exceeds this multiple of the first one.
        keep_weights: Keep W at every epoch recorded (8 m d bytes each).
        progress: Show a progress bar (never while the book is built).

    Raises:
        TypeError: If an argument is not a floating-point tensor, dtypes differ, or a number or
            an epoch is none.
        ValueError: If shapes do not fit, an entry is NaN or infinite, a number is out of range,
            or a name is unknown.

    Warns:
        DivergenceWarning: If training diverges.

    Source: Low Rank Gradients, Figures 5 and 6.

    Example:
        >>> from lowgrad_utils.spiked_data import sample_spiked_data, sample_targets
        >>> data = sample_spiked_data(30, 40, nu=0.25)
        >>> network = TwoLayerNetwork.random(40, 50, activation="tanh", scaling="mean-field")
        >>> run = train(data, sample_targets(data.X).y, network, epochs=5)
        >>> bool(run.loss[-1] < run.loss[0]), run.u1.shape
        (True, torch.Size([6, 40]))
    """
    epochs = checks.positive_integer("epochs", epochs)
    wanted = _epochs(record, epochs)
    states = gradient_descent(
        data.X, y, network, eta=eta, loss=loss, normalisation=normalisation, growth=growth
    )
    hidden = not progress or bool(os.environ.get(_BOOK_VARIABLE))
    rows, diverged = [], None
    try:
        for epoch, state in zip(tqdm(range(epochs + 1), disable=hidden), states):
            network = state.network
            if epoch in wanted:
                rows.append(_measure(data, state, rows[0]["u1"] if rows else None, keep_weights))
    except DivergenceError as error:
        diverged = str(error)
        warnings.warn(diverged, DivergenceWarning, stacklevel=2)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    reached, W = columns.pop("epoch"), columns.pop("W")
    return Trajectory(
        epochs=reached,
        network=network,
        W=torch.stack(W) if keep_weights else None,
        diverged=diverged,
        **{name: _stacked(values) for name, values in columns.items()},
    )


def _states(X, y, network, step, loss, normalisation, limit) -> Iterator[State]:
    """Yield the states after the arguments were checked."""
    lengths = network.W.new_ones(network.m, 1)
    epoch = 0
    while True:
        value, residue, gradient = _loss_and_gradient(X, y, network, loss)
        if not value <= limit:
            raise DivergenceError(
                f"training diverged at epoch {epoch}: the loss is {value:.3g}, beyond its "
                f"limit of {limit:.3g}; a smaller eta helps"
            )
        yield State(epoch, network, residue, gradient, value, lengths[:, 0])
        epoch += 1
        W, lengths = _stepped(network.W, lengths, gradient.T, step, normalisation)
        # A length beyond all numbers gives rows of zeros or NaN.
        if not bool((W.norm(dim=1) > 0.5).all()):
            raise DivergenceError(
                f"training diverged at epoch {epoch}: the weights are no longer finite; "
                "a smaller eta helps"
            )
        network = TwoLayerNetwork(W, network.a, network.activation, network.scaling)


@torch.no_grad()
def _loss_and_gradient(
    X: Tensor, y: Tensor, network: TwoLayerNetwork, loss: Loss
) -> tuple[float, Tensor, Tensor]:
    """Return loss, residue and G; as ``closed_form_gradient`` does, but X W^T is formed once."""
    preactivations = X @ network.W.T
    f = network.gamma * (network.sigma.value(preactivations) @ network.a)
    residue = loss.residue(f, y)
    weighted = network.sigma.derivative(preactivations).mul_(residue[:, None])
    gradient = (X.T @ weighted).mul_((network.gamma / len(y)) * network.a)
    return float(loss.value(f, y).mean()), residue, gradient


@torch.no_grad()
def _stepped(
    W: Tensor, lengths: Tensor, gradient: Tensor, step: float, normalisation: str
) -> tuple[Tensor, Tensor]:
    """Return W after one step and the lengths |v_j| of its parameters v, which start at 1."""
    if normalisation != "rows":
        gradient = gradient - (gradient * W).sum(dim=1, keepdim=True) * W
    V = lengths * W - (step / lengths) * gradient
    new = V.norm(dim=1, keepdim=True)
    return V / new, new if normalisation == "weight-norm" else lengths


def _measure(data: SpikedData, state: State, initial: Tensor | None, keep_weights: bool) -> dict:
    parts = decompose(data, state.network, state.residue)
    top = leading_singular_triplets(state.gradient, 1)
    u1, itself, r = top.U[:, 0], 1.0, state.residue
    if top.s[0] == 0:
        # Any vector is a singular vector of a zero gradient, so that none is told.
        u1, itself = torch.full_like(u1, math.nan), math.nan
    return {
        "epoch": state.epoch,
        "loss": state.loss,
        "u1": u1,
        "s1": top.s[0],
        "u1_q": _alignment(u1, data.q),
        "u1_residue": _alignment(u1, parts.S1.u),
        "u1_initial": itself if initial is None else _alignment(u1, initial),
        "S1": parts.S1.norm,
        "S12": parts.S12.norm,
        "S2": parts.S2.norm,
        # Both are columns along q times a row: the rows add, the direction stays.
        "S12_S2": (parts.S12.matrix() + parts.S2.matrix()).norm(),
        "z_residue": data.z @ r / (data.z.norm() * r.norm()),
        "residue": r,
        "W": state.network.W if keep_weights else None,
    }


def _alignment(u: Tensor, v: Tensor) -> float:
    """Return the alignment of two directions, or NaN if one is zero or NaN."""
    return alignment(u, v) if all(float(w.norm()) > 0 for w in (u, v)) else math.nan


def _stacked(values: list) -> Tensor:
    return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])


def _epochs(record: Iterable[int] | None, epochs: int) -> set[int]:
    """Return the epochs to record, 0 among them."""
    if record is None:
        return set(range(epochs + 1))
    wanted = {0} | {checks.positive_integer("an epoch of record", t) for t in record if t != 0}
    if max(wanted) > epochs:
        raise ValueError(f"record has the epoch {max(wanted)}, but there are {epochs} epochs")
    return wanted
