"""Cuts a traced step into microbatches: `microbatches=`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from autoshard import _compat
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.axes.analysis import Analysis, analyse
from autoshard.sharding.microbatches.accumulation import Runner, in_microbatches
from autoshard.sharding.microbatches.counted_rows import with_counted_rows
from autoshard.sharding.microbatches.flow import Flow, find_flow, own_sums
from autoshard.sharding.microbatches.operator_steps import NotCut, place_of
from autoshard.sharding.microbatches.states import Cut, Split
from autoshard.sharding.microbatches.update_loops import update_loop
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.sharding.rewrite.pairs import check_program

AUTO = "auto"


class RowsNotDivided(PlanError):
    """The number of microbatches does not divide the rows of the batch.

    Attributes:
        rows: the number of rows.
    """

    def __init__(self, message: str, rows: int):
        super().__init__(message)
        self.rows = rows

    def counts(self, least: int) -> list[int]:
        """Return the numbers of microbatches, from `least` on, that divide the rows."""
        return divisors(self.rows, least)


def divisors(rows: int, least: int = 1) -> list[int]:
    """Return the divisors of a number of rows, from `least` on.

    Example:
        >>> divisors(12, least=3)
        [3, 4, 6, 12]
    """
    return [n for n in range(least, rows + 1) if rows % n == 0]


def batch_rows(traced: Traced) -> int:
    """Return the number of rows of a step's batch; 0 if it has none."""
    analysis = analyse(traced)
    return 0 if analysis.roles.batch is None else analysis.axes.sizes[analysis.roles.batch]


def read_microbatches(count: Any) -> int | str:
    """Return the number of microbatches, or "auto"; 1 for None.

    Raises:
        PlanError: it is neither "auto" nor a positive integer.
    """
    if count == AUTO:
        return AUTO
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
        raise PlanError(
            f"microbatches is {short_repr(count)}; give the number of parts of the batch, such as 4, or 'auto'"
        )
    return int(count)


def with_microbatches(
    traced: Traced,
    count: int,
    run: Runner | None = None,
    *,
    replicas: int = 1,
    numerics: bool = False,
    prepare: Callable[[Any, Flow], Any | None] | None = None,
) -> Traced:
    """Return a traced step as a loop over microbatches. Its results are the same up to the order of sums.

    Args:
        traced: the step.
        count: number of microbatches.
        run: runs the microbatches; one after another for None.
        replicas: number of groups of consecutive rows whose sums are added after the loop. If a mesh axis shards the
            groups, sums are reduced over it once, not in each microbatch.
        numerics: whether the results may differ: operators that need a sum over the whole batch in the loop take that
            of each microbatch. `Traced.own_sums` has their lines.
        prepare: returns the step's closed jaxpr, rewritten before it is cut, or None to leave it as it is.

    Raises:
        PlanError: the step has no batch, `count` does not divide the batch, or an operator in the loop needs all rows.
    """
    if count == 1 and run is None:
        return traced
    analysis = analyse(traced)
    rows = batch_inputs(traced, analysis, count * replicas)
    batch = analysis.roles.batch
    pieces = Cut(count, replicas, analysis.axes.sizes[batch] if batch is not None and replicas > 1 else 0)
    with _compat.auto_axes():
        closed = with_counted_rows(rewritten(_compat.dce(traced.closed)))
        loop = update_loop(closed, rows)
        try:
            find = partial(find_flow, batch=rows, count=pieces.pieces, numerics=numerics and loop is None,
                           rows=pieces.rows or None)  # fmt: skip
            flow = find(closed)
            if prepare is not None and (prepared := prepare(closed, flow)) is not None:
                closed, flow = prepared, find(prepared)
            if replicas > 1 and own_sums(flow):  # groups would have sums of their own
                return with_microbatches(traced, count, run, numerics=numerics, prepare=prepare)
            cut = in_microbatches(closed, flow, pieces, run)
            closed = _compat.dce(jax.make_jaxpr(cut)(*map(_compat.shape_dtype_of, _compat.open_jaxpr(closed).invars)))
        except NotCut as reason:
            if loop is not None:
                raise PlanError(
                    f"auto_shard({traced.name}): microbatches={count}, but {place_of(loop[0])} updates "
                    f"{traced.in_names[loop[1]]} in each iteration, and microbatches cut a single update. Give "
                    "microbatches to the function of one update, and call it several times"
                ) from None
            raise PlanError(
                f"auto_shard({traced.name}): microbatches={count}, but the function cannot be cut: {reason}. "
                f"{_advice(closed, rows, count, numerics)}"
            ) from None
    check_program(closed)
    jaxpr = _compat.open_jaxpr(closed)
    return replace(traced, closed=closed, in_avals=[v.aval for v in jaxpr.invars],
                   out_avals=[v.aval for v in jaxpr.outvars], microbatches=count, own_sums=tuple(own_sums(flow)),
                   replicas=replicas, batch=_batch_after(traced, analysis, rows, pieces),
                   input_roles=tuple(analysis.roles.inputs[v] for v in traced.program.inputs))  # fmt: skip


def batch_inputs(traced: Traced, analysis: Analysis, count: int) -> Mapping[int, Split]:
    """Return the input leaves that have the batch, and where its rows are.

    Args:
        traced: the step.
        analysis: its logical axes.
        count: number of microbatches.

    Raises:
        PlanError: no input has the batch, or `count` does not divide it.
    """
    axes, batch = analysis.axes, analysis.roles.batch
    where: dict[int, Split] = {}
    for leaf, value in enumerate(traced.program.inputs):
        for dim, classes in enumerate(axes.of_value[value]):
            if batch is None or batch not in classes:
                continue
            if leaf in where:
                raise PlanError(
                    f"auto_shard({traced.name}): microbatches={count}, but {traced.in_names[leaf]} has the batch in "
                    "two dimensions. Leave microbatches out"
                )
            where[leaf] = Split(dim, math.prod(axes.sizes[c] for c in classes[classes.index(batch) + 1 :]))
    if batch is not None and not where:
        raise PlanError(
            f"auto_shard({traced.name}): microbatches={count}, but the function makes the batch of {axes.sizes[batch]} "
            "rows itself: it concatenates, draws or generates them. Pass the batch as an argument, or leave "
            "microbatches out"
        )
    if batch is None:
        raise PlanError(
            f"auto_shard({traced.name}): microbatches={count}, but no argument has a batch: a dimension that is in the "
            "activations and in no parameter. Leave microbatches out"
        )
    size = axes.sizes[batch]
    if size % count:
        leaf, split = next(iter(where.items()))
        fits = ", ".join(map(str, divisors(size)))
        raise RowsNotDivided(
            f"auto_shard({traced.name}): microbatches={count} does not divide the batch of {size} rows, which is in "
            f"dimension {split.dim} of {traced.in_names[leaf]}. Use one of {fits}",
            size,
        )
    return where


def _advice(closed: Any, rows: Mapping[int, Split], count: int, numerics: bool) -> str:
    """Say what to do about a step that cannot be cut."""
    otherwise = "Leave microbatches out, or accumulate gradients in the function"
    try:
        if not numerics and find_flow(closed, rows, count, numerics=True):
            return f"{otherwise}, or allow_numerics=True: each microbatch takes its own sums, which changes the numbers"
    except NotCut:
        pass
    return otherwise


def _batch_after(traced: Traced, analysis: Analysis, rows: Mapping[int, Split], cut: Cut) -> tuple[int, int, int, int]:
    """Return where the batch is after the cut (`Traced.batch`). The cut may change what else looks like a batch."""
    axes, batch = analysis.axes, analysis.roles.batch
    assert batch is not None
    leaf, split = next(iter(rows.items()))
    place = axes.of_value[traced.program.inputs[leaf]][split.dim].index(batch)
    return leaf, split.dim, place + (cut.replicas > 1), axes.sizes[batch] // cut.pieces
