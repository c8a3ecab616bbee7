"""Damaged or pickled directories, and those of other models, are each refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging import gpt2_tensors, write_directory
from safetensors.numpy import load_file, save_file

from jaxptd.errors import UserError, install
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import remarks_of, sizes_of, sizes_without_weights

ONE = "model.safetensors"
INDEX = f"{ONE}.index.json"
NO_KEYS = {kind: {"model_type": kind} for kind in ("llama", "mistral", "qwen2", "qwen3")}
SHARD = "model-00002-of-00003.safetensors"


def refusal(folder: Path, ask: Callable[[Directory], Any]) -> str:
    with pytest.raises(UserError) as error:
        ask(Directory(folder))
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 600
    return line.replace(str(folder), "DIR")


def shapes(directory: Directory) -> object:
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
    """Offsets lie outside the file, or do not match the shape."""
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
    assert refusal(folder, shapes).startswith(f"DIR/{SHARD} is missing or not a regular file; ")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", 3, None])
def test_an_index_names_files_beside_it_only(folder: Path, name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    assert refusal(folder, shapes).startswith(f"DIR/{INDEX} does not name an existing file ")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": []}', '{"a": ' * 9999])
def test_broken_indexes(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert refusal(folder, shapes).startswith(f"DIR/{INDEX} ")


def test_an_index_says_nothing_but_files(folder: Path, tensors) -> None:
    """Tensors absent from all files may be tied to others, as in transformers."""
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {f"lm_head.{number}": file for number, file in enumerate(files)}
    (folder / INDEX).write_text(json.dumps(index))
    assert Directory(folder).shapes.keys() == tensors.keys()


def test_a_single_file_goes_before_an_index(folder: Path, tensors) -> None:
    write_directory(folder, {name: x + 1 for name, x in tensors.items()})
    directory = Directory(folder)
    np.testing.assert_array_equal(
        directory.tensor("transformer.wte.weight")[(slice(None),) * 2],
        tensors["transformer.wte.weight"] + 1,
    )
    assert directory.remarks() == [
        f"{INDEX} is ignored: {ONE} takes precedence, as in transformers"
    ]


def test_of_several_files_with_a_tensor_the_last_one_counts(folder: Path, tensors) -> None:
    """Files count in order of their names, whatever the index says; unlisted files are not read."""
    name = "transformer.wte.weight"
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"][name] != SHARD
    for number, file in enumerate((SHARD, "model-extra.safetensors"), start=1):
        there = load_file(folder / file) if file == SHARD else {}
        save_file(there | {name: tensors[name] + number}, folder / file)
    directory = Directory(folder)
    np.testing.assert_array_equal(directory.tensor(name)[:, :], tensors[name] + 1)
    assert directory.remarks() == [
        f"several files have {name}; {SHARD} is used, the last one, as in transformers"
    ]


def test_a_file_of_another_name_is_refused_with_the_remedy(tmp_path: Path, tensors) -> None:
    for name in ("weights.safetensors", 3):
        folder = write_directory(tmp_path / "model", tensors, transformers_weights=name)
        line = refusal(folder, shapes)
        assert line == (
            f"DIR: transformers_weights={name} in config.json; remove the key, and rename its file "
            "to model.safetensors"
        )


def test_pickles_are_refused_with_the_remedy(single: Path) -> None:
    (single / ONE).rename(single / "pytorch_model.bin")
    line = refusal(single, shapes)
    assert line.startswith("DIR has its weights only in pytorch_model.bin, a pickle, ")
    assert "save_pretrained" in line


def test_no_weights(single: Path) -> None:
    (single / ONE).unlink()
    assert refusal(single, shapes).startswith(f"DIR has neither {ONE} nor {INDEX}; ")


def test_integers_are_refused_by_name(tmp_path: Path, tensors) -> None:
    quantized = tensors | {"transformer.wte.weight": np.zeros((13, 12), np.int8)}
    folder = write_directory(tmp_path / "model", quantized)
    line = refusal(folder, lambda directory: directory.tensor("transformer.wte.weight"))
    assert line.startswith(
        "DIR: transformer.wte.weight has dtype I8; use weights that are not quan"
    )


def test_without_the_library(single: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    line = refusal(single, shapes)
    assert line == f"DIR/{ONE} needs the safetensors library; {install('hf')}"


# ---- config.json ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"model_type": "bloom"}, "DIR: model_type=bloom; use a model of gpt2, llama, mistral, "),
        ({"model_type": None}, "DIR: model_type=None; use a model of "),
        ({"model_type": ["gpt2"]}, "DIR: model_type=['gpt2']; use a model of "),
        ({"n_layer": "5"}, 'DIR: n_layer="5"; it must be a whole number above 0'),
        ({"n_embd": 12.0}, "DIR: n_embd=12.0; it must be a whole number above 0"),
        ({"n_head": 0}, "DIR: n_head=0; it must be a whole number above 0"),
        ({"n_head": 5}, "DIR: model.hidden_size=12 does not split over model.num_heads=5"),
        ({"n_inner": [1]}, "DIR: n_inner=[1]; it must be a whole number above 0"),
        ({"n_positions": None}, "DIR: n_positions=None; it must be a whole number above 0"),
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


# ---- the output layer -----------------------------------------------------------------------

HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"


def head(folder: Path, there: str, **keys: Any) -> Directory:
    """A GPT-2 whose output layer is absent, a copy of the embedding, or a different tensor."""
    tensors = gpt2_tensors(tied=there == "none")
    if there == "copy":
        tensors[HEAD] = tensors[TABLE].copy()
    if there == "alone":
        tensors[HEAD] = tensors.pop(TABLE)
    return Directory(write_directory(folder, tensors, **keys))


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("there", ["none", "copy", "another", "alone"])
def test_the_output_layer_is_that_of_transformers(
    tmp_path: Path, there: str, flag: bool | None
) -> None:
    """Follows config.json, where a GPT-2 is tied by default, unless the two tensors differ."""
    directory = head(tmp_path, there, **({} if flag is None else {"tie_word_embeddings": flag}))
    if (there, flag) == ("none", False):
        assert refusal(tmp_path, sizes_of) == (
            "DIR has no lm_head.weight, and tie_word_embeddings is false; if the output layer is "
            'the embedding, write "tie_word_embeddings": true into its config.json, else download '
            "it again"
        )
        return
    tied = flag is not False and there != "another"
    assert sizes_of(directory)["tie_embeddings"] is tied
    differ = there == "another" and flag is not False
    assert bool(remarks_of(directory)) is differ
    if differ:
        assert remarks_of(directory) == [
            f"{tmp_path}: tie_word_embeddings is true, but {HEAD} and {TABLE} have different "
            "numbers: they are not tied, as in transformers"
        ]


@pytest.mark.parametrize("flag", [True, False, None])
def test_without_weights_the_output_layer_is_tied_as_the_config_says(
    tmp_path: Path, flag: bool | None
) -> None:
    directory = head(tmp_path, "none", **({} if flag is None else {"tie_word_embeddings": flag}))
    assert directory.has_weights
    if flag is not False:
        assert sizes_without_weights(directory) == sizes_of(directory)
    (tmp_path / "model.safetensors").unlink()
    directory = Directory(tmp_path)
    assert not directory.has_weights
    assert sizes_without_weights(directory)["tie_embeddings"] is (flag is not False)


@pytest.mark.parametrize("flag", [None, 0, "false"])
def test_flags_that_are_none_are_refused(tmp_path: Path, flag: object) -> None:
    head(tmp_path, "none", tie_word_embeddings=flag)
    shown = '"false"' if flag == "false" else flag
    assert refusal(tmp_path, sizes_of) == (
        f"DIR: tie_word_embeddings={shown}; it must be true or false"
    )


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_llama_without_the_key_is_not_tied(tmp_path: Path, kind: str) -> None:
    """transformers would reinitialise the head with a warning; we refuse the directory."""
    write_directory(tmp_path, {"model.embed_tokens.weight": np.zeros((3, 2))}, base=NO_KEYS[kind])
    assert refusal(tmp_path, sizes_of).startswith(
        "DIR has no lm_head.weight, and tie_word_embeddings is false, "
        f"the default of {kind}; if the output layer is the embedding, write "
    )


def test_t5_ties_whatever_the_key_says(tmp_path: Path) -> None:
    """transformers uses a T5's key for the factor before the output layer."""
    table = np.ones((3, 2))
    base = {"model_type": "t5", "d_model": 2, "vocab_size": 3, "num_layers": 1, "num_heads": 1}
    for key, other in ((False, 0), (False, 1), (True, 1)):
        tensors = {"shared.weight": table, "lm_head.weight": table + other}
        folder = write_directory(tmp_path, tensors, base=base, tie_word_embeddings=key)
        assert sizes_of(Directory(folder))["tie_embeddings"] is (other == 0)


def test_more_layers_than_tensors_are_refused_at_once(tmp_path: Path, tensors) -> None:
    folder = write_directory(tmp_path, tensors, n_layer=2**31 - 1)
    assert refusal(folder, sizes_of).startswith(
        f"DIR: 2147483647 layers in its config.json, and {len(tensors)} tensors in its files; "
    )


def test_a_pointer_of_git_lfs_is_named(single: Path) -> None:
    single.joinpath("model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\n"
    )
    with pytest.raises(UserError, match=r"model.safetensors is a Git LFS pointer; fetch the file"):
        _ = Directory(single).shapes
