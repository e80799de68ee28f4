"""The JAX primitive of an opaque operator: one equation in a jaxpr, lowered as its function.

Its parameters are `fn`, the function of arrays; `text`, the declared rule; `vjp`, the declared derivative (None: JAX
differentiates the function); and `cost`, a function from operands to the declared `KernelCost` (None: the cost of the
function's own operators).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.core.layer_stacks import LayerStacks, layer_stacks
from autoshard.spmdrules.core.rule import Rule, RuleError, Shard
from autoshard.spmdrules.custom_ops.kernel_cost import Cost, KernelCost

Vjp = tuple[Callable[..., Any] | None, Callable[..., Any]]
_PRIMITIVES: set[Primitive] = set()
_compat.exclude_from_user_code(__file__)


def returning_list(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Wraps `fn` so that it returns a list, whether it has one result or several.

    Raises:
        RuleError: when it is called, if a result is not an array.
    """

    def as_list(*args: Any) -> list[Any]:
        out = fn(*args)
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        for j, x in enumerate(results):
            if isinstance(x, (dict, list, tuple)) or x is None:
                raise RuleError(
                    f"operator '{getattr(fn, '__name__', fn)}': result {j} is of type {type(x).__name__}. Return one "
                    "array or a flat tuple of arrays, as the rule lists them."
                )
        return results

    return as_list


def apply(
    primitive: Primitive, args: Sequence[Any], *, fn: Any, text: str, vjp: Vjp | None, cost: Cost | None = None
) -> tuple[Any, ...]:
    """Binds the primitive; if a vjp is declared, inside a `custom_vjp`."""

    def bind(*xs: Any) -> tuple[Any, ...]:
        return tuple(primitive.bind(*xs, fn=fn, text=text, vjp=vjp, cost=cost))

    args = unify_varying_axes(args)
    if vjp is None:
        return bind(*args)
    fwd, bwd = vjp

    def forward(*xs: Any) -> tuple[tuple[Any, ...], Any]:
        if fwd is None:
            return bind(*xs), xs
        out, residuals = fwd(*xs)
        return tuple(out) if isinstance(out, (list, tuple)) else (out,), residuals

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        gradients = bwd(residuals, cotangents[0] if len(cotangents) == 1 else cotangents)
        return tuple(gradients) if isinstance(gradients, (list, tuple)) else (gradients,)

    differentiable = jax.custom_vjp(bind)
    differentiable.defvjp(forward, backward)
    return differentiable(*args)


def unify_varying_axes(args: Sequence[Any]) -> list[Any]:
    """Under `shard_map`, makes all operands vary over the same mesh axes, so that JAX sums cotangents correctly."""
    axes = frozenset[str]().union(*map(_compat.varying_axes, args))
    missing = [tuple(sorted(axes - _compat.varying_axes(x))) for x in args]
    return [lax.pcast(x, over, to="varying") if over else x for x, over in zip(args, missing, strict=True)]


def make_primitive(name: str) -> Primitive:
    """Creates a primitive with its evaluation, lowering, batching and differentiation rules."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    _PRIMITIVES.add(primitive)
    primitive.def_impl(lambda *args, **params: _jitted(primitive, tuple(params.items()))(*args))

    def abstract(*avals: Any, fn: Any, text: str, **_: Any) -> list[Any]:
        results = result_types(fn, avals)
        check_fit(name, text, avals, results)
        return [_compat.result_type(r.shape, r.dtype, avals) for r in results]

    def lowered(context: Any, *args: Any, fn: Any, **_: Any) -> Any:
        plain = [_compat.result_type(a.shape, a.dtype, ()) for a in context.avals_in]
        with _compat.unchecked_varying():
            return mlir.lower_fun(returning_list(fn), multiple_results=True)(context.replace(avals_in=plain), *args)

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lowered)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    return primitive


def is_operator(primitive: Any) -> bool:
    """Whether a primitive was created by `@operator`: its equations have `fn`, `text`, `vjp` and `cost`."""
    return primitive in _PRIMITIVES


def defined_at(eqn: Any) -> str:
    """Returns where an operator's function is defined, `file.py:12 (function)`; empty if that is unknown."""
    code = getattr(eqn.params.get("fn"), "__code__", None) if is_operator(eqn.primitive) else None
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else ""


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the compiled operator, which is checked and traced once for each set of operand types."""
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)))


def result_types(fn: Callable[..., Any], avals: Sequence[Any]) -> list[Any]:
    """Returns the shapes and types of the results for operands of these shapes and types, without their shardings."""
    if isinstance(fn, BatchedFunction):
        found = result_types(fn.fn, fn.rows(avals))
        return [jax.ShapeDtypeStruct((fn.size(avals), *x.shape), x.dtype) for x in found]
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    stated, options = (fn.func, fn.keywords) if isinstance(fn, functools.partial) else (fn, {})
    if hasattr(stated, "result_types"):
        return list(stated.result_types(*plain, **options))
    with _compat.unchecked_varying():
        return jax.eval_shape(returning_list(fn), *plain)


def drawn_operands(fn: Callable[..., Any], avals: Sequence[Any], rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Returns valid random values of the operands that an operator's function draws itself, by their number."""
    fn = fn.func if isinstance(fn, functools.partial) else fn
    return fn.draw_operands(rng, *avals) if hasattr(fn, "draw_operands") else {}


def drawing_operands(draw: Callable[..., Mapping[int, Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that says how `check_rule` draws operands for which most values are invalid.

    Args:
        draw: from a NumPy generator and the operands, anything with a shape and a dtype, to the values of some of the
            operands, by their number. Examples are the sizes of groups that have to add up to the number of rows.
    """

    def decorate(fn: Any) -> Any:
        fn.draw_operands = draw
        return fn

    return decorate


def stating_results(types: Callable[..., Sequence[Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that states the result types of an operator's function. Without it they are traced.

    Tracing a large kernel for each new shape would make up most of the time of planning.

    Args:
        types: from the operands, anything with a shape and a dtype, and the options, to `ShapeDtypeStruct`s.
    """

    def decorate(fn: Any) -> Any:
        fn.result_types = types
        return fn

    return decorate


def check_fit(name: str, text: str, avals: Sequence[Any], results: Sequence[Any]) -> None:
    """Checks a declared rule against the shapes of a call.

    Raises:
        RuleError: the rule does not fit.
    """
    try:
        rule = Rule.parse(text, *avals)
    except RuleError as error:
        reason = str(error).removesuffix(".")
        raise RuleError(f"operator '{name}': {reason}. Correct the rule or the operands of this call.") from None
    if len(results) != len(rule.results):
        raise RuleError(
            f"operator '{name}': '{text}' declares {len(rule.results)} results, but the function returns "
            f"{len(results)}. Correct the rule or the function."
        )
    for j, (result, dims) in enumerate(zip(results, rule.results, strict=True)):
        unknown = [f for dim in dims for f in dim if rule.factor(f).size is None]
        if unknown:
            raise RuleError(
                f"operator '{name}': result {j} in '{text}' has factor '{unknown[0]}', which no operand has. Give its "
                f"size with 'where {unknown[0]}=...'."
            )
        shape = Shard(rule, {}, {}).shape(dims)
        if shape != tuple(result.shape):
            raise RuleError(
                f"operator '{name}': result {j} has shape {tuple(result.shape)}, but '{text}' declares {shape}. "
                "Correct the rule or the function."
            )


def _jvp(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Computes the values by the operator, and the tangents by the derivative of its function."""
    out = primitive.bind(*primals, **params)
    live = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def fn_of_live(*xs: Any) -> list[Any]:
        given = dict(zip(live, xs, strict=True))
        return returning_list(params["fn"])(*(given.get(i, x) for i, x in enumerate(primals)))

    try:
        _, out_tangents = jax.jvp(fn_of_live, [primals[i] for i in live], [tangents[i] for i in live])
    except NotImplementedError as error:  # of a kernel; JAX's error may have no text
        jax.eval_shape(fn_of_live, *(primals[i] for i in live))  # raises if the function itself fails, too
        reason = f" ({error})" if str(error) else ""
        raise NotImplementedError(
            f"JAX cannot differentiate the kernel of the operator {primitive.name}{reason}. @operator(vjp=...) gives a "
            "first derivative. For a second one, or for forward mode, use an implementation in plain JAX"
        ) from error
    pairs = zip(out, out_tangents, strict=True)
    return out, [ad.Zero(jax.typeof(x).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t for x, t in pairs]


def _batch(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Binds the operator with one more leading dimension, which passes through."""
    mapped = tuple(d is not None for d in dims)
    moved = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]
    fn = BatchedFunction(params["fn"], mapped)
    cost = params["cost"] and _batched_cost(params["cost"], mapped)
    out = primitive.bind(*moved, fn=fn, text=batched_text(params["text"], mapped), vjp=None, cost=cost)
    return out, [0] * len(out)


@shown
@dataclass(frozen=True)
class BatchedFunction:
    """An operator's function under `jax.vmap`: some operands and all results have one more leading dimension.

    Attributes:
        fn: the function.
        mapped: whether each operand has the dimension.

    Example:
        >>> BatchedFunction(jnp.dot, (True, False))(jnp.ones((3, 2)), jnp.ones(2)).shape
        (3,)
    """

    fn: Callable[..., Any]
    mapped: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        """Computes the function for each element of the dimension."""
        return jax.vmap(self.fn, tuple(0 if m else None for m in self.mapped))(*args)

    @property
    def layer_stacks(self) -> LayerStacks | None:
        """Which operands of the function are stacks of layers."""
        return layer_stacks(self.fn)

    def size(self, avals: Sequence[Any]) -> int:
        """Returns the size of the dimension; `avals` are the operands, anything with a shape."""
        return next(a.shape[0] for a, m in zip(avals, self.mapped, strict=True) if m)

    def rows(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the operands of the function for one element; `avals` have shapes and dtypes."""
        return [jax.ShapeDtypeStruct(a.shape[m:], a.dtype) for a, m in zip(avals, self.mapped, strict=True)]


def one_of_batch(
    fn: Callable[..., Any], operands: Sequence[tuple[tuple[int, ...], Any]]
) -> tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], Any], ...]] | None:
    """Returns the function under `jax.vmap` with its operands, if they have a leading dimension of size 1.

    Args:
        fn: the function of an operator, batched by `jax.vmap` or not.
        operands: the shapes and dtypes of its operands.
    """
    if not isinstance(fn, BatchedFunction):
        return None
    both = list(zip(operands, fn.mapped, strict=True))
    if any(shape[0] != 1 for (shape, _), mapped in both if mapped):
        return None
    return fn.fn, tuple((shape[mapped:], dtype) for (shape, dtype), mapped in both)


@functools.lru_cache(maxsize=1024)
def _batched_cost(cost: Cost, mapped: tuple[bool, ...]) -> Cost:
    """Returns the cost of an operator with one more leading dimension in the operands that are `mapped`."""

    def batched(*avals: Any) -> tuple[KernelCost, ...]:
        size = next(a.shape[0] for a, m in zip(avals, mapped, strict=True) if m)
        rows = [jax.ShapeDtypeStruct(a.shape[m:], a.dtype) for a, m in zip(avals, mapped, strict=True)]
        found = cost(*rows)
        return tuple(each.times(size) for each in (found if isinstance(found, tuple) else (found,)))

    return batched


def batched_text(text: str, mapped: Sequence[bool]) -> str:
    """Adds a leading dimension to all results of a rule's text, and to the operands that are `mapped`.

    Example:
        >>> batched_text("m k, k n -> m n; reduce k", (True, False))
        'b m k, k n -> b m n; reduce k'
    """
    head, *clauses = text.split(";")
    used = {f.name for f in Rule.parse(text).factors}
    name = next(n for n in ("b", *(f"b{i}" for i in range(len(used) + 1))) if n not in used)
    left, right = head.split("->")

    def add(array: str, batched: bool = True) -> str:
        rest = array.strip()
        return (f"{name} {rest}" if rest != "[]" else name) if batched else rest

    operands = [add(*each) for each in zip(left.split(","), mapped, strict=True)]
    return ";".join([f"{', '.join(operands)} -> {', '.join(map(add, right.split(',')))}", *clauses])
