"""Renders the templates of batch scripts and manifests."""

from __future__ import annotations

import json
import shlex
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Return the text of a template.

    Args:
        template: Name of a file in `templates`.
        **values: The variables of the template. A missing one is an error.
    """
    environment = Environment(
        loader=PackageLoader("autoshard.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  the text is a shell script or YAML, not HTML
    )
    # JSON strings are YAML strings, except that JSON escapes some characters as surrogates, which YAML does not have.
    environment.filters["yaml"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["unexpanded"] = _unexpanded
    environment.filters["sh"] = shlex.quote
    return environment.get_template(template).render(**values)


def _unexpanded(text: str) -> str:
    """Return a text with $ escaped, so that Kubernetes does not expand references such as $(NAME)."""
    return text.replace("$", "$$")
