"""Finds layers that a program writes out one after another: equal equations, and how values pass between them.

block      the equations of one layer
run        blocks that follow each other, with equal equations and equal data flow
carry      a value that each block takes from the block before
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.flow import HEAVY
from autoshard.sharding.program.array_sizes import nbytes

MAX_CUTS = 8  # chosen: for each run, the number of places to try at which its first block may begin


@shown
@dataclass(frozen=True)
class Operand:
    """Where the operand of an equation comes from, in each block.

    Attributes:
        kind: `own` for a result of the same block, `carry` for one of the block before, `const` for a value that all
            blocks take, `slices` for a value of each block that comes from outside of the run.
        made: for `own` and `carry`, the equation of the block that makes it and the number of its result.
        atoms: for `const` one atom, for `carry` what the first block takes, for `slices` the atom of each block.
    """

    kind: str
    made: tuple[int, int] = (-1, -1)
    atoms: tuple[Any, ...] = ()

    @cached_property
    def key(self) -> Hashable:
        """A key of the operand. Equal operands of equal blocks have equal keys."""
        return self.kind, self.made, tuple(map(atom_key, self.atoms))


@shown
@dataclass(eq=False)
class Run:
    """Blocks with equal equations and equal data flow.

    Attributes:
        eqns: all equations of the program.
        keys: for each equation a number, equal for equations that compute the same function.
        first: the position of the first equation of the first block.
        size: the number of equations of a block.
        count: the number of blocks.
        operands: for each equation of a block, its operands.
    """

    eqns: Sequence[Any]
    keys: np.ndarray
    first: int
    size: int
    count: int
    operands: list[list[Operand]]

    @property
    def end(self) -> int:
        """The position after the last equation."""
        return self.first + self.size * self.count

    @property
    def block(self) -> Sequence[Any]:
        """The equations of the first block."""
        return self.eqns[self.first : self.first + self.size]

    @cached_property
    def made(self) -> dict[Any, tuple[int, tuple[int, int]]]:
        """Variable -> the block that makes it, and which equation and result of the block it is."""
        return {
            var: (b, (j, k))
            for b in range(self.count)
            for j in range(self.size)
            for k, var in enumerate(self.eqns[self.first + b * self.size + j].outvars)
        }

    def variables(self, result: tuple[int, int]) -> tuple[Any, ...]:
        """The variables of a result in each block."""
        j, k = result
        return tuple(self.eqns[self.first + b * self.size + j].outvars[k] for b in range(self.count))

    def of_kind(self, kind: str) -> list[Operand]:
        """The different operands of a kind."""
        return [*{o.key: o for operands in self.operands for o in operands if o.kind == kind}.values()]


def atom_key(atom: Any) -> Hashable:
    """Return a key of a variable or literal. Equal keys mean the same variable, or literals of equal value."""
    if not isinstance(atom, _compat.Literal):
        return id(atom)
    value, aval = np.asarray(atom.val), atom.aval
    return value.shape, str(getattr(aval, "dtype", None)), value.tobytes()


def find_runs(eqns: Sequence[Any]) -> list[list[Run]]:
    """Return the runs of heavy blocks, in order: for each, the ways to cut it into blocks, the best one first.

    A run can begin at any equation of a layer. The best cut is the one at which the fewest bytes cross.
    """
    numbers: dict[Hashable, int] = {}
    keys = np.array([numbers.setdefault(equation_key(eqn), len(numbers)) for eqn in eqns], np.int32)
    heavy = np.array([eqn.primitive.name in HEAVY for eqn in eqns], bool)
    found: list[list[Run]] = []
    taken = np.zeros(len(eqns), bool)
    for first, size, end in _repetitions(keys, heavy):
        if taken[first:end].any():
            continue
        count = (end - first) // size
        starts = _by_crossing_bytes(eqns, first, size, end)
        runs = (_run(eqns, keys, start, size, count) for start in starts if start + size * count <= end)
        cuts = [*itertools.islice((run for run in runs if run is not None), MAX_CUTS)]
        if cuts:
            found.append(cuts)
            taken[first:end] = True
    return sorted(found, key=lambda cuts: cuts[0].first)


def in_blocks(run: Run, count: int) -> Run | None:
    """Return a run with its equations in a smaller number of larger blocks; None if that is not possible.

    The gradients of two kinds of layers may be equal operators. Then their blocks must be as large as those of the
    forward pass.
    """
    if run.count % count:
        return None
    return run if run.count == count else _run(run.eqns, run.keys, run.first, run.size * (run.count // count), count)


def part_of(run: Run, first: int, count: int) -> Run | None:
    """Return some consecutive blocks of a run."""
    return _run(run.eqns, run.keys, run.first + first * run.size, run.size, count)


def _repetitions(keys: np.ndarray, heavy: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first, period, end) where keys repeat and some are heavy, the longest first, then the shortest period."""
    found = []
    for size in range(1, len(keys) // 2 + 1):
        equal = np.concatenate([[False], keys[:-size] == keys[size:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first >= size and heavy[first : first + size].any():
                found.append((first, size, last + size))
    return sorted(found, key=lambda each: (-((each[2] - each[0]) // each[1] * each[1]), each[1]))


def _by_crossing_bytes(eqns: Sequence[Any], first: int, size: int, end: int) -> list[int]:
    """The positions at which the first block may begin, ordered by the bytes that pass from it to the second one."""
    last_use = {
        atom: position
        for position in range(first, end)
        for atom in eqns[position].invars
        if not isinstance(atom, _compat.Literal)
    }

    def crossing(start: int) -> int:
        made = (var for eqn in eqns[start : start + size] for var in eqn.outvars)
        return sum(nbytes(var.aval) for var in made if last_use.get(var, -1) >= start + size)

    return sorted(range(first, first + size), key=crossing)


def _run(eqns: Sequence[Any], keys: np.ndarray, first: int, size: int, count: int) -> Run | None:
    """The run that begins at an equation; None if the data flow of its blocks differs."""
    run = Run(eqns, keys, first, size, count, [])
    inits: dict[tuple[int, int], Hashable] = {}
    for j in range(size):
        atoms = [eqns[first + b * size + j].invars for b in range(count)]
        operands = [_operand(run, column) for column in zip(*atoms, strict=True)]
        if any(o is None for o in operands):
            return None
        found = [o for o in operands if o is not None]
        for o in found:
            if o.kind == "carry" and inits.setdefault(o.made, o.key) != o.key:
                return None
        run.operands.append(found)
    return run


def _operand(run: Run, atoms: Sequence[Any]) -> Operand | None:
    made = [None if isinstance(a, _compat.Literal) else run.made.get(a) for a in atoms]
    places = [at and at[1] for at in made]
    steps = [at and b - at[0] for b, at in enumerate(made)]
    if made[0] is None and len(set(map(atom_key, atoms))) == 1:
        return Operand("const", atoms=(atoms[0],))
    if all(at is None for at in made):
        return Operand("slices", atoms=tuple(atoms))
    if places[0] is not None and len({*places}) == 1 and {*steps} == {0}:
        return Operand("own", places[0])
    if places[0] is None and places[1] is not None and len({*places[1:]}) == 1 and {*steps[1:]} == {1}:
        return Operand("carry", places[1], (atoms[0],))
    return None


def equation_key(eqn: Any) -> Hashable:
    """Return a key of an equation. Equations that compute the same function of their operands have equal keys."""
    return (
        eqn.primitive.name,
        tuple(_type_key(a.aval) for a in eqn.invars),
        tuple(_type_key(v.aval) for v in eqn.outvars),
        tuple((name, _parameter_key(value)) for name, value in sorted(eqn.params.items())),
    )


def _type_key(aval: Any) -> Hashable:
    return aval.shape, str(aval.dtype)


def _parameter_key(value: Any) -> Hashable:
    """Return a key of an equation's parameter. Equal parameters have equal keys.

    An object that cannot be compared has a key of its own.
    """
    if _compat.is_jaxpr(value):
        return _jaxpr_key(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_parameter_key, value))
    if isinstance(value, (np.ndarray, np.generic, float)):  # 0.0 == -0.0, but they differ
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    if isinstance(value, dict):
        return tuple((name, _parameter_key(each)) for name, each in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _jaxpr_key(jaxpr: Any) -> Hashable:
    """Return a key of a jaxpr. Jaxprs with the same equations have equal keys; names of variables do not matter."""
    inner = _compat.open_jaxpr(jaxpr)
    number: dict[Any, int] = {}

    def of(atom: Any) -> Hashable:
        return atom_key(atom) if isinstance(atom, _compat.Literal) else number.setdefault(atom, len(number))

    for var in (*inner.constvars, *inner.invars):
        of(var)
    body = tuple((equation_key(e), tuple(map(of, e.invars)), tuple(map(of, e.outvars))) for e in inner.eqns)
    types = tuple(_type_key(v.aval) for v in inner.invars)
    return types, tuple(map(id, _compat.constants(jaxpr))), body, tuple(map(of, inner.outvars))
