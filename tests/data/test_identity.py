"""Identity of a run's data: what distinguishes it from other data."""

import numpy as np
import pytest

from jaxptd.data.batches import EACH, PLACES, Concatenated, change, identity_of

TOKENS = np.arange(100_000, dtype=np.uint16)
LONG = PLACES * EACH


def test_the_same_tokens_are_the_same_data_however_they_are_held():
    halves = Concatenated((TOKENS[:30_000], TOKENS[30_000:]))
    assert identity_of(TOKENS) == identity_of(halves) == identity_of(TOKENS.astype("<u4"))
    assert identity_of(TOKENS)["tokens"] == 100_000


@pytest.mark.parametrize("place", [0, 5, 50_000, 99_999])
def test_another_token_is_other_data(place):
    other = np.arange(LONG, dtype=np.uint32)
    changed = other.copy()
    changed[place % LONG] += 1
    assert identity_of(other) != identity_of(changed)


def test_what_has_changed_is_said():
    before = {"": identity_of(TOKENS)}
    assert change(before, before) is None
    assert change({"": identity_of(TOKENS[:-1])}, before) == (
        "data.source has 99,999 tokens now, and had 100,000"
    )
    assert change(before, {"": identity_of(TOKENS[:7])}) == (
        "data.source has 100,000 tokens now, and had 7"
    )
    assert change({"": identity_of(TOKENS + 1)}, before) == (
        "data.source has other tokens now (the text, tokenizer or chat template has changed) than"
    )
    mixture = {"web": identity_of(TOKENS), "code": identity_of(TOKENS[:9])}
    assert change(mixture, before) == "data.source has 2 sources, not 1"
    other = {"/b/web": mixture["web"], "/b/code": identity_of(TOKENS[:8])}
    assert change(other, mixture) == "data.source /b/code has 8 tokens now, and had 9"
