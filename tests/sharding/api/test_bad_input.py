"""Invalid options raise errors that name them, before anything is searched or compiled."""

import math
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard.errors import AutoshardError, PlanError
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.bound_plan import bound_or_error

FIVE: Any = 5
SHAPES = jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")


def product(w, x):
    return x @ w


@cache
def planned():
    return autoshard.plan(product, *SHAPES, target="cpu:8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan": {}},
            r"plan is {}, which has no mesh axis, or one without logical axes: give the logical",
        ),
        ({"plan": {"a": None}}, "plan 'a' is None; it must be a list"),
        ({"plan": {"a": {"batch"}}}, "plan 'a' is {'batch'}; it must be a list"),
        ({"plan": {"a": [["batch"]]}}, r"plan 'a'\[0\] is \['batch'\]; it must be text"),
        ({"plan": {5: ["batch"]}}, "a key of plan is 5; it must be text"),
        ({"plan": 5}, "plan is 5; give a strategy such as 'fsdp:8'"),
        ({"target": 5}, "target is 5; write its name as text, such as 'v5p:4x4x4'"),
        (
            {"donate_argnums": 1.0},
            "donate_argnums is 1.0; it must be positions of arguments, as numbers: 0",
        ),
        ({"donate_argnums": None}, "donate_argnums is None; it must be positions of arguments"),
        ({"static_argnums": [True]}, "static_argnums is True; it must be positions of arguments"),
        ({"memory_limit_bytes": 10**400}, r"memory_limit_bytes is 10+\.\.\.; give a positive number"),
        ({"memory_limit_bytes": np.array([1, 2])}, "memory_limit_bytes is array.*; give a positive number"),
        ({"strict": "no"}, "strict is 'no'; give True or False"),
    ],
)
def test_invalid_options_raise_at_plan_and_at_auto_shard(options, message):
    for use in (lambda: autoshard.plan(product, *SHAPES, **options), lambda: autoshard.auto_shard(product, **options)):
        with pytest.raises(AutoshardError, match=message) as raised:
            use()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mesh", [{"a": True}, {"": 8}, {5: 8}, {"a": 2.0}, {"a": -1}, {}, [("a", 8)], 5])
def test_invalid_meshes(mesh):
    with pytest.raises(PlanError, match="mesh is .*; give a jax.sharding.Mesh, an AbstractMesh, or sizes such as"):
        find_machine(mesh, None)


def test_a_mesh_of_too_many_devices():
    with pytest.raises(PlanError, match="mesh {'a': 10+} has more than 1048576 devices"):
        find_machine({"a": 10**30}, None)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda plan: plan.diff(None), "diff: None is not a plan; pass the result of"),
        (lambda plan: plan.explain(5), "explain: 5 is not a path; give a string"),
        (lambda plan: plan.verify(timeout_s="x"), "verify: timeout_s is 'x'; it must be a finite number"),
        (lambda plan: plan.verify(timeout_s=math.inf), "verify: timeout_s is inf; it must be a finite number"),
        (lambda plan: plan.verify(timeout_s=0), "verify: timeout_s is 0; it must be above 0"),
        (lambda plan: plan.verify(options=5), "verify: options is 5; it must be a table"),
        (lambda plan: plan.verify(options={"a": None}), "verify: options 'a' is None; it must be text or"),
        (lambda plan: plan.jit(5), "devices is 5; give some of jax.devices"),
        (lambda plan: plan.jit([]), r"devices is \[\]; give some of jax.devices"),
        (lambda plan: plan.bind(None, *SHAPES), "take a function or a Flax module class, got None"),
        (
            lambda plan: autoshard.plan(product, *SHAPES, fixed={"0": (None, None, "batch")}),
            "has 3 entries, but the array",
        ),
        (lambda plan: autoshard.auto_shard(product, example=FIVE), "example is 5; pass the arguments as a tuple"),
    ],
)
def test_invalid_arguments_of_plan_methods(use, message):
    with pytest.raises(AutoshardError, match=message):
        use(planned())


def test_an_argument_number_may_repeat_and_be_any_integer_type():
    numbers: Any = [np.int64(0), -2]
    plan = autoshard.plan(product, *SHAPES, donate_argnums=numbers)
    assert bound_or_error(plan.bound).traced.donated == {0}


@pytest.mark.parametrize("name", ["CPU:8", " cpu:8 "])
def test_target_names_are_normalized(name):
    assert autoshard.plan(product, *SHAPES, target=name).target == "cpu:8"


@pytest.mark.parametrize("spec", [">20", "100", "q", ".5f", "{}"])
def test_plans_accept_every_format_specification(spec):
    assert str(planned()) in format(planned(), spec)
    assert str(planned().estimate) in format(planned().estimate, spec)
    assert format(planned(), "^9999").strip() == str(planned())
