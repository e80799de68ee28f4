"""What the config of a Llama 4 says about its layers."""

import pytest

from autoshard.models.decoder.positions.temperature import Temperature
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.families.llama4 import LLAMA4 as FAMILY
from tests.models.pretrained.folders import LLAMA4


def read(**changes):
    return FAMILY.config(Config({**LLAMA4, **changes}, "config.json"))


def test_every_fourth_layer_sees_all_without_rotary_positions():
    cfg = read()
    *rotated, last = cfg.kinds
    assert all(kind.rotary.interleaved and kind.chunk == 6 and kind.unit_norm for kind in rotated)
    assert not any(kind.temperature for kind in rotated)
    assert (last.rotary, last.chunk, last.unit_norm) == (None, None, False)
    assert last.temperature == Temperature(scale=0.1, step=8192)
    assert [kind.experts for kind in cfg.kinds] == [False, True, False, True]


def test_experts_and_dense_layers_have_sizes_of_their_own():
    cfg = read()
    assert (cfg.ffn, cfg.experts.ffn, cfg.experts.shared_ffn) == (24, 32, 32)
    assert cfg.head_dim == 8
    assert FAMILY.config(Config({**LLAMA4, "head_dim": None}, "")).head_dim == 4  # the width over the heads
    assert FAMILY.config(Config({k: v for k, v in LLAMA4.items() if k != "head_dim"}, "")).head_dim == 128
    assert (cfg.experts.scoring, cfg.experts.gated_input, cfg.experts.renormalize) == ("sigmoid", True, False)


@pytest.mark.parametrize(
    "changes, field, expected",
    [
        ({"attn_temperature_tuning": False}, "temperature", [None] * 4),
        ({"attn_scale": 0.5, "floor_scale": 7}, "temperature", [None] * 3 + [Temperature(0.5, 7)]),
        ({"use_qk_norm": False}, "unit_norm", [False] * 4),
        ({"no_rope_layers": [0, 1, 1, 0]}, "chunk", [None, 6, 6, None]),
        ({"moe_layers": [0, 2]}, "experts", [True, False, True, False]),
        ({"layer_types": ["full_attention", *["chunked_attention"] * 3]}, "chunk", [None, 6, 6, 6]),
        ({"attention_chunk_size": None}, "chunk", [None] * 4),
    ],
    ids=str,
)
def test_fields_of_the_config(changes, field, expected):
    assert [getattr(kind, field) for kind in read(**changes).kinds] == expected
