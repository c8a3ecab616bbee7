"""Where cuDNN's fused attention cannot be used, by the facts of a step. Imports no jax."""

from collections.abc import Collection


def obstacle(
    platform: str,
    dtype: str,
    *,
    head_sizes: Collection[int],
    dropout: float,
    documents: bool,
    window_in_ring: bool = False,
    bias: bool = False,
    capped: bool = False,
    capability: float = 9.0,
) -> str | None:
    """The reason why cuDNN's kernel cannot be used; None if it can.

    Args:
        platform: of the devices, as JAX names it.
        dtype: name of the precision of q, k and v.
        head_sizes: H of all layers.
        dropout: rate of dropout of the probabilities.
        documents: whether attention is restricted to a token's own document, or sees no padding.
        window_in_ring: whether a window ends within a block of another device's keys.
        bias: whether scores have a bias by distance.
        capped: whether they have a limit.
        capability: compute capability of the GPU.
    """
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, not {platform}"
    if capability < 8:
        return f"it needs a GPU of compute capability 8.0 or more, not {capability}"
    if dtype != "bfloat16":
        return f"it needs model.dtype=bfloat16, not {dtype}"
    largest = 256 if capability >= 9 else 128
    for size in head_sizes:
        if size % 8 or size > largest:
            return f"it needs a head size that is a multiple of 8, at most {largest}, not {size}"
    if dropout > 0:
        return f"it has no dropout (model.dropout={dropout})"
    if bias:
        return "scores have a bias by distance"
    if capped:
        return "scores have a limit (model.attention_softcap)"
    if documents:
        return "it keeps neither documents (data.documents=apart) nor padding apart"
    if window_in_ring:
        return "its windows begin at the queries' own block, not at another device's (model.window)"
    return None
