"""A plan's program as a function that is called like the user's function, for `Plan.jit`.

Under `jax.jit` with shardings of its arguments, a program takes positional arguments only. Here it also takes keyword
arguments. It checks that the arrays are those that were planned before JAX does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.lower.executable import NewSignature
from autoshard.sharding.lower.placement_differences import placement_differences
from autoshard.sharding.lower.separate_arrays import SeparateArrays, is_shared_memory_error, memory_kinds
from autoshard.sharding.lower.watched_program import WatchedProgram
from autoshard.sharding.program.argument_differences import differences_text, leaves_by_path
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.donated_arrays import donated_error, without_shared_memory
from autoshard.sharding.program.static_leaves import hide_static, reveal_static
from autoshard.sharding.program.tracing import TRACE_FLAGS, Traced


class PlannedCall:
    """A jitted program that takes its arguments as the user's function does."""

    def __init__(self, jitted: Any, traced: Traced, shardings: Sequence[Any]):
        self.jitted, self.traced = jitted, traced
        self.shardings = shardings  # of the flat inputs
        self.program = WatchedProgram(jitted, traced, shardings)
        self.__name__ = traced.name
        self.planned_args, self.planned_kwargs = jax.tree.unflatten(traced.in_tree, traced.in_avals)
        self.hides = traced.static_arguments or traced.static_results
        several = any(s.mesh.size > 1 for s in shardings)
        self.separate = SeparateArrays(needed=several)

    def __repr__(self) -> str:
        return f"Plan.jit of {getattr(self, '__name__', 'nothing yet')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        results = self._checked(self._run, args, kwargs)
        return reveal_static(results) if self.hides else results

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the program for these arguments, arrays or shapes, as `jax.jit(...).lower` does."""
        return self._checked(lambda leaves: self.jitted.lower(*self._jit_arguments(leaves)), args, kwargs)

    def _checked(self, run: Callable[[list[Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `run` on the leaves of the arguments.

        Raises:
            PlanError: the arguments have other structures, shapes, dtypes or places than the planned ones.
        """
        leaves = self._leaves(args, kwargs)
        try:
            return run(leaves)
        except NewSignature:
            raise self._mismatch_error(args, kwargs, leaves) from None
        except (ValueError, TypeError, AssertionError) as error:
            if misplaced := self._placement_differences(leaves):
                raise self._misplaced_error(misplaced) from error
            raise

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the arguments, in the order of the plan.

        Raises:
            PlanError: their structure is not the planned one, or an array was donated.
        """
        args, kwargs = self._as_planned(args, kwargs)
        if self.hides:
            args, kwargs = hide_static((args, kwargs), f"{self.__name__}: argument", self.traced.static_numbers, skip=1)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.traced.in_tree:
            raise self._mismatch_error(args, kwargs)
        if _compat.has_deleted(leaves):  # JAX crashes on them, or raises an error without their paths
            raise donated_error(self.__name__, self.traced.in_names, leaves)
        return leaves

    def _jit_arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        return self.traced.jit_arguments(*jax.tree.unflatten(self.traced.in_tree, leaves))

    def _run(self, leaves: list[Any]) -> Any:
        """Run the jitted program, with copies of donated arrays that share memory."""
        donated = self.traced.donated
        if _compat.under_trace():
            return self.jitted(*self._jit_arguments(leaves))
        if not self.program.is_compiled:
            leaves = without_shared_memory(leaves, donated)
            results = self.program(*self._jit_arguments(leaves))
        else:
            if donated and (distinct := self.separate.distinct(leaves, donated, self.memory_kinds)):
                leaves = distinct
            try:
                results = self.program(*self._jit_arguments(leaves))
            except (ValueError, RuntimeError) as error:
                if not is_shared_memory_error(error):
                    raise
                self.separate.needed = True
                leaves = without_shared_memory(leaves, donated)
                results = self.program(*self._jit_arguments(leaves))
        if donated:
            self.separate.learn(leaves, donated, results)
        return results

    @functools.cached_property
    def memory_kinds(self) -> dict[Hashable, list[int]]:
        """The indices of the flat inputs of each kind of memory."""
        return memory_kinds(self.traced.in_avals, self.shardings)

    def _as_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass each argument as it was planned, by position or by keyword."""
        names, count = self.traced.arguments, len(self.planned_args)
        if kwargs.keys() == self.planned_kwargs.keys() or not names:
            return args, kwargs
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or len(named) < len(args) + len(kwargs) or any(n not in named for n in names[:count]):
            return args, kwargs  # `_arguments` raises
        positional = tuple(named.pop(name) for name in names[:count])
        return positional, named

    def _mismatch_error(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any] | None = None
    ) -> PlanError:
        """The error about arguments that are not as planned. `leaves` are given if their structure is as planned."""
        planned = dict(zip(self.traced.in_names, self.traced.in_avals, strict=True))
        given = leaves_by_path(self._as_planned(args, kwargs))
        different = differences_text(planned, {named_path(p, self.traced.arguments): x for p, x in given.items()})
        # Memory kinds are a part of the signature.
        if not different and leaves is not None and (misplaced := self._placement_differences(leaves)):
            return self._misplaced_error(misplaced)
        problem = f"the arguments are not those of the plan: {different}" if different else (
            f"the arguments have another structure than those of the plan, or JAX another setting of "
            f"{', '.join(TRACE_FLAGS)}"
        )  # fmt: skip
        return PlanError(
            f"{self.__name__}: {problem}. Plan again with these arguments, or pass those that were planned"
        )

    def _placement_differences(self, leaves: Sequence[Any]) -> str:
        return placement_differences(self.traced.in_names, leaves, self.shardings)

    def _misplaced_error(self, different: str) -> PlanError:
        return PlanError(
            f"{self.__name__}: {different}. Move the arguments with jax.device_put(arguments, plan.in_shardings()), or "
            "call the function under auto_shard, which takes arrays from anywhere"
        )
