"""`print(plan)`: the table shows the plan, and its lines are short."""

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._columns import shorten_middle
from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.page import page
from autoshard.sharding.report.summary import mesh_text
from autoshard.sharding.report.tensor_labels import LABEL_WIDTH
from tests.sharding.example_step import shapes, train_step
from tests.sharding.report.plans import REQUESTS, half_built, planned


@pytest.mark.parametrize("words", REQUESTS)
def test_table_is_plain_text_of_a_page_width(words):
    text = str(planned(words))
    assert text.isascii() and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"\d[eE][+-]?\d|nan|inf\b", text)


def test_table_names_the_chosen_plan_and_the_next_best():
    plan = planned(None)
    text, priced = str(plan), sum(len(record.tried) for record in plan.history)
    assert text.startswith(f"train_step on cpu:8: {mesh_text(plan)}\nplan: {plan.chosen}, the fastest of ")
    assert f"of {priced} plans" in text and f"<b>{priced}</b> plans priced" in page(plan)
    assert priced > len(plan.candidates)  # local search priced further plans
    distinct = sorted({(us, peak): name for name, us, peak in reversed(plan.candidates) if name != plan.chosen}.items())
    for (us, _), name in distinct[:3]:
        assert f"{name} {ratio_text(us, plan.estimate.step_time_us)}" in text
    assert "fsdp:2 tp:4 seq, as requested" in str(planned())


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


def test_the_table_keeps_the_ends_of_long_paths():
    leaf = Leaf(f"0/{'Long' * 5}TransformerEncoderLayer_0/kernel", (2, 2), "float32", P(), ("a", "b"), "parameter")
    assert f"  {shorten_middle(leaf.path[2:], LABEL_WIDTH)}    16 B" in str(half_built(inputs=(leaf,)))


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
    table = text[text.index("traffic per step:") :].partition("\n\n")[0].splitlines()[1:]
    assert len(table) <= 9 and re.match(r" +and \d+ smaller ones", table[-1])
    assert "traffic: none" in str(autoshard.plan(train_step, *shapes(), target="cpu:1"))


def test_table_lists_unknown_primitives_and_notes():
    plan = planned().where(unknown={"cholesky": ("/a/b/c.py:7:1 (f)",)}, notes=("seven is not divisible",))
    assert "no rule for primitive 'cholesky', at b/c.py:7 (f)" in str(plan)
    assert "\nnote: seven is not divisible\n" in str(plan)


def test_unrolled_layers_share_one_line():
    def step(layers, x):
        for layer in layers:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    layer = {"up": jax.ShapeDtypeStruct((16, 64), "float32"), "down": jax.ShapeDtypeStruct((64, 16), "float32")}
    x = jax.ShapeDtypeStruct((32, 16), "float32")
    text = str(autoshard.plan(step, [layer] * 9, x, plan="fsdp:8", target="cpu:8"))
    assert re.search(r"^  layers/up +x9 +36\.0 KiB", text, re.M), text
