"""The time of transfers of host memory: bytes over the link, and what the compute of the same loop hides."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan, plan
from autoshard.sharding.loops import host_moves
from autoshard.sharding.machines.constants import HOST_BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import find_target, write_target

LAYERS, ROWS, WIDTH = 4, 8192, 1024
PART = 2560  # hidden units of an eighth of the compute of an iteration that hides most of two values
VALUE = ROWS * WIDTH * 4  # bytes of one layer's value
TARGET = "v5e:2x4"
PER_BYTE = 1e6 / (find_target(TARGET).chip.host_bandwidth * HOST_BANDWIDTH_REACHED)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def step(hidden, *, names=("input",), scan=True):
    """The gradient of scanned layers, each with a hidden size, that offload the values with these names."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst="pinned_host"
    )

    @partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        x = checkpoint_name(x, "input")
        return x + jnp.tanh(checkpoint_name(x @ w["up"], "hidden")) @ w["down"], None

    def loss(w, x):
        if scan:
            return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)
        for n in range(LAYERS):
            x = layer(x, jax.tree.map(lambda a, n=n: a[n], w))[0]
        return jnp.sum(x**2)

    shapes = {"up": (LAYERS, WIDTH, hidden), "down": (LAYERS, hidden, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    return jax.grad(loss), weights, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def estimate(*args, target=TARGET, words="dp:8", **keywords):
    return plan(*step(*args, **keywords), target=target, plan=words).estimate


@pytest.mark.parametrize("scan", [True, False])
def test_bytes_of_both_directions(scan):
    found = estimate(1024, scan=scan)
    # The last layer of a scan does not send its value. The backward loop also fetches in its last iteration.
    assert found.host_traffic_bytes == pytest.approx((2 * LAYERS - scan) * VALUE / 8)
    assert found.host_memory_bytes == pytest.approx(LAYERS * VALUE / 8)
    # Scanned, the two directions are in two loops. Unrolled, both are in one stretch of code and run at once.
    assert found.host_us == pytest.approx((2 * LAYERS - 1 if scan else LAYERS) * VALUE / 8 * PER_BYTE)


def test_a_device_transfers_its_shard_of_each_value(monkeypatch):
    monkeypatch.setattr(host_moves, "FETCHED_NOW_FROM", 2.0)  # all slices are fetched ahead, and all last ones kept
    one, all_names = estimate(2048), estimate(2048, names=("input", "hidden"), words="tp:8")
    # Under tp:8 the input is whole on every device; of the hidden value each device has an eighth.
    assert all_names.host_traffic_bytes == pytest.approx((2 * LAYERS - 1) * (VALUE + 2 * VALUE / 8))
    assert one.host_traffic_bytes == pytest.approx((2 * LAYERS - 1) * VALUE / 8)


def test_compute_of_the_same_loop_hides_transfers():
    """With a large hidden size compute is longer than the transfers, with a small one it is not."""
    large, small = estimate(16_384), estimate(128)
    assert large.host_us == small.host_us
    assert large.host_exposed_us == 0 < small.host_exposed_us < small.host_us
    unrolled = estimate(16_384, scan=False)
    assert unrolled.host_exposed_us == 0
    alone = estimate(128, words="dp:1", target="v5e:1x1")  # no collectives
    assert alone.step_time_us == pytest.approx(alone.compute_us + alone.host_exposed_us)
    assert alone.host_exposed_us > 0


def test_nothing_hides_the_first_fetch_of_a_loop_that_takes_a_stack_from_outside():
    """Its slices are inputs of the step, so no loop has kept the first one."""

    def sums(stack, w):
        def body(x, h):
            return jnp.tanh(x @ w) @ w.T + jax.device_put(h, DEVICE) @ w @ w.T, None

        return jax.lax.scan(body, jnp.zeros((ROWS, WIDTH)), stack)[0]

    place = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P(), memory_kind="pinned_host")
    stack = jax.ShapeDtypeStruct((LAYERS, ROWS, WIDTH), "float32", sharding=place)
    found = plan(sums, stack, jax.ShapeDtypeStruct((WIDTH, 65_536), "float32"), target=TARGET, plan="dp:8").estimate
    assert found.host_us == pytest.approx(LAYERS * VALUE / 8 * PER_BYTE)
    assert found.host_exposed_us == pytest.approx(VALUE / 8 * PER_BYTE)


@pytest.mark.parametrize("early", [1, 3])
def test_only_the_compute_after_a_result_hides_its_transfer(early):
    """Each of the two values waits for its product. `early` of eight parts of the compute come before the first one."""
    before, middle, after = early * PART, PART, (7 - early) * PART

    def made(x, w):
        def body(x, _):
            def through(x, hidden, place=0):
                return jnp.tanh(x @ w[:, place : place + hidden]) @ w[:, place : place + hidden].T

            first = through(x, before)
            second = through(first, middle, before)
            sent = [jax.device_put(value, HOST) for value in (first, second)]
            return through(second, after, before + middle), sent

        return jax.lax.scan(body, x, length=LAYERS)

    inputs = jax.ShapeDtypeStruct((ROWS // 8, WIDTH), "float32"), jax.ShapeDtypeStruct((WIDTH, 8 * PART), "float32")
    found = plan(made, *inputs, target="v5e:1x1", plan="dp:1").estimate
    link, compute = LAYERS * VALUE / 8 * PER_BYTE, found.compute_us
    assert found.host_us == pytest.approx(2 * link) and link < compute < 2 * link
    late = early / 8 * compute + 2 * link  # from the first value on, the link is busy
    assert found.host_exposed_us == pytest.approx(late - compute, rel=0.1)


def test_on_a_gpu_nothing_hides_transfers():
    found = estimate(16_384, target="h100:8")
    chip = find_target("h100:8").chip
    expected = 2 * LAYERS * VALUE / 8 / (chip.host_bandwidth * HOST_BANDWIDTH_REACHED) * 1e6
    assert found.host_exposed_us == found.host_us == pytest.approx(expected)


def test_on_tpu7x_compute_hides_transfers_to_the_host_alone():
    """The rest of the transfers to the host is longer than the compute of the forward loop."""
    target = "tpu7x:2x2x1"
    one_way = LAYERS * VALUE / 8 / (find_target(target).chip.host_bandwidth * HOST_BANDWIDTH_REACHED) * 1e6
    found = estimate(16_384, target=target)
    assert found.host_us == pytest.approx((2 - 1 / LAYERS) * one_way)
    assert one_way < found.host_exposed_us < (2 - 1 / LAYERS) * one_way


def test_the_forward_loop_does_not_hide_transfers_of_the_backward_loop():
    """The loops' exposed parts add up: each is its own transfers less its own compute."""
    found = estimate(128)
    both = (2 * LAYERS - 1) * VALUE / 8 * PER_BYTE
    assert both - found.compute_us < found.host_exposed_us <= both  # less would be exposed if all compute hid all


def test_no_host_memory_costs_nothing():
    found = estimate(1024, names=())
    assert (found.host_traffic_bytes, found.host_us, found.host_exposed_us) == (0, 0, 0)


def test_a_machine_without_a_known_link_is_not_priced(tmp_path):
    path = tmp_path / "machine.toml"
    write_target(find_target(TARGET), path)
    path.write_text("".join(s for s in path.read_text().splitlines(keepends=True) if "host_bandwidth" not in s))
    made = plan(*step(128), target=str(path), plan="dp:8")
    assert made.estimate.host_traffic_bytes > 0
    assert (made.estimate.host_us, made.estimate.host_exposed_us) == (0, 0)
    assert "  host " in str(made) and "unknown" in str(made)


def test_the_plan_shows_transfers_and_keeps_them():
    made = plan(*step(128), target=TARGET, plan="dp:8")
    (row,) = [line for line in str(made).splitlines() if line.startswith("  host ")]
    assert "to and from host memory" in row and "not hidden by compute" in row
    assert Plan.from_json(made.to_json()).estimate == made.estimate
    plain = plan(*step(128, names=()), target=TARGET, plan="dp:8")
    assert "host" not in plain.to_json() and "  host " not in str(plain)
    assert "host traffic per step" in made.diff(plain)


def test_state_that_waits_on_the_host_is_priced_in_straight_code():
    def update(state, gradient):
        here = jax.device_put(state, DEVICE)
        return jax.device_put(0.9 * here + gradient, HOST)

    shape = jax.ShapeDtypeStruct((8192, 1024), "float32")
    place = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec(), memory_kind="pinned_host"
    )
    on_host = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)
    found = plan(update, on_host, shape, target=TARGET, plan="dp:8").estimate
    size = 8192 * 1024 * 4 / 8
    assert found.host_traffic_bytes == pytest.approx(2 * size)
    assert found.host_us == pytest.approx(size * PER_BYTE)
    assert found.host_exposed_us == pytest.approx(found.host_us - found.compute_us)


def test_a_loop_without_iterations_moves_nothing():
    fn, weights, x = step(1024)
    none = {name: jax.ShapeDtypeStruct((0, *w.shape[1:]), w.dtype) for name, w in weights.items()}
    assert plan(fn, none, x, target=TARGET, plan="dp:8").estimate.host_us == 0
