"""Heuristic figures of machines: shares of rated figures, default latencies, bounds on sizes, sizes of measurements.

The rated figures of each chip, with their sources, stand in `chips`. Each constant names its unit, its source and what
depends on it. No record says that any of them was fitted to the models of the benchmark.
"""

# --- Shares of rated figures. `cost.step_time`, `cost.collectives` and `hlo.kernel_costs` divide by the rated figure
# times the share; `calibration` divides what it measures by it, so that a calibrated target predicts what was measured.

# Fraction of a chip's peak FLOP/s. Chosen, not measured on a chip: the TPU compiler's cycle estimates of large products
# come to 88 to 97 % of peak (`benchmarks/estimate.py`, comment above `CHIPS`; no command prints them).
PEAK_REACHED = 0.95
# Fraction of a chip's memory bandwidth. Chosen, not measured. The TPU compiler's cycle estimates cannot confirm it
# (`python benchmarks/compiler_cycles.py`).
BANDWIDTH_REACHED = 0.8

# Elements along one side of the tiles in which a GPU computes products: a shard that fills a tile by half takes as long
# as a full one. Chosen, not measured. `cost.step_time` depends on it. (A TPU's tile is the side of its matrix unit.)
GPU_TILE = 64

# --- Links and networks that the table of chips has no figure for. The time of every collective depends on them.

# Microseconds of one hop of a TPU's torus. Chosen, not measured.
TORUS_LATENCY_US = 1.0
# Microseconds between the slices of a TPU. Chosen, not measured.
SLICE_LATENCY_US = 20.0
# Microseconds of one crossing of NVLink's switch. Chosen, not measured.
NVLINK_LATENCY_US = 5.0
# Microseconds between GPU hosts. Chosen, not measured.
GPU_HOST_LATENCY_US = 15.0
# Bytes per second and chip between the slices of a TPU: the 50 Gbit/s of data center network that Google's page on v5p
# gives (https://docs.cloud.google.com/tpu/docs/v5p-training); taken for all versions.
SLICE_BANDWIDTH = 6.25e9
# Bandwidth between the two devices of a tpu7x chip, as a multiple of one torus link. Chosen, not measured.
CORE_LINKS = 4
# Additional latency for each further device of a CPU target, as a fraction of the latency of the first: the devices are
# threads of one process that wait in turn. Chosen together with the figures that `autoshard bench --calibrate` gave for
# 8 virtual devices on 2 cores; that command gives the latency of a collective as a whole, not this fraction.
CPU_LATENCY_GROWTH = 0.5

# --- Bounds on machines.

# Devices. Chosen: more than any machine has. Larger targets, meshes and plans are refused, because the search goes
# through the divisors of the number of devices.
MOST_DEVICES = 2**20
# The remaining bounds limit the larger machines that `machine_sizes` proposes where no plan fits the memory.
# Chips along one dimension of a torus. Google Cloud's largest slices of v5e and v6e are 16 x 16; for chips with a torus
# of three dimensions, chosen.
LARGEST_TORUS_SIDE = 16
# Hosts. Chosen.
MOST_HOSTS = 128
# Devices behind one switch where the chip sets no bound of its own, as for CPUs. Chosen.
MOST_ON_A_SWITCH = 1024
# Multiple of the devices of a target that was read from a file. Chosen.
MOST_TIMES = 64
# Multiples of the slices of a target with several slices. Chosen.
SLICE_MULTIPLES = (2, 4, 8)

# --- Calibration (`autoshard bench --calibrate`). All chosen, not measured; CPU devices get smaller arrays because they
# are slower and share the memory of one host.

# Rows and columns of the matrices that are multiplied: on accelerators, on CPUs.
MATRIX, CPU_MATRIX = 4096, 1024
# Bytes of each array that is added.
ARRAY_BYTES, CPU_ARRAY_BYTES = 1 << 28, 1 << 25
# Bytes of a device's shard in the larger all-gather.
SHARD_BYTES, CPU_SHARD_BYTES = 1 << 24, 1 << 20
# Bytes of a device's shard in the smaller all-gather, whose time is mostly latency.
SMALL_SHARD_BYTES = 1 << 10
# Runs, the fastest of which counts.
RUNS = 7
# Least difference in seconds between the larger and the smaller all-gather, and least latency in microseconds: noise
# can make either zero or negative.
LEAST_DIFFERENCE_S, LEAST_LATENCY_US = 1e-9, 0.1
