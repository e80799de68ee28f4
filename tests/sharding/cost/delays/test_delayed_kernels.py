"""Memory of products inside opaque operators that XLA delays to the end of a loop body."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.models.dropless.operators import experts
from autoshard.models.workloads import workload
from autoshard.sharding.cost.delays.delayed_kernels import ends_of_bodies
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build
from autoshard.train.program.build import workload_step

PAIRS, EXPERTS, EMBED, FFN, TOP_K, ROWS, SEQ = 2, 8, 512, 1024, 2, 32, 4096
# Bytes that the products of the expert gradients read: the sorted tokens, the gradients of their results, the hidden
# units, and the gradients of the up and gate products.
READ = 2.0 * (ROWS // 8 * SEQ * TOP_K) * (2 * EMBED + 3 * FFN)


def layer(x, params):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) @ params["router"]), TOP_K)
    matrices = (params[name].astype(jnp.bfloat16) for name in ("up", "down", "gate"))
    return x + experts(x, gates, chosen, *matrices)


def pair(x, params):
    for own in params:
        x = jax.checkpoint(layer)(x, own)
    return x, None


def gradients(params, x):
    return jax.grad(lambda params: jnp.mean(jax.lax.scan(pair, x, params)[0].astype(jnp.float32) ** 2))(params)


def held(target):
    """Return the operator before each buffer of `READ` bytes, and whether the buffer lives to the end of the body."""
    shape = {"router": (EMBED, EXPERTS), "down": (EXPERTS, FFN, EMBED)}
    shape |= dict.fromkeys(("up", "gate"), (EXPERTS, EMBED, FFN))
    params = tuple({name: jax.ShapeDtypeStruct((PAIRS, *s), "float32") for name, s in shape.items()} for _ in range(2))
    x = jax.ShapeDtypeStruct((ROWS, SEQ, EMBED), "bfloat16")
    problem = (bound := bound_or_error(plan(gradients, params, x, target=target, plan="fsdp:8").bound)).problem
    ops, ends = list(problem.axes.program.ops()), ends_of_bodies(problem.axes.program)
    return [
        (ops[first - 1].name, last == ends[first])
        for some in problem.cost(bound.layout).live_buffers if some.nbytes == pytest.approx(READ)
        for first, last in zip(some.first, some.last, strict=True)
    ]  # fmt: skip


def test_asynchronous_reduce_scatters_delay_products_to_the_end_of_the_body():
    assert held("v5p:2x2x2") == [("swiglu_experts_gradients", True)] * 2


def test_synchronous_reduce_scatters_delay_nothing():
    """Compiled for v6e:2x4 and, without reductions on SparseCores, v5p:2x2x2 (libtpu 0.0.42.1)."""
    assert held("v6e:2x4") == []


def peak(name, remat, words):
    step, *shapes = workload_step(workload(name).with_(batch_size=1024, remat=remat, context=4096))
    return plan(step, *shapes, target="v5p:4x8x8", plan=words, donate_argnums=0).estimate.peak_memory_bytes / 2**30


def test_the_peak_of_groups_of_layers_is_that_of_the_compiled_program():
    """Compiled with libtpu 0.0.42.1: 82.22 GiB. Three of the four layers of a group hold 3.75 GiB each."""
    kept = ["keep:qkv+context+out_proj"] * 3 + ["keep:context+out_proj"]
    assert peak("mixtral-8x22b", ",".join(kept), "dp:2 fsdp:128") == pytest.approx(82.22, rel=0.05)


def test_the_whole_gradient_of_a_head_is_held_over_the_backward_pass():
    """Compiled with libtpu 0.0.42.1: 29.35 GiB. The gradient takes 1.1 GiB until it is scattered."""
    assert peak("gpt-oss-20b", "keep:qkv+context+out_proj", "dp:4 fsdp:64") == pytest.approx(29.35, rel=0.05)


def test_sums_of_activations_are_not_held_over_a_loop():
    """Only reductions of gradients are asynchronous."""

    def loss(params, x):
        y = jnp.tanh(x @ params["up"]) @ params["down"]
        z = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=4)[0]
        return jnp.mean((y + z) ** 2)

    sizes = {"up": (1024, 4096), "down": (4096, 1024)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.items()}
    x = jax.ShapeDtypeStruct((8, 2048, 1024), "float32")
    bound = bound_or_error(plan(jax.grad(loss), params, x, target="v5p:2x2x2", plan="tp:8 seq").bound)
    cost = bound.problem.cost(bound.layout)
    whole = 8 * 2048 * 1024 * 4
    assert [each.local_bytes for each in cost.collectives if each.kind == "reduce-scatter"] == [whole]
    (held,) = [each for each in cost.live_buffers if each.nbytes == whole]
    assert held.first.tolist() == held.last.tolist()


def test_bodies_of_nested_loops_end_at_their_own_last_operator():
    def inner(c, _):
        return jnp.sin(c), None

    def outer(c, _):
        return jnp.cos(jax.lax.scan(inner, c, None, length=2)[0]), None

    program = build(jax.make_jaxpr(lambda x: jnp.exp(jax.lax.scan(outer, x, None, length=3)[0]))(jnp.ones(4)))
    ends = dict(zip([op.name for op in program.ops()], ends_of_bodies(program).tolist(), strict=True))
    number = {op.name: n for n, op in enumerate(program.ops())}
    assert ends["sin"] == number["sin"] and ends["cos"] == number["cos"] and ends["exp"] == -1
