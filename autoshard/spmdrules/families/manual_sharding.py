"""Rules that the program itself specifies: by the specs of `shard_map`, or by the rule of `custom_partitioning`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard._compat import primitive
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, to_partition_spec
from autoshard.spmdrules.core.registry import replicated_rule, rule
from autoshard.spmdrules.core.rule import Body, Dims, Factor, Rule, Shard
from autoshard.spmdrules.core.rule_builder import RuleBuilder

_SHARD_MAP = primitive("shard_map")


@rule(_SHARD_MAP)
def shard_map(
    *xs: Any, mesh: Any, in_specs: Sequence[Any], out_specs: Sequence[Any], jaxpr: Any, **params: Any
) -> Rule:
    """``(i w) w1 -> (i w2) w3; whole w w1 w2 w3``: sharded along its own mesh axes by its specs; a block is whole.

    A factor is named after the mesh axis that shards it. A block is what one shard holds. Nothing inside is planned. If
    the function has collectives, its shards depend on each other, and the rule cannot be checked shard by shard.

    https://docs.jax.dev/en/latest/_autosummary/jax.shard_map.html
    """
    build = RuleBuilder()
    results = [v.aval for v in _compat.open_jaxpr(jaxpr).outvars]
    axes = {a: build.dim(_name(a), n) for a, n in mesh.shape.items()}

    def dims(block: Sequence[int], spec: Any) -> Dims:
        split = from_partition_spec(spec, len(block))
        return tuple(sum((axes[a] for a in over), ()) + build.whole(n) for n, over in zip(block, split, strict=True))

    def run_global(*xs: Any) -> Any:
        all_params = {**params, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "jaxpr": jaxpr}
        return _compat.bind_primitive(_SHARD_MAP, all_params, *xs)

    blocks = [v.aval.shape for v in _compat.open_jaxpr(jaxpr).invars]
    operands = [dims(block, spec) for block, spec in zip(blocks, in_specs, strict=True)]
    outs = [dims(r.shape, spec) for r, spec in zip(results, out_specs, strict=True)]
    return build.rule(operands, outs, body=_zero_padded(run_global, operands, outs))


def mapped_specs(eqn: Any, mesh: Mapping[str, int]) -> tuple[list[Spec], list[Spec]] | None:
    """Returns the specs of the operands and results of a `shard_map` over the axes of `mesh`.

    None for any other equation, and for a `shard_map` that leaves some axes to the compiler: these may shard dimensions
    that its specs do not name.
    """
    if eqn.primitive is not _SHARD_MAP:
        return None
    params = eqn.params
    sizes = dict(params["mesh"].shape)
    if set(sizes) != set(params["newly_manual_axes"]) or any(mesh.get(a) != n for a, n in sizes.items()):
        return None
    sides = ((params["in_specs"], eqn.invars), (params["out_specs"], eqn.outvars))
    ins, outs = (
        [from_partition_spec(spec, v.aval.ndim) for spec, v in zip(specs, vs, strict=True)] for specs, vs in sides
    )
    return ins, outs


def _name(axis: Any) -> str:
    """Converts the name of a mesh axis, or of a factor in another notation, to a valid factor name."""
    return re.sub(r"^(?=\d)|\W", "_", str(axis))


def communicates(eqn: Any) -> bool:
    """Whether an equation is a `shard_map` with collectives inside, so that its shards depend on each other."""
    return eqn.primitive is _SHARD_MAP and _has_collectives(eqn.params["jaxpr"])


def _has_collectives(jaxpr: Any) -> bool:
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        named = "axis_name" in eqn.params or eqn.primitive.name.startswith(("psum", "pmax", "pmin"))
        if named and eqn.primitive.name != "axis_index":
            return True
        leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=_compat.is_jaxpr)
        if any(_compat.is_jaxpr(x) and _has_collectives(x) for x in leaves):
            return True
    return False


def _zero_padded(bind: Callable[..., Any], operands: Sequence[Dims], results: Sequence[Dims]) -> Body:
    """Returns a body that runs the global operator with zeros in place of other shards, and keeps its own shard."""

    def body(shard: Shard, *xs: Any) -> list[Any]:
        outs = bind(*(_embed_in_zeros(shard, x, dims) for x, dims in zip(xs, operands, strict=True)))
        return [_own_shard(shard, x, dims) for x, dims in zip(outs, results, strict=True)]

    return body


def _embed_in_zeros(shard: Shard, x: Any, dims: Dims) -> Any:
    """Embeds a shard at its position in an array of zeros of the global shape."""
    whole = Shard(shard.rule, {}, {})
    factors = [f for dim in dims for f in dim]
    part = x.reshape(tuple(map(shard.size, factors)))
    zeros = jnp.zeros(tuple(map(whole.size, factors)), x.dtype)
    return lax.dynamic_update_slice(zeros, part, tuple(map(shard.offset, factors))).reshape(whole.shape(dims))


def _own_shard(shard: Shard, x: Any, dims: Dims) -> Any:
    """Returns this shard's part of a global array. Factors that cannot be sharded stay whole."""
    whole = Shard(shard.rule, {}, {})
    factors = [f for dim in dims for f in dim]
    mine = {f: shard.rule.factor(f).shardable for f in factors}
    starts = tuple(shard.offset(f) if mine[f] else 0 for f in factors)
    sizes = tuple((shard if mine[f] else whole).size(f) for f in factors)
    part = lax.dynamic_slice(x.reshape(tuple(map(whole.size, factors))), starts, sizes)
    blocks = Shard(shard.rule, {f: n for f, n in shard.counts.items() if shard.rule.factor(f).shardable}, {})
    return part.reshape(blocks.shape(dims))


@rule(primitive("custom_partitioning"))
def custom_partitioning(*xs: Any, call: Any, sharding_rule: Any = None, **params: Any) -> Rule:
    """``m k, k n -> m n; reduce k``: the function's own sharding rule; whole if it has no rule that can be read.

    Its callback partitions the function, so nothing inside is planned. A sharding rule that is a callable exists only
    at compile time, so it cannot be read; factors that need a permutation are whole.

    https://docs.jax.dev/en/latest/jax.experimental.custom_partitioning.html
    """
    results = [v.aval for v in _compat.open_jaxpr(call).outvars]
    if not hasattr(sharding_rule, "operand_mappings"):
        return replicated_rule(xs, tuple(results))
    operands, outs = (
        [_read_mapping(m, len(x.shape)) for m, x in zip(mappings, arrays, strict=True)]
        for mappings, arrays in ((sharding_rule.operand_mappings, xs), (sharding_rule.result_mappings, results))
    )
    in_results = {f for dims in outs for dim in dims for f in dim}
    sums = set(map(_name, sharding_rule.reduction_factors))
    sizes = {_name(f): n for f, n in sharding_rule.factor_sizes.items()}
    whole = set(map(_name, (*sharding_rule.need_replication_factors, *sharding_rule.permutation_factors)))

    def factor(name: str) -> Factor:
        if name in sums:
            return Factor(name, sizes.get(name), "reduce", "sum")
        return Factor(name, sizes.get(name), "pass" if name in in_results - whole else "whole")

    names = dict.fromkeys(f for dims in (*operands, *outs) for dim in dims for f in dim)
    bound = Rule((*operands, *outs), (), tuple(map(factor, names))).bind(*xs, *results)
    return Rule(tuple(operands), tuple(outs), bound.factors, body=_by_callback(operands, outs, **params))


def _by_callback(
    operands: Sequence[Dims], results: Sequence[Dims], *, partition: Any, in_tree: Any, out_tree: Any,
    static_args: Sequence[Any], **_: Any,
) -> Body:  # fmt: skip
    """Returns a body that runs what the function's callback returns for a shard, with collectives over one device."""

    def body(shard: Shard, *xs: Any) -> list[Any]:
        mesh = jax.sharding.AbstractMesh(tuple(shard.counts.values()), tuple(shard.counts))
        whole = Shard(shard.rule, {}, {})

        def sharded(dims: Dims, dtype: Any) -> Any:
            spec = [tuple(f for f in dim if f in shard.counts) for dim in dims]
            sharding = jax.sharding.NamedSharding(mesh, to_partition_spec(tuple(spec)))
            return jax.ShapeDtypeStruct(whole.shape(dims), dtype, sharding=sharding)

        arg_shapes = in_tree.unflatten([sharded(dims, x.dtype) for dims, x in zip(operands, xs, strict=True)])
        result_shapes = out_tree.unflatten([sharded(dims, xs[0].dtype) for dims in results])
        _, run, _, _ = partition(*static_args, mesh, arg_shapes, result_shapes)
        for axis in shard.counts:
            run = jax.vmap(run, axis_name=axis, axis_size=1, in_axes=None, out_axes=0)
        outs = jax.tree.leaves(run(*in_tree.unflatten(xs)))
        return [x.reshape(shard.shape(dims)) for x, dims in zip(outs, results, strict=True)]

    return body


def _read_mapping(mapping: Sequence[Any], rank: int) -> Dims:
    """Reads the dimensions of one array in the compiler's notation; an ellipsis covers the dimensions not named."""
    dims: list[tuple[str, ...]] = []
    for entry in mapping:
        if isinstance(entry, str) and entry.startswith(_compat.ELLIPSIS):
            dims += [(f"e{entry[1:]}_{i}",) for i in range(rank - len(mapping) + 1)]
        else:
            dims.append((_name(entry),) if isinstance(entry, str) else tuple(map(_name, entry)))
    return tuple(dims)
