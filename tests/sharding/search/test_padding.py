"""The reported gain of padding equals that of the plan of the padded program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, plan
from autoshard.errors import PlanError
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step

WORK = workload("gpt-350m").with_(batch_size=64)


def planned(vocab: int, words: str, **options) -> Plan:
    return plan(*workload_step(WORK.with_(vocab=vocab)), target="h100:1x8", plan=words, donate_argnums=0, **options)


def test_the_padded_price_is_that_of_the_padded_program():
    unpadded, padded = planned(50257, "tp:8"), planned(50264, "tp:8")
    (padding,) = unpadded.padding
    assert (padding.axis, padding.size, padding.padded) == ("vocab", 50257, 50264)
    assert (padding.ways, padding.words) == (8, "tp:8")
    assert padding.step_time_us == pytest.approx(padded.estimate.step_time_us, rel=0.02)
    assert padding.peak_memory_bytes == pytest.approx(padded.estimate.peak_memory_bytes, rel=0.02)
    assert padding.step_time_us < 0.95 * unpadded.estimate.step_time_us
    assert not padded.padding


def test_every_report_has_it():
    original = planned(50257, "tp:8")
    gain = r"\d+ ms \(-\d+\.\d %\) and [\d.]+ GiB less"
    words = rf"vocab 50257 is not divisible by 8. Padded to 50264, a step would take {gain}"
    reread = Plan.from_json(original.to_json())
    assert reread.padding == original.padding
    for text in (str(original), original.explain("params/embed"), str(reread)):
        assert re.search(words, " ".join(text.split())), text
    assert "Padded to" not in original.explain("params/blocks/attention/wq")


def test_the_page_has_it(tmp_path):
    planned(50257, "tp:8").to_html(tmp_path / "plan.html")
    assert "Padded to 50264" in (tmp_path / "plan.html").read_text()


def test_padding_without_gain_is_not_reported():
    """With tp:4, repeated logits cost less than 0.5 %. ZeRO stores the state along another dimension."""
    assert not planned(50257, "dp:2 tp:4 seq").padding
    assert not planned(50257, "fsdp:8").padding


def test_the_error_names_padding_with_which_the_plan_fits():
    with pytest.raises(PlanError, match="or vocab padded from 50257 to 50264"):
        planned(50257, "tp:8", memory_limit_bytes=8 * 2**30)


def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def train(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))


def shapes(hidden: int, embed: int = 1001) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    array = jax.ShapeDtypeStruct
    weights = {"up": array((embed, hidden), "float32"), "down": array((hidden, embed), "float32")}
    return weights, array((4096, embed), "float32")


def test_another_plan_that_is_the_best_with_padding():
    """The plan shards the batch. With a slightly larger hidden size, sharding that would be faster."""
    array = jax.ShapeDtypeStruct
    weights = {"up": array((1024, 65535), "float32"), "down": array((65535, 1024), "float32")}
    planned = plan(train, weights, array((64, 1024), "float32"), target="h100:1x8", donate_argnums=0)
    (padding,) = planned.padding
    assert (padding.size, padding.padded) == (65535, 65536)
    assert padding.words != planned.chosen and "tp" in padding.words
    weights = {"up": array((1024, 65536), "float32"), "down": array((65536, 1024), "float32")}
    padded = plan(train, weights, array((64, 1024), "float32"), target="h100:1x8", donate_argnums=0)
    assert padding.step_time_us == pytest.approx(padded.estimate.step_time_us, rel=0.1)


def test_state_without_a_divisible_dimension():
    """With fsdp:8 and no size divisible by 8, the state is replicated. With one dimension padded, it is sharded."""
    unpadded = plan(train, *shapes(20001), target="h100:1x8", plan="fsdp:8", donate_argnums=0)
    padded = plan(train, *shapes(20008), target="h100:1x8", plan="fsdp:8", donate_argnums=0)
    unpadded_bytes, padded_bytes = (
        sum(p.estimate.memory_bytes["parameter"] for p in [each]) for each in (unpadded, padded)
    )
    assert unpadded_bytes == pytest.approx(8 * padded_bytes, rel=0.01)
    limit = (unpadded.estimate.peak_memory_bytes + padded.estimate.peak_memory_bytes) / 2
    with pytest.raises(PlanError, match="padded from 20001 to 20008"):
        plan(train, *shapes(20001), target="h100:1x8", plan="fsdp:8", memory_limit_bytes=limit, donate_argnums=0)


def grouped(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    queries = jnp.einsum("be,ekgh->bkgh", x, w["q"])
    keys = jnp.einsum("be,ekh->bkh", x, w["k"])
    return jnp.sum(jnp.einsum("bkgh,bkh,kghe->be", queries, keys, w["o"]) ** 2)


def attention(heads: int) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    q, k, o = (1024, heads, 3, 61), (1024, heads, 61), (heads, 3, 61, 1024)
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in dict(q=q, k=k, o=o).items()}
    return weights, jax.ShapeDtypeStruct((65536, 1024), "float32")


@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
def test_padding_of_key_value_heads():
    """Seven key-value heads with three query groups each, over four devices, padded to eight heads."""
    gradient = jax.grad(grouped)
    planned = plan(gradient, *attention(7), target="h100:1x8", plan="dp:2 tp:4")
    padded = plan(gradient, *attention(8), target="h100:1x8", plan="dp:2 tp:4")
    (padding,) = [p for p in planned.padding if p.size == 7]
    assert padding.padded == 8
    assert padding.step_time_us == pytest.approx(padded.estimate.step_time_us, rel=0.02)


@pytest.mark.filterwarnings("ignore::autoshard.errors.AutoshardWarning")  # devices repeat work
@pytest.mark.parametrize("cp", [3, 9])
def test_a_sequence_is_padded_by_whole_blocks_of_a_kernel(cp: int):
    """Splash attention needs shards that consist of whole blocks of 128 positions."""
    step = workload_step(WORK.with_(batch_size=27))
    unpadded = plan(*step, target="v6e:3x3", plan=f"dp:{9 // cp} cp:{cp}", donate_argnums=0)
    (padding,) = unpadded.padding
    assert (padding.axis, padding.size, padding.ways) == ("seq", 1024, cp)
    assert padding.padded == 128 * 9
    assert any(f"seq 1024 (8 blocks of 128) is not divisible by cp {cp}" in note for note in unpadded.notes)


def test_an_axis_beside_a_kernel_is_padded_by_elements():
    step = workload_step(WORK.with_(vocab=50257))
    (padding,) = plan(*step, target="v5e:2x4", plan="tp:8", donate_argnums=0).padding
    assert (padding.axis, padding.size, padding.padded) == ("vocab", 50257, 50264)


@pytest.mark.filterwarnings("ignore::autoshard.errors.AutoshardWarning")  # devices repeat work
def test_axes_that_count_blocks_together_are_as_large_as_the_sequence():
    """Another operator reshapes the sequence into two halves. So the number of blocks has two logical axes."""
    step, state, batch = workload_step(WORK.with_(batch_size=27))

    def halves(state, batch):
        state, metrics = step(state, batch)
        return state, metrics, jnp.sum(jnp.tanh(batch["mask"].reshape(27, 2, 512)), 1)

    made = plan(halves, state, batch, target="v6e:3x3", plan="dp:3 cp:3", donate_argnums=0)
    texts = [note for note in made.notes if "not divisible by cp 3" in note]
    assert texts and all("seq 1024 (2 blocks of 512)" in t or "1024 (4 blocks of 256)" in t for t in texts)
