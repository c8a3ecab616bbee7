"""A run as Python code has it, after training or from its directory."""

from jaxptd.api.harness import lm_eval_model
from jaxptd.api.loading import from_hf, load
from jaxptd.api.run import Run, ShownState
