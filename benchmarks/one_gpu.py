"""One attached GPU, and what plans predict of it: rates, loops, attention, experts, train steps, the corpus, decoding.

    JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/one_gpu.py      measure
    ... --sections rates attention            some of them
    ... --small                               tiny sizes, on any device: whether everything runs; stores nothing
    JAX_PLATFORMS=cpu python benchmarks/one_gpu.py --predict      predict what was measured; needs no GPU
    python benchmarks/one_gpu.py --show                           print the stored figures

Predictions are those of plans for the chip, as one device. The ratio is the prediction over the measurement. Two
constants of the estimate come from rows of an H200: `CUDNN_SOFTMAX_SHARE` from attention with heads of 64, and
`EXPOSED_TRANSFERS` from the step with the residual on the host. The other rows judge the estimate. Each figure is
stored in `results/one_gpu.json` once it is known; figures of other chips and sections stay there. Decoding needs
PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # `common` would set eight

import gpu_attention
import gpu_decoding
import gpu_experts
import gpu_formulations
import gpu_loops
import gpu_rates
import gpu_steps
import jax
from common import RESULTS
from gpu_timing import Figure
from rich.console import Console
from rich.table import Table

from autoshard.sharding.machines.chips import chip_name
from autoshard.sharding.machines.targets import find_target, target_for

PATH = RESULTS / "one_gpu.json"
SECTIONS: Mapping[str, ModuleType] = {
    "rates": gpu_rates, "loops": gpu_loops, "attention": gpu_attention, "experts": gpu_experts, "steps": gpu_steps,
    "formulations": gpu_formulations, "decoding": gpu_decoding,
}  # fmt: skip
CHOOSABLE = {"experts", "steps", "formulations"}
Content = dict[str, Any]


def stored(path: Path) -> Content:
    """Return what the file has: for each kind of device its versions and figures."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(content: Content, path: Path) -> None:
    """Write the file."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def with_figure(content: Content, device: str, figure: Figure) -> Content:
    """Return the content with this figure in the place of an older one."""
    record = _rounded(asdict(figure))
    kept = [r for r in content.get(device, {}).get("figures", []) if _key(r) != _key(record)]
    head = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {package: version(package) for package in ("jax", "jaxlib")},
    }
    return content | {device: head | {"figures": [*kept, record]}}


def with_predictions(content: Content) -> Content:
    """Return the content with the predictions of today's plans, and their ratios."""
    found = {}
    for device, body in content.items():
        target = find_target(f"{chip_name(device)}:1")
        known = {(section, *key): value for section, module in SECTIONS.items() if hasattr(module, "predictions")
                 for key, value in module.predictions(target).items()}  # fmt: skip
        records = []
        for record in body["figures"]:
            if (predicted := known.get(_key(record))) is not None:
                record = record | {"predicted": predicted, "ratio": predicted / record["measured"]}
            records.append(_rounded(record))
        found[device] = body | {"figures": records}
    return found


def measured(sections: list[str], small: bool, only: str = "") -> Iterator[Figure]:
    """Measure the sections on the first device. With `only`, measure the cases that have it in their name."""
    target = target_for(jax.devices()[:1], 1)
    for section in sections:
        chosen = {"only": only} if only else {}
        yield from SECTIONS[section].figures(target, small=small, **chosen)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["section"], record["case"], record["quantity"]


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}


def show(content: Content) -> None:
    """Print the figures of each device as a table."""
    for device, body in content.items():
        table = Table("section", "case", "", "measured", "predicted", "ratio", "slowest / fastest", "", title=device)
        for r in body["figures"]:
            cells = [
                f"{r[k]:.4g}" if r.get(k) is not None else "" for k in ("measured", "predicted", "ratio", "spread")
            ]
            table.add_row(r["section"], r["case"], r["quantity"], f"{cells[0]} {r['unit']}", *cells[1:], r["note"])
        Console(width=180).print(table)


def main() -> None:
    """Measure or predict, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--small", action="store_true", help="tiny sizes; stores nothing")
    parser.add_argument(
        "--only", default="", help="measure only cases with this text in their name; not for all sections"
    )
    parser.add_argument("--predict", action="store_true", help="predict what was measured, and measure nothing")
    parser.add_argument("--show", action="store_true", help="print the stored figures")
    parser.add_argument("--out", type=Path, default=PATH, help="the file of the figures")
    given = parser.parse_args()
    if given.only and not {*given.sections} <= CHOOSABLE:
        parser.error(f"--only goes with --sections {' '.join(sorted(CHOOSABLE))}")
    content = {} if given.small else stored(given.out)
    if given.predict:
        save(content := with_predictions(content), given.out)
    elif not given.show:
        for figure in measured(given.sections, given.small, given.only):
            content = with_figure(content, jax.devices()[0].device_kind, figure)
            print(f"{figure.section}: {figure.case}: {figure.measured:.4g} {figure.unit} {figure.note}", flush=True)
            if not given.small:
                save(content, given.out)
    show(content)


if __name__ == "__main__":
    main()
