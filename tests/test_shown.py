"""Every public object can be printed and copied: whole, half-built, or with attributes that cannot be printed."""

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
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._shown import SHOWN
from autoshard.ckpt import Checkpointer
from autoshard.errors import AutoshardError, AutoshardWarning, DamagedCheckpointError
from autoshard.models.workloads import workload
from autoshard.sharding.audit.verification import Audit
from autoshard.sharding.hlo.rematerializations import Rematerialization
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.machines.targets import find_target
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
def public_classes() -> dict[str, type]:
    """Collects the exported classes, those reachable from the samples, all errors, and all classes with `@shown`."""
    classes = [getattr(autoshard, name) for name in autoshard.__all__ if name != "__version__"]
    classes += [type(x) for sample in samples().values() for x in reached(sample)]
    for module in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
        if module.name.rpartition(".")[2] != "__main__":
            classes += [
                cls for cls in vars(importlib.import_module(module.name)).values()
                if inspect.isclass(cls) and issubclass(cls, AutoshardError)
            ]  # fmt: skip
    own_classes = [
        cls
        for cls in [*classes, *SHOWN, Checkpointer]
        if inspect.isclass(cls) and cls.__module__.startswith("autoshard")
    ]
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in own_classes if not issubclass(cls, jax.Array)}


def check(x: Any, deep: bool = True) -> None:
    for text in TEXTS:
        assert isinstance(text(x), str)
    for copied in (copy.copy(x), copy.deepcopy(x) if deep else x):
        assert type(copied) is type(x) and isinstance(repr(copied), str)


def test_public_classes_are_found():
    names = {name.rpartition(".")[2] for name in public_classes()}
    assert {"Plan", "Leaf", "Estimate", "Audit", "Rule", "Factor", "Discovery", "Propagation", "Target"} <= names
    assert {"Chip", "Checkpointer", "AutoSharded", "TrainConfig", "FixedError", "DoesNotFitError"} <= names


def test_half_built_objects_can_be_printed_and_copied():
    failures = []
    for name, cls in sorted(public_classes().items()):
        fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for count in {0, len(fields) // 2, max(len(fields) - 1, 0)}:
            half: Any = cls.__new__(cls)  # pyright: ignore[reportCallIssue]
            for field in fields[:count]:
                object.__setattr__(half, field, None)
            try:
                check(half)
            except Exception as error:  # collect all failures
                failures.append(f"{name} with {count} fields: {error!r}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["auto_shard", "plan", "read", "audit", "propagation", "discovery", "check", "rule",
                                  "target", "config", "workload"])  # fmt: skip
def test_whole_objects_can_be_printed_and_copied(name):
    for x in reached(samples()[name]):
        check(x, deep=name != "auto_shard")


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
