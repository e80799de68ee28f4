"""Policies of named values: what their text means, and what is wrong with a text."""

import re

import pytest

from autoshard.models import GPTConfig, MoEConfig, ViTConfig, WideResNetConfig
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.policies import checkpoint_policy, named_groups, remat_policies, remat_problems

VALID = [
    "host:residual",
    "keep:qkv",
    "host:residual+qkv keep:out_proj",
    "keep:out_proj host:residual",
    "host:residual host:qkv",
    "host:residual, full",
    "host:residual+qkv keep:context,host:residual",
]
NAMES = ", ".join(NAMED_VALUES)


@pytest.mark.parametrize("text", VALID)
def test_valid_texts(text):
    assert remat_problems(text, 4, scan=True) == []
    for policy in remat_policies(text):
        assert checkpoint_policy(policy) is not None
    assert GPTConfig(layers=4, remat=text).remat == text


def test_groups_of_names():
    assert named_groups("host:residual host:qkv keep:out_proj") == {"host": ("residual", "qkv"), "keep": ("out_proj",)}
    assert named_groups("full") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("host:residul", f"'residul' is not a named value; the named values of a layer are {NAMES}"),
        ("host:", f"'' is not a named value; the named values of a layer are {NAMES}"),
        ("host:residual+", f"'' is not a named value; the named values of a layer are {NAMES}"),
        ("full,keep:mlp", f"'mlp' is not a named value; the named values of a layer are {NAMES}"),
        ("device:qkv", "'device:qkv' is not host:NAME+NAME or keep:NAME+NAME; separate names with '+', and the two"),
        ("host:qkv out_proj", "'out_proj' is not host:NAME+NAME or keep:NAME+NAME"),
        ("host:qkv full", "'full' is not host:NAME+NAME or keep:NAME+NAME"),
        ("host:qkv keep:qkv", "'qkv' occurs twice; name it once, after host: or after keep:"),
        ("residual", "choose one of none, full, dots, .*, named values such as host:residual"),
        ("host:residual,none,full", "4 scanned layers do not divide into groups of 3"),
    ],
)
def test_what_is_wrong_with_a_text(text, problem):
    pattern = re.escape(f"remat is {text!r}; ") + (problem if ".*" in problem else re.escape(problem))
    (found,) = remat_problems(text, 4, scan=True)
    assert re.match(pattern, found), found
    with pytest.raises(ValueError, match=pattern):
        GPTConfig(layers=4, remat=text)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda remat: MoEConfig(GPTConfig(remat=remat)), "GPTConfig"),
        (lambda remat: ViTConfig(remat=remat), "ViTConfig"),
    ],
)
def test_every_model_checks_the_names(make, name):
    with pytest.raises(ValueError, match=f"{name}: remat is 'host:x'; 'x' is not a named value"):
        make("host:x")


def test_a_model_without_named_values():
    with pytest.raises(ValueError, match="WideResNetConfig: remat is 'host:residual'; this model's layers have no"):
        WideResNetConfig(remat="host:residual")
