"""XLA options one by one: what each does, who documents it, what it needs, and what it is known to break.

Sources:
    maxtext   AI-Hypercomputer/maxtext, `benchmarks/xla_flags_library.py`: groups of flags with a comment on each
    recipes   AI-Hypercomputer/tpu-recipes, `training/`: the flags of published runs on v6e and tpu7x
    axlearn   apple/axlearn, `axlearn/common/compiler_options.py` (2026-07): defaults by TPU version, with comments
    nvidia    docs.nvidia.com/jax-toolbox, "Tips for High-Performance LLMs with JAX and XLA"
    gpu       AI-Hypercomputer/gpu-recipes, `training/a3ultra`: the flags of published runs on H200
    xla       openxla/xla, `xla/service/gpu/gpu_hlo_schedule.cc` and `xla/xla.proto`
    jax       jax-ml/jax, issue 38741 (2026-06): NaN on v6e
    libtpu    the list of options that the compiler writes with `--xla_dump_to`

libtpu 0.0.42.1 (JAX 0.10.2) accepts every TPU option of the table, alike for v5e, v5p, v6e and tpu7x. It refuses
`xla_sc_disjoint_spmem`, which older recipes set. `latency_hiding_layer_scheduler` is refused without the option that it
needs. An accepted option may still do nothing: `benchmarks/option_sets.py` prints what each set did to one program. TPU
options take the strings "true" and "false", options of XLA:GPU the values True and False.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard._shown import shown

Options = Mapping[str, str | bool | int | float]  # XLA compiler options: name -> value

NONE_KNOWN = "none known"
_UNDOES_BARRIERS = (
    "removes optimization barriers, and with them rematerialization and the order of gathers: compiled for v5e, the "
    "temporaries of rematerialized gradients grow from 160 to 333 MiB"
)
_ABNORMAL = "abnormal losses on v6e (JAX 0.6) and tpu7x (JAX 0.8), for which AXLearn leaves it off"
_NAN = (
    "NaN on v6e together with fused all-reduces, in attention with a splash kernel between all-to-alls "
    "(jax-ml/jax issue 38741)"
)


@shown
@dataclass(frozen=True)
class Option:
    """One XLA option.

    Attributes:
        name: its name.
        effect: what it does.
        source: who documents or uses it; see the top of this module.
        trouble: what it is known to break.
        needs: options without which the compiler refuses it, or which its sources set with it, with their values.
        excludes: options that must not be on at the same time.
    """

    name: str
    effect: str
    source: str
    trouble: str = NONE_KNOWN
    needs: Options = field(default_factory=dict, hash=False)
    excludes: tuple[str, ...] = ()


SPARSE_CORE_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
"""The beginning of the options that run collectives on the SparseCores."""
LINK_SPEED = "xla_tpu_pcie_bandwidth_multiplier"
"""The option that scales the bandwidth of the link to the host that the scheduler expects."""
TILES = "xla_tpu_control_large_2nd_minor_layout_for_x16"
"""The option that chooses the tiles of 16-bit arrays."""
KEEP_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
"""The option that keeps all-gathers over several dimensions of a torus."""
_FUSION = "xla_tpu_enable_async_collective_fusion"
_FUSE_GATHERS = f"{_FUSION}_fuse_all_gather"
_GATHER_OFFLOADS = tuple(f"{SPARSE_CORE_OFFLOAD}{kind}" for kind in ("all_gather", "2d_all_gather", "3d_all_gather"))
_LAYERS = "xla_tpu_enable_latency_hiding_layer_scheduler"
_AGGREGATOR = "xla_tpu_enable_sparse_core_collective_aggregator"

_ALL = (
    Option(
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        "products above this size run as a ring of permutes that overlap with parts of the product (collective matmul, "
        "windowed einsum); a large value turns that off",
        "maxtext, axlearn, recipes",
        "left on, a GPT's step on v5e takes 1.5 times as long; off, tensor parallelism loses that overlap",
    ),
    # Collectives on the SparseCores.
    Option(
        f"{SPARSE_CORE_OFFLOAD}all_gather",
        "all-gathers over one torus dimension run on the SparseCores, in parallel with products",
        "maxtext, recipes, axlearn",
        excludes=(_FUSE_GATHERS,),
    ),
    Option(
        f"{SPARSE_CORE_OFFLOAD}2d_all_gather",
        "the same for all-gathers over two torus dimensions",
        "recipes, axlearn",
        excludes=(_FUSE_GATHERS,),
    ),
    Option(
        f"{SPARSE_CORE_OFFLOAD}3d_all_gather",
        "the same for all-gathers over three torus dimensions",
        "recipes, axlearn",
        excludes=(_FUSE_GATHERS,),
    ),
    Option(
        f"{SPARSE_CORE_OFFLOAD}reduce_scatter",
        "reduce-scatters run on the SparseCores, in parallel with products",
        "recipes",
        _ABNORMAL,
    ),
    Option(f"{SPARSE_CORE_OFFLOAD}all_reduce", "all-reduces run on the SparseCores", "maxtext, recipes", _ABNORMAL),
    Option(
        f"{SPARSE_CORE_OFFLOAD}nd_reduce_scatter",
        "reduce-scatters over several torus dimensions run on the SparseCores",
        "recipes",
        _ABNORMAL,
    ),
    Option(
        "xla_tpu_enable_sparse_core_reduce_scatter_v2",
        "another algorithm of reduce-scatters on the SparseCores",
        "recipes, axlearn",
    ),
    Option(
        "xla_tpu_enable_all_gather_offload_tracing",
        "profiles show all-gathers on the SparseCores",
        "maxtext, recipes, axlearn",
    ),
    Option(
        "xla_tpu_use_tc_device_shape_on_sc",
        "programs of the SparseCores use the array layouts of the TensorCore",
        "maxtext, recipes, axlearn",
    ),
    Option(
        "xla_sc_disable_megacore_partitioning",
        "programs of the SparseCores are not split over the cores of a chip",
        "maxtext, recipes, axlearn",
    ),
    Option(
        "xla_tpu_use_single_sparse_core_for_all_gather_offload",
        "an all-gather uses one SparseCore; the others are free for other collectives",
        "recipes, axlearn",
    ),
    Option(
        KEEP_GATHERS,
        "a gather over several torus dimensions stays an all-gather, which is asynchronous, and does not become an "
        "all-reduce of zero-padded shards",
        "recipes, axlearn",
    ),
    # Continuation fusion.
    Option(
        _FUSION,
        "asynchronous collectives run inside fusions with products ('continuation fusion')",
        "maxtext, axlearn, recipes",
    ),
    Option(
        _FUSE_GATHERS,
        "continuation fusion of all-gathers",
        "maxtext, axlearn, recipes",
        needs={_FUSION: "true"},
        excludes=_GATHER_OFFLOADS,
    ),
    Option(
        f"{_FUSION}_fuse_all_reduce",
        "continuation fusion of all-reduces",
        "maxtext",
        _NAN,
        needs={_FUSION: "true"},
        excludes=(f"{SPARSE_CORE_OFFLOAD}all_reduce",),
    ),
    Option(
        f"{_FUSION}_multiple_steps",
        "one collective spans several fusions",
        "maxtext, axlearn, recipes",
        needs={_FUSION: "true"},
    ),
    Option(
        "xla_tpu_overlap_compute_collective_tc",
        "fused collectives and compute overlap on the TensorCore",
        "maxtext, axlearn, recipes",
        _NAN,
        needs={_FUSION: "true"},
    ),
    Option("xla_enable_async_all_gather", "all-gathers are asynchronous", "maxtext, axlearn, recipes"),
    # Memory and schedule.
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        "vector memory that one operator may use, in KiB; the rest holds prefetched arrays",
        "maxtext, axlearn, recipes",
        "too large a value leaves no room for prefetching. A value above what the chip has is accepted",
    ),
    Option(
        _LAYERS,
        "the scheduler moves collectives between the layers of a loop",
        "recipes",
        "the compiler refuses it alone",
        needs={_AGGREGATOR: "true"},
    ),
    Option(
        "xla_tpu_enable_layer_scheduler_for_dependent_collectives",
        "the layer scheduler also moves collectives that depend on each other",
        "recipes",
        needs={_LAYERS: "true"},
    ),
    Option(_AGGREGATOR, "collectives of the SparseCores are started together", "recipes"),
    Option(
        "xla_tpu_scheduler_percent_shared_memory_limit",
        "the device memory that the scheduler may fill, in percent; above 100 it expects later passes to free memory",
        "maxtext, recipes, axlearn",
        "above 100 a program may no longer fit",
    ),
    Option(
        "xla_latency_hiding_scheduler_rerun",
        "how often the scheduler runs again with 90 % of the memory, if its schedule exceeds the limit",
        "maxtext, axlearn",
    ),
    # Reductions of gradients.
    Option(
        "xla_tpu_use_minor_sharding_for_major_trivial_input",
        "the layout of an all-reduce shards the minor dimension, if the major one has size 1",
        "maxtext",
    ),
    Option(
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter",
        "groups of at least this many devices get a layout that suits reduce-scatters",
        "maxtext",
    ),
    Option(
        "xla_tpu_assign_all_reduce_scatter_layout",
        "an all-reduce followed by a slice gets the layout of a reduce-scatter",
        "maxtext",
    ),
    Option(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "gradient all-reduces between slices overlap with the backward pass",
        "maxtext, axlearn",
    ),
    Option(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "such all-reduces are pipelined over the iterations of a loop, whatever their sizes",
        "maxtext, axlearn",
    ),
    # Transfers of host memory.
    Option(
        "xla_tpu_enable_all_experimental_scheduler_features",
        "turns on the features of the scheduler that are off by default",
        "maxtext, axlearn",
    ),
    Option(
        "xla_tpu_enable_scheduler_memory_pressure_tracking",
        "the scheduler counts live memory and frees it before it overlaps more",
        "maxtext, axlearn",
    ),
    Option(
        "xla_tpu_host_transfer_overlap_limit",
        "how many transfers of host memory are in flight at the same time",
        "maxtext, axlearn",
    ),
    Option(
        LINK_SPEED,
        "scales the bandwidth of the link to the host that the scheduler expects; the default is 0.2",
        "recipes, libtpu",
        "with a larger value, transfers may start too late; the recipe sets 0.03",
    ),
    Option(TILES, "whether 16-bit arrays may have tiles of 16 rows instead of 8", "libtpu"),
    Option(
        "xla_tpu_aggressive_opt_barrier_removal", "removes optimization barriers", "maxtext, axlearn", _UNDOES_BARRIERS
    ),
    Option(
        "xla_lhs_prioritize_async_depth_over_stall",
        "the scheduler starts asynchronous operators as early as it can, up to the start of a loop's body",
        "maxtext, axlearn",
    ),
    Option(
        "xla_tpu_enable_ag_backward_pipelining",
        "all-gathers between slices are pipelined over the iterations of a loop",
        "maxtext, axlearn",
    ),
    Option(
        "xla_should_allow_loop_variant_parameter_in_chain",
        "this pipelining also accepts gathers of values that change over the iterations",
        "maxtext, axlearn",
    ),
    Option(
        "xla_should_add_loop_invariant_op_in_chain",
        "this pipelining also accepts operators that do not change over the iterations",
        "maxtext, axlearn",
    ),
    Option(
        "xla_max_concurrent_host_send_recv",
        "how many transfers between slices are in flight at the same time",
        "maxtext, axlearn",
    ),
    # GPUs.
    Option(
        "xla_gpu_memory_limit_slop_factor",
        "the scheduler's memory limit, in percent of (80 % of the memory - inputs and results)",
        "xla",
        "above 115 a program may no longer fit",
    ),
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        "the scheduler moves collectives, so that compute hides them",
        "nvidia, gpu",
    ),
    *(
        Option(
            f"xla_gpu_enable_pipelined_{kind}",
            f"{words} of a loop start in the iteration before the one that needs them",
            "nvidia, gpu",
            "takes memory for one more layer",
        )
        for kind, words in (
            ("all_gather", "all-gathers"),
            ("reduce_scatter", "reduce-scatters"),
            ("all_reduce", "all-reduces"),
        )
    ),
    Option(
        "xla_gpu_enable_while_loop_double_buffering",
        "a loop's body holds two iterations, so that pipelined collectives need no copy",
        "nvidia, gpu",
        "takes longer to compile",
    ),
    *(
        Option(
            f"xla_gpu_{kind}_combine_threshold_bytes",
            f"{words} are combined up to this size, in bytes",
            "nvidia, gpu",
            "combined buffers take that much memory",
        )
        for kind, words in (
            ("all_gather", "all-gathers"),
            ("reduce_scatter", "reduce-scatters"),
            ("all_reduce", "all-reduces"),
        )
    ),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _ALL}
