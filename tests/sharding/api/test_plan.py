"""A plan as data: JSON round trips, binding to a function, invalid plans, copies."""

import copy
import dataclasses
import functools
import json
import math
import pickle
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.sharding_plan import Estimate
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.page import page
from tests.sharding.example_step import arrays, shapes, train_step


@cache
def planned(strategy="fsdp:2 tp:4 seq"):
    return autoshard.plan(train_step, *shapes(), plan=strategy, donate_argnums=0)


@cache
def searched():
    return autoshard.plan(train_step, *shapes(), target="v5e:2x4")


EMPTY = Plan(
    mesh=abstract_mesh({}),
    axis_rules={},
    storage={},
    inputs=(),
    outputs=(),
    estimate=Estimate(0, 0, 0, 0, 0),
    target="",
)


def fields(plan):
    return {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name != "bound"}


@pytest.mark.parametrize("make", [planned, searched, lambda: EMPTY], ids=["requested", "searched", "empty"])
def test_json_round_trip(make):
    plan = make()
    again = Plan.from_json(plan.to_json())
    assert fields(again) == fields(plan)
    assert again.bound is None
    assert again.to_json() == plan.to_json()


def test_json_is_portable():
    data = json.loads(planned().to_json())  # plain JSON: no Python types in it
    assert data["mesh"] == {"fsdp": 2, "tp": 4}
    assert data["function"] == "train_step"
    wq = next(leaf for leaf in data["inputs"] if leaf["path"] == "0/params/attention/wq")
    assert wq == {
        "path": "0/params/attention/wq",
        "shape": [32, 8, 4],
        "dtype": "float32",
        "spec": ["fsdp", "tp"],
        "axes": wq["axes"],
        "role": "parameter",
    }
    assert wq["axes"][:2] == ["embed", "heads"]
    assert data["axis_sizes"]["embed"] == 32 and data["axis_sizes"]["heads"] == 8


def test_specs_with_several_axes_round_trip():
    leaf = Leaf("x", (8, 8), "float32", P(("a", "b"), None), ("m", "n"), "data")
    plan = EMPTY.where(mesh=abstract_mesh({"a": 2, "b": 2}), inputs=(leaf,), outputs=(leaf,))
    assert Plan.from_json(plan.to_json()).inputs[0].spec == P(("a", "b"), None)


def test_plans_have_the_values_that_reports_show():
    plan = searched()
    assert plan.function == "train_step"
    assert plan.limit_bytes == 15.75 * 2**30
    assert plan.alone is not None and plan.alone.comm_us == 0
    assert plan.alone.memory_bytes["parameter"] == sum(
        4 * np.prod(x.shape) for x in plan.inputs if x.role == "parameter"
    )
    assert {name for leaf in plan.inputs for dim in leaf.axes for name in dim.split("*")} <= set(plan.axis_sizes)


def test_specs_have_the_structure_of_the_arguments():
    plan = planned()
    state, batch = plan.in_specs
    assert state["params"]["attention"]["wq"] == P("fsdp", "tp") == state["moments"]["attention"]["wq"]
    assert batch["x"] == P("fsdp", "tp")
    assert plan.out_specs[0] == state
    assert plan.logical_axes["0/params/mlp/up"] == ("embed", "ffn")


def test_a_plan_bound_again_computes_the_same():
    rebound = Plan.from_json(planned().to_json()).bind(train_step, *shapes(), donate_argnums=0)
    state, batch = arrays()
    expected_state, expected = jax.jit(train_step)(state, batch)
    actual_state, actual = rebound.jit()(state, batch)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual_state, expected_state)
    wq = actual_state["params"]["attention"]["wq"]
    assert wq.sharding.spec == P("fsdp", "tp")
    assert wq.addressable_shards[0].data.shape == (16, 2, 4)


def test_a_plan_is_used_on_its_own_mesh_and_target():
    """A `Plan` takes options that do not contradict it: its mesh, in any form, and its target."""
    devices = np.array(jax.devices()).reshape(2, 4)
    several: list[dict[str, Any]] = [
        {"mesh": {"fsdp": 2, "tp": 4}},
        {"mesh": jax.sharding.Mesh(devices[::-1], ("fsdp", "tp"))},
        {"target": "cpu:8", "strict": True},
    ]
    for options in several:
        step = autoshard.auto_shard(train_step, plan=planned(), **options)
        assert step.plan(*shapes()).in_specs == planned().in_specs


def test_an_unbound_plan_has_no_function():
    plan = Plan.from_json(planned().to_json())
    for use in (lambda: plan.in_specs, lambda: plan.out_specs, plan.jit):
        with pytest.raises(PlanError, match=r"no function .*plan\.bind"):
            use()


def test_binding_another_program_raises():
    plan = Plan.from_json(planned().to_json())
    with pytest.raises(
        PlanError,
        match=r"another program.*'state/moments/attention/wk' float32\[32, 8, 4\], this .*\[48, 8, 4\]",
    ):
        plan.bind(train_step, *shapes(width=48))
    with pytest.raises(PlanError, match="another program.*the plan has 19 inputs, this function 2"):
        plan.bind(lambda x, y: x @ y, np.ones((4, 4)), np.ones((4, 4)))


def test_binding_arguments_of_another_dtype_raises():
    def fn(x, w):
        return (x @ w).astype("float32")

    wide, narrow = (jax.ShapeDtypeStruct((16, 16), dtype) for dtype in ("float32", "bfloat16"))
    plan = Plan.from_json(autoshard.plan(fn, wide, wide, plan="dp:8").to_json())
    with pytest.raises(
        PlanError, match=r"another program.*plan has 'x' float32\[16, 16\], this function 'x' bfloat16\[16, 16\]"
    ):
        plan.bind(fn, narrow, narrow)


def test_binding_a_program_with_other_axes_raises():
    square = jax.ShapeDtypeStruct((16, 16), "float32")
    plan = Plan.from_json(autoshard.plan(lambda x, w: x @ w, square, square, plan="dp:8").to_json())
    with pytest.raises(
        PlanError, match=r"another program: the axes of '\w+' are .* in the plan, but .* in this program"
    ):
        plan.bind(lambda x, w: x.T @ w, square, square)


def broken(**changes):
    return json.dumps(json.loads(planned().to_json()) | changes)


def with_leaf(**changes):
    data = json.loads(planned().to_json())
    return broken(inputs=[data["inputs"][1] | changes])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan"),
        ("not JSON", "not a plan"),
        ("null", "not a plan"),
        ("[]", "not a plan"),
        ("{}", "not a plan.*format"),
        ('{"format": 4}', "not a plan.*mesh"),
        ('{"format": 999}', "format 999, this version reads 4: plan again"),
        (None, "not a plan"),
        (lambda: planned().to_json()[:-200], "not a plan"),
        (lambda: broken(mesh=[8]), "not a plan"),
        (lambda: broken(mesh={"fsdp": 2, "tp": "4"}), "sizes must be positive whole numbers"),
        (lambda: broken(mesh={"fsdp": 2, "tp": 0}), "sizes must be positive whole numbers"),
        (lambda: broken(mesh={"fsdp": 8}), "names mesh axis 'tp', but the mesh has fsdp"),
        (lambda: broken(inputs=[7]), "not a plan"),
        (lambda: broken(inputs=[{"path": "x"}]), "not a plan"),
        (lambda: broken(estimate=None), "not a plan"),
        (lambda: broken(estimate={"step_time_us": 1}), "not a plan"),
        (
            lambda: broken(estimate=dict.fromkeys(Estimate.__dataclass_fields__, "1") | {"memory_bytes": {}}),
            r"estimate.step_time_us is '1'; it must be a finite number.*; and 6 more",
        ),
        (lambda: broken(axis_rules=["batch"]), "not a plan"),
        (lambda: broken(candidates=3), "not a plan"),
        (lambda: with_leaf(spec=["other"]), "names mesh axis 'other'"),
        (lambda: with_leaf(spec=[3]), r"inputs\[0\].spec\[0\] is 3; it must be text or nothing or a list"),
        (lambda: with_leaf(spec=[{"tp": 4}]), "not a plan"),
    ],
)
def test_invalid_plans(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text() if callable(text) else text)  # type: ignore[arg-type]


OTHERS = [None, True, -1, 10**400, 1.5, math.nan, "x", [], [[1, "y"]], {"x": ["y"]}]


def parts(data, path=()):
    """Yield the path of every part of JSON; of lists only the last element."""
    yield path
    pairs = data.items() if isinstance(data, dict) else list(enumerate(data))[-1:] if isinstance(data, list) else ()
    for key, each in pairs:
        yield from parts(each, (*path, key))


def changed(data, path, part):
    """Return JSON with the part at a path replaced."""
    if not path:
        return part
    edited = copy.copy(data)
    edited[path[0]] = changed(data[path[0]], path[1:], part)
    return edited


def edits(part):
    """Yield replacements of a part: other types, and the part with elements removed and added."""
    yield from OTHERS
    if isinstance(part, list):
        yield from (part[1:], part[:-1], [*part, *part[:1]], [*part, 1], part[::-1])
    if isinstance(part, dict):
        yield from ({k: v for k, v in part.items() if k != out} for out in list(part)[:3])
        yield from ({f"{k}x": v for k, v in part.items()}, part | {"new": 1})


DATA = json.loads(searched().to_json())


@pytest.mark.few(8)
@pytest.mark.parametrize("path", list(parts(DATA)), ids=lambda path: "-".join(map(str, path)) or "all")
def test_a_plan_with_a_changed_part_raises_or_is_usable(path):
    part = functools.reduce(lambda data, key: data[key], path, DATA)
    for edit in edits(part):
        try:
            plan = Plan.from_json(json.dumps(changed(DATA, path, edit)))
        except PlanError as error:
            assert "plan" in str(error) and len(str(error)) < 700 and "\n" not in str(error)
            continue
        texts = [str(plan), repr(plan), plan.diff(searched()), searched().diff(plan), plan.to_json(), page(plan)]
        assert all(texts) and plan.device_order and plan.logical_axes is not None
        assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": [["y", 4], ["y", 2]]}, "names must differ"),
        ({"placing": {"fsdp": [["w", 8, 1]]}}, "placing does not assign the mesh"),
        ({"placing": {"fsdp": [["y", 4, 2], ["x", 2, 1]]}}, "placing does not assign the mesh"),
        ({"placing": {"other": []}}, "placing names mesh axis 'other', but the mesh has"),
        ({"axis_rules": {"other": ["batch"]}}, "axis_rules names mesh axis 'other', but the mesh has"),
        ({"storage": {"parameter": ["other"]}}, "storage names mesh axis 'other', but the mesh has"),
        ({"traffic_us": [[1, 2]] * 99}, "traffic has .* rows and traffic_us 99"),
        ({"limit_bytes": None}, "limit_bytes is None; it must be a finite number"),
    ],
)
def test_contradictory_parts_of_a_plan_raise(changes, message):
    with pytest.raises(PlanError, match=f"not a plan.*{message}"):
        Plan.from_json(json.dumps(DATA | changes))


def test_a_plan_whose_inputs_do_not_match_its_fingerprint_raises():
    inputs = json.loads(planned().to_json())["inputs"][:-1]
    with pytest.raises(PlanError, match="another program.*the plan has 18 inputs, this function 19"):
        Plan.from_json(broken(inputs=inputs)).bind(train_step, *shapes(), donate_argnums=0)


def test_numbers_that_json_cannot_express():
    def no_constant(name):
        raise AssertionError(name)

    unlimited = autoshard.plan(train_step, *shapes(), plan="dp:8", memory_limit_bytes=math.inf)
    assert unlimited.fits and json.loads(unlimited.to_json(), parse_constant=no_constant)["limit_bytes"] == 0
    odd = planned().where(candidates=(("dp:8", math.inf, math.nan),))
    assert json.loads(odd.to_json(), parse_constant=no_constant)["candidates"] == [["dp:8", None, None]]
    with pytest.raises(PlanError, match="variant 'clip' is inf, which JSON cannot express"):
        planned().where(variant={"clip": math.inf}).to_json()


@pytest.mark.parametrize("bound", [True, False])
def test_copies(bound):
    plan = planned() if bound else Plan.from_json(planned().to_json())
    for copied in (copy.copy(plan), copy.deepcopy(plan), plan.where()):
        assert fields(copied) == fields(plan) and copied.bound is plan.bound
    unpickled = pickle.loads(pickle.dumps(plan))
    assert fields(unpickled) == fields(plan) and unpickled.bound is None
    assert copy.deepcopy(plan).estimate.memory_bytes is not plan.estimate.memory_bytes


def test_where_changes_only_the_given_attributes():
    plan = planned()
    other = plan.where(chosen="mine", notes=("one",))
    assert (other.chosen, other.notes, other.inputs) == ("mine", ("one",), plan.inputs)
    assert plan.chosen == "fsdp:2 tp:4 seq"


def test_a_plan_includes_compiler_options():
    plan = autoshard.plan(lambda x: x * 2, np.ones(16, "float32"), plan="dp:8", mesh={"dp": 8})
    assert plan.compiler_options == {}
    options = {"cpu": {"xla_no_such_option": "1", "xla_cpu_enable_fast_math": True}, "tpu": {"xla_other": "1"}}
    with pytest.warns(AutoshardWarning, match="does not know the plan.s options xla_no_such_option: they are left out"):
        run = plan.where(compiler_options=options).jit()
    assert run(np.ones(16, "float32")).tolist() == [2.0] * 16
    nested = jax.jit(lambda x: plan.where(compiler_options={"cpu": {"xla_cpu_enable_fast_math": True}}).jit()(x))
    assert nested(np.ones(16, "float32")).tolist() == [2.0] * 16
    pod = autoshard.plan(lambda x: x * 2, np.ones(64, "float32"), target="v5e:4x4")
    assert "xla_jf_spmd_threshold_for_windowed_einsum_mib" in pod.compiler_options["tpu"]
    assert autoshard.Plan.from_json(pod.to_json()).compiler_options == pod.compiler_options


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}])
def test_the_device_order_follows_the_assignment_of_the_axes(mesh):
    text = " ".join(f"{kind}:{n}" for kind, n in mesh.items())
    plan = autoshard.plan(train_step, *shapes(), plan=text, target="v5e:2x4")
    assert sorted(plan.device_order) == list(range(8)) and plan.topology == (("y", 4), ("x", 2))
    again = autoshard.Plan.from_json(plan.to_json())
    assert again.device_order == plan.device_order and again.placing == plan.placing
    assert plan.where(placing={}).device_order == tuple(range(8))
