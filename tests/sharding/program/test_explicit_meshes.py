"""Programs for meshes with Explicit axes: the shardings that they request are constraints of their plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, plan
from autoshard._compat import ShardingTypeError
from autoshard.errors import PlanError
from tests.sharding.programs import assert_close, mlp_state, sgd_step

TYPES = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(types):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=types)


def layers():
    return {"w": jnp.stack([jax.random.normal(jax.random.key(n), (64, 64)) / 8 for n in range(3)])}


def rows():
    return jax.random.normal(jax.random.key(9), (16, 64))


def step(params, x):
    """Gradient descent over scanned, checkpointed layers, whose rows are resharded after each layer."""

    @jax.checkpoint
    def layer(x, w):
        return reshard(jnp.tanh(x @ w), P("data", None)), None

    def loss(params):
        return jnp.mean(lax.scan(layer, reshard(x, P("data", None)), params["w"])[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.few(1)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_a_step_with_reshards_equals_that_of_one_device(types):
    expected = layers()
    for _ in range(2):
        expected, loss = one_device_step(expected, rows())
    with jax.set_mesh(mesh_of(types)):
        planned = auto_shard(step, donate_argnums=0)
        state = layers()
        for _ in range(2):
            state, value = planned(state, rows())
        assert_close((expected, loss), (state, value))
        # Results are on the user's mesh, so that other operators can take them.
        assert value.sharding.mesh.axis_types == types
        assert float(value + 1) == pytest.approx(float(loss) + 1)
        assert dict(planned.plan(state, rows()).mesh.shape) == dict(mesh_of(types).shape)


def one_device_step(params, x):
    def loss(params):
        for w in params["w"]:
            x_of.append(jnp.tanh(x_of[-1] @ w))
        return jnp.mean(x_of[-1] ** 2)

    x_of = [x]
    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def test_parameters_keep_the_shardings_that_they_were_created_with():
    expected = sgd_step(mlp_state(), rows())
    places = {"w": P(None, "model"), "b": P("model"), "v": P("model", None)}

    def typed_step(params, x):
        def loss(params):
            hidden = jnp.tanh(x @ params["w"] + params["b"])
            return jnp.mean((jnp.dot(hidden, params["v"], out_sharding=P("data", None)) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        params = {name: jax.device_put(x, places[name]) for name, x in mlp_state().items()}
        planned = auto_shard(typed_step)
        x = jax.device_put(rows(), P("data", None))
        results = planned(params, x)
        assert_close(expected, results)
        for name, x_of in results[0].items():
            assert x_of.sharding.is_equivalent_to(params[name].sharding, x_of.ndim), name
        # JAX rejects `sgd_step`, because its types do not agree. auto_shard plans it without types.
        with pytest.raises(ShardingTypeError, match="ontracting"):
            jax.jit(sgd_step)(params, x)
        assert_close(expected, auto_shard(sgd_step)(params, x))


REQUESTS = {
    "reshard": (lambda x: reshard(x, P("data", None)), P("data")),
    "dot": (lambda x: jnp.dot(x.T, x, out_sharding=P("data", "model")), P("data", "model")),
    "rows of a table": (lambda x: x.at[jnp.arange(8) % 3].get(out_sharding=P("data", None)), P("data")),
    "reshape": (lambda x: jnp.reshape(x, (4, 4, 64), out_sharding=P("model", None, None)), P("model")),
    "branches": (lambda x: lax.cond(x[0, 0] > 0, *[lambda x: reshard(x, P(None, "model"))] * 2, x), P(None, "model")),
    "loop": (lambda x: lax.fori_loop(0, 2, lambda _, x: reshard(x + 1, P("data", None)), reshard(x, P("data", None))),
             P("data")),
    "rows under vmap": (jax.vmap(lambda row: reshard(row, P("model"))), P(None, "model")),
    "partial sums": (
        lambda x: reshard(jnp.dot(reshard(x.T, P(None, "data")), reshard(x, P("data", None)),
                                  out_sharding=P(None, None, unreduced=frozenset({"data"}))), P("model", None)),
        P("model")),
    "shards": (
        lambda x: jax.shard_map(lambda x: x - lax.pmean(x, "data"), in_specs=P("data", None), out_specs=P("data", None),
                                axis_names={"data"})(reshard(x, P("data", None))), P("data")),
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("name", REQUESTS)
def test_results_have_the_requested_shardings(name):
    fn, spec = REQUESTS[name]
    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        expected = jax.jit(fn)(rows())
        result = auto_shard(fn)(rows())
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh_of(TYPES["explicit"]), spec), result.ndim)


def test_state_on_the_mesh_gets_the_requested_sharding():
    def fn(x):
        return reshard(x * 2, P("data", None)), reshard(x, P("model", None))

    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        planned = auto_shard(fn)
        results, notes = planned(rows()), planned.plan(rows()).notes
    assert [result.sharding.spec for result in results] == [P("data"), P("model")]
    assert not [note for note in notes if "requests other shardings" in note]
    np.testing.assert_allclose(results[0], 2 * np.asarray(rows()), rtol=1e-6)


@pytest.mark.parametrize("requested", [True, False])
def test_state_without_a_sharding_has_one_for_argument_and_result(requested):
    """So that a step takes its own results. A note says which requests the plan does not follow."""

    def fn(params, x):
        params = jax.tree.map(lambda p, g: p - g, params, jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params))
        return (reshard(params, P(None, "data")) if requested else params), jnp.mean(x)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        planned = plan(fn, *shapes)
    assert planned.out_specs[0] == planned.in_specs[0] != P(None, "data")
    assert ["requests other shardings of the results for 'params'" in note for note in planned.notes] == (
        [True] if requested else []
    )


def test_a_requested_sharding_is_priced_and_compiled():
    def fn(x, w):
        return reshard(x, P(None, "model")) @ w

    shapes = jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32)
    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        planned = plan(fn, *shapes, fixed={"x": P("model", None)})
    moved = [row for row in planned.traffic if "test_explicit_meshes.py" in str(row)]
    assert ("all-to-all", "model") in [row[:2] for row in moved], planned.traffic
    assert "all-to-all" in planned.jit().lower(*shapes).compile().as_text()


def test_state_that_is_replicated_by_its_type_is_noted():
    with jax.set_mesh(mesh_of(TYPES["explicit"])):
        (note,) = (note for note in plan(step, layers(), rows()).notes if "by type" in note)
        free = plan(step, jax.eval_shape(layers), jax.eval_shape(rows))
    assert note.startswith("'params/w' is replicated by type")
    assert not [note for note in free.notes if "by type" in note]


def test_the_devices_of_the_current_mesh_are_used():
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    with jax.set_mesh(Mesh(devices, ("data", "model"), axis_types=TYPES["explicit"])):
        result = auto_shard(lambda x: reshard(x, P("data", None)) * 2)(rows())
        assert_close(rows() * 3, result + rows())
    assert [d.id for d in result.sharding.mesh.devices.flat] == [d.id for d in devices.flat]


def test_a_plan_for_another_mesh_names_the_request():
    with (
        jax.set_mesh(mesh_of(TYPES["explicit"])),
        pytest.raises(PlanError, match=r"P\('data', None\) at .*test_explicit_meshes.py.*give auto_shard the mesh"),
    ):
        plan(lambda x: reshard(x, P("data", None)), rows(), mesh={"rows": 8})


def test_shardings_that_do_not_agree_are_the_error_of_jax():
    with jax.set_mesh(mesh_of(TYPES["explicit"])), pytest.raises(ShardingTypeError, match="incompatible"):
        auto_shard(lambda x: reshard(x, P("data", None)) + reshard(x, P("model", None)))(rows())


def test_a_program_whose_types_do_not_agree_is_planned_without_them():
    mesh = mesh_of(TYPES["explicit"])
    x, y = (jax.device_put(rows(), NamedSharding(mesh, P(axis))) for axis in mesh.axis_names)
    step = auto_shard(lambda x, y: x + y)
    with jax.set_mesh(mesh):
        assert_close(step(x, y), 2 * rows())
        (note,) = [note for note in step.plan(x, y).notes if "do not agree" in note]
    assert "incompatible shardings for broadcasting" in note and "use jax.sharding.reshard" in note
