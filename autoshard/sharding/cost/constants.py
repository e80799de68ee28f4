"""Heuristic constants of the cost model. As far as is known, none was fitted to the benchmark's models.

The shares of peak FLOP/s and of bandwidth that kernels reach are in `machines.constants`. The plans of the benchmark's
models (`tests/golden`) depend on all constants here but `KNOWN_ASSIGNMENTS`,
`MOST_KNOWN_PRICES` and `MEMORY_CACHE_ENTRIES`.
"""

# --- Collectives (`collectives`).

# Number of device assignments that are priced for each order of the mesh axes (`best_assignment`). Source: chosen.
MOST_ASSIGNMENTS = 64

# Number of results that `_assignments` and `_distinct_assignments` keep. Only speed depends on it. Source: chosen.
KNOWN_ASSIGNMENTS = 1024

# Relative difference in step time below which the assignment that was found first is kept. It absorbs rounding errors.
# Source: chosen.
TIME_TOLERANCE = 1e-9

# Additional passes over the reduced bytes in device memory where XLA:TPU emits an all-reduce in place of the requested
# collective (`Topology.compiled`): requested kind -> passes. An all-reduce is a reduce-scatter and an all-gather. In
# place of a reduce-scatter, the all-gather is added: each part is received (written) and sent (read). In place of an
# all-gather, shards are padded with zeros (written), and the reduce-scatter is added: each part is received (written),
# and added to the own one (both read). Source: counted, not measured.
ALL_REDUCE_PASSES = {"reduce-scatter": 2, "all-gather": 4}

# --- Kernels and on-chip memory (`fusion`, `step_time`).

# Bytes of an element in which XLA:TPU writes a value that several products read: they read bfloat16 at JAX's default
# precision.
PRODUCT_OPERAND_BYTES = 2

# Number of operators after which a value has left on-chip memory. Source: chosen, not measured.
ON_CHIP_OPS = 64

# Values of one block stay in on-chip memory if their total size is at most this fraction of the memory for arrays
# (`machines.on_chip_memory`). Source: chosen. On v5e, this is half of the vector memory.
ON_CHIP_SHARE = 0.58

# Number of operators after which two products that take the same value are in different passes. Compiled for v5e
# (libtpu 0.0.42), steps with layers in straight code compute norms and gelu again in the products of the backward pass.
# Source: chosen; a layer's products are closer, and its two passes are further apart.
PASS_OPS = 64

# Most elements of a row of scores whose softmax XLA:TPU computes in the kernel of their product. Source: compiled for
# v5e (libtpu 0.0.42.1, `benchmarks/absorbed_reductions.py`), rows of 4096 are computed there; those of 8192 are not.
SOFTMAX_ROW = 4096

# Elementwise operators whose result XLA writes if both passes need it, rather than compute it twice. Source: a product,
# an activation and a product with their gradients. Compiled for h100 (jaxlib 0.10.2), the results of these were
# written, for gelu in both forms; those of logistic, exp, log1p and sqrt were computed again. Compiled for v5e (libtpu
# 0.0.42.1), those of erf and erfc were written, for which XLA has long polynomials; tanh and logistic were computed
# again.
SLOW_OPS = {"gpu": ("tanh", "erf", "erfc"), "tpu": ("erf", "erfc"), "": ()}

# A value with several users is written if its sources have at least this many times its bytes; otherwise each user
# computes it again. Source: chosen, so that residual streams are written once.
WRITTEN_SOURCES = 2

# A value that has more than this many times the bytes of its sources, such as a mask, is computed again at each use.
# Source: chosen, not measured.
BROADCAST_GROWTH = 16

# Largest number of prices of operators that a process keeps (`prices.known_prices`). It bounds memory: one takes about
# 1 KiB. Only speed depends on it. Source: chosen; a search over the variants of Llama-3 70B for 256 chips computes
# 40,000.
MOST_KNOWN_PRICES = 200_000

# --- Memory (`peak_memory`, `opaque_memory`).

# Number of entries of the cache of opaque operators' memory. It bounds memory: one takes about 10 KiB. Only speed
# depends on it. Source: chosen; each program of a search for gpt-oss-20b on 256 tpu7x has about 300 shapes of shards
# of its experts, and two entries for each in a pipeline.
MEMORY_CACHE_ENTRIES = 8192

# Number of operator classes that are priced between two lower bounds of the time of a step (`bounds.least_time`). Only
# speed depends on it. Source: chosen, not measured.
CLASSES_PER_BOUND = 4

# Factor of lower bounds of the time of a step (`bounds.least_time`). It keeps them below the time despite the rounding
# of sums in another order. Source: far above the rounding of double precision, far below differences that matter.
ROUNDING = 1 - 1e-9
