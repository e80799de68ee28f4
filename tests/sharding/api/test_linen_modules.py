"""`auto_shard` on linen module classes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from autoshard import auto_shard
from autoshard.errors import AutoshardError, AutoshardWarning
from tests.sharding.api.flax_classes import layout_of, linen_class
from tests.sharding.programs import assert_close, batch, device_bytes, whole_bytes


@pytest.mark.whole
def test_a_linen_class_plans_at_init():
    plain, cls = linen_class()(), auto_shard(linen_class(), plan="fsdp:8")
    expected = plain.init(jax.random.key(0), batch())
    variables = cls().init(jax.random.key(0), batch())
    assert jax.tree.structure(variables) == jax.tree.structure(expected)  # the class kept its name
    assert_close(expected, variables, 1e-6)
    assert device_bytes(variables) * 8 == whole_bytes(variables)
    assert_close(plain.apply(expected, batch()), cls().apply(variables, batch()))
    keys = {"dropout": jax.random.key(1)}
    assert_close(
        plain.apply(expected, batch(), train=True, rngs=keys), cls().apply(variables, batch(), train=True, rngs=keys)
    )


def full_class() -> Any:
    """Return a linen class whose calls need random streams, mutable collections and static arguments."""

    class Net(linen.Module):
        hidden: int = 128
        taps: Any = (1,)

        @linen.compact
        def __call__(self, x, train=False, mode=None):
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(self.hidden)(x))
            self.sow("intermediates", "seen", x)
            x = linen.Dropout(0.5, deterministic=not train)(jnp.tanh(x))
            return linen.Dense(64)(x if mode is None else x * len(mode))

        def encode(self, x):
            return x * 2

    return Net


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "rngs, args, kwargs",
    [
        (KEYS["params"], (), {"train": False}),
        (KEYS["params"], (False,), {}),
        (KEYS["params"], (True, "ab"), {}),
        (KEYS, (), {}),
        (KEYS, (), {"train": True}),
        (KEYS, (True,), {"mode": None}),
        ({"params": KEYS["params"]}, (True,), {}),
        (KEYS["params"], (), {"mutable": ["params", "batch_stats"]}),
        (KEYS["params"], (), {"x": batch(), "train": False}),
        (KEYS, (), {"x": batch(), "train": True}),
    ],
)
def test_linen_init_accepts_the_usual_arguments(rngs, args, kwargs):
    plain, model = full_class()(), auto_shard(full_class(), plan="fsdp:8")()
    args = () if "x" in kwargs else (batch(), *args)
    expected, variables = plain.init(rngs, *args, **kwargs), model.init(rngs, *args, **kwargs)
    assert jax.tree.structure(expected) == jax.tree.structure(variables)
    assert_close(expected, variables, 1e-6)
    assert device_bytes(variables["params"]) * 8 == whole_bytes(variables["params"])
    assert type(model).autoshard_plan.chosen == "fsdp:8"
    layout = layout_of(variables["params"])
    model.apply(variables, batch())
    called = [x.spec for x in type(model).autoshard_plan.inputs if x.path.startswith("0/params")]
    assert called == [s.spec for s in layout]


def test_linen_apply_accepts_the_usual_arguments():
    plain, model = full_class()(), auto_shard(full_class(), plan="fsdp:8")()
    variables = plain.init(KEYS["params"], batch())
    for _ in range(2):
        assert_close(plain.apply(variables, batch(), False), model.apply(variables, batch(), False))
        for mutable in (["batch_stats"], True, ("batch_stats", "intermediates"), linen.DenyList("params")):
            train = {"mutable": mutable, "rngs": {"dropout": KEYS["dropout"]}}
            expected, actual = (m.apply(variables, batch(), True, **train) for m in (plain, model))
            assert jax.tree.structure(expected) == jax.tree.structure(actual)
            assert_close(expected, actual)
        assert_close(batch() * 2, model.apply(variables, batch(), method="encode"))
        assert_close(plain.apply(variables, x=batch()), model.apply(variables, x=batch()))
    born = model.init(KEYS["params"], batch())
    _, changed = model.apply(born, batch(), True, mutable=["batch_stats"], rngs={"dropout": KEYS["dropout"]})
    before, after = layout_of(born["params"]), type(model).autoshard_plan
    assert [x.spec for x in after.inputs if x.path.startswith("0/params")] == [s.spec for s in before]
    assert_close(*(m.apply({**born, **changed}, batch()) for m in (plain, model)))


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_linen_parameters_keep_their_shardings_from_call_to_call():
    plain, model = linen_class()(), auto_shard(linen_class(), plan="tp:8 state")()
    variables = model.init(KEYS["params"], batch())
    specs = [x.sharding.spec for x in jax.tree.leaves(variables)]
    for x in (batch(), batch()[0], batch(size=16)):
        assert_close(plain.apply(variables, x), model.apply(variables, x))
        plan = type(model).autoshard_plan
        assert [leaf.spec for leaf in plan.inputs if leaf.path.startswith("0/")] == specs


@pytest.mark.slow
@pytest.mark.whole
def test_linen_modules_with_different_fields_differ():
    cls = auto_shard(full_class(), plan="dp:8")
    for taps in ([1], [2], {"a": [1]}, np.ones(3), True, 1):
        model = cls(taps=taps)
        variables = model.init(KEYS["params"], batch())
        assert model.apply(variables, batch()).shape == batch().shape


def test_linen_init_without_a_traceable_forward_pass_warns():
    def make():
        class Once(linen.Module):
            @linen.compact
            def __call__(self, x):
                if not self.is_initializing():
                    raise RuntimeError("only to be initialised")
                return linen.Dense(64)(x)

        return Once

    expected = make()().init(KEYS["params"], batch())
    cls = auto_shard(make(), plan="fsdp:8")
    with pytest.warns(AutoshardWarning, match=r"auto_shard\(Once\): init made the .*only to be initialised"):
        variables = cls().init(KEYS["params"], batch())
    assert_close(expected, variables)
    with pytest.raises(AutoshardError, match="unknown word 'fsd:8'"):  # an invalid strategy still raises
        auto_shard(linen_class(), plan="fsd:8")().init(KEYS["params"], batch())


@pytest.mark.whole
def test_classes_derived_from_a_decorated_linen_class():
    def make(decorate):
        Base = decorate(linen_class())

        class Derived(Base):
            @linen.compact
            def __call__(self, x, train=False):
                return linen.Dense(64, name="last")(super().__call__(x, train))

        return Base, Derived, decorate(type("Decorated", (Derived,), {"__module__": __name__}))

    classes = make(lambda cls: cls), make(auto_shard(plan="fsdp:8"))
    for plain_class, cls in zip(*classes, strict=True):
        plain, model = plain_class(), cls()
        expected, variables = (m.init(KEYS["params"], batch(), train=False) for m in (plain, model))
        assert_close(expected, variables)
        assert device_bytes(variables) * 8 == whole_bytes(variables)
        assert_close(plain.apply(expected, batch(), False), model.apply(variables, batch(), False))
    plans = [cls.autoshard_plan for cls in classes[1]]
    assert [any("/last/" in leaf.path for leaf in p.inputs) for p in plans] == [False, True, True]
