"""`auto_shard` and `plan`: plan a function or a Flax module class, and run it sharded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from autoshard._tracebacks import hides_own_frames
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.api.auto_sharded import AutoSharded
from autoshard.sharding.api.flax_modules import shard_class
from autoshard.sharding.api.jit_habits import check_jit_options, explains_jit_options
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import MeshLike
from autoshard.sharding.machines.option_requests import OptionRequest
from autoshard.sharding.plan.overlap_words import OverlapRequest
from autoshard.sharding.planner.planning import PlanLike
from autoshard.sharding.planner.variants import Variants
from autoshard.sharding.program.kernel_records import KernelWord
from autoshard.sharding.runtime.plan_options import checked_options


@hides_own_frames
@explains_jit_options
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
    offload: str | Sequence[str] | None = None,
    compiler_options: OptionRequest | None = None,
    gather: str | None = None,
    overlap: OverlapRequest | None = None,
    kernels: KernelWord | None = None,
    microbatches: int | str | None = None,
    schedule: str | None = None,
    allow_numerics: bool | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    example: tuple[Any, ...] | None = None,
    verify: int | Literal["auto", "schedule"] = 0,
    verify_timeout_s: float | None = None,
    measure: int = 0,
    strict: bool = False,
) -> Any:
    """Make a function or a Flax module class run sharded over a mesh, by an automatic plan.

    Args:
        obj: a function of pytrees, which may contain nnx modules and optimizers; or an nnx or linen module class.
            Leaves of its arguments and results that are neither arrays nor numbers, such as functions and text, are
            static: they are hashed and compared, and new values are planned again. In Equinox modules, and in all
            arguments of `equinox.filter_jit(...)`, numbers are static too.
        mesh: a `Mesh`, or sizes such as `{"data": 4, "model": 2}`; default: a mesh of all attached devices.
        target: a machine to plan for; default: the attached one.
        memory_limit_bytes: memory limit of one device.
        fixed: shardings that the plan must keep, see `autoshard.plan`.
        plan: a plan to use: "fsdp:8", a table, or a `Plan`. A `Plan` takes no other mesh, and no `fixed`,
            `memory_limit_bytes`, `verify` or `measure`.
        variants: static keywords to choose from, see `autoshard.plan`.
        offload: what waits in host memory, see `autoshard.plan`. `init` creates the optimizer's state there, and a call
            moves it there.
        compiler_options: options for XLA, see `autoshard.plan`.
        gather: the order in which stored parameters are gathered, see `autoshard.plan`.
        overlap: which collectives of which parameters may run beside compute, see `autoshard.plan`.
        kernels: whether kernels take the place of attention in the function, see `autoshard.plan`.
        microbatches: the number of parts of the batch over which sums are accumulated, see `autoshard.plan`.
        schedule: in which order the stages of a pipeline work, see `autoshard.plan`.
        allow_numerics: whether `microbatches` may change the results, see `autoshard.plan`.
        donate_argnums: arguments whose buffers the results may reuse.
        static_argnums: arguments that are not arrays.
        example: arguments (or their shapes) to plan from before the first call. For an nnx class: the default of
            `.sharded(example=...)`.
        verify: see `autoshard.plan`.
        verify_timeout_s: see `autoshard.plan`.
        measure: see `autoshard.plan`.
        strict: raise an error, instead of a warning, if a primitive has no rule.

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
                              fixed=fixed, plan=plan, offload=offload, compiler_options=compiler_options,
                              gather=gather, overlap=overlap, kernels=kernels, microbatches=microbatches,
                              schedule=schedule, allow_numerics=allow_numerics, verify_timeout_s=verify_timeout_s,
                              strict=strict)  # fmt: skip
    if not isinstance(example, tuple | list | None):
        raise PlanError(f"example is {short_repr(example)}; pass the arguments as a tuple, such as (state, batch)")
    if obj is None:
        # Keep None: beside a Plan it means the plan's own word, not the default.
        options |= {"offload": offload, "gather": gather, "overlap": overlap, "kernels": kernels,
                    "microbatches": microbatches, "schedule": schedule,
                    "allow_numerics": allow_numerics}  # fmt: skip
        return functools.partial(auto_shard, **options, variants=variants, donate_argnums=donate_argnums,
                                 static_argnums=static_argnums, example=example)  # fmt: skip
    if inspect.isclass(obj):
        word = None if options["kernels"] == "off" else options["kernels"]
        others = dict(variants=variants, offload=options["offload"] or None, kernels=word,
                      donate_argnums=donate_argnums, static_argnums=static_argnums)  # fmt: skip
        return shard_class(obj, options, example, [k for k, v in others.items() if v is not None and v not in ((), [])])
    return AutoSharded(obj, options, variants, donate_argnums, static_argnums, example)


@hides_own_frames
def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    variants: Variants | None = None,
    offload: str | Sequence[str] | None = None,
    compiler_options: OptionRequest | None = None,
    gather: str | None = None,
    overlap: OverlapRequest | None = None,
    kernels: KernelWord | None = None,
    microbatches: int | str | None = None,
    schedule: str | None = None,
    allow_numerics: bool | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: int | Literal["auto", "schedule"] = 0,
    verify_timeout_s: float | None = None,
    measure: int = 0,
    strict: bool = False,
    **kwargs: Any,
) -> Plan:
    """Plan how to shard a function.

    Args:
        fn: a function of pytrees.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s. Other leaves are static, as under `auto_shard`. Nothing
            is computed.
        mesh: a `Mesh`, an `AbstractMesh`, or sizes such as `{"data": 4, "model": 2}`; default: the search chooses.
        target: a machine, such as "v5p:4x4x4"; default: the attached devices.
        memory_limit_bytes: memory limit of one device; default: its capacity.
        fixed: `{path: PartitionSpec}`, or `{path: names of logical axes}`, where path is a path (`0/params/wq`), a
            glob (`*/wq`), or the end of a path (`wq`) that fits one input. Paths take precedence over globs. Without a
            mesh, only meshes that have the axes of these specs are searched.
        plan: a plan to use: "fsdp:8 tp:4 seq", `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`, or a `Plan`. A `Plan`
            takes no other mesh, and no `fixed`, `memory_limit_bytes`, `verify` or `measure`.
        variants: `{static keyword: values}`; all combinations are tried and the best is planned. Or a function from the
            `Attempt`s so far (at first none) to the keywords to try next.
        offload: what waits in host memory, without a change of `fn`: words joined by `+`, or a list of them. `residual`
            is the input of each layer of a scan over stacked layers. Other words are names that `fn` gives with
            `jax.ad_checkpoint.checkpoint_name`: the values with that name move, if the backward pass reads them. A glob
            (`blocks.*.residual`) selects several names. A slice (`residual@::2`) selects some of the values with a
            name, counted in the order in which the forward pass computes them. It cannot select iterations of a scan.
            `optimizer` is the state that only the update reads, such as moments. "none" moves nothing. "auto" plans
            without offload first. It keeps that plan if it fits, unless a plan with offload is estimated to be at least
            10 % faster. If it does not fit, "auto" takes the fastest plan that fits. If none fits, it takes the one
            that needs the least memory. By default, nothing moves, or what a given `Plan` moves.
        compiler_options: options for XLA, which take precedence over those that the planner chooses: a mapping
            `{option: value}`, the name of an option set such as "scoped-vmem", a list of these, or text in which `+`
            joins names and `option=value`. The estimate, `Plan.verify` and `Plan.jit` use them. An option that the
            installed compiler refuses is left out with a warning; `Plan.verify` names those that change nothing.
        gather: the order in which stored parameters are gathered. "auto", the default, leaves the order to the
            compiler, which may gather many of them early. If no plan fits that way and the layers are written out, the
            order is "sequential". With "prefetch", parameters are gathered while the layer before theirs computes: all
            parameters of written-out layers, but in a scan only those whose gathers the products of their own iteration
            would not hide. `Plan.notes` lists them. With "sequential", a device holds at most two gathered parameters
            of one stretch of code: one in use, and the next, which is gathered meanwhile. Each use has a gather of its
            own. In a pipeline, stages gather their layers either "once", before the first tick, and hold them until the
            last one, so that gradients are reduced once, too; or they "repeat" the gather of a layer whenever they run
            it. "auto" plans both and takes the faster one that fits the memory. Under a given `Plan`, its order is the
            default.
        overlap: which collectives may run beside compute, as a table `{path: {kind: "on" or "off"}}`, such as
            `{"experts/*": {"gather": "off"}}`, or as text, "experts/*:gather=off". A path names parameters as in
            `fixed`; a glob may also match the end of a path, and of several globs the last one counts. With `gather`
            or `reduce` "off", nothing runs beside the gathers of these parameters or the reductions of their gradients.
            With `gather` "on", their gathers may start early, even under `gather="sequential"`. With `matmul` "on", a
            product with them runs in parts, beside permutes that replace a gather of an operand or a sum of the result
            over one mesh axis; sums may then have another order. With `matmul` "off", the compiler does not split a
            product with them in this way. By default, the table is empty, which leaves everything to the compiler, or
            it is that of a given `Plan`. Reports then have a line for each module, and a note for each entry that
            changes nothing.
        kernels: "off" leaves attention as `fn` computes it. "auto" recognises attention by its dataflow, and on TPUs
            and NVIDIA GPUs grouped products (`jax.lax.ragged_dot`). It puts the kernel of the target's platform in
            their place; for attention, a proof on small arrays has to show that both compute the same. The bits of the
            results change. `Plan.kernels` lists what was replaced, and what was left and why. "require" makes it an
            error if something is left, or if there is nothing to replace. By default "off", or the word of a given
            `Plan`.
        microbatches: the number of parts of the batch. The step runs on one after the other, and what it sums over the
            batch, such as gradients, is accumulated, floats of 16 bits or fewer in float32. So activations take less
            memory. `fn` does not change, and its results are the same up to the order of sums. Microbatch m has the
            rows m, m + microbatches, ... "auto" plans with 1, 2, 4, ... and takes the first number that fits, or
            the next if it is clearly faster. By default 1, or the number of a given `Plan`. In a pipeline, "auto" is
            the default and begins with the number of stages. Between slices or hosts with slow links, a search without
            this option also tries pipelines.
        schedule: the order in which the stages of a pipeline work on the microbatches. It needs the word `pp:N` in the
            plan. With neither a plan nor a mesh, the search chooses the number of stages. "gpipe" runs all forward
            passes and then all backward passes. With "1f1b", a stage runs the backward pass of a microbatch as soon as
            it can, and holds the residuals of at most 2 N - 1 microbatches. "interleaved:V" is "1f1b" with V chunks of
            layers on each stage: stages are idle for 1 / V of the time, and values move V times as often. "zb" is
            "1f1b" with the gradients of weights computed apart. "ftb" is "gpipe", but a stage holds only its input for
            each microbatch, computes its layers again before the gradients, and then frees the input. "1f1b-inputs" is
            "1f1b" with such stages. By default "1f1b", or if it does not fit, "1f1b-inputs" or "ftb" if one of them
            does. A function without gradients has only forward passes.
        allow_numerics: whether `microbatches` may change the results. An operator of the loop that needs a sum over the
            whole batch, as a batch norm and the load-balance loss of experts do, is an error by default. With True it
            takes the sum over each microbatch, times the number of microbatches, and losses are averaged. The plan's
            notes name these lines.
        donate_argnums: arguments whose buffers the results may reuse.
        static_argnums: arguments that are not arrays.
        verify: number of best plans to compile for the target and to compare. The one with the fastest program is
            kept. With `verify >= 2`, also compiles the two fastest plans whose estimated peak exceeds the limit by at
            most 25 % and 50 %, if they are estimated to be faster. XLA rematerializes what does not fit. With "auto",
            compiles the fastest plans of different kinds (fsdp, tp, cp, ep, hybrids). It stops when no other kind can
            be faster than the best compiled plan, within the error of the estimate. The results are kept for the next
            plan of `fn`. On TPUs, plans are compared by their schedules, in seconds, and machine code is generated for
            the fastest alone, which takes minutes. On TPUs, "schedule" is like "auto" without machine code, and it
            schedules at least the chosen plan. If the compiler of the target is not installed, or rejects the target, a
            warning says so, and the estimate decides.
        verify_timeout_s: seconds for all compilations of "auto" and "schedule", by default 600. After this time,
            the best plan so far is chosen, and its notes name the kinds that are not settled.
        measure: number of best plans to run for some steps on the attached devices; the fastest is kept. Inputs have
            generated values, and one plan at a time is in memory. The winner may differ from run to run. Programs with
            side effects (`jax.debug.print`, `io_callback`), or with loops whose length depends on values, are not run:
            the plan with the best estimate is kept, with a note that gives the reason. A plan that fails to compile or
            run (for example with 4-bit integer inputs) is skipped, with a note.
        strict: raise an error, instead of a warning, if a primitive has no rule.
        **kwargs: arguments by keyword.

    Returns:
        The plan, bound to `fn`.

    Raises:
        PlanError: the request is invalid, `offload` has a word of which `fn` has no value, `compiler_options` names a
            set that the target does not have, `kernels="require"` cannot replace something, `microbatches` does not
            divide the batch, an operator in the loop over microbatches needs the rows of all of them, or no plan fits.

    Example:
        >>> import jax, autoshard
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> w = jax.ShapeDtypeStruct((32, 16), "float32")
        >>> autoshard.plan(lambda w, x: x @ w, w, x, target="cpu:8").mesh.size
        8

        The inputs of the layers wait in host memory for the backward pass:

        >>> import jax.numpy as jnp
        >>> def loss(layers, x):
        ...     return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, layers)[0])
        >>> layers, x = jax.ShapeDtypeStruct((4, 32, 32), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
        >>> autoshard.plan(jax.grad(loss), layers, x, target="cpu:8", offload="residual").offload
        {'residual': 32768.0}
    """
    check_jit_options("plan", kwargs, fn)
    options = checked_options(verify, measure, mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes,
                              fixed=fixed, plan=plan, offload=offload, compiler_options=compiler_options,
                              gather=gather, overlap=overlap, kernels=kernels, microbatches=microbatches,
                              schedule=schedule, allow_numerics=allow_numerics, verify_timeout_s=verify_timeout_s,
                              strict=strict)  # fmt: skip
    return AutoSharded(fn, options, variants, donate_argnums, static_argnums).plan(*args, **kwargs)
