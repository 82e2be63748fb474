"""Copies later versions of a model straight to where the first one went.

SGLang's ``load_weights`` finds the place of each tensor in loops over names, and copies it alone: 0.1 ms a tensor, 2 s
for the 18,432 matrices of a mixture of 30B, in which the engine generates nothing. The places never change. So one load
is watched, and what later versions have for these names is copied there in a few calls:

    load_weights("q", w)   qkv[0:4].copy_(w[4:8])    the second of two ranks: its half of w, in the first rows of qkv
    recorded               "q": rows 4 to 8  ->  that view of qkv
    next version           torch._foreach_copy_([that view of qkv, ...], [rows 4 to 8 of its w, ...])

All other names are left to load_weights, which takes a part of a model's tensors, as from SGLang for each bucket.

Invariants (tests/unit/engines/sglang/test_destinations.py):
  D1 a name is copied straight only if the watched load did nothing with its tensor but copy parts of it into the model.
     What is multiplied, compared, converted, joined with another, or only kept, is left to load_weights, and so is what
     another thread loads. Not seen would be a tensor that is copied and kept as well.
  D2 nothing else was read from or written to the parameters that it went to: what a model makes of these (w_kc of
     DeepSeek, 1 + weight of Gemma's norms), it makes in load_weights, which then gets all their names.
  D3 no two copies meet, so their order does not matter.
  D4 parameters that are in other memory, or of another shape, than after the watched load have no known places; nor has
     a tensor of another dtype, shape or stride.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_AT_ONCE_BYTES: Final = 32 * 2**20
"""Bytes of one call. Tensors wait for it, and keep the memory that they came in."""
_RECORDINGS: Final = 3
"""Times that a model is watched at most: each takes longer than a load, and some models move with every load."""
_PLAIN: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Parameters of any other type are quantized: kernels that no dispatch mode sees make something of them."""

_log = logging.getLogger(__name__)

Named: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
_Layout: TypeAlias = "tuple[torch.dtype, torch.Size, tuple[int, ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A part of a tensor, and the view of a parameter that it is copied to.

    offset    of the part in elements, from the tensor's first one
    is_whole  whether the part is the tensor
    is_dense  whether it is as contiguous as its destination, and of one dtype: torch copies many of these by one kernel
    """

    into: torch.Tensor
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_whole: bool
    is_dense: bool

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return tensor
        return tensor.as_strided(self.shape, self.stride, int(tensor.storage_offset()) + self.offset)


_Known: TypeAlias = "dict[str, tuple[_Layout, tuple[_Copy, ...]]]"
"""By name: the layout of its tensor, and its copies; none if it is left to load_weights."""


class Destinations:
    """Where the tensors of one model go."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._state: list[Any] = []
        self._recordings = 0

    @contextlib.contextmanager
    def loading(self, model: Any) -> Iterator[Any]:
        """Yield what has ``load_weights`` in place of the model, for one version in one call or several."""
        known, self._known = self._known, None
        if known is not None and self._state != _state(model):
            known = None  # it kept memory that the model has left
        is_plain = all(parameter.dtype in _PLAIN for parameter in model.parameters())
        if not is_plain or (known is None and self._recordings == _RECORDINGS):
            yield model
        elif known is None:
            self._recordings += 1
            recording = _Recording(model)
            yield recording
            self._known, self._state = recording.known(), _state(model)
            if not any(copies for _, copies in self._known.values()):
                self._known, self._recordings = None, _RECORDINGS
        else:
            straight = _Straight(model, known)
            yield straight
            _log.info("new weights: %d tensors copied straight, %d by load_weights", straight.count, straight.others)
            if not straight.is_changed:
                self._known = known


def _state(model: torch.nn.Module) -> list[Any]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return [(name, tensor.data_ptr(), *_layout(tensor)) for name, tensor in tensors]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.dtype, tensor.shape, tensor.stride()


class _Straight:
    """One load by known places.  count, others: tensors copied straight, and left to load_weights"""

    def __init__(self, model: Any, known: _Known) -> None:
        self._model, self._known = model, known
        self._waiting: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._waiting_bytes = 0
        self.count = self.others = 0
        self.is_changed = False
        """Whether there was a tensor of an unknown name or layout."""

    def load_weights(self, named: Named) -> None:
        others = self._without_known(named)
        for one in others:  # a model that needs none of them is not called: it may want all its tensors
            first = [one]
            del one
            self._model.load_weights(_with(first, others))

    def _without_known(self, named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            layout, copies = self._known.get(name, (None, ()))
            if layout != _layout(tensor):
                self.is_changed, copies = True, ()
                self._copy()  # it may go where another went
            if not copies:
                self.others += 1
                yield name, _apart(tensor)
                continue
            self._wait(tensor, copies)
        self._copy()

    def _wait(self, tensor: torch.Tensor, copies: Sequence[_Copy]) -> None:
        self.count += 1
        for copy in copies:
            into, parts = self._waiting.setdefault(copy.is_dense, ([], []))
            into.append(copy.into)
            parts.append(copy.part_of(tensor))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= _AT_ONCE_BYTES:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        """Copy what waits, on the current stream, as load_weights does."""
        for into, parts in self._waiting.values():
            torch._foreach_copy_(into, parts)
        self._waiting.clear()
        self._waiting_bytes = 0


def _with(first: list[tuple[str, torch.Tensor]], others: Named) -> Iterator[tuple[str, torch.Tensor]]:
    yield first.pop()
    yield from others


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its bucket: the model's loop holds it until it gets another, which may be the last."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class _Recording(TorchDispatchMode):
    """One load by load_weights, watched.

    Tensors are recognised by their memory, so views need not be followed. A storage that is gone is not taken for a
    newer one in its place: a weak reference keeps its number.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        own = (_reference(tensor) for tensor in itertools.chain(model.parameters(), model.buffers()))
        self._own = {storage.cdata: storage for storage in own}
        self._given: dict[int, tuple[StorageWeakRef, list[tuple[int, int, str]]]] = {}
        """By storage: begin and end of each tensor that came in it, in bytes."""
        self._layouts: dict[str, _Layout] = {}
        self._begins: dict[str, int] = {}
        self._copies: dict[str, list[_Copy]] = {}
        self._unclear = set[str]()
        self._used = set[int]()
        """Storages of the model from which something else was read, or to which something else was written."""

    def load_weights(self, named: Named) -> None:
        with self:
            self._model.load_weights(self._noted(named))

    def known(self) -> _Known:
        """Return what the load has shown."""
        spans = sorted(
            (_storage(copy.into), *_span(copy.into), name) for name, copies in self._copies.items() for copy in copies
        )
        last = (0, 0, "")
        for storage, begin, end, name in spans:
            if storage == last[0] and begin < last[1]:
                self._unclear |= {name, last[2]}
            last = max(last, (storage, end, name))
            if storage in self._used:
                self._unclear.add(name)
        return {
            name: (layout, () if name in self._unclear else tuple(self._copies.get(name, ())))
            for name, layout in self._layouts.items()
        }

    def _noted(self, named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            met = {*self._names(tensor), *({name} & self._layouts.keys())}
            if met:  # in the memory of another, or twice
                self._unclear |= {name, *met}
            self._layouts[name], self._begins[name] = _layout(tensor), int(tensor.storage_offset())
            reference = _reference(tensor)
            _, spans = self._given.setdefault(reference.cdata, (reference, []))
            insort(spans, (*_span(tensor), name))
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = _tensors_in((*args, *(kwargs or {}).values()))
        if func is torch.ops.aten.copy_.default:
            self._note_copy(*given)
        elif not _is_view(func, given, made):
            for tensor in given:
                self._note_use(tensor)
        return made

    def _note_copy(self, into: torch.Tensor, part: torch.Tensor) -> None:
        names = self._names(part)
        layout = self._layouts[names[0]] if len(names) == 1 else None
        if layout is None or _storage(into) not in self._own or (part.dtype, into.shape) != (layout[0], part.shape):
            self._note_use(into)
            self._note_use(part)
            return
        copy = _Copy(
            into=into.detach(),
            offset=int(part.storage_offset()) - self._begins[names[0]],
            shape=part.shape,
            stride=part.stride(),
            is_whole=_layout(part) == layout,
            is_dense=part.is_contiguous() and into.is_contiguous() and part.dtype == into.dtype,
        )
        self._copies.setdefault(names[0], []).append(copy)

    def _note_use(self, tensor: torch.Tensor) -> None:
        if tensor.numel() and _storage(tensor) in self._own:
            self._used.add(_storage(tensor))
        self._unclear.update(self._names(tensor))

    def _names(self, tensor: torch.Tensor) -> Sequence[str]:
        """Return the names of the tensors that lie in the memory of this one."""
        _, spans = self._given.get(_storage(tensor), (None, []))
        begin, end = _span(tensor)
        first = max(0, bisect_right(spans, begin, key=lambda span: span[0]) - 1)
        from_there = map(spans.__getitem__, range(first, len(spans)))
        return [
            name for _, its_end, name in itertools.takewhile(lambda span: span[0] < end, from_there) if its_end > begin
        ]


def _is_view(func: Any, given: Sequence[torch.Tensor], made: Any) -> bool:
    """Whether an operator has only made views of its arguments."""
    views = _tensors_in((made,))
    return bool(views) and not func._schema.is_mutable and {*map(_storage, views)} <= {*map(_storage, given)}


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors_in(one)
    return found


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1 if tensor.numel() else begin) * tensor.itemsize
