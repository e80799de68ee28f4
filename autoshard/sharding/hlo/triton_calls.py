"""The cost of this project's Triton kernels in a compiled program, as they state it (`kernels.grouped.triton`)."""

from __future__ import annotations

import json
import re

from autoshard.sharding.hlo.parser import Instruction
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

TARGET = "__gpu$xla.gpu.triton"
_STATED = re.compile(r'serialized_metadata = "({.*?})"')
_QUOTE = r"\22"  # how the text of a program writes a quotation mark


def triton_cost(i: Instruction) -> KernelCost | None:
    """Return the cost that a Triton kernel states; None for kernels that state none, and for other instructions."""
    found = _STATED.search(i.attributes) if i.opcode == "custom-call" and i.target == TARGET else None
    stated = json.loads(found[1].replace(_QUOTE, '"')) if found else {}
    try:
        cost = {name: float(stated[name]) for name in ("flops", "moved_bytes", "efficiency")}
        return KernelCost(**cost, itemsize=int(stated["itemsize"]))
    except KeyError:  # a kernel of others, which states no cost
        return None
