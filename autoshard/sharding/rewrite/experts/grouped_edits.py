"""Edits that replace grouped products by the kernel of the target, if it has one."""

from __future__ import annotations

import functools

from autoshard import _compat
from autoshard._units import line_text
from autoshard.kernels.grouped.call import KERNELS, kernel_call, missing_kernel
from autoshard.kernels.planned_platform import planned_platform
from autoshard.sharding.program.kernel_records import KernelRecord
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits
from autoshard.sharding.rewrite.experts.grouped_products import RAGGED_DOT, grouped_product_of
from autoshard.sharding.rewrite.slices import Refused, reason_of
from autoshard.sharding.rewrite.values import Graph


def edit_grouped_products(edits: FrameEdits, graph: Graph, *, differentiable: bool = False) -> list[KernelRecord]:
    """Add the edits of all grouped products of a program; return what was found.

    Args:
        edits: the edits, which are extended.
        graph: the program.
        differentiable: whether the program is differentiated later.
    """
    if planned_platform() not in KERNELS:
        return []
    kernel, dtypes = KERNELS[planned_platform()]
    call, records = kernel_call(), []
    for frame in graph.root.walk():
        for position, eqn in enumerate(frame.jaxpr.eqns):
            if eqn.primitive.name != RAGGED_DOT:
                continue
            try:
                if missing := missing_kernel():
                    raise Refused(missing)
                found = grouped_product_of(eqn, dtypes)
                if frame.is_in_call:
                    raise Refused("it is in a function with a derivative or shardings of its own")
                if differentiable and found.kind != "rows":
                    raise Refused("it sums over the rows of each group, for which the kernel has no derivative")
                compute = functools.partial(found.differentiable if differentiable else found.compute, call)
                here = edits.at(frame.path)
                here.before.setdefault(position, []).append(Edit(tuple(eqn.invars), tuple(eqn.outvars), compute, eqn))
                here.skipped.add(position)
                is_replaced, reason = True, f"{found.groups} matrices, proven on small arrays"
            except Exception as error:  # the matcher reads any user's program; it is left unchanged, with a reason
                is_replaced, reason = False, reason_of(error)
            line = line_text(_compat.program_line(eqn))
            records.append(KernelRecord(kernel, line, is_replaced, reason, operator="grouped product"))
    return records
