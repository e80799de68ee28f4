"""The option set `full-memory`: XLA's scheduler may fill the memory. What it does, and what it is worth.

TPUs. Without it, gathers become synchronous if the program needs more than a share of the memory, which is between 89
and 91 %. The set does not always make the step faster: a gathered weight in flight takes on-chip memory from the
products beside it. On v5e, at 93 % of the memory, relative to the default sets (first row: `autoshard plan moe-2.4b
--target v5e:4x4 --plan "dp:2 fsdp:8" --batch-size 256 --remat keep:context+mlp_in+mlp_out`; second row:
`benchmarks/memory_pressure.py`):

    program                              step by cycles   by roofline   exposed time of collectives
    MoE of 2.4B, dp:2 fsdp:8             0.976            0.949         0.77
    two products a layer, fsdp:8         1.037            0.955         0.53

GPUs. The scheduler of XLA:GPU has a memory limit: 0.95 x (80 % of the memory - inputs and results). If a program needs
more, no collective overlaps with compute. The set replaces 0.95 by 1.15. It is a default, because it changes nothing
for programs that need less. Llama 2 70B, `fsdp:256` on h100:32x8, four microbatches, seconds by the roofline
(`benchmarks/gpu_scheduler_memory.py`):

    layers keep                        share of the memory   step, exposed part   with the set   with it and `gpu-o1`
    qkv, context, out_proj, mlp_in     86 %                  13.2, 4.4            11.5, 3.0      11.3, 2.3
    qkv, context                       33 %                  12.6, 2.8            12.6, 2.8      10.9, 1.0

`gpu-o1` adds 4.5 to 5.2 GiB, which the estimate does not know, so it is no default; `verify` tries it.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.sharding.machines.options.option_table import Options

TPU_CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_CHIPS = ("a100-40", "a100-80", "h100", "h200", "b200", "gb200")

# The factor of the limit in percent; XLA's default is 95. Chosen so that the limit is 92 % of the memory of a program
# with small inputs: `Chip.memory_bytes` is 93 % of the memory that an H100 reports.
_SLOP_PERCENT = "115"

FULL_MEMORY: Mapping[str, Options] = {
    **dict.fromkeys(TPU_CHIPS, {"xla_tpu_scheduler_percent_shared_memory_limit": "100"}),
    **dict.fromkeys(GPU_CHIPS, {"xla_gpu_memory_limit_slop_factor": _SLOP_PERCENT}),
}
"""Chip -> the options of `full-memory`."""

# On TPUs, `full-memory` is tried for plans that take at least this share of the memory. Source:
# `benchmarks/memory_pressure.py --show`. Without the set, a v5e hides gathers up to 89 % of the memory, fewer at 91 %,
# and none at 93 %.
ALMOST_FULL = 0.85
