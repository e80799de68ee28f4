"""A plan's program with its sharding constraints, under `jax.jit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from autoshard import _compat
from autoshard._shown import shown
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.lowering import Lowering
from autoshard.sharding.machines.chips import Chip, Options
from autoshard.sharding.machines.device_mesh import device_mesh
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.machines.options import with_needed
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.program.tracing import Traced, trace_flags


@shown
@dataclass(eq=False)
class Executable:
    """A plan with its traced function and the layout of the function's program.

    Attributes:
        plan: the plan.
        traced: the function.
        layout: the sharding of every value of its program.
        link_prices: what bytes cost on the links of the target.
        chip: the target's device.
        mesh: the mesh of devices that the user gave to the planner, if any.
        early: the parameters that are gathered one layer early (`StepCost.early`).
        overlap: the words of `overlap=`, if there are any.
        wrap: wraps the jitted pure function so that it takes and updates nnx objects.
    """

    plan: ShardingPlan
    traced: Traced
    layout: Layout
    link_prices: LinkPrices
    chip: Chip
    mesh: Any = None
    early: frozenset[tuple[int, int]] = frozenset()
    overlap: ModuleOverlap | None = None
    wrap: Callable[[Any], Any] = lambda jitted: jitted

    def __deepcopy__(self, memo: Any) -> Executable:  # a trace cannot be copied, so copies share it
        return self

    def mesh_over(self, devices: Any) -> Any:
        """Return the plan's mesh over these devices; for None, the user's mesh or one over the attached devices."""
        if devices is None and self.mesh is not None:
            return self.mesh
        plan = self.plan
        return device_mesh(
            dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)), devices, plan.device_order
        )

    def constrained_program(self, mesh: Any) -> Callable[..., list[Any]]:
        """Return the program with its sharding constraints, as a function from flat inputs to flat results."""
        lowering = Lowering(
            self.layout,
            _compat.all_axes_auto(mesh),
            self.link_prices,
            gather=self.plan.gather,
            early=self.early,
            overlap=self.overlap,
            tpu=self.chip if self._platform(mesh) == "tpu" else None,
        )
        return _compat.classic_scans()(lowering)

    def _platform(self, mesh: Any) -> str:
        """Return the platform of a mesh's devices; that of the plan's target if the mesh is abstract."""
        if isinstance(mesh, AbstractMesh):
            return find_target(self.plan.target).platform if self.plan.target else ""
        return mesh.devices.flat[0].platform

    def jit(self, devices: Any = None, weak: bool = False) -> Callable[..., Any]:
        """The program under `jax.jit`, for positional arguments: those of `Traced.jit_arguments`.

        Args:
            devices: see `Plan.jit`.
            weak: whether arrays may be weakly typed that were not when they were planned, or the reverse; cast them.

        Returns:
            A function of pure arguments, without `wrap`. It raises `NewSignature` for other arrays.
        """
        plan, mesh = self.plan, self.mesh_over(devices)
        ins, outs = plan.shardings(mesh)
        lowered, traced = self.constrained_program(mesh), self.traced
        in_args, in_kwargs = jax.tree.unflatten(traced.in_tree, ins)

        def run(*args: Any) -> Any:
            keywords = {name: x for mapping in args[len(in_args) :] for name, x in mapping.items()}
            leaves = traced.in_tree.flatten_up_to((args[: len(in_args)], keywords))
            if weak:
                leaves = [_with_weak_type_of(leaf, aval) for leaf, aval in zip(leaves, traced.in_avals, strict=True)]
            check_signature(traced, leaves)
            return jax.tree.unflatten(traced.out_tree, lowered(*leaves))

        run.__name__ = traced.name
        _compat.with_names(run, traced.user_names)
        owners = {int(traced.owners[i]) for i in traced.donated}
        arguments = traced.jit_arguments(in_args, in_kwargs)
        donated = sorted(owner if owner >= 0 else len(arguments) - 1 for owner in owners)  # keywords come last
        device = mesh.devices.flat[0]
        options = supported_options(
            plan.compiler_options.get("cuda" if device.platform == "gpu" else device.platform, {}), device
        )
        return jax.jit(
            run,
            compiler_options=options or None,
            in_shardings=arguments,
            out_shardings=jax.tree.unflatten(traced.out_tree, outs),
            donate_argnums=donated,
        )


def lower_as_planned(
    jitted: Any, traced: Traced, shardings: Sequence[Any], on_mesh: Collection[int] = frozenset()
) -> Any:
    """Lower the result of `Executable.jit` for the planned shapes and shardings of its flat inputs.

    Args:
        jitted: the program.
        traced: the function.
        shardings: the planned shardings of its flat inputs.
        on_mesh: the inputs whose types have the mesh. JAX compiles again for a call whose arguments have other types.
    """
    shapes = [
        _compat.planned_shape(aval, sharding, on_mesh=i in on_mesh)
        for i, (aval, sharding) in enumerate(zip(traced.in_avals, shardings, strict=True))
    ]
    return jitted.lower(*traced.jit_arguments(*jax.tree.unflatten(traced.in_tree, shapes)))


def supported_options(options: Options, device: Any) -> dict[str, str | bool | int | float]:
    """Return the options that the installed compiler knows, and warn about the others.

    An option that needs others is tried with these, and the result contains them.
    Under another trace the result is empty, because `jax.jit` does not accept compiler options there.
    """
    if not options or _compat.under_trace():
        return {}
    every, _ = with_needed(options)
    if _compiles(every, device):
        return dict(every)
    known: dict[str, str | bool | int | float] = {}
    for name, value in options.items():
        some, _ = with_needed({name: value})
        # What the user set takes precedence over what an option needs.
        some = {**some, **{other: options[other] for other in some if other in options}}
        if _compiles(some, device):
            known |= some
    unknown = [name for name in options if name not in known]
    if unknown:
        warnings.warn(
            f"the compiler for {device.device_kind} does not know the plan's options {', '.join(unknown)}: they are "
            "left out",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )
    return known


def _compiles(options: Options, device: Any) -> bool:
    """Whether a trivial program compiles under these options."""
    with jax.default_device(device):
        try:
            jax.jit(lambda: jax.numpy.zeros(()), compiler_options=dict(options)).lower().compile()
        except jax.errors.JaxRuntimeError:  # raised for an option that the compiler does not have
            return False
    return True


def _with_weak_type_of(leaf: Any, aval: Any) -> Any:
    if leaf.aval.weak_type == aval.weak_type or leaf.dtype != aval.dtype:
        return leaf
    return _compat.weakly_typed(leaf) if aval.weak_type else jax.lax.convert_element_type(leaf, aval.dtype)


class NewSignature(Exception):
    """A planned function was called with shapes, dtypes or JAX flags that differ from those of its plan."""


def check_signature(traced: Traced, leaves: Sequence[Any]) -> None:
    """Raise `NewSignature` if shapes, dtypes, memory kinds or JAX's flags are not those of the trace."""
    for leaf, aval in zip(leaves, traced.in_avals, strict=True):
        if leaf.shape != aval.shape or leaf.dtype != aval.dtype or jax.typeof(leaf).weak_type != aval.weak_type:
            raise NewSignature
        if _compat.is_on_host(leaf) != _compat.is_on_host(aval):
            raise NewSignature
    if trace_flags() != traced.flags:
        raise NewSignature
