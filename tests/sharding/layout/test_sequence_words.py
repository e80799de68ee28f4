"""Ways of attention over a sharded sequence: the strategies of its operators, and what they send."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import PlanError
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.layout.operator_sharding import strategy_in_layout
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.layout.sequence_words import sequence_variants
from autoshard.sharding.planner.bound_plan import bound_or_error

BATCH, LENGTH, KV_HEADS, GROUP, HEAD_DIM, WIDTH = 2, 4096, 4, 2, 128, 64
OF_KEYS = BATCH * LENGTH * KV_HEADS * HEAD_DIM * 4  # bytes


def forward(visibility, params, x):
    q = (x @ params["wq"]).reshape(BATCH, LENGTH, KV_HEADS, GROUP, HEAD_DIM)
    k, v = ((x @ params[name]).reshape(BATCH, LENGTH, KV_HEADS, HEAD_DIM) for name in ("wk", "wv"))
    return splash_attention(Softmax(visibility, 1.0), q, k, v).reshape(BATCH, LENGTH, -1) @ params["wo"]


def planned(words, visibility=None, target="v5p:2x2x2"):
    heads = {"wq": KV_HEADS * GROUP, "wk": KV_HEADS, "wv": KV_HEADS}
    params = {name: jax.ShapeDtypeStruct((WIDTH, n * HEAD_DIM), jnp.float32) for name, n in heads.items()}
    params["wo"] = jax.ShapeDtypeStruct((KV_HEADS * GROUP * HEAD_DIM, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    step = partial(forward, visibility or Visibility())
    return autoshard.plan(step, params, x, target=target, plan=words)


def strategy(plan):
    bound = bound_or_error(plan.bound)
    problem, layout = bound.problem, bound.layout
    (op,) = (op for op in problem.program.ops() if op.name == "splash_attention")
    return strategy_in_layout(layout, op, problem.machine.target.link_prices)


def test_ulysses_shards_heads_and_moves_by_all_to_alls():
    plan = planned("ring:2 ulysses:4")
    found = strategy(plan)
    sent = {(kind, axes) for kind, axes, *_ in plan.traffic}
    assert sent == {("all-to-all", "ulysses"), ("collective-permute", "ring")}  # priced apart
    assert found.factors == {"ring": "n", "ulysses": "h"}
    assert {move.kind for move in found.moves if move.axes == ("ulysses",)} == {"all-to-all"}


def test_where_key_heads_run_out_ulysses_shards_the_queries_of_a_head_and_gathers_keys():
    found = strategy(planned("ulysses:8"))
    assert found.factors == {"ulysses": "g", "ulysses_1": "h"}
    gathered = {move.array for move in found.moves if move.kind == "all-gather"}
    assert gathered == {1, 2}
    # Key heads are on neighbouring shards of the sequence, so shards of keys move before they are gathered.
    sent = {i: [(m.kind, m.axes, m.wire_bytes) for m in found.moves if m.array == i] for i in (0, 1, -1)}
    shard = OF_KEYS / 8
    assert sent[1] == [("all-to-all", ("ulysses_1",), shard * 3 / 4), ("all-gather", ("ulysses",), shard)]
    # XLA moves one mesh axis of a dimension at a time if they go to different dimensions.
    of_queries = [
        ("all-to-all", ("ulysses_1",), GROUP * shard * 3 / 4),
        ("all-to-all", ("ulysses",), GROUP * shard / 2),
    ]
    assert sent[0] == of_queries and sent[-1] == of_queries


def test_tp_takes_heads_before_ulysses():
    assert strategy(planned("ulysses:2 tp:4")).factors == {"ulysses": "g", "tp": "h"}


@pytest.mark.parametrize(
    "visibility, hops, balanced",
    [
        (Visibility(), 7, False),
        (Visibility(causal=True), 7, True),
        (Visibility(causal=True, window=700), 2, False),
    ],
)
def test_a_ring_sends_keys_as_far_as_the_mask_reaches(visibility, hops, balanced):
    """Shards have 512 positions. Balanced work needs an exchange of queries, keys, values and results, too."""
    travel, *exchange = [m for m in strategy(planned("ring:8", visibility)).moves if m.kind == "collective-permute"]
    assert (travel.hops, travel.local_bytes) == (hops, 2 * OF_KEYS / 8)
    assert bool(exchange) == balanced


def test_the_price_of_a_ring_is_what_its_compute_does_not_hide():
    bound = bound_or_error(planned("ring:8").bound)
    ((one, ring),) = [(c, c.ring) for c in bound.problem.cost(bound.layout).collectives if c.ring is not None]
    assert 0 <= one.exposed_us < one.time_us
    assert one.exposed_us == pytest.approx(max(one.time_us - ring.beside_us, 0.0))


@pytest.mark.parametrize("word", ["ring", "ulysses"])
def test_memory_of_a_device_falls_with_the_number_of_devices(word):
    two, four = (
        planned(f"{word}:{n}", Visibility(causal=True), target).estimate.peak_memory_bytes
        for n, target in ((2, "v5p:2x1x1"), (4, "v5p:2x2x1"))
    )
    assert four == pytest.approx(two / 2, rel=0.1)
    assert four < planned("gather:4", target="v5p:2x2x1").estimate.peak_memory_bytes


def test_cp_stands_for_all_ways_that_divide():
    axes = bound_or_error(planned("cp:8").bound).problem.axes
    words = list(sequence_variants(axes, parse_request("fsdp:2 cp:8 tp:2 seq")))
    assert words == [
        "fsdp:2 gather:8 tp:2 seq",
        "fsdp:2 ulysses:8 tp:2 seq",
        "fsdp:2 ring:8 tp:2 seq",
        "fsdp:2 ring:4 ulysses:2 tp:2 seq",
    ]
    assert list(sequence_variants(axes, parse_request("fsdp:8"))) == []


def test_isp_is_ulysses_with_parameters_and_state_over_the_same_devices():
    isp, ulysses = planned("dp:2 isp:4"), planned("dp:2 ulysses:4")
    assert isp.sequence == {"isp": "ulysses"}
    assert strategy(isp).factors == {"dp": "b", "isp": "h"}
    assert strategy(ulysses).factors == {"dp": "b", "ulysses": "h"}
    layouts = [bound_or_error(plan.bound).layout for plan in (isp, ulysses)]
    assert [*layouts[0].table.values()] == [*layouts[1].table.values()]
    assert [layout.storage for layout in layouts] == [{"parameter": ("isp",), "optimizer": ("isp",)}, {}]
    sent = {(kind, axes) for kind, axes, *_ in isp.traffic}
    assert {("all-to-all", "isp"), ("all-gather", "isp")} <= sent


def test_isp_gives_the_words_of_its_request_again():
    assert str(parse_request("ISP:4 dp:2")) == "dp:2 isp:4"


def test_a_sequence_that_a_loop_runs_over_cannot_be_sharded():
    def step(weight, x):
        def loss(weight):
            blocks = (x @ weight).reshape(16, 4, 8, 32).swapaxes(0, 1)
            ends = jax.lax.scan(lambda c, b: (jnp.tanh(c + b.sum(1)), c), jnp.zeros((16, 32)), blocks)[1]
            return jnp.mean(ends**2)

        value, grad = jax.value_and_grad(loss)(weight)
        return weight - grad, value

    with pytest.raises(PlanError, match="cp shards sequences, .*A loop runs over seq, so each device needs all pos"):
        autoshard.plan(step, jnp.ones((8, 32)), jnp.ones((16, 32, 8)), target="cpu:8", plan="dp:2 cp:4")
