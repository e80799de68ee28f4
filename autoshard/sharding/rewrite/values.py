"""A program as a graph of values. Equal computations are one value, also across the bodies of loops.

    frame        a jaxpr at one place of the program: the step, the body of a scan, of a `remat2`, of a call
    value        a variable up to equality: the same operator on the same values is the same value in every frame

A value in the body of a scan stands for its values in all iterations. If one scan stacks a value and another one takes
slices of the stack, each slice is the value of the same iteration, whatever the direction of the scans. So a residual
that the backward scan takes is the value of the forward scan's body, and what `remat2` computes again is the value that
the forward pass computed. The remat policies `none`, `full` and `dots` differ only in where a value is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard._shown import shown

# Operators whose result is their operand.
_SAME = ("copy", "copy_p", "name")
_CALLS = ("call", "closed_call", "core_call", "eval_jaxpr", "jit", "pjit", "custom_jvp_call", "custom_vjp_call")


@shown
@dataclass(eq=False)
class Value:
    """One value of a program.

    Attributes:
        op: the primitive, or a kind of leaf: `input`, `const`, `literal`, `carry`, `slice`, `stack`, `opaque`.
        operands: the values that it is computed from.
        aval: its shape and dtype.
        eqn: the first equation that computes it; None for leaves.
        index: which result of the equation it is.
        data: a literal's or constant's value; the number of an input; the depth of a slice or stack.
        is_static: whether it depends on no input, loop or random key.
        users: the values that are computed from it.
        escapes: whether the program uses it otherwise: as a result, as a carry, in a loop or branch.
        number: its position in the order of computation.
        is_backward: whether the backward pass is the first to compute it.
    """

    op: str
    operands: tuple[Value, ...] = field(repr=False)
    aval: Any
    eqn: Any = field(default=None, repr=False)
    index: int = 0
    data: Any = None
    is_static: bool = False
    users: list[Value] = field(default_factory=list, repr=False)
    escapes: bool = False
    number: int = 0
    is_backward: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.aval.shape)

    @property
    def is_used(self) -> bool:
        """Whether anything needs it. A stack that only slices take is used through its slices."""
        return self.escapes or any(u.is_used if u.op == "stack" else True for u in self.users)


@shown
@dataclass(eq=False)
class Frame:
    """A jaxpr at one place of the program.

    Attributes:
        jaxpr: the jaxpr.
        kind: `step`, `scan`, `remat2` or `call`.
        path: the positions of the equations that lead to it, from the outermost.
        parent: the frame around it.
        depth: number of scans around it.
        is_backward: whether it is in a backward pass.
        places: value -> (position of its equation, variable), the first of each; -1 for inputs.
        values: variable -> value.
        children: position of an equation -> the frame within it.
    """

    jaxpr: Any
    kind: str
    path: tuple[int, ...] = ()
    parent: Frame | None = None
    depth: int = 0
    is_backward: bool = False
    places: dict[Value, tuple[int, Any]] = field(default_factory=dict, repr=False)
    values: dict[Any, Value] = field(default_factory=dict, repr=False)
    children: dict[int, Frame] = field(default_factory=dict)

    @property
    def is_in_call(self) -> bool:
        """Whether it is in a call that cannot be inlined, so that it cannot be changed."""
        return self.kind == "call" or (self.parent is not None and self.parent.is_in_call)

    def walk(self) -> Iterator[Frame]:
        """Yield this frame and all within it, in the order of the program."""
        yield self
        for child in self.children.values():
            yield from child.walk()


@shown
@dataclass(eq=False)
class Graph:
    """The values of a program, and its frames."""

    root: Frame
    values: list[Value]
    computed: dict[Value, list[tuple[Frame, int]]]  # value -> the equations that compute it

    def computing(self, value: Value) -> list[tuple[Frame, int]]:
        """Return the equations that compute a value: the frame of each, and its position there."""
        return self.computed.get(value, [])


def graph_of(closed: Any) -> Graph:
    """Return the values of a closed jaxpr, from which dead code was removed."""
    return _Builder().build(closed)


class _Builder:
    def __init__(self) -> None:
        self.values: list[Value] = []
        self.known: dict[Any, tuple[Value, ...]] = {}
        self.computed: dict[Value, list[tuple[Frame, int]]] = defaultdict(list)

    def build(self, closed: Any) -> Graph:
        jaxpr = _compat.open_jaxpr(closed)
        root = Frame(jaxpr, "step")
        for var, const in zip(jaxpr.constvars, _compat.constants(closed), strict=True):
            self.define(root, var, -1, self.constant(var, const))
        for i, var in enumerate(jaxpr.invars):
            self.define(root, var, -1, self.make(("input", i), "input", (), [var.aval], data=i)[0])
        self.equations(root)
        for atom in jaxpr.outvars:
            self.read(root, atom).escapes = True
        return Graph(root, self.values, self.computed)

    def constant(self, var: Any, const: Any) -> Value:
        static = not _compat.is_extended(var.aval.dtype) and not _compat.is_tracer(const)
        return self.make(("const", id(const)), "const", (), [var.aval], data=const, static=static)[0]

    def define(self, frame: Frame, var: Any, position: int, value: Value) -> None:
        frame.values[var] = value
        frame.places.setdefault(value, (position, var))

    def read(self, frame: Frame, atom: Any) -> Value:
        if not isinstance(atom, _compat.Literal):
            return frame.values[atom]
        data, aval = np.asarray(atom.val), _compat.shape_dtype_of(atom)
        key = ("literal", data.tobytes(), str(aval.dtype), aval.shape)
        return self.make(key, "literal", (), [aval], data=data, static=True)[0]

    def make(
        self, key: Any, op: str, operands: tuple[Value, ...], avals: Any, *,
        eqn: Any = None, data: Any = None, static: bool = False,
    ) -> tuple[Value, ...]:  # fmt: skip
        """Return the results of an operator; those of an equal one that is known."""
        if key is not None and key in self.known:
            return self.known[key]
        first = len(self.values)
        made = tuple(Value(op, operands, aval, eqn, i, data, static, number=first + i) for i, aval in enumerate(avals))
        self.values += made
        if key is not None:
            self.known[key] = made
        for operand in dict.fromkeys(operands):
            operand.users += made
        return made

    def equations(self, frame: Frame) -> None:
        for position, eqn in enumerate(frame.jaxpr.eqns):
            operands = tuple(self.read(frame, atom) for atom in eqn.invars)
            results = self.results(frame, position, eqn, operands)
            for var, value in zip(eqn.outvars, results, strict=True):
                self.define(frame, var, position, value)

    def results(self, frame: Frame, position: int, eqn: Any, operands: tuple[Value, ...]) -> Any:
        name, params = eqn.primitive.name, eqn.params
        if name in _SAME:
            return operands
        if name == "reduce_precision" and _keeps_precision(params, operands[0].aval.dtype):
            return operands
        if name == "convert_element_type" and params["new_dtype"] == operands[0].aval.dtype:
            return operands
        if name in _CALLS or name == "remat2":
            inner = next((v for k, v in params.items() if "jaxpr" in k and _compat.is_jaxpr(v)), None)
            if inner is not None and len(_compat.open_jaxpr(inner).invars) == len(operands):
                return self.call(frame, position, "remat2" if name == "remat2" else "call", inner, operands)
        if name == "scan":
            return self.scan(frame, position, eqn, operands)
        avals = [var.aval for var in eqn.outvars]
        key = _key(name, params, operands) if not eqn.effects else None
        if key is None:
            for value in operands:
                value.escapes = True
            return self.make(None, "opaque", operands, avals, eqn=eqn)
        static = all(v.is_static for v in operands) and not name.startswith(("random", "rng", "threefry"))
        results = self.make(key, name, operands, avals, eqn=eqn, static=static)
        for value in results:
            if not self.computed[value]:
                value.is_backward = frame.is_backward or _compat.is_transposed(eqn)
            self.computed[value].append((frame, position))
        return results

    def call(self, frame: Frame, position: int, kind: str, inner: Any, operands: tuple[Value, ...]) -> list[Value]:
        child = self.child(frame, position, kind, inner, frame.depth)
        for var, value in zip(child.jaxpr.invars, operands, strict=True):
            self.define(child, var, -1, value)
        self.equations(child)
        return [self.read(child, atom) for atom in child.jaxpr.outvars]

    def child(self, frame: Frame, position: int, kind: str, inner: Any, depth: int) -> Frame:
        jaxpr = _compat.open_jaxpr(inner)
        backward = frame.is_backward or _compat.is_transposed(frame.jaxpr.eqns[position])
        child = Frame(jaxpr, kind, (*frame.path, position), frame, depth, backward)
        frame.children[position] = child
        for var, const in zip(jaxpr.constvars, _compat.constants(inner), strict=True):
            self.define(child, var, -1, self.constant(var, const))
        return child

    def scan(self, frame: Frame, position: int, eqn: Any, operands: tuple[Value, ...]) -> list[Value]:
        n_consts, n_carry = _compat.scan_arity(eqn.params)
        child = self.child(frame, position, "scan", eqn.params["jaxpr"], frame.depth + 1)
        body = child.jaxpr
        first = n_consts + n_carry
        for i, (var, value) in enumerate(zip(body.invars, operands, strict=True)):
            if n_consts <= i < first:
                if body.outvars[i - n_consts] is not var:  # else no iteration changes it
                    value.escapes = True
                    value = self.make(None, "carry", (), [var.aval], eqn=eqn, data=i - n_consts)[0]
            elif i >= first:
                value = self.slice(value, child.depth, var.aval)
            self.define(child, var, -1, value)
        self.equations(child)
        results = []
        for k, (var, atom) in enumerate(zip(eqn.outvars, body.outvars, strict=True)):
            inner = self.read(child, atom)
            if k >= n_carry:
                results.append(self.stack(inner, child.depth, var.aval))
            elif body.invars[n_consts + k] is atom:
                results.append(operands[n_consts + k])
            else:
                inner.escapes = True
                results.append(self.make(None, "opaque", (), [var.aval], eqn=eqn)[0])
        return results

    def slice(self, value: Value, depth: int, aval: Any) -> Value:
        if value.op == "stack" and value.data == depth:
            return value.operands[0]
        return self.make(("slice", value.number, depth), "slice", (value,), [aval], data=depth)[0]

    def stack(self, value: Value, depth: int, aval: Any) -> Value:
        if value.op == "slice" and value.data == depth and value.operands[0].shape == tuple(aval.shape):
            return value.operands[0]
        return self.make(("stack", value.number, depth, aval.shape), "stack", (value,), [aval], data=depth)[0]


def _keeps_precision(params: Any, dtype: Any) -> bool:
    """Whether an operator that rounds, such as the one that `remat2` puts on what it saves, rounds nothing."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    kept = jnp.finfo(dtype)
    return params["exponent_bits"] >= kept.nexp and params["mantissa_bits"] >= kept.nmant


def _key(name: str, params: Any, operands: tuple[Value, ...]) -> Any:
    """Return what equal applications of an operator share; None if they cannot be compared."""
    inner = [v for value in params.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
    if any(_compat.is_jaxpr(value) for value in inner):
        return None
    key = (name, tuple(sorted(params.items())), tuple(v.number for v in operands))
    try:
        hash(key)
    except TypeError:
        return None
    return key
