"""Cuts out the part of a program that computes values from given others, or says what prevents that.

    slice(results; cut)   = the values between `cut` and the results, in order; every other leaf is static

Only operators that do the same at every size may be in a slice: products, reductions, elementwise arithmetic, changes
of shape. So two slices that agree on small arrays agree on large ones. A value that depends only on positions (a mask
from `iota`) is static. It is a leaf here, and is compared at full size (`masks.static_masks`). Other booleans by which
scores or weights are chosen are leaves too, the conditions (`masks.array_masks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.rewrite.constants import MOST_VALUES_FOR_RANDOM
from autoshard.sharding.rewrite.values import Value

ELEMENTWISE = frozenset(
    "abs sign ge add add_any convert_element_type div exp exp2 expm1 integer_pow log log1p logistic mul neg "
    "one_minus_square rsqrt select_n sqrt square stop_gradient sub tanh zeros_like and or not eq is_finite max".split()
)
STRUCTURAL = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims reduce_sum reduce_max dot_general reduce_and "
    "reduce_or".split()
)
SIZE_FREE = ELEMENTWISE | STRUCTURAL
COMPARISONS = frozenset("ne gt le lt min".split())  # besides SIZE_FREE, what a condition may be made of
_RANDOM = ("random_bits", "random_wrap", "random_unwrap", "threefry2x32", "rng_bit_generator", "random_seed")
DROPOUT = "it has dropout: the weights are multiplied by random values, which no kernel draws in the same way"


class Refused(Exception):
    """A match that is not replaced; the text is the reason."""


def reason_of(error: Exception) -> str:
    """Return why a match is not replaced. An error other than `Refused` is a fault of the matcher."""
    if isinstance(error, Refused):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"its check failed with {type(error).__name__}: {lines[0] if lines else 'no message'}. Please report this"


@shown
@dataclass(eq=False)
class Slice:
    """The part of a program that computes some values from others.

    Attributes:
        cut: the values that it starts from.
        results: the values that it computes.
        inner: the values in between, the results included, in order.
        static: the static arrays that it takes.
        conditions: the arrays of booleans that it takes.
    """

    cut: tuple[Value, ...]
    results: tuple[Value, ...]
    inner: list[Value] = field(default_factory=list)
    static: list[Value] = field(default_factory=list)
    conditions: list[Value] = field(default_factory=list)


def cut_out(results: Iterable[Value], cut: Iterable[Value]) -> Slice:
    """Return the part of a program that computes values from others.

    Raises:
        Refused: something else is needed too, or an operator in between is not known to be the same at every size.
    """
    made = Slice(tuple(cut), tuple(results))
    seen, todo = set(made.cut), list(made.results)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_static and not _is_only_shaped(value):
            made.static.append(value)
            continue
        if not value.is_static and value.aval.dtype == bool and value.op != "not" and not _chooses_largest(value):
            made.conditions.append(value)
            continue
        if value.op not in SIZE_FREE:
            raise Refused(foreign_text(value))
        check_smooth(value)
        made.inner.append(value)
        todo += value.operands
    made.inner.sort(key=lambda v: v.number)
    made.static.sort(key=lambda v: v.number)
    made.conditions.sort(key=lambda v: v.number)
    return made


def check_smooth(value: Value) -> None:
    """Check that an operator has no thresholds, so that a few values show what it does to all.

    Raises:
        Refused: it has one: a score is clipped or rounded, for example.
    """
    if value.op in ("max", "eq", "is_finite"):
        # The largest score of a row is subtracted; these occur around it.
        largest = any(_is_largest(v) for v in value.operands)
        floors = [v for v in value.operands if v.op == "literal" and v.data.size == 1 and v.data < -1e30]
        if not largest or (value.op == "max" and not floors):
            raise Refused(f"the scores or weights are compared with a threshold ({value.op})")
    elif value.op == "convert_element_type":
        source, target = value.operands[0].aval.dtype, value.aval.dtype
        if source.kind != "b" and not (_is_float(source) and _is_float(target)):
            raise Refused(f"the scores or weights are rounded to {target}")
    elif value.op in ("abs", "sign", "ge"):  # logsumexp has them
        if not _is_positive(value.operands[0]) or any(v.op != "literal" or v.data != 0 for v in value.operands[1:]):
            raise Refused(f"the scores or weights are compared with a threshold ({value.op})")


def _is_positive(value: Value) -> bool:
    """Whether a value is a sum of exponentials, in any shape."""
    while value.op in ("reshape", "broadcast_in_dim"):
        value = value.operands[0]
    return value.op == "reduce_sum" and value.operands[0].op in ("exp", "exp2")


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def _is_largest(value: Value) -> bool:
    """Whether a value is the largest score of each row, in any shape."""
    while value.op in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "max",
                       "convert_element_type"):  # fmt: skip
        value = next((v for v in value.operands if not v.is_static), value.operands[0])
        if value.is_static:
            return False
    return value.op == "reduce_max"


def _chooses_largest(value: Value) -> bool:
    """Whether a condition is static up to what `check_smooth` accepts: whether a score is its row's largest."""
    while value.op in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "not"):
        value = value.operands[0]
    if value.op in ("eq", "is_finite"):
        return any(_is_largest(v) for v in value.operands)
    if value.op == "ge":
        return _is_positive(value.operands[0])
    if value.op in ("and", "or"):
        return all(v.is_static or _chooses_largest(v) for v in value.operands)
    return value.is_static


def _is_only_shaped(value: Value) -> bool:
    """Whether a static value repeats a smaller one along new dimensions, which need not be evaluated."""
    return value.op == "broadcast_in_dim" and value.operands[0].aval.size < value.aval.size


def foreign_text(value: Value) -> str:
    """Say what prevents a slice: a value that it would have to take besides its cut."""
    shape = f"{value.aval.dtype}{list(value.shape)}"
    if is_random(value):
        return DROPOUT
    if value.op in ("input", "carry", "slice", "stack", "const"):
        return (
            f"the scores or weights also depend on {shape} from outside, such as a bias. A mask must be booleans: "
            "compare its numbers, as in mask > 0"
        )
    line = _compat.source_line(value.eqn) if value.eqn is not None else ""
    name = value.eqn.primitive.name if value.eqn is not None else value.op
    if name == "sharding_constraint":
        return f"your program has a sharding constraint on the scores or weights{' at ' + line if line else ''}"
    return f"the scores or weights also depend on the {name} of {shape}{' at ' + line if line else ''}"


def is_random(value: Value) -> bool:
    """Return whether a value depends on random numbers, as far as a bounded search finds."""
    seen: set[Value] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if one in seen or len(seen) > MOST_VALUES_FOR_RANDOM:
            continue
        seen.add(one)
        if one.op in _RANDOM or (one.eqn is not None and one.eqn.primitive.name in _RANDOM):
            return True
        if one.op not in ("dot_general", "slice"):
            todo += one.operands
    return False


def used_elsewhere(inside: Iterable[Value], cut: Iterable[Value], results: Iterable[Value]) -> Value | None:
    """Return a value in some slices that the rest of the program uses too; None if there is none."""
    inner, ends = {*inside}, {*results}
    cuts = {*cut}
    for value in sorted(inner - ends - cuts, key=lambda v: v.number):
        if not value.is_static and (value.escapes or any(_is_other(u, inner) for u in value.users)):
            return value
    return None


def _is_other(user: Value, inner: set[Value]) -> bool:
    if user in inner:
        return False
    # A user is dead if only a scan stacks it and nothing takes the stack.
    return user.is_used
