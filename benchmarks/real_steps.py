"""Compare the planner's plan with the best plan of an expert's grid, by real steps on eight virtual CPU devices.

    python benchmarks/real_steps.py [CASE ...]

The planner plans each model's step for the attached devices, twice: by the estimate alone, and with `measure=24`, which
runs the 24 best by the estimate and takes the fastest. The expert's side is every style of `expert_plans.styles` on
eight devices, on the same step function. All styles run for a few steps, and the fastest ones for more, so the best
style is known by measurement. Then each of the planner's plans and the best style take turns for `ROUNDS` steps each,
from separate states. Each pair of steps gives one ratio, and the median ratio should be at most 1.03.

Memory is not limited, so neither side recomputes or splits the batch: both have remat `none` and one microbatch. The
comparison stops if the two losses of the first step differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import common  # sets up the devices first
import jax
import numpy as np
from expert_plans import AXES, Case, Style, styles
from expert_step import expert_step
from jax.sharding import Mesh, NamedSharding

from autoshard import auto_shard
from autoshard.models.workloads import Workload, workload
from autoshard.train.program.build import workload_step
from autoshard.train.program.step_timing import SteppedState, paired_times
from autoshard.train.step.optimizer import OptimizerConfig, make_optimizer
from autoshard.train.step.train_state import make_program

# All chosen, not measured.
DEVICES = 8
ROUNDS = 100  # steps of each side of a pair
TARGET = 1.03  # the planner's step time over that of the best style
MEASURED = 24  # plans that `measure=` runs
SCREEN, FINALISTS, FINAL = 3, 4, 15  # steps of each style, number of styles in the final, their steps in it

_TEXT: Mapping[str, Any] = {"width": 128, "ffn": 512, "layers": 4, "context": 64, "vocab": 1024, "remat": "none"}
_SMALL: Mapping[str, Workload] = {
    "gpt": workload("gpt-tiny").with_(**_TEXT),
    "llama": workload("llama-tiny").with_(**_TEXT | {"block_size": 32}),
    "moe": workload("moe-tiny").with_(**_TEXT | {"expert_ffn": 256}),
    "wide-resnet": workload("wide-resnet-tiny").with_(batch_size=32, channels=16, remat="none"),
}


def batch_of(work: Workload) -> dict[str, np.ndarray]:
    """Make a random batch."""
    rng, found = np.random.default_rng(0), {}
    for name, aval in work.batch().items():
        whole = np.issubdtype(aval.dtype, np.integer)
        values = rng.integers(0, 8, aval.shape) if whole else rng.uniform(0.5, 1.0, aval.shape)
        found[name] = values.astype(aval.dtype)
    return found


def planned(work: Workload, measure: int = 0) -> tuple[SteppedState, str]:
    """Return the step under the planner's plan, and the plan's text. With `measure`, the fastest of that many plans."""
    train_step, state, batch = workload_step(work)
    step = auto_shard(train_step, donate_argnums=0, measure=measure)
    words = step.plan(state, batch).chosen
    (_, batch_in), _ = step.lower(state, batch).compile().input_shardings
    return SteppedState(
        step, step.init(create(work), jax.random.key(0)), jax.device_put(batch_of(work), batch_in)
    ), words


def by_hand(work: Workload, style: Style, microbatches: int = 1) -> SteppedState:
    """Return the step under an expert's style."""
    expert = expert_step(work, style, microbatches)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(style.sizes), AXES)
    arguments, results = (
        [NamedSharding(mesh, sharding.spec) for sharding in shardings]
        for shardings in (expert.in_shardings, expert.out_shardings)
    )
    count = len(expert.donated)
    run = jax.jit(expert.fn, in_shardings=arguments, out_shardings=results, donate_argnums=expert.donated)
    train_step, *shapes = workload_step(work)
    tree = jax.tree.structure(jax.eval_shape(train_step, *shapes)[1])

    def step(state: Sequence[jax.Array], batch: Sequence[jax.Array]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        values = run(*state, *batch)
        return values[:count], jax.tree.unflatten(tree, values[count:])

    leaves = jax.tree.leaves(create(work)(jax.random.key(0)))
    batch = jax.device_put(jax.tree.leaves(batch_of(work)), arguments[count:])
    return SteppedState(step, jax.device_put(leaves, arguments[:count]), batch)


def create(work: Workload) -> Callable[[jax.Array], Any]:
    """Return a function that makes the state from a key."""
    return make_program(work.build, make_optimizer(OptimizerConfig(), 1000)).create_state


def fastest(loops: Mapping[str, SteppedState], rounds: int) -> list[str]:
    """Return the names in the order of their median times, all measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            times[name].append(loop.once())
    return sorted(times, key=lambda name: float(np.median(times[name])))


def rows_of(name: str) -> list[common.Row]:
    """Return the figures of one model."""
    work = _SMALL[name]
    ours, words = planned(work)
    loss = float(ours.metrics()["loss"])
    hands: dict[str, tuple[float, SteppedState]] = {}  # the fastest so far, because one process cannot hold all
    tried = 0
    for style in styles(Case(name, work, f"cpu:{DEVICES}")):
        loop = by_hand(work, style)
        other = float(loop.metrics()["loss"])
        if not math.isclose(loss, other, rel_tol=1e-4):
            raise SystemExit(f"{name}: the loss is {loss} under {words}, and {other} by hand under {style.name}")
        seconds = float(np.median([loop.once() for _ in range(SCREEN)]))
        tried += 1
        hands[style.name] = seconds, loop
        print(f"  {name}: {style.name}: {1e3 * seconds:.0f} ms", flush=True)
        while len(hands) > FINALISTS:
            del hands[max(hands, key=lambda each: hands[each][0])]
        del loop
        gc.collect()
    best = fastest({each: loop for each, (_, loop) in hands.items()}, FINAL)[0]
    theirs = hands[best][1]
    hands.clear()
    gc.collect()
    rows = []
    for how, measure in (("by the estimate", 0), (f"measure={MEASURED}", MEASURED)):
        if measure:
            ours, words = planned(work, measure)
        ours_s, theirs_s = paired_times(ours.once, theirs.once, rounds=ROUNDS)
        note = f"{words} / {best}, of {tried}; {datetime.now(UTC):%Y-%m-%d}"
        rows += [
            common.measured(f"{name}: the planner's plan, {how}", 1e3 * ours_s, "ms"),
            common.measured(f"{name}: the best by hand", 1e3 * theirs_s, "ms"),
            common.measured(f"{name}: ratio, paired, {how}", ours_s / theirs_s, "", TARGET, note),
        ]
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*_SMALL, []], help="models; default: all")
    names = parser.parse_args().cases or list(_SMALL)
    if len(names) > 1:  # each in a new process: the programs of all do not fit in one
        for name in names:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    common.report("real_steps", [*stored_rows(names), *rows_of(names[0])], rounds=ROUNDS)


def stored_rows(names: Sequence[str]) -> list[common.Row]:
    """Return the stored rows of other models. Their notes have the dates of their runs."""
    path = common.RESULTS / "real_steps.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    fields = common.Row.__dataclass_fields__
    return [
        common.Row(**{name: row[name] for name in fields}) for row in rows if row["name"].partition(":")[0] not in names
    ]


if __name__ == "__main__":
    main()
