"""The two planned steps over one state: prefill of new prompts, and decode of one token a row.

The decode step is planned first, because most of the time is spent in it. Its plan shards the cache. The prefill step
takes the state as it is: the plan of a function keeps the shardings of arrays that it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import autoshard
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning
from autoshard.models.decoder import Decoder
from autoshard.models.decoder.cache import DecoderCache
from autoshard.serve.sampling import GREEDY, Settings, choose
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.planner.idle_devices import IDLE_DEVICES


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
    """

    tokens: jax.Array
    counts: jax.Array
    seen: jax.Array
    source: jax.Array
    settings: Settings


class Steps:
    """The planned steps of a model for a number of rows.

    Args:
        graph: the structure of a `Decoder`.
        params: its parameters; or their shapes, with which `plan` works alone.
        rows: number of rows.
        length: positions of a row, prompt and text.
        options: of `autoshard.auto_shard`, such as `plan` and `mesh`, for both steps.
    """

    def __init__(self, graph: Any, params: Any, rows: int, length: int, options: dict[str, Any]):
        self.graph, self.params, self.rows, self.length = graph, params, rows, length
        self._decode = autoshard.auto_shard(self._decode_step, donate_argnums=1, **options)
        self._prefill = autoshard.auto_shard(self._prefill_step, donate_argnums=1, **options)
        with _idle_devices_allowed():
            self.plan: Plan = self._decode.plan(params, *self._shapes())

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
        return self._decode(self.params, state, active)

    def _decode_step(self, params: Any, state: State, active: jax.Array) -> State:
        model: Decoder = nnx.merge(self.graph, params)
        logits, cache = model.extend(state.tokens[:, None], state.cache, counts=active.astype(jnp.int32))
        tokens = choose(logits[:, 0], state.settings, state.seen, cache.lengths)
        tokens = jnp.where(active, tokens, state.tokens)
        return State(cache, tokens, _with_token(state.seen, tokens, active), state.settings)

    def _prefill_step(self, params: Any, state: State, prompts: Prompts) -> State:
        model: Decoder = nnx.merge(self.graph, params)
        group = prompts.tokens.shape[0]
        empty = model.cache(group, self.length)
        logits, new = model.extend(prompts.tokens, empty, counts=prompts.counts, fresh=True, last=True)
        taken, index = prompts.source >= 0, jnp.maximum(prompts.source, 0)

        def into_rows(new: jax.Array, old: jax.Array, axis: int) -> jax.Array:
            shape = [1] * old.ndim
            shape[axis] = -1
            return jnp.where(taken.reshape(shape), jnp.take(new, index, axis=axis), old)

        kept = jax.tree.map(lambda new, old: into_rows(new, old, 1), new.kept, state.cache.kept)
        cache = DecoderCache(kept, into_rows(new.lengths, state.cache.lengths, 0))
        seen = into_rows(prompts.seen, state.seen, 0)
        chosen = choose(jnp.take(logits[:, 0], index, axis=0), prompts.settings, seen, cache.lengths)
        tokens = jnp.where(taken, chosen, state.tokens)
        return State(cache, tokens, _with_token(seen, tokens, taken), prompts.settings)

    def _empty(self) -> State:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        model: Decoder = nnx.merge(self.graph, shapes)
        cache = model.cache(self.rows, self.length)
        settings = Settings.of([GREEDY] * self.rows, [0] * self.rows)
        tokens = jnp.zeros((self.rows,), jnp.int32)
        seen = jnp.zeros((self.rows, model.cfg.vocab), bool)
        return State(cache, tokens, seen, jax.tree.map(jnp.asarray, settings))

    def _shapes(self) -> tuple[Any, Any]:
        return jax.eval_shape(self._empty), jax.ShapeDtypeStruct((self.rows,), bool)


def _with_token(seen: jax.Array, tokens: jax.Array, which: jax.Array) -> jax.Array:
    new = tokens[:, None] == jax.lax.broadcasted_iota(jnp.int32, seen.shape, 1)
    return seen | (new & which[:, None])


@contextmanager
def _idle_devices_allowed() -> Iterator[None]:
    """A few rows may give too little work for all devices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", IDLE_DEVICES, AutoshardWarning)
        yield
