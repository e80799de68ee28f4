"""Heuristic figures of machines: shares of rated figures, default latencies, bounds on sizes, sizes of measurements.

`chips` has the rated figures of each chip and their sources. The comment of each constant here gives its meaning and
unit, its source, and what depends on it. None of them is known to have been fitted to the benchmark's models.
"""

# --- Shares of rated figures. Predicted times (`cost.step_time`, `cost.collectives`, `hlo.kernel_costs`) use the rated
# figure times its share. `calibration` divides measured figures by it, so that predictions match the measurements.

# Fraction of a chip's peak FLOP/s that products reach, for chips without an efficiency of their own (`chips.CHIPS`).
# Source: chosen, not measured on a chip.
PEAK_REACHED = 0.95

# Fraction of a chip's memory bandwidth that kernels reach. Source: chosen, not measured. The TPU compiler's cycle
# estimates of memory-bound kernels do not determine it (`python benchmarks/compiler_cycles.py`).
BANDWIDTH_REACHED = 0.8

# Fraction of the bandwidth between a device and its host that large copies reach. Source: chosen, not measured. The
# headers of packets take 5 to 10 % of a PCIe link. The time of transfers of host memory depends on it
# (`cost.offload_time`, `hlo.host_transfers`).
HOST_BANDWIDTH_REACHED = 0.9

# Platforms on which compute hides no transfer of host memory. Source: Llama 1B on an H200, "residual on the host"
# (`benchmarks/one_gpu.py --sections steps`): transfers of 10 ms in each direction lengthen the step by 15 ms, though
# the compiled schedule starts them early. The row with residual and qkv judges it. The time of transfers of
# host memory on GPUs depends on it (`cost.offload_time`, `hlo.host_transfers`).
EXPOSED_TRANSFERS = frozenset({"cuda"})

# TPUs on which compute hides no fetch from host memory. Source: the row with `host:` in
# `benchmarks/results/recipes/llama3-70b-tpu7x-64-bf16.json`, compiled with libtpu 0.0.42.1. The fetches of a step take
# 3.2 s, and 3.0 s of copies are exposed (`copies`, joined measure). XLA changes the layouts of fetched slices on the
# SparseCores, which also run the gathers. It schedules all fetches at the start of an iteration, before any compute.
EXPOSED_FETCHES = frozenset({"tpu7x"})

# Fraction of a host's memory that the values of its devices may take. Source: chosen, not measured. The rest is for the
# operating system, the process itself and the batches that it loads. Which plans with offload fit depends on it
# (`Chip.host_limit_bytes`).
HOST_MEMORY_SHARE = 0.9

# Platform -> the largest number of bytes of host memory that its compiler allows for one device. The limit is the same
# for hosts with more memory. Source: for v4, v5e, v5p, v6e and tpu7x, libtpu 0.0.42.1 refuses programs that use more in
# total ("Used 130.62G of 128.00G host"; `tests/sharding/audit/test_compilers.py`). Which plans with offload fit depends
# on it (`Chip.host_limit_bytes`).
COMPILERS_HOST_BYTES = {"tpu": 2**37}

# Elements along one side of the tiles in which a GPU computes products. Source: chosen, not measured. `cost.step_time`
# rounds the dimensions of a shard up to tiles. (The tile of a TPU is the side of its matrix unit, in `chips`.)
GPU_TILE = 64

# Elements of a tile along the minor dimension of an array in a TPU's memory: the lanes of its vector registers.
TPU_LANES = 128

# Elements of a tile along the second dimension: the sublanes. Arrays with fewer elements there have smaller tiles, of a
# power of two. Source: the layouts of arrays compiled for v5e (libtpu 0.0.42.1), such as `{2,3,1,0:T(8,128)}`.
TPU_SUBLANES = 8

# Passes of a TPU's matrix unit over bfloat16 parts of 32-bit operands, by the name of a `jax.lax.Precision`. At default
# precision it takes one pass. Source: JAX's documentation of `Precision` (3 and 6 products of parts).
PRECISION_PASSES = {"high": 3, "highest": 6}

# 32-bit operations that the vector unit of a TPU's core can start in one cycle: 8 x 128 lanes with 4 arithmetic units
# each. Source: https://jax-ml.github.io/scaling-book/tpus. The predicted times of Pallas kernels depend on it.
VECTOR_LANES = 8 * 128 * 4

# --- Links and networks that have no rated figure. The time of every collective depends on them (`topology`).

# Latency of one hop on a TPU's torus, in microseconds. Source: chosen, not measured.
TORUS_LATENCY_US = 1.0

# Latency between the slices of a TPU, in microseconds. Source: chosen, not measured.
SLICE_LATENCY_US = 20.0

# Latency of one crossing of an NVLink switch, in microseconds. Source: chosen, not measured.
NVLINK_LATENCY_US = 5.0

# Multiprocessors of a GPU that a collective takes from compute: one for each channel of NCCL (arXiv:2507.04786).
# Source: the largest number of channels in XLA:GPU's model of collectives (`kMaxNumChannelsRing`).
NCCL_CHANNELS = 16

# Latency between GPU hosts, in microseconds. Source: chosen, not measured.
GPU_HOST_LATENCY_US = 15.0

# Bandwidth between the two devices of a tpu7x chip, as a multiple of one torus link. Source: chosen, not measured.
CORE_LINKS = 4

# Additional latency of each device after the first on a CPU target, as a fraction of the chip's latency. The devices
# are threads of one process that wait for each other. Source: chosen when the figures of the `cpu` chip were measured
# with `autoshard bench --calibrate`, which measures the latency of whole collectives, not this fraction.
CPU_LATENCY_GROWTH = 0.5

# --- Bounds on machines.

# Largest number of devices. Source: chosen, more than any machine has. Larger targets, meshes and plans are refused,
# because the search enumerates divisors of the number of devices.
MOST_DEVICES = 2**20

# XLA's flag that splits the CPU into virtual devices. Source: XLA. Messages about too few devices name it.
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

# The bounds below limit the machines that `machine_sizes` lists where no plan fits the memory.

# Largest number of chips along one dimension of a torus. Source: Google Cloud's largest slices of v5e and v6e have 16 x
# 16 chips. For tori of three dimensions, chosen.
LARGEST_TORUS_SIDE = 16

# Largest number of hosts. Source: chosen.
MOST_HOSTS = 128

# Largest number of devices on one switch, for chips whose own limit is higher (CPUs). Source: chosen.
MOST_ON_A_SWITCH = 1024

# Largest factor by which the number of devices of a target from a file is multiplied. Source: chosen.
MAX_FILE_TARGET_GROWTH = 64

# Factors by which the number of slices of a target is multiplied. Source: chosen.
SLICE_MULTIPLES = (2, 4, 8)

# --- Calibration (`autoshard bench --calibrate`). Source of all: chosen, not measured. The sizes for CPUs are smaller,
# because CPU devices are slower and share the memory of one host.

# Rows and columns of the matrices that are multiplied.
MATRIX, CPU_MATRIX = 4096, 1024

# Bytes of each array that is added.
ARRAY_BYTES, CPU_ARRAY_BYTES = 1 << 28, 1 << 25

# Bytes of a device's shard in the larger all-gather.
SHARD_BYTES, CPU_SHARD_BYTES = 1 << 24, 1 << 20

# Bytes of a device's shard in the smaller all-gather. Its time is mostly latency.
SMALL_SHARD_BYTES = 1 << 10

# Number of runs. The fastest one counts.
RUNS = 7

# Lower bounds for the measured difference between the two all-gathers, in seconds, and for the measured latency, in
# microseconds. Noise can make both negative.
LEAST_DIFFERENCE_S, LEAST_LATENCY_US = 1e-9, 0.1

# Bytes of the messages that are compared to weigh kinds of collectives (`link_prices`). The weight does not depend on
# it, because latency is taken off.
WEIGHED_BYTES = 1e9
