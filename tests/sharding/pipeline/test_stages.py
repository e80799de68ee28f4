"""A step in stages equals the step: loss, gradients, updated state and rows, in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.pipeline.pipelining import with_stages
from autoshard.sharding.pipeline.schedules import SCHEDULES
from autoshard.sharding.program.tracing import trace
from tests.sharding.pipeline.programs import KINDS, make_step, state, tokens

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def float64():
    """Run in float64."""
    with jax.enable_x64(True):
        yield


@functools.cache
def traced(kind, remat, layers):
    return trace(make_step(kind, remat, layers != "scan"), (state(unrolled=layers == "list"), tokens()), {})


@functools.cache
def expected(kind, layers):
    args = state(unrolled=layers == "list"), tokens()
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(make_step(kind, False, layers != "scan"))(*args))]


def check(kind, remat, microbatches, stages, schedule, layers="scan"):
    cut = with_stages(traced(kind, remat, layers), microbatches, stages=stages, schedule=schedule)
    assert (cut.stages, cut.schedule, cut.microbatches) == (stages, schedule, microbatches)
    args = jax.tree.leaves((state(unrolled=layers == "list"), tokens()))
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*args)
    for one, other in zip(made, expected(kind, layers), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other) / max(np.linalg.norm(other), 1e-30)
        assert error < TOLERANCE


QUICK = ("dropout", "frozen", "auxiliary", "experts", "encoder")  # kinds that differ most in what is cut


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_one_forward_one_backward(kind):
    check(kind, False, 4, 2, "1f1b")


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "schedule"), [("encoder", "ftb"), ("hidden", "gpipe"), ("auxiliary", "zb")])
def test_other_schedules(kind, schedule):
    check(kind, False, 4, 4, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES])
@pytest.mark.parametrize("kind", KINDS)
def test_all_with_remat(kind, schedule):
    check(kind, True, 8, 4, schedule)


def test_checkpointed_layers_are_split_for_zero_bubble():
    check("tied", True, 2, 2, "zb")


def in_ticks(jaxpr):
    """Yield for each loop over ticks what it does, in order: `product`, `barrier` and `shift`. Products are merged."""
    names = {"dot_general": "product", "optimization_barrier": "barrier", "shift_stages": "shift"}
    for eqn in jaxpr.eqns:
        bodies = [_compat.open_jaxpr(eqn.params["jaxpr"])] if eqn.primitive.name in ("scan", "jit") else []
        for body in bodies:
            found = [names[each.primitive.name] for each in body.eqns if each.primitive.name in names]
            if "shift" in found:
                yield [
                    name for name, before in zip(found, ["", *found], strict=False) if name != before or name == "shift"
                ]
            yield from in_ticks(body)


def test_values_move_while_gradients_of_weights_are_computed():
    """They move after the last sum over the stages, which uses the same links."""
    ticks = {
        schedule: [*in_ticks(with_stages(traced("plain", False, "scan"), 8, stages=4, schedule=schedule).closed.jaxpr)]
        for schedule in ("1f1b", "zb")
    }
    assert [found[0] for found in ticks["1f1b"]] == ["shift"] * 3
    wait = ["barrier", "shift"]
    assert ticks["zb"] == [
        ["product", "shift"],  # forward
        ["product", "shift", "shift"],  # and backward
        ["product", *wait, *wait, "product"],  # and the gradients of weights
        ["product", *wait, "product"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auxiliary", "shared"])
def test_layers_one_after_another(kind):
    check(kind, False, 4, 2, "1f1b", "list")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", pytest.param("dropout", marks=pytest.mark.slow)])
def test_layers_one_after_another_that_index_a_stack(kind):
    check(kind, True, 4, 4, "zb", "index")


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["list", "index"])
@pytest.mark.parametrize(("remat", "schedule"), [(False, "1f1b"), (True, "1f1b"), (False, "ftb")])
@pytest.mark.parametrize("kind", KINDS)
def test_all_with_layers_one_after_another(kind, remat, schedule, layers):
    check(kind, remat, 4, 2, schedule, layers)


def train(stack):
    """Return a train step `step(weights, x)` of layers, the arguments, and its results."""

    def loss(weights, x):
        return (stack(weights, x) ** 3).mean()

    weights = jax.random.normal(jax.random.key(0), (2, 4, 6, 6)) * 0.4
    args = weights, jax.random.normal(jax.random.key(1), (8, 6))
    fn = jax.value_and_grad(loss, argnums=(0, 1))
    return fn, args, jax.tree.leaves(fn(*args))


def layer(x, w):
    x = x + jnp.tanh(x @ w)
    return x, x


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "schedule", "layers"),
    [
        ("auxiliary", "gpipe", "scan"),
        pytest.param("dropout", "1f1b", "scan", marks=pytest.mark.slow),
        ("shared", "zb", "list"),
        pytest.param("dropout", "ftb", "list", marks=pytest.mark.slow),
        pytest.param("plain", "1f1b", "scan", marks=pytest.mark.slow),
        pytest.param("tied", "zb", "scan", marks=pytest.mark.slow),
        pytest.param("frozen", "zb", "scan", marks=pytest.mark.slow),
        pytest.param("encoder", "zb", "index", marks=pytest.mark.slow),
        pytest.param("auxiliary", "ftb", "scan", marks=pytest.mark.slow),
        pytest.param("encoder", "ftb", "index", marks=pytest.mark.slow),
    ],
)
def test_stages_with_different_numbers_of_layers(kind, schedule, layers):
    check(kind, True, 4, 3, schedule, layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("auxiliary", "scan"),
        *(pytest.param(kind, "scan", marks=pytest.mark.slow) for kind in KINDS if kind != "auxiliary"),
        *(pytest.param(kind, "list", marks=pytest.mark.slow) for kind in ("shared", "tied", "dropout")),
        pytest.param("encoder", "index", marks=pytest.mark.slow),
    ],
)
def test_interleaved(kind, layers):
    check(kind, True, 4, 2, "interleaved:2", layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("written", ["scan", "reverse", "list"])
@pytest.mark.parametrize(("layers", "stages", "microbatches", "chunks"), [(8, 2, 8, 2), (7, 3, 4, 2), (7, 2, 2, 3)])
def test_chunks_of_layers(layers, stages, microbatches, chunks, written):
    def loss(weights, x):
        if written == "list":
            for w in weights:
                x = x + jnp.tanh(x @ w)
        else:
            x = jax.lax.scan(layer, x, weights, reverse=written == "reverse")[0]
        return (x**3).mean()

    weights = jax.random.normal(jax.random.key(0), (layers, 6, 6)) * 0.4
    args = [*weights] if written == "list" else weights, jax.random.normal(jax.random.key(1), (8, 6))
    fn = jax.value_and_grad(loss, argnums=(0, 1))
    cut = with_stages(trace(fn, args, {}), microbatches, stages=stages, schedule=f"interleaved:{chunks}")
    assert sum(cut.stage_layers) == layers and len(cut.stage_layers) == stages
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves(args))
    for one, other in zip(made, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_layers_that_run_from_last_to_first(schedule):
    fn, args, want = train(lambda weights, x: jax.lax.scan(layer, x, weights[0], reverse=True)[0])
    for stages in (2, 3):
        cut = with_stages(trace(fn, args, {}), 4, stages=stages, schedule=schedule)
        for one, other in zip(jax.jit(_compat.jaxpr_as_function(cut.closed))(*args), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("staged", "advice"), [(0, "Add up in the carry"), (1, "Request a plan without pp")])
def test_a_later_stack_in_the_same_direction_is_no_gradient(staged, advice):
    """Each layer of the second stack takes rows of one of the first, as in a U-Net."""

    def stack(weights, x):
        x, kept = jax.lax.scan(layer, x, weights[0])
        own = (weights[0], weights[1]) if staged else (weights[1],)  # the stack with more weights would be in stages
        body = lambda x, xs: (x + jnp.tanh(x @ sum(xs[0])) * xs[1], None)  # noqa: E731
        return jax.lax.scan(body, x, (own, kept))[0]

    fn, args, _ = train(stack)
    with pytest.raises(PlanError, match=f"slices of an array that differs between microbatches: .*scan.*{advice}"):
        with_stages(trace(fn, args, {}), 4, stages=2)
    if not staged:  # without gradients, the rows travel from the first stack to the second
        cut = with_stages(trace(stack, args, {}), 4, stages=2)
        np.testing.assert_allclose(_compat.jaxpr_as_function(cut.closed)(*args)[0], stack(*args), rtol=TOLERANCE)


def forward(kind, layers):
    """Return a function without gradients, its arguments, and its results."""

    def fn(weights, rows):
        x = rows @ weights["head"].T
        if layers == "scan":
            x, kept = jax.lax.scan(layer, x, weights["layers"])
        else:
            made = []
            for w in weights["layers"]:
                x, y = layer(x, w)
                made.append(y)
            kept = jnp.stack(made)
        logits = x @ weights["head"]
        return {"loss": (logits**2).mean(), "rows": (logits, x), "stacked": (logits.max(-1), kept[1:].sum())}[kind]

    stack = jax.random.normal(jax.random.key(0), (4, 6, 6)) * 0.4
    weights = {"head": jax.random.normal(jax.random.key(2), (6, 5)), "layers": stack if layers == "scan" else [*stack]}
    args = weights, jax.random.normal(jax.random.key(1), (8, 5))
    return fn, args, jax.tree.leaves(fn(*args))


@pytest.mark.few(1)
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (3, "ftb"), (2, "interleaved:2")])
@pytest.mark.parametrize("layers", ["scan", "list"])
@pytest.mark.parametrize("kind", ["loss", "rows", "stacked"])
def test_functions_without_gradients(kind, layers, stages, schedule):
    fn, args, want = forward(kind, layers)
    cut = with_stages(trace(fn, args, {}), 4, stages=stages, schedule=schedule)
    assert (cut.stages, cut.schedule) == (stages, "forward:2" if schedule == "interleaved:2" else "forward")
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves(args))
    for one, other in zip(made, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("layers", ["scan", "list"])
def test_weights_that_are_taken_outside_of_the_layers(layers):
    fn, args, _ = forward("loss", layers)

    def penalized(weights, rows):
        x = rows @ weights["head"].T
        if layers == "scan":
            return fn(weights, rows) + (jnp.einsum("bi,lij->blj", x, weights["layers"]) ** 2).mean()
        return fn(weights, rows) + ((x @ weights["layers"][1]) ** 2).mean()

    with pytest.raises(PlanError, match="of the layers at .* are taken by another operator" if layers == "scan" else
                       "no repeated part"):  # fmt: skip
        with_stages(trace(penalized, args, {}), 4, stages=2)
    with pytest.raises(PlanError, match="schedule 'forward' is for functions without gradients; use '1f1b'"):
        with_stages(trace(jax.grad(fn), args, {}), 4, stages=2, schedule="forward")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("taken", r"float64\[4,2,6\], the result of 'tanh' at .*test_stages.py.*\. Compute it in the layers"),
        ("returned", r"float64\[4,2,6\], the result of 'mul' at .*test_stages.py.*\. Add up in the carry"),
    ],
)
def test_rows_of_each_layer_are_named(rows, message):
    def stack(weights, x):
        own = jnp.tanh(jnp.stack([x, 2 * x, 3 * x, 4 * x])) if rows == "taken" else jnp.zeros(4)
        x, found = jax.lax.scan(lambda x, each: layer(x + each[1], each[0]), x, (weights[0], own))
        return x if rows == "taken" else (found * jnp.arange(4.0)[:, None, None]).sum(0)

    fn, args, _ = train(stack)
    with pytest.raises(PlanError, match=message) as error:
        with_stages(trace(fn, args, {}), 4, stages=2)
    assert "\n" not in str(error.value)


def check_advice(loss, args, message):
    """Check that a loss is refused with a message, and that what the message advises has the same values.

    Args:
        loss: takes `args`, and whether it is written in the way that is refused.
        args: its arrays.
        message: a pattern of the message.
    """
    refused, advised = (lambda *xs, s=s: jax.value_and_grad(loss)(*xs, s) for s in (True, False))
    with pytest.raises(PlanError, match=message):
        with_stages(trace(refused, args, {}), 4, stages=2)
    cut = with_stages(trace(advised, args, {}), 4, stages=2)
    for one, other in zip(jax.jit(_compat.jaxpr_as_function(cut.closed))(*args), refused(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_that_index_the_weights_of_all_layers(remat):
    """The message says what to do: each layer takes a slice of the weights."""
    body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731

    def loss(weights, rows, index):
        layer = (lambda x, i: body(x, weights[i])) if index else body
        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, rows, jnp.arange(4) if index else weights)[0] ** 3).mean()

    args = jax.random.normal(jax.random.key(0), (4, 6, 6)) * 0.4, jax.random.normal(jax.random.key(1), (8, 6))
    check_advice(loss, args, "index the weights of all layers, float64.4,6,6.*as its xs")


def test_layers_index_an_argument_with_the_batch():
    """They cannot take slices of it. The message says what to do."""

    def loss(weights, rows, sliced):
        def body(x, xs):
            w, own = xs
            return x + jnp.tanh(x @ w) + (own if sliced else jax.lax.dynamic_index_in_dim(rows, own, 0, False)), None

        own = rows if sliced else jnp.arange(4)
        return (jax.lax.scan(body, jnp.zeros((8, 6)), (weights, own))[0] ** 2).mean()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) * 0.4  # noqa: E731
    args = draw(0, 4, 6, 6), draw(1, 4, 8, 6)
    check_advice(loss, args, "an argument with the batch. Let each layer index the whole array by the l")


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layers", "frozen", "embedding", "sizes"),
    [
        (8, 4, "frozen", (2, 2)),  # the trained layers, of which the first one has no gradient of its input
        (8, 4, "trained", (2, 2)),
        (8, 5, "trained", (3, 2)),  # the frozen layers, which pass gradients on
        (6, 4, "frozen", (2, 2)),  # the frozen layers, which have no gradients
        pytest.param(6, 3, "frozen", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_lower_layers_that_are_frozen(layers, frozen, embedding, sizes, schedule):
    """Layers with gradients take precedence. The plan names the others."""

    def loss(weights, tokens):
        table = weights["embedding"]
        x = (jax.lax.stop_gradient(table) if embedding == "frozen" else table)[tokens]
        for n, w in enumerate(weights["layers"]):
            x = x + jnp.tanh(x @ (jax.lax.stop_gradient(w) if n < frozen else w))
        return (x**2).mean()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) * 0.4  # noqa: E731
    weights = {"embedding": draw(99, 16, 6), "layers": [draw(n, 6, 6) for n in range(layers)]}
    args = weights, jnp.arange(8) * 2
    cut = with_stages(trace(jax.value_and_grad(loss), args, {}), 4, stages=2, schedule=schedule)
    assert cut.stage_layers == sizes and cut.schedule == (schedule if layers == 8 or frozen == 3 else "forward")
    (place,) = cut.unstaged_layers
    assert re.match(r"other layers at .*test_stages\.py", place)
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves(args))
    for one, other in zip(made, jax.tree.leaves(jax.value_and_grad(loss)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
