"""The HTML of a plan's page: content, escaping, security policy, style sheet."""

import re

import pytest
from jax.sharding import PartitionSpec as P

from autoshard._units import bytes_text, time_text
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.page import page
from autoshard.sharding.report.page.script import DIGEST
from autoshard.sharding.report.page.style import STYLE
from autoshard.sharding.report.summary import AxisNames, groups, mesh_sizes, path_text
from tests.sharding.report.html_reader import read
from tests.sharding.report.plans import REQUESTS, half_built, planned


@pytest.mark.parametrize("words", REQUESTS)
def test_page_lists_every_input_and_axis(tmp_path, words):
    plan = planned(words)
    plan.to_html(tmp_path / "plan.html")
    document = read((tmp_path / "plan.html").read_text(encoding="utf-8"))
    text = set(document.text)
    paths = {path_text(plan, x) for x in (*plan.inputs, *plan.outputs)} | {x.path for x in plan.activations}
    assert paths <= set(re.split(r"[\n,]", "\n".join(text)))
    assert {g.label for g in groups(plan, plan.inputs)} <= text
    names = AxisNames(plan)
    assert {names.short(name) for name in names.all} <= text
    assert {f"{a} {n}" for a, n in mesh_sizes(plan).items()} | {t[0] for t in plan.traffic} <= text
    assert {bytes_text(plan.estimate.peak_memory_bytes), time_text(plan.estimate.step_time_us)} <= text
    assert {"Memory per device", "Step time", "Collectives per step"} <= text
    assert ("Search" in text) == (words is None)


def test_page_makes_no_external_request():
    html = page(planned(None))
    document = read(html)
    assert not document.tags & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [value for name, value in document.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert all(value.startswith("#") for name, value in document.attributes if name == "href")
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
    document = read(page(plan))
    assert document.tags_of("script") == 1
    assert evil in "".join(document.text)


def test_page_marks_a_plan_that_does_not_fit():
    plan = planned(None)
    assert "over the limit" not in page(plan)
    small = plan.where(limit_bytes=plan.estimate.peak_memory_bytes - 1)
    assert "1 B over the limit" in "".join(read(page(small)).text)
