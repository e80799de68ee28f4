"""Jaxprs: their types, constants and equations, and how an equation is evaluated again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import core, effects, hijax, source_info_util
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import ClosedJaxpr

from autoshard._compat.memory_spaces import abstract_array, is_on_host

ONE_JAXPR_TYPE = ClosedJaxpr is core.Jaxpr
Literal = core.Literal
# `HiPrim` was named `VJPHiPrimitive` in older versions.
_HI_OPERATOR: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one. An open jaxpr is returned unchanged."""
    return jaxpr if ONE_JAXPR_TYPE or isinstance(jaxpr, core.Jaxpr) else jaxpr.jaxpr


def constants(jaxpr: Any) -> list[Any]:
    """Returns the values of a closed jaxpr's `constvars`. An open jaxpr has none."""
    return list(getattr(jaxpr, "consts", ()) or ())


def is_jaxpr(value: Any) -> bool:
    """Returns whether `value` is a jaxpr, closed or open."""
    return isinstance(value, (core.Jaxpr, ClosedJaxpr))


def close(jaxpr: Any, consts: list[Any]) -> Any:
    """Closes an open jaxpr: its first inputs become constants with these values."""
    if ONE_JAXPR_TYPE:
        return jaxpr.with_consts(consts)
    return ClosedJaxpr(pe.convert_invars_to_constvars(jaxpr, len(consts)), consts)


def split_constants(closed: Any) -> tuple[Any, list[Any]]:
    """Turns the constants of a closed jaxpr into leading inputs: returns the open jaxpr and the constants."""
    return pe.convert_constvars_jaxpr(open_jaxpr(closed)), constants(closed)


def with_equations(jaxpr: Any, eqns: list[Any], **changes: Any) -> Any:
    """Returns a jaxpr, closed or open as it is, with other equations and with changes of its open form."""
    inner = open_jaxpr(jaxpr)
    replaced = inner.replace(eqns=eqns, **changes)
    return replaced if ONE_JAXPR_TYPE or inner is jaxpr else jaxpr.replace(jaxpr=replaced)


def with_transferred(closed: Any, results: Sequence[int]) -> Any:
    """Adds results to a closed jaxpr: what the transfers (`jax.device_put`) that make these results take."""
    jaxpr = open_jaxpr(closed)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found = []
    for var in [jaxpr.outvars[n] for n in results]:
        while made_by[var].primitive.name != "device_put":  # a constraint of the result's sharding
            (var,) = made_by[var].invars
        found.append(made_by[var].invars[[*made_by[var].outvars].index(var)])
    unnamed = jaxpr.debug_info.with_unknown_names()
    return with_equations(closed, jaxpr.eqns, outvars=[*jaxpr.outvars, *found], debug_info=unnamed)


def jaxpr_as_function(closed: Any) -> Any:
    """Returns a function that evaluates a closed jaxpr on its inputs and returns a list."""
    return core.jaxpr_as_fun(closed)


def dce(closed: Any) -> Any:
    """Removes the equations whose results are not used from a closed jaxpr. All inputs and outputs stay."""
    without_constants = pe.convert_constvars_jaxpr(open_jaxpr(closed))
    pruned, _ = pe.dce_jaxpr(without_constants, [True] * len(without_constants.outvars), instantiate=True)
    return close(pruned, constants(closed))


def check_jaxpr(closed: Any) -> None:
    """Checks the types of a closed jaxpr, and that each variable is made once and before its use.

    Raises:
        Exception: an error of JAX that says what is wrong.
    """
    core.check_jaxpr(open_jaxpr(closed))


def scan_arity(params: Any) -> tuple[int, int]:
    """Returns (number of constants, number of carries) for the parameters of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def solve_operands(eqn: Any) -> list[int]:
    """Returns the indices of the operands of a `custom_linear_solve` that its solver takes.

    The other operands belong to the matrix product and to the transposed functions.
    """
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*range(first, first + lengths.solve), *range(sum(lengths), len(eqn.invars))]


def shape_dtype_of(var: Any) -> Any:
    """Returns an argument for `jax.make_jaxpr` with the shape, dtype, weak type and memory of a jaxpr's variable."""
    return abstract_array(var.aval.shape, var.aval.dtype, var.aval.weak_type, is_on_host(var.aval))


def bind(eqn: Any, params: Any, *args: Any) -> list[Any]:
    """Binds the primitive of `eqn` with other parameters. Always returns a list."""
    return bind_primitive(eqn.primitive, params, *args)


def bind_primitive(primitive: Any, params: Any, *args: Any) -> list[Any]:
    """Binds a primitive with the parameters of an equation. Always returns a list."""
    out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


@contextlib.contextmanager
def source_of(eqn: Any) -> Iterator[None]:
    """Gives primitives bound in this context the source line and name scope of `eqn`.

    Operators inside JAX's own functions, such as the sort in `jnp.argsort`, have no line of the user's code. They get
    the line of the equation that calls the function.
    """
    traceback = eqn.source_info.traceback
    if not _has_user_line(traceback):
        traceback = source_info_util._source_info_context.context.traceback or traceback
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        yield


@functools.lru_cache(maxsize=4096)  # chosen: more tracebacks than most programs have; only speed depends on it
def _has_user_line(traceback: Any) -> bool:
    return next(source_info_util.user_frames(traceback), None) is not None


@contextlib.contextmanager
def line_of(eqn: Any | None) -> Iterator[None]:
    """Gives primitives bound in this context the source line of `eqn`, but not its names; changes nothing for None."""
    if eqn is None:
        yield
        return
    stack = source_info_util.current_name_stack()
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def innermost(eqn: Any, result: int) -> Any:
    """Returns the equation that makes a result of `eqn`: `eqn`, or one in the bodies of scans and checkpoints."""
    while eqn.primitive.name in ("scan", "remat2"):
        jaxpr = open_jaxpr(eqn.params["jaxpr"])
        var = jaxpr.outvars[result]
        inner = next((e for e in jaxpr.eqns if any(var is v for v in e.outvars)), None)
        if inner is None:  # an input of the body
            break
        eqn, result = inner, next(n for n, v in enumerate(inner.outvars) if v is var)
    return eqn


def needs_one_device(eqn: Any) -> bool:
    """Returns whether an equation has an order of effects that JAX supports on one device only (ordered prints)."""
    ordered, shardable = effects.ordered_effects, effects.shardable_ordered_effects
    return any(ordered.contains(effect) and not shardable.contains(effect) for effect in eqn.effects)


def is_differentiated(eqn: Any) -> bool:
    """Returns whether JAX made an equation when it differentiated a function: in its forward or backward pass."""
    return "jvp" in _transforms(eqn)


def is_transposed(eqn: Any) -> bool:
    """Returns whether an equation is in a backward pass: JAX made it when it transposed a derivative."""
    names = _transforms(eqn)
    return "transpose" in names and "jvp" in names[names.index("transpose") :]


def is_recomputed(eqn: Any) -> bool:
    """Returns whether an equation recomputes a value of a function under `jax.checkpoint`."""
    return any(part.name == "rematted_computation" for part in eqn.source_info.name_stack.stack)


def _transforms(eqn: Any) -> list[str]:
    """The transformations that made an equation, the outermost first."""
    stack = eqn.source_info.name_stack.stack
    return [part.name for part in stack if isinstance(part, source_info_util.Transform)]


def source_line(eqn: Any) -> str:
    """Returns the line of user code that an equation came from, `file.py:12 (function)`; empty if unknown."""
    return source_info_util.summarize(eqn.source_info)


def program_line(eqn: Any, libraries: tuple[str, ...] = ("site-packages", "dist-packages")) -> str:
    """Returns the innermost line of an equation that is in no installed library, `file.py:12 (function)`.

    If all lines are in libraries, it is the innermost one outside JAX. It is empty if unknown.
    """
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [f for f in frames if not any(name in f.file_name for name in libraries)]
    return next((f"{f.file_name}:{f.start_line} ({f.function_name})" for f in [*own, *frames]), "")


def exclude_from_user_code(path: str) -> None:
    """Makes source lines skip the files whose path starts with `path`. They name the caller instead."""
    source_info_util.register_exclusion(path)


def expand_hijax(eqn: Any) -> Any | None:
    """Expands a HiJAX operator (`jnp.searchsorted` on a new JAX) to a closed jaxpr of its operands.

    Returns None if an operand or result is not an array, or if the operator does not define an expansion.
    """
    if any(not isinstance(v.aval, core.ShapedArray) for v in (*eqn.invars, *eqn.outvars)):
        return None
    try:
        with source_of(eqn):
            lowered = functools.partial(eqn.primitive.to_lojax, **eqn.params)
            return jax.make_jaxpr(lowered)(*map(shape_dtype_of, eqn.invars))
    except NotImplementedError:  # raised by the base class if the operator has no `to_lojax`
        return None


def expand_by_implementation(eqn: Any) -> Any | None:
    """Expands a primitive that another library defines to a closed jaxpr, by tracing its implementation.

    JAX calls the implementation where the primitive is not under `jax.jit`, so both compute the same.

    Returns None for JAX's own primitives, and if the implementation cannot be traced or only applies the primitive.
    """
    implementation = eqn.primitive.impl
    while isinstance(implementation, functools.partial):
        implementation = implementation.func
    if (getattr(implementation, "__module__", None) or "jax").partition(".")[0] in ("jax", "jaxlib"):
        return None
    try:
        with source_of(eqn):
            computed = functools.partial(eqn.primitive.impl, **eqn.params)
            expanded = jax.make_jaxpr(computed)(*map(shape_dtype_of, eqn.invars))
    except Exception:  # the implementation is another library's code: on traced values it may raise any error
        return None
    results = [(v.aval.shape, v.aval.dtype) for v in open_jaxpr(expanded).outvars]
    if results != [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]:
        return None
    inner = open_jaxpr(expanded).eqns
    while len(inner) == 1 and inner[0].primitive.name == "jit":
        inner = open_jaxpr(inner[0].params["jaxpr"]).eqns
    return None if [e.primitive for e in inner] == [eqn.primitive] else expanded


def with_derivative_of(eqn: Any, fn: Any) -> Any:
    """Returns `fn`, which computes the results of a HiJAX operator, with the operator's own derivative.

    The primitives of the expansion may not be differentiable: `jnp.ldexp` works on bits.
    """
    operator = functools.partial(bind, eqn, eqn.params)
    if type(eqn.params["_prim"]).jvp is _HI_OPERATOR.jvp:  # the operator has no JVP: it is not expanded
        return operator
    differentiable = jax.custom_jvp(fn)
    differentiable.defjvp(lambda primals, tangents: (differentiable(*primals), jax.jvp(operator, primals, tangents)[1]))
    return differentiable
