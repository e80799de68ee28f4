"""Estimates of programs that are compiled for unattached machines, compared with figures derived by hand."""

import jax
import jax.numpy as jnp
import pytest
from estimate import estimate
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.sharding.audit import CompileJob, compile_job
from autoshard.sharding.audit.export import export
from autoshard.sharding.machines.device_mesh import abstract_mesh

LAYERS, WIDTH, HIDDEN, BATCH = 3, 1024, 4096, 512
WEIGHT = WIDTH * HIDDEN * 2  # bytes, bf16


def layers_job(kind, topology="v5e:4x4"):
    """Loss and gradients of a scan of MLPs with remat on 16 devices: FSDP, or tensor-parallel over the hidden dim."""
    mesh = {"x": 4, "y": 4}
    axes = tuple(mesh)

    def constrained(array, *spec):
        return jax.lax.with_sharding_constraint(array, NamedSharding(abstract_mesh(mesh), PartitionSpec(*spec)))

    def fsdp(x, weights):
        into, out = (constrained(weight) for weight in weights)
        return constrained(constrained(jnp.maximum(x @ into, 0), axes) @ out, axes), None

    def tensor(x, weights):
        into, out = weights
        return constrained(constrained(jnp.maximum(x @ into, 0), None, axes) @ out), None

    def step(into, out, x):
        def loss(weights):
            y, _ = jax.lax.scan(jax.checkpoint(fsdp if kind == "fsdp" else tensor), x, weights)
            return (y.astype(jnp.float32) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)((into, out))
        return [value, into - 0.1 * gradients[0], out - 0.1 * gradients[1]]

    shapes = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (BATCH, WIDTH))
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    stored = {"fsdp": ((None, axes), (None, axes)), "tensor": ((None, None, axes), (None, axes))}[kind]
    specs = [*stored, (axes,) if kind == "fsdp" else ()]
    options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000", "xla_no_such_option": "1"}
    in_shardings, out_shardings = (
        [NamedSharding(abstract_mesh(mesh), PartitionSpec(*spec)) for spec in some] for some in (specs, [(), *stored])
    )
    platform = "cuda" if topology.startswith("h100") else "tpu"
    program = export(step, avals, in_shardings, out_shardings, platform)
    return CompileJob(program, platform, topology, mesh, tuple(range(16)), (0, 1), options)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_fsdp_compiled():
    """In every layer each weight is gathered in the forward and in the backward pass, and its gradient is reduced."""
    result = compile_job(layers_job("fsdp"))
    assert (result.kind, result.dropped) == ("ok", ["xla_no_such_option"]), result.message
    estimated = estimate(result.text, "v5e:4x4", result.coordinates, result.memory)
    gathers = [each for each in estimated.traffic if each.collective.kind == "all-gather"]
    assert sum(each.trips * each.collective.payload_bytes for each in gathers) == LAYERS * 4 * WEIGHT
    reductions = [each for each in estimated.traffic if each.collective.kind in ("all-reduce", "reduce-scatter")]
    reduced = sum(each.trips * each.collective.payload_bytes for each in reductions)
    assert reduced == LAYERS * 2 * WEIGHT + 4  # and the loss
    assert {each.collective.size for each in estimated.traffic} == {16}
    assert {each.over for each in estimated.traffic} == {"x4:1 y4:1"}
    assert all(each.collective.source.partition(":")[0].endswith("test_compiled.py") for each in gathers)
    # 2 products forward, the first one recomputed backward, and 4 for the gradients.
    assert estimated.flops == LAYERS * 2 * (BATCH // 16) * WIDTH * HIDDEN * (2 + 1 + 4)
    assert estimated.step["cycles"] >= estimated.step["roofline"] > estimated.exposed["roofline"] > 0
    assert (estimated.memory_bytes or 0) >= 2 * LAYERS * WEIGHT // 16


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_tensor_parallel_compiled():
    """Each layer all-reduces its activations once forward and once backward. Weights are not moved."""
    job = layers_job("tensor")
    compiled = compile_job(job)
    assert compile_job(job).cached
    step = estimate(compiled.text, "v5e:4x4", compiled.coordinates, compiled.memory)
    sums = [each for each in step.traffic if each.collective.payload_bytes > 4]
    assert {each.collective.kind for each in sums} == {"all-reduce"}
    assert sum(each.trips * each.collective.payload_bytes for each in sums) == LAYERS * 2 * BATCH * WIDTH * 2
    assert sum(each.trips for each in sums) == 2 * LAYERS
    assert step.flops == LAYERS * 2 * BATCH * WIDTH * HIDDEN // 16 * (2 + 1 + 4)


@pytest.mark.cuda_compile
def test_compiled_for_gpus():
    """The FSDP step on two hosts of eight GPUs uses NVLink and the network, and has no cycles."""
    result = compile_job(layers_job("fsdp", "h100:2x8"))
    assert result.kind == "ok", result.message
    estimated = estimate(result.text, "h100:2x8", result.coordinates, result.memory)
    gathers = [each for each in estimated.traffic if each.collective.kind == "all-gather"]
    assert sum(each.trips * each.collective.payload_bytes for each in gathers) == LAYERS * 4 * WEIGHT
    assert {each.over for each in gathers} == {"2 x 8"}
    assert list(estimated.step) == ["roofline"]
    assert estimated.flops == LAYERS * 2 * (BATCH // 16) * WIDTH * HIDDEN * (2 + 1 + 4)
