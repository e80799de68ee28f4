"""Reads a constant array of a slice at full size: one number everywhere, or a mask that says which keys a query sees.

The array is evaluated element by element from its indices, in blocks of rows, so that a mask of any size takes little
memory. An element that depends on the batch or the heads is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.rewrite.constants import MASK_BLOCK
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Value

Dims = tuple[int | None, int | None]  # of queries and of keys
_UNKNOWN = "the scores take a constant array that is neither a causal mask nor a window"
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "eq": np.equal,
    "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
    "abs": np.abs, "stop_gradient": lambda x: x,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int8), cases),
}  # fmt: skip


@shown
@dataclass(frozen=True)
class StaticArray:
    """A static array of scores' shape.

    Attributes:
        shown: its value where a query sees a key, or its only value.
        hidden: its value elsewhere; None if there is only one value.
        visibility: which keys a query sees.
    """

    shown: Any
    hidden: Any = None
    visibility: Visibility = Visibility()


@shown
@dataclass(frozen=True)
class _Any:
    """An index on which an element must not depend."""


def used_dims(value: Value, known: dict[Value, frozenset[int]] | None = None) -> frozenset[int]:
    """Return the dimensions on whose index the elements of a static array depend."""
    known = {} if known is None else known
    if value not in known:
        known[value] = frozenset(d for d in _used_dims(value, known) if value.shape[d] != 1)
    return known[value]


def _used_dims(value: Value, known: dict[Value, frozenset[int]]) -> Iterable[int]:
    params, rank = value.eqn.params if value.eqn is not None else {}, len(value.shape)
    if value.op == "const" and value.aval.size and np.all(np.asarray(value.data) == np.asarray(value.data).flat[0]):
        return ()
    if value.op == "iota":
        return (params["dimension"],)
    if not value.operands:
        return range(rank)
    inner = [used_dims(v, known) for v in value.operands]
    if not any(inner):
        return () if value.op not in ("cumsum", "sort", "pad", "concatenate") else range(rank)
    if value.op == "broadcast_in_dim":
        return [params["broadcast_dimensions"][d] for d in inner[0]]
    if value.op == "transpose":
        return [params["permutation"].index(d) for d in inner[0]]
    if _keeps_order(value):
        before, after = ([d for d, n in enumerate(v.shape) if n != 1] for v in (value.operands[0], value))
        if [value.operands[0].shape[d] for d in before] == [value.shape[d] for d in after]:
            return [after[before.index(d)] for d in inner[0]]
        return range(rank)
    if value.op in _OPERATORS or value.op in ("convert_element_type", "slice"):
        return frozenset().union(*inner)
    return range(rank)


# Unrolled layers share the arrays of their masks, because equal computations are one value. A refusal is kept as text,
# because an exception holds its frames, and these hold the value.
_known: WeakKeyDictionary[Value, dict[Dims, StaticArray | str]] = WeakKeyDictionary()


def static_array(value: Value, query_dim: int | None, key_dim: int | None) -> StaticArray:
    """Return the values of a static array, and which keys a query sees. Each array is evaluated once.

    Args:
        value: the array.
        query_dim: its dimension of queries; None if it has none.
        key_dim: its dimension of keys.

    Raises:
        Refused: it is neither one number nor a mask that a kernel supports.
    """
    known = _known.setdefault(value, {})
    if (query_dim, key_dim) not in known:
        try:
            known[query_dim, key_dim] = _evaluated(value, query_dim, key_dim)
        except Refused as refused:
            known[query_dim, key_dim] = str(refused)
    found = known[query_dim, key_dim]
    if isinstance(found, str):
        raise Refused(found)
    return found


def _evaluated(value: Value, query_dim: int | None, key_dim: int | None) -> StaticArray:
    shape = value.shape
    if value.aval.size == 1:
        return StaticArray(np.reshape(elements(value, [np.zeros((), np.int64) for _ in shape]), ()))
    if value.op == "const" and not used_dims(value):
        return StaticArray(np.asarray(value.data).flat[0])
    queries = 1 if query_dim is None else shape[query_dim]
    keys = 1 if key_dim is None else shape[key_dim]
    rows = max(1, MASK_BLOCK // keys)

    def block(first: int, last: int) -> np.ndarray:
        index: list[Any] = [np.zeros((), np.int64) if n == 1 else _Any() for n in shape]
        if query_dim is not None:
            index[query_dim] = np.arange(first, last)[:, None]
        if key_dim is not None:
            index[key_dim] = np.arange(keys)[None]
        return np.broadcast_to(elements(value, index), (last - first, keys))

    blocks = ((first, block(first, min(first + rows, queries))) for first in range(0, queries, rows))
    return _classified(queries, keys, blocks, lambda: block(queries - 1, queries)[0])


def _classified(queries: int, keys: int, blocks: Any, last_row: Callable[[], np.ndarray]) -> StaticArray:
    shown_value: Any = None
    hidden: Any = None
    visibility: Visibility | None = None
    for first, block in blocks:
        if first == 0:
            shown_value = block[0, 0]
            ends = block[0] == shown_value, last_row() == shown_value
            visibility = _visibility(queries, keys, *ends)
        seen = block == shown_value
        position = np.arange(first, first + len(block))[:, None]
        if visibility is None or not np.array_equal(
            seen, np.broadcast_to(visibility(position, np.arange(keys)[None]), seen.shape)
        ):
            raise Refused(_UNKNOWN)
        others = block[~seen]
        if others.size:
            hidden = others[0] if hidden is None else hidden
            if not np.all(others == hidden):
                raise Refused(_UNKNOWN)
    if hidden is None:
        return StaticArray(shown_value)
    if queries != keys:
        raise Refused(f"a mask by positions needs as many keys as queries, not {keys} and {queries}")
    assert visibility is not None
    return StaticArray(shown_value, hidden, visibility)


def _visibility(queries: int, keys: int, first: np.ndarray, last: np.ndarray) -> Visibility | None:
    """The visibility that the first and the last row of a mask have; None if there is none."""
    ahead, behind = int(first.sum()), int(last.sum())
    if ahead == keys and behind == keys:
        return Visibility()
    if ahead == 1:
        return Visibility(causal=True, window=None if behind == keys else behind)
    return Visibility(window=ahead) if ahead == behind else None


def elements(value: Value, index: Sequence[Any]) -> Any:
    """Return elements of a static value at some indices, which broadcast.

    Raises:
        Refused: they cannot be computed.
    """
    op, params = value.op, value.eqn.params if value.eqn is not None else {}
    if op in ("literal", "const"):
        data = np.asarray(value.data)
        if value.op == "const" and data.ndim and not used_dims(value):
            return data.flat[0]
        return data[tuple(map(_number, index))] if data.ndim else data
    operands = value.operands
    if op == "iota":
        return _number(index[params["dimension"]]).astype(value.aval.dtype)
    if op == "broadcast_in_dim":
        inner = [
            np.zeros((), np.int64) if size == 1 else index[d]
            for size, d in zip(operands[0].shape, params["broadcast_dimensions"], strict=True)
        ]
        return elements(operands[0], inner)
    if op == "transpose":
        inner = [index[params["permutation"].index(d)] for d in range(len(index))]
        return elements(operands[0], inner)
    if _keeps_order(value):
        return elements(operands[0], _reshaped(index, value.shape, operands[0].shape))
    if op == "slice":
        strides = params["strides"] or (1,) * len(index)
        starts = zip(index, params["start_indices"], strides, strict=True)
        return elements(operands[0], [i if (s, k) == (0, 1) else _number(i) * k + s for i, s, k in starts])
    if op == "convert_element_type":
        return np.asarray(elements(operands[0], index)).astype(value.aval.dtype)
    if op in _OPERATORS:
        zero = np.zeros((), np.int64)  # an operand of size 1 is repeated
        parts = [elements(v, [zero if n == 1 else i for n, i in zip(v.shape, index, strict=False)]) for v in operands]
        return _OPERATORS[op](*parts)
    return _whole(value)[tuple(map(_number, index))]


def _keeps_order(value: Value) -> bool:
    """Whether a value is another one in a new shape, with the same elements in row-major order."""
    return value.op in ("squeeze", "expand_dims") or (value.op == "reshape" and value.eqn.params["dimensions"] is None)


def _number(index: Any) -> np.ndarray:
    if isinstance(index, _Any):
        raise Refused(
            "a constant array of the scores, such as ALiBi's bias, differs between rows of the batch or heads"
        )
    return index


def _reshaped(index: Sequence[Any], shape: Sequence[int], target: Sequence[int]) -> list[Any]:
    """Return the indices into an operand of a reshape."""
    left = [(i, n) for i, n in zip(index, shape, strict=True) if n != 1]
    sizes = [n for n in target if n != 1]
    zero = np.zeros((), np.int64)
    if [n for _, n in left] == sizes:
        parts = iter(i for i, _ in left)
        return [zero if n == 1 else next(parts) for n in target]
    flat = zero
    for i, n in left:
        flat = flat * n + _number(i)
    found: list[Any] = []
    for n in reversed(target):
        found.append(flat % n if n > 1 else zero)
        flat = flat // n if n > 1 else flat
    return found[::-1]


def _whole(value: Value) -> np.ndarray:
    """Evaluate a static value as a whole."""
    if value.aval.size > MASK_BLOCK:
        raise Refused(_UNKNOWN)
    if value.op in ("literal", "const"):
        return np.asarray(value.data)
    operands = [_whole(v) for v in value.operands]
    with jax.ensure_compile_time_eval():
        return np.asarray(_compat.bind(value.eqn, value.eqn.params, *operands)[value.index])
