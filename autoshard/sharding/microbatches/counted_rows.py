"""Batches gathers and scatters whose index counts the rows: `x[jnp.arange(batch), labels]`.

The index counts over the whole batch, so the operator seems to compare each row with all others. As a batched operator
it takes each row alone, and a microbatch computes it for its own rows (`spmdrules/ir/index_batching.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard import _compat
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits, rewritten
from autoshard.spmdrules.ir.index_batching import ConstantIndices


def with_counted_rows(closed: Any) -> Any:
    """Return a closed jaxpr, whose calls are inlined, with batched gathers and scatters where the index counts.

    Bodies of `scan` and `jax.checkpoint` are searched, too.
    """
    edits = FrameEdits()
    _Finder().frame(closed, edits, {})
    return rewritten(closed, edits) if edits.before or edits.children else closed


class _Finder:
    """Follows the integers of a program that do not depend on its inputs, by number."""

    def __init__(self) -> None:
        self.constants = ConstantIndices()
        self.unused: Iterator[int] = itertools.count()

    def frame(self, closed: Any, edits: FrameEdits, numbers: Mapping[Any, int]) -> None:
        """Find the edits of one frame. `numbers` has its inputs of known number."""
        jaxpr = _compat.open_jaxpr(closed)
        known = {v: next(self.unused) for v in (*jaxpr.constvars, *jaxpr.invars)} | dict(numbers)
        for var, array in zip(jaxpr.constvars, _compat.constants(closed), strict=True):
            self.constants.add_constant(known[var], array)
        for position, eqn in enumerate(jaxpr.eqns):
            operands = [-1 if isinstance(a, _compat.Literal) else known[a] for a in eqn.invars]
            results = [next(self.unused) for _ in eqn.outvars]
            known |= zip(eqn.outvars, results, strict=True)
            self.body(eqn, operands, edits, position)
            batched = self.constants.rewrite(eqn, operands)
            if batched != (eqn,):
                edits.before[position] = [_edit(eqn, batched)]
                edits.skipped.add(position)
            self.constants.add_result(eqn, operands, results)

    def body(self, eqn: Any, operands: Sequence[int], edits: FrameEdits, position: int) -> None:
        """Find the edits of the body of an equation, if it has one that can be edited."""
        name = eqn.primitive.name
        if name not in ("scan", "remat2"):
            return
        inner, found = eqn.params["jaxpr"], FrameEdits()
        fixed = operands[: _compat.scan_arity(eqn.params)[0]] if name == "scan" else operands
        variables = _compat.open_jaxpr(inner).invars
        self.frame(inner, found, {v: n for v, n in zip(variables, fixed, strict=False) if n >= 0})
        if found.before or found.children:
            edits.children[position] = found


def _edit(eqn: Any, batched: Sequence[Any]) -> Edit:
    """Return the edit that computes an equation by other equations, of the same operands."""
    reads = tuple(dict.fromkeys(a for a in eqn.invars if not isinstance(a, _compat.Literal)))

    def compute(*args: Any) -> list[Any]:
        env = dict(zip(reads, args, strict=True))
        for each in batched:
            operands = (a.val if isinstance(a, _compat.Literal) else env[a] for a in each.invars)
            env |= zip(each.outvars, _compat.bind(each, each.params, *operands), strict=True)
        return [env[v] for v in eqn.outvars]

    return Edit(reads, tuple(eqn.outvars), compute, eqn)
