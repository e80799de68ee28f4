"""The cost of collectives as XLA emits them."""

import pytest

from autoshard.sharding.cost.collectives import collective, step_cost
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import find_target
from autoshard.spmdrules.core.placement import ReshardKind


@pytest.mark.parametrize(
    ("target", "kind", "devices", "passes"),
    [
        ("v5e:4x4", "reduce-scatter", 16, 2),  # over two lines: an all-gather is added
        ("v4:4x4x4", "all-gather", 64, 4),  # over three dimensions: zeros, and a reduce-scatter
        ("v5e:4x4", "all-gather", 16, 0),  # emitted as requested
    ],
)
def test_an_all_reduce_in_place_of_another_collective_passes_over_its_bytes(
    target: str, kind: ReshardKind, devices: int, passes: int
):
    machine, whole = find_target(target), 1e9
    local = whole / devices if kind == "all-gather" else whole
    moved = collective(machine.assign({"a": devices}), kind, ("a",), local, 3.0, "line")
    cost = step_cost(0.0, [moved], machine.chip, HostTime(), None)  # pyright: ignore[reportArgumentType]
    once = (devices - 1) / devices * whole / (machine.chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
    assert cost.compute_us == pytest.approx(passes * 3 * once)
