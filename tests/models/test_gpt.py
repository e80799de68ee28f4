"""The GPT: its values and gradients, the agreement of its variants, and its error messages."""

import dataclasses
import inspect
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models import (
    GPT,
    REMAT_POLICIES,
    flops_per_token,
    loss_fn,
    parameter_count,
    restack,
)
from autoshard.models.stack import run_layers
from autoshard.models.transformer import Norm, _rotate, dropout, dropout_add, dropout_keys
from tests.models.small import GPT2, TINY, filled, logits_of, quickly

VARIANTS = {
    "llama": TINY,
    "gpt2": GPT2,
    "unrolled": dataclasses.replace(TINY, scan_layers=False),
    "blockwise": dataclasses.replace(TINY, attention="blockwise", block_size=4),
    "loss-in-chunks": dataclasses.replace(TINY, loss_chunks=4),
    "gpt2-tied-unrolled": dataclasses.replace(GPT2, tie_head=True, scan_layers=False),
}


def initialised(cfg):
    """Makes a model with its initial parameters."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, quickly(lambda: nnx.state(GPT(cfg, rngs=nnx.Rngs(0)))))


def tokens(shape=(2, 9), vocab=32, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, vocab)


def loss_and_grads(model, *, key=None, inputs=None):
    graph, params = nnx.split(model, nnx.Param)
    inputs = tokens() if inputs is None else inputs

    def loss(params):
        total, count = loss_fn(nnx.merge(graph, params), inputs, inputs[:, ::-1], deterministic=key is None, rngs=key)
        return total / count

    value, grads = quickly(jax.value_and_grad(loss), params)
    return value, nnx.to_pure_dict(grads)


@cache
def loss_and_grads_of(cfg, seed=None):
    return loss_and_grads(filled(cfg), key=None if seed is None else jax.random.key(seed))


def assert_close(a, b, tolerance=1e-5):
    """Compares leaves by the norm of their difference, relative to the leaf's norm or 1 % of the tree's norm."""
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(b)))
    jax.tree.map_with_path(
        lambda path, x, y: np.testing.assert_array_less(
            np.linalg.norm(x - y), tolerance * max(np.linalg.norm(y), 1e-2 * whole), err_msg=str(path)
        ),
        a,
        b,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_future_token_does_not_change_past_logits(name):
    model = filled(VARIANTS[name])
    before = tokens()
    after = before.at[:, 5].set((before[:, 5] + 1) % 32)
    a, b = logits_of(model, before), logits_of(model, after)
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    assert np.all(np.max(np.abs(a[:, 5:] - b[:, 5:]), axis=-1) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "blockwise"])
def test_gradients_match_finite_differences(name):
    model = filled(VARIANTS[name])
    graph, params = nnx.split(model, nnx.Param)
    inputs = tokens((1, 6))

    def loss(params):
        total, count = loss_fn(nnx.merge(graph, params), inputs, inputs[:, ::-1])
        return total / count

    # Move one leaf at a time along its gradient: there the slope is the gradient's norm, and rounding matters least.
    gradient = quickly(jax.grad(loss), params)
    loss = jax.jit(loss)
    leaves, tree = jax.tree.flatten(params)
    for index, grad in enumerate(jax.tree.leaves(gradient)):
        norm = np.linalg.norm(grad)
        losses = []
        for step in (1e-2, -1e-2):
            moved = [x + step * grad / max(norm, 1e-30) if i == index else x for i, x in enumerate(leaves)]
            losses.append(loss(jax.tree.unflatten(tree, moved)))
        np.testing.assert_allclose((losses[0] - losses[1]) / 2e-2, norm, rtol=1e-2, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("name, dropout", [("llama", 0.2), ("gpt2", 0.0)])
def test_scanned_and_unrolled_are_the_same_model(name, dropout):
    cfg = dataclasses.replace(VARIANTS[name], dropout=dropout)
    scanned = filled(cfg)
    unrolled = restack(scanned, scan_layers=False)
    assert not unrolled.cfg.scan_layers and isinstance(unrolled.blocks, nnx.List)
    key = jax.random.key(2) if dropout else None
    loss, grads = loss_and_grads_of(cfg, 2 if dropout else None)
    other, other_grads = loss_and_grads(unrolled, key=key)
    np.testing.assert_allclose(loss, other, rtol=1e-6)
    layers = [other_grads["blocks"][i] for i in range(2)]
    other_grads["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    assert_close(grads, other_grads)


@pytest.mark.slow
def test_restack_is_its_own_inverse_and_initialisation_does_not_depend_on_the_layout():
    scanned, unrolled = initialised(TINY), initialised(dataclasses.replace(TINY, scan_layers=False))
    for a, b in [
        (restack(scanned, scan_layers=False), unrolled),
        (restack(unrolled, scan_layers=True), scanned),
        (restack(scanned, scan_layers=True), scanned),
    ]:
        assert a.cfg == b.cfg
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(a)), nnx.to_pure_dict(nnx.state(b)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "policy, scan",
    [(name, True) for name in REMAT_POLICIES if name != "none"]
    + [("full", False), ("dots", False), ("none,full", True), ("full, dots", True), ("none,full", False)],
)
def test_remat_changes_neither_loss_nor_gradients(policy, scan):
    cfg = dataclasses.replace(TINY, dropout=0.2, scan_layers=scan)
    expected = loss_and_grads_of(dataclasses.replace(cfg, scan_layers=True), 2)
    model = restack(filled(dataclasses.replace(cfg, remat=policy, scan_layers=True)), scan_layers=scan)
    loss, grads = loss_and_grads(model, key=jax.random.key(2))
    if not scan:
        grads["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *(grads["blocks"][i] for i in range(2)))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(grads, expected[1])


@pytest.mark.slow
def test_remat_policies_order_the_memory():
    def temp_bytes(policy, layers=8):
        cfg = dataclasses.replace(TINY, layers=layers, context=64, remat=policy)
        graph, params = nnx.split(nnx.eval_shape(lambda: filled(cfg)), nnx.Param)
        inputs = jax.ShapeDtypeStruct((4, 64), jnp.int32)
        step = jax.grad(lambda params, x: loss_fn(nnx.merge(graph, params), x, x)[0])
        analysis = jax.jit(step).lower(params, inputs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    none, dots, full = temp_bytes("none"), temp_bytes("dots"), temp_bytes("full")
    assert full < dots < none
    # Alternating policies lie in between. A scan over groups saves no copies of parameters: it adds one layer's memory.
    none, dots, full = temp_bytes("none", 64), temp_bytes("dots", 64), temp_bytes("full", 64)
    assert full < temp_bytes("dots,full", 64) < dots < temp_bytes("none,full", 64) < none
    assert abs(temp_bytes("dots,dots", 64) - dots) < 0.15 * dots


@pytest.mark.few(1)
@pytest.mark.parametrize("chunks", [2, 5])  # 5 does not divide the vocabulary
@pytest.mark.parametrize("cfg", [TINY, GPT2], ids=["tied", "untied"])
def test_the_loss_in_chunks_has_the_same_value_and_gradients(cfg, chunks):
    loss, grads = loss_and_grads_of(dataclasses.replace(cfg, dropout=0.2), 1)
    in_chunks, chunk_grads = loss_and_grads_of(dataclasses.replace(cfg, dropout=0.2, loss_chunks=chunks), 1)
    np.testing.assert_allclose(in_chunks, loss, rtol=1e-6)
    assert_close(chunk_grads, grads)


def test_a_tied_head_is_one_parameter_with_the_sum_of_both_gradients():
    tied = filled(TINY)
    untied = filled(dataclasses.replace(TINY, tie_head=False))
    values = nnx.to_pure_dict(nnx.state(tied)) | {"head": tied.embed[...].T}
    state = nnx.state(untied)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(untied, state)
    loss, grads = loss_and_grads_of(TINY)
    other, other_grads = loss_and_grads(untied)
    np.testing.assert_allclose(loss, other, rtol=1e-6)
    assert_close(grads["embed"], other_grads["embed"] + other_grads["head"].T)
    assert "head" not in grads and np.abs(other_grads["embed"]).max() > 0


def test_dropout_is_a_function_of_its_key():
    model, inputs = filled(dataclasses.replace(TINY, dropout=0.5)), tokens()
    key = jax.random.key(0)
    drop = partial(logits_of, model, inputs)
    first = drop(key)
    np.testing.assert_array_equal(first, drop(key))
    assert np.abs(first - drop(jax.random.key(1))).max() > 1e-3
    plain = logits_of(model, inputs)
    assert np.abs(first - plain).max() > 1e-3
    np.testing.assert_array_equal(plain, logits_of(filled(TINY), inputs))


def test_dropout_from_rngs_advances_its_stream():
    model, inputs, rngs = filled(dataclasses.replace(TINY, dropout=0.5)), tokens(), nnx.Rngs(dropout=3)
    drop = nnx.jit(lambda model, rngs: model(inputs, deterministic=False, rngs=rngs))
    first, second = drop(model, rngs), drop(model, rngs)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(first, drop(model, nnx.Rngs(dropout=3)))


def test_dropout_is_added_in_float32():
    key, shape = jax.random.key(0), (64, 64)
    residual, x = jnp.asarray(jax.random.normal(key, (2, *shape)), "bfloat16")
    made = jax.jit(partial(dropout_add, rate=0.25, key=key))(residual, x)
    keep = np.asarray(jax.random.bernoulli(key, 0.75, shape))
    exact = np.asarray(residual, np.float32) + np.where(keep, np.asarray(x, np.float32) / np.float32(0.75), 0)
    assert made.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(made), np.asarray(jnp.asarray(exact, "bfloat16")))
    narrow = residual + dropout(x, 0.25, key)
    assert (np.asarray(narrow) != np.asarray(made)).mean() > 0.01  # it is rounded twice


def test_dropout_keeps_the_mean():
    x = jnp.ones((64, 64))
    dropped = dropout(x, 0.25, jax.random.key(0))
    assert abs(float(dropped.mean()) - 1.0) < 0.03
    assert abs(float((dropped == 0).mean()) - 0.25) < 0.03


def test_layers_drop_different_elements():
    model = filled(dataclasses.replace(TINY, dropout=0.5, layers=2))
    graph, params = nnx.split(model.blocks)
    same = jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), params)
    first = jax.tree.map(lambda x: x[0], params)
    layer = jax.jit(lambda x, key: nnx.merge(graph, first)(x, key))
    keys = dropout_keys(model.cfg, False, jax.random.key(0))[1:]  # pyright: ignore[reportOptionalSubscript]
    x = jax.random.normal(jax.random.key(1), (2, 9, 16))
    one_key_twice = layer(layer(x, keys[0]), keys[0])
    np.testing.assert_allclose(
        run_layers(nnx.merge(graph, same), x, keys, remat="none"), layer(layer(x, keys[0]), keys[1]), atol=1e-6
    )
    assert np.abs(one_key_twice - layer(layer(x, keys[0]), keys[1])).max() > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("scan", [True, False])
def test_under_nnx_transforms_gradients_are_those_of_split_and_merge(scan):
    model = filled(dataclasses.replace(TINY, scan_layers=scan))
    inputs = tokens()

    @nnx.jit
    def step(model):
        def loss(model):
            total, count = loss_fn(model, inputs, inputs[:, ::-1])
            return total / count

        return nnx.value_and_grad(loss)(model)

    value, grads = step(model)
    expected, expected_grads = loss_and_grads_of(model.cfg)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(nnx.to_pure_dict(grads), expected_grads)


def test_grouped_queries_equal_repeated_heads():
    grouped = filled(TINY)
    values = nnx.to_pure_dict(nnx.state(grouped))
    for name in ("wk", "wv"):
        values["blocks"]["attention"][name] = jnp.repeat(values["blocks"]["attention"][name], 2, axis=2)
    full = filled(dataclasses.replace(TINY, kv_heads=4))
    state = nnx.state(full)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(full, state)
    np.testing.assert_allclose(logits_of(full, tokens()), logits_of(grouped, tokens()), atol=1e-5)


@pytest.mark.slow
def test_rotary_positions_are_relative_and_learned_positions_absolute():
    """If all tokens are equal, rotary attention averages equal values, so the logits of all positions are equal."""
    same = jnp.full((1, 9), 3, jnp.int32)
    rotary, learned = (logits_of(filled(cfg), same) for cfg in (TINY, GPT2))
    np.testing.assert_allclose(rotary[:, 1:], rotary[:, :-1], atol=1e-5)
    assert np.abs(learned[:, 1:] - learned[:, :-1]).max() > 1e-2
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    rows_q, rows_k = (_rotate(jnp.tile(x, (1, 6, 1, 1)), 100.0)[0, :, 0] for x in (q, k))
    scores = rows_q @ rows_k.T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert np.abs(scores[0, 1:] - scores[0, :-1]).max() > 1e-2
    np.testing.assert_allclose(jnp.linalg.norm(rows_q, axis=-1), jnp.linalg.norm(q), rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-3])  # at 1e-3, the epsilon added to the variance matters
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_against_their_definitions(kind, size):
    norm = Norm(dataclasses.replace(GPT2, norm=kind))
    for i, param in enumerate(jax.tree.leaves(nnx.state(norm), is_leaf=lambda x: isinstance(x, nnx.Variable))):
        param[...] = jax.random.normal(jax.random.key(i), param.shape)
    x = size * np.asarray(3 + 2 * jax.random.normal(jax.random.key(0), (2, 3, 16)))
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...])
    expected = expected + (np.asarray(norm.bias[...]) if kind == "layernorm" else 0)  # pyright: ignore[reportOptionalSubscript]
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, atol=1e-5)
    assert (norm.bias is not None) == (kind == "layernorm")


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    model = filled(dataclasses.replace(TINY, dtype="bfloat16"))
    assert logits_of(model, tokens()).dtype == jnp.bfloat16
    loss, grads = loss_and_grads(model)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    expected, _ = loss_and_grads_of(TINY)
    np.testing.assert_allclose(loss, expected, rtol=1e-2)
    half = filled(dataclasses.replace(TINY, param_dtype="bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_and_flop_counts(name):
    cfg = VARIANTS[name]
    model = filled(cfg)
    sizes = {jax.tree_util.keystr(p): x.size for p, x in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))}
    assert parameter_count(model) == sum(sizes.values())
    weights = sum(size for path, size in sizes.items() if "'w" in path) + cfg.vocab * cfg.width
    assert flops_per_token(cfg, 8) == 6 * weights + 12 * cfg.layers * cfg.width * 8
    assert flops_per_token(cfg) == flops_per_token(cfg, cfg.context)


def test_flops_agree_with_the_compilers_count():
    cfg = dataclasses.replace(TINY, layers=1, width=64, heads=4, kv_heads=4, ffn=256, vocab=256, scan_layers=False)
    graph, params = nnx.split(nnx.eval_shape(lambda: filled(cfg)), nnx.Param)
    x = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    step = jax.jit(jax.grad(lambda params, x: loss_fn(nnx.merge(graph, params), x, x)[0]))
    analysis = step.lower(params, x).compile().cost_analysis()
    assert 0.95 < analysis["flops"] / (24 * flops_per_token(cfg, 12)) < 1.15  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.slow
def test_initialisation_has_gpt2_deviations():
    model = initialised(dataclasses.replace(GPT2, layers=8, width=64, ffn=256, vocab=256))
    values = nnx.to_pure_dict(nnx.state(model))
    attention, mlp = values["blocks"]["attention"], values["blocks"]["mlp"]
    residual = 0.02 / 16**0.5
    for weight, std in [
        (values["embed"], 0.02),
        (values["head"], 0.02),
        (attention["wq"], 0.02),
        (attention["wo"], residual),
        (mlp["w_up"], 0.02),
        (mlp["w_down"], residual),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.03)
    assert np.all(np.std(attention["wq"], axis=(1, 2, 3)) > 0)
    assert np.abs(attention["wq"][0] - attention["wq"][1]).max() > 0.01
    uniform, _ = loss_and_grads(model, inputs=tokens(vocab=256))
    np.testing.assert_allclose(uniform, np.log(256), rtol=0.02)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norm": "batchnorm"}, "norm is 'batchnorm'; choose one of rmsnorm, layernorm"),
        ({"remat": "some"}, "remat is 'some'; choose one of none, full, dots"),
        (
            {"remat": "full,some"},
            "remat is 'full,some'; choose one of .*, or several with commas, to alternate over the layers",
        ),
        ({"remat": "full,none,none"}, "2 scanned layers do not divide into groups of 3"),
        ({"width": 18}, "width 18 is not a multiple of heads 4"),
        ({"width": 12}, "make it even, or set positions='learned'"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"loss_chunks": 0}, "loss_chunks is 0; it must be at least 1"),
        ({"attention": "cudnn"}, "attention is 'cudnn', which needs dtype bfloat16 or float16, not float32"),
        ({"attention": "splash", "dtype": "float16"}, "attention is 'splash', which needs dtype bfloat16 or float32"),
        ({"loss_chunks": 33}, "loss_chunks is 33; it must be at most vocab, 32"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_an_invalid_config_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_config_names_every_problem_at_once():
    with pytest.raises(ValueError, match="mlp is 'relu'.*vocab is 0.*dropout is -1"):
        dataclasses.replace(TINY, mlp="relu", vocab=0, dropout=-1.0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_more_tokens_than_context_is_an_error(name):
    with pytest.raises(ValueError, match=r"13 positions \(dim 1\), more than the context of 12.*larger"):
        filled(VARIANTS[name])(tokens((1, 13)))


def test_other_invalid_calls():
    model = filled(dataclasses.replace(TINY, dropout=0.1))
    with pytest.raises(ValueError, match="pass rngs="):
        model(tokens(), deterministic=False)
    with pytest.raises(ValueError, match=r"integers \[batch, seq\], not float32\[2, 9\]"):
        model(tokens().astype(jnp.float32))
    with pytest.raises(ValueError, match=r"int32\[9\]"):
        model(tokens((9,)))


def test_a_token_outside_the_vocabulary_gives_nan():
    assert np.all(np.isnan(logits_of(filled(TINY), jnp.array([[32]]))))
    assert np.all(np.isnan(logits_of(filled(TINY), jnp.array([[-1]]))))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_promotion_is_implicit(name, dtype, strict_numerics):
    cfg = dataclasses.replace(VARIANTS[name], dtype=dtype, dropout=0.1)
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))

    def loss(params, inputs, key):
        return loss_fn(nnx.merge(graph, params), inputs, inputs, inputs > 0, deterministic=False, rngs=key)[0]

    grads = jax.eval_shape(jax.grad(loss), params, jax.ShapeDtypeStruct((2, 9), jnp.int32), jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("path", sorted(Path(inspect.getfile(GPT)).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_sharding_annotation(path):
    for word in (
        "PartitionSpec",
        "with_partitioning",
        "with_sharding_constraint",
        "NamedSharding",
        "out_sharding",
    ):
        assert word not in path.read_text()


def test_dropout_without_a_key_changes_nothing():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.5, None) is x
