"""The forms of a shard's experts: equal values, the choice between them, and reads of stacked weights in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.models import dropless
from autoshard.models.dropless import forms, operators
from autoshard.models.dropless.constants import DENSE_TOKENS
from autoshard.models.dropless.units import gelu, limited, swiglu
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import find_target
from tests.arrays import array

EMBED, FFN, EXPERTS, TOP_K = 8, 12, 16, 3
TILED = GroupedCall("tiled")
densely = functools.partial(forms.densely, call=TILED)
UNITS = {
    "gelu": (gelu, 1, 0),
    "swiglu": (swiglu, 2, 0),
    "limited": (functools.partial(limited, limit=1.5, alpha=1.7), 2, 2),
}


def operands(unit, tokens, own=slice(0, EXPERTS)):
    """Return tokens, gates, choices, and the numbers and weights of some experts. No token chooses the last expert."""
    rng = np.random.default_rng(0)
    _, up, biases = UNITS[unit]
    chosen = np.stack([rng.permutation(EXPERTS - 1)[:TOP_K] for _ in range(tokens)])
    shapes = [(EXPERTS, EMBED, FFN)] * up + [(EXPERTS, FFN)] * biases + [(EXPERTS, FFN, EMBED)]
    return (
        array(rng.normal(size=(tokens, 1, EMBED)), jnp.float32),
        array(rng.random((tokens, 1, TOP_K)), jnp.float32),
        jnp.asarray(chosen[:, None], jnp.int32),
        jnp.arange(EXPERTS, dtype=jnp.int32)[own],
        *(array(rng.normal(size=shape), jnp.float32)[own] for shape in shapes),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("own", [slice(5, 12), slice(0, EXPERTS)], ids=["a shard", "all experts"])
def test_all_forms_have_the_same_values(unit, own):
    given = operands(unit, 5, own)
    by_sorting = functools.partial(forms.by_sorting, count=EXPERTS, call=TILED)
    expected, *others = (
        jax.jit(form, static_argnums=0)(UNITS[unit][0], *given) for form in (by_sorting, densely, forms.one_by_one)
    )
    assert np.linalg.norm(expected) > 1
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_overflow_of_an_expert_that_is_not_chosen_has_no_effect():
    x, gates, chosen, own, gate, up, down = operands("swiglu", 5)
    found = jax.jit(densely, static_argnums=0)(swiglu, x, gates, chosen, own, gate.at[-1].set(3e38), up, down)
    expected = jax.jit(densely, static_argnums=0)(swiglu, x, gates, chosen, own, gate, up, down)
    np.testing.assert_array_equal(found, expected)


def form_of(tokens, call, own=slice(0, EXPERTS), *, monkeypatch):
    """Return the name of the form that `apply_experts` takes."""
    taken = []
    for name in ("one_by_one", "densely", "by_sorting"):
        monkeypatch.setattr(forms, name, lambda *_, name=name, **__: taken.append(name))
    forms.apply_experts(swiglu, *operands("swiglu", tokens, own), count=EXPERTS, call=call)
    return taken[0]


@pytest.mark.parametrize(
    ("tokens", "kernel", "own", "form"),
    [
        (2, "megablox", slice(0, EXPERTS), "one_by_one"),
        (2, "tiled", slice(0, EXPERTS), "one_by_one"),
        (2, "megablox", slice(0, 4), "densely"),  # 6 choices, and 4 experts
        (6, "megablox", slice(0, EXPERTS), "densely"),
        (6, "tiled", slice(0, EXPERTS), "by_sorting"),
        (DENSE_TOKENS, "megablox", slice(0, EXPERTS), "densely"),
        (DENSE_TOKENS + 1, "megablox", slice(0, EXPERTS), "by_sorting"),
    ],
)
def test_the_form_follows_from_tokens_and_experts(tokens, kernel, own, form, monkeypatch):
    assert form_of(tokens, GroupedCall(kernel), own, monkeypatch=monkeypatch) == form


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 6], ids=["one by one", "densely"])
def test_gradients_do_not_depend_on_the_form(tokens):
    x, gates, chosen, own, *weights = operands("swiglu", tokens)

    def gradients(experts):
        def loss(x, gates, *weights):
            return jnp.sum(jnp.square(experts(x, gates, chosen, own, *weights)))

        return jax.jit(jax.value_and_grad(loss, argnums=range(5)))(x, gates, *weights)

    found = gradients(functools.partial(operators.swiglu_experts, count=EXPERTS, call=GroupedCall("megablox")))
    expected = gradients(functools.partial(forms.by_sorting, swiglu, count=EXPERTS, call=TILED))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4), found, expected)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize(("tokens", "read"), [(32, 1.0), (2, 2 * TOP_K / EXPERTS)], ids=["densely", "one by one"])
def test_a_tpu_reads_stacked_weights_once(tokens, read):
    """A compiled scan over layers takes the time in which the experts that it needs are read from memory."""
    layers, width, ffn = 3, 1024, 2048
    up, down = (layers, EXPERTS, width, ffn), (layers, EXPERTS, ffn, width)
    weights = tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (up, up, down))
    x = jax.ShapeDtypeStruct((tokens, 1, width), "bfloat16")

    def step(weights, x, gates, chosen):
        def layer(x, weights):
            gate, up, down = weights
            return x + dropless.experts(x, gates, chosen, up, down, gate), None

        return jax.lax.scan(layer, x, weights)[0]

    gates, chosen = (jax.ShapeDtypeStruct((tokens, 1, TOP_K), dtype) for dtype in ("bfloat16", "int32"))
    audit = plan(step, weights, x, gates, chosen, target="v5e:2x2", plan="tp:4").verify()
    assert audit.ok, audit.message
    own_bytes = read * 3 * layers * EXPERTS * width * ffn * 2 / 4
    fastest_us = own_bytes / find_target("v5e:2x2").chip.memory_bandwidth / BANDWIDTH_REACHED * 1e6
    assert audit.compute_us_roofline == pytest.approx(fastest_us, rel=0.15)
