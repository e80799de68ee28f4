"""Links from signatures to the types of other libraries, without their inventories: a build needs no network."""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

PYTHON = "https://docs.python.org/3/library"
JAX = "https://docs.jax.dev/en/latest"
FLAX = "https://flax.readthedocs.io/en/stable/api_reference"
NUMPY = "https://numpy.org/doc/stable/reference/generated"
ABSTRACT = ("Callable", "Hashable", "Iterable", "Iterator", "Mapping", "Sequence")
PAGES = {
    **{f"collections.abc.{name}": f"{PYTHON}/collections.abc.html#collections.abc.{name}" for name in ABSTRACT},
    "datetime.datetime": f"{PYTHON}/datetime.html#datetime.datetime",
    "jax.P": f"{JAX}/jax.sharding.html#jax.sharding.PartitionSpec",
    "jax.sharding.PartitionSpec": f"{JAX}/jax.sharding.html#jax.sharding.PartitionSpec",
    "pathlib.Path": f"{PYTHON}/pathlib.html#pathlib.Path",
    "jax.jaxlib._jax.Array": f"{JAX}/_autosummary/jax.Array.html",
    "jax.Array": f"{JAX}/_autosummary/jax.Array.html",
    "jaxlib._jax.Array": f"{JAX}/_autosummary/jax.Array.html",
    "jax._src.mesh.Mesh": f"{JAX}/jax.sharding.html#jax.sharding.Mesh",
    "jax._src.mesh.AbstractMesh": f"{JAX}/jax.sharding.html#jax.sharding.AbstractMesh",
    "AbstractMesh": f"{JAX}/jax.sharding.html#jax.sharding.AbstractMesh",
    "jax._src.core.Primitive": f"{JAX}/jax.extend.core.html",
    "flax.nnx.module.Module": f"{FLAX}/flax.nnx/module.html#flax.nnx.Module",
    "flax.nnx.rnglib.Rngs": f"{FLAX}/flax.nnx/rnglib.html#flax.nnx.Rngs",
    "numpy.ndarray": f"{NUMPY}/numpy.ndarray.html",
    "tokenizers.Tokenizer": "https://huggingface.co/docs/tokenizers/api/tokenizer",
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
