"""Plans keep the shardings that users fix and that programs contain, or the error names the ones that they cannot."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import Plan, auto_shard, plan
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.sharding.axes.state_checks import StateChangedError
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.core.placement import to_partition_spec
from tests.sharding.programs import assert_close, batch, mlp_loss, mlp_state, sgd_step

MESH = {"data": 2, "model": 4}


def spec_of_each_input(plan):
    return {leaf.path: leaf.spec for leaf in plan.inputs}


def test_fixed_specs_are_kept():
    fixed = {"0/w": P("model"), "1": P("data")}
    step = auto_shard(sgd_step, mesh=MESH, fixed=fixed)
    planned_specs = spec_of_each_input(step.plan(mlp_state(), batch()))
    assert planned_specs["0/w"] == P("model") and planned_specs["1"] == P("data")
    params, _ = step(mlp_state(), batch())
    assert params["w"].sharding.spec == P("model")
    assert_close(sgd_step(mlp_state(), batch())[0], params)


def test_the_end_of_a_path_names_the_one_input_that_ends_so():
    fixed = {"*": P("model"), "w": P(None, "model")}  # a name takes precedence over a glob
    planned_specs = spec_of_each_input(plan(sgd_step, mlp_state(), batch(), mesh=MESH, fixed=fixed))
    assert planned_specs["0/w"] == P(None, "model") and planned_specs["0/v"] == P("model")
    state = (mlp_state(), mlp_state())
    with pytest.raises(
        FixedError,
        match=r"'w' is the end of 2 paths: s/0/w, s/1/w. Give a longer path, such as '1/w', or .* '\*/w' for",
    ):
        plan(lambda s, x: (s, mlp_loss(s[0], x)), state, batch(), mesh=MESH, fixed={"w": P("model")})


def test_seq_needs_tp_where_there_is_a_sequence():
    def loss(w, x):
        return jnp.mean(jax.nn.softmax(jnp.einsum("bsd,btd->bst", x @ w, x)) @ x)

    w, x = jnp.ones((16, 16)), jnp.ones((8, 32, 16))
    with pytest.raises(AutoshardError, match="the plan has no tp. Leave 'seq' out"):
        plan(jax.grad(loss), w, x, plan="dp:8 seq")


def test_fixed_by_logical_axes():
    table = {"tp": ["ffn"]}
    free = spec_of_each_input(plan(sgd_step, mlp_state(), batch(), plan=table, mesh={"tp": 8}))
    assert free["0/w"] == P(None, "tp") and free["0/v"] == P("tp")
    fixed = spec_of_each_input(
        plan(sgd_step, mlp_state(), batch(), plan=table, mesh={"tp": 8}, fixed={"0/w": (None, None)})
    )
    assert fixed["0/w"] == P() and fixed["0/v"] == P("tp")


def test_a_given_mesh_is_never_split_and_tables_name_its_axes():
    planned = plan(sgd_step, mlp_state(), batch(), mesh=MESH, plan={"data": ["batch"], "model": ["ffn"]})
    assert dict(zip(planned.mesh.axis_names, planned.mesh.axis_sizes, strict=True)) == MESH
    assert spec_of_each_input(planned)["0/w"] == P(None, "model") and spec_of_each_input(planned)["1"] == P("data")
    assert plan(sgd_step, mlp_state(), batch(), mesh=MESH, plan="data=fsdp:2 model=tp:4").storage == {
        "parameter": ("data",),
        "optimizer": ("data",),
    }


def test_constraints_of_the_program_are_kept(mesh8):
    def loss(params, x):
        h = jnp.tanh(x @ params["w"] + params["b"])
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh8, P("model", "data")))
        return jnp.mean((h @ params["v"] - x) ** 2)

    sharded = auto_shard(jax.grad(loss))
    assert_close(jax.grad(mlp_loss)(mlp_state(), batch()), sharded(mlp_state(), batch()))
    text = sharded.lower(mlp_state(), batch()).as_text()
    assert '[{"model"}, {"data"}]' in text
    with pytest.raises(AutoshardError, match=r"constraint .* at .*test_fixed_shardings.py.* names mesh axis 'model'"):
        auto_shard(loss, mesh={"a": 8})(mlp_state(), batch())


def test_partitioned_boxes_of_linen_are_fixed():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    dense = linen.Dense(16, kernel_init=init)
    variables = dense.init(jax.random.key(0), batch())

    def forward(variables, x):
        return dense.apply(variables, x)

    planned_specs = spec_of_each_input(plan(forward, variables, batch(), mesh=MESH))
    assert planned_specs["0/params/kernel"] == P(None, "model")
    with pytest.raises(AutoshardError, match="annotated '0/params/kernel'.*'model'"):
        plan(forward, variables, batch(), mesh={"data": 8})


def test_fixed_takes_precedence_over_an_annotation():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    dense = linen.Dense(16, kernel_init=init)
    variables = dense.init(jax.random.key(0), batch())
    planned = plan(dense.apply, variables, batch(), mesh=MESH, fixed={"0/params/kernel": P("data")})
    assert spec_of_each_input(planned)["0/params/kernel"] == P("data")


def test_metadata_of_nnx_variables_are_fixed(mesh8):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh8):
        layer = nnx.Linear(64, 16, kernel_init=init, rngs=nnx.Rngs(0))
    sharded = auto_shard(lambda layer, x: layer(x))
    assert_close(layer(batch()), sharded(layer, batch()))
    assert spec_of_each_input(sharded.plan(layer, batch()))["0/kernel"] == P(None, "model")


def test_meshes_with_explicit_axes_are_accepted():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(batch(), NamedSharding(mesh, P("data")))
    step = auto_shard(sgd_step)
    for _ in range(2):
        np.testing.assert_allclose(step(mlp_state(), x)[1], sgd_step(mlp_state(), batch())[1], rtol=1e-5)
    assert spec_of_each_input(step.plan(mlp_state(), x))["1"] == P("data")


def test_a_plan_goes_through_json():
    planned = plan(sgd_step, mlp_state(), batch(), plan="fsdp:4 tp:2")
    reread = Plan.from_json(planned.to_json())
    assert reread.to_json() == planned.to_json()
    with pytest.raises(AutoshardError, match="plan.bind"):
        reread.jit()
    bound = reread.bind(sgd_step, mlp_state(), batch())
    assert_close(sgd_step(mlp_state(), batch())[0], bound.jit()(mlp_state(), batch())[0])
    used = auto_shard(sgd_step, plan=reread)
    assert spec_of_each_input(used.plan(mlp_state(), batch())) == spec_of_each_input(planned)
    with pytest.raises(AutoshardError, match=r"another program.*'params/b'"):
        reread.bind(sgd_step, mlp_state(hidden=256), batch())


def test_a_plan_from_json_keeps_what_was_fixed():
    fixed = {"0/w": P("model"), "1": P("data")}
    planned = plan(sgd_step, mlp_state(), batch(), mesh=MESH, fixed=fixed)
    bound = Plan.from_json(planned.to_json()).bind(sgd_step, mlp_state(), batch())
    values = bound_or_error(bound.bound).traced.program.inputs
    assert {leaf.path: to_partition_spec(bound_or_error(bound.bound).layout.stored_spec(v))
            for v, leaf in zip(values, planned.inputs, strict=True)} == spec_of_each_input(planned)  # fmt: skip
    assert spec_of_each_input(planned)["0/w"] == P("model")


BAD = {
    "unknown word": (dict(plan="fdsp:8"), r"unknown word 'fdsp:8'. Did you mean 'fsdp:8'\?"),
    "no size": (dict(plan="tp"), "needs a number of devices, such as tp:8"),
    "too many devices": (
        dict(plan="fsdp:16"),
        "takes 16 devices, but cpu:8 has 8; start with XLA_FLAGS=--xla_force_host_platform_device_count=16, or request "
        "'fsdp:8', or plan for a target of 16 devices",
    ),
    "too few devices": (dict(plan="dp:2 tp:2"), "but cpu:8 has 8; request 'dp:4 tp:2', or plan for a target of 4 dev"),
    "no such axis": (
        dict(plan="ep:8"),
        "but no such axis can be sharded: its .*. Use one of dp, zero1, fsdp, tp$",
    ),
    "seq without tp": (
        dict(plan="dp:8 seq"),
        "plan 'dp:8 seq': 'seq' makes tp shard the sequence too, but the plan has no tp and the program has no "
        "sequence. Leave 'seq' out",
    ),
    "seq without a sequence": (dict(plan="dp:4 tp:2 seq"), "tp shard the sequence too, but the program has no seq"),
    "seq and no such axis": (dict(plan="ep:8 seq"), "ep shards experts, .*has no sequence. Leave 'seq' out"),
    "seq without tp or a sequence": (dict(plan="dp:8 tp:1 seq"), "the plan has no tp and the program has no sequence"),
    "table": (dict(plan={"tp": ["fnn"]}), "no logical axis 'fnn'"),
    "table of another mesh": (dict(plan={"tp": ["ffn"]}, mesh={"data": 8}), "no axis 'tp'.*or give mesh= with axes tp"),
    "plan of no kind": (dict(plan=8), "plan is 8; give a strategy such as 'fsdp:8'"),
    "memory in words": (dict(memory_limit_bytes="4GB"), "memory_limit_bytes is '4GB'; give a positive number"),
    "no memory": (dict(memory_limit_bytes=0), "memory_limit_bytes is 0; give a positive number"),
    "donated": (
        dict(donate_argnums=5),
        r"donate_argnums is 5; it must be positions of arguments, as numbers: 0",
    ),
    "donated by name": (dict(donate_argnums="params"), "donate_argnums is 'params'; it must be positions"),
    "static": (
        dict(static_argnums=(1, 2)),
        r"static_argnums is 2; it must be positions of .*: 0 \(\w+\), 1",
    ),
    "mesh": (dict(mesh={"data": 0}), "mesh is"),
    "other mesh": (dict(mesh={"data": 8}, plan="fsdp:8"), "but mesh is {'data': 8}. Say what each axis"),
    "target": (dict(target="v7:3"), "there is no chip 'v7'. Write CHIP:SHAPE, .*v5p"),
    "target and mesh": (dict(target="cpu:4", mesh={"data": 8}), "has 8 devices, target 'cpu:4' has 4"),
    "fixed nothing": (dict(mesh={"data": 8}, fixed={"0/zz*": P("data")}), "matches no input"),
    "fixed axis": (dict(mesh={"data": 8}, fixed={"0/w": P("model")}), "names mesh axis 'model'"),
    "fixed rank": (dict(mesh={"data": 8}, fixed={"0/b": P(None, "data")}), "has 2 entries, but the array has 1"),
    "fixed twice": (dict(mesh={"data": 8}, fixed={"0/w": P("data", "data")}), "'data' twice"),
    "fixed names": (dict(fixed={"0/w": ("batch", "nothing")}), "has no logical axis 'nothing'"),
    "fixed to another name": (
        dict(fixed={"0/w": ("ffn", "batch")}),
        r"'0/w' is \('ffn', 'batch'\), but dim 0 is embed, not ffn, dim 1 is ffn, not batch. Give each dimension",
    ),
    "memory": (
        dict(memory_limit_bytes=1000),
        r"KiB\) too much: .*No cpu machine is large enough, up to cpu:1024. Use a smaller batch",
    ),
    "memory of a request": (
        dict(memory_limit_bytes=1000, plan="dp:8"),
        "requested plan does not fit .* Give memory_limit_bytes=[1-9][0-9_]+ if each device has that much memory, or a",
    ),
    "verify": (dict(verify=-1), "verify is -1; give the number of plans"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_invalid_request_raises_one_clear_error(name):
    options, message = BAD[name]
    with pytest.raises(AutoshardError, match=message):
        plan(sgd_step, mlp_state(), batch(), **options)


def test_one_error_names_every_impossible_fixed_spec():
    fixed = {"0/zz": P(), "0/w": P("nope"), "1": P(None, None, "data")}
    with pytest.raises(AutoshardError, match="(?s)matches no input.*'nope'.*3 entries"):
        plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed=fixed)


def test_the_message_has_only_the_first_of_many_problems():
    params = {f"w{i}": jnp.ones((9 + 8 * i, 6)) for i in range(9)}
    with pytest.raises(FixedError) as caught:
        plan(lambda p: sum(map(jnp.sum, p.values())), params, mesh={"data": 8}, fixed={"*": P("data")})
    assert len(caught.value.problems) == 9 and "'0/w5' dim 0 has size 49" in str(caught.value)
    assert "'0/w6'" not in str(caught.value) and str(caught.value).endswith("from its spec and 3 more")


def test_the_message_has_one_problem_of_several_inputs_once():
    params = {f"w{i}": jnp.ones((6, 6)) for i in range(9)}
    with pytest.raises(
        FixedError, match=r"fixed '0/w0' \(and 8 more\) dim 0 has size 6, not divisible by mesh axis"
    ) as caught:
        plan(lambda p: sum(map(jnp.sum, p.values())), params, mesh={"data": 8}, fixed={"*": P("data")})
    assert str(caught.value).count("not divisible") == 1 and len(caught.value.problems) == 9


CONTRARY = {
    "one axis twice": ({"0/w": P("data", "data")}, r"fixed '0/w': P\(.*\) uses mesh axis 'data' twice. Keep it on one"),
    "two patterns": (
        {"0/[wv]": P("data"), "*/w": P(None, "data"), "1": P("data")},
        r"fixed '0/\[wv\]' is P\('data'.*\) and fixed '\*/w' is P\(None, 'data'\), but both match '0/w': drop one, "
        "or add '0/w' itself",
    ),
    "two kinds": ({"0/*": P("data"), "*/b": (None,)}, r"'0/\*' is .* '\*/b' is \(None,\), but both match '0/b'"),
    "two of all": ({"*": P("data"), "0/*": P()}, r"'\*' is .* and fixed '0/\*' is P\(\), .* '0/b' and 2 more: "),
    "mesh axis": ({"0/v": P("dtaa")}, "names mesh axis 'dtaa', but the mesh is {'data': 8}; did you mean 'data'"),
    "no such path": ({"0/params/w": P("data")}, r"fixed '0/params/w' matches no input. Similar paths: 0/w"),
    "no such glob": ({"0/*/kernel": P("data")}, r"fixed '0/\*/kernel' matches no input. There are 0/b, 0/v, 0/w, 1"),
}


@pytest.mark.parametrize("name", CONTRARY)
def test_specs_that_contradict_each_other_or_the_mesh(name):
    fixed, message = CONTRARY[name]
    with pytest.raises(FixedError, match=message) as caught:
        plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed=fixed)
    assert isinstance(caught.value, PlanError) and len(caught.value.problems) == 1
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_an_exact_path_takes_precedence_over_patterns():
    for fixed in ({"0/w": P("data"), "0/*": P()}, {"0/*": P(), "0/w": P("data")}):
        planned_specs = spec_of_each_input(plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed=fixed))
        assert planned_specs["0/w"] == P("data") and planned_specs["0/v"] == P() == planned_specs["0/b"]
    same = {"0/*": P("data"), "*/w": P("data", None)}  # written in two ways, but equal
    assert spec_of_each_input(plan(sgd_step, mlp_state(), batch(), mesh={"data": 8}, fixed=same))["0/w"] == P("data")


def test_the_name_of_an_axis_means_all_axes_of_that_name():
    def step(params, x):
        def loss(params):
            h = jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"])
            return jnp.mean((jnp.tanh(jnp.tanh(h @ params["w2"]) @ params["v2"]) - x) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"w": jnp.ones((64, 128)), "v": jnp.ones((128, 64)), "w2": jnp.ones((64, 256)), "v2": jnp.ones((256, 64))}
    axes = plan(step, params, batch(), target="cpu:8", plan="tp:8").logical_axes
    assert axes["0/w"] == ("embed", "ffn_2")
    planned = plan(step, params, batch(), target="cpu:8", plan="tp:8", fixed={"0/w": (None, "ffn")})
    assert spec_of_each_input(planned)["0/w"] == P(None, "tp")


def test_a_note_names_fixed_specs_that_shard_one_logical_axis_differently():
    fixed = {"0/w": P(None, "model"), "0/v": P("data")}  # both shard ffn, over different mesh axes
    planned = plan(sgd_step, mlp_state(), batch(), mesh=MESH, fixed=fixed)
    assert spec_of_each_input(planned)["0/w"] == P(None, "model") and spec_of_each_input(planned)["0/v"] == P("data")
    note = next(note for note in planned.notes if "resharded" in note)
    assert "fixed 'params/v' shards ffn over data, but fixed 'params/w' shards it over model" in note
    assert "in every step" in note
    assert_close(sgd_step(mlp_state(), batch())[0], planned.jit()(mlp_state(), batch())[0])
    same = plan(sgd_step, mlp_state(), batch(), mesh=MESH, fixed={"0/w": P(None, "model"), "0/v": P("model")})
    assert not [note for note in same.notes if "resharded" in note]


def test_without_a_mesh_only_plans_with_the_axes_of_the_spec_are_searched():
    planned = plan(sgd_step, mlp_state(), batch(), target="cpu:8", fixed={"0/w": P(None, "tp")})
    assert "tp" in planned.mesh.axis_names and spec_of_each_input(planned)["0/w"] == P(None, "tp")
    assert all("tp" in words for words, _, _ in planned.candidates)
    with pytest.raises(FixedError, match="names mesh axis 'model'.*Without mesh=, the planner .* tried have dp, z"):
        plan(sgd_step, mlp_state(), batch(), target="cpu:8", fixed={"0/w": P("model")})


def test_a_plan_and_fixed_specs_at_once():
    planned = plan(sgd_step, mlp_state(), batch(), target="cpu:8", plan="fsdp:8")
    with pytest.raises(
        AutoshardError,
        match=r"fixed={'0/w': P\(\)} is given with a Plan.* Leave it out, or make .* plan='fsdp:8'",
    ):
        auto_shard(sgd_step, plan=planned, fixed={"0/w": P()})


def test_a_dimension_that_does_not_divide():
    params = mlp_state(hidden=100)
    with pytest.raises(AutoshardError, match=r"dim 1 has size 100, not divisible.*\(8\). Pad it to 104"):
        plan(sgd_step, params, batch(), mesh={"data": 8}, fixed={"0/w": P(None, "data")})
    with pytest.warns(AutoshardWarning, match=r"only 4 of the 8 .*: ffn 100 is not divisible .*Pad ffn to 104"):
        planned = plan(sgd_step, params, batch(), plan="tp:8")  # requested: sharded where possible
    assert any("ffn 100 is not divisible by tp 8" in note and "104" in note for note in planned.notes)
    with pytest.warns(AutoshardWarning, match=r"only 2 of the 8 .*: ffn 101 is not"):
        odd = plan(sgd_step, mlp_state(hidden=101), batch(), plan="dp:2 tp:4")
    assert any("ffn 101 is not divisible by tp 4. Pad ffn to 104" in note for note in odd.notes)
    assert_close(sgd_step(params, batch())[0], planned.jit()(params, batch())[0])


@pytest.mark.parametrize(("words", "axis"), [("dp:8", "dp"), ("data=dp:8", "data")])
def test_a_requested_strategy_that_shards_nothing_is_an_error(words, axis):
    mesh = {"data": 8} if axis == "data" else None
    with pytest.raises(
        AutoshardError, match=f"'{words}' shards nothing: batch 7 is .* by {axis} 8. Pad batch to 8, or"
    ):
        plan(sgd_step, mlp_state(), batch(size=7), plan=words, mesh=mesh)
    with pytest.warns(AutoshardWarning, match=r"nothing is computed in shards: .* \(batch 7 is not .* fsdp 8"):
        planned = plan(sgd_step, mlp_state(), batch(size=7), plan="fsdp:8")  # at least the state is stored in shards
    assert planned.estimate.memory_bytes["parameter"] < 9000


def test_a_searched_plan_that_shards_nothing_is_a_warning():
    with (
        pytest.warns(AutoshardWarning, match=r"nothing is sharded: each of the 7 .* \(.* is not divisible by data 7"),
        pytest.warns(AutoshardWarning, match="1 of the 8 attached devices is idle"),
    ):
        planned = plan(sgd_step, mlp_state(), batch(), mesh={"data": 7})
    assert_close(sgd_step(mlp_state(), batch())[0], planned.jit()(mlp_state(), batch())[0])


def test_arguments_of_a_function_that_takes_any_number_can_be_donated():
    step = auto_shard(lambda *args: sgd_step(*args), donate_argnums=0)
    assert_close(sgd_step(mlp_state(), batch())[1], step(mlp_state(), batch())[1])


def test_a_mesh_with_more_devices_than_there_are():
    with pytest.raises(AutoshardError, match="needs 16 devices, but there are 8"):
        plan(sgd_step, mlp_state(), batch(), mesh={"data": 16}).jit()


def test_a_leaked_tracer_is_named():
    leaked = []
    jax.jit(lambda x: leaked.append(x) or x)(batch())
    with pytest.raises(AutoshardError, match="argument 'x' is a leaked tracer"):
        auto_shard(sgd_step)(mlp_state(), leaked[0])


def test_a_state_that_changes_through_the_step_is_named():
    def step(params, x):
        return {**params, "w": params["w"].astype(jnp.bfloat16)}, x.sum()

    with pytest.raises(StateChangedError, match="'w' from float32.* to bfloat16"):
        auto_shard(step, donate_argnums=0)(mlp_state(), batch())


def test_a_primitive_without_a_rule_is_named():
    from jax.extend.core import Primitive

    opaque = Primitive("opaque_kernel")
    opaque.def_impl(np.asarray)  # which cannot be traced
    opaque.def_abstract_eval(lambda x: x)
    with (
        pytest.warns(AutoshardWarning, match="nothing is sharded: each of the 8 devices"),
        pytest.warns(AutoshardWarning, match="no rule for 'opaque_kernel' at .*test_fixed_shardings.py"),
    ):
        planned = plan(lambda x: opaque.bind(x) * 2, batch())
    assert "opaque_kernel" in planned.unknown
    with pytest.raises(AutoshardError, match="no rule for 'opaque_kernel'"):
        plan(lambda x: opaque.bind(x) * 2, batch(), strict=True)


def test_a_primitive_without_a_rule_or_a_source_line(monkeypatch):
    from jax.extend.core import Primitive

    opaque = Primitive("nameless_kernel")
    opaque.def_impl(np.asarray)  # which cannot be traced
    opaque.def_abstract_eval(lambda x: x)
    monkeypatch.setattr("autoshard._compat.source_line", lambda eqn: "")
    with pytest.raises(AutoshardError, match=r"no rule for 'nameless_kernel' \(it has no source line\)\. Every device"):
        plan(lambda x: opaque.bind(x) * 2, batch(), strict=True)


def test_functions_that_share_state_on_one_device_stay_there(mesh_of):
    one = NamedSharding(mesh_of(data=1), P())
    params = jax.device_put(mlp_state(), one)
    loss = auto_shard(mlp_loss)
    assert_close(mlp_loss(mlp_state(), batch()), loss(params, batch()))
    assert loss.plan(params, batch()).mesh.size == 1
    beside = jax.device_put(batch(), NamedSharding(mesh_of(data=8), P("data")))
    assert auto_shard(mlp_loss).plan(params, beside).mesh.size == 8
