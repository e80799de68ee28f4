"""Fill in the templates of what schedulers read."""

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
        **values: What the template names. A name that is missing is an error.
    """
    environment = Environment(
        loader=PackageLoader("autoshard.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  the text is a shell script or YAML, not HTML
    )
    # A JSON text is a YAML text, except that YAML knows no surrogates, in which JSON escapes some characters.
    environment.filters["yaml"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["unexpanded"] = _unexpanded
    environment.filters["sh"] = shlex.quote
    return environment.get_template(template).render(**values)


def _unexpanded(text: str) -> str:
    """Return a text whose references $(NAME) Kubernetes does not expand."""
    return text.replace("$", "$$")
