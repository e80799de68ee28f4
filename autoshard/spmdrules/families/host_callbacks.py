"""Operators for the host or the compiler: prints, callbacks without results, sinks, platform queries."""

from __future__ import annotations

from typing import Any

from autoshard._compat import primitive, primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import RuleBuilder


@rule(*primitives("debug_callback", "debug_print"))
def debug_callback(*xs: Any, partitioned: bool = False, **_: Any) -> Rule:
    """``w w1 ->; whole w w1``: gathered arrays go to one host; if `partitioned`, each shard goes to its own host.

    https://docs.jax.dev/en/latest/_autosummary/jax.debug.callback.html
    """
    build = RuleBuilder()
    if partitioned:
        return build.rule([build.dims(x.shape) for x in xs], [])
    return build.rule([tuple(map(build.whole, x.shape)) for x in xs], [])


@rule(primitive("inspect_sharding"))
def inspect_sharding(x: Any, **_: Any) -> Rule:
    """``a b ->``: reports the sharding of an array to the host.

    https://docs.jax.dev/en/latest/_autosummary/jax.debug.inspect_array_sharding.html
    """
    build = RuleBuilder()
    return build.rule([build.dims(x.shape)], [], body=lambda shard, x: [])


@rule(primitive("dce_sink"))
def dce_sink(x: Any, **_: Any) -> Rule:
    """``a b ->``: keeps the computation of an unused array.

    https://docs.jax.dev/en/latest/jax.lax.html
    """
    build = RuleBuilder()
    return build.rule([build.dims(x.shape)], [])


@rule(primitive("platform_index"))
def platform_index(**_: Any) -> Rule:
    """``-> []``: the index of the platform that the program is compiled for.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.platform_dependent.html
    """
    return RuleBuilder().rule([], [()])
