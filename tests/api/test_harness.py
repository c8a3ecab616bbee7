"""A run as a model of lm-evaluation-harness, with the harness's base class or a stand-in."""

import abc
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toys.scored import LONGEST, Letters, logs, params, program, run
from turns import slow

import jaxptd
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.run.generator import Generator, Sampling

END = ByteTokenizer.end_of_document


class Base(abc.ABC):
    """Members that the harness requires of a model."""

    def __init__(self) -> None:
        self._rank = 0

    @abc.abstractmethod
    def loglikelihood(self, requests: Any) -> Any: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: Any) -> Any: ...

    @abc.abstractmethod
    def generate_until(self, requests: Any) -> Any: ...


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> type:
    if importlib.util.find_spec("lm_eval"):
        from lm_eval.api.model import LM

        return LM
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = Base  # type: ignore[attr-defined]
    return Base


def asked(*requests: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in requests]


def log_likelihood(given: list[int], text: str) -> float:
    """Log-likelihood of a text after given ids, computed in numpy on one device."""
    ids = [*text.encode()]
    rows = logs([*given, *ids][:-1])[len(given) - 1 :]
    return sum(float(row[token]) for row, token in zip(rows, ids, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", slow("dp=2 ep=2 tp=2")])
def test_log_likelihoods_of_texts(layout: str, base: type) -> None:
    model = jaxptd.lm_eval_model(run(layout))
    assert isinstance(model, base) and model._rank == 0
    assert model.tokenizer_name == "bytes"
    texts = [("the ", "cat"), ("", "cat"), ("a b", " c")]
    found = model.loglikelihood(asked(*texts))
    direct = [
        log_likelihood([*b"the"], " cat"),
        log_likelihood([END], "cat"),
        log_likelihood([*b"a b"], " c"),
    ]
    np.testing.assert_allclose([each for each, _ in found], direct, rtol=2e-5)
    assert {type(likeliest) for _, likeliest in found} == {bool}


@pytest.mark.slow
def test_a_whole_text_is_scored_in_windows(base: type) -> None:
    long = "one two three four five"  # 23 tokens
    found = jaxptd.lm_eval_model(run()).loglikelihood_rolling(asked(("short",), (long,), ("",)))
    last = log_likelihood([*long[6:LONGEST].encode()], long[LONGEST:])
    direct = [log_likelihood([END], "short"), log_likelihood([END], long[:LONGEST]) + last, 0.0]
    np.testing.assert_allclose(found, direct, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "dp=2 row=2 col=2"])
def test_generation_ends_at_a_stop(layout: str, base: type, monkeypatch) -> None:
    monkeypatch.setattr("jaxptd.run.generator.SHAPES", 4)
    model, prompt = jaxptd.lm_eval_model(run(layout)), "def f(x"  # 4 tokens, and 3 given
    ids = Generator(program(), 258, Sampling(temperature=0))(params(), [*prompt.encode()], 6)
    text = Letters().decode(ids[: ids.index(END)] if END in ids else ids)
    assert text.index(text[2]) == 2 and text.index(text[3]) == 3
    options = [{"max_gen_toks": 6}, {"max_tokens": 6, "until": text[3]}]
    options += [{"max_gen_toks": 6, "until": ["", "none", text[3], text[2:]]}]
    found = model.generate_until(asked(*((prompt, each) for each in options)))
    assert found == [text, text[:3], text[:2]]


def test_a_text_begins_with_the_token_that_is_named(base: type) -> None:
    model = jaxptd.lm_eval_model(run())
    assert model._split("", "b") == ([END], [98])
    with pytest.raises(UserError, match="begin='<x>' is not a token of data.tokenizer='bytes'"):
        jaxptd.lm_eval_model(run(), begin="<x>")
    begins = jaxptd.lm_eval_model(run(), begin="<s>")
    assert begins._split("a ", "b") == ([257, 97], [32, 98])
    assert begins._split("", "b") == ([257], [98])


def test_a_text_begins_as_the_tokenizer_says_and_not_twice(base: type, monkeypatch) -> None:
    monkeypatch.setattr("toys.scored.Letters.begin", (257,))
    model = jaxptd.lm_eval_model(run())
    assert model._split("a", "b") == ([257, 97], [98])
    assert model._split("", "b") == ([257], [98])
    assert model._begun([257, 97]) == [257, 97]


@pytest.mark.parametrize("context", ["", "a"])
def test_a_continuation_of_no_tokens_is_refused(base: type, context: str) -> None:
    message = r"asks for the likelihood of '' after '.*', which has no tokens; correct the task"
    with pytest.raises(UserError, match=message):
        jaxptd.lm_eval_model(run()).loglikelihood(asked((context, "")))


def test_what_is_not_done_is_refused(base: type) -> None:
    model = jaxptd.lm_eval_model(run())
    for options in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(UserError, match="set do_sample=False"):
            model.generate_until(asked(("a", {"max_gen_toks": 2, **options})))
    with pytest.raises(UserError, match="max_gen_toks=256 leaves no room .* use 1 to 15"):
        model.generate_until(asked(("a", {})))
    assert model.generate_until(asked(("a", {"max_gen_toks": 1, "do_sample": False})))


def test_an_id_that_the_model_does_not_know_is_refused(base: type) -> None:
    model = jaxptd.lm_eval_model(run())
    model._vocab_size = 98
    assert model._split("a", "a") == ([97], [97])
    with pytest.raises(
        UserError,
        match=r"text has id 98, but the model knows only 0 to 97; leave '.' out of",
    ):
        model._split("a", "b")


def test_without_the_harness_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"needs lm-evaluation-harness; .*pip install -e '\.\[lm-e"):
        jaxptd.lm_eval_model(run())
