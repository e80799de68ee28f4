"""Recipes: their file, their words, what is planned for them, and the results."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import optax
import plan_rows
import plan_sides
import pytest
import recipe_rows
import recipe_settings
import recipe_stand_ins as stand_ins
import recipes
from plan_rows import Planned, Row, Store
from plan_sides import Side
from recipe_figures import figures, table
from recipe_file import OWN, Entry, Recipe, RecipeFileError, read_recipes
from recipe_rows import Result, result_of
from recipe_settings import UnavailableError, settings_of
from recipe_words import POLICIES, VALUES, Remat, WordsError, parse_note, parse_remat, parse_sharding
from referee_calibration import efficiencies

from autoshard.models.remat.policies import remat_problems
from autoshard.models.workloads import WORKLOADS
from autoshard.sharding.audit import Compiled
from autoshard.sharding.machines.options import ProgramFacts, default_options
from autoshard.sharding.machines.options.host_memory import LINK_SPEEDS
from autoshard.sharding.machines.options.option_table import LINK_SPEED
from autoshard.sharding.machines.targets import find_target
from autoshard.train.program.build import workload_step
from tests.sharding.lower.tpu.test_stack_layouts import ROWS, mlp, wide

TINY = """
[[recipe]]
id = "tiny"
model = "llama-tiny"
target = "v5e:2x4"
slices = 1
batch = 16
seq = 32
precision = "bf16"
seconds = 0.001
sharding = "fsdp:8"
remat = "decoder_layer_input, query/key/value_proj: host"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipes.toml"
    path.write_text(text)
    return path


def entry(tmp_path: Path, *changes: tuple[str, str]) -> Entry:
    text = TINY
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return read_recipes(written(tmp_path, text))[0]


# --- The file


def test_our_own_file_is_read_and_its_words_are_understood():
    entries = read_recipes(OWN)
    assert len(entries) == 23 and not any(each.problems or each.ignored for each in entries)
    for recipe in (each.recipe for each in entries):
        assert recipe is not None and recipe.xla_options and recipe.source
        target = find_target(recipe.machine)
        machine = {"devices": target.devices, "slices": recipe.slices, "devices_per_chip": target.chip.cores}
        assert parse_sharding(recipe.sharding, **machine).sizes
        parse_remat(recipe.remat)
    available = [each for each in entries if each.recipe and each.recipe.model in WORKLOADS]
    assert len(available) == 23
    assert all(settings_of(each).work.batch_size == each.recipe.batch for each in available if each.recipe)


def test_sets_of_options_are_joined(tmp_path):
    sets = "[options.a]\nx = true\ny = 1\n[options.b]\ny = 2\n"
    row = TINY + 'options = ["a", "b"]\n[recipe.more_options]\nz = "ENABLED"\n'
    (found,) = read_recipes(written(tmp_path, sets + row))
    assert found.recipe is not None and found.recipe.xla_options == {"x": True, "y": 2, "z": "ENABLED"}
    (found,) = read_recipes(written(tmp_path, TINY))
    assert found.recipe is not None and found.recipe.xla_options is None


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("batch = 16", "", "batch is missing"),
        ("batch = 16", 'batch = "16"', "batch is '16'; it must be a whole number"),
        ("seq = 32", "seq = 0", "seq is 0; it must be above 0"),
        ("seconds = 0.001", "seconds = -1.0", "seconds is -1.0; it must be above 0"),
        ('"bf16"', '"int4"', "precision is 'int4'; it must be 'bf16' or 'fp8'"),
        (
            "slices = 1",
            'slices = 1\nmoment_dtype = "int8"',
            "moment_dtype is 'int8'; it must be 'float32' or 'bfloat16'",
        ),
        ("slices = 1", 'slices = 1\noptions = ["fast"]', "there is no option set 'fast'; there are none"),
        ("slices = 1", 'slices = 1\ndispatch = "random"', "dispatch is 'random'; it must be 'capacity' or 'dropless'"),
    ],
)
def test_a_row_that_cannot_be_read_is_kept_with_its_problems(tmp_path, before, after, problem):
    found = entry(tmp_path, (before, after))
    assert found.id == "tiny" and found.recipe is None and found.problems == (problem,)
    with pytest.raises(UnavailableError, match="not readable"):
        settings_of(found)


def test_an_id_that_occurs_twice_is_a_problem_of_the_second_row(tmp_path):
    first, second = read_recipes(written(tmp_path, TINY + TINY))
    assert first.recipe is not None and second.recipe is None and "occurs twice" in second.problems[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id = ", "is not TOML"),
        ("", r"has no \[\[recipe\]\] tables"),
        ("[recipe]\nid = 1", r"has no \[\[recipe\]\] tables"),
        (TINY + "[chips]", "there is no table 'chips'"),
        ("options = 1\n" + TINY, "options is 1"),
    ],
)
def test_a_file_of_another_form_is_an_error(tmp_path, text, message):
    with pytest.raises(RecipeFileError, match=message):
        read_recipes(written(tmp_path, text))


# --- Words


@pytest.mark.parametrize(
    ("text", "machine", "words"),
    [
        ("fsdp:16", {"devices": 16}, "fsdp:16"),
        ("fsdp:64 ep:4", {"devices": 256}, "fsdp:64 ep:4"),
        ("fsdp:64 dp:2", {"devices": 128}, "dp:2 fsdp:64"),
        ("fsdp:256 within a slice, dp:2 across", {"devices": 512, "slices": 2}, "dp:2 fsdp:256"),
        ("dp:4 fsdp:32 (two devices a chip)", {"devices": 128, "devices_per_chip": 2}, "dp:4 fsdp:32"),
        ("fsdp:128, as 16 x 8 (two devices a chip)", {"devices": 128, "devices_per_chip": 2}, "fsdp:128"),
        ("fsdp:64 cp:8 (512 cores)", {"devices": 512, "devices_per_chip": 2}, "fsdp:64 cp:8"),
        ("fsdp:128 (16 hosts x 8), dp:2 across", {"devices": 256}, "dp:2 fsdp:128"),
    ],
)
def test_shardings(text, machine, words):
    assert parse_sharding(text, **machine).words == words


def test_a_loss_in_parts_of_the_tokens_is_planned_in_parts_of_the_vocabulary():
    found = stand_ins.loss(cast(Recipe, SimpleNamespace(vocab_tiles=8)))
    assert found.changes == {"loss_chunks": 8} and "8 parts of the tokens" in found.note
    assert stand_ins.loss(cast(Recipe, SimpleNamespace(vocab_tiles=None))) == stand_ins.StandIn()


def test_kernel_settings_are_noted():
    blocks = {"q": 2048, "kv": 1024, "kv_compute": 512}
    recipe = SimpleNamespace(attention="splash", attention_blocks=blocks, fused_backward=True)
    assert stand_ins.kernel_note(cast(Recipe, recipe)) == (
        "the recipe's attention: splash, blocks q=2048 kv=1024 kv_compute=512, one kernel for all gradients; "
        "planned: the planner's own kernel and blocks"
    )
    nothing = SimpleNamespace(attention=None, attention_blocks=None, fused_backward=None)
    assert stand_ins.kernel_note(cast(Recipe, nothing)) == ""


@pytest.mark.parametrize(
    ("text", "machine", "message"),
    [
        ("fsdp:8", {"devices": 16}, "is for 8 devices; the machine has 16"),
        ("", {"devices": 16}, "is for 1 devices"),
        ("fsdp:16 and more", {"devices": 16}, "'fsdp:16 and more' is not understood"),
        ("fsdp:16, quickly", {"devices": 16}, "'quickly' is not understood"),
        ("xp:16", {"devices": 16}, "'xp' is not one of pp, dp, zero1, fsdp"),
        ("fsdp:4 fsdp:4", {"devices": 4}, "'fsdp' occurs twice"),
        ("dp:4, dp:4", {"devices": 16}, "'dp' occurs twice"),
        ("fsdp:16 (two devices a chip)", {"devices": 16}, "contradicts the machine"),
        ("fsdp:16 (32 cores)", {"devices": 16}, "contradicts the machine"),
        ("fsdp:16 (on Sundays)", {"devices": 16}, "the remark 'on Sundays' is not understood"),
        ("fsdp:16, as 3 x 4", {"devices": 16}, "'3 x 4' is not 16"),
        ("fsdp:8 within a slice, dp:4 across", {"devices": 32, "slices": 2}, "8 devices are not within a slice"),
    ],
)
def test_shardings_that_are_not_understood(text, machine, message):
    with pytest.raises(WordsError, match=message):
        parse_sharding(text, **machine)


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("full", {}),
        (
            "decoder_layer_input, query/key/value_proj, out_proj: host",
            {"residual": "host", "qkv": "host", "out_proj": "host"},
        ),
        ("context, mlpwo: host", {"context": "host", "mlp_out": "host"}),
        (
            "decoder_layer_input kept, query/key/value_proj recomputed",
            {"residual": "keep", "qkv": "recompute"},
        ),
        (
            "decoder_layer_input, mlpwo: host; key/value_proj kept",
            {"residual": "host", "mlp_out": "host", "key": "keep", "value": "keep"},
        ),
        ("residual, mlpwi_0, mlpwi_1 kept", {"residual": "keep", "mlp_in": "keep"}),
        ("qkv_proj_offloaded", {"qkv": "host"}),
        (
            "dots and context kept, but not those of the mlp",
            {"qkv": "keep", "context": "keep", "out_proj": "keep"},
        ),
        ("none", dict.fromkeys(VALUES, "keep")),
    ],
)
def test_remats(text, actions):
    assert parse_remat(text).actions == actions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlpwo: disk", "'mlpwo: disk' is not understood"),
        ("mlpwx: host", "there is no value 'mlpwx'; there are decoder_layer_input, query_proj"),
        ("query/mlp_proj: host", "there is no value 'mlp_proj'"),
        ("context: host, mlpwo", "mlp_out has no action; write host, kept or recomputed"),
        ("context: host; context kept", "context has two actions"),
        ("", "'' is not understood"),
    ],
)
def test_remats_that_are_not_understood(text, message):
    with pytest.raises(WordsError, match=message):
        parse_remat(text)


@pytest.mark.parametrize(
    ("note", "settings"),
    [
        ("", {}),
        ("512 chips; batch from the logged weights", {}),
        ("128 chips; dropless grouped products (megablox)", {"dispatch": "dropless"}),
        ("dropped tokens, capacity factor 2", {"dispatch": "capacity", "capacity_factor": 2.0}),
        ("parameters in bf16; batch from the logged weights", {"param_dtype": "bfloat16"}),
    ],
)
def test_settings_in_notes(note, settings):
    assert parse_note(note) == settings


# --- What is planned


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", "full"),
        ("decoder_layer_input kept", "full"),
        ("none", "none"),
        ("minimal", "dots"),
        ("decoder_layer_input: host", "host:residual"),
        ("query/key/value_proj, context kept", "keep:qkv+context"),
        ("decoder_layer_input, query/key/value_proj: host; out_proj kept", "host:residual+qkv keep:out_proj"),
    ],
)
def test_values_get_the_recipes_actions(text, policy):
    assert stand_ins.remat(parse_remat(text)) == stand_ins.StandIn({"remat": policy})


def test_a_value_without_a_name_of_its_own_is_noted():
    found = stand_ins.remat(parse_remat("decoder_layer_input: host; key/value_proj kept"))
    assert found == stand_ins.StandIn({"remat": "host:residual"}, "key, value alone: recomputed")


def test_every_policy_of_maxtext_is_a_policy():
    for actions in POLICIES.values():
        assert not remat_problems(stand_ins.remat(Remat(actions)).changes["remat"], layers=2, scan=True)


def test_a_note_gives_settings_that_the_row_lacks(tmp_path):
    text = 'slices = 1\nnote = "dropped tokens, capacity factor 1.5, parameters in bf16"'
    found = settings_of(entry(tmp_path, ('"llama-tiny"', '"mixtral-tiny"'), ("slices = 1", text)))
    config = found.work.config
    assert (config.dispatch, config.capacity_factor, config.gpt.param_dtype) == ("capacity", 1.5, "bfloat16")
    found = settings_of(
        entry(tmp_path, ('"llama-tiny"', '"mixtral-tiny"'), ("slices = 1", text + '\nparam_dtype = "float32"'))
    )
    assert found.work.config.gpt.param_dtype == "float32"


def test_products_in_another_precision_are_reported(tmp_path):
    found = settings_of(entry(tmp_path, ('"bf16"', '"fp8"')))
    assert found.same_precision and found.work.config.quantization == "fp8"
    found = settings_of(entry(tmp_path, ('"bf16"', '"fp8"'), ('"llama-tiny"', '"mixtral-tiny"')))
    assert not found.same_precision and "products in fp8 are planned in bf16" in found.notes
    assert found.work.config.gpt.quantization == "none"
    found = settings_of(entry(tmp_path))
    assert found.same_precision and not any("products" in note for note in found.notes)


def test_the_first_moment_has_the_recipes_dtype(tmp_path):
    def moments(text: str) -> list[str]:
        settings = settings_of(entry(tmp_path, ("slices = 1", f"slices = 1{text}")))
        _, state, _ = workload_step(settings.work, optimizer=settings.optimizer)
        adam = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
        return [str({leaf.dtype.name for leaf in jax.tree.leaves(each)}) for each in adam]

    assert moments("") == moments('\nmoment_dtype = "float32"') == ["{'float32'}", "{'float32'}"]
    assert moments('\nmoment_dtype = "bfloat16"') == ["{'bfloat16'}", "{'float32'}"]


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ('"llama-tiny"', '"gemma9-2b"', "model not available"),
        ('"v5e:2x4"', '"v9:2x4"', "target not available: .*v9"),
        ('"fsdp:8"', '"fsdp:4"', "not understood: .* is for 4 devices"),
        (": host", ": somewhere", "not understood: remat"),
        ("slices = 1", 'slices = 1\nparam_dtype = "float7"', "not possible: .*float7"),
    ],
)
def test_a_row_that_cannot_be_planned_says_why(tmp_path, before, after, status):
    with pytest.raises(UnavailableError, match=status):
        settings_of(entry(tmp_path, (before, after)))


@pytest.mark.slow
def test_results_of_a_file(tmp_path, capsys):
    other = TINY.replace('"tiny"', '"unknown"').replace('"llama-tiny"', '"gemma9-2b"')
    unreadable = TINY.replace('"tiny"', '"unreadable"').replace("batch = 16", "")
    extra = TINY.replace("slices = 1", "chips = 8")
    path, out = written(tmp_path, extra + other + unreadable), tmp_path / "out.json"
    assert recipes.main(["--recipes", str(path), "--json", str(out), "--predict-only"]) == 1
    printed = capsys.readouterr().out
    assert "unknown: model not available" in printed and "unreadable: not readable: batch is missing" in printed
    rows = json.loads(out.read_text())["recipes"]
    assert [rows[name]["status"] for name in ("unknown", "unreadable")] == [
        "model not available", "not readable: batch is missing",
    ]  # fmt: skip
    tiny = rows["tiny"]
    assert tiny["status"] == "ok" and tiny["measured"] == 0.001 and tiny["remat"] == {"residual": "host", "qkv": "host"}
    assert "field 'chips' is unknown and ignored" in tiny["notes"]
    own, best = tiny["recipe"], tiny["plan"]
    assert (own["words"], own["remat"], own["fits"], own["compiled"]) == ("fsdp:8", "host:residual+qkv", True, None)
    assert best["words"] and best["remat"] and best["fits"] and best["compiled"] is None
    assert 0 < best["predicted"]["seconds"] <= own["predicted"]["seconds"]
    assert own["predicted"]["memory_bytes"] > 0 and own["predicted"]["limit_bytes"] == 15.75 * 2**30
    summary = json.loads(out.read_text())["figures"]
    assert summary["rows"] == ["tiny"]
    assert summary["predicted"]["geometric_mean"] == pytest.approx(own["predicted"]["seconds"] / 0.001)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_a_result(tmp_path):
    huge = entry(tmp_path, ("batch = 16", "batch = 1600000"), ("seq = 32", "seq = 4096"))
    found = result_of(huge, compile_plans=False, timeout_s=1.0)
    assert found.recipe.fits is False and found.recipe.seconds
    assert found.best.seconds is None and "no plan fits" in found.best.problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "missing.toml"], "cannot be read: No such file"),
        (["--only", "tiny"], "has no recipe tiny; it has"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert recipes.main([*arguments, "--predict-only"]) == 2
    assert message in capsys.readouterr().err


SPARSE = "xla_tpu_enable_sparse_core_collective_offload_all_reduce"


def test_options_with_reports_of_wrong_numbers_are_compiled_with_and_without(tmp_path, monkeypatch):
    sets = f"[options.sparse]\n{SPARSE} = true\nxla_enable_async_all_gather = true\n"
    text = sets + TINY.replace("v5e:2x4", "v6e:2x4") + 'options = ["sparse"]\n'
    (one,) = read_recipes(written(tmp_path, text))
    used, by_compiler = {}, set()

    def compile_under(side, made, store, name, options, alternatives=(), compiler_moves=False):
        used[name] = options
        by_compiler.update((name,) if compiler_moves else ())
        return side

    monkeypatch.setattr(recipe_rows, "with_compiled", compile_under)
    monkeypatch.setattr(recipe_rows, "_best_plan", lambda settings, sets=(): (Side(remat="+".join(sets)), None))
    found = result_of(one, compile_plans=True, timeout_s=1.0, folder=tmp_path)
    assert found.reported == ("sparse-core-reductions (AXLearn reports abnormal losses)",)
    assert used["recipe"][SPARSE] is True and used["recipe without"][SPARSE] is False
    assert used["recipe without"]["xla_enable_async_all_gather"] is True and used["plan"] is None
    assert found.recipe_without == found.recipe
    assert by_compiler == {"recipe", "recipe without"}  # our own plans say when slices move
    assert used["plan with"] is None and found.best_with == Side(remat="sparse-core-reductions")
    (other,) = read_recipes(written(tmp_path, sets + TINY + 'options = ["sparse"]\n'))
    found = result_of(other, compile_plans=True, timeout_s=1.0, folder=tmp_path)
    assert found.reported == () and found.recipe_without is None and found.best_with is None


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((3.0, 2.0, 2.5), "0.5"), ((3.0, 4.0, 2.5), "0.3"), ((3.0, 4.0, 3.5), None), ((3.0, math.inf, math.inf), None)],
)
def test_our_plan_has_the_fastest_schedule_of_transfers(monkeypatch, seconds, chosen):
    by_speed = dict(zip((None, *(o[LINK_SPEED] for o in LINK_SPEEDS.values())), seconds, strict=True))
    scheduled, compiled = [], []

    def schedule(options, timeout_s, until):
        scheduled.append((options.get(LINK_SPEED), until))
        return options

    def judge(options, target):
        return SimpleNamespace(step={"roofline": by_speed[options.get(LINK_SPEED)]})

    class Options(dict):
        kind = "ok"  # in place of a job and of its result

    monkeypatch.setattr(plan_sides, "bound_or_error", lambda bound: SimpleNamespace(executable=None))
    monkeypatch.setattr(plan_sides, "export_plan", lambda executable, options: Options(options))
    monkeypatch.setattr(plan_sides, "compile_job", schedule)
    monkeypatch.setattr(plan_sides, "estimated", judge)
    monkeypatch.setattr(plan_sides, "_compiled", lambda row: {})
    facts = ProgramFacts("v6e", host_traffic_bytes=1e9)
    monkeypatch.setattr(recipe_rows, "program_facts", lambda made: facts)
    made = SimpleNamespace(compiler_options={"tpu": default_options("v6e")}, bound=None)
    side = Side(words="fsdp:8", predicted={"seconds": 1.0, "memory_bytes": 1.0})

    def finish(planned, options, job):
        compiled.append(job.get(LINK_SPEED))
        return SimpleNamespace(message="")

    store = cast(Any, SimpleNamespace(target="v6e:2x4", timeout_s=1.0, finish=finish))

    def run():
        links = recipe_rows._link_options(made)
        assert not plan_sides.with_compiled(side, made, store, "plan", None, alternatives=links).problem

    run()
    assert scheduled == [(speed, "schedule") for speed in by_speed] and compiled == [chosen]
    monkeypatch.setattr(recipe_rows, "program_facts", lambda made: replace(facts, host_traffic_bytes=0.0))
    run()
    assert len(scheduled) == 3 and compiled == [chosen, None]


def test_option_sets_with_reports_are_on_in_our_plan_if_a_recipe_has_them(tmp_path):
    text = f"[options.sparse]\n{SPARSE} = true\n" + TINY.replace("v5e:2x4", "v6e:2x4") + 'options = ["sparse"]\n'
    (one,) = read_recipes(written(tmp_path, text))
    settings = recipe_settings.settings_of(one)
    _, plain = recipe_rows._best_plan(settings)
    _, asked = recipe_rows._best_plan(settings, ["sparse-core-reductions"])
    assert plain.compiler_options["tpu"][SPARSE] == "false" and asked.compiler_options["tpu"][SPARSE] == "true"


def test_our_plans_are_compared_with_recipes_that_have_the_same_options():
    own, best, asked = (replace(side(10.0), compiled=judged(seconds, 0.0)) for seconds in (8.0, 9.0, 7.0))
    row = Result("a", "ok", 10.0, "llama3-8b", "v6e:4x4", "bf16", recipe=own, best=best, best_with=asked)
    assert figures([row])["best"]["alike"]["joined"]["largest"] == 7 / 8
    assert figures([replace(row, best_with=None)])["best"]["alike"]["joined"]["largest"] == 9 / 8


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_compiled_plans_are_judged(tmp_path):
    options = 'options = ["two"]\n'
    sets = "[options.two]\nxla_tpu_scoped_vmem_limit_kib = 65536\nxla_no_such_option = true\n"
    (one,) = read_recipes(written(tmp_path, sets + TINY + options))
    found = result_of(one, compile_plans=True, timeout_s=300.0, folder=tmp_path)
    for side in (found.recipe, found.best):
        assert side.problem == "" and side.compiled is not None and side.compiled["fits"]
        assert (
            set(side.compiled["seconds"]) == {"cycles", "roofline", "joined"}
            and min(side.compiled["seconds"].values()) > 0
        )
        assert 0 < side.compiled["memory_bytes"] < side.compiled["limit_bytes"]
    assert found.recipe.compiled is not None and found.best.compiled is not None
    assert found.recipe.compiled["dropped"] == ["xla_no_such_option"]
    assert "xla_tpu_scoped_vmem_limit_kib" not in found.best.compiled["options"]
    assert (tmp_path / "tiny.json").exists()


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_compiler_that_was_stopped_is_started_again(tmp_path):
    (one,) = read_recipes(written(tmp_path, TINY))
    stopped = result_of(one, compile_plans=True, timeout_s=0.1, folder=tmp_path).recipe
    assert stopped.compiled is not None and stopped.compiled["kind"] == "timeout" and not stopped.compiled["fits"]
    assert "stopped after 0.1 s" in stopped.problem
    again = result_of(one, compile_plans=True, timeout_s=300.0, folder=tmp_path).recipe
    assert again.compiled is not None and again.compiled["kind"] == "ok"


def test_a_row_of_an_earlier_referee_is_compiled_again(tmp_path, monkeypatch):
    """It lacks a measure that the present referee has."""
    store = Store("case", "v6e:4x4", tmp_path)
    row = Row("plan", "fsdp:16", "fsdp:16", "full", 1, {}, "digest", "ok", step={"cycles": 1.0, "roofline": 1.0})
    job, planned = SimpleNamespace(digest=lambda _: "digest"), Planned("plan", "fsdp:16", "fsdp:16", "full", 1, None)
    fresh = replace(row, step={**row.step, "joined": 1.0})
    monkeypatch.setattr(plan_rows, "compile_job", lambda *_, **__: None)
    monkeypatch.setattr(store, "_row", lambda *_: fresh)
    store.rows = [row]
    assert store.finish(planned, {}, cast(Any, job)).step == fresh.step and not store.rows[0].cached
    assert store.finish(planned, {}, cast(Any, job)).cached


# --- Figures


def side(seconds: float | None, compiled: float | None = None, fits: bool = True) -> Side:
    if seconds is None:
        return Side(problem="no plan fits")
    judged = None if compiled is None else {"kind": "ok", "fits": fits, "seconds": {"roofline": compiled}}
    return Side("fsdp:8", "full", 1, {"seconds": seconds, "memory_bytes": 1.0, "limit_bytes": 2.0}, judged)


def test_figures():
    results = [
        Result("a", "ok", 10.0, "llama3-8b", "", "bf16", recipe=side(11.0, 9.0), best=side(9.0, 4.5)),
        Result("b", "ok", 10.0, "mistral-7b", "", "bf16", recipe=side(12.0, 8.1, fits=False), best=side(None)),
        Result("c", "ok", 10.0, "gpt3-175b", "", "bf16", recipe=side(10.0), best=side(16.0)),
        Result("d", "ok", 10.0, "gpt3-175b", "", "fp8", False, recipe=side(99.0), best=side(99.0)),
        Result("e", "ok", 10.0, "gpt3-175b", "", "bf16", recipe=side(99.0), best=side(99.0)),
        Result("f", "ok", 10.0, "gemma", "", "bf16", recipe=side(99.0), best=side(99.0)),
        Result("g", "model not available", 10.0, "llama9"),
    ]
    found = figures(results, ["e"])
    assert (found["rows"], found["left_out"], found["without_plan"]) == (["a", "b", "c"], ["d", "e"], ["b"])
    assert found["predicted"] == {
        "rows": 3,
        "median_error": pytest.approx(0.1),
        "share_within_15_percent": pytest.approx(2 / 3),
        "geometric_mean": pytest.approx((1.1 * 1.2) ** (1 / 3)),
        "largest": pytest.approx(1.2),
    }
    assert found["best"]["predicted"]["geometric_mean"] == pytest.approx((0.9 * 1.6) ** 0.5)
    # A program that the compiler accepts counts, and is marked where it exceeds the memory.
    assert found["compiled"]["roofline"]["geometric_mean"] == pytest.approx((0.9 * 0.81) ** 0.5)
    assert found["over_memory"] == ["b"] and not found["compiled"]["cycles"]
    assert found["best"]["compiled"]["roofline"]["geometric_mean"] == pytest.approx(0.5)


def judged(compute: float, exposed: float) -> dict[str, Any]:
    seconds, exposed_seconds = {"joined": compute + exposed}, {"joined": exposed}
    return {"kind": "ok", "fits": True, "seconds": seconds, "exposed_seconds": exposed_seconds}


def test_one_recipe_calibrates_the_referee_on_its_chip(tmp_path):
    """At half of the efficiency compute takes twice as long, and exposed seconds stay."""
    store = Store("llama3.1-8b-v6e-16", "v6e:4x4", tmp_path)
    measured = next(entry.recipe.seconds for entry in read_recipes(OWN) if entry.id == store.case and entry.recipe)
    row = Row("recipe", "fsdp:16", "fsdp:16", "full", 1, {}, "digest", "ok")
    store.rows = [replace(row, step={"joined": measured / 2 + 0.1}, exposed={"joined": 0.2})]
    store.save()
    known = efficiencies(tmp_path)
    assert known == {("v6e", "efficiency"): pytest.approx((measured / 2 - 0.1) / (measured - 0.2))}
    known = {("v6e", "efficiency"): 0.5}
    results = [
        Result("a", "ok", 10.0, "llama3-8b", "v6e:4x4", "bf16", recipe=replace(side(11.0), compiled=judged(4.0, 1.0))),
        Result(
            "b", "ok", 10.0, "llama3-8b", "v5p:2x2x1", "bf16", recipe=replace(side(11.0), compiled=judged(4.0, 1.0))
        ),
        Result("c", "ok", 10.0, "llama3-8b", "v6e:4x4", "fp8", recipe=replace(side(11.0), compiled=judged(4.0, 1.0))),
    ]
    found = figures(results, referee=known)["compiled"]
    assert found["calibrated"]["rows"] == 1 and found["calibrated"]["geometric_mean"] == pytest.approx(0.9)
    assert found["joined"]["rows"] == 3 and found["joined"]["geometric_mean"] == pytest.approx(0.5)


def test_our_plans_are_also_compared_with_the_recipe_without_reported_options():
    own, best, safe = (replace(side(10.0), compiled=judged(seconds, 0.0)) for seconds in (8.0, 9.0, 12.0))
    row = Result("a", "ok", 10.0, "llama3-8b", "v6e:4x4", "bf16", recipe=own, best=best, recipe_without=safe)
    found = figures([row])["best"]
    assert found["compiled"]["joined"]["largest"] == 9 / 8 and found["safe"]["joined"]["largest"] == 9 / 12
    assert figures([replace(row, recipe_without=None)])["best"]["safe"]["joined"]["largest"] == 9 / 8


def test_the_table_marks_a_program_that_exceeds_the_memory():
    def cell(fits: bool) -> str:
        judged = {"kind": "ok", "fits": fits, "seconds": {"cycles": 3.0, "roofline": 2.0}}
        row = Result("a", "ok", 10.0, "llama3-8b", recipe=replace(side(12.0), compiled=judged), best=side(9.0))
        return str(next(iter(table([row]).columns[5].cells)))

    assert (cell(fits=True), cell(fits=False)) == ("3.00 / 2.00", "3.00 / 2.00 *")


def test_a_recipe_of_several_slices_names_them():
    recipe = read_recipes(OWN)[10].recipe
    assert isinstance(recipe, Recipe) and recipe.machine == "v6e:16x16*2"


def test_exposed_seconds_of_a_row_include_copies(tmp_path, monkeypatch):
    store = Store("case", "v6e:4x4", tmp_path)
    judged = SimpleNamespace(
        step={"joined": 2.0}, exposed={"joined": 0.25}, copies={"joined": 0.5},
        wire_bytes=0.0, memory_bytes=1.0, peak_bytes=1.0, memory_limit=2.0,
    )  # fmt: skip
    monkeypatch.setattr(plan_rows, "estimated", lambda *_: judged)
    result = Compiled("ok", versions={}, memory={})
    planned = Planned("plan", "fsdp:16", "fsdp:16", "full", 1, None)
    assert store._row(planned, {}, "digest", result).exposed == {"joined": 0.75}


def test_the_compiler_chooses_the_layout_of_stacks_in_the_plans_of_recipes():
    shape = (ROWS, 8, 256)
    assert wide(["input"], mlp, shape)
    with plan_sides.moved_by_compiler():
        assert not wide(["input"], mlp, shape)
