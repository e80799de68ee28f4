"""Reports of plans: table, explanations, differences and page are correct, and never fail."""

import copy
import math
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._units import bytes_text, line_text, percent_text, ratio_text, time_text
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import Estimate
from autoshard.sharding.plan.tensors import Activation, Leaf
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.report.input_traffic import traffic_of
from autoshard.sharding.report.page import page
from autoshard.sharding.report.page.script import DIGEST
from autoshard.sharding.report.page.style import STYLE
from autoshard.sharding.report.summary import AxisNames, groups, label, mesh_sizes, mesh_text, verdict
from tests.sharding.example_step import shapes, train_step

REQUESTS = (None, "dp:8", "zero1:8", "fsdp:8", "tp:8", "fsdp:2 tp:4 seq", "dp:2 fsdp:2 tp:2")


@cache
def planned(words="fsdp:2 tp:4 seq", **options):
    return autoshard.plan(train_step, *shapes(), plan=words, target="cpu:8", donate_argnums=0, **options)


def unbound(words="fsdp:2 tp:4 seq"):
    return Plan.from_json(planned(words).to_json())


# units


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (7.4, "7 B"),
        (1023, "1023 B"),
        (1023.9, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1020 * 2**10, "1020 KiB"),
        (1023.9 * 2**10, "1.00 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**60, "3072 PiB"),
        (math.inf, "inf"),
    ],
)
def test_bytes_have_a_unit_and_three_digits(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 us"), (12.34, "12.3 us"), (999.9, "1.00 ms"), (1.5e5, "150 ms"), (1e6, "1.00 s"), (9e9, "9000 s")],
)
def test_times_have_a_unit_and_three_digits(us, text):
    assert time_text(us) == text


def test_ratios_and_percentages_handle_zero():
    assert ratio_text(3, 2) == "1.50x" and ratio_text(1002, 1000) == "1.002x"
    assert ratio_text(1, 0) == "-" == percent_text(1, 0)
    assert percent_text(1, 1000) == "<1 %" and percent_text(0, 10) == "0 %" and percent_text(1, 3) == "33 %"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/work/a/models/gpt.py:171:8 (_project)", "models/gpt.py:171 (_project)"),
        (r"C:\code\gpt.py:3 (f.<locals>.<lambda>)", "code/gpt.py:3 (f.<locals>.<lambda>)"),
        ("gpt.py:3", "gpt.py:3"),
        ("updated parameters", "updated parameters"),
        ("", "(no source line)"),
    ],
)
def test_source_lines_are_shortened(line, text):
    assert line_text(line) == text


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["0/params/attention/wq"], "attention/wq"),
        (["0/attention/wq", "0/attention/wk"], "attention/{wq,wk}"),
        (["0/layers/0/wq", "0/layers/1/wq"], "layers/wq"),
        (["mu/embed", "nu/embed"], "{mu,nu}/embed"),
        (["a/b", "c/d", "e/f"], "a/b +2"),
        ([f"block/a_long_name_{i}" for i in range(9)], "block/a_long_name_0 +8"),
        (["0"], "0"),
        ([""], "(the argument)"),
    ],
)
def test_label_of_several_paths(paths, text):
    assert label(paths) == text


def test_short_axis_names_are_distinct():
    leaf = Leaf("x", (2, 2, 2, 2), "float32", P(), ("a/k:0", "b/k:0", "c/q:1", "heads*c/q:2"))
    names = AxisNames(half_built(inputs=(leaf,)))
    assert names.list(leaf.axes) == "[a/k:0, b/k:0, q:1, heads*q:2]"
    assert len({names.short(name) for name in names.all}) == len(names.all)


def test_long_axis_names_are_shortened_in_the_middle_and_stay_distinct():
    long = "MultiHeadDotProductAttention_0/relative_position_bias"
    leaf = Leaf("x", (2, 2, 2), "float32", P(), (f"{long}:0", f"{long}:1.0*{long}:1.1", "heads"))
    names = AxisNames(half_built(inputs=(leaf,)))
    assert names.list(leaf.axes) == "[relative_position_bias:0, relative_position_bias:1.0*1.1, heads]"
    leaf = Leaf(
        "x", (2, 2), "float32", P(), tuple(f"{b}/{'very_' * 8}long/kernel:{n}" for b, n in (("a", 0), ("b", 0)))
    )
    names = AxisNames(half_built(inputs=(leaf,)))
    short = "very_very_very_v..._very_long/kernel:0"
    assert names.list(leaf.axes) == f"[a/{short}, b/{short}]"
    long = tuple(f"{'very_' * 8}long_{c}_{'very_' * 8}long/kernel:0" for c in "ab")  # equal if shortened
    names = AxisNames(half_built(inputs=(Leaf("x", (2, 2), "float32", P(), long),)))
    assert names.list(long) == f"[{long[0]}, {long[1]}]"


def test_the_table_keeps_the_ends_of_long_paths():
    leaf = Leaf("0/TransformerEncoderLayer_0/kernel", (2, 2), "float32", P(), ("a", "b"), "parameter")
    assert "  Transforme...er_0/kernel    16 B" in str(half_built(inputs=(leaf,)))


# the table


@pytest.mark.parametrize("words", REQUESTS)
def test_table_is_plain_text_of_a_page_width(words):
    text = str(planned(words))
    assert text.isascii() and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"\d[eE][+-]?\d|nan|inf\b", text)


def test_table_names_the_chosen_plan_and_the_next_best():
    plan = planned(None)
    text = str(plan)
    assert text.startswith(f"train_step on cpu:8: {mesh_text(plan)}\nplan: {plan.chosen}, the fastest of ")
    assert f"of {len(plan.candidates)} plans" in text
    distinct = sorted({(us, peak): name for name, us, peak in reversed(plan.candidates) if name != plan.chosen}.items())
    for (us, _), name in distinct[:3]:
        assert f"{name} {ratio_text(us, plan.estimate.step_time_us)}" in text
    assert "fsdp:2 tp:4 seq, as requested" in str(planned())


def test_verdict_counts_the_candidates_that_fit():
    plan = half_built(
        chosen="b", candidates=(("a", 1.0, 99.0), ("b", 2.0, 5.0), ("c", 3.0, 5.0)), limit_bytes=10.0,
        estimate=Estimate(2.0, 2.0, 0.0, 0.0, 5.0),
    )  # fmt: skip
    assert verdict(plan).sentence == "b, the fastest of 2 plans that fit 10 B (of 3)"
    assert [name for name, _, _ in verdict(plan).rivals] == ["c"]
    large = Estimate(2.0, 2.0, 0.0, 0.0, 11.0)
    none = plan.where(estimate=large, candidates=(("a", 1.0, 99.0), ("b", 2.0, 11.0)))
    assert verdict(none).sentence == "b, the smallest of 2 plans: none fits 10 B"
    assert verdict(plan.where(estimate=large)).sentence == "b, which does not fit 10 B"
    assert verdict(plan.where(estimate=large, candidates=())).sentence == "b, as requested; it does not fit 10 B"


def test_table_lists_mesh_axes_and_logical_axes_with_sizes():
    lines = str(planned()).splitlines()
    fsdp = next(line for line in lines if line.startswith("fsdp "))
    tp = next(line for line in lines if line.startswith("tp "))
    assert fsdp.split()[1] == "2" and "parameter, optimizer" in fsdp and fsdp.endswith("batch 16")
    assert tp.split()[1] == "4" and tp.index("ffn 128") < tp.index("heads 8") < tp.index("seq 16")
    assert any(line.startswith("not sharded in compute: ") and "embed 32" in line for line in lines)


def test_table_groups_inputs_with_sizes_and_specs():
    text = str(planned())
    line = next(line for line in text.splitlines() if "attention/{wk,wq}" in line)
    assert "x2" in line and "8.00 KiB  -> 1.00 KiB" in line  # two of 32 x 8 x 4 float32, sharded 8 ways
    assert re.search(r"\[embed, heads, \S+\] -> P\('fsdp', 'tp'\)$", line)
    assert "optimizer: 8 arrays, 56.1 KiB -> 7.06 KiB per device, sharded like the parameters" in text
    zero1 = str(planned("zero1:8"))
    assert "sharded like the parameters" not in zero1  # only the moments are sharded
    assert re.search(r"parameter: 8 arrays, 56\.1 KiB -> 56\.1 KiB", zero1)


def test_every_input_is_in_one_group():
    plan = planned()
    assert sorted(x.path for g in groups(plan, plan.inputs) for x in g.leaves) == sorted(x.path for x in plan.inputs)
    kinds = [{(x.axes, x.spec, x.role, x.shape, x.dtype) for x in g.leaves} for g in groups(plan, plan.inputs)]
    assert all(len(kind) == 1 for kind in kinds) and len({next(iter(kind)) for kind in kinds}) == len(kinds)


def test_table_compares_the_estimates_with_one_device():
    plan = planned()
    alone = plan.alone
    assert alone is not None
    text = str(plan)
    assert re.search(
        rf"peak +{bytes_text(plan.estimate.peak_memory_bytes)} +{bytes_text(alone.peak_memory_bytes)} ", text
    )
    assert re.search(rf"step +{time_text(plan.estimate.step_time_us)} +{time_text(alone.step_time_us)} ", text)
    exposed = plan.estimate.step_time_us - plan.estimate.compute_us
    assert f"{time_text(exposed)} not hidden by compute" in text
    assert "of the limit of 4.00 GiB" in text


def test_table_lists_traffic_with_source_lines():
    plan = planned()
    text = str(plan)
    assert f"each device sends {bytes_text(plan.estimate.comm_bytes)}" in text
    assert "sharding/example_step.py:" in text and "(loss_of)" in text and "/tests/" not in text
    shown = text[text.index("traffic per step:") :].splitlines()[1:]
    assert len(shown) <= 9 and re.match(r" +and \d+ smaller ones", shown[-1])
    assert "traffic: none" in str(autoshard.plan(train_step, *shapes(), target="cpu:1"))


def test_table_lists_unknown_primitives_and_notes():
    plan = planned().where(unknown={"cholesky": ("/a/b/c.py:7:1 (f)",)}, notes=("seven is not divisible",))
    assert "no rule for primitive 'cholesky', at b/c.py:7 (f)" in str(plan)
    assert str(plan).endswith("note: seven is not divisible")


def test_unrolled_layers_share_one_line():
    def step(layers, x):
        for layer in layers:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    layer = {"up": jax.ShapeDtypeStruct((16, 64), "float32"), "down": jax.ShapeDtypeStruct((64, 16), "float32")}
    x = jax.ShapeDtypeStruct((32, 16), "float32")
    text = str(autoshard.plan(step, [layer] * 9, x, plan="fsdp:8", target="cpu:8"))
    assert re.search(r"^  up +x9 +36\.0 KiB", text, re.M), text


# explain


def test_explain_gives_the_logical_axis_and_the_storage():
    text = planned().explain("0/params/attention/wq")
    assert "parameter, float32[32, 8, 4], 4.00 KiB; 512 B per device" in text
    assert "-> P('fsdp', 'tp')" in text
    flat = re.sub(r"\s+", " ", text)
    assert "fsdp: shards dimension 0 (embed) 2 ways in storage only (ZeRO)" in flat
    assert re.search(
        r"tp: shards dimension 1 \(heads\) 4 ways: the first of \([^)]*heads[^)]*\) that this tensor has", flat
    )
    assert "stored over fsdp: cast to the compute dtype and gathered to P(None, 'tp') for each use" in flat


def test_explain_names_the_logical_axes_that_come_later():
    table = {"a": ["batch"], "b": ["heads", "embed"]}
    plan = autoshard.plan(train_step, *shapes(), mesh={"a": 2, "b": 4}, plan=table)
    flat = re.sub(r"\s+", " ", plan.explain("params/attention/wq"))
    assert (
        "b: shards dimension 1 (heads) 4 ways: the first of (heads, embed) that this tensor has; embed comes later"
        in flat
    )
    assert "a: not used: it shards batch, which this tensor lacks" in flat
    assert "none of which this tensor has" in plan.explain("loss")


def test_explain_names_the_size_that_does_not_divide():
    state, batch = shapes(batch=12, seq=16)
    both = autoshard.plan(train_step, state, batch, mesh={"a": 8}, plan={"a": ["batch", "seq"]})
    text = both.explain("1/x")
    assert "a: shards dimension 1 (seq) 8 ways: of (batch, seq), batch has size 12, not divisible by 8" in text
    with pytest.warns(AutoshardWarning, match="nothing is sharded"):
        one = autoshard.plan(train_step, state, batch, mesh={"a": 8}, plan={"a": ["batch"]})
    assert "a: not used: batch has size 12, not divisible by 8" in one.explain("1/x")
    assert "batch (12) is not divisible by mesh axes a (8)" in re.sub(r"\s+", " ", str(one))


def test_explain_names_fixed_shardings():
    plan = autoshard.plan(
        train_step, *shapes(), mesh={"a": 8}, plan={"a": ["batch"]}, fixed={"0/*/mlp/up": P("a")}, target="cpu:8"
    )
    flat = re.sub(r"\s+", " ", plan.explain("params/mlp/up"))
    assert "a: shards dimension 0 (embed) 8 ways: fixed by the user, or as the array was already sharded" in flat


def test_explain_takes_ends_of_paths_and_globs():
    plan = planned()
    assert plan.explain("wq").startswith("0/params/attention/wq\n")  # the parameter takes precedence
    assert plan.explain("/moments/attention/wq").startswith("0/moments/attention/wq\n")
    text = plan.explain("*/mlp/*")
    assert all(f"{tree}/mlp/{name}" in text for tree in ("params", "moments") for name in ("up", "down"))
    assert plan.explain("*/attention/w[kq]").count("the same for 1 more: ") == 2  # parameters, moments
    assert plan.explain("1/loss").startswith("1/loss\n  result, float32[]")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("attention/wz", r"no input or result is called 'attention/wz'. Similar paths: .*attention/w"),
        ("mlp/upp", "Similar paths: 0/params/mlp/up|Similar paths: 0/moments/mlp/up"),
        ("*nothing*", r"no input or result.*There are 0/count"),
        ("", "no input or result is called ''"),
    ],
)
def test_explain_suggests_similar_paths(path, message):
    with pytest.raises(PlanError, match=message):
        planned().explain(path)


def test_explain_rejects_an_ambiguous_end_of_a_path():
    leaves = tuple(Leaf(f"{k}/scale", (4,), "float32", P(), ("embed",), "parameter") for k in "abc")
    with pytest.raises(PlanError, match="'scale' is the end of 3 paths: a/scale, b/scale, c/scale. Give a longer path"):
        half_built(inputs=leaves).explain("scale")


def test_explain_shows_traffic_if_the_function_is_known():
    assert "all-gather of the tensor over fsdp" in planned().explain("mlp/up")
    assert "bind the plan to its function" in unbound().explain("mlp/up")
    assert "all-gather of the tensor over dp" not in planned("dp:8").explain("mlp/up")
    assert re.search(r"(all-reduce|reduce-scatter) of its gradient over dp", planned("dp:8").explain("mlp/up"))
    zero1 = planned("zero1:8").explain("mlp/up")
    assert re.search(r"all-gather of the tensor over zero1, 14\.0 KiB, once updated", zero1)


@pytest.mark.parametrize("words", ["dp:8", "zero1:8", "fsdp:8"])
def test_traffic_of_parameters_sums_to_the_traffic_of_the_plan(words):
    """Under data parallelism, nearly all traffic is of parameters and gradients, each counted once."""
    plan = planned(words)
    own = sum(
        sum(traffic_of(bound_or_error(plan.bound), i).values())
        for i, x in enumerate(plan.inputs)
        if x.role == "parameter"
    )
    assert 0.97 * plan.estimate.comm_bytes <= own <= plan.estimate.comm_bytes * 1.0001


# diff


def test_diff_of_the_same_plan():
    assert planned().diff(unbound()) == "the same plan"
    assert planned().diff(planned()) == "the same plan"


def test_diff_lists_changes_with_ratios():
    a, b = planned("dp:8"), planned("fsdp:2 tp:4 seq")
    text = a.diff(b)
    assert text.startswith("dp:8 -> fsdp:2 tp:4 seq\n")
    flat = re.sub(r" +", " ", text)
    assert "mesh dp 8 = 8 devices -> fsdp 2 x tp 4 = 8 devices" in flat
    assert "rule of dp batch -> -" in flat and "rule of fsdp - -> batch" in flat
    assert "storage of parameter - -> fsdp" in flat
    assert "input {x,y} x2: P('dp') -> P('fsdp', 'tp')" in flat
    assert "input attention/wk +3 x8: P() -> P('fsdp', 'tp')" in flat  # wq, wk, wv, mlp/up and their moments
    ratio = ratio_text(b.estimate.peak_memory_bytes, a.estimate.peak_memory_bytes)
    assert re.search(rf"peak memory .* -> .* {re.escape(ratio)}$", flat, re.M)
    assert "result" not in flat  # returned state is sharded like its input; the loss is replicated in both


def test_one_difference_is_one_line():
    plan = planned()
    changed = [x if x.path != "1/x" else Leaf(x.path, x.shape, x.dtype, P("tp"), x.axes, x.role) for x in plan.inputs]
    lines = plan.diff(plan.where(inputs=tuple(changed))).splitlines()[1:]
    assert lines == ["  input x: P('fsdp', 'tp') -> P('tp')"]
    lines = plan.diff(plan.where(target="v5e:2x4")).splitlines()[1:]
    assert [line.split() for line in lines] == [["target", "cpu:8", "->", "v5e:2x4"]]


def test_diff_of_different_programs():
    wide = autoshard.plan(train_step, *shapes(width=64), plan="fsdp:2 tp:4 seq", target="cpu:8")
    assert "input mlp/up x2: float32[32, 128] -> float32[64, 128]" in planned().diff(wide)
    other = autoshard.plan(
        lambda a, b: a @ b, np.ones((8, 8), "f4"), np.ones((8, 8), "f4"), target="cpu:8", plan="dp:8"
    )
    text = planned().diff(other)
    assert "inputs only in the first: 0/count" in text and "inputs only in the second: 0, 1" in text


# page


class Reader(HTMLParser):
    """Check that tags are balanced, and collect text and attributes."""

    VOID = frozenset({"meta", "rect", "path", "br", "input", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.attributes, self.counts = [], [], set(), [], Counter()

    def tags_of(self, tag):
        return self.counts[tag]

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.counts[tag] += 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("words", REQUESTS)
def test_page_lists_every_input_and_axis(tmp_path, words):
    plan = planned(words)
    plan.to_html(tmp_path / "plan.html")
    found = read((tmp_path / "plan.html").read_text(encoding="utf-8"))
    text = set(found.text)
    assert {x.path for x in (*plan.inputs, *plan.outputs, *plan.activations)} <= set(
        re.split(r"[\n,]", "\n".join(text))
    )
    assert {g.label for g in groups(plan, plan.inputs)} <= text
    names = AxisNames(plan)
    assert {names.short(name) for name in names.all} <= text
    assert {f"{a} {n}" for a, n in mesh_sizes(plan).items()} | {t[0] for t in plan.traffic} <= text
    assert {bytes_text(plan.estimate.peak_memory_bytes), time_text(plan.estimate.step_time_us)} <= text
    assert {"Memory per device", "Step time", "Collectives per step"} <= text
    assert ("Search" in text) == (words is None)


def test_page_makes_no_external_request():
    html = page(planned(None))
    found = read(html)
    assert not found.tags & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [value for name, value in found.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert not re.search(r"https?:|url\(|@import", html)
    assert html.count("<script") == 1 and html.count(DIGEST) == 1  # the policy allows no other script
    assert len(html) < 200_000


def test_style_sheet_is_well_formed():
    assert STYLE.count("{") == STYLE.count("}") > 40
    assert all(line.count('"') % 2 == 0 for line in STYLE.splitlines())  # a multi-line string disables the rest
    defined, used = set(re.findall(r"(--[a-z]+):", STYLE)), set(re.findall(r"var\((--[a-z]+)\)", STYLE))
    html = page(planned(None))
    assert used == defined and {"--h", "--s"} <= used  # set for each axis
    classes = {name for value in re.findall(r'class="([^"]+)"', html) for name in value.split()}
    style = html[: html.index("</style>")]
    assert {name for name in classes if not re.search(rf"\.{name}\b", style)} <= {"tensor", "v0", "fit"}


def test_page_draws_the_mesh():
    assert page(planned()).count("<rect data-d=") + page(planned()).count('<rect class="on" data-d=') == 2 * 8
    large = half_built(mesh=abstract_mesh({"dp": 64, "tp": 32}))
    html = page(large)
    assert html.count(" data-d=") == 2 * 1024 and "The first 1024 of 2048 devices are drawn" in html


def test_page_escapes_names_from_programs():
    evil = "<script>&\"'"
    leaf = Leaf(evil, (8,), "float32", P("dp"), (f"{evil}:0",), "parameter")
    plan = half_built(
        **dict.fromkeys(("function", "target", "chosen"), evil),
        mesh=abstract_mesh({"dp": 8}),
        axis_rules={"dp": (evil,)},
        inputs=(leaf,),
        traffic=((evil, evil, 8.0, evil),),
        unknown={evil: (evil,)},
        notes=(evil,),
        candidates=((evil, 1.0, 2.0), ("other", 2.0, 3.0)),
    )
    found = read(page(plan))
    assert found.tags_of("script") == 1
    assert evil in "".join(found.text)


def test_page_marks_a_plan_that_does_not_fit():
    plan = planned(None)
    assert "over the limit" not in page(plan)
    small = plan.where(limit_bytes=plan.estimate.peak_memory_bytes - 1)
    assert "1 B over the limit" in "".join(read(page(small)).text)


# robustness


def half_built(**fields):
    start = dict(mesh=abstract_mesh({}), axis_rules={}, storage={}, inputs=(), outputs=(),
                 estimate=Estimate(0, 0, 0, 0, 0), target="")  # fmt: skip
    return Plan(**(start | fields))  # type: ignore[arg-type]


def all_of(plan):
    texts = [repr(plan), str(plan), format(plan), f"{plan}", page(plan), plan.diff(plan), plan.diff(half_built())]
    texts += [half_built().diff(plan), plan.to_json()]
    texts += [plan.explain(leaf.path) for leaf in (*plan.inputs, *plan.outputs) if leaf.path.strip("/")]
    assert all(isinstance(text, str) and text for text in texts)
    for made in (copy.copy(plan), copy.deepcopy(plan)):
        assert str(made) == str(plan)


@pytest.mark.parametrize("words", REQUESTS)
@pytest.mark.parametrize("make", [planned, unbound])
def test_all_reports_of_real_plans(words, make):
    all_of(make(words))


NAMES = st.sampled_from(["batch", "embed", "heads*groups", "0/params/wq:1", "1", "", "*", "a/b/", "é"])
AXES = st.sampled_from(["dp", "tp", "pp"])
BYTES = st.one_of(st.floats(0, 1e20), st.just(math.inf), st.just(math.nan))
ENTRIES = st.one_of(st.none(), AXES, st.lists(AXES, min_size=1, max_size=2, unique=True).map(tuple))


def each_axis_once(spec):
    axes = [axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)]
    return len(axes) == len(set(axes))


@st.composite
def leaves(draw):
    spec = draw(st.lists(ENTRIES, max_size=3).filter(each_axis_once))
    return Leaf(
        draw(st.sampled_from(["x", "0/a/w", "1/b/w", "0/3", "//", ""])),
        tuple(draw(st.lists(st.integers(0, 9), max_size=4))),
        draw(st.sampled_from(["float32", "bfloat16", "key<fry>", "int4", "float0", "no such type"])),
        P(*spec),
        tuple(draw(st.lists(NAMES, max_size=4))),
        draw(st.sampled_from(["parameter", "optimizer", "data", "other", ""])),
    )


@st.composite
def estimates(draw):
    kinds = st.dictionaries(st.sampled_from(["parameter", "temporary", "other", "new"]), BYTES)
    step, compute, comm, moved, peak = (draw(BYTES) for _ in range(5))
    return Estimate(step, compute, comm, moved, peak, draw(kinds))


@st.composite
def histories(draw):
    tried = st.builds(PricedPlan, st.sampled_from(["dp:8", "tp:8"]), BYTES, BYTES, BYTES, st.just("all-gather"), BYTES)
    some = st.lists(tried, max_size=3).map(tuple)
    return tuple(SearchRecord({"remat": "none"}, 4, 1, 1, found) for found in draw(st.lists(some, max_size=2)))


@st.composite
def odd_plans(draw):
    axes = draw(st.dictionaries(AXES, st.integers(1, 40)))
    return half_built(
        mesh=abstract_mesh(axes),
        axis_rules=draw(st.dictionaries(AXES, st.lists(NAMES, max_size=3).map(tuple))),
        storage=draw(
            st.dictionaries(st.sampled_from(["parameter", "optimizer"]), st.lists(AXES, max_size=2).map(tuple))
        ),
        inputs=tuple({x.path: x for x in draw(st.lists(leaves(), max_size=3))}.values()),
        outputs=tuple({x.path: x for x in draw(st.lists(leaves(), max_size=2))}.values()),
        estimate=draw(estimates()),
        alone=draw(st.one_of(st.none(), estimates())),
        links=draw(st.dictionaries(AXES, st.tuples(st.sampled_from(["ring", "new"]), BYTES), max_size=2)),
        topology=tuple(draw(st.lists(st.tuples(AXES, st.integers(1, 4)), max_size=3))),
        activations=tuple(Activation(**vars(x), held_bytes=draw(BYTES)) for x in draw(st.lists(leaves(), max_size=2))),
        history=draw(histories()),
        variant=draw(st.sampled_from([{}, {"remat": "none"}])),
        traffic=tuple(draw(st.lists(st.tuples(st.just("all-reduce"), AXES, BYTES, st.text(max_size=9)), max_size=3))),
        unknown=draw(
            st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=2).map(tuple), max_size=2)
        ),
        chosen=draw(st.sampled_from(["", "dp:8"])),
        candidates=tuple(draw(st.lists(st.tuples(st.sampled_from(["dp:8", "tp:8"]), BYTES, BYTES), max_size=3))),
        axis_sizes=draw(st.dictionaries(NAMES, st.integers(0, 9), max_size=3)),
        limit_bytes=draw(st.one_of(st.just(0.0), BYTES)),
    )


@given(odd_plans())
def test_all_reports_of_random_plans(plan):
    all_of(plan)
    read(page(plan))
