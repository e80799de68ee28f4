"""Transformers of Penzai: named arrays, and parameters that are bound in the loss."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from tests.foreign.one_step import Program, integers


def _language_model(model):
    model, params = pz.unbind_params(model, freeze=True)

    def loss(params, tokens):
        bound = pz.bind_variables(model, [p.unfreeze_as_copy() for p in params])
        logits = bound(pz.nx.wrap(tokens[:, :-1]).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        scores = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    return Program(loss, params, (integers(64, 16, 9),))


def _llama_like(**options):
    config = llamalike_common.LlamalikeTransformerConfig(
        **{"num_kv_heads": 4, "query_head_multiplier": 2, "embedding_dim": 32, "projection_dim": 8}, mlp_hidden_dim=64,
        num_decoder_blocks=2, vocab_size=64, **options,
    )  # fmt: skip
    return _language_model(llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0)))


def llama():
    return _llama_like(mlp_variant="swiglu", tie_embedder_and_logits=False)


def gemma():
    window = llamalike_common.AttentionTypeSlidingWindowCausal(4), llamalike_common.AttentionTypeGlobalCausal()
    return _llama_like(
        mlp_variant="geglu_approx", tie_embedder_and_logits=True, attention_type=window, use_post_attn_norm=True,
        use_post_ffw_norm=True, final_logit_softcap=30.0, attn_logits_soft_cap=50.0,
    )  # fmt: skip


def stacked_llama():
    return _llama_like(mlp_variant="swiglu", tie_embedder_and_logits=False, use_layer_stack=True)


def neox():
    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=8, embedding_dim=64, projection_dim=8, mlp_hidden_dim=128, num_decoder_blocks=2,
        vocab_size=64, activation_fn="gelu_exact", rope_subset_size=4, rope_wavelength=1e4, layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
    )  # fmt: skip
    return _language_model(gpt_neox.build_gpt_neox_transformer(config, init_base_rng=jax.random.key(0)))


PROGRAMS = (llama, gemma, stacked_llama, neox)
