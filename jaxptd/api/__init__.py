"""A run as Python code has it, after training or from its directory."""

from jaxptd.api.harness import lm_eval_model
from jaxptd.api.loading import from_hf, load
from jaxptd.api.run import Run
from jaxptd.api.state import ShownState

__all__ = ["Run", "ShownState", "from_hf", "lm_eval_model", "load"]
