"""Programs compiled for machines that are not here, and what is estimated of them, worked out by hand."""

import base64
import json
import shutil
import sys

import pytest
from compile_cache import Job, abstract_mesh, compiled, job_of  # pyright: ignore[reportMissingImports]
from compile_child import read_job  # pyright: ignore[reportMissingImports]
from estimate import estimate  # pyright: ignore[reportMissingImports]

LAYERS, WIDTH, HIDDEN, BATCH = 3, 1024, 4096, 512
WEIGHT = WIDTH * HIDDEN * 2  # bytes, bf16


def test_jobs_as_json(tmp_path):
    job = {"program": base64.b64encode(b"abc").decode(), "topology": "v5e:2x2", "mesh": {"x": 4}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert read_job(tmp_path / "job.json") == job | {"program": b"abc"}


@pytest.fixture(scope="module")
def cache(request):
    """Where compiled programs are kept between runs."""
    return request.config.cache.mkdir("compiled")


def layers_job(kind, topology="v5e:4x4"):
    """Loss and gradients of a scan of MLPs, recomputed backward, on 16 devices: FSDP, or split over the hidden dim."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = {"x": 4, "y": 4}
    axes = tuple(mesh)

    def kept(array, *spec):
        return jax.lax.with_sharding_constraint(array, NamedSharding(abstract_mesh(mesh), PartitionSpec(*spec)))

    def fsdp(x, weights):
        into, out = (kept(weight) for weight in weights)
        return kept(kept(jnp.maximum(x @ into, 0), axes) @ out, axes), None

    def tensor(x, weights):
        into, out = weights
        return kept(kept(jnp.maximum(x @ into, 0), None, axes) @ out), None

    def step(into, out, x):
        def loss(weights):
            y, _ = jax.lax.scan(jax.checkpoint(fsdp if kind == "fsdp" else tensor), x, weights)
            return (y.astype(jnp.float32) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)((into, out))
        return value, into - 0.1 * gradients[0], out - 0.1 * gradients[1]

    shapes = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (BATCH, WIDTH))
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    stored = {"fsdp": ((None, axes), (None, axes)), "tensor": ((None, None, axes), (None, axes))}[kind]
    specs = [*stored, (axes,) if kind == "fsdp" else ()]
    options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000", "xla_no_such_option": "1"}
    outs = [(), *stored]
    return job_of(step, avals, specs, outs, options=options, mesh=mesh, topology=topology, donated=(0, 1))


@pytest.mark.tpu_compile
def test_fsdp_compiled(cache):
    """Each weight is gathered forward and again backward, and its gradient reduced, in every layer."""
    result = compiled(layers_job("fsdp"), cache=cache)
    assert (result.kind, result.dropped) == ("ok", ["xla_no_such_option"]), result.message
    found = estimate(result.text, "v5e:4x4", result.places, result.memory)
    gathers = [each for each in found.traffic if each.collective.kind == "all-gather"]
    assert sum(each.trips * each.collective.payload_bytes for each in gathers) == LAYERS * 4 * WEIGHT
    reductions = [each for each in found.traffic if each.collective.kind in ("all-reduce", "reduce-scatter")]
    reduced = sum(each.trips * each.collective.payload_bytes for each in reductions)
    assert reduced == LAYERS * 2 * WEIGHT + 4  # and the loss
    assert {each.collective.size for each in found.traffic} == {16}
    assert {each.over for each in found.traffic} == {"x4:1 y4:1"}
    assert all(each.collective.source.partition(":")[0].endswith("test_compiled.py") for each in gathers)
    # Forward, and backward the same again and twice that for gradients; not again: the last product of a layer.
    assert found.flops == LAYERS * 2 * (BATCH // 16) * WIDTH * HIDDEN * (2 + 1 + 4)
    assert found.step["cycles"] >= found.step["roofline"] > found.exposed["roofline"] > 0
    assert (found.memory_bytes or 0) >= 2 * LAYERS * WEIGHT // 16


@pytest.mark.tpu_compile
def test_tensor_parallel_compiled(cache):
    """One all-reduce of the activations a layer forward, one backward; weights stay where they are."""
    job = layers_job("tensor")
    found = compiled(job, cache=cache)
    assert compiled(job, cache=cache).cached
    step = estimate(found.text, "v5e:4x4", found.places, found.memory)
    sums = [each for each in step.traffic if each.collective.payload_bytes > 4]
    assert {each.collective.kind for each in sums} == {"all-reduce"}
    assert sum(each.trips * each.collective.payload_bytes for each in sums) == LAYERS * 2 * BATCH * WIDTH * 2
    assert sum(each.trips for each in sums) == 2 * LAYERS
    assert step.flops == LAYERS * 2 * BATCH * WIDTH * HIDDEN // 16 * (2 + 1 + 4)


@pytest.mark.tpu_compile
def test_what_does_not_fit_is_a_result(cache):
    import jax
    import jax.numpy as jnp

    big = jax.ShapeDtypeStruct((1 << 18, 1 << 16), jnp.bfloat16)  # 32 GiB

    def square(x):
        return (x @ x.T,)

    job = job_of(square, [big], [()], [()], mesh={"x": 4}, topology="v5e:2x2")
    found = compiled(job, cache=cache)
    assert found.kind == "oom" and not found.text
    assert (found.needed_bytes or 0) > (found.limit_bytes or 0) > 15 << 30


@pytest.mark.tpu_compile
def test_order_of_devices(cache):
    """A job says which device stands where in the mesh; each is another program to compile."""
    import jax
    import jax.numpy as jnp

    array = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    parts = [lambda x: (x + 1,), [array], [("x",)], [("x",)]]
    jobs = [job_of(*parts, mesh={"x": 4}, topology="v5e:2x2", devices=order) for order in (None, [3, 0, 2, 1])]
    there, elsewhere = (compiled(job, cache=cache).places for job in jobs)
    assert jobs[0].key != jobs[1].key
    assert elsewhere == [there[3], there[0], there[2], there[1]]


@pytest.mark.tpu_compile
def test_failures_are_results(tmp_path, monkeypatch):
    job = Job(b"no program", "v5e:2x2", {"x": 4})
    assert compiled(job, cache=tmp_path).kind == "error"
    assert compiled(job, cache=tmp_path).cached
    other = Job(b"no program either", "v5e:2x2", {"x": 4})
    assert compiled(other, timeout=0.01, cache=tmp_path).kind == "timeout"
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert compiled(other, cache=tmp_path).kind == "crash"
    assert not (tmp_path / other.key).exists()


@pytest.mark.cuda_compile
def test_compiled_for_gpus(cache):
    """The same FSDP step on two hosts of eight: NVLink and the network, no cycles."""
    result = compiled(layers_job("fsdp", "h100:2x8"), cache=cache)
    assert result.kind == "ok", result.message
    found = estimate(result.text, "h100:2x8", result.places, result.memory)
    gathers = [each for each in found.traffic if each.collective.kind == "all-gather"]
    assert sum(each.trips * each.collective.payload_bytes for each in gathers) == LAYERS * 4 * WEIGHT
    assert {each.over for each in gathers} == {"2 x 8"}
    assert list(found.step) == ["roofline"]
    assert found.flops == LAYERS * 2 * (BATCH // 16) * WIDTH * HIDDEN * (2 + 1 + 4)
