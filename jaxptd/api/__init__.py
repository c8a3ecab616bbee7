"""Runs in Python code, after training or loaded from a directory."""

from jaxptd.api.harness import lm_eval_model
from jaxptd.api.loading import from_hf, load
from jaxptd.api.run import Run, ShownState
