"""A train step through `auto_shard` beside the same step under hand-written `jax.jit` with the same shardings.

    python benchmarks/step_ratio.py

Both step functions have their own state, donated, and take turns in one process; a pair gives one ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from common import GPTConfig, Row, gpt_step, measured, paired, report

from autoshard import auto_shard

CONFIG = GPTConfig(layers=4, heads=4, width=128, context=64)
BATCH, ROUNDS = 16, 60
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
    step.plan(state_shapes, token_shape)
    state_in, tokens_in = step.lower(state_shapes, token_shape).compile().input_shardings[0]
    tokens = jax.device_put(jax.random.randint(jax.random.key(1), token_shape.shape, 0, CONFIG.vocab), tokens_in)
    mine = Loop(step, step.init(create, jax.random.key(0)), tokens)
    by_hand = jax.jit(
        train_step, in_shardings=(state_in, tokens_in), out_shardings=(state_in, None), donate_argnums=0
    )
    theirs = Loop(by_hand, jax.jit(create, out_shardings=state_in)(jax.random.key(0)), tokens)
    ours_s, theirs_s = paired(mine.once, theirs.once, rounds=ROUNDS)
    return [
        measured(f"{plan}: hand-written jax.jit", 1e3 * theirs_s, "ms"),
        measured(f"{plan}: auto_shard", 1e3 * ours_s, "ms"),
        measured(f"{plan}: auto_shard / jax.jit, paired", ours_s / theirs_s, "", 1.02),
    ]


def main() -> None:
    """Measures and reports."""
    report("step_ratio", [row for plan in PLANS for row in rows_of(plan)], batch=BATCH, model=vars(CONFIG))


if __name__ == "__main__":
    main()
