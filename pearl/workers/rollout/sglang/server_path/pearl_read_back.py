"""Proves what a model inside SGLang serves, in the model's own layout, whatever that is.

The model's own loader runs a second time over the same tensors, and every write into a parameter is replaced by a
comparison with what the parameter holds. So fused, sharded, replicated and stacked parameters need no rules here, and
a parameter that the loader never writes is found, as is a tensor that it never uses. Imports torch alone.
"""

import concurrent.futures
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where a view lies in its storage: offset, sizes and strides, in elements."""
Pieces = list[tuple[str, torch.Tensor]]
"""Tensors under the names that a checkpoint has for them; each has a storage of its own, tied ones the same."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


def read_back(model: torch.nn.Module, pieces: Pieces) -> dict[str, list[str]]:
    """Compare the model's parameters with the pieces they were loaded from.

    Returns the names: ``wrong`` hold other values than the pieces give them, ``unproven`` are not wholly given by the
    pieces, ``unused`` are pieces that reach no parameter.
    """
    comparison = _Comparison(model, pieces)
    with comparison, _one_thread():
        model.load_weights(comparison.given())  # type: ignore[operator]
    return comparison.result()


class _Parameter:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor.detach()
        self.regions: set[Geometry] = set()
        self.is_wrong = False
        self.other_write = ""  # an operation that cannot be compared

    def is_covered(self) -> bool:
        total = sum(math.prod(shape) for _, shape, _ in self.regions)
        if total <= self.tensor.numel():
            return total == self.tensor.numel()
        # Some regions overlap, so that their sizes say nothing.
        storage = self.tensor.untyped_storage()
        seen = torch.zeros(storage.nbytes() // self.tensor.element_size(), dtype=torch.bool)
        for offset, shape, strides in self.regions:
            seen.as_strided(shape, strides, offset).fill_(True)
        own = seen.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        return bool(own.all())


class _Comparison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: torch.nn.Module, pieces: Pieces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces
        self._parameters: dict[int, list[_Parameter]] = {}
        self._all: list[_Parameter] = []
        for name, tensor in model.named_parameters():
            parameter = _Parameter(name, tensor)
            self._all.append(parameter)
            self._parameters.setdefault(_address(tensor), []).append(parameter)
        self._sources = {_address(tensor): _address(tensor) for _, tensor in pieces}
        self._used: set[int] = set()
        self._current = 0  # address of the piece that the loader took last

    def given(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._pieces:
            self._current = _address(tensor)
            yield name, tensor

    def result(self) -> dict[str, list[str]]:
        return {
            "wrong": [parameter.name for parameter in self._all if parameter.is_wrong],
            "unproven": [
                f"{parameter.name} ({parameter.other_write})" if parameter.other_write else parameter.name
                for parameter in self._all
                if parameter.other_write or not parameter.is_covered()
            ],
            "unused": [
                name for name, tensor in self._pieces if tensor.numel() and _address(tensor) not in self._used
            ],
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parameter = self._written(func, args)
        if parameter is None:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is COPY:
            self._compare(parameter, target, args[1])
            self._used.add(self._sources.get(_address(args[1]), self._current))
        elif func in FILLS:
            value = args[1] if len(args) > 1 else 0
            self._compare(parameter, target, torch.as_tensor(value, dtype=target.dtype))
            if math.prod(target.shape) == 1:  # a loader's way to write one number
                self._used.add(self._current)
        else:
            parameter.other_write = str(func)
        return target

    def _written(self, func: Any, args: Any) -> _Parameter | None:
        """The parameter that the operation would write into."""
        arguments = func._schema.arguments
        if not (arguments and args and arguments[0].alias_info and arguments[0].alias_info.is_write):
            return None
        target = args[0]
        if not isinstance(target, torch.Tensor):
            return None
        found = self._parameters.get(_address(target), [])
        return next((one for one in found if _lies_in(target, one.tensor)), None)

    def _compare(self, parameter: _Parameter, target: torch.Tensor, source: torch.Tensor) -> None:
        wanted = source.detach().to(target.device, target.dtype).expand(target.shape)
        kind = BITS[target.element_size()]
        if not torch.equal(target.detach().view(kind), wanted.contiguous().view(kind)):
            parameter.is_wrong = True
        parameter.regions.add((int(target.storage_offset()), tuple(target.shape), target.stride()))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _lies_in(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether one tensor begins within another of the same storage: several parameters may share one."""
    first = whole.storage_offset()
    return first <= view.storage_offset() < first + max(1, whole.numel())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have loaders that hand their writes to threads do them themselves: a comparison sees its own thread alone."""
    original = concurrent.futures.ThreadPoolExecutor
    concurrent.futures.ThreadPoolExecutor = _Immediate  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        concurrent.futures.ThreadPoolExecutor = original  # type: ignore[misc]


class _Immediate(concurrent.futures.Executor):
    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  it belongs to whoever asks for the result
            future.set_exception(error)
        return future
