"""What is gathered one layer early, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import plan
from autoshard.sharding.cost.overlap import Overlap, Place
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.cost.test_overlap import straight
from tests.sharding.lower.gathers.test_gather_order import scanned, step_of, unrolled

SHAPES = {"first": (2048, 2048), "up": (2048, 4096), "down": (4096, 2048)}
PARAMETER = 2048 * 2048 * 4  # bytes of `first`
ROWS = 65536


def layer(p, h):
    h = h + jnp.tanh(h @ p["first"])
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def stacked(layers=8):
    return {name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for name, shape in SHAPES.items()}


def written_out(layer):
    return lambda stack, h: unrolled(layer)([jax.tree.map(lambda x, n=n: x[n], stack) for n in range(8)], h)


def planned(forward, gather, target="v5e:2x4", words="fsdp:8", rows=ROWS, **options):
    x = jax.ShapeDtypeStruct((rows, 2048), jnp.float32)
    return plan(step_of(forward), stacked(), x, plan=words, target=target, gather=gather, **options)


def cost_of(made):
    bound = bound_or_error(made.bound)
    return bound.problem.cost(bound.layout)


def exposed(place, once_us, times_us, **options):
    stretches = straight(len(times_us))
    return Overlap([place], stretches.times(times_us), **options).exposed_us([once_us]).tolist()[0]


def test_an_early_gather_hides_behind_its_whole_stretch():
    assert exposed(Place(np.array([0]), True), 12.0, [5, 5, 5]) == 12.0
    # The gather for the first iteration has nothing beside which it can run.
    early = Place(np.array([0]), True, np.array([1.0]))
    assert exposed(early, 12.0, [5, 5, 5]) == 12.0
    assert exposed(early, 18.0, [5, 5, 5]) == 18.0 + 3.0
    assert exposed(early, 18.0, [5, 5, 5], copies_us={0: 2.0}) == 18.0 + 1.0


def test_only_the_parameters_that_a_layer_needs_first_are_early():
    made = planned(scanned(jax.checkpoint(layer)), "prefetch")
    bound = bound_or_error(made.bound)
    program, layout = bound.problem.program, bound.layout
    paths = dict(zip(program.inputs, bound.problem.traced.in_paths, strict=True))
    early = cost_of(made).early
    scans = [n for n, op in enumerate(program.ops()) if op.name == "scan"]
    assert {number for number, _ in early} == set(scans) and len(scans) == 2
    assert {paths[layout.aliased_inputs.get(v, v)] for _, v in early} == {"0/first"}
    assert [note.split(" gathers ")[1].split(";")[0] for note in made.notes] == ["0/first one iteration early"] * 2
    assert made.notes[1].startswith("the backward scan over 8 iterations")


def test_loops_hold_early_parameters_twice_and_gather_once_more():
    with jax.default_matmul_precision("highest"):  # otherwise only `auto` gathers 16 bits of each parameter
        auto, early = (planned(scanned(jax.checkpoint(layer)), gather) for gather in ("auto", "prefetch"))
    traffic = PARAMETER * 7 / 8
    assert early.estimate.comm_bytes - auto.estimate.comm_bytes == pytest.approx(2 * traffic, rel=1e-3)
    held = [sum(b.nbytes * len(b.first) for b in cost_of(made).live_buffers) for made in (auto, early)]
    assert held[1] - held[0] == pytest.approx(2 * PARAMETER)  # in each scan
    assert early.estimate.compute_us > auto.estimate.compute_us  # copies


@pytest.mark.parametrize(("target", "early"), [("v5p:2x2x2", True), ("v5p:2x4x4", True), ("v4:2x2x2", False)])
def test_nothing_is_early_where_gathers_run_alone(target, early):
    made = planned(
        scanned(jax.checkpoint(layer)), "prefetch", target, "fsdp:8" if target[-5:] == "2x2x2" else "fsdp:32"
    )
    assert bool(cost_of(made).early) == early
    assert early or made.notes[-1].startswith("gather='prefetch' gathers nothing early")


def test_rematerialized_layers_gather_before_what_they_rematerialize():
    early = cost_of(planned(written_out(jax.checkpoint(layer)), "prefetch")).early
    assert len(early) == len({stage for stage, _ in early}) == 15  # one parameter in each layer, forward and backward
    # Without rematerialization, both passes share a gather, which the compiler can start at any time.
    assert not cost_of(planned(written_out(layer), "prefetch")).early


def test_auto_gathers_sequentially_only_if_nothing_else_fits():
    forward, rows = written_out(layer), ROWS // 16  # parameters are large beside activations
    auto, sequential = (
        planned(forward, gather, rows=rows).estimate.peak_memory_bytes for gather in ("auto", "sequential")
    )
    limit = (auto + sequential) / 2
    assert sequential < auto and planned(forward, "auto", rows=rows, memory_limit_bytes=auto).gather == ""
    made = planned(forward, "auto", rows=rows, memory_limit_bytes=limit)
    assert made.gather == "sequential" and made.fits
    assert "gather: sequential" in str(made)


@pytest.mark.parametrize("length", [0, 1])
def test_scans_without_an_earlier_iteration(length):
    x = jax.ShapeDtypeStruct((ROWS, 2048), jnp.float32)
    made = plan(step_of(scanned(layer)), stacked(length), x, plan="fsdp:8", target="v5e:2x4", gather="prefetch")
    assert not cost_of(made).early
    jax.make_jaxpr(bound_or_error(made.bound).executable.constrained_program(made.mesh))(
        *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in made.inputs)
    )


def test_a_constant_parameter_of_a_scan_is_not_early():
    w, x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32), jax.ShapeDtypeStruct((ROWS, 2048), jnp.float32)

    def forward(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0]

    made = plan(step_of(forward), w, x, plan="fsdp:8", target="v5e:2x4", gather="prefetch")
    assert not cost_of(made).early
