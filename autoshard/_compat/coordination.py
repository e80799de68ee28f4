"""The key-value store of `jax.distributed`'s coordination service, shared by all processes of a run."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed


def publish_text(key: str, text: str, *, again: bool = False) -> None:
    """Stores a text under a key for all processes; with `again`, it may replace an existing text."""
    _coordination().key_value_set(key, text, allow_overwrite=again)


def delete_text(key: str) -> None:
    """Deletes the text under a key, if there is one."""
    _coordination().key_value_delete(key)


def texts_under(prefix: str) -> dict[str, str]:
    """Returns the texts whose keys start with a prefix, keyed by the rest of the key."""
    return {key[len(prefix) :]: text for key, text in _coordination().key_value_dir_get(prefix)}


def wait_for_text(key: str, timeout_s: float) -> str | None:
    """Waits for a text under a key and returns it, or None after `timeout_s` seconds."""
    try:
        return _coordination().blocking_key_value_get(key, int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _coordination() -> Any:
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return client
