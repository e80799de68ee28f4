"""The train state as a pytree of arrays, and the program that turns it into a model and back.

A Flax NNX module is split once. Its static part, the graph, stays in `Program`; its arrays go into `TrainState`. Random
streams are not part of the state. They are derived from the run's key and the step, so that dropout masks are a pure
function of both and do not depend on the mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.train.step.ema import NO_AVERAGE, EmaConfig, start
from autoshard.train.step.guard import GuardConfig, first_guard
from autoshard.train.step.parameter_paths import matches, path_name

Tree = Any


@shown
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All arrays that a step reads or changes, and that a checkpoint stores.

    Attributes:
        step: Steps done, int32 `[]`.
        params: Trained parameters, nested dictionaries.
        frozen: Parameters that are not trained.
        variables: The model's other variables, such as batch statistics.
        opt_state: The optimizer's state.
        ema: Moving average of `params` (`ema.Average`); None if the program has none.
        key: Data of the run's random key, uint32 `[2]`.
        guard: What `guard.judge` knows of the steps before; None if it needs nothing.
    """

    step: jax.Array
    params: Tree
    frozen: Tree
    variables: Tree
    opt_state: Tree
    ema: Tree
    key: jax.Array
    guard: Tree = None


@shown
@dataclass(frozen=True)
class Program:
    """A model and an optimizer, without their arrays.

    Attributes:
        build: Makes the model from random streams.
        optimizer: Updates its parameters.
        graph: The model's static part.
        streams: Shapes of the model's random streams, which each step fills again.
        freeze: Globs over the paths of frozen parameters.
        ema: How the parameters are averaged.
        train: Globs over the paths of parameters that are trained. Others are frozen.
        guard: What a step does if it is bad; None if steps are not judged.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    optimizer: optax.GradientTransformation
    graph: Any
    streams: Tree
    freeze: tuple[str, ...] = ()
    ema: EmaConfig = NO_AVERAGE
    train: tuple[str, ...] = ("*",)
    guard: GuardConfig | None = None

    def create_state(self, key: jax.Array, values: Mapping[str, jax.Array] | None = None) -> TrainState:
        """Make a new state from a random key. The function is pure, so that it can run under `jit` with shardings.

        Args:
            key: The random key.
            values: Values of the model by `/`-joined path, in place of those that the key gives.
        """
        key = as_key(key)
        build_key, run_key = jax.random.split(key)
        _, *parts = self._split(self.build(nnx.Rngs(build_key)))
        params, frozen, _, variables = (
            jax.tree_util.tree_map_with_path(lambda path, leaf: (values or {}).get(path_name(path), leaf), part)
            for part in parts
        )
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            frozen=frozen,
            variables=variables,
            opt_state=self.optimizer.init(params),
            ema=start(params) if self.ema.decay else None,
            key=jax.random.key_data(run_key),
            guard=self.first_guard(),
        )

    def first_guard(self) -> Tree:
        """Make the guard's part of a new state."""
        return first_guard(self.guard)

    def abstract_state(self) -> TrainState:
        """Return the shapes and dtypes of a state."""
        return jax.eval_shape(self.create_state, jax.random.key(0))

    def model(self, params: Tree, frozen: Tree, variables: Tree, key: jax.Array | None) -> Any:
        """Return the model with these arrays: to train with random streams from `key`, or to evaluate if it is None."""
        streams = fill_streams(self.streams, jax.random.key(0) if key is None else key)
        model = cast(nnx.Module, nnx.merge(self.graph, params, frozen, streams, variables))
        model.eval() if key is None else model.train()
        return model

    def variables(self, model: nnx.Module) -> Tree:
        """Return the model's variables after a call, such as updated batch statistics."""
        return self._split(model)[4]

    def _split(self, model: nnx.Module) -> tuple[Any, Tree, Tree, Tree, Tree]:
        return _split(model, self.freeze, self.train)


def as_key(key: jax.Array) -> jax.Array:
    """Return a typed random key, given one or its data."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def fill_streams(streams: Tree, key: jax.Array) -> Tree:
    """Make random streams: each stream's key is `key` folded with the stream's path, each count is zero."""

    def fill(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jnp.zeros(spec.shape, spec.dtype)
        stream = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        return jax.random.split(stream, spec.shape) if spec.shape else stream

    return jax.tree_util.tree_map_with_path(fill, streams)


def make_program(
    build: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    *,
    freeze: tuple[str, ...] = (),
    ema: EmaConfig = NO_AVERAGE,
    train: tuple[str, ...] = ("*",),
    guard: GuardConfig | None = None,
) -> Program:
    """Make a program from a model and an optimizer. No array is allocated.

    Args:
        build: Makes the model from random streams.
        optimizer: Updates its parameters.
        freeze: Globs over `/`-joined parameter paths; matching parameters are not trained.
        ema: How the parameters are averaged; by default they are not.
        train: Globs over the paths of parameters that are trained; by default all are.
        guard: What a step does if it is bad; by default steps are not judged.

    Raises:
        ConfigError: A glob matches no parameter, or all parameters are frozen.
    """
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    _check_freeze(model, freeze)
    graph, _, _, streams, _ = _split(model, freeze, train)
    return Program(build, optimizer, graph, streams, freeze, ema, train, guard)


def _split(model: nnx.Module, freeze: tuple[str, ...], train: tuple[str, ...]) -> tuple[Any, Tree, Tree, Tree, Tree]:
    """Split a model into its graph, parameters, frozen parameters, random streams and variables."""

    def freezes(path: Any, _: Any) -> bool:
        name = "/".join(map(str, path))
        return matches(name, freeze) or not matches(name, train)

    is_frozen = nnx.All(nnx.Param, freezes)
    graph, *states = nnx.split(model, is_frozen, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
    frozen, params, streams, _, variables = (nnx.to_pure_dict(state) for state in states)
    return graph, params, frozen, streams, variables


def _check_freeze(model: nnx.Module, freeze: tuple[str, ...]) -> None:
    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[0]
    names = [path_name(path) for path, _ in flat]
    unmatched = [pattern for pattern in freeze if not any(matches(name, [pattern]) for name in names)]
    if unmatched:
        raise ConfigError(
            f"--freeze {' '.join(unmatched)}: no parameter matches. The model's parameters are: {', '.join(names)}"
        )
    if all(matches(name, freeze) for name in names):
        raise ConfigError(f"--freeze {' '.join(freeze)} freezes all {len(names)} parameters: leave some of them out")
