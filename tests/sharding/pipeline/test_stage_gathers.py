"""Weights that are stored in shards: the stages gather them once a step, or again in each microbatch."""

import functools
from collections import defaultdict
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard.errors import PlanError
from autoshard.sharding.hlo.collectives import Collectives
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.layout import layout
from autoshard.sharding.pipeline.choice import plan_with_gathers
from tests.sharding.pipeline.test_pipelined_plans import F32, make_step, separate_layers, shapes, stacked_layers, state


@pytest.fixture(autouse=True)
def no_layer_is_small(monkeypatch):
    """The layers of these tests count as large: small ones are gathered once a step under both words."""
    monkeypatch.setattr(layout, "EARLY_GATHER_SLICE_BYTES", 0)


def collectives(made, args, size):
    """Pairs (kind, bytes) of the collectives over groups of this size: those of loops, and those of straight code."""
    program = parse_program(made.jit().lower(*args).compile().as_text())
    found, parsed = ([], []), Collectives(program)
    for computation in program.computations.values():
        for event in (e for i in computation.instructions for e in parsed.events(computation, i)):
            if event.collective and event.collective.size == size:
                moved = event.collective.kind, event.collective.payload_bytes
                found[computation is program.entry].append(moved)
    return found


def equal(made, expected, tolerance=5e-6):
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= tolerance * max(np.linalg.norm(other), 1e-30)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("gather", ["once", "repeat"])
def test_the_compiled_step_gathers_in_or_before_the_loop(gather):
    fn, weights, x = stacked_layers(8)
    args = weights, np.tile(x, (16, 1))  # the weights are smaller than the activations
    step = auto_shard(fn, plan="pp:2 fsdp:4", microbatches=4, gather=gather)
    equal(step(*args), jax.jit(fn)(*args))
    looped, straight = collectives(step.plan(*args), args, size=4)
    layer = 16 * 32 * 4  # bytes of one of the two matrices; a stage has four layers
    of_weights = [payload for kind, payload in straight if kind == "all-gather"]
    if gather == "once":
        assert of_weights == [4 * layer] * 2 and not looped
        assert sum(n for kind, n in straight if kind != "all-gather") == 2 * 4 * layer + 4  # gradients, and the loss
    else:
        assert not of_weights
        assert {("all-gather", layer), ("reduce-scatter", layer)} <= {*looped}, "scattered behind the stages"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("kind", "words", "schedule"),
    [
        ("auxiliary", "pp:2 fsdp:2 tp:2", "1f1b"),
        pytest.param("experts", "pp:2 fsdp:4", "zb", marks=pytest.mark.slow),
        pytest.param("frozen", "pp:2 dp:2 fsdp:2", "ftb", marks=pytest.mark.slow),
        pytest.param("tied", "pp:2 fsdp:2 tp:2", "interleaved:2", marks=pytest.mark.slow),
        pytest.param("dropout", "pp:4 fsdp:2", "gpipe", marks=pytest.mark.slow),
        pytest.param("shared", "pp:2 fsdp:4 state", "1f1b-inputs", marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_gathered_once_equal_one_device(kind, words, schedule):
    fn, batch = make_step(kind, remat=True), shapes()[1]
    step = auto_shard(fn, plan=words, microbatches=4, schedule=schedule, gather="once")
    with jax.enable_x64(True):  # in float32, squares of gradients differ by more than 5e-6 in some orders of the sums
        made, expected = (jax.device_get(run(state(), batch)) for run in (step, jax.jit(fn)))
    equal(made, expected, 1e-12)
    assert step.plan(state(F32), batch).gather == "once"


@functools.cache
def planned(gather=None, **options):
    return plan(make_step(), *shapes(), target="cpu:4", plan="pp:2 fsdp:2", microbatches=4, gather=gather, **options)


@pytest.mark.slow
def test_memory_decides():
    once, repeat = planned("once"), planned("repeat")
    assert once.estimate.step_time_us < repeat.estimate.step_time_us
    assert once.estimate.peak_memory_bytes > repeat.estimate.peak_memory_bytes
    assert (once.replicas, repeat.replicas) == (2, 1)
    assert planned().gather == "once"
    made = planned(memory_limit_bytes=once.estimate.peak_memory_bytes - 1)
    assert made.gather == "" and made.fits
    assert "gather their layers again in each microbatch: compared gather='once' (" in made.notes[-1]


def test_each_layer_is_gathered_and_reduced_once():
    """Uneven stages exchange shards of their layers first."""
    fn, weights, x = stacked_layers(6)
    options = {"target": "cpu:8", "plan": "pp:4 fsdp:2", "microbatches": 4, "gather": "once"}
    made = plan(fn, weights, x, **options)
    slots = 2 * 2 * 16 * 32 * 4  # bytes of the two matrices in the two slots of a stage
    gradients = 2 * 6 * 16 * 32 * 4  # bytes of those of all layers
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for kind, axes, sent, _ in made.traffic:
        if "fsdp" in axes and kind != "all-reduce":
            moved[kind, axes] += sent
    assert moved == {
        ("all-gather", "fsdp"): slots / 2,
        ("reduce-scatter", "fsdp"): gradients / 4 / 2,  # pp has a quarter of each
    }
    assert "all-to-all" in {kind for kind, axes, *_ in made.traffic if axes == "pp"}


def test_a_plan_keeps_its_gathers():
    made = planned()
    assert "gather: once: each stage of a pipeline gathers its layers once a step" in " ".join(str(made).split())
    explained = " ".join(made.explain("0/0/layers/up").split())
    assert "gathered to P('pp') once a step if it has layers of the stages" in explained
    assert "all-gather of the tensor over fsdp, 1.00 KiB" in explained  # half of the 2 KiB of a stage
    bound = Plan.from_json(made.to_json()).bind(make_step(), *shapes())
    assert (bound.gather, bound.replicas, bound.fingerprint) == ("once", 2, made.fingerprint)
    assert bound.traffic == made.traffic


def test_nothing_is_compared_without_shards():
    made = plan(*separate_layers(), target="cpu:4", plan="pp:2 dp:2", microbatches=4, gather="once")
    assert not [kind for kind, *_ in made.traffic if kind == "all-gather"]
    of_stages = SimpleNamespace(storage={"parameter": ("pp",)}, roles=SimpleNamespace(stages=3), table={"pp": (3, 5)})
    first = SimpleNamespace(plan=SimpleNamespace(fits=True), layout=of_stages)
    assert plan_with_gathers(first, lambda: pytest.fail("made a second plan")) is first
    of_stages.storage["parameter"] = ("fsdp", "pp")

    def refused():
        raise PlanError("auto_shard(step): no rows")

    first.plan.notes, first.where = ("a note",), lambda notes: notes
    assert plan_with_gathers(first, refused) == ("a note", "gather='once' is not possible: no rows")
    first.plan.fits = False
    assert plan_with_gathers(first, lambda: pytest.fail("made a second plan")) is first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pp:2 dp:2", "gathers nothing: no mesh axis beside that of the stages stores shards"),
        ("pp:2 fsdp:2 state", "gradients are reduced over fsdp in each microbatch"),
        ("pp:2 fsdp:2", ""),
    ],
)
def test_notes_say_what_once_does_not_do(words, expected):
    fn, *args = stacked_layers(4)
    notes = plan(fn, *args, target="cpu:4", plan=words, microbatches=4, gather="once").notes
    assert any(expected in note for note in notes) if expected else not notes


def test_there_is_a_pipeline():
    with pytest.raises(PlanError, match="gather is 'once', but the plan has no pipeline.* give one with the word pp:N"):
        plan(make_step(), *shapes(), target="cpu:4", plan="fsdp:4", microbatches=4, gather="once")
    with pytest.raises(PlanError, match="gather is 'twice'; it must be 'auto', .*'once' or 'repeat'"):
        planned("twice")
