"""`plan.reduce_axes(path)` names the mesh axes over which the compiled program reduces a gradient, each once."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from autoshard import Plan, plan
from autoshard.errors import PlanError
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.replica_groups import groups_of
from tests.parity import mixed_layers
from tests.parity.mixed_parameters import arguments, shapes, step

# Sizes with different odd factors, by which gradients and activations are told apart in the compiled program.
SHAPES = shapes(seq=8 * 11, width=8 * 3, hidden=8 * 5, vocab=8 * 7, experts=8 * 13, frozen=8 * 19)
ARGUMENTS = arguments(SHAPES, batch=8 * 17)


def odd(dims):
    """The odd factors of the sizes, sorted, without those of powers of two."""
    return sorted(factor for n in dims if (factor := n // (n & -n)) > 1)


def reduced_axes(made, args):
    """Parameter -> the mesh axes of the reductions of its gradient in the compiled program."""
    program = parse_program(made.jit().lower(*args).compile().as_text())
    coordinates = np.array(list(np.ndindex(*made.mesh.axis_sizes)))
    found = {name: [] for name in SHAPES}
    for computation in program.computations.values():
        for each in computation.instructions:
            if each.opcode not in ("all-reduce", "reduce-scatter"):
                continue
            group = coordinates[list(groups_of(each.attributes, program.partitions)[0])]
            axes = [a for a, at in zip(made.mesh.axis_names, group.T, strict=True) if len({*at}) > 1]
            for array in each.arrays:  # XLA combines reductions
                for name, shape in SHAPES.items():
                    if odd(array.dims) == odd(shape):
                        found[name] += axes
    return found


@pytest.mark.parametrize("words", ["dp:2 fsdp:4", "dp:2 tp:4 seq", "fsdp:2 cp:4", "dp:2 ep:2 tp:2", "zero1:4 tp:2"])
def test_each_gradient_is_reduced_once_over_the_axes_that_it_names(words):
    args = ARGUMENTS
    made = plan(step, *args, plan=words)
    said = {name: [*made.reduce_axes(name)] for name in SHAPES}
    said["embed"] *= 2  # tied: the lookup and the head each have a gradient
    assert said["frozen"] == [] and said["scale"]
    assert {k: sorted(v) for k, v in said.items()} == {k: sorted(v) for k, v in reduced_axes(made, args).items()}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "replicated", "others"),
    [
        ("pp:2 ring:2 dp:2", "dp ring", {"position": "dp"}),
        ("dp:2 isp:4", "dp isp", {"position": "dp"}),
        pytest.param("pp:2 dp:2 tp:2", "dp", {"bias": "dp tp"}, marks=pytest.mark.slow),  # tp shards the experts
        pytest.param("pp:2 fsdp:4", "fsdp", {}, marks=pytest.mark.slow),
        pytest.param("pp:2 ulysses:2 fsdp:2", "fsdp ulysses", {"position": "fsdp"}, marks=pytest.mark.slow),
        pytest.param("pp:2 dp:2 isp:2", "dp isp", {"position": "dp"}, marks=pytest.mark.slow),
        pytest.param("dp:2 ring:4", "dp ring", {"position": "dp"}, marks=pytest.mark.slow),
        pytest.param("dp:2 ulysses:4", "dp ulysses", {"position": "dp"}, marks=pytest.mark.slow),
    ],
)
def test_layers_on_stages_and_long_sequences(words, replicated, others):
    """Gradients equal those of one device, so each is reduced once; `pp` reduces none."""
    args = mixed_layers.arguments()
    made = plan(mixed_layers.step, *args, plan=words, microbatches=4 if "pp" in words else None)
    named = {name: " ".join(made.reduce_axes(f"0/{name}")) for name in mixed_layers.SHAPES}
    assert named == {**dict.fromkeys(mixed_layers.SHAPES, replicated), **others}
    want = jax.jit(mixed_layers.step)(*args)
    for one, other in zip(jax.tree.leaves(made.jit()(*args)), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)


def test_a_random_key_beside_the_parameters():
    def noisy(p, x, key):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x * kept @ p["up"]) @ p["down"]) ** 2))(p)
        return jax.tree.map(lambda p, g: p - g, p, grads)

    params = {"up": jnp.ones((16, 56)), "down": jnp.ones((56, 16))}
    made = plan(noisy, params, jnp.ones((40, 16)), jax.random.key(0), plan="dp:8")
    assert [*made.reduce_axes("up")] == ["dp"]
    with pytest.raises(PlanError, match="no parameter is called 'key'"):
        made.reduce_axes("key")


def test_it_says_why():
    made = plan(step, *ARGUMENTS, plan="dp:2 tp:4 seq")
    found = made.reduce_axes("p/scale")
    assert found["dp"].startswith("dp shards batch, which the parameter lacks: all-reduce after 'reduce_sum' at ")
    assert found["tp"].startswith("tp shards seq, which the parameter lacks: all-reduce after 'reduce_sum' at ")
    assert [*made.reduce_axes("position")] == ["dp"]  # it has the sequence that tp shards
    assert "(loss), all-reduce after 'dot_general'" in made.reduce_axes("0/embed")["dp"]


def test_gradients_in_a_loop_over_layers_and_microbatches():
    def stacked(p, x):
        def of(p):
            return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, p, jax.grad(of)(p))

    args = {"layers": jnp.ones((4, 16, 16))}, jnp.ones((1024, 16))
    for count in (1, 2):
        made = plan(stacked, *args, plan="dp:2 fsdp:4", microbatches=count)
        assert [*made.reduce_axes("layers")] == ["dp", "fsdp"], count


@pytest.mark.parametrize(
    ("words", "microbatches", "axes"),
    [("dp:8", None, "dp"), ("dp:8", 4, "dp"), ("pp:2 dp:4", 4, "dp"), ("dp:2 tp:4", None, "dp tp")],
)
def test_parameters_without_dimensions(words, microbatches, axes):
    """They are a temperature, and one scale for each layer. The norm of all gradients is not one of their gradients."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def scaled(p, rate, x):
        def loss(p):
            run = lambda h, w: (h + w["scale"] * jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
            return jnp.mean((jax.lax.scan(run, x, p["layers"])[0] * p["temperature"]) ** 2)

        updates, _ = optimizer.update(jax.grad(loss)(p), optimizer.init(p))
        return jax.tree.map(lambda w, g: w + rate * g, p, updates)

    layers = {"scale": jnp.ones(4), "up": jnp.ones((4, 16, 32)), "down": jnp.ones((4, 32, 16))}
    args = {"layers": layers, "temperature": jnp.ones(())}, jnp.ones(()), jnp.ones((64, 16))
    made = plan(scaled, *args, target="cpu:8", plan=words, microbatches=microbatches)
    found = {name: " ".join(made.reduce_axes(name)) for name in ("scale", "temperature", "up", "rate")}
    assert found == {"scale": axes, "temperature": axes.split()[0], "up": "dp", "rate": ""}


def test_statistics_of_an_optimizer_are_no_reduction_of_the_gradient():
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=8)

    def loss(p, x):
        return (jnp.tanh(x @ p["w"]) @ p["v"] - x).var()

    def update(state, x):
        p, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(p, x), moments, p)
        return optax.apply_updates(p, updates), moments

    p = {"w": jnp.ones((16, 32)), "v": jnp.ones((32, 16))}
    made = plan(update, (p, optimizer.init(p)), jnp.ones((32, 16)), plan="dp:2 tp:4")
    assert made.in_specs[0][0]["w"] == PartitionSpec(None, "tp")  # the mean of its squares is a sum over tp
    assert [*made.reduce_axes("0/0/w")] == [*made.reduce_axes("0/0/v")] == ["dp"]


def test_a_base_of_integers_has_no_gradient():
    def step(p, x):
        def loss(trained):
            base = p["codes"].astype(jnp.float32) * p["scale"]
            return jnp.mean((x @ base + x @ trained["a"] @ trained["b"]) ** 2)

        value, gradients = jax.value_and_grad(loss)({name: p[name] for name in "ab"})
        return {**p, **{name: p[name] - d for name, d in gradients.items()}}, value

    float32 = {"scale": (32,), "a": (64, 4), "b": (4, 32)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in float32.items()}
    p["codes"] = jax.ShapeDtypeStruct((64, 32), jnp.int8)
    made = plan(step, p, jax.ShapeDtypeStruct((16, 64), jnp.float32), plan="dp:8")
    assert made.reduce_axes("codes") == made.reduce_axes("scale") == {}
    assert list(made.reduce_axes("a")) == ["dp"]
    with pytest.raises(PlanError, match="no parameter is called '1'"):
        made.reduce_axes("1")


def test_paths_that_it_refuses():
    made, number = plan(step, *ARGUMENTS, plan="fsdp:8"), cast(Any, 3)
    for path, message in (
        (number, "reduce_axes: 3 is not a path"),
        ("1", "reduce_axes: no parameter is called '1'"),
        ("wq", "no parameter is called 'wq'"),
        ("p/*", r"'p/\*' names 8 parameters; give the path of one"),
    ):
        with pytest.raises(PlanError, match=message):
            made.reduce_axes(path)
    with pytest.raises(PlanError, match="no function"):
        Plan.from_json(made.to_json()).reduce_axes("up")
