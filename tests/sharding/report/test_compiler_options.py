"""The compiler options of a plan in its table and on its page."""

from autoshard.sharding.audit import Audit
from autoshard.sharding.machines.options import SETS
from autoshard.sharding.report.compiler_options import option_texts
from tests.sharding.autotune.test_compiled_options import planned
from tests.sharding.report.plans import half_built

REDUCE = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"


def test_table_and_page_name_the_sets_and_what_is_off(tmp_path):
    made = planned()
    text = str(made)
    assert (
        "compiler options: no-collective-matmul, sparse-core-gathers, no-sparse-core-reductions, scoped-vmem\n" in text
    )
    assert "off, because they may change numbers: sparse-core-reductions (AXLearn reports abnormal losses)" in text
    made.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert (
        "Compiler options: no-collective-matmul, sparse-core-gathers, no-sparse-core-reductions, scoped-vmem." in page
    )
    assert "Off, because they may change numbers: sparse-core-reductions" in page


def test_options_on_request_are_marked():
    made = planned()
    names = ("no-collective-matmul", "sparse-core-gathers")
    options = {name: value for each in names for name, value in SETS[each].options["v6e"].items()}
    made = made.where(compiler_options={"tpu": options | {REDUCE: "true", "xla_own": "7"}})
    names, wrong, off = option_texts(made)
    assert names == f"compiler options: no-collective-matmul, sparse-core-gathers, {REDUCE}=true, xla_own=7"
    assert wrong == "compiler options that may change numbers: sparse-core-reductions (AXLearn reports abnormal losses)"
    assert off.endswith("gather-fusion-overlap (jax-ml/jax issue 38741 reports NaN)")


def test_requested_options_are_unchecked_until_something_is_compiled():
    made = planned(compiler_options={"xla_own": 7})
    text = "unchecked: nothing is compiled yet; plan.verify() or --verify 1 reports what the compiler refuses"
    assert option_texts(made)[:2] == ["requested compiler options: xla_own=7", text]
    for compiled in ({"audits": (Audit("ok"),)}, {"measured": (("fsdp:8", 1.0),)}):
        assert text not in option_texts(made.where(**compiled))
    assert "nothing is compiled" not in str(planned())


def test_machines_without_sets_have_no_texts():
    assert not option_texts(planned("cpu:8"))
    assert option_texts(planned("h100:8")) == ["compiler options: full-memory"]
    assert not option_texts(half_built()) and not option_texts(half_built(target="v6e:nonsense"))
