"""Adds the gradients of equal slices of a parameter before they are padded to the shape of the parameter.

If a step uses `tables[0]` several times, JAX computes a gradient for each use, pads each with zeros to the shape of
`tables`, and adds the padded arrays:

    pad(scatter) + pad(scatter') + pad(other scatter)    becomes    pad(scatter + scatter') + pad(other scatter)

If the rows are sharded, each gradient is a partial sum on each device. XLA adds partial sums before it reduces them,
but not if they are padded and the parameter is stored in shards. Compiled for v5e:2x2 (libtpu 0.0.42.1), a step with
two slices of a sharded parameter and 8 lookups in each had 18 all-reduces of a slice. If the gradients are added first,
it has 2. This also pads fewer arrays. The terms are added in another order, so results differ by rounding errors.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.weights.joined_sums import sums_of
from autoshard.sharding.loops.frames import frames
from autoshard.sharding.loops.loop_collectives import with_program
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits, rewritten
from autoshard.spmdrules.ir.program import Block, Op, Program

_TERMS = (*CONTRACTIONS, "scatter-add")
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def with_added_slices(traced: Traced) -> Traced:
    """Return a traced step that adds the gradients of equal slices before it pads them.

    Args:
        traced: the step. A pipeline stays as it is.
    """
    if traced.stages > 1 or not _may_change(traced.program):
        return traced
    with _compat.auto_axes():
        inlined = with_program(traced, rewritten(traced.closed))
        edits = FrameEdits()
        changed = [_change(block, edits.at(path)) for block, path in frames(inlined.program.block)]
        return with_program(traced, rewritten(inlined.closed, edits)) if any(changed) else traced


def _may_change(program: Program) -> bool:
    """Whether two operators put an array of one shape into the same place of zeros."""
    places = Counter(_place(op) for op in program.ops() if _is_pad_of_zeros(op))
    return max(places.values(), default=0) > 1


def _place(op: Op) -> Any:
    return op.eqn.params["padding_config"], op.eqn.invars[0].aval.shape, op.eqn.outvars[0].aval.shape


def _is_pad_of_zeros(op: Op) -> bool:
    if op.name != "pad":
        return False
    value = op.eqn.invars[1]
    return isinstance(value, _compat.Literal) and not value.val


@shown
@dataclass(frozen=True, eq=False)
class _Term:
    """A term of a sum.

    Attributes:
        op: the operator that computes the term before it is moved; None for other terms.
        moves: the operators that move and pad its result, in their order.
        var: the term.
        ready: the position of the equation before which the term is known; -1 for an input of the block.
    """

    op: Op | None
    moves: tuple[Op, ...]
    var: Any
    ready: int


def _change(block: Block, edits: FrameEdits) -> bool:
    """Change the sums of a block; return whether there was one to change."""
    ops = block.ops
    # Positions of equations. The program may have several operators for one equation, such as a gather, or none.
    positions = {v: n for n, eqn in enumerate(_compat.open_jaxpr(block.jaxpr).eqns) for v in eqn.outvars}
    uses = Counter(v for op in ops for v in op.operands)
    uses.update(block.outputs)
    made = {op.results[0]: op for op in ops if len(op.results) == 1}
    changed = False
    for additions, terms in sums_of(ops, uses):
        groups = defaultdict[Any, list[_Term]](list)
        for addition, i in terms:
            v, var = addition.operands[i], addition.eqn.invars[i]
            term = _term(v, var, made, uses, positions)
            groups[var if term.op is None else _key(term)].append(term)
        if any(len(group) > 1 and group[0].op is not None for group in groups.values()):
            _add(list(groups.values()), additions[-1], positions, edits)
            changed = True
    return changed


def _term(v: int, var: Any, made: Mapping[int, Op], uses: Mapping[int, int], positions: Mapping[Any, int]) -> _Term:
    """Return a term of a sum; without its operator if that is no gradient of a slice, or is used elsewhere, too."""
    moves, source = list[Op](), v
    while (op := made.get(source)) is not None and uses[source] == 1:
        if op.name in _TERMS and any(map(_is_pad_of_zeros, moves)):
            (product,) = op.eqn.outvars
            return _Term(op, tuple(reversed(moves)), product, positions[product] + 1)
        if not (op.name in _MOVES or _is_pad_of_zeros(op)):
            break
        moves.append(op)
        source = op.operands[0]
    return _Term(None, (), var, positions[var] + 1 if var in positions else -1)


def _key(term: _Term) -> Any:
    """Return what terms have in common that can be added before they are moved."""
    assert term.op is not None
    steps = [(op.name, str(op.eqn.params)) for op in term.moves]
    return term.op.name, term.var.aval.shape, term.var.aval.dtype, *steps


def _add(groups: Sequence[Sequence[_Term]], root: Op, positions: Mapping[Any, int], edits: FrameEdits) -> None:
    """Write the edits of one sum: each group is added where its terms are known, and the groups one after another.

    Inputs of the block are added last, so that the carry of a loop over microbatches stays a sum (`loop_collectives`).
    """
    ready: list[tuple[int, Any]] = []
    for group in groups:
        in_order = sorted(group, key=lambda each: each.ready)
        total, at = in_order[0].var, in_order[0].ready
        for n, term in enumerate(in_order[1:]):
            key, at = ("added", id(root), id(group), n), term.ready
            edits.before.setdefault(max(at, 0), []).append(Edit((total, term.var), (key,), _sum, root.eqn))
            total = key
        for n, move in enumerate(in_order[0].moves):
            key = "moved", id(root), id(group), n
            edits.before.setdefault(at, []).append(Edit((total,), (key,), functools.partial(_moved, move), move.eqn))
            total = key
        ready.append((at, total))
    ready.sort(key=lambda each: (each[0] < 0, each[0]))
    (at, total), (result,) = ready[0], root.eqn.outvars
    for n, (known, part) in enumerate(ready[1:]):
        key, at = result if n == len(ready) - 2 else ("total", id(root), n), max(at, known)
        edits.before.setdefault(at, []).append(Edit((total, part), (key,), _sum, root.eqn))
        total = key
    if len(ready) == 1:
        edits.before.setdefault(at, []).append(Edit((total,), (result,), _same, root.eqn))
    edits.skipped.add(positions[result])


def _sum(a: Any, b: Any) -> list[Any]:
    return [lax.add(a, b)]


def _same(a: Any) -> list[Any]:
    return [a]


def _moved(move: Op, x: Any) -> list[Any]:
    literals = [atom.val for atom in move.eqn.invars[1:]]
    return list(_compat.bind(move.eqn, move.eqn.params, x, *literals))
