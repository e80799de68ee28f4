"""Rows of a table that are looked up and then cast to a narrower type, as those of an embedding.

XLA:TPU casts the table before the lookup. So the gathered table and the rows take the bytes of the narrower type.
Compiled for v5e, v5p and v6e (libtpu 0.0.42.1), GPT 1.3B, GPT-3, Llama-3 8B and Llama-2 70B hold them in bfloat16.
"""

from __future__ import annotations

from autoshard.sharding.program.array_sizes import itemsize
from autoshard.spmdrules.ir.program import Program, users_of


def cast_lookups(program: Program) -> dict[int, float]:
    """Return the results of lookups that only a cast to a narrower type takes, and the fraction of their bytes."""
    found: dict[int, float] = {}
    blocks, kept = [program.block], {*program.outputs}
    while blocks:
        ops = blocks.pop().ops
        blocks += [inner for op in ops for inner in op.blocks]
        lookups = [op for op in ops if op.name == "gather" and op.results[0] not in kept]
        users = users_of(ops) if lookups else {}
        for op in lookups:
            taken = users.get(op.results[0], ())
            if len(taken) == 1 and taken[0].name == "convert_element_type":
                narrow = itemsize(taken[0].eqn.outvars[0].aval) / itemsize(op.eqn.outvars[0].aval)
                if narrow < 1:
                    found[op.results[0]] = narrow
    return found
