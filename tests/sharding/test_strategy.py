"""How the work of one operator is counted and cut."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.sharding.roles import CONTRACTIONS
from autoshard.sharding.strategy import Arrays, flops_of
from autoshard.spmdrules.program import build


def convolution(groups, stride, padding):
    def fn(image, kernel):
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), padding, feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    return fn


def of_weights(fn, *shapes):
    """The gradient of `fn` with respect to its second argument, at ones."""
    arrays = [jnp.ones(shape) for shape in shapes]
    return jax.make_jaxpr(lambda x, w: jax.grad(lambda w: jnp.sum(fn(x, w) ** 2))(w))(*arrays)


def contractions(closed):
    return [op for op in build(closed).ops() if op.name in CONTRACTIONS]


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (convolution(1, 1, "SAME"), [(8, 32, 32, 16), (3, 3, 16, 32)], 2 * 8 * 32 * 32 * 16 * 32 * 9),
        (convolution(1, 4, "VALID"), [(8, 32, 32, 16), (4, 4, 16, 32)], 2 * 8 * 8 * 8 * 16 * 32 * 16),
        (convolution(16, 1, "SAME"), [(8, 32, 32, 16), (3, 3, 1, 32)], 2 * 8 * 32 * 32 * 32 * 9),
        (lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (lambda a, b: lax.ragged_dot(a, b, jnp.full(4, 16, jnp.int32)), [(64, 16), (4, 16, 32)], 2 * 64 * 16 * 32),
    ],
    ids=["convolution", "patches", "depthwise", "batched", "ragged"],
)
def test_the_work_of_a_contraction_and_of_its_gradient(fn, shapes, flops):
    found = [flops_of(op) for op in contractions(of_weights(fn, *shapes))]
    assert found == [flops, flops]  # forward, and the gradient of the weights


def test_a_mesh_axis_is_taken_for_the_part_of_a_dimension_that_it_cuts():
    op = next(op for op in build(jax.make_jaxpr(lambda x: x.reshape(8, 4))(jnp.ones(32))).ops() if op.name == "reshape")
    mesh = {"a": 8, "b": 2, "c": 3}
    assert op.rule is not None
    merged = op.rule.operands[0][0]
    assert len(merged) == 2
    places = Arrays(op.rule.operands, [128], [(("a", "b"),)], op.rule, mesh).places
    assert places == [{"a": merged[0], "b": merged[1]}]
    assert Arrays(op.rule.operands, [128], [(("a", "c"),)], op.rule, mesh).places == [{"a": merged[0], "c": ""}]
