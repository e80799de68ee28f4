"""`compiler_options=`: its forms, what takes precedence, and what it changes in a plan."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard.errors import PlanError
from autoshard.sharding.audit import Audit
from autoshard.sharding.machines.option_requests import read_request, requested, under_request
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.autotune.test_compiled_options import choose, own_audit, planned
from tests.sharding.autotune.test_compiled_options import step as fn

REDUCE = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"
GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
KEEP = "xla_tpu_prefer_async_allgather_to_allreduce"
LAYOUT = "xla_tpu_assign_all_reduce_scatter_layout"
MEMORY = "xla_tpu_scoped_vmem_limit_kib"
CPU_OPTION = "xla_cpu_enable_fast_math"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (None, ()),
        ("", ()),
        ("scoped-vmem", ("scoped-vmem",)),
        ({MEMORY: 65536}, ({MEMORY: 65536},)),
        ([f"scoped-vmem + {REDUCE}=true", {MEMORY: "1"}], ("scoped-vmem", {REDUCE: "true"}, {MEMORY: "1"})),
    ],
)
def test_forms_of_a_request(given, parts):
    assert read_request(given) == parts and read_request(parts) == parts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "compiler_options is 7, of type int; give the name of an option set"),
        ([7], "compiler_options[0] is 7, of type int; give the name of an option set"),
        (["scoped-vmem", ["a"]], "compiler_options[1] is ['a'], of type list; give the name of an option set"),
        ("=1", "compiler_options has '=1'; give the name of an option set"),
        (f"{MEMORY}=", f"compiler_options has '{MEMORY}='; give the name of an option set"),
        ({"": "1"}, "compiler_options has an option without a name; names are text"),
        ({7: "1"}, "compiler_options has an option whose name is 7, of type int; names are text"),
        ({MEMORY: None}, f"compiler_options['{MEMORY}'] is None; the value of an option is text, True or False, or a "
                         "number: leave the option out, which keeps its default"),
        ({MEMORY: [1]}, f"compiler_options['{MEMORY}'] is [1], of type list; the value of an option is text, True or"),
        ({MEMORY: np.int64(3)}, f"compiler_options['{MEMORY}'] is np.int64(3), of type int64; the value of an option "
                                "is text, True or False, or a number: give one of these, such as the result of its"),
        ([{"a": None, "b": {}}], "compiler_options['a'] is None; the value of an option is text, True or False, or a "
                                 "number: leave the option out, which keeps its default; compiler_options['b'] is {}"),
    ],
)  # fmt: skip
def test_other_forms_are_errors(given, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        auto_shard(lambda x: x, compiler_options=given)


def test_unknown_sets_list_the_known_ones():
    with pytest.raises(PlanError, match="compiler_options: there is no option set 'fastest'; the sets of v6e are no-"):
        planned(compiler_options="fastest")
    with pytest.raises(PlanError, match="cpu has no sets; pass a mapping"):
        planned("cpu:8", compiler_options="scoped-vmem")


def test_requests_take_precedence_over_defaults():
    target = find_target("v6e:2x4")
    options, own = requested(read_request(["gather-fusion", {MEMORY: 65536, GATHER: False}]), target)
    assert target.chip.options.keys() >= {GATHER, MEMORY} and options[GATHER] == own[GATHER] == "false"
    assert options[MEMORY] == "65536"  # text, as the TPU's compiler takes it
    options, _ = requested(read_request("gather-fusion"), target)
    assert GATHER not in options  # the set excludes that of GATHER


def test_values_have_the_form_that_the_compiler_takes():
    _, own = requested(read_request("a=true+b=12+c=x"), find_target("cpu:8"))
    assert own == {"a": True, "b": 12, "c": "x"}


def test_options_change_what_compute_hides_and_are_shown_and_kept():
    default, made = planned(), planned(compiler_options="sparse-core-reductions")
    assert made.requested_options == {REDUCE: "true", REDUCE.replace("reduce_scatter", "all_reduce"): "true"}
    assert made.compiler_options["tpu"].items() >= made.requested_options.items()
    hides = [bound_or_error(p.bound).problem.machine.target.chip.hides for p in (default, made)]
    assert hides == [("all-gather",), ("all-gather", "reduce-scatter", "all-reduce")]
    assert f"requested compiler options: {REDUCE}=true" in " ".join(str(made).split())
    assert "may change numbers: sparse-core-reductions (AXLearn" in " ".join(str(made).split())
    read = Plan.from_json(made.to_json())
    assert read.requested_options == made.requested_options and read.compiler_options == made.compiler_options
    assert "requested_options" not in default.to_json()


@pytest.mark.parametrize("option", [KEEP, GATHER])
def test_gathers_over_three_dimensions_are_priced_as_the_requested_options_compile_them(option):
    machine = under_request(find_target("v5p:4x4x4"), [{option: "false"}])
    over = machine.assign({"a": 64}).pieces_of(("a",))
    assert machine.topology.compiled("all-gather", over, 1.0) == ("all-reduce", 64.0)
    again = under_request(machine, [{option: "true"}])
    assert again.topology.compiled("all-gather", over, 1.0) == ("all-gather", 1.0)
    assert not machine.chip.keeps_gathers and again == find_target("v5p:4x4x4")


def test_hidden_reductions_take_less_time():
    """The same step, large enough that gradients of one layer reduce while the next one computes."""
    params = {
        "up": jax.ShapeDtypeStruct((8, 4096, 16384), "bfloat16"),
        "down": jax.ShapeDtypeStruct((8, 16384, 4096), "bfloat16"),
    }
    x = jax.ShapeDtypeStruct((65536, 4096), "bfloat16")
    default, made = (
        plan(fn, params, x, target="v6e:2x4", plan="fsdp:8", compiler_options=given)
        for given in (None, "sparse-core-reductions")
    )
    assert made.estimate.step_time_us < default.estimate.step_time_us
    assert made.estimate.comm_bytes == default.estimate.comm_bytes


def test_a_bound_plan_is_priced_under_its_options():
    made = planned(compiler_options="sparse-core-reductions")
    bound = bound_or_error(made.bound)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in made.inputs]
    params = {"down": shapes[0], "up": shapes[1]}
    again = Plan.from_json(made.to_json()).bind(fn, params, shapes[2])
    assert bound_or_error(again.bound).problem.machine.target.chip.hides == bound.problem.machine.target.chip.hides
    with pytest.raises(PlanError, match="compiler_options=.* is given with a Plan"):
        plan(fn, params, shapes[2], plan=made, compiler_options="scoped-vmem")


def test_verify_k_keeps_requested_options(monkeypatch):
    made = planned(compiler_options={GATHER: "false"})
    fast = Audit("ok", step_time_us=10.0, peak_bytes=1e6, program="fast")
    bound, _, tried = choose(monkeypatch, made, {LAYOUT: fast})
    assert tried and all(options[GATHER] == "false" for options in tried)
    assert bound.compiler_options["tpu"][GATHER] == "false" and LAYOUT in bound.compiler_options["tpu"]
    assert own_audit(made).options[GATHER] == "false"
    assert any(
        "because they change requested options: sparse-core-gathers, gather-fusion" in note for note in bound.notes
    )


def test_verify_names_requested_options_without_effect(monkeypatch):
    verification = importlib.import_module("autoshard.sharding.audit.verification")

    def compile_under(executable, options, timeout_s=0.0, until="code"):
        return Audit("ok", program=str("xla_real" in options), options=dict(options))

    monkeypatch.setattr(verification, "verify_under", compile_under)
    only = "these options change nothing in the compiled program: "
    assert planned(compiler_options={"xla_idle": "1", "xla_real": "1"}).verify().notes == (f"{only}xla_idle",)
    assert planned(compiler_options={"xla_idle": "1"}).verify().notes == (f"{only}xla_idle",)
    assert not planned(compiler_options={"xla_real": "1"}).verify().notes


def test_calls_use_the_options_and_name_what_the_compiler_refuses():
    step = auto_shard(lambda x: jnp.tanh(x) * 2, compiler_options={CPU_OPTION: False, "xla_no_such_option": "1"})
    with pytest.warns(match="does not know the plan's options xla_no_such_option: they are left out"):
        out = step(jnp.ones((8, 4)))
    assert jnp.allclose(out, jnp.tanh(1.0) * 2)
    made = step.plan(jnp.ones((8, 4)))
    assert made.compiler_options == {"cpu": {CPU_OPTION: False, "xla_no_such_option": 1}}
