"""The stored figures of one GPU and their predictions."""

from types import SimpleNamespace

import gpu_attention
import gpu_experts
import gpu_formulations
import gpu_steps
import one_gpu
import pytest
from gpu_timing import Figure

ESTIMATE = SimpleNamespace(step_time_us=2e3, peak_memory_bytes=3 * 2**30)
NOT_PREDICTED = {"decoding", "loops"}


@pytest.fixture
def plans(monkeypatch):
    """Takes one estimate for all plans: planning is tested elsewhere."""
    made = SimpleNamespace(estimate=ESTIMATE)
    for module in (gpu_attention, gpu_experts):
        monkeypatch.setattr(module, "plan", lambda *args, **options: made)
    monkeypatch.setattr(gpu_steps, "_planned", lambda name, work, target: (None, made))
    monkeypatch.setattr(gpu_formulations, "_made", lambda name: None)
    monkeypatch.setattr(gpu_formulations, "_planned", lambda program, target: made)


def test_every_stored_figure_is_predicted_by_its_name(plans):
    content = one_gpu.with_predictions(one_gpu.stored(one_gpu.PATH))
    records = [record for body in content.values() for record in body["figures"]]
    alone = {r["case"] for r in records if "ratio" not in r and r["section"] not in NOT_PREDICTED}
    others = {case for case in alone if case.startswith(("Triton with blocks", "Mosaic"))}
    assert alone - others == {"product 8192 x 8192 x 8192 bfloat16, all ones"}
    for r in records:
        if "ratio" in r and r["section"] in ("attention", "experts", "steps", "formulations"):
            assert r["predicted"] == (3 if r["quantity"] == "memory" else 2)
            assert r["ratio"] == pytest.approx(r["predicted"] / r["measured"], rel=1e-3)


def test_a_new_figure_replaces_the_old_one_of_its_device():
    old = Figure("rates", "memory: copy", "rate", "GB/s", 1.0)
    content = one_gpu.with_figure({"other": {"figures": [1]}}, "NVIDIA H200", old)
    content = one_gpu.with_figure(content, "NVIDIA H200", Figure("rates", "memory: copy", "rate", "GB/s", 4219.87))
    (record,) = content["NVIDIA H200"]["figures"]
    assert record["measured"] == 4220 and content["other"] == {"figures": [1]}
