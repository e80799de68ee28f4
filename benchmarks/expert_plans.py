"""Plans that an expert writes by hand, and common practice. The planner is measured against both.

Only the default compiler options come from the planner. A plan is a mesh, a PartitionSpec for each parameter by its
name, and constraints inside the model by the letters of its einsums (`expert_step`). It contains what an expert knows
about each mesh axis:

    batch       the first dimension of every activation, over data, fsdp and expert
    tensor      heads, hidden sizes, vocabulary (Megatron: column, then row), `sequence` between the products
    fsdp        moments (ZeRO-1), gradients too (ZeRO-2) or parameters too (ZeRO-3), along the width of the residual
                stream. Parameters are gathered after their cast to 16 bits, gradients are reduce-scattered to where
                they are stored
    expert      experts, with all-to-alls of their tokens. Dropless experts run under a shard_map on local tokens

The step function, remat policies, microbatches and compiler options are the planner's. Devices are assigned to the mesh
row by row, tensor innermost: neighbours on the torus, devices of one host on GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from autoshard.models.moe import MoEConfig
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import Workload, workload
from autoshard.sharding.machines.options import default_options
from autoshard.train.program.build import workload_variant_values

AXES: tuple[str, ...] = ("data", "fsdp", "expert", "tensor")
MAX_TENSOR = 16  # chosen: experts use no more devices along tensor
Spec = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A workload on a machine."""

    name: str
    work: Workload
    target: str

    @property
    def devices(self) -> int:
        """The number of chips of the machine."""
        return device_count(self.target)

    @property
    def variants(self) -> list[tuple[str, int]]:
        """The remat policies and microbatches to try, for the expert and the planner alike."""
        choices = workload_variant_values(self.work)
        return [(remat, parts) for remat in choices["remat"] for parts in choices["microbatches"]]

    def variant(self, remat: str) -> Workload:
        """Return the workload under a remat policy."""
        return self.work.with_(remat=remat)


_LLAMA2_7B = workload("llama2-7b")
_LLAMA3_8B = workload("llama3-8b").with_(batch_size=128, attention="blockwise")
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("gpt-1.3b", workload("gpt-1.3b").with_(batch_size=512), "v5e:4x4"),
        Case("gpt-2.6b", workload("gpt-2.6b").with_(batch_size=512), "v5e:4x4"),
        Case("llama2-7b-2k", _LLAMA2_7B.with_(batch_size=128, context=2048), "v5p:4x4x4"),
        Case("llama2-7b-4k", _LLAMA2_7B.with_(batch_size=64, context=4096), "v5p:4x4x4"),
        Case("llama3-8b-v5e", _LLAMA3_8B, "v5e:16x16"),
        Case("llama3-8b-h100", _LLAMA3_8B, "h100:4x8"),
        Case("llama2-70b", workload("llama2-70b").with_(batch_size=256), "v5p:8x8x4"),
        Case("mixtral-8x7b", workload("mixtral-8x7b").with_(batch_size=128), "v5p:4x4x4"),
        Case("moe-2.4b", workload("moe-2.4b").with_(batch_size=256), "v5e:4x4"),
        Case("moe-10b", workload("moe-10b"), "v5e:4x4"),
        Case("wide-resnet-250m", workload("wide-resnet-250m").with_(batch_size=1536), "v5e:4x4"),
        Case("wide-resnet-1b", workload("wide-resnet-1b").with_(batch_size=1536), "v5e:4x4"),
        Case("vit-l16", workload("vit-l16").with_(batch_size=1024), "v5e:4x4"),
    )
}

# XLA overlaps collectives with parts of a product (windowed einsum) only above this size, so in effect never.
_NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_OFFLOADED = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in _KINDS}
_MORE_OPTIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "v4": ({},),
    "v5e": (_NO_WINDOWED_EINSUM, {}),
    "v5p": (_NO_WINDOWED_EINSUM | _OFFLOADED, _OFFLOADED, _NO_WINDOWED_EINSUM, {}),
    "v6e": (_NO_WINDOWED_EINSUM | _OFFLOADED, _OFFLOADED, _NO_WINDOWED_EINSUM, {}),
    "h100": (),
}
OPTION_SETS: Mapping[str, Sequence[Mapping[str, str]]] = {
    chip: ({name: str(value).lower() for name, value in default_options(chip).items()}, *more)
    for chip, more in _MORE_OPTIONS.items()
}
"""The sets of compiler options that are tried on each chip. Both sides use the first one, the planner's default."""


@dataclass(frozen=True)
class Style:
    """A way to use the devices.

    Attributes:
        sizes: devices along `AXES`.
        zero: what is sharded along fsdp: moments (1), gradients too (2), parameters too (3).
        sequence: whether the residual stream's sequence is sharded along tensor.
        spread: whether the dense parameters' state is sharded along expert, too. For them expert is a data axis.
        today: common practice instead: the batch is sharded, and each parameter along its largest dimension.
    """

    sizes: tuple[int, int, int, int]
    zero: int = 3
    sequence: bool = False
    spread: bool = False
    today: bool = False

    @property
    def name(self) -> str:
        """`data:4 zero3:4 tensor:4 seq`."""
        if self.today:
            return "today"
        kinds = ("data", f"zero{self.zero}", "expert", "tensor")
        words = [f"{kind}:{size}" for kind, size in zip(kinds, self.sizes, strict=True) if size > 1]
        over = [f"zero{self.zero}+expert"] if self.spread else []
        return " ".join([*words, *over, *(["seq"] if self.sequence else [])])

    @property
    def words(self) -> str:
        """The strategy in the planner's words. ZeRO-2 is `zero1` there, because gradients follow the moments."""
        data, group, expert, tensor = self.sizes
        kind = "fsdp" if self.zero == 3 else "zero1"
        named = {"dp": data, kind: group, "ep": expert, "tp": tensor}
        words = [f"{word}:{size}" for word, size in named.items() if size > 1]
        if self.spread:
            words += ["ep+optimizer", *(["ep+parameter"] if self.zero == 3 else [])]
        return " ".join([*words, *(["seq"] if self.sequence else [])])

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that shard the batch."""
        return ("fsdp",) if self.today else ("data", "fsdp", "expert")

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, with axes of size 1."""
        return AbstractMesh(self.sizes, AXES, axis_types=(AxisType.Auto,) * 4)

    def ways(self, axes: Sequence[str]) -> int:
        """Return the number of shards over these axes."""
        return math.prod(self.sizes[AXES.index(axis)] for axis in axes)


def device_count(target: str) -> int:
    """Return the number of chips of a machine.

    >>> device_count("v5e:4x4*2")
    32
    """
    return math.prod(int(size) for size in re.split("[x*]", target.partition(":")[2]))


def styles(case: Case) -> list[Style]:
    """Return the whole grid of an expert's styles on a case's machine, except those that do not divide the batch."""
    config = case.work.config
    experts = config.experts if isinstance(config, MoEConfig) and config.dispatch == "capacity" else 1
    image = isinstance(config, WideResNetConfig)
    return style_grid(case.devices, case.work.batch_size, experts=experts, sequence=not image)


def style_grid(devices: int, rows: int, *, experts: int = 1, tensor: bool = True, sequence: bool = True) -> list[Style]:
    """Return an expert's styles on a machine for a batch of `rows`.

    Args:
        devices: the machine's devices.
        rows: the rows of the batch. Styles that do not divide them are left out.
        experts: the number of experts that can be sharded; 1 if there are none.
        tensor: whether heads, hidden sizes and vocabulary may be sharded.
        sequence: whether the residual stream's sequence may be sharded along tensor.
    """
    found = []
    for ways in [t for t in _divisors(devices) if t <= (MAX_TENSOR if tensor else 1)]:
        streams = (False, True) if ways > 1 and sequence else (False,)
        for expert in _divisors(math.gcd(devices // ways, experts)):
            rest = devices // ways // expert
            if rows % (rest * expert):
                continue
            for group in _divisors(rest):
                sizes = (rest // group, group, expert, ways)
                for zero in (1, 2, 3) if group > 1 else (3,):
                    found += [Style(sizes, zero, stream) for stream in streams]
                for zero in (2, 3) if expert > 1 else ():
                    found += [Style(sizes, zero, stream, spread=True) for stream in streams]
    return found


def today(case: Case) -> Style:
    """Return common practice on a case's machine."""
    return Style((1, case.devices, 1, 1), today=True)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
