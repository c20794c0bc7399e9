"""A device called "pretend", which keeps its tensors apart from the processor's as a GPU does.

Its numbers lie in a tensor of the processor, so it needs no hardware; but torch takes it for
another device. Tensors of both in one operation, a generator of the processor for numbers made
there, and ``numpy()`` are errors, as on a GPU. What it cannot show: kernels that a GPU lacks, its
rounding, its speed and memory. Importing this module changes torch for the whole process: use a
process of its own.
"""

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
# Modules that are moved get new parameters, as they do wherever memory is not shared.
torch.__future__.set_overwrite_module_params_on_conversion(True)

DEVICE = torch.device("pretend:0")
_ATEN = torch.ops.aten
# A GPU copies from the processor, and takes indices that lie there.
_BOTH = {
    _ATEN.copy_.default,
    _ATEN._to_copy.default,
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
}
_MAKERS = ("empty.memory_format", "empty_strided", "rand", "eye", "linspace", "randperm")


class OnDevice(torch.Tensor):
    """A tensor of the pretended device around one of the processor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=DEVICE, **layout
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})

    def untyped_storage(self):
        """Memory, which torch does not look for in a wrapper."""
        return self.inner.untyped_storage()

    def tolist(self):
        """Numbers, which torch fetches from every device but from no wrapper."""
        return self.inner.tolist()

    def numpy(self, *args, **kwargs):
        """Refuse, as a GPU's tensors do."""
        raise TypeError("can't convert pretend:0 device type tensor to numpy: use Tensor.cpu()")


def _inner(value):
    return value.inner if isinstance(value, OnDevice) else value


def _wrapped(value):
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def _run(operation, args, kwargs):
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if operation not in _BOTH and any(not isinstance(t, OnDevice) and t.dim() for t in given):
        raise RuntimeError(f"expected all tensors on one device, found two in {operation}")
    if kwargs.get("generator") is not None:
        raise RuntimeError("expected a 'pretend' device type for generator but found 'cpu'")
    if operation is _ATEN._local_scalar_dense.default:
        return args[0].inner.item()
    target = kwargs.get("device")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = operation(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if operation is _ATEN._to_copy.default and torch.device(target or DEVICE).type == "cpu":
        return out
    return return_and_correct_aliasing(operation, args, kwargs, tree_map(_wrapped, out))


def _maker(name):
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(_ATEN, packet), overload or "default")
    return lambda *args, **kwargs: _run(operation, args, {**kwargs, "device": DEVICE})


_LIBRARY = torch.library.Library("aten", "IMPL")
for _name in _MAKERS:
    _LIBRARY.impl(_name, _maker(_name), "PrivateUse1")
