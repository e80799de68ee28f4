"""Which axes are sharded where a large part of the weights has no hidden units, heads, classes or vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.errors import PlanError
from autoshard.models.workloads import workload
from autoshard.sharding.axes.analysis import Analysis, analyse
from autoshard.sharding.program.tracing import Traced, trace
from autoshard.train.program.build import workload_step


def sgd(forward: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """One training step. The loss reads one output, so that it does not sum over an axis of a weight."""

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean(forward(p, x)[..., 0] ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    return step


def analysed(forward: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array) -> tuple[Traced, Analysis]:
    traced = trace(sgd(forward), (params, x), {})
    return traced, analyse(traced)


def sharded(forward: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array) -> list[tuple[str, int]]:
    """The name and the size of each axis that tensor parallelism shards."""
    _, analysis = analysed(forward, params, x)
    return [(analysis.axes.name(c), analysis.axes.sizes[c]) for c in analysis.roles.parallel]


def test_the_residual_is_sharded_where_most_weights_have_no_other_axis():
    """Two gates: their weights share the axis of the data too, but the state is the residual and shards all of them."""

    def forward(params, x):
        def cell(h, x):
            z, n = (x @ gate["input"] + h @ gate["state"] for gate in params)
            return h + jax.nn.sigmoid(z) * jnp.tanh(n), None

        return jax.lax.scan(cell, jnp.zeros((32, 16)), jnp.swapaxes(x, 0, 1))[0]

    params = [{"input": jnp.ones((8, 16)), "state": jnp.ones((16, 16))}] * 2
    _, analysis = analysed(forward, params, jnp.ones((32, 5, 8)))
    assert analysis.roles.parallel == (analysis.roles.residual,)
    assert analysis.axes.sizes[analysis.roles.parallel[0]] == 16


def test_of_a_weight_that_is_used_twice_the_axis_that_it_produces_is_sharded():
    def forward(params, x):
        return jnp.tanh(x @ params["w"]) @ params["w"].T

    assert sharded(forward, {"w": jnp.ones((16, 8))}, jnp.ones((32, 16))) == [("ffn", 8)]
    assert sharded(forward, {"w": jnp.ones((8, 16))}, jnp.ones((32, 8))) == [("ffn", 16)]


def test_concatenated_gates_are_sharded_by_what_their_product_sums_over():
    """No axis of the gates is one of the concatenation, so the state goes first and the features follow."""

    def forward(params, x):
        def cell(h, x):
            gates = x @ jnp.concatenate(params["input"], 1) + h @ jnp.concatenate(params["state"], 1)
            z, n = jnp.split(gates, 2, 1)
            return h + jax.nn.sigmoid(z) * jnp.tanh(n), None

        return jax.lax.scan(cell, jnp.zeros((32, 16)), jnp.swapaxes(x, 0, 1))[0]

    params = {"input": [jnp.ones((8, 16))] * 2, "state": [jnp.ones((16, 16))] * 2}
    assert sharded(forward, params, jnp.ones((32, 5, 8))) == [("ffn", 16), ("features", 8)]


def test_windows_of_convolutions_are_not_sharded():
    def forward(params, x):
        return jax.lax.conv_general_dilated(
            x, params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
        )

    assert sharded(forward, {"w": jnp.ones((32, 1, 4))}, jnp.ones((16, 64, 4))) == [("features", 4)]


def test_a_minor_axis_alone_does_not_shard_a_weight():
    """The norm sums over the channels of a group, so they count as hidden units; the groups come before them."""

    def forward(params, x):
        y = (x @ params["w"]).reshape(len(x), 8, 4)
        y = y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)
        return y.reshape(len(x), 32)

    params = {"w": jnp.ones((16, 32))}
    traced, analysis = analysed(forward, params, jnp.ones((64, 16)))
    groups, channels = analysis.axes.of_value[traced.program.inputs[0]][1]
    assert analysis.roles.parallel == (channels, groups)
    planned = plan(sgd(forward), params, jnp.ones((64, 16)), target="cpu:8", plan="tp:8")
    assert planned.inputs[0].spec[0] is None and planned.inputs[0].spec[1]


@pytest.mark.parametrize(("features", "covered"), [(4, False), (32, True)])
def test_a_small_part_of_the_weights_is_left_whole(features: int, covered: bool):
    def forward(params, x):
        x = x @ params["embedding"]
        for up, down in params["layers"]:
            x = x + jnp.tanh(x @ up) @ down
        return x

    params = {"embedding": jnp.ones((features, 16)), "layers": [(jnp.ones((16, 64)), jnp.ones((64, 16)))]}
    traced, analysis = analysed(forward, params, jnp.ones((128, features)))
    embedding = analysis.axes.of_value[traced.program.inputs[0]]
    ffn, *added = analysis.roles.parallel
    assert analysis.axes.name(ffn) == "ffn" and (ffn,) not in embedding
    assert [(c,) in embedding for c in added] == [True] * covered


def test_the_patch_embedding_of_a_small_vision_transformer_is_left_whole():
    step, *args = workload_step(workload("vit-tiny"))
    analysis = analyse(trace(step, tuple(args), {}))
    assert analysis.roles.residual not in analysis.roles.parallel


def test_a_program_without_products_has_no_axis_for_tp():
    step = sgd(lambda params, x: jnp.tanh(x * params["scale"]))
    with pytest.raises(PlanError, match="no such axis can be sharded: .*tp shards weights that are .*Leave 'tp' out"):
        plan(step, {"scale": jnp.ones(16)}, jnp.ones((32, 16)), target="cpu:8", plan="tp:8")
