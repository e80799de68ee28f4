"""What the config of a Gemma 4 says about its layers."""

import pytest

from autoshard.models.decoder import Rotary
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.families.gemma4 import GEMMA4 as FAMILY
from tests.models.pretrained.folders import GEMMA4


def read(**changes):
    return FAMILY.config(Config({**GEMMA4, **changes}, "config.json"))


def test_layers_that_see_all_have_other_heads_of_which_a_quarter_turns():
    local, whole, *_ = read().kinds
    assert (local.window, local.head_dim, local.rotary) == (6, None, Rotary(10_000.0))
    assert (whole.window, whole.head_dim, whole.rotary) == (None, 12, Rotary(1_000_000.0, fraction=0.25))


def test_the_last_layers_borrow_from_the_last_one_of_their_type():
    kinds = read().kinds
    assert [kind.lends for kind in kinds] == ["", "", "sliding_attention", "full_attention", "", ""]
    assert [kind.borrows for kind in kinds] == [""] * 4 + ["sliding_attention", "full_attention"]
    assert [kind.ffn for kind in kinds] == [None] * 4 + [64, 64]


def test_switches_of_the_whole_model():
    cfg = read(final_logit_softcapping=30.0)
    assert (cfg.norm_offset, cfg.score_scale, cfg.logit_cap) == (0.0, 1.0, 30.0)
    assert cfg.query_norm and cfg.value_norm and cfg.layer_scale
    assert (cfg.layer_inputs.vocab, cfg.layer_inputs.width) == (24, 4)
    assert read(hidden_size_per_layer_input=0).layer_inputs is None


@pytest.mark.parametrize(
    "changes, field, expected",
    [
        ({"use_double_wide_mlp": False}, "ffn", [None] * 6),
        ({"num_kv_shared_layers": 0, "attention_k_eq_v": True}, "keys_as_values", [False, True] * 3),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 2}, "kv_heads", [None, 2] * 3),
        ({"num_global_key_value_heads": 2}, "kv_heads", [None] * 6),
        (
            {"num_kv_shared_layers": 0, "per_layer_config": {"01": {"head_dim": 20}}},
            "head_dim",
            [None, 20] + [None] * 4,
        ),
    ],
    ids=str,
)
def test_fields_of_the_config(changes, field, expected):
    assert [getattr(kind, field) for kind in read(**changes).kinds] == expected
