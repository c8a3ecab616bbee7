"""Leaves out what needs a package that no extra installs."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["one_device/torch_trainer.py"]
