"""`autoshard plan MODULE:FUNCTION`: the arguments of a plan of the user's own step."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.commands.rules_coverage import example_of
from autoshard.errors import ConfigError

# Options that change a named model. The user's own step sets these in its code.
_OF_MODELS = {"batch_size": "--batch-size", "context": "--context", "remat": "--remat", "set": "--set"}


def is_own_step(model: str) -> bool:
    """Whether the text names a function, not a model or a folder."""
    return ":" in model and not Path(model).exists()


def own_step(
    given: argparse.Namespace, arguments: Sequence[str]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the step that `MODULE:FUNCTION` names, its arguments, and the options that only such a plan has.

    Args:
        given: the parsed command line.
        arguments: the command line. It tells an option that was given its default value from one that was left out.

    Raises:
        ConfigError: the function cannot be imported or called, it returns something else, or an option is for named
            models only.
    """
    refused = [option for name, option in _OF_MODELS.items() if getattr(given, name) not in (None, [])]
    if refused:
        raise ConfigError(
            f"plan {given.model!r}: {', '.join(refused)} {'is' if len(refused) == 1 else 'are'} for named models. The "
            "shapes and the code of your own step are those of your function"
        )
    step, values = example_of(given.model, "plan")
    named = {argument.partition("=")[0] for argument in arguments}
    options = {name: getattr(given, name) or "auto" for name in ("microbatches", "offload") if f"--{name}" in named}
    return step, values, options | ({"allow_numerics": True} if given.allow_numerics else {})
