"""Logical axes are derived from structure alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.models import GPT, GPTConfig, cross_entropy
from autoshard.sharding.axes.logical_axes import find_axes
from autoshard.spmdrules.ir.program import build
from tests.sharding.programs import batch, mlp_state


def axes_of(fn, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = build(jax.make_jaxpr(fn)(*args))
    axes = find_axes(program)
    return program, axes


def leaves(fn, *shapes):
    program, axes = axes_of(fn, *shapes)
    return [axes.of_value[v] for v in (*program.inputs, *program.outputs)]


def test_a_contraction_unifies_both_operands():
    x, w, y = leaves(lambda x, w: x @ w, (8, 16), (16, 4))
    assert x[1] == w[0] and y == (x[0], w[1]) and len({x[0], x[1], w[1]}) == 3


def test_a_split_dimension_has_the_axes_of_its_parts():
    x, y = leaves(lambda x: x.reshape(8, 4, 16), (8, 64))
    assert x[1] == (*y[1], *y[2]) and x[0] == y[0]


def test_nesting_splits_are_refined_and_others_stay_separate():
    x, y = leaves(lambda x: x.reshape(4, 6), (8, 3))
    assert [len(d) for d in x] == [2, 1] and y == ((x[0][0],), (x[0][1], x[1][0]))
    x, y = leaves(lambda x: x.reshape(7, 5), (5, 7))
    assert not {c for d in x for c in d} & {c for d in y for c in d}


def test_a_scan_unifies_its_carry_and_marks_the_loop_axis():
    def fn(x, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    program, axes = axes_of(fn, (8, 16), (3, 16, 16))
    x, ws = (axes.of_value[v] for v in program.inputs)
    assert x[1] == ws[1] == ws[2] and set(ws[0]) <= axes.stacked and not set(x[0]) & axes.stacked


def test_unrolled_layers_have_the_axes_of_one_layer():
    def fn(x, *weights):
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return x

    _, axes = axes_of(fn, (8, 16), *[(16, 32), (32, 16)] * 6)
    assert len(axes.sizes) == 3  # batch, residual stream, one hidden axis


def test_axes_of_one_value_are_not_merged():
    program, axes = axes_of(lambda x: jnp.tanh(x), (8, 16, 16))
    x = axes.of_value[program.inputs[0]]
    assert x[1] != x[2]


def _gpt_plan(rename: bool, scan: bool = True, **options):
    from flax import nnx

    cfg = GPTConfig(vocab=64, layers=2, heads=4, kv_heads=2, width=32, ffn=64, context=16, scan_layers=scan)
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))
    flat, tree = jax.tree.flatten(params)
    order = sorted(range(len(flat)), key=lambda i: (i * 7919) % 31) if rename else list(range(len(flat)))
    named = {f"p{n:03d}" if rename else f"q{n:03d}": flat[i] for n, i in enumerate(order)}

    def loss(named, tokens):
        leaves = [None] * len(flat)
        for (_, leaf), i in zip(sorted(named.items()), order, strict=True):
            leaves[i] = leaf
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        total, weight = cross_entropy(model(tokens), tokens, jnp.ones(tokens.shape))
        return total / weight

    def step(named, tokens):
        value, grads = jax.value_and_grad(loss)(named, tokens)
        return jax.tree.map(lambda p, g: p - g, named, grads), value

    planned = plan(step, named, jax.ShapeDtypeStruct((16, 16), jnp.int32), target="cpu:8", **options)
    specs = {leaf.path.rpartition("/")[2]: leaf for leaf in planned.inputs}
    by_leaf = {i: specs[name] for name, i in zip(sorted(named), order, strict=True)}
    return planned, [by_leaf[i] for i in range(len(flat))]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [None, "fsdp:4 tp:2", "tp:4 dp:2 seq"])
def test_planning_never_reads_names(strategy):
    plain, specs = _gpt_plan(rename=False, plan=strategy)
    renamed, others = _gpt_plan(rename=True, plan=strategy)
    assert plain.chosen == renamed.chosen
    assert [leaf.spec for leaf in specs] == [leaf.spec for leaf in others]
    assert plain.estimate == renamed.estimate


@pytest.mark.parametrize("scan", [True, False])
def test_a_transformer_has_the_axes_that_people_name(scan):
    plan, specs = _gpt_plan(rename=False, scan=scan, plan="fsdp:2 tp:4 seq")
    names = {name for leaf in plan.inputs for dim in leaf.axes for name in dim.split("*")}
    assert {"batch", "seq", "embed", "vocab", "heads", "ffn"} <= names
    sharded = [leaf for leaf in specs if any("tp" in str(e) for e in leaf.spec)]
    assert len(sharded) >= (8 if scan else 14)


def test_an_axis_that_two_activations_contract_is_never_sharded():
    plan, _ = _gpt_plan(rename=False, scan=False, plan="tp:8")
    heads = [leaf for leaf in plan.inputs if leaf.shape in ((32, 4, 8), (32, 2, 8))]  # [embed, heads, head_dim]
    assert len(heads) == 2 * 3 and all(leaf.spec[1] and len(leaf.spec) == 2 for leaf in heads)


@pytest.mark.parametrize("parameters_first", [True, False])
def test_the_batch_of_a_function_without_state_is_an_axis_that_no_weight_contracts(parameters_first):
    def apply(params, x):
        return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]

    fn = apply if parameters_first else lambda x, params: apply(params, x)
    args = (mlp_state(), batch(size=64)) if parameters_first else (batch(size=64), mlp_state())
    planned = plan(fn, *args, plan="dp:8")
    specs = {leaf.path: leaf.spec for leaf in planned.inputs}
    assert {path: spec for path, spec in specs.items() if any(spec)} == {"1" if parameters_first else "0": P("dp")}
    assert not planned.traffic
