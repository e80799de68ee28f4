"""Compiled programs are kept under pytest's own cache (`pytest --cache-clear` empties it)."""

import pytest


@pytest.fixture(autouse=True)
def compiled_programs(request, monkeypatch, tmp_path_factory):
    """Where these tests keep compiled programs."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("compiled") if cache is not None else tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv("AUTOSHARD_CACHE", str(folder))
