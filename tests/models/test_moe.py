"""Mixtures of experts: comparison with all experts on all tokens, dropped choices, and the router's losses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from autoshard.models import ALPA_MOE, MIXTRAL, GPTConfig, MoE, MoEConfig, cross_entropy, generate, workload
from autoshard.models.capacity import dispatch_masks
from autoshard.models.moe import Experts, route
from tests.arrays import array
from tests.models.small import called, count, equations, filled_as, quickly, text_entropy, trained

SMALL = MoEConfig(GPTConfig(vocab=32, layers=4, heads=4, kv_heads=2, width=16, ffn=24, context=12), moe_every=2)
AMPLE = dataclasses.replace(SMALL, capacity_factor=8.0)  # as many slots as tokens
DROPLESS = dataclasses.replace(SMALL, dispatch="dropless")


def with_gpt(cfg, **changes):
    return dataclasses.replace(cfg, gpt=dataclasses.replace(cfg.gpt, **changes))


def model_factory(cfg):
    return lambda rngs: MoE(cfg, rngs=rngs)


def experts_of(cfg):
    return filled_as(lambda rngs: Experts(cfg, rngs.params()), 0.5)


def inputs(batch=2, seq=12, seed=0):
    return array(np.random.default_rng(seed).normal(size=(batch, seq, 16)), jnp.float32)


def tokens(seed=0):
    return array(np.random.default_rng(seed).integers(0, 32, (2, 12)), jnp.int32)


def batch(seed=0):
    mask = array(np.random.default_rng(seed).random((2, 12)) < 0.7, jnp.float32)
    return {"inputs": tokens(seed), "targets": tokens(seed + 1), "mask": mask}


def every_expert(layer, x):
    """The layer's definition: runs all experts on all tokens and weights them by the gates."""
    cfg = layer.cfg
    probabilities = jax.nn.softmax(x @ layer.router[...], axis=-1)
    chosen = jnp.where(probabilities >= jnp.sort(probabilities, axis=-1)[..., -cfg.top_k, None], probabilities, 0.0)
    gates = chosen / jnp.sum(chosen, axis=-1, keepdims=True) if cfg.renormalize else chosen
    hidden = jnp.einsum("bsd,edf->bsef", x, layer.w_up[...])
    if layer.w_gate is None:
        hidden = jax.nn.gelu(hidden)
    else:
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, layer.w_gate[...])) * hidden
    y = jnp.einsum("bse,bsed->bsd", gates, jnp.einsum("bsef,efd->bsed", hidden, layer.w_down[...]))
    return y if layer.shared is None else y + layer.shared(x)


def value_and_gradients(layer, run, x):
    """Returns the output, and the gradients of all weights and of the input for a random cotangent."""
    graph, params = nnx.split(layer)
    cotangent = array(np.random.default_rng(7).normal(size=x.shape), jnp.float32)

    def scalar(params, x):
        y = run(nnx.merge(graph, params), x)
        return jnp.sum(y * cotangent), y

    (_, y), gradients = quickly(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True), params, x)
    return y, gradients


CASES = {
    "swiglu": {},
    "probabilities": {"renormalize": False},
    "one-expert": {"renormalize": False, "top_k": 1},
    "shared": {"shared_experts": 2, "top_k": 3},
    "gelu-groups": {"mlp": "gelu", "expert_ffn": 10, "group_size": 6},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("dispatch", "remat"), [("capacity", "none"), ("capacity", "full"), ("dropless", "none")])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_weighted_sum_of_all_experts(name, dispatch, remat):
    changes = dict(CASES[name])
    cfg = with_gpt(AMPLE, mlp=changes.pop("mlp", "swiglu"), remat=remat)
    layer = experts_of(dataclasses.replace(cfg, dispatch=dispatch, **changes))
    expected = value_and_gradients(layer, every_expert, inputs())
    actual = value_and_gradients(layer, lambda layer, x: layer(x)[0], inputs())
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert np.linalg.norm(one) > 1e-3
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(one))))


def assign_slots(chosen, capacity, experts):
    """Assigns slots in a plain loop: maps (token, choice) to the slot at the expert, or None."""
    used, slots = [0] * experts, {}
    for choice in range(chosen.shape[1]):
        for token in range(chosen.shape[0]):
            expert = int(chosen[token, choice])
            slots[token, choice] = used[expert] if used[expert] < capacity else None
            used[expert] += 1
    return slots


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_slots_go_to_first_choices_in_order(factor):
    cfg = dataclasses.replace(SMALL, capacity_factor=factor)
    rng = np.random.default_rng(0)
    chosen = np.stack([np.stack([rng.permutation(8)[:2] for _ in range(12)]) for _ in range(3)])
    gates = rng.random(chosen.shape).astype(np.float32)
    dispatched, weighted = dispatch_masks(cfg, jnp.asarray(gates), jnp.asarray(chosen, jnp.int32))
    expected, expected_gates = np.zeros(dispatched.shape), np.zeros(dispatched.shape)
    for group in range(3):
        for (token, choice), slot in assign_slots(chosen[group], cfg.capacity(12), 8).items():
            if slot is not None:
                position = group, token, chosen[group, token, choice], slot
                expected[position], expected_gates[position] = 1, gates[group, token, choice]
    assert dispatched.shape == (3, 12, 8, cfg.capacity(12)) and expected.sum() < chosen.size
    np.testing.assert_array_equal(dispatched, expected)
    np.testing.assert_array_equal(weighted, expected_gates.astype(np.float32))


def test_masks_are_computed_without_products():
    """A product would contract over a token's two choices and fill a small part of a TPU's matrix unit."""
    gates, chosen = jnp.ones((3, 12, 2)), jnp.zeros((3, 12, 2), jnp.int32)
    grads = jax.make_jaxpr(jax.grad(lambda g: dispatch_masks(SMALL, g, chosen)[1].sum()))(gates)
    assert "dot_general" not in str(grads)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_where_outputs_are_not_kept_the_backward_pass_computes_none(quantization):
    """Two products with `w_down`: one in the forward pass, and one for the gradient of the hidden units."""
    layer = experts_of(with_gpt(SMALL, remat="full", quantization=quantization))
    graph, params = nnx.split(layer)

    def total(params, x):
        return jnp.sum(jax.checkpoint(lambda p, x: nnx.merge(graph, p)(x)[0])(params, x))

    traced = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(params, inputs())
    found = [each for each in equations(traced.jaxpr) if each.primitive.name == "dot_general"]
    products = [[v.aval.shape for v in each.invars] for each in found]
    assert sum(layer.w_down.shape in shapes for shapes in products) == 2
    assert sum(layer.w_up.shape in shapes for shapes in products) == 6  # `w_gate` has the same shape


def test_frozen_weights_need_no_product_with_zeros():
    layer = experts_of(SMALL)
    params, router = nnx.to_pure_dict(nnx.state(layer)), layer.router[...]

    def total(router, remat):
        model = nnx.merge(nnx.graphdef(experts_of(with_gpt(SMALL, remat=remat))), {**params, "router": router})
        return jnp.sum(jnp.sin(jax.checkpoint(lambda x: model(x)[0])(inputs())))

    traced = jax.make_jaxpr(jax.grad(lambda router: total(router, "full")))(router)
    found = [each for each in equations(traced.jaxpr) if each.primitive.name == "dot_general"]
    products = [[v.aval.shape for v in each.invars] for each in found]
    assert sum(layer.w_down.shape in shapes for shapes in products) == 2
    recomputed, kept = (jax.jit(jax.grad(lambda r, remat=remat: total(r, remat)))(router) for remat in ("full", "none"))
    np.testing.assert_allclose(recomputed, kept, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_the_derivative_in_a_direction_is_the_gradient_along_it(mlp):
    layer = experts_of(with_gpt(SMALL, mlp=mlp, remat="full"))
    graph, params = nnx.split(layer)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda p: array(rng.normal(size=p.shape), p.dtype), params)

    def total(params):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(inputs())[0]))

    forward = jax.jit(lambda: jax.jvp(total, (params,), (direction,))[1])()
    gradient = jax.jit(jax.grad(total))(params)
    backward = sum(float(jnp.vdot(d, g)) for d, g in zip(*map(jax.tree.leaves, (direction, gradient)), strict=True))
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


def test_a_choice_without_a_slot_adds_nothing():
    """All tokens choose the same two experts, which have two slots each: from token 2 on, only the residual is left."""
    cfg = dataclasses.replace(SMALL, capacity_factor=0.5)
    assert cfg.capacity(12) == 2
    layer = experts_of(cfg)
    layer.router[...] = jnp.zeros((16, 8)).at[:, 3].set(2.0).at[:, 6].set(1.0)
    x = jnp.abs(inputs())
    actual, expected = called(layer, lambda layer, x: (layer(x)[0], every_expert(layer, x)), x)
    np.testing.assert_allclose(actual[:, :2], expected[:, :2], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(actual[:, 2:], 0.0)
    one_slot = dataclasses.replace(cfg, group_size=4, capacity_factor=1.0)  # one slot for 4 tokens
    other = experts_of(one_slot)
    other.router[...] = layer.router[...]
    actual = np.asarray(called(other, lambda layer, x: layer(x)[0], x))
    assert np.any(actual != 0, axis=-1).tolist() == [[True, False, False, False] * 3] * 2


def test_masks_grow_with_the_batch_and_not_with_its_square():
    def elements(batch):
        shape = jax.ShapeDtypeStruct((batch * 12 // 6, 6, 2), jnp.float32)
        chosen = jax.ShapeDtypeStruct(shape.shape, jnp.int32)
        return jax.eval_shape(lambda g, c: dispatch_masks(SMALL, g, c), shape, chosen)[0].size

    assert elements(8) == 4 * elements(2)
    assert SMALL.capacity(12) == 4 and AMPLE.capacity(12) == 12  # ceil(1.25 * 2 * 12 / 8), at most the tokens


def test_tokens_that_do_not_divide_into_groups_are_an_error():
    with pytest.raises(ValueError, match="2 x 12 tokens do not divide into groups of 7; change MoEConfig.group_size"):
        experts_of(dataclasses.replace(SMALL, group_size=7))(inputs())
    together = experts_of(dataclasses.replace(SMALL, group_size=2048))
    assert jax.eval_shape(lambda x: together(x)[0], inputs()).shape == (2, 12, 16)


def test_losses_of_the_router_by_their_formulas():
    logits = np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)
    balance, z = route(SMALL, jnp.asarray(logits)).losses
    exponents = np.exp(logits.astype(np.float64)).reshape(24, 8)
    probabilities = exponents / exponents.sum(1, keepdims=True)
    chosen = np.argsort(-exponents, axis=1)[:, :2]
    fractions = np.array([(chosen == expert).sum() / chosen.size for expert in range(8)])
    np.testing.assert_allclose(balance, 8 * np.sum(fractions * probabilities.mean(0)), rtol=1e-5)
    np.testing.assert_allclose(z, np.mean(np.log(exponents.sum(1)) ** 2), rtol=1e-5)


def test_balance_loss_is_one_for_equal_use_and_the_number_of_experts_for_one_expert():
    cfg = dataclasses.replace(SMALL, top_k=1, renormalize=False)
    balance = jax.jit(jax.value_and_grad(lambda logits: route(cfg, logits).losses.balance))
    uniform = np.tile(4.0 * np.eye(8, dtype=np.float32), (3, 1))[None]
    np.testing.assert_allclose(balance(uniform)[0], 1.0, rtol=1e-5)
    one_expert = np.zeros((1, 24, 8), np.float32)
    one_expert[..., 2] = 30.0
    np.testing.assert_allclose(balance(one_expert)[0], 8.0, rtol=1e-5)
    slope = np.asarray(balance(one_expert / 30.0)[1])
    # Gradient descent raises the logits of the idle experts.
    assert np.all(slope[..., 2] > 0) and np.all(np.delete(slope, 2, axis=-1) < 0)


@pytest.mark.parametrize("cfg", [SMALL, DROPLESS], ids=["capacity", "dropless"])
def test_the_router_computes_in_float32(cfg):
    """Only the input is rounded to bfloat16; the router computes in float32."""
    layer = experts_of(with_gpt(cfg, dtype="bfloat16"))
    x = inputs().astype(jnp.bfloat16)
    y, losses = called(layer, lambda layer, x: layer(x), x)
    logits = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(layer.router[...])
    expected = route(cfg, jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(losses.z, expected.losses.z, rtol=1e-6)
    np.testing.assert_allclose(losses.balance, expected.losses.balance, rtol=1e-6)
    assert y.dtype == jnp.bfloat16 and losses.z.dtype == jnp.float32
    products = [e for e in jax.make_jaxpr(layer)(x).eqns if e.primitive.name == "dot_general"]
    assert products[0].params["precision"] == (lax.Precision.HIGHEST,) * 2  # accelerators round the operands otherwise


def test_expert_weights_are_stacked():
    shapes = {name: leaf.shape for name, leaf in nnx.to_pure_dict(nnx.state(experts_of(SMALL))).items()}
    assert shapes == {"router": (16, 8), "w_up": (8, 16, 24), "w_gate": (8, 16, 24), "w_down": (8, 24, 16)}
    blocks: Any = nnx.eval_shape(lambda: model_factory(SMALL)(nnx.Rngs(0))).blocks
    assert blocks.moe.experts.w_up.shape == (2, 8, 16, 24)  # every second one of four layers
    assert blocks.dense[0].mlp.w_up.shape == (2, 16, 24) and len(blocks.dense) == 1


@pytest.mark.slow
def test_scanned_and_unrolled_are_the_same_model():
    """The model has dropout, the router's losses, and two groups of one dense layer and one layer with experts."""
    cfg = with_gpt(SMALL, dropout=0.2)
    scanned = filled_as(model_factory(cfg))
    graph, state = nnx.split(nnx.eval_shape(lambda: model_factory(with_gpt(cfg, scan_layers=False))(nnx.Rngs(0))))
    values = nnx.to_pure_dict(nnx.state(scanned))
    stacked = values["blocks"]
    values["blocks"] = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(2)}
    nnx.replace_by_pure_dict(state, values)

    def outputs(graph, params):
        def forward(params, key):
            return nnx.merge(graph, params).forward(tokens(), deterministic=False, rngs=key)

        return jax.tree.leaves(quickly(forward, params, jax.random.key(0)))

    for one, other in zip(outputs(*nnx.split(scanned)), outputs(graph, state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
@pytest.mark.parametrize("changes", [{}, dict(scan_layers=False, positions="learned", mlp="gelu")], ids=["", "list"])
def test_a_cache_gives_the_logits_of_the_whole_sequence(dispatch, changes):
    """Any split of a sequence into calls gives the logits of the whole sequence, if no choice is dropped."""
    model = filled_as(model_factory(with_gpt(dataclasses.replace(AMPLE, dispatch=dispatch), **changes)), 0.3)
    whole = called(model, lambda model, x: model(x), tokens())
    extend = nnx.jit(lambda model, tokens, cache: model.extend(tokens, cache))
    for ends in ([12], [5, 6, 7, 12]):
        cache, begin, parts = model.cache(2), 0, []
        for end in ends:
            logits, cache = extend(model, tokens()[:, begin:end], cache)
            parts.append(logits)
            begin = end
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)
        assert int(cache.length) == 12


def test_a_cache_drops_no_choice_although_the_whole_sequence_does():
    """With little capacity, a call on the whole sequence drops choices. A cache gives the logits without drops."""
    tight, ample = (filled_as(model_factory(dataclasses.replace(SMALL, capacity_factor=c)), 0.3) for c in (0.5, 8.0))
    whole = [called(model, lambda model, x: model(x), tokens()) for model in (tight, ample)]
    cached = called(tight, lambda model, x: model.extend(x, model.cache(2))[0], tokens())
    assert np.abs(whole[0] - whole[1]).max() > 1e-3
    np.testing.assert_allclose(cached, whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 14])
def test_generated_text_equals_recomputation_of_each_step(n):
    """This holds within the context and beyond it, where the window moves."""
    model = filled_as(model_factory(AMPLE), 0.5)
    text = generate(model, tokens()[:, :3], n, key=jax.random.key(0), temperature=0.0)
    for end in (3, 2 + n):
        logits = called(model, lambda model, x: model(x), text[:, max(0, end - 12) : end])
        np.testing.assert_array_equal(jnp.argmax(logits[:, -1], -1), text[:, end])


def test_the_training_loss_is_the_cross_entropy_plus_the_weighted_losses():
    cfg = dataclasses.replace(SMALL, balance_weight=0.3, z_weight=0.2)
    model = filled_as(model_factory(cfg))

    def all_losses(model, batch):
        logits, losses = model.forward(batch["inputs"])
        plain = cross_entropy(logits, batch["targets"], batch["mask"])
        return losses, plain, model.loss(batch, deterministic=False), model.loss(batch)

    losses, (plain, tokens), (total, weight), evaluated = called(model, all_losses, batch())
    assert 1.9 < losses.balance < 4.0 and losses.z > 0.1  # sums over two layers, each about 1 or more
    np.testing.assert_allclose(total / weight, plain / tokens + 0.3 * losses.balance + 0.2 * losses.z, rtol=1e-6)
    assert weight == tokens == batch()["mask"].sum()
    np.testing.assert_allclose(evaluated, (plain, tokens), rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_loss_in_chunks_is_the_same(deterministic):
    def loss(model, batch):
        return model.loss(batch, deterministic=deterministic)

    whole, in_chunks = (called(filled_as(model_factory(with_gpt(SMALL, loss_chunks=n))), loss, batch()) for n in (1, 4))
    np.testing.assert_allclose(in_chunks, whole, rtol=1e-6)


def test_a_future_token_does_not_change_past_logits():
    """Dropless only: with a capacity, the first choice of a later token can take the slot of an earlier token."""
    model = filled_as(model_factory(DROPLESS))
    later = tokens().at[:, 7].set((tokens()[:, 7] + 1) % 32)
    one, other = (np.asarray(called(model, lambda model, x: model(x), x)) for x in (tokens(), later))
    np.testing.assert_allclose(one[:, :7], other[:, :7], rtol=1e-5, atol=1e-5)
    assert np.all(np.max(np.abs(one[:, 7:] - other[:, 7:]), axis=-1) > 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cfg", [SMALL, DROPLESS], ids=["capacity", "dropless"])
def test_no_promotion_is_implicit(cfg, dtype, strict_numerics):
    cfg = dataclasses.replace(with_gpt(cfg, dtype=dtype, dropout=0.1), shared_experts=1)
    graph, params = nnx.split(nnx.eval_shape(lambda: model_factory(cfg)(nnx.Rngs(0))))

    def loss(params, batch, key):
        return nnx.merge(graph, params).loss(batch, deterministic=False, rngs=key)[0]

    gradients = jax.eval_shape(jax.grad(loss), params, batch(), jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k": 9}, "top_k is 9; it must be at most the number of experts, 8"),
        ({"top_k": 1}, "gates of 1 give the router no gradient; set renormalize=False"),
        ({"moe_every": 3}, "layers 4 is not a multiple of moe_every 3"),
        ({"moe_every": 0, "experts": 0}, "experts is 0; it must be at least 1.*moe_every is 0"),
        ({"dispatch": "sort"}, "dispatch is 'sort'; choose one of capacity, dropless"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; it must be a finite number above 0"),
        ({"z_weight": -1.0}, "z_weight is -1.0; it must be a finite number of at least 0"),
    ],
)
def test_an_invalid_config_is_an_error(change, message):
    with pytest.raises(ValueError, match=f"MoEConfig: .*{message}"):
        dataclasses.replace(SMALL, **change)


def alpa_parameters(cfg):
    """Counts attention in each layer, one MLP of 8 * width in half of the layers, and one per expert in the others."""
    width, layers = cfg.gpt.width, cfg.gpt.layers
    return layers * (4 * width**2 + (1 + cfg.experts) * 16 * width**2 // 2) + (32_000 + 1024) * width


@pytest.mark.parametrize("name", ALPA_MOE)
def test_parameters_of_alpas_sizes(name):
    actual = count(model_factory(ALPA_MOE[name]))
    assert actual == pytest.approx(alpa_parameters(ALPA_MOE[name]), rel=2e-3)
    label = name.removeprefix("moe-")
    assert actual == pytest.approx(float(label[:-1]) * {"m": 1e6, "b": 1e9}[label[-1]], rel=0.04)


@pytest.mark.parametrize(("name", "published"), [("mixtral-8x7b", 46_702_792_704), ("mixtral-8x22b", 140_630_071_296)])
def test_parameters_of_mixtral(name, published):
    """Counted in the published checkpoints."""
    assert count(model_factory(MIXTRAL[name])) == published


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe-tiny", "mixtral-tiny"])
def test_it_learns(name):
    losses, *_ = trained(workload(name).with_(batch_size=8), 40)
    assert losses[0] == pytest.approx(np.log(128), abs=0.15)
    assert np.mean(losses[-5:]) < text_entropy() - 0.3
