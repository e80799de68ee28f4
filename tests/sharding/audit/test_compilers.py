"""Small programs that the real TPU and GPU compilers compile, without a device."""

import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.audit.verification import compile_target
from autoshard.sharding.machines.constants import COMPILERS_HOST_BYTES
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.audit.test_audit import planned

LAYERS, WIDTH, HIDDEN, ROWS = 3, 256, 1024, 2048


def layers_loss(params, x):
    def body(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(body), x, params)[0].astype(jnp.float32) ** 2)


def layers_step(params, x):
    gradients = jax.grad(layers_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def layers_planned(strategy, target):
    """The plan of a train step of scanned layers under `jax.checkpoint`."""
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    return plan(layers_step, params, x, target=target, plan=strategy, donate_argnums=0)


def large_collectives(audit):
    """Check that an audit's times and memory are plausible, and return its collectives of activations."""
    assert audit.ok, audit.message
    assert audit.step_time_us == pytest.approx(audit.compute_us + audit.exposed_us)
    assert 0 <= audit.exposed_us <= audit.comm_us * 2
    assert audit.peak_bytes > 0
    return [f for f in audit.collectives if f.payload_bytes > 1024]


@pytest.mark.tpu_compile
def test_tensor_parallel_layers_for_a_tpu():
    """Each layer has one all-reduce of activations in the forward and one in the backward pass, and nothing else."""
    plan = layers_planned("tp:4", "v5e:2x2")
    audit = plan.verify()
    sums = large_collectives(audit)
    assert {(f.kind, f.axes, f.payload_bytes) for f in sums} == {("all-reduce", ("tp",), ROWS * WIDTH * 2)}
    assert sum(f.trips for f in sums) == 2 * LAYERS
    assert all("test_compilers.py" in f.line for f in sums)
    assert audit.wire_bytes == pytest.approx(plan.estimate.comm_bytes, rel=0.1)
    assert audit.unplanned == audit.replicated == ()
    assert audit.cycles and audit.compute_us_cycles == pytest.approx(audit.cycles / 1.5e9 * 1e6)
    assert set(audit.versions) == {"jax", "jaxlib", "libtpu"}


@pytest.mark.tpu_compile
def test_device_order_of_a_tpu_is_that_of_the_plan():
    plan = planned("fsdp:4 tp:2", "v5e:2x4")
    target = compile_target(plan.target)
    compiled = compile_job(export_plan(bound_or_error(plan.bound).executable))
    sizes = {d.name: d.size for d in target.topology.dims}
    numbers = [y * sizes["x"] + x for x, y, *_ in compiled.coordinates]
    assert tuple(numbers) == plan.device_order
    assert export_plan(bound_or_error(plan.bound).executable).devices == plan.device_order


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_remarks_of_the_tpu_compiler():
    from jax.sharding import PartitionSpec as P

    from tests.sharding.audit.test_audit import with_input_spec

    audit = with_input_spec(planned("dp:2 tp:4", "v5e:2x4"), "0/0/w", P(("tp", "dp"))).verify()
    assert audit.remarks and audit.unplanned


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_layers_that_wait_on_the_host_of_a_tpu():
    """Each layer's input leaves in the forward loop and comes back in the backward loop, as planned.

    That of the last layer stays on the device. The last fetch, in the last iteration, has no use.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(params, x):
        def body(h, w):
            h = checkpoint_name(h, "x")
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body, policy=policy), x, params)[0].astype(jnp.float32) ** 2)

    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "bfloat16")
    made = plan(jax.grad(loss), params, x, target="v5e:2x2", plan="dp:4")
    audit = made.verify()
    assert audit.ok, audit.message
    one = 64 * ROWS * WIDTH * 2 / 4
    assert {(t.bytes, t.to_host) for t in audit.transfers} == {(one, True), (one, False)}
    assert {t.to_host: t.trips for t in audit.transfers} == {True: LAYERS - 1, False: LAYERS}
    assert audit.host_traffic_bytes == made.estimate.host_traffic_bytes == (2 * LAYERS - 1) * one
    assert audit.host_bytes == made.estimate.host_memory_bytes == LAYERS * one
    assert audit.peak_bytes == audit.memory["device"] == pytest.approx(made.estimate.peak_memory_bytes, rel=0.3)
    assert all(t.distance for t in audit.transfers) and audit.host_us
    times = audit.compute_us, audit.exposed_us, audit.host_exposed_us
    assert audit.step_time_us == pytest.approx(sum(us or 0.0 for us in times)) and audit.host_exposed_us
    assert f"host memory: {2 * LAYERS - 1} transfers per step" in str(audit)


@pytest.mark.cuda_compile
def test_tensor_parallel_layers_for_a_gpu():
    plan = layers_planned("tp:8", "h100:8")
    audit = plan.verify()
    sums = large_collectives(audit)
    assert {f.kind for f in sums} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert {f.axes for f in sums} == {("tp",)}
    assert audit.wire_bytes == pytest.approx(plan.estimate.comm_bytes, rel=0.1)
    assert audit.unplanned == ()
    assert (audit.cycles, audit.compute_us_cycles) == (None, None)
    assert json.loads(audit.to_json())["versions"]["jax-cuda13-pjrt"]


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("target", ["v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_the_most_host_memory_that_the_compiler_accepts(target):
    """The limit applies to the sum of all values. Each of the two stacks alone is below it."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x", "y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params, x):
        def body(h, w):
            y = checkpoint_name(jnp.tanh(checkpoint_name(h, "x") @ w), "y")
            return jnp.tanh(y @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body, policy=policy), x, params)[0].astype(jnp.float32) ** 2)

    layers, rows, width = 136, 2**18, 1024  # each layer moves two values of 512 MiB, 136 GiB in all
    params = jax.ShapeDtypeStruct((layers, width, width), "bfloat16")
    x = jax.ShapeDtypeStruct((8 * rows, width), "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)  # of this memory
        made = plan(jax.grad(loss), params, x, target=target, plan="dp:8")
    assert made.estimate.host_memory_bytes == 2 * layers * rows * width * 2 and not made.fits_host
    audit = made.verify()
    limit = COMPILERS_HOST_BYTES["tpu"] / 2**30
    assert audit.kind == "error" and f"of {limit:.2f}G host" in audit.message


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("target", ["v4:2x2x2", "v5p:2x2x2", "v5p:2x2x1*2", "v6e:2x4", "tpu7x:2x2x1", "v5e:2x4"])
def test_every_tpu(target):
    large_collectives(planned("dp:8", target).verify())


@pytest.mark.slow
@pytest.mark.cuda_compile
@pytest.mark.parametrize("target", ["a100:8", "a100-40:8", "h100:2x4", "h200:8", "b200:8", "gb200:8"])
def test_every_gpu(target):
    large_collectives(planned("dp:8", target).verify())
