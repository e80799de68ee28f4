"""Operands of declared operators are resharded in steps that XLA does without gathering the whole array."""

from types import SimpleNamespace

import pytest

from autoshard.sharding.lower import declared_operators


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
    op = SimpleNamespace(eqn=SimpleNamespace(params={}))
    chosen = SimpleNamespace(rule=lambda _: SimpleNamespace(operands=["dims"]), spec=lambda _: wanted, form=None)
    assert declared_operators.run_declared(op, chosen, None, [stored], [wanted], ["x"], constrain) == ["x"]  # pyright: ignore[reportArgumentType]
    assert constrained == between
