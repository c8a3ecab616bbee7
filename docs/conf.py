"""Sphinx configuration."""

project = "jaxptd"
author = copyright = "jaxptd developers"

# Pages load nothing from a network: formulas are text, since equations would need a script.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

default_role = "code"  # docstrings write `names` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True}

copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # is not copied, and neither is output
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "jaxptd"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
