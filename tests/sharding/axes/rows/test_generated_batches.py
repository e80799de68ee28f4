"""Batches that a step generates itself are sharded like given ones."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.programs import assert_close

ROWS = 1024  # many compared with the weights, so that sharding the rows saves most of the work


def weights(*sizes):
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [0.1 * jax.random.normal(key, pair) for key, *pair in pairs]


def perceptron(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def descent(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def adversarial_step(noise_rows):
    """Real and generated rows meet only in the loss. The generator is trained on new noise."""

    def step(state, x, key):
        first, second = jax.random.split(key)

        def discriminator_loss(judge):
            generated = perceptron(state["maker"], jax.random.normal(first, (noise_rows, 16)))
            return jnp.mean(perceptron(judge, x) ** 2) - jnp.mean(perceptron(judge, generated) ** 2)

        loss, grads = jax.value_and_grad(discriminator_loss)(state["judge"])
        judge = descent(state["judge"], grads)

        def generator_loss(maker):
            generated = perceptron(maker, jax.random.normal(second, (noise_rows, 16)))
            return jnp.mean(perceptron(judge, generated) ** 2)

        return {"judge": judge, "maker": descent(state["maker"], jax.grad(generator_loss)(state["maker"]))}, loss

    state = {"judge": weights(64, 128, 8), "maker": weights(16, 128, 64)}
    return step, (state, jnp.ones((ROWS, 64)), jax.random.key(1))


def generating_step():
    """A step whose only inputs are state and a key."""

    def step(params, key):
        x = jax.random.uniform(key, (ROWS, 16))
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((perceptron(p, x) - x[:, :1]) ** 2))(params)
        return descent(params, grads), loss

    return step, (weights(16, 64, 64, 1), jax.random.key(1))


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.parametrize("make", [lambda: adversarial_step(ROWS), generating_step])
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(p, marks=pytest.mark.slow) for p in ("dp:8", "fsdp:8")), "dp:2 fsdp:2 tp:2"]
)
def test_generated_rows_are_sharded_like_the_batch(make, strategy):
    step, args = make()
    planned = plan(step, *args, target="cpu:8", plan=strategy)
    single = plan(step, *args, target="cpu:1")
    assert planned.estimate.compute_us < single.estimate.compute_us / 4
    assert_close(jax.jit(step)(*args), planned.jit()(*args))


def test_rows_that_are_drawn_from_the_state_are_the_batch():
    """All rows are trained towards the one picture that is given."""

    def step(state, picture, key):
        rows = state["pool"][jax.random.choice(key, 2 * ROWS, (ROWS,), replace=False)]

        def loss(params):
            return jnp.mean((perceptron(params, rows)[..., :3] - picture) ** 2)

        return {**state, "params": descent(state["params"], jax.grad(loss)(state["params"]))}

    state = {"params": weights(16, 64, 16), "pool": jnp.ones((2 * ROWS, 6, 16))}
    problem = bound_or_error(plan(step, state, jnp.ones((6, 3)), jax.random.key(1), target="cpu:8").bound).problem
    assert problem.roles.batch is not None and problem.axes.sizes[problem.roles.batch] == ROWS


def test_rows_that_are_multiplied_by_the_batch_stay_another_axis():
    def step(params, x, key):
        def loss(params):
            real, generated = perceptron(params, x), perceptron(params, jax.random.normal(key, x.shape))
            return jnp.mean(jax.nn.logsumexp(real @ generated.T, axis=1))

        value, grads = jax.value_and_grad(loss)(params)
        return descent(params, grads), value

    args = weights(16, 64, 8), jnp.ones((ROWS, 16)), jax.random.key(1)
    planned = plan(step, *args, target="cpu:8", plan="dp:8")
    axes, batch = bound_or_error(planned.bound).problem.axes, bound_or_error(planned.bound).problem.roles.batch
    assert not [leaves for leaves in axes.of_value if sum(batch in dim for dim in leaves) > 1]
    assert_close(jax.jit(step)(*args), planned.jit()(*args))


def test_rows_of_another_number_stay_another_axis():
    step, args = adversarial_step(2 * ROWS)
    planned = plan(step, *args, target="cpu:8", plan="dp:8")
    problem = bound_or_error(planned.bound).problem
    assert problem.roles.batch is not None and problem.axes.sizes[problem.roles.batch] == ROWS
    assert_close(jax.jit(step)(*args), planned.jit()(*args))


@pytest.mark.parametrize("words", ["dp:8", "cp:8", "dp:2 ring:4"])
def test_data_that_is_differentiated_is_no_state_if_positions_are_beside_it(words):
    """The gradient of the data looks like new state, and positions have no other axes than it has."""

    def rotated(x, positions):
        angles = (positions[..., None] * jnp.array([1.0, 0.1]))[:, :, None]
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def loss(params, x, positions):
        q, k, v = ((x @ params[name]).reshape(8, 64, 4, 4) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q, positions), rotated(k, positions))
        return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) - x) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip("qkv", keys[:3], strict=True)}
    args = params, jax.random.normal(keys[3], (8, 64, 16)), jnp.broadcast_to(jnp.arange(64), (8, 64))
    step = jax.value_and_grad(loss, argnums=(0, 1))
    planned = plan(step, *args, target="cpu:8", plan=words)
    assert {leaf.path: leaf.axes for leaf in planned.inputs}["1"][:2] == ("batch", "seq")
    assert {leaf.path: leaf.role for leaf in planned.inputs}["1"] == "data"
    assert_close(jax.jit(step)(*args), planned.jit()(*args))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32"])
def test_rows_that_are_drawn_from_a_replay_buffer_are_the_batch(dtype):
    """New rows are only written to the buffer, which is in the state."""

    def step(state, rows, key):
        kept = jax.lax.dynamic_update_slice(state["kept"], rows, (state["end"], jnp.int32(0)))
        drawn = kept[jax.random.randint(key, (48,), 0, kept.shape[0])].astype(jnp.float32)
        grads = jax.grad(lambda p: jnp.mean(perceptron(p, drawn) ** 2))(state["params"])
        end = (state["end"] + rows.shape[0]) % kept.shape[0]
        return {"params": descent(state["params"], grads), "kept": kept, "end": end}

    state = {"params": weights(32, 64, 8), "kept": jnp.zeros((256, 32), dtype), "end": jnp.int32(0)}
    made = plan(step, state, jnp.zeros((16, 32), dtype), jax.random.key(0), target="v5e:2x4", plan="fsdp:8")
    assert {leaf.role for leaf in made.inputs if "params" in leaf.path} == {"parameter"}
