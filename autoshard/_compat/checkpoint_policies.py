"""Reads which values a policy of `jax.checkpoint` moves to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax._src.ad_checkpoint import name_p
from jax._src.interpreters.partial_eval import Offloadable

_OFFLOADED = "names_which_can_be_offloaded"  # the argument of JAX's policies


def offloaded_names(policy: Callable[..., Any] | None, names: Iterable[str]) -> set[str]:
    """Returns the names whose values a policy of `jax.checkpoint` moves to the host.

    JAX's own policies keep the names that they were made with, so those that no value has are found too. Any policy is
    asked about the given names.
    """
    if policy is None:
        return set()
    return {name for name in names if _offloads(policy, name)} | _kept_names(policy)


def _offloads(policy: Callable[..., Any], name: str) -> bool:
    try:
        return isinstance(policy(name_p, name=name), Offloadable)
    except Exception:  # noqa: BLE001 a user's policy may need more than a name: it then offloads by other rules
        return False


def _kept_names(policy: Callable[..., Any]) -> set[str]:
    """The names with which a policy, or one that it calls, was made."""
    code, cells = getattr(policy, "__code__", None), getattr(policy, "__closure__", None) or ()
    found: set[str] = set()
    for variable, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # the variable is not set
            continue
        if variable == _OFFLOADED:
            found |= {name for name in (value if isinstance(value, Iterable) else ()) if isinstance(name, str)}
        elif callable(value) and value is not policy and getattr(value, "__closure__", None):
            found |= _kept_names(value)
    return found
