"""Measure the time of planning. The trace does not count, because lowering needs it, too.

    python benchmarks/planning_time.py

Everything is planned from shapes, without arrays. Each figure is the best of a few runs of new functions, because a
process usually plans once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import jax
from common import Row, report, timed
from small_gpt import GPTConfig, gpt_step

from autoshard import plan

SCANNED = GPTConfig(layers=24, heads=8, width=512, vocab=8192, context=128)
RUNS, BATCH = 3, 16


def times(config: GPTConfig) -> tuple[float, float, float]:
    """Return the seconds to trace, to lower the trace, and to plan (tracing included)."""
    best = [float("inf")] * 3
    for _ in range(RUNS):
        train_step, _, state, tokens = gpt_step(config, BATCH)
        trace_s, traced = timed(jax.jit(train_step).trace, state, tokens)
        lower_s, _ = timed(traced.lower)
        train_step, _, state, tokens = gpt_step(config, BATCH)  # a new function, which no cache knows
        plan_s, _ = timed(plan, train_step, state, tokens, donate_argnums=0)
        best = [min(old, new) for old, new in zip(best, (trace_s, lower_s, plan_s), strict=True)]
    return best[0], best[1], best[2]


def rows_of(name: str, config: GPTConfig, limit_s: float | None) -> list[Row]:
    """Return the figures of one model. Without `limit_s`, the target is twice the time of tracing and lowering."""
    trace_s, lower_s, plan_s = times(config)
    target = 2 * (trace_s + lower_s) if limit_s is None else limit_s
    return [
        Row(f"{name}: tracing", trace_s, "s"),
        Row(f"{name}: lowering", lower_s, "s"),
        Row(f"{name}: planning beyond the trace", max(plan_s - trace_s, 0.0), "s", target),
    ]


def main() -> None:
    """Measure and report."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    unrolled = replace(SCANNED, scan_layers=False)
    rows = [*rows_of("scanned, 24 layers", SCANNED, 2.0), *rows_of("unrolled, 24 layers", unrolled, None)]
    report("planning_time", rows, batch=BATCH, model=vars(SCANNED), devices=jax.device_count(), runs=RUNS)


if __name__ == "__main__":
    main()
