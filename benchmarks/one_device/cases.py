"""The models and batches that `benchmarks.one_device` trains, and the FLOPs of a token."""

import dataclasses
import math

from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.models.families import work_of

VOCABULARY = 50304  # GPT-2's 50257, padded to a multiple of 128, for both trainers
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, warmup_steps=1, decay="constant")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch on one GPU.

    Args:
        config: for jaxptd's step, with bfloat16 matmuls and float32 masters.
        peer: the module `torch_PEER.py` that makes PyTorch's model.
    """

    config: Config
    peer: str

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.model.seq_length

    def flops(self, *, causal: bool) -> int:
        """FLOPs of a token: 6N + 12 L D T; causal: without what attention's mask hides.

        N counts the parameters of matrices; the table counts once, as the output layer. D is the
        width of all heads together.

        Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
        """
        model = self.config.model
        attention = 12 * model.num_layers * model.num_heads * model.block.head_size
        hidden = attention * model.seq_length // 2 if causal else 0
        return work_of(model).flops // model.seq_length - hidden


def gpt2(layers: int, hidden: int, heads: int, *, length: int, batch: int) -> Case:
    """GPT-2 with a batch of sequences of this length, unrolled layers and no recomputation."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "seq_length": length}
    model = ModelConfig(vocab_size=VOCABULARY, dtype="bfloat16", scan_layers=False, **sizes)
    train = TrainConfig(global_batch_size=batch)
    return Case(Config(model, optimizer=OPTIMIZER, train=train), "gpt2")


def published(name: str, options: str) -> Case:
    """A config of `configs/` on one GPU, with command line options."""
    alone = "--layout.dp=1 --layout.zero=0 --train.micro_batches=1 --model.attention=auto"
    config = load_config(name, [*alone.split(), *options.split()])
    return Case(dataclasses.replace(config, optimizer=OPTIMIZER), "transformers")


CASES = {
    "124m": gpt2(12, 768, 12, length=1024, batch=32),
    "350m": gpt2(24, 1024, 16, length=1024, batch=32),
    "774m": gpt2(36, 1280, 20, length=1024, batch=16),
    "1.5b": gpt2(48, 1600, 25, length=1024, batch=16),
    "2.5b": gpt2(54, 1920, 30, length=512, batch=16),
    "2.5b-2048": gpt2(54, 1920, 30, length=2048, batch=4),
    "qwen3-0.6b": published("qwen3-0.6b", "--model.seq_length=4096 --train.global_batch_size=4"),
    # As many of the 32 layers as fit on a GPU with their optimizer state.
    "llama3-8b-8-layers": published(
        "llama3-8b",
        "--model.num_layers=8 --model.remat=none --model.seq_length=4096 "
        "--train.global_batch_size=4",
    ),
}


def mfu(case: Case, seconds: float, peak: float, *, causal: bool) -> float:
    """The fraction of a GPU's FLOPs that a step of this many seconds uses."""
    return case.flops(causal=causal) * case.tokens / seconds / peak if peak else math.nan
