"""One kernel: what it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.spmdrules.ir.program import Op


@shown
@dataclass(eq=False)
class Kernel:
    """One kernel.

    Attributes:
        op: the operator that names it; of a kernel of elementwise operators, the first.
        reads: the values that it reads.
        writes: the values that it writes.
        absorbed: the value of a product from which it computes reductions; -1 if there are none.
    """

    op: Op
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    absorbed: int = -1
