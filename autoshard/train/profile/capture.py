"""Record a trace of some steps of a run, and the names of what is in it.

The trace is in RUN/profile/plugins/profile/SESSION, where TensorBoard and XProf look for it. `collectives.json` beside
`plugins` has the plan's name of each collective of the compiled step. The trace has lines with these names, too. Only
the main process records, its own devices.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from autoshard._shown import shown
from autoshard._units import variant_text
from autoshard.sharding.audit.named_collectives import name_collectives
from autoshard.train.config.profile_words import Window
from autoshard.train.profile.constants import FOLDER, FORMAT, NAMES, STEP
from autoshard.train.profile.named_lines import add_named_lines
from autoshard.train.program.planned_step import PlacedStep


@shown
class Profiler:
    """Records the steps of a window; without one, or in processes other than the main one, it does nothing.

    As a context manager it ends a trace that an error or a signal interrupts.
    """

    def __init__(
        self,
        window: Window | None,
        run_dir: Path,
        placed: PlacedStep,
        start: int,
        say: Callable[[str], None],
        enabled: bool = True,
    ) -> None:
        """Record nothing yet.

        Args:
            window: The steps to record.
            run_dir: Folder of the run.
            placed: The planned step.
            start: Steps done before this attempt. Steps of the window up to it are left out.
            say: Prints a line.
            enabled: Whether this process records.
        """
        self._folder, self._placed, self._start, self._say = run_dir / FOLDER, placed, start, say
        self._window = window if enabled else None
        self._recorded: list[int] | None = None
        self._last: Any = None
        if self._window is not None and self._window.last <= start:
            say(f"no trace is recorded: this attempt begins at step {start + 1}, after {self._window} of --profile")
            self._window = None
        self._first = max(self._window.first, start + 1) if self._window is not None else None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        if self._recorded is None:
            return
        self._recorded = None
        with contextlib.suppress(Exception):  # the error of the run is raised, not one of the trace that it cut short
            jax.profiler.stop_trace()
        self._say(f"the trace in {self._folder} ends with an error of the run, so its collectives have no names")

    def begins(self, step: int) -> bool:
        """Whether the trace begins with this step."""
        return step == self._first

    def ends(self, step: int) -> bool:
        """Whether the trace ends with this step."""
        return self._recorded is not None and self._window is not None and step == self._window.last

    def begin(self) -> None:
        """Begin the trace, when the steps before are computed."""
        jax.block_until_ready(self._last)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it records every Python call, which slows the host and fills the trace
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._recorded, self._first = [], None  # once

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Mark a step in the trace, if there is one."""
        if self._recorded is None:
            yield
            return
        self._recorded.append(step)
        with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
            yield

    def rewind(self, step: int) -> None:
        """Drop what is recorded so far, because the run goes back to a step; the window is recorded from there on."""
        if self._recorded is None or self._window is None:
            return
        self._recorded, self._first = None, max(self._window.first, step + 1)
        jax.profiler.stop_trace()
        shutil.rmtree(self._session())
        self._say(
            f"the run was rolled back in {self._window} of --profile: the trace begins again at step {self._first}"
        )

    def _session(self) -> Path:
        """Return the folder of the newest trace."""
        return max((self._folder / "plugins" / "profile").iterdir(), key=lambda path: path.stat().st_mtime)

    def ran(self, result: Any) -> None:
        """Keep a result of the newest step, by which the trace knows that it has ended."""
        self._last = result

    def finish(self) -> None:
        """End a trace whose run ended within the window, as after a signal."""
        if self._recorded is not None:
            self.end()

    def end(self) -> None:
        """End the trace when its steps are computed, and write the names of what is in it."""
        jax.block_until_ready(self._last)
        steps, self._recorded = self._recorded or [], None
        try:
            jax.profiler.stop_trace()
            self._write_names(steps)
        except Exception as error:  # such as a full disk; a trace must not cost the run its steps
            self._say(f"the trace in {self._folder} has no names: {type(error).__name__}: {error}")

    def _write_names(self, steps: list[int]) -> None:
        session = self._session()
        names = self._names() | {"session": session.name, "steps": steps, "compiled": self._start + 1 in steps}
        file = self._folder / NAMES
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(names, indent=1) + "\n")
        temporary.replace(file)
        add_named_lines(session, names)
        window = Window(steps[0], steps[-1]) if steps else "no step"
        run = self._folder.parent
        self._say(f"trace of {window} in {self._folder}: `autoshard profile {run}` compares it with the plan")

    def _names(self) -> dict[str, Any]:
        """What `collectives.json` says of the compiled step."""
        plan = self._placed.plan
        entry = self._placed.step.entry((self._placed.state_shapes, self._placed.batch_shapes), {})
        named = name_collectives(plan, entry.compiled().as_text())
        modules: dict[str, list[str]] = {}
        for instruction, module in named.modules.items():
            modules.setdefault(module, []).append(instruction)
        estimate = plan.estimate
        return {
            "format": FORMAT,
            "module": named.module,
            "strategy": f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen,
            "target": plan.target,
            "planned": {
                "step_time_us": estimate.step_time_us,
                "compute_us": estimate.compute_us,
                "kinds": _planned_kinds(plan),
            },
            "compute_us": named.compute_us,
            "collectives": [asdict(each) for each in named.collectives],
            "modules": modules,
        }


def _planned_kinds(plan: Any) -> dict[str, float]:
    """The estimated microseconds of each kind of collective."""
    kinds: dict[str, float] = {}
    for (kind, *_), (us, _exposed) in zip(plan.traffic, plan.traffic_us, strict=False):
        kinds[kind] = kinds.get(kind, 0.0) + us
    return kinds
