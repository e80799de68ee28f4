"""Train from a config to the last checkpoint of the run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, Restored, RetentionPolicy, SaveEvery
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models import flops_per_token
from autoshard.train.config import run_directory
from autoshard.train.config.train_config import TrainConfig, checkpoint_config, to_dict
from autoshard.train.data.prefetch import Prefetcher, place_batch
from autoshard.train.data.text_data import Source
from autoshard.train.data.tokenizer import load_codec
from autoshard.train.inference.exported_model import write_inference
from autoshard.train.inference.text_generation import sample_text
from autoshard.train.program.build import fit_vocab, loss_item, loss_of, make_program_of, make_source, train_step_of
from autoshard.train.program.evaluation import Evaluation, evaluate
from autoshard.train.program.planned_step import (
    PlacedEvalStep,
    PlacedStep,
    place_eval_step,
    place_step,
    search_variants,
    with_offload,
)
from autoshard.train.program.pretrained import first_state, keep_copied, kept_files, open_weights
from autoshard.train.run import distributed
from autoshard.train.run.attempts import Attempt, check_first_start
from autoshard.train.run.goodput import goodput_of, goodput_text
from autoshard.train.run.interrupt import Interrupts, StopAgreement
from autoshard.train.run.loss_plot import plot_loss
from autoshard.train.run.metric_writers import check_writers
from autoshard.train.run.metrics import Reporter, peak_flops, read_metrics
from autoshard.train.run.resumption import (
    check_resumable,
    check_same_run,
    place_again,
    saved_progress,
    stored_config,
    with_searched_variant,
)
from autoshard.train.run.throughput import Clock
from autoshard.train.run.watchdog import Watchdog
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
        self._watchdog = Watchdog(config.deadline_seconds)
        self.run_dir = self._claim_run_dir()

    def run(self) -> Result:
        """Train to the last step, or until a signal requests a stop."""
        with self._attempt.recorded():
            return self._run()

    def _run(self) -> Result:
        checkpoints = Checkpointer(self.run_dir / run_directory.CHECKPOINTS, keep=retention_policy(self.config))
        with contextlib.closing(checkpoints), contextlib.ExitStack() as stack:
            checkpoints.claim()  # before anything in the folder changes, because another run may be training in it
            interrupts = stack.enter_context(Interrupts())
            self._attempt.begin(self.run_dir, checkpoints.latest() or 0)
            state = self._first_state(checkpoints)
            checkpoints.prepare(state)
            self._plan_text = self.placed.plan.to_json()  # once, because it takes longer than a save
            start = int(state.step)
            options = {"start": start, "enabled": distributed.is_main(), "per": loss_item(self.config)}
            options |= {"writers": self.config.metrics, "settings": to_dict(self.config)}
            reporter = Reporter(self.run_dir, steps=self.config.steps, **options)
            stack.callback(reporter.close)
            self._report_start(reporter, start, checkpoints.restored)
            self._watchdog = stack.enter_context(Watchdog(self.config.deadline_seconds))
            step, state, stopped = self._steps(state, start, checkpoints, reporter, interrupts)
            # A signal after the last step is ignored: the other processes evaluate and sample, and need this one.
            interrupted_by = interrupts.received if stopped else None
            evaluation = None
            if not stopped:
                evaluation = self._evaluate(state, step, reporter, batches=0)
            with self._watchdog.paused():
                if checkpoints.latest() != step:
                    self._save(checkpoints, step, state, evaluation, block=True)
            spent = self._attempt.spent()
            causes = {f"seconds_{cause}": seconds for cause, seconds in spent.items()}
            reporter.write(step, {"goodput": goodput_of(spent), **causes})
            reporter.close()
            self._conclude(state, step, reporter, interrupted_by)
            reporter.print(goodput_text(spent, self._attempt.number))
            self._attempt.reason = interrupted_by or "finished"
        return Result(self.run_dir, step, evaluation, interrupted_by)

    def save_first_state(self) -> Path:
        """Save the state before the first step as step 0, without training, and return the run's folder."""
        checkpoints = Checkpointer(self.run_dir / run_directory.CHECKPOINTS, keep=None)
        with contextlib.closing(checkpoints):
            checkpoints.claim()
            state = self._first_state(checkpoints)
            self._metrics, self._plan_text = {}, self.placed.plan.to_json()
            self._save(checkpoints, 0, state, None, block=True)
            if distributed.is_main():
                run_directory.write_plan(self.run_dir, self.placed.plan, 0)
        return self.run_dir

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
        kept = replace(self.config, run_dir=run_dir, resume=False, resume_if_started=False, allow_other_data=False)
        run_directory.write_config(run_dir, to_dict(kept))

    @property
    def _data_digest(self) -> str | None:
        return getattr(self.source, "digest", None)

    def _first_state(self, checkpoints: Checkpointer) -> TrainState:
        if not self.config.resume or checkpoints.latest() is None:
            if self.config.pretrained.folder is not None:
                return first_state(self.config, self.program, self.placed.state_shapes)
            return self.placed.step.init(self.program.create_state, jax.random.key(self.config.seed))
        with self._goodput.spent_on("restore"):
            state = checkpoints.restore(like=self.placed.state_shapes, config=checkpoint_config(self.config))
        assert checkpoints.restored is not None
        step = self._attempt.step = checkpoints.restored.step
        check_resumable(self.config, self._data_digest, step, checkpoints.config(step))
        return state

    def _report_start(self, reporter: Reporter, start: int, restored: Restored | None) -> None:
        reporter.print(str(self.placed.plan))
        if self._planned_anew is not None:
            reporter.print(self._planned_anew)
        parameters = sum(
            leaf.size for leaf in jax.tree.leaves((self.placed.state_shapes.params, self.placed.state_shapes.frozen))
        )
        origin = f"continues from step {start}" if self.config.resume else "starts"
        complete = start >= self.config.steps
        if restored is not None:
            reporter.print(f"restored {restored}")
        reporter.print(
            f"{parameters:,} parameters on {self.placed.plan.mesh.size} {jax.devices()[0].platform} devices; "
            f"the run {origin} in {self.run_dir}"
            + (f", and has all its steps already; to train further, give more --steps than {start}" if complete else "")
        )
        if distributed.is_main():
            self._write_config(self.run_dir)  # a resumed run's config changes only after its state was restored
            run_directory.write_plan(self.run_dir, self.placed.plan, start)

    def _batches(self, start: int) -> Prefetcher:
        def make(step: int) -> tuple[int, dict[str, jax.Array]]:
            placed = self.placed
            return step, place_batch(
                lambda rows: self.source.batch(step, rows), placed.batch_shapes, placed.batch_shardings
            )

        return Prefetcher(range(start, self.config.steps), make, self.config.prefetch)

    def _steps(
        self,
        state: TrainState,
        start: int,
        checkpoints: Checkpointer,
        reporter: Reporter,
        interrupts: Interrupts,
    ) -> tuple[int, TrainState, bool]:
        """Train until the last step or a signal; return the steps done, the state, and whether it was a signal."""
        config, done, last_loss, stopped = self.config, start, None, False
        self._metrics: dict[str, jax.Array] = {}  # metrics of the last step
        every = SaveEvery(
            config.checkpoint_every,
            config.checkpoint_minutes,
            agreed=lambda due: bool(distributed.value_of_main_process(due)),
            asked_every=config.log_every if jax.process_count() > 1 else 1,
        )
        clock = Clock(self._tokens_per_step(), self._peak_seconds_per_step())
        stop_agreement = StopAgreement(interrupts, start, at_least_every=config.log_every)
        reporter.start()
        self._goodput.begin_steps()
        # A signal that came while the state was made or restored does not wait for the first step to compile.
        if start < config.steps and StopAgreement(interrupts, start, at_least_every=1).after(start, last=True):
            return start, state, True
        with self._batches(start) as batches:
            for step, batch in self._goodput.waiting(batches, "data"):
                with self._goodput.spent_on("compile") if step == start else contextlib.nullcontext():
                    state, metrics = self.placed.step(state, batch)
                self._metrics = metrics
                # At most one step is in flight while the next is dispatched, so that a signal takes effect soon.
                jax.block_until_ready(last_loss)
                self._watchdog.beat(done)
                self._attempt.step = done = step + 1
                last_loss = metrics["loss"]
                reporter.advance(done)
                if done % config.log_every == 0 or done in (start + 1, config.steps):
                    self._log(done, metrics, clock, reporter)
                evaluation = None
                if config.eval_every and done % config.eval_every == 0 and done < config.steps:
                    with clock.paused():
                        evaluation = self._evaluate(state, done, reporter, config.eval_batches)
                if done < config.steps and every.due(done):
                    with clock.paused(), self._watchdog.paused():
                        self._save(checkpoints, done, state, evaluation)
                    every.saved()
                stopped = stop_agreement.after(done, last=done >= config.steps)
                if stopped:
                    break
        return done, state, stopped

    def _save(
        self,
        checkpoints: Checkpointer,
        step: int,
        state: TrainState,
        evaluation: Evaluation | None,
        block: bool = False,
    ) -> None:
        self._check_finite(step, jax.device_get(self._metrics))
        with self._goodput.spent_on("save"):
            checkpoints.save(
                step,
                state,
                config=checkpoint_config(self.config) | {"data": self._data_digest},
                metrics=evaluation.metrics() if evaluation is not None else {},
                plan=self._plan_text,
                block=block,
            )
        self._attempt.saved(step)
        if distributed.is_main():
            write_inference(self.run_dir / run_directory.CHECKPOINTS, self.config, self.program)

    def _log(self, step: int, metrics: dict[str, jax.Array], clock: Clock, reporter: Reporter) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "weight"}
        self._check_finite(step, values)
        reporter.record(step, values | clock.rates(step, self.config.steps))

    def _check_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Stop a run that has diverged, before its state is saved and replaces an earlier checkpoint.

        Raises:
            AutoshardError: The loss or the gradient norm of the last step is not finite.
        """
        for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if not math.isfinite(value := float(metrics.get(name, 0.0))):
                raise AutoshardError(
                    f"the {what} is {value} at step {step}: try a lower --optimizer.learning-rate "
                    f"(it is {self.config.optimizer.learning_rate}); checkpoints are in {self.run_dir}"
                )

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

    def _conclude(self, state: TrainState, step: int, reporter: Reporter, interrupted_by: str | None) -> None:
        if interrupted_by is None and self.config.sample_tokens:
            text, shown = self._sample(state)
            reporter.print(shown)
            if text is not None and distributed.is_main():
                (self.run_dir / run_directory.SAMPLE).write_text(text)
        if distributed.is_main():
            lines = read_metrics(self.run_dir / run_directory.METRICS)
            plot_loss(lines, self.run_dir / run_directory.PLOT, loss_item(self.config))
        ended = f"{interrupted_by}: saved and stopped" if interrupted_by else "finished"
        more = f"; continue with --run-dir {self.run_dir} --resume" if interrupted_by else ""
        reporter.print(
            f"{ended} at step {step}/{self.config.steps}. Checkpoint, metrics and {run_directory.PLOT} are in "
            f"{self.run_dir}{more}"
        )

    def _sample(self, state: TrainState) -> tuple[str | None, str]:
        """Return a sample if there is one, and what to print: the sample, or why there is none."""
        codec, count = load_codec(self.config.tokenizer_file), self.config.sample_tokens
        try:
            text = sample_text(self.program, state, codec, self.config.prompt, count, use_ema=self.config.use_ema)
        except ConfigError as error:  # a tokenizer may have no token for the prompt
            return None, f"No sample: {error}"
        return text, f"Sample:\n{text}" if text is not None else "No sample: the model is not a built-in one."

    def _tokens_per_step(self) -> int:
        return math.prod(self.placed.batch_shapes["inputs"].shape)

    def _peak_seconds_per_step(self) -> float | None:
        """Time of a step at the devices' peak FLOP/s, in seconds; None if the peak or the model's FLOPs are unknown."""
        peak = peak_flops(jax.devices()[0].device_kind)
        if peak is None or not self.config.is_built_in:
            return None
        return flops_per_token(self.config.gpt) * self._tokens_per_step() / (peak * self.placed.plan.mesh.size)


def retention_policy(config: TrainConfig) -> RetentionPolicy:
    """Return the policy that decides which checkpoints of a run are kept."""
    return RetentionPolicy(
        config.keep_checkpoints or None, best=config.keep_best, metric="val_loss", every=config.keep_every
    )


def train(config: TrainConfig) -> Result:
    """Train as a config describes.

    Raises:
        AutoshardError: The config, the data or the run's folder cannot be used.
    """
    distributed.initialize()
    return Trainer(config).run()
