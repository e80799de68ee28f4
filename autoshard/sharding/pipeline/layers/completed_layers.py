"""Completes the first and the last layer of a program that writes its layers out, so that all layers are equal.

If the model's input needs no gradient, the first layer's gradients lack operators that those of other layers have, and
so does its forward pass. They are added. Their results are not used. If all layers add to a sum, such as the gradient
of a weight that they share, the block that comes first has no sum to add to. It adds to zero instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.pipeline.layers.layer_runs import Operand, Run, atom_key, find_runs


@shown
@dataclass(eq=False)
class _Part:
    """A block of which some equations are missing.

    Attributes:
        run: the run of complete blocks beside it.
        at: the position of its first equation.
        present: equation of a block -> the equation of this block.
        operands: operand of the run -> the atom that this block takes.
        sums: missing equation that adds to a carry -> the result of this block that it adds.
    """

    run: Run
    at: int
    present: dict[int, Any]
    operands: dict[Hashable, Any] = field(default_factory=dict)
    sums: dict[int, tuple[int, int]] = field(default_factory=dict)


def complete_layers(jaxpr: Any) -> Iterator[Any]:
    """Yield open jaxprs whose first and last layers are like the others. There is none if nothing can be added.

    The second one only completes blocks after a run. A layer before those that are trained may look like one of them.
    """
    runs = find_runs(jaxpr.eqns)
    begun = _completed(jaxpr, [_first_part(_part_before, cuts) for cuts in runs], [])
    for program in (jaxpr,) if begun is None else (begun, jaxpr):
        found = runs if program is jaxpr else find_runs(program.eqns)
        last = partial(_part_after, results=program.outvars)
        ended = _completed(
            program, [_first_part(last, cuts) for cuts in found], [run for cuts in found for run in cuts]
        )
        if ended is not None or program is begun:
            yield ended or program


def _first_part(part_of: Callable[[Run], _Part | None], cuts: Sequence[Run]) -> _Part | None:
    """The incomplete block beside a run, for the first cut of the run that has one."""
    return next((part for run in cuts if (part := part_of(run)) is not None), None)


def _part_before(run: Run) -> _Part | None:
    """The incomplete block before a run."""
    for start in range(max(run.first - run.size + 1, 0), run.first):
        present, end = _present(run, start, run.first)
        if end == run.first and (part := _followed(_Part(run, start, present))) is not None:
            return part
    return None


def _followed(part: _Part) -> _Part | None:
    """Return a part if the run's first block takes its results, else None. Also finds the sums that it starts."""
    for c in part.run.of_kind("carry"):
        made: tuple[int, int] | None = c.made
        if c.made[0] not in part.present and (made := _added(part.run, c)) is not None:
            part.sums[c.made[0]] = made
        if made is None or made[0] not in part.present or part.present[made[0]].outvars[made[1]] is not c.atoms[0]:
            return None
    return part if _has_same_flow(part, {}) else None


def _part_after(run: Run, results: Sequence[Any]) -> _Part | None:
    """Return the incomplete block after a run; None if it lacks a result that is used outside of the run.

    Args:
        run: the run.
        results: the results of the program.
    """
    part = _Part(run, run.end, _present(run, run.end, len(run.eqns))[0])
    others = (*run.eqns[: run.first], *run.eqns[run.end :])
    used = {
        a for atoms in (results, *(eqn.invars for eqn in others)) for a in atoms if not isinstance(a, _compat.Literal)
    }
    if any(j not in part.present and used.intersection(eqn.outvars) for j, eqn in enumerate(run.block)):
        return None
    return part if _has_same_flow(part, {c.key: run.variables(c.made)[-1] for c in run.of_kind("carry")}) else None


def _present(run: Run, position: int, end: int) -> tuple[dict[int, Any], int]:
    """Match equations from a position on with those of a block; some of the block may be missing.

    Returns:
        equation of the block -> the equation that matches it; the position after the last match.
    """
    present: dict[int, Any] = {}
    for j in range(run.size):
        if position < end and run.keys[position] == run.keys[run.first + j]:
            present[j] = run.eqns[position]
            if _fits(run, j, present):
                position += 1
            else:
                del present[j]
    return present, position


def _added(run: Run, carry: Operand) -> tuple[int, int] | None:
    """The result of a block that is added to a carry; None if the carry is no sum, or has other uses."""
    users = [j for j, operands in enumerate(run.operands) if carry in operands]
    j = carry.made[0]
    if users != [j] or run.block[j].primitive.name not in ("add", "add_any"):
        return None
    return next((o.made for o in run.operands[j] if o.kind == "own"), None)


def _fits(run: Run, j: int, present: dict[int, Any]) -> bool:
    """Whether an equation takes the results of its own block that it should take."""
    pairs = zip(run.operands[j], present[j].invars, strict=True)
    return all(o.made[0] in present and present[o.made[0]].outvars[o.made[1]] is a for o, a in pairs if o.kind == "own")


def _has_same_flow(part: _Part, carried: dict[Hashable, Any]) -> bool:
    """Whether the equations of a block take what those of the run's blocks take; finds the operands of the block."""
    run = part.run
    if not part.present or len(part.present) == run.size:
        return False
    if any(eqn.effects for j, eqn in enumerate(run.block) if j not in part.present):
        return False  # an added print would be seen
    part.operands |= carried
    for j, eqn in part.present.items():
        if not _fits(run, j, part.present):
            return False
        for operand, atom in zip(run.operands[j], eqn.invars, strict=True):
            if operand.kind == "const" and atom_key(atom) != atom_key(operand.atoms[0]):
                return False
            if operand.kind in ("carry", "slices"):
                if not isinstance(atom, _compat.Literal) and atom in run.made and operand.kind == "slices":
                    return False
                if atom_key(part.operands.setdefault(operand.key, atom)) != atom_key(atom):
                    return False
    return True


def _completed(jaxpr: Any, parts: Sequence[_Part | None], runs: Sequence[Run]) -> Any | None:
    """The program with the missing equations of some blocks; None if there are none."""
    found = {}
    for part in parts:
        if part is not None and all(_find_operand(part, o, runs) for o in _missing_operands(part)):
            found[part.at] = part
    if not found:
        return None
    written = {id(eqn) for part in found.values() for eqn in part.present.values()}

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        sums: dict[
            tuple[int, Hashable], Any
        ] = {}  # position of an equation and operand -> the sum that it takes instead
        for position, eqn in enumerate(jaxpr.eqns):
            if position in found:
                sums |= _write(found[position], env)
            if id(eqn) not in written:
                operands = [sums.get((position, atom_key(a)), _read(env, a)) for a in eqn.invars]
                env |= zip(eqn.outvars, _bind(eqn, operands), strict=True)
        return [_read(env, a) for a in jaxpr.outvars]

    closed = jax.make_jaxpr(run)(*map(_compat.shape_dtype_of, jaxpr.invars))
    completed, held = _compat.split_constants(closed)
    assert not held, "constants are inputs"
    return completed


def _missing_operands(part: _Part) -> list[Operand]:
    return [
        o for j, operands in enumerate(part.run.operands) if j not in part.present and j not in part.sums
        for o in operands if o.kind in ("carry", "slices")
    ]  # fmt: skip


def _find_operand(part: _Part, operand: Operand, runs: Sequence[Run]) -> bool:
    """Find what the block takes as an operand of a missing equation: what the forward pass of the layer has."""
    if operand.key in part.operands:
        return True
    wanted = [*map(atom_key, operand.atoms[::-1])]  # gradients run from the last layer to the first
    for run in runs:
        if run.count != len(wanted) + 1 or run.end > part.run.first:
            continue
        columns = [o.atoms for o in run.of_kind("slices")]
        columns += [run.variables((j, k)) for j, eqn in enumerate(run.block) for k in range(len(eqn.outvars))]
        columns += [(*o.atoms, *run.variables(o.made)[:-1]) for o in run.of_kind("carry")]
        for atoms in columns:
            if [*map(atom_key, atoms[1:])] == wanted:
                part.operands[operand.key] = atoms[0]
                return True
    return False


def _write(part: _Part, env: dict[Any, Any]) -> dict[tuple[int, Hashable], Any]:
    """Compute all equations of a block, in their order. Returns the sums that the next block takes."""
    known: dict[tuple[int, int], Any] = {}
    sums: dict[tuple[int, Hashable], Any] = {}
    zeros = {j: jnp.zeros_like(part.run.block[j].outvars[0].aval) for j in part.sums}  # not between the equations
    for j, (eqn, operands) in enumerate(zip(part.run.block, part.run.operands, strict=True)):
        if j in part.sums:
            term = known[part.sums[j]]
            known[j, 0] = _bind(eqn, [zeros[j], term])[0]
            added = part.present[part.sums[j][0]].outvars[part.sums[j][1]]
            sums[part.run.first + j, atom_key(added)] = known[j, 0]
            continue
        values = [
            known[o.made] if o.kind == "own" else _read(env, o.atoms[0] if o.kind == "const" else part.operands[o.key])
            for o in operands
        ]
        made = _bind(part.present.get(j, eqn), values)
        known |= {(j, k): x for k, x in enumerate(made)}
        if j in part.present:
            env |= zip(part.present[j].outvars, made, strict=True)
    return sums


def _bind(eqn: Any, operands: list[Any]) -> list[Any]:
    with _compat.source_of(eqn):
        return _compat.bind(eqn, eqn.params, *operands)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]
