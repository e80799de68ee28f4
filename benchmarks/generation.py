"""Greedy generation of small random models on one CPU device in float32: `autoshard.serve` beside transformers.

    python benchmarks/generation.py [REPEATS]

It needs PyTorch and transformers (the extra `parity`). Both continue the same ragged prompts, in turns. The ratio is
the CPU time of `autoshard.serve` over that of transformers, pair by pair. Both run on one core: on several, PyTorch's
threads wait busily for each other wherever something else runs. The target is a ratio of at most 1: at least as many
tokens a second.
"""

from __future__ import annotations

import os
import sys
import time

if hasattr(os, "sched_setaffinity"):  # Linux
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1".strip()

from common import Row, report, summary  # noqa: E402  after the number of cores and devices is set
from decoding import Case, Pair, times  # noqa: E402  the same

LENGTHS, NEW, REPEATS = (120, 17, 64, 33), 32, 5  # chosen: ragged prompts, and about a second for one run
SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
CASES = (
    Case("LlamaConfig", SIZES, "float32", LENGTHS, NEW),
    Case("Qwen3Config", {**SIZES, "head_dim": 64}, "float32", LENGTHS, NEW),
)


def rows_of(case: Case, repeats: int) -> list[Row]:
    """Measure one case."""
    found = times(Pair(case, "cpu"), repeats, time.process_time)
    note = f"{100 * found.equal:.0f} % of the tokens are those of transformers"
    ratio, low, high = summary([mine / other for mine, other in zip(found.mine, found.theirs, strict=True)])
    return [
        Row(f"{case.name}: autoshard", case.tokens / summary(found.mine)[0], "tokens/s", note=note),
        Row(f"{case.name}: transformers", case.tokens / summary(found.theirs)[0], "tokens/s"),
        Row(f"{case.name}: time / that of transformers", ratio, "x", 1.0, low, high),
    ]


def main() -> None:
    """Measure and report."""
    repeats = int(sys.argv[1]) if sys.argv[1:] else REPEATS
    rows = [row for case in CASES for row in rows_of(case, repeats)]
    report("generation", rows, sizes=SIZES, prompts=LENGTHS, new=NEW, repeats=repeats)


if __name__ == "__main__":
    main()
