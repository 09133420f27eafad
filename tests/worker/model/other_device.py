"""A device that this machine does not have: its tensors lie in host memory, and refuse what those
of a real one refuse.

An operation over tensors of both places raises, also where torch would copy an index
without a word.  Copies to the host, waits and the most memory held at once are counted.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
"""Stands for a GPU: torch asks no driver for it."""
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Operations whose results the host has to wait for."""


class There(Tensor):
    """A tensor on the device.  inner: its numbers, in host memory."""

    inner: Tensor
    is_cuda = True
    # What torch gives for "no such function" has fewer parameters than its stubs want.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} outside of the device's context")


class OtherDevice(TorchDispatchMode):
    """The device, while its context is open.

    copied: bytes of each copy to the host.  num_waits: these copies and other waits.
    most_bytes: of all tensors that were alive at once; what an operation needs inside of it is not
                in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []
        self.num_waits = 0
        self.most_bytes = 0
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def place(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return self._there(tensor.clone())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given, _ = tree_flatten((args, kwargs))
        ours = [each for each in given if isinstance(each, There)]
        with self:  # in inference mode whole operations come here, which are made of others
            whole = func.decompose(*args, **kwargs) if ours else NotImplemented
        if whole is not NotImplemented:
            return whole
        if func is torch.ops.aten._to_copy.default and ours and kwargs.get("device") != DEVICE:
            if kwargs.get("device") is not None:
                return self._home(ours[0], kwargs)
        elif ours:
            _check_places(func, given)
        makes = bool(ours) or kwargs.get("device") == DEVICE
        if kwargs.get("device") == DEVICE:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        self.num_waits += bool(ours) and (func in WAITS or _asks_where(func, given))
        known = {id(each.inner): each for each in ours}
        return tree_map(lambda one: self._made(one, known) if makes else one, out)

    def _home(self, tensor: There, kwargs: dict[str, Any]) -> Tensor:
        self.copied.append(tensor.inner.nbytes)
        self.num_waits += 1
        return torch.ops.aten._to_copy.default(tensor.inner, **kwargs)

    def _made(self, one: Any, known: dict[int, There]) -> Any:
        """A result as the device has it; one that was changed in place is the same tensor."""
        if not isinstance(one, Tensor):
            return one
        return known[id(one)] if id(one) in known else self._there(one)

    def _there(self, inner: Tensor) -> There:
        made, storage = There(inner), inner.untyped_storage()
        key = storage.data_ptr()
        self._uses[key] += 1
        self._sizes[key] = storage.nbytes()
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))
        weakref.finalize(made, self._drop, key)
        return made

    def _drop(self, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._sizes[key]


def _inner(each: Any) -> Any:
    return each.inner if isinstance(each, There) else each


def _check_places(func: Any, given: Iterable[Any]) -> None:
    """Refuse tensors of the host beside those of the device; numbers may be."""
    for each in given:
        if isinstance(each, Tensor) and not isinstance(each, There) and each.dim():
            raise RuntimeError(f"{func}: tensors on {DEVICE} and on the host")


def _asks_where(func: Any, given: Iterable[Any]) -> bool:
    """Return whether truth values are an index, whose number of places the host waits for."""
    return func is torch.ops.aten.index.Tensor and any(
        isinstance(each, Tensor) and each.dtype == torch.bool for each in list(given)[1:]
    )
