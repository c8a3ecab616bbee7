"""Log-likelihoods follow from the logits on every layout; each token of a text counts once."""

import functools

import numpy as np
import pytest
import tiny
from toys.scored import LONGEST, VOCAB, logs, params, program
from turns import slow

from jaxptd.api import harness
from jaxptd.api.harness import Question, Scorer, windows
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

LAYOUTS = ["dp=2 ep=2 pp=2", "ep=2 cp=2 zero=3", slow(""), slow("dp=2 row=2 col=2")]
LAYOUTS += [slow("dp=8"), slow("tp=4 dp=2 sequence_parallel=true"), slow("pp=2 cp=2 dp=2 zero=2")]
SIZES = [(1, 1), (3, 2), (2, 7), (20, 3), (1, 16), (9, 16), (4, 0), (5, 4)]


def questions() -> list[Question]:
    rng = np.random.default_rng(0)
    return [
        Question(rng.integers(0, VOCAB, a).tolist(), rng.integers(0, VOCAB, b).tolist())
        for a, b in SIZES
    ]


@functools.cache
def expected() -> list[tuple[float, bool]]:
    found = []
    for context, continuation in questions():
        text = [*context, *continuation][-LONGEST - 1 :]
        asked = logs(text[:-1])[len(text) - 1 - len(continuation) :] if continuation else []
        each = [row[token] for row, token in zip(asked, continuation, strict=True)]
        likeliest = [row.argmax() == token for row, token in zip(asked, continuation, strict=True)]
        found.append((sum(each), all(likeliest)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_score_is_the_log_softmax_of_the_logits(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "SHORTEST", 8)  # pads texts to 8, or to the model's 16
    monkeypatch.setattr(harness, "AT_ONCE", 32)  # batches of two such texts, or four of 8
    found = Scorer(program(layout))(params(layout), questions())
    for score, (log_likelihood, greedy) in zip(found, expected(), strict=True):
        np.testing.assert_allclose(score.log_likelihood, log_likelihood, rtol=2e-5)
        assert score.greedy == greedy
    assert len({round(score.log_likelihood) for score in found}) > 4


EXPERTS = "model.family=mixtral model.moe.num_experts=4 model.moe.top_k=2"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2 ep=2 zero=3", "ep=2 tp=2 sequence_parallel=true"])
def test_scores_of_experts_are_those_of_one_device(layout: str) -> None:
    asked = questions()
    one = Scorer(program(EXPERTS))(params(EXPERTS), asked)
    spread = f"{EXPERTS} {layout}"
    for score, expected in zip(Scorer(program(spread))(params(spread), asked), one, strict=True):
        np.testing.assert_allclose(score.log_likelihood, expected.log_likelihood, rtol=2e-5)
        assert score.greedy == expected.greedy


def test_the_likeliest_continuation_is_greedy_and_another_is_not() -> None:
    first = int(logs([5, 6])[-1].argmax())
    best = [first, int(logs([5, 6, first])[-1].argmax())]
    other = [best[0], (best[1] + 1) % VOCAB]
    asked = [Question([5, 6], best), Question([5, 6], other)]
    assert [score.greedy for score in Scorer(program())(params(), asked)] == [True, False]


def test_windows_ask_for_each_token_once_with_as_long_a_text_as_fits() -> None:
    asked = list(windows(range(10), -1, 4))  # the harness's example
    assert [(list(q.context), list(q.continuation)) for q in asked] == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    for count in range(12):
        ids = [*range(count)]
        asked = list(windows(ids, -1, 4))
        assert [token for q in asked for token in q.continuation] == ids
        for context, continuation in asked:
            text = [*context, *continuation]
            assert text == [-1, *ids][text[0] + 1 :][: len(text)]
            assert len(text) <= 5


def test_what_has_no_likelihood_is_refused() -> None:
    with pytest.raises(
        UserError, match="a continuation has 17 tokens, but the model takes 16; split"
    ):
        Scorer(program())(params(), [Question([1], [2] * 17)])
    with pytest.raises(UserError, match="model.family=bert does not continue text"):
        Scorer(tiny.program(Layout(), family="bert"))
