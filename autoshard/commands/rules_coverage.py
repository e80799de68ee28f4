"""`autoshard rules --coverage`: list the primitives of a user's function that have no rule."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard._shown import shown
from autoshard.errors import ConfigError


@shown
@dataclass(frozen=True)
class Coverage:
    """The primitives of a function, and those of them that have no rule.

    Attributes:
        target: the function as the user named it, `module:function`.
        primitives: number of different primitives.
        missing: source lines by primitive without a rule, one line for each use.
    """

    target: str
    primitives: int
    missing: dict[str, list[str]]

    def __str__(self) -> str:
        if not self.missing:
            return f"{self.target}: {self.primitives} primitives, each with a rule"
        head = f"{self.target}: {self.primitives} primitives, {len(self.missing)} without a rule (replicated in a plan)"
        return "\n".join([head, *(self._describe(name, lines) for name, lines in sorted(self.missing.items()))])

    def _describe(self, name: str, lines: list[str]) -> str:
        from autoshard.spmdrules.reference.coverage import EXEMPT, NO_RULE

        reason = NO_RULE.get(name) or EXEMPT.get(name, "")
        counted = {line or "(line unknown)": lines.count(line) for line in lines}
        where = [f"    {line}" + (f" x {count}" if count > 1 else "") for line, count in counted.items()]
        return "\n".join([f"  {name}: {reason}" if reason else f"  {name}", *where])


def coverage_of(target: str) -> Coverage:
    """Trace a function and find its primitives without a rule.

    Args:
        target: `module:function` of a function that takes no arguments and returns `(fn, args)`; `fn(*args)` is traced.

    Raises:
        ConfigError: the function cannot be imported, called or traced.
    """
    given = f"--coverage {target!r}"
    fn, args = example_of(target, "--coverage")
    import jax

    from autoshard.spmdrules.ir import program

    closed = _attempt(given, "the function cannot be traced", lambda: jax.make_jaxpr(fn)(*args))
    found = program.build(closed)
    return Coverage(target, len({op.name for op in found.ops()}), found.unknown)


def example_of(target: str, option: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Call a function of the user that returns a function and its arguments.

    Args:
        target: `module:function`, which takes no arguments and returns `(fn, args)`. The working directory is searched
            first.
        option: what `target` was given for, for messages.

    Raises:
        ConfigError: the function cannot be imported or called, or returns something else.
    """
    given = f"{option} {target!r}"
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py"):
        dotted = ".".join(Path(module_name).with_suffix("").parts)
        raise ConfigError(f"{given}: give the module, not its file: {dotted}:{name or 'function'}")
    if not module_name or not name:
        raise ConfigError(f"{given}: write module:function, such as train:example")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _attempt(
        given,
        f"module '{module_name}' cannot be imported",
        lambda: importlib.import_module(module_name),
        ". Modules are searched in the working directory, then as Python does",
    )
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(f"{given}: module '{module_name}' has no function '{name}'")
    made = _attempt(
        given,
        f"'{name}' cannot be called without arguments",
        function,
        ". Name a function that returns (fn, args), a function and the tuple of its arguments",
    )
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise ConfigError(f"{given}: '{name}' returns {_type_text(made)}; it should return (fn, args), a "
                          "function and the tuple of its arguments")  # fmt: skip
    return made[0], tuple(made[1])


def _attempt(given: str, failure: str, action: Callable[[], Any], remedy: str = "") -> Any:
    """Run an action on the user's code; any error becomes a one-line `ConfigError`, from `failure` to `remedy`."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines()
        raise ConfigError(
            f"{given}: {failure}: {type(error).__name__}: {lines[0] if lines else 'no message'}{remedy}"
        ) from error


def _type_text(value: Any) -> str:
    kind = type(value).__name__
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else kind
