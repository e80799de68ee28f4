"""Checks of the setting `offload`."""

from __future__ import annotations

from typing import Any

from autoshard.errors import PlanError
from autoshard.models.remat.offload_words import offload_remat, offloaded_names, selects_layers
from autoshard.sharding.offload.words import AUTO, read_words

_WRITTEN_OUT = "--gpt.no-scan-layers (gpt.scan_layers = false)"


def offload_problems(config: Any) -> list[str]:
    """Return why the setting `offload` of a `TrainConfig` does not fit its other settings."""
    if not config.is_built_in:
        try:
            read_words(config.offload)  # the planner knows what the model has
        except PlanError as error:
            return [str(error)]
        return []
    if config.offload == AUTO:
        return []
    try:
        if not offloaded_names(config.offload):
            return []
        shape = {"scan": config.gpt.scan_layers, "written_out": _WRITTEN_OUT}
        remat = offload_remat(config.offload, config.gpt.layers, **shape)
    except ValueError as error:
        return [str(error)]
    if config.variants == "search" and selects_layers(config.offload):
        return [f"offload is {config.offload!r}, whose slices over layers say what each layer keeps, and variants is "
                "'search', which chooses it: leave out --variants search, or the slices"]  # fmt: skip
    if config.variants == "given" and config.gpt.remat not in ("none", remat):
        return [f"offload is {config.offload!r} and gpt.remat is {config.gpt.remat!r}: both say what a layer keeps; "
                f"give one of them, such as gpt.remat '{remat} keep:NAMES'"]  # fmt: skip
    return []
