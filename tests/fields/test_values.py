"""Values that are of a field's type, or become so."""

import enum
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from jaxptd.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.errors import UserError
from jaxptd.fields.values import ImpossibleError, OtherTypeError, convert, describe
from jaxptd.layout import Layout


class Choice(enum.StrEnum):
    """A choice as a script may have it."""

    RSA = "rsa"


@pytest.mark.parametrize(
    ("section", "name", "value", "found"),
    [
        (ModelConfig, "num_layers", np.int64(3), 3),
        (ModelConfig, "num_layers", np.uint8(3), 3),
        (ModelConfig, "dropout", 0, 0.0),
        (ModelConfig, "dropout", np.int32(0), 0.0),
        (ModelConfig, "dropout", np.float32(0.5), 0.5),
        (ModelConfig, "scan_layers", np.bool_(False), False),
        (ModelConfig, "vocab_size", None, None),
        (ModelConfig, "vocab_size", np.int64(300), 300),
        (ModelConfig, "dtype", np.str_("bfloat16"), "bfloat16"),
        (Layout, "ring", Choice.RSA, "rsa"),
        (Layout, "zero", np.int64(2), 2),
        (Layout, "stage_layers", [1, np.int64(2)], (1, 2)),
        (Layout, "stage_layers", np.array([1, 2]), (1, 2)),
        (DataConfig, "source", Path("a/b.txt"), "a/b.txt"),
        (DataConfig, "source", ("a", Path("b")), ["a", "b"]),
        (DataConfig, "source", {Path("b"): np.int64(1), "a": 0.5}, {"a": 0.5, "b": 1.0}),
        (DataConfig, "tokenizer", np.str_("bytes"), "bytes"),
        (OptimizerConfig, "learning_rate", 1, 1.0),
        (OptimizerConfig, "grad_clip", np.float64(2), 2.0),
        (TrainConfig, "run_dir", Path("runs") / "x", "runs/x"),
        (TrainConfig, "seed", 2**32 - 1, 2**32 - 1),
        (TrainConfig, "steps", 2**31 - 1, 2**31 - 1),
    ],
)
def test_a_value_becomes_a_plain_one_of_its_fields_type(section, name, value, found) -> None:
    kept = getattr(section(**{name: value}), name)
    assert (kept, type(kept)) == (found, type(found))
    if isinstance(found, list | tuple):
        assert [type(each) for each in kept] == [type(each) for each in found]


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_tilde_is_the_home_directory_in_every_path(as_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert TrainConfig(run_dir=as_path("~/runs")).run_dir == "/home/me/runs"
    assert DataConfig(source=[as_path("~/a"), "b/~"]).source == ["/home/me/a", "b/~"]
    assert DataConfig(source={as_path("~/a"): 1}).source == {"/home/me/a": 1}
    assert DataConfig(tokenizer=as_path("~")).tokenizer == "/home/me"
    assert Layout(schedule=as_path("~/mine.csv")).schedule == "/home/me/mine.csv"


@pytest.mark.parametrize("text", ["a b", "größe/文", "a\nb", "./~no-such-user/x", "a" * 255])
def test_other_texts_stay_as_they_are(text) -> None:
    assert convert(text, str) == text


@pytest.mark.parametrize("text", ["a" * 256, "ü" * 128, "a/" * 2048, "\0", "\ud800"])
def test_a_text_that_no_path_can_have(text) -> None:
    with pytest.raises(ImpossibleError):
        convert(text, str)


def test_a_home_directory_that_nobody_has_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"train.run_dir='~no-such-user/x': there is no home directory ~no-such-user;",
    ):
        TrainConfig(run_dir="~no-such-user/x")


def test_the_first_type_of_a_union_that_fits_is_taken() -> None:
    assert convert("a", str | list[str]) == "a"
    assert convert(["a"], str | list[str]) == ["a"]
    with pytest.raises(OtherTypeError):
        convert([3], str | list[str])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number or null"),
        (str | list[str], "a text or a list, each of them a text"),
        (tuple[int, ...] | None, "a list, each of them a whole number or null"),
        (Literal[0, 1], "one of 0, 1"),
        (bool, "true or false"),
        (Layout, "a Layout"),
    ],
)
def test_types_in_words(kind, words) -> None:
    assert describe(kind) == words
