"""A run as Python code has it, after training or from its directory."""

from jaxptd.api.harness import lm_eval_model
from jaxptd.api.hugging_face import from_hf
from jaxptd.api.loading import load
from jaxptd.api.run import Run
from jaxptd.api.state import ShownState

__all__ = ["Run", "ShownState", "from_hf", "lm_eval_model", "load"]
