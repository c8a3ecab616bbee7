"""The identity of a run's data: a run that is resumed goes on with the data it began with.

A source has its number of tokens and a digest of some of them: files may be moved, copied or split,
but not grown, replaced or read with another tokenizer.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxptd.data.concatenated import Concatenated

PLACES, EACH = 16, 4096  # that a digest is made of: places, evenly spaced, and tokens at each

# Name of each source of a mixture, else "" -> its tokens and digest. Hosts may have other names.
Identity = Mapping[str, Mapping[str, Any]]


def identity_of(tokens: np.ndarray | Concatenated) -> dict[str, Any]:
    """The number of a source's tokens, and a digest of some of them."""
    count = len(tokens)
    digest = hashlib.sha256()
    for start in np.linspace(0, max(count - EACH, 0), PLACES).astype(np.int64).tolist():
        digest.update(np.asarray(tokens[start : start + EACH]).astype("<u4").tobytes())
    return {"tokens": count, "digest": digest.hexdigest()[:16]}


def change(now: Identity, before: Identity) -> str | None:
    """Says what has changed in the data, of the first source that differs; None for nothing."""
    if len(now) != len(before):
        return f"data.source has {len(now)} sources, not {len(before)}"
    for name, found, was in zip(now, now.values(), before.values(), strict=True):
        source = f"data.source {name}" if name else "data.source"
        if found == was:
            continue
        if found["tokens"] == was["tokens"]:
            return f"{source} has other tokens now (the text or the tokenizer has changed) than"
        return f"{source} has {found['tokens']:,} tokens now, and had {was['tokens']:,}"
    return None
