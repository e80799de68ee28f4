"""The examples in docs/writing-rules.md run."""

import re
from pathlib import Path

import pytest

from autoshard.spmdrules.core import registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-rules.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def own_registry(monkeypatch):
    """Registers the rules of these examples in a copy of the registry."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def test_examples_run_in_order(own_registry):
    assert len(EXAMPLES) == 6
    names = {"__name__": "example"}
    for example in EXAMPLES:
        exec(compile(example, PAGE.name, "exec"), names)
