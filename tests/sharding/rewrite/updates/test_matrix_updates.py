"""Updates of matrices are found in a step, and equal ones are joined."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.rewrite.updates.matrix_updates import may_have_updates
from autoshard.sharding.rewrite.updates.spread_updates import with_spread_updates
from tests.sharding.programs import rows_of
from tests.sharding.rewrite.updates import programs
from tests.sharding.rewrite.updates.programs import (
    by_hand,
    by_optax,
    layers,
    loss_of,
    moments_of,
    momentum_of,
    muon,
    orthogonal,
    rows,
    spread,
    stacks,
)

ALL = [(6, (1, 16, 32), 8, False)]  # optax transposes tall matrices, so all have one shape


def found_of(optimizer: Any, params: Any) -> Any:
    return spread(by_optax(optimizer), moments_of(params, optimizer), rows())


def test_matrices_of_a_list_become_one_stack():
    assert found_of(muon(), layers()) == ALL
    assert found_of(muon(), layers(5)) == [(10, (1, 16, 32), 16, False)]


def test_stacks_become_one_stack():
    assert found_of(muon(), stacks()) == [(2, (3, 16, 32), 8, True)]


def test_a_nested_call_is_searched():
    optimizer = muon()
    inner = optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))
    assert found_of(inner, layers()) == ALL


def test_coefficients_may_be_cast_for_each_matrix():
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers())
    assert found_of(muon(), params) == ALL


def test_dtypes_are_kept_apart():
    params = layers(4)
    params["layers"][::2] = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"][::2])
    assert found_of(muon(), params) == [(4, (1, 16, 32), 8, False)] * 2


def test_optimizers_are_kept_apart():
    first, second = muon(), muon(ns_steps=3)

    def step(state: Any, x: jax.Array) -> Any:
        return by_optax(first)(state[0], x)[0], by_optax(second)(state[1], x)[0]

    assert spread(step, (moments_of(layers(), first), moments_of(layers(), second)), rows()) == ALL * 2


def test_roots_of_statistics():
    found = spread(programs.shampoo_step, programs.shampoo_state(layers()), rows())
    assert sorted(found) == [(6, (16, 16), 8, False), (6, (32, 32), 8, False)]


def scaled(table: np.ndarray) -> Any:
    def update(m: jax.Array) -> jax.Array:
        def body(y: jax.Array, n: jax.Array) -> tuple[jax.Array, None]:
            return y * jnp.asarray(table)[n] + 0.1 * (y @ y.T @ y), None

        return jax.lax.scan(body, m / jnp.linalg.norm(m), jnp.arange(3))[0]

    return update


def test_loops_with_other_coefficients_are_joined():
    tables = iter([np.arange(3, dtype=np.float32) + n for n in range(6)])
    other = spread(by_hand(lambda m: scaled(next(tables))(m)), momentum_of(layers()), rows())
    table = np.arange(3, dtype=np.float32)
    same = spread(by_hand(scaled(table)), momentum_of(layers()), rows())
    assert [each[:2] for each in same] == [(3, (32, 16)), (3, (16, 32))] == [each[:2] for each in other]


def until_close(m: jax.Array) -> jax.Array:
    def body(carry: Any) -> Any:
        n, y, _ = carry
        new = 1.5 * y - 0.5 * y @ y.T @ y
        return n + 1, new, jnp.max(jnp.abs(new - y))

    start = (0, m / (jnp.linalg.norm(m) + 1e-7), jnp.float32(1))
    return jax.lax.while_loop(lambda carry: (carry[0] < 8) & (carry[2] > 0.1), body, start)[1]


def test_a_while_loop_is_found():
    assert [each[0] for each in spread(by_hand(until_close), momentum_of(layers()), rows())] == [3, 3]


def joint_norm(m: jax.Array) -> jax.Array:
    m = m / jnp.linalg.norm(m)
    return jax.vmap(lambda y: y @ y.T @ y)(m)


def test_what_comes_before_the_products_may_join_matrices():
    assert [each[0] for each in spread(by_hand(joint_norm), momentum_of(stacks()), rows())] == [1, 1]


def with_neighbors(m: jax.Array) -> jax.Array:
    return jnp.einsum("lij,lkj->lik", m, m) @ jnp.roll(m, 1, 0)


def test_stacks_whose_matrices_depend_on_each_other_stay():
    assert not spread(by_hand(with_neighbors), momentum_of(stacks()), rows())


def test_a_loop_over_matrices_stays():
    assert not spread(by_hand(lambda m: jax.lax.map(orthogonal, m)), momentum_of(stacks()), rows())


def test_a_device_never_gets_all_matrices_of_a_stack():
    """One array holds several matrices, and the rules do not say how to take one of them."""
    assert not found_of(muon(preconditioning="aol"), stacks())  # a branch in a loop
    assert found_of(muon(preconditioning="aol"), layers()) == ALL
    experts = {"experts": programs.weights("experts", 3, 4, 16, 32)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.einsum("bsd,ledf->bsf", x, params["experts"]) ** 2)

    step = by_hand(jax.vmap(jax.vmap(orthogonal)), loss)
    assert not spread(step, momentum_of(experts), rows())
    step = by_optax(muon(), loss)  # optax makes a stack of 12 matrices
    assert spread(step, moments_of(experts, muon()), rows()) == [(1, (12, 16, 32), 16, True)]


def test_one_matrix_stays():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    assert not spread(by_hand(orthogonal, loss), momentum_of(programs.weights("w", 16, 32)), rows())


def test_one_device_and_steps_without_state_stay():
    args = momentum_of(layers()), rows()
    assert not spread(by_hand(orthogonal), *args, devices=1)
    assert spread(by_hand(orthogonal), *args)

    def changes(state: Any, x: jax.Array) -> Any:
        return [orthogonal(0.9 * m) for m in jax.tree.leaves(state[1]["layers"])], x.mean()

    assert not spread(changes, *args)


def test_gradients_without_momentum_stay():
    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda w, g: w - (orthogonal(g) if g.ndim > 1 else g), params, gradients), value

    assert not spread(step, layers(), rows())


def test_products_of_parameters_in_the_model_stay():
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return loss_of({**params, "layers": jax.tree.map(orthogonal, params["layers"])}, x)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    assert not spread(step, layers(), rows())


def test_tied_weights_stay():
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(sum(jnp.tanh(x @ w) @ w.T for w in params) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    assert not spread(step, [programs.weights(f"w{n}", 16, 32) for n in range(4)], rows_of(16))


@pytest.mark.parametrize("inside", [True, False])
def test_a_constraint_inside_an_update_keeps_it(mesh8, inside):
    sharding = NamedSharding(mesh8, PartitionSpec(None, "model"))

    def update(m: jax.Array) -> jax.Array:
        made = orthogonal(m)
        return orthogonal(jax.lax.with_sharding_constraint(made, sharding)) if inside else made

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return loss_of(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh8, PartitionSpec("data"))))

    assert bool(spread(by_hand(update, loss), momentum_of(layers()), rows())) is not inside


def test_a_branch_of_all_matrices_stays():
    assert not found_of(optax.MultiSteps(muon(), 2), layers())


def test_a_branch_of_each_matrix_is_found():
    def update(m: jax.Array) -> jax.Array:
        return jax.lax.cond(m[0, 0] > 0, orthogonal, lambda y: 1.5 * y, m)

    assert [each[0] for each in spread(by_hand(update), momentum_of(layers()), rows())] == [3, 3]


def unrolled(count: int) -> Any:
    """Trace a training step of a perceptron. Each of its products has rows of the batch as an operand."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.jit(lambda x, w: x + jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    begin = time.perf_counter()
    made = jax.make_jaxpr(step)([jnp.zeros((16, 16)) for _ in range(count)], jnp.zeros((16, 16)))
    return made, time.perf_counter() - begin


def test_models_are_searched_in_a_fraction_of_the_time_of_their_trace():
    closed, trace_s = unrolled(200)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        assert not may_have_updates(closed)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.2 * trace_s


def test_updates_in_calls_are_noticed():
    optimizer = muon()
    nested = optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))
    for each in (optimizer, nested, optax.adam(1e-2)):
        traced = trace(jax.jit(by_optax(each)), (moments_of(layers(), each), rows()), {})
        assert may_have_updates(traced.closed) is (each in (optimizer, nested))


def test_source_lines_are_those_of_the_products():
    step = by_hand(orthogonal)
    changed = with_spread_updates(trace(step, (momentum_of(layers()), rows()), {}), 8)
    (eqn,) = [e for e in _compat.open_jaxpr(changed.closed).eqns if e.primitive.name == "spread_matrices"]
    assert "programs.py" in str(_compat.program_line(eqn))


def test_an_operator_without_a_rule():
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    assert not spread(by_hand(lambda m: unknown.bind(m @ m.T) @ m), momentum_of(layers()), rows())
    assert spread(by_hand(lambda m: jnp.sin(m @ m.T) @ m), momentum_of(layers()), rows())
