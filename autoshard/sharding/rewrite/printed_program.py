"""A program as text: its frames with their equations, what crosses between scans, and repeated equations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax

from autoshard import _compat
from autoshard.sharding.rewrite.constants import LINE_WIDTH
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.sharding.rewrite.pairs import check_program, equal_groups, scan_of, scan_pairs
from autoshard.sharding.rewrite.values import Frame, Graph, graph_of


def program_text(closed: Any) -> str:
    """Return a closed jaxpr as text, with calls inlined and without dead code.

    A value has the same name wherever it is computed: what `jax.checkpoint` computes again, and what a backward scan
    takes from its forward scan, has the name that it has in the forward pass.

    Raises:
        PlanError: the program is not well formed.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
    >>> text = program_text(jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 4, 4)), jnp.ones((2, 4))))
    >>> "residuals: 3 from scan 0 to scan" in text
    True
    """
    normal = rewritten(_compat.dce(closed))
    check_program(normal)
    graph = graph_of(normal)
    return "\n".join(_cut(line) for line in [*_frame_lines(graph.root), *_pair_lines(graph)])


def _cut(line: str) -> str:
    return line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 4]} ..."


def _frame_lines(frame: Frame) -> Iterator[str]:
    pad = "  " * len(frame.path)
    yield f"{pad}{_title(frame)}({', '.join(_named(frame, v) for v in frame.jaxpr.invars)})"
    groups = {first: (size, count) for first, size, count in equal_groups(frame)}
    for position, eqn in enumerate(frame.jaxpr.eqns):
        if position in groups:
            size, count = groups[position]
            yield f"{pad}  # {count} equal groups of {size} equations"
        results = ", ".join(_named(frame, v) for v in eqn.outvars)
        operands = " ".join(_name(frame, v) for v in eqn.invars)
        line = re.sub(r"(:\d+):\d+", r"\1", _compat.source_line(eqn)).rpartition("/")[2]
        backward = "<- " if _compat.is_transposed(eqn) else ""
        yield f"{pad}  {results} = {backward}{eqn.primitive.name} {operands}{f'  # {line}' if line else ''}"
        if position in frame.children:
            yield from _frame_lines(frame.children[position])
    yield f"{pad}  return {', '.join(_name(frame, v) for v in frame.jaxpr.outvars)}"


def _title(frame: Frame) -> str:
    if frame.kind != "scan":
        return frame.kind
    params = scan_of(frame).params
    return f"scan {frame.path[-1]}: {params['length']} iterations{' in reverse' if params['reverse'] else ''} "


def _name(frame: Frame, atom: Any) -> str:
    return str(atom.val) if isinstance(atom, _compat.Literal) else f"v{frame.values[atom].number}"


def _named(frame: Frame, var: Any) -> str:
    if var not in frame.values:  # JAX drops results that nothing takes
        return "_"
    return f"{_name(frame, var)}:{var.aval.str_short(short_dtypes=True)}"


def _pair_lines(graph: Graph) -> Iterator[str]:
    for pair in scan_pairs(graph):
        first, last = pair.forward.path[-1], pair.backward.path[-1]
        yield f"residuals: {len(pair.residuals)} from scan {first} to scan {last}"
        for residual in pair.residuals:
            aval = residual.value.aval.str_short(short_dtypes=True)
            yield f"  v{residual.value.number}:{aval}  result {residual.made} -> operand {residual.taken}"


def function_text(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Return the program of a function of pytrees as text; the arguments may be shapes."""
    return program_text(jax.make_jaxpr(fn)(*args, **kwargs))
