"""Compare the plan that is chosen for several slices with other plans, all compiled. Links between slices are slow.

    python benchmarks/multi_slice.py [CASE ...] [--words WORDS ...] [--fresh] [--show]

`llama-*`: a Llama of 8 layers in plain JAX (`plain_models.llama`, full rematerialization, 128 rows of 1024 tokens).
`perceptron-*`: 8 layers of 4096 x 16384 in bfloat16, 64 rows for each chip, and no optimizer. A number in a name is the
number of slices of v5e:4x4. `v5p` means four slices of v5p:4x4x4, where the Llama has 256 rows. `chosen` is the plan of
the search, without any words. The other rows are the plans of `CASES`. All are compiled, and judged by `estimate.py`.
`over best` divides a step by the fastest of the other plans: 1 means that no other plan is faster. Nothing runs.

Each result is stored in `results/multi_slice.json` as soon as it is there. A run plans all cases, but compiles only
programs without a stored result. So it can be stopped and started again. Use `--fresh` after a change of `estimate.py`:
it compiles and judges all programs. Nearly all of the time is spent in XLA.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import plain_models
from common import RESULTS, Console, Table
from judged_steps import JudgedStep, exported, judged, predicted, scaled_text

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import compile_job, missing_compiler
from autoshard.sharding.audit.compiler_process import versions as compilers

PATH = RESULTS / "multi_slice.json"
TIMEOUT_S = 4 * 3600.0  # for one compilation; chosen for processors that are busy with other work
LAYERS, SEQ = 8, 1024
WIDTH, HIDDEN, POINTS = 4096, 16384, 64  # of the perceptron; POINTS: rows for each chip
CHOSEN = "chosen"


def llama(rows: int = 128) -> plain_models.Made:
    """The Llama's step."""
    return plain_models.llama("full", rows=rows, seq=SEQ, layers=LAYERS)


def perceptron(chips: int) -> plain_models.Made:
    """The perceptron's step: gradient descent on a scan of layers with residuals."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            out, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w[0]) @ w[1], None), x, weights)
            return (out.astype(jnp.float32) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, gradients), value

    sizes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (POINTS * chips, WIDTH)
    up, down, x = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)
    return step, (up, down), (x,)


@dataclass(frozen=True)
class Case:
    """A step, its machine, and the plans that an expert would try: words -> microbatches (1 without stages)."""

    made: Callable[[], plain_models.Made]
    target: str
    plans: Mapping[str, int]


CASES: Mapping[str, Case] = {
    "perceptron-4": Case(
        partial(perceptron, 64),
        "v5e:4x4*4",
        {"pp:4 fsdp:16": 8, "tp:64": 1, "dp:4 tp:16": 1, "dp:4 fsdp:16": 1, "dp:4 fsdp:4 tp:4": 1},
    ),
    "perceptron-v5p": Case(
        partial(perceptron, 256),
        "v5p:4x4x4*4",
        {"pp:4 fsdp:64": 8, "dp:4 tp:64": 1, "dp:4 fsdp:64": 1, "dp:4 fsdp:4 tp:16": 1},
    ),
    "llama-2": Case(
        llama,
        "v5e:4x4*2",
        {"dp:2 fsdp:16": 1, "fsdp:32": 1, "dp:2 fsdp:4 tp:4": 1, "pp:2 fsdp:16": 8, "pp:2 dp:4 fsdp:4": 8},
    ),
    "llama-4": Case(
        llama,
        "v5e:4x4*4",
        {"dp:4 fsdp:16": 1, "fsdp:64": 1, "dp:4 fsdp:4 tp:4": 1, "pp:4 fsdp:16": 8, "pp:2 dp:2 fsdp:16": 4},
    ),
    "llama-v5p": Case(
        partial(llama, 256),
        "v5p:4x4x4*4",
        {"dp:4 fsdp:64": 1, "fsdp:256": 1, "dp:4 fsdp:16 tp:4": 1, "pp:4 fsdp:64": 8},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row(JudgedStep):
    """A compiled step.

    Attributes:
        case: the name of the case.
        words: the words that were requested; `chosen` for the plan of the search.
        plan: the plan.
        schedule: the schedule of its pipeline, empty without one.
        microbatches: number of microbatches.
        fits: whether the predicted peak fits a device.
        digest: the hash of the exported program, the machine, the options and the compiler's version.
    """

    case: str
    words: str
    plan: str
    schedule: str
    microbatches: int
    fits: bool
    digest: str = ""


def row_of(name: str, words: str, known: Row | None) -> Row:
    """Plan, compile and judge one step. It is not compiled if its program is that of a known row."""
    case = CASES[name]
    step, state, batch = case.made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(step, state, *batch, target=case.target, plan=None if words == CHOSEN else words, donate_argnums=0,
                    microbatches=case.plans.get(words))  # fmt: skip
    job = exported(made, case.target)
    digest = job.digest(json.dumps(compilers(), sort_keys=True))
    if known is not None and known.digest == digest and known.kind != "timeout":
        found = {field.name: getattr(known, field.name) for field in fields(JudgedStep)} | predicted(made)
    else:
        found = judged(made, case.target, compile_job(job, TIMEOUT_S))
    return Row(case=name, words=words, plan=made.chosen, schedule=made.schedule if made.stages > 1 else "",
               microbatches=made.microbatches, fits=made.fits, digest=digest, **found)  # fmt: skip


def over_best(row: Row, rows: Sequence[Row], measure: str) -> float | None:
    """The step of a row over that of the fastest requested plan of its case, by one measure."""
    others = [getattr(other, measure) for other in rows if other.case == row.case and other.words != CHOSEN]
    times = [time for time in others if time]
    here = getattr(row, measure)
    return here / min(times) if here and times else None


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    found = Table(title="plans across slices")
    for name in ("case", "words", "plan", "schedule", "microbatches", "result", "ms predicted", "ms cycles",
                 "ms roofline", "over best, cycles", "roofline"):  # fmt: skip
        found.add_column(name)
    for row in sorted(rows, key=lambda row: (row.case, row.words != CHOSEN, row.predicted)):
        times = [scaled_text(time, 1e3) for time in (row.predicted, row.cycles, row.roofline)]
        ratios = [scaled_text(over_best(row, rows, measure), 1.0, 3) for measure in ("cycles", "roofline")]
        found.add_row(row.case, row.words, row.plan if row.words == CHOSEN else "", row.schedule,
                      str(row.microbatches), row.kind, *times, *ratios)  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the plans and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--words", nargs="+", help=f"only these plans, such as {CHOSEN}")
    parser.add_argument("--fresh", action="store_true", help="also judge programs whose results are stored")
    parser.add_argument("--show", action="store_true", help="print the stored rows only")
    given = parser.parse_args(arguments)
    if not given.show and (missing := missing_compiler("tpu")):
        print(missing, file=sys.stderr)
        return 1
    stored = json.loads(PATH.read_text()) if PATH.exists() else []
    rows = {(row.case, row.words): row for row in (Row(**each) for each in stored)}
    for name in [] if given.show else given.cases or list(CASES):
        for words in (CHOSEN, *CASES[name].plans):
            if given.words is None or words in given.words:
                row = row_of(name, words, None if given.fresh else rows.get((name, words)))
                rows[name, words] = row
                times = ", ".join(scaled_text(time, 1e3) for time in (row.predicted, row.cycles, row.roofline))
                print(f"{name}, {words}: {row.plan}, {row.kind}, ms predicted, cycles, roofline: {times}", flush=True)
                PATH.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
    Console(width=180).print(table(list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
