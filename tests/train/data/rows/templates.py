"""Chat templates in the styles that models have, and a tokenizer of words and special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.models.pretrained.folders import LLAMA, make_folder

CHATML = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
HEADERS = """{{ bos_token }}{% for m in messages %}<|start|> {{ m.role }} <|end|>

{{ m.content | trim }} <|eot|>{% endfor %}{% if add_generation_prompt %}<|start|> assistant <|end|>

{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}{% if m.role == "user" %}[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"""
MODEL = """{% for m in messages %}{% set role = "model" if m.role == "assistant" else m.role %}
<|im_start|> {{ role }}
{{ m.content }} <|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|> model
{% endif %}"""
# The statement marks what the model writes.
MARKED = """{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == "assistant" %}
{% generation %}{{ m.content }} <|im_end|>{% endgeneration %}{% else %}{{ m.content }} <|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
# The text ends differently from how its parts end.
CLOSED = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% else %}{{ eos_token }}{% endif %}"""
# Reasoning of earlier answers is removed.
REASONING = """{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == "assistant" and not loop.last %}
{{ m.content.split("</think>")[-1] }}{% else %}{{ m.content }}{% endif %} <|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
# The prompt starts the reasoning itself.
OPENED = CHATML.replace("assistant {% endif %}", "assistant <think> {% endif %}")
# The reasoning of an answer is a field of its own.
THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think> {{ m.reasoning_content }} </think> {% endif %}{{ m.content }}",
).replace("assistant {% endif %}", "assistant <think> {% endif %}")
# No special token ends an answer.
PLAIN = """{% for m in messages %}{{ m.role }} : {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<s>", "</s>")
WORDS = ("user assistant model system hi why because so bye then [INST] [/INST] : <think> </think> hm oh").split()


def tokenizer() -> Tokenizer:
    """Makes a tokenizer of words."""
    vocab = {word: n for n, word in enumerate(["?", *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    return made


def make_chat_folder(folder: Path, template: str = CHATML) -> Path:
    """Makes a pretrained folder of a tiny model with this tokenizer and a chat template."""
    make_folder(folder, {**LLAMA, "vocab_size": 32, "num_hidden_layers": 2})
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
