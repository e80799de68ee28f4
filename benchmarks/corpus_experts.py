"""An expert's plans for the programs of the corpus: the grid of `expert_plans`, with the program's own notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
from expert_plans import Style, device_count, style_grid
from expert_ranking import MOST_OVER
from expert_step import Annotator, Expert, applied_on_shards, planned_blocks
from formulations.formulation import Formulation
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard.kernels.planned_platform import Planned, planned_for, planned_platform
from autoshard.kernels.two_passes import kernel_of
from autoshard.sharding.planner.strategy_prices import StrategyPrice, StrategyPrices
from autoshard.sharding.rewrite.evaluation import evaluated
from autoshard.sharding.rewrite.kernel_rewriting import kernels_in
from autoshard.spmdrules.custom_ops import operator
from autoshard.train.step.parameter_paths import path_name

_PARAMETERS = ("params", "frozen")  # the parts of a state that are used in the step as they are stored


class Annotations:
    """The notes of an expert, see `formulations.formulation.Notes`."""

    def __init__(self, formulation: Formulation, style: Style):
        """Read the dimensions of the program's parameters."""
        table = [(pattern, _names(dims)) for pattern, dims in formulation.dims.items()]
        self.annotator = Annotator(style, None, table)

    def __call__(self, x: jax.Array, dims: str) -> jax.Array:
        """Constrain an activation and its gradient."""
        return self.annotator.constrained(x, *_names(dims))

    def weights(self, weights: Any) -> Any:
        """Gather weights, and reduce their gradients to where those are stored."""
        return jax.tree_util.tree_map_with_path(self._gathered, weights)

    def _gathered(self, path: Any, leaf: jax.Array) -> jax.Array:
        names = self.annotator.names_of(path_name(path), leaf.ndim)
        return leaf if names is None else self.annotator.gathered(leaf, *names)


def _names(dims: str) -> tuple[str | None, ...]:
    return tuple(None if word == "." else word for word in dims.split())


def corpus_styles(formulation: Formulation, target: str | None) -> list[Style]:
    """Return the grid of an expert's styles for a program on a machine; None is eight devices and the small sizes."""
    _, batch = formulation.program(target).shapes()
    ways = formulation.ways
    return style_grid(
        8 if target is None else device_count(target),
        jax.tree.leaves(batch)[0].shape[0],
        experts=formulation.sizes(target)["experts"] if "experts" in ways else 1,
        tensor="tensor" in ways,
        sequence="sequence" in ways,
    )


def corpus_step(formulation: Formulation, target: str | None, style: Style, machine: Planned | str = "cpu") -> Expert:
    """Return a program's step under a style, with the kernels of the machine as the planner has them.

    Args:
        formulation: the program.
        target: the machine whose sizes it has; None for the small sizes.
        style: the expert's style.
        machine: what the kernels are chosen for.
    """
    notes = Annotations(formulation, style)
    program = formulation.program(target, notes)
    state, batch = program.shapes()
    leaves, tree = jax.tree_util.tree_flatten_with_path((state, *batch))
    count = len(jax.tree.leaves(state))

    def spec_of(path: Any, leaf: Any) -> PartitionSpec:
        part, _, name = path_name(path).partition("/")
        if part != "0":
            split = leaf.ndim and leaf.shape[0] % style.ways(style.batch) == 0
            return PartitionSpec(style.batch) if split and style.ways(style.batch) > 1 else PartitionSpec()
        stored = style.zero == 3 or name.partition("/")[0] not in _PARAMETERS
        return PartitionSpec(*notes.annotator.parameter(name, leaf.shape, stored=stored))

    def run(*flat: Any) -> list[Any]:
        applied = partial(applied_on_shards, notes.annotator, operator.apply)
        blocks, kernels = planned_blocks(target), planned_for("cpu" if style.today else machine)
        with blocks, kernels, mock.patch.object(operator, "apply", applied):
            return jax.tree.leaves(with_step_kernels(program.step)(*jax.tree.unflatten(tree, flat)))

    shardings = [NamedSharding(style.mesh, spec_of(*each)) for each in leaves]
    results = shardings[:count] + [NamedSharding(style.mesh, PartitionSpec())]
    sizes = dict(zip(style.mesh.axis_names, style.sizes, strict=True))
    return Expert(run, [leaf for _, leaf in leaves], shardings, results, tuple(range(count)), sizes)


def with_step_kernels(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step with kernels in the place of attention and its gradient, as `kernels="auto"` has them."""

    def run(*args: Any) -> Any:
        with _compat.classic_scans():
            traced, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        closed, _ = kernels_in(_compat.classic(traced), kernel_of(planned_platform()))
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluated(closed)(*jax.tree.leaves(args)))

    return run


def most_promising(
    formulation: Formulation, target: str, styles: Sequence[Style], most_over: float = MOST_OVER
) -> list[tuple[Style, StrategyPrice]]:
    """Return the styles whose estimated memory fits, each with the planner's estimate, the fastest first.

    Args:
        formulation: the program.
        target: the machine.
        styles: the styles.
        most_over: a style fits if its estimated peak is at most this many times the memory.
    """
    program = formulation.program(target)
    state, batch = program.shapes()
    with planned_blocks(target):
        step = with_step_kernels(program.step)
        prices = StrategyPrices(step, (state, *batch), target=target, donate_argnums=(0,))
        found = prices.of(dict.fromkeys(style.words for style in styles if style.words))
    limit = prices.limit_bytes * most_over
    priced = [(style, found[style.words]) for style in styles if style.words in found]
    fitting = [each for each in priced if each[1].peak_memory_bytes <= limit]
    return sorted(fitting, key=lambda each: each[1].step_time_us)
