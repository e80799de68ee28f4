"""Errors of the caller are reported at once: they name the operator and the array, what is wrong and what to do."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from autoshard import AutoshardError, Factor, Rule, auto_shard, check_rule, operator, plan, propagate, rule
from autoshard.spmdrules import RuleError
from autoshard.spmdrules.core import registry

MESH = {"data": 2, "model": 4}
STRANGE: Any = jnp.sin  # a value that no parameter here accepts


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Registers the rules of these tests in a copy of the registry."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def declared(text, result=lambda *xs: xs[0]):
    """Calls an operator with this text on arrays of shapes (4, 6) and (6, 8)."""
    return operator(text, name="blend")(result)(jnp.ones((4, 6)), jnp.ones((6, 8)))


def primitive(rule_function):
    """Propagates through a primitive with one operand of size 8 and this rule function."""
    halve = Primitive("halve")
    halve.def_abstract_eval(lambda x: x)
    rule(halve)(rule_function)
    return propagate(halve.bind, f32(8), in_specs=P("data"), mesh=MESH)


def twice():
    own = Primitive("own")
    rule(own)(lambda x: Rule.parse("a -> a", x))
    rule(own)(lambda x: Rule.parse("a -> a; whole a", x))


def twice_in_one_call():
    own = Primitive("own")
    rule(own, own)(lambda x: Rule.parse("a -> a", x))


RULES = {
    "no arrow": (
        lambda: Rule.parse("a b"),
        "rule 'a b': write exactly one '->' between operands and results, as in 'm k, k n ->",
    ),
    "two arrows": (lambda: Rule.parse("a -> b -> c"), "write exactly one '->'"),
    "an empty operand": (lambda: Rule.parse("a, -> a"), "an operand or result is empty. Write a scalar as []."),
    "an open parenthesis": (lambda: Rule.parse("(a b -> a b"), "a parenthesis is not closed in '(a b'. Close it."),
    "no name": (lambda: Rule.parse("a-b -> a"), "cannot read 'a-b' in 'a-b'"),
    "an unknown clause": (
        lambda: Rule.parse("a b -> a; sum b"),
        "unknown clause 'sum'. Known clauses: reduce, whole, halo,",
    ),
    "an empty clause": (
        lambda: Rule.parse("a b -> a; where"),
        "clause 'where' is empty. Write, for example, 'where k=4'.",
    ),
    "an unknown factor": (lambda: Rule.parse("a -> a; whole c"), "'whole c' names a factor that occurs in no operand"),
    "an unknown reduction": (
        lambda: Rule.parse("a b -> a; reduce b:mean"),
        "unknown reduction 'mean'. Known reductions: sum, max",
    ),
    "two kinds": (lambda: Rule.parse("a b -> a; reduce b; whole b"), "factor 'b' has two kinds, reduce and whole"),
    "no size": (lambda: Rule.parse("(a b) -> a b; where b=x"), "'b=x' should be a size, such as b=16"),
    "not an operand number": (lambda: Rule.parse("a -> a; linear x"), "take operand numbers, such as 'linear 0 1'"),
    "no such operand": (
        lambda: Rule.parse("a -> a; linear 1"),
        "names operand 1, but the last operand is 0. Operands are numb",
    ),
    "a factor twice in an operand": (
        lambda: Rule.parse("a a -> a"),
        "rule 'a a -> a': operand 0 names factor 'a' twice. A factor can shard only one dimension of an array. Give",
    ),
    "a factor twice in a result": (lambda: Rule.parse("a -> a a"), "result 0 names factor 'a' twice."),
    "an unknown kind": (lambda: Factor("a", 4, STRANGE), "factor 'a': unknown kind '.*'. Known kinds: pass, reduce"),
    "another rank": (
        lambda: Rule.parse("a b -> a b", f32(4, 6, 8)),
        "rule 'a b -> a b': operand 0 is declared with 2 dimensions, but the argument has shape (4, 6, 8)",
    ),
    "more operands": (lambda: Rule.parse("a -> a", f32(4), f32(4)), "rule 'a -> a' has 1 operand, but got 2"),
    "sizes that disagree": (
        lambda: Rule.parse("a b, b c -> a c; reduce b", f32(4, 6), f32(8, 2)),
        "operand 1 dimension 0 (of (8, 2)) has size 8, but b is already 6",
    ),
    "a dimension that is not 1": (lambda: Rule.parse("a 1 -> a", f32(4, 6)), "has size 6, but it is declared as 1"),
    "unknown sizes": (
        lambda: Rule.parse("(a b) -> a b", f32(12)),
        "the sizes of a and b are unknown. Give one with 'where a=...'.",
    ),
    "an operator without a text": (
        lambda: operator(STRANGE),
        "@operator takes the rule as text, as in @operator('b d, d ->",
    ),
    "an operator's operands": (
        lambda: declared("a b -> a b"),
        "operator 'blend': rule 'a b -> a b' has 1 operand, but got 2. Correct the rule or the operands of this call.",
    ),
    "an operator's sizes": (
        lambda: declared("a b, a c -> a b"),
        "operator 'blend': rule 'a b, a c -> a b': operand 1 dimension 0 (of (6, 8)) has size 6, but a is already 4.",
    ),
    "an operator's results": (
        lambda: declared("a b, b c -> a b, a"),
        "operator 'blend': 'a b, b c -> a b, a' declares 2 results, but the function returns 1. Correct the rule or",
    ),
    "an operator's result": (
        lambda: declared("a b, b c -> b a"),
        "operator 'blend': result 0 has shape (4, 6), but 'a b, b c -> b a' declares (6, 4). Correct the rule or the",
    ),
    "a size that no operand has": (
        lambda: declared("a b, b c -> a d"),
        "operator 'blend': result 0 in 'a b, b c -> a d' has factor 'd', which no operand has. Give its size with",
    ),
    "a size that does not divide": (
        lambda: Rule.parse("(a b) -> a b; where a=5", f32(12)),
        "operand 0 dimension 0 (of (12,)) has size 12, which is not divisible by a = 5",
    ),
    "two sizes": (lambda: Rule.parse("(a b) -> a b; where a=2 a=3"), "factor 'a' has two sizes, 2 and 3"),
    "moves twice": (
        lambda: Rule.parse("a, b -> a, b; moves 0; moves 1"),
        "there are two 'moves' clauses. Name all the operands in one.",
    ),
    "an option that is an array": (
        lambda: operator("a -> a", name="blend")(lambda x, scale: x)(jnp.ones(4), scale=jnp.ones(4)),
        "operator 'blend': option 'scale' is of type ArrayImpl, which is not hashable. .* Pass arrays by position",
    ),
    "an operand that is a tree": (
        lambda: operator("a -> a", name="blend")(lambda x: x)({"w": jnp.ones(4)}),
        "operator 'blend': operand 0 is of type dict, not an array. Pass each leaf of a tree as its own positional",
    ),
    "a result that is a tree": (
        lambda: operator("a -> a", name="blend")(lambda x: {"w": x})(jnp.ones(4)),
        "result 0 is of type dict. Return one array or a flat tuple of arrays",
    ),
    "nested results": (
        lambda: operator("a -> a, a", name="blend")(lambda x: (x, (x, x)))(jnp.ones(4)),
        "result 1 is of type tuple. Return one array or a flat tuple of arrays",
    ),
    "a vjp that is not a pair": (
        lambda: operator("a -> a", vjp=STRANGE),
        "@operator('a -> a'): vjp must be a pair (fwd, bwd) of functions, where fwd may be None, but got",
    ),
    "propagate without a function": (
        lambda: propagate(3, f32(8), in_specs=None, mesh=MESH),
        "propagate takes a function followed by its arguments, as in propagate(fn, x, y), but got 3 first",
    ),
    "check_rule without a function": (
        lambda: check_rule(3, f32(8)),
        "check_rule takes a function followed by its arguments, as in check_rule(fn, x, y), but got 3 first",
    ),
    "a second rule": (
        twice,
        "primitive 'own' already has a rule, tests.*twice.* A primitive has only one rule: remove that one or",
    ),
    "a primitive twice in one rule": (twice_in_one_call, "primitive 'own' already has a rule"),
    "a rule of JAX's": (
        lambda: rule(lax.add_p)(lambda *xs: Rule.parse("a, a -> a")),
        "primitive 'add' already has a rule, autoshard.spmdrules.families.elementwise.add",
    ),
    "not a primitive": (lambda: rule(STRANGE), "@rule takes primitives, but got"),
    "no primitive at all": (lambda: rule(), "@rule got no primitive. Pass one or more, as in @rule(lax.add_p)."),
    "a rule that raises": (
        lambda: primitive(lambda x: 1 // 0),
        "the rule of 'halve', .*, failed for operands of shapes (8,): it raised ZeroDivisionError: ",
    ),
    "a rule of other arguments": (
        lambda: primitive(lambda x, y: Rule.parse("a, a -> a")),
        "the rule of 'halve', .*, failed for operands of shapes (8,): it raised TypeError: .* missing 1 required "
        "positional argument",
    ),
    "a rule function that returns None": (
        lambda: primitive(lambda x: None),
        "the rule of 'halve', .*: it returned None, which is not a Rule",
    ),
    "a rule of other operands": (
        lambda: primitive(lambda x: Rule.parse("a, b -> a")),
        "the rule of 'halve', .*, failed for operands of shapes (8,): rule 'a, b -> a' has 2 operands, but got 1",
    ),
    "a rule of other results": (
        lambda: primitive(lambda x: Rule.parse("a -> a, a", x)),
        "the rule of 'halve', .*, does not fit the equation at .*: 'a -> a, a' declares results of shapes "
        "[(8,), (8,)], but they have shapes [(8,)]. Correct",
    ),
    "a rule of other shapes": (
        lambda: primitive(lambda x: Rule.parse("(a b) -> a; whole b; where b=2", x)),
        "declares results of shapes [(4,)], but they have shapes [(8,)]. Correct the rule.",
    ),
}


def affine(params, x):
    return x @ params["w"] + params["b"]


ARGS = {"w": f32(16, 4), "b": f32(4)}, f32(8, 16)


def through(**given):
    return lambda: propagate(affine, *ARGS, **({"in_specs": None, "mesh": MESH} | given))


def planned(fixed, **given):
    return lambda: plan(affine, *ARGS, **({"mesh": MESH, "fixed": fixed} | given))


SPECS = {
    "longer than the rank": (
        through(in_specs=({"w": P(), "b": P("data", None)}, P())),
        "propagate(affine): argument 0/b (float32[4]): P('data', None) has 2 entries, but the array has rank 1. Remove",
    ),
    "an axis twice": (
        through(in_specs=(None, P("data", "data"))),
        "argument 1 .*: P('data', 'data') uses mesh axis 'data' twice. Keep it on one dimension.",
    ),
    "an unknown axis": (
        through(in_specs=(None, P("expert"))),
        "argument 1 .*: there is no mesh axis 'expert'. The mesh has 'data', 'model'.",
    ),
    "not an axis": (
        through(in_specs=(None, P(3))),
        "argument 1 .*: P(3,) has the entry 3, which is not an axis name or a tuple of axis names.",
    ),
    "a partial over a sharded axis": (
        through(in_specs=(None, P("data")), in_partial=(None, {"data": "sum"})),
        "argument 1 .*: it is both sharded and partial over 'data'. Use another mesh axis, or remove one.",
    ),
    "an unknown reduction over an axis": (
        through(in_partial=(None, {"data": "mean"})),
        "unknown reduction 'mean' over 'data'. Known reductions: sum",
    ),
    "a reduction that its type lacks": (
        through(in_partial=(None, {"data": "or"})),
        "argument 1 (float32[8,16]): 'or' over 'data' cannot reduce float32 terms.",
    ),
    "not a partial": (
        through(in_partial=(None, "data")),
        "in_partial at 1: 'data' is not a dict of partials. Write {mesh axis: operation}",
    ),
    "too few": (
        through(in_specs=(None,)),
        "in_specs does not match the tree: its length is 1, but that of the tree is 2. Give one Part",
    ),
    "another key": (
        through(in_specs=({"w": P(), "bias": P()}, P())),
        "in_specs does not match the tree at 0: it lacks b and"
        " the tree has no bias. Give one PartitionSpec or None for each array, or one for a whole subtree.",
    ),
    "another node": (
        through(in_specs=([P(), P()], P())),
        "in_specs does not match the tree at 0: got a list of length 2 where the tree has a dict of length 2.",
    ),
    "names instead of a spec": (
        through(in_specs=(None, "data")),
        "in_specs at 1: 'data' is not a spec. Write P(",
    ),
    "a tuple instead of a spec": (
        through(in_specs=(None, ("data", None))),
        "at 1: got ('data', None) where .* one array.",
    ),
    "a result's": (
        through(out_specs=P(None, None, "data")),
        "result 0 .*: P(None, None, 'data') has 3 entries, but the array has",
    ),
    "results'": (
        through(out_specs=(P(), P())),
        "out_specs does not match the tree: got (P(), P()) where .* one array.",
    ),
    "no mesh": (through(mesh=8), "mesh must be axis names with sizes, such as {'data': 4, 'model': 2}"),
    "no axis names": (through(mesh={1: 8}), "mesh must be axis names with sizes"),
    "fixed, longer": (
        planned({"1": P("data", None, None)}),
        "auto_shard(affine): fixed '1': P('data', None, None) has 3 "
        "entries, but the array has 2 dimensions (8, 16). Drop the last entries",
    ),
    "fixed, an axis twice": (
        planned({"1": P("data", "data")}),
        "fixed '1': .* uses mesh axis 'data' twice. Keep it on one",
    ),
    "fixed, an unknown axis": (
        planned({"1": P("expert")}),
        "fixed '1': .* names mesh axis 'expert', but the mesh is {'data': 2"
        ", 'model': 4}; use its names, or give mesh= with the names that the spec uses",
    ),
    "fixed, no axis": (planned({"1": P(3)}), "fixed '1': P(3,); give {path glob: PartitionSpec} on a named mesh"),
    "fixed, indivisible": (
        planned({"0/b": P(("data", "model"))}),
        "fixed '0/b' dim 0 has size 4, not divisible by mesh axes 'data' x 'model' (8). Pad it to 8, or drop",
    ),
    "fixed, no such path": (
        planned({"layers/*": P("data")}),
        "fixed 'layers/*' matches no input. There are params/b, params/w, x",
    ),
    "fixed, no spec": (
        planned({"1": "data"}),
        "fixed '1': 'data'; give {path glob: PartitionSpec} on a named mesh, or {path",
    ),
    "fixed, no table": (planned([P("data")]), "fixed is [P('data',)]; give {path glob: PartitionSpec}"),
    "fixed, no logical axis": (
        planned({"1": ("batch", "foo")}),
        "fixed '1': the program has no logical axis 'foo'; it has",
    ),
    "auto_shard": (
        lambda: auto_shard(affine, mesh=MESH, fixed={"0/w": P("x")})(*jax.tree.map(jnp.zeros_like, ARGS)),
        "auto_shard(affine): fixed '0/w': .* names mesh axis 'x'",
    ),
}


def as_pattern(message):
    """Escapes a message for `re`, except for `.*`, which matches anything."""
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize(("call", "message"), [*RULES.values(), *SPECS.values()], ids=[*RULES, *SPECS])
def test_error_message(call, message):
    with pytest.raises((AutoshardError, TypeError), match=as_pattern(message)) as caught:
        call()
    ours = "@rule", "@operator", "operator 'blend'", "propagate takes", "check_rule takes"
    assert isinstance(caught.value, AutoshardError) or str(caught.value).startswith(ours)


def test_all_errors_of_a_call_are_reported():
    with pytest.raises(AutoshardError) as caught:
        through(in_specs=({"w": P("a", "b", "c"), "b": P("data")}, P("q")))()
    lines = str(caught.value).splitlines()
    assert lines[0] == "propagate(affine): 5 errors" and len(lines) == 6


def test_a_rejected_registration_changes_nothing():
    own, other = Primitive("own"), Primitive("other")
    rule(own)(lambda x: Rule.parse("a -> a", x))
    before = dict(registry._RULES)
    with pytest.raises(RuleError):
        rule(other, own)(lambda x: Rule.parse("a -> a", x))
    assert registry._RULES == before


def test_sizes_of_a_rule_may_be_left_to_the_operands():
    propagation = primitive(lambda x: Rule.parse("a -> a"))
    assert propagation.out_specs == P("data") and not propagation.reshards


def test_a_spec_may_have_unreduced_axes():
    spec = P("data", unreduced=frozenset({"model"}))
    propagation = propagate(lambda x: x * 2, f32(8, 4), in_specs=spec, mesh=MESH)
    assert (
        propagation.in_specs == (spec,)
        and propagation.out_specs == P("data")
        and propagation.out_partial == {"model": "sum"}
    )
