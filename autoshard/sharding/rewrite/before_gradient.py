"""`replace_kernels`: replaces attention by kernels in a function that is differentiated later.

A region may have derivatives of its own (`stop_gradient`, `custom_jvp`). So it is differentiated alone, and the proof
covers its result and the gradients of q, k and v, as in a step that is already differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard import _compat
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.kernels.planned_platform import planned_platform
from autoshard.kernels.two_passes import Kernel, differentiable_pass, kernel_of
from autoshard.sharding.program.kernel_records import KernelRecord, KernelWord, read_word
from autoshard.sharding.rewrite.attention_forward import Candidate, Unread, candidates
from autoshard.sharding.rewrite.attention_proof import Attention
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits, evaluated, rewritten
from autoshard.sharding.rewrite.experts.grouped_edits import edit_grouped_products
from autoshard.sharding.rewrite.kernel_edits import segments_edit
from autoshard.sharding.rewrite.kernel_rewriting import (
    attention_of,
    check_kernel,
    check_required,
    grouped,
    left,
    replaced,
)
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Frame, Graph, Value, graph_of


def replace_kernels(fn: Callable[..., Any], *, kernels: KernelWord = "auto") -> Callable[..., Any]:
    """Return a function whose attention is replaced by kernels, to be differentiated.

    Use it on a loss before `jax.grad`. `auto_shard(step, kernels="auto")` does the same for a whole step that is
    already differentiated. The kernel is that of the platform that the function is traced for. Results are not bitwise
    equal to those of `fn`.

    Args:
        fn: a function of pytrees of arrays.
        kernels: "auto" leaves what cannot be replaced; "require" makes it an error; "off" returns `fn`.

    Returns:
        The function. Its attribute `kernels` lists what the last trace found, replaced or left.

    Raises:
        PlanError: `fn` is not a function, or the word is unknown. Calls raise it too, if `kernels` is "require" and
            something is left.

    >>> import jax.numpy as jnp
    >>> def loss(q, k, v):
    ...     return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True))
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> with_kernels = replace_kernels(loss)
    >>> _ = jax.grad(with_kernels)(x, x + 1, x)
    >>> [record.replaced for record in with_kernels.kernels]
    [True]
    """
    if not callable(fn):
        raise PlanError(f"replace_kernels takes a function, got {type(fn).__name__} {short_repr(fn)}")
    if read_word(kernels) == "off":
        return fn

    @functools.wraps(fn)
    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        with _compat.classic_scans():
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        closed = _compat.classic(closed)
        edits, closed, records = _edits_of(closed)
        if kernels == "require":
            check_required(getattr(fn, "__name__", "function"), records)
        setattr(with_kernels, "kernels", tuple(records))  # noqa: B010
        results = evaluated(closed, edits)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    setattr(with_kernels, "kernels", ())  # noqa: B010
    return with_kernels


def _edits_of(closed: Any) -> tuple[FrameEdits, Any, list[KernelRecord]]:
    kernel = kernel_of(planned_platform())
    closed = rewritten(_compat.dce(closed))
    graph = graph_of(closed)
    edits = FrameEdits()
    records = edit_grouped_products(edits, graph, differentiable=True)
    for found in candidates(graph):
        if isinstance(found, Unread):
            records.append(left(kernel, found, found.error))
            continue
        try:
            one = attention_of(found, {})
            check_kernel(one, kernel)
            records.append(replaced(kernel, found, _replace(edits, graph, one, kernel)))
        except Exception as error:  # matchers read any user's program; it is left unchanged, with the error as reason
            records.append(left(kernel, found, error))
    return edits, closed, grouped(records)


def _replace(edits: FrameEdits, graph: Graph, one: Attention, kernel: Kernel) -> Attention:
    """Add the edits of one attention to those of a program; return what the proof of its gradients found."""
    if one.gradients is not None:
        raise Refused(
            "the function already computes its gradient: use replace_kernels before jax.grad, or "
            "auto_shard(kernels='auto') for a whole step"
        )
    places = []
    for frame, position in graph.computing(one.out):
        if frame.is_in_call:
            raise Refused("it is in a function with a derivative of its own")
        reads = [frame.places.get(value) for value in (one.found.q, one.found.k, one.found.v)]
        if any(place is None or place[0] >= position for place in reads):
            raise Refused("its operands are not available where the kernel has to run")
        places.append((frame, position, [place[1] for place in reads if place is not None]))
    if not places:
        raise Refused("no equation computes its result")
    proven = one
    for frame, position, variables in places:
        proven = _differentiated(frame, position, variables, one.segments.bases if one.segments else ())
        if proven.proof.softmax != one.proof.softmax:
            raise Refused("its gradients are not those of attention")
    one = replace(one, proof=proven.proof)  # how rows without a visible key are computed shows in their gradients only
    for frame, position, variables in places:
        eqn = frame.jaxpr.eqns[position]
        keys: tuple[Any, ...] = ()
        if one.segments is not None:
            (at, made), outside = segments_edit(one.segments, frame, position)
            edits.at(outside.path).before.setdefault(at, []).append(made)
            keys = made.writes
        edit = Edit((*variables, *keys), (eqn.outvars[0],), functools.partial(_attention, kernel, one), eqn)
        here = edits.at(frame.path)
        here.before.setdefault(position, []).append(edit)
        here.skipped.add(position)
    return proven


def _attention(kernel: Kernel, one: Attention, q: Any, k: Any, v: Any, *segments: Any) -> list[Any]:
    folded = [one.folds[name].fold(x) for name, x in zip("qkv", (q, k, v), strict=True)]
    out = differentiable_pass(one.passes(kernel), *folded, *segments)
    return [one.folds["out"].unfold(out, one.out.shape).astype(one.out.aval.dtype)]


def _differentiated(frame: Frame, position: int, variables: list[Any], bases: Sequence[Value]) -> Attention:
    """Differentiate a region alone, and prove its gradients too. `bases` are the arrays that its mask is made of."""
    jaxpr = frame.jaxpr
    of_bases = {var: value for var, value in frame.values.items() if value in bases}
    given = {*variables, *of_bases}
    needed, used = {jaxpr.eqns[position].outvars[0]}, []
    for eqn in reversed(jaxpr.eqns[: position + 1]):
        if needed & {*eqn.outvars} - given:
            used.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, _compat.Literal)} - given
    made = {var for eqn in used for var in eqn.outvars}
    outside = {v: frame.values[v] for v in needed - made - given}

    def region(rows: Sequence[Any], *operands: Any) -> Any:
        known = dict(zip(bases, rows, strict=True))
        env = {var: known[value] for var, value in of_bases.items()} | dict(zip(variables, operands, strict=True))
        env |= {var: _rebuilt(value, known) for var, value in outside.items()}
        for eqn in reversed(used):
            args = [atom.val if isinstance(atom, _compat.Literal) else env[atom] for atom in eqn.invars]
            env |= zip(eqn.outvars, _compat.bind(eqn, eqn.params, *args), strict=True)
        return env[jaxpr.eqns[position].outvars[0]]

    def both(d_out: Any, rows: Sequence[Any], *operands: Any) -> Any:
        out, pullback = jax.vjp(functools.partial(region, rows), *operands)
        return out, pullback(d_out)

    d_out, *shapes = [_compat.shape_dtype_of(var) for var in (jaxpr.eqns[position].outvars[0], *variables)]
    of_rows = [jax.ShapeDtypeStruct(base.shape, base.aval.dtype) for base in bases]
    graph = graph_of(rewritten(jax.make_jaxpr(both)(d_out, of_rows, *shapes)))
    proven = [attention_of(found, {}) for found in candidates(graph) if isinstance(found, Candidate)]
    if len(proven) != 1 or proven[0].gradients is None or len(proven[0].gradients.present) != 3:
        raise Refused("its gradients are not those of attention")
    return proven[0]


def _rebuilt(value: Value, known: dict[Value, Any]) -> Any:
    """Compute a value again from static ones and known ones, such as a mask from outside of a loop.

    Raises:
        Refused: it depends on another array.
    """
    if value not in known:
        if value.op in ("const", "literal"):
            known[value] = value.data
        elif value.eqn is None or value.op in ("carry", "opaque"):
            raise Refused("its scores depend on an array from outside")
        else:
            operands = [_rebuilt(v, known) for v in value.operands]
            known[value] = _compat.bind(value.eqn, value.eqn.params, *operands)[value.index]
    return known[value]
