"""The corpus: every program equals one device under its chosen plan and others, and so does an expert's program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus_experts import corpus_step, corpus_styles, with_step_kernels
from formulations.corpus import CORPUS
from formulations.formulation import Formulation
from formulations.parts import computing_in
from jax.sharding import Mesh, NamedSharding

from autoshard import auto_shard, plan
from autoshard.sharding.search.strategy_kinds import kind_of

TOLERANCE = 5e-6  # relative norm of a leaf in float64; JAX's softmax and Flax's norms are still in float32
ZERO = 1e-11  # norm of a gradient that is nothing but rounding: of the bias of keys, of a bias before a norm
FAST = ("moe-8-one-hot",)  # a scan, experts and a capacity
LONG = ("bert-large-linen", "gpt-shampoo-nnx")  # their modules take seconds to trace


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Let the programs compute in float64, also what they cast to float32."""
    with jax.enable_x64(True), computing_in(jnp.float64), mock.patch.object(jnp, "float32", jnp.float64):
        yield


def values(formulation: Formulation, kernels: bool = False) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the small program's state and batch in float64, and the result of its step on one device.

    Args:
        formulation: the program.
        kernels: whether kernels take the place of attention. They compute in float32.
    """
    program = formulation.program()
    made = program.state(jax.random.key(0)), program.batch(jax.random.key(1))
    # Flax creates parameters in float32.
    state, batch = jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, made)
    step = with_step_kernels(program.step) if kernels else program.step
    return state, batch, jax.device_get(jax.jit(step)(state, *batch))


def check(got: Any, want: Any) -> None:
    """Compare the loss and every leaf of the state: parameters, moments, averages."""
    np.testing.assert_allclose(got[1], want[1], rtol=TOLERANCE)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got[0]), jax.tree.leaves(want[0]), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = np.linalg.norm(other)
        assert np.linalg.norm(one - other) <= TOLERANCE * scale + ZERO, jax.tree_util.keystr(path)


def others(candidates: Any, chosen: str, count: int) -> list[str]:
    """Return the fastest candidates of kinds that differ from the chosen one and each other, then the fastest ones."""
    ranked = [words for words, *_ in sorted(candidates, key=lambda each: each[1]) if words != chosen]
    kinds: dict[str, str] = {}
    for words in ranked:
        kinds.setdefault(kind_of(words), words)
    kinds.pop(kind_of(chosen), None)
    return list(dict.fromkeys([*kinds.values(), *ranked]))[:count]


# The plan of actor-critic-memory moves a shard from the channels of images to their sides. XLA gathers these images.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s).*involuntary full rematerialization:autoshard.errors.AutoshardWarning")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CORPUS]
)
def test_a_program_equals_one_device_under_its_plans(name):
    formulation = CORPUS[name]
    with exactly():
        state, batch, want = values(formulation)
        program = formulation.program()
        made = plan(program.step, state, *batch)
        for words in [made.chosen, *others(made.candidates, made.chosen, 1 if name in FAST else 3)]:
            got = auto_shard(lambda *args: program.step(*args), plan=words)(state, *batch)
            check(jax.device_get(got), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_an_expert_equals_one_device(name):
    formulation = CORPUS[name]
    with exactly():
        state, batch, want = values(formulation, kernels=True)  # as the expert's program has them
        grid = [style for style in corpus_styles(formulation, None) if style.zero == 3]
        found = {kind_of(style.words): style for style in grid}  # the last of a kind uses the most of it
        for style in found.values():
            expert = corpus_step(formulation, None, style)
            mesh = Mesh(np.array(jax.devices()).reshape(style.sizes), style.mesh.axis_names)
            shardings = [
                [NamedSharding(mesh, s.spec) for s in each] for each in (expert.in_shardings, expert.out_shardings)
            ]
            with jax.set_mesh(mesh):
                flat = jax.jit(expert.fn, in_shardings=shardings[0], out_shardings=shardings[1])(
                    *jax.device_put(jax.tree.leaves((state, *batch)), shardings[0])
                )
            check(jax.device_get(jax.tree.unflatten(jax.tree.structure(want), flat)), want)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CORPUS])
def test_a_step_returns_its_state_and_a_loss(name):
    formulation = CORPUS[name]
    for target in formulation.targets:
        program = formulation.program(target)
        state, batch = program.shapes()
        returned, loss = jax.eval_shape(program.step, state, *batch)
        assert loss.shape == ()
        assert jax.tree.map(lambda x: (x.shape, x.dtype), returned) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
