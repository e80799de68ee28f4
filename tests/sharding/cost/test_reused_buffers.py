"""Results that XLA stores in the buffer of another value."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard import plan
from autoshard.sharding.cost import peak_memory, program_kernels
from autoshard.sharding.cost.reused_buffers import scattered_into_sums
from autoshard.sharding.planner.bound_plan import bound_or_error

ROWS, VOCAB, WIDTH = 4096, 8192, 64
SHAPES = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((WIDTH, VOCAB), (ROWS, WIDTH))]
LABELS = jax.ShapeDtypeStruct((ROWS,), "int32")


def temporary_bytes():
    """The temporaries of the gradient of a loss that picks the targets' logits with a gather."""

    def loss(w, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w).astype("float32"), labels).mean()

    return plan(jax.grad(loss), *SHAPES, LABELS, plan="dp:8", target="v5e:2x4").estimate.memory_bytes["temporary"]


def test_the_scatter_of_a_loss_takes_no_memory_of_its_own(monkeypatch):
    shared = temporary_bytes()
    monkeypatch.setattr(peak_memory, "scattered_into_sums", lambda program, written: frozenset())
    assert temporary_bytes() - shared == pytest.approx(4 * ROWS / 8 * VOCAB, rel=0.1)


def found(fn, *shapes):
    program = bound_or_error(plan(fn, *shapes, plan="dp:8", target="v5e:2x4").bound).problem.program
    return [program.avals[v].shape for v in scattered_into_sums(program, set())]


X, INDICES = jax.ShapeDtypeStruct((64, 16), "float32"), jax.ShapeDtypeStruct((64,), "int32")


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(2 * x) + jnp.sin(x), [(64, 16)]),
        (lambda x, i: jnp.cos(x).at[i].add(2 * x) + jnp.sin(x), []),  # not into zeros
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(2 * x) * jnp.sin(x), []),  # not a sum
        (lambda x, i: (y := jnp.zeros((64, 16)).at[i].add(x)) + jnp.sin(x) * jnp.sum(y), []),  # used twice
        (lambda x, i: (y := jnp.zeros((64, 16)).at[i].add(x)) + y, []),  # added to itself
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(x) + x @ x.T @ x, []),  # to a product without a buffer
    ],
)
def test_only_scatters_into_zeros_that_are_added_once(fn, expected):
    assert found(fn, X, INDICES) == expected


def peak_bytes(fn, *shapes, target):
    return plan(fn, *shapes, plan="dp:8", target=target).estimate.memory_bytes["temporary"]


LARGE = jax.ShapeDtypeStruct((65_536, 256), "float32")
BYTES = LARGE.size * 4 / 8  # of one device


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        (lambda x: jnp.sin(jnp.cumsum(x, axis=1)), 1),  # written over the sums
        (lambda x: jnp.sin(jnp.cumsum(x, axis=1)).astype("bfloat16"), 1.5),  # not of the same bytes
        (lambda x: (y := jnp.cumsum(x, axis=1)) + jnp.sort(jnp.sin(y), axis=1), 3),  # the sums are needed later
        (lambda x: jnp.roll(jnp.cumsum(x, axis=1), 128, axis=1), 2),  # it reads other elements
    ],
)
def test_an_elementwise_result_is_written_over_an_operand_that_nothing_needs_later(fn, arrays):
    assert peak_bytes(fn, LARGE, target="cpu:8") == arrays * BYTES


def sorted_sums(y, *arrays):
    return sum(jnp.sum(jnp.sort(each, axis=1), axis=1) for each in arrays)


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        # Both results are written at once, one of them over the sums. They are live while the first one is sorted.
        (lambda y: sorted_sums(y, jnp.sin(y), jnp.cos(y)), 3),
        (lambda y: sorted_sums(y, jnp.sin(y), y, jnp.cos(y)), 4),  # the sums are sorted in between
    ],
)
def test_a_kernel_with_several_results_writes_all_of_them_at_its_first_operator(fn, arrays):
    def of_sums(x):
        return fn(jnp.cumsum(x, axis=1))

    assert peak_bytes(of_sums, LARGE, target="cpu:8") == pytest.approx(arrays * BYTES, rel=0.05)


def test_a_product_is_not_written_over_its_operand():
    def fn(x, w):
        return jnp.sum(jnp.sort(jnp.tanh(jnp.cumsum(x, axis=1) @ w), axis=1), axis=1)

    weight = jax.ShapeDtypeStruct((256, 256), "float32")
    assert peak_bytes(fn, LARGE, weight, target="v5e:2x4") == pytest.approx(2 * BYTES, rel=0.05)


def network(weights, x, act, remat):
    """Layers of two products with an activation, or of three with a gate, `[rows, 512]`, in bfloat16."""

    def layer(x, w):
        h = act(x @ w["up"])
        h = h * (x @ w["gate"]) if "gate" in w else h
        return x + h @ w["down"]

    for w in weights:
        x = (jax.checkpoint(layer) if remat else layer)(x, w)
    return jnp.mean(x.astype("float32") ** 2)


@pytest.mark.parametrize(("act", "gated", "remat", "expected"), [
    (jax.nn.relu, False, False, 4),  # each layer keeps what its activation takes; its gradient is written over that
    (jax.nn.gelu, False, False, 4),
    (jax.nn.silu, False, False, 4),
    (jax.nn.silu, True, False, 9),  # and the gate; the gradients of both are written over them
    (functools.partial(jax.nn.gelu, approximate=False), False, False, 9),  # two results of a kernel: see below
    (jax.nn.gelu, False, True, 1),
    (functools.partial(jax.nn.gelu, approximate=False), False, True, 3),
    (jax.nn.silu, True, True, 3),
])  # fmt: skip
def test_backward_passes_of_activations_on_tpus_hold_as_many_arrays_as_compiled(act, gated, remat, expected):
    """Compiled for v5e, such programs hold these numbers of arrays of hidden features (`benchmarks/peak_memory.py`).

    One kernel writes the input of an exact gelu and its `erfc`. Nothing is written over one of several results.
    """
    rows, width, hidden, layers = 65_536, 512, 8192, 4
    shapes = {"up": (width, hidden), "down": (hidden, width)} | ({"gate": (width, hidden)} if gated else {})
    weights = [{name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}] * layers
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")

    def step(weights, x):
        return jax.grad(functools.partial(network, act=act, remat=remat), (0, 1))(weights, x)

    bound = bound_or_error(plan(step, weights, x, plan="dp:8", target="v5e:2x4").bound)
    alive = bound.problem.memory.at_peak(bound.layout, bound.problem.cost(bound.layout).live_buffers)
    held = sum(size for _, size in alive) / (rows * hidden * 2 / 8)
    inputs = (layers + 1) * width / hidden  # of the layers
    assert expected + inputs / 2 < held < expected + inputs + 0.5


def test_on_a_gpu_a_kernel_that_reduces_its_own_rows_writes_over_nothing():
    """As the backward pass of a softmax. The maximum of `two` is read by two kernels, so it is computed before them."""

    def one(x):
        y = jnp.cumsum(x, axis=1)
        return y - jnp.max(y, axis=1, keepdims=True)

    def two(x):
        y = jnp.cumsum(x, axis=1)
        top = jnp.max(y, axis=1, keepdims=True)
        return y - top, jnp.sort(jnp.sin(top), axis=0)

    assert peak_bytes(one, LARGE, target="h100:8") >= 2 * BYTES
    assert peak_bytes(two, LARGE, target="h100:8") < 1.1 * BYTES
    assert peak_bytes(one, LARGE, target="cpu:8") < 1.1 * BYTES


def test_parts_of_stacks_have_no_buffers_of_their_own():
    """Elementwise results are written into the stack, and slices of it are read where they are needed."""

    def stacked(x):
        return jax.lax.scan(lambda c, _: (c, jnp.sin(c)), x, None, length=4)[1]

    def summed(xs):
        return jax.lax.scan(lambda c, x: (c + jnp.sin(x), None), jnp.zeros_like(xs[0]), xs)[0]

    def sorted_slices(xs):
        return jax.lax.scan(lambda c, x: (c + jnp.sort(x, axis=1), None), jnp.zeros_like(xs[0]), xs)[0]

    stack = jax.ShapeDtypeStruct((4, *LARGE.shape), "float32")
    assert peak_bytes(stacked, LARGE, target="cpu:8") == 4 * BYTES
    assert peak_bytes(summed, stack, target="cpu:8") == BYTES
    assert peak_bytes(sorted_slices, stack, target="cpu:8") == 3 * BYTES  # the carry, a slice and its sorted copy


def test_moved_stages_of_a_pipeline_are_no_copies(monkeypatch):
    """The loop over a stage's layers takes the weights with their dimensions of stages and layers swapped."""

    def step(weights, x):
        loss = lambda w: (jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, w)[0] ** 2).mean()  # noqa: E731
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8, 4096, 4096), (64, 4096))]

    def estimate():
        return plan(step, *shapes, plan="pp:4", microbatches=4, target="v5e:2x2", donate_argnums=0).estimate

    shared = estimate()
    monkeypatch.setattr(program_kernels, "views", lambda axes: frozenset())
    copied = estimate()
    assert copied.compute_us > 1.1 * shared.compute_us
    assert copied.memory_bytes["temporary"] - shared.memory_bytes["temporary"] >= 2 * 2 * 4096 * 4096


def test_layers_are_grouped_without_a_copy(monkeypatch):
    """Scans over groups of layers, forward and backward, read the parameters from the stack of all layers."""

    def step(ws, x):
        def loss(ws):
            @jax.checkpoint
            def group(x, each):
                return jnp.tanh(jnp.tanh(x @ each[0]) @ each[1]), None

            return jnp.sum(jax.lax.scan(group, x, ws.reshape(-1, 2, *ws.shape[1:]))[0])

        return ws - jax.grad(loss)(ws)

    shapes = jax.ShapeDtypeStruct((16, 1024, 1024), "float32"), jax.ShapeDtypeStruct((8, 1024), "float32")

    def temporary_bytes():
        planned = plan(step, *shapes, plan="fsdp:8", target="v5e:2x4", donate_argnums=0)
        return planned.estimate.memory_bytes["temporary"]

    shared = temporary_bytes()
    monkeypatch.setattr(program_kernels, "views", lambda axes: frozenset())
    assert temporary_bytes() - shared > 0.9 * 16 * 1024**2 * 4 / 8
