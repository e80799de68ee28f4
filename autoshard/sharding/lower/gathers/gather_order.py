"""Parameters that are gathered one after another, as `gather="sequential"` asks.

A parameter that is stored in shards is gathered where an operator uses it. Compilers may start such gathers at any
earlier time, and then hold many whole parameters at once. `optimization_barrier` does not prevent this: some published
sets of compiler options remove barriers. Here the order is a data dependence: the shard of a parameter is combined with
one element of the result of an earlier use, so no compiler can gather it before that use. The values do not change: the
bits of the shard are xor-ed with t (t + 1) mod 2. This is 0 for every integer t, but compilers do not know it. It costs
one read and write of the shard.

The gather for a use waits for the second to last of the uses before it. So at most two gathered parameters are held:
the one in use, and the next one, whose gather runs meanwhile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.spmdrules.core.placement import Spec, to_partition_spec

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


class GatherOrder:
    """The uses of gathered parameters so far, in the code that is lowered now.

    Args:
        mesh: the mesh of devices.
    """

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self._uses: list[tuple[Any, Spec]] = []

    def used(self, results: Sequence[Any], specs: Sequence[Spec]) -> None:
        """Note the results of an operator that uses a gathered parameter, and their shardings."""
        found = next(((x, spec) for x, spec in zip(results, specs, strict=True) if has_bits(x)), None)
        if found is not None:
            self._uses.append(found)

    def cast(self, before: Any, after: Any) -> None:
        """Let gathers wait for the cast of a result instead of the result itself.

        Otherwise the result would have a second user, and XLA could not cast a table before it gathers it for a lookup.
        """
        self._uses = [(after if x is before and has_bits(after) else x, spec) for x, spec in self._uses]

    def after_last_but_one(self, shard: Any, spec: Spec) -> Any:
        """Return a stored parameter, with this sharding, that depends on the second to last use."""
        return self._after(shard, spec, 2)

    def after_last(self, shard: Any, spec: Spec) -> Any:
        """Return a stored parameter, with this sharding, that depends on the last use."""
        return self._after(shard, spec, 1)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the uses of a body with its own trace apart, because values of one trace cannot be used in another."""
        outside, self._uses = self._uses, []
        try:
            yield
        finally:
            self._uses = outside

    @property
    def has_uses(self) -> bool:
        """Whether a gathered parameter was used."""
        return bool(self._uses)

    def _after(self, shard: Any, spec: Spec, back: int) -> Any:
        if len(self._uses) < back or not has_bits(shard):
            return shard
        return after(self.mesh, shard, spec, *self._uses[-back])


def after(mesh: Any, shard: Any, spec: Spec, earlier: Any, earlier_spec: Spec) -> Any:
    """Return a stored parameter that depends, on each device, on the device's shard of `earlier`.

    Args:
        mesh: the mesh of devices.
        shard: the parameter.
        spec: its sharding.
        earlier: another value.
        earlier_spec: the sharding of `earlier`.
    """
    stored, other = to_partition_spec(spec), to_partition_spec(earlier_spec)

    @jax.custom_jvp
    def waiting(shard: Any, earlier: Any) -> Any:
        return jax.shard_map(_dependent, mesh=mesh, in_specs=(stored, other), out_specs=stored, check_vma=False)(
            shard, earlier
        )

    @waiting.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        return waiting(*primals), tangents[0]  # bits have no derivative, but the parameter is the same

    return waiting(shard, earlier)


def _dependent(shard: jax.Array, earlier: jax.Array) -> jax.Array:
    """Return `shard`, with a data dependence on one element of `earlier`."""
    element = lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim).reshape(())
    t = _bits(element).astype(jnp.uint32)
    zero = (t * (t + 1)) & 1
    bits = _bits(shard)
    changed = bits ^ zero.astype(bits.dtype)
    return lax.bitcast_convert_type(changed, shard.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def has_bits(x: Any) -> bool:
    """Whether a value is an array with elements of whole bytes whose bits can be changed."""
    if _compat.is_extended(x.dtype) or not math.prod(x.shape):
        return False
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype == jnp.bool_:
        return False
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    return info(x.dtype).bits == 8 * jnp.dtype(x.dtype).itemsize  # not the 4-bit types
