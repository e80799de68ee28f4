"""Every object of the package can be printed and copied: whole, half-built, or with unprintable attributes."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ckpt import Checkpointer
from autoshard.errors import AutoshardWarning, DamagedCheckpointError
from autoshard.models.workloads import workload
from autoshard.sharding.audit.verification import Audit
from autoshard.sharding.hlo.rematerializations import Rematerialization
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.tensors import Leaf
from autoshard.train.config.train_config import TrainConfig
from tests.sharding.programs import batch, mlp_state, sgd_step

TEXTS = (repr, str, format, lambda x: f"{x!r:>9}{x!s}", lambda x: repr([x]))
HIDDEN = {"problem", "traced", "layout", "assignment", "executable"}  # the planner's workings, behind `plan.bound`


@cache
def samples() -> dict[str, Any]:
    """Makes a result of each public function."""
    step = autoshard.auto_shard(sgd_step, plan="fsdp:8")
    plan = step.plan(mlp_state(), batch())
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    return {
        "auto_shard": step,
        "plan": plan,
        "read": autoshard.Plan.from_json(plan.to_json()),
        "audit": Audit("error", remarks=(Rematerialization.__new__(Rematerialization),)),
        "propagation": autoshard.propagate(jnp.tanh, x, in_specs=(P("a"),), mesh={"a": 2}),
        "discovery": autoshard.discover(jnp.tanh, jnp.ones((8, 4))),
        "check": autoshard.check_rule(jnp.tanh, jnp.ones((8, 4))),
        "rule": autoshard.Rule.parse("m k, k n -> m n; reduce k"),
        "target": find_target("v5p:4x4x4*2"),
        "config": TrainConfig(),
        "workload": workload("gpt-tiny"),
    }


def reached(start: Any) -> Iterator[Any]:
    """Yields all objects of our classes that are reachable from `start` through public attributes and containers."""
    to_visit, visited = [start], set()
    while to_visit:
        x = to_visit.pop()
        if id(x) in visited:
            continue
        visited.add(id(x))
        if isinstance(x, dict):
            to_visit += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple | set | frozenset) and not hasattr(x, "_fields"):
            to_visit += x
        elif type(x).__module__.startswith("autoshard"):
            yield x
            to_visit += [v for k, v in getattr(x, "__dict__", {}).items() if not k.startswith("_") and k not in HIDDEN]


@cache
def classes() -> dict[str, type]:
    """Collects all classes that the modules of the package define, except those without objects.

    Arrays, and variables of Flax, are printed and copied by their libraries.

    Abstract classes and protocols have none. A copy of a protocol's object would also change the class: `copy` gives it
    an attribute, which Python 3.11 then expects of every object that `isinstance` compares with the protocol.
    """
    modules = [m.name for m in pkgutil.walk_packages(autoshard.__path__, "autoshard.")]
    found = {
        f"{name}.{cls.__qualname__}": cls
        for name in modules
        if not name.endswith("__main__")
        for cls in vars(importlib.import_module(name)).values()
        if inspect.isclass(cls) and cls.__module__ == name
    }
    return {
        name: cls
        for name, cls in found.items()
        if not (
            issubclass(cls, (jax.Array, nnx.Variable)) or inspect.isabstract(cls) or getattr(cls, "_is_protocol", False)
        )
    }


def half_built(cls: type) -> Any:
    """Makes an object without running the class's own `__new__` and `__init__`."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    return builtin.__new__(cls)  # pyright: ignore[reportCallIssue]


def check(x: Any, copied: bool = True, deep: bool = True) -> None:
    for text in TEXTS:
        assert isinstance(text(x), str)
    for duplicate in (copy.copy(x), copy.deepcopy(x) if deep else x) if copied else ():
        assert type(duplicate) is type(x) and isinstance(repr(duplicate), str)


def test_classes_are_found():
    names = {name.rpartition(".")[2] for name in classes()}
    assert {"Plan", "Leaf", "Estimate", "Audit", "Rule", "Factor", "Discovery", "Propagation", "Target"} <= names
    assert {"Chip", "Checkpointer", "AutoSharded", "TrainConfig", "FixedError", "DoesNotFitError", "KVCache"} <= names


def test_half_built_objects_can_be_printed_and_copied():
    failures = []
    for name, cls in sorted(classes().items()):
        fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for count in {0, len(fields) // 2, max(len(fields) - 1, 0)}:
            half = half_built(cls)
            for field in fields[:count]:
                object.__setattr__(half, field, None)
            try:
                check(half, copied=not isinstance(half, tuple))  # a tuple without its items cannot be copied
            except Exception as error:  # collect all failures
                failures.append(f"{name} with {count} fields: {error!r}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["auto_shard", "plan", "read", "audit", "propagation", "discovery", "check", "rule",
                                  "target", "config", "workload"])  # fmt: skip
def test_whole_objects_can_be_printed_and_copied(name):
    for x in reached(samples()[name]):
        check(x, deep=name != "auto_shard")


def test_results_can_be_printed_and_plans_made_while_another_function_is_traced():
    """A debugger and a logger print what they find, also objects that hold tracers."""
    texts, whole, state = [], samples(), mlp_state()

    @jax.jit
    def traced(x):
        plan = autoshard.plan(sgd_step, jax.tree.map(lambda w: w * x, state), batch(), target="cpu:8", plan="fsdp:8")
        holding = Leaf("x", x.shape, x, P("a"), axes=(x,))  # pyright: ignore[reportArgumentType]
        half = half_built(Leaf)
        object.__setattr__(half, "path", x)
        for each in (plan, holding, half, *(x for name in whole for x in reached(whole[name]))):
            check(each, copied=False)
        texts.extend([repr(holding), repr(half), plan.explain("w")])
        return x + 1

    jax.vmap(jax.grad(lambda x: traced(x)))(jnp.ones(3))
    assert "Leaf(" in texts[0] and "Leaf" in texts[1] and "fsdp" in texts[2]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("deleted")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


def test_an_attribute_that_cannot_be_printed_does_not_make_repr_fail():
    plan = samples()["plan"].where(chosen=Unprintable(), target=Unprintable(), notes=Unprintable())
    for text in TEXTS:
        assert "Plan" in text(plan) or "half-built" in text(plan)
    leaf = dataclasses.replace(plan.inputs[0], spec=Unprintable())
    assert repr(leaf).startswith("<Leaf, half-built: path, shape")


def test_errors_keep_their_message_when_copied_or_pickled():
    errors: list[Any] = [FixedError("step", ["one", "two"], ". So what"), AutoshardWarning("careful")]
    errors.append(DamagedCheckpointError("broken", step=3, cause="it is", leaves=["a"]))
    for error in errors:
        for copied in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
            assert type(copied) is type(error) and str(copied) == str(error) and vars(copied) == vars(error)


def test_a_checkpointer_can_be_printed_and_copied(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4)}, config={})
        checkpoints.wait()
        check(checkpoints, deep=False)
