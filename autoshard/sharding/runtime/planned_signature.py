"""One planned signature of a function: its plan, the jitted program, and how arguments get to their shardings."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.lower.executable import lower_as_planned
from autoshard.sharding.lower.separate_arrays import memory_kinds
from autoshard.sharding.lower.watched_program import WatchedProgram
from autoshard.sharding.machines.targets import is_made_of, target_for
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.program.static_leaves import reveal_static
from autoshard.sharding.runtime.process_agreement import check_same_plan


class PlannedSignature:
    """One planned signature: the plan, the jitted function, and the shardings of its inputs."""

    def __init__(self, bound: BoundPlan, hides_warnings: bool = False):
        self.hides_warnings = hides_warnings  # about donated buffers
        self.bound, self.plan, self.traced = bound, bound.plan, bound.traced
        self.state = frozenset(i for i, _ in self.traced.state)
        self.inspected = False  # whether a call went through `inspect_and_call`
        self.on_mesh: frozenset[int] = frozenset()  # the inputs that the last such call passed with the plan's mesh

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of devices. Only a call needs it: the machine of a plan need not be attached."""
        return self.bound.executable.mesh_over(None)

    @functools.cached_property
    def jitted(self) -> Any:
        """The annotated function under `jax.jit`."""
        executable = self.bound.executable
        return executable.jit(self.mesh if executable.mesh is None else None)

    @functools.cached_property
    def program(self) -> WatchedProgram:
        """The jitted function, with the compiler's remarks reported in warnings."""
        return WatchedProgram(self.jitted, self.traced, self.in_shardings)

    def run(self, *arguments: Any) -> Any:
        """Call the jitted function for the first time, which compiles it. Later calls go to `program` directly."""
        with warnings.catch_warnings():
            if self.hides_warnings:
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            results = self.program(*arguments)
        self.run = self.program
        return results

    def lower(self) -> Any:
        """Lower the jitted function for the shapes of the signature. After a call, JAX has the program of that call."""
        return lower_as_planned(self.jitted, self.traced, self.in_shardings, self.on_mesh)

    def compiled(self) -> Any:
        """Return the program that calls run, as `jax.jit(...).lower(...).compile()` does. JAX has it after a call."""
        pairs = zip(self.traced.in_avals, self.in_shardings, strict=True)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=s) for x, s in pairs]
        arguments = self.traced.jit_arguments(*jax.tree.unflatten(self.traced.in_tree, shapes))
        return self.jitted.lower(*arguments).compile()

    @functools.cached_property
    def in_shardings(self) -> list[Any]:
        """The sharding of each flat input."""
        return self.plan.shardings(self.mesh)[0]

    @functools.cached_property
    def memory_kinds(self) -> dict[Hashable, list[int]]:
        """The indices of the flat inputs of each kind of memory."""
        return memory_kinds(self.traced.in_avals, self.in_shardings)

    @functools.cache  # noqa: B019  an entry lives as long as its function
    def check_target(self) -> None:
        """Check that the target that the user named is the machine that the plan is about to run on.

        Raises:
            PlanError: it is another machine.
        """
        target, mesh = self.bound.problem.machine.target, self.bound.executable.mesh
        devices = jax.devices() if mesh is None else list(mesh.devices.flat)  # perhaps fewer than the plan needs
        if self.bound.problem.target_given and not is_made_of(target, devices):
            here = target_for(devices, len(devices)).name
            enough = math.prod(self.plan.mesh.axis_sizes) <= len(devices)
            others = (
                f", or use .plan(...).jit(), which runs the plan for '{target.name}' here. .plan(...) and .lower(...) "
                "work anywhere"
            )
            raise PlanError(
                f"auto_shard({self.traced.name}): the plan is for target '{target.name}', but the devices are '{here}' "
                f"({devices[0].device_kind}). To run on these, leave out target="
                + (others if enough else ". .plan(...) and its .verify() need no devices")
            )

    @functools.cache  # noqa: B019  an entry lives as long as its function
    def check_agreement(self) -> None:
        """Check that all processes are about to run the same plan on these devices.

        Raises:
            PlanError: another process has another plan.
        """
        if len({d.process_index for d in self.mesh.devices.flat}) > 1:
            check_same_plan(self.plan)

    def misplaced(self, leaves: Sequence[Any]) -> list[int]:
        """Return the indices of inputs whose sharding is not the planned one, or that are on another mesh."""
        pairs = zip(leaves, self.in_shardings, strict=True)
        return [i for i, (x, s) in enumerate(pairs) if isinstance(x, jax.Array) and _is_misplaced(x, s)]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves, with misplaced ones moved to their planned shardings.

        State is always moved. Of the other inputs only committed arrays are moved; jit moves uncommitted ones itself.
        """
        out = list(leaves)
        for i in self.misplaced(leaves):
            if i in self.state or getattr(leaves[i], "committed", True):
                out[i] = jax.device_put(leaves[i], self.in_shardings[i])
        if self.traced.explicit_mesh is None:  # `call` changes the types of all others
            self.on_mesh = frozenset(i for i, x in enumerate(out) if _has_mesh(x))
        return out

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the jitted function with arguments of the planned signature, with their static leaves hidden."""
        if self.traced.explicit_mesh is not None:
            args, kwargs = _compat.on_mesh((args, kwargs), self.mesh.abstract_mesh)
        return self.run(*self.traced.jit_arguments(args, kwargs)) if kwargs else self.run(*args)

    def revealed(self, results: Any) -> Any:
        """The results of `call` with their static leaves, on the user's mesh if that has Explicit axes."""
        if self.traced.explicit_mesh is not None:
            results = _compat.on_mesh(results, self.traced.explicit_mesh)
        return reveal_static(results) if self.traced.static_results else results


def _has_mesh(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, jax.sharding.NamedSharding)


def _is_misplaced(x: jax.Array, planned: Any) -> bool:
    if not x.sharding.is_equivalent_to(planned, x.ndim):
        return True
    mesh = getattr(x.sharding, "mesh", None)  # jit traces with the argument's own mesh, even if the shards agree
    return mesh is not None and mesh != planned.mesh
