"""The word `pp:N` in plans: parity on 8 devices, what the compiled program moves, and what cannot be."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard.errors import PlanError
from autoshard.sharding.layout import layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.pipeline.schedules import SCHEDULES
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.spmdrules.core.placement import axes_of
from tests.sharding.microbatches import programs as uncut
from tests.sharding.pipeline.programs import EMBED, LAYERS, SEQ, make_step, state, tokens

F32 = jnp.float32


def shapes():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, F32), state(F32)), tokens()


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("pp:2 fsdp:2 tp:2", "1f1b"),
        pytest.param("pp:4 dp:2", "zb", marks=pytest.mark.slow),
        pytest.param("pp:2 fsdp:4", "ftb", marks=pytest.mark.slow),
        pytest.param("pp:2 fsdp:4", "interleaved:2", marks=pytest.mark.slow),
        pytest.param("pp:2 dp:2 tp:2", "interleaved:2", marks=pytest.mark.slow),
        pytest.param("pp:2 dp:4", "gpipe", marks=pytest.mark.slow),
        pytest.param("pp:4 fsdp:2 state", "1f1b", marks=pytest.mark.slow),
        pytest.param("pp:2 tp:4 seq", "zb", marks=pytest.mark.slow),
    ],
)
def test_a_planned_pipeline_equals_one_device(words, schedule):
    fn = make_step("auxiliary", remat=True)
    expected = jax.tree.leaves(jax.device_get(jax.jit(fn)(state(F32), tokens())))
    step = auto_shard(fn, plan=words, microbatches=4, schedule=schedule)
    made = jax.tree.leaves(jax.device_get(step(state(F32), tokens())))
    found = step.plan(state(F32), tokens())
    assert (found.stages, found.schedule, found.microbatches) == (int(words[3]), schedule, 4)
    for one, other in zip(made, expected, strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1e-30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices")
def test_stages_take_the_sums_of_their_microbatch_where_numerics_may_change():
    with jax.enable_x64(True):
        args = uncut.state(jnp.float64), uncut.tokens()
        step = auto_shard(uncut.make_step("load balance"), plan="pp:2 dp:2 tp:2", microbatches=4, allow_numerics=True)
        expected = jax.tree.leaves(jax.jit(uncut.make_step("load balance", parts=4))(*args))
        for actual, wanted in zip(jax.tree.leaves(step(*args)), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)
        made = step.plan(*args)
    assert "microbatches=4 changes the numbers" in made.notes[-1]
    # A stage has the gradients of its own layers. The embedding is sharded over the stages.
    assert [*made.reduce_axes("0/0/layers/up")] == [*made.reduce_axes("0/0/embedding")] == ["dp"]


@pytest.mark.whole
def test_stages_hold_their_layers_and_pass_activations_on():
    made = plan(make_step(), *shapes(), target="cpu:8", plan="pp:4 dp:2", microbatches=4)
    layers = [leaf for leaf in made.inputs if "/layers/" in leaf.path]
    assert layers and all(leaf.spec[0] == "pp" and leaf.shape[0] == LAYERS for leaf in layers)
    assert ("collective-permute", "pp") in {(kind, axes) for kind, axes, *_ in made.traffic}
    text = made.jit().lower(*shapes()).compile().as_text()
    assert "collective-permute" in text
    gathered = re.findall(r"= (\S+) all-gather\(", text)
    assert not [shape for shape in gathered if shape.startswith(f"f32[{LAYERS},")], "the layers of all stages"


def separate_layers():
    """Return a step whose layers are a list of weights, and its arguments."""

    def step(layers, x):
        def loss(layers):
            y = x
            for up, down in layers:
                y = y + jnp.tanh(y @ up) @ down
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) * 0.3  # noqa: E731
    return step, [(draw(n, 16, 32), draw(n + LAYERS, 32, 16)) for n in range(LAYERS)], draw(99, 16, 16)


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("words", "gather", "summed"),
    [("pp:2 dp:2 tp:2", None, ["dp"]), ("fsdp:4 pp:2", "repeat", []), ("fsdp:2 dp:2 pp:2", "once", ["dp", "fsdp"])],
)
def test_layers_one_after_another_equal_one_device(words, gather, summed):
    fn, *args = separate_layers()
    expected = jax.tree.leaves(jax.device_get(jax.jit(fn)(*args)))
    step = auto_shard(fn, plan=words, microbatches=4, gather=gather)
    for one, other in zip(jax.tree.leaves(jax.device_get(step(*args))), expected, strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)
    made = step.plan(*args)
    assert made.stages == 2
    assert [*made.reduce_axes("0/0/0")] == summed


@pytest.mark.whole
def test_stages_exchange_the_weights_of_separate_layers_once_a_step():
    fn, *args = separate_layers()
    made = plan(fn, *args, target="cpu:4", plan="pp:2 dp:2", microbatches=4)
    weights = [leaf for leaf in made.inputs if leaf.path != "1"]
    assert len(weights) == 2 * LAYERS and all("pp" in leaf.spec for leaf in weights)
    moved = [(axes, sent) for kind, axes, sent, _ in made.traffic if kind == "all-to-all"]
    shard = sum(4 * np.prod(leaf.shape) for leaf in weights) / 2
    # The weights and their gradients; one half of the shards stays where it is.
    assert {axes for axes, _ in moved} == {"pp"} and sum(sent for _, sent in moved) == pytest.approx(2 * shard / 2)
    text = made.jit().lower(*args).compile().as_text()
    assert "all-to-all" in text and " all-gather(" not in text


@pytest.mark.whole
def test_stages_exchange_shards_before_fsdp_gathers_the_layers():
    fn, *args = separate_layers()
    made = plan(fn, *args, target="cpu:4", plan="pp:2 fsdp:2", microbatches=4, gather="repeat")
    weights = [leaf for leaf in made.inputs if leaf.path != "1"]
    assert all(("fsdp", "pp") in leaf.spec for leaf in weights)
    shard = sum(4 * np.prod(leaf.shape) for leaf in weights) / 4
    moved: dict[tuple[str, str], float] = collections.defaultdict(float)
    for kind, axes, sent, _ in made.traffic:
        moved[kind, axes] += sent
    assert moved["all-to-all", "pp"] == 2 * shard / 2  # the weights and their gradients
    assert shard <= moved["all-gather", "fsdp"] < 2 * shard  # the weights once, and activations
    gathered = re.findall(r"= (\S+) all-gather\(", made.jit().lower(*args).compile().as_text())
    assert not [shape for shape in gathered if shape.startswith(f"f32[{LAYERS},")], "the layers of all stages"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("kind", ["separate", "uneven", pytest.param("one layer a stage", marks=pytest.mark.slow)])
def test_a_stage_gathers_one_layer_at_a_time(kind, monkeypatch):
    """Large weights stay sharded over fsdp after the stages have exchanged them."""
    monkeypatch.setattr(layout, "EARLY_GATHER_SLICE_BYTES", 0)
    fn, weights, x = separate_layers() if kind == "separate" else stacked_layers(6 if kind == "uneven" else 4)
    args = weights, jnp.tile(x, (512 // len(x), 1))  # the weights are smaller than the activations
    step = auto_shard(fn, plan="pp:4 fsdp:2", microbatches=4, gather="repeat")
    for one, other in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)
    made = step.plan(*args)
    text = made.jit().lower(*args).compile().as_text()
    if kind == "uneven":  # outside the loops, XLA gathers the gradients of such a stage before it stores them
        text = text.split("\nENTRY")[0]
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert {"1,16,32", "1,32,16"} & {g.removeprefix("1,") if g.count(",") > 2 else g for g in gathered}
    assert all(np.prod([*map(int, g.split(","))]) <= 16 * 32 for g in gathered), "several layers at once"
    by_product = [sent for move, _, sent, _ in made.traffic if move == "all-gather"]
    assert len(by_product) == 2 and by_product[0] == by_product[1], "a gather outside of the two products of a layer"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stages_gather_small_layers_once(dtype):
    fn, weights, x = stacked_layers(4, dtype)
    step = auto_shard(fn, plan="pp:2 fsdp:4", microbatches=4, gather="repeat")
    args = weights, jnp.tile(x, (16, 1))
    tolerance = 5e-6 if dtype == jnp.float32 else 2e-2
    for one, other in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)
    made = step.plan(*args)
    stage = 2 * 2 * 16 * 32 * jnp.dtype(dtype).itemsize  # both weights of its two layers, of which it stores a quarter
    assert [sent for move, axes, sent, _ in made.traffic if (move, axes) == ("all-gather", "fsdp")] == [stage * 3 / 4]
    text = made.jit().lower(*args).compile().as_text()
    gathers = [text.count(" all-gather("), text[text.index("\nENTRY") :].count(" all-gather(")]
    assert gathers[0] == gathers[1] > 0, "in a loop"


def stacked_layers(layers, dtype=jnp.float32):
    """Return a step whose layers are a stack of weights, and its arguments. Layers compute in `dtype`."""

    def step(weights, x):
        def loss(weights):
            def layer(y, w):
                up, down = w[0].astype(dtype), w[1].astype(dtype)
                return y + jnp.tanh(y @ up) @ down, None

            y = jax.lax.scan(layer, x.astype(dtype), weights)[0].astype(x.dtype)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) * 0.3  # noqa: E731
    return step, (draw(0, layers, 16, 32), draw(1, layers, 32, 16)), draw(2, 32, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("layers", [8, 6])
def test_stages_in_a_ring(layers):
    fn, *args = stacked_layers(layers)
    step = auto_shard(fn, plan="pp:2 dp:4", microbatches=4, schedule="interleaved:2")
    for one, other in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(fn(*args)), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)
    made = step.plan(*args)
    assert "each stage idle in 1 of 9 forward ticks" in " ".join(str(made).split())
    found = {8: ", 2 chunks of 2 on each; the", 6: ": 3, 3; each stage takes the time and memory of 4, and"}[layers]
    assert any(note.startswith(f"{layers} layers on 2 stages{found}") for note in made.notes)
    assert Plan.from_json(made.to_json()).bind(fn, *args).schedule == "interleaved:2"
    text = made.jit().lower(*args).compile().as_text()
    assert "all-to-all" in text and " all-gather(" not in text  # no device gathers layers or gradients of all stages
    sent = {kind: n for kind, axes, n, _ in made.traffic if (kind, axes) == ("collective-permute", "pp")}
    # Forward and backward, 9 ticks each: the activation of 2 of 32 rows, 16 floats each.
    assert sent == {"collective-permute": 2 * 9 * 2 * 16 * 4}


@pytest.mark.whole
@pytest.mark.parametrize("layers", [8, 6])
def test_gradients_are_exchanged_as_shards_where_groups_have_one_row(layers):
    fn, weights, x = stacked_layers(layers)
    made = plan(fn, weights, x[:16], target="cpu:8", plan="pp:2 dp:4", microbatches=4, schedule="interleaved:2")
    assert made.replicas == 4 and "all-gather" not in {kind for kind, *_ in made.traffic}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*devices")
def test_stages_that_do_not_divide_the_layers():
    fn, *args = stacked_layers(6)
    step = auto_shard(fn, plan="pp:4 dp:2", microbatches=4)
    for one, other in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(fn(*args)), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)
    made = step.plan(*args)
    assert all(leaf.spec[0] is None and "pp" in leaf.spec[1:] for leaf in made.inputs[:2])
    assert any(note.startswith("6 layers on 4 stages: 2, 2, 1, 1; each stage takes the time") for note in made.notes)
    moved = [sent for kind, axes, sent, _ in made.traffic if (kind, axes) == ("all-to-all", "pp")]
    of_stage = 4 * 2 * (2 * 16 * 32)  # bytes of two layers in float32
    assert sum(moved) == pytest.approx(2 * of_stage * 3 / 4)  # weights and gradients; a quarter stays where it is
    assert "all-gather" not in {kind for kind, *_ in made.traffic}


@pytest.mark.whole
def test_no_stage_gathers_the_layers_of_all():
    fn, *args = stacked_layers(6)
    made = plan(fn, *args, target="cpu:8", plan="pp:4 fsdp:2", microbatches=4, gather="repeat")
    text = made.jit().lower(*args).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    whole = {"6,16,32", "6,32,16", "4,2,16,32", "4,2,32,16"}
    assert "6,16,8" in gathered and whole.isdisjoint(gathered)  # over fsdp; pp still shards each layer 4 ways


@pytest.mark.whole
def test_a_stage_takes_the_time_of_the_largest_one():
    plans = [plan(*stacked_layers(n), target="cpu:4", plan="pp:4", microbatches=4) for n in (8, 7)]
    even, uneven = (made.estimate.compute_us for made in plans)
    assert even <= uneven < 1.2 * even


@pytest.mark.slow
@pytest.mark.whole
def test_the_plan_keeps_its_stages_in_json():
    made = plan(make_step(), *shapes(), target="cpu:4", plan="pp:2 fsdp:2", microbatches=4, schedule="zb")
    assert "pipeline: 2 stages, schedule zb, 4 microbatches" in str(made)
    read = Plan.from_json(made.to_json())
    assert (read.stages, read.schedule) == (2, "zb")
    bound = read.bind(make_step(), *shapes())
    assert (bound.stages, bound.schedule, bound.fingerprint) == (2, "zb", made.fingerprint)
    alone = plan(make_step(), *shapes(), target="cpu:4", plan="fsdp:4")
    assert '"stages"' not in alone.to_json() and '"schedule"' not in alone.to_json()


@pytest.mark.whole
def test_the_number_of_microbatches_is_chosen():
    made = plan(make_step(), *shapes(), target="cpu:2", plan="pp:2")
    assert made.microbatches in (2, 4, 8) and made.schedule == "1f1b"
    assert "microbatches='auto' compared 2 (" in made.notes[-1]


@pytest.mark.whole
def test_stages_need_not_be_a_power_of_two():
    fn, layers, x = separate_layers()
    made = plan(fn, layers[:3], jnp.ones((20, 16)), target="cpu:3", plan="pp:3")
    assert made.stages == 3 and made.microbatches % 4 == 0  # 3 does not divide 20 rows


@pytest.mark.whole
def test_memory_is_flat_in_the_number_of_microbatches():
    def growing(schedule, count):
        made = plan(
            make_step(remat=True),
            *shapes(),
            target="cpu:2",
            plan="pp:2",
            microbatches=count,
            schedule=schedule,
            donate_argnums=0,  # else the new state, beside the old one, takes more than the pipeline
        )
        return made.estimate.memory_bytes["temporary"] * count  # the rows of a microbatch shrink with their number

    assert growing("1f1b", 8) < growing("gpipe", 8)


@pytest.mark.slow
def test_compiled_memory_by_schedule():
    """`1f1b` holds 2 N - 1 of the M residuals that `gpipe` holds, and `ftb` one input a microbatch."""
    layers, stages, rows, width = 8, 4, 512, 16

    def step(weights, tokens):
        def loss(weights):
            body = jax.checkpoint(lambda y, w: (y + jnp.tanh(y @ w[0]) @ w[1], None))
            return (jax.lax.scan(body, weights[2][tokens], weights[:2])[0] ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    shapes = (layers, width, 32), (layers, 32, width), (64, width)
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def inputs_of_a_stage(schedule, count):
        args = weights, jax.ShapeDtypeStruct((rows * count,), jnp.int32)
        made = plan(step, *args, target=f"cpu:{stages}", plan=f"pp:{stages}", microbatches=count, schedule=schedule)
        temporaries = made.jit().lower(*args).compile().memory_analysis().temp_size_in_bytes
        return (temporaries - rows * count * 4) / (rows * width * 4)  # without the tokens in the order of microbatches

    gpipe, one, inputs = ([inputs_of_a_stage(word, m) for m in (16, 32)] for word in ("gpipe", "1f1b", "ftb"))
    of_microbatch = (gpipe[1] - gpipe[0]) / 16
    held = one[1] - (gpipe[1] - 32 * of_microbatch)
    assert one[1] - one[0] < 0.5, "1f1b grows with the number of microbatches"
    assert held <= 1.1 * (2 * stages - 1) * of_microbatch
    assert (inputs[1] - inputs[0]) / 16 == pytest.approx(1, rel=0.05) and of_microbatch > 2.9


def planned_on_two(schedule, **options):
    return plan(make_step(), *shapes(), target="cpu:2", plan="pp:2", microbatches=8, schedule=schedule, **options)


@pytest.mark.slow
def test_stages_that_keep_inputs_need_less_memory():
    peaks = {word: planned_on_two(word).estimate.peak_memory_bytes for word in SCHEDULES}
    assert peaks["ftb"] < peaks["gpipe"] / 1.5 and peaks["1f1b-inputs"] < peaks["1f1b"] / 1.4


@pytest.mark.whole
def test_stages_keep_inputs_if_nothing_else_fits():
    peak = planned_on_two("1f1b").estimate.peak_memory_bytes
    assert planned_on_two(None, memory_limit_bytes=peak).schedule == "1f1b"
    made = planned_on_two(None, memory_limit_bytes=peak - 1)
    assert made.schedule == "1f1b-inputs" and made.fits
    assert made.notes[-1].startswith("schedule 1f1b does not fit the memory: compared 1f1b (")


@pytest.mark.whole
def test_a_plan_shows_what_waits_by_tick():
    text = str(planned_on_two("ftb"))
    lines = text[text.index("microbatches that wait on the first stage") :].splitlines()[1:4]
    assert [line.split()[-4:] for line in lines] == [["0", "7", "10", "17"], ["1", "8", "8", "1"], ["1", "8", "8", "1"]]
    assert [line.split("  ")[0] for line in lines[1:]] == ["residuals, gpipe", "inputs, ftb"]
    layer = SEQ * EMBED * 4  # bytes of a microbatch of one row, in float32
    assert f"a stage holds its input, {layer} B a microbatch, in place of residuals" in text
    assert "microbatches that wait" not in str(planned_on_two("gpipe"))


@pytest.mark.whole
def test_a_schedule_without_a_plan_searches_the_number_of_stages():
    made = plan(make_step(), *shapes(), target="cpu:2", schedule="zb", microbatches=4)
    assert (made.stages, made.schedule, made.microbatches) == (2, "zb", 4)
    assert "schedule zb was requested: compared pp:2" in made.notes[-1]
    with pytest.raises(PlanError, match="schedule 'zb' needs a pipeline, but .* use at least 2 microbatches"):
        plan(make_step(), *shapes(), target="cpu:2", schedule="zb", microbatches=1)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*devices")
def test_stages_are_on_an_axis_of_the_mesh_of_placed_arguments(monkeypatch):
    """The plan keeps the mesh, so no other number of stages is tried."""

    def placed(*sizes):
        kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
        mesh = jax.make_mesh(sizes, ("rows", "other")[: len(sizes)], axis_types=kinds)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        state, tokens = shapes()
        return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), tokens)

    made = plan(make_step(), *placed(4, 2), schedule="gpipe", microbatches=2)
    assert (made.stages, dict(made.mesh.shape)) == (2, {"rows": 4, "other": 2})
    with pytest.raises(PlanError, match="schedule 'gpipe' needs a pipeline, but pp:8 is not possible"):
        plan(make_step(), *placed(8), schedule="gpipe")
    monkeypatch.setattr("autoshard.sharding.pipeline.choice._may_pay", lambda *_: True)
    hosts = find_target("h100:2x4")
    monkeypatch.setattr("autoshard.sharding.machines.device_mesh.target_for", lambda devices, count: hosts)
    assert plan(make_step(), *placed(8)).stages == 1


@pytest.mark.whole
def test_weights_keep_their_role_where_a_microbatch_is_a_single_row():
    """In the cut step, no value has an axis of rows then."""

    def step(weights, x):
        def loss(weights):
            return (jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0] ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradients, value

    args = jax.ShapeDtypeStruct((4, 8, 8), F32), jax.ShapeDtypeStruct((8, 8), F32)
    for count in (4, 8):
        made = plan(step, *args, target="cpu:2", plan="pp:2", microbatches=count)
        assert [each.role for each in made.inputs] == ["parameter", "data"]


@pytest.mark.slow
@pytest.mark.whole
def test_a_second_stack_of_layers_is_on_no_stage():
    def step(weights, x):
        def loss(weights):
            encoded, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights["encoder"])
            return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w + encoded), None), x, weights["decoder"])[0].sum()

        return jax.grad(loss)(weights)

    weights = {"encoder": jax.ShapeDtypeStruct((2, 8, 8), F32), "decoder": jax.ShapeDtypeStruct((4, 8, 8), F32)}
    made = plan(step, weights, jax.ShapeDtypeStruct((8, 8), F32), target="cpu:2", plan="pp:2", microbatches=4)
    (note,) = [note for note in made.notes if "on no stage" in note]
    assert "2 in number, are on no stage: all stages compute them" in note and "test_pipelined_plans.py" in note
    assert not [note for note in plan(make_step(), *shapes(), target="cpu:2", plan="pp:2").notes if "no stage" in note]


@pytest.mark.few(5)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "pp:5", "target": "cpu:5", "microbatches": 8}, r"pp:5, but the function cannot be cut: 5 stages are "
         r"more than the layers at .*, whose number is 4\. There can be at most 4 stages"),
        ({"plan": "pp:8 tp:2", "target": "cpu:16", "microbatches": 8}, r"whose number is 4\. Request 'pp:4 dp:2 tp:2'"),
        ({"plan": "pp:16", "target": "cpu:16", "microbatches": 16}, "pp:16 with 16 microbatches, which do not divide "
         "the batch of 8 rows; there must be at least as many rows as stages, and the batch has 8: use fewer stages"),
        ({"plan": "pp:2 ulysses:2", "target": "cpu:4", "microbatches": 4},
         "attention at .* has 1 heads; 2 devices do not divide them. Use 'ring:2' instead"),
        ({"plan": "pp:4", "target": "cpu:4", "microbatches": 2}, "pp:4 with 2 microbatches leaves stages idle all the "
         "time; use at least 4 microbatches: microbatches=4 or 8"),
        ({"plan": "pp:2", "target": "cpu:2", "microbatches": 1}, "pp:2 with 1 microbatch leaves stages idle"),
        ({"plan": "pp:2", "target": "cpu:2", "schedule": "dual"}, "schedule is 'dual'; it must be one of 'gpipe'"),
        ({"plan": "pp:2", "target": "cpu:2", "schedule": "interleaved:0"}, "schedule is 'interleaved:0'; give the "
         "number of chunks of layers of each stage, at least 2"),
        ({"plan": "pp:2", "target": "cpu:2", "microbatches": 2, "schedule": "interleaved:3"}, r"3 chunks of layers on "
         r"each of 2 stages are more than the layers at .*, whose number is 4\. Use schedule='interleaved:2'"),
        ({"plan": "dp:2", "target": "cpu:2", "schedule": "zb"}, "schedule is 'zb', but the plan has no pipeline"),
        ({"plan": "pp:2", "target": "cpu:2", "microbatches": 3}, "pp:2 with 3 microbatches, which do not divide "
         "the batch of 8 rows; use at least 2 microbatches: microbatches=2, 4 or 8"),
    ],
)  # fmt: skip
def test_what_cannot_be(options, message):
    with pytest.raises(PlanError, match=message):
        plan(make_step(), *shapes(), **options)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("words", "devices", "schedule", "possible"),
    [
        ("pp:4", 8, None, "pp:4 dp:2"),  # there are no 8 layers
        ("pp:2", 16, None, "pp:2 dp:8"),
        ("pp:4 fsdp:2", 4, None, "pp:4"),
        ("pp:2", 4, "interleaved:2", "pp:2 dp:2"),  # 4 stages with 2 chunks each have no layers
    ],
)
def test_a_suggested_pipeline_is_possible(words, devices, schedule, possible):
    fn, *args = stacked_layers(4)
    options = {"target": f"cpu:{devices}", "microbatches": 4, "schedule": schedule}
    with pytest.raises(PlanError, match=f"has {devices}; request '{possible}', or plan for a target of"):
        plan(fn, *args, plan=words, **options)
    assert plan(fn, *args, plan=possible, **options).stages == int(possible[3])


@pytest.mark.whole
def test_a_schedule_tries_the_microbatches_that_the_batch_allows():
    fn, weights, x = stacked_layers(4)
    made = plan(fn, weights, jnp.ones((9, 16)), target="cpu:2", schedule="gpipe")
    assert made.microbatches in (3, 9)  # 2 and 4 do not divide 9 rows
    assert "microbatches='auto' compared 3 (" in " ".join(made.notes)


@pytest.mark.whole
def test_a_program_without_layers():
    def step(w, x):
        return jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    with pytest.raises(PlanError, match=r"pp:2, but the function cannot be cut: it has no repeated part"):
        plan(step, jnp.ones((8, 8)), jnp.ones((4, 8)), target="cpu:2", plan="pp:2")


@pytest.mark.whole
def test_a_loop_over_the_layers_outside_of_the_pipeline():
    """The message says what to do where the loop carries a value. A loop that carries none needs no change."""
    fn, *args = stacked_layers(4)

    def step(kind, weights, x):
        weights, value = fn(weights, x)
        squares = (weights[0] ** 2).sum((1, 2))
        if kind == "carried":
            scales = jax.lax.scan(lambda c, w: (c + (w**2).sum(), c + (w**2).sum()), 0.0, weights[0])[1]
        elif kind == "cumsum":
            scales = jnp.cumsum(squares)
        else:
            scales = jax.lax.map(lambda w: (w**2).sum(), weights[0])
        return (weights[0] / (1 + scales[:, None, None]), weights[1]), value

    options = {"target": "cpu:2", "plan": "pp:2", "microbatches": 4}
    with pytest.raises(PlanError, match=r"a loop at .*test_pipelined_plans.py.* carries a value from layer to layer. .*"
                       "such as by jnp.cumsum"):  # fmt: skip
        plan(functools.partial(step, "carried"), *args, **options)
    for kind in ("cumsum", "map"):
        assert plan(functools.partial(step, kind), *args, **options).stages == 2


@pytest.mark.whole
def test_a_second_run_of_the_layers():
    """The message says what it is. One run of the layers over both inputs is possible."""
    options = {"target": "cpu:2", "plan": "pp:2", "microbatches": 4}
    args = jax.ShapeDtypeStruct((4, 8, 8), F32), *[jax.ShapeDtypeStruct((8, 8), F32)] * 2

    def step(once, weights, x, y):
        def loss(weights):
            run = lambda x: jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]  # noqa: E731
            one, other = jnp.moveaxis(run(jnp.stack([x, y], axis=1)), 1, 0) if once else (run(x), run(y))
            return jnp.mean((one - other) ** 2)

        return jax.value_and_grad(loss)(weights)

    with pytest.raises(PlanError, match=r"a loop at .*test_pipelined_plans.py.* takes rows of the batch: a second run "
                       r"of the layers\. .* run the layers once, over jnp.stack\(inputs, axis=1\), or"):  # fmt: skip
        plan(functools.partial(step, False), *args, **options)
    assert plan(functools.partial(step, True), *args, **options).stages == 2


@pytest.mark.whole
def test_layers_inside_a_checkpoint():
    @jax.checkpoint
    def layers(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    step = jax.grad(lambda weights, x: layers(weights, x).sum())
    with pytest.raises(
        PlanError, match=r"the jax.lax.scan at .* is inside a jax.checkpoint. Put jax.checkpoint around"
    ):
        plan(step, jnp.ones((4, 8, 8)), jnp.ones((4, 8)), target="cpu:2", plan="pp:2")


@pytest.mark.whole
def test_layers_are_no_rows_where_a_group_of_rows_has_one():
    """A function without gradients has no state: what is cut into microbatches tells rows from stacks of layers."""

    def fn(weights, x):
        body = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return (jax.lax.scan(body, x, weights)[0] ** 2).mean()

    layers = {"up": (8, 64, 128), "down": (8, 128, 64)}
    weights = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in layers.items()}
    x = jax.ShapeDtypeStruct((16, 64), F32)
    made = plan(fn, weights, x, target="cpu:8", plan="pp:2 dp:4", microbatches=4)
    roles = {leaf.path: leaf.role for leaf in made.inputs}
    assert roles == {"0/down": "parameter", "0/up": "parameter", "1": "data"}


@pytest.mark.whole
def test_gradients_that_stages_give_back_are_stored_in_shards_where_a_group_has_one_row():
    """The groups of rows are then the batch, which the gradients have until they are added."""
    made = plan(make_step(), *shapes(), target="cpu:4", plan="pp:2 dp:2", microbatches=4, schedule="interleaved:2")
    found = bound_or_error(made.bound).layout
    given = [v for op in found.axes.program.ops() if op.name == "collect_layers" for v in op.results]
    assert given and made.replicas == 2
    assert all("pp" in axes_of(operand_spec(found, v)) for v in given if found.axes.program.avals[v].ndim > 2)
