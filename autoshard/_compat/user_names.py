"""The names that JAX's errors use for a traced function and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src import api_util


def user_names(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], paths: Sequence[str] | None = None
) -> Any:
    """Returns what JAX's errors call a function, its place and its array arguments, as under `jax.jit(fn)`.

    Args:
        fn: the user's function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        paths: paths of the array arguments in the user's arguments, `0/up/kernel`, if `args` are others, as for nnx
            objects.
    """
    found = api_util.debug_info("auto_shard", fn, args, dict(kwargs))
    if paths is None:
        return found
    signature = api_util.fun_signature(fn)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in positional] if signature else []
    return found._replace(arg_names=tuple(_name(path, names) for path in paths))


def _name(path: str, positional: Sequence[str]) -> str:
    """`model.up.kernel` for `0/up/kernel`."""
    argument, *words = path.split("/")
    if argument.isdigit():
        place = int(argument)
        argument = positional[place] if place < len(positional) else f"args[{place}]"
    return argument + "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in words)


def with_names(fn: Any, names: Any) -> Any:
    """Returns `fn`, which takes the same arrays in the same order, with `names` from `user_names` in JAX's errors."""
    fn.__fun_debug_info__ = names
    return fn
