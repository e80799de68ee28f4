"""Gathered operands that several operators share."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.gathers.cast_lookups import cast_lookups
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build

VOCAB, WIDTH, ROWS, SEQ = 16_384, 512, 64, 128


def tied(cast_first):
    def loss(table, tokens):
        if cast_first:
            table = table.astype("bfloat16")
        x = table[tokens].astype("bfloat16")
        return jnp.mean(jnp.tanh(x @ table.astype("bfloat16").T).astype("float32"))

    return loss


SHAPES = jax.ShapeDtypeStruct((VOCAB, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, SEQ), "int32")


@pytest.mark.parametrize(("cast_first", "target", "lives"), [(False, "v5e:2x4", 2), (True, "v5e:2x4", 1)])
def test_gathers_of_a_table_and_of_a_cast_of_it_have_their_own_lives(cast_first, target, lives):
    bound = bound_or_error(plan(jax.grad(tied(cast_first)), *SHAPES, plan="fsdp:8", target=target).bound)
    cost = bound.problem.cost(bound.layout)
    whole = [each for each in cost.live_buffers if each.nbytes == VOCAB * WIDTH * 2]
    ops = list(bound.problem.axes.program.ops())
    whole = [each for each in whole if ops[each.first[0]].results[0] not in bound.problem.roles.gradients]
    assert len(whole) == lives
    gathers = [
        each for each in cost.collectives
        if each.kind == "all-gather" and each.array in (0, 1) and each.local_bytes > 1e5
    ]  # fmt: skip
    assert len(gathers) == 1  # the time is that of one gather
    if lives == 2:
        lookup, head = sorted(whole, key=lambda each: each.first[0])
        assert ops[lookup.first[0]].name == "gather" and lookup.first[0] == lookup.last[0] < head.first[0]


def test_rows_that_are_only_cast_are_looked_up_in_the_narrower_type():
    def narrow(fn):
        shapes = [jnp.zeros(each.shape, each.dtype) for each in SHAPES]
        return list(cast_lookups(build(jax.make_jaxpr(fn)(*shapes))).values())

    assert narrow(lambda t, i: t[i].astype("bfloat16")) == [0.5]
    assert narrow(lambda t, i: t[i]) == []
    assert narrow(lambda t, i: t[i].astype("float32") * 2) == []
    assert narrow(lambda t, i: (y := t[i]).astype("bfloat16").astype("float32") + y) == []
    assert narrow(lambda t, i: t.astype("bfloat16")[i].astype("float32")) == []
