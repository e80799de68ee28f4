"""Tiny pretrained folders with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.pretrained.folders import LLAMA, QWEN2_5_VL, make_folder, tensors_of, write_tensors

LETTERS = "abcdefghijklmnopqrstuvwx"
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == "system" %}{{ raise_exception("no system messages") }}{% endif %}
    {{- message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}a{% endif %}"""


def make_text_folder(folder: Path) -> Path:
    """Makes a folder whose tokens are letters; `x` ends a text."""
    make_folder(folder, {**LLAMA, "eos_token_id": 5})
    save_letters(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [23]}))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "e"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_letters(folder: Path) -> None:
    """Saves a tokenizer whose tokens are letters."""
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


IMAGE_TEMPLATE = """{%- for message in messages %}{% if message.content is string %}{{ message.content }}{% else -%}
{% for part in message.content %}{% if part.type == "image" %}u{% else %}{{ part.text }}{% endif %}{% endfor -%}
{% endif %}
{%- endfor %}{% if add_generation_prompt %}a{% endif %}"""


def make_image_folder(folder: Path) -> Path:
    """Makes a folder of a model that reads images, with three images. The letter `u` stands for an image."""
    from PIL import Image

    make_folder(folder, {**QWEN2_5_VL, "max_position_embeddings": 256})
    # With larger weights, the tokens depend on the images.
    write_tensors(folder, {name: 5 * values for name, values in tensors_of(folder, "float32").items()})
    save_letters(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": IMAGE_TEMPLATE}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 256, "max_pixels": 4096,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    rng = np.random.default_rng(0)
    for name, size in {"one": (16, 24), "two": (33, 20), "three": (60, 60)}.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder
