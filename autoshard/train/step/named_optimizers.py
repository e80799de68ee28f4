"""Optimizers of optax and schedules of the learning rate, by name, and those of users."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from optax import contrib

from autoshard._typed import read_value
from autoshard.errors import ConfigError
from autoshard.train.user_functions import is_function, load_function


def schedule_free(
    learning_rate: optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_lr_power: float = 2.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Make AdamW without first moment whose iterates are averaged (Defazio et al., arXiv:2405.15682)."""
    base = optax.adamw(learning_rate, b1=0.0, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
    return contrib.schedule_free(base, learning_rate, b1=b1, weight_lr_power=weight_lr_power)


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adafactor": optax.adafactor,
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "adan": optax.adan,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "muon": contrib.muon,
    "nadamw": optax.nadamw,
    "rmsprop": optax.rmsprop,
    "schedule_free": schedule_free,
    "sgd": optax.sgd,
}
"""Functions of optax whose updates depend only on gradients and parameters."""


def _wsd(peak: float, last: float, steps: int, share: float) -> optax.Schedule:
    decay = max(round(share * steps), 1)
    return optax.linear_schedule(peak, last, decay, transition_begin=steps - decay)


SCHEDULES: Mapping[str, Callable[[float, float, int, float], optax.Schedule]] = {
    "cosine": lambda peak, last, steps, share: optax.cosine_decay_schedule(peak, steps, last / peak if peak else 0.0),
    "linear": lambda peak, last, steps, share: optax.linear_schedule(peak, last, steps),
    "wsd": _wsd,
    "constant": lambda peak, last, steps, share: optax.constant_schedule(peak),
}
"""Functions that make the schedule after the warm-up. Their arguments are the peak rate, the last rate, the number of
steps, and the share of the steps in which the rate decays."""


def check_optimizer(name: str, arguments: Sequence[str]) -> None:
    """Check the name of an optimizer and the arguments that it is given.

    Raises:
        ConfigError: The name is unknown, or an argument is unknown or malformed.
    """
    if not is_function(name):
        _check_known("optimizer.name", name, OPTIMIZERS)
    accepted = None if is_function(name) else _parameters(OPTIMIZERS[name])
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"optimizer.arguments {argument!r}: write NAME=VALUE, such as b1=0.95")
        if key == "learning_rate":
            raise ConfigError("optimizer.arguments learning_rate: give --optimizer.learning-rate and .schedule")
        if accepted is not None and key not in accepted:
            raise ConfigError(f"optimizer.arguments: {name} has no {key!r}; it has {', '.join(accepted)}")
        if accepted is not None:
            _check_value(f"optimizer.arguments {argument}", accepted[key], read_value(text))
        if (name, key) == ("schedule_free", "b1") and not 0 < read_value(text) < 1:
            raise ConfigError(f"optimizer.arguments {argument}: with schedule_free it must be above 0 and below 1")


def check_schedule(name: str) -> None:
    """Check the name of a schedule.

    Raises:
        ConfigError: The name is unknown.
    """
    if not is_function(name):
        _check_known("optimizer.schedule", name, SCHEDULES)


def takes(name: str, argument: str) -> bool:
    """Return whether an optimizer of `OPTIMIZERS` has an argument; False for a user's own."""
    return name in OPTIMIZERS and argument in _parameters(OPTIMIZERS[name])


def optimizer_by_name(
    name: str, schedule: optax.Schedule, arguments: Sequence[str], settings: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Make an optimizer.

    Args:
        name: A name of `OPTIMIZERS`, or package.module:function.
        schedule: The learning rate.
        arguments: Arguments of its function, as NAME=VALUE. Values are JSON, True, False, None, or text.
        settings: Further arguments. Those that the function does not have, or that `arguments` has too, are left out.
    """
    given = {key: read_value(text) for key, _, text in (argument.partition("=") for argument in arguments)}
    if is_function(name):
        return load_function(name, "--optimizer.name")(schedule, **given)
    parameters = _parameters(OPTIMIZERS[name])
    kept = {key: value for key, value in settings.items() if key in parameters}
    return OPTIMIZERS[name](schedule, **(kept | given))


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default values of a function's arguments, without the learning rate."""
    arguments = inspect.signature(function).parameters
    return {name: argument.default for name, argument in arguments.items() if name != "learning_rate"}


def _check_value(what: str, default: Any, value: Any) -> None:
    for kind, needed in ((bool, "true or false"), (int | float, "a number")):
        if isinstance(default, kind):
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
                raise ConfigError(f"{what}: it must be {needed}, such as {json.dumps(default)}")
            return


def _check_known(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}? Give" if close else "; give"
        raise ConfigError(f"{what} is {name!r}{hint} {', '.join(known)}, or package.module:function")
