"""The models and batches that `benchmarks.one_device` trains, and the FLOPs of a token."""

import dataclasses
import math

from jaxptd.config import Config, ModelConfig, OptimizerConfig, TrainConfig

VOCABULARY = 50304  # GPT-2's 50257, made a multiple of 128, for both trainers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch on one GPU.

    Args:
        layers: L.
        hidden: D.
        heads: of attention.
        length: T.
        batch: sequences.
        unrolled: our layers are; else they are scanned.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    unrolled: bool

    @property
    def config(self) -> Config:
        """The config of jaxptd's step: bfloat16 products, float32 masters."""
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            seq_length=self.length,
            vocab_size=VOCABULARY,
            dtype="bfloat16",
            scan_layers=not self.unrolled,
        )
        optimizer = OptimizerConfig(learning_rate=1e-4, warmup_steps=1, decay="constant")
        return Config(model, optimizer=optimizer, train=TrainConfig(global_batch_size=self.batch))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def weights(self) -> int:
        """N: parameters of matrices; the table counts once, as the output layer."""
        return 12 * self.layers * self.hidden**2 + VOCABULARY * self.hidden

    def flops(self, *, causal: bool) -> int:
        """FLOPs of a token: 6N + 12 L D T; causal: without what attention's mask hides.

        Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
        """
        attention = 12 * self.layers * self.hidden * self.length
        return 6 * self.weights + (attention // 2 if causal else attention)


CASES = {
    "124m": Case(12, 768, 12, 1024, 32, unrolled=True),
    "350m": Case(24, 1024, 16, 1024, 32, unrolled=True),
    "774m": Case(36, 1280, 20, 1024, 16, unrolled=True),
    "1.5b": Case(48, 1600, 25, 1024, 16, unrolled=True),
    "2.5b": Case(54, 1920, 30, 512, 16, unrolled=True),
    "2.5b-2048": Case(54, 1920, 30, 2048, 4, unrolled=True),
}


def parameters(case: Case) -> int:
    """All parameters of a GPT-2, with biases, norms and positions."""
    layer = 12 * case.hidden**2 + 13 * case.hidden
    return case.layers * layer + (VOCABULARY + case.length + 2) * case.hidden


def mfu(case: Case, seconds: float, peak: float, *, causal: bool) -> float:
    """The fraction of a GPU's FLOPs that a step of this many seconds uses."""
    return case.flops(causal=causal) * case.tokens / seconds / peak if peak else math.nan
