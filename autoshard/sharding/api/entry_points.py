"""`auto_shard` and `plan`: what a user calls. A function or a Flax module class, planned and run sharded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard._typed import shortly
from autoshard.errors import PlanError
from autoshard.sharding.api.auto_sharded import AutoSharded
from autoshard.sharding.api.flax_modules import shard_class
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import MeshLike
from autoshard.sharding.planner.planning import PlanLike
from autoshard.sharding.planner.variants import Variants
from autoshard.sharding.runtime.plan_options import checked_options


def auto_shard(
    obj: Any = None,
    /,
    *,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Variants | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    example: tuple[Any, ...] | None = None,
    verify: int = 0,
    measure: int = 0,
    strict: bool = False,
) -> Any:
    """Makes a function or a Flax module class run sharded over a mesh, by a plan that nobody has to write.

    Args:
        obj: a function of pytrees (nnx modules and optimizers among them), or an nnx or linen module class.
        mesh: where to run: a `Mesh`, sizes such as `{"data": 4, "model": 2}`, or None: all attached devices.
        target: a machine to plan for; default: the attached one.
        memory_limit_bytes: memory that one device may use.
        fixed: shardings that the plan must keep, see `autoshard.plan`.
        plan: a plan to use: "fsdp:8", a table, or a `Plan`.
        variants: static keywords to choose among, see `autoshard.plan`.
        donate_argnums: arguments whose buffers the results may take.
        static_argnums: arguments that are not arrays.
        example: arguments (or their shapes) to plan from before the first call; of an nnx class, the arguments of a
            call, which `.sharded` then need not be given.
        verify: see `autoshard.plan`.
        measure: see `autoshard.plan`.
        strict: an operator without a rule is an error.

    Returns:
        The function with `.plan`, `.lower` and `.init`, or the class with `.autoshard_plan`; `__wrapped__` is kept.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from autoshard import auto_shard
        >>> @auto_shard
        ... def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
        >>> float(loss(jnp.ones((16, 8)), jnp.ones((32, 16)))) > 0
        True
    """
    options = checked_options(verify, measure, mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes,
                              fixed=fixed, plan=plan, strict=strict)  # fmt: skip
    if not isinstance(example, tuple | list | None):
        raise PlanError(f"example is {shortly(example)}; give the arguments as a tuple, such as (state, batch)")
    if obj is None:
        return functools.partial(auto_shard, **options, variants=variants, donate_argnums=donate_argnums,
                                 static_argnums=static_argnums, example=example)  # fmt: skip
    if inspect.isclass(obj):
        given = dict(variants=variants, donate_argnums=donate_argnums, static_argnums=static_argnums)
        return shard_class(obj, options, example, [k for k, v in given.items() if v is not None and v not in ((), [])])
    return AutoSharded(obj, options, variants, donate_argnums, static_argnums, example)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Variants | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: int = 0,
    measure: int = 0,
    strict: bool = False,
    **kwargs: Any,
) -> Plan:
    """Plans how to shard a function.

    Args:
        fn: a function of pytrees of arrays.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s: nothing is computed.
        mesh: a `Mesh`, an `AbstractMesh`, sizes such as `{"data": 4, "model": 2}`, or None: choose.
        target: a machine, such as "v5p:4x4x4"; default: the attached devices.
        memory_limit_bytes: memory that one device may use; default: what the machine has.
        fixed: `{path glob: PartitionSpec}`, or `{path glob: names of logical axes}`; a path goes before patterns.
            Without a mesh, the plans are searched whose mesh has the axes that the specs name.
        plan: ask for a plan: "fsdp:8 tp:4 seq", `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`, or a `Plan`.
        variants: `{static keyword: values}`, or a function from what became of the variants so far (`Attempt`s, at
            first none) to the keywords to try next: the best of them all is planned.
        donate_argnums: arguments whose buffers the results may take.
        static_argnums: arguments that are not arrays.
        verify: how many of the best plans to compile for the target, to keep the one whose program is the fastest. From
            two on up to two more are compiled that by the estimate take up to a quarter and up to half more memory than
            there is, if they would be faster than all that take less: XLA computes again what does not fit.
        measure: how many of the best plans to run for some steps on the attached devices, to keep the fastest. Values
            are made up; each plan has the devices' memory for itself. Which wins may differ from run to run. Not
            measured are programs with side effects (`jax.debug.print`, `io_callback`) and with loops whose end depends
            on values: the best by the estimate is kept, and a note of the plan says why. A plan that fails to compile
            or run (4-bit integers as inputs do) is left out, with a note.
        strict: a primitive without a rule is an error instead of a warning.
        **kwargs: arguments by keyword.

    Returns:
        The plan, bound to `fn`.

    Raises:
        PlanError: the request cannot be read, or nothing fits.

    Example:
        >>> import jax, autoshard
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> w = jax.ShapeDtypeStruct((32, 16), "float32")
        >>> autoshard.plan(lambda w, x: x @ w, w, x, target="cpu:8").mesh.size
        8
    """
    options = checked_options(verify, measure, mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes,
                              fixed=fixed, plan=plan, strict=strict)  # fmt: skip
    return AutoSharded(fn, options, variants, donate_argnums, static_argnums).plan(*args, **kwargs)
