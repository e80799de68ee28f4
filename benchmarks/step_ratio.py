"""Compare a train step of `auto_shard` with the same step under hand-written `jax.jit` with the same shardings.

    python benchmarks/step_ratio.py

Both step functions have separate states, which they donate, and take turns in one process. Each pair of steps gives one
ratio. `auto_shard` is compared with

    hand-written jax.jit        the plan's shardings for the state and the batch, and an expert's constraints:
                                activations stay where they are, and each weight is gathered at each use, forward and
                                backward, as in PyTorch's FSDP
    plan.jit()                  the planned function without the wrapper of `auto_shard`
    weights gathered at start   `jax.jit` that gathers all weights at the start of the step, with half the messages and
                                the memory of a whole model. No target
    without constraints         `jax.jit` with the shardings alone. No target
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from common import Row, measured, report
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from small_gpt import GPT, GPTConfig, gpt_step

from autoshard import auto_shard
from autoshard.train.program.step_timing import SteppedState, paired_times

CONFIG = GPTConfig(layers=4, heads=4, width=128, context=64)
BATCH, ROUNDS = 16, 100
PLANS = ("dp:8", "fsdp:8")


def gathered_by_layer(model: GPT, tokens: jax.Array, gather: Callable[[Any], Any]) -> jax.Array:
    """Run the model's forward pass. Every weight is gathered where it is used, and again in the backward pass."""
    graph, layers = nnx.split(model.blocks)
    norm_graph, norm = nnx.split(model.norm)

    def is_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name != "sharding_constraint"  # gathered weights are not saved for the backward pass

    @partial(jax.checkpoint, policy=is_saveable, prevent_cse=False)
    def run(x: jax.Array, layer: Any) -> jax.Array:
        return nnx.merge(graph, gather(layer))(x, None)

    x = gather(model.embed[...])[tokens].astype(model.cfg.dtype)
    x, _ = jax.lax.scan(lambda x, layer: (run(x, layer), None), x, layers)
    head = model.embed[...].T if model.head is None else model.head[...]
    return jnp.einsum("bse,ev->bsv", nnx.merge(norm_graph, gather(norm))(x), gather(head).astype(x.dtype))


def gathered_at_start(model: GPT, tokens: jax.Array, gather: Callable[[Any], Any]) -> jax.Array:
    """Run the model's forward pass after gathering every weight."""
    graph, params = nnx.split(model)
    return nnx.merge(graph, gather(params))(tokens)


def rows_of(plan: str) -> list[Row]:
    """Return the figures under one plan."""
    train_step, create, state_shapes, token_shape = gpt_step(CONFIG, BATCH)
    step = auto_shard(train_step, plan=plan, donate_argnums=0)
    planned = step.plan(state_shapes, token_shape)
    state_in, tokens_in = step.lower(state_shapes, token_shape).compile().input_shardings[0]
    tokens = jax.device_put(jax.random.randint(jax.random.key(1), token_shape.shape, 0, CONFIG.vocab), tokens_in)

    def gather(weights: Any) -> Any:
        return jax.lax.with_sharding_constraint(weights, NamedSharding(tokens_in.mesh, PartitionSpec()))

    def jit(forward: Callable[..., Any] | None) -> Callable[..., Any]:
        own = gpt_step(CONFIG, BATCH) if forward is None else gpt_step(CONFIG, BATCH, partial(forward, gather=gather))
        return jax.jit(own[0], in_shardings=(state_in, tokens_in), out_shardings=(state_in, None), donate_argnums=0)

    others = {
        "hand-written jax.jit": (jit(gathered_by_layer), 1.02),
        "plan.jit()": (planned.jit(), 1.02),
        "jax.jit, weights gathered at the start": (jit(gathered_at_start), None),
        "jax.jit without constraints": (jit(None), None),
    }
    create_there = jax.jit(create, out_shardings=state_in)
    mine = SteppedState(step, step.init(create, jax.random.key(0)), tokens)
    rows = []
    for name, (function, target) in others.items():
        theirs = SteppedState(function, create_there(jax.random.key(0)), tokens)
        ours_s, theirs_s = paired_times(mine.once, theirs.once, rounds=ROUNDS)
        rows += [
            measured(f"{plan}: {name}", 1e3 * theirs_s, "ms"),
            measured(f"{plan}: auto_shard beside it", 1e3 * ours_s, "ms"),
            measured(f"{plan}: auto_shard / {name}, paired", ours_s / theirs_s, "", target),
        ]
    return rows


def main() -> None:
    """Measure and report."""
    report("step_ratio", [row for plan in PLANS for row in rows_of(plan)], batch=BATCH, model=vars(CONFIG))


if __name__ == "__main__":
    main()
