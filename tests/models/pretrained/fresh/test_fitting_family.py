"""A `config.json` for decoders that were made here: what a family writes, it reads again."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from autoshard.errors import AutoshardError
from autoshard.models import load_pretrained, save_pretrained
from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.kinds import ExpertsConfig, LatentConfig
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.published import DECODERS
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.fresh import fresh_origin
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.models.vit import ViTConfig
from tests.models.pretrained.folders import GEMMA4, LLAMA4

SIZES: dict[str, Any] = {"vocab": 24, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 32, "context": 1040}
PLAIN = DecoderConfig(kinds=(LayerKind(),) * 3, **SIZES)
YARN = Rotary(1e4, "yarn", 4.0, 260)
WINDOWS = (LayerKind(8), LayerKind(8), LayerKind())
EXPERTS = ExpertsConfig(4, 2, 12)
GPT2 = dataclasses.replace(
    PLAIN, kinds=(LayerKind(rotary=None),) * 2, head_dim=4, kv_heads=4, learned_positions=True, gated=False,
    norm="layer", qkv_bias=True, output_bias=True, mlp_bias=True, activation="gelu_tanh", tie_head=True,
)  # fmt: skip
GEMMA2 = dataclasses.replace(
    PLAIN, kinds=WINDOWS, norm_offset=1.0, post_norms=True, embed_scale=4.0, tie_head=True, score_scale=144**-0.5,
    score_cap=5.0, logit_cap=3.0, activation="gelu_tanh",
)  # fmt: skip
LOCAL, WHOLE = LayerKind(8), LayerKind(rotary=Rotary(1e6, "linear", 8.0))
LATENT = dataclasses.replace(
    PLAIN, kv_heads=4, head_dim=8, experts=EXPERTS, latent=LatentConfig(8, 4, 4, 6, 8),
    kinds=(LayerKind(rotary=Rotary(interleaved=True)), LayerKind(rotary=Rotary(interleaved=True), experts=True)),
)  # fmt: skip
LONG = tuple(LayerKind(rotary=dataclasses.replace(YARN, interleaved=True), experts=bool(n)) for n in range(2))
V3 = dataclasses.replace(
    LATENT, kinds=LONG, score_scale=8**-0.5 * 1.3,
    experts=dataclasses.replace(
        EXPERTS, scoring="sigmoid", groups=2, top_groups=1, group_best=2, choice_bias=True, scale=2.5, shared_ffn=24,
    ),
)  # fmt: skip


def read(values):
    """Returns the config of a `config.json`, for longer rows."""
    cfg = known_families()[values["architectures"][0]].config(Config(values, "config.json"))
    return dataclasses.replace(cfg, context=1040)


CONFIGS = {
    "llama": PLAIN,
    "llama-biased": dataclasses.replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, norm_eps=1e-5),
    "llama-3.1": dataclasses.replace(PLAIN, kinds=(LayerKind(rotary=Rotary(5e5, "llama3", 8.0, 16)),) * 2),
    "llama-yarn": dataclasses.replace(PLAIN, kinds=(LayerKind(rotary=YARN),) * 2),
    "mistral": dataclasses.replace(PLAIN, kinds=(LayerKind(8),) * 2),
    "qwen2": dataclasses.replace(PLAIN, kinds=(LayerKind(), LayerKind(8)), qkv_bias=True),
    "qwen3": dataclasses.replace(PLAIN, query_norm=True, init_std=0.1),
    "gemma2": GEMMA2,
    "gemma3": dataclasses.replace(
        GEMMA2, query_norm=True, score_cap=None, logit_cap=None, kinds=(LOCAL, LOCAL, WHOLE)
    ),
    "mixtral": dataclasses.replace(PLAIN, kinds=(LayerKind(experts=True),) * 2, experts=EXPERTS, router_loss=0.01),
    "qwen3_moe": dataclasses.replace(
        PLAIN, kinds=(LayerKind(), LayerKind(experts=True)), experts=EXPERTS, query_norm=True
    ),
    "gpt_oss": dataclasses.replace(
        PLAIN, kinds=(LayerKind(8, YARN, experts=True), LayerKind(None, YARN, experts=True)), sinks=True,
        experts=dataclasses.replace(EXPERTS, bias=True, limit=7.0), qkv_bias=True, output_bias=True,
    ),
    "deepseek_v2": dataclasses.replace(
        LATENT, experts=dataclasses.replace(EXPERTS, renormalize=False, shared_ffn=12)
    ),
    "deepseek_v3": V3,
    "gpt2": GPT2,
    "llama4": read(LLAMA4),
    "gemma4": read(GEMMA4),
}  # fmt: skip
CHANGED = {
    "a norm": ({"post_norms": True}, "post_norms is False, here True"),
    "rotary positions": ({"kinds": (LayerKind(), LayerKind(rotary=Rotary(5.0)))}, "kinds[1].rotary.base"),
    "sinks": ({"sinks": True}, "sinks is False, here True"),
    "a scale": ({"score_scale": 0.5}, "score_scale is"),
    "an encoder": ({"causal": False}, "causal is True, here False"),
}


def family_named(name):
    return next(family for family in known_families().values() if family.name == name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_reads_what_it_writes(name):
    expected, _, _ = name.partition("-")
    origin = fresh_origin(SimpleNamespace(cfg=CONFIGS[name]))
    assert known_families()[origin.family].name == expected


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2"])
def test_a_saved_decoder_is_loaded_again(name, tmp_path):
    model = Decoder(dataclasses.replace(CONFIGS[name], param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_pretrained(tmp_path / "model", plan="dp:8")
    assert loaded.origin.family in family_named(name).architectures
    jax.tree.map(np.testing.assert_array_equal, parameters_of(loaded), parameters_of(model))
    with pytest.raises(AutoshardError, match="leave family out"):
        save_pretrained(loaded, tmp_path / "other", family=name)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3-12b", "gemma4-2b", "gemma4-31b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3",
        "llama4-maverick-17b-128e",
    ],
)  # fmt: skip
def test_published_sizes_belong_to_a_family(name):
    assert fresh_origin(SimpleNamespace(cfg=DECODERS[name]))


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_that_no_family_has_is_refused(name):
    changes, expected = CHANGED[name]
    with pytest.raises(AutoshardError) as caught:
        fresh_origin(SimpleNamespace(cfg=dataclasses.replace(PLAIN, **changes)))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_family_can_be_chosen(tmp_path):
    model = Decoder(PLAIN, rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path / "model", family="mistral")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["architectures"] == ["MistralForCausalLM"] and values["sliding_window"] is None
    with pytest.raises(AutoshardError, match="'gpt2' does not have a model with this config"):
        save_pretrained(model, tmp_path / "other", family="gpt2")
    with pytest.raises(AutoshardError, match="family is 'lama'; choose one of llama, "):
        save_pretrained(model, tmp_path / "other", family="lama")


def test_other_models_are_refused():
    with pytest.raises(AutoshardError, match="this SimpleNamespace was not loaded"):
        fresh_origin(SimpleNamespace(cfg=ViTConfig()))


def test_decoders_of_all_families_can_be_written():
    assert not [f.name for f in known_families().values() if f.model is Decoder and f.values is None]
