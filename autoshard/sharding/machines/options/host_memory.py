"""Options for host memory on TPUs, and what they are worth.

`host-link`: XLA's scheduler gives each fetch from host memory as much compute as it expects the fetch to take. For v6e
it expects a third of the link's bandwidth. Then it finds too little compute for the first fetches of an iteration, and
the device waits for them. `LINK_SPEED` scales what it expects; its default is 0.2. In GB/s, compiled with libtpu
0.0.42.1 (`benchmarks/host_link.py`):

    chip   by default   at 1   the planner
@@
    v5e, tpu7x          fetches start at the beginning of the iteration whatever the value

Llama-3.1 8B on v6e:2x4, `fsdp:8 host:qkv+context+out_proj`, takes 0.93 of the time with the set
(`python benchmarks/recipes.py --only llama3.1-8b-v6e-8`): compute hides all fetches of the backward loop.

`small-tiles`: without it, XLA for tpu7x writes a stack in host memory in tiles of 16 rows and reads it in tiles of 8, so
each iteration of a loop moves the whole stack through the device. With it, eight layers with two values in host memory
take 0.122 of the time (`benchmarks/option_limits.py stacks`). Programs without host memory keep theirs: 0.996 for four
layers of Llama-3.1 8B, `fsdp:8`.

`host-transfers` leaves out `xla_tpu_aggressive_opt_barrier_removal`, which published sets for host offload have: it
undoes rematerialization.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.sharding.machines.options.option_table import LINK_SPEED, Options

# Chip -> the options of `host-link`. The value is the bandwidth that the planner expects, divided by the one at 1. On v4
# and v5p, where the default is within 30 % of that, compiled programs did not show a need for the set.
LINK_SPEEDS: Mapping[str, Options] = {"v6e": {LINK_SPEED: "0.62"}}

# The options of `host-transfers`.
HOST_TRANSFERS: Options = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_lhs_prioritize_async_depth_over_stall": "true",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
