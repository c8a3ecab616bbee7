"""Values that have a field's type, or are converted to it."""

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
    """A choice as a user's script may define it."""

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
        (str | list[str], "a text or a list, each item a text"),
        (tuple[int, ...] | None, "a list, each item a whole number or null"),
        (Literal[0, 1], "one of 0, 1"),
        (bool, "true or false"),
        (Layout, "a Layout"),
    ],
)
def test_types_in_words(kind, words) -> None:
    assert describe(kind) == words


@pytest.mark.parametrize("name", ["s3://a/b", "S3://a", " gs://a", "hf://a/b", "host:/a", "u@h:/a"])
@pytest.mark.parametrize("as_path", [str, Path])
def test_an_address_is_no_path_as_a_text_or_as_a_path(name, as_path) -> None:
    """`Path("s3://a/b")` turns into `s3:/a/b`."""
    with pytest.raises(ImpossibleError, match="is an address, not a path; jaxptd reads and writes"):
        convert(as_path(name), str | list[str])


@pytest.mark.parametrize(
    "name", ["a:b/c", "/a:/b", "./s3:/a", "a b:/c", "runs/Foo$Bar", "a$b", "{a}"]
)
def test_paths_that_only_look_odd(name) -> None:
    assert convert(name, str) == name


@pytest.mark.parametrize(
    "part", ["${HOME}", "${oc.env:HOME}", "$HOME", "$(pwd)", "{{ run }}", "${"]
)
def test_nothing_in_a_text_is_replaced(part) -> None:
    for text in (part, f"{part}/x", f"runs/{part}"):
        with pytest.raises(ImpossibleError) as caught:
            convert(text, str)
        assert str(caught.value).startswith(part)
        assert " is not expanded here; write the value out" in str(caught.value)


def test_a_file_address_names_the_path() -> None:
    for address in ("file:///a/b", "file:/a/b", "FILE:///a/b"):
        with pytest.raises(ImpossibleError, match="write the path, /a/b"):
            convert(address, str)


def test_a_text_that_is_no_path_may_look_like_one() -> None:
    field = "https://schema.org/text"
    assert DataConfig(prompt_field=field).prompt_field == field
    assert DataConfig(prompt_field="~").prompt_field == "~"
