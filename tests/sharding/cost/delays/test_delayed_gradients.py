"""When XLA:GPU runs the products that compute gradients, and how long XLA:TPU holds their sums."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.cost.delays.delayed_gradients import held_until, points
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build
from autoshard.train.program.build import workload_step

ROWS, WIDTH, CLASSES = 64, 16, 32
DOT = "dot_general"


def order(fn, *shapes):
    """The shapes of the results of all products, in the order in which they run."""
    program = build(jax.make_jaxpr(fn)(*shapes))
    ops = list(program.ops())
    place = points(program, lambda op: op.name == "dot_general" and ROWS not in op.eqn.outvars[0].aval.shape)
    assert sorted(place) == list(range(len(ops)))
    products = sorted((place[n], op.results[0]) for n, op in enumerate(ops) if op.name == "dot_general")
    return [program.avals[v].shape for _, v in products]


X, DY = (jax.ShapeDtypeStruct((ROWS, n), "float32") for n in (WIDTH, CLASSES))
W = jax.ShapeDtypeStruct((WIDTH, CLASSES), "float32")
ROWS_FIRST, ROWS_LAST, GRADIENT = (ROWS, WIDTH), (ROWS, CLASSES), (WIDTH, CLASSES)


def backward(x, dy, w):
    return dy @ w.T, x.T @ dy


def test_in_a_loop_a_gradient_that_is_stacked_is_computed_last():
    def fn(x, dy, w):
        def body(dy, _):
            dx, dw = backward(x, dy, w)
            return jnp.tanh(dx) @ w, dw

        return jax.lax.scan(body, dy, None, length=3)

    assert order(fn, X, DY, W) == [ROWS_FIRST, ROWS_LAST, GRADIENT]


def test_in_a_loop_every_product_is_computed_before_its_first_user():
    """As the gradient of the values of attention, which the program has before that of the scores."""

    def fn(x, dy, w, v):
        def body(dy, _):
            first, second = dy @ w.T, x @ v
            return jnp.tanh(second) @ (v.T @ w) + jnp.tanh(first) @ w, None

        return jax.lax.scan(body, dy, None, length=3)[0]

    small = jax.ShapeDtypeStruct((WIDTH, 8), "float32")
    found = order(fn, X, DY, W, small)
    assert found.index((ROWS, 8)) < found.index(ROWS_FIRST) < found.index(ROWS_LAST)


def test_a_gradient_before_a_loop_is_computed_behind_it():
    def fn(x, dy, w):
        dw = x.T @ dy
        dx = jax.lax.scan(lambda c, _: (jnp.tanh(c @ (w @ w.T)), None), dy @ w.T, None, length=3)[0]
        return dx, w - dw

    assert order(fn, X, DY, W)[-1] == GRADIENT


def test_in_straight_code_a_gradient_is_computed_a_layer_late():
    def fn(x, dy, w):
        for _ in range(3):
            dw, dx = x.T @ dy, dy @ w.T
            w, dy = w - dw, jnp.tanh(dx) @ jnp.ones_like(w)
        return dy, w

    late, last = [ROWS_FIRST, GRADIENT, ROWS_LAST], [GRADIENT, ROWS_FIRST, ROWS_LAST]
    assert order(fn, X, DY, W) == late + late + last  # each gradient is taken before the next one is computed

    def at_the_end(x, dy, w):
        gradients = []
        for _ in range(3):
            gradients.append(x.T @ dy)
            dy = jnp.tanh(dy @ w.T) @ w
        return dy, [w - dw for dw in gradients]

    found = order(at_the_end, X, DY, W)
    assert found == [ROWS_FIRST, ROWS_LAST, GRADIENT, ROWS_FIRST, ROWS_LAST, GRADIENT, GRADIENT, ROWS_FIRST, ROWS_LAST]


def test_operands_stay_in_memory_until_then():
    """A layer has two blocks. The hidden values of the second one are held while the first one's are computed."""

    def fn(weights, x):
        def layer(x, weights):
            for w, v in weights:
                x = jnp.tanh(x @ w) @ v
            return x, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0])

    w, v, x = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4, 64, 512), (4, 512, 64), (65_536, 64)))
    gpu, cpu = (
        plan(jax.grad(fn), [(w, v), (w, v)], x, plan="dp:8", target=target).estimate.memory_bytes["temporary"]
        for target in ("h100:8", "cpu:8")
    )
    hidden = 65_536 * 512 * 2 / 8
    assert gpu - cpu >= 0.9 * hidden


def test_a_sum_waits_over_loops_for_its_first_user():
    def fn(x, dy, w):
        early, late, unused = x.T @ dy, jnp.cos(x).T @ dy, jnp.sin(x).T @ dy
        w = w - early

        def body(c, _):
            return jnp.tanh(jnp.tanh(c @ w) @ w.T), None

        c = jax.lax.scan(body, x, None, length=3)[0]
        c = jax.lax.scan(body, c, None, length=3)[0]
        return c, jnp.sinh(w) - late.astype("bfloat16").astype("float32"), unused

    program = build(jax.make_jaxpr(fn)(X, DY, W))
    ops, until = list(program.ops()), held_until(program)
    products = [n for n, op in enumerate(ops) if op.name == DOT]
    early, late, unused = (n for n in products if program.avals[ops[n].results[0]].shape == GRADIENT)
    end, user = (max(n for n, op in enumerate(ops) if op.name == name) for name in ("tanh", "sub"))
    assert (until[early], until[late], until[unused]) == (early, user, end)
    others = [n for n in products if n not in (late, unused)]
    assert len(others) == 5 and [until[n] for n in others] == others


@pytest.mark.parametrize("target", ["v5e:2x2", "h100:1x4", "cpu:4"])
@pytest.mark.parametrize(
    "kept",
    [
        lambda new, old: jax.lax.cond(new[0, 0] > 0, lambda: new, lambda: old),
        lambda new, old: jax.lax.scan(lambda last, x: (x, last), old, jnp.stack([new, old]))[0],
    ],
)
def test_branches_and_loops_without_operators_are_planned(kept, target):
    def step(state, x):
        new = state["w"] - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        return {"w": new, "old": kept(new, state["old"])}

    assert plan(step, {"w": W, "old": W}, X, target=target).candidates


def peak(name, remat, words):
    step, *shapes = workload_step(workload(name).with_(batch_size=1024, remat=remat, context=4096))
    return plan(step, *shapes, target="v5p:4x8x8", plan=words, donate_argnums=0).estimate.peak_memory_bytes / 2**30


def test_the_whole_gradient_of_a_head_is_held_over_the_backward_pass():
    """Compiled with libtpu 0.0.42.1: 28.43 GiB. The gradient takes 1.1 GiB until it is scattered."""
    assert peak("gpt-oss-20b", "keep:qkv+context+out_proj", "dp:4 fsdp:64") == pytest.approx(28.43, rel=0.03)


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
