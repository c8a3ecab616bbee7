"""Attention of one block by cuDNN's fused kernel: NVIDIA GPUs, bfloat16, no dropout, no documents.

`jax.nn.dot_product_attention` cannot be used in a ring: it rounds the logsumexp and drops its
gradient. The primitives behind it can, but they are private to JAX: only this file uses them,
`PROVEN` lists the versions that work, and `tests/attention/test_cudnn.py` checks their types and
what they lower to.

Keys and values may have fewer heads than queries, and are read as they are: the kernel adds up what
each group of queries makes of their gradient.

Letters: B batch, T query position, S key position, N heads, H head size.
Limits: cuDNN 9 on Hopper.
"""

import dataclasses
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.attention.kernel import Dropout, Gradients, Saved, ScoreCoordinates, Scores

PROVEN = ("0.10.", "0.11.", "0.12.")


@cache
def _private() -> ModuleType | None:
    """JAX's module with the primitives, or None in a version without known ones."""
    if not jax.__version__.startswith(PROVEN):
        return None
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError:
        return None
    names = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper")
    return module if all(hasattr(module, name) for name in names) else None


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """cuDNN's kernel as a `Kernel`. `obstacle` and `unproven` say where it cannot be used."""

    @property
    def dropout(self) -> Dropout:
        return Dropout(0.0, lambda *_: jnp.ones((), bool))

    def within(self, limit: int) -> "Cudnn":
        """Implements `Kernel.within`: no scores are in memory."""
        return self

    def tile(self, side: int) -> int:
        """Implements `Kernel.tile`: cuDNN splits any square itself."""
        return side

    def fwd(
        self, q: Array, k: Array, v: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> tuple[Array, Array]:
        """Implements `Kernel.fwd`; o in the precision of q."""
        module: Any = _private()
        o_BTNH, lse_BNT = module._dot_product_attention_fwd_p_wrapper.bind(
            q, k, v, *_nothing(q), **_parameters(module, scores), is_training=True
        )
        return o_BTNH, lse_BNT.swapaxes(1, 2)

    def bwd(
        self, saved: Saved, do: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> Gradients:
        """Implements `Kernel.bwd`; gradients in the precision of q."""
        module: Any = _private()
        q, k, v, o, lse_BTN = saved
        dq, dk, dv = module._dot_product_attention_bwd_p_wrapper.bind(
            *(q, k, v, *_nothing(q), lse_BTN.swapaxes(1, 2), o, do.astype(q.dtype)),
            **_parameters(module, scores),
        )
        return Gradients(dq, dk, dv)


def _nothing(q: Array) -> list[Array]:
    """Empty arrays for bias, lengths, offsets and page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _parameters(module: Any, scores: Scores) -> dict[str, Any]:
    parameters = {
        "scale": scores.scale,
        "seed": 42,  # dropout is not used
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": module.MaskType.CAUSAL if scores.causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": scores.window,  # its own token and those before it
    }
    older = jax.__version__.startswith(("0.10.", "0.11."))
    return parameters if older else parameters | {"score_mod": None}


def unproven() -> str | None:
    """The reason why this version of JAX cannot use cuDNN's kernel; None if it can."""
    return None if _private() else f"jax {jax.__version__} is not one it is known to work with"
