"""The two planned steps over one state: prefill of new prompts, and decode of one token for each row.

The decode step is planned first, because most of the time is spent in it. Its plan shards the cache. The prefill step
takes the state as it is: the plan of a function keeps the shardings of arrays that it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

import autoshard
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.models.decoder.cache import DecoderCache
from autoshard.models.pretrained.parameter_paths import as_tree, by_path
from autoshard.serve.constants import PLANNED_POSITIONS
from autoshard.serve.model import GenerativeModel
from autoshard.serve.sampling import GREEDY, Settings, choose
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.planner.notes.idle_devices import IDLE_DEVICES

_AXIS = re.compile(r"(\w+):(\d+)")  # the name and the size of a mesh axis in the words of a plan


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What generation keeps of each row.

    Attributes:
        cache: keys and values of the text without its last token.
        tokens: the last token, int32 `[rows]`.
        seen: which tokens the text has, booleans `[rows, vocab]`.
        settings: how tokens are chosen.
    """

    cache: DecoderCache
    tokens: jax.Array
    seen: jax.Array
    settings: Settings


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """New prompts and the rows that they go to.

    Attributes:
        tokens: int32 `[group, positions]`, padded at the end.
        counts: number of real tokens of each, int32 `[group]`.
        seen: which tokens each has, booleans `[group, vocab]`.
        source: for each row the prompt that it takes, or -1 to keep what it has, int32 `[rows]`.
        settings: of all rows.
        inputs: what the model takes besides, `GenerativeModel.prompt_inputs`.
    """

    tokens: jax.Array
    counts: jax.Array
    seen: jax.Array
    source: jax.Array
    settings: Settings
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)


class Steps:
    """The planned steps of a model for a number of rows.

    Args:
        graph: the structure of a `GenerativeModel`.
        params: its parameters, as a tree; or their shapes, with which `plan` and `shardings` work alone.
        rows: number of rows.
        length: positions of a row, prompt and text.
        options: of `autoshard.auto_shard`, such as `plan` and `mesh`, for both steps.
    """

    def __init__(self, graph: Any, params: Any, rows: int, length: int, options: dict[str, Any]):
        self.graph, self.params, self.rows, self.length = graph, params, rows, length
        _check_words(options.get("plan"))
        self._decoded, self._others = self._parts()
        self._decode = autoshard.auto_shard(self._decode_step, donate_argnums=1, **options)
        with _idle_devices_allowed():
            self.plan: Plan = self._decode.plan(self._decoded, *self._shapes())
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
            # Once, and not in each step. Arrays that are there already stay.
            self._decoded = jax.device_put(self._decoded, self.plan.in_shardings()[0])
            self.params = as_tree(by_path(params) | by_path(self._decoded))
        self._prefill = autoshard.auto_shard(self._prefill_step, donate_argnums=1, **self._kept(options))

    def new_state(self) -> State:
        """Make the state of empty rows, sharded as the decode step's plan says."""
        return self._create()

    @functools.cached_property
    def _create(self) -> Callable[[], State]:
        return jax.jit(self._empty, out_shardings=self.plan.in_shardings()[1])

    def prefill(self, state: State, prompts: Prompts) -> State:
        """Put new prompts into rows, and choose their first tokens."""
        with _idle_devices_allowed():
            return self._prefill(self.params, state, prompts)

    def prefill_plan(self, state: State, prompts: Prompts) -> Plan:
        """Return the plan of `prefill` for these arguments."""
        with _idle_devices_allowed():
            return self._prefill.plan(self.params, state, prompts)

    def decode(self, state: State, active: np.ndarray) -> State:
        """Choose the next token of each active row."""
        return self._decode(self._decoded, state, active)

    def decode_shapes(self) -> tuple[Any, State]:
        """Return the shapes of the parameters that the decode step reads, and of its state."""
        return self._decoded, self._shapes()[0]

    def shardings(self, group: int) -> dict[str, Any]:
        """Return the sharding of each parameter, by path.

        The plan of the decode step shards its parameters. Those of a vision tower are in the prefill step alone: its
        plan for usual prompts shards them.

        Args:
            group: number of prompts that are prefilled at a time.
        """
        of_params, of_state = (by_path(tree) for tree in self.plan.in_shardings()[:2])
        if not self._others:
            return of_params
        placed = self._placed(self.params, of_params), self._placed(self._shapes()[0], of_state)
        with _idle_devices_allowed():
            others = by_path(self._prefill.plan(*placed, self._prompt_shapes(group)).in_shardings()[0])
        return of_params | {path: others[path] for path in self._others}

    @staticmethod
    def _placed(shapes: Any, shardings: dict[str, Any]) -> Any:
        """Return shapes with the shardings that are known."""
        leaves, tree = jax.tree.flatten(shapes)
        placed = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings.get(path))
            for path, leaf in zip(by_path(shapes), leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, placed)

    def _kept(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the prefill step, under which it keeps the decode step's mesh and shardings.

        A requested plan alone could shard the cache in another way; it would then be moved twice for each prompt.
        """
        mesh, words = self.plan.mesh, options.get("plan")
        if mesh.size == 1:  # one device says nothing about the devices to use
            return options
        if not isinstance(words, str) or dict(_AXIS.findall(words)) != {name: str(n) for name, n in mesh.shape.items()}:
            # The words do not name the axes of the mesh: where one does not divide the rows, there are several. A
            # function without a plan keeps the shardings of its arguments, and plans the rest around them.
            return {**options, "mesh": None, "target": None, "plan": None}
        shardings = [by_path(tree) for tree in self.plan.in_shardings()[:2]]
        own = shardings[0][next(iter(shardings[0]))].mesh
        for path, leaf in by_path(self.params).items():
            sharding = getattr(leaf, "sharding", None)
            if path in self._others and isinstance(sharding, NamedSharding) and sharding.mesh == own:
                shardings[0][path] = sharding
        fixed = {f"{n}/{path}": x.spec for n, of_tree in enumerate(shardings) for path, x in of_tree.items()}
        return {**options, "mesh": own, "target": None, "fixed": {**(options.get("fixed") or {}), **fixed}}

    def _parts(self) -> tuple[Any, dict[str, Any]]:
        """Return the parameters that the decode step reads, as a tree, and the shapes of the others, by path."""
        leaves = by_path(self.params)
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        self._others = {}
        traced = jax.make_jaxpr(self._decode_step)(as_tree(shapes), *self._shapes()).jaxpr
        read = {id(one) for eqn in traced.eqns for one in eqn.invars}
        # The leaves of a tree of dicts are in the order of their keys, as those of `by_path` of that tree.
        order = list(by_path(as_tree(shapes)))
        others = {path for path, one in zip(order, traced.invars, strict=False) if id(one) not in read}
        return (
            as_tree({path: leaf for path, leaf in leaves.items() if path not in others}),
            {path: shapes[path] for path in leaves if path in others},
        )

    def _prompt_shapes(self, group: int) -> Prompts:
        """Return the shapes of usual prompts."""
        model: GenerativeModel = nnx.merge(self.graph, self.params)
        positions, settings = min(self.length, PLANNED_POSITIONS), self._shapes()[0].settings
        tokens, counts, seen, source = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((group, positions), jnp.int32), ((group,), jnp.int32), ((group, model.cfg.vocab), jnp.bool_),
                ((self.rows,), jnp.int32),
            )
        )  # fmt: skip
        inputs = model.prompt_shapes(group, positions)
        return Prompts(tokens, counts, seen, source, settings, inputs)  # pyright: ignore[reportArgumentType]

    def _decode_step(self, params: Any, state: State, active: jax.Array) -> State:
        model: GenerativeModel = nnx.merge(self.graph, as_tree(by_path(params) | self._others))
        logits, cache = model.extend(state.tokens[:, None], state.cache, counts=active.astype(jnp.int32))
        tokens = choose(logits[:, 0], state.settings, state.seen, cache.lengths)
        tokens = jnp.where(active, tokens, state.tokens)
        return State(cache, tokens, _with_token(state.seen, tokens, active), state.settings)

    def _prefill_step(self, params: Any, state: State, prompts: Prompts) -> State:
        model: GenerativeModel = nnx.merge(self.graph, params)
        group = prompts.tokens.shape[0]
        empty = model.cache(group, self.length)
        options = {"counts": prompts.counts, "fresh": True, "last": True}
        logits, new = model.extend(prompts.tokens, empty, **options, **prompts.inputs)
        taken, index = prompts.source >= 0, jnp.maximum(prompts.source, 0)

        def into_rows(new: jax.Array, old: jax.Array, axis: int) -> jax.Array:
            shape = [1] * old.ndim
            shape[axis] = -1
            return jnp.where(taken.reshape(shape), jnp.take(new, index, axis=axis), old)

        kept = jax.tree.map(lambda new, old: into_rows(new, old, 1), new.kept, state.cache.kept)
        lengths, following = (
            into_rows(getattr(new, name), getattr(state.cache, name), 0) for name in ("lengths", "following")
        )
        cache = DecoderCache(kept, lengths, following)
        seen = into_rows(prompts.seen, state.seen, 0)
        chosen = choose(jnp.take(logits[:, 0], index, axis=0), prompts.settings, seen, cache.lengths)
        tokens = jnp.where(taken, chosen, state.tokens)
        return State(cache, tokens, _with_token(seen, tokens, taken), prompts.settings)

    def _empty(self) -> State:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        model: GenerativeModel = nnx.merge(self.graph, shapes)
        cache = model.cache(self.rows, self.length)
        settings = Settings.of([GREEDY] * self.rows, [0] * self.rows)
        tokens = jnp.zeros((self.rows,), jnp.int32)
        seen = jnp.zeros((self.rows, model.cfg.vocab), bool)
        return State(cache, tokens, seen, jax.tree.map(jnp.asarray, settings))

    def _shapes(self) -> tuple[Any, Any]:
        return jax.eval_shape(self._empty), jax.ShapeDtypeStruct((self.rows,), bool)


def _check_words(words: Any) -> None:
    """Refuse a pipeline: each token needs all stages one after another, so all but one would wait."""
    stages = [f"{name}:{n}" for name, n in _AXIS.findall(words)] if isinstance(words, str) else []
    if wrong := [axis for axis in stages if axis.startswith("pp:")]:
        size = wrong[0].partition(":")[2]
        raise PlanError(
            f"generation: the plan {words!r} has {wrong[0]}, but generation does not run in the stages of a pipeline. "
            f"Give these devices to another kind, such as tp:{size} in the place of {wrong[0]}, or leave out the plan"
        )


def _with_token(seen: jax.Array, tokens: jax.Array, which: jax.Array) -> jax.Array:
    new = tokens[:, None] == jax.lax.broadcasted_iota(jnp.int32, seen.shape, 1)
    return seen | (new & which[:, None])


@contextmanager
def _idle_devices_allowed() -> Iterator[None]:
    """A few rows may give too little work for all devices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", IDLE_DEVICES, AutoshardWarning)
        yield
