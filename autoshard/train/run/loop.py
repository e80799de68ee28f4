"""Train from a config to the last checkpoint of the run."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, SaveEvery
from autoshard.train.config import run_directory
from autoshard.train.config.profile_words import read_profile
from autoshard.train.config.stored_config import checkpoint_config, to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.prefetch import Prefetcher, place_batch
from autoshard.train.data.text_data import Source
from autoshard.train.profile.capture import Profiler
from autoshard.train.program.build import fit_vocab, loss_item, loss_of, make_program_of, make_source, train_step_of
from autoshard.train.program.evaluation import Evaluation, evaluate
from autoshard.train.program.offloading import with_offload
from autoshard.train.program.planned_step import (
    PlacedEvalStep,
    PlacedStep,
    place_eval_step,
    place_step,
    search_variants,
)
from autoshard.train.program.pretrained import first_state, keep_copied, kept_files, open_weights
from autoshard.train.program.saved_state import restore_state
from autoshard.train.run import distributed
from autoshard.train.run.announcements import conclude, report_start
from autoshard.train.run.attempts import Attempt, check_first_start
from autoshard.train.run.cloud.maintenance import MaintenanceNotices, find_notices
from autoshard.train.run.device_memory import fullest_device
from autoshard.train.run.goodput import goodput_of, goodput_text
from autoshard.train.run.incidents.batch_order import BatchOrder
from autoshard.train.run.incidents.watch import RollbackRequested, Watch, freed_on_rollback
from autoshard.train.run.interrupt import Interrupts, StopAgreement
from autoshard.train.run.metric_writers import check_writers
from autoshard.train.run.metrics import Reporter
from autoshard.train.run.resumption import (
    check_resumable,
    check_same_run,
    place_again,
    saved_progress,
    stored_config,
    with_searched_variant,
)
from autoshard.train.run.saving import Saver, retention_policy
from autoshard.train.run.throughput import Clock, peak_seconds_per_step, tokens_per_step
from autoshard.train.run.watchdog import Watchdog
from autoshard.train.step.guard import SQUARES, VERDICT
from autoshard.train.step.train_state import Program, TrainState
from autoshard.train.step.train_step import eval_params, make_eval_step


@shown
@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run_dir: Folder of the run.
        step: Steps done.
        evaluation: The last evaluation; None if the run was interrupted.
        interrupted_by: Name of the signal that stopped the run; None if it finished.
    """

    run_dir: Path
    step: int
    evaluation: Evaluation | None
    interrupted_by: str | None


class Trainer:
    """A training run; `run()` trains to the end."""

    def __init__(self, config: TrainConfig) -> None:
        """Read the data, plan the steps and claim the run's folder.

        Raises:
            AutoshardError: The config, the data or the folder cannot be used.
        """
        stored = stored_config(config) if config.resume else None
        if stored is not None:
            config = with_searched_variant(config, stored)
        config = with_offload(config)
        self._attempt = Attempt(limit := config.max_failures if config.resume_if_started else 0)
        self._goodput = self._attempt.goodput
        with self._goodput.spent_on("data"):
            self.source: Source = make_source(config)
        self.config = config = fit_vocab(config, self.source.vocab_size)
        check_writers(config.metrics)
        self._check_run_dir()
        if stored is not None:
            check_same_run(config, stored)
            self._attempt.check(*saved_progress(config))
        else:
            check_first_start(limit)
        searched = None
        if config.searches_variants and not config.resume:
            with self._goodput.spent_on("plan"):
                self.config, searched = search_variants(config)
            if self.config.eval_batch_size != config.eval_batch_size:
                self.source = make_source(self.config)
            config = self.config
        self.program: Program = make_program_of(config)
        place = partial(place_step, train_step_of(config, self.program), self.program)
        self.placed: PlacedStep
        self._planned_anew: str | None = None
        with self._goodput.spent_on("plan"):
            if stored is None:
                self.placed = place(config, searched)
            else:
                self.placed, self._planned_anew = place_again(place, config, stored)
        self._eval_step: PlacedEvalStep | None = None
        self._compiled = False
        self._watchdog = Watchdog(config.deadline_seconds)
        self.run_dir = self._claim_run_dir()

    def run(self) -> Result:
        """Train to the last step, or until a signal requests a stop."""
        with self._attempt.recorded():
            return self._run()

    def _run(self) -> Result:
        checkpoints = Checkpointer(self.run_dir / run_directory.CHECKPOINTS, keep=retention_policy(self.config))
        saver = self._saver(checkpoints)
        with contextlib.closing(checkpoints), contextlib.ExitStack() as stack:
            checkpoints.claim()  # before anything in the folder changes, because another run may be training in it
            interrupts = stack.enter_context(Interrupts())
            stack.enter_context(MaintenanceNotices(interrupts.notice, find_notices()))
            self._attempt.begin(self.run_dir, checkpoints.latest() or 0)
            state = self._first_state(checkpoints)
            start = int(state.step)
            options = {"start": start, "enabled": distributed.is_main(), "per": loss_item(self.config)}
            options |= {"writers": self.config.metrics, "settings": to_dict(self.config)}
            reporter = Reporter(self.run_dir, steps=self.config.steps, **options)
            stack.callback(reporter.close)
            report_start(
                reporter, self.config, self.placed, self.run_dir, start, checkpoints.restored, self._planned_anew
            )
            if distributed.is_main():
                self._write_config(self.run_dir)  # a resumed run's config changes only after its state was restored
                run_directory.write_plan(self.run_dir, self.placed.plan, start)
            self._watchdog = stack.enter_context(Watchdog(self.config.deadline_seconds))
            profiler = stack.enter_context(self._profiler(start, reporter))
            step, state, stopped = self._steps(state, start, saver, reporter, interrupts, profiler)
            # A signal after the last step is ignored: the other processes evaluate and sample, and need this one.
            interrupted_by = interrupts.received if stopped else None
            evaluation = None
            if not stopped:
                evaluation = self._evaluate(state, step, reporter, batches=0)
            with self._watchdog.paused():
                if checkpoints.latest() != step:
                    saver.save(step, state, evaluation, block=True)
                with self._goodput.spent_on("profile"):
                    profiler.finish()  # after the save, because a signal may leave little time
            spent = self._attempt.spent()
            causes = {f"seconds_{cause}": seconds for cause, seconds in spent.items()}
            reporter.write(step, {"goodput": goodput_of(spent), **causes})
            reporter.close()
            conclude(reporter, self.config, self.program, self.run_dir, state, step, interrupted_by)
            reporter.print(goodput_text(spent, self._attempt.number))
            self._attempt.reason = interrupted_by or "finished"
        return Result(self.run_dir, step, evaluation, interrupted_by)

    def save_first_state(self) -> Path:
        """Save the state before the first step as step 0, without training, and return the run's folder."""
        checkpoints = Checkpointer(self.run_dir / run_directory.CHECKPOINTS, keep=None)
        with contextlib.closing(checkpoints):
            checkpoints.claim()
            state = self._first_state(checkpoints)
            self._saver(checkpoints).save(0, state, None, block=True)
            if distributed.is_main():
                run_directory.write_plan(self.run_dir, self.placed.plan, 0)
        return self.run_dir

    def _saver(self, checkpoints: Checkpointer) -> Saver:
        return Saver(
            self.config, self.program, self.placed, self._data_digest, self.run_dir, checkpoints, self._attempt
        )

    def _check_run_dir(self) -> None:
        """Refuse a folder that is taken or cannot be written to, and damaged weights. Nothing is written before."""
        run_dir, config = self.config.run_dir, self.config
        if run_dir is not None and not config.resume:
            run_directory.check_free(run_dir)
        if config.pretrained.folder is not None and not config.resume:
            open_weights(config)
        run_directory.check_writable(run_dir or run_directory.RUNS)

    def _claim_run_dir(self) -> Path:
        run_dir = self.config.run_dir or run_directory.new_run_dir(
            self.config.preset, distributed.value_of_main_process(int(time.time()))
        )
        # Waits for all processes, so that each has checked the folder before the main process writes to it.
        distributed.check_same("the data", self._data_digest or "")
        if distributed.is_main() and not self.config.resume:
            if (folder := self.config.pretrained.folder) is not None:
                run_directory.keep_pretrained(run_dir, kept_files(folder), partial(keep_copied, self.config))
            self._write_config(run_dir)
        return run_dir

    def _write_config(self, run_dir: Path) -> None:
        once = {"resume": False, "resume_if_started": False, "allow_other_data": False, "profile": None}
        kept = replace(self.config, run_dir=run_dir, **once)
        run_directory.write_config(run_dir, to_dict(kept))

    @property
    def _data_digest(self) -> str | None:
        return getattr(self.source, "digest", None)

    def _first_state(self, checkpoints: Checkpointer) -> TrainState:
        if not self.config.resume or checkpoints.latest() is None:
            return self._new_state()
        state = self._restored(checkpoints)
        assert checkpoints.restored is not None
        step = self._attempt.step = checkpoints.restored.step
        check_resumable(self.config, self._data_digest, step, checkpoints.config(step))
        return state

    def _new_state(self) -> TrainState:
        if self.config.pretrained.folder is not None:
            return first_state(self.config, self.program, self.placed.state_shapes)
        return self.placed.step.init(self.program.create_state, jax.random.key(self.config.seed))

    def _restored(self, checkpoints: Checkpointer) -> TrainState:
        with self._goodput.spent_on("restore"):
            return restore_state(checkpoints, self.placed.state_shapes, self.program, checkpoint_config(self.config))

    def _batches(self, start: int, order: BatchOrder) -> Prefetcher:
        def make(step: int) -> tuple[int, dict[str, jax.Array]]:
            placed, index = self.placed, order.batch_of(step)
            return step, place_batch(
                lambda rows: self.source.batch(index, rows), placed.batch_shapes, placed.batch_shardings
            )

        return Prefetcher(range(start, self.config.steps), make, self.config.prefetch)

    def _steps(
        self,
        state: TrainState,
        start: int,
        saver: Saver,
        reporter: Reporter,
        interrupts: Interrupts,
        profiler: Profiler,
    ) -> tuple[int, TrainState, bool]:
        """Train until the last step or a signal; return the steps done, the state, and whether it was a signal."""
        watch = Watch(self.config, self.placed.state_shapes.params, BatchOrder(self.run_dir), reporter)
        peak_seconds = partial(peak_seconds_per_step, self.config, self.program, self.placed)
        self._clock = Clock(tokens_per_step(self.placed), peak_seconds)
        reporter.start()
        self._goodput.begin_steps()
        # A signal that came while the state was made or restored does not wait for the first step to compile.
        if start < self.config.steps and StopAgreement(interrupts, start, at_least_every=1).after(start, last=True):
            return start, state, True
        while True:
            try:
                return self._steps_from(state, start, saver, reporter, interrupts, watch, profiler)
            except RollbackRequested as requested:
                with self._watchdog.paused():
                    state, start = self._rolled_back(saver.checkpoints, watch, requested.bad_step, reporter)
                    with self._goodput.spent_on("profile"):
                        profiler.rewind(start)
                self._clock.rewind(start)

    def _rolled_back(
        self, checkpoints: Checkpointer, watch: Watch, bad_step: int, reporter: Reporter
    ) -> tuple[TrainState, int]:
        """Restore the newest checkpoint, or make the first state again, and leave out the bad batch."""
        # Bad states are never saved, so the newest checkpoint is good.
        resumes = checkpoints.latest() is not None
        state = self._restored(checkpoints) if resumes else self._new_state()
        step = int(state.step)
        watch.forget()
        self._attempt.rolled_back(step)
        made = watch.order.roll_back(bad_step, step)
        reporter.rewind(step)
        left_out = f"batch {made.first}" if made.first == made.last else f"batches {made.first} to {made.last}"
        reporter.print(f"rolled back to step {step}; {left_out} of the data are left out")
        return state, step

    def _steps_from(
        self,
        state: TrainState,
        start: int,
        saver: Saver,
        reporter: Reporter,
        interrupts: Interrupts,
        watch: Watch,
        profiler: Profiler,
    ) -> tuple[int, TrainState, bool]:
        config, clock, done, last_loss, stopped = self.config, self._clock, start, None, False
        every = SaveEvery(
            config.checkpoint_every,
            config.checkpoint_minutes,
            agreed=lambda due: bool(distributed.value_of_main_process(due)),
            asked_every=config.log_every if jax.process_count() > 1 else 1,
        )
        stop_agreement = StopAgreement(interrupts, start, at_least_every=config.log_every)
        with self._batches(start, watch.order) as batches, freed_on_rollback() as held:
            for step, batch in self._goodput.waiting(batches, "data"):
                if profiler.begins(step + 1):
                    with clock.paused(), self._goodput.spent_on("profile"):
                        profiler.begin()
                compiles = step == start and not self._compiled
                with self._goodput.spent_on("compile") if compiles else contextlib.nullcontext():
                    with profiler.step(step + 1):
                        state, metrics = self.placed.step(state, batch)
                self._compiled, held.state = True, state
                # At most one step is in flight while the next is dispatched, so that a signal takes effect soon.
                jax.block_until_ready(last_loss)
                self._watchdog.beat(done)
                self._attempt.step = done = step + 1
                last_loss = metrics["loss"]
                watch.add(done, batch, metrics)
                logs = done % config.log_every == 0 or done in (start + 1, config.steps)
                evaluates = config.eval_every and done % config.eval_every == 0 and done < config.steps
                saves = done < config.steps and every.due(done)
                # The verdict of a step is read before its state is used.
                watch.settle(state.params, but=0 if logs or evaluates or saves else 1)
                profiler.ran(last_loss)
                if profiler.ends(done):
                    with clock.paused(), self._watchdog.paused(), self._goodput.spent_on("profile"):
                        profiler.end()
                reporter.advance(done)
                if logs:
                    self._log(done, metrics, clock, reporter)
                if compiles:  # not earlier, because it would take processor time from the first step's compilation
                    saver.checkpoints.prepare(state)
                evaluation = None
                if evaluates:
                    with clock.paused():
                        evaluation = self._evaluate(state, done, reporter, config.eval_batches)
                if saves:
                    with clock.paused(), self._watchdog.paused():
                        saver.save(done, state, evaluation)
                    every.saved()
                stopped = stop_agreement.after(done, last=done >= config.steps)
                if stopped:
                    watch.settle(state.params)
                    break
        return done, state, stopped

    def _profiler(self, start: int, reporter: Reporter) -> Profiler:
        window = read_profile(self.config.profile, self.config.steps)
        return Profiler(window, self.run_dir, self.placed, start, reporter.print, enabled=distributed.is_main())

    def _log(self, step: int, metrics: dict[str, jax.Array], clock: Clock, reporter: Reporter) -> None:
        shown = {name: value for name, value in metrics.items() if name not in (VERDICT, SQUARES, "weight")}
        values = {name: float(value) for name, value in jax.device_get(shown).items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}  # others are incidents
        memory = fullest_device(self.placed.plan, step)
        reporter.record(step, finite | clock.rates(step, self.config.steps) | memory)

    def _evaluate(self, state: TrainState, step: int, reporter: Reporter, batches: int) -> Evaluation:
        parts = (eval_params(state, self.config.use_ema), state.frozen, state.variables)
        if self._eval_step is None:
            self._eval_step = place_eval_step(make_eval_step(self.program, loss_of(self.config)), parts, self.config)
        with self._goodput.spent_on("evaluation"):
            evaluation = evaluate(
                self._eval_step,
                parts,
                self.source,
                batches=batches,
                prefetch=self.config.prefetch,
                after_batch=self._watchdog.beat,
            )
        reporter.record(step, evaluation.metrics())
        return evaluation


def train(config: TrainConfig) -> Result:
    """Train as a config describes.

    Raises:
        AutoshardError: The config, the data or the run's folder cannot be used.
    """
    distributed.initialize()
    return Trainer(config).run()
