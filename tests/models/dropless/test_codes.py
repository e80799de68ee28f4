"""Experts whose matrices are codes and scales: equal to those with decoded matrices, in each form and on shards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.models import dropless
from autoshard.models.block_scales import ScaledCodes, StackedCodes, split_inputs
from autoshard.models.dropless import coded as coded_experts
from autoshard.models.dropless import forms
from autoshard.models.dropless.units import limited, swiglu
from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.arrays import array

EMBED, FFN, EXPERTS, TOP_K = 8, 12, 16, 3
TILED = GroupedCall("tiled")


def operands(tokens):
    """Return tokens, gates, choices, and three matrices as codes and scales of blocks of 4 inputs and 4 outputs."""
    rng = np.random.default_rng(0)

    def coded(inputs, outputs):
        codes = array(rng.normal(size=(EXPERTS, inputs, outputs)), jnp.float8_e4m3fn)
        scale = array(rng.uniform(0.5, 1.5, (EXPERTS, inputs // 4, outputs // 4)), jnp.float32)
        return ScaledCodes(split_inputs(codes, scale, 1, 1), scale)

    chosen = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    x = array(rng.normal(size=(tokens, 1, EMBED)), jnp.float32)
    gates = array(rng.random((tokens, 1, TOP_K)), jnp.float32)
    weights = coded(EMBED, FFN), coded(EMBED, FFN), coded(FFN, EMBED)
    return x, gates, jnp.asarray(chosen[:, None], jnp.int32), *weights


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4, 5], ids=["as many as a block has inputs", "more"])
@pytest.mark.parametrize("own", [slice(5, 12), slice(0, EXPERTS)], ids=["a shard", "all experts"])
def test_all_forms_have_the_values_of_decoded_matrices(tokens, own):
    x, gates, chosen, *coded = operands(tokens)
    coded = [ScaledCodes(*(each[own] for each in one)) for one in coded]
    given = x, gates, chosen, jnp.arange(EXPERTS, dtype=jnp.int32)[own]
    by_sorting = functools.partial(forms.by_sorting, count=EXPERTS, call=TILED)
    expected = jax.jit(by_sorting, static_argnums=0)(swiglu, *given, *(one.values for one in coded))
    assert np.linalg.norm(expected) > 1
    densely = functools.partial(forms.densely, call=TILED)
    for form in (by_sorting, densely, forms.one_by_one):
        found = jax.jit(form, static_argnums=0)(swiglu, *given, *coded)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_values_and_gradients_are_those_of_decoded_matrices():
    x, gates, chosen, *coded = operands(5)
    gate, up, down = (one.values for one in coded)

    def loss(x, gates, experts):
        return jnp.sum(jnp.sin(experts(x, gates)))

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, experts=experts), argnums=(0, 1)))(x, gates)
        for experts in (
            lambda x, gates: dropless.experts_in_codes(x, gates, chosen, *coded),
            lambda x, gates: dropless.experts(x, gates, chosen, up, down, gate),
        )
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-3), found, expected)


def test_blocks_of_different_matrices():
    *_, gate, up, down = operands(1)
    assert dropless.same_blocks(gate, up, down) and not dropless.same_blocks(gate, up, gate)


@pytest.mark.slow
def test_terms_of_experts_and_blocks_of_hidden_units_add_up():
    x, gates, chosen, *coded = operands(4)
    experts = jnp.arange(EXPERTS, dtype=jnp.int32)
    options = {"count": EXPERTS, "call": TILED}

    def terms(run, *more):
        for own in (slice(0, 6), slice(6, EXPERTS)):
            for blocks, units in ((slice(0, 1), slice(0, 4)), (slice(1, 3), slice(4, FFN))):
                wide = [(one.codes[own][..., units], one.scale[own][..., blocks]) for one in coded[:2]]
                down = coded[2].codes[own][:, blocks], coded[2].scale[own][:, blocks]
                yield run(x, gates, chosen, experts[own], *wide[0], *wide[1], *down, *more, **options)

    def whole(run, *more):
        return run(x, gates, chosen, experts, *(each for one in coded for each in one), *more, **options)

    run, gradients = coded_experts.coded_swiglu_experts, coded_experts.coded_swiglu_experts_gradients
    found = list(terms(run))
    assert all(np.linalg.norm(one) > 0.1 for one in found)
    np.testing.assert_allclose(sum(found), whole(run), rtol=1e-5, atol=1e-4)
    for n, expected in enumerate(whole(gradients, x)):
        np.testing.assert_allclose(sum(one[n] for one in terms(gradients, x)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "read"), [(32, 1.0), (2, 2 * TOP_K / EXPERTS)], ids=["densely", "one by one"])
def test_a_tpu_reads_stacked_codes_once(tokens, read):
    """A compiled scan over layers takes the time in which the codes of the experts that it needs are read."""
    layers, width, ffn = 3, 1024, 4096
    up, down = (layers, EXPERTS, width, ffn), (layers, EXPERTS, ffn, width)

    def coded(layers, experts, inputs, outputs):
        codes = jnp.zeros((layers, experts, inputs // 128, 128, outputs), jnp.float8_e4m3fn)
        return ScaledCodes(codes, jnp.zeros((layers, experts, inputs // 128, outputs // 128), jnp.float32))

    def step(weights, x, gates, chosen):
        def layer(x, weights):
            return x + dropless.experts_in_codes(x, gates, chosen, *weights), None

        return jax.lax.scan(layer, x, weights)[0]

    gates, chosen = (jax.ShapeDtypeStruct((tokens, 1, TOP_K), dtype) for dtype in ("bfloat16", "int32"))
    x = jax.ShapeDtypeStruct((tokens, 1, width), "bfloat16")
    weights = jax.eval_shape(lambda: (coded(*up), coded(*up), coded(*down)))
    audit = plan(step, weights, x, gates, chosen, target="v5e:2x2", plan="tp:4").verify()
    assert audit.ok, audit.message
    own_bytes = read * 3 * layers * EXPERTS * width * ffn / 4
    fastest_us = own_bytes / find_target("v5e:2x2").chip.memory_bandwidth / BANDWIDTH_REACHED * 1e6
    assert audit.compute_us_roofline == pytest.approx(fastest_us, rel=0.15)


def four_bits(own=slice(None)) -> Any:
    """Returns tokens, gates, choices, matrices in MXFP4 and biases of gate and up, of some experts."""
    rng = np.random.default_rng(1)
    x = array(rng.normal(size=(7, 1, 64)), jnp.float32)
    chosen = jnp.asarray(np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(7)])[:, None], jnp.int32)
    gates = array(rng.random((7, 1, TOP_K)), jnp.float32)

    def coded(inputs, outputs):
        codes = array(rng.normal(size=(EXPERTS, inputs, outputs)), jnp.float4_e2m1fn)
        scale = jnp.exp2(array(rng.integers(-3, 1, (EXPERTS, inputs // 32, outputs)), jnp.float32))
        scale = scale.astype(jnp.float8_e8m0fnu)
        return ScaledCodes(split_inputs(codes[own], scale[own], 1, 1), scale[own])

    biases = [array(rng.normal(size=(EXPERTS, 32)), jnp.float32)[own] for _ in range(2)]
    return (x, gates, chosen), (coded(64, 32), coded(64, 32), coded(32, 64)), biases


def last_of_two_layers(one):
    """Returns the same matrices as the last layer of two. The first layer has other codes."""
    codes = one.stacked.codes
    return StackedCodes(jnp.concatenate([jnp.roll(codes, 1, axis=2), codes]), one.scale, jnp.array([1], jnp.int32))


@pytest.mark.few(1)
@pytest.mark.parametrize("own", [slice(5, 12), slice(0, EXPERTS)], ids=["a shard", "all experts"])
def test_all_forms_have_the_values_of_decoded_matrices_of_4_bits(own, monkeypatch):
    monkeypatch.setattr(forms, "TILE_ROWS", 32)
    monkeypatch.setattr(forms, "PIECE_ELEMENTS", 1024)  # two pieces of 32 x 32
    given, (gate, up, down), biases = four_bits(own)
    given = *given, jnp.arange(EXPERTS, dtype=jnp.int32)[own]
    unit = functools.partial(limited, limit=7.0, alpha=1.702)
    by_sorting = functools.partial(forms.by_sorting, count=EXPERTS, call=TILED)
    dense = [one.values for one in (gate, up)], down.values
    expected = jax.jit(by_sorting, static_argnums=0)(unit, *given, *dense[0], *biases, dense[1])
    assert np.linalg.norm(expected) > 1
    densely = functools.partial(forms.densely, call=TILED)
    for form in (by_sorting, densely, forms.in_turn, forms.one_by_one):
        found = jax.jit(form, static_argnums=0)(unit, *given, gate, up, *biases, down)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    low = gate.in_dtype(jnp.bfloat16)  # exact
    np.testing.assert_array_equal(low.astype(jnp.float32), gate.values)
    kernel = GroupedCall("megablox")
    program = jax.make_jaxpr(functools.partial(forms.apply_experts, unit, count=EXPERTS, call=kernel))(
        *given, gate, up, *biases, down
    )
    assert "scan" in str(program) and "sort" not in str(program)  # the kernel takes no rows in float32
    stacks = [last_of_two_layers(one) for one in (gate, up, down)]
    for call, tokens in ((TILED, 7), (kernel, 7), (TILED, 1)):  # by sorting, in turn, one by one
        run = jax.jit(functools.partial(forms.apply_experts, unit, count=EXPERTS, call=call))
        given = *(one[:tokens] for one in given[:3]), given[3]
        found = run(*given, *stacks[:2], *biases, stacks[2])
        np.testing.assert_allclose(found, expected[:tokens], rtol=1e-5, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("own", [slice(5, 12), slice(0, EXPERTS)], ids=["a shard", "all experts"])
def test_the_forms_with_a_kernel_have_the_values_of_decoded_matrices_of_4_bits(own):
    (x, gates, chosen), (gate, up, down), biases = four_bits(own)
    kernel = GroupedCall("megablox", interpret=True)
    unit = functools.partial(limited, limit=7.0, alpha=1.702)
    given = x.astype(jnp.bfloat16), gates, chosen, jnp.arange(EXPERTS, dtype=jnp.int32)[own]
    biases = [one.astype(jnp.bfloat16) for one in biases]
    by_sorting = functools.partial(forms.by_sorting, unit, count=EXPERTS)
    expected = by_sorting(
        *(one.astype(jnp.float32) for one in given[:2]), *given[2:], gate.values, up.values,
        *(one.astype(jnp.float32) for one in biases), down.values, call=TILED,
    )  # fmt: skip
    for form in (functools.partial(forms.densely, unit), by_sorting):
        run = functools.partial(form, call=kernel)
        assert str(jax.make_jaxpr(run)(*given, gate, up, *biases, down)).count("coded_") >= 3
        found = jax.jit(run)(*given, gate, up, *biases, down)
        error = np.linalg.norm(np.asarray(found, np.float32) - expected)
        assert error < 0.02 * np.linalg.norm(expected)  # bfloat16 with rounded hidden units
        stacks = [last_of_two_layers(one) for one in (gate, up, down)]
        np.testing.assert_array_equal(jax.jit(run)(*given, *stacks[:2], *biases, stacks[2]), found)


def test_gradients_read_codes(monkeypatch):
    """The gradients of tokens, gates and biases are those with decoded matrices, although no matrix is decoded."""
    (x, gates, chosen), coded, biases = four_bits()
    biases = *(one.astype(jnp.bfloat16) for one in biases), jnp.zeros((EXPERTS, 64), jnp.bfloat16)

    def loss(x, gates, biases, experts, coded):
        y = experts(x, gates, chosen, coded, biases, limit=7.0, alpha=1.702)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def gradients(experts, coded):
        run = jax.value_and_grad(functools.partial(loss, experts=experts, coded=coded), argnums=(0, 1, 2))
        return jax.jit(run)(x.astype(jnp.bfloat16), gates, biases)

    expected = gradients(dropless.limited_experts, [one.in_dtype(jnp.bfloat16) for one in coded])
    monkeypatch.setattr(coded_experts, "grouped_call", lambda dtype: GroupedCall("megablox", interpret=True))
    monkeypatch.setattr(forms, "DENSE_TOKENS", 1)
    monkeypatch.delattr(ScaledCodes, "in_dtype")
    found = gradients(dropless.limited_experts_in_codes, coded)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float32) - np.asarray(other, np.float32))
        assert error <= 0.02 * max(np.linalg.norm(np.asarray(other, np.float32)), 1.0)


def test_a_kernel_that_cannot_read_codes_is_a_warning(monkeypatch):
    (x, gates, chosen), coded, biases = four_bits()
    monkeypatch.setattr(coded_experts, "grouped_call", lambda dtype: GroupedCall("megablox"))
    biases = *biases, jnp.zeros((EXPERTS, 64))
    with pytest.warns(AutoshardWarning, match="takes rows in bfloat16, not float32. The matrices are decoded"):
        jax.eval_shape(
            lambda x: dropless.limited_experts_in_codes(x, gates, chosen, coded, biases, limit=7.0, alpha=1.7), x
        )


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["slices", "stacks"])
@pytest.mark.parametrize("tokens", [32, 132], ids=["densely", "by sorting"])
def test_a_tpu_decodes_no_matrix_of_4_bits_in_memory(tokens, stacked):
    """In a compiled scan over layers, arrays as large as a matrix have 4 bits an element. Stacks are read in place."""
    layers, width, ffn = 3, 512, 1024

    def coded(inputs, outputs) -> Any:
        stack = (layers,) if stacked else (layers, 1)  # a slice is a stack of one layer
        codes: Any = jax.ShapeDtypeStruct((*stack, EXPERTS, inputs, outputs), "float4_e2m1fn")
        return codes, jax.ShapeDtypeStruct((layers, EXPERTS, inputs // 32, outputs), "float8_e8m0fnu")

    def step(codes, others, x, gates, chosen):
        def layer(x, each):
            number, slices, (*scales, biases) = each
            stacks, number = (codes, number) if stacked else (slices, jnp.zeros_like(number))
            coded = [StackedCodes(*pair, number) for pair in zip(stacks, scales, strict=True)]
            return x + dropless.limited_experts_in_codes(x, gates, chosen, coded, biases, limit=7.0, alpha=1.7), None

        numbers = jax.lax.broadcasted_iota(jnp.int32, (layers, 1), 0)
        return jax.lax.scan(layer, x, (numbers, () if stacked else codes, others))[0]

    gates, chosen = (jax.ShapeDtypeStruct((tokens, 1, TOP_K), dtype) for dtype in ("bfloat16", "int32"))
    x = jax.ShapeDtypeStruct((tokens, 1, width), "bfloat16")
    biases = tuple(jax.ShapeDtypeStruct((layers, EXPERTS, n), "bfloat16") for n in (ffn, ffn, width))
    codes, scales = zip(coded(width, ffn), coded(width, ffn), coded(ffn, width), strict=True)
    made = plan(step, codes, (*scales, biases), x, gates, chosen, target="v6e:2x2", plan="ep:4")
    result = compile_job(export_plan(bound_or_error(made.bound).executable, {}), 600.0)
    assert result.kind == "ok" and result.text.count("%coded_product") >= 3
    instructions = [i for one in parse_program(result.text).computations.values() for i in one.instructions]
    large = {a.dtype for i in instructions for a in i.arrays if a.elements >= width * ffn}
    assert large == {"f4e2m1fn"}
    # `copy-start` prefetches stacks that fit on the chip.
    makers = {i.opcode for i in instructions for a in i.arrays if a.dtype == "f4e2m1fn"}
    in_place = {"parameter", "tuple", "get-tuple-element", "while", "copy-start", "copy-done", "bitcast"}
    assert (makers <= in_place) == stacked, makers
