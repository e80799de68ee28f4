"""The cost of collectives as XLA emits them."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.collectives import collective, merged_reductions, step_cost
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.layout.operator_strategy import Move
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


def test_an_all_reduce_of_shards_becomes_part_of_the_reduction_before_it():
    gathered, other = Move("all-gather", ("tp",), 0, 1.0, 1.0), Move("all-reduce", ("tp",), -2, 4.0, 8.0)
    scattered, of_shards = Move("reduce-scatter", ("fsdp",), -1, 8.0, 6.0), Move("all-reduce", ("dp",), -1, 2.0, 2.0)
    together = Move("reduce-scatter", ("dp", "fsdp"), -1, 8.0, 6.0)
    assert merged_reductions((gathered, scattered, of_shards, other)) == (gathered, together, other)
    assert merged_reductions((gathered, scattered, other)) == (gathered, scattered, other)


def test_on_tpu7x_gradients_are_all_reduced_over_all_axes_of_the_batch():
    """The whole gradient is sent. A v6e reduce-scatters it to the shards that are stored, and all-reduces these."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2048, 8192), (32_768, 2048))]

    def reductions(target):
        made = plan(step, *shapes, plan="dp:2 fsdp:4", target=target, donate_argnums=0)
        return {(kind, axes): size for kind, axes, size, _ in made.traffic if "all-gather" not in kind}

    whole = 2048 * 8192 * 2
    assert reductions("tpu7x:2x2x1") == {("all-reduce", "dp fsdp"): 2 * 7 / 8 * whole}
    assert reductions("v6e:2x4") == {("reduce-scatter", "fsdp"): 3 / 4 * whole, ("all-reduce", "dp"): whole / 4}
