"""Greedy text of a random Llama in bfloat16 on an attached GPU: `autoshard.serve` and transformers, in one process.

Both continue the same prompts by the same number of tokens, all rows at a time. transformers runs as `generate` does by
default: eager PyTorch with scaled-dot-product attention and a growing cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_timing import Figure

from autoshard.models.pretrained.load import load_pretrained
from autoshard.serve.engine import Engine, Request
from autoshard.sharding.machines.targets import Target

ROWS, PROMPT, NEW = 8, 128, 128
SIZES = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL = {**SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def figures(target: Target, *, small: bool = False) -> Iterator[Figure]:
    """Time both. The share of equal tokens is noted: texts part where two logits are about equal in bfloat16."""
    import torch  # pyright: ignore[reportMissingImports]  only this section needs it
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]  the same

    sizes = SMALL if small else SIZES
    new = 8 if small else NEW
    prompts = np.random.default_rng(0).integers(3, sizes["vocab_size"], (ROWS, PROMPT))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        theirs: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model: Any = load_pretrained(Path(folder), dtype="bfloat16")
    engine = Engine(model, rows=ROWS, length=PROMPT + new)
    requests = [Request(tuple(map(int, prompt)), new) for prompt in prompts]
    rows = torch.as_tensor(prompts, device=device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def by_transformers() -> np.ndarray:
        with torch.no_grad():
            return theirs.generate(rows, attention_mask=torch.ones_like(rows), **options)[:, PROMPT:].cpu().numpy()

    mine, my_s = _best(lambda: np.asarray([found.tokens for found in engine.run(requests)]))
    other, other_s = _best(by_transformers)
    note = f"{100 * (mine == other).mean():.0f} % of the tokens are those of transformers"
    case = f"Llama of {sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, {ROWS} rows"
    yield Figure("decoding", f"{case}: autoshard", "tokens", "1/s", ROWS * new / my_s, note=note)
    yield Figure("decoding", f"{case}: transformers", "tokens", "1/s", ROWS * new / other_s)


def _best(run: Callable[[], np.ndarray], times: int = 3) -> tuple[np.ndarray, float]:
    """Run once untimed, then some times; return the result and the fewest seconds."""
    result, seconds = run(), []
    for _ in range(times):
        begin = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - begin)
    return result, min(seconds)
