"""How Sphinx builds the site: `make docs`. Every warning is an error there."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_extensions")]

project = "autoshard"
author = "The autoshard authors"
copyright = author  # noqa: A001  Sphinx gives the name
release = version = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "external_types",
    "public_names",
    "repository_pages",
    "soft_references",
]
root_doc = "index"
exclude_patterns = ["_*"]
nitpicky = True
# Types of internal modules, which some public signatures name, are text.
nitpick_ignore_regex = [("py:.*", r"autoshard\.\w+\.\w+\..*|BoundPlan|Options")]
suppress_warnings = ["config.cache"]

# Pages are Markdown. Headings have the anchors that the repository's web page gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# Signatures are short: names without their module, one parameter per line where a line does not hold them.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_class_signature = "mixed"
autodoc_type_aliases = {
    name: f"autoshard.sharding.{module}.{name}"
    for name, module in {
        "KernelWord": "program.kernel_records",
        "MeshLike": "machines.device_mesh",
        "OptionRequest": "machines.option_requests",
        "OverlapRequest": "plan.overlap_words",
        "PlanLike": "planner.planning",
        "Variants": "planner.variants",
    }.items()
}
napoleon_numpy_docstring = False
napoleon_use_ivar = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
default_role = "soft"

html_theme = "pydata_sphinx_theme"
html_title = "autoshard"
html_copy_source = False
html_show_sourcelink = False
templates_path = ["_templates"]
html_sidebars = {"**": ["all-pages"]}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "navbar_center": [],  # all pages are in the sidebar
    "collapse_navigation": False,
    "show_toc_level": 1,
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
