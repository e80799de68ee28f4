"""A batch that a reshape splits is sharded as a whole, if its parts could not be sharded over all devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import Plan, auto_shard, plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.loops.split_rows import with_whole_rows
from autoshard.sharding.program.tracing import trace
from tests.sharding.programs import assert_close, descent, matrices, perceptron, rows_of

WIDTHS = (16, 128, 128, 32)


def few_shots(params, support, queries, labels):
    """A prototypical network: 5 classes with 16 rows each."""
    centres = perceptron(params, support).reshape(5, 16, -1).mean(1)
    distances = jnp.sum((perceptron(params, queries)[:, None] - centres) ** 2, axis=-1)
    return optax.softmax_cross_entropy_with_integer_labels(-distances, labels).mean()


def spread_of_groups(params, x):
    """The judge of a GAN: rows of 4 groups are compared, and the result is repeated for each group."""
    y = perceptron(params, x)
    spread = y.reshape(4, -1, y.shape[-1]).std(0).mean(-1)
    return jnp.mean(jnp.concatenate([y, jnp.tile(spread, 4)[:, None]], axis=-1) ** 2)


def attention(params, x):
    """Tokens of 4 sequences in one dimension. Most values have both parts apart."""
    y = (x @ params[0]).reshape(4, -1, 8, 16)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", y, y) / 4)
    return jnp.mean(perceptron(params, x + jnp.einsum("bhqk,bkhd->bqhd", scores, y).reshape(-1, 128)[:, :16]) ** 2)


FEW_SHOTS = (few_shots, (matrices(*WIDTHS), rows_of(80), rows_of(40), jnp.arange(40) % 5))
GROUPS = (spread_of_groups, (matrices(*WIDTHS), rows_of(16)))
IN_BLOCKS = (lambda *args: jax.checkpoint(spread_of_groups)(*args), (matrices(*WIDTHS), rows_of(16)))


def changes(loss, args, devices=8):
    traced = trace(descent(loss), args, {})
    found = analyse(traced)
    return with_whole_rows(traced, found.axes, found.roles, devices) is not traced


@pytest.mark.parametrize(("loss", "args"), [FEW_SHOTS, GROUPS, IN_BLOCKS], ids=["few_shots", "groups", "checkpoint"])
def test_all_devices_share_the_rows(loss, args):
    step = auto_shard(descent(loss), plan="dp:8")
    made = step.plan(*args)
    assert made.in_specs[1] == P("dp")
    assert not any("have work of their own" in note for note in made.notes)
    assert_close(step(*args), jax.jit(descent(loss))(*args))


@pytest.mark.parametrize("strategy", ["fsdp:8", "dp:2 fsdp:2 tp:2"])
@pytest.mark.parametrize(("loss", "args"), [FEW_SHOTS, GROUPS], ids=["few_shots", "groups"])
def test_other_plans_have_the_results_of_one_device(loss, args, strategy):
    assert_close(auto_shard(descent(loss), plan=strategy)(*args), jax.jit(descent(loss))(*args))


def test_a_plan_from_json_shards_the_rows_too():
    loss, args = FEW_SHOTS
    text = plan(descent(loss), *args, plan="dp:8").to_json()
    bound = Plan.from_json(text).bind(descent(loss), *args)
    assert bound.in_specs[1] == P("dp")
    assert_close(bound.jit()(*args), jax.jit(descent(loss))(*args))


def test_rows_stay_split_where_most_work_needs_the_parts():
    assert not changes(attention, (matrices(*WIDTHS), rows_of(4 * 64)))


def test_rows_stay_split_if_the_major_part_is_enough():
    assert changes(*GROUPS)
    assert not changes(*GROUPS, devices=4)


def test_rows_stay_split_in_a_branch():
    """The bodies of branches are not rewritten."""

    def loss(params, x):
        return jax.lax.cond(jnp.sum(x) > 0, lambda: spread_of_groups(params, x), lambda: jnp.mean(x))

    args = matrices(*WIDTHS), rows_of(16)
    assert not changes(loss, args)
