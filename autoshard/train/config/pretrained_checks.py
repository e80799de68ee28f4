"""Checks of the settings of a run that starts from a pretrained folder."""

from __future__ import annotations

from typing import Any

from autoshard.train.config.rows_config import RowsConfig
from autoshard.train.step.preference import DpoConfig


def pretrained_problems(config: Any) -> list[str]:
    """Return why the settings of a `TrainConfig` do not fit its pretrained folder, or the lack of one."""
    folder, problems = config.pretrained.folder, []
    if folder is not None and config.model != "gpt":
        problems.append(f"model is {config.model}, but --from {folder} says what the model is: give one of them")
    lora = "lora.path" if config.lora.path is not None else f"lora.rank {config.lora.rank}" if config.lora.rank else ""
    if folder is None and lora:
        problems.append(f"{lora} is given, but no pretrained model: give its folder by --from")
    if config.pretrained.keep_codes and not lora:
        problems.append("pretrained.keep_codes freezes weights, so adapters are trained: give --lora.rank")
    if config.pretrained.keep_codes and config.lora.quantize != "none":
        problems.append(f"pretrained.keep_codes and lora.quantize {config.lora.quantize} are both given: give one")
    if lora and config.freeze:
        problems.append(f"freeze and {lora} are both given, but adapters freeze all else: leave out freeze")
    if config.rows != RowsConfig() and not config.reads_rows:
        problems.append("rows.* are for rows of instruction data, which need --from and --data ROWS: leave them out")
    if config.dpo != DpoConfig() and config.loss != "dpo":
        problems.append("dpo.* are for --loss dpo: add it, or leave them out")
    if config.loss == "dpo" and (folder is None or not (config.reads_rows or ":" in (config.data or ""))):
        problems.append("loss is dpo, which needs --from and --data ROWS with prompt, chosen and rejected")
    return problems
