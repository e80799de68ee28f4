"""Constants of the kernels, with unit, source and what depends on them."""

# The checkpoint name of what the backward pass of a kernel keeps of the forward pass: the result, and its log-sum-exp.
CONTEXT = "context"

# Lanes and sublanes of a TPU's vector registers. Splash attention takes blocks of a multiple of `LANES` queries and
# keys. Source: https://docs.jax.dev/en/latest/pallas/tpu/details.html
LANES, SUBLANES = 128, 8

# Bytes of the float32 in which the kernels keep the statistics of softmax.
FLOAT32 = 4

# Keys in a block where a kernel's operator runs in plain JAX, on platforms without the kernel. Source: the default of
# `attention`. Only speed and memory on those platforms depend on it.
FALLBACK_BLOCK = 512

# Largest number of positions in a block of splash attention: of 16-bit elements, of wider ones, and computed at a time.
# Source: Google's recipes for v5p and v6e use blocks of 1024 to 2048 (https://github.com/AI-Hypercomputer/tpu-recipes);
# with these the kernels fit a vector memory of 16 MiB, the compiler's default limit.
LARGEST_BLOCK, LARGEST_BLOCK_32_BITS, LARGEST_COMPUTED = 1024, 512, 512

# Bytes of vector memory that one kernel may use by default. Source: XLA:TPU's default of
# `xla_tpu_scoped_vmem_limit_kib`, 16 MiB on v5e and v5p. On v6e, libtpu 0.0.42.1 also takes blocks that need more; only
# a larger limit among the compiler options allows larger blocks.
SCOPED_VMEM_BYTES = 16 * 2**20

# Block sizes that are tried where more vector memory may be used. Source: MaxText's recipes for v6e and tpu7x use 2048
# with limits of 64 and 96 MiB (https://github.com/AI-Hypercomputer/tpu-recipes).
LARGER_BLOCKS = (2048,)

# Blocks of scores in float32 that a kernel holds at the same time: scores, weights, and a mask or gradients. With it,
# the default blocks need at most 14.5 MiB at a head size of 128, and the kernels fit 16 MiB.
SCORES_HELD = 3

# Arrays of float32 in the shape of a block's result that a forward kernel holds at the same time. Source: compiled for
# v5p, a forward kernel with a head size of 256 and blocks of 2048 x 2048 (512 keys at a time) needs more than 32.84 MiB
# and at most 36 MiB. With 5 arrays, the estimate is 34 MiB.
RESULTS_HELD = 5

# Fraction of the vector memory that the estimate of a kernel may fill. Source: chosen, not measured.
VMEM_SHARE = 0.9

# --- The cost of splash attention (`attention_cost`). All predicted times of attention on TPUs depend on these figures.

# Vector operations for each pair of a query and a key, of which one is an exponential. Counted in the source of the
# kernels. Forward: mask (position of the key, comparison, choice), maximum, subtraction, exponential, sum, rounding to
# 16 bits. Each kernel of the backward pass: mask, subtraction, exponential, two roundings, difference and product of
# the gradient of the scores. The audit counts as many for each transcendental operation that a kernel states.
VECTOR_OPS = 9

# Additional vector operations of a soft cap: two products, a hyperbolic tangent of two operations, and its derivative.
VECTOR_OPS_SOFT_CAP = 5

# Microseconds of one step of a kernel's grid, on top of its arithmetic. Source: the overhead of about 0.35 us that
# JAX's guide to Pallas on TPUs gives (https://docs.jax.dev/en/latest/pallas/tpu/matmul.html).
STEP_OVERHEAD_US = 0.35

# How often attention in plain JAX reads or writes its float32 scores: written by the first product, read for the
# maximum, read and written by the exponential with its sum, and read by the second product. Source: counted; XLA may
# fuse more. Only prices of attention on platforms without a kernel depend on it.
PLAIN_SCORE_PASSES = 5

# --- The cost of cuDNN's attention (`cudnn_attention`). Predicted times of attention on GPUs depend on these figures.

# FLOP/s that the products of cuDNN's attention reach, as a fraction of those of large products: the forward pass, the
# causal forward pass, and the backward pass. Source: FlashAttention-3 (arXiv:2407.08608), figures 5 and 6: on an H100
# SXM with heads of 128 and 8192 positions, cuDNN reaches 600, 529 and 518 TFLOP/s (the last one without a mask). Large
# products reach 711 TFLOP/s there (`machines.chips`).
CUDNN_FORWARD, CUDNN_CAUSAL_FORWARD, CUDNN_BACKWARD = 600 / 711, 529 / 711, 518 / 711

# Size of the heads for which these hold, and the share of the time there that does not depend on the size: exponentials
# and the rest of softmax, once for each pair. Source: an H200, 4096 positions, causal, heads of 128 and of 64
# (`benchmarks/one_gpu.py --sections attention`): 0.41 of the forward pass, 0.34 of the gradients, without the time of
# memory traffic. Plans with heads of 64 depend on it; the train steps of that benchmark judge it.
CUDNN_HEAD_DIM, CUDNN_SOFTMAX_SHARE = 128, 0.38

# The largest heads of cuDNN's attention on GPUs before Hopper, the largest ones from Hopper on, and Hopper's compute
# capability. Source: what `jax.nn.dot_product_attention` of JAX 0.10.2 checks before it calls the kernels.
OLDER_HEAD_DIM, HOPPER_HEAD_DIM, HOPPER = 128, 256, 9.0

# --- The choice of an implementation (`kernel_choice`).

# With at least this many keys, `auto` uses the blockwise implementation where no kernel serves. Below, the score matrix
# is small: 2048 x 2048 float32 scores are 16 MiB per head. Source: chosen, not measured.
BLOCKWISE_KEYS = 2048

# With at least this many keys, `auto` uses the platform's kernel. Source: chosen, not measured: below, one block holds
# all keys, and the plain implementation is one kernel of XLA too.
KERNEL_KEYS = 1024

# --- Grouped products (`grouped`).

# Rows of the smallest tile of a grouped product on TPUs; arrays are padded to a multiple of it. The rows of a tile of
# 16-bit elements fill whole registers. Only speed depends on it.
SMALLEST_ROW_TILE = 128

# The largest size of a tile of a grouped product on TPUs, except that a tile may have a whole dimension. Source:
# chosen; larger tiles do not fit the vector memory together.
LARGEST_TILE = 2048

# A grouped product may use one part in this many of a core's vector memory, and at least `SCOPED_VMEM_BYTES`. Source:
# chosen. The compiler keeps whole arrays in the rest.
VECTOR_MEMORY_PART = 2

# The share of it that the blocks of a grouped product may fill. The rest is for the compiler's own values. Source:
# chosen; experts of Mixtral's sizes then compile for v4, v5p and v6e.
VECTOR_MEMORY_SHARE = 0.85

# For the choice of tiles: the FLOPs that take as long as the traffic of one byte, and the bytes whose traffic takes as
# long as one step of a kernel's grid. Source: v6e, whose ratio of FLOPs to bandwidth is the largest (918 TFLOP/s,
# 1.64 TB/s), with `STEP_OVERHEAD_US`.
FLOPS_PER_BYTE, STEP_BYTES = 560, 574_000

# Vector operations of the gradient of the matrices for each element of a tile of its operands: the row's number, two
# comparisons, their conjunction, the choice, and conversions to float32 and back. Rows are transposed, one more.
# Counted in the source of the kernel.
GRADIENT_VECTOR_OPS = 8

# The largest tile of rows where grouped products run in plain JAX, on platforms without the kernel. A product reads a
# matrix for each tile, so it makes this many FLOPs for each byte of 16-bit weights: enough for any GPU.
TILED_ROWS = 1024

# --- Grouped products on NVIDIA GPUs (`grouped.triton`). Only speed depends on these figures.

# Compute capabilities of the GPUs that the kernels are for. The blocks need 148 KiB of shared memory, and the
# multiprocessors of these GPUs have 163 KiB or 227 KiB. Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide,
# "Technical Specifications per Compute Capability".
TRITON_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")

# Rows, columns and contracted elements of a block, and the number of rows that the gradient of the matrices reads at a
# time. Source: the fastest blocks on an H100 (`benchmarks/one_gpu.py --sections experts`).
TRITON_ROWS, TRITON_COLUMNS, TRITON_INNER, TRITON_GRADIENT_ROWS = 128, 256, 64, 64

# Warps of a block, loads in flight, and blocks of rows that run next to each other. Source: as above for warps and
# loads. The number of neighbours is chosen, not measured.
TRITON_WARPS, TRITON_STAGES, TRITON_NEIGHBOURS = 8, 3, 8

# FLOP/s of these kernels, as a fraction of the FLOP/s of large products. Source: an H100, 32768 rows and 8 experts of
# 1024 x 3584 with these blocks. The product, the gradient of the rows and that of the matrices reach 0.75, 0.82 and
# 0.82, and 0.78, 0.85 and 0.85 in a second run. The other shapes of that section and the train steps judge the figure.
TRITON_REACHED = 0.8

# --- The loop over tiles on GPUs (`grouped.tiled`). Predicted times of experts without kernels depend on these figures.

# Microseconds that a GPU waits for the host in each iteration, because the host reads the condition of the loop.
# Source: an H100 (`benchmarks/one_gpu.py --sections loops`). Iterations of a loop with a condition on the device take
# 18.9 and 17.6 us longer than those of a loop of fixed length.
LOOP_WAIT_US = 18.2

# Microseconds of one kernel launch in a loop that XLA records as a CUDA graph. Source: the same runs; an iteration of 5
# kernels takes 6.9 us.
GRAPH_LAUNCH_US = 1.4

# Number of kernels in an iteration: for the product, and for the gradient of the matrices. Source: programs compiled
# for an H100.
TILE_KERNELS, TILE_KERNELS_GRADIENT = 7, 8

# --- Grouped products with codes on TPUs (`grouped.codes`). Only speed and prices depend on these figures.

# Rows of the smallest and the largest tile. The rows of a tile of 16-bit elements fill whole registers. The largest is
# chosen: with it, a decoded tile takes longer to multiply than to decode.
CODED_ROWS, LARGEST_CODED_ROWS = 16, 512

# The most elements of a decoded tile. Source: chosen. The compiler unrolls the decoding, so the time of compilation is
# linear in it: about 5 s of CPU time for a tile of this size.
DECODED_ELEMENTS = 2 * 2**20

# Vector operations for each decoded element. Counted in the program of v6e for 1440 registers of codes, where the
# compiler's final schedule has 6037 of them, most of them on the bytes of four codes at a time.
DECODING_VECTOR_OPS = 4.2
