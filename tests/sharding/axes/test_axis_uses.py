"""What operators say of their axes: which of their matrices count, and which stacks of matrices are experts."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, operator, plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.axes.axis_uses import _without_scales
from autoshard.sharding.program.tracing import trace
from autoshard.spmdrules.core.layer_stacks import taking_stacks

CODES = (("e0",), ("e1",), ("f0", "f1"))
SCALES = (("e0",), ("f0",))
DOWN = (("f0", "f1"), ("e0", "e1"))


@pytest.mark.parametrize(
    ("matrices", "kept"),
    [
        ([CODES, SCALES], [CODES]),  # the scales of blocks have some of the factors of the codes
        ([SCALES, CODES], [CODES]),
        ([CODES, DOWN], [CODES, DOWN]),  # the same factors: both are matrices
        ([SCALES], [SCALES]),  # a matrix of its own
        ([CODES, (("e0",), ("g",))], [CODES, (("e0",), ("g",))]),
    ],
)
def test_scales_of_blocks_are_no_matrices_of_their_own(matrices, kept):
    found = _without_scales([(frozenset({n}), dims) for n, dims in enumerate(matrices)])
    assert [dims for _, dims in found] == kept


ROWS, SEQ, WIDTH, RANK, HEADS, PLAIN, ROTARY, VALUES = 4, 24, 64, 16, 8, 6, 4, 5


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def latent_decode(weights, state):
    """A decode step of latent attention. `key` and `value` multiply the queries and results of heads, not the cache."""
    latents, rotated, seen = state
    x = jnp.sin(weights["embed"][seen])
    q = jnp.einsum("be,ehd->bhd", x, weights["query"])
    new_latent, new_rotated = jnp.split(x @ weights["down"], [RANK], axis=-1)
    rows = jnp.arange(ROWS)
    latents, rotated = latents.at[rows, seen].set(new_latent), rotated.at[rows, seen].set(new_rotated)
    key, value = jnp.split(weights["key_value"], [PLAIN], axis=-1)
    q_latent = jnp.einsum("bhd,rhd->bhr", q[..., :PLAIN], key)
    scores = jnp.einsum("bhr,btr->bht", q_latent, latents) + jnp.einsum("bhd,btd->bht", q[..., PLAIN:], rotated)
    weighted = jax.nn.softmax(jnp.where(jnp.arange(SEQ) <= seen[:, None, None], scores, -1e9), axis=-1)
    y = jnp.einsum("bhr,rhd->bhd", jnp.einsum("bht,btr->bhr", weighted, latents), value)
    y = x + jnp.einsum("bhd,hde->be", y, weights["output"])
    kept = jnp.sin(jnp.tanh(y @ weights["ffn_in"]) @ weights["ffn_out"])
    return latents.at[rows, seen].add(kept[:, :RANK]), rotated, seen + 1


def latent_arguments():
    """Random weights, and a cache that holds 5 to 20 tokens of each row."""
    sizes = {
        "embed": (SEQ, WIDTH), "query": (WIDTH, HEADS, PLAIN + ROTARY), "down": (WIDTH, RANK + ROTARY),
        "key_value": (RANK, HEADS, PLAIN + VALUES), "output": (HEADS, VALUES, WIDTH), "ffn_in": (WIDTH, 96),
        "ffn_out": (96, WIDTH),
    }  # fmt: skip
    random = np.random.default_rng(0)
    weights = {name: jnp.asarray(random.normal(0, 0.5, size), jnp.float32) for name, size in sizes.items()}
    cache = (jnp.asarray(random.normal(0, 1, (ROWS, SEQ, size)), jnp.float32) for size in (RANK, ROTARY))
    return weights, (*cache, jnp.asarray([5, 20, 9, 13], jnp.int32))


def test_heads_with_a_matrix_each_are_no_experts():
    arguments = latent_arguments()
    step = auto_shard(latent_decode, plan="tp:8")
    made = step.plan(*arguments)
    leaves = {leaf.path.rpartition("/")[2]: leaf for leaf in made.inputs}
    assert [leaves["key_value"].axes[1], leaves["query"].axes[1], leaves["output"].axes[0]] == ["heads"] * 3
    assert [leaves[name].spec.index("tp") for name in ("key_value", "query", "output")] == [1, 1, 0]
    found, expected = step(*arguments), jax.jit(latent_decode)(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 2e-6 * np.linalg.norm(other)  # the order of sums differs
    # Each device computes its own heads: the plan sums the results of `output` only, and moves no queries.
    assert not [traffic for traffic in made.traffic if traffic[0] in ("all-gather", "all-to-all", "reduce-scatter")]


def blocks(weights, x):
    """A block-diagonal product between two others."""
    y = jnp.einsum("bhd,hde->bhe", (x @ weights["first"]).reshape(16, 8, 12), weights["block"])
    return jnp.tanh(y).reshape(16, 96) @ weights["last"]


def mixture(weights, x):
    """A mixture in which every expert computes every row."""
    gates = jax.nn.softmax(x @ weights["first"], axis=-1)
    hidden = jnp.tanh(jnp.einsum("ebd,edf->ebf", gates.T[..., None] * x, weights["block"]))
    return jnp.einsum("ebf,efd->ebd", hidden, weights["last"]).sum(0)


@pytest.mark.parametrize(
    ("layer", "sizes", "name"),
    [(blocks, [(32, 96), (8, 12, 12), (96, 32)], "heads"), (mixture, [(32, 8), (8, 32, 48), (8, 48, 32)], "experts")],
)
def test_a_stack_is_of_heads_only_if_other_weights_produce_and_contract_it(layer, sizes, name):
    def loss(weights, x):
        for of_layer in weights["layers"]:
            x = x + layer(of_layer, x)
        return jnp.mean((x @ weights["out"]) ** 2)

    def step(weights, x):
        return jax.tree.map(lambda w, grad: w - 0.1 * grad, weights, jax.grad(loss)(weights, x))

    of_layer = dict(zip(("first", "block", "last"), shapes(*sizes), strict=True))
    weights = {"layers": [of_layer] * 2, "out": shapes((32, 20))[0]}
    made = plan(step, weights, *shapes((16, 32)), target="v5e:2x2", plan="fsdp:4")
    stacks = {leaf.axes[0].partition("_")[0] for leaf in made.inputs if leaf.path.endswith("block")}
    assert stacks == {name}


@operator("b d, l e d f, l e f d, 1 -> b d; reduce e f; whole l d")
@taking_stacks("l", layer=3)
def experts_of_layer(x, up, down, layer):
    """Sums the experts of one layer of two stacks."""
    up, down = (jax.lax.dynamic_index_in_dim(one, layer[0], keepdims=False) for one in (up, down))
    return jnp.einsum("ebf,efd->bd", jnp.tanh(jnp.einsum("bd,edf->ebf", x, up)), down)


@pytest.mark.parametrize("layers", [3, 1], ids=["a loop over layers", "one layer"])
def test_stacks_that_a_loop_does_not_slice_are_those_of_experts_of_layers(layers):
    def decode(weights, state):
        x = jnp.sin(weights["embed"][state])

        def layer(x, own):
            number, scale = own
            return x + experts_of_layer(x * scale, weights["up"], weights["down"], number), None

        numbers = jnp.arange(layers, dtype=jnp.int32)[:, None]
        if layers == 1:
            return jnp.argmax(layer(x, (numbers[0], weights["scale"][0]))[0] @ weights["embed"].T, axis=1)
        x, _ = jax.lax.scan(layer, x, (numbers, weights["scale"]))
        return jnp.argmax(x @ weights["embed"].T, axis=1)

    sizes = {"embed": (40, 16), "scale": (layers, 16), "up": (layers, 4, 16, 24), "down": (layers, 4, 24, 16)}
    random = np.random.default_rng(0)
    weights = {name: jnp.asarray(random.normal(0, 0.5, size), jnp.float32) for name, size in sizes.items()}
    tokens = jnp.arange(512, dtype=jnp.int32) % 40  # gathering weights moves fewer bytes than gathering rows
    expected = jax.jit(decode)(weights, tokens)
    step = auto_shard(decode, plan="dp:2 ep:4")
    leaves = {leaf.path.rpartition("/")[2]: leaf for leaf in step.plan(weights, tokens).inputs}
    for name in ("up", "down"):
        assert leaves[name].axes[1] == "experts" and tuple(leaves[name].spec)[:2] == (None, "ep")
    assert layers == 1 or leaves["up"].axes[0] == leaves["down"].axes[0] == leaves["scale"].axes[0]
    np.testing.assert_array_equal(step(weights, tokens), expected)
    # Stored in shards, each layer is gathered alone.
    step = auto_shard(decode, plan="fsdp:8")
    sent = [one[2] for one in step.plan(weights, tokens).traffic if one[0] == "all-gather"]
    assert max(sent) == pytest.approx(7 / 8 * (weights["up"].nbytes + weights["down"].nbytes))
    np.testing.assert_array_equal(step(weights, tokens), expected)
    gathered = re.findall(r"= f32\[(\d+),4,\d+,\d+\]\S* all-gather\(", step.lower(weights, tokens).compile().as_text())
    assert gathered == ["1", "1"]


def rays(weights, origins, directions, pick):
    """The colors of points on rays, which are computed from their coordinates by `pick`."""
    points = origins[:, None] + jnp.linspace(0.0, 1.0, 16)[:, None] * directions[:, None]
    features = jnp.stack(pick(points), -1)
    return jnp.mean(jnp.tanh(features @ weights["in"]) @ weights["out"])


def coordinates(points):
    return [jnp.sin(points[..., i]) for i in range(3)]


def split_coordinates(points):
    return [jnp.sin(each[..., 0]) for each in jnp.split(points, 3, -1)]


def alike(points):
    """A sum and two single positions."""
    return [jnp.sum(points, -1), points[..., 0], points[..., 2]]


@pytest.mark.parametrize(("pick", "is_sequence"), [(coordinates, False), (split_coordinates, False), (alike, True)])
def test_positions_that_are_all_taken_by_themselves_are_no_sequence(pick, is_sequence):
    weights = {"in": jax.ShapeDtypeStruct((3, 64), "float32"), "out": jax.ShapeDtypeStruct((64, 4), "float32")}
    data = jax.ShapeDtypeStruct((4096, 3), "float32")
    found = analyse(trace(partial(rays, pick=pick), (weights, data, data), {}))
    assert bool(found.roles.sequence) == bool(found.roles.context) == is_sequence


def attention_over_blocks(weights, x, count):
    """Attention whose loop over blocks of keys is unrolled."""
    query, key = jnp.tanh(x @ weights[0]), jnp.tanh(x @ weights[1])
    blocks = key.reshape(len(x), count, -1, x.shape[-1])
    summed = jnp.zeros_like(x)
    for i in range(count):
        scores = jnp.exp(jnp.einsum("bqd,bkd->bqk", query, blocks[:, i]))
        summed += jnp.einsum("bqk,bkd->bqd", scores, blocks[:, i])
    return jnp.mean(summed**2)


def attention_with_an_output_for_each_position(weights, x):
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ weights[0], x @ weights[1]))
    y = scores @ x
    return sum(i * jnp.mean(y[:, i] ** 2) for i in range(y.shape[1]))


@pytest.mark.parametrize(
    ("loss", "positions"),
    [(partial(attention_over_blocks, count=4), 512), (attention_with_an_output_for_each_position, 8)],
)
def test_positions_of_attention_are_a_sequence_although_slices_take_them(loss, positions):
    args = jax.ShapeDtypeStruct((2, 64, 64), "float32"), jax.ShapeDtypeStruct((8, positions, 64), "float32")
    found = analyse(trace(jax.grad(loss), args, {}))
    axes, (_, x) = found.axes, found.axes.program.inputs
    assert found.roles.context == axes.of_value[x][1]


def test_adapters_that_are_looked_up_for_each_row_leave_hidden_axes_shardable():
    rows, width, hidden, adapters, rank = 16, 32, 64, 6, 4

    def layer(base, x, down, up):
        return x @ base + jnp.einsum("bti,bir,bro->bto", x, down, up)

    def step(state, base, tokens, chosen):
        def loss(state):
            x = base["embed"][tokens]
            hidden = jnp.tanh(layer(base["up"], x, state["in"][chosen], state["to"][chosen]))
            x = x + layer(base["down"], hidden, state["from"][chosen], state["out"][chosen])
            return -jnp.mean(jax.nn.log_softmax(x @ base["embed"].T)[..., 0])

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))

    state = {"in": (adapters, width, rank), "to": (adapters, rank, hidden), "from": (adapters, hidden, rank),
             "out": (adapters, rank, width)}  # fmt: skip
    state, base = (
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        for shapes in (state, {"embed": (48, width), "up": (width, hidden), "down": (hidden, width)})
    )
    tokens, chosen = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 8), (rows,)))
    made = plan(step, state, base, tokens, chosen, target="cpu:8", plan="tp:8")
    assert made.logical_axes["base/up"] == ("embed", "ffn")
    specs = made.in_specs[1]
    assert specs["up"] == P(None, specs["down"][0]) and specs["down"][0]
