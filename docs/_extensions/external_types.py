"""Links from signatures to the types of other libraries, without their inventories, so that a build needs no network."""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

PYTHON = "https://docs.python.org/3/library"
JAX = "https://docs.jax.dev/en/latest"
FLAX = "https://flax.readthedocs.io/en/stable/api_reference"
NUMPY = "https://numpy.org/doc/stable/reference/generated"
PAGES = {
}
"""Full name of a type -> address of its documentation."""


def link(app: Sphinx, env: Any, node: addnodes.pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Links a type of another library to its page."""
    address = PAGES.get(node["reftarget"])
    if node.get("refdomain") != "py" or address is None:
        return None
    return nodes.reference("", "", contnode, internal=False, refuri=address, reftitle=node["reftarget"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the event."""
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
