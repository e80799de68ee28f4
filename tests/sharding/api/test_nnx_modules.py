"""`auto_shard` on nnx module classes, and its options on classes of both kinds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard import auto_shard
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.runtime.static_arguments import split_arguments
from tests.sharding.api.flax_classes import layout_of, linen_class, nnx_class
from tests.sharding.programs import assert_close, batch, device_bytes, whole_bytes


def test_an_nnx_class_is_changed_in_place_and_created_sharded():
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
    second = cls.sharded(64, 128, rngs=rngs, example=(batch(),))  # the random streams have advanced
    assert not np.allclose(second.up.kernel[...], model.up.kernel[...])


def test_an_nnx_module_made_by_its_constructor_is_resharded_at_its_first_call():
    expected = nnx_class()(64, 128, rngs=nnx.Rngs(0))(batch())
    cls = auto_shard(nnx_class(), plan="fsdp:8")
    model = cls(64, 128, rngs=nnx.Rngs(0))
    assert device_bytes(nnx.state(model)) == whole_bytes(nnx.state(model))
    assert_close(expected, model(batch()))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))


def test_a_first_call_under_a_transformation_only_constrains_and_warns():
    plain = nnx_class()(64, 128, rngs=nnx.Rngs(0))
    model = auto_shard(nnx_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradients(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    with pytest.warns(AutoshardWarning, match="the first call is inside a transformed function"):
        actual = gradients(model, batch())
    assert_close(gradients(plain, batch()), actual)


def test_inside_a_planned_step_the_plan_of_the_step_applies():
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
    assert cls.autoshard_plan is None  # it was never planned itself
    assert_close(nnx.state(plain, nnx.Param), nnx.state(model, nnx.Param))


def varied_class() -> Any:
    """Return an nnx class whose call accepts flags, numbers and lists besides arrays."""

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


@pytest.mark.whole
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
def test_arguments_that_are_not_arrays_are_static(args, kwargs):
    plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (varied_class(), auto_shard(varied_class(), plan="fsdp:8")))
    for _ in range(2):
        assert_close(plain(batch(), *args, **kwargs), model(batch(), *args, **kwargs))
    assert device_bytes(nnx.state(model)) * 8 == whole_bytes(nnx.state(model))


def test_static_arguments_differ_by_type_and_current_value():
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
    assert float(model(batch(size=16), [1])) == 3  # traced with this call's list, not the first one's


def test_keys_of_static_arguments():
    def key(value):
        return split_arguments((None, value), {"of": [value]}, "f").key

    assert len({key(x) for x in (True, 1, "1", None, (1, 1.0), [1, 1.0], [True])} | {key(float), key(int)}) == 9
    assert hash(key([float("nan"), 1])) == hash(key([float("nan"), 1])) and key({"a": {1}}) == key({"a": {1}})
    arrays = split_arguments((None, [np.ones(2), 1]), {"of": 0.5}, "f")
    assert arrays.key == split_arguments((None, [np.zeros(3), 1]), {"of": 0.25}, "f").key
    assert arrays.key != split_arguments((None, [np.ones(2), True]), {"of": 0.5}, "f").key


def test_an_argument_that_is_neither_array_nor_hashable_raises():
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    model = auto_shard(varied_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match=r"auto_shard\(Net\): argument 'taps' contains an instance of Odd"):
        model(batch(), taps=[Odd()])


def test_random_streams_are_arguments():
    plain, model = (c(64, 128, rngs=nnx.Rngs(0)) for c in (varied_class(), auto_shard(varied_class(), plan="dp:8")))
    streams, others = nnx.Rngs(1), nnx.Rngs(1)
    for _ in range(2):  # the streams advance
        assert_close(plain(batch(), rngs=streams), model(batch(), rngs=others))


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["tp:8 state", "fsdp:8", "fsdp:2 tp:4", None, {"tp": ["ffn"]}])
@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_parameters_keep_their_shardings_from_call_to_call(plan):
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


def test_modules_of_other_sizes_have_their_own_shardings():
    plain_class, cls = varied_class(), auto_shard(varied_class(), plan="fsdp:8")
    for width, hidden in ((64, 128), (32, 128), (64, 128)):
        plain, model = (c(width, hidden, rngs=nnx.Rngs(0)) for c in (plain_class, cls))
        assert_close(plain(batch(width=width)), model(batch(width=width)))
        assert device_bytes(nnx.state(model)) * 8 == whole_bytes(nnx.state(model))


def test_fixed_shardings_apply_to_the_forward_pass():
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
def test_sown_values_of_an_nnx_class_are_returned():
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


def test_other_methods_are_unchanged():
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


@pytest.mark.slow
@pytest.mark.whole
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


def test_an_nnx_class_without_a_call_raises():
    class Base(nnx.Module):
        def encode(self, x):
            return x

    with pytest.raises(PlanError, match="Base.*no __call__"):
        auto_shard(Base)


@pytest.mark.parametrize("make", [nnx_class, linen_class])
@pytest.mark.parametrize(
    "option", [dict(donate_argnums=0), dict(static_argnums=1), dict(variants={"train": [True, False]})]
)
def test_options_of_functions_raise_on_a_class(make, option):
    with pytest.raises(PlanError, match=rf"auto_shard\(Net\): {next(iter(option))} cannot be used on a class"):
        auto_shard(make(), **option)
    nothing: Any = dict.fromkeys(option, ())
    auto_shard(make(), **nothing)


@pytest.mark.whole
def test_the_example_of_the_decorator_is_the_default_of_sharded():
    cls = auto_shard(nnx_class(), plan="fsdp:8", example=(batch(),))
    model = cls.sharded(64, 128, rngs=nnx.Rngs(0))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    cls.sharded(64, 128, rngs=nnx.Rngs(0), example=(batch(size=16),))
    assert [leaf.shape for leaf in cls.autoshard_plan.inputs if leaf.path == "1"] == [(16, 64)]
    with pytest.raises(PlanError, match=r"Net.sharded: there is no example to plan from: pass example="):
        auto_shard(nnx_class()).sharded(64, 128, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match="example cannot be used on a linen class: its init plans"):
        auto_shard(linen_class(), example=(batch(),))


def test_the_warning_of_a_first_call_points_at_the_call():
    model = auto_shard(nnx_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))
    with pytest.warns(AutoshardWarning, match="inside a transformed function") as caught:
        nnx.jit(lambda model, x: model(x))(model, batch())
    assert caught[0].filename == __file__


def test_other_classes_and_values_raise():
    with pytest.raises(PlanError, match="class int"):
        auto_shard(int)
    with pytest.raises(PlanError, match="function or a Flax module class"):
        auto_shard(3)  # pyright: ignore[reportArgumentType]
