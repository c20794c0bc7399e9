"""Second derivatives of a classifier's loss: products with the Hessian and Gauss-Newton matrix.

The network's parameters, flattened in the order of ``model.parameters()``, are one vector theta
of length P. For example i, with logits z and probabilities p = softmax(z), J_i = dz/dtheta is C x P
and the logit derivatives are delta_{i,c'} = sqrt(p_c') J_i^T (e_c' - p). Nothing here forms a P x P
matrix, or the derivatives of all examples at once, unless it is asked to.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, linearize
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowgrad_utils import checks

# Bytes that examples take while they are worked on, as multiples of what their forward pass saves
# for its backward pass: that graph, what is kept beside it, and transients. Measured: up to 3 for
# Gauss-Newton products, 7.4 once traced, 4.6 for the Hessian.
_GRAPHS_IN_GAUSS_NEWTON, _GRAPHS_TRACED, _GRAPHS_IN_HESSIAN = 3.5, 7.5, 5
# Of the memory, for what is kept between products and for any other pass over the examples.
_KEPT_SHARE, _PASS_SHARE = 0.8, 0.2
# Of the bytes that a pass saves for its backward pass. Beyond it the largest tensors pass the size
# (32 MB) from which the C library asks the system for fresh pages each time, and passes over an
# example take up to twice as long (measured from 130 MB).
_PASS_BYTES = 128e6
# Tracing a network takes about a second, whatever its size, as long as it then saves in products
# over so many examples times parameters (measured: 2e9 to 1e10).
_WORK_BEFORE_TRACING = 2.8e9
_LARGEST_MATRIX = 20_000
_DROPOUT = nn.modules.dropout._DropoutNd
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, eq=False)
class SymmetricOperator:
    """A symmetric P x P matrix known by its products with vectors.

    Attributes:
        size: P.
        dtype: Type of the vectors it takes.
        device: Where they live.
        product: Maps rows V (K x P) to rows V A.

    Example:
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> operator = SymmetricOperator(2, a.dtype, a.device, lambda rows: rows @ a)
        >>> operator @ torch.tensor([1.0, -1.0])
        tensor([ 1., -1.])
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    product: Callable[[Tensor], Tensor]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Return A v for a vector (P), or A V for a block of columns (P x K).

        Args:
            vectors: Of the operator's dtype.

        Raises:
            TypeError: If ``vectors`` is no tensor with one or two dimensions.
            ValueError: If it has another length, or another dtype.
        """
        if not isinstance(vectors, Tensor) or vectors.ndim not in (1, 2):
            raise TypeError(
                f"a vector of length {self.size}, or a matrix with as many rows, is needed"
            )
        if vectors.shape[0] != self.size or vectors.dtype != self.dtype:
            raise ValueError(
                f"vectors have shape {tuple(vectors.shape)} and dtype {vectors.dtype}, but "
                f"{self.size} rows of {self.dtype} are needed"
            )
        rows = vectors.reshape(self.size, -1).T.contiguous().to(self.device)
        return self.product(rows).T.reshape(vectors.shape)

    def matrix(self) -> Tensor:
        """Return the P x P matrix itself, from P products: for small networks.

        Raises:
            ValueError: If P is above 20,000.
        """
        if self.size > _LARGEST_MATRIX:
            raise ValueError(
                f"the matrix would have {self.size} rows, but at most {_LARGEST_MATRIX} are made; "
                "use products, or top_eigenpairs"
            )
        return self.product(torch.eye(self.size, dtype=self.dtype, device=self.device))


class LossCurvature:
    """Mean softmax cross-entropy of a classifier as a function of its parameters, to second order.

    ``gauss_newton`` is G = (1/n) sum_i J_i^T (diag(p_i) - p_i p_i^T) J_i and ``hessian`` is
    H = G + (1/n) sum_{i,k} (p_i - y_i)_k d^2 z_{i,k} / dtheta^2, both as operators. Examples are
    kept sorted by class, so that whatever is returned for each example is in that order (see
    ``labels``).

    Args:
        model: Any module that maps a batch of inputs to n x C logits, in evaluation mode.
        data: A pair (inputs, labels) of tensors, or an iterable of such pairs, as a DataLoader.
        memory: Gigabytes that the work on the examples may take, beside the data, the model and
            the result. What all examples' forward passes save is kept between products if it fits,
            which makes a product about twice as fast.
        parameters: Names of the parameters that make up theta, in the model's order; by default
            all. Parameters that share a tensor are one.

    Attributes:
        n: Number of examples.
        classes: Number of logits, C.
        size: Number of parameters, P.
        counts: Examples of each class (C, int64).
        labels: Sorted labels (n).
        probabilities: p of the sorted examples (n x C).

    Raises:
        ValueError: If the model is not in evaluation mode, has active dropout or a batch norm that
            uses the batch's statistics, or parameters without gradient; if data are empty, labels
            out of range, or logits not finite.
        TypeError: If parameters are in half precision, labels are no integers, or the model gives
            something other than a tensor of logits.

    Source: Papyan 2019, Section 2.

    Example:
        >>> model = torch.nn.Linear(5, 3).double().eval()
        >>> x = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> at = LossCurvature(model, (x, torch.arange(60) % 3))
        >>> at, torch.dist(at.gauss_newton.matrix(), at.hessian.matrix()).item() < 1e-15
        (LossCurvature(60 examples of 3 classes, 18 parameters), True)
        >>> derivatives = at.logit_derivatives()  # by example, logit and parameter
        >>> means, centres = at.group_means(), at.class_centres()
        >>> torch.allclose(means[0, 2], derivatives[at.labels == 0, 2].mean(0))
        True
        >>> torch.allclose(centres[0], means[0, 1:].mean(0))
        True
        >>> torch.allclose(at.derivatives_along(centres)[1], derivatives @ centres[1])
        True
        >>> loss = torch.nn.functional.cross_entropy(model(x), torch.arange(60) % 3)
        >>> weight, bias = torch.autograd.grad(loss, list(model.parameters()))
        >>> torch.allclose(at.gradient(), torch.cat([weight.flatten(), bias]))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor] | Iterable[tuple[Tensor, Tensor]],
        *,
        memory: float = 2.0,
        parameters: Sequence[str] | None = None,
    ):
        self._bytes = 1e9 * checks.positive("memory", memory)
        _check_mode(model)
        self._model = model
        self._parameters = _chosen_parameters(model, parameters)
        self._slots = _slots(model, self._parameters)
        first = next(iter(self._parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.size = sum(p.numel() for p in self._parameters.values())
        inputs, labels = _gathered(data)
        if inputs.is_floating_point() and inputs.dtype != self.dtype:
            raise TypeError(
                f"inputs have dtype {inputs.dtype}, but the model's parameters have {self.dtype}; "
                "convert one of them, as in model.double() or inputs.float()"
            )
        order = torch.argsort(labels, stable=True)
        self._inputs, self.labels = inputs[order], labels[order]
        self.n = len(labels)
        self._all = torch.arange(self.n, device="cpu")
        self._logits = self._checked_logits()
        self.probabilities = self._logits.softmax(1)
        self.classes = self._logits.shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= self.classes:
            raise ValueError(
                f"labels lie between {int(labels.min())} and {int(labels.max())}, but the model "
                f"has {self.classes} logits; labels 0 to {self.classes - 1} are needed"
            )
        self.counts = torch.bincount(self.labels, minlength=self.classes)

    def __repr__(self) -> str:
        return f"LossCurvature({self.n} examples of {self.classes} classes, {self.size} parameters)"

    # --- the loss and its first derivative ------------------------------------------------------

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return float(_total_loss(self._logits.cpu().double(), self.labels)) / self.n

    def gradient(self, rows: Tensor | None = None) -> Tensor:
        """Return the gradient (1/n) sum_i J_i^T (p_i - y_i) of the mean loss, a vector of length P.

        Args:
            rows: Positions, among the sorted examples, of a mini-batch; all by default.

        Raises:
            TypeError: If ``rows`` is no vector of integers (int64).
            ValueError: If ``rows`` is empty, or has other positions than 0 to n - 1.
        """
        rows = self._checked_rows(rows)
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for part in rows.split(self._pass_size):
            residues, labels = self.probabilities[part], self.labels[part].to(self.device)[:, None]
            residues = residues.scatter(1, labels, -_others(residues).gather(1, labels))
            total += self._pullback(part)(residues / len(rows))
        return total

    # --- products -------------------------------------------------------------------------------

    @cached_property
    def gauss_newton(self) -> SymmetricOperator:
        """The Gauss-Newton matrix G, which for softmax cross-entropy is the Fisher matrix."""
        return SymmetricOperator(self.size, self.dtype, self.device, self._gauss_newton_rows)

    @cached_property
    def hessian(self) -> SymmetricOperator:
        """The Hessian H of the mean loss."""
        return SymmetricOperator(self.size, self.dtype, self.device, self._hessian_rows)

    def _gauss_newton_rows(self, rows: Tensor) -> Tensor:
        products = torch.zeros_like(rows)
        for part, push, pull in self._linear_maps():
            p = self.probabilities[part]
            for row, product in zip(rows, products):
                product += pull(p * _minus_mean(push(row), p) / self.n)
        return products

    def _hessian_rows(self, rows: Tensor) -> Tensor:
        products = torch.zeros_like(rows)
        for parameters, gradient in self._gradient_graphs():
            for row, product in zip(rows, products):
                direction = list(self._unflatten(row).values())
                product += self._derivative(gradient, parameters, direction)
        return products

    # --- logit derivatives and their means ------------------------------------------------------

    def logit_derivatives(self, rows: Tensor | None = None) -> Tensor:
        """Return delta_{i,c'} = sqrt(p_ic') J_i^T (e_c' - p_i), n x C x P: for small networks.

        Args:
            rows: Positions among the sorted examples; all by default.

        Raises:
            TypeError: If ``rows`` is no vector of integers (int64).
            ValueError: If they would take more than ``memory``, or on wrong ``rows``.

        Source: Papyan 2019, Eqs. 13-16.
        """
        rows = self._checked_rows(rows)
        self._check_output("logit derivatives", len(rows) * self.classes)
        derivatives = torch.empty(
            len(rows), self.classes, self.size, dtype=self.dtype, device=self.device
        )
        for part, result in zip(rows.split(1), derivatives):
            pull = self._pullback(part)
            for cotangent, derivative in zip(self._cotangents(part), result):
                derivative.copy_(pull(cotangent))
        return derivatives

    def derivatives_along(self, vectors: Tensor, label: int | None = None) -> Tensor:
        """Return the products <delta_{i,c'}, v_k>, K x n x C, without forming the derivatives.

        Args:
            vectors: K x P.
            label: Only the examples of this class; all by default.

        Raises:
            ValueError: If the vectors are not of length P, or the class has no example.
            TypeError: If they have another dtype than the parameters.
        """
        checks.matrix("vectors", vectors, columns=self.size)
        if vectors.dtype != self.dtype:
            raise TypeError(f"vectors have dtype {vectors.dtype}, but {self.dtype} is needed")
        results = []
        for part in self._parts(label):
            p, push = self.probabilities[part], self._pushforward(part)
            changes = torch.stack([push(vector.to(self.device)) for vector in vectors])
            results.append(p.sqrt() * _minus_mean(changes, p))
        return torch.cat(results, 1)

    def class_centres(self) -> Tensor:
        """Return delta_c = Ave_{c' != c} Ave_{i in c} delta_{i,c'}, C x P: one backward pass.

        A class centre is a vector-Jacobian product over the class's examples, with the cotangent
        v_i = (r_i - (1^T r_i) p_i) / (n_c (C-1)), r_ik = sqrt(p_ik) for k != c, held constant.

        Raises:
            ValueError: If a class has no example.

        Source: Papyan 2019, Eq. 25.
        """
        self._check_classes()

        def cotangents(part: Tensor, label: int) -> Tensor:
            p = self.probabilities[part]
            r = p.sqrt()
            r[:, label] = 0
            # Equal to r - (1^T r) p, where a likely wrong class would leave nothing but rounding.
            return (r * _others(p) - p * _others(r))[None] / (self.classes - 1)

        return self._class_means(cotangents, 1)[:, 0]

    def group_means(self) -> Tensor:
        """Return delta_{c,c'} = Ave_{i in c} delta_{i,c'}, C x C x P: C backward passes.

        Raises:
            ValueError: If a class has no example, or the means would take more than ``memory``.

        Source: Papyan 2019, Eq. 21.
        """
        self._check_classes()
        self._check_output("group means", self.classes**2)
        return self._class_means(lambda part, label: self._cotangents(part), self.classes)

    def _cotangents(self, part: Tensor) -> Tensor:
        """Return sqrt(p_c') (e_c' - p) by logit c', then example, then the coordinate of z."""
        p = self.probabilities[part]
        return p.T.sqrt()[:, :, None] * _units_minus(p)

    def _class_means(self, cotangents: Callable[[Tensor, int], Tensor], count: int) -> Tensor:
        """Return Ave_{i in c} J_i^T v_i of each class, for so many cotangents v of its examples."""
        means = torch.zeros(self.classes, count, self.size, dtype=self.dtype, device=self.device)
        for label, own in enumerate(means):
            for part in self._parts(label):
                pull = self._pullback(part)
                for mean, weights in zip(own, cotangents(part, label)):
                    mean += pull(weights / self.counts[label])
        return means

    # --- the network as a function of theta -----------------------------------------------------

    def _forward(self, theta: dict[str, Tensor], inputs: Tensor) -> Tensor:
        everywhere = {slot: theta[name] for slot, name in self._slots.items()}
        # Of torch's kernels of attention MATH alone has a forward derivative and a second one.
        with layer_by_layer(self._model), sdpa_kernel(SDPBackend.MATH):
            return functional_call(self._model, everywhere, (inputs,), tie_weights=False)

    def _unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([p.numel() for p in self._parameters.values()])
        return {
            name: piece.view(p.shape) for (name, p), piece in zip(self._parameters.items(), pieces)
        }

    def _graph(self, part: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return parameters that require a gradient, and the logits computed from them."""
        # Detached, so that the model's own parameters and their gradients stay as they are.
        theta = {name: p.detach().requires_grad_() for name, p in self._parameters.items()}
        with torch.enable_grad():
            return list(theta.values()), self._forward(theta, self._inputs[part].to(self.device))

    @staticmethod
    def _derivative(outputs: Any, parameters: list[Tensor], cotangents: Any) -> Tensor:
        """Return the derivative of the outputs by the parameters, weighted, as one vector."""
        pieces = torch.autograd.grad(
            outputs, parameters, cotangents, retain_graph=True, materialize_grads=True
        )
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def _pullback(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map from cotangents of the logits (n x C) to sum_i J_i^T v_i."""
        parameters, logits = self._graph(part)
        return partial(self._derivative, logits, parameters)

    def _pushforward(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map v -> J_i v (n x C)."""
        if not self._has_forward_derivative:
            return self._twice_backward(part)
        function = partial(self._forward, inputs=self._inputs[part].to(self.device))
        return lambda v: jvp(function, (self._parameters,), (self._unflatten(v),))[1]

    @cached_property
    def _has_forward_derivative(self) -> bool:
        """Whether every layer has one; an LSTM has not, nor a function with its own backward."""
        function = partial(self._forward, inputs=self._inputs[:1].to(self.device))
        try:
            jvp(function, (self._parameters,), (self._parameters,))
        except RuntimeError:
            return False
        return True

    def _twice_backward(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return v -> J v by two backward passes: u -> J^T u is linear, and its own is v -> J v."""
        parameters, logits = self._graph(part)
        u = torch.zeros_like(logits, requires_grad=True)
        gradient = torch.autograd.grad(
            logits, parameters, u, create_graph=True, materialize_grads=True
        )
        return lambda v: torch.autograd.grad(
            gradient, u, list(self._unflatten(v).values()), retain_graph=True
        )[0]

    def _traced_later(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return v -> J v, which is traced once that pays: the activations are then kept."""
        push, work = self._pushforward(part), 0
        traced = not (self._has_forward_derivative and self._fits(_GRAPHS_TRACED))

        def product(vector: Tensor) -> Tensor:
            nonlocal push, work, traced
            work += len(part) * self.size
            if work > _WORK_BEFORE_TRACING and not traced:
                push, traced = self._linearised(part) or push, True
            return push(vector)

        return product

    def _linearised(self, part: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return v -> J v with the network's activations kept, or None if it cannot be traced."""
        function = partial(self._forward, inputs=self._inputs[part].to(self.device))
        try:
            with warnings.catch_warnings():
                # torch's tracer complains of constants that it itself folds.
                warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
                linear = linearize(function, self._parameters)[1]
        except RuntimeError:
            return None
        return lambda v: linear(self._unflatten(v))

    def _linear_maps(self) -> Iterator[tuple[Tensor, Callable, Callable]]:
        """Yield for each chunk its rows, v -> J v, and u -> J^T u; kept if all fit in memory."""
        if self._fits(_GRAPHS_IN_GAUSS_NEWTON):
            self.__dict__.pop("_kept_gradients", None)  # together they may exceed the memory
            yield from self._kept_maps
            return
        for part in self._parts():
            yield part, self._pushforward(part), self._pullback(part)

    @cached_property
    def _kept_maps(self) -> list[tuple[Tensor, Callable, Callable]]:
        return [(part, self._traced_later(part), self._pullback(part)) for part in self._parts()]

    def _gradient_graphs(self) -> Iterator[tuple[list[Tensor], tuple[Tensor, ...]]]:
        """Yield for each chunk its parameters and the gradient of its loss, to differentiate."""
        if self._fits(_GRAPHS_IN_HESSIAN):
            self.__dict__.pop("_kept_maps", None)
            yield from self._kept_gradients
            return
        for part in self._parts():
            yield self._gradient_graph(part)

    @cached_property
    def _kept_gradients(self) -> list[tuple[list[Tensor], tuple[Tensor, ...]]]:
        return [self._gradient_graph(part) for part in self._parts()]

    def _gradient_graph(self, part: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        parameters, logits = self._graph(part)
        loss = _total_loss(logits, self.labels[part].to(self.device)) / self.n
        return parameters, torch.autograd.grad(
            loss, parameters, create_graph=True, materialize_grads=True
        )

    # --- sizes ----------------------------------------------------------------------------------

    @cached_property
    def _bytes_per_example(self) -> float:
        """What a forward pass saves for its backward pass, per example: the slope over 1 and 2."""
        few = min(2, self.n)
        saved = [_saved_bytes(lambda n=n: self._graph(self._all[:n])) for n in (1, few)]
        return max(saved[1] - saved[0], 1) if few > 1 else saved[0]

    def _fits(self, graphs: float) -> bool:
        """Whether so many graphs of all examples may be kept."""
        return graphs * self._bytes_per_example * self.n <= _KEPT_SHARE * self._bytes

    @property
    def _pass_size(self) -> int:
        """How many examples go through the network at a time."""
        saved = _PASS_SHARE * self._bytes / _GRAPHS_IN_HESSIAN
        if self.device.type == "cpu":
            saved = min(saved, _PASS_BYTES)
        return max(1, int(saved / self._bytes_per_example))

    def _rows(self, label: int) -> slice:
        end = int(self.counts[: label + 1].sum())
        return slice(end - int(self.counts[label]), end)

    def _parts(self, label: int | None = None) -> tuple[Tensor, ...]:
        """Return the rows of a class, or all, in chunks that fit in memory."""
        if label is not None and not (label in range(self.classes) and self.counts[label]):
            known = torch.nonzero(self.counts).flatten().tolist()
            raise ValueError(f"label is {label!r}, but one of {known} is needed")
        rows = self._all if label is None else self._all[self._rows(label)]
        return rows.split(self._pass_size)

    def _checked_rows(self, rows: Tensor | None) -> Tensor:
        if rows is None:
            return self._all
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise TypeError("rows must be a vector of positions, a tensor of dtype int64")
        if len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= self.n:
            raise ValueError(
                f"rows has {len(rows)} positions, but at least one, all from 0 to {self.n - 1}, "
                "is needed"
            )
        return rows.cpu()

    def _checked_logits(self) -> Tensor:
        chunks = self._all.split(256)
        with torch.no_grad():
            logits = torch.cat([self._called(part) for part in chunks])
            again, half = (self._called(chunks[0][: -(-len(chunks[0]) // k)]) for k in (1, 2))
        bad = int((~torch.isfinite(logits)).any(1).sum())
        if bad:
            why = why_not_finite(
                self._model,
                "they overflow on the way; rescale the data, or train with a smaller learning rate",
                inputs=self._inputs,
            )
            raise ValueError(f"{bad} of {self.n} examples have NaN or infinite logits: {why}")
        if is_softmax(logits):
            warnings.warn(SOFTMAX_LAST, stacklevel=3)
        tolerance = torch.finfo(self.dtype).eps ** 0.5 * float(logits.abs().max())
        if (again - logits[: len(again)]).abs().max() > tolerance:
            raise ValueError(
                "the model gives other logits when it is called again: some dropout or noise is "
                "active; switch it off"
            )
        if (half - logits[: len(half)]).abs().max() > tolerance:
            raise ValueError(
                "the model gives other logits for an example when others of its batch are left "
                "out: a layer uses the statistics of the batch; use stored ones, as batch norm "
                "does in evaluation mode"
            )
        return logits

    def _called(self, part: Tensor) -> Tensor:
        """Return the model's logits, after a look at what they are."""
        # In the same way as `_forward`, so that all logits agree to rounding.
        with layer_by_layer(self._model), sdpa_kernel(SDPBackend.MATH):
            inputs = self._inputs[part].to(self.device)
            try:
                logits = self._model(inputs)
            except Exception as error:
                line = str(error).partition("\n")[0] or type(error).__name__
                shown = f"inputs of shape {tuple(inputs.shape)} and {inputs.dtype}"
                raise ValueError(f"the model fails on {shown}: {line}") from error
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"the model returns a {type(logits).__name__}, but a tensor of logits is needed; "
                "wrap it in a module whose forward returns the logits alone"
            )
        if logits.ndim != 2 or len(logits) != len(part) or logits.shape[1] < 2:
            raise ValueError(
                f"the model returns shape {tuple(logits.shape)} for {len(part)} inputs, but one "
                "row of at least 2 logits for each is needed"
            )
        if logits.dtype != self.dtype:
            raise TypeError(
                f"the model returns logits of dtype {logits.dtype}, but its parameters have "
                f"{self.dtype}; remove the conversion"
            )
        return logits

    def _check_classes(self) -> None:
        absent = torch.nonzero(self.counts == 0).flatten().tolist()
        if absent:
            raise ValueError(
                f"class {', '.join(map(str, absent))} of {self.classes} has no example, so that "
                "there are no means of it; add examples, or use a model with fewer logits"
            )

    def _check_output(self, what: str, vectors: int) -> None:
        needed = vectors * self.size * torch.finfo(self.dtype).bits / 8
        if needed > self._bytes:
            raise ValueError(
                f"{what} take {needed / 1e9:.3g} GB ({vectors} vectors of {self.size}), but memory "
                f"is {self._bytes / 1e9:.3g}; raise memory, or use class_centres or products"
            )


# --- softmax, without loss of digits where a probability is nearly 1 -----------------------------


def _others(p: Tensor) -> Tensor:
    """Return sum_{j != k} p_j, n x C: for probabilities 1 - p_k, exact near p_k = 1, too."""
    return p @ (1 - torch.eye(p.shape[1], dtype=p.dtype, device=p.device))


def _units_minus(p: Tensor) -> Tensor:
    """Return e_c' - p by logit c', then example, then coordinate, C x n x C."""
    vectors = -p.repeat(p.shape[1], 1, 1)
    vectors.diagonal(dim1=0, dim2=2).copy_(_others(p))
    return vectors


def _minus_mean(values: Tensor, p: Tensor) -> Tensor:
    """Return values - sum_k p_k values_k over the last dimension, of ... x n x C."""
    # Relative to the likeliest logit, whose own term would otherwise cancel all but rounding.
    top = p.argmax(1, keepdim=True).expand(*values.shape[:-1], 1)
    values = values - values.gather(-1, top)
    return values - (p * values).sum(-1, keepdim=True)


def _total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies, log(1 + sum_{k != c} exp(z_k - z_c))."""
    own = labels[:, None]
    margins = logits.scatter(1, own, -torch.inf).logsumexp(1) - logits.gather(1, own)[:, 0]
    return nn.functional.softplus(margins, threshold=50).sum()


# --- what is checked before anything is computed ------------------------------------------------


def _check_mode(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but a torch.nn.Module is needed")
    for name, module in model.named_modules():
        # Containers too: a module of the user's own may read its flag, and model.eval() sets all.
        if module.training:
            why = "layers would behave as in training"
            if isinstance(module, _DROPOUT):
                why = "dropout is active"
            elif isinstance(module, _BATCH_NORM):
                why = "batch norm would update its statistics"
            where = f"the model's module {name!r}" if name else "the model"
            raise ValueError(f"{where} is in train mode: {why}; call model.eval() first")
        if isinstance(module, _BATCH_NORM) and module.running_mean is None:
            raise ValueError(
                f"the batch norm {name!r} uses the statistics of the batch (it tracks none), so "
                "that an example's logits depend on the others; build it with "
                "track_running_stats=True and train it"
            )


def _chosen_parameters(model: nn.Module, names: Sequence[str] | None) -> dict[str, Tensor]:
    known = dict(model.named_parameters())
    if not known:
        raise ValueError("the model has no parameters")
    if isinstance(names, str):
        raise TypeError(f"parameters is {names!r}, but a list of names is needed: [{names!r}]")
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"parameters has {unknown[0]!r}, but the model has {', '.join(known)}")
    if names is None:
        frozen = [name for name, p in known.items() if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"{len(frozen)} parameters have no gradient (requires_grad=False), {frozen[0]!r} "
                "first; call requires_grad_() on them, or name those wanted in parameters="
            )
    chosen = {name: p for name, p in known.items() if names is None or name in names}
    if not chosen:
        raise ValueError("parameters is empty; name at least one, or leave it out for all")
    dtypes = {p.dtype for p in known.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise TypeError(
            f"the model's parameters have dtype {', '.join(sorted(map(str, dtypes)))}, but all "
            "float64 or all float32 is needed; call model.double()"
        )
    devices = {str(p.device) for p in known.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters lie on {', '.join(sorted(devices))}, but one device is "
            "needed; call model.to(device)"
        )
    return {name: p.detach() for name, p in chosen.items()}


def _slots(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return every place of the named parameters, once for each module, with the name.

    Left to itself, torch's ``functional_call`` exchanges a parameter once for each *name* of its
    module. Of a module with two names it then puts its own tensor back, not the parameter.
    """
    own = dict(model.named_parameters())
    by_identity = {id(own[name]): name for name in names}
    return {
        f"{prefix}.{key}" if prefix else key: by_identity[id(p)]
        for prefix, module in model.named_modules()
        for key, p in module._parameters.items()
        if id(p) in by_identity
    }


def _gathered(data: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and labels, of one pair or of an iterable of batches."""
    wanted = "a pair (inputs, labels) of tensors, or batches of such pairs, are needed"
    if isinstance(data, Tensor | str) or not isinstance(data, Iterable):
        raise TypeError(f"data is a {type(data).__name__}, but {wanted}")
    pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor)
    batches = [tuple(data)] if pair else []
    for batch in () if pair else data:
        if not isinstance(batch, tuple | list):
            remedy = pair_remedy(batch)
            raise TypeError(f"data gives a {type(batch).__name__}, but {wanted}{remedy}")
        batches.append(tuple(batch))
    for batch in batches:
        kinds = [type(piece).__name__ for piece in batch]
        if len(batch) != 2 or not all(isinstance(piece, Tensor) for piece in batch):
            remedy = pair_remedy(batch)
            raise TypeError(f"data gives ({', '.join(kinds)}), but {wanted}{remedy}")
        _check_batch(*batch)
    if sum(len(labels) for _, labels in batches) == 0:
        raise ValueError("data has no examples: the loader, or the tensor, is empty")
    shapes = {tuple(inputs.shape[1:]) for inputs, _ in batches}
    if len(shapes) > 1:
        raise ValueError(
            f"inputs of different batches have shapes {' and '.join(map(str, shapes))} each, but "
            "one shape is needed; pad or crop them"
        )
    inputs, labels = (torch.cat(pieces) for pieces in zip(*batches))
    return inputs, labels.long().cpu()


def _check_batch(inputs: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or inputs.ndim < 1 or len(labels) != len(inputs):
        remedy = "; use y.squeeze(1)" if labels.shape[1:] == (1,) else ""
        remedy = "; use y.argmax(dim=1)" if is_one_hot(labels) and not remedy else remedy
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and inputs {tuple(inputs.shape)}, but one "
            f"label for each input is needed{remedy}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels have dtype {labels.dtype}, but integers are needed; use y.long()")


def pair_remedy(batch: Any) -> str:
    """Return how to make a pair of what data give, for the end of an error's line."""
    if isinstance(batch, Mapping) and len(batch) > 1:
        x, y = list(batch)[:2]
        return f"; give pairs, as in [(b[{x!r}], b[{y!r}]) for b in loader]"
    if isinstance(batch, tuple | list) and len(batch) > 2:
        return "; keep two of each, as in [(b[0], b[1]) for b in loader]"
    return "; use a DataLoader" if isinstance(batch, tuple | list) else ""


def is_softmax(output: Tensor) -> bool:
    """Whether each row of an output looks like probabilities, which no loss of logits expects."""
    sums = output.sum(1)
    return bool((output >= 0).all()) and bool(torch.allclose(sums, torch.ones_like(sums)))


# What a model that ends in a softmax is told.
SOFTMAX_LAST = (
    "the model's outputs are not negative and add up to 1, as after a softmax, but cross-entropy "
    "takes logits; leave the last softmax out"
)


def is_one_hot(labels: Tensor) -> bool:
    """Whether each row of a matrix is one 1 among zeros."""
    if labels.ndim != 2:
        return False
    ones = (labels == 1).sum(1)
    return bool((ones == 1).all()) and int((labels != 0).sum()) == len(labels)


def why_not_finite(model: nn.Module, otherwise: str, **tensors: Any) -> str:
    """Return why a model's results are NaN or infinite, and what to do; for an error's line.

    Args:
        model: The model, whose parameters and buffers are looked at last.
        otherwise: What to say if all is finite.
        **tensors: What the results were computed from, by name, examples first.
    """
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        bad = int((~torch.isfinite(value)).reshape(len(value), -1).any(1).sum())
        if bad:
            return f"{bad} of {len(value)} examples have NaN or infinite {name}; remove them"
    given = " and ".join(tensors)
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    # Infinite buffers are masks.
    broken += [name for name, buffer in model.named_buffers() if torch.isnan(buffer).any()]
    if broken:
        return (
            f"{given} are finite, but the model's {broken[0]!r} is not; train it with a smaller "
            "learning rate, or load a state from before"
        )
    return f"{given} and the model's weights are finite, but {otherwise}"


@contextmanager
def layer_by_layer(model: nn.Module) -> Iterator[None]:
    """Keep torch from kernels that compute several layers or steps at once.

    A transformer's fast path calls no hooks and has no derivative; cuDNN's recurrent layers have
    none in evaluation mode, and never a second one.
    """
    fast, cudnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.enabled
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cudnn.enabled = cudnn and not recurrent
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.cudnn.enabled = cudnn


def _saved_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes that autograd saves, counting tensors that share memory once."""
    storages = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        graph = forward()  # kept, so that no memory is counted that was given back and taken again
    del graph
    return sum(storages.values())
