"""Compare the trainer's step of a 1B Llama on one device with the same model in plain JAX: tokens/s and MFU.

    JAX_PLATFORMS=cuda python benchmarks/single_device.py           bfloat16, cuDNN's attention
    python benchmarks/single_device.py --small                      a model for a CPU, with XLA's attention

The hand-written side uses only JAX and Optax: its parameters are a dict of arrays, its layers a `lax.scan`. Both sides
have Llama 3.2 1B's sizes (16 layers of 2048, 32 heads and 8 for keys and values, 8192 hidden units, 128,256 tokens, the
head tied to the embedding), float32 parameters and moments, AdamW with clipping, the same remat policy, the same batch
and the same initial parameters. Their first losses must agree. Steps are timed in turn. MFU is
`models.flops_per_token` over the chip's peak at 16 bits, and is left out if the peak is unknown.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # `common` would set eight

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Row, measured, report
from jax import lax

from autoshard.models import GPTConfig, flops_per_token
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.program.planned_step import place_step
from autoshard.train.program.step_timing import SteppedState, paired_times
from autoshard.train.run.throughput import peak_flops

LLAMA = GPTConfig(
    vocab=128_256, layers=16, heads=32, kv_heads=8, width=2048, ffn=8192, context=2048,
    rotary_base=500_000.0, remat="dots", attention="cudnn", dtype="bfloat16",
)  # fmt: skip
SMALL = replace(LLAMA, vocab=512, layers=4, heads=8, kv_heads=2, width=128, ffn=512, context=128, attention="plain")
AGREE = {"bfloat16": 2e-2, "float32": 1e-5}
TARGET = 1.02  # the trainer's time over that by hand; the same as in `step_ratio.py`


def by_hand(config: GPTConfig, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Return the step `((params, opt_state), (tokens, targets)) -> ((params, opt_state), loss)`, without autoshard."""
    dtype = jnp.dtype(config.dtype)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + config.norm_eps) * scale).astype(dtype)

    def rotate(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        rates = config.rotary_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kernel = "cudnn" if config.attention == "cudnn" else "xla"
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        heads, mlp = weights["attention"], weights["mlp"]
        wide = {name: w.astype(dtype) for name, w in {**heads, **mlp}.items()}
        y = norm(x, weights["attention_norm"]["scale"])
        q, k = (rotate(jnp.einsum("bse,ehd->bshd", y, wide[name])) for name in ("wq", "wk"))
        y = attend(q, k, jnp.einsum("bse,ehd->bshd", y, wide["wv"]))
        x = x + jnp.einsum("bshd,hde->bse", y, wide["wo"])
        y = norm(x, weights["mlp_norm"]["scale"])
        y = jax.nn.silu(y @ wide["w_gate"]) * (y @ wide["w_up"])
        return x + y @ wide["w_down"], None

    def loss_of(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = params["embed"].astype(dtype)[tokens]
        keep = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
        x, _ = lax.scan(jax.checkpoint(layer, policy=keep, prevent_cse=False), x, params["blocks"])
        logits = norm(x, params["norm"]["scale"]) @ params["embed"].astype(dtype).T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    def step(state: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return jax.jit(step, donate_argnums=0)


def rows_of(config: GPTConfig, batch_size: int, rounds: int) -> list[Row]:
    """Return the figures of one model."""
    run = TrainConfig(gpt=config, batch_size=batch_size, plan="dp:1")
    program = make_program_of(run)
    placed = place_step(train_step_of(run, program), program, run)
    state = placed.step.init(program.create_state, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab, (batch_size, config.context + 1)), jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    params = jax.tree.map(jnp.copy, state.params)
    theirs = SteppedState(
        by_hand(config, program.optimizer), (params, program.optimizer.init(params)), (inputs, targets)
    )
    batch = {"inputs": inputs, "targets": targets, "mask": jnp.ones(inputs.shape, jnp.float32)}
    mine = SteppedState(placed.step, state, jax.device_put(batch, placed.batch_shardings))

    first, second = float(mine.metrics()["loss"]), float(theirs.metrics())
    if not math.isclose(first, second, rel_tol=AGREE[config.dtype]):
        raise SystemExit(f"the two models differ: the first loss is {first:.5f}, by hand {second:.5f}")
    ours_s, theirs_s = paired_times(mine.once, theirs.once, rounds=rounds)
    rows = [measured("trainer's step / by hand, paired", ours_s / theirs_s, "", TARGET)]
    for name, seconds in (("trainer", ours_s), ("by hand", theirs_s)):
        rows.append(measured(f"{name}: a step", 1e3 * seconds, "ms"))
        rows.append(measured(f"{name}: tokens", inputs.size / seconds, "1/s"))
        if peak := peak_flops(jax.devices()[0].device_kind):
            flops = flops_per_token(config) * inputs.size
            rows.append(measured(f"{name}: MFU", 100 * flops / (peak * seconds), "%"))
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model that a CPU trains")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch (8)")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps (60)")
    options = parser.parse_args()
    config = SMALL if options.small else LLAMA
    rows = rows_of(config, options.batch_size, options.rounds)
    kind = jax.devices()[0].device_kind
    report("single_device" + "_small" * options.small, rows, device=kind, batch=options.batch_size, model=vars(config))


if __name__ == "__main__":
    main()
