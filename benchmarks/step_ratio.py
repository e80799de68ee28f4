"""A train step through `auto_shard` beside the same step under hand-written `jax.jit` with the same shardings.

    python benchmarks/step_ratio.py

Both step functions have their own state, donated, and take turns in one process; a pair gives one ratio. By hand
means: the plan's own shardings for the state and the batch, and under fsdp the line that an expert adds, so that
weights are gathered and activations stay where they are. `plan.jit()` called bare shows what the wrapper costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from common import GPTConfig, Row, gpt_step, measured, paired, report
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import auto_shard

CONFIG = GPTConfig(layers=4, heads=4, width=128, context=64)
BATCH, ROUNDS = 16, 100
PLANS = ("dp:8", "fsdp:8")


class Loop:
    """A step function and the state that it goes on from."""

    def __init__(self, step: Callable[..., Any], state: Any, tokens: jax.Array):
        self.step, self.state, self.tokens = step, state, tokens

    def once(self) -> float:
        """Seconds of one step, with everything that it started."""
        begin = time.perf_counter()
        self.state, loss = self.step(self.state, self.tokens)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - begin


def rows_of(plan: str) -> list[Row]:
    """The figures under one plan."""
    train_step, create, state_shapes, token_shape = gpt_step(CONFIG, BATCH)
    step = auto_shard(train_step, plan=plan, donate_argnums=0)
    planned = step.plan(state_shapes, token_shape)
    state_in, tokens_in = step.lower(state_shapes, token_shape).compile().input_shardings[0]
    tokens = jax.device_put(jax.random.randint(jax.random.key(1), token_shape.shape, 0, CONFIG.vocab), tokens_in)

    def whole(params: Any) -> Any:
        return jax.lax.with_sharding_constraint(params, NamedSharding(tokens_in.mesh, PartitionSpec()))

    by_hand = jax.jit(
        gpt_step(CONFIG, BATCH, whole)[0],
        in_shardings=(state_in, tokens_in),
        out_shardings=(state_in, None),
        donate_argnums=0,
    )
    create_there = jax.jit(create, out_shardings=state_in)
    mine = Loop(step, step.init(create, jax.random.key(0)), tokens)
    rows = []
    for name, function in {"hand-written jax.jit": by_hand, "plan.jit()": planned.jit()}.items():
        theirs = Loop(function, create_there(jax.random.key(0)), tokens)
        ours_s, theirs_s = paired(mine.once, theirs.once, rounds=ROUNDS)
        rows += [
            measured(f"{plan}: {name}", 1e3 * theirs_s, "ms"),
            measured(f"{plan}: auto_shard beside it", 1e3 * ours_s, "ms"),
            measured(f"{plan}: auto_shard / {name}, paired", ours_s / theirs_s, "", 1.02),
        ]
    return rows


def main() -> None:
    """Measures and reports."""
    report("step_ratio", [row for plan in PLANS for row in rows_of(plan)], batch=BATCH, model=vars(CONFIG))


if __name__ == "__main__":
    main()
