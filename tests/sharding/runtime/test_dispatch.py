"""The plan that a call gets, and the shardings of its arguments and results."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, plan
from autoshard.errors import AutoshardWarning, PlanError
from tests.sharding.programs import assert_close, batch, device_bytes, mlp_loss, mlp_state, sgd_step, whole_bytes


def test_weak_types_are_part_of_a_signature():
    scale = auto_shard(lambda x, s: x * s, plan="dp:8")
    x = jnp.ones((16, 8), jnp.bfloat16)
    assert [scale(x, s).dtype for s in (2.0, jnp.float32(2), 2.0)] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]


def test_dtypes_are_part_of_a_signature():
    def fn(x):
        return x + x if x.dtype == jnp.float32 else x * x  # a plan for one dtype could run with the other

    sharded, x = auto_shard(fn, plan="dp:8"), batch() * 9
    for dtype in (np.float32, np.int32, np.float32):  # the second call finds one plan, the third two
        actual = sharded(x.astype(dtype))
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, fn(x.astype(dtype)))
    assert len(sharded._plain.entries) == 2


def test_a_leaf_that_is_not_an_array_is_named_at_every_call():
    step = auto_shard(lambda state, x: x * state["scale"][...], plan="dp:8")
    for _ in range(2):
        with pytest.raises(PlanError, match=r"argument 'state/name' is 'adam', a str: JAX has no arrays of that type"):
            step(nnx.State({"name": nnx.Param("adam"), "scale": nnx.Param(jnp.ones(()))}), batch())
        step(nnx.State({"scale": nnx.Param(jnp.ones(()))}), batch())


def test_the_current_mesh_is_part_of_a_signature(mesh_of):
    double = auto_shard(lambda x: x * 2)
    meshes = [mesh_of(a=8), mesh_of(b=4), mesh_of(a=8)]
    for mesh in meshes:
        with jax.set_mesh(mesh):
            assert double(batch()).sharding.mesh == mesh
            assert mesh.axis_names[0] in double.plan(batch()).mesh.axis_names
    assert len(double._plain.entries) == 2


def test_settings_of_jax_are_part_of_a_signature():
    double = auto_shard(lambda x: jnp.asarray(x, float) * 2, plan="dp:8")
    x = np.ones((16, 8), np.float32)
    assert double(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert double(x).dtype == jnp.float64
    assert double(x).dtype == jnp.float32


@pytest.mark.whole
def test_a_step_runs_without_jit():
    """To find an error, `jax.disable_jit` runs the program operator by operator, on NumPy arrays too."""
    step = auto_shard(sgd_step, plan="dp:8")
    with jax.disable_jit():
        state, _ = step(mlp_state(), batch())
    assert_close(state, jax.jit(sgd_step)(mlp_state(), batch())[0])


@pytest.mark.parametrize("values", [(True, 1, 1.0), (1.0, 1, True)])
def test_static_arguments_of_different_types_differ(values):
    def fn(x, n):
        return x.astype(jnp.int32) + (1 if n is True else n)

    sharded, jitted = auto_shard(fn, static_argnums=1), jax.jit(fn, static_argnums=1)
    for n in values:
        assert sharded(batch(), n).dtype == jitted(batch(), n).dtype


def test_static_arguments_with_defaults_keywords_and_negative_numbers():
    def fn(x, n=2):
        return x * n

    for sharded in (auto_shard(fn, static_argnums=1), auto_shard(fn, static_argnums=-1)):
        for args, kwargs in (((), {}), ((3,), {}), ((), {"n": 4})):
            np.testing.assert_allclose(sharded(batch(), *args, **kwargs), fn(batch(), *args, **kwargs))
    with pytest.raises(PlanError, match="not hashable"):
        auto_shard(fn, static_argnums=1)(batch(), [2])


def test_donated_arguments_with_negative_numbers():
    step = auto_shard(lambda x, s: s + x.sum(), donate_argnums=-1)
    x, s = jnp.asarray(batch()), jnp.zeros((8, 8))
    first = step(x, s)
    step(x, first)
    assert first.is_deleted() and not x.is_deleted()


def test_donated_arguments_with_static_ones():
    def fn(n, x, s):
        return s + n * x.sum()

    step = auto_shard(fn, static_argnums=0, donate_argnums=2)
    x, s = jnp.asarray(batch()), jnp.zeros((8, 8))
    first = step(2, x, s)
    step(2, x, first)
    assert first.is_deleted() and not x.is_deleted()


def test_nnx_objects_that_first_appear_in_a_later_call_are_updated():
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()))

    def fn(x, m=None, k=1):
        if m is not None:
            m.n[...] += k
        return x * 2

    sharded, static = auto_shard(fn), auto_shard(fn, static_argnums=2)
    counter, other = Counter(), Counter()
    sharded(batch())
    for _ in range(2):
        sharded(batch(), counter)
        static(batch(), m=other, k=3)
    assert float(counter.n[...]) == 2 and float(other.n[...]) == 6


def test_the_outer_plan_applies_to_a_planned_function_inside_another():
    inner = auto_shard(mlp_loss)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(inner)(params, x))

    outer = auto_shard(step, plan="fsdp:8")
    assert_close(sgd_step(mlp_state(), batch())[0], outer(mlp_state(), batch()))
    assert not inner._plain.entries


def test_evaluation_before_training_moves_the_state_once():
    train, evaluate = auto_shard(sgd_step, plan="fsdp:8"), auto_shard(mlp_loss)
    params = mlp_state()
    evaluate(params, batch(size=4096))  # planned for uncommitted arrays
    for seed in range(3):
        params, _ = train(params, batch(seed, size=4096))
        pointers = [s.data.unsafe_buffer_pointer() for s in params["w"].addressable_shards]
        evaluate(params, batch(seed, size=4096))
        assert [s.data.unsafe_buffer_pointer() for s in params["w"].addressable_shards] == pointers
    specs = {leaf.path: leaf.spec for leaf in evaluate._plain.last.plan.inputs}
    assert specs["0/w"] == P(None, "fsdp") and len(evaluate._plain.by_placement) == 1


def test_a_training_loop_compiles_once():
    step = auto_shard(sgd_step, donate_argnums=0)
    params, x = mlp_state(), jnp.asarray(batch())
    step.plan(params, x)
    for _ in range(3):
        params, _ = step(params, x)
    assert step._plain.last.jitted._cache_size() == 1


def test_results_computed_from_state_keep_its_sharding():
    train = auto_shard(sgd_step, plan="fsdp:8")
    params, _ = train(mlp_state(), batch())
    eighth = whole_bytes(params) / 8
    returned = auto_shard(lambda s, x: (s["p"], x.sum()))({"p": params, "o": params}, batch())[0]
    moments = auto_shard(optax.adam(1e-3).init)(params)
    narrow = auto_shard(lambda p: jax.tree.map(lambda a: a.astype(jnp.bfloat16), p))(params)
    assert device_bytes(returned) == eighth
    assert device_bytes(moments) <= 2 * eighth + 8
    assert device_bytes(narrow) <= eighth / 2


def test_arguments_on_two_meshes_of_the_same_devices():
    params, _ = auto_shard(sgd_step, plan="fsdp:8")(mlp_state(), batch())
    x = auto_shard(lambda x: x * 1.0, plan="dp:8")(batch())
    assert_close(mlp_loss(mlp_state(), batch()), auto_shard(mlp_loss, plan="dp:8")(mlp_state(), x))
    assert_close(mlp_loss(params, batch()), auto_shard(mlp_loss)(params, x))


def test_a_variant_that_does_not_fit_is_not_chosen():
    def fn(params, x, *, half):
        loss = mlp_loss(params, x[: len(x) // 2] if half else x)
        return jax.tree.map(lambda p: p - loss, params), loss

    big = batch(size=4096)
    peaks = [
        plan(fn, mlp_state(), big, variants={"half": [h]}, plan="dp:8").estimate.peak_memory_bytes
        for h in (False, True)
    ]
    planned = plan(
        fn, mlp_state(), big, variants={"half": [False, True]}, plan="dp:8", memory_limit_bytes=sum(peaks) / 2
    )
    assert planned.variant == {"half": peaks[1] < peaks[0]}


def test_a_path_with_brackets_can_be_fixed():
    params = {f"{k}[0]": v for k, v in mlp_state().items()}

    def loss(params, x):
        return mlp_loss({k[0]: v for k, v in params.items()}, x)

    planned = plan(loss, params, batch(), mesh={"data": 8}, fixed={"0/w[0]": P("data")})
    assert {leaf.path: leaf.spec for leaf in planned.inputs}["0/w[0]"] == P("data")


def test_init_accepts_settings_and_keywords():
    step = auto_shard(sgd_step, plan="fsdp:8")
    step.plan(jax.eval_shape(mlp_state), batch())

    def create(seed, scale, kind, *, width):
        assert kind == "normal"
        return jax.tree.map(lambda x: x * scale, mlp_state(seed, width=width))

    state = step.init(create, 0, 2.0, "normal", width=64)
    assert device_bytes(state) * 8 == whole_bytes(state)


def test_init_of_state_with_another_dtype_raises():
    step = auto_shard(sgd_step, plan="fsdp:8")
    step.plan(jax.eval_shape(mlp_state), batch())
    with pytest.raises(PlanError, match="returns none of the planned arguments"):
        step.init(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), mlp_state()))


def test_a_plan_for_nnx_objects_runs_on_them():
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(64))

    def count(counter, x):
        counter.n[...] += x.sum(0)
        return x * 2

    counter, sharded = Counter(), auto_shard(count, plan="dp:8")
    run = sharded.plan(counter, batch()).jit()
    for _ in range(2):
        assert_close(batch() * 2, run(counter, batch()))
    assert_close(2 * batch().sum(0), counter.n[...])


def test_memory_includes_arrays_that_a_function_closes_over():
    weight = jnp.ones((1024, 512))
    captures = r"captures 2.00 MiB of arrays, the largest a float32\[1024, 512\]. .* Pass them as arguments"
    with pytest.warns(AutoshardWarning, match=captures):
        planned = plan(lambda x: x @ weight, jax.ShapeDtypeStruct((64, 1024), jnp.float32), plan="dp:8")
    assert planned.estimate.memory_bytes["constant"] == weight.nbytes
    assert any("captures 2.00 MiB" in note for note in planned.notes)
    with pytest.raises(PlanError, match="constant 2.00 MiB"), pytest.warns(AutoshardWarning, match=captures):
        plan(lambda x: x @ weight, jax.ShapeDtypeStruct((64, 1024), jnp.float32), memory_limit_bytes=2**20)


def test_lowering_after_a_call_compiles_nothing(caplog):
    """The batch of the call has no sharding, and the state gets that of the plan."""
    step = auto_shard(sgd_step, plan="dp:8")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        step(mlp_state(), batch())
        assert "XLA compilation of jit(sgd_step)" in caplog.text
        caplog.clear()
        assert step.lower(mlp_state(), batch()).compile().as_text()
    assert "XLA compilation of jit(sgd_step)" not in caplog.text


def test_a_plan_for_a_machine_that_is_not_attached_is_not_run():
    step = auto_shard(sgd_step, target="h100:8", example=(mlp_state(), batch()))
    assert step.plan(mlp_state(), batch()).target == "h100:8"
    assert "sdy.mesh" in step.lower(mlp_state(), batch()).as_text()
    for run in (lambda: step(mlp_state(), batch()), lambda: step.init(mlp_state)):
        with pytest.raises(PlanError, match="plan is for target 'h100:8', but the devices are 'cpu:8' .*leave out"):
            run()
    assert_close(sgd_step(mlp_state(), batch())[0], step.plan(mlp_state(), batch()).jit()(mlp_state(), batch())[0])
    assert_close(sgd_step(mlp_state(), batch())[0], auto_shard(sgd_step, target="cpu:8")(mlp_state(), batch())[0])


def test_the_message_of_a_larger_machine_names_it():
    """Not the number of devices: on a CPU with that many, the plan would be refused all the same."""
    step = auto_shard(sgd_step, target="v5e:4x4", example=(mlp_state(), batch()))
    for run in (lambda: step(mlp_state(), batch()), lambda: step.init(mlp_state)):
        with pytest.raises(PlanError, match=r"target 'v5e:4x4', but the devices are 'cpu:8' .*leave out target=\. "):
            run()


def test_the_first_call_of_each_of_several_plans_is_inspected():
    double = auto_shard(lambda x: x * 2, target="h100:8")
    for rows in (16, 32):
        double.plan(batch(size=rows))
    with pytest.raises(PlanError, match="plan is for target 'h100:8', but the devices"):
        double(batch(size=16))
