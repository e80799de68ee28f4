"""The efficiency of each chip at which the predicted time of one recipe is its measured time.

    python benchmarks/recipe_calibration.py

These are the values of `efficiency` and `efficiency_fp8` in `autoshard.sharding.machines.chips`. No other constant is
fitted to a recipe. The rows are left out of the figures of `recipes.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from unittest import mock

from recipe_file import OWN, read_recipes
from recipe_rows import own_plan
from recipe_settings import Settings, settings_of

from autoshard.sharding.machines.chips import CHIPS

ROWS: Mapping[tuple[str, str], str] = {
    ("v5p", "efficiency"): "llama3.1-405b-v5p-1024",
    ("v6e", "efficiency"): "llama3.1-8b-v6e-16",
    ("tpu7x", "efficiency"): "llama3-70b-tpu7x-64-bf16",
    ("tpu7x", "efficiency_fp8"): "llama3-70b-tpu7x-64-fp8",
}
"""Chip and the name of its efficiency -> the recipe that it is calibrated on."""
TOLERANCE = 5e-4


def predicted(settings: Settings, chip: str, name: str, efficiency: float) -> float:
    """Return the predicted seconds of a recipe's own plan if the chip's field `name` has this value."""
    with mock.patch.dict(CHIPS, {chip: dataclasses.replace(CHIPS[chip], **{name: efficiency})}):  # pyright: ignore[reportArgumentType]
        seconds = own_plan(settings)[0].seconds
    assert seconds is not None
    return seconds


def efficiency_of(settings: Settings, chip: str, name: str) -> float:
    """Return the efficiency at which the predicted seconds are the measured ones, to three digits, by bisection."""
    low, high = 0.3, 1.0
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        slower = predicted(settings, chip, name, middle) > settings.recipe.seconds
        low, high = (middle, high) if slower else (low, middle)
    return round((low + high) / 2, 3)


def main() -> None:
    """Print the efficiency of each chip."""
    entries = {entry.id: entry for entry in read_recipes(OWN)}
    for (chip, name), row in ROWS.items():
        settings = settings_of(entries[row])
        found = efficiency_of(settings, chip, name)
        check = predicted(settings, chip, name, found)
        print(
            f"{chip} {name}: {found:.3f} from {row}: {check:.3f} s predicted, "
            f"{settings.recipe.seconds:.3f} s measured; with 0.95 it is {predicted(settings, chip, name, 0.95):.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
