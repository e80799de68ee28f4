"""Checks of the setting `offload`."""

from __future__ import annotations

from typing import Any

from autoshard.models.remat.offload_words import AUTO, NONE, offload_remat, selects_layers


def offload_problems(config: Any) -> list[str]:
    """Return why the setting `offload` of a `TrainConfig` does not fit its other settings."""
    if config.offload == NONE:
        return []
    if not config.is_built_in:
        own = "leave it out, or use jax.checkpoint with an offloading policy in your model"
        other = f"only the built-in model has named values, not {config.model_name}"
        return [f"offload is {config.offload!r}, but {other}: {own}"]
    if config.offload == AUTO:
        return []
    try:
        remat = offload_remat(config.offload, config.gpt.layers, scan=config.gpt.scan_layers)
    except ValueError as error:
        return [str(error)]
    if config.variants == "search" and selects_layers(config.offload):
        return [f"offload is {config.offload!r}, whose slices over layers say what each layer keeps, and variants is "
                "'search': give one of them"]  # fmt: skip
    if config.variants == "given" and config.gpt.remat not in ("none", remat):
        return [f"offload is {config.offload!r} and gpt.remat is {config.gpt.remat!r}: both say what a layer keeps; "
                f"give one of them, such as gpt.remat '{remat} keep:NAMES'"]  # fmt: skip
    return []
