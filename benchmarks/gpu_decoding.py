"""Greedy text of a random Llama in bfloat16 on an attached GPU: `autoshard.serve` and transformers, in one process."""

from __future__ import annotations

from collections.abc import Iterator

from decoding import Case, Pair, times
from gpu_timing import Figure

from autoshard.sharding.machines.targets import Target

ROWS, PROMPT, NEW, REPEATS = 8, 128, 128, 3
SIZES = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL = {**SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def figures(target: Target, *, small: bool = False) -> Iterator[Figure]:
    """Time both. The share of equal tokens is noted: texts part where two logits are about equal in bfloat16."""
    import torch  # pyright: ignore[reportMissingImports]  only this section needs it

    case = Case("LlamaConfig", SMALL if small else SIZES, "bfloat16", (PROMPT,) * ROWS, 8 if small else NEW)
    found = times(Pair(case, "cuda" if torch.cuda.is_available() else "cpu"), REPEATS)
    note = f"{100 * found.equal:.0f} % of the tokens are those of transformers"
    yield Figure("decoding", f"{case.name}: autoshard", "tokens", "1/s", case.tokens / min(found.mine), note=note)
    yield Figure("decoding", f"{case.name}: transformers", "tokens", "1/s", case.tokens / min(found.theirs))
