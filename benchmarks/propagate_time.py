"""Measure the time that propagation over a long program takes in addition to tracing it.

    python benchmarks/propagate_time.py

The program is an unrolled 48-layer GPT's train step, with the batch over `dp` and the wide dimensions of weights over
`tp`.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
from common import Row, report, timed
from jax.sharding import PartitionSpec as P
from small_gpt import GPTConfig, gpt_step

from autoshard import propagate
from autoshard.spmdrules.ir.program import build

SIZES: dict[str, Any] = {"layers": 48, "heads": 8, "width": 512, "vocab": 8192, "context": 128, "scan_layers": False}
MODELS = {
    "GPT": GPTConfig(**SIZES),
    "GPT, bf16, remat": GPTConfig(**SIZES, dtype="bfloat16", remat="full"),
    "GPT, LayerNorm, biases, remat": GPTConfig(**SIZES, norm="layernorm", bias=True, remat="full"),
}
RUNS, BATCH = 5, 16
MESH = {"dp": 2, "tp": 4}


def specs_of(state: Any) -> Any:
    """Shard matrices over `tp` along their longer dimension, and replicate everything else."""

    def spec(x: jax.ShapeDtypeStruct) -> P:
        if len(x.shape) != 2:
            return P()
        return P("tp") if x.shape[0] > x.shape[1] else P(None, "tp")

    return jax.tree.map(spec, state)


def rows_of(name: str, config: GPTConfig) -> list[Row]:
    """Return the figures of one model, each the best of a few runs."""
    trace_s = whole_s = float("inf")
    equations = reshards = 0
    for _ in range(RUNS):
        train_step, _, state, tokens = gpt_step(config, BATCH)
        gc.collect()  # no run collects the garbage of an earlier one
        once_s, closed = timed(jax.make_jaxpr(train_step), state, tokens)
        equations = equations or sum(1 for _ in build(closed).ops())
        del closed
        train_step, _, state, tokens = gpt_step(config, BATCH)  # a new function, which no cache knows
        gc.collect()
        run_s, result = timed(propagate, train_step, state, tokens, in_specs=(specs_of(state), P("dp")), mesh=MESH)
        reshards = len(result.reshards)
        trace_s, whole_s = min(trace_s, once_s), min(whole_s, run_s)
    beyond_s = max(whole_s - trace_s, 0.0)
    return [
        Row(f"{name}: tracing {equations} equations", trace_s, "s"),
        Row(f"{name}: propagation beyond the trace", beyond_s, "s", trace_s, note=f"{reshards} reshards"),
    ]


def main() -> None:
    """Measure and report."""
    rows = [row for name, config in MODELS.items() for row in rows_of(name, config)]
    report("propagate_time", rows, batch=BATCH, models={n: vars(c) for n, c in MODELS.items()}, mesh=MESH, runs=RUNS)


if __name__ == "__main__":
    main()
