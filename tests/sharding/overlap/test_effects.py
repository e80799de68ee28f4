"""Notes on entries of `overlap=` that change nothing."""

import jax
import pytest

from autoshard import Plan, plan
from tests.sharding.overlap.programs import inputs, overlap_of, parameters, step


def notes(overlap, target="v5e:2x4", words="fsdp:8", **options):
    made = plan(step, parameters(), inputs(), plan=words, target=target, overlap=overlap, **options)
    return [note for note in made.notes if note.startswith("overlap")]


@pytest.mark.parametrize(("overlap", "words", "reason"), [
    ("*/up:gather=off", "dp:8", "no operator gathers these parameters"),
    ("*/up:reduce=off", "fsdp:8", "the compiler for v5e:2x4 runs nothing beside reduce-scatter"),
    ("*/up:gather=on", "fsdp:8", "without gather='sequential', gathers run beside compute already"),
    ("*/up:matmul=off", "fsdp:8", "the compiler for v5e:2x4 makes no collective matmul"),
    ("*/up:matmul=on", "dp:8", "no product with these parameters has a collective"),
])  # fmt: skip
def test_entries_without_effect(overlap, words, reason):
    (note,) = notes(overlap, words=words)
    assert note.startswith(f"overlap '*/up': {overlap.partition(':')[2]} changes nothing: {reason}")


def test_entries_with_an_effect_have_no_such_note():
    assert notes("*/up:gather=off") == []
    assert notes("*/up:gather=on", gather="sequential") == []
    assert notes({"*": {"gather": "off"}, "*/up": {"gather": "on"}}) == []
    assert notes("*/up:reduce=off", "v6e:2x4", compiler_options="sparse-core-reductions") == []
    low = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
    assert notes("*/up:matmul=off", "v6e:2x4", compiler_options=low) == []
    (note,) = notes("*/up:matmul=on")
    assert "the estimate does not count" in note


def test_gpus_combine_collectives():
    (note,) = notes("*/up:gather=off", "h100:1x8")
    assert "give compiler_options={'xla_gpu_all_gather_combine_threshold_bytes': '1'}" in note
    alone = {"xla_gpu_all_gather_combine_threshold_bytes": "1"}
    assert notes("*/up:gather=off", "h100:1x8", compiler_options=alone) == []
    (note,) = notes("*/up:reduce=off", "h100:1x8", compiler_options=alone)
    assert "'xla_gpu_reduce_scatter_combine_threshold_bytes': '1', 'xla_gpu_all_reduce_combine_threshold" in note


def test_an_entry_that_others_replace():
    (note,) = notes({"1/up": {"gather": "off"}, "*": {"gather": "off"}, "*/*": {"gather": "off"}})
    assert note.startswith("overlap '*': gather=off changes nothing: later entries, or exact paths")


def test_gathers_after_the_update():
    def with_momentum(state, x):
        layers, before = state
        moved = jax.tree.map(lambda p, new, m: 0.9 * m + new - p, layers, step(layers, x)[0], before)
        return jax.tree.map(jax.numpy.add, layers, moved), moved

    made = plan(with_momentum, (parameters(), parameters()), inputs(), plan="zero1:8", target="v5e:2x4",
                overlap="0/0/*/up:gather=off")  # fmt: skip
    assert "overlap '0/0/*/up': gather=off does not concern the gathers after the update, which the compiler " \
           "schedules" in made.notes  # fmt: skip


def test_exposed_gathers_are_priced(tmp_path):
    shapes = {"up": (1024, 4096), "down": (4096, 1024), "scale": (1024,)}
    layers = [{name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}] * 2
    x = jax.ShapeDtypeStruct((64, 256, 1024), "bfloat16")
    before, after = (
        plan(step, layers, x, plan="fsdp:8", target="v5e:2x4", overlap=overlap)
        for overlap in ("*/up:gather=on", "*/up:gather=off")
    )
    us, exposed = before.module_us["0/*/up"]["gather"]
    assert exposed < us
    us, exposed = after.module_us["0/*/up"]["gather"]
    assert us == pytest.approx(exposed) and after.estimate.step_time_us > before.estimate.step_time_us
    assert "overlap: */up:gather=off" in str(after) and "collectives by module" in str(after)
    read = Plan.from_json(after.to_json())
    assert (read.overlap, read.module_us) == (after.overlap, after.module_us)
    assert overlap_of(read.bind(step, layers, x)).words["gather"]
