"""Peak memory of a device: by kind, by shard, and by live range."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.cost import peak_memory
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import walk
from autoshard.train.program.build import workload_step
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state, sgd_step, whole_bytes


@pytest.mark.parametrize(
    ("strategy", "parameter", "optimizer"),
    [("dp:8", 1, 1), ("zero1:8", 1, 8), ("fsdp:8", 8, 8), ("dp:2 fsdp:4", 4, 4), ("dp:8 state", 8, 8), ("tp:8", 8, 8)],
)
def test_state_takes_the_memory_of_its_shards(strategy, parameter, optimizer):
    params = mlp_state()
    state = params, OPTIMIZER.init(params)
    memory_bytes = plan(adamw_step, state, batch(), plan=strategy, donate_argnums=0).estimate.memory_bytes
    assert memory_bytes["parameter"] == whole_bytes(params) / parameter
    assert memory_bytes["optimizer"] == 2 * whole_bytes(params) / optimizer
    assert memory_bytes["data"] == batch().nbytes / (1 if strategy == "tp:8" else 8)
    assert memory_bytes["other"] == 4


def test_donated_state_is_not_held_twice():
    params = mlp_state(hidden=1024)
    undonated, donated = (
        plan(sgd_step, params, batch(), plan="dp:8", target="v5e:2x4", donate_argnums=d).estimate for d in ((), 0)
    )
    assert undonated.memory_bytes["temporary"] >= whole_bytes(params)
    assert donated.peak_memory_bytes <= undonated.peak_memory_bytes - 0.4 * whole_bytes(params)
    assert donated.peak_memory_bytes == sum(donated.memory_bytes.values())


def test_copies_of_parameters_that_a_loop_keeps_are_sharded_like_them():
    """The backward pass keeps the shards of a stack's cast weights and gathers them again."""

    def step(ws, x):
        def loss(ws):
            def layer(x, w):
                return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

            return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32))

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    shapes = jax.ShapeDtypeStruct((16, 1024, 1024), "float32"), jax.ShapeDtypeStruct((65_536, 1024), "bfloat16")
    planned = plan(step, *shapes, plan="fsdp:8", target="v5e:2x4", donate_argnums=0)
    cast = 2.0 * 16 * 1024**2
    problem, layout = bound_or_error(planned.bound).problem, bound_or_error(planned.bound).layout
    assert problem.memory.kinds_at_peak(layout, problem.cost(layout).live_buffers)["temporary"] < cast / 2
    gathered = sum(size for kind, _, size, _ in planned.traffic if kind == "all-gather")
    assert gathered == pytest.approx(2 * 7 / 8 * cast, rel=0.01)


@pytest.mark.parametrize("times", [1, 4])
def test_values_are_freed_after_their_last_use(times):
    def fn(x, w, v):
        for _ in range(times):
            x = (x @ w) @ v
        return jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 512), (512, 1024), (1024, 512))]
    estimate = plan(fn, *shapes, plan="dp:8", target="h100:8").estimate
    assert estimate.memory_bytes["temporary"] == pytest.approx(4096 * (512 + 1024) * 4 / 8, rel=1e-3)


def test_values_that_the_backward_pass_needs_are_kept_until_then():
    def fn(x, w, v):
        for _ in range(4):
            x = jnp.tanh(x @ w) @ v
        return jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 512), (512, 1024), (1024, 512))]
    estimate = plan(jax.grad(fn, (1, 2)), *shapes, plan="dp:8", target="h100:8").estimate
    assert estimate.memory_bytes["temporary"] >= 4 * 4096 * 1024 * 4 / 8


def test_temporaries_of_a_loop_body_are_held_once():
    def run(length):
        def fn(x, w, v):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ v, None), x, None, length=length)[0]

        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 512), (512, 1024), (1024, 512))]
        return plan(fn, *shapes, plan="dp:8", target="h100:8").estimate.memory_bytes["temporary"]

    carry, temporary = 4096 * 512 * 4 / 8, 4096 * 1024 * 4 / 8
    assert run(2) == run(9) == carry + temporary  # as compiled for one H100: the next carry is written over the last


def test_a_call_does_not_change_memory():
    def gradients(params, x):
        return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]) ** 2))(params)

    def update(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = mlp_state(hidden=1024)
    plain, called = (
        plan(lambda p, x, u=u: u(p, gradients(p, x)), params, batch(), plan="dp:8", donate_argnums=0).estimate
        for u in (update, jax.jit(update))
    )
    assert called.memory_bytes == plain.memory_bytes


def test_the_carry_of_a_loop_is_held_once():
    def fn(x):
        return jax.lax.scan(lambda carry, _: (jnp.sort(carry, axis=1) * 2.0, None), x, None, length=3)[0]

    x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    peak = plan(fn, x, target="cpu:1").estimate.memory_bytes["temporary"]
    assert peak == 2 * 4 * 2**20  # the carry, and its sorted copy


def test_a_product_is_computed_before_the_loop_whose_result_is_added_to_it():
    """Its result is small and is kept during the loop; its operands are large and are not."""

    def fn(x, y, z):
        product = jnp.cumsum(x, axis=0).T @ jnp.cumsum(y, axis=0)
        looped = jax.lax.scan(lambda carry, _: (jnp.sort(carry, axis=1), None), z, None, length=3)[0]
        return product + looped.T @ looped

    x = jax.ShapeDtypeStruct((2**16, 256), "float32")
    peak = plan(fn, x, x, x, target="v5e:1x1").estimate.memory_bytes["temporary"]
    assert 2 * 4 * x.size <= peak < 3 * 4 * x.size


def test_a_loop_of_one_iteration_stacks_nothing():
    """It is not compiled as a loop: all layers in one group take about the memory of single layers, not twice that."""

    def peak(remat):
        step, *shapes = workload_step(workload("gpt-tiny").with_(layers=4, remat=remat, batch_size=64, context=128))
        return plan(step, *shapes, plan="dp:8", donate_argnums=0).estimate.memory_bytes["temporary"]

    assert peak("none,none,none,none") < 1.1 * peak("none")


def residual_peak(blocks, channels):
    """Bytes of temporaries of the gradient of residual blocks of two convolutions on a TPU, 8 images per device."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x):
        return (x - jnp.mean(x, (0, 1, 2))) * jax.lax.rsqrt(jnp.var(x, (0, 1, 2)) + 1e-5)

    def loss(weights, x):
        for first, second in weights:
            x = jax.nn.relu(x + norm(conv(jax.nn.relu(norm(conv(x, first))), second)))
        return jnp.sum(x * x)

    weight = jax.ShapeDtypeStruct((3, 3, channels, channels), "bfloat16")
    images = jax.ShapeDtypeStruct((64, 28, 28, channels), "bfloat16")
    estimate = plan(jax.grad(loss), [(weight, weight)] * blocks, images, plan="dp:8", target="v5e:2x4").estimate
    return estimate.memory_bytes["temporary"]


def test_a_residual_block_keeps_the_results_of_its_convolutions_and_its_sum_once():
    # It keeps neither `relu` of a norm, which convolutions compute again, nor the sum in addition to its `relu`.
    one = 8 * 28 * 28 * 128 * 2
    assert residual_peak(6, 128) - residual_peak(5, 128) == pytest.approx(3 * one, rel=0.02)


@pytest.mark.parametrize(("channels", "lanes"), [(160, 256), (320, 384), (640, 640)])
def test_activations_are_tiled_along_the_dimension_with_the_least_padding(channels, lanes):
    one = 8 * 28 * 28 * lanes * 2
    assert residual_peak(6, channels) - residual_peak(5, channels) == pytest.approx(3 * one, rel=0.02)


@pytest.mark.parametrize(
    ("positions", "padded"),
    [(196, 200 * 256), (256, 256 * 256), (72, 72 * 128)],  # compiled for v5e, such scores take these elements
)
def test_scores_are_tiled_along_positions_and_not_along_rows(positions, padded):
    rows, heads = 512, 16

    def attend(x, w):
        q, k, v = jnp.einsum("bse,enhd->nbhsd", x, w)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(scores), v).sum((2, 3))

    shapes = (
        jax.ShapeDtypeStruct((rows, positions, 128), "bfloat16"),
        jax.ShapeDtypeStruct((128, 3, heads, 8), "bfloat16"),
    )
    bound = bound_or_error(plan(attend, *shapes, plan="dp:4", target="v5e:2x2").bound)
    model, program = bound.problem.memory, bound.problem.program
    local = model._local(bound.layout)
    scores = [v for v in model.keep if program.avals[v].shape == (rows, heads, positions, positions)]
    assert scores and {local[v] for v in scores} == {rows // 4 * heads * padded * 2}


def test_a_loop_writes_over_its_initial_carry():
    """Two loops that accumulate into one array hold it once. It is held twice if something else takes it, too."""
    x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)

    def loops(x, keeps):
        add = lambda total, row: (total + row * row, None)  # noqa: E731
        first, _ = jax.lax.scan(add, jnp.zeros((1024, 4096)), x)
        second, _ = jax.lax.scan(add, first, x[::-1])
        return second.sum() + (first[0, 0] if keeps else 0.0)

    once, twice = (
        plan(lambda x, k=k: loops(x, k), x, plan="dp:1", target="cpu:1").estimate.memory_bytes["temporary"]
        for k in (False, True)
    )
    size = 4 * 1024 * 4096
    assert size <= once < 1.5 * size < 2 * size <= twice


def test_a_loop_has_two_buffers_for_what_it_brings_from_the_host(monkeypatch):
    """One for this iteration, from its start to the use of the value, and one for the next iteration, until the end."""
    rows, width, hidden, layers = 65_536, 1024, 2048, 4
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    @partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "x") @ w["up"]) @ w["down"], None

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)

    w = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    shapes = (
        {k: jax.ShapeDtypeStruct(s, "bfloat16") for k, s in w.items()},
        jax.ShapeDtypeStruct((rows, width), "bfloat16"),
    )

    def temporary_bytes(target):
        return plan(step, *shapes, plan="dp:8", target=target).estimate.memory_bytes["temporary"]

    tpu, gpu = temporary_bytes("v6e:2x4"), temporary_bytes("h100:8")
    monkeypatch.setattr(peak_memory, "fetch_buffers", lambda *args: [])
    # The peak is where the layer has its recomputed values: the iteration's own value is there in any case.
    assert tpu - temporary_bytes("v6e:2x4") == rows * width * 2 / 8
    assert gpu == temporary_bytes("h100:8")


@pytest.mark.parametrize(("target", "is_square"), [("v6e:4x4", True), ("v5e:4x4", True), ("v6e:2x8", False)])
def test_the_whole_sum_of_a_heads_gradient_waits_for_the_backward_loop(target, is_square):
    """Where a reduce-scatter becomes an all-reduce, its slice runs after the loop, or at the end of the loop's body."""
    rows, width, hidden, classes = 16_384, 1024, 65_536, 8192

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(w, x):
        logits = jax.lax.scan(layer, x, w["layers"])[0] @ w["head"]
        return jnp.sum(jnp.square(logits.astype("float32")))

    def step(w, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))

    shapes = {"layers": {"up": (4, width, hidden), "down": (4, hidden, width)}, "head": (width, classes)}
    w = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "bfloat16"), shapes, is_leaf=lambda s: isinstance(s, tuple))

    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    bound = bound_or_error(plan(step, w, x, plan="fsdp:16", target=target).bound)
    ops = list(bound.problem.axes.program.ops())
    (loop,) = (n for n, op in enumerate(ops) if op.name == "scan" and op.eqn.params["reverse"])
    end = loop + sum(1 for _ in walk(ops[loop].blocks[0]))
    lives = [
        (first, last) for each in bound.problem.cost(bound.layout).live_buffers
        for first, last in zip(each.first.tolist(), each.last.tolist(), strict=True)
        if not each.is_divided and ops[first].results[0] in bound.problem.roles.gradients and each.nbytes > 1e6
    ]  # fmt: skip
    assert [last >= end for first, last in lives if first < loop] == [is_square]
    assert [last == end for first, last in lives if first > loop] == [is_square] * 2
