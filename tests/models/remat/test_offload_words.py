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


@pytest.mark.parametrize(
    ("text", "layers", "remat"),
    [
        ("residual@:", 6, "host:residual"),
        ("residual@::2", 6, "host:residual,full"),
        ("qkv@1::2+residual", 4, "host:residual,host:residual+qkv"),
        ("decoder_layer_input@[:2]", 4, "host:residual,host:residual,full,full"),
        ("residual@:2+qkv@-1:", 3, "host:residual,host:residual,host:qkv"),
    ],
)
def test_slices_select_layers(text: str, layers: int, remat: str) -> None:
    assert offload_remat(text, layers) == remat
    assert GPTConfig(layers=layers, remat=remat, scan_layers=False).remat == remat


@pytest.mark.parametrize("text", ["residual@", "residual@2", "residual@a:b", "residual@::0", "residual@1:2:3:4"])
def test_other_slices_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="write a slice over the layers after the name, such as 'residual@::2'"):
        offload_remat(text, 8)


def test_slices_that_select_nothing_or_do_not_fit_a_scan_are_errors() -> None:
    with pytest.raises(ValueError, match="selects none of 8 layers"):
        offload_remat("residual@9:", 8)
    with pytest.raises(ValueError, match="the 8 layers are one scan.* set scan_layers=False to write them out"):
        offload_remat("residual@:3", 8, scan=True)
    assert offload_remat("residual@::2", 8, scan=True) == "host:residual,full"
