"""Greedy generation with a cache against transformers: ragged prompts in one batch, and under plans."""

import numpy as np
import pytest

from autoshard.models.pretrained import load_pretrained
from autoshard.serve import Engine, Request
from tests.parity.pretrained.configs import CONFIGS, VOCAB
from tests.parity.pretrained.reference import make_reference

pytestmark = pytest.mark.parity

NEW = 64
LENGTHS = (5, 130, 33, 1, 77)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in LENGTHS]
PLANS = {
    "llama3": ("fsdp:8", "tp:2 fsdp:4", "cp:2 fsdp:4"), "mixtral": ("ep:4 fsdp:2",), "gpt-oss": ("fsdp:4 tp:2",),
    "deepseek-v3": ("ep:8", "tp:4 fsdp:2"),
}  # fmt: skip


def expected_of(reference):
    """Returns transformers' greedy tokens of each prompt."""
    import torch

    found = []
    for prompt in PROMPTS:
        ids = torch.asarray([prompt])
        out = reference.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


def tokens_of(engine):
    return [found.tokens for found in engine.run([Request(prompt, NEW) for prompt in PROMPTS])]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens(name, tmp_path):
    reference = make_reference(name, tmp_path / "model")
    model = load_pretrained(reference.folder, plan="dp:8", batch=(8, 64))
    assert tokens_of(Engine(model, rows=5, length=256)) == expected_of(reference)


@pytest.mark.parametrize("name", PLANS)
def test_greedy_tokens_under_plans(name, tmp_path):
    reference = make_reference(name, tmp_path / "model")
    expected = expected_of(reference)
    for words in PLANS[name]:
        model = load_pretrained(reference.folder, plan=words, batch=(8, 64))
        assert tokens_of(Engine(model, rows=8, length=256, plan=words)) == expected, words
