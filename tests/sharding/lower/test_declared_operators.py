"""Declared operators: how their operands are resharded, and which of their results wait for each other."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.models.dropless.operators import experts
from autoshard.sharding.lower import declared_operators
from autoshard.sharding.lower.declared_operators import gives_gradients
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.models.small import equations


@pytest.mark.parametrize(
    ("stored", "wanted", "between"),
    [
        ((("dp", "tp"), ()), ((), ("dp",)), [(("dp",), ())]),  # a gather, then an all-to-all
        ((("tp", "dp"), ()), ((), ("dp",)), [(("tp",), ("dp",))]),  # an all-to-all, then a gather
        ((("dp", "tp"), ()), (("dp",), ("tp",)), []),
        ((("dp", "tp"), ()), (("dp",), ()), []),
    ],
)
def test_an_operand_has_the_shardings_in_between(monkeypatch, stored, wanted, between):
    constrained = []

    def constrain(x, spec):
        constrained.append(spec)
        return x

    monkeypatch.setattr(declared_operators, "run_sharded", lambda params, mesh, specs, wants, *args: list(args))
    monkeypatch.setattr(declared_operators, "operand_spec", lambda layout, value: stored)
    op: Any = SimpleNamespace(eqn=SimpleNamespace(params={}), operands=[0])
    lowering: Any = SimpleNamespace(layout=None, mesh=None, constrain=constrain, tpu=None)
    chosen: Any = SimpleNamespace(rule=lambda _: SimpleNamespace(operands=["dims"]), spec=lambda _: wanted, form=None)
    assert declared_operators.run_declared(lowering, op, chosen, [wanted], ["x"]) == ["x"]
    assert constrained == between


PAIRS, EXPERTS, EMBED, FFN, TOP_K = 2, 8, 32, 64, 2
X = jax.ShapeDtypeStruct((16, 128, EMBED), jnp.float32)


def layer(x, params):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), TOP_K)
    return x + experts(x, gates, chosen, *(params[name] for name in ("up", "down", "gate")))


def step(params, x):
    def pair(x, params):
        for own in params:
            x = jax.checkpoint(layer)(x, own)
        return x, None

    return jax.value_and_grad(lambda params: jnp.mean(jax.lax.scan(pair, x, params)[0] ** 2))(params)


def parameters():
    shapes = {"router": (EMBED, EXPERTS), "down": (EXPERTS, FFN, EMBED)}
    shapes |= dict.fromkeys(("up", "gate"), (EXPERTS, EMBED, FFN))
    return tuple({n: jax.ShapeDtypeStruct((PAIRS, *s), jnp.float32) for n, s in shapes.items()} for _ in range(2))


def lowered(target):
    made = autoshard.plan(step, parameters(), X, target=target, plan="fsdp:8")
    return bound_or_error(made.bound).executable.constrained_program(made.mesh)


@pytest.mark.parametrize(("target", "barriers"), [("v5p:2x2x2", 2), ("v6e:2x4", 2), ("h100:8", 0), ("cpu:8", 0)])
def test_gradients_of_experts_wait_for_each_other_on_tpus(target, barriers):
    """The body of the backward loop has a barrier for each of its two layers, that of the forward loop none."""
    jaxpr = jax.make_jaxpr(lowered(target))(*jax.tree.leaves((parameters(), X))).jaxpr
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    # The results are the gradients of the tokens, the gates and three matrices.
    joined = [
        sum(eqn.primitive.name == "optimization_barrier" and len(eqn.outvars) == 5 for eqn in equations(body))
        for body in bodies
    ]
    assert joined == [0, barriers]


def test_an_operator_with_gradients_alone_does_not_wait():
    """Nothing continues from them."""
    roles: Any = SimpleNamespace(gradients={3, 4})
    ops: list[Any] = [SimpleNamespace(results=results) for results in ((2, 3, 4), (3, 4), (1, 2))]
    found = [gives_gradients(op, roles) for op in ops]
    assert found == [True, False, False]
