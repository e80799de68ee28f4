"""`microbatches=` in plans and planned functions."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Plan, auto_shard, plan
from autoshard.errors import AutoshardWarning, PlanError
from tests.sharding.microbatches.programs import make_step, state, tokens


@functools.cache
def single():
    return jax.device_get(jax.jit(make_step("masked"))(state(), tokens()))


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("words", ["dp:2 fsdp:2 tp:2", pytest.param("fsdp:4 tp:2", marks=pytest.mark.slow)])
def test_a_sharded_step_equals_one_device(words):
    step = auto_shard(make_step("masked"), plan=words, microbatches=2)
    made = jax.device_get(step(state(), tokens()))
    assert step.plan(state(), tokens()).microbatches == 2
    for actual, expected in zip(jax.tree.leaves(made), jax.tree.leaves(single()), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def test_the_plan_reports_them_and_keeps_them_in_json():
    count: Any = np.int64(4)  # any integer will do
    made = plan(make_step(), state(), tokens(), target="cpu:2", plan="fsdp:2", microbatches=count)
    assert "microbatches: 4, one after the other" in str(made)
    read = Plan.from_json(made.to_json())
    assert read.microbatches == 4
    assert read.bind(make_step(), state(), tokens()).microbatches == 4
    alone = plan(make_step(), state(), tokens(), target="cpu:2", plan="fsdp:2")
    assert alone.microbatches == 1 and '"microbatches"' not in alone.to_json()
    assert made.estimate.peak_memory_bytes < alone.estimate.peak_memory_bytes


def test_offloaded_values_are_cut_too():
    made = plan(make_step(remat="full"), state(), tokens(), target="cpu:2", plan="fsdp:2", microbatches=2,
                offload="residual")  # fmt: skip
    assert made.offload and made.microbatches == 2
    assert "annotate_device_placement" in made.jit().lower(state(), tokens()).as_text()


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "microbatches=3 does not divide the batch of 8 rows, which is in dimension 0 of .*. Use one of 1, 2, 4, 8"),
        (0, "microbatches is 0; give the number of parts of the batch, such as 4"),
        (True, "microbatches is True; give the number"),
        ("2", "microbatches is '2'; give the number"),
    ],
)
def test_numbers_that_cannot_be(count, message):
    with pytest.raises(PlanError, match=message):
        plan(make_step(), state(), tokens(), target="cpu:2", microbatches=count)


def test_steps_that_cannot_be_cut():
    with pytest.raises(
        PlanError, match=r"microbatches=2, but the function cannot be cut: 'sub' at .*or allow_numerics=True: each mic"
    ):
        plan(make_step("batch norm"), state(), tokens(), target="cpu:2", microbatches=2)
    with pytest.raises(PlanError, match="microbatches=2, but no argument has a batch"):
        plan(lambda x: x * 2, jnp.float32(1), target="cpu:2", microbatches=2)

    def step(weight, x, y):
        rows = jnp.concatenate([x, y])
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(rows @ w) @ w.T) ** 2))(weight)
        return weight - grad, loss

    with pytest.raises(PlanError, match="microbatches=2, but the function makes the batch of 16 rows itself"):
        plan(step, jnp.ones((3, 4)), jnp.ones((8, 5, 3)), jnp.ones((8, 5, 3)), target="cpu:2", microbatches=2)


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("kind", "remat", "unrolled", "lines"),
    [("batch norm", "full", False, "'sub' at .*, 'add_any' at "),
     ("load balance", "none", False, "'mul' at .*, 'div' at "), ("head norm", "none", True, "'div' at ")],
)  # fmt: skip
def test_sums_of_each_microbatch_where_numerics_may_change(kind, remat, unrolled, lines):
    """The loss is the mean of those of the microbatches, each with its own statistics; sharded over devices, too."""
    with jax.enable_x64(True):
        args = state(jnp.float64), tokens()
        options: Any = {"mesh": {"data": 2}, "plan": {"data": ["batch"]}}
        step = auto_shard(make_step(kind, remat, unrolled), **options, microbatches=4, allow_numerics=True)
        expected = jax.jit(make_step(kind, remat, unrolled, parts=4))(*args)
        made = step.plan(*args)
        for actual, wanted in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)
    [note] = [note for note in made.notes if "numerics" in note]
    assert re.match(rf"microbatches=4 changes the numbers, as allow_numerics permits: {lines}", note)
    read = Plan.from_json(made.to_json())
    assert read.allow_numerics
    with jax.enable_x64(True):
        assert read.bind(make_step(kind, remat, unrolled), *args).notes == made.notes


def test_numerics_change_only_where_a_sum_is_needed():
    args = state(), tokens()
    exact = plan(make_step("masked"), *args, target="cpu:2", plan="dp:2", microbatches=4)
    allowed = plan(make_step("masked"), *args, target="cpu:2", plan="dp:2", microbatches=4, allow_numerics=True)
    assert allowed.fingerprint == exact.fingerprint and not allowed.allow_numerics and allowed.notes == exact.notes


def test_what_stays_refused_where_numerics_may_change():
    with pytest.raises(
        PlanError, match=r"compares each row of the batch with other rows. Leave microbatches out, or acc"
    ):
        plan(make_step("contrastive"), state(), tokens(), target="cpu:2", microbatches=2, allow_numerics=True)
    count: Any = 2
    with pytest.raises(PlanError, match="allow_numerics is 2; give True or False"):
        plan(make_step(), state(), tokens(), target="cpu:2", microbatches=2, allow_numerics=count)
    made = plan(make_step(), state(), tokens(), target="cpu:2", plan="dp:2", microbatches=2)
    with pytest.raises(PlanError, match="allow_numerics is True, but plan is a Plan with allow_numerics=False"):
        plan(make_step(), state(), tokens(), plan=made, allow_numerics=True)


@pytest.mark.parametrize("numerics", [False, True])
def test_a_step_of_several_updates_is_refused(numerics):
    step, options = make_step(), {"target": "cpu:2", "microbatches": 2, "allow_numerics": numerics}

    def scanned(state, batches):
        return jax.lax.scan(step, state, batches)

    def repeated(state, batch):
        return jax.lax.fori_loop(0, jnp.sum(batch), lambda _, state: step(state, batch)[0], state)

    for fn, batch in ((scanned, jnp.stack([tokens()] * 3)), (repeated, tokens())):
        message = (
            f"but '(scan|while)' at .*{fn.__name__}\\) updates state/.* in each iteration, .* call it several times"
        )
        with pytest.raises(PlanError, match=message):
            plan(fn, state(), batch, **options)


@pytest.mark.whole
def test_auto_takes_the_first_number_that_fits():
    fn, args = make_step(remat="full"), (state(), tokens())
    need = [
        plan(fn, *args, target="cpu:2", plan="fsdp:2", microbatches=n).estimate.peak_memory_bytes for n in (1, 2, 4)
    ]
    assert need[2] < need[1] < need[0]
    for limit, expected in ((2 * need[0], 1), ((need[1] + need[2]) / 2, 4)):
        made = plan(fn, *args, target="cpu:2", plan="fsdp:2", microbatches="auto", memory_limit_bytes=limit)
        assert made.microbatches == expected and made.fits
        assert f"and chose {expected}" in made.notes[-1]


def test_auto_says_why_there_are_no_more():
    made = plan(make_step("batch norm"), state(), tokens(), target="cpu:2", plan="dp:2", microbatches="auto")
    assert made.microbatches == 1
    assert "chose 1. microbatches=2, but the function cannot be cut: 'sub'" in made.notes[-1]


def test_a_plan_keeps_its_number():
    made = autoshard.plan(make_step(), state(), tokens(), target="cpu:2", plan="fsdp:2", microbatches=2)
    with pytest.raises(PlanError, match="microbatches is 4, but plan is a Plan with microbatches=2"):
        plan(make_step(), state(), tokens(), plan=made, microbatches=4)


def test_the_batch_stays_the_one_that_was_cut():
    # In the cut step a weight dimension has more bytes of results than the rows, and would be taken for the batch.
    def loss(p, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["a"]) @ p["b"], None

        return (jax.lax.scan(layer, x, p)[0] ** 2).mean()

    def gradient(p, x):
        return jax.grad(loss)(jax.tree.map(lambda w: w[:1], p), x)

    p = {"a": jnp.ones((4, 32, 64)), "b": jnp.ones((4, 64, 32))}
    made = plan(gradient, p, jnp.ones((48, 32)), target="cpu:2", plan="fsdp:2", microbatches=4)
    assert {leaf.path: leaf.role for leaf in made.inputs} == {"0/a": "parameter", "0/b": "parameter", "1": "data"}


@pytest.mark.filterwarnings("ignore:.*no rule for 'new_ref'")
def test_reads_of_a_mutable_array_follow_its_writes():
    def total(w, x):
        ref = jax.new_ref(jnp.zeros(4))
        ref[...] = (x @ w).sum(0)
        return ref[...]

    w, x = jnp.arange(16.0).reshape(4, 4), jnp.ones((8, 4))
    np.testing.assert_allclose(auto_shard(total, target="cpu:2", microbatches=2)(w, x), (x @ w).sum(0))


def test_too_few_rows_in_a_microbatch_are_reported():
    with pytest.warns(AutoshardWarning, match=r"Use fewer microbatches \(now 4, and each has 2 rows\)"):
        plan(make_step(), state(), tokens(), target="cpu:4", plan="dp:4", microbatches=4)


def test_gradients_in_16_bits_of_a_scale_in_float32():
    # The gradient of the scale is a sum over the batch in float32, which is cast to bfloat16 within the layers.
    def loss(p, x):
        def layer(x, w):
            w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
            wide = x.astype(jnp.float32)
            return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True)) * w["scale"]).astype(x.dtype) @ w["a"], None

        return (jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), p)[0].astype(jnp.float32) ** 2).mean()

    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    p = {"scale": draw(jax.random.key(0), (2, 16)), "a": draw(jax.random.key(1), (2, 16, 16)) / 4}
    x = draw(jax.random.key(2), (8, 16))
    made, expected = (
        auto_shard(jax.grad(loss), plan="fsdp:2", target="cpu:2", microbatches=4)(p, x),
        jax.grad(loss)(p, x),
    )
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)
