"""Products in 8 bits on chips that compute them no faster than those in 16 bits."""

from __future__ import annotations

from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.program.flops import matmul_flops
from autoshard.spmdrules.ir.program import Program


def product_notes(program: Program, chip: Chip, target: str) -> list[str]:
    """Return a note for each 8-bit type whose products the chip does not speed up; empty if there is none.

    Args:
        program: the planned program.
        chip: its device.
        target: the machine's name.
    """
    multiplied = {each for op in program.ops() if op.rule is not None for each in matmul_flops(op)}
    slow = {"int8": chip.flops_int8, "fp8": chip.flops_fp8}
    used = {"int8" if each.integer else "fp8" for each in multiplied if each.itemsize == 1}
    return [
        f"products in {name} are priced like those in 16 bits: {target} computes them no faster"
        for name, flops in slow.items()
        if name in used and not flops
    ]
