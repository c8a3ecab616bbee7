"""Leaves out what needs packages that no extra installs."""

import importlib.util

NEEDS = {"torch": ("gpt2", "trainer", "transformers"), "transformers": ("transformers",)}
collect_ignore = [
    f"one_device/torch_{module}.py"
    for package, modules in NEEDS.items()
    if not importlib.util.find_spec(package)
    for module in modules
]
