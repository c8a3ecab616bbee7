"""Short text and HTML of what the package returns, for a terminal and for a notebook."""

from jaxptd.display.callable_module import callable_module
from jaxptd.display.settings import settings_html, settings_text
from jaxptd.display.tables import Table, html_of, preformatted
from jaxptd.display.units import bytes_text, count_text, gib_text

__all__ = [
    "Table",
    "bytes_text",
    "callable_module",
    "count_text",
    "gib_text",
    "html_of",
    "preformatted",
    "settings_html",
    "settings_text",
]
