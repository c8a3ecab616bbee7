"""Causal language models of transformers, in the family of a config.

With `attn_implementation="sdpa"` a compiled model makes its own mask, since sequences might be
packed, but no fast kernel accepts a mask. Here that function is told that the mask is causal.
`benchmarks/one_device/test_one_device.py` compares loss and gradients with jaxptd's.
"""

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jaxptd.config import Config
from jaxptd.hf.sizes import config_json
from jaxptd.models.families import tokenizer_of

USES = ("torch", "transformers")
CAUSAL = "causal_sdpa"  # has no mask function, so no mask is made
transformers.AttentionInterface.register(CAUSAL, sdpa_attention_forward)


class CausalLM(nn.Module):
    """A model with its loss.

    It uses our loss, as the GPT-2 peer does: transformers' own casts all logits to float32 first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, T] -> mean cross-entropy, nats."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(config: Config) -> CausalLM:
    """The model of a config, with its own initial parameters in float32."""
    sizes = config_json(config.model, dtype="float32", tokenizer=tokenizer_of(config))
    wanted = transformers.AutoConfig.for_model(**sizes)
    return CausalLM(
        transformers.AutoModelForCausalLM.from_config(
            wanted, attn_implementation=CAUSAL, dtype=torch.float32
        )
    )
