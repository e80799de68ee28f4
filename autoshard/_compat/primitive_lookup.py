"""Finds JAX's primitives by name in the modules that define them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from jax import lax
from jax._src import (
    ad_checkpoint,
    ad_util,
    custom_derivatives,
    custom_partitioning,
    custom_partitioning_sharding_rule,
    debugging,
    dispatch,
    pjit,
    shard_map,
    xla_metadata,
)
from jax._src.cudnn import fused_attention_stablehlo, scaled_matmul_stablehlo
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
from jax.extend.core import Primitive
from jax.extend.core import primitives as public_primitives

ELLIPSIS = custom_partitioning_sharding_rule.BATCHING  # stands for all leading dimensions in a sharding rule
_MODULES = (
    lax, public_primitives, lax_internal, slicing, control_flow, ad_util, prng, pjit, ad_checkpoint, custom_derivatives,
    dispatch, shard_map, ann, convolution, fft, linalg, parallel, special, windowed_reductions,
    custom_partitioning, debugging, xla_metadata, pallas_core, state_primitives, random_core, philox2x32, philox4x32,
    threefry4x32, importlib.import_module("jax._src.lax.scaled_dot"),  # the attribute is a function
)  # fmt: skip
# These modules do not name their primitives `<name>_p`.
_CUDNN_MODULES = (fused_attention_stablehlo, scaled_matmul_stablehlo)


def primitive(name: str) -> Primitive | None:
    """Returns the primitive that JAX defines as `<name>_p`, or None if the installed JAX has no such primitive."""
    for module in _MODULES:
        found = getattr(module, f"{name}_p", None)
        if found is not None:
            return found
    values = (value for module in _CUDNN_MODULES for value in vars(module).values())
    return next((v for v in values if isinstance(v, Primitive) and v.name == name), None)


def primitives(*names: str) -> list[Primitive | None]:
    """Returns `primitive(name)` for each name."""
    return [primitive(name) for name in names]


def defining_modules(prims: list[Any]) -> dict[Any, set[str]]:
    """Maps each primitive to the modules that refer to it and the module that defines its type.

    Module names are without the prefix `jax._src.`.
    """
    found = {p: {type(p).__module__.removeprefix("jax._src.")} for p in prims}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("jax", "flax", "optax"):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive) and value in found:
                    found[value].add(name.removeprefix("jax._src."))
    return found
