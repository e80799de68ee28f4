"""Measure the bytes of state on each device: under fsdp, and under a memory limit that forces sharding.

python benchmarks/state_memory.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from common import Row, report
from small_gpt import GPTConfig, gpt_step

from autoshard import auto_shard

CONFIG = GPTConfig(layers=4, heads=8, width=256, vocab=512, context=16)
BATCH = 8


def bytes_per_device(state: Any) -> Counter[Any]:
    """Return the bytes of a state on each device."""
    sizes: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return sizes


def row_of(name: str, **options: Any) -> Row:
    """Return the largest share of one device under a plan, times the number of devices."""
    train_step, create, state_shapes, token_shape = gpt_step(CONFIG, BATCH)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state_shapes))
    step = auto_shard(train_step, donate_argnums=0, **options)
    step.plan(state_shapes, token_shape)
    state = step.init(create, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), token_shape.shape, 0, CONFIG.vocab)
    initial = bytes_per_device(state)
    state, _ = step(state, tokens)
    largest = max(max(initial.values()), max(bytes_per_device(state).values()))
    share = len(initial) * largest / whole
    return Row(f"{name}: largest share x 8", share, "", 1.02, note=f"{largest:,} of {whole:,} bytes")


def main() -> None:
    """Measure and report."""
    train_step, _, state_shapes, token_shape = gpt_step(CONFIG, BATCH)
    needed = auto_shard(train_step, donate_argnums=0, plan="fsdp:8").plan(state_shapes, token_shape).estimate
    limit = round(needed.peak_memory_bytes * 1.02)  # plans that keep more of the state on each device do not fit
    rows = [row_of("fsdp:8", plan="fsdp:8"), row_of("chosen for what fsdp:8 needs", memory_limit_bytes=limit)]
    report("state_memory", rows, batch=BATCH, model=vars(CONFIG))


if __name__ == "__main__":
    main()
