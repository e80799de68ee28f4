"""Docstrings as autodoc reads them: in the form that people write them, which is close to Markdown.

reStructuredText wants a space after code (`Leaf` s), a double colon before an indented block, and backslashes before
asterisks of globs. Docstrings of attributes are text: napoleon would read "Sizes: of what" as a type and a text. It
writes the type of an attribute as a field, which Sphinx splits at commas; an option of the entry keeps it whole.
"""

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(?<![`\\])`([^`]+)`(?![`_])")
SEVERAL = re.compile(r"    (\w+(?:, \w+)+):(.*)")
ALIAS = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")
DEFAULT = re.compile(r"=\s*<[^<>]*>")
TEXT_KINDS = ("attribute", "data", "property")


def readable(lines: list[str]) -> list[str]:
    """The lines in reStructuredText."""
    return [*_with_literal_blocks(_with_closed_code("\n".join(lines)).split("\n"))]


def _with_closed_code(text: str) -> str:
    """Separates code from a letter that follows it, and keeps asterisks outside of code from starting emphasis."""
    parts = CODE.split(text)
    for position, part in enumerate(parts):
        if position % 2:
            follows = parts[position + 1]
            parts[position] = f"`{' '.join(part.split())}`" + ("\\ " if follows[:1].isalnum() else "")
        else:
            parts[position] = re.sub(r"(?<=[/\w\"])\*(?!\*)|\*(?=[/\"])", r"\\*", part)
    return "".join(parts)


def _with_literal_blocks(lines: list[str]) -> list[str]:
    """Marks indented blocks after a paragraph of the docstring itself as code."""
    result: list[str] = []
    for position, line in enumerate(lines):
        before = next((each for each in reversed(lines[:position]) if each.strip()), "")
        starts = line.startswith("    ") and position and not lines[position - 1].strip()
        if starts and before and not before.startswith((" ", ">>>")) and not before.endswith("::"):
            result += ["::", ""]
        result.append(line)
    return result


def _with_entries_of_each(lines: list[str]) -> list[str]:
    """Gives each name of `first, second: text` an entry of its own."""
    result: list[str] = []
    position = 0
    while position < len(lines):
        names = SEVERAL.match(lines[position])
        end = position + 1
        while end < len(lines) and lines[end].startswith("     "):
            end += 1
        for name in names[1].split(", ") if names else [""]:
            result += [f"    {name}:{names[2]}" if names else lines[position], *lines[position + 1 : end]]
        position = end
    return result


def _with_type_options(lines: list[str]) -> list[str]:
    """Makes `:type:` an option of the attribute's directive."""
    result: list[str] = []
    attribute = 0
    for line in lines:
        if line.startswith(".. attribute::"):
            attribute = len(result)
        if line.startswith("   :type: "):
            result.insert(attribute + 1, line)
        else:
            result.append(line)
    return result


class Docstrings:
    """The handlers before and after napoleon's."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def before(self, app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        """Makes the lines readable, and keeps those of an attribute."""
        lines[:] = self.text = readable(_with_entries_of_each(lines) if what == "class" else lines)

    def after(self, app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        """Gives an attribute its lines back."""
        if what in TEXT_KINDS:
            lines[:] = self.text
        elif what in ("class", "exception"):
            lines[:] = _with_type_options(lines)


def parsable(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Makes Python of a signature: of type aliases in unions, and of defaults that are `<factory>`."""
    signature, result = (text and DEFAULT.sub("=...", ALIAS.sub(r"~\1", text)) for text in (signature, result))
    return signature, result


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the handlers."""
    docstrings = Docstrings()
    app.connect("autodoc-process-docstring", docstrings.before, priority=300)
    app.connect("autodoc-process-docstring", docstrings.after, priority=600)
    app.connect("autodoc-process-signature", parsable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
