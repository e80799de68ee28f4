"""The words of `offload`: names of this package, names of MaxText, and wrong words."""

import re

import pytest

from autoshard.models import GPTConfig
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.offload_words import (
    globbed_names,
    moves_optimizer,
    names_values,
    offload_remat,
    offloaded_names,
)
from autoshard.models.remat.policies import host_names, kept_on_device


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
        ("optimizer", ()),
        ("optimizer, residual", ("residual",)),
        ("mlp_*", ("mlp_in", "mlp_out")),
        ("mlpwi*", ("mlp_in",)),
        ("*_proj", ("out_proj",)),  # a name of ours comes first
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
        ("mlp_*@4:+optimizer", 6, "full,full,full,full,host:mlp_in+mlp_out,host:mlp_in+mlp_out"),
    ],
)
def test_slices_select_layers(text: str, layers: int, remat: str) -> None:
    assert offload_remat(text, layers) == remat
    assert GPTConfig(layers=layers, remat=remat, scan_layers=False).remat == remat


@pytest.mark.parametrize("text", ["residual@", "residual@2", "residual@a:b", "residual@::0", "residual@1:2:3:4"])
def test_other_slices_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="write a name and a slice over layers, such as 'residual@::2'"):
        offload_remat(text, 8)


def test_slices_that_select_nothing_or_do_not_fit_a_scan_are_errors() -> None:
    with pytest.raises(ValueError, match="selects none of 8 layers, numbered from 0; 'residual@:8' selects all"):
        offload_remat("residual@9:", 8)
    with pytest.raises(ValueError, match="the 8 layers are one scan.* write the layers out with scan_layers=False"):
        offload_remat("residual@:3", 8, scan=True)
    assert offload_remat("residual@::2", 8, scan=True) == "host:residual,full"


@pytest.mark.parametrize(("text", "moves", "names"), [("optimizer", True, False), ("residual, optimizer", True, True),
                                                      ("auto", False, True), ("none", False, False)])  # fmt: skip
def test_the_state_of_the_optimizer_is_a_word_of_its_own(text: str, moves: bool, names: bool) -> None:
    assert (moves_optimizer(text), names_values(text)) == (moves, names)


@pytest.mark.parametrize("text", ["residual+none", "auto,residual", "auto, optimizer"])
def test_none_and_auto_stand_alone(text: str) -> None:
    with pytest.raises(ValueError, match="must stand alone"):
        offloaded_names(text)


def test_the_state_of_the_optimizer_has_no_slices() -> None:
    with pytest.raises(ValueError, match="it moves as a whole. Write 'optimizer'"):
        offload_remat("residual+optimizer@::2", 8)


def test_globs_may_select_values_that_stay() -> None:
    assert globbed_names("mlp_*+mlp_in") == ("mlp_out",) and globbed_names("mlp_in+mlpwo") == ()


@pytest.mark.parametrize(
    ("remat", "names", "kept"),
    [
        ("none", (), "none"),
        ("full,dots", (), "full,dots"),
        ("host:residual", ("residual",), "keep:residual"),
        ("keep:mlp_in host:qkv+residual,full", ("residual", "qkv"), "keep:qkv+residual+mlp_in,full"),
    ],
)
def test_policies_whose_values_stay_on_the_device(remat: str, names: tuple[str, ...], kept: str) -> None:
    assert host_names(remat) == names and kept_on_device(remat) == kept
    assert GPTConfig(layers=2, remat=kept).remat == kept
