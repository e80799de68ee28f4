"""Memory of a train step with adapters (LoRA), planned and compiled, against base weights, 5 % and activations.

python benchmarks/lora_memory.py [--layers 32] [--dora] [--quantize int8|nf4]

The model has the published config of Llama 3.1 8B in bfloat16, and adapters of rank 16 at all matrices of its layers,
on sequences of 4096 positions, one a device. It is compiled for a machine that is not there; this needs the extra
aot-tpu.

Activations are the temporaries of a second program, compiled in the same way: the gradient of the loss with respect to
a vector that is added to all embeddings. It runs the whole backward pass, but has no gradient of any weight.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import Row, report

import autoshard
from autoshard.models.adapters import LoraConfig
from autoshard.models.gpt_config import GPTConfig
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.step.train_step import batch_shapes

TARGET, PLAN, DEVICES, CONTEXT = "v5e:4x4", "fsdp:16", 16, 4096
BAR = 0.05  # of the base weights
# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, without the scaling of rotary positions.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def audited(made: Any) -> dict[str, float]:
    """Compile a plan for its target; return its memory on a device, in bytes."""
    audit = made.verify(timeout_s=1800)
    if not audit.ok:
        raise SystemExit(f"{TARGET}: {audit.kind}: {audit.message}")
    return {"peak": audit.peak_bytes, **audit.memory}


def main(layers: int, dora: bool, quantize: Any) -> None:
    """Plan, compile and report."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
        config = TrainConfig(
            pretrained=PretrainedConfig(folder, remat="full", loss_chunks=8),
            lora=LoraConfig(rank=16, targets=("attention/*", "mlp/*"), dora=dora, quantize=quantize),
            gpt=GPTConfig(context=CONTEXT), batch_size=DEVICES, steps=1000,
        )  # fmt: skip
        program = make_program_of(config)
        step = train_step_of(config, program)
    state, batch = program.abstract_state(), batch_shapes(DEVICES, CONTEXT)

    def sensitivity(state: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        def loss(vector: jax.Array) -> jax.Array:
            model = program.model(state.params, state.frozen, state.variables, None)
            x = model.embedded(batch["inputs"])
            x = model.features(batch["inputs"], embedded=x + vector.astype(x.dtype))
            total, count = model.loss_of(x, batch["targets"], batch["mask"])
            return total / count

        return jax.value_and_grad(loss)(jnp.zeros((LLAMA["hidden_size"],), jnp.float32))

    plan = autoshard.plan(step, state, batch, target=TARGET, plan=PLAN, donate_argnums=0)
    # Codes are integers, which the plan does not list as parameters.
    frozen = [leaf.path for leaf in plan.inputs if "/frozen/" in leaf.path and not leaf.path.endswith("/codes")]
    reduced = [path for path in frozen if plan.reduce_axes(path)]
    ours = audited(plan)
    backward = audited(autoshard.plan(sensitivity, state, batch, target=TARGET, plan=PLAN))
    base, own = bytes_of(state.frozen) / DEVICES, bytes_of((state.params, state.opt_state)) / DEVICES
    over = (ours["peak"] - base - backward["temp"]) / base
    note = (
        f"MiB a device: peak {ours['peak'] / 2**20:.0f}, base {base / 2**20:.0f}, activations "
        f"{backward['temp'] / 2**20:.0f}, adapters and moments {own / 2**20:.0f}; "
        f"planned peak {plan.estimate.peak_memory_bytes / 2**20:.0f}"
    )
    kind = "DoRA" if dora else "LoRA" if quantize == "none" else f"LoRA, base in {quantize}"
    rows = [
        Row(f"{kind}: peak above base and activations, over the base", over, "", BAR, note=note),
        Row(f"{kind}: planned over compiled peak", plan.estimate.peak_memory_bytes / ours["peak"], ""),
        Row("frozen parameters whose gradient is reduced", len(reduced), "", 0, note=f"of {len(frozen)}"),
    ]
    name = "lora_memory" + ("_dora" if dora else "") + ("" if quantize == "none" else f"_{quantize}")
    report(name, rows, layers=layers, target=TARGET, plan=PLAN, config=LLAMA)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--quantize", choices=["none", "int8", "nf4"], default="none")
    given = parser.parse_args()
    main(given.layers, given.dora, given.quantize)
