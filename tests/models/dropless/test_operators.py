"""Dropless experts as one operator: the terms of its shards, its estimated work and memory, and its plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.tiles import tiled_rows
from autoshard.models import workload
from autoshard.models.dropless import operators
from autoshard.models.dropless.forms import by_sorting
from autoshard.models.dropless.units import swiglu
from autoshard.sharding.cost.opaque_memory import trace_opaque_memory
from autoshard.sharding.program.flops import flops_of, matmul_flops
from autoshard.spmdrules.ir.program import build
from autoshard.train.program.build import workload_step
from tests.arrays import array

BATCH, SEQ, EMBED, FFN, EXPERTS, TOP_K = 4, 6, 16, 24, 8, 2
ROWS = BATCH * SEQ * TOP_K
TINY = workload("mixtral-tiny")
OPTIONS = {"count": EXPERTS, "call": GroupedCall("tiled")}


def operands(seed=0):
    """Makes tokens, gates, choices (no token chooses the last expert), all expert indices, and weights."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(EXPERTS - 1)[:TOP_K] for _ in range(BATCH * SEQ)]).reshape(BATCH, SEQ, TOP_K)
    shapes = ((EXPERTS, EMBED, FFN), (EXPERTS, EMBED, FFN), (EXPERTS, FFN, EMBED))
    return (
        array(rng.normal(size=(BATCH, SEQ, EMBED)), jnp.float32),
        array(rng.random((BATCH, SEQ, TOP_K)), jnp.float32),
        jnp.asarray(chosen, jnp.int32),
        jnp.arange(EXPERTS, dtype=jnp.int32),
        *(array(rng.normal(size=shape), jnp.float32) for shape in shapes),
    )


def test_terms_of_experts_and_hidden_units_add_up():
    x, gates, chosen, expert_ids, *weights = operands()
    run = jax.jit(functools.partial(operators.swiglu_experts, **OPTIONS))
    terms = []
    for experts in (slice(0, 3), slice(3, 8)):
        for units in (slice(0, 10), slice(10, FFN)):
            gate, up, down = (w[experts] for w in weights)
            terms.append(run(x, gates, chosen, expert_ids[experts], gate[:, :, units], up[:, :, units], down[:, units]))
    whole = run(x, gates, chosen, expert_ids, *weights)
    assert all(np.linalg.norm(term) > 0.1 for term in terms)
    np.testing.assert_allclose(sum(terms), whole, rtol=1e-5, atol=1e-4)


def test_tokens_are_independent_of_those_beside_them():
    x, gates, chosen, *rest = operands()
    run = jax.jit(functools.partial(operators.swiglu_experts, **OPTIONS))
    whole = run(x, gates, chosen, *rest)
    np.testing.assert_allclose(run(x[1:2, 3:], gates[1:2, 3:], chosen[1:2, 3:], *rest), whole[1:2, 3:], rtol=1e-5)


@pytest.mark.slow
def test_products_of_other_shards_rows_are_zeros():
    """The terms of two halves of the experts, with every gradient, add up to those of all experts."""
    x, gates, chosen, expert_ids, *weights = operands()
    cotangent = x[::-1]
    run = jax.jit(functools.partial(by_sorting, swiglu, **OPTIONS))
    differentiate = jax.jit(functools.partial(operators._gradients, swiglu, **OPTIONS))
    expected = differentiate(x, gates, chosen, expert_ids, *weights, cotangent)
    value, terms = 0.0, []
    for experts in (slice(0, 3), slice(3, 8)):
        shard_weights = [w[experts] for w in weights]
        value += run(x, gates, chosen, expert_ids[experts], *shard_weights)
        terms.append(differentiate(x, gates, chosen, expert_ids[experts], *shard_weights, cotangent))
    np.testing.assert_allclose(value, run(x, gates, chosen, expert_ids, *weights), atol=1e-4)
    for one, low, high in zip(expected[:2], *(term[:2] for term in terms), strict=True):
        np.testing.assert_allclose(low + high, one, rtol=1e-4, atol=1e-4)
    for one, low, high in zip(expected[2:], *(term[2:] for term in terms), strict=True):
        np.testing.assert_allclose(jnp.concatenate([low, high]), one, rtol=1e-4, atol=1e-4)


def operator_of(fn, *args):
    """Returns the first operator of a function whose name contains `experts`."""
    return next(op for op in build(jax.make_jaxpr(fn)(*args)).ops() if "experts" in op.name)


def test_its_flops_are_those_of_the_rows_that_are_computed():
    """Each expert but one adds a tile to the rows. A device with 2 of 8 experts has a quarter of the rows."""
    forward = operator_of(functools.partial(operators.swiglu_experts, **OPTIONS), *operands())
    tile = tiled_rows(ROWS, EXPERTS)
    computed = ROWS + (EXPERTS - 1) * tile
    assert matmul_flops(forward) == {(4, False): 3 * 2.0 * computed * EMBED * FFN}
    backward = operator_of(functools.partial(operators.swiglu_experts_gradients, **OPTIONS), *operands(), operands()[0])
    # Recomputed hidden units; for each product the gradient of its rows, and that of its weights.
    assert flops_of(backward) == (2 + 3 + 3) * 2.0 * computed * EMBED * FFN
    x, gates, chosen, expert_ids, *weights = operands()
    part = operator_of(
        functools.partial(operators.swiglu_experts, **OPTIONS),
        x,
        gates,
        chosen,
        expert_ids[:2],
        *(w[:2] for w in weights),
    )
    assert matmul_flops(part) == {(4, False): 3 * 2.0 * (-(-ROWS // 4 // tile) + 1) * tile * EMBED * FFN}


def test_its_memory_shrinks_with_its_shard():
    def held(batch, units):
        shapes = [(batch, SEQ, n) for n in (EMBED, TOP_K, TOP_K)]
        shapes += [(EXPERTS,), (EXPERTS, EMBED, units), (EXPERTS, EMBED, units), (EXPERTS, units, EMBED)]
        types = ["float32", "float32", "int32", "int32", "float32", "float32", "float32"]
        fn = operator_of(functools.partial(operators.swiglu_experts, **OPTIONS), *operands()).eqn.params["fn"]
        memory = trace_opaque_memory(fn, tuple(zip(shapes, types, strict=True)), "tpu")
        assert memory is not None
        return memory

    whole, half, thin = held(BATCH, FFN), held(BATCH // 2, FFN), held(BATCH, FFN // 2)
    rows = ROWS * 4.0
    assert rows * (EMBED + FFN) <= whole.peak_bytes <= rows * 3 * (EMBED + FFN)
    assert half.peak_bytes == pytest.approx(whole.peak_bytes / 2, rel=0.05)
    assert half.moved_bytes < whole.moved_bytes and thin.peak_bytes < whole.peak_bytes


def test_its_gradients_are_scattered_one_after_another():
    """Compiled for tpu7x, the matrices are held until their last product; one whole gradient is held at a time."""
    shapes = [(BATCH, SEQ, n) for n in (EMBED, TOP_K, TOP_K)]
    shapes += [(EXPERTS,), (EXPERTS, EMBED, FFN), (EXPERTS, EMBED, FFN), (EXPERTS, FFN, EMBED), (BATCH, SEQ, EMBED)]
    types = ["float32", "float32", "int32", "int32", *["float32"] * 4]
    traced = operator_of(functools.partial(operators.swiglu_experts_gradients, **OPTIONS), *operands(), operands()[0])
    memory = trace_opaque_memory(traced.eqn.params["fn"], tuple(zip(shapes, types, strict=True)), "tpu")
    assert memory is not None
    gate, up, down = memory.last_uses[4:7]
    assert down < up < gate  # of the matrices' last products, in the backward pass
    made = [first for first, _ in memory.results[2:]]
    assert made[2] < made[1] < made[0] and all(first == last for first, last in memory.results[2:])
    large = 1e9  # bytes of a gathered matrix and of a gradient, beside which the own values are small
    matrices: dict[int, float] = {4: large, 5: large, 6: large}
    gradients: dict[int, float] = {2: large, 3: large, 4: large}
    assert memory.peak_with({}, {}) == memory.peak_bytes
    assert memory.peak_with({}, gradients) == pytest.approx(large, rel=0.01)
    assert memory.peak_with(matrices, gradients) == pytest.approx(3 * large, rel=0.01)
    assert memory.peak_with({4: large}, {2: large}) == pytest.approx(large, rel=0.01)  # freed, then made
    assert memory.peak_with({4: large}, {4: large}) == pytest.approx(2 * large, rel=0.01)  # needed after it is made


def spec_of(planned, end):
    (leaf,) = [leaf for leaf in planned.inputs if leaf.path.endswith(end) and "opt_state" not in leaf.path]
    return leaf.axes, tuple(leaf.spec)


def test_its_experts_and_hidden_units_can_be_sharded():
    planned = plan(*workload_step(TINY), target="cpu:8", plan="dp:2 ep:2 tp:2", donate_argnums=0)
    for end, ffn in (("w_up", 3), ("w_gate", 3), ("w_down", 2)):
        axes, spec = spec_of(planned, f"experts/{end}")
        assert axes[1] == "experts" and spec[1] == "ep"
        assert axes[ffn] == "ffn" and spec[ffn] == "tp"
    assert spec_of(planned, "inputs")[1][0] == ("dp", "ep")


def test_data_parallelism_moves_no_tokens():
    planned = plan(*workload_step(TINY), target="cpu:8", plan="dp:8", donate_argnums=0)
    assert {kind for kind, _, _, line in planned.traffic if "(experts)" in line} <= {"all-reduce"}


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_no_weight_of_an_expert_is_gathered():
    audit = plan(*workload_step(TINY), target="v5e:2x4", plan="ep:8", donate_argnums=0).verify()
    cfg = TINY.config
    tokens = TINY.batch_size * cfg.context * cfg.gpt.width * 4.0
    weights = cfg.experts * cfg.gpt.width * cfg.expert_hidden * 4.0
    gathered = {f.payload_bytes for f in audit.collectives if f.kind == "all-gather"}
    assert audit.unplanned == () and max(gathered) == tokens < weights
