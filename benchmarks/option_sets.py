"""What each set of XLA options does to one small program, by chip.

    python benchmarks/option_sets.py                      # all chips whose compiler is installed
    python benchmarks/option_sets.py v6e:2x4 --each       # one machine, and each option alone
    python benchmarks/option_sets.py v6e:2x4 --program stack --sets gather-fusion scoped-vmem
    python benchmarks/option_sets.py --show               # the stored rows, without compiling

The program is a step of gradient descent under `fsdp`: of a scanned GPT (4 layers of width 1024), or with
`--program stack`, which compiles in a fraction of the time, of 4 scanned layers of two products each. The layers of
`--program products` are two products of the size of Llama-3 8B's MLP, with 16384 rows on each of 8 devices. For the
host set, the residual stream waits in host memory.

It is compiled under the chip's default options, without each default set, and with each other set of
`autoshard.sharding.machines.options` whose condition holds, sets that are used only on request included. A row says
whether the compiler refuses options, whether the compiled program is another one, and the step time by the audit over
that of the default options. Nothing runs. Rows are stored in `results/option_sets.json` one by one, compiled programs
in the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS, Console, Table
from flax import nnx
from jax import checkpoint_policies
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models import GPT, GPTConfig, cross_entropy
from autoshard.sharding.audit import Audit, missing_compiler, verify_under
from autoshard.sharding.machines.options import (
    Options,
    OptionSet,
    ProgramFacts,
    default_options,
    named_set,
    set_names,
    with_needed,
    with_set,
)
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.planner.bound_plan import bound_or_error

PATH = RESULTS / "option_sets.json"
TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8")
GPT_SIZES: Mapping[str, Any] = {
    "layers": 4, "width": 1024, "heads": 8, "vocab": 2048, "context": 512, "attention": "plain",
}  # fmt: skip
BATCH = 64
STACK_SIZES: Mapping[str, int] = {"layers": 4, "width": 512, "hidden": 2048, "rows": 32768}
PRODUCT_SIZES: Mapping[str, int] = {"layers": 2, "width": 4096, "hidden": 14336, "rows": 131072}
HOST_SET = "host-transfers"
DEFAULT = "default"


@dataclass(frozen=True)
class Row:
    """A program compiled under one set, or under one option of it. Times are microseconds of a step, by the audit.

    Attributes:
        target: the machine.
        program: `gpt`, `stack` or `products`.
        name: the set; `default` for the default options; `set: option` for one option of a set.
        offload: whether the residual stream waits in host memory.
        kind: the compiler's result: `ok`, `error`, ...
        us: the step time; None if there is none.
        base_us: the same under the default options.
        compute_us, exposed_us, host_us: the parts of `us`: compute, exposed collectives, exposed host transfers.
        changes: whether the compiled program differs from that under the default options.
        refused: the options that the compiler does not know.
        message: the compiler's message if it failed.
        requested: why the set is used only on request; empty for the others.
        versions: the compiler's versions.
    """

    target: str
    program: str
    name: str
    offload: bool
    kind: str
    us: float | None
    base_us: float | None
    compute_us: float | None
    exposed_us: float | None
    host_us: float | None
    changes: bool
    refused: Sequence[str]
    message: str
    requested: str
    versions: Mapping[str, str]

    @property
    def outcome(self) -> str:
        """`0.93`, `changes nothing`, or why there is no time."""
        if self.kind != "ok" or self.us is None or self.base_us is None:
            return f"{self.kind}: {self.message[:60]}"
        return f"{self.us / self.base_us:.3f}" if self.changes or self.name == DEFAULT else "changes nothing"


def gpt_step(offload: bool) -> tuple[Any, ...]:
    """A step of gradient descent of a GPT, and the shapes of the parameters and of the tokens."""
    config = GPTConfig(**GPT_SIZES, remat="host:residual" if offload else "full")
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        total, count = cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])
        return total / count

    return _descent(loss_of), nnx.to_pure_dict(state), jax.ShapeDtypeStruct((BATCH, config.context + 1), jnp.int32)


def stack_step(sizes: Mapping[str, int], offload: bool) -> tuple[Any, ...]:
    """A step of gradient descent of layers of two products, and the shapes of the parameters and of the input."""
    layers, width, hidden, rows = sizes.values()
    policy = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=("residual",), offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def layer(h: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "residual")
        up, down = w["up"].astype(h.dtype), w["down"].astype(h.dtype)
        return h + jnp.tanh(h @ up) @ down, None

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, policy=policy if offload else None)
        return (jax.lax.scan(body, x, params)[0].astype(jnp.float32) ** 2).mean()

    shapes = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return _descent(loss_of), params, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)


def _descent(loss_of: Any) -> Any:
    def step(params: Any, data: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss_of)(params, data))

    return step


PROGRAMS: Mapping[str, Any] = {
    "gpt": gpt_step,
    "stack": partial(stack_step, STACK_SIZES),
    "products": partial(stack_step, PRODUCT_SIZES),
}


class Case:
    """A planned program for one machine, and its audit under the default options."""

    def __init__(self, target: str, program: str, offload: bool):
        """Plan the program. Nothing is compiled before `base` is read."""
        self.target, self.program, self.offload = target, program, offload
        devices = find_target(target).devices
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoshardWarning)
            made = plan(*PROGRAMS[program](offload), target=target, plan=f"fsdp:{devices}", donate_argnums=0)
        self.executable = bound_or_error(made.bound).executable
        facts = program_facts(made)
        assert facts is not None, f"{target} has no option sets"
        self.facts: ProgramFacts = facts
        self._base: Audit | None = None

    @property
    def base(self) -> Audit:
        """The audit under the default options."""
        if self._base is None:
            self._base = verify_under(self.executable, default_options(self.facts.chip))
        return self._base

    def row(self, name: str, options: Options, requested: str = "") -> Row:
        """Compile the program under these options."""
        base = self.base
        audit = base if name == DEFAULT else verify_under(self.executable, options)
        return Row(
            self.target, self.program, name, self.offload, audit.kind, audit.step_time_us, base.step_time_us,
            audit.compute_us, audit.exposed_us, audit.host_exposed_us, audit.program != base.program, audit.dropped,
            audit.message, requested, dict(audit.versions),
        )  # fmt: skip


def rows_of(target: str, program: str, sets: Sequence[str] = (), *, each: bool) -> Iterator[Row]:
    """Compile the program of a machine under its sets (all, or those named), and each option alone if asked to."""
    cases = {offload: Case(target, program, offload) for offload in (False, True)}
    chip = cases[False].facts.chip
    yield cases[False].row(DEFAULT, default_options(chip))
    for name in sets or set_names(chip):
        chosen = named_set(name, chip)
        case = cases[name == HOST_SET]
        if not chosen.applies(case.facts):
            continue
        for label, options in _variations(case, chosen, each):
            yield case.row(label, options, chosen.numerics.get(chip, ""))


def _variations(case: Case, chosen: OptionSet, each: bool) -> Iterator[tuple[str, Options]]:
    """The default options with a set, or without it if it is one of them; then with single options of it."""
    chip, base = case.facts.chip, default_options(case.facts.chip)
    own = with_set({}, chosen, case.facts)
    if chip in chosen.default:
        yield f"without {chosen.name}", {name: value for name, value in base.items() if name not in own}
        return
    merged = with_set(base, chosen, case.facts)
    yield chosen.name, merged
    if each and len(own) > 1:
        for option in own:
            rest = {name: value for name, value in merged.items() if name not in own or name == option}
            yield f"{chosen.name}: {option}", with_needed(rest)[0]


def stored(path: Path = PATH) -> list[Row]:
    """Read the stored rows."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def save(rows: Sequence[Row], path: Path = PATH) -> None:
    """Write the rows."""
    head = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpt": dict(GPT_SIZES) | {"batch": BATCH},
        "stack": dict(STACK_SIZES),
        "products": dict(PRODUCT_SIZES),
    }
    path.write_text(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def merged(rows: Sequence[Row], new: Row) -> list[Row]:
    """Replace the row of the same machine and set, or append it."""
    kept = [row for row in rows if _key(row) != _key(new)]
    return sorted([*kept, new], key=lambda row: TARGETS.index(row.target) if row.target in TARGETS else len(TARGETS))


def _key(row: Row) -> tuple[str, str, str]:
    return row.target, row.program, row.name


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(
        "target",
        "program",
        "set",
        "step over default",
        "step ms",
        "compute",
        "exposed",
        "host",
        "refused",
        "on request",
    )
    for row in rows:
        times = [f"{us / 1e3:.2f}" if us is not None else "-"
                 for us in (row.us, row.compute_us, row.exposed_us, row.host_us)]  # fmt: skip
        table.add_row(row.target, row.program, row.name, row.outcome, *times, ", ".join(row.refused), row.requested)
    Console(width=180).print(table)


def main(arguments: Sequence[str]) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"machines; default: {' '.join(TARGETS)}")
    parser.add_argument("--each", action="store_true", help="also compile with each option of a set alone")
    parser.add_argument("--program", choices=PROGRAMS, default="gpt", help="the program; default: gpt")
    parser.add_argument("--sets", nargs="*", default=(), help="names of sets; default: all of the chip")
    parser.add_argument("--show", action="store_true", help="print the stored rows and compile nothing")
    given = parser.parse_args(arguments)
    rows = stored()
    for target in [] if given.show else given.targets or TARGETS:
        if missing := missing_compiler(find_target(target).platform):
            print(f"{target}: {missing}", file=sys.stderr)
            continue
        for row in rows_of(target, given.program, given.sets, each=given.each):
            rows = merged(rows, row)
            save(rows)
            print(f"{row.target} {row.program} {row.name}: {row.outcome}", flush=True)
    show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
