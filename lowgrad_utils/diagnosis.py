"""The gradient of one layer of any network, split as the gradient of the two-layer network is.

A linear layer with inputs x (rows of X) and backpropagated signals delta = dl/d(output) (rows of
Delta) has the weight gradient G = X^T Delta. In a two-layer network Delta is
(gamma/n) (r a^T) o sigma'(X W^T), close to the rank-one matrix (gamma/n) r (a o mu)^T. Elsewhere
the leading singular pair of Delta takes that part, and the top right singular vector of X that of
the spike. A convolution is such a layer with patches as rows.
"""

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowgrad_utils import checks
from lowgrad_utils.curvature import (
    SOFTMAX_LAST,
    LossCurvature,
    is_one_hot,
    is_softmax,
    layer_by_layer,
    pair_remedy,
    why_not_finite,
)
from lowgrad_utils.eigensolvers import top_eigenpairs
from lowgrad_utils.gradients import RankOne
from lowgrad_utils.spectra import (
    SingularTriplets,
    leading_singular_triplets,
    operator_norm,
)

Loss = Callable[[Any, Any], Tensor]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KINDS = "Linear, Conv1d, Conv2d or Conv3d"
#: How many singular triplets a diagnosis keeps.
LEADING = 5
# Bytes of patches at a time: they take k^2 times the memory of the image they come from.
_CHUNK_BYTES = 6e7


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """What the gradient of a layer is made of.

    G = S1 + S12 + S2 + E exactly: the four blocks of G in q, the leading direction of the inputs,
    and v, that of the signals. The blocks are orthogonal, so that their shares of |G|_F^2 add up
    to 1.

    Attributes:
        layer: Its name in the model.
        kind: Its class, such as ``Conv2d``.
        examples: Number of examples.
        rows: Number of rows of X: examples, times positions or tokens.
        G: Gradient of the mean loss in the weights, transposed: inputs x outputs, float64.
        q: Estimated data spike: top right singular vector of X (centred if that was asked for).
        v: Estimated direction of a o mu: top right singular vector of Delta.
        input_values: Two leading eigenvalues of X^T X / rows, or of the covariance if centred.
        mean_input: Mean row of X.
        bias_gradient: Sum of the rows of Delta: the gradient in a bias, if there is one; exactly 0
            where it is no more than rounding.
        signal_share: Share of |Delta|_F^2 in its leading singular pair.
        null_norms: Norm of E with random signs of the examples, one for each draw.
        gauss_newton: Share of |G|_F^2 in the C leading Gauss-Newton directions of the layer's
            weights, C the number of logits; None if it was not asked for.
        gauss_newton_null: The same share with random signs of the examples, mean over the draws.
    """

    layer: str
    kind: str
    examples: int
    rows: int
    G: Tensor = field(repr=False)
    q: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    input_values: tuple[float, float]
    mean_input: Tensor = field(repr=False)
    bias_gradient: Tensor = field(repr=False)
    signal_share: float
    null_norms: tuple[float, ...]
    gauss_newton: float | None = None
    gauss_newton_null: float | None = None

    def __repr__(self) -> str:
        d, m = self.G.shape
        return (
            f"Diagnosis({self.layer or 'the model'}: {self.kind}, gradient {d} x {m}, "
            f"{self.examples} examples, {self.rows} rows)"
        )

    # --- the pieces -----------------------------------------------------------------------------

    @cached_property
    def S1(self) -> RankOne:
        """Residue spike X_B^T r mu^T = (I - q q^T) G v v^T."""
        Gv = self.G @ self.v
        return RankOne(Gv - (self.q @ Gv) * self.q, self.v)

    @cached_property
    def S12(self) -> RankOne:
        """Interpolant zeta q (z^T r) mu^T = q (q^T G v) v^T."""
        return RankOne((self.q @ self.G @ self.v) * self.q, self.v)

    @cached_property
    def S2(self) -> RankOne:
        """Data spike zeta q z^T (Delta - r mu^T) = q q^T G (I - v v^T)."""
        row = self.G.T @ self.q
        return RankOne(self.q, row - (row @ self.v) * self.v)

    @cached_property
    def E(self) -> Tensor:
        """The rest (I - q q^T) G (I - v v^T), inputs x outputs."""
        return _without(self.G, self.q, self.v)

    @property
    def pieces(self) -> dict[str, float]:
        """Operator norms of S1, S12, S2 and E."""
        norms = {name: getattr(self, name).norm for name in ("S1", "S12", "S2")}
        return {**norms, "E": operator_norm(self.E)}

    @property
    def shares(self) -> dict[str, float]:
        """Shares of |G|_F^2 in S1, S12, S2 and E, which add up to 1."""
        total = float(self.G.square().sum())
        ranks = {name: getattr(self, name).norm ** 2 / total for name in ("S1", "S12", "S2")}
        return {**ranks, "E": float(self.E.square().sum()) / total}

    # --- the spectrum ---------------------------------------------------------------------------

    @cached_property
    def top(self) -> SingularTriplets:
        """The leading singular triplets of G, up to ``LEADING``."""
        return leading_singular_triplets(self.G, min(LEADING, *self.G.shape))

    @cached_property
    def singular_values(self) -> Tensor:
        """All singular values of G, falling."""
        return torch.linalg.svdvals(self.G)

    @property
    def edge(self) -> float:
        """The largest of ``null_norms``: what E would reach if nothing in it were systematic."""
        return max(self.null_norms)

    @property
    def outliers(self) -> int:
        """How many singular values of G are above the edge."""
        # Where all is of rank one, edge and values are rounding.
        least = max(self.edge, 1e-12 * float(self.singular_values[0]))
        return int((self.singular_values > least).sum())

    @property
    def stable_rank(self) -> float:
        """|G|_F^2 / |G|^2."""
        return float(self.G.square().sum() / self.top.s[0] ** 2)

    @property
    def zeta(self) -> float:
        """Strength of the data spike, |X q| / sqrt(rows)."""
        return math.sqrt(self.input_values[0])

    @property
    def nu(self) -> float:
        """Spike exponent log sqrt(lambda_1 / lambda_2) / log rows, as ``estimate_nu`` has it."""
        first, second = self.input_values
        return 0.5 * math.log(first / second) / math.log(self.rows) if second > 0 else math.inf

    @property
    def mean_alignment(self) -> float:
        """|q^T x| / |x| for the mean input x: 1 if the spike is the mean."""
        return abs(float(self.q @ _unit(self.mean_input)))

    @cached_property
    def along_means(self) -> tuple[float, float]:
        """|u_1^T x| / |x| for the mean input x, and |v_1^T b| / |b| for the bias's gradient b."""
        left, right = self.top.U[:, 0] @ _unit(self.mean_input), self.top.V[:, 0]
        return abs(float(left)), abs(float(right @ _unit(self.bias_gradient)))

    @cached_property
    def along_q(self) -> Tensor:
        """|u_k^T q| of the leading left singular vectors u_k."""
        return (self.top.U.T @ self.q).abs()

    @cached_property
    def along_residue(self) -> Tensor:
        """|u_k^T p| with p the direction of X_B^T r, which is orthogonal to q."""
        return (self.top.U.T @ _unit(self.S1.u)).abs()

    @property
    def plane(self) -> float:
        """Share of the two leading left singular vectors in the span of q and X_B^T r.

        The mean squared cosine of the principal angles: 1 if the planes are one, 2/d by chance.
        """
        first = slice(0, 2)
        return float((self.along_q[first] ** 2 + self.along_residue[first] ** 2).mean())

    @property
    def leader(self) -> str:
        """What the top left singular vector is closest to: ``data``, ``residue`` or ``neither``."""
        shares = {"data": float(self.along_q[0]) ** 2, "residue": float(self.along_residue[0]) ** 2}
        shares["neither"] = 1 - sum(shares.values())
        return max(shares, key=shares.get)

    # --- tables ---------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """Return all that was measured under plain names, for a table over layers."""
        pieces, shares = self.pieces, self.shares
        return {
            "layer": self.layer,
            "kind": self.kind,
            "inputs": self.G.shape[0],
            "outputs": self.G.shape[1],
            "rows": self.rows,
            **{f"s{k}": float(s) for k, s in enumerate(self.top.s, 1)},
            "edge": self.edge,
            "outliers": self.outliers,
            **{f"norm_{name}": norm for name, norm in pieces.items()},
            **{f"share_{name}": share for name, share in shares.items()},
            "u1_q": float(self.along_q[0]),
            "u1_residue": float(self.along_residue[0]),
            "u2_q": float(self.along_q[1]),
            "u2_residue": float(self.along_residue[1]),
            "plane": self.plane,
            "leader": self.leader,
            "stable_rank": self.stable_rank,
            "zeta": self.zeta,
            "nu": self.nu,
            "mean_alignment": self.mean_alignment,
            "u1_mean": self.along_means[0],
            "v1_bias": self.along_means[1],
            "signal_share": self.signal_share,
            "gauss_newton": _or_nan(self.gauss_newton),
            "gauss_newton_null": _or_nan(self.gauss_newton_null),
        }

    def table(self, digits: int | None = None) -> pd.DataFrame:
        """Return a table to read: one row a quantity, its value and what it means.

        Args:
            digits: Significant digits. If given, values are texts, and counts stay whole.

        Raises:
            ValueError: If ``digits`` is not a whole number between 1 and 15.

        Example:
            >>> model = nn.Linear(6, 3, bias=False).double().eval()
            >>> _ = nn.init.eye_(model.weight)
            >>> x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double()
            >>> found = diagnose(model, "", (x, torch.arange(40) % 3), nn.CrossEntropyLoss())
            >>> found.table(digits=2).value[["s₁", "edge", "outliers"]].to_dict()
            {'s₁': '0.43', 'edge': '0.22', 'outliers': '2'}
        """
        if digits is not None and (type(digits) is not int or not 1 <= digits <= 15):
            raise ValueError(f"digits is {digits!r}, but a whole number from 1 to 15 is needed")
        rows = [
            (f"s{_sub(k)}", float(s), f"singular value {k} of G")
            for k, s in enumerate(self.top.s, 1)
        ]
        rows += [
            ("edge", self.edge, "norm of E with random signs of the examples"),
            ("outliers", self.outliers, "singular values above the edge"),
            ("stable rank", self.stable_rank, "‖G‖_F² / ‖G‖²"),
        ]
        for name, norm in self.pieces.items():
            rows.append((f"‖{_pretty(name)}‖", norm, _MEANINGS[name]))
        for name, share in self.shares.items():
            rows.append((f"share of {_pretty(name)}", share, "of ‖G‖_F²; the four add up to 1"))
        for k, (q, p) in enumerate(zip(self.along_q[:2], self.along_residue[:2]), 1):
            u = f"u{_sub(k)}"
            rows.append((f"|{u}ᵀq|", float(q), f"left singular vector {k} with the data spike"))
            rows.append((f"|{u}ᵀp|", float(p), f"left singular vector {k} with p ∝ X_Bᵀr"))
        rows += [
            ("plane", self.plane, "share of u₁, u₂ in the span of q and p"),
            ("ν", self.nu, "log √(λ₁/λ₂) / log rows of the inputs"),
            ("|qᵀx̄|", self.mean_alignment, "data spike with the mean input x̄"),
            ("|u₁ᵀx̄|", self.along_means[0], "top left singular vector with the mean input"),
            ("|v₁ᵀb|", self.along_means[1], "its right partner with the bias's gradient b"),
            ("rank-one share of Δ", self.signal_share, "how far the signals are r μᵀ"),
        ]
        if self.gauss_newton is not None:
            meaning = "of ‖G‖_F² in the C top Gauss-Newton directions"
            rows.append(("Gauss-Newton", self.gauss_newton, meaning))
            meaning = "the same with random signs of the examples"
            rows.append(("Gauss-Newton, signs", self.gauss_newton_null, meaning))
        if digits is not None:
            rows = [(name, _text(value, digits), meaning) for name, value, meaning in rows]
        return pd.DataFrame(rows, columns=["quantity", "value", "meaning"]).set_index("quantity")


_MEANINGS = {
    "S1": "residue spike, along p",
    "S12": "interpolant, along q",
    "S2": "data spike, along q",
    "E": "rest (operator norm)",
}


def _text(value: float, digits: int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def _sub(k: int) -> str:
    return str(k).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def _pretty(name: str) -> str:
    return name[0] + name[1:].translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def layer_names(model: nn.Module) -> list[str]:
    """Return the names of the layers that ``diagnose`` takes, in the model's order.

    Args:
        model: Any module.

    Example:
        >>> layer_names(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
        ['0', '2']
    """
    return [name for name, module in model.named_modules() if _refusal(module) is None]


def diagnose(
    model: nn.Module,
    layer: str | nn.Module,
    data: tuple[Tensor, Any] | Iterable[tuple[Tensor, Any]],
    loss: Loss,
    *,
    centre: bool = False,
    draws: int = 5,
    gauss_newton: bool = False,
    memory: float = 2.0,
    seed: int | torch.Generator = 0,
) -> Diagnosis:
    """Split the weight gradient G = X^T Delta of a linear or convolutional layer, and measure it.

    Data are gone through once, forwards and backwards. The model is left as it is: its gradients,
    its mode, its buffers; so are torch's random numbers. The bias is no part of G. Inputs are not
    centred, since G is made of X itself: in most layers q is close to the mean input
    (``mean_alignment`` says how close).

    Rows of X and Delta are not kept: with mu = |mu| v, r = Delta v / |mu| and z = X q / zeta, the
    pieces are S1 = (I - q q^T) G v v^T, S12 = q q^T G v v^T, S2 = q q^T G (I - v v^T) and
    E = (I - q q^T) G (I - v v^T), which need q, v and G only.

    Args:
        model: Any module in evaluation mode, on any device.
        layer: Name of the layer, see ``layer_names``, or the module itself. A layer that is called
            several times in a pass has the rows of all its calls. The first dimension of what it
            gets is over the examples, or examples times windows; of a linear layer another one may
            be, if it has their number.
        data: A pair (inputs, targets), or an iterable of such pairs, as a DataLoader. The first
            dimension is over the examples.
        loss: Maps the model's output and the targets to the mean loss of a batch, such as
            ``torch.nn.CrossEntropyLoss()``. Batches are weighted by their sizes.
        centre: Take q from the centred inputs: the direction of the largest variance.
        draws: How many times the examples get random signs for the edge, the largest of the norms
            (``null_norms`` has each). Seed and batches decide the signs: with others the edge
            moves within the scatter of these norms, and an outlier close to it may not count.
        gauss_newton: Also compute ``Diagnosis.gauss_newton``: some tens of passes over the data,
            which must fit in memory, for a model from inputs to logits and mean cross-entropy.
        memory: Gigabytes for what is kept of the layer, and for the Gauss-Newton products.
        seed: Seed, or generator, of the signs.

    Raises:
        TypeError: If an argument is of the wrong type, or dtypes do not fit.
        ValueError: If the layer is unknown, of another kind, not called, or gets no gradient; if
            its weight is used elsewhere, too; if the model or the loss fails, or the model is in
            train mode; if data are empty or a single example; if anything is NaN or infinite; or if
            it takes more than ``memory``.

    Source: the pieces are those of Low Rank Gradients, Section 3; their estimates are ours.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
        >>> x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        >>> found = diagnose(model, "0", (x, torch.arange(40) % 3), nn.CrossEntropyLoss())
        >>> found, round(sum(found.shares.values()), 12)
        (Diagnosis(0: Linear, gradient 6 x 5, 40 examples, 40 rows), 1.0)
    """
    name, module = _found(model, layer)
    _check_model(model)
    _check_loss(loss)
    for option, value in (("centre", centre), ("gauss_newton", gauss_newton)):
        if not isinstance(value, bool):
            raise TypeError(f"{option} is {value!r}, but True or False is needed")
    draws = checks.positive_integer("draws", draws)
    limit = 1e9 * checks.positive("memory", memory)
    stream = checks.random_stream(seed, "signs")

    sums, batches = None, []
    with _as_it_was(model):
        for inputs, targets in _batches(data, model):
            calls, whole = _signals(model, module, name, inputs, targets, loss)
            if sums is None:
                sums = _Sums(_checked_rows(module, name, *calls[0]), draws, limit)
            # Mean losses of batches are weighted by their sizes; the division by n comes last.
            calls = [(x, delta * len(inputs)) for x, delta in calls]
            sums.add(module, _by_example(module, name, calls, len(inputs)), len(inputs), stream)
            if whole is not None:
                sums.whole += len(inputs) * whole.flatten(1).T.to(sums.whole)
            if gauss_newton:
                batches.append((inputs, targets))
        _check_sums(sums, name)
        if whole is not None:
            _check_whole(sums, name)
        G, *signed = sums.products / sums.examples
        shares = _gauss_newton_shares(model, module, name, batches, [G, *signed], memory)
    q, values, _ = sums.inputs.leading("inputs of the layer", centre=centre)
    v, _, signal_share = sums.signals.leading("signals")
    mean = sums.inputs.mean
    return Diagnosis(
        layer=name,
        kind=type(module).__name__,
        examples=sums.examples,
        rows=sums.inputs.rows,
        G=G,
        q=-q if q @ mean < 0 else q,
        v=v,
        input_values=values,
        mean_input=mean,
        bias_gradient=sums.bias_gradient(),
        signal_share=signal_share,
        null_norms=tuple(operator_norm(_without(sign, q, v)) for sign in signed),
        gauss_newton=shares[0] if shares else None,
        gauss_newton_null=sum(shares[1:]) / draws if shares else None,
    )


def _or_nan(number: float | None) -> float:
    return math.nan if number is None else number


def _without(G: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Return (I - q q^T) G (I - v v^T)."""
    rest = torch.addr(G, q, q @ G, alpha=-1)
    return rest.addr_(rest @ v, v, alpha=-1)


def _unit(u: Tensor) -> Tensor:
    norm = u.norm()
    return u / norm if norm > 0 else u


# --- sums over the rows of X and Delta ------------------------------------------------------------


class _Sums:
    """X^T Delta, with and without random signs, and what gives the leading directions."""

    def __init__(self, rows: tuple[Tensor, Tensor], draws: int, limit: float):
        d, m = (part.shape[1] for part in rows)
        needed = 8 * (d * m * (draws + 2) + d**2 + m**2)
        if needed > limit:
            raise ValueError(
                f"a layer of {d} inputs and {m} outputs takes {needed / 1e9:.3g} GB, but memory is "
                f"{limit / 1e9:.3g}; raise memory, or lower draws"
            )
        # Not every device has float64: Apple's has not.
        device = "cpu" if rows[0].device.type == "mps" else rows[0].device
        self.products = torch.zeros(draws + 1, d, m, dtype=torch.float64, device=device)
        self.inputs, self.signals = _Gram(self.products[0, :, 0]), _Gram(self.products[0, 0])
        # The weight's gradient as autograd has it, to be compared.
        self.whole = torch.zeros_like(self.products[0])
        self.examples, self.rounding = 0, 0.0

    def add(
        self,
        module: nn.Module,
        calls: list[tuple[Tensor, Tensor]],
        n: int,
        stream: torch.Generator,
    ) -> None:
        """Add the layer's calls on n examples, whose signs are the same in all of them."""
        draws = len(self.products)
        signs = 2.0 * torch.randint(0, 2, (draws, n), generator=stream, device="cpu") - 1
        signs[0] = 1
        self.examples += n
        for x, delta in calls:
            self.rounding = max(self.rounding, _rounding(delta))
            self._add(module, x, delta, signs.repeat_interleave(len(x) // n, dim=1))

    def bias_gradient(self) -> Tensor:
        """Return the sum of the signals, or 0 if it is rounding, whose direction says nothing."""
        size = float(self.signals.matrix.trace()) ** 0.5
        rounding = float(self.signals.total.norm()) <= self.rounding**0.5 * size
        return (0 if rounding else 1) * self.signals.total / self.examples

    def _add(self, module: nn.Module, x: Tensor, delta: Tensor, signs: Tensor) -> None:
        """Add one call, a few of its entries at a time."""
        _, d, m = self.products.shape
        positions = delta.numel() // (len(x) * m)
        size = max(1, int(_CHUNK_BYTES / (8 * (d + m) * positions)))
        for part, back, sign in zip(x.split(size), delta.split(size), signs.split(size, dim=1)):
            X, Delta = (rows.to(self.products) for rows in _rows_of(module, part, back))
            # Positions of an example have its sign.
            each = sign.to(self.products).repeat_interleave(positions, dim=1)
            for product, row in zip(self.products, each):
                product.addmm_(X.T, row[:, None] * Delta)
            self.inputs.add(X)
            self.signals.add(Delta)


def _rounding(rows: Tensor) -> float:
    """Return the relative size of rounding; a GPU may multiply float32 with 10 bits (TF32)."""
    return max(torch.finfo(rows.dtype).eps, 2.0**-10 if rows.device.type == "cuda" else 0.0)


class _Gram:
    """A^T A and the mean of rows that come in parts."""

    def __init__(self, like: Tensor):
        self.matrix, self.total = like.new_zeros(len(like), len(like)), torch.zeros_like(like)
        self.rows = 0

    @property
    def mean(self) -> Tensor:
        """The mean row."""
        return self.total / self.rows

    def add(self, rows: Tensor) -> None:
        """Add some rows."""
        self.matrix.addmm_(rows.T, rows)
        self.total += rows.sum(0)
        self.rows += len(rows)

    def leading(self, what: str, *, centre: bool = False) -> tuple[Tensor, Any, float]:
        """Return the top eigenvector, two eigenvalues (a row), the first's share of the trace."""
        second_moment = self.matrix / self.rows
        # Of equal rows rounding leaves something to centre.
        least = 1e-12 * float(second_moment.trace()) if centre else 0.0
        if centre:
            second_moment = second_moment.addr_(self.mean, self.mean, alpha=-1)
        trace = float(second_moment.trace())
        if not trace > least:
            raise ValueError(f"the {what} are all {'alike' if centre else 'zero'}: no direction")
        top = leading_singular_triplets(second_moment, 2)
        first, second = top.s.tolist()
        # Rounding leaves a second eigenvalue where there is none.
        return top.U[:, 0], (first, second if second > 1e-12 * first else 0.0), first / trace


def _check_sums(sums: _Sums | None, name: str) -> None:
    if sums is None:
        raise ValueError("data has no examples: the loader is empty")
    if sums.examples < 2:
        raise ValueError(
            "data has 1 example, but at least 2 are needed: the gradient of one says nothing of "
            "what examples share"
        )
    all_sums = (sums.products, sums.inputs.matrix, sums.signals.matrix)
    if not all(torch.isfinite(part.sum()) for part in all_sums):
        raise ValueError(
            f"the gradient of layer {name!r}, or the square of its inputs or signals, is infinite; "
            "rescale the data or the loss"
        )
    if not sums.products[0].any():
        raise ValueError(f"the gradient of layer {name!r} is zero: no signal comes back to it")


def _check_whole(sums: _Sums, name: str) -> None:
    # Signs leave the scale of rounding where contributions of examples cancel.
    scale = max(float(product.norm()) for product in sums.products)
    if float((sums.products[0] - sums.whole).norm()) > sums.rounding**0.5 * scale:
        raise ValueError(
            f"the weight of layer {name!r} is used elsewhere, too, or changed on its way, so that "
            "the gradient in it is not X^T Delta of the layer's calls"
        )


# --- the layer's rows -----------------------------------------------------------------------------


def _rows_of(module: nn.Module, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return X and Delta: a row for each example, or for each of its tokens or positions."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1]), delta.reshape(-1, delta.shape[-1])
    return _patches(module, x), delta.flatten(2).transpose(1, 2).flatten(0, 1)


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """Return what the filters of a convolution see, one row a position, in the weights' order."""
    dimensions = len(module.kernel_size)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    # torch's own list, from the last dimension backwards, which resolves padding="same".
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(module.kernel_size, module.stride, module.dilation)
    for axis, (kernel, stride, dilation) in enumerate(sizes, 2):
        x = x.unfold(axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    # examples x channels x positions x kernel -> (examples, positions) x (channels, kernel)
    order = [0, *range(2, 2 + dimensions), 1, *range(2 + dimensions, 2 + 2 * dimensions)]
    return x.permute(order).reshape(-1, module.in_channels * math.prod(module.kernel_size))


def _signals(
    model: nn.Module, module: nn.Module, name: str, inputs: Tensor, targets: Any, loss: Loss
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Return the layer's input and dl/d(output) for each of its calls on a batch, and dl/dW.

    The latter is None if the weight is frozen, or no parameter but computed from some.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_module, args, kwargs, output):
        x = args[0] if args else kwargs["input"]
        # A sum of its own: the output itself may be changed in place by the next layer, and has no
        # gradient if all before it is frozen. The input is copied for the first of these reasons.
        probe = torch.zeros_like(output, requires_grad=True)
        seen.append((x.detach().clone(), probe))
        return output + probe

    with torch.inference_mode(False), torch.enable_grad(), layer_by_layer(model):
        # First of all hooks: others may change the output.
        handle = module.register_forward_hook(note, with_kwargs=True, prepend=True)
        try:
            output = _tried(f"the model fails on {_described(inputs)}", model, inputs)
        finally:
            handle.remove()
        given = f"{_described(output)} (output) and {_described(targets)} (targets)"
        remedy = partial(_label_remedy, output, targets)
        value = _tried(f"loss fails on {given}", loss, output, targets, remedy=remedy)
        _check_value(value)
        logits = isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy
        if logits and output.ndim == 2 and is_softmax(output):
            warnings.warn(SOFTMAX_LAST, stacklevel=3)
        if not torch.isfinite(value):
            otherwise = "the loss is not; rescale the data, or look at the loss"
            why = why_not_finite(model, otherwise, inputs=inputs, targets=targets)
            raise ValueError(f"the loss of a batch is {value.item()}: {why}")
        if not seen:
            raise ValueError(
                f"layer {name!r} is not called as a module on these data (MultiheadAttention, for "
                "one, takes the weights of its out_proj itself), so its inputs are not seen"
            )
        probes = [probe for _, probe in seen]
        parameter = module._parameters.get("weight")
        weights = [parameter] if parameter is not None and parameter.requires_grad else []
        deltas: tuple = (None,)
        if value.requires_grad:
            deltas = torch.autograd.grad(value, [*probes, *weights], allow_unused=True)
    if any(delta is None for delta in deltas[: len(probes)]):
        raise ValueError(
            f"no gradient reaches layer {name!r}: the loss does not depend on its output, or a "
            "detach() or no_grad() lies between"
        )
    calls = [(_batched(module, x), _batched(module, d)) for (x, _), d in zip(seen, deltas)]
    if not all(_all_finite(part) for call in calls for part in call):
        otherwise = "what comes of them is not; look at the slopes of the model and of the loss"
        why = why_not_finite(model, otherwise, inputs=inputs, targets=targets)
        raise ValueError(f"layer {name!r} has NaN or infinite inputs or signals: {why}")
    return calls, deltas[-1] if weights else None


def _by_example(
    module: nn.Module, name: str, calls: list[tuple[Tensor, Tensor]], n: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the calls with n entries each, or a multiple, those of an example in a row."""
    moved = [_examples_first(module, x, delta, n) for x, delta in calls]
    if all(len(x) % n == 0 for x, _ in moved):
        return moved
    # Examples that the model goes through one by one, or a few at a time.
    shapes = {(x.shape[1:], delta.shape[1:]) for x, delta in calls}
    if len(shapes) == 1 and sum(len(x) for x, _ in calls) % n == 0:
        return [tuple(torch.cat(parts) for parts in zip(*calls))]
    odd = next(x for x, _ in moved if len(x) % n)
    raise ValueError(
        f"layer {name!r} gets inputs of shape {tuple(odd.shape)} for {n} examples, but their first "
        "dimension must be over the examples"
    )


def _examples_first(module: nn.Module, x: Tensor, delta: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Move the examples to the front of a linear layer's inputs where tokens come first."""
    if isinstance(module, nn.Linear) and len(x) != n and n in x.shape[1:-1]:
        axis = x.shape.index(n, 1)
        return x.movedim(axis, 0), delta.movedim(axis, 0)
    return x, delta


def _all_finite(part: Tensor) -> bool:
    # The sum needs no mask in memory, but that of half precision may overflow.
    return bool(torch.isfinite(part.sum()) or torch.isfinite(part).all())


def _tried(
    what: str, function: Callable[..., Any], *arguments: Any, remedy: Callable[[], str] = str
) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise ValueError(f"{what}: {line or type(error).__name__}{remedy()}") from error


def _label_remedy(output: Any, targets: Any) -> str:
    """Return what to do about targets that losses do not take, or nothing."""
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor) and output.ndim == 2):
        return ""
    if output.shape[1] == 1:
        return "; use y.float()[:, None]" if targets.ndim == 1 else ""
    if targets.shape[1:] == (1,):
        return "; if the targets are labels, use y.squeeze(1)"
    if is_one_hot(targets):
        return "; if the targets are one-hot labels, use y.argmax(dim=1)"
    if targets.ndim == 1 and targets.dtype != torch.int64:
        return "; if the targets are labels, use y.long()"
    if targets.ndim == 1:
        low, high, classes = int(targets.min()), int(targets.max()), output.shape[1]
        if low < 0 or high >= classes:
            return f"; labels lie between {low} and {high}, but 0 to {classes - 1} are needed"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _batched(module: nn.Module, x: Tensor) -> Tensor:
    """Return x with a dimension for the examples, which layers admit to be left out."""
    alone = 1 if isinstance(module, nn.Linear) else len(module.kernel_size) + 1
    return x[None] if x.ndim == alone else x


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back what a pass, or a loader that shuffles, may change: buffers and random numbers."""
    kept = [
        (module._buffers, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for buffers, key, buffer, value in kept:
                buffers[key] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


# --- the Gauss-Newton share -----------------------------------------------------------------------


def _gauss_newton_shares(
    model: nn.Module,
    module: nn.Module,
    name: str,
    batches: list[tuple[Tensor, Tensor]],
    gradients: list[Tensor],
    memory: float,
) -> list[float]:
    """Return |P g|^2 / |g|^2 of each, P the projection on the C top Gauss-Newton directions."""
    if not batches:
        return []
    parameter = next((key for key, p in model.named_parameters() if p is module.weight), None)
    if parameter is None:
        raise ValueError(
            f"the weight of layer {name!r} is no parameter but computed from some, so that it has "
            "no Gauss-Newton directions; leave gauss_newton out"
        )
    curvature = LossCurvature(model, batches, memory=memory, parameters=[parameter])
    g = curvature.gradient()
    rows = torch.stack([G.T.reshape(-1).to(g) for G in gradients])
    if (g - rows[0]).norm() > 1e-3 * rows[0].norm():
        raise ValueError(
            "loss is not the mean softmax cross-entropy of the model's output (or the weight is "
            "used elsewhere, too), so that the Gauss-Newton matrix is another one; leave "
            "gauss_newton out"
        )
    k = min(curvature.classes, curvature.size - 1)
    top = top_eigenpairs(curvature.gauss_newton, k, tolerance=1e-3, residuals=False)
    return ((rows @ top.vectors).square().sum(1) / rows.square().sum(1)).tolist()


# --- what is checked before anything is computed --------------------------------------------------


def _found(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the layer, if it is one that can be diagnosed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but a torch.nn.Module is needed")
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(layer, nn.Module):
        name = next((key for key, module in modules.items() if module is layer), None)
        if name is None:
            raise ValueError(f"layer is a {type(layer).__name__} that is no part of the model")
    elif isinstance(layer, str):
        name = layer
    else:
        raise TypeError(f"layer is a {type(layer).__name__}, but a name or a module is needed")
    names = layer_names(model)
    if name not in modules:
        raise ValueError(f"layer is {name!r}, but {_suggestion(name, names)}")
    refusal = _refusal(modules[name])
    if refusal is not None:
        raise ValueError(f"layer {name!r} {refusal}; {_suggestion(name, names)}")
    _check_untied(model, modules[name], name)
    return name, modules[name]


def _check_untied(model: nn.Module, module: nn.Module, name: str) -> None:
    weight = module._parameters.get("weight")
    for other, part in model.named_modules():
        if part is module or weight is None:
            continue
        if any(p is weight for p in part._parameters.values()):
            raise ValueError(
                f"the weight of layer {name!r} is also that of {other!r}, so that its gradient is "
                "not X^T Delta of one of them; give one of them a copy"
            )


def _suggestion(name: str, names: list[str]) -> str:
    if not names:
        return f"the model has no {_KINDS} to diagnose"
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.4) or names[:4]
    return f"one of the model's {len(names)} layers is needed, such as {', '.join(near)}"


def _refusal(module: nn.Module) -> str | None:
    """Return why a module cannot be diagnosed, or None."""
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"is a {type(module).__name__}, but a {_KINDS} is needed"
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "has no weights yet: call the model once"
    if not module.weight.is_floating_point():
        return f"has weights of dtype {module.weight.dtype}, but floating point is needed"
    if isinstance(module, _CONVOLUTIONS) and module.groups > 1:
        return f"has groups={module.groups}: its gradient is {module.groups} matrices, not one"
    if min(len(module.weight), module.weight[0].numel()) < 2:
        return "has one input or one output: its gradient is a single vector"
    return None


def _check_model(model: nn.Module) -> None:
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            "the model was built or loaded in torch.inference_mode(), so that it has no gradients; "
            "build it outside"
        )
    for name, module in model.named_modules():
        if module.training:
            where = f"the model's module {name!r}" if name else "the model"
            raise ValueError(
                f"{where} is in train mode, where dropout is active and batch norm changes; call "
                "model.eval() first"
            )


def _checked_rows(module: nn.Module, name: str, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of one entry if the layer computes X W^T on them: a subclass may do otherwise."""
    with torch.no_grad():
        output = module.forward(x[:1])  # without the hooks, which have had their turn
        X, Y = _rows_of(module, x[:1], output)
        own = X.double() @ module.weight.detach().double().flatten(1).T
        if module.bias is not None:
            own = own + module.bias.detach().double()
    least = torch.finfo(Y.dtype).tiny
    if float((Y.double() - own).norm()) > _rounding(Y) ** 0.5 * float(own.norm()) + least:
        raise ValueError(
            f"layer {name!r}, a {type(module).__name__}, does not compute x W^T + b with its "
            "weight and bias, so that its gradient is not X^T Delta"
        )
    return _rows_of(module, x[:1], delta[:1])


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise TypeError(
            f"loss is the class {loss.__name__}, but an instance is needed: {loss.__name__}()"
        )
    if not callable(loss):
        raise TypeError(f"loss is a {type(loss).__name__}, but a function of (output, targets)")
    if getattr(loss, "reduction", "mean") != "mean":
        raise ValueError(f"loss has reduction {loss.reduction!r}, but 'mean' is needed")


def _check_value(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss returns a {type(value).__name__}, but a tensor with one number is needed"
        )
    if value.numel() != 1:
        raise ValueError(
            f"loss returns shape {tuple(value.shape)}, but one number is needed: average it"
        )
    if not value.is_floating_point():
        raise TypeError(f"loss returns {value.dtype}, but a floating-point number is needed")


def _batches(data: Any, model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """Yield inputs and targets on the model's device."""
    wanted = "a pair (inputs, targets), or batches of such pairs as from a DataLoader, are needed"
    if isinstance(data, Tensor | str) or not isinstance(data, Iterable):
        raise TypeError(f"data is a {type(data).__name__}, but {wanted}")
    pair = isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "dtype")
    first = next(model.parameters())  # there is one: the layer's
    for batch in [data] if pair else data:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            remedy = pair_remedy(batch)
            raise TypeError(f"data gives a {type(batch).__name__}, but {wanted}{remedy}")
        inputs, targets = batch
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"data gives inputs that are a {type(inputs).__name__}, but a tensor is needed"
            )
        if inputs.ndim == 0 or len(inputs) == 0:
            raise ValueError("data has a batch without examples; leave it out")
        if isinstance(targets, int | float) or getattr(targets, "ndim", 1) == 0:
            raise ValueError("data gives single examples, but batches are needed: use a DataLoader")
        if isinstance(targets, Tensor) and len(targets) != len(inputs):
            raise ValueError(f"data gives {len(inputs)} inputs, but {len(targets)} targets")
        if inputs.is_floating_point() and inputs.dtype != first.dtype:
            raise TypeError(
                f"inputs have dtype {inputs.dtype}, but the model's parameters have {first.dtype}; "
                "convert one of them, as in model.double() or inputs.float()"
            )
        yield _moved(inputs, first.device), _moved(targets, first.device)


def _moved(part: Any, device: torch.device) -> Any:
    if not isinstance(part, Tensor):
        return part
    # What was made in inference mode cannot be differentiated through, but copied.
    with torch.inference_mode(False):
        return (part.clone() if part.is_inference() else part).to(device)
