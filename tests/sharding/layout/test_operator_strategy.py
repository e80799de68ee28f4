"""How the work of one operator is counted and sharded."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.sharding.layout.operator_strategy import OperandSpecs, choose_strategy
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.program.flops import flops_of
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import build


def convolution(groups, stride, padding):
    def fn(image, kernel):
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), padding, feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    return fn


def weight_gradient(fn, *shapes):
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
def test_the_flops_of_a_contraction_and_of_its_gradient(fn, shapes, flops):
    counted = [flops_of(op) for op in contractions(weight_gradient(fn, *shapes))]
    ragged = fn(*map(jnp.ones, shapes)).shape == (64, 32)  # its gradient multiplies all rows for each of 4 groups
    assert counted == [flops, 4 * flops if ragged else flops]  # forward, and the gradient of the weights


def test_a_mesh_axis_is_assigned_to_the_part_of_a_dimension_that_it_shards():
    op = next(op for op in build(jax.make_jaxpr(lambda x: x.reshape(8, 4))(jnp.ones(32))).ops() if op.name == "reshape")
    mesh = {"a": 8, "b": 2, "c": 3}
    assert op.rule is not None
    merged = op.rule.operands[0][0]
    assert len(merged) == 2
    factors_of_axes = OperandSpecs(op.rule.operands, [128], [(("a", "b"),)], op.rule, mesh).factors_of_axes
    assert factors_of_axes == [{"a": merged[0], "b": merged[1]}]
    assert OperandSpecs(op.rule.operands, [128], [(("a", "c"),)], op.rule, mesh).factors_of_axes == [
        {"a": merged[0], "c": ""}
    ]


# --- the choice ---


def test_positions_are_gathered_with_the_values_there():
    def moves(rows, positions):
        x = jax.ShapeDtypeStruct((rows, positions), jnp.bfloat16)
        op = next(op for op in build(jax.make_jaxpr(lambda x: jnp.argmax(x, -1))(x)).ops() if op.name == "argmax")
        mesh, rule = {"dp": 2, "tp": 4}, op.rule
        assert rule is not None
        operands = OperandSpecs(rule.operands, [2 * rows * positions], [(("dp",), ("tp",))], rule, mesh)
        results = OperandSpecs(rule.results, [4 * rows], [(("dp",),)], rule, mesh)
        return choose_strategy(rule, operands, results, mesh, 0, LinkPrices(1e3)).moves

    (gather,) = moves(16, 4096)
    assert gather[:3] == ("all-gather", ("tp",), -1)
    assert gather.local_bytes == 8 * (4 + 2) and gather.wire_bytes == 3 * 8 * (4 + 2)
    assert [move.array for move in moves(16, 8)] == [0]  # two elements of each shard are fewer bytes than these
    assert moves(0, 8) == ()


WHOLE = ((), ())


def strategy(shapes, specs, want, mesh, flops_per_byte):
    """The strategy of `x @ w` with operands sharded as `specs` and the wanted sharding `want` of its result."""
    (m, k), (_, n) = shapes
    rule = Rule.parse("m k, k n -> m n; reduce k", *(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    operands = OperandSpecs(rule.operands, [4 * m * k, 4 * k * n], specs, rule, mesh)
    results = OperandSpecs(rule.results, [4 * m * n], [want], rule, mesh)
    return choose_strategy(rule, operands, results, mesh, 2 * m * k * n, LinkPrices(flops_per_byte))


@pytest.mark.parametrize(
    ("flops_per_byte", "factor", "array", "sent"),
    [(10, None, 0, 7 / 8 * 4 * 4096 * 8), (1, "m", -1, 7 / 8 * 4 * 4096 * 64)],
)
def test_work_is_repeated_where_communication_would_cost_more(flops_per_byte, factor, array, sent):
    sharded = strategy([(4096, 8), (8, 64)], [(("a",), ()), WHOLE], WHOLE, {"a": 8}, flops_per_byte)
    assert sharded.factors == {"a": factor}
    assert [(m.kind, m.array, m.wire_bytes) for m in sharded.moves] == [("all-gather", array, sent)]


def test_a_partial_is_reduce_scattered_to_the_wanted_sharding_or_all_reduced():
    specs = [((), ("a",)), (("a",), ())]
    replicated = strategy([(64, 128), (128, 64)], specs, WHOLE, {"a": 4}, 0.01)
    sharded = strategy([(64, 128), (128, 64)], specs, ((), ("a",)), {"a": 4}, 0.01)
    assert replicated.factors == sharded.factors == {"a": "k"}
    assert [(m.kind, m.array, m.wire_bytes) for m in replicated.moves] == [("all-reduce", -1, 2 * 3 / 4 * 4 * 64 * 64)]
    assert [(m.kind, m.array, m.wire_bytes) for m in sharded.moves] == [("reduce-scatter", -1, 3 / 4 * 4 * 64 * 64)]


def test_a_factor_is_sharded_only_as_far_as_all_axes_divide_it():
    mesh, specs = {"a": 2, "b": 4}, [(("a",), ()), WHOLE]
    fits = strategy([(8, 16), (16, 16)], specs, (("a", "b"), ()), mesh, 0.01)
    small = strategy([(4, 16), (16, 16)], specs, (("b",), ()), mesh, 0.01)
    assert fits.factors == {"a": "m", "b": "m"} and small.factors == {"a": "m", "b": None}


@pytest.mark.parametrize(
    ("order", "moves"),
    [
        (("a", "b"), [("all-gather", ("b",), 3 * 4096), ("all-to-all", ("a",), 1 / 2 * 4 * 4096)]),
        (("b", "a"), [("all-to-all", ("a",), 1 / 2 * 4096), ("all-gather", ("b",), 3 * 4096)]),
    ],
)
def test_only_the_minor_mesh_axis_of_a_dimension_can_move_to_another_one(order, moves):
    """The weight is large and stays where it is: the rows move from `m` to `k` over `a`, and are gathered over `b`."""
    mesh, specs = {"a": 2, "b": 4}, [(order, ()), (("a",), ("b",))]
    sharded = strategy([(8, 1024), (1024, 512)], specs, ((), ("b",)), mesh, 0.01)
    assert sharded.factors == {"a": "k", "b": "n"}
    assert [(m.kind, m.axes, m.wire_bytes) for m in sharded.moves if m.array == 0] == moves


@pytest.mark.parametrize(("size", "behind"), [(2, "n"), (4, None)])
def test_a_factor_is_sharded_only_if_earlier_factors_are_fully_sharded(size, behind):
    """Shards of a merged dimension are contiguous: `n` may be sharded if each shard has one `m`, not two."""
    rule = Rule.parse(f"m n -> (m n); where m={size} n=4")
    mesh = {"a": 2, "b": 2}
    operands = OperandSpecs(rule.operands, [1024], [(("a",), ("b",))], rule, mesh)
    results = OperandSpecs(rule.results, [1024], [((),)], rule, mesh)
    plan = choose_strategy(rule, operands, results, mesh, flops=1e9, prices=LinkPrices(1.0))
    assert plan.factors == {"a": "m", "b": behind}
    gathered = [move.axes for move in plan.moves if move.kind == "all-gather" and not move.array]
    assert gathered == ([("b",)] if behind is None else [])


def test_a_tensor_is_gathered_over_all_its_axes_at_once():
    """An array sharded 16 ways by two axes of 4 is sent as 15 shards, not as 3 and then 3 larger ones."""
    rule = Rule.parse("b m, m n -> b n; reduce m; where b=64 m=64 n=64")
    mesh = {"a": 4, "b": 4}
    operands = OperandSpecs(rule.operands, [1 << 20, 1600], [(("a", "b"), ()), ((), ("a", "b"))], rule, mesh)
    results = OperandSpecs(rule.results, [1 << 20], [(("a", "b"), ())], rule, mesh)
    plan = choose_strategy(rule, operands, results, mesh, flops=1e9, prices=LinkPrices(1.0))
    assert [(m.kind, m.axes, m.array, m.wire_bytes) for m in plan.moves] == [("all-gather", ("a", "b"), 1, 1500)]


def test_a_gradient_is_reduce_scattered_before_it_is_all_reduced():
    rule = Rule.parse("b m, b n -> m n; reduce b; where b=64 m=64 n=64")
    mesh = {"a": 2, "b": 4}
    operands = OperandSpecs(rule.operands, [1 << 20, 1 << 20], [(("a", "b"), ())] * 2, rule, mesh)
    results = OperandSpecs(rule.results, [1600], [((), ("b",))], rule, mesh)
    plan = choose_strategy(rule, operands, results, mesh, flops=1e9, prices=LinkPrices(1.0))
    expected = [("reduce-scatter", ("b",), 1600 * 3 / 4), ("all-reduce", ("a",), 2 * 1 / 2 * 400)]
    assert [(m.kind, m.axes, m.wire_bytes) for m in plan.moves] == expected


def test_one_reduction_over_two_mesh_axes_is_cheaper_than_a_gather_over_one():
    """Alone, the reduction over `a` costs more than the gather of the rows over `a`."""
    rule = Rule.parse("b m, b n -> m n; reduce b; where b=64 m=64 n=64")
    mesh = {"a": 2, "b": 8}
    operands = OperandSpecs(rule.operands, [4800, 4800], [(("a", "b"), ())] * 2, rule, mesh)
    results = OperandSpecs(rule.results, [1600], [WHOLE], rule, mesh)
    plan = choose_strategy(rule, operands, results, mesh, flops=0, prices=LinkPrices(1.0))
    assert plan.factors == {"a": "b", "b": "b"}
    assert [(m.kind, m.axes, m.wire_bytes) for m in plan.moves] == [("all-reduce", ("a", "b"), 2 * 15 / 16 * 1600)]


@pytest.mark.parametrize(("size", "joined"), [(64, "b"), (24, None)])
def test_mesh_axes_join_a_reduction_only_if_they_divide_its_factor(size, joined):
    """Eight devices divide 24 rows, and 16 do not."""
    rule = Rule.parse(f"b m, b n -> m n; reduce b; where b={size} m=64 n=64")
    mesh = {"a": 2, "b": 8}
    operands = OperandSpecs(rule.operands, [1600, 4800], [(("a",), ()), (("b",), ())], rule, mesh)
    results = OperandSpecs(rule.results, [1600], [WHOLE], rule, mesh)
    assert choose_strategy(rule, operands, results, mesh, 0, LinkPrices(1.0)).factors == {"a": joined, "b": "b"}


def test_forced_mesh_axes_join_no_reduction():
    rule = Rule.parse("b m, b n -> m n; reduce b; where b=64 m=64 n=64")
    mesh = {"a": 2, "b": 8}
    operands = OperandSpecs(rule.operands, [4800, 4800], [(("a", "b"), ())] * 2, rule, mesh)
    results = OperandSpecs(rule.results, [1600], [WHOLE], rule, mesh)
    forced = {"a": ["b"], "b": [None]}
    assert choose_strategy(rule, operands, results, mesh, 0, LinkPrices(1.0), forced).factors == {"a": "b", "b": None}


@pytest.mark.parametrize(("machine", "kind"), [("v5e:2x4", "all-gather"), ("h100:1x8", "all-to-all")])
def test_an_all_to_all_is_avoided_where_it_takes_longer_than_a_gather(machine, kind):
    """The rows of `x` are sharded, and columns of `x @ w` are wanted: `x` is gathered, or the product is moved.

    The gather sends 7/8 of x, 1.5 times what the all-to-all sends, 7/8 of a shard of the product."""
    mesh, shapes = {"a": 8}, ((64, 768), (768, 4096))
    rule = Rule.parse("m k, k n -> m n; reduce k", *(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    operands = OperandSpecs(rule.operands, [64 * 768, 768 * 4096], [(("a",), ()), WHOLE], rule, mesh)
    results = OperandSpecs(rule.results, [64 * 4096], [((), ("a",))], rule, mesh)
    moves = choose_strategy(rule, operands, results, mesh, 2**40, find_target(machine).link_prices).moves
    assert [m.kind for m in moves] == [kind]
