"""The words of `offload`: our names, MaxText's, and what is wrong with a text."""

import re

import pytest

from autoshard.models import GPTConfig
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.offload_words import offload_remat, offloaded_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("none", ()),
        ("residual", ("residual",)),
        ("qkv+residual", ("residual", "qkv")),
        ("residual, out_proj", ("residual", "out_proj")),
        ("decoder_layer_input+query_proj+key_proj+value_proj", ("residual", "qkv")),
        ("mlpwi_0,mlpwi_1,mlpwo", ("mlp_in", "mlp_out")),
        ("qkv+qkv_proj", ("qkv",)),
    ],
)
def test_names(text, names):
    assert offloaded_names(text) == names


def test_every_name_and_synonym_gives_a_policy():
    for name, value in NAMED_VALUES.items():
        for text in (name, *value.maxtext):
            assert GPTConfig(remat=offload_remat(text)).remat == f"host:{name}"


@pytest.mark.parametrize("text", ["residul", "residual+", "", "residual+nothing", "auto", "host:residual"])
def test_an_unknown_name_lists_the_known_ones(text):
    with pytest.raises(ValueError, match="is not a named value") as caught:
        offloaded_names(text)
    assert all(re.search(rf"\b{known}\b", str(caught.value)) for known in (*NAMED_VALUES, "decoder_layer_input"))
