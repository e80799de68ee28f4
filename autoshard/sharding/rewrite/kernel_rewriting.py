"""Replaces attention and grouped products in a traced program by kernels: `kernels=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard import _compat
from autoshard._units import line_text
from autoshard.errors import PlanError
from autoshard.kernels.block_choice import under_rules
from autoshard.kernels.planned_platform import Planned, planned_for, planned_platform
from autoshard.kernels.two_passes import Kernel, kernel_of, kernel_refusals
from autoshard.sharding.program.kernel_records import KernelRecord, KernelWord
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.attention_forward import Candidate, Unread, candidates
from autoshard.sharding.rewrite.attention_gradient import gradients_of
from autoshard.sharding.rewrite.attention_proof import Attention, Proof, prove
from autoshard.sharding.rewrite.attention_region import Region, regions_of
from autoshard.sharding.rewrite.constants import MOST_CHANGES_TO_QUOTIENT
from autoshard.sharding.rewrite.evaluation import FrameEdits, rewritten
from autoshard.sharding.rewrite.experts.grouped_edits import edit_grouped_products
from autoshard.sharding.rewrite.kernel_edits import edit_attention
from autoshard.sharding.rewrite.pairs import check_program
from autoshard.sharding.rewrite.slices import Refused, cut_out, reason_of, used_elsewhere
from autoshard.sharding.rewrite.values import Value, graph_of


def with_kernels(traced: Traced, word: KernelWord, machine: Planned) -> Traced:
    """Return a traced step with its attention and its grouped products replaced by kernels.

    Args:
        traced: the step.
        word: `off`, `auto` or `require`.
        machine: the machine that it is planned for.

    Raises:
        PlanError: the word is `require`, and there is nothing to replace, or something cannot be replaced.
    """
    if word == "off":
        return traced
    with _compat.auto_axes(), planned_for(machine), under_rules(traced.block_rules):
        closed, records = kernels_in(traced.closed, kernel_of(planned_platform()))
    if word == "require":
        check_required(traced.name, records)
    if not any(record.replaced for record in records):
        return replace(traced, kernels=tuple(records), kernels_word=word)
    jaxpr = _compat.open_jaxpr(closed)
    return replace(traced, closed=closed, in_avals=[v.aval for v in jaxpr.invars],
                   out_avals=[v.aval for v in jaxpr.outvars], kernels=tuple(records), kernels_word=word)  # fmt: skip


def check_required(name: str, records: Sequence[KernelRecord]) -> None:
    """Check that there is something to replace, and that all of it was replaced.

    Raises:
        PlanError: there is none, or some of it was left.
    """
    if not records:
        raise PlanError(
            f"auto_shard({name}): kernels='require', but no attention was found in the program: two products around a "
            "softmax; nor a grouped product for which the target has a kernel. Leave kernels out, or use kernels='auto'"
        )
    if left := [record for record in records if not record.replaced]:
        texts = "; ".join(f"{record.operator} cannot be replaced at {record.line}: {record.reason}" for record in left)
        raise PlanError(f"auto_shard({name}): kernels='require', but {texts}. Change the code, or use kernels='auto'")


def kernels_in(closed: Any, kernel: Kernel) -> tuple[Any, list[KernelRecord]]:
    """Return a closed jaxpr with attention and grouped products replaced, and the records of what was found.

    Args:
        closed: the program.
        kernel: the kernel of attention. That of grouped products is the one of the planned platform.
    """
    closed = rewritten(_compat.dce(closed))
    graph = graph_of(closed)
    edits = FrameEdits()
    records = edit_grouped_products(edits, graph)
    proofs: dict[Any, Proof | Refused] = {}
    done: set[Value] = set()
    for number, found in enumerate(candidates(graph)):
        if isinstance(found, Unread):
            records.append(left(kernel, found, found.error))
            continue
        if found.scores in done:
            continue
        try:
            one = attention_of(found, proofs)
            check_kernel(one, kernel)
            edit_attention(edits, graph, one, kernel, number)
            done.add(found.scores)
            records.append(replaced(kernel, found, one))
        except Exception as error:  # matchers read any user's program; it is left unchanged, with the error as reason
            records.append(left(kernel, found, error))
    if any(record.replaced for record in records):
        closed = rewritten(closed, edits)
        check_program(closed)
    return closed, grouped(records)


def replaced(kernel: Kernel, found: Candidate, one: Attention) -> KernelRecord:
    """Return the record of an attention that a kernel computes."""
    softmax = one.proof.softmax
    cap = "" if softmax.soft_cap is None else f", cap {softmax.soft_cap:g}"
    passes = "forward and backward" if one.gradients else "forward"
    worst = max(one.proof.differences.values())
    reason = f"{mask_text(one)}, scale {softmax.scale:.4g}{cap}; {passes} proven to {worst:.0e}"
    return KernelRecord(kernel, line_text(found.line), True, reason)


def left(kernel: Kernel, found: Candidate | Unread, error: Exception) -> KernelRecord:
    """Return the record of an attention that stays as it is."""
    return KernelRecord(kernel, line_text(found.line), False, reason_of(error))


def mask_text(one: Attention) -> str:
    """Describe the mask of an attention."""
    seen = one.proof.softmax.visibility
    words = [*(["causal"] if seen.causal else []), *([f"window {seen.window}"] if seen.window is not None else [])]
    kinds = {term.kind for term in one.segments.terms} if one.segments else set()
    words += [*(["segments"] if "equal" in kinds else []), *(["padding"] if kinds - {"equal"} else [])]
    return " with ".join(words) or "no mask"


def grouped(records: Sequence[KernelRecord]) -> list[KernelRecord]:
    """Return equal records once, with their number."""
    counts: dict[KernelRecord, int] = {}
    for record in records:
        counts[record] = counts.get(record, 0) + 1
    return [replace(record, count=count) for record, count in counts.items()]


def attention_of(found: Candidate, proofs: dict[Any, Proof | Refused]) -> Attention:
    """Prove that a candidate is attention.

    Args:
        found: the candidate.
        proofs: proofs of equal regions, which are extended.

    Raises:
        Refused: it is not, or it cannot be replaced.
    """
    reason: Refused | None = None
    for out in _results(found):
        try:
            return _attention(found, out, proofs)
        except Refused as refused:
            reason = reason or refused
    assert reason is not None
    raise reason


def _attention(found: Candidate, out: Value, proofs: dict[Any, Proof | Refused]) -> Attention:
    forward = cut_out([out], (found.q, found.k, found.v))
    gradients = gradients_of(found, out)
    reason: Refused | None = None
    for region in regions_of(found, out, forward, gradients):
        ends = (out, *(gradients.present if gradients else ()))
        if (other := used_elsewhere(region.inner, (found.q, found.k, found.v), ends)) is not None:
            raise Refused(
                f"the program also uses its {other.aval.dtype}{list(other.shape)} elsewhere, such as the weights"
            )
        key = _structure(region)
        if key not in proofs:
            try:
                proofs[key] = prove(region)
            except Refused as refused:
                proofs[key] = refused
        proof = proofs[key]
        if not isinstance(proof, Refused):
            return Attention(found, out, forward, gradients, region.folds, region.segments, proof)
        reason = reason or proof
    assert reason is not None
    raise reason


def _structure(region: Region) -> Any:
    """Return a key of a region. Equal regions have the same key, so equal layers need only one proof."""
    numbers: dict[Value, int] = {}
    rows = []
    for value in region.arrays.values():
        numbers.setdefault(value, len(numbers))
    for value in region.static:
        numbers.setdefault(value, len(numbers))
        one = region.static[value]
        rows.append((value.shape, str(one), value.aval.dtype))
    for top in region.small_tops(region.small_rows(None)):
        numbers.setdefault(top, len(numbers))
    for value in region.evaluated:
        operands = tuple(numbers.get(v, -1) for v in value.operands)
        numbers.setdefault(value, len(numbers))
        rows.append((value.op, str(value.eqn.params), operands, numbers[value], value.shape))
    folds = tuple((name, fold, numbers[region.arrays[name]]) for name, fold in region.folds.items())
    segments = region.segments
    axes = (
        {}
        if segments is None
        else {each: n for n, each in enumerate((*segments.batch, segments.queries, segments.keys))}
    )
    terms = tuple(
        (term.kind, term.is_positive, *((numbers[row.top], *(axes.get(a, -1) for a in row.index)) for row in term.rows))
        for term in (segments.terms if segments else ())
    )
    return tuple(rows), folds, terms, segments is not None and segments.is_reflexive


def _results(found: Candidate) -> list[Value]:
    """Return what may be the result: the second product, or its quotient if the weights are divided afterwards."""
    value = found.product
    for _ in range(MOST_CHANGES_TO_QUOTIENT):
        users = [u for u in dict.fromkeys(value.users) if u.is_used and not u.is_backward]
        following = next((u for u in users if u.op in ("transpose", "convert_element_type", "div", "mul")), None)
        if following is None:
            break
        value = following
        if value.op in ("div", "mul"):
            return [found.product, value]
    return [found.product]


def check_kernel(one: Attention, kernel: Kernel) -> None:
    """Check that a kernel supports an attention.

    Raises:
        Refused: it does not. The text lists every condition that failed.
    """
    operands = [
        jax.ShapeDtypeStruct(one.folds[name].sizes(value.shape), value.aval.dtype)
        for name, value in (("q", one.found.q), ("k", one.found.k), ("v", one.found.v))
    ]
    if reasons := kernel_refusals(kernel, one.proof.softmax, *operands, has_segments=one.segments is not None):
        raise Refused(f"the kernel {kernel!r} cannot run: {'; '.join(reasons)}")
