"""The models and machines of the gallery."""

from __future__ import annotations

from dataclasses import replace

from autoshard.models.workloads import Workload, workload
from autoshard.sharding.machines.targets import find_target

MODELS = (
    "gpt-1.3b", "gpt3-175b", "llama2-7b", "llama2-70b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "mistral-7b",
    "mixtral-8x7b", "mixtral-8x22b", "gemma3-4b", "gemma3-12b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b",
    "qwen3-235b-a22b", "deepseek-v3", "vit-l16", "vit-h14", "wide-resnet-1b",
)  # fmt: skip
TARGETS = ("v5e:16x16", "v6e:16x16", "v5p:4x8x8", "tpu7x:4x8x8", "h100:32x8", "h200:32x8")
TOKENS_PER_CHIP = 16_384  # chosen: the recipes that others measured have 8,192 to 41,000
IMAGES_PER_CHIP = 64  # chosen


def gallery_workload(model: str, target: str) -> Workload:
    """Return a model with the gallery's batch for a machine: the same work for each chip on all machines."""
    work, machine = workload(model), find_target(target)
    chips = machine.devices // machine.chip.cores
    context = getattr(work.config, "context", None)
    rows = max(TOKENS_PER_CHIP // context, 1) if context else IMAGES_PER_CHIP
    return replace(work, batch_size=rows * chips)


def command(work: Workload, target: str) -> str:
    """Return the command that plans a model of the gallery again."""
    context = getattr(work.config, "context", None)
    given = f" --context {context}" if context else ""
    return f"autoshard plan {work.name} --target {target} --batch-size {work.batch_size}{given} --verify 0"
