"""Second derivatives of a classifier's loss: products with the Hessian and Gauss-Newton matrix.

The network's parameters, flattened in the order of ``model.parameters()``, are one vector theta
of length P. For example i, with logits z and probabilities p = softmax(z), J_i = dz/dtheta is C x P
and the logit derivatives are delta_{i,c'} = sqrt(p_c') J_i^T (e_c' - p). Nothing here forms a P x P
matrix, or the derivatives of all examples at once, unless it is asked to.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, linearize, vmap

from lowgrad_utils import checks

# Bytes a chunk of examples takes while it is worked on, as multiples of what one forward pass
# saves for its backward pass: the graph itself, the linear map beside it, and transients.
_GRAPHS_IN_GAUSS_NEWTON, _GRAPHS_IN_HESSIAN = 4, 6
_EXAMPLES_BEFORE_TRACING = 2000
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, eq=False)
class SymmetricOperator:
    """A symmetric P x P matrix known by its products with vectors.

    Attributes:
        size: P.
        dtype: Type of the vectors it takes.
        device: Where they live.
        product: Maps rows V (K x P) to rows V A.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    product: Callable[[Tensor], Tensor]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Return A v for a vector (P), or A V for a block of columns (P x K)."""
        if not isinstance(vectors, Tensor) or vectors.ndim not in (1, 2):
            raise TypeError(
                f"a vector of length {self.size}, or a matrix with as many rows, is needed"
            )
        if vectors.shape[0] != self.size or vectors.dtype != self.dtype:
            raise ValueError(
                f"vectors have shape {tuple(vectors.shape)} and dtype {vectors.dtype}, but "
                f"{self.size} rows of {self.dtype} are needed"
            )
        rows = vectors.reshape(self.size, -1).T.to(self.device)
        return self.product(rows).T.reshape(vectors.shape)

    def matrix(self) -> Tensor:
        """Return the P x P matrix itself, from P products: for small networks."""
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
        memory: Gigabytes that the work on the examples may take. Linear maps of all examples are
            kept between products if they fit, which makes a product about twice as fast.
        parameters: Names of the parameters that make up theta; by default all.

    Attributes:
        n: Number of examples.
        classes: Number of logits, C.
        size: Number of parameters, P.
        counts: Examples of each class (C, int64).
        labels: Sorted labels (n).

    Raises:
        ValueError: If the model is not in evaluation mode, has active dropout or a batch norm that
            uses the batch's statistics, or parameters without gradient; if data are empty, labels
            out of range, or logits not finite.
        TypeError: If parameters are in half precision, or labels are no integers.

    Source: Papyan 2019, Section 2.

    Example:
        >>> model = torch.nn.Linear(5, 3).double().eval()
        >>> x = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> at = LossCurvature(model, (x, torch.arange(60) % 3))
        >>> at, torch.dist(at.gauss_newton.matrix(), at.hessian.matrix()).item() < 1e-15
        (LossCurvature(60 examples of 3 classes, 18 parameters), True)
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
        self._logits = self._checked_logits()
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
    def probabilities(self) -> Tensor:
        """Probabilities p = softmax(z) of the sorted examples, n x C."""
        return self._logits.softmax(1)

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return float(nn.functional.cross_entropy(self._logits, self.labels.to(self.device)))

    def gradient(self, rows: Tensor | None = None) -> Tensor:
        """Return the gradient (1/n) sum_i J_i^T (p_i - y_i) of the mean loss, a vector of length P.

        Args:
            rows: Positions, among the sorted examples, of a mini-batch; all by default.
        """
        rows = torch.arange(self.n) if rows is None else rows
        residues = self.probabilities
        residues[torch.arange(self.n), self.labels.to(self.device)] -= 1
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for part in rows.split(self._chunk_size(_GRAPHS_IN_GAUSS_NEWTON)):
            total += self._pullback(part)(residues[part.to(self.device)] / len(rows))
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
                change = push(row)
                product += pull((p * change - p * (p * change).sum(1, keepdim=True)) / self.n)
        return products

    def _hessian_rows(self, rows: Tensor) -> Tensor:
        products = torch.zeros_like(rows)
        for parameters, gradient in self._gradient_graphs():
            for row, product in zip(rows, products):
                change = torch.autograd.grad(
                    gradient,
                    parameters,
                    list(self._unflatten(row).values()),
                    retain_graph=True,
                    materialize_grads=True,
                )
                product += _flatten(change)
        return products

    # --- logit derivatives and their means ------------------------------------------------------

    def logit_derivatives(self, rows: Tensor | None = None) -> Tensor:
        """Return delta_{i,c'} = sqrt(p_ic') J_i^T (e_c' - p_i), n x C x P: for small networks.

        Args:
            rows: Positions among the sorted examples; all by default.

        Raises:
            ValueError: If they would take more than ``memory``.

        Source: Papyan 2019, Eqs. 13-16.
        """
        rows = torch.arange(self.n) if rows is None else rows
        self._check_output("logit derivatives", len(rows) * self.classes)
        p = self.probabilities[rows.to(self.device)]
        jacobians = vmap(
            jacrev(lambda theta, x: self._forward(theta, x[None])[0]), (None, 0), chunk_size=64
        )(self._parameters, self._inputs[rows].to(self.device))
        jacobian = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
        centred = jacobian - torch.einsum("nk,nkp->np", p, jacobian)[:, None]
        return p.sqrt()[:, :, None] * centred

    def derivatives_along(self, vectors: Tensor, label: int | None = None) -> Tensor:
        """Return the products <delta_{i,c'}, v_k>, K x n x C, without forming the derivatives.

        Args:
            vectors: K x P.
            label: Only the examples of this class; all by default.
        """
        results = []
        for part in self._parts(label, _GRAPHS_IN_GAUSS_NEWTON):
            p = self.probabilities[part]
            changes = torch.stack([self._pushforward(part, vector) for vector in vectors])
            results.append(p.sqrt() * (changes - (p * changes).sum(2, keepdim=True)))
        return torch.cat(results, 1)

    def class_centres(self) -> Tensor:
        """Return delta_c = Ave_{c' != c} Ave_{i in c} delta_{i,c'}, C x P: one backward pass.

        A class centre is a vector-Jacobian product over the class's examples, with the cotangent
        v_i = (r_i - (1^T r_i) p_i) / (n_c (C-1)), r_ik = sqrt(p_ik) for k != c, held constant.

        Raises:
            ValueError: If a class has no example.

        Source: Papyan 2019, Eq. 25.
        """
        cotangents = []
        for label in range(self.classes):
            p = self.probabilities[self._rows(label)]
            r = p.sqrt()
            r[:, label] = 0
            cotangents.append(
                (r - r.sum(1, keepdim=True) * p)[None] / (len(p) * (self.classes - 1))
            )
        return self._means(cotangents)[:, 0]

    def group_means(self) -> Tensor:
        """Return delta_{c,c'} = Ave_{i in c} delta_{i,c'}, C x C x P: C backward passes.

        Raises:
            ValueError: If a class has no example, or the means would take more than ``memory``.

        Source: Papyan 2019, Eq. 21.
        """
        self._check_output("group means", self.classes**2)
        cotangents = []
        identity = torch.eye(self.classes, dtype=self.dtype, device=self.device)
        for label in range(self.classes):
            p = self.probabilities[self._rows(label)]
            # By logit c', then example, then the coordinate of z.
            centred = identity[:, None, :] - p[None]
            cotangents.append(p.T.sqrt()[:, :, None] * centred / len(p))
        return self._means(cotangents)

    def _means(self, cotangents: list[Tensor]) -> Tensor:
        """Return sum_i J_i^T v_i over each class, for the K cotangents (K x n_c x C) of each."""
        self._check_classes()
        means = torch.zeros(
            self.classes, len(cotangents[0]), self.size, dtype=self.dtype, device=self.device
        )
        for label, cotangent in enumerate(cotangents):
            done = 0
            for part in self._parts(label, _GRAPHS_IN_GAUSS_NEWTON):
                pull = self._pullback(part)
                for mean, weights in zip(means[label], cotangent[:, done : done + len(part)]):
                    mean += pull(weights)
                done += len(part)
        return means

    # --- the network as a function of theta -----------------------------------------------------

    def _forward(self, theta: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(self._model, theta, (inputs,))

    def _unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([p.numel() for p in self._parameters.values()])
        return {
            name: piece.view(p.shape) for (name, p), piece in zip(self._parameters.items(), pieces)
        }

    def _graph(self, part: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return fresh parameters that require a gradient, and the logits computed from them."""
        theta = {k: p.detach().clone().requires_grad_() for k, p in self._parameters.items()}
        with torch.enable_grad():
            return list(theta.values()), self._forward(theta, self._inputs[part].to(self.device))

    def _pullback(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map from cotangents of the logits (n x C) to sum_i J_i^T v_i."""
        parameters, logits = self._graph(part)
        return lambda cotangent: _flatten(
            torch.autograd.grad(
                logits, parameters, cotangent, retain_graph=True, materialize_grads=True
            )
        )

    def _pushforward(self, part: Tensor, vector: Tensor) -> Tensor:
        """Return J_i v (n x C)."""
        function = partial(self._forward, inputs=self._inputs[part].to(self.device))
        try:
            return jvp(function, (self._parameters,), (self._unflatten(vector),))[1]
        except NotImplementedError:
            return self._twice_backward(part)(vector)

    def _twice_backward(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return v -> J v for layers without a forward derivative, such as an LSTM.

        u -> J^T u is linear, and its own backward pass is v -> J v.
        """
        parameters, logits = self._graph(part)
        u = torch.zeros_like(logits, requires_grad=True)
        gradient = torch.autograd.grad(
            logits, parameters, u, create_graph=True, materialize_grads=True
        )
        return lambda vector: torch.autograd.grad(
            gradient, u, list(self._unflatten(vector).values()), retain_graph=True
        )[0]

    def _linearised(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        """Return v -> J v that keeps the network's activations once they are worth keeping.

        Tracing a deep network takes seconds, as long as a few passes over some thousand examples.
        """
        examples, linear = 0, None

        def push(vector: Tensor) -> Tensor:
            nonlocal examples, linear
            examples += len(part)
            if examples <= _EXAMPLES_BEFORE_TRACING:
                return self._pushforward(part, vector)
            if linear is None:
                linear = self._traced(part)
            return linear(vector)

        return push

    def _traced(self, part: Tensor) -> Callable[[Tensor], Tensor]:
        function = partial(self._forward, inputs=self._inputs[part].to(self.device))
        try:
            with warnings.catch_warnings():
                # torch's tracer complains of constants that it itself folds.
                warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
                linear = linearize(function, self._parameters)[1]
        except (NotImplementedError, RuntimeError):
            return self._twice_backward(part)
        return lambda vector: linear(self._unflatten(vector))

    def _linear_maps(self) -> Iterator[tuple[Tensor, Callable, Callable]]:
        """Yield for each chunk its rows, v -> J v, and u -> J^T u; kept if all fit in memory."""
        if self.n <= self._chunk_size(_GRAPHS_IN_GAUSS_NEWTON):
            self.__dict__.pop("_kept_gradient", None)  # together they may exceed the memory
            yield self._kept_maps
            return
        for part in self._parts(None, _GRAPHS_IN_GAUSS_NEWTON):
            yield part, partial(self._pushforward, part), self._pullback(part)

    @cached_property
    def _kept_maps(self) -> tuple[Tensor, Callable, Callable]:
        part = torch.arange(self.n)
        return part, self._linearised(part), self._pullback(part)

    def _gradient_graphs(self) -> Iterator[tuple[list[Tensor], tuple[Tensor, ...]]]:
        """Yield for each chunk its parameters and the gradient of its loss, to differentiate."""
        if self.n <= self._chunk_size(_GRAPHS_IN_HESSIAN):
            self.__dict__.pop("_kept_maps", None)
            yield self._kept_gradient
            return
        for part in self._parts(None, _GRAPHS_IN_HESSIAN):
            yield self._gradient_graph(part)

    @cached_property
    def _kept_gradient(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        return self._gradient_graph(torch.arange(self.n))

    def _gradient_graph(self, part: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        parameters, logits = self._graph(part)
        labels = self.labels[part].to(self.device)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / self.n
        return parameters, torch.autograd.grad(
            loss, parameters, create_graph=True, materialize_grads=True
        )

    # --- sizes ----------------------------------------------------------------------------------

    @cached_property
    def _bytes_per_example(self) -> float:
        """What a forward pass saves for its backward pass, per example: the slope over 1 and 2."""
        saved = [
            _saved_bytes(lambda n=n: self._graph(torch.arange(n))) for n in (1, min(2, self.n))
        ]
        return max(saved[1] - saved[0], 1) if self.n > 1 else saved[0]

    def _chunk_size(self, graphs: int) -> int:
        return max(1, int(self._bytes / (graphs * self._bytes_per_example)))

    def _rows(self, label: int) -> slice:
        end = int(self.counts[: label + 1].sum())
        return slice(end - int(self.counts[label]), end)

    def _parts(self, label: int | None, graphs: int) -> tuple[Tensor, ...]:
        """Return the rows of a class, or all, in chunks that fit in memory."""
        rows = torch.arange(self.n)
        return (rows if label is None else rows[self._rows(label)]).split(self._chunk_size(graphs))

    def _checked_logits(self) -> Tensor:
        logits = []
        with torch.no_grad():
            for part in torch.arange(self.n).split(256):
                logits.append(self._model(self._inputs[part].to(self.device)))
            again = self._model(self._inputs[:256].to(self.device))
        if logits[0].ndim != 2 or len(logits[0]) != min(256, self.n) or logits[0].shape[1] < 2:
            raise ValueError(
                f"the model returns shape {tuple(logits[0].shape)} for {min(256, self.n)} inputs, "
                "but one row of at least 2 logits for each is needed"
            )
        joined = torch.cat(logits)
        bad = int((~torch.isfinite(joined)).any(1).sum())
        if bad:
            raise ValueError(
                f"{bad} of {self.n} examples have NaN or infinite logits; remove them, or train "
                "with a smaller learning rate"
            )
        if not torch.equal(again, logits[0]):
            raise ValueError(
                "the model gives other logits when it is called again: some dropout or noise is "
                "active; switch it off"
            )
        return joined

    def _check_classes(self) -> None:
        absent = torch.nonzero(self.counts == 0).flatten().tolist()
        if absent:
            raise ValueError(
                f"class {', '.join(map(str, absent))} of {self.classes} has no example, so that "
                "its means do not exist; add examples, or use a model with fewer logits"
            )

    def _check_output(self, what: str, vectors: int) -> None:
        needed = vectors * self.size * torch.finfo(self.dtype).bits / 8
        if needed > self._bytes:
            raise ValueError(
                f"{what} take {needed / 1e9:.3g} GB ({vectors} vectors of {self.size}), but memory "
                f"is {self._bytes / 1e9:.3g}; raise memory, or use class_centres or products"
            )


# --- what is checked before anything is computed ------------------------------------------------


def _check_mode(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but a torch.nn.Module is needed")
    for name, module in model.named_modules():
        if module.training and not isinstance(module, _DROPOUT | _BATCH_NORM) and name:
            continue  # a container's own flag changes nothing unless a layer reads it
        if module.training:
            why = {
                isinstance(module, _DROPOUT): "dropout is active",
                isinstance(module, _BATCH_NORM): "batch norm would update its statistics",
            }.get(True, "layers would behave as in training")
            where = f"its layer {name!r}" if name else "the model"
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
    chosen = known if names is None else {k: p for k, p in known.items() if k in set(names)}
    if not chosen:
        raise ValueError("parameters is empty; name at least one, or leave it out for all")
    dtypes = {p.dtype for p in chosen.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise TypeError(
            f"parameters have dtype {', '.join(map(str, dtypes))}, but all float64 or all float32 "
            "is needed; call model.double()"
        )
    return {name: p.detach() for name, p in chosen.items()}


def _gathered(data: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and labels, of one pair or of an iterable of batches."""
    if isinstance(data, Tensor | str) or not isinstance(data, Iterable):
        raise TypeError(
            f"data is a {type(data).__name__}, but a pair (inputs, labels), or batches of such "
            "pairs, are needed"
        )
    pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor)
    batches = [tuple(data)] if pair else [tuple(batch) for batch in data]
    if not batches or sum(len(batch[0]) for batch in batches) == 0:
        raise ValueError("data has no examples: the loader, or the tensor, is empty")
    inputs, labels = (torch.cat([batch[k] for batch in batches]) for k in (0, 1))
    if labels.ndim != 1 or len(labels) != len(inputs):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, but one for each of {len(inputs)} inputs is "
            "needed"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels have dtype {labels.dtype}, but integers are needed; use y.long()")
    return inputs, labels.long().cpu()


def _flatten(pieces: Iterable[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _saved_bytes(forward: Callable[[], Any]) -> int:
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        forward()
    return total
