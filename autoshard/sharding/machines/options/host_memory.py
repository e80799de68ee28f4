"""Options for host memory on TPUs, and what they are worth.

`host-link` and `slow-host-link`: XLA's scheduler gives each fetch from host memory as much compute as it expects the
fetch to take. For v6e it expects a third of the link's bandwidth. `LINK_SPEED` scales what it expects. In GB/s,
compiled with libtpu 0.0.42.1 (`benchmarks/host_link.py`):

    chip   by default   at 1   the planner
    v4     18.2         81.8   14.4
    v5p    12.5         60.5   14.4
    v6e     9.3         46.1   28.8

On v5e and tpu7x, fetches start at the beginning of the iteration, whatever the value. `verify` tries both sets.
Neither is a default, because each is the best for some programs. Seconds per step on v6e, scheduled for the plans of
`benchmarks/recipes.py`, by the roofline:

    program                                                  default   host-link   slow-host-link
    Llama-3.1 8B, v6e:2x4, host:qkv+context+out_proj         2.765     2.762       2.601
    Llama-3.1 8B, v6e:8x8, host:qkv+context+out_proj         4.288     4.551       4.364
    Mistral 7B, v6e:2x4, host:residual+qkv+context           4.646     4.582       4.926
    Llama-2 70B, v6e:16x16, three of four layers host:mlp_in 6.575     6.781       6.621

`small-tiles`: without it, XLA for tpu7x writes a stack in host memory in tiles of 16 rows and reads it in tiles of 8.
So each iteration of a loop moves the whole stack through the device. With it, eight layers with two values in host
memory take 0.122 of the time (`benchmarks/option_limits.py stacks`). Programs without host memory keep theirs: 0.996
for four layers of Llama-3.1 8B, `fsdp:8`.

`host-transfers` leaves out `xla_tpu_aggressive_opt_barrier_removal`, which published sets for host offload have: it
undoes rematerialization.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.sharding.machines.options.option_table import LINK_SPEED, Options

# Option set -> its options, for v6e. Half and three tenths of what it expects at 1: 23 and 14 GB/s.
# Values around them (0.4, 0.62, 0.75, 0.85) were not better for the programs of the second table. v4 and v5p have no
# such set: what the scheduler expects by default is within 30 % of the planner's figure, which is only a rated one.
LINK_SPEEDS: Mapping[str, Options] = {"host-link": {LINK_SPEED: "0.5"}, "slow-host-link": {LINK_SPEED: "0.3"}}

# The options of `host-transfers`.
HOST_TRANSFERS: Options = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_lhs_prioritize_async_depth_over_stall": "true",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
