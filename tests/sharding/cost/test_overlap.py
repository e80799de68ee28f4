"""The part of communication that compute hides: waits within one stretch, and stretches apart from each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.sharding.cost.collectives import best_assignment, collective, step_cost
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.cost.overlap import Overlap, Place
from autoshard.sharding.cost.stretches import Stretches
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.device_assignments import assignments
from autoshard.sharding.machines.option_requests import with_options
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.program.tracing import trace
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state


def stretches_of(fn, *args, members=None):
    """The stretches of a function; each operator is a class of its own unless `members` are given."""
    program = trace(fn, args, {}).program
    count = len(list(program.ops()))
    return Stretches(program, [[n] for n in range(count)] if members is None else members)


def straight(n=4):
    """The stretches of `n` operators in straight code."""

    def fn(x):
        for _ in range(n):
            x = jnp.sin(x)
        return x

    return stretches_of(fn, jax.ShapeDtypeStruct((8,), "float32"))


def exposed(places, once_us, times_us, stretches=None):
    stretches = stretches or straight(len(times_us))
    return Overlap(places, stretches.times(times_us)).exposed_us(once_us).tolist()


def before(*ops):
    return Place(np.array(ops), is_before=True)


def after(*ops):
    return Place(np.array(ops), is_before=False)


def test_a_gather_hides_behind_the_operators_before_the_one_that_needs_it():
    assert exposed([before(2)], [12.0], [5, 5, 5, 5]) == [2.0]
    assert exposed([before(2)], [10.0], [5, 5, 5, 5]) == [0.0]
    assert exposed([before(0)], [3.0], [5, 5, 5, 5]) == [3.0]  # nothing runs before the first operator


@pytest.mark.parametrize(
    ("target", "mesh", "first", "hidden", "best"),
    [
        ("v5p:4x4x4", {"dp": 2, "fsdp": 32}, "fsdp", True, True),  # two neighbouring planes
        ("v5p:4x4x4", {"dp": 2, "fsdp": 32}, "dp", False, True),  # every second plane
        ("v5p:4x4x4", {"dp": 4, "fsdp": 16}, "fsdp", True, True),  # one plane
        ("v5p:4x4x4", {"dp": 16, "fsdp": 4}, "fsdp", False, False),  # one line
        ("v5p:2x2x4", {"fsdp": 16}, "fsdp", True, True),
        ("v6e:4x4", {"dp": 2, "fsdp": 8}, "dp", True, True),
    ],
)
def test_the_compiler_for_v5p_runs_gathers_alone_unless_over_a_box_if_it_does_not_keep_them(
    target, mesh, first, hidden, best
):
    """As libtpu 0.0.42.1 compiles gathers of a scanned layer's weights over these groups of devices."""
    machine = find_target(target)
    machine = with_options(machine, {**machine.chip.options, "xla_tpu_prefer_async_allgather_to_allreduce": "false"})
    order = sorted(mesh, key=lambda axis: axis != first)
    assignment = next(assignments(machine.topology, mesh, order))
    gather = collective(assignment, "all-gather", ("fsdp",), 2.0**20, 1.0, "", before(3))
    cost = step_cost(4e6, [gather], machine.chip, HostTime(), straight().times([1e6] * 4))
    assert [c.exposed_us for c in cost.collectives] == [0.0 if hidden else gather.time_us]
    _, cheapest = best_assignment(machine, mesh, cost)
    assert all(c.exposed_us == 0 for c in cheapest.collectives) == best


@pytest.mark.parametrize(("mesh", "first"), [({"dp": 2, "fsdp": 32}, "dp"), ({"dp": 16, "fsdp": 4}, "fsdp")])
def test_a_gather_that_is_kept_hides_over_any_group(mesh, first):
    machine = find_target("v5p:4x4x4")
    order = sorted(mesh, key=lambda axis: axis != first)
    assignment = next(assignments(machine.topology, mesh, order))
    gather = collective(assignment, "all-gather", ("fsdp",), 2.0**20, 1.0, "", before(3))
    cost = step_cost(4e6, [gather], machine.chip, HostTime(), straight().times([1e6] * 4))
    assert [c.exposed_us for c in cost.collectives] == [0.0]


@pytest.mark.parametrize(("target", "share"), [("h100:1x8", 16 / 132), ("a100-80:1x8", 16 / 108), ("v5e:2x4", 0.0)])
def test_a_hidden_collective_takes_multiprocessors_of_a_gpu(target, share):
    machine = find_target(target)
    gather = collective(machine.assign({"fsdp": 8}), "all-gather", ("fsdp",), 2.0**30, 1.0, "", before(3))
    for compute, hidden in (([1e6] * 4, gather.time_us), ([0.0] * 4, 0.0)):
        cost = step_cost(sum(compute), [gather], machine.chip, HostTime(), straight().times(compute))
        assert cost.compute_us == pytest.approx(sum(compute) + share * hidden)
        assert sum(c.exposed_us for c in cost.collectives) == pytest.approx(gather.time_us - hidden)


def test_gathers_run_one_after_another():
    # The second one ends at 8, but its operator could run at 5. The first waits for nothing.
    assert exposed([before(3), before(1)], [4.0, 4.0], [5, 0, 0, 5]) == [pytest.approx(3.0), 0.0]
    # Two that the same operator needs: 10 of 16 us are hidden.
    assert sum(exposed([before(2), before(2)], [8.0, 8.0], [5, 5, 5, 5])) == pytest.approx(6.0)


def test_a_wait_gives_later_gathers_time():
    # The first gather is exposed for 6 us. The second one ends at 12, and its operator runs at 6 + 6.
    assert exposed([before(0), before(1)], [6.0, 6.0], [6, 5]) == [6.0, 0.0]


def test_a_reduction_hides_behind_the_operators_after_the_one_that_computes_its_operand():
    assert exposed([after(1)], [12.0], [5, 5, 5, 5]) == [2.0]
    assert exposed([after(3)], [3.0], [5, 5, 5, 5]) == [3.0]  # nothing runs after the last operator
    assert exposed([after(3), after(0)], [3.0, 15.0], [5, 5, 5, 5]) == [3.0, 0.0]


def test_gathers_and_reductions_share_the_links():
    # Each alone would be hidden behind the other 10 us. Together they take 20 us, and there are 10 us of compute.
    assert sum(exposed([before(3), after(0)], [10.0, 10.0], [0, 5, 5, 0])) == pytest.approx(10.0)


def test_compute_of_other_stretches_hides_nothing():
    def fn(x):
        x = jnp.sin(x)
        x, _ = jax.lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=3)
        return jnp.tan(x)

    stretches = stretches_of(fn, jax.ShapeDtypeStruct((8,), "float32"))
    names = [op.name for op in stretches.ops]
    sin, scan, cos, tan = (names.index(name) for name in ("sin", "scan", "cos", "tan"))
    times = [{"sin": 2.0, "cos": 7.0, "tan": 5.0}.get(name, 0.0) for name in names]
    assert stretches.number[[sin, scan, cos, tan]].tolist() == [0, 0, 1, 0]
    assert stretches.first_loop == scan
    # In the loop: one run is exposed for 3 - 0 us, three times. Before it and after it: the loop does not count.
    assert exposed([before(cos)], [3.0], times, stretches) == [9.0]
    assert exposed([before(scan)], [3.0], times, stretches) == [1.0]
    assert exposed([before(tan)], [9.0], times, stretches) == [7.0]
    assert exposed([after(sin)], [9.0], times, stretches) == [4.0]


def test_one_collective_in_several_stretches():
    def fn(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(jnp.cos(c)), None), x, None, length=3)
        return jnp.sin(jnp.cos(x))

    stretches = stretches_of(fn, jax.ShapeDtypeStruct((8,), "float32"))
    sines = [n for n, op in enumerate(stretches.ops) if op.name == "sin"]
    times = [4.0 if op.name == "cos" else 1.0 if op.name == "sin" else 0.0 for op in stretches.ops]
    assert exposed([before(*sines)], [6.0], times, stretches) == [pytest.approx(2.0 * 4)]


def test_what_cannot_be_hidden_has_no_place():
    assert exposed([None, before(1)], [0.0, 2.0], [5, 5]) == [0.0, 0.0]


WIDTH, ROWS = 2048, 8192


def scanned(w, x):
    """A stack of two products a layer; the gradient of its parameters."""

    def loss(w):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    return jax.grad(loss)(w)


def planned(layers, words, target="h100:8"):
    shapes = jax.ShapeDtypeStruct((layers, 2, WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    return plan(scanned, *shapes, target=target, plan=words)


def exposed_by_kind(made):
    found = {}
    for (kind, *_), times in zip(made.traffic, made.traffic_us, strict=True):
        found[kind] = np.add(found.get(kind, (0.0, 0.0)), times)
    return found


def test_exposed_time_grows_with_the_number_of_layers():
    """Each iteration waits for its first gather and its last reduction, however many iterations there are."""
    few, many = planned(4, "fsdp:8"), planned(16, "fsdp:8")
    one, other = (made.estimate.step_time_us - made.estimate.compute_us for made in (few, many))
    assert one > 0 and other == pytest.approx(4 * one, rel=0.05)
    assert other < many.estimate.comm_us
    assert sum(waits for _, waits in many.traffic_us) == pytest.approx(other)


def test_kinds_that_the_compiler_runs_synchronously_are_exposed():
    assert "all-reduce" in CHIPS["h100"].hides and "all-reduce" not in CHIPS["v5e"].hides
    (us, waits), (other_us, other_waits) = (
        exposed_by_kind(planned(4, "dp:8", t))["all-reduce"] for t in ("v5e:2x4", "h100:8")
    )
    assert waits == pytest.approx(us) and other_waits < 0.9 * other_us


def test_activations_are_exposed():
    found = planned(4, "tp:8")
    assert found.estimate.step_time_us == pytest.approx(found.estimate.compute_us + found.estimate.comm_us)


def test_a_gather_after_the_update_is_exposed():
    """Parameters that are updated in shards are gathered at the end of the step: little compute is left to hide it."""

    params = mlp_state()
    made = plan(adamw_step, (params, OPTIMIZER.init(params)), batch(), target="h100:8", plan="zero1:8")
    rows = {row[3]: times for row, times in zip(made.traffic, made.traffic_us, strict=True)}
    us, waits = rows["parameters, after the update"]
    assert 0.5 * us < waits <= us


def test_the_numbers_do_not_depend_on_how_operators_are_grouped():
    times = [3.0, 4.0, 3.0, 4.0]
    apart = straight(4)
    together = Stretches(
        trace(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))), (jnp.zeros(8),), {}).program, [[0, 2], [1, 3]]
    )
    for ops in ([0], [1], [2], [3]):
        place = dataclasses.replace(before(*ops))
        assert exposed([place], [9.0], times, apart) == exposed([place], [9.0], times[:2], together)
