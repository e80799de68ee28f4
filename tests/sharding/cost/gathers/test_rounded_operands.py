"""Which float32 operands of products XLA:TPU gathers in 16 bits."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.cost.gathers.rounded_operands import rounded_operands, with_rounded_operands
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.program.tracing import trace

WIDTH, ROWS = 256, 4096
MATRIX, BATCH = (jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (WIDTH, ROWS))


def step_of(network):
    def step(weights, x):
        value, gradients = jax.value_and_grad(lambda weights: jnp.mean(network(weights, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def product(w, x):
    return jnp.tanh(x @ w) @ w


def sent(network, words, weights=MATRIX, target="v5e:2x4", x=BATCH):
    return plan(step_of(network), weights, x, target=target, plan=words).estimate.comm_bytes


def precise(w, x):
    return jnp.matmul(jnp.tanh(jnp.matmul(x, w, precision="highest")), w, precision="highest")


def scanned(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def is_rounded(network, weights=MATRIX, x=BATCH):
    found = analyse(trace(step_of(network), (weights, x), {}))
    origin = {**{v: v for v in found.axes.program.inputs}, **found.axes.parameter_aliases}
    return found.axes.program.inputs[0] in {origin.get(v) for v in rounded_operands(found.axes, found.roles, "tpu")}


@pytest.mark.parametrize(("network", "expected"), [
    (product, True),
    (precise, False),
    (lambda w, x: jnp.matmul(x, w, precision="default") @ w, True),
    (lambda w, x: jnp.matmul(x, w, precision="highest") @ w, False),  # one gather serves both
    (lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), False),  # no 32-bit operand
    (lambda w, x: x @ jnp.tanh(w), False),  # the product takes another value
])  # fmt: skip
def test_only_products_at_default_precision_round(network, expected):
    assert is_rounded(network) == expected


def test_stacks_of_layers_and_tables():
    stack = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)
    assert is_rounded(scanned, stack)
    tokens = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    assert not is_rounded(lambda table, tokens: table[tokens], MATRIX, tokens)
    assert not is_rounded(lambda table, tokens: table[tokens] @ table, MATRIX, tokens)  # rows of the table are not


def test_a_parameter_is_gathered_in_16_bits_on_a_tpu():
    """The gather sends 2 bytes for each element instead of 4. The reduction of the gradient still sends 4."""
    assert sent(product, "fsdp:8") == pytest.approx(0.75 * sent(precise, "fsdp:8"), rel=1e-3)
    assert sent(product, "dp:8") == sent(precise, "dp:8")
    assert sent(product, "fsdp:8", target="h100:8") == sent(precise, "fsdp:8", target="h100:8")


@pytest.mark.parametrize("computed", [lambda w: w.T, lambda w: 2 * w, lambda w: jnp.concatenate([w, w], 1)])
def test_weights_that_the_program_computes_are_gathered_in_32_bits(computed):
    default, highest = (
        sent(lambda w, x, p=precision: jnp.matmul(x, computed(w), precision=p), "fsdp:8")
        for precision in ("default", "highest")
    )
    assert default == highest


def test_moves():
    gather = Move("all-gather", ("fsdp",), 1, 8.0, 56.0)
    ring = gather._replace(kind="collective-permute", hops=7)
    sums = gather._replace(kind="reduce-scatter", array=-1)
    halved = gather._replace(local_bytes=4.0, wire_bytes=28.0)
    assert with_rounded_operands([gather, ring, sums], (1,)) == (halved, ring, sums)
    assert with_rounded_operands([gather], (0,)) == (gather,)


@pytest.mark.parametrize(("order", "rounds"), [("sequential", True), ("prefetch", False)])
def test_early_gathers_move_parameters_in_their_own_type(order, rounds):
    """A loop carries the gathered parameters from one iteration to the next, in their own type."""

    def sent_in(network):
        made = plan(step_of(network), MATRIX, BATCH, target="v5e:2x4", plan="fsdp:8", gather=order)
        return made.estimate.comm_bytes

    assert (sent_in(product) < 0.9 * sent_in(precise)) == rounds


@pytest.mark.slow
@pytest.mark.parametrize("network", [product, precise])
def test_the_tpu_compiler_moves_as_many_bytes(network):
    made = plan(step_of(network), MATRIX, BATCH, target="v5e:2x4", plan="fsdp:8")
    compiled = sum(c.wire_bytes for c in made.verify().collectives)
    assert compiled == pytest.approx(made.estimate.comm_bytes, rel=0.02)
