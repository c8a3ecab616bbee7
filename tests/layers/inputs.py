"""Models and inputs for the cases of the layers' contract."""

import dataclasses

import numpy as np
from contract import residual_spec
from jax.sharding import PartitionSpec as P
from moves import SCALE, WINDOW, B, D, F, K, N, T, V

from jaxptd.config import Latent, ModelConfig
from jaxptd.mesh import SAMPLE_AXES, Axis

MODEL = ModelConfig(
    num_layers=1, hidden_size=D, num_heads=N, ffn_hidden_size=F, seq_length=T, vocab_size=V
)
GPT = MODEL.block
POST = dataclasses.replace(MODEL, norm_order="post")
FULL = dataclasses.replace(MODEL, causal=False)
QWEN = dataclasses.replace(
    MODEL,
    family="qwen3",
    num_kv_heads=K,
    linear_bias="qkv",
    attention_scale=SCALE,
    window=WINDOW,
)
LATENT = dataclasses.replace(
    MODEL,
    num_layers=2,
    family="deepseek_v2",
    latent=Latent(q_rank=10, kv_rank=6, nope_size=5, rope_size=2, value_size=3),
    attention_scale=SCALE,
    window=WINDOW,
)
PLAIN_QUERIES = dataclasses.replace(LATENT, latent=Latent(0, 6, 5, 2, 7))
OLMO = dataclasses.replace(QWEN, qk_norm="whole")


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TOKENS = np.random.default_rng(3).integers(0, V, (B, T)).astype(np.int32)
PLACE_SPEC = P(SAMPLE_AXES, Axis.CP)
SAMPLES = np.arange(B, dtype=np.int32)
POSITIONS = np.arange(T, dtype=np.int32)
SEED = np.array([5, 6], np.uint32)


def place_specs(tensor_parallel):
    return residual_spec(tensor_parallel), P(SAMPLE_AXES), P(Axis.CP), P()


def dropping(rate: float) -> ModelConfig:
    return dataclasses.replace(MODEL, dropout=rate)
