"""Checks of arguments before anything is read or written."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autoshard._shown import shown
from autoshard._typed import short_repr
from autoshard.ckpt.store.manifest import as_json, metrics_as_json
from autoshard.errors import CheckpointError


@shown
class SaveArguments(NamedTuple):
    """The arguments of `Checkpointer.save` other than the state, as JSON values."""

    config: dict[str, Any]
    metrics: dict[str, float]
    plan: Any
    expert_dims: Mapping[str, int]


def save_arguments(config: Any, metrics: Any, plan: Any, expert_dims: Any) -> SaveArguments:
    """Check the arguments of `Checkpointer.save`, each of which may be None.

    Raises:
        CheckpointError: an argument has the wrong type or cannot be written as JSON.
    """
    config, metrics, expert_dims = ({} if one is None else one for one in (config, metrics, expert_dims))
    errors = mapping_errors("config", config, "{'model': {'width': 64}}")
    errors += mapping_errors("metrics", metrics, "{'val_loss': 1.9}")
    raise_errors(errors + dim_errors("expert_dims", expert_dims))
    return SaveArguments(as_json(config, "config"), metrics_as_json(metrics), plan_json(plan), expert_dims)


def step_number(step: Any) -> int:
    """Return the number of a step as an int.

    Raises:
        CheckpointError: it is not an integer, or negative.
    """
    if not is_integer(step) or step.__index__() < 0:
        hint = " The state comes second: save(step, state), restore(step, like=state)."
        more = hint if isinstance(step, (Mapping, list, tuple)) else ""
        raise CheckpointError(f"step is {short_repr(step)}; it must be an integer of at least 0.{more}")
    return step.__index__()


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python, NumPy or JAX. Booleans are not."""
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        value.__index__()
    except (AttributeError, TypeError):  # an array of several elements has the method, but it raises
        return False
    return True


def mapping_errors(name: str, value: Any, example: str) -> list[str]:
    """Return a list with an error if an argument is not a dict, else an empty list."""
    return [] if isinstance(value, Mapping) else [f"{name} is {short_repr(value)}; it must be a dict such as {example}"]


def dim_errors(name: str, value: Any) -> list[str]:
    """Return the errors of an argument that must be a dict of path patterns -> dimension."""
    if not isinstance(value, Mapping):
        return mapping_errors(name, value, "{'*/experts/w_*': 0}")
    wrong = {one: dim for one, dim in value.items() if not isinstance(one, str) or not is_integer(dim)}
    what = "its keys must be strings (path patterns), and its values integers (dimensions)"
    return [f"{name} is {wrong!r}; {what}"] if wrong else []


def expert_errors(value: Any) -> list[str]:
    """Return the errors of an argument that must be a list of expert numbers or None."""
    if value is None or (isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)):
        return []
    return [f"experts is {value!r}; it must be a list of numbers such as [0, 3]"]


def raise_errors(errors: Iterable[str]) -> None:
    """Raise one error for all errors, if there are any.

    Raises:
        CheckpointError: naming all of them.
    """
    text = "; ".join(errors)
    if text:
        raise CheckpointError(f"{text}.")


def plan_json(plan: Any) -> Any:
    """Return a plan, or its JSON text, as JSON values.

    Raises:
        CheckpointError: the text is not JSON, or the plan cannot be written as JSON.
    """
    text = plan.to_json() if hasattr(plan, "to_json") else plan
    return _parsed_plan(text) if isinstance(text, str) else as_json(text, "plan")


@functools.lru_cache(maxsize=4)  # a run saves one plan with every step
def _parsed_plan(text: str) -> Any:
    try:
        plan = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the plan is not JSON ({error}): pass a Plan, or the result of its to_json.") from error
    return as_json(plan, "plan")
