"""Sets of XLA options by chip: which are part of every plan, and which `verify` tries.

A set is tried where its condition holds: it needs a program with host traffic, with all-gathers, over several slices.
Sets for which wrong numbers were reported are used only on request (`Plan.verify(options=NAME)`), except on chips where
none were reported. `benchmarks/option_sets.py` shows what the sets do to small programs.

In programs that libtpu 0.0.42.1 compiles for v6e (JAX 0.10.2, 2026-11), all-gathers on the SparseCores are
asynchronous; reduce-scatters are so only with `sparse-core-reductions`. Thus `Chip.hides` of v6e and tpu7x has
all-gathers alone. For tpu7x this compiler runs reduce-scatters on the SparseCores unless told not to, by name.

Step time divided by that under the default sets (two products a layer, `fsdp:8`, same compiler):

    v6e:2x4       0.924   with `sparse-core-reductions`
                  1.005   without `scoped-vmem`; 1.368 where products are large (`--program products`)
                  1       with `host-transfers` or `reduction-layout`, which change nothing
                  1.067   with `gather-fusion-overlap`
                  1.14    with `gather-fusion`, 1.16 without `sparse-core-gathers`
                  1.567   without `no-collective-matmul`
    v5p:2x2x2     1.039   without `scoped-vmem`
                  1.078   with `gather-fusion`, or without `sparse-core-gathers`
    tpu7x:2x2x1   1.017   without `scoped-vmem`
                  0.807   without `no-sparse-core-reductions`

So gathers inside fusions, without overlap on the TensorCore, hide nothing on v6e, and `gather-fusion` is tried last.

Gathers over several torus dimensions are synchronous, unless `2d_all_gather` and `3d_all_gather` are on, too. Four
layers of two products (2048 x 8192 in bfloat16) with these options, relative to `all_gather` alone
(`benchmarks/option_limits.py gathers`):

    target      plan           rows a device   step    exposed part of the gathers' time
    v6e:4x8     fsdp:32        4096            0.798   1.00 -> 0.44
    v5p:4x4x4   dp:4 fsdp:16   4096            0.933   1.24 -> 0.39
    v5p:2x2x4   fsdp:16        1024            0.867   1.00 -> 0.54   with `3d_all_gather`; `2d_all_gather` alone: 1.00
    v5p:2x2x2   fsdp:8         1024            0.873   1.00 -> 0.51   likewise

A gather over three dimensions becomes an all-reduce of zero-padded shards, and so do gathers over two dimensions whose
shards are small. `prefer_async_allgather_to_allreduce` keeps them. Four such layers relative to all other default
options, on v5e and v6e with a width of 1024 (`benchmarks/option_limits.py kept`):

    target      plan           rows a device   step    exposed part of all collectives' time
    v5e:16x16   fsdp:256       4096            0.754
    v5p:4x4x4   fsdp:64        4096            0.738   0.14 -> 0.04 of the step
    v6e:16x16   fsdp:256       4096            0.763
    tpu7x:4x4x4 fsdp:128       4096            0.745   0.42 -> 0.32 of the step

`scoped-vmem` lets products have larger tiles. Left: cycles of an MLP and its gradients on one device, relative to the
compiler's own limit (16384 bfloat16 rows; `benchmarks/option_limits.py products`). Right: step time as above.

    chip    limit        4096 x 14336   8192 x 28672   2048 x 8192   small
    v5e     32768 KiB    0.835                                       1.061
            98304 KiB    0.817
    v5p     32768 KiB    0.790                         0.952         0.941
            65472 KiB    0.773                         0.938         1.108
    v6e     65536 KiB    0.712          0.711
            98304 KiB    0.627          0.655          0.871         0.996
    tpu7x   49152 KiB    0.742                         0.887         0.984
            65536 KiB    0.686                                       1.027

The rest of the vector memory holds whole arrays, so the largest limits make small products slower. Compilation takes
longer: the first column took 7 s on v5e and 43 s with the set. The recipes on which the efficiencies of v5p, v6e and
tpu7x are calibrated have large limits, too: 98304 KiB, and 61440 on tpu7x.

`host_memory` has the figures of sets for host memory, `full_memory` those of `full-memory`. The recipes of
`layer-scheduler` also run reduce-scatters on the SparseCores. The set leaves that out, because wrong numbers were
reported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.machines.options.full_memory import ALMOST_FULL, FULL_MEMORY, GPU_CHIPS, TPU_CHIPS
from autoshard.sharding.machines.options.host_memory import HOST_TRANSFERS, LINK_SPEEDS
from autoshard.sharding.machines.options.option_table import KEEP_GATHERS, SPARSE_CORE_OFFLOAD, TILES, Options

# A value that stands for the bytes of one layer's weights, which differ by program.
LAYER_BYTES = "LAYER_BYTES"


@shown
@dataclass(frozen=True)
class ProgramFacts:
    """What the conditions of option sets ask of a planned program.

    Attributes:
        chip: the chip's name.
        slices: the number of slices.
        host_traffic_bytes: bytes that a device exchanges with host memory in one step.
        collectives: kinds of its collectives: `all-gather`, `reduce-scatter`, `all-reduce`, ...
        gather_dims: the number of torus dimensions that its widest all-gather spans.
        layer_bytes: bytes of the weights of one layer.
        memory_share: its estimated peak memory divided by the memory of the chip.
    """

    chip: str
    slices: int = 1
    host_traffic_bytes: float = 0.0
    collectives: frozenset[str] = frozenset()
    gather_dims: int = 0
    layer_bytes: int = 0
    memory_share: float = 0.0


@shown
@dataclass(frozen=True)
class OptionSet:
    """A set of options.

    Attributes:
        name: its name, as in `Plan.verify(options=NAME)`.
        effect: what it does.
        options: chip -> its options there.
        pays: the programs that it is likely to make faster, in words.
        applies: whether a program is one of these.
        excludes: names of sets whose options it replaces.
        default: chips whose plans have it.
        numerics: chip -> wrong numbers that were reported there. On these chips it is used only on request.
        changes_code: whether it changes machine code alone, so schedules do not show its gain.
    """

    name: str
    effect: str
    options: Mapping[str, Options] = field(repr=False, hash=False)
    pays: str
    applies: Callable[[ProgramFacts], bool] = field(repr=False, compare=False)
    excludes: tuple[str, ...] = ()
    default: tuple[str, ...] = ()
    numerics: Mapping[str, str] = field(default_factory=dict, hash=False)
    changes_code: bool = False


_FUSION = "xla_tpu_enable_async_collective_fusion"
_REDUCTIONS = tuple(f"{SPARSE_CORE_OFFLOAD}{kind}" for kind in ("reduce_scatter", "all_reduce", "nd_reduce_scatter"))
_GATHER_FUSION: Options = {
    _FUSION: "true",
    f"{_FUSION}_fuse_all_gather": "true",
    f"{_FUSION}_fuse_all_reduce": "false",
    f"{_FUSION}_multiple_steps": "true",
    "xla_enable_async_all_gather": "true",
}
_SPARSE_CORES = ("v5p", "v6e", "tpu7x")
_ABNORMAL_LOSSES = "AXLearn reports abnormal losses"


def _always(_: ProgramFacts) -> bool:
    return True


def _gathers(facts: ProgramFacts) -> bool:
    return "all-gather" in facts.collectives


def _reduces(facts: ProgramFacts) -> bool:
    return bool(facts.collectives & {"reduce-scatter", "all-reduce"})


def _communicates(facts: ProgramFacts) -> bool:
    return bool(facts.collectives)


def _moves(facts: ProgramFacts) -> bool:
    return facts.host_traffic_bytes > 0


# In the order in which `verify` tries them.
_ALL = (
    OptionSet(
        "no-collective-matmul",
        "products are not split into rings of permutes",
        dict.fromkeys(TPU_CHIPS, {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}),
        "fsdp; compiled without it, a GPT's step on v5e takes 1.5 times as long",
        _always,
        default=TPU_CHIPS,
    ),
    OptionSet(
        "sparse-core-gathers",
        "all-gathers run on the SparseCores, in parallel with products",
        {
            "v5p": {
                **{f"{SPARSE_CORE_OFFLOAD}{kind}": "true" for kind in ("all_gather", "2d_all_gather", "3d_all_gather")},
                KEEP_GATHERS: "true",
            },
            "v6e": {
                **{f"{SPARSE_CORE_OFFLOAD}{kind}": "true" for kind in ("all_gather", "2d_all_gather")},
                KEEP_GATHERS: "true",
            },
            "tpu7x": {f"{SPARSE_CORE_OFFLOAD}all_gather": "true", KEEP_GATHERS: "true"},
        },
        "programs with all-gathers",
        _gathers,
        excludes=("gather-fusion", "gather-fusion-overlap"),
        default=_SPARSE_CORES,
    ),
    OptionSet(
        "kept-gathers",
        "no all-gather becomes an all-reduce of shards padded with zeros",
        {"v5e": {KEEP_GATHERS: "true"}},
        "programs with all-gathers over two torus dimensions",
        _gathers,
        default=("v5e",),
    ),
    OptionSet(
        "no-sparse-core-reductions",
        "reductions run on the TensorCore, also where the compiler's own default is the SparseCores",
        dict.fromkeys(("v6e", "tpu7x"), dict.fromkeys(_REDUCTIONS, "false")),
        "all programs, because of `sparse-core-reductions`",
        _always,
        excludes=("sparse-core-reductions",),
        default=("v6e", "tpu7x"),
    ),
    OptionSet(
        "small-tiles",
        "16-bit arrays have tiles of 8 rows everywhere",
        {"tpu7x": {TILES: "false"}},
        "loops over stacks in host memory, which XLA would move through the device to change their tiles",
        _always,
        default=("tpu7x",),
    ),
    *(
        OptionSet(
            name,
            "the scheduler expects a faster link to the host than by default",
            {"v6e": options},
            "programs with host traffic",
            _moves,
        )
        for name, options in LINK_SPEEDS.items()
    ),
    OptionSet(
        "host-transfers",
        "more transfers of host memory are in flight at the same time, and start earlier",
        dict.fromkeys(("v5e", "v5p", "v6e", "tpu7x"), HOST_TRANSFERS),
        "programs with host traffic",
        _moves,
    ),
    OptionSet(
        "full-memory",
        "the scheduler may use more of the memory, so collectives stay asynchronous in programs that almost fill it",
        FULL_MEMORY,
        "programs with all-gathers that almost fill the memory",
        lambda facts: _gathers(facts) and facts.memory_share >= ALMOST_FULL,
        default=GPU_CHIPS,
    ),
    OptionSet(
        "data-parallel-overlap",
        "gradient reductions between slices overlap with compute",
        dict.fromkeys(
            TPU_CHIPS,
            {
                "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
                "xla_tpu_data_parallel_opt_different_sized_ops": "true",
                "xla_tpu_enable_ag_backward_pipelining": "true",
                "xla_should_allow_loop_variant_parameter_in_chain": "true",
                "xla_should_add_loop_invariant_op_in_chain": "true",
                "xla_max_concurrent_host_send_recv": "100",
            },
        ),
        "programs over several slices",
        lambda facts: facts.slices > 1,
    ),
    OptionSet(
        "sparse-core-nd-gathers",
        "all-gathers over two and three torus dimensions run on the SparseCores, too",
        {
            "tpu7x": {
                f"{SPARSE_CORE_OFFLOAD}all_gather": "true",
                f"{SPARSE_CORE_OFFLOAD}2d_all_gather": "true",
                f"{SPARSE_CORE_OFFLOAD}3d_all_gather": "true",
                "xla_tpu_use_tc_device_shape_on_sc": "true",
                "xla_sc_disable_megacore_partitioning": "true",
                "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true",
                "xla_enable_async_all_gather": "true",
                KEEP_GATHERS: "true",
            }
        },
        "programs with all-gathers over at least two torus dimensions",
        lambda facts: _gathers(facts) and facts.gather_dims >= 2,
        excludes=("gather-fusion", "gather-fusion-overlap"),
    ),
    OptionSet(
        "layer-scheduler",
        "the scheduler moves collectives between layers",
        {
            "tpu7x": {
                "xla_tpu_enable_latency_hiding_layer_scheduler": "true",
                "xla_tpu_enable_layer_scheduler_for_dependent_collectives": "true",
                "xla_tpu_enable_sparse_core_collective_aggregator": "true",
                "xla_tpu_scheduler_percent_shared_memory_limit": "150",
            }
        },
        "programs with collectives",
        _communicates,
        excludes=("gather-fusion", "gather-fusion-overlap"),
    ),
    OptionSet(
        "scoped-vmem",
        "one operator may use more vector memory",
        {
            "v5e": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
            "v5p": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
            "v6e": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
            "tpu7x": {"xla_tpu_scoped_vmem_limit_kib": "49152"},
        },
        "programs with large products",
        _always,
        default=_SPARSE_CORES,
        changes_code=True,
    ),
    OptionSet(
        "reduction-layout",
        "gradients get layouts that suit reduce-scatters",
        dict.fromkeys(
            ("v6e",),
            {
                "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
                "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
                "xla_tpu_assign_all_reduce_scatter_layout": "true",
            },
        ),
        "programs with reduce-scatters or all-reduces",
        _reduces,
    ),
    OptionSet(
        "gather-fusion",
        "all-gathers run inside fusions with products, instead of on the SparseCores",
        dict.fromkeys(("v5p", "v6e"), {**_GATHER_FUSION, "xla_tpu_overlap_compute_collective_tc": "false"}),
        "programs with all-gathers",
        _gathers,
        excludes=("sparse-core-gathers", "sparse-core-nd-gathers", "layer-scheduler"),
    ),
    OptionSet(
        "sparse-core-reductions",
        "reduce-scatters and all-reduces run on the SparseCores, in parallel with products",
        dict.fromkeys(
            _SPARSE_CORES, {f"{SPARSE_CORE_OFFLOAD}reduce_scatter": "true", f"{SPARSE_CORE_OFFLOAD}all_reduce": "true"}
        ),
        "programs with reduce-scatters or all-reduces",
        _reduces,
        excludes=("no-sparse-core-reductions",),
        default=("v5p",),
        numerics=dict.fromkeys(("v6e", "tpu7x"), _ABNORMAL_LOSSES),
    ),
    OptionSet(
        "gather-fusion-overlap",
        "like gather-fusion, and fused collectives overlap with compute on the TensorCore",
        dict.fromkeys(("v5p", "v6e"), {**_GATHER_FUSION, "xla_tpu_overlap_compute_collective_tc": "true"}),
        "programs with all-gathers",
        _gathers,
        excludes=("sparse-core-gathers", "sparse-core-nd-gathers", "gather-fusion", "layer-scheduler"),
        numerics=dict.fromkeys(("v5p", "v6e"), "jax-ml/jax issue 38741 reports NaN"),
    ),
    OptionSet(
        "gpu-o1",
        "collectives of a loop start one iteration early, and the scheduler hides them; much of what "
        "JAX_OPTIMIZATION_LEVEL=O1 does",
        dict.fromkeys(
            GPU_CHIPS,
            {
                "xla_gpu_enable_latency_hiding_scheduler": True,
                "xla_gpu_enable_pipelined_all_gather": True,
                "xla_gpu_enable_pipelined_reduce_scatter": True,
                "xla_gpu_enable_pipelined_all_reduce": True,
                "xla_gpu_enable_while_loop_double_buffering": True,
            },
        ),
        "programs with collectives",
        _communicates,
    ),
    OptionSet(
        "gpu-combined-layers",
        "collectives of one layer's weights are combined into one",
        dict.fromkeys(
            GPU_CHIPS,
            {
                "xla_gpu_all_gather_combine_threshold_bytes": LAYER_BYTES,
                "xla_gpu_reduce_scatter_combine_threshold_bytes": LAYER_BYTES,
                "xla_gpu_all_reduce_combine_threshold_bytes": LAYER_BYTES,
            },
        ),
        "programs with collectives of stacked layers",
        lambda facts: _communicates(facts) and facts.layer_bytes > 0,
    ),
)
SETS: Mapping[str, OptionSet] = {each.name: each for each in _ALL}
