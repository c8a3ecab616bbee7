"""Weights to start from in an S3 store: slices by range requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hugging import gpt2_tensors, write_directory
from runs import TEXT
from safetensors import safe_open
from safetensors.numpy import save_file
from turns import slow

import jaxptd
from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd import Layout
from jaxptd.errors import UserError
from jaxptd.hf import stored_tensors
from jaxptd.hf.directory import Directory
from jaxptd.hf.stored_tensors import StoredTensors
from jaxptd.stores import StorePath, place
from jaxptd.train import main as train

URL = f"s3://{BUCKET}/models/m"


def at(name: str = "") -> StorePath:
    where = place(f"{URL}/{name}")
    assert isinstance(where, StorePath)
    return where


def upload(folder: Path) -> None:
    for file in filter(Path.is_file, sorted(folder.rglob("*"))):
        at().store.write(at(str(file.relative_to(folder))).key, file.read_bytes())


@pytest.mark.parametrize(("gap", "span"), [(0, 24), (40, 2**25), slow(0, 2**25)])
def test_slices_are_those_of_the_library(
    tmp_path: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch, gap: int, span: int
) -> None:
    monkeypatch.setattr(stored_tensors, "GAP", gap)
    monkeypatch.setattr(stored_tensors, "SPAN", span)
    draw = np.random.default_rng(0)
    kinds = (np.float64, np.float32, np.float16, stored_tensors.ml_dtypes.bfloat16, np.uint8)
    shapes = ((), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 4))
    tensors = {
        f"{np.dtype(kind).name}{shape}": np.asarray(draw.normal(9, 3, shape)).astype(kind)
        for kind, shape in zip(kinds, shapes, strict=True)
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    upload(tmp_path)
    stored = StoredTensors(at("m.safetensors"))
    file = safe_open(tmp_path / "m.safetensors", "np")
    assert stored.keys() == sorted(file.keys())
    for name, x in tensors.items():
        ours, theirs = stored.get_slice(name), file.get_slice(name)
        assert ours.get_shape() == theirs.get_shape()
        assert ours.get_dtype() == theirs.get_dtype()
        for _ in range(4):
            low = [draw.integers(0, n) for n in x.shape]
            high = [draw.integers(a, n) + 1 for a, n in zip(low, x.shape, strict=True)]
            part = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
            assert ours[part].tobytes() == np.asarray(x[part]).tobytes()
            assert ours[part].shape == x[part].shape
        assert np.array_equal(ours[(slice(None),) * x.ndim], x)
        if x.ndim:
            assert ours[2:2].shape == x[2:2].shape
            with pytest.raises(IndexError, match="only slices of step 1"):
                ours[::2]


def test_only_the_bytes_of_a_slice_are_read(
    tmp_path: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    save_file({"x": x}, tmp_path / "m.safetensors")
    upload(tmp_path)
    tensor = StoredTensors(at("m.safetensors")).get_slice("x")
    before = s3.sent
    tensor[16:32, :]
    assert s3.sent - before == 16 * 32 * 4
    tensor[16:32, 8:16]  # rows are short: read whole
    assert s3.sent - before == 2 * 16 * 32 * 4
    monkeypatch.setattr(stored_tensors, "GAP", 0)
    before = s3.sent
    tensor[16:32, 8:16]
    assert s3.sent - before == 16 * 8 * 4


@pytest.mark.parametrize("shards", [slow(1), 3])
def test_a_directory_in_a_store_is_that_on_a_disk(tmp_path: Path, s3: Faults, shards: int) -> None:
    folder = write_directory(tmp_path / "m", gpt2_tensors(), shards=shards)
    upload(folder)
    local, stored = (jaxptd.from_hf(each, layout=Layout(tp=2)) for each in (folder, URL))
    assert local.config.model == stored.config.model
    for name, x in local.state["params"].items():
        assert np.array_equal(x, stored.state["params"][name])
    for tensor in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        assert Directory(URL).shapes[tensor] == Directory(folder).shapes[tensor]


@pytest.mark.slow
def test_a_run_starts_from_a_url(
    tmp_path: Path, s3: Faults, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(0, 0.3, (257, 12)).astype(np.float32)
    tensors = gpt2_tensors() | {"transformer.wte.weight": table}
    upload(write_directory(tmp_path / "m", tensors, vocab_size=257))
    (tmp_path / "text.txt").write_text(TEXT)
    options = {
        "from": URL,
        "data.source": tmp_path / "text.txt",
        "data.tokenizer": "bytes",
        "train.run_dir": f"s3://{BUCKET}/run",
        "train.platform": "cpu",
        "train.sample_tokens": 0,
        "train.eval_every": 0,
        "train.steps": 1,
    }
    assert train([f"--{name}={value}" for name, value in options.items()]) == 0
    assert f"starting from the weights of {URL}" in capfd.readouterr().out
    base = at().store.read(f"{BUCKET}/run/base/config.json")
    assert json.loads(base)["model_type"] == "gpt2"


def test_a_tokenizer_is_read_from_a_url(tmp_path: Path, s3: Faults) -> None:
    words = {"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = write_directory(tmp_path / "m", gpt2_tensors(), eos_token_id=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    upload(folder)
    for name, end in ((URL, 2), (f"{URL}/tokenizer.json", 1)):
        loaded = jaxptd.load_tokenizer(name)
        assert loaded.encode("world hello").tolist() == [3, 2]
        assert loaded.end_of_document == end
        assert loaded.name == f"{URL}/tokenizer.json"  # for messages, not that of the copy
    at().store.write(at("bad/tokenizer.json").key, b"{}")
    for name, words in (
        ("none", f"data.tokenizer='{URL}/none': it is a folder without tokenizer.json"),
        ("none.json", f"data.tokenizer='{URL}/none.json': no such file"),
        ("bad", f"data.tokenizer='{URL}/bad/tokenizer.json' is not a tokenizer.json"),
    ):
        with pytest.raises(UserError, match=words):
            jaxptd.load_tokenizer(f"{URL}/{name}")
    s3.requests.clear()
    jaxptd.load_tokenizer(f"{URL}/tokenizer.json")
    assert s3.of("GET") == [f"{BUCKET}/models/m/tokenizer.json"]  # and nothing beside it
    run = jaxptd.from_hf(URL)
    assert run.config.data.tokenizer == run.config.checkpoint.start == URL
    assert run.tokenizer.end_of_document == 2
    with pytest.raises(UserError, match="it is a folder without tokenizer.json"):
        jaxptd.load_tokenizer(f"{URL}/nothing")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:4], "no header of safetensors"),
        (lambda data: b"\xff" * 8 + data[8:], "no header of safetensors"),
        (lambda data: data[:-1], "which do not fit its shape"),
        (lambda data: data[:8] + b"x" * 20 + data[28:], "is damaged"),
        (lambda data: data.replace(b'"F32"', b'"F64"', 1), "do not fit its shape"),
    ],
)
def test_damaged_weights_are_one_line(tmp_path: Path, s3: Faults, damage: Any, words: str) -> None:
    folder = write_directory(tmp_path / "m", gpt2_tensors())
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    upload(folder)
    with pytest.raises(UserError, match=words) as caught:
        jaxptd.from_hf(URL)
    assert "\n" not in str(caught.value)
    assert f"{URL}/model.safetensors" in str(caught.value)


def test_what_is_no_model_is_refused(tmp_path: Path, s3: Faults) -> None:
    with pytest.raises(UserError, match=f"{URL} has no config.json"):
        jaxptd.from_hf(URL)
    folder = write_directory(tmp_path / "m", gpt2_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    upload(folder)
    with pytest.raises(UserError, match="only in pytorch_model.bin, a pickle"):
        jaxptd.from_hf(URL)
