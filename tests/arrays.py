"""Arrays of values that NumPy draws."""

from typing import Any

import jax
import numpy as np


def array(values: Any, dtype: Any = None) -> Any:
    """Returns a JAX array of NumPy values. `jnp.asarray` compiles a program for each of their shapes and types."""
    return jax.device_put(np.asarray(values, dtype))
