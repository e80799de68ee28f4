"""What callers give, checked before anything is done with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.ckpt.store.manifest import plain
from autoshard.errors import CheckpointError


def step_number(step: Any) -> int:
    """The number of a step.

    Raises:
        CheckpointError: it is none.
    """
    if not is_integer(step) or step.__index__() < 0:
        raise CheckpointError(f"step={step!r}: a step is an integer, 0 or more.")
    return step.__index__()


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of Python, NumPy or JAX; True and False are none."""
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        value.__index__()
    except (AttributeError, TypeError):  # an array of several has the method
        return False
    return True


def no_mapping(name: str, value: Any, example: str) -> list[str]:
    """What is wrong with an argument that must be a dict, in a list; an empty one where it is a dict."""
    return [] if isinstance(value, Mapping) else [f"{name}={value!r} is no dict, as {name}={example} is"]


def no_dims(name: str, value: Any) -> list[str]:
    """The same of patterns of paths -> dimension."""
    if not isinstance(value, Mapping):
        return no_mapping(name, value, "{'*/experts/w_*': 0}")
    wrong = {one: dim for one, dim in value.items() if not isinstance(one, str) or not is_integer(dim)}
    return [f"{name}={wrong!r}: patterns of paths are texts, dimensions are integers"] if wrong else []


def no_experts(value: Any) -> list[str]:
    """The same of numbers of experts."""
    if value is None or (isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)):
        return []
    return [f"experts={value!r} is no list of numbers, as experts=[0, 3] is"]


def refuse(wrong: Iterable[str]) -> None:
    """Raises where something is wrong.

    Raises:
        CheckpointError: naming all of it.
    """
    text = "; ".join(wrong)
    if text:
        raise CheckpointError(f"{text}.")


def plan_json(plan: Any) -> Any:
    """A plan as JSON has it.

    Raises:
        CheckpointError: it is none.
    """
    if hasattr(plan, "to_json"):
        plan = plan.to_json()
    if isinstance(plan, str):
        try:
            plan = json.loads(plan)
        except ValueError as error:
            raise CheckpointError(f"the plan is no JSON ({error}): give a Plan, or what its to_json wrote.") from error
    return plain(plan, "plan")
