"""Rules: the text form and its errors, sizes, shards, the registry, the table."""

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive

from autoshard.spmdrules import Factor, Rule, RuleError, Shard, rule, rule_for, table
from autoshard.spmdrules.core.registry import registered, replicated_rule
from autoshard.spmdrules.core.rule import REDUCTIONS
from tests.spmdrules.rows import all_rows, f32

_NAMES = [*"abcdefg", "d0", "long_name"]
_KINDS = ["pass", "whole", "halo", "index", "offset", "reduce"]


@st.composite
def rules(draw):
    """Any rule: compound dimensions, dimensions of size 1, scalars, operators without operands or results."""
    arrays = draw(st.lists(_arrays(), max_size=5))
    split = draw(st.integers(0, len(arrays)))
    used = dict.fromkeys(f for dims in arrays for dim in dims for f in dim)
    compound = {f for dims in arrays for dim in dims if len(dim) > 1 for f in dim}
    factors = []
    for name in used:
        kind = draw(st.sampled_from(_KINDS))
        op = draw(st.sampled_from(REDUCTIONS)) if kind == "reduce" else None
        size = draw(st.one_of(st.none(), st.integers(2, 64))) if name in compound else None
        factors.append(Factor(name, size, kind, op))
    group = st.lists(st.integers(0, split - 1), min_size=1, max_size=3, unique=True).map(tuple)
    linear = draw(st.lists(group, max_size=2)) if split else []
    moves = draw(st.one_of(st.just(()), group)) if split else ()
    return Rule(tuple(arrays[:split]), tuple(arrays[split:]), tuple(factors), tuple(linear), moves)


@st.composite
def _arrays(draw):
    names = draw(st.permutations(_NAMES))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(0, 2))
        dims.append(tuple(names[:count]))
        names = names[count:]
    return tuple(dims)


@given(rules())
def test_parsing_is_the_inverse_of_printing(drawn):
    assert Rule.parse(drawn.text) == drawn
    assert str(drawn) == drawn.text


@pytest.mark.parametrize(
    "text",
    [
        "b m k, b k n -> b m n; reduce k; linear 0; linear 1",
        "b (h d) -> b h d; moves 0; where h=16",
        "a r -> a; reduce r:max",
        "v d, b -> b d; index v",
        "-> n; offset n",
        "[] -> []",
        "n (g c) s, (g o) c x -> n (g o) t; reduce c; whole s x t; where g=4",
        "s -> s; halo s",
        "a 1, [] -> a 1; linear 0 1",
    ],
)
def test_the_documented_forms_are_printed_as_they_were_read(text):
    assert Rule.parse(text).text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "write exactly one '->'"),
        ("a -> a -> a", "write exactly one '->'"),
        ("a, -> a", "an operand or result is empty"),
        ("a -> a; shrink a", "unknown clause 'shrink'"),
        ("a -> []; reduce a:mean", "unknown reduction 'mean'"),
        ("a -> a; whole a; index a", "two kinds"),
        ("a -> a; whole b", "occurs in no operand and no result"),
        ("a a -> a", "names factor 'a' twice"),
        ("(a -> a", "."),
        ("a -> a; linear 1", "names operand 1"),
    ],
)
def test_texts_that_do_not_parse_raise_with_the_reason(text, message):
    with pytest.raises(RuleError, match=message.replace("?", r"\?")):
        Rule.parse(text)


def test_sizes_are_taken_from_the_operands():
    rule = Rule.parse("b (h d) -> b h d; where h=4", f32(8, 12))
    assert {f.name: f.size for f in rule.factors} == {"b": 8, "h": 4, "d": 3}


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b -> a", [(4,)], "2 dimensions"),
        ("a -> a", [(4,), (4,)], "has 1 operand, but got 2"),
        ("a, a -> a", [(4,), (5,)], "size 5"),
        ("(a b) -> a b", [(12,)], "where a="),
        ("(a b) -> a b; where a=5", [(12,)], "size 12"),
        ("a 1 -> a", [(4, 2)], "size 2"),
    ],
)
def test_operands_that_do_not_fit_are_named(text, shapes, message):
    with pytest.raises(RuleError, match=message):
        Rule.parse(text, *(f32(*shape) for shape in shapes))


def test_a_factor_has_an_operation_exactly_if_it_reduces():
    with pytest.raises(RuleError, match="needs an operation"):
        Factor("k", 4, "reduce")
    with pytest.raises(RuleError, match="needs an operation"):
        Factor("k", 4, "pass", "sum")


def test_where_a_result_is_partial():
    rule = Rule.parse("v d, b k -> b d; index v; reduce k:max")
    assert [rule.partial(name, 0) for name in "vdbk"] == ["sum", None, None, "max"]


def test_a_shard_knows_its_shape_and_where_it_starts():
    rule = Rule.parse("(a b) c -> a b c; where a=4", f32(24, 8))
    shard = Shard(rule, {"a": 2, "c": 4}, {"a": 1, "c": 3})
    assert shard.shape(rule.operands[0]) == (12, 2)
    assert (shard.offset("a"), shard.offset("b"), shard.offset("c")) == (2, 0, 6)
    assert (shard.count("b"), shard.size("b")) == (1, 6)


def test_a_primitive_is_registered_once():
    with pytest.raises(RuleError, match="'add' already has a rule, autoshard.*add. A primitive has only one rule"):
        rule(lax.add_p)(lambda x, y, **_: Rule.parse("a, a -> a"))
    with pytest.raises(TypeError, match="lax.add_p"):
        rule(jnp.add)(lambda x, y, **_: Rule.parse("a, a -> a"))  # type: ignore[arg-type]


def test_an_unknown_primitive_has_no_rule_and_is_replicated():
    assert rule_for(Primitive("nobody_knows"), (f32(4),), {}) is None
    assert replicated_rule((f32(4, 2),), (f32(4),)).text == "w0_0 w0_1 -> r0_0; whole w0_0 w0_1 r0_0"


def test_every_rule_is_documented_by_its_map():
    for row in table():
        assert Rule.parse(row.text).text == row.text, row
        assert row.note.endswith("."), row
    assert len(table()) == len(list(registered()))


def test_every_rule_function_documents_a_map_that_one_of_its_rows_has():
    documented = {row.primitive: row.text for row in table()}
    expected = {text: set() for text in documented.values()}
    for row in all_rows():
        expected[documented[row.primitive]].add(_in_short(row.expected))
    without_row = {text: sorted(maps) for text, maps in expected.items() if maps and text not in maps}
    assert not without_row


def _in_short(text):
    """Removes what the documentation leaves out: sizes, and the dimension of an index vector."""
    return text.partition("; where")[0].replace(", b 1 ->", ", b ->").replace(", n 1, ", ", n, ")
