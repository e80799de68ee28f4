"""Every check of the JAX version and every use of a name that JAX keeps private. Nothing of either stands elsewhere.

Supported: jax 0.10.2 (Python 3.11) to the newest. What differs: parameters of control flow (`num_consts` against
`ft_in`), names of primitives, whether a jaxpr and a closed jaxpr are two types or one, where internals live.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.linen import spmd as linen_spmd
from jax import lax
from jax._src import (
    ad_checkpoint,
    ad_util,
    config,
    core,
    custom_derivatives,
    custom_partitioning,
    custom_partitioning_sharding_rule,
    debugging,
    dispatch,
    distributed,
    dtypes,
    hijax,
    pjit,
    shard_map,
    source_info_util,
    xla_metadata,
)
from jax._src import mesh as mesh_lib
from jax._src.cudnn import fused_attention_stablehlo, scaled_matmul_stablehlo
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import (
    ann,
    control_flow,
    convolution,
    fft,
    linalg,
    parallel,
    slicing,
    special,
    windowed_reductions,
)
from jax._src.lax import lax as lax_internal
from jax._src.pallas import core as pallas_core
from jax._src.random import core as random_core
from jax._src.random import philox2x32, philox4x32, prng, threefry4x32
from jax._src.state import primitives as state_primitives
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core import primitives as public_primitives

ONE_JAXPR_TYPE = ClosedJaxpr is core.Jaxpr
Literal = core.Literal
_HI_OPERATOR: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009  the older name
ELLIPSIS = custom_partitioning_sharding_rule.BATCHING  # in a sharding rule: all leading dimensions

_PLACES = (
    lax, public_primitives, lax_internal, slicing, control_flow, ad_util, prng, pjit, ad_checkpoint, custom_derivatives,
    dispatch, shard_map, ann, convolution, fft, linalg, parallel, special, windowed_reductions,
    custom_partitioning, debugging, xla_metadata, pallas_core, state_primitives, random_core, philox2x32, philox4x32,
    threefry4x32, importlib.import_module("jax._src.lax.scaled_dot"),  # as an attribute it is the function
)  # fmt: skip
_VENDORS = (fused_attention_stablehlo, scaled_matmul_stablehlo)  # these keep their primitives under names of their own


def primitive(name: str) -> Primitive | None:
    """The primitive that JAX keeps as `<name>_p`, None where the installed JAX has none."""
    for place in _PLACES:
        found = getattr(place, f"{name}_p", None)
        if found is not None:
            return found
    values = (value for place in _VENDORS for value in vars(place).values())
    return next((v for v in values if isinstance(v, Primitive) and v.name == name), None)


def primitives(*names: str) -> list[Primitive | None]:
    """`primitive` for several names."""
    return [primitive(name) for name in names]


def homes(wanted: list[Any]) -> dict[Any, set[str]]:
    """The modules that keep each of these primitives, `jax._src.` left out of their names, and those of their types."""
    found = {p: {type(p).__module__.removeprefix("jax._src.")} for p in wanted}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("jax", "flax", "optax"):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive) and value in found:
                    found[value].add(name.removeprefix("jax._src."))
    return found


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one; an open one as it is."""
    return jaxpr if ONE_JAXPR_TYPE or isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


def constants(jaxpr: Any) -> list[Any]:
    """The constants that belong to a closed jaxpr's `constvars`; none for an open one."""
    return list(getattr(jaxpr, "consts", ()) or ())


def is_jaxpr(value: Any) -> bool:
    """Whether `value` is a jaxpr, closed or open."""
    return isinstance(value, (core.Jaxpr, ClosedJaxpr))


def scan_arity(params: Any) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


@contextlib.contextmanager
def source_of(eqn: Any) -> Iterator[None]:
    """Binds primitives as if they stood on the user's line and in the name scope that `eqn` came from."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def source_line(eqn: Any) -> str:
    """The user's own line that an equation came from, `file.py:12 (function)`; empty if unknown."""
    return source_info_util.summarize(eqn.source_info)


def not_users_lines(path: str) -> None:
    """Lines of the Python file at `path` are not the user's own: whoever called them is named in their place."""
    source_info_util.register_exclusion(path)


def bind(eqn: Any, params: Any, *args: Any) -> list[Any]:
    """Applies the primitive of `eqn` with other parameters; results always as a list."""
    return bind_primitive(eqn.primitive, params, *args)


def bind_primitive(primitive: Any, params: Any, *args: Any) -> list[Any]:
    """Applies a primitive with the parameters of an equation; results always as a list."""
    out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


def dce(closed: Any) -> Any:
    """A closed jaxpr without the equations whose results nobody uses; its inputs and outputs stay."""
    bare = pe.convert_constvars_jaxpr(open_jaxpr(closed))
    pruned, _ = pe.dce_jaxpr(bare, [True] * len(bare.outvars), instantiate=True)
    return close(pruned, constants(closed))


def close(jaxpr: Any, consts: list[Any]) -> Any:
    """A closed jaxpr: the first inputs of `jaxpr` take these constants."""
    if ONE_JAXPR_TYPE:
        return jaxpr.with_consts(consts)
    return ClosedJaxpr(pe.convert_invars_to_constvars(jaxpr, len(consts)), consts)


def call_of(closed: Any) -> Any:
    """A closed jaxpr as a function of its inputs that returns a list."""
    return core.jaxpr_as_fun(closed)


def stand_in(var: Any) -> jax.ShapeDtypeStruct:
    """A stand-in of the same type as a jaxpr's variable."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)


def solve_operands(eqn: Any) -> list[int]:
    """Which operands of a `custom_linear_solve` its solver takes; the others are those of the matrix and transposes."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*range(first, first + lengths.solve), *range(sum(lengths), len(eqn.invars))]


def expanded(eqn: Any) -> Any | None:
    """What a HiJAX operator (`jnp.searchsorted` on a new JAX) is made of, as a closed jaxpr of its operands.

    None where it works on other things than arrays, or does not say what it is made of.
    """
    if any(not isinstance(v.aval, core.ShapedArray) for v in (*eqn.invars, *eqn.outvars)):
        return None
    try:
        with source_of(eqn):
            lowered = functools.partial(eqn.primitive.to_lojax, **eqn.params)
            return jax.make_jaxpr(lowered)(*map(stand_in, eqn.invars))
    except NotImplementedError:  # the base class raises it for an operator that does not say what it is made of
        return None


def differentiated_as(eqn: Any, fn: Any) -> Any:
    """`fn`, which computes the results of a HiJAX operator, differentiated as the operator is.

    What an operator is made of may have no derivative of its own: `jnp.ldexp` works on bits.
    """
    own = functools.partial(bind, eqn, eqn.params)
    if type(eqn.params["_prim"]).jvp is _HI_OPERATOR.jvp:  # it has none: it is left as one piece
        return own
    computed = jax.custom_jvp(fn)
    computed.defjvp(lambda primals, tangents: (computed(*primals), jax.jvp(own, primals, tangents)[1]))
    return computed


def split_constants(closed: Any) -> tuple[Any, list[Any]]:
    """An open jaxpr whose first inputs are the constants of a closed one, and these constants."""
    return pe.convert_constvars_jaxpr(open_jaxpr(closed)), constants(closed)


def all_axes_auto(mesh: Any) -> Any:
    """A mesh of the same devices or sizes whose axes are all Auto."""
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.update(axis_types=auto)  # of the same kind of device, too
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def current_mesh() -> Any:
    """The mesh set by `jax.set_mesh` or `with mesh`, None where there is none."""
    concrete = mesh_lib.get_concrete_mesh()
    if concrete is not None and not concrete.empty:
        return concrete
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def no_mesh() -> Any:
    """A context in which no mesh is set: a program may then be on devices that are not the set mesh's."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def under_trace() -> bool:
    """Whether somebody is tracing now (jit, grad, vmap, ...)."""
    return not core.trace_state_clean()


def tell_processes(key: str, text: str, *, again: bool = False) -> None:
    """Makes a text known to all processes of a `jax.distributed` run; with `again` in place of an earlier one."""
    _coordination().key_value_set(key, text, allow_overwrite=again)


def forget_told(key: str) -> None:
    """Removes a text that was made known, if it was."""
    _coordination().key_value_delete(key)


def told_below(prefix: str) -> dict[str, str]:
    """The texts that were made known below a prefix, by what follows it."""
    return {key[len(prefix) :]: text for key, text in _coordination().key_value_dir_get(prefix)}


def hear_process(key: str, timeout_s: float) -> str | None:
    """The text that a process of a `jax.distributed` run made known; None if it does not in time."""
    try:
        return _coordination().blocking_key_value_get(key, int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _coordination() -> Any:
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return client


def has_graph_nodes(tree: Any) -> bool:
    """Whether a pytree of arguments holds nnx objects: modules, optimizers, metrics, random streams, variables.

    An `nnx.State` is none, nor are the variables in it: it is a pytree of arrays to whoever splits and merges himself.
    """
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State)))
    return any(isinstance(x, (nnx.Pytree, nnx.Variable)) for x in found)


def nnx_jit(fn: Any, make: Any) -> tuple[Any, Any]:
    """`nnx.jit(fn)` whose inner pure function is `make(pure)` instead of `jax.jit(pure)`, and that inner function."""
    wrapped = nnx.jit(fn)
    pure = make(wrapped.jitted_fn.__wrapped__)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.jitted_fn = pure  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped, pure


def nnx_pure_call(wrapped: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call(pure_args, pure_kwargs)`, in the context in which `wrapped` (from `nnx_jit`) would call its function."""
    args, kwargs = nnx.clone((args, kwargs))
    with nnx.update_context(wrapped):
        pure_args, pure_kwargs = wrapped._get_pure_args_kwargs(args, kwargs)
        return call(pure_args, pure_kwargs)


def nnx_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of every array leaf of arguments with nnx objects, in the order in which `nnx.jit` flattens them."""
    return [path for path, _ in _graph_leaves(args, kwargs)]


def _graph_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, owner) of every array leaf, as `nnx.jit` flattens: what several objects share belongs to the first.

    The owner is the variable or box that holds the array, or the array itself. A variable's value can be a pytree.
    """
    with nnx.split_context() as context:
        for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_node_or_owner)[0]:
            held = (
                [((), leaf)]
                if isinstance(leaf, linen.Partitioned) or not _is_node_or_owner(leaf)
                else (context.flatten(leaf)[1])
            )
            for path, owner in held:
                for inside, _ in jax.tree_util.tree_flatten_with_path(owner)[0]:
                    own = inside[1:] if isinstance(owner, nnx.Variable) else inside
                    words = [jax.tree_util.keystr(k, simple=True, separator="/") for k in (keys[1:], own) if k]
                    yield "/".join([words[0], *map(str, path), *words[1:]]), owner


def _is_node_or_owner(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable, linen.Partitioned))


def split_graph(create: Any) -> tuple[Any, Any]:
    """(a function that returns the state of what `create` makes, a function that makes the objects again)."""
    kept: list[Any] = []

    def pure(*args: Any) -> Any:
        made = create(*args)
        if not has_graph_nodes(made):
            kept[:] = [None]
            return made
        graphdef, state = nnx.split(made)
        kept[:] = [graphdef]
        return state

    return pure, lambda state: state if kept[0] is None else nnx.merge(kept[0], state)


def written_specs(args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> list[Any]:
    """For every array leaf, in flat order, the `PartitionSpec` that its owner wrote on it, None where there is none.

    Read are `linen.Partitioned` boxes (logical names through the rules in force) and the metadata of nnx variables.
    """
    if graph:
        return [_written_on(owner) for _, owner in _graph_leaves(args, kwargs)]
    owners = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, (nnx.Variable, linen.Partitioned)))
    return [_written_on(owner) for owner in owners for _ in jax.tree.leaves(owner)]


def _written_on(leaf: Any) -> Any:
    names: Any = None
    if isinstance(leaf, linen.LogicallyPartitioned):
        names = linen_spmd.logical_to_mesh_axes(leaf.names)
    elif isinstance(leaf, linen.Partitioned):
        names = leaf.names
    elif isinstance(leaf, nnx.Variable):
        names = leaf.get_metadata().get("out_sharding")
    return None if names is None or not any(names) else jax.sharding.PartitionSpec(*names)


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Traces as if every axis of the mesh in force were Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_auto or under_trace():
        yield
    else:
        with jax.sharding.use_abstract_mesh(all_axes_auto(mesh)):
            yield


def weakly_typed(array: jax.Array) -> jax.Array:
    """An array of the same values whose type gives way to others', as that of a Python number."""
    return lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's own (a typed random key)."""
    return not isinstance(dtype, np.dtype) and dtypes.issubdtype(dtype, dtypes.extended)


def element_shape(dtype: Any) -> tuple[int, ...]:
    """The shape of the plain array that one element of an extended type is."""
    return core.physical_element_aval(dtype).shape


def is_floating(dtype: Any) -> bool:
    """Whether a dtype is a floating one."""
    return dtypes.issubdtype(dtype, jax.numpy.floating)


def is_tracer(value: Any) -> bool:
    """Whether a value stands for one in somebody's trace."""
    return isinstance(value, core.Tracer)


def result_type(shape: Any, dtype: Any, operands: Any) -> Any:
    """The type of an opaque operator's result: under `shard_map` it varies wherever one of the operands does."""
    varying = frozenset[str]().union(*(aval.manual_axis_type.varying for aval in operands))
    mesh = next((aval.sharding.mesh for aval in operands if not aval.sharding.mesh.empty), None)
    if mesh is None:
        return core.ShapedArray(shape, dtype)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=core.ManualAxisType(varying=varying))


def varying_axes(value: Any) -> frozenset[str]:
    """The mapped mesh axes over which a value varies, under `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def unchecked_varying() -> Any:
    """A context in which opaque code need not say over which mapped axes its results vary."""
    return config._check_vma(False)
