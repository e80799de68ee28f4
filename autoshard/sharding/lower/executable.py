"""A plan and its function: the annotated program under `jax.jit`, for the arguments that were planned for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.lowering import Lowering
from autoshard.sharding.machines.chips import Options
from autoshard.sharding.machines.device_mesh import device_mesh
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.program.tracing import Traced, trace_flags


@shown
@dataclass(eq=False)
class Executable:
    """A plan's function: its trace, and the layout that the plan means for it.

    Attributes:
        plan: the plan.
        traced: the function.
        layout: the sharding of every value of its program.
        flops_per_byte: of the target's chip: how much compute a byte on the wire is worth.
        mesh: the mesh of devices that was given to plan on; None where none was.
        wrap: puts the arguments' objects (nnx) around the pure function.
    """

    plan: ShardingPlan
    traced: Traced
    layout: Layout
    flops_per_byte: float
    mesh: Any = None
    wrap: Callable[[Any], Any] = lambda jitted: jitted

    def __deepcopy__(self, memo: Any) -> Executable:  # a trace cannot be copied: it is shared
        return self

    def mesh_over(self, devices: Any) -> Any:
        """The plan's mesh over these devices; those that the plan was made on, if none are given."""
        if devices is None and self.mesh is not None:
            return self.mesh
        plan = self.plan
        return device_mesh(
            dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)), devices, plan.device_order
        )

    def run(self, mesh: Any) -> Callable[..., list[Any]]:
        """The annotated program over flat inputs."""
        return Lowering(self.layout, _compat.all_axes_auto(mesh), self.flops_per_byte)

    def jit(self, devices: Any = None) -> Callable[..., Any]:
        """See `Plan.jit`; of pure arguments, without `wrap`."""
        plan, mesh = self.plan, self.mesh_over(devices)
        ins, outs = plan.shardings(mesh)
        lowered, traced = self.run(mesh), self.traced
        in_args, in_kwargs = jax.tree.unflatten(traced.in_tree, ins)

        def run(*args: Any) -> Any:
            leaves = traced.in_tree.flatten_up_to((args[: len(in_args)], args[-1] if in_kwargs else {}))
            check_signature(traced, leaves)
            return jax.tree.unflatten(traced.out_tree, lowered(*leaves))

        run.__name__ = traced.name
        donated = sorted({int(traced.owners[i]) for i in traced.donated})
        device = mesh.devices.flat[0]
        options = accepted(
            plan.compiler_options.get("cuda" if device.platform == "gpu" else device.platform, {}), device
        )
        return jax.jit(
            run,
            compiler_options=options or None,
            in_shardings=(*in_args, in_kwargs) if in_kwargs else in_args,
            out_shardings=jax.tree.unflatten(traced.out_tree, outs),
            donate_argnums=donated,
        )


def accepted(options: Options, device: Any) -> dict[str, str | bool | int | float]:
    """The compiler options that may be given here: none inside another jit, and none that the compiler does not know.

    Warns of those that are left out.
    """
    if not options or _compat.under_trace():
        return {}
    able, refused = {}, []
    for name, value in options.items():
        with jax.default_device(device):
            try:
                jax.jit(lambda: jax.numpy.zeros(()), compiler_options={name: value}).lower().compile()
                able[name] = value
            except jax.errors.JaxRuntimeError:  # the compiler's word for an option that it does not have
                refused.append(name)
    if refused:
        warnings.warn(
            f"the compiler for {device.device_kind} does not know {', '.join(refused)}: left out of the plan's options",
            AutoshardWarning,
            stacklevel=4,
        )
    return able


class NewSignature(Exception):
    """A planned function was called with arguments that it was not planned for."""


def check_signature(traced: Traced, leaves: Sequence[Any]) -> None:
    """Raises `NewSignature` if the arguments' shapes or dtypes are not those of the trace."""
    for leaf, aval in zip(leaves, traced.in_avals, strict=True):
        if leaf.shape != aval.shape or leaf.dtype != aval.dtype or leaf.aval.weak_type != aval.weak_type:
            raise NewSignature
    if trace_flags() != traced.flags:
        raise NewSignature
