"""A table of files that users get wrong: data, tokenizers, run directories, checkpoints."""

import dataclasses
import functools
import os
import socket
import stat
import struct
from pathlib import Path

import numpy as np
import tokenizers
import yaml
from runs import CONFIG

from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, to_dict
from jaxptd.run.holder import Holder

NO_FILES = {
    "pipe": (os.mkfifo, "is not a regular file"),
    "device": (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
    "folder": (os.mkdir, "is a folder; name its files with a glob"),
    "dangling link": (lambda path: os.symlink("nowhere", path), "is not a regular file"),
    "loop": (lambda path: os.symlink(path, path), "is not a regular file"),
}
# Names that no file can have, and what the error says wherever they are given.
BAD_NAMES = {
    "long": ("x" * 300, "no path is so long; use"),
    "with a null byte": ("a\0b", "it has a null byte; remove it"),
    "half a pair": ("\ud800", "it is not valid Unicode; use"),
    "deep": ("x/" * 5000, "no path is so long; use"),
}


def a_socket(path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def ids(*values: int, dtype: str = "<u2", count: int = 4000) -> bytes:
    """Token ids, padded with zeros."""
    array = np.zeros(count, dtype)
    array[: len(values)] = values
    return array.tobytes()


def index(*, magic=b"MMIDIDX\0\0", version=1, code=8, sequences=1, documents=2, lengths=(4000,),
          pointers=(0,)) -> bytes:  # fmt: skip
    """A Megatron index."""
    head = struct.pack("<9sQBQQ", magic, version, code, sequences, documents)
    body = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    return head + body + bytes(8 * documents)


def tokenizer_json(model, *added: str) -> bytes:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(list(added))
    return tokenizer.to_str().encode()


WORDS = {"<eos>": 0, "def": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """Files by name (content, or a function that creates each), config fields, and the error."""

    name: str
    files: dict
    fields: dict
    words: str

    def __str__(self) -> str:
        return self.name


def sources():
    def case(name, content, words, file="a.txt", **more):
        return Case(f"{file}: {name}", {file: content, **more}, {"data.source": file}, words)

    for kind, (make, words) in NO_FILES.items():
        yield case(kind, make, words)
    yield case("socket", a_socket, "is not a regular file")
    for kind, (name, words) in BAD_NAMES.items():
        yield Case(f"a name {kind}", {}, {"data.source": name}, words)
    for name in ("", "none.txt", "*.none", "/dev/null", "/dev/stdin"):
        words = "not a regular file" if "dev" in name else "data.source"
        yield Case(f"source {name!r}", {}, {"data.source": [name]}, words)
    two = {"data.source": ["text.txt", "./text.txt"]}
    yield Case("a file twice", {}, two, "is named twice, by 'text.txt' and './text.txt'")
    mixed = {"data.source": ["text.txt", "a.bin"]}
    yield Case("text and tokens", {"a.bin": ids()}, mixed, "mixes tokens (a.bin) with text")
    yield case("empty", b"", "a.txt holds no text; leave it out")
    yield case("a byte order mark alone", b"\xef\xbb\xbf", "a.txt holds no text")
    yield case("binary", b"text\0", "a.txt is binary, not text (NUL at byte 4)")
    yield case("Latin-1", b"caf\xe9 " * 100, "a.txt is not UTF-8 text (byte 3 is 0xe9)")
    yield case(
        "UTF-16", "text".encode("utf-16"), "a.txt is text in UTF-16 or UTF-32; convert it to UTF-8"
    )
    yield case(
        "compressed", b"\x1f\x8b\x08\x01" * 50, "a.txt is compressed by gzip; end its name in .gz"
    )
    yield case("short", b"short", "one sequence takes 17")
    line = '{"text": "one"}\n'
    for name, bad, words in (
        ("no JSON", "text", "line 2 is not JSON"),
        ("cut", '{"text": "o', "line 2 is not JSON"),
        ("a list", '["text"]', 'line 2 has no string "text"'),
        ("a number", "1", 'line 2 has no string "text"'),
        ("no text", '{"body": "x"}', 'line 2 has no string "text"'),
        ("text null", '{"text": null}', 'line 2 has no string "text"'),
        ("text a list", '{"text": ["x"]}', 'line 2 has no string "text"'),
        ("half a pair", '{"text": "\\ud800"}', "line 2: '\\ud800' is half a surrogate pair"),
        ("10,000 digits", '{"text": ' + "9" * 10_000 + "}", "line 2 is not JSON"),
        ("deep", "[" * 100_000, "line 2 is not JSON"),
    ):
        yield case(name, (line + bad).encode(), words, "a.jsonl")
    yield case("Latin-1", line.encode() + b'{"text": "\xe9"}', "line 2 is not UTF-8", "a.jsonl")
    yield case("a null byte", line.encode() + b'{"text": "\0"}', "line 2 is binary", "a.jsonl")
    for content in (b"", b"\n\n  \n", b'{"text": ""}\n'):
        yield case(repr(content), content, "a.jsonl holds no text; leave it out", "a.jsonl")


def token_files():
    def case(name, content, words, **more):
        files = {f"a.{ending}": each for ending, each in {"bin": content, **more}.items()}
        return Case(f"a.bin: {name}", files, {"data.source": "a.bin"}, words)

    yield case("empty", b"", "a.bin is empty; leave it out")
    yield case("odd", b"\0" * 4001, "has 4001 bytes, not a multiple of 2")
    yield case("short", bytes(20), "one sequence takes 17")
    yield case("an id too large", ids(1, 2, 300), "/a.bin has id 300, outside the model's")
    yield case("the last id", ids()[:-2] + b"\xff\xff", "token 3999 of ")
    for kind, (make, words) in NO_FILES.items():
        yield case(kind, make, words)
    good = ids()
    for name, wrong, words in (
        ("magic", index(magic=b"MMIDIDY\0\0"), "is not a Megatron index (no MMIDIDX"),
        ("cut head", index()[:20], "is not a Megatron index"),
        ("empty index", b"", "is not a Megatron index"),
        ("text", b"text" * 20, "is not a Megatron index"),
        ("version", index(version=2), "has version 2, not 1"),
        ("code 0", index(code=0), "has dtype code 0; ids must have one of"),
        ("floats", index(code=7), "has dtype code 7; ids must have one of"),
        ("code 255", index(code=255), "has dtype code 255; ids must have one of"),
        ("cut", index()[:-1], "sequences and 2 document entries take"),
        ("long", index() + b"\0", "sequences and 2 document entries take"),
        ("many sequences", index(sequences=2**63), "it is truncated or multimodal"),
        ("many documents", index(documents=2)[:26] + b"\xff" * 8, "it is truncated or multimodal"),
        ("negative length", index(lengths=(-4000,)), "its sequences are not contiguous"),
        ("gap", index(pointers=(2,)), "its sequences are not contiguous"),
        ("negative place", index(pointers=(-2,)), "its sequences are not contiguous"),
        ("fewer", index(lengths=(3999,)), "a.bin has 8000 bytes, but a.idx says 7998"),
        ("more", index(lengths=(4001,)), "a.bin has 8000 bytes, but a.idx says 8002"),
        ("none", index(sequences=0, lengths=(), pointers=()), "has 8000 bytes, but a.idx says 0"),
        ("pipe", os.mkfifo, "a.idx is not a regular file"),
        ("folder", os.mkdir, "a.idx is not a regular file"),
    ):
        yield case(f"index, {name}", good, words, idx=wrong)
    negative = ids(-1, dtype="<i4")
    yield case("a negative id", negative, "has id -1, outside", idx=index(code=4))
    large = ids(2**40, dtype="<i8")
    yield case("a huge id", large, f"has id {2**40}, outside", idx=index(code=5))
    alone = {"data.source": "a.idx"}
    yield Case("an index alone", {"a.idx": index()}, alone, "a.bin is missing; put it there")


def tokenizer_files():
    def case(name, content, words, **fields):
        return Case(
            f"t.json: {name}", {"t.json": content}, {"data.tokenizer": "t.json"} | fields, words
        )

    for kind, (make, _) in NO_FILES.items():
        yield case(kind, make, "; use bytes, or the path")
    for kind, (name, words) in BAD_NAMES.items():
        yield Case(f"a tokenizer's name {kind}", {}, {"data.tokenizer": name}, words)
    for content in (b"", b"{", b"[]", b"null", b'{"version": "1.0"}', b"\xff\0", b"[" * 10_000):
        yield case(repr(content[:20]), content, "is not a tokenizer.json")
    model = tokenizers.models.WordLevel
    good = tokenizer_json(model(WORDS, unk_token="<eos>"), "<eos>")
    yield case("cut", good[:-10], "is not a tokenizer.json")
    no_end = tokenizer_json(model({"a": 0}, unk_token="a"))
    yield case("no end of document", no_end, "has no end-of-document token; add one of")
    no_unknown = tokenizer_json(model(WORDS), "<eos>")
    yield case("no unknown token", no_unknown, "cannot encode the text: WordLevel error: Missing")
    ends = {"t.json/tokenizer.json": good}
    ends |= {"t.json/config.json": b'{"eos_token_id": 7}'}
    words = "has no token 7, the eos_token_id of the config next to it"
    yield Case("a folder that contradicts itself", ends, {"data.tokenizer": "t.json"}, words)
    drops = tokenizer_json(tokenizers.models.BPE(WORDS | {"d": 2, "e": 3, "f": 4}, []), "<eos>")
    yield case("a letter without a token", drops, "and no unknown token")


def run_dirs():
    def case(name, files, words, **fields):
        return Case(f"run: {name}", files, {"train.run_dir": "run"} | fields, words)

    yield case("a file", {"run": b"text"}, "train.run_dir=run: run is a file; name a directory")
    yield case("a pipe", {"run": os.mkfifo}, "train.run_dir=run: run is a file; name a directory")
    below = {"train.run_dir": "run/a/b"}
    yield case("below a file", {"run": b""}, "run is a file; name a directory", **below)
    for kind, (name, words) in BAD_NAMES.items():
        yield case(f"a name {kind}", {}, words, **{"train.run_dir": name})
    yield case("a loop", {"run": NO_FILES["loop"][0]}, "Too many levels of symbolic links; use")
    yield case("a dangling link", {"run": NO_FILES["dangling link"][0]}, "run is a file; name a")
    for name, content in (
        ("empty", b""),
        ("binary", b"\0\xff"),
        ("a list", b"- 1\n"),
        ("no YAML", b"{"),
        ("a section of text", b"model: text\n"),
        ("an unknown section", b"modell: {num_layers: 2}\n"),
        ("an unknown key", b"model: {num_layer: 2}\n"),
        ("a wrong type", b"model: {num_layers: two}\n"),
        ("a folder", os.mkdir),
    ):
        yield case(f"config, {name}", {"run/config.yaml": content}, "")
    for kind in ("pipe", "device"):
        words = "run/config.yaml is not a regular file; remove it"
        yield case(f"config, {kind}", {"run/config.yaml": NO_FILES[kind][0]}, words)
    other = yaml.safe_dump(to_dict(dataclasses.replace(Config()))).encode()
    yield case("of another run", {"run/config.yaml": other}, "holds another run: model.num_layers")
    never = {"checkpoint.resume": "never"}
    yield case("never", {"run/checkpoints": os.mkdir}, "and checkpoint.resume is never", **never)
    for kind in ("pipe", "device"):
        make = NO_FILES[kind][0]
        yield case(f"checkpoints, {kind}", {"run/checkpoints": make}, "run/checkpoints")
    yield case("checkpoints, a file", {"run/checkpoints": b""}, "Not a directory")
    for name, content in (("damaged", b""), ("a folder", os.mkdir), ("a pipe", os.mkfifo)):
        words = "run/lock.json does not name the process; if no run uses the"
        yield case(f"lock, {name}", {"run/lock.json": content}, words)
    elsewhere = dataclasses.replace(Holder.this_process(), host="node07").to_json().encode()
    words = "is locked by process "
    yield case("of another host", {"run/lock.json": elsewhere}, words)
    here = Holder.this_process().to_json().encode()
    yield case("in use", {"run/lock.json": here}, "train.run_dir=run is in use by process ")


def checkpoint_paths():
    def case(name, files, resume, words):
        return Case(f"resume: {name}", files, {"checkpoint.resume": resume}, words)

    yield case("none", {}, "none/00000005", "there is no checkpoint none/00000005; name a folder")
    yield case("a file", {}, "text.txt", "there is no checkpoint text.txt; name a folder")
    yield case("a pipe", {"00000005": os.mkfifo}, "00000005", "there is no checkpoint 00000005")
    yield case("a folder of others", {"a/b.txt": b""}, "a", "a is not a checkpoint; name a folder")
    for kind, (name, words) in BAD_NAMES.items():
        yield case(f"a name {kind}", {}, name, words)
    yield case("best of none", {}, "best", "has a validation_loss; use checkpoint.resume=auto")
    for kind in ("pipe", "device", "folder"):
        files = {"00000005/manifest.json": NO_FILES[kind][0]}
        yield case(f"manifest, {kind}", files, "00000005", "manifest.json: not a regular file")


TABLE = [*sources(), *token_files(), *tokenizer_files(), *run_dirs(), *checkpoint_paths()]


@functools.cache
def base() -> Config:
    return load_config(CONFIG, ["--train.steps=1", "--train.sample_tokens=0"])


def changed(config: Config, fields: dict) -> Config:
    for name, value in fields.items():
        section, field = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def tree(folder: Path) -> dict[str, object]:
    """Maps every regular file to its content, and everything else to its kind."""
    found = {}
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        found[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


def put(folder: Path, files: dict) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
