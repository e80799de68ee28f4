"""The role of single backquotes in docstrings: code, which links to the public name that it spells, if there is one."""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

# Dotted names, and names of classes. A plain lower-case word is more often a parameter than a function.
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+|[A-Z]\w*")


class Soft(SphinxRole):
    """Code that is a link where the text is a public name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        code = nodes.literal(self.rawtext, self.text, classes=["code"])
        name = self.text.removesuffix("()")
        if not NAME.fullmatch(name):
            return [code], []
        reference = addnodes.pending_xref(
            self.rawtext, code, refdomain="py", reftype="obj", reftarget=name, refwarn=False, is_soft=True
        )
        reference["py:module"] = self.env.ref_context.get("py:module")
        reference["py:class"] = self.env.ref_context.get("py:class")
        return [reference], []


def keep_as_code(app: Sphinx, env: Any, node: addnodes.pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Leaves a text that is no public name as it is, without a warning."""
    return contnode if node.get("is_soft") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the role."""
    app.add_role("soft", Soft())
    app.connect("missing-reference", keep_as_code, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
