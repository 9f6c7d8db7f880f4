"""Sphinx configuration of the documentation's site; `make docs` builds it."""

import sys
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER / "extensions"))

project = "torchrec-bls"
release = metadata.version(project)
copyright = "torchrec-bls contributors"
html_title = f"{project} {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_help",
    "repository_links",
]
exclude_patterns = ["extensions"]

myst_heading_anchors = 4  # as a forge makes them
myst_enable_extensions = ["deflist"]
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": "{{path}}"}
highlight_language = "none"  # of indented blocks; fenced ones name theirs

# Docstrings write `name` where reStructuredText wants ``name``.
default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

# The pages of sources, which are no external links.
linkcheck_ignore = [r"(\.\./)*files/"]
linkcheck_timeout = 20
