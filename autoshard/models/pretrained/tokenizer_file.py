"""Opens the tokenizer of a pretrained folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from autoshard.errors import ConfigError


def open_tokenizer(file: Path) -> Tokenizer:
    """Open a `tokenizer.json`. It encodes whole texts: nothing is cut or padded.

    Raises:
        ConfigError: the file is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain `Exception` from its Rust code
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
