"""The words of `offload=`."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.sharding.offload.words import read_words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, ()),
        ("none", ()),
        ("auto", ("auto",)),
        ("residual", ("residual",)),
        ("residual+optimizer", ("residual", "optimizer")),
        ("residual, qkv,residual", ("residual", "qkv")),
        (["a+b", "optimizer"], ("a+b", "optimizer")),  # in a list, a name may contain a separator
        ((), ()),
    ],
)
def test_words_are_read(given: Any, words: tuple[str, ...]) -> None:
    assert read_words(given) == words


@pytest.mark.parametrize("given", [5, True, "", "a++b", ["a", 1], {"a": 1}, b"residual"])
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="offload is .*; it must be 'none', 'auto', or words"):
        read_words(given)


@pytest.mark.parametrize("word", ["none", "auto"])
def test_none_and_auto_stand_alone(word: str) -> None:
    with pytest.raises(PlanError, match=f"'{word}' must stand alone"):
        read_words(f"{word}+residual")
