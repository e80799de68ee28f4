"""Weights that are computed from a stored parameter are gathered where they are used, and codes before decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace

WIDTH = 32
SHAPES = {
    "first": (WIDTH, WIDTH), "w": (WIDTH, 4 * WIDTH), "scale": (1, 4 * WIDTH), "heads": (WIDTH, 8, WIDTH // 2),
    "turned": (4 * WIDTH, WIDTH), "a": (WIDTH, 8), "b": (8, 4 * WIDTH), "codes": (WIDTH, 6 * WIDTH),
    "pairs": (WIDTH, 3 * WIDTH), "merged": (2 * WIDTH, 2, WIDTH),
}  # fmt: skip
COMPUTED = {
    "scaled": (lambda p: p["w"] * p["scale"], ["w", "scale"]),
    "reshaped": (lambda p: p["heads"].reshape(WIDTH, 4 * WIDTH), ["heads"]),
    "merged": (lambda p: p["merged"].reshape(4 * WIDTH, WIDTH).T, ["merged"]),
    "transposed": (lambda p: p["turned"].T, ["turned"]),
    "one plus": (lambda p: 1 + p["w"], ["w"]),
    "normalized": (lambda p: p["w"] * jax.lax.rsqrt(jnp.sum(p["w"] ** 2, 0, keepdims=True)), ["w"]),
    "adapted": (lambda p: p["w"] + p["a"] @ p["b"], ["w", "a", "b"]),
}
CODES = {
    "codes": (lambda p: p["codes"].astype(jnp.float32) / 256, ["codes"], jnp.int8),
    "pairs": (
        lambda p: jnp.stack([p["pairs"] & 15, p["pairs"] >> 4], -1).reshape(WIDTH, -1).astype(jnp.float32) / 32,
        ["pairs"],
        jnp.uint8,
    ),
}


def step_of(weight):
    """A step of plain gradient descent on two products, the second with a computed weight."""

    def loss(p, frozen, x):
        return jnp.mean((jnp.tanh(x @ p["first"]) @ weight({**p, **frozen})) ** 2)

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["p"], state["frozen"], x)
        return {**state, "p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)}, value

    return step


def inputs(names, codes=None):
    """The state and the batch. `codes` is the dtype of codes, which are frozen."""
    drawn = np.random.default_rng(0)
    own = {n: drawn.normal(size=SHAPES[n]).astype("float32") / 8 for n in ("first", *names) if n not in CODES}
    frozen = {n: drawn.integers(0, 100, SHAPES[n]).astype(codes) for n in names if n in CODES}
    return {"p": own, "frozen": frozen}, drawn.normal(size=(1024, WIDTH)).astype("float32")


def collectives_of(made, sent_bytes):
    """The kinds of collectives over fsdp in which a device sends so many bytes."""
    return sorted(kind for kind, axes, sent, _ in made.traffic if axes == "fsdp" and sent == sent_bytes)


def roles_of(made):
    """Path -> the role of each input, and whether fsdp shards it."""
    return {leaf.path: (leaf.role, "fsdp" in str(leaf.spec)) for leaf in made.inputs}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_gathered_where_it_is_used(name):
    weight, names = COMPUTED[name]
    made = plan(step_of(weight), *inputs(names), target="v5e:2x4", plan="fsdp:8")
    assert collectives_of(made, 4 * 4 * WIDTH**2 * 7 / 8) == ["all-gather", "reduce-scatter"]


def test_one_gather_serves_a_parameter_and_its_transpose():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2))(w)
        return w - 0.1 * gradient

    given = np.ones(SHAPES["w"], "float32"), inputs([])[1]
    made = plan(step, *given, target="v5e:2x4", plan="fsdp:8")
    assert [kind for kind, *_ in made.traffic].count("all-gather") == 1
    compiled = auto_shard(step, plan="fsdp:8").plan(*given).jit().lower(*given).compile()
    assert compiled.as_text().count(" all-gather(") == 1


def test_values_that_are_computed_from_gradients_are_no_computed_weights():
    weight, names = COMPUTED["scaled"]
    given = inputs(names)
    found = analyse(trace(step_of(weight), given, {}, (0,)))
    assert found.roles.computed_weights and not found.roles.computed_weights.keys() & found.roles.gradients


def test_compute_hides_the_gather_of_a_computed_weight_as_that_of_a_parameter():
    def exposed_us(weight):
        given = inputs(["w"])[0], np.ones((2**18, WIDTH), "float32")
        estimate = plan(step_of(weight), *given, target="v5p:2x2x2", plan="fsdp:8").estimate
        return estimate.step_time_us - estimate.compute_us

    assert exposed_us(COMPUTED["one plus"][0]) == pytest.approx(exposed_us(lambda p: p["w"]), rel=0.01)


@pytest.mark.parametrize("name", CODES)
def test_codes_are_stored_in_shards_and_gathered_before_they_are_decoded(name):
    weight, names, dtype = CODES[name]
    made = plan(step_of(weight), *inputs(names, dtype), target="v5e:2x4", plan="fsdp:8")
    assert roles_of(made)[f"0/frozen/{name}"] == ("parameter", True)
    codes_bytes, first_bytes = np.prod(SHAPES[name]), 4 * WIDTH**2
    assert collectives_of(made, codes_bytes * 7 / 8) == ["all-gather"]
    gathered = sum(sent for kind, _, sent, _ in made.traffic if kind == "all-gather")
    assert gathered == (codes_bytes + first_bytes) * 7 / 8


def test_decoded_codes_take_no_memory_of_their_own():
    """The kernels that read a weight decode it. So codes of 8 bits save three quarters of the bytes of float32."""

    def peak(codes):
        given = inputs(["codes"], codes)[0], np.ones((64, WIDTH), "float32")
        weight = CODES["codes"][0] if codes == jnp.int8 else lambda p: p["codes"] / 256
        return plan(step_of(weight), *given, target="v5e:2x4", plan="dp:8").estimate.peak_memory_bytes

    assert peak(jnp.float32) - peak(jnp.int8) == 3 * np.prod(SHAPES["codes"])


@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:4", "tp:8", "fsdp:4 tp:2", "zero1:8"])
def test_values_equal_those_of_one_device(words):
    for weight, names, dtype in [*((*each, None) for each in COMPUTED.values()), *CODES.values()]:
        given = inputs(names, dtype)
        step = step_of(weight)
        expected, loss = jax.jit(step)(*given)
        state, value = auto_shard(step, plan=words)(*given)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, expected)


def test_other_integers_are_no_parameters():
    """A mask, a counter and positions of the state, and a table of the data, are not weights."""

    def step(state, x, ids, neighbours):
        def loss(w):
            y = jnp.where(state["mask"], jnp.tanh(x @ w), 0.0) + state["positions"]
            return jnp.mean(y * neighbours[ids])

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"]), "count": state["count"] + 1}

    own = {"mask": np.ones((2, WIDTH), bool)[:1], "positions": np.arange(WIDTH)[None], "count": np.zeros((), int)}
    state = {"w": np.ones((WIDTH, WIDTH), "float32"), **own}
    data = np.ones((256, WIDTH), "float32"), np.ones(256, int), np.ones((4, WIDTH), int)
    roles = roles_of(plan(step, state, *data, target="v5e:2x4", plan="fsdp:8"))
    assert roles["0/w"] == ("parameter", True)
    assert {roles[f"0/{name}"][0] for name in own} == {"other"} and roles["3"][0] == "data"


def test_relative_positions_are_no_weights():
    """Relative positions select rows of a table. Positions of shape `[1, seq]` give the decay of the scores."""

    def loss(w, x, data):
        queries = (x @ w["first"]).reshape(-1, 16, WIDTH)
        scores = jnp.einsum("bqd,qkd->bqk", queries, w["table"][data["relative"]])
        return jnp.mean(jnp.einsum("bqk,qk,bkd->bqd", scores, 0.9 ** jnp.abs(data["at"].T - data["at"]), queries) ** 2)

    def step(w, x, data):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x.reshape(-1, WIDTH), data))

    weights = {"first": np.ones((WIDTH, WIDTH), "float32"), "table": np.ones((31, WIDTH), "float32")}
    at = np.arange(16)
    data = {"relative": (at[:, None] - at + 15).astype("int32"), "at": at[None].astype("int32")}
    made = plan(step, weights, np.ones((256, 16, WIDTH), "float32"), data, target="v5e:2x4", plan="fsdp:8")
    roles = roles_of(made)
    assert {roles[f"2/{name}"][0] for name in data} == {"data"}
    assert not any("experts" in str(leaf) for leaf in made.inputs)
