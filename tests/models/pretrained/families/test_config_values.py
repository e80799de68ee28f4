"""What the families read from a `config.json`: rotary positions in all their spellings, windows, and missing keys.

The defaults are those of the config classes in transformers 5.24.
"""

import math

import numpy as np
import pytest

from autoshard.errors import AutoshardError
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.families.constants import GEMMA3 as GEMMA3_DEFAULTS
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.load import Described
from tests.models.pretrained.folders import (
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    QWEN2_5_VL,
    VIT,
    make_folder,
    tensors_of,
    write_tensors,
)  # fmt: skip

MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 30, "use_sliding_window": True}
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 3, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def read(base, without=(), **changes):
    values = {key: value for key, value in {**base, **changes}.items() if key not in without}
    return family_of(values, "config.json").config(Config(values, "config.json"))


def rotary_of(base, without=(), **changes):
    return read(base, without, **changes).kinds[0].rotary


def windows_of(base, **changes):
    return [kind.window for kind in read(base, **changes).kinds]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_scales_by_the_ratio_of_two_magnitudes(key):
    rotary = rotary_of(LLAMA, **{key: {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}})
    assert rotary.magnitude == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize("given", [{"mscale": 1.0}, {"mscale_all_dim": 1.0}, {"mscale": 0.0, "mscale_all_dim": 1.0}])
def test_yarn_with_one_magnitude_scales_by_the_default(given):
    assert rotary_of(LLAMA, rope_scaling={**YARN, **given}).magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_the_factor_of_attention_takes_precedence_over_magnitudes():
    given = {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}
    assert rotary_of(LLAMA, rope_scaling={**YARN, **given}).magnitude == 1.5


def test_betas_of_zero_are_the_defaults():
    rotary = rotary_of(LLAMA, rope_scaling={**YARN, "beta_fast": 0, "beta_slow": 0})
    assert (rotary.beta_fast, rotary.beta_slow) == (32.0, 1.0)


def test_a_factor_of_null_is_the_ratio_of_the_contexts():
    assert rotary_of(LLAMA, rope_scaling={**YARN, "factor": None}).factor == 64 / 16


def test_the_original_context_beside_the_table_takes_precedence():
    assert rotary_of(LLAMA, rope_scaling=YARN, original_max_position_embeddings=32).original_context == 32


def test_two_tables_that_agree_are_one():
    rotary = rotary_of(LLAMA, rope_parameters={**YARN, "rope_theta": 5e3}, rope_scaling={"type": "yarn", "factor": 4.0})
    assert (rotary.base, rotary.original_context) == (5e3, 16)


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling differ in rope_type, factor, original_max_position_embeddings: keep one",
        ),
        (
            QWEN2_5_VL,
            {"rope_parameters": {"type": "default", "mrope_section": [2, 1, 1]}},
            "rope_parameters and rope_scaling differ in rope_type, mrope_section",
        ),
        (
            QWEN2_5_VL,
            {
                "vision_config": {
                    **QWEN2_5_VL["vision_config"],
                    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                }
            },
            "the type is 'linear'; scaled positions are not built for a vision tower",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rotary positions of type 'yarn' have no factor"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rotary positions of type 'linear' have no factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rotary positions of type 'llama3' have no factor"),
        (GEMMA3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has type, but no rope_type"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}, "rope_scaling": None},
            "rope_parameters of full_attention have truncate: false, which transformers ignores there",
        ),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None is built"),
        (DEEPSEEK_V3, {"norm_topk_prob": None}, "norm_topk_prob is None; it must be true or false"),
        (
            LLAMA,
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; it must be above 0",
        ),
        (GEMMA4, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None is built"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it is built for the rope_type"),
        (MIXTRAL, {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types differ from sliding_wind"),
        (
            QWEN3_MOE,
            {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "layer_types differ from sliding_window, which all layers have or none",
        ),
    ],
)
def test_values_that_are_refused(base, changes, message):
    with pytest.raises(AutoshardError, match=message):
        read(base, **changes)


@pytest.mark.parametrize(
    "base, expected", [(LLAMA, 1e4), (MIXTRAL, 1e6), (GPT_OSS, 150_000.0), (DEEPSEEK_V3, 1e4), (QWEN2_5_VL, 1e6)]
)
def test_base_of_rotary_positions_if_none_is_given(base, expected):
    cfg = read(base, without=["rope_theta"])
    assert getattr(cfg, "text", cfg).kinds[-1].rotary.base == expected


@pytest.mark.parametrize("changes", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}], ids=str)
def test_the_base_of_a_towers_rotary_positions(changes):
    assert read(QWEN2_5_VL).vision.base == 1e4
    assert read({**QWEN2_5_VL, "vision_config": {**QWEN2_5_VL["vision_config"], **changes}}).vision.base == 500.0


@pytest.mark.parametrize(
    "base, changes, expected",
    [
        (MISTRAL, {}, [4096] * 3),
        (MISTRAL, {"sliding_window": None}, [None] * 3),
        (MISTRAL, {"sliding_window": 8}, [8] * 3),
        (MIXTRAL, {}, [None] * 3),
        (QWEN3, {}, [None] * 28 + [4096] * 2),
        (QWEN3, {"max_window_layers": 29, "sliding_window": 8}, [None] * 29 + [8]),
        (QWEN3, {"sliding_window": None}, [None] * 30),
        (QWEN3_MOE, {"max_window_layers": 2, "sliding_window": 8}, [8] * 3),
        (QWEN3_MOE, {}, [4096] * 3),
        (QWEN3_MOE, {"use_sliding_window": False}, [None] * 3),
    ],
    ids=str,
)
def test_windows(base, changes, expected):
    assert windows_of(base, **changes) == expected


def test_gpt_oss_has_the_positions_of_the_release_by_default():
    rotary = rotary_of(GPT_OSS)
    assert (rotary.scaling, rotary.factor, rotary.original_context, rotary.truncate) == ("yarn", 32.0, 4096, False)
    assert rotary_of(GPT_OSS, rope_scaling={"rope_type": "default"}).scaling == "none"


def test_published_gemma_3_leaves_out_what_is_the_default():
    cfg = read(GEMMA3, without=["vocab_size"])
    assert (cfg.vocab, cfg.heads, cfg.kv_heads, cfg.context, cfg.norm_eps) == (262_208, 8, 4, 131_072, 1e-6)
    assert (cfg.activation, cfg.tie_head) == ("gelu_tanh", True)
    local, whole = cfg.kinds[0], cfg.kinds[5]
    assert (local.window, local.rotary.base, local.rotary.scaling) == (6, 1e4, "none")
    assert (whole.window, whole.rotary.base, whole.rotary.factor) == (None, 1e6, 8.0)


@pytest.mark.parametrize(
    "changes, expected",
    [({}, (50.0, 30.0)), ({"final_logit_softcapping": None}, (50.0, None))],
    ids=["left out", "null"],
)
def test_gemma_2_has_caps_unless_they_are_null(changes, expected):
    cfg = read({**GEMMA3, **GEMMA3_DEFAULTS, "architectures": ["Gemma2ForCausalLM"]}, **changes)
    assert (cfg.score_cap, cfg.logit_cap) == expected


def test_deepseek_v3_scales_the_choices_of_experts_by_default():
    cfg = read({**DEEPSEEK_V3, "num_hidden_layers": 4}, without=["first_k_dense_replace"])
    assert (cfg.experts.scale, [kind.experts for kind in cfg.kinds]) == (2.5, [False] * 3 + [True])


def test_a_pooler_that_classification_does_not_use_is_not_read(tmp_path):
    folder = make_folder(tmp_path, VIT)
    write_tensors(folder, tensors_of(folder, "float32") | {"vit.pooler.dense.weight": np.zeros((16, 16), "float32")})
    opened = Folder.open(folder)
    sources = Described.of(opened, None, {}).fitted(opened, opened.tensors()).sources
    assert not any("pooler" in name for source in sources.values() for name in source.names.values())
