"""The train step of the preset `quick` with shardings by hand. `first_step.py` runs it in a new process.

    python benchmarks/first_step_by_hand.py TEXT

The model, the optimizer and the step are the trainer's, with its metrics and its check for a loss that is not finite.
The rest is what people write without a planner. It reads bytes, and shards every parameter over eight devices along its
largest dimension. It creates the state sharded, gathers the parameters for the forward pass, and runs a step under
`jax.jit`. Then it prints the loss.

Without the gathers, XLA shards the activations along the width of the model, and the first step takes three times as
long to run.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.models import GPT, GPTConfig
from autoshard.train.step.guard import GuardConfig
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from autoshard.train.step.train_state import Program, make_program
from autoshard.train.step.train_step import Loss, TrainStep, loss_and_weight, make_train_step

# The settings of the preset; a test compares the steps.
BATCH, STEPS, GUARD = 64, 1000, GuardConfig()
CONFIG = GPTConfig(layers=4, heads=4, width=128, context=128)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=25, beta2=0.99)


def program_and_step(loss_of: Loss = loss_and_weight) -> tuple[Program, TrainStep]:
    """Make the model with its optimizer, and the train step."""
    program = make_program(lambda rngs: GPT(CONFIG, rngs=rngs), make_optimizer(OPTIMIZER, STEPS), guard=GUARD)
    return program, make_train_step(program, learning_rate_schedule(OPTIMIZER, STEPS), loss_of=loss_of)


def main(text: Path) -> None:
    """Train one step."""
    data = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(data) - CONFIG.context - 1, BATCH)
    rows = np.stack([data[start : start + CONFIG.context + 1] for start in starts])
    batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "mask": np.ones((BATCH, CONFIG.context), np.float32)}
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def with_gathered_parameters(model: Any, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        whole = NamedSharding(mesh, PartitionSpec())
        nnx.update(model, jax.lax.with_sharding_constraint(nnx.state(model, nnx.Param), whole))
        return loss_and_weight(model, batch, key)

    program, step = program_and_step(with_gathered_parameters)

    def sharding(leaf: Any) -> NamedSharding:
        sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
        spec = [None] * leaf.ndim
        if any(sizes):
            spec[sizes.index(max(sizes))] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    of_state = jax.tree.map(sharding, program.abstract_state())
    of_batch = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.jit(program.create_state, out_shardings=of_state)(jax.random.key(0))
    run = jax.jit(step, in_shardings=(of_state, of_batch), out_shardings=(of_state, None), donate_argnums=0)
    _, metrics = run(state, jax.device_put(batch, of_batch))
    print(f"loss {float(metrics['loss']):.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
