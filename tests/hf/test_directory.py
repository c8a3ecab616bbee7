"""Directories that are damaged, pickled or of another model are refused in one line each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging import gpt2_tensors, write_directory

from jaxptd.errors import UserError
from jaxptd.hf.directory import Directory
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.read import sizes_of

ONE = "model.safetensors"
INDEX = f"{ONE}.index.json"
SHARD = "model-00002-of-00003.safetensors"


def refusal(folder: Path, ask: Callable[[Directory], Any]) -> str:
    with pytest.raises(UserError) as error:
        ask(Directory(folder))
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 600
    return line.replace(str(folder), "DIR")


def shapes(directory: Directory) -> dict[str, list[int]]:
    return directory.shapes


@pytest.fixture
def folder(tmp_path: Path, tensors) -> Path:
    return write_directory(tmp_path / "model", tensors, shards=3)


@pytest.fixture
def single(tmp_path: Path, tensors) -> Path:
    return write_directory(tmp_path / "model", tensors)


def test_headers_are_read(folder: Path, tensors) -> None:
    directory = Directory(folder)
    assert directory.shapes == {name: list(x.shape) for name, x in tensors.items()}
    assert set(directory.dtypes.values()) == {"F32"}


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere has no config.json; name a directory"):
        Directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\xff" * 8 + b"{}", b"\x05\0\0\0\0\0\0\0{'a':", b"\x02\0\0\0\0\0\0\0[]"],
    ids=["empty", "short", "huge header", "no JSON", "a list"],
)
def test_damaged_headers(single: Path, content: bytes) -> None:
    (single / ONE).write_bytes(content)
    assert refusal(single, shapes).startswith(f"DIR/{ONE} is damaged: ")


@pytest.mark.parametrize("change", [-1, -1000, 4])
def test_files_of_another_length_than_their_headers_say(single: Path, change: int) -> None:
    data = (single / ONE).read_bytes()
    (single / ONE).write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    assert refusal(single, shapes).startswith(f"DIR/{ONE} is damaged: ")


def test_headers_that_lie(single: Path) -> None:
    """Offsets outside the file, or that do not fit the shape."""
    data = (single / ONE).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for field in ({"data_offsets": [0, 2**40]}, {"shape": [2**40, 2**40]}, {"dtype": "X1"}):
        lie = json.dumps(header | {"lm_head.weight": header["transformer.wte.weight"] | field})
        text = lie.encode()
        (single / ONE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        assert refusal(single, shapes).startswith(f"DIR/{ONE} is damaged: "), field


def test_missing_shards_and_tensors(folder: Path) -> None:
    (folder / SHARD).unlink()
    assert refusal(folder, shapes).startswith(f"DIR/{SHARD} is missing, or no regular file; ")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != SHARD}
    index["weight_map"]["transformer.x"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert "transformer.x" not in shapes(Directory(folder))  # what is needed is looked for later


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", 3, None])
def test_an_index_names_files_beside_it_only(folder: Path, name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    assert refusal(folder, shapes).startswith(f"DIR/{INDEX} does not name a file beside it ")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": []}', '{"a": ' * 9999])
def test_broken_indexes(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert refusal(folder, shapes).startswith(f"DIR/{INDEX} ")


def test_of_a_tensor_in_two_files_the_last_counts(tmp_path: Path, tensors) -> None:
    """Whichever the index names, and though it does not name all, as in transformers."""
    name, other = "transformer.wte.weight", "transformer.wpe.weight"
    for file, table in (("a", tensors[name]), ("b", tensors[name] + 1)):
        write_directory(tmp_path, {name: table, other: tensors[other]})
        (tmp_path / ONE).rename(tmp_path / f"{file}.safetensors")
    index = {name: "a.safetensors", "transformer.x": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    directory = Directory(tmp_path)
    assert set(shapes(directory)) == {name, other}
    np.testing.assert_array_equal(directory.tensor(name)[:, :], tensors[name] + 1)


def test_a_single_file_goes_before_an_index(folder: Path, tensors) -> None:
    name = "transformer.wte.weight"
    write_directory(folder, {name: tensors[name] + 1})  # model.safetensors
    directory = Directory(folder)
    assert set(shapes(directory)) == {name}
    np.testing.assert_array_equal(directory.tensor(name)[:, :], tensors[name] + 1)


def test_pickles_are_refused_with_the_remedy(single: Path) -> None:
    (single / ONE).rename(single / "pytorch_model.bin")
    line = refusal(single, shapes)
    assert line.startswith("DIR has its weights in pytorch_model.bin only, a pickle, ")
    assert "save_pretrained" in line


def test_no_weights(single: Path) -> None:
    (single / ONE).unlink()
    assert refusal(single, shapes).startswith(f"DIR has neither {ONE} nor {INDEX}; ")


def test_integers_are_refused_by_name(tmp_path: Path, tensors) -> None:
    quantized = tensors | {"transformer.wte.weight": np.zeros((13, 12), np.int8)}
    folder = write_directory(tmp_path / "model", quantized)
    line = refusal(folder, lambda directory: directory.tensor("transformer.wte.weight"))
    assert line.startswith("DIR: transformer.wte.weight is of I8; use weights that are not quan")


def test_without_the_library(single: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    line = refusal(single, shapes)
    assert line == f"DIR/{ONE} needs the safetensors library; pip install 'jaxptd[hf]'"


# ---- config.json ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"model_type": "bloom"}, "DIR: model_type=bloom; use a model of gpt2, llama, mistral, "),
        ({"model_type": None}, "DIR: model_type=None; use a model of "),
        ({"model_type": ["gpt2"]}, "DIR: model_type=['gpt2']; use a model of "),
        ({"n_layer": "5"}, "DIR: n_layer=5; it must be a whole number above 0"),
        ({"n_embd": 12.0}, "DIR: n_embd=12.0; it must be a whole number above 0"),
        ({"n_head": 0}, "DIR: n_head=0; it must be a whole number above 0"),
        ({"n_head": 5}, "DIR: model.hidden_size=12 does not split over model.num_heads=5"),
        ({"n_inner": [1]}, "DIR: model.ffn_hidden_size=[1]: use a whole number or null"),
        ({"n_positions": None}, "DIR: positions=None; it must be a whole number above 0"),
        ({"activation_function": {}}, "DIR: activation_function={}; use a model with one of "),
        ({"scale_attn_weights": False}, "DIR: scale_attn_weights=False; use a model with scale_"),
        ({"quantization_config": {"bits": 4}}, "DIR: the weights are quantized; use those in full"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configs_of_no_such_model(tmp_path: Path, tensors, config: dict, line: str) -> None:
    folder = write_directory(tmp_path / "model", tensors, **config)
    assert refusal(folder, sizes_of).startswith(line)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x80"])
def test_broken_configs(single: Path, content: str) -> None:
    (single / "config.json").write_text(content, encoding="latin-1")
    assert refusal(single, sizes_of).startswith("DIR/config.json is ")


def test_the_file_decides_whether_the_head_is_tied(tmp_path: Path) -> None:
    for tied in (True, False):
        tensors = gpt2_tensors(tied=tied)
        folder = write_directory(tmp_path / str(tied), tensors, tie_word_embeddings=True)
        assert sizes_of(Directory(folder))["tie_embeddings"] is tied


@pytest.mark.parametrize("flag", [False, None])
def test_an_output_layer_that_is_not_tied_and_not_there_is_an_error(tmp_path, flag) -> None:
    folder = write_directory(tmp_path / "m", gpt2_tensors(), tie_word_embeddings=flag)
    line = refusal(folder, sizes_of)
    assert line.startswith("DIR has no lm_head.weight, and tie_word_embeddings is false; write it")


def test_whether_the_output_layer_is_tied_where_no_key_says_so() -> None:
    tied = {kind for kind, family in FAMILIES.items() if family.tied}
    assert tied == {"gpt2", "bert", "t5"}  # the defaults of transformers' configurations


@pytest.mark.parametrize("flag", [True, False, None])
def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path, flag: bool | None) -> None:
    """Unless `config.json` says that the two are apart."""
    tensors = gpt2_tensors(tied=False)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    keys = {} if flag is None else {"tie_word_embeddings": flag}
    folder = write_directory(tmp_path / "model", tensors, **keys)
    assert sizes_of(Directory(folder))["tie_embeddings"] is (flag is not False)
