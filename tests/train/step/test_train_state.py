"""Splitting a model into arrays and rebuilding it: frozen parameters, random streams, variables, moving average."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig
from autoshard.train.step.ema import EmaConfig, averaged_params
from autoshard.train.step.parameter_paths import path_name
from autoshard.train.step.train_state import Program, TrainState, fill_streams, make_program
from autoshard.train.step.train_step import batch_shapes, make_train_step

SHAPE: dict[str, Any] = dict(vocab=32, layers=2, heads=2, width=8, context=8)
ADAMW: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))


def gpt(freeze: tuple[str, ...] = (), ema_decay: float = 0.0, **shape: Any) -> Program:
    config = GPTConfig(**{**SHAPE, **shape})
    return make_program(lambda rngs: GPT(config, rngs=rngs), ADAMW, freeze=freeze, ema=EmaConfig(ema_decay))


def tokens(step: int = 0) -> dict[str, jax.Array]:
    ids = np.random.default_rng(step).integers(0, 32, (4, 9))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones((4, 8))}
    return {name: jnp.asarray(batch[name], spec.dtype) for name, spec in batch_shapes(4, 8).items()}


def run(program: Program, steps: int = 3) -> tuple[TrainState, TrainState, list[dict[str, float]]]:
    """Train and return the first state, the last state and the metrics."""
    first = state = jax.jit(program.create_state)(jax.random.key(0))
    step = jax.jit(make_train_step(program, optax.constant_schedule(1e-2)))
    log = []
    for number in range(steps):
        state, metrics = step(state, tokens(number))
        log.append(jax.device_get(metrics))
    return first, state, log


def names(tree: Any) -> set[str]:
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.few(1)
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_frozen_parameters_never_change(remat: str, scan_layers: bool) -> None:
    program = gpt(("embed", "blocks/*attention/*"), ema_decay=0.9, remat=remat, scan_layers=scan_layers)
    first, last, _ = run(program)
    frozen = names(first.frozen)
    assert "embed" in frozen and any("wq" in name for name in frozen) and not any("mlp" in name for name in frozen)
    jax.tree.map(np.testing.assert_array_equal, first.frozen, last.frozen)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), first.params, last.params)
    assert all(jax.tree.leaves(changed))
    # They have no moments and no average, and are not among the trained parameters.
    state_names = names(first.opt_state) | names(first.ema) | names(first.params)
    assert not any(name.endswith(tuple(frozen)) for name in state_names)


@pytest.mark.whole
def test_frozen_parameters_do_not_count_in_the_gradient_norm() -> None:
    """The norm is that of the trained parameters' gradient, which is computed here with all parameters trained."""
    whole, part = gpt(), gpt(("embed",))
    state = jax.jit(whole.create_state)(jax.random.key(0))

    def loss(params: Any) -> jax.Array:
        model = whole.model(params, state.frozen, state.variables, None)
        logits = model(tokens()["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens()["targets"]).mean()

    gradient = jax.jit(jax.grad(loss))(state.params)
    _, _, log = run(part, steps=1)
    without = {name: leaf for name, leaf in gradient.items() if name != "embed"}
    np.testing.assert_allclose(log[0]["grad_norm"], optax.tree.norm(without), rtol=1e-5)
    assert optax.tree.norm(gradient) > 1.01 * optax.tree.norm(without)


def test_no_flops_are_spent_on_frozen_gradients() -> None:
    def flops(program: Program) -> float:
        step = make_train_step(program, optax.constant_schedule(1e-2))
        shapes = program.abstract_state(), batch_shapes(4, 8)
        costs: Any = jax.jit(step).lower(*shapes).compile().cost_analysis()
        return costs["flops"]

    shape: dict[str, Any] = dict(layers=1, width=32, scan_layers=False)
    assert flops(gpt(("blocks/*/w?", "blocks/*/w_*"), **shape)) < 0.8 * flops(gpt(**shape))


def test_a_glob_that_matches_nothing_raises() -> None:
    with pytest.raises(ConfigError, match="--freeze head/\\*: no parameter matches.*blocks/attention/wq"):
        gpt(("embed", "head/*"))
    with pytest.raises(ConfigError, match="freezes all"):
        gpt(("*",))


@pytest.mark.slow
def test_one_update_of_the_moving_average_equals_the_parameters() -> None:
    first, last, _ = run(gpt(ema_decay=0.75), steps=1)
    jax.tree.map(
        lambda mean, p: np.testing.assert_allclose(mean, p, rtol=1e-5, atol=1e-7),
        averaged_params(last.ema, first.params),
        last.params,
    )


class Foreign(nnx.Module):
    """A user's model with batch norm, dropout with its own random streams, and a tied head."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.drop(self.norm(self.embed(tokens))))


@pytest.fixture
def foreign() -> Program:
    return make_program(lambda rngs: Foreign(rngs=rngs), ADAMW)


def test_variables_are_updated_and_random_streams_are_not_state(foreign: Program) -> None:
    first, last, _ = run(foreign, steps=1)
    assert names(first.params) == {"embed/embedding", "norm/scale", "norm/bias"}
    assert names(first.variables) == {"norm/mean", "norm/var"}
    embedded = first.params["embed"]["embedding"][tokens()["inputs"]]
    np.testing.assert_allclose(last.variables["norm"]["mean"], embedded.mean((0, 1)) / 2, rtol=1e-4, atol=1e-6)


def test_variables_are_updated_by_each_microbatch(foreign: Program) -> None:
    state = jax.jit(foreign.create_state)(jax.random.key(0))
    after, _ = jax.jit(make_train_step(foreign, optax.constant_schedule(1e-2), 2))(state, tokens())
    embedded = state.params["embed"]["embedding"][tokens()["inputs"]]
    first, second = (embedded[i::2].mean((0, 1)) for i in range(2))
    np.testing.assert_allclose(after.variables["norm"]["mean"], first / 4 + second / 2, rtol=1e-4, atol=1e-6)


def test_evaluation_has_no_dropout_and_does_not_change_variables(foreign: Program) -> None:
    state = jax.jit(foreign.create_state)(jax.random.key(0))
    parts = state.params, state.frozen, state.variables
    model = foreign.model(*parts, None)
    np.testing.assert_array_equal(model(tokens()["inputs"]), foreign.model(*parts, None)(tokens()["inputs"]))
    jax.tree.map(np.testing.assert_array_equal, foreign.variables(model), state.variables)


def test_each_stream_has_its_own_key_and_starts_at_count_zero() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    many = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    streams = {"a": {"key": key, "count": count}, "b": {"key": key, "count": count}, "layers": {"key": many}}
    filled = fill_streams(streams, jax.random.key(7))
    assert filled["a"]["count"] == filled["b"]["count"] == 0
    keys = [filled["a"]["key"][None], filled["b"]["key"][None], filled["layers"]["key"]]
    assert len({tuple(row) for part in keys for row in jax.random.key_data(part).tolist()}) == 5


def test_streams_depend_only_on_the_key(foreign: Program) -> None:
    state = jax.jit(foreign.create_state)(jax.random.key(0))

    def out(seed: int) -> jax.Array:
        return foreign.model(state.params, state.frozen, state.variables, jax.random.key(seed))(tokens()["inputs"])

    np.testing.assert_array_equal(out(1), out(1))
    assert (out(1) != out(2)).any()
