"""Steps with values in host memory compute what they computed before."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan, auto_shard, plan
from autoshard.errors import AutoshardWarning, PlanError
from tests.sharding.offload.steps import OPTIMIZER, arguments, rows, step_of

PLANS = ("fsdp:8", "dp:2 tp:4")


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def trained(step: Any, steps: int = 2) -> tuple[Any, ...]:
    params, moments, x = arguments()
    results: Any = ()
    for _ in range(steps):
        params, moments, *results = step(params, moments, x)
    return params, moments, *results


def check(kind: str, offload: str, words: str, moved: set[str]) -> None:
    step = step_of(kind)
    planned = auto_shard(step, plan=words, offload=offload)
    assert_close(trained(planned), trained(jax.jit(step)))
    made = planned.plan(*arguments())
    assert set(made.offload) == moved and (made.estimate.host_memory_bytes > 0) == bool(moved)
    assert made.bound is not None
    assert any(op.name == "device_put" for op in made.bound.traced.program.ops())


@pytest.mark.whole
@pytest.mark.parametrize("words", ["fsdp:8", pytest.param("dp:2 tp:4", marks=pytest.mark.slow)])
def test_everything_is_moved_and_nothing_changes(words: str) -> None:
    check("scan", "residual+hidden+optimizer", words, {"residual", "hidden", "optimizer"})


CASES = [
    ("scan remat", "residual"),
    ("scan remat", "residual+optimizer"),
    ("scan", "hidden"),
    ("scan policy", "hidden,residual"),
    ("scan micro", "hidden+residual"),
    ("scan remat micro", "residual+optimizer"),
    ("scan frozen", "hidden+residual"),
    ("unrolled", "hidden+out"),
    ("unrolled jit micro", "hidden"),
    ("unrolled remat", "out"),
    ("unrolled frozen", "hidden+optimizer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", PLANS)
@pytest.mark.parametrize(("kind", "offload"), CASES)
def test_parity(kind: str, offload: str, words: str) -> None:
    check(kind, offload, words, set(offload.replace("+", ",").split(",")))


def test_slices_move_in_the_bodies_of_loops() -> None:
    made = plan(step_of("scan remat"), *arguments(), plan="fsdp:8", offload="residual")
    assert made.bound is not None
    put = [op for op in made.bound.traced.program.ops() if op.name == "device_put"]
    assert len(put) == 2 and all(op.trips == 3 for op in put)
    without = plan(step_of("scan remat"), *arguments(), plan="fsdp:8")
    assert made.estimate.peak_memory_bytes < without.estimate.peak_memory_bytes
    assert made.estimate.host_memory_bytes == made.offload["residual"] / 8  # the batch is sharded 8 ways


def test_the_optimizers_state_stays_on_the_host() -> None:
    step = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer")
    params, moments, x = arguments()
    for _ in range(3):
        params, moments, *_ = step(params, moments, x)
        assert kinds(moments) == {"pinned_host", "device"} and kinds(params) == {"device"}
        assert kinds([moments[0].mu["up"], moments[0].nu["down"]]) == {"pinned_host"}
    assert step.plan(params, moments, x) is step.plan(*arguments())  # both memories are one signature


@pytest.mark.slow
def test_init_creates_the_optimizers_state_on_the_host() -> None:
    step = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer", example=arguments())
    params, moments = step.init(lambda: arguments()[:2])
    assert kinds(moments[0].mu["up"]) == {"pinned_host"}
    params, moments, value, _ = step(params, moments, rows())
    assert_close(value, trained(jax.jit(step_of("scan")), 1)[2])


@pytest.mark.slow
def test_state_that_was_restored_to_the_host_is_planned() -> None:
    step = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer")
    params, moments, x = arguments()
    _, on_host, *_ = step(params, moments, x)
    again = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer")
    assert kinds(again(params, on_host, x)[1][0].mu["up"]) == {"pinned_host"}


def test_donated_state() -> None:
    step = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer", donate_argnums=(0, 1))
    assert_close(trained(step, 3), trained(jax.jit(step_of("scan")), 3))


def test_a_call_in_another_jit_keeps_the_memory_of_its_arguments() -> None:
    step = auto_shard(step_of("scan"), plan="fsdp:8", offload="optimizer")
    with pytest.warns(AutoshardWarning, match="Call the step outside"):
        got = jax.jit(lambda *args: step(*args))(*arguments())
    assert_close(got, trained(jax.jit(step_of("scan")), 1))


def test_a_plan_moves_the_same_values_after_json() -> None:
    made = plan(step_of("scan"), *arguments(), plan="fsdp:8", offload=["hidden", "optimizer"])
    read = Plan.from_json(made.to_json())
    assert read.offload == made.offload and read.offload["hidden"] > 0
    bound = read.bind(step_of("scan"), *arguments())
    assert bound.estimate == made.estimate and bound.fingerprint == made.fingerprint
    got = bound.jit()(*jax.device_put(arguments(), bound.in_shardings()))
    assert_close(got, trained(jax.jit(step_of("scan")), 1))
    assert "moved to host memory in each step, before sharding: hidden" in str(made)
    assert '"offload"' not in plan(step_of("scan"), *arguments(), plan="fsdp:8").to_json()


def test_a_plan_with_another_offload_is_refused() -> None:
    made = plan(step_of("scan"), *arguments(), plan="fsdp:8", offload="hidden")
    with pytest.raises(PlanError, match="a Plan that offloads hidden"):
        plan(step_of("scan"), *arguments(), plan=made, offload="residual")
    with pytest.raises(PlanError, match="a Plan that offloads hidden"):
        auto_shard(step_of("scan"), plan=made, offload="none")
    assert plan(step_of("scan"), *arguments(), plan=made, offload="hidden").offload == made.offload


def test_unknown_names_list_those_that_there_are() -> None:
    with pytest.raises(PlanError, match="names 'hiden', which .* It has hidden, out, residual, optimizer"):
        plan(step_of("scan"), *arguments(), target="cpu:8", offload="hiden")
    with pytest.raises(PlanError, match="names 'residual'.* carry of a scan over stacked parameters"):
        plan(step_of("unrolled"), *arguments(), target="cpu:8", offload="residual")


@pytest.mark.parametrize(
    ("kind", "word", "reason"),
    [
        ("scan remat", "hidden", "jax.checkpoint computes it again"),
        ("scan", "out", "the result of a scanned layer is the next one's input, 'residual'"),
    ],
)
def test_a_word_that_moves_nothing_is_a_warning(kind: str, word: str, reason: str) -> None:
    with pytest.warns(AutoshardWarning, match=f"'{word}', which moves nothing to the host: .*{reason}"):
        made = plan(step_of(kind), *arguments(), plan="fsdp:8", offload=word)
    assert not made.offload


def test_a_recomputed_value_with_the_name_of_the_carry_is_a_warning() -> None:
    """The carry has no word then, and it stays on the device."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + checkpoint_name(jnp.tanh(x @ w["up"]), "residual") @ w["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    params = {name: w for name, w in arguments()[0].items() if name != "bias"}
    with pytest.warns(AutoshardWarning, match="the carry of scanned layers, which needs a name of its own here"):
        made = plan(jax.grad(loss), params, rows(), plan="fsdp:8", offload="residual")
    assert not made.offload


def test_the_optimizers_state_must_be_an_argument() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w: w - jnp.mean(x) * jnp.sum(jax.grad(lambda w: jnp.sum(w**2))(w)), params)

    with pytest.warns(AutoshardWarning, match="no state has the shape of a parameter"):
        plan(step, arguments()[0], rows(), target="cpu:1", offload="optimizer")


def test_a_class_takes_no_offload() -> None:
    class Model(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(PlanError, match="offload cannot be used on a class"):
        auto_shard(Model, offload="residual")


def test_gpus_are_allowed_with_a_note() -> None:
    made = plan(step_of("scan"), *arguments(), target="h100:8", plan="fsdp:8", offload="residual")
    assert any("XLA once computed wrong losses" in note for note in made.notes)


# --- modules ----------------------------------------------------------------------------------------------------------


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = checkpoint_name(nn.relu(nn.Dense(64)(x)), "hidden")
        return x + nn.Dense(32)(h), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(8)(layers()(x, None)[0])


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("words", ["fsdp:8", pytest.param("dp:2 tp:4", marks=pytest.mark.slow)])
def test_linen_layers(words: str) -> None:
    model, x = LinenModel(), rows()
    params = model.init(jax.random.key(0), x)
    moments = OPTIMIZER.init(params)

    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(jnp.asarray(model.apply(p, x)))))(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value, grads

    planned = auto_shard(step, plan=words, offload="residual+optimizer")
    assert_close(planned(params, moments, x), jax.jit(step)(params, moments, x))
    assert set(planned.plan(params, moments, x).offload) == {"residual", "optimizer"}


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(checkpoint_name(jnp.tanh(self.up(x)), "hidden"))


@pytest.mark.parametrize("words", ["fsdp:8", pytest.param("dp:2 tp:4", marks=pytest.mark.slow)])
def test_nnx_modules(words: str) -> None:
    def step(model: NnxModel, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    results = []
    for run in (nnx.jit(step), auto_shard(step, plan=words, offload="hidden+optimizer")):
        model = NnxModel(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
        values = [run(model, optimizer, rows()) for _ in range(3)]
        results.append((values, jax.tree.map(np.asarray, nnx.state(model))))
        last = nnx.state(optimizer)
    assert_close(results[1], results[0])
    assert "pinned_host" in kinds(jax.tree.leaves(last))
