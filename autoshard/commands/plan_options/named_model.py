"""`autoshard plan MODEL`: the workload that the command line names, its step, and the search over its variants."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autoshard._shown import shown
from autoshard.commands.plan_options.arguments import parse_setting, unique
from autoshard.errors import AutoshardError, ConfigError


@shown
@dataclass(frozen=True)
class NamedModel:
    """A named model, as the command line describes it.

    Attributes:
        given: the parsed command line.
        work: the model and its batch.
        remat: the policy of the layers; None to search for it.
        pipelined: whether the planner cuts the step into the stages of a pipeline.
    """

    given: argparse.Namespace
    work: Any
    remat: str | None
    pipelined: bool

    @classmethod
    def of(cls, given: argparse.Namespace) -> NamedModel:
        """Find the model.

        Raises:
            ConfigError: the model is unknown, or a setting does not fit it.
        """
        from autoshard.sharding.pipeline.pipelining import stages_of

        settings = unique("--set", map(parse_setting, given.set))
        named = {"context": given.context, "batch_size": given.batch_size, "remat": given.remat}
        try:
            work = _found(given.model).with_(**settings, **{k: v for k, v in named.items() if v is not None})
        except AutoshardError:
            raise
        except ValueError as error:  # its message says which fields are wrong
            raise ConfigError(f"{given.model}: {error}") from error
        searched = given.schedule is not None and given.plan is None and given.mesh is None
        remat = settings.get("remat") if given.remat is None else given.remat
        return cls(given, work, remat, searched or stages_of(given.plan) > 1)

    def step(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """Return the step with static keywords, and the shapes of its arguments."""
        from autoshard.models.remat.policies import kept_on_device
        from autoshard.train.program.build import workload_variants

        step, *shapes = workload_variants(self.work)
        if not self.pipelined:
            return step, shapes

        def in_stages(state: Any, batch: Any, *, remat: str) -> Any:
            # The planner cuts the step into microbatches, and moves to the host what the layers keep.
            return step(state, batch, remat=kept_on_device(remat), microbatches=1)

        in_stages.__name__ = step.__name__
        return in_stages, shapes

    def plain(self, step: Callable[..., Any], remat: str = "none", microbatches: int = 1) -> Callable[..., Any]:
        """Return the step with values of its keywords."""
        return partial(step, remat=remat, **({} if self.pipelined else {"microbatches": microbatches}))

    def shown(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step that `--show` prints."""
        return self.plain(step, self.remat or "none", self.given.microbatches or 1)

    def plan(self, step: Callable[..., Any], shapes: Sequence[Any], options: Mapping[str, Any], **how: Any) -> Any:
        """Plan the step.

        Args:
            step: the step.
            shapes: its arguments.
            options: options of `autoshard.plan` that each variant has.
            **how: options of `autoshard.plan` about how plans are compared.
        """
        import autoshard
        from autoshard.sharding.offload.words import AUTO, NONE, OPTIMIZER
        from autoshard.train.program.offloading import plan_within_memory, planner_words
        from autoshard.train.program.workload_search import checked_offload, named_values_of, workload_search

        given = self.given
        more = {"microbatches": given.microbatches} if self.pipelined and given.microbatches is not None else {}

        def planned(words: Sequence[str]) -> Any:
            search = workload_search(
                self.work,
                {**options, "offload": tuple(words)},
                offload=given.offload,
                remat=self.remat,
                microbatches=given.microbatches,
                numerics=given.allow_numerics,
                pipelined=self.pipelined,
            )
            moved = {"variants": search, "offload": words or None}
            return autoshard.plan(step, *shapes, donate_argnums=0, **how, **options, **more, **moved)

        if given.offload != AUTO:
            names = bool(named_values_of(self.work.config))
            checked_offload(given.offload, has_named_values=names, model=self.work.name)
            return planned(planner_words(given.offload, self.remat or "", pipelined=self.pipelined))
        words = planner_words(NONE, self.remat or "", pipelined=self.pipelined)
        otherwise = (AUTO,) if self.pipelined and not words else (*words, OPTIMIZER)
        place = {name: options.get(name) for name in ("mesh", "target")}
        return plan_within_memory(planned, words, otherwise, **place)


def _found(model: str) -> Any:
    """Return the workload of a name or of a folder.

    Raises:
        ConfigError: it is neither.
    """
    from autoshard.models.pretrained.workload import folder_workload
    from autoshard.models.workloads import WORKLOADS, known_names, workload

    folder = Path(model)
    if model in WORKLOADS:
        return workload(model)
    if folder.name == "config.json" or folder.is_dir():
        return folder_workload(folder)
    names = known_names(model, WORKLOADS).partition("? ")  # all of them only if none is similar
    own = (
        "For a model of your own, give a folder with a config.json, or --model package.module:factory; for a step "
        "of your own, module:function, which returns (step, arguments)"
    )
    raise ConfigError(f"unknown model {model!r}{names[0]}{'?' if names[1] else '.'} {own}")
