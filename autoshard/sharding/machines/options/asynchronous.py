"""Which kinds of collectives a TPU's compiler runs asynchronously under some options, so that compute can hide them.

Gathers are asynchronous on v5e, v5p, v6e and tpu7x under their default sets. Reductions are asynchronous where they run
on the SparseCores, and only there. On tpu7x that is the compiler's own default. Source: programs that libtpu 0.0.42.1
compiled (`option_sets`, `benchmarks/option_sets.py`). On v6e:4x8, a gather over all chips is asynchronous only where
gathers over two torus dimensions run on the SparseCores, as by default; under `gather-fusion` it is synchronous. On
v5p, all gathers are asynchronous where gathers are kept (see below), as by default: over 2 to 64 devices of v5p:4x4x4,
neighbours or not. Otherwise only those over boxes of more than 4 neighbouring devices in two and three dimensions are
(16 chips of a plane, all of v5p:2x2x2 and 2x2x4).

A gather over three dimensions of a torus becomes an all-reduce of shards padded with zeros, which is synchronous and
sends twice the bytes. On v5e and v6e, so do some gathers over two dimensions: those over v5e:8x8, and those over
v5e:8x16, v5e:16x16 and v6e:16x16 whose shards do not fill the tiles of the memory (16 rows or 128 columns in bfloat16).
`prefer_async_allgather_to_allreduce` keeps them as asynchronous gathers. On v5p, v6e and tpu7x it needs gathers on the
SparseCores, else it changes nothing (v5p:4x4x4, v6e:16x16, tpu7x:4x4x4). On v4 it changes nothing (v4:4x4x4).

On tpu7x, every reduce-scatter that does not run on the SparseCores becomes an all-reduce, even over the 8 devices of
tpu7x:2x2x1 (`benchmarks/reductions.py tpu7x:2x2x1`).
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.sharding.machines.options.option_table import KEEP_GATHERS, SPARSE_CORE_OFFLOAD, Options

_REDUCTIONS: Mapping[str, str] = {
    "reduce-scatter": f"{SPARSE_CORE_OFFLOAD}reduce_scatter",
    "all-reduce": f"{SPARSE_CORE_OFFLOAD}all_reduce",
}
_KEEPING: Mapping[str, tuple[str, ...]] = {
    "v5e": (KEEP_GATHERS,),
    **dict.fromkeys(("v5p", "v6e", "tpu7x"), (f"{SPARSE_CORE_OFFLOAD}all_gather", KEEP_GATHERS)),
}
"""Chip -> the options that keep gathers as they are. Source: see above."""
_GATHERING = ("v5e", "v5p", "v6e", "tpu7x")
_SPARSE_CORES = ("v5p", "v6e", "tpu7x")
_REDUCING_BY_DEFAULT = ("tpu7x",)
_SCATTERING_ON_SPARSE_CORES = ("tpu7x",)
SYNCHRONOUS_GATHERS: Mapping[str, int] = {"v5p": 4}
"""Chip -> the size of the largest group of devices whose gathers are synchronous if gathers are not kept. Source: see
above."""

GATHER_DIMS: Mapping[str, int] = {"v5p": 2}
"""Chip -> the least number of torus dimensions that a group of neighbours must span for its gathers to be asynchronous
if gathers are not kept. Source: see above."""


def on_by_default(chip: str) -> frozenset[str]:
    """Return the options for reductions on the SparseCores that a TPU's compiler turns on unless they are given.

    >>> [name.rpartition("_offload_")[2] for name in sorted(on_by_default("tpu7x"))], on_by_default("v6e")
    (['all_reduce', 'reduce_scatter'], frozenset())
    """
    return frozenset(_REDUCTIONS.values()) if chip in _REDUCING_BY_DEFAULT else frozenset()


def asynchronous_kinds(chip: str, options: Options) -> tuple[str, ...]:
    """Return the kinds of collectives that the compiler for a TPU runs asynchronously.

    Args:
        chip: the chip's name.
        options: compiler options.

    >>> asynchronous_kinds("v6e", {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": True})
    ('all-gather', 'all-reduce')
    """
    default = on_by_default(chip)
    reductions = [
        kind
        for kind, option in _REDUCTIONS.items()
        if chip in _SPARSE_CORES and _is_on(options, option, option in default)
    ]
    return (("all-gather",) if chip in _GATHERING else ()) + tuple(reductions)


def gathers_beside_compute(chip: str, devices: int, options: Options) -> bool:
    """Return whether the compiler for a TPU runs gathers over so many neighbouring devices asynchronously.

    >>> gathers_beside_compute("v5p", 4, {}), gathers_beside_compute("v5p", 64, {})
    (False, True)
    """
    kept = keeps_gathers(chip, options)
    return chip in _GATHERING and (kept or devices > SYNCHRONOUS_GATHERS.get(chip, 0))


def keeps_gathers(chip: str, options: Options) -> bool:
    """Return whether the compiler for a TPU keeps each gather over several dimensions of the torus as an all-gather.

    >>> from autoshard.sharding.machines.options import named_set
    >>> keeps_gathers("v5p", {}), keeps_gathers("v5p", named_set("sparse-core-gathers", "v5p").options["v5p"])
    (False, True)
    """
    return chip in _KEEPING and all(_is_on(options, option) for option in _KEEPING[chip])


def keeps_reduce_scatters(chip: str, options: Options) -> bool:
    """Return whether the compiler for a TPU emits reduce-scatters. Otherwise it emits all-reduces instead.

    >>> keeps_reduce_scatters("v6e", {}), keeps_reduce_scatters("tpu7x", {})
    (True, True)
    >>> keeps_reduce_scatters("tpu7x", {"xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "false"})
    False
    """
    option = _REDUCTIONS["reduce-scatter"]
    return chip not in _SCATTERING_ON_SPARSE_CORES or _is_on(options, option, chip in _REDUCING_BY_DEFAULT)


def _is_on(options: Options, name: str, default: bool = False) -> bool:
    return str(options.get(name, default)).lower() in ("true", "1")
