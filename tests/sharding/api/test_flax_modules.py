"""`auto_shard` on module classes, nnx and linen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from autoshard import auto_shard
from autoshard.errors import AutoshardError, AutoshardWarning, PlanError
from autoshard.sharding.runtime.static_arguments import split_arguments
from tests.sharding.programs import assert_close, batch, device_bytes, whole_bytes


def nnx_class() -> Any:
    class Net(nnx.Module):
        def __init__(self, width, hidden, *, rngs):
            self.up = nnx.Linear(width, hidden, rngs=rngs)
            self.norm = nnx.BatchNorm(hidden, rngs=rngs)
            self.down = nnx.Linear(hidden, width, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.norm(self.up(x))))

    return Net


def linen_class() -> Any:
    class Net(linen.Module):
        hidden: int = 128

        @linen.compact
        def __call__(self, x, train=False):
            x = linen.relu(linen.Dense(self.hidden)(x))
            return linen.Dense(64)(linen.Dropout(0.1, deterministic=not train)(x))

    return Net


def test_an_nnx_class_is_changed_in_place_and_born_sharded():
    plain = nnx_class()(64, 128, rngs=nnx.Rngs(0))
    expected = plain(batch())
    cls = nnx_class()
    sharded_class = auto_shard(plan="fsdp:8")(cls)
    assert sharded_class is cls and cls.__name__ == "Net"
    rngs = nnx.Rngs(0)
    model = cls.sharded(64, 128, rngs=rngs, example=(batch(),))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    assert cls.autoshard_plan.chosen == "fsdp:8"
    assert_close(expected, model(batch()))
    assert_close(nnx.state(plain, nnx.BatchStat), nnx.state(model, nnx.BatchStat))
    second = cls.sharded(64, 128, rngs=rngs, example=(batch(),))  # the streams have moved on
    assert not np.allclose(second.up.kernel[...], model.up.kernel[...])


def test_a_plainly_made_nnx_module_is_resharded_at_its_first_call():
    expected = nnx_class()(64, 128, rngs=nnx.Rngs(0))(batch())
    cls = auto_shard(nnx_class(), plan="fsdp:8")
    model = cls(64, 128, rngs=nnx.Rngs(0))
    assert device_bytes(nnx.state(model)) == whole_bytes(nnx.state(model))
    assert_close(expected, model(batch()))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))


def test_a_first_call_under_a_trace_only_constrains_and_says_so():
    plain = nnx_class()(64, 128, rngs=nnx.Rngs(0))
    model = auto_shard(nnx_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradients(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    with pytest.warns(AutoshardWarning, match="first called under somebody's trace"):
        found = gradients(model, batch())
    assert_close(gradients(plain, batch()), found)


def test_inside_a_planned_step_the_step_rules():
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make(cls):
        model = cls(64, 128, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    cls = auto_shard(nnx_class(), plan="dp:8")
    (plain, plain_optimizer), (model, optimizer) = make(nnx_class()), make(cls)
    sharded = auto_shard(step, plan="tp:8")
    for seed in range(2):
        expected = nnx.jit(step)(plain, plain_optimizer, batch(seed))
        np.testing.assert_allclose(sharded(model, optimizer, batch(seed)), expected, rtol=1e-5)
    assert cls.autoshard_plan is None  # its own plan was never made
    assert_close(nnx.state(plain, nnx.Param), nnx.state(model, nnx.Param))


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


def varied_class() -> Any:
    """An nnx class whose call takes what is no array: flags, numbers, lists."""

    class Net(nnx.Module):
        def __init__(self, width, hidden, *, rngs):
            self.up = nnx.Linear(width, hidden, rngs=rngs)
            self.drop = nnx.Dropout(0.5)
            self.down = nnx.Linear(hidden, width, rngs=rngs)
            self.traced = 0

        def __call__(self, x, double=False, taps=(), mask=None, scale=1, rngs=None):
            if double:
                x = 2 * x
            for tap in taps:
                x = x + tap
            x = self.up(x) if mask is None else self.up(x) * mask["of"] * (1 if mask["keep"] else 0)
            x = x if rngs is None else self.drop(x, rngs=rngs)
            return self.down(jnp.tanh(x)) * jnp.asarray(scale)

        def encode(self, x):
            return jnp.tanh(self.up(x))

    return Net


def layout_of(tree: Any) -> list[Any]:
    """Where the arrays of a tree lie."""
    return [x.sharding for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((True,), {}),
        ((False,), {"taps": [1]}),
        ((), {"taps": [1, 2]}),
        ((True, (1,), None), {}),
        ((None, [0.5]), {}),
        ((), {"taps": [True, 2.0]}),
        ((), {"mask": {"of": np.arange(128, dtype=np.float32), "keep": True}}),
        ((False, (), {"of": np.arange(128, dtype=np.float32), "keep": False}), {}),
    ],
)
def test_what_is_no_array_is_static_wherever_it_stands(args, kwargs):
    plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (varied_class(), auto_shard(varied_class(), plan="fsdp:8")))
    for _ in range(2):
        assert_close(plain(batch(), *args, **kwargs), model(batch(), *args, **kwargs))
    assert device_bytes(nnx.state(model)) * 8 == whole_bytes(nnx.state(model))


def test_static_arguments_are_told_apart_by_type_and_by_their_value_now():
    class Typed(nnx.Module):
        def __init__(self, *, rngs):
            self.up = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x, kinds):
            return jnp.sum(self.up(x)) * 0 + sum(3 ** (bool, int, float).index(type(k)) * k for k in kinds)

    model = auto_shard(Typed, plan="dp:8")(rngs=nnx.Rngs(0))
    assert [float(model(batch(), (k, 1))) for k in (True, 1)] == [4, 6]
    assert [float(model(batch(), {k, 4})) for k in (True, 1, 1.0)] == [13, 15, 21]
    kinds = [1]
    assert float(model(batch(), kinds)) == 3
    kinds.append(5)
    assert float(model(batch(), kinds)) == 18
    assert float(model(batch(size=16), [1])) == 3  # traced with this call's list, not with that of the first


def test_keys_of_static_arguments():
    def key(value):
        return split_arguments((None, value), {"of": [value]}, "f").key

    assert len({key(x) for x in (True, 1, "1", None, (1, 1.0), [1, 1.0], [True])} | {key(float), key(int)}) == 9
    assert hash(key([float("nan"), 1])) == hash(key([float("nan"), 1])) and key({"a": {1}}) == key({"a": {1}})
    arrays = split_arguments((None, [np.ones(2), 1]), {"of": 0.5}, "f")
    assert arrays.key == split_arguments((None, [np.zeros(3), 1]), {"of": 0.25}, "f").key
    assert arrays.key != split_arguments((None, [np.ones(2), True]), {"of": 0.5}, "f").key


def test_what_is_neither_array_nor_hashable_is_refused():
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    model = auto_shard(varied_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match=r"auto_shard\(Net\): argument 'taps' holds a Odd"):
        model(batch(), taps=[Odd()])


def test_random_streams_are_arguments():
    plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (varied_class(), auto_shard(varied_class(), plan="dp:8")))
    streams, others = nnx.Rngs(1), nnx.Rngs(1)
    for _ in range(2):  # they move on
        assert_close(plain(batch(), rngs=streams), model(batch(), rngs=others))


@pytest.mark.parametrize("plan", ["tp:8 state", "fsdp:8", "fsdp:2 tp:4", None, {"tp": ["ffn"]}])
@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_parameters_stay_from_call_to_call(plan):
    plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (varied_class(), auto_shard(varied_class(), plan=plan)))
    assert_close(plain(batch()), model(batch()))
    layout = layout_of(nnx.state(model))
    kernels = [model.up.kernel[...], model.down.kernel[...]]
    for x in (batch()[0], batch(size=16), batch()[None]):
        assert_close(plain(x), model(x))
        assert_close(plain(x, True), model(x, True))
        assert layout_of(nnx.state(model)) == layout
    for before, after in zip(kernels, [model.up.kernel[...], model.down.kernel[...]], strict=True):
        assert [s.index for s in before.addressable_shards] == [s.index for s in after.addressable_shards]


def test_modules_of_other_sizes_have_their_own_layout():
    plain_class, cls = varied_class(), auto_shard(varied_class(), plan="fsdp:8")
    for width, hidden in ((64, 128), (32, 128), (64, 128)):
        plain, model = (c(width, hidden, rngs=nnx.Rngs(0)) for c in (plain_class, cls))
        assert_close(plain(batch(width=width)), model(batch(width=width)))
        assert device_bytes(nnx.state(model)) * 8 == whole_bytes(nnx.state(model))


def test_what_the_user_fixed_stays_fixed_in_the_forward_pass():
    fixed = {"0/up/kernel": jax.sharding.PartitionSpec(None, "model")}
    model = auto_shard(varied_class(), mesh={"model": 8}, fixed=fixed)(64, 128, rngs=nnx.Rngs(0))
    for x in (batch(), batch(size=16)):
        model(x)
        assert model.up.kernel[...].sharding.spec == fixed["0/up/kernel"]


def test_a_class_with_keyword_arrays_only():
    def make():
        class Pair(nnx.Module):
            def __init__(self, *, rngs):
                self.up = nnx.Linear(64, 64, rngs=rngs)

            def __call__(self, *, left, right):
                return self.up(left) + right

        return Pair

    plain, model = make()(rngs=nnx.Rngs(0)), auto_shard(make(), plan="fsdp:8")(rngs=nnx.Rngs(0))
    for _ in range(2):
        assert_close(plain(left=batch(), right=batch(1)), model(left=batch(), right=batch(1)))
    assert device_bytes(nnx.state(model)) * 8 == whole_bytes(nnx.state(model))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_an_nnx_class_sows_comes_out():
    def make():
        class Sower(nnx.Module):
            def __init__(self, *, rngs):
                self.up = nnx.Linear(64, 64, rngs=rngs)

            def __call__(self, x):
                x = self.up(x)
                self.sow(nnx.Intermediate, "seen", x)
                return x

        return Sower

    plain, model = make()(rngs=nnx.Rngs(0)), auto_shard(make(), plan="fsdp:8")(rngs=nnx.Rngs(0))
    for seed in range(2):
        assert_close(plain(batch(seed)), model(batch(seed)))
        assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    assert_close(nnx.state(plain, nnx.Intermediate), nnx.state(model, nnx.Intermediate))
    seen: Any = nnx.pop(model, nnx.Intermediate)["seen"]
    assert len(seen.get_value()) == 2


def test_other_methods_are_left_alone():
    def make():
        class Coder(nnx.Module):
            def __init__(self, *, rngs):
                self.up = nnx.Linear(64, 64, rngs=rngs)

            def __call__(self, x):
                return self.encode(x) * 2

            def encode(self, x):
                return jnp.tanh(self.up(x))

        return Coder

    cls: Any = make()
    encode = cls.encode
    model = auto_shard(cls, plan="fsdp:8")(rngs=nnx.Rngs(0))
    assert cls.encode is encode
    expected = make()(rngs=nnx.Rngs(0)).encode(batch())
    assert_close(expected, model.encode(batch()))
    assert cls.autoshard_plan is None
    model(batch())
    assert_close(expected, model.encode(batch()))


def test_classes_derived_from_a_decorated_nnx_class():
    def make(decorate):
        Base = decorate(nnx_class())

        class Derived(Base):
            def __init__(self, width, hidden, *, rngs):
                super().__init__(width, hidden, rngs=rngs)
                self.last = nnx.Linear(width, width, rngs=rngs)

            def __call__(self, x):
                return self.last(super().__call__(x))

        class Inherits(Base):
            pass

        return Base, Derived, decorate(type("Decorated", (Derived,), {})), Inherits

    classes = make(lambda cls: cls), make(auto_shard(plan="fsdp:8"))
    for plain_class, cls in zip(*classes, strict=True):
        plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (plain_class, cls))
        for seed in range(2):
            assert_close(plain(batch(seed)), model(batch(seed)))
        born = cls.sharded(64, 128, rngs=nnx.Rngs(0), example=(batch(),))
        assert device_bytes(nnx.state(born, nnx.Param)) * 8 == whole_bytes(nnx.state(born, nnx.Param))
        layout = layout_of(nnx.state(born))
        assert_close(plain_class(64, 128, rngs=nnx.Rngs(0))(batch()), born(batch()))
        assert layout_of(nnx.state(born)) == layout
    base, derived, decorated, inherits = classes[1]
    plans = [c.autoshard_plan for c in (base, derived, decorated, inherits)]
    assert len(set(map(id, plans))) == 4 and None not in plans
    assert [any("0/last" in leaf.path for leaf in p.inputs) for p in plans] == [False, True, True, False]


def test_an_nnx_class_without_a_call_is_refused():
    class Base(nnx.Module):
        def encode(self, x):
            return x

    with pytest.raises(PlanError, match="Base.*no __call__"):
        auto_shard(Base)


@pytest.mark.parametrize("make", [nnx_class, linen_class])
@pytest.mark.parametrize(
    "option", [dict(donate_argnums=0), dict(static_argnums=1), dict(variants={"train": [True, False]})]
)
def test_options_of_functions_mean_nothing_on_a_class(make, option):
    with pytest.raises(PlanError, match=rf"auto_shard\(Net\): {next(iter(option))} means nothing on a class"):
        auto_shard(make(), **option)
    nothing: Any = dict.fromkeys(option, ())
    auto_shard(make(), **nothing)


def test_an_example_given_to_the_decorator_is_the_one_of_sharded():
    cls = auto_shard(nnx_class(), plan="fsdp:8", example=(batch(),))
    model = cls.sharded(64, 128, rngs=nnx.Rngs(0))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    cls.sharded(64, 128, rngs=nnx.Rngs(0), example=(batch(size=16),))
    assert [leaf.shape for leaf in cls.autoshard_plan.inputs if leaf.path == "1"] == [(16, 64)]
    with pytest.raises(PlanError, match=r"Net.sharded: there is nothing to plan from: give example="):
        auto_shard(nnx_class()).sharded(64, 128, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match="example means nothing on a linen class: its init plans"):
        auto_shard(linen_class(), example=(batch(),))


def test_a_warning_of_a_first_call_stands_at_the_call():
    model = auto_shard(nnx_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))
    with pytest.warns(AutoshardWarning, match="somebody's trace") as found:
        nnx.jit(lambda model, x: model(x))(model, batch())
    assert found[0].filename == __file__


def full_class() -> Any:
    """A linen class with all that needs more of `apply` than variables and arrays."""

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
def test_linen_init_takes_what_it_always_took(rngs, args, kwargs):
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


def test_linen_apply_takes_what_it_always_took():
    plain, model = full_class()(), auto_shard(full_class(), plan="fsdp:8")()
    variables = plain.init(KEYS["params"], batch())
    for _ in range(2):
        assert_close(plain.apply(variables, batch(), False), model.apply(variables, batch(), False))
        for mutable in (["batch_stats"], True, ("batch_stats", "intermediates"), linen.DenyList("params")):
            train = {"mutable": mutable, "rngs": {"dropout": KEYS["dropout"]}}
            expected, found = (m.apply(variables, batch(), True, **train) for m in (plain, model))
            assert jax.tree.structure(expected) == jax.tree.structure(found)
            assert_close(expected, found)
        assert_close(batch() * 2, model.apply(variables, batch(), method="encode"))
        assert_close(plain.apply(variables, x=batch()), model.apply(variables, x=batch()))
    born = model.init(KEYS["params"], batch())
    _, changed = model.apply(born, batch(), True, mutable=["batch_stats"], rngs={"dropout": KEYS["dropout"]})
    before, after = layout_of(born["params"]), type(model).autoshard_plan
    assert [x.spec for x in after.inputs if x.path.startswith("0/params")] == [s.spec for s in before]
    assert_close(*(m.apply({**born, **changed}, batch()) for m in (plain, model)))


@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_linen_parameters_stay_from_call_to_call():
    plain, model = linen_class()(), auto_shard(linen_class(), plan="tp:8 state")()
    variables = model.init(KEYS["params"], batch())
    specs = [x.sharding.spec for x in jax.tree.leaves(variables)]
    for x in (batch(), batch()[0], batch(size=16)):
        assert_close(plain.apply(variables, x), model.apply(variables, x))
        plan = type(model).autoshard_plan
        assert [leaf.spec for leaf in plan.inputs if leaf.path.startswith("0/")] == specs


def test_linen_modules_are_told_apart_by_their_fields():
    cls = auto_shard(full_class(), plan="dp:8")
    for taps in ([1], [2], {"a": [1]}, np.ones(3), True, 1):
        model = cls(taps=taps)
        variables = model.init(KEYS["params"], batch())
        assert model.apply(variables, batch()).shape == batch().shape


def test_linen_init_without_a_forward_pass_to_plan_says_so():
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
        found = cls().init(KEYS["params"], batch())
    assert_close(expected, found)
    with pytest.raises(AutoshardError, match="unknown word 'fsd:8'"):  # a wrong request is no such case
        auto_shard(linen_class(), plan="fsd:8")().init(KEYS["params"], batch())


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


def test_what_is_no_module_is_refused():
    with pytest.raises(PlanError, match="class int"):
        auto_shard(int)
    with pytest.raises(PlanError, match="function or a Flax module class"):
        auto_shard(3)  # pyright: ignore[reportArgumentType]
