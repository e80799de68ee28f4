"""docs/glossary.md explains every column and word of the reports."""

import re
from pathlib import Path

import pytest

from autoshard.sharding.layout.plan_request import FLAGS, KINDS
from autoshard.sharding.report.page.parts import KINDS as COLLECTIVES
from autoshard.sharding.report.plan_table import GLOSSARY
from autoshard.sharding.report.summary import ROLES
from tests.sharding.report.plans import planned

ROOT = Path(__file__).resolve().parents[3]
REQUESTS = (None, "fsdp:2 tp:4 seq")
TABLES = ("mesh axis", "memory per device", "step time (estimated)")  # the first columns of the tables of a text


def explained() -> set[str]:
    return set(re.findall(r"\*\*(.+?)\*\*", (ROOT / GLOSSARY).read_text(encoding="utf-8")))


def columns_of_text(text: str) -> set[str]:
    """Returns the headers of the tables, and the first words of their rows."""
    found: set[str] = set()
    for block in text.split("\n\n"):
        head, *rows = block.splitlines()
        if head.startswith(TABLES):
            found.update(re.split(r" {2,}", head))
        if head.startswith(TABLES[1:]):
            found.update(re.split(r" {2,}", row.strip())[0] for row in rows)
    return found


def columns_of_page(html: str) -> set[str]:
    cells = re.findall(r"<(?:th|dt)\b[^>]*>(.*?)</(?:th|dt)>", html, re.S)
    return {re.sub(r"<[^>]+>", "", cell).strip() for cell in cells} - {""}


@pytest.mark.parametrize("words", REQUESTS)
def test_every_column_is_in_the_glossary(words, tmp_path):
    plan = planned(words)
    text = columns_of_text(str(plan))
    assert {*TABLES, "size", "shards state of", "peak", "communication"} <= text
    plan.to_html(tmp_path / "plan.html")
    page = columns_of_page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert {"dimensions", "source line", "spans"} <= page
    assert (text | page) - explained() == set()


def test_words_of_strategies_roles_and_collectives_are_in_the_glossary():
    assert {*KINDS, *FLAGS, *ROLES, *COLLECTIVES} - explained() == set()


def test_the_names_of_logical_axes_are_in_the_glossary():
    source = (ROOT / "autoshard/sharding/axes/naming/axis_names.py").read_text(encoding="utf-8")
    names = set(re.findall(r"\"([a-z_]+)\"", source)) - {"data"}
    assert {"batch", "embed", "head_dim", "nodes", "microbatch"} <= names and names - explained() == set()


def test_the_last_line_of_a_plan_names_the_glossary():
    assert str(planned()).splitlines()[-1].endswith(GLOSSARY)
