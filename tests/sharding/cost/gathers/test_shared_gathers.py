"""Gathered operands that several operators share."""

import jax
import jax.numpy as jnp

from autoshard import plan
from autoshard.sharding.cost.gathers.cast_lookups import cast_lookups
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.ir.program import build

VOCAB, WIDTH, ROWS, SEQ = 16_384, 512, 64, 4096  # the plan gathers the table: it is smaller than the rows


def loss(table, tokens):
    """The rows are looked up before they are cast, and the head takes a cast of all of the table."""
    x = table.at[tokens].get(mode="fill", wrap_negative_indices=False).astype("bfloat16")
    logits = jnp.einsum("bse,ve->bsv", x, table.astype("bfloat16"))
    return jnp.mean(jnp.tanh(logits).astype("float32"))


SHAPES = jax.ShapeDtypeStruct((VOCAB, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, SEQ), "int32")


def test_gathers_of_a_table_and_of_a_cast_of_it_have_their_own_lives():
    bound = bound_or_error(plan(jax.grad(loss), *SHAPES, plan="fsdp:8", target="v5e:2x4").bound)
    cost, ops = bound.problem.cost(bound.layout), list(bound.problem.axes.program.ops())
    whole = [each for each in cost.live_buffers if each.nbytes == VOCAB * WIDTH * 2]
    whole = [each for each in whole if ops[each.first[0]].results[0] not in bound.problem.roles.gradients]
    lookup, head = sorted(whole, key=lambda each: each.first[0])
    assert [ops[n].name for n in (*lookup.first, *lookup.last)] == ["gather"] * 2  # in the type of the cast
    assert lookup.last[0] < head.first[0] < head.last[0]
    gathers = [
        each for each in cost.collectives
        if each.kind == "all-gather" and each.array in (0, 1) and each.local_bytes > 1e5
    ]  # fmt: skip
    assert len(gathers) == 1  # the time is that of one gather


def test_rows_that_are_only_cast_are_looked_up_in_the_narrower_type():
    def narrow(fn):
        shapes = [jnp.zeros(each.shape, each.dtype) for each in SHAPES]
        return list(cast_lookups(build(jax.make_jaxpr(fn)(*shapes))).values())

    assert narrow(lambda t, i: t[i].astype("bfloat16")) == [0.5]
    assert narrow(lambda t, i: t[i]) == []
    assert narrow(lambda t, i: t[i].astype("float32") * 2) == []
    assert narrow(lambda t, i: (y := t[i]).astype("bfloat16").astype("float32") + y) == []
    assert narrow(lambda t, i: t.astype("bfloat16")[i].astype("float32")) == []
