"""What a Pallas kernel of another library tells the compiler: its cost, and the vector memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import pallas
from jax.experimental.pallas import tpu
from jax.extend.core import jaxpr_as_fun


def with_costs(
    fn: Callable[..., Any],
    costs: Mapping[str, tuple[float, float, float]],
    *args: Any,
    vector_memory_bytes: int | None = None,
) -> Any:
    """Calls a function whose Pallas kernels state a cost to the compiler, in place of their own.

    Args:
        fn: a function of pytrees of arrays.
        costs: a part of a kernel's name, such as `_dq_` -> its FLOPs, transcendental operations and bytes accessed.
        *args: its arguments.
        vector_memory_bytes: the vector memory that each of these kernels may use; by default the compiler's limit.

    Raises:
        NotImplementedError: no kernel has such a name. This JAX has renamed it, and without a stated cost the compiler
            and the audit would take it to be free.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    eqns, unused = [], set(costs)
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            for part, (flops, transcendentals, size) in costs.items():
                if part in str(eqn.params["name"]):
                    unused.discard(part)
                    cost = pallas.CostEstimate(
                        flops=int(flops), transcendentals=int(transcendentals), bytes_accessed=int(size)
                    )
                    params = {**eqn.params, "cost_estimate": cost}
                    if vector_memory_bytes is not None:
                        params["compiler_params"] = _limited(eqn.params["compiler_params"], vector_memory_bytes)
                    eqn = eqn.replace(params=params)
        eqns.append(eqn)
    if unused:
        raise NotImplementedError(f"this version of JAX has no kernel named {', '.join(unused)}")
    priced = closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(priced)(*jax.tree.leaves(args)))


def _limited(params: Any, vector_memory_bytes: int) -> Any:
    return replace(params or tpu.CompilerParams(), vmem_limit_bytes=vector_memory_bytes)
