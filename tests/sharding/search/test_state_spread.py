"""How far the optimizer's state is spread, apart from parameters."""

import jax
import pytest

from autoshard import plan
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.search.state_spread import state_spreads


@pytest.mark.parametrize(("known", "spreads"), [
    ("zero1:2", {"dp:2", "zero1:2", "fsdp:2"}),
    ("dp:2 cp:2", {"dp:2 cp:2", "dp:2 cp:2 cp+optimizer", "zero1:2 cp:2", "zero1:2 cp:2 cp+optimizer", "fsdp:2 cp:2",
                   "fsdp:2 cp:2 cp+optimizer"}),
    ("fsdp:2 state", set()),  # all state is stored over all devices
])  # fmt: skip
def test_spreads_of_a_known_plan(known, spreads):
    found = [str(each) for each in state_spreads(parse_request(known))]
    assert set(found) == spreads and len(found) == len(spreads)
    assert all(str(parse_request(each)) == each for each in found)


def test_every_division_of_the_batch_is_tried():
    sizes = [
        tuple(each.sizes.get(a, 1) for a in ("dp", "zero1", "fsdp")) for each in state_spreads(parse_request("dp:8"))
    ]
    assert set(sizes) == {(2**a, 2**b, 2 ** (3 - a - b)) for a in range(4) for b in range(4 - a)}


def step(state, batch):
    """Eight microbatches: stored parameters are gathered for each, moments are used once."""
    params, moments = state

    def loss(params, x):
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return jax.numpy.mean(x.astype("float32") ** 2)

    def add(total, x):
        return jax.tree.map(jax.numpy.add, total, jax.grad(loss)(params, x)), None

    gradients, _ = jax.lax.scan(add, jax.tree.map(jax.numpy.zeros_like, params), batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def made(words, target="v5p:4x4x4"):
    params = [jax.ShapeDtypeStruct((4096, 4096), "float32")] * 4
    batch = jax.ShapeDtypeStruct((8, 65536, 4096), "bfloat16")
    return plan(step, (params, params), batch, target=target, plan=words)


def test_less_spreading_can_be_faster():
    """Gradients are summed over 32 of 64 devices in shards, and over the other mesh axis as a whole.

    Over all 64 devices of this torus, XLA sums whole gradients.
    """
    wide, narrow = made("zero1:64"), made("dp:2 zero1:32")
    assert narrow.estimate.step_time_us < 0.7 * wide.estimate.step_time_us
    assert narrow.estimate.memory_bytes["optimizer"] == pytest.approx(2 * wide.estimate.memory_bytes["optimizer"])


def test_the_search_tries_other_spreads():
    with jax.default_matmul_precision("highest"):  # otherwise gathers move 16 bits, and `fsdp` is faster
        assert "dp:2 zero1:32" in [name for name, _, _ in made(None).candidates]
