"""A tokenizer encodes whole texts, and a damaged file is named."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from autoshard.errors import ConfigError
from autoshard.models.pretrained.tokenizer_file import open_tokenizer


def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    stored = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    stored.enable_truncation(1)
    stored.enable_padding(length=9)
    stored.save(str(file := tmp_path / "tokenizer.json"))
    opened = open_tokenizer(file)
    assert opened.truncation is None and opened.padding is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer: "):
        open_tokenizer(file)
