"""A train step with shardings by hand, up to its first step; `first_step.py` runs it in a process of its own.

    python benchmarks/first_step_by_hand.py TEXT

It does what people write without a planner: it reads bytes, shards every parameter over eight devices along its largest
dimension, creates the state sharded, and runs a step under `jax.jit`. It prints the loss of the first step.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from small_gpt import GPTConfig, gpt_step

BATCH = 64
CONFIG = GPTConfig(layers=4, heads=4, width=128, context=128)  # the preset `quick`


def main(text: Path) -> None:
    """Train one step."""
    data = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(data) - CONFIG.context - 1, BATCH)
    batch = np.stack([data[start : start + CONFIG.context + 1] for start in starts])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    step, create, shapes, _ = gpt_step(CONFIG, BATCH)

    def sharding(leaf: Any) -> NamedSharding:
        sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
        spec = [None] * leaf.ndim
        if any(sizes):
            spec[sizes.index(max(sizes))] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    state_shardings = jax.tree.map(sharding, shapes)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.jit(create, out_shardings=state_shardings)(jax.random.key(0))
    run = jax.jit(step, in_shardings=(state_shardings, rows), out_shardings=(state_shardings, None), donate_argnums=0)
    _, loss = run(state, jax.device_put(batch, rows))
    print(f"loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
