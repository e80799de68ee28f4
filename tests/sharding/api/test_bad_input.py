"""What cannot be used is told by name, with what would be right, before anything is searched or compiled."""

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
def made():
    return autoshard.plan(product, *SHAPES, target="cpu:8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": {}}, r"plan is {}, but it must name mesh axes: give the logical axes of each mesh axis"),
        ({"plan": {"a": None}}, "plan 'a' is None, it must be a list"),
        ({"plan": {"a": {"batch"}}}, "plan 'a' is {'batch'}, it must be a list"),
        ({"plan": {"a": [["batch"]]}}, r"plan 'a'\[0\] is \['batch'\], it must be text"),
        ({"plan": {5: ["batch"]}}, "a key of plan is 5, it must be text"),
        ({"plan": 5}, "plan is 5; give words such as 'fsdp:8'"),
        ({"target": 5}, "target is 5; write its name as text, such as 'v5p:4x4x4'"),
        ({"donate_argnums": 1.0}, "donate_argnums 1.0: the function has 2 positional arguments, numbered 0 to 1"),
        ({"donate_argnums": None}, "donate_argnums None: the function has 2 positional arguments"),
        ({"static_argnums": [True]}, "static_argnums True: the function has 2 positional arguments"),
        ({"memory_limit_bytes": 10**400}, "memory_limit_bytes is 10+; give a positive number"),
        ({"memory_limit_bytes": np.array([1, 2])}, "memory_limit_bytes is array.*; give a positive number"),
        ({"strict": "no"}, "strict is 'no'; give True or False"),
    ],
)
def test_options_are_refused_where_they_are_given(options, message):
    for use in (lambda: autoshard.plan(product, *SHAPES, **options), lambda: autoshard.auto_shard(product, **options)):
        with pytest.raises(AutoshardError, match=message) as raised:
            use()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mesh", [{"a": True}, {"": 8}, {5: 8}, {"a": 2.0}, {"a": -1}, {}, [("a", 8)], 5])
def test_what_is_no_mesh(mesh):
    with pytest.raises(PlanError, match="mesh is .*; give a jax.sharding.Mesh, an AbstractMesh, or sizes like"):
        find_machine(mesh, None)


def test_a_mesh_of_more_devices_than_there_are_anywhere():
    with pytest.raises(PlanError, match="mesh {'a': 10+} has more than 1048576 devices"):
        find_machine({"a": 10**30}, None)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda plan: plan.diff(None), "diff: None is no plan; give one that"),
        (lambda plan: plan.explain(5), "explain: 5 is not a path; give a string"),
        (lambda plan: plan.verify(timeout_s="x"), "verify: timeout_s is 'x', it must be a finite number"),
        (lambda plan: plan.verify(timeout_s=math.inf), "verify: timeout_s is inf, it must be a finite number"),
        (lambda plan: plan.verify(timeout_s=0), "verify: timeout_s is 0, it must be above 0"),
        (lambda plan: plan.verify(options=5), "verify: options is 5, it must be a table"),
        (lambda plan: plan.verify(options={"a": None}), "verify: options 'a' is None, it must be text or"),
        (lambda plan: plan.jit(5), "devices is 5; give some of jax.devices"),
        (lambda plan: plan.jit([]), r"devices is \[\]; give some of jax.devices"),
        (lambda plan: plan.bind(None, *SHAPES), "takes a function or a Flax module class, got NoneType None"),
        (
            lambda plan: autoshard.plan(product, *SHAPES, fixed={"0": (None, None, "batch")}),
            "has 3 entries, but the array",
        ),
        (lambda plan: autoshard.auto_shard(product, example=FIVE), "example is 5; give the arguments as a tuple"),
    ],
)
def test_what_a_plan_is_asked_for_wrongly(use, message):
    with pytest.raises(AutoshardError, match=message):
        use(made())


def test_one_argument_may_be_named_twice_and_by_any_whole_number():
    numbers: Any = [np.int64(0), -2]
    plan = autoshard.plan(product, *SHAPES, donate_argnums=numbers)
    assert bound_or_error(plan.bound).traced.donated == {0}


@pytest.mark.parametrize("name", ["CPU:8", " cpu:8 "])
def test_a_target_has_one_name_however_it_is_written(name):
    assert autoshard.plan(product, *SHAPES, target=name).target == "cpu:8"


@pytest.mark.parametrize("spec", [">20", "100", "q", ".5f", "{}"])
def test_what_can_be_printed_can_be_formatted(spec):
    assert str(made()) in format(made(), spec) and str(made().estimate) in format(made().estimate, spec)
    assert format(made(), "^9999").strip() == str(made())
