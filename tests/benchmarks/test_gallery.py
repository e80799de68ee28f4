"""The gallery of plans: what it counts, and its pages."""

import json

import gallery
import gallery_pages
import pytest
from gallery_models import MODELS, TARGETS, TOKENS_PER_CHIP, command, gallery_workload

from autoshard.models import flops_per_token
from autoshard.models.workloads import WORKLOADS, workload
from autoshard.sharding.machines.targets import find_target


def test_every_chip_has_the_same_tokens():
    assert set(MODELS) <= set(WORKLOADS)
    for target in TARGETS:
        chips = find_target(target).devices // find_target(target).chip.cores
        assert chips == 256
        work = gallery_workload("llama3.1-8b", target)
        assert work.batch_size * work.config.context == TOKENS_PER_CHIP * chips
    assert command(work, "v5p:4x8x8") == (
        "autoshard plan llama3.1-8b --target v5p:4x8x8 --batch-size 512 --context 8192 --verify 0"
    )


def test_flops_of_a_step_are_those_of_the_model():
    work = workload("llama-tiny")
    tokens = work.batch_size * work.config.context
    assert gallery.step_flops(work) == pytest.approx(flops_per_token(work.config) * tokens, rel=0.1)


def test_the_pages_are_those_of_the_stored_figures(tmp_path):
    cells = json.loads(gallery.STORED.read_text())
    gallery_pages.write_pages(cells, tmp_path)
    assert {page.name for page in tmp_path.iterdir()} == {page.name for page in gallery_pages.PAGES.iterdir()}
    for page in tmp_path.iterdir():
        assert page.read_text() == (gallery_pages.PAGES / page.name).read_text(), "run benchmarks/gallery.py --pages"


def test_a_page_says_what_does_not_fit_and_what_was_compiled(tmp_path):
    cell = {
        "words": "fsdp:8", "remat": "full", "microbatches": 2, "problem": "", "batch_size": 16, "context": 32,
        "predicted": {"seconds": 2.0, "memory_bytes": 2**31, "host_bytes": 2**30, "limit_bytes": 2**34},
        "compiled": {"kind": "ok", "seconds": {"cycles": 1.5, "roofline": 0.5}, "memory_bytes": 2**32, "fits": True},
        "date": "2026-01-01", "command": "autoshard plan m", "least_seconds": 1.0, "text": ["head", "", "  more"],
    }  # fmt: skip
    too_large = cell | {"compiled": cell["compiled"] | {"fits": False}}
    none = cell | {"predicted": {}, "problem": "no plan fits 31.2 GiB", "text": [], "compiled": None}
    gallery_pages.write_pages({"m": {"one": cell, "two": none, "three": too_large}}, tmp_path)
    page = (tmp_path / "m.md").read_text()
    assert (
        "| one | 16 x 32 | `fsdp:8`, 2 microbatches | `full` | 2.0 GiB of 16.0, 1.0 GiB on the host | 2.00 s | 50% | "
        in page
    )
    assert "| 1.50 s / 500 ms | 4.0 GiB | 2026-01-01 |" in page
    assert "| 1.50 s / 500 ms | 4.0 GiB, does not fit | 2026-01-01 |" in page
    assert "no plan fits 31.2 GiB" in page
    assert "| [m](m.md) | 2.00 s<br>50% | does not fit |" in (tmp_path / "index.md").read_text()


def test_a_compiled_figure_stays_only_with_its_plan():
    stored = {"words": "fsdp:8", "remat": "full", "microbatches": 1, "batch_size": 8, "context": 16, "compiled": None}
    found = stored | {"options": {"some": "1"}}
    assert gallery._same_plan(found, stored)
    assert gallery._same_plan(found, stored | {"compiled": {"options": {"some": "1"}}})
    assert not gallery._same_plan(found, stored | {"compiled": {"options": {}}})
    assert not gallery._same_plan(found | {"remat": "none"}, stored)
