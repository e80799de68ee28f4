"""On TPUs, updates of parameters wait for their gradients."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.lower.tpu.update_barriers import updates
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.program.tracing import trace

LAYERS, WIDTH, ROWS = 2, 512, 4096


def loss(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def scanned_loss(params, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None))
    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)


def train_step(optimizer, loss=loss):
    def step(state, x):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        changes, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, changes), moments), value

    return step


def shapes(optimizer, scanned=False):
    def state():
        def ones(*shape):
            return jnp.ones((LAYERS, *shape)) if scanned else jnp.ones(shape)

        layers = [{"up": ones(WIDTH, 2 * WIDTH), "down": ones(2 * WIDTH, WIDTH)}] * LAYERS
        params = {"layers": layers[0] if scanned else layers}
        return params, optimizer.init(params)

    return jax.eval_shape(state), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def lowered(step, args, words="dp:2 fsdp:4", target="v5e:2x4"):
    """The jaxpr of the program that a plan lowers to."""
    made = autoshard.plan(step, *args, plan=words, target=target)
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    return jax.make_jaxpr(program)(*jax.tree.leaves(args)).jaxpr


def barriers(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]


def adam():
    """Adam with weight decay, written out: without the functions that optax 0.2.8 jits."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        first = jax.tree.map(lambda g, m: 0.1 * g + 0.9 * m, updates, state[0])
        second = jax.tree.map(lambda g, v: 0.01 * g**2 + 0.99 * v, updates, state[1])
        changes = jax.tree.map(lambda m, v, p: -1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 1e-4 * p), first, second, params)
        return changes, (first, second)

    return optax.GradientTransformation(init, update)


def jitted(optimizer):
    """An optimizer whose whole update is one jitted function."""
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


ADAM, MOMENTUM = adam(), optax.sgd(1e-2, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (ADAM, 3),
        (optax.adamw(1e-3), 3),
        (jitted(optax.adamw(1e-3)), 3),
        (optax.ema(0.9), 2),
        (MOMENTUM, 2),
        (optax.sgd(1e-2), 1),
        (CLIPPED, 3),
    ],
)
def test_each_gradient_is_joined_with_its_parameter_and_moments(optimizer, state):
    jaxpr = lowered(train_step(optimizer), shapes(optimizer))
    found = barriers(jaxpr)
    assert len(found) == 2 * LAYERS
    assert all(len(eqn.invars) == 1 + state and len({v.aval.shape for v in eqn.invars}) == 1 for eqn in found)
    inputs = set(jaxpr.invars)
    assert all(inputs >= {*eqn.invars[1:]} and eqn.invars[0] not in inputs for eqn in found)
    joined = {v for eqn in found for v in eqn.invars[1:]}
    assert joined == {v for v in jaxpr.invars if v.aval.ndim and v.aval.shape != (ROWS, WIDTH)}
    for eqn in found:  # nothing but constraints takes the state itself after that
        later = jaxpr.eqns[jaxpr.eqns.index(eqn) + 1 :]
        takers = {e.primitive.name for e in later if set(eqn.invars[1:]) & {v for v in e.invars if hasattr(v, "count")}}
        assert takers <= {"sharding_constraint"}


def test_a_jitted_step_has_the_barriers_of_the_step():
    step, args = train_step(ADAM), shapes(ADAM)
    assert [len(barriers(lowered(fn, args))) for fn in (step, jax.jit(step), jax.jit(jax.jit(step)))] == [4, 4, 4]


def test_a_clipped_update_waits_for_the_clipped_gradient():
    """Otherwise the copies of the state are made before the gradients of the other layers are computed."""
    jaxpr = lowered(train_step(CLIPPED), shapes(CLIPPED))
    maker = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    assert {maker[eqn.invars[0]] for eqn in barriers(jaxpr)} <= {"mul", "div", "select_n", "jit", "pjit"}


@pytest.mark.parametrize(
    ("words", "target", "scanned"),
    [("dp:2 fsdp:4", "v5e:2x4", True), ("dp:2 fsdp:4", "h100:1x8", False), ("dp:1", "v5e:1x1", False)],
)
def test_other_programs_have_no_barriers(words, target, scanned):
    """Those with loops over layers, those for GPUs, and those whose gradients devices do not add up."""
    step = train_step(ADAM, scanned_loss if scanned else loss)
    assert not barriers(lowered(step, shapes(ADAM, scanned), words, target))


def test_values_stay_the_same():
    step, random = train_step(CLIPPED), np.random.default_rng(0)
    (params, _), x = jax.tree.map(lambda s: random.normal(size=s.shape).astype(s.dtype) / 32, shapes(CLIPPED))
    args = (params, CLIPPED.init(params)), x
    made = autoshard.plan(step, *args, plan="dp:2 fsdp:4", target="v5e:2x4")
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    mesh = jax.make_mesh(made.mesh.axis_sizes, made.mesh.axis_names, axis_types=made.mesh.axis_types)
    assert barriers(jax.make_jaxpr(program)(*jax.tree.leaves(args)).jaxpr)
    with jax.set_mesh(mesh):
        results = jax.jit(program)(*jax.tree.leaves(args))
    for result, expected in zip(results, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("operators", "expected"), [(20, 1), (400, 0)])
def test_long_chains_have_no_barrier(operators, expected):
    """The search takes time that grows with the square of their number."""

    def step(w, x):
        update = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        for _ in range(operators):
            update = jnp.sin(update)
        return w - 0.1 * update

    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    assert len(barriers(lowered(step, args))) == expected


def test_moments_on_the_host_wait_for_nothing():
    def step(state, x):
        w, moments = state
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        moments = 0.1 * gradient + 0.9 * jax.device_put(moments, jax.memory.Space.Device)
        return (w - 0.1 * moments, jax.device_put(moments, jax.memory.Space.Host)), None

    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    on_host, on_device = jax.device_put(jnp.ones((64, 64)), host), jnp.ones((64, 64))
    waiting = {}
    for name, moments in (("host", on_host), ("device", on_device)):
        found = analyse(trace(step, ((on_device, moments), jnp.ones((4096, 64))), {}))
        waiting[name] = [len(update.state) for update in updates(found.axes.program, found.roles)]
    assert {*waiting["host"]} == {1} and 2 in waiting["device"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_the_sum_of_a_moment_does_not_matter(order):
    def step(state, x):
        w, moments = state
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        terms = [lambda: 0.9 * moments, lambda: 0.1 * gradient][::order]
        moments = sum(term() for term in terms)
        return (w - 0.1 * moments, moments), None

    one = jax.ShapeDtypeStruct((64, 64), "float32")
    (found,) = barriers(lowered(step, ((one, one), jax.ShapeDtypeStruct((4096, 64), "float32"))))
    assert len(found.invars) == 3


def test_an_update_that_starts_before_its_gradient_has_no_barrier():
    """The decay of the moments is written before the gradient is computed."""

    def step(state, x):
        w, moments = state
        decayed = 0.9 * moments
        moments = decayed + 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - 0.1 * moments, moments), None

    one = jax.ShapeDtypeStruct((64, 64), "float32")
    assert not barriers(lowered(step, ((one, one), jax.ShapeDtypeStruct((4096, 64), "float32"))))


@jax.jit
def updated(w, gradient):
    """Return an updated parameter, and the operands of the update, as for metrics."""
    return w - 0.1 * gradient, w, gradient


@jax.custom_jvp
def same(x):
    return x


same.defjvp(lambda primals, tangents: (same(*primals), tangents[0]))


@pytest.mark.parametrize(
    "update",
    [
        lambda w, gradient: updated(w, gradient),
        lambda w, gradient: (w - 0.1 * gradient, same(w), same(gradient)),
        lambda w, gradient: (same(w) - 0.1 * same(gradient), w, gradient),
    ],
)
def test_operands_that_a_call_returns_wait_too(update):
    """The jaxpr has two variables for such a value: one for the operand, and one for the result of the call."""

    def step(w, x):
        return update(w, jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))

    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    jaxpr = lowered(step, args)
    (found,) = barriers(jaxpr)
    later = [eqn for eqn in jaxpr.eqns[jaxpr.eqns.index(found) :] if eqn.primitive.name in ("mul", "sub")]
    assert later[-1].primitive.name == "sub"
    taken = {v for eqn in later for v in eqn.invars if not hasattr(v, "val")}
    assert taken.isdisjoint(found.invars) and len(taken.intersection(found.outvars)) == 2


def test_the_platform_is_that_of_the_devices():
    step, args = train_step(MOMENTUM), shapes(MOMENTUM)
    executable = bound_or_error(autoshard.plan(step, *args, plan="fsdp:8", target="v5e:2x4").bound).executable
    for platform in ("tpu", "cpu"):
        assert executable._platform(SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))) == platform
    assert executable._platform(executable.plan.mesh) == "tpu"
