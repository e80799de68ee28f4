"""Attention that `kernels="auto"` replaces, against the same model with our own kernel call: steps as compiled.

    python benchmarks/own_kernels.py [--programs llama gpt vit moe] [--remat full] [--target v5e:2x4] [--plan fsdp:8]

Programs are those of `plain_models.py` with two layers. Each is planned twice with the same words and compiled: plain
with `kernels="auto"`, and with `attention(impl="splash")` in its code and `kernels="off"`. Times are the two measures
of `estimate.py`. The bar is a ratio of at most 1.03. Nothing runs. Results are stored in `results/own_kernels.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plain_models
from common import RESULTS
from judged_steps import JudgedStep, judged, scaled_text

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import missing_compiler

PATH = RESULTS / "own_kernels.json"
# A kernel takes a multiple of 128 positions, so images have 256 patches. Rows: the fewest for which a device has some.
PROGRAMS: dict[str, dict[str, Any]] = {
    "llama": {"rows": 8, "layers": 2},
    "gpt": {"rows": 16, "layers": 2},
    "vit": {"rows": 64, "layers": 2, "side": 16},
    "moe": {"rows": 16, "layers": 2},
}


@dataclass(frozen=True, kw_only=True)
class Row(JudgedStep):
    """A compiled step.

    Attributes:
        program: its name in `plain_models`.
        way: `auto`, or `own` for the call in its code.
        replaced: the attention that `kernels="auto"` replaced, and found.
    """

    program: str
    way: str
    replaced: tuple[int, int]


def row_of(given: Any, program: str, way: str) -> Row:
    """Plan, compile and judge one step."""
    step, state, batch = getattr(plain_models, program)(given.remat, **PROGRAMS[program], kernel=way == "own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(step, state, *batch, target=given.target, plan=given.plan, donate_argnums=0,
                    kernels="auto" if way == "auto" else "off")  # fmt: skip
    replaced = sum(record.count for record in made.kernels if record.replaced)
    found = sum(record.count for record in made.kernels)
    return Row(program=program, way=way, replaced=(replaced, found), **judged(made, given.target))


def line(auto: Row, own: Row) -> str:
    """One line of a program: the replaced step over the one with our own call."""
    words = []
    for name in ("cycles", "roofline"):
        here, there = getattr(auto, name), getattr(own, name)
        ratio = f"{here / there:.3f}" if here and there else "-"
        words.append(f"{name} {scaled_text(here, 1e3)} / {scaled_text(there, 1e3)} ms = {ratio}")
    sizes = " / ".join(scaled_text(row.temp_bytes, 2**-20, 0) for row in (auto, own))
    return f"{auto.program}: {auto.replaced[0]} of {auto.replaced[1]} replaced; {'; '.join(words)}; {sizes} MiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the steps and print a line for each program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--remat", default="full")
    parser.add_argument("--target", default="v5e:2x4")
    parser.add_argument("--plan", default="fsdp:8")
    given = parser.parse_args(arguments)
    if missing := missing_compiler("tpu"):
        print(missing, file=sys.stderr)
        return 1
    rows: list[Row] = []
    for program in given.programs:
        rows += [row_of(given, program, way) for way in ("auto", "own")]
        print(line(*rows[-2:]), flush=True)
        PATH.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
