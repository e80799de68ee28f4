"""What a caller gets wrong is told at once: the operator, the array, what is the matter and what to do."""

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
STRANGE: Any = jnp.sin  # what nothing here takes


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """The rules of these tests are nobody else's."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def declared(text, result=lambda *xs: xs[0]):
    """Calls an operator of that text on arrays of shapes (4, 6) and (6, 8)."""
    return operator(text, name="blend")(result)(jnp.ones((4, 6)), jnp.ones((6, 8)))


def primitive(give):
    """Propagates through a primitive of one operand of size 8, with a rule made by `give`."""
    halve = Primitive("halve")
    halve.def_abstract_eval(lambda x: x)
    rule(halve)(give)
    return propagate(halve.bind, f32(8), in_specs=P("data"), mesh=MESH)


def twice():
    own = Primitive("own")
    rule(own)(lambda x: Rule.parse("a -> a", x))
    rule(own)(lambda x: Rule.parse("a -> a; whole a", x))


def at_once():
    own = Primitive("own")
    rule(own, own)(lambda x: Rule.parse("a -> a", x))


RULES = {
    "no arrow": (lambda: Rule.parse("a b"), "rule 'a b': write one '->' between operands and results: 'm k, k n ->"),
    "two arrows": (lambda: Rule.parse("a -> b -> c"), "write one '->'"),
    "an empty operand": (lambda: Rule.parse("a, -> a"), "an empty operand; a scalar is written []"),
    "an open parenthesis": (lambda: Rule.parse("(a b -> a b"), "a parenthesis is not closed in '(a b'"),
    "no name": (lambda: Rule.parse("a-b -> a"), "cannot read 'a-b' in 'a-b'"),
    "an unknown clause": (lambda: Rule.parse("a b -> a; sum b"), "unknown clause 'sum'; known: reduce, whole, halo,"),
    "an empty clause": (lambda: Rule.parse("a b -> a; where"), "'where' names nothing; say what, such as 'where k=4'"),
    "an unknown factor": (lambda: Rule.parse("a -> a; whole c"), "'whole c' names a factor that stands in no operand"),
    "an unknown reduction": (
        lambda: Rule.parse("a b -> a; reduce b:mean"),
        "unknown reduction 'mean'; known: sum, max",
    ),
    "two kinds": (lambda: Rule.parse("a b -> a; reduce b; whole b"), "factor 'b' has two kinds, reduce and whole"),
    "no size": (lambda: Rule.parse("(a b) -> a b; where b=x"), "'b=x' should be a size, such as b=16"),
    "no operand's number": (lambda: Rule.parse("a -> a; linear x"), "take numbers of operands, such as 'linear 0 1'"),
    "no such operand": (
        lambda: Rule.parse("a -> a; linear 1"),
        "names operand 1, the last one is 0. Operands are numb",
    ),
    "a factor twice in an operand": (
        lambda: Rule.parse("a a -> a"),
        "rule 'a a -> a': operand 0 names factor 'a' twice. A factor is cut in one place of an array; give the other",
    ),
    "a factor twice in a result": (lambda: Rule.parse("a -> a a"), "result 0 names factor 'a' twice."),
    "an unknown kind": (lambda: Factor("a", 4, STRANGE), "factor 'a': unknown kind '.*'; known: pass, reduce"),
    "another rank": (
        lambda: Rule.parse("a b -> a b", f32(4, 6, 8)),
        "rule 'a b -> a b': operand 0 is declared with 2 dimensions, the argument's shape is (4, 6, 8)",
    ),
    "more operands": (lambda: Rule.parse("a -> a", f32(4), f32(4)), "rule 'a -> a' is for 1 operand, got 2"),
    "sizes that disagree": (
        lambda: Rule.parse("a b, b c -> a c; reduce b", f32(4, 6), f32(8, 2)),
        "operand 1 dimension 0 (of (8, 2)) has size 8, where b is 6 already",
    ),
    "a dimension that is no 1": (lambda: Rule.parse("a 1 -> a", f32(4, 6)), "has size 6, but is declared as 1"),
    "sizes that are open": (
        lambda: Rule.parse("(a b) -> a b", f32(12)),
        "the sizes of a and b are open; say one with 'where a=...'",
    ),
    "an operator without a text": (lambda: operator(STRANGE), "@operator takes the rule as text, @operator('b d, d ->"),
    "an operator's operands": (
        lambda: declared("a b -> a b"),
        "operator 'blend': rule 'a b -> a b' is for 1 operand, got 2. Correct its text, or the operands of this call.",
    ),
    "an operator's sizes": (
        lambda: declared("a b, a c -> a b"),
        "operator 'blend': rule 'a b, a c -> a b': operand 1 dimension 0 (of (6, 8)) has size 6, where a is 4 already.",
    ),
    "an operator's results": (
        lambda: declared("a b, b c -> a b, a"),
        "operator 'blend': the function returns 1 arrays, 'a b, b c -> a b, a' declares 2 results. Correct its text,",
    ),
    "an operator's result": (
        lambda: declared("a b, b c -> b a"),
        "operator 'blend': result 0 has shape (4, 6), 'a b, b c -> b a' makes it (6, 4). Correct its text, or what it",
    ),
    "a size that no operand has": (
        lambda: declared("a b, b c -> a d"),
        "operator 'blend': no operand in 'a b, b c -> a d' has 'd', of which result 0 is made; say how large it is",
    ),
    "a size that does not divide": (
        lambda: Rule.parse("(a b) -> a b; where a=5", f32(12)),
        "operand 0 dimension 0 (of (12,)) has size 12, which a = 5 does not divide",
    ),
    "two sizes": (lambda: Rule.parse("(a b) -> a b; where a=2 a=3"), "factor 'a' has two sizes, 2 and 3"),
    "moves twice": (
        lambda: Rule.parse("a, b -> a, b; moves 0; moves 1"),
        "'moves' is said twice; name all its operands in one clause",
    ),
    "an option that is an array": (
        lambda: operator("a -> a", name="blend")(lambda x, scale: x)(jnp.ones(4), scale=jnp.ones(4)),
        "operator 'blend': option 'scale' is of type ArrayImpl, which cannot be hashed. .* give arrays by position",
    ),
    "an operand that is a tree": (
        lambda: operator("a -> a", name="blend")(lambda x: x)({"w": jnp.ones(4)}),
        "operator 'blend': operand 0 is of type dict, no array. .* give the leaves of a tree each by position",
    ),
    "a result that is a tree": (
        lambda: operator("a -> a", name="blend")(lambda x: {"w": x})(jnp.ones(4)),
        "result 0 is a dict. Return one array or a flat tuple of arrays",
    ),
    "results in one another": (
        lambda: operator("a -> a, a", name="blend")(lambda x: (x, (x, x)))(jnp.ones(4)),
        "result 1 is a tuple. Return one array or a flat tuple of arrays",
    ),
    "a vjp that is no pair": (
        lambda: operator("a -> a", vjp=STRANGE),
        "@operator('a -> a'): vjp is a pair (fwd, bwd), fwd None or a function; got",
    ),
    "propagate without a function": (
        lambda: propagate(3, f32(8), in_specs=None, mesh=MESH),
        "propagate takes a function and then its arguments, propagate(fn, x, y); the first is 3",
    ),
    "check_rule without a function": (
        lambda: check_rule(3, f32(8)),
        "check_rule takes a function and then its arguments, check_rule(fn, x, y); the first is 3",
    ),
    "a second rule": (
        twice,
        "primitive 'own' has a rule already, tests.*twice.* It has one rule only: drop that one, or",
    ),
    "a primitive twice in one rule": (at_once, "primitive 'own' has a rule already"),
    "a rule of JAX's": (
        lambda: rule(lax.add_p)(lambda *xs: Rule.parse("a, a -> a")),
        "primitive 'add' has a rule already, autoshard.spmdrules.families.elementwise.add",
    ),
    "no primitive": (lambda: rule(STRANGE), "@rule takes primitives, got"),
    "no primitive at all": (lambda: rule(), "@rule names no primitive; write @rule(lax.add_p)"),
    "a rule that raises": (
        lambda: primitive(lambda x: 1 // 0),
        "the rule of 'halve', .*, for operands (8,): it raised ZeroDivisionError: ",
    ),
    "a rule of other arguments": (
        lambda: primitive(lambda x, y: Rule.parse("a, a -> a")),
        "the rule of 'halve', .*, for operands (8,): it raised TypeError: .* missing 1 required positional argument",
    ),
    "a rule that gives none": (
        lambda: primitive(lambda x: None),
        "the rule of 'halve', .*: it gave None, which is no Rule",
    ),
    "a rule of other operands": (
        lambda: primitive(lambda x: Rule.parse("a, b -> a")),
        "the rule of 'halve', .*, for operands (8,): rule 'a, b -> a' is for 2 operands, got 1",
    ),
    "a rule of other results": (
        lambda: primitive(lambda x: Rule.parse("a -> a, a", x)),
        "the rule of 'halve', .*, at .*: 'a -> a, a' declares results of shapes [(8,), (8,)], they are [(8,)]. Correct",
    ),
    "a rule of other shapes": (
        lambda: primitive(lambda x: Rule.parse("(a b) -> a; whole b; where b=2", x)),
        "declares results of shapes [(4,)], they are [(8,)]. Correct the rule.",
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
        "propagate(affine): argument 0/b (float32[4]): P('data', None) has 2 entries, the array has 1 dimension",
    ),
    "an axis twice": (
        through(in_specs=(None, P("data", "data"))),
        "argument 1 .*: P('data', 'data') uses mesh axis 'data' twice. Keep it on one dimension.",
    ),
    "an unknown axis": (
        through(in_specs=(None, P("expert"))),
        "argument 1 .*: there is no mesh axis 'expert'. The mesh has 'data', 'model'.",
    ),
    "no axis": (
        through(in_specs=(None, P(3))),
        "argument 1 .*: P(3,) holds 3, which is no name of a mesh axis, nor a tuple",
    ),
    "a partial over a sharded axis": (
        through(in_specs=(None, P("data")), in_partial=(None, {"data": "sum"})),
        "argument 1 .*: partial over 'data', which shards the same array. Use another axis, or drop one.",
    ),
    "an unknown reduction": (
        through(in_partial=(None, {"data": "mean"})),
        "unknown reduction 'mean' over 'data'. Known: sum",
    ),
    "a reduction that its type has not": (
        through(in_partial=(None, {"data": "or"})),
        "argument 1 (float32[8,16]): 'or' over 'data' is no reduction of float32 terms.",
    ),
    "no partial": (
        through(in_partial=(None, "data")),
        "in_partial does not match the tree at 1: 'data' is nothing that is partial. Write {mesh axis: operation}",
    ),
    "too few": (
        through(in_specs=(None,)),
        "in_specs does not match the tree: it has 1 entries, there are 2. Give one Part",
    ),
    "another key": (
        through(in_specs=({"w": P(), "bias": P()}, P())),
        "in_specs does not match the tree at 0: it lacks b and"
        " there is no bias. Give one PartitionSpec or None for each array, or one for a whole subtree.",
    ),
    "another node": (
        through(in_specs=([P(), P()], P())),
        "in_specs does not match the tree at 0: a list of 2 stands where there is a dict of 2.",
    ),
    "names instead of a spec": (
        through(in_specs=(None, "data")),
        "does not match the tree at 1: 'data' is no spec. Write P(",
    ),
    "a tuple instead of a spec": (
        through(in_specs=(None, ("data", None))),
        "at 1: ('data', None) stands where .* one array.",
    ),
    "a result's": (
        through(out_specs=P(None, None, "data")),
        "result 0 .*: P(None, None, 'data') has 3 entries, the array has",
    ),
    "results'": (
        through(out_specs=(P(), P())),
        "out_specs does not match the tree: (P(), P()) stands where .* one array.",
    ),
    "no mesh": (through(mesh=8), "mesh must be axis names with sizes, such as {'data': 4, 'model': 2}"),
    "no axis names": (through(mesh={1: 8}), "mesh must be axis names with sizes"),
    "fixed, longer": (
        planned({"1": P("data", None, None)}),
        "auto_shard(affine): fixed '1': P('data', None, None) has 3 "
        "entries, the array has 2 dimensions (8, 16). Drop the last ones",
    ),
    "fixed, an axis twice": (
        planned({"1": P("data", "data")}),
        "fixed '1': .* uses mesh axis 'data' twice. Keep it on one",
    ),
    "fixed, an unknown axis": (
        planned({"1": P("expert")}),
        "fixed '1': .* names mesh axis 'expert', the mesh has {'data': 2"
        ", 'model': 4}; give mesh= with the names that the specs use",
    ),
    "fixed, no axis": (planned({"1": P(3)}), "fixed '1': P(3,); give {path glob: PartitionSpec} on a named mesh"),
    "fixed, indivisible": (
        planned({"0/b": P(("data", "model"))}),
        "fixed '0/b' dim 0 has size 4, not divisible by mesh axes ('data', 'model') (8). Pad it to 8, or drop",
    ),
    "fixed, no such path": (
        planned({"params/*": P("data")}),
        "fixed 'params/*' matches no input. There are 0/b, 0/w, 1",
    ),
    "fixed, no spec": (
        planned({"1": "data"}),
        "fixed '1': 'data'; give {path glob: PartitionSpec} on a named mesh, or {path",
    ),
    "fixed, no table": (planned([P("data")]), "fixed is [P('data',)]; give {path glob: PartitionSpec}"),
    "fixed, no logical axis": (
        planned({"1": ("batch", "foo")}),
        "fixed '1' names ['foo'], which is no logical axis; there",
    ),
    "auto_shard": (
        lambda: auto_shard(affine, mesh=MESH, fixed={"0/w": P("x")})(*jax.tree.map(jnp.zeros_like, ARGS)),
        "auto_shard(affine): fixed '0/w': .* names mesh axis 'x'",
    ),
}


def as_pattern(message):
    """The message, in which `.*` stands for anything."""
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize(("call", "message"), [*RULES.values(), *SPECS.values()], ids=[*RULES, *SPECS])
def test_it_is_told(call, message):
    with pytest.raises((AutoshardError, TypeError), match=as_pattern(message)) as caught:
        call()
    ours = "@rule", "@operator", "operator 'blend'", "propagate takes", "check_rule takes"
    assert isinstance(caught.value, AutoshardError) or str(caught.value).startswith(ours)


def test_all_faults_of_a_call_are_told():
    with pytest.raises(AutoshardError) as caught:
        through(in_specs=({"w": P("a", "b", "c"), "b": P("data")}, P("q")))()
    lines = str(caught.value).splitlines()
    assert lines[0] == "propagate(affine): 5 faults" and len(lines) == 6


def test_a_refused_registration_changes_nothing():
    own, other = Primitive("own"), Primitive("other")
    rule(own)(lambda x: Rule.parse("a -> a", x))
    before = dict(registry._RULES)
    with pytest.raises(RuleError):
        rule(other, own)(lambda x: Rule.parse("a -> a", x))
    assert registry._RULES == before


def test_sizes_of_a_rule_may_be_left_to_the_operands():
    found = primitive(lambda x: Rule.parse("a -> a"))
    assert found.out_specs == P("data") and not found.reshards


def test_a_spec_may_say_what_is_unreduced():
    spec = P("data", unreduced=frozenset({"model"}))
    found = propagate(lambda x: x * 2, f32(8, 4), in_specs=spec, mesh=MESH)
    assert found.in_specs == (spec,) and found.out_specs == P("data") and found.out_partial == {"model": "sum"}
