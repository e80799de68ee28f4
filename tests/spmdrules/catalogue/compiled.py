"""Compiles each call of a module's functions as one program. To compile each operator alone takes far longer."""

from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def compiled(module: ModuleType) -> Any:
    """Return a namespace with the module's functions, each compiled as one program when it is called.

    A call inside a JAX transformation is traced as usual. The result has type Any because tests pass NumPy arrays.
    """
    found = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    own = {name for name, value in found.items() if getattr(value, "__module__", None) == module.__name__}
    functions = {
        name: _jitted(found[name]) for name in own if callable(found[name]) and not isinstance(found[name], type)
    }
    return SimpleNamespace(**found | functions)


def _jitted(fn: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return fn(*args, **options)
        is_array = [isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves]

        def run(arrays: list[Any]) -> Any:
            rest = iter(arrays)
            args, options = tree.unflatten([next(rest) if of else x for x, of in zip(leaves, is_array, strict=True)])
            return fn(*args, **options)

        return jax.jit(run)([leaf for leaf, of in zip(leaves, is_array, strict=True) if of])

    return call
