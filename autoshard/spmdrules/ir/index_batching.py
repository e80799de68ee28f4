"""Rewrites gathers and scatters to batched ones where their index counts along a dimension.

``x[jnp.arange(batch)[:, None], tokens]`` reads row 0 of `x` for row 0 of `tokens`, row 1 for row 1, and so on: a batch
of smaller gathers, which can be sharded without communication. Neither a rule nor XLA's partitioner can see this from
the operator alone, because its indices are ordinary values. So integers that do not depend on the
program's inputs are tracked through the operations that turn them into indices (wrapping negative ones, broadcasting,
concatenating components). Where a component of the index counts 0, 1, 2, ... along a dimension of the indices, and over
the whole dimension of the operand, it is replaced by a pair of batching dimensions. The result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from autoshard import _compat
from autoshard._shown import shown

# An array that varies along at most one dimension; every other dimension has size 1.
Line = np.ndarray

_POINTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert, "copy": np.asarray, "stop_gradient": np.asarray,
    "convert_element_type": np.asarray, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases, mode="clip"),
}  # fmt: skip
# Both limits are in elements, chosen and not measured.
_MAX_LINE = 1 << 20  # longer lines are not tracked: the iotas that generate random bits are longer than any batch
_MAX_CONSTANT = 1 << 22  # larger constants are not examined: they are data, not indices
_RESHAPES = ("reshape", "squeeze", "expand_dims")
_MAPPED = ("start_index_map", "scatter_dims_to_operand_dims")
_DROPPED = ("collapsed_slice_dims", "inserted_window_dims")
_BATCHES = ("start_indices_batching_dims", "scatter_indices_batching_dims")


@shown
@dataclass(eq=False)
class ConstantIndices:
    """The integer values of a program that do not depend on its inputs, by value number.

    Attributes:
        lines: the contents of a value that varies along at most one dimension.
        components: for a value that is a concatenation along its last dimension, the contents of each element of that
            dimension; None where unknown.
    """

    lines: dict[int, Line] = field(default_factory=dict)
    components: dict[int, list[Line | None]] = field(default_factory=dict)

    def add_constant(self, value: int, array: Any) -> None:
        """Records the contents of a constant of the program."""
        if not isinstance(array, np.ndarray | jax.Array) or _compat.is_tracer(array) or not _is_integer(array.dtype):
            return
        is_local = isinstance(array, np.ndarray) or array.is_fully_addressable
        if is_local and array.size <= _MAX_CONSTANT:
            self._record_line(value, _line(np.asarray(array)))

    def add_result(self, eqn: Any, operands: Sequence[int], results: Sequence[int]) -> None:
        """Records the contents of the result of an equation, where they are known."""
        if len(results) != 1 or not _is_integer(getattr(eqn.outvars[0].aval, "dtype", None)):
            return
        given = [self._line_of(*each) for each in zip(eqn.invars, operands, strict=True)]
        shape = eqn.outvars[0].aval.shape
        if eqn.primitive.name == "concatenate" and eqn.params["dimension"] == len(shape) - 1:
            components = [self._components_of(*each) for each in zip(eqn.invars, operands, given, strict=True)]
            self.components[results[0]] = [component for part in components for component in part]
        elif (result := _evaluate(eqn, given)) is not None:
            self._record_line(results[0], result.astype(eqn.outvars[0].aval.dtype))

    def rewrite(self, eqn: Any, operands: Sequence[int]) -> tuple[Any, ...]:
        """Returns the equations that replace an equation: itself, or those of the batched gather or scatter."""
        if eqn.primitive.name != "gather" and not eqn.primitive.name.startswith("scatter"):
            return (eqn,)
        components = self.components.get(operands[1])
        if components is None:
            return (eqn,)
        x, indices = (v.aval.shape for v in eqn.invars[:2])
        counted = _counting_components(components, x, indices, eqn.params["dimension_numbers"])
        kept = [p for p in range(len(components)) if p not in counted]
        return _with_batching_dims(eqn, counted, kept) if counted and kept else (eqn,)

    def _record_line(self, value: int, line: Line | None) -> None:
        if line is not None and sum(n != 1 for n in line.shape) <= 1 and line.size <= _MAX_LINE:
            self.lines[value] = line

    def _line_of(self, atom: Any, value: int) -> Line | None:
        if value >= 0:
            return self.lines.get(value)
        return _line(np.asarray(atom.val).astype(atom.aval.dtype)) if _is_integer(atom.aval.dtype) else None

    def _components_of(self, atom: Any, value: int, line: Line | None) -> list[Line | None]:
        count = atom.aval.shape[-1]
        return self.components.get(value) or ([line] if count == 1 else [None] * count)


def _is_integer(dtype: Any) -> bool:
    return dtype is not None and not _compat.is_extended(dtype) and np.dtype(dtype).kind in "biu"


def _line(array: np.ndarray) -> Line | None:
    """Shrinks every dimension along which an array is constant to size 1; None if two or more dimensions vary."""
    for d, size in enumerate(array.shape):
        first = array.take([0], d) if size else array
        if size > 1 and (array == first).all():
            array = first
    return array if sum(n != 1 for n in array.shape) <= 1 else None


def _evaluate(eqn: Any, given: Sequence[Line | None]) -> Line | None:
    """Returns the result of an equation for these operands, None if it is not known."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    if name == "iota" and not given and shape[params["dimension"]] <= _MAX_LINE:
        return _along(np.arange(shape[params["dimension"]]), params["dimension"], len(shape))
    lines = [line for line in given if line is not None]
    if not lines or len(lines) < len(given):
        return None
    if name in _POINTWISE:
        with np.errstate(over="ignore"):
            return _POINTWISE[name](*lines)
    if name == "broadcast_in_dim":
        sizes = dict(zip(params["broadcast_dimensions"], lines[0].shape, strict=True))
        return lines[0].reshape([sizes.get(d, 1) for d in range(len(shape))])
    if name in _RESHAPES and not (name == "reshape" and params["dimensions"]):
        return _reshaped(lines[0], eqn.invars[0].aval.shape, shape)
    return None


def _along(numbers: np.ndarray, dimension: int, rank: int) -> Line:
    return numbers.reshape([-1 if d == dimension else 1 for d in range(rank)])


def _reshaped(line: Line, old: Sequence[int], new: Sequence[int]) -> Line | None:
    """Reshapes a line, which may gain and lose dimensions of size 1; None if its own dimension is merged or split."""
    d = next((d for d, n in enumerate(line.shape) if n != 1), None)
    if d is None:
        return line.reshape([1] * len(new))
    before = math.prod(old[:d])
    e = next((e for e, n in enumerate(new) if n == old[d] and math.prod(new[:e]) == before), None)
    return None if e is None else _along(line.ravel(), e, len(new))


def _field(numbers: Any, names: Sequence[str]) -> str:
    """Returns the one of `names` that is a field of these dimension numbers; gathers and scatters differ in it."""
    return next(name for name in names if hasattr(numbers, name))


def _counting_components(
    components: Sequence[Line | None], x: Sequence[int], indices: Sequence[int], numbers: Any
) -> dict[int, tuple[int, int]]:
    """Finds the index components that count 0, 1, 2, ... over a whole dimension of the operand.

    Returns:
        component -> (the dimension of the operand that it indexes, the dimension of the indices that it counts along).
    """
    mapped, dropped = (getattr(numbers, _field(numbers, names)) for names in (_MAPPED, _DROPPED))
    used = set(getattr(numbers, _field(numbers, _BATCHES)))
    found: dict[int, tuple[int, int]] = {}
    for p, (line, d) in enumerate(zip(components, mapped, strict=True)):
        if line is None or d not in dropped or x[d] < 2 or line.size != x[d]:
            continue
        along = line.shape.index(x[d])
        spans = along < len(indices) - 1 and indices[along] == x[d]
        if spans and along not in used and (line.ravel() == np.arange(x[d])).all():
            found[p] = d, along
            used.add(along)
    return found


def _with_batching_dims(eqn: Any, counted: Mapping[int, tuple[int, int]], kept: Sequence[int]) -> tuple[Any, ...]:
    """Returns the batched operator, preceded by the equations that select the other components of the indices."""
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
    mapped, dropped, batches = (_field(numbers, names) for names in (_MAPPED, _DROPPED, _BATCHES))
    pairs = [*zip(numbers.operand_batching_dims, getattr(numbers, batches), strict=True), *counted.values()]
    operand, along = zip(*sorted(pairs), strict=True)
    changed = numbers._replace(**{
        mapped: tuple(getattr(numbers, mapped)[p] for p in kept),
        dropped: tuple(d for d in getattr(numbers, dropped) if d not in operand),
        "operand_batching_dims": operand,
        batches: along,
    })  # fmt: skip

    def select_kept(indices: Any) -> Any:
        axis = indices.ndim - 1
        return lax.concatenate([lax.slice_in_dim(indices, p, p + 1, axis=axis) for p in kept], axis)

    traced = _compat.open_jaxpr(jax.make_jaxpr(select_kept)(_compat.shape_dtype_of(indices)))
    (given,), (selected,) = traced.invars, traced.outvars
    origin = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    before = [e.replace(invars=[indices if v is given else v for v in e.invars], **origin) for e in traced.eqns]
    params = {**eqn.params, "dimension_numbers": changed, "indices_are_sorted": False}
    return (*before, eqn.replace(params=params, invars=[eqn.invars[0], selected, *eqn.invars[2:]]))
