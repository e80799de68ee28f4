"""Names of logical axes: those of graphs, of the elements of a head, and of dimensions that are no axes."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from autoshard.models.workloads import workload
from autoshard.sharding.axes.analysis import Analysis, analyse
from autoshard.sharding.program.tracing import Traced, trace
from autoshard.train.program.build import workload_step
from tests.corpus import graph_network


@cache
def analysed(name: str) -> tuple[Traced, Analysis]:
    if name == "graph_network":
        step, state, data = graph_network.make()
        traced = trace(step, (*state, data), {})
    else:
        step, state, data = workload_step(workload(name))
        traced = trace(step, (state, data), {})
    return traced, analyse(traced)


def axes_of(name: str, end: str) -> list[list[str]]:
    """The names of the axes of each dimension of the first input whose path has this end."""
    traced, analysis = analysed(name)
    value = next(v for v, path in zip(traced.program.inputs, traced.in_names, strict=True) if path.endswith(end))
    return [[analysis.axes.name(c) for c in dim] for dim in analysis.axes.of_value[value]]


def test_a_graph_has_edges_nodes_and_graphs():
    assert axes_of("graph_network", "graph/edges") == [["edges"], ["features"]]
    assert axes_of("graph_network", "graph/nodes")[0] == ["nodes"]
    assert axes_of("graph_network", "graph/target") == [["graphs"]]
    traced, analysis = analysed("graph_network")
    assert not {"batch", "vocab"} & {*analysis.axes.names.values()}
    roles = {path: analysis.roles.inputs[v] for v, path in zip(traced.program.inputs, traced.in_names, strict=True)}
    assert [roles[f"graph/{name}"] for name in ("nodes", "edges", "target", "senders")] == ["data"] * 4


def test_a_table_that_is_indexed_is_no_graph():
    """A frozen table is not scattered into; a trained one is state."""

    def step(params, frozen, tokens):
        def loss(params):
            x = frozen[tokens] + params["table"][tokens]
            return jnp.mean((x @ params["w"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"table": jnp.ones((32, 8)), "w": jnp.ones((8, 16))}
    traced = trace(step, (params, jnp.ones((32, 8)), jnp.zeros((64, 4), jnp.int32)), {})
    names = {*analyse(traced).axes.names.values()}
    assert {"batch", "vocab"} <= names and not {"edges", "nodes", "graphs"} & names


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_head_size_is_called_head_dim(model):
    """Llama rotates queries and keys, so that their weights do not have the axis of the contraction."""
    for weight in ("wq", "wk", "wv"):
        (last,) = axes_of(model, f"attention/{weight}")[-1]
        assert last.startswith("head_dim")
    assert axes_of(model, "attention/wo")[-2][-1].startswith("head_dim")


def test_only_axes_of_the_size_of_a_head_are_called_head_dim():
    (count,) = axes_of("moe-tiny", "attention/wv")[-1]
    assert count.startswith("head_dim")
    _, analysis = analysed("moe-tiny")
    sizes = {analysis.axes.sizes[c] for c, name in analysis.axes.names.items() if name.startswith("head_dim")}
    assert len(sizes) == 1


def test_the_words_of_a_key_are_no_logical_axis():
    traced, analysis = analysed("gpt-tiny")
    value = next(v for v, path in zip(traced.program.inputs, traced.in_names, strict=True) if path == "state/key")
    (dim,) = analysis.axes.of_value[value]
    assert {*dim} <= analysis.axes.key_words and not {*dim} & analysis.axes.names.keys()

    def step(params, x, key):
        noise = jax.random.normal(jax.random.wrap_key_data(key), x.shape)
        return jax.tree.map(lambda p: p + jnp.mean((x + noise) @ p), params)

    key = jax.ShapeDtypeStruct((2,), "uint32")
    wrapped = analyse(trace(step, ({"w": jnp.ones((4, 2))}, jnp.ones((8, 4)), key), {}))
    assert not [name for name in wrapped.axes.names.values() if name.startswith("key")]


def test_axes_that_no_input_has_are_named_by_what_computes_them():
    """Llama's rotated queries and keys have other axes than their weights; an expert's capacity is in no input."""
    for model, name in (("llama-tiny", "head_dim"), ("moe-tiny", "iota:3")):
        _, analysis = analysed(model)
        axes, computed = analysis.axes, analysis.axes.computed_names
        found = {c for dims in axes.of_value for dim in dims for c in dim} - axes.key_words
        names = [axes.name(c) for c in found]
        assert not [each for each in names if each.startswith("axis")] and len({*names}) == len(names)
        assert [each for each in computed.values() if each.startswith(name)]
        assert not computed.keys() & axes.names.keys()
        heads = {axes.sizes[c] for c, each in computed.items() if each.startswith("head_dim")}
        assert heads <= {axes.sizes[c] for c in analysis.roles.head_dims}


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_head_size_is_called_head_dim_if_a_loop_keeps_cast_weights(attention: str) -> None:
    """Without rematerialization, the gradient uses copies of the weights that the loop over layers stacked."""
    model = workload("llama-tiny")
    config = dataclasses.replace(model.config, attention=attention, kv_heads=8, remat="none", dtype="bfloat16")
    step, state, data = workload_step(dataclasses.replace(model, config=config))
    traced = trace(step, (state, data), {})
    analysis = analyse(traced)
    weights = [i for i, path in enumerate(traced.in_names) if "params" in path and path[-2:] in ("wq", "wk", "wv")]
    assert len(weights) == 3
    for i in weights:
        axis = analysis.axes.of_value[traced.program.inputs[i]][-1][0]
        assert analysis.axes.name(axis).startswith("head_dim") and axis not in analysis.roles.parallel


WIDTH, RANK, HIDDEN, HEADS, SIZE, ROWS, SEQ = 32, 4, 64, 4, 16, 8, 16


def weight_axes(predict, weights):
    """The names of the axes of the weights of a step in plain JAX, by path."""

    def step(weights, x):
        gradients = jax.grad(lambda w: jnp.mean(predict(w, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients)

    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    traced = trace(step, (weights, jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), jnp.float32)), {})
    axes = analyse(traced).axes
    return {
        path.rpartition("/")[2]: [axes.name(c) for dim in axes.of_value[v] for c in dim]
        for v, path in zip(traced.program.inputs, traced.in_names, strict=True)
    }


ADAPTED = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "a": (WIDTH, RANK), "b": (RANK, HIDDEN)}


@pytest.mark.parametrize(
    ("between", "name"),
    [(lambda h: 2 * h.astype(jnp.bfloat16), "lora_rank"), (jax.nn.silu, "ffn"), (lambda h: h * h, "ffn")],
)
def test_a_small_axis_between_two_weights_is_a_rank_if_nothing_else_is_between_them(between, name):
    def predict(w, x):
        return x + jax.nn.silu(x @ w["up"] + between(x @ w["a"]).astype(x.dtype) @ w["b"]) @ w["down"]

    found = weight_axes(predict, ADAPTED)
    assert found["a"][1] == found["b"][0] and found["a"][1].startswith(name)
    assert found["up"][1].startswith("ffn")


def test_a_large_axis_between_two_weights_is_no_rank():
    found = weight_axes(lambda w, x: x + x @ w["up"] @ w["down"], {name: ADAPTED[name] for name in ("up", "down")})
    assert found["up"][1] == found["down"][0] == "ffn"


LATENT = {
    "q_down": (WIDTH, 12), "q_norm": (12,), "q_up": (12, HEADS, SIZE), "kv_down": (WIDTH, 8 + SIZE), "kv_norm": (8,),
    "kv_up": (8, HEADS, 2 * SIZE), "out": (HEADS, SIZE, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip


def test_queries_and_keys_of_latent_attention_come_from_latents():
    """One latent vector is the result of a weight, the other a part of it."""

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def predict(w, x):
        q = jnp.einsum("bsr,rhd->bshd", norm(x @ w["q_down"], w["q_norm"]), w["q_up"])
        latent, shared = jnp.split(x @ w["kv_down"], [8], -1)
        k, v = jnp.split(jnp.einsum("bsr,rhd->bshd", norm(latent, w["kv_norm"]), w["kv_up"]), 2, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,bkd->bhqk", q, shared)
        x = x + jnp.einsum("bhqk,bkhd,hde->bqe", jax.nn.softmax(scores), v, w["out"])
        return x + jax.nn.silu(x @ w["up"]) @ w["down"]

    found = weight_axes(predict, LATENT)
    assert {found["q_down"][1], found["kv_norm"][0]} == {"latent", "latent_1"}
    assert found["q_up"][0] == found["q_norm"][0] == found["q_down"][1] and found["kv_up"][0] == found["kv_norm"][0]
    assert found["up"] == ["embed", "ffn"]


@pytest.mark.parametrize(("dims", "names"), [(1, ["seq"]), (2, ["height", "width"]), (3, ["depth", "height", "width"])])
def test_convolutions_slide_along_height_width_and_depth(dims, names):
    """Windows of kernels are no such axes, although they are dimensions of the result in a kernel's gradient."""
    letters = "DHW"[3 - dims :]
    layouts = f"N{letters}C", f"{letters}IO", f"N{letters}C"
    kernels = {"a": jnp.ones((*[3] * dims, 4, 32)), "b": jnp.ones((*[3] * dims, 32, 64))}

    def step(kernels, images):
        def loss(kernels):
            hidden = images
            for kernel in kernels.values():
                hidden = jax.nn.relu(
                    jax.lax.conv_general_dilated(hidden, kernel, (2,) * dims, "SAME", dimension_numbers=layouts)
                )
            return (hidden**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, jax.grad(loss)(kernels))

    traced = trace(step, (kernels, jnp.ones((8, *[16] * dims, 4))), {})
    axes = analyse(traced).axes
    a, b, images = ([axes.name(c) for dim in axes.of_value[v] for c in dim] for v in traced.program.inputs)
    assert [name.rstrip("_0123456789") for name in images[1:-1]] == names and images[0] == "batch"
    assert a[:dims] == [f"kernels/a:{d}" for d in range(dims)] and b[:dims] == [f"kernels/b:{d}" for d in range(dims)]
    if dims > 1:
        assert images[-1].startswith("channels") and {n.split("_")[0] for n in (*a[dims:], *b[dims:])} <= {
            "channels",
            "embed",
        }


def test_channels_that_a_group_norm_reduces_are_channels():
    """A group norm splits them, and its mean removes one part, as a softmax removes the classes."""
    kernels = {"a": jnp.ones((3, 3, 4, 32)), "b": jnp.ones((3, 3, 32, 64))}

    def step(params, images):
        def loss(params):
            hidden, head = images, params[1]
            for kernel in params[0].values():
                hidden = jax.lax.conv_general_dilated(
                    hidden, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                groups = hidden.reshape(*hidden.shape[:-1], 4, -1)
                groups = groups - groups.mean((1, 2, 4), keepdims=True)
                hidden = jax.nn.relu(groups.reshape(hidden.shape))
            return jax.nn.logsumexp(hidden.mean((1, 2)) @ head, axis=-1).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    traced = trace(step, ((kernels, jnp.ones((64, 10))), jnp.ones((8, 16, 16, 4))), {})
    axes = analyse(traced).axes
    a, b, head, _ = ([axes.name(c) for dim in axes.of_value[v] for c in dim] for v in traced.program.inputs)
    assert not [name for name in (*a, *b) if name.startswith(("vocab", "classes"))]
    assert head[-1] == "classes"


def test_patches_have_the_names_of_their_kernel():
    """Windows that do not overlap split a dimension of the image. The part within a window has the kernel's name."""
    layouts = "NHWC", "HWIO", "NHWC"

    def step(w, images):
        patches = lambda w: jax.lax.conv_general_dilated(images, w, (4, 4), "VALID", dimension_numbers=layouts)  # noqa: E731
        return w - 0.1 * jax.grad(lambda w: (patches(w) ** 2).mean())(w)

    traced = trace(step, (jnp.ones((4, 4, 8, 16)), jnp.ones((8, 16, 16, 8))), {})
    axes = analyse(traced).axes
    kernel, images = ([[axes.name(c) for c in dim] for dim in axes.of_value[v]] for v in traced.program.inputs)
    assert kernel[:2] == [["w:0"], ["w:1"]] and images[1:3] == [["height", "w:0"], ["width", "w:1"]]
