"""A tiny pretrained folder with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.pretrained.folders import LLAMA, make_folder

LETTERS = "abcdefghijklmnopqrstuvwx"
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == "system" %}{{ raise_exception("no system messages") }}{% endif %}
    {{- message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}a{% endif %}"""


def make_text_folder(folder: Path) -> Path:
    """Makes a folder whose tokens are letters; `x` ends a text."""
    make_folder(folder, {**LLAMA, "eos_token_id": 5})
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [23]}))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "e"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
