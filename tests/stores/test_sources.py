"""`data.source` in an S3 store: the same sequences as from a disk, each byte fetched once."""

import contextlib
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd import DataConfig
from jaxptd.commands.data import main as data_command
from jaxptd.data import ByteTokenizer, open_data, stored_ids
from jaxptd.data.batches import Concatenated, locate
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import open_token_file, open_tokens, write_bin, write_bin_arrays
from jaxptd.errors import UserError
from jaxptd.stores import StorePath, place
from jaxptd.vision.data import find_images

URL = f"s3://{BUCKET}/data"
SIZES: dict[str, Any] = {"seq_length": 16, "vocab_size": 300, "seed": 3}


def upload(folder: Path) -> None:
    where = place(URL)
    assert isinstance(where, StorePath)
    for file in filter(Path.is_file, sorted(folder.rglob("*"))):
        where.store.write(f"{where.key}/{file.relative_to(folder)}", file.read_bytes())


def sequences(source: Any, **config: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    data = open_data(DataConfig(source=source, **config), ByteTokenizer(), **SIZES)
    assert data.validation is not None
    numbers = [5, 0, 10**6, 17]
    return data.train.rows(numbers), data.validation.rows([0, 1]), data.identity


@pytest.fixture
def folder(tmp_path: Path, s3: Faults) -> Path:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, 257, 9000)
    write_bin(folder / "a.bin", ids[:3000])
    write_bin_arrays(folder / "b.bin", [ids[3000:]], vocab_size=257, end_of_document=256)
    words = [f"text number {n} of them" for n in range(200)]
    (folder / "t.txt").write_text("\n".join(words))
    (folder / "more/u.txt").write_text("more text, more text and more\n" * 50)
    (folder / "r.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in words))
    with gzip.open(folder / "r.json.gz", "wt") as file:
        json.dump([{"text": each} for each in words], file)
    (folder / "r.csv").write_text("text,other\n" + "".join(f"{each},1\n" for each in words))
    upload(folder)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["a.bin"],
        ["a.bin", "b.bin"],
        ["*.bin"],
        ["t.txt", "more/u.txt"],
        ["**/*.txt"],
        ["r.jsonl"],
        ["r.json.gz"],
        ["r.csv"],
    ],
)
def test_the_sequences_are_those_of_a_disk(folder: Path, names: list[str]) -> None:
    local = sequences([str(folder / name) for name in names])
    stored = sequences([f"{URL}/{name}" for name in names])
    for a, b in zip(local[:2], stored[:2], strict=True):
        assert np.array_equal(a, b)
    assert local[2] == stored[2]  # so that a run goes on with a copy of its data elsewhere


@pytest.mark.parametrize("name", ["whole.bin", "whole.jsonl"])
def test_whole_records_are_those_of_a_disk(folder: Path, name: str) -> None:
    records = [b"%x" % (n * n * n) for n in range(1, 600)]
    (folder / "whole.jsonl").write_text("\n".join(f'{{"text": "{x.decode()}"}}' for x in records))
    ids = (np.array([*record, 256]) for record in records)
    write_bin_arrays(folder / "whole.bin", ids, vocab_size=257, end_of_document=256)
    upload(folder)
    sources = str(folder / name), f"{URL}/{name}", str(folder / "whole.jsonl")
    local, stored, text = (sequences(source, documents="whole") for source in sources)
    for other in (stored, text):
        assert all(np.array_equal(a, b) for a, b in zip(local[:2], other[:2], strict=True))
        assert local[2] == other[2]


def test_mixtures_and_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    texts = pyarrow.table({"text": [f"row {n} of the table" for n in range(100)]})
    parquet.write_table(texts, folder / "p.parquet")
    upload(folder)
    names = ("p.parquet", "t.txt")
    local = sequences({str(folder / name): 0.5 for name in names})
    stored = sequences({f"{URL}/{name}": 0.5 for name in names})
    assert np.array_equal(local[0], stored[0])


def test_each_block_is_fetched_once_and_only_if_it_is_needed(
    folder: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_ids, "BLOCK", 1000)
    tokens = open_token_file(place(f"{URL}/b.bin"))
    size, header = 64 + 6000 * 2, 64
    expected = np.memmap(folder / "b.bin", "<u2", offset=header)
    assert len(tokens) == 6000
    before = s3.sent
    assert np.array_equal(tokens[700:1100], expected[700:1100])
    first, last = (header + 1400) // 1000, (header + 2200 - 1) // 1000
    assert s3.sent - before == (last - first + 1) * 1000
    assert np.array_equal(tokens[700:1100][100:200], expected[800:900])
    assert locate(tokens[700:1100][100:200], 5) == f"token 805 of {URL}/b.bin"
    assert s3.sent - before == (last - first + 1) * 1000
    assert np.array_equal(tokens, expected)
    assert s3.sent - before == size
    s3.fault = lambda *_: "AccessDenied"
    assert np.array_equal(tokens[::1], expected)


def test_all_blocks_are_kept_in_one_file(
    folder: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that fetch the first blocks at once must not make a file each."""
    monkeypatch.setattr(stored_ids, "BLOCK", 1000)
    tokens = open_token_file(place(f"{URL}/b.bin"))
    each, made = type(tokens.blocks.url.store).each, []

    def watched(store: Any, work: Any, items: Any) -> Any:
        made.append("_file" in vars(tokens.blocks))
        return each(store, work, items)

    monkeypatch.setattr(type(tokens.blocks.url.store), "each", watched)
    np.asarray(tokens[:1100])
    assert made == [True]


def test_two_threads_fetch_no_block_twice_and_leave_no_file(
    folder: Path, s3: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = open_token_file(place(f"{URL}/b.bin"))
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(stored_ids.tempfile, "tempdir", str(tmp_path / "t"))
    each, both = type(tokens.blocks.url.store).each, threading.Barrier(2)

    def slow(store: Any, work: Any, items: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # for the other thread, which should wait for this one
        return each(store, work, items)

    monkeypatch.setattr(type(tokens.blocks.url.store), "each", slow)
    s3.requests.clear()
    threads = [threading.Thread(target=np.asarray, args=[tokens]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert s3.of("GET") == [f"{BUCKET}/data/b.bin"]
    assert list((tmp_path / "t").iterdir()) == []


def test_the_rows_of_a_batch_are_fetched_together(
    folder: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_ids, "BLOCK", 200)
    both = open_tokens([place(f"{URL}/a.bin"), place(f"{URL}/b.bin")])
    assert isinstance(both, Concatenated)
    from jaxptd.data import WindowsInOrder

    windows = WindowsInOrder(both, seq_length=16, vocab_size=257)
    asked: list[int] = []
    each = type(both.arrays[0].blocks.url.store).each  # type: ignore[union-attr]

    def counted(store: Any, work: Any, items: Any) -> Any:
        asked.append(len(items := list(items)))
        return each(store, work, items)

    monkeypatch.setattr(type(both.arrays[0].blocks.url.store), "each", counted)  # type: ignore[union-attr]
    s3.requests.clear()
    windows.rows(np.array([0, 50, 100, 250]))
    assert [number for number in asked if number] == [3, 1]  # of each file, at once
    assert len(s3.of("GET", r"/(a|b)\.bin")) == 4


def test_faults_that_pass_are_not_seen(folder: Path, s3: Faults) -> None:
    expected = sequences(f"{URL}/*.bin")
    s3.times(3, "InternalError", method="GET", key=r"\.bin")
    assert np.array_equal(sequences(f"{URL}/*.bin")[0], expected[0])


def test_megatron_pairs(folder: Path, tmp_path: Path) -> None:
    import struct

    ids = np.arange(600, dtype="<u2")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 1)
    lengths = np.array([400, 200], "<i4").tobytes()
    index = head + lengths + np.array([0, 800], "<i8").tobytes() + bytes(8)
    (folder / "m.bin").write_bytes(ids.tobytes())
    (folder / "m.idx").write_bytes(index)
    upload(folder)
    for name in ("m", "m.bin", "m.idx", "m.*"):
        (found,) = find_files(f"{URL}/{name}")
        assert str(found) == f"{URL}/m.bin"
        assert np.array_equal(open_token_file(found), ids)


def test_text_is_tokenized_from_a_store(folder: Path, tmp_path: Path) -> None:
    data_command(["--source", f"{URL}/t.txt", "--out", str(tmp_path / "a.bin"), "--quiet"])
    data_command(["--source", str(folder / "t.txt"), "--out", str(tmp_path / "b.bin"), "--quiet"])
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{URL}/none.bin", "matches no object; use URLs or globs of objects"),
        (f"{URL}/*.none", "matches no object"),
        (f"{URL}/more", "is a folder; name its objects with a glob, such as .*more/.*txt"),
        ("s3://nobucket/a.bin", "there is no such bucket"),
        ("quux://a/b.bin", "data.source=quux://a/b.bin: no store has URLs with quux://"),
        (f"{URL}/empty.bin", "empty.bin is empty; leave it out"),
        (f"{URL}/odd.bin", "odd.bin has 3 bytes, not a multiple of 2"),
        (f"{URL}/text.bin", "text.bin is text, but its name says token ids"),
        (f"{URL}/binary.txt", "s3://bucket/data/binary.txt is binary, not text"),
        (f"{URL}/lonely.idx", "lonely.bin is missing; put it there"),
    ],
)
def test_bad_sources_are_one_line(folder: Path, name: str, words: str) -> None:
    (folder / "empty.bin").touch()
    (folder / "odd.bin").write_bytes(b"\x01\x00\x02")
    (folder / "text.bin").write_text("words and words " * 50)
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "lonely.idx").touch()
    upload(folder)
    with pytest.raises(UserError, match=words) as caught:
        sequences(name)
    assert "\n" not in str(caught.value)


def test_a_source_that_is_named_twice_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="is named twice"):
        find_files([f"{URL}/a.bin", f"{URL}/*.bin"])


def test_images_are_refused(s3: Faults) -> None:
    with pytest.raises(UserError, match="images are read from a disk only; copy them here"):
        find_images(f"{URL}/images")


def test_an_id_outside_the_vocabulary_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"token \d+ of s3://bucket/data/a.bin has id \d+, outside"):
        open_data(
            DataConfig(source=f"{URL}/a.bin"),
            ByteTokenizer(),
            seq_length=16,
            vocab_size=100,
            seed=0,
        )


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="No space left on device; the folder of TMPDIR needs room"):
        sequences(f"{URL}/b.bin")


def test_no_room_for_a_temporary_file_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**_: Any) -> int:
        raise FileNotFoundError(2, "No usable temporary directory found")

    tokens = open_token_file(place(f"{URL}/b.bin"))
    monkeypatch.setattr(stored_ids.tempfile, "mkstemp", none)
    with pytest.raises(UserError, match="No usable temporary directory found; the folder"):
        np.asarray(tokens)


def test_an_object_that_was_deleted_is_one_line(folder: Path) -> None:
    where = place(f"{URL}/b.bin")
    assert isinstance(where, StorePath)
    tokens = open_token_file(where)
    where.store.delete([where.key])
    with pytest.raises(UserError, match=r"data.source: s3://bucket/data/b.bin was deleted"):
        np.asarray(tokens)


def test_more_is_read_and_written_than_the_system_does_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda file, n, start: pread(file, min(n, 1000), start))
    monkeypatch.setattr(os, "pwrite", lambda file, data, start: pwrite(file, data[:900], start))
    tokens = open_token_file(place(f"{URL}/b.bin"))
    assert np.array_equal(tokens, np.memmap(folder / "b.bin", "<u2", offset=64))


def test_a_store_that_refuses_is_not_taken_for_damage(
    folder: Path, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": ["a" * 99]}), folder / "p.parquet")
    upload(folder)
    s3.fault = lambda method, key: "AccessDenied" if method == "GET" and "p.parq" in key else None
    with pytest.raises(UserError, match=r"^could not read s3://.*p.parquet: the credential is"):
        sequences(f"{URL}/p.parquet")


def test_a_package_that_is_missing_is_named_with_the_url(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    (folder / "t.txt.zst").write_bytes(b"x")
    upload(folder)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=f"{URL}/t.txt.zst is compressed by zstd; install"):
        sequences(f"{URL}/t.txt.zst")


def test_an_object_that_was_replaced_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would read blocks of both."""
    monkeypatch.setattr(stored_ids, "BLOCK", 1000)
    where = place(f"{URL}/b.bin")
    assert isinstance(where, StorePath)
    tokens, data = open_token_file(where), where.store.read(where.key)
    kept = np.asarray(tokens[:1000])
    where.store.write(where.key, data[:64] + data[:63:-1])
    assert np.array_equal(tokens[:1000], kept)  # from the disk
    with pytest.raises(UserError, match=f"{where} was changed while the run read it; put the obj"):
        np.asarray(tokens[2000:3000])
    with pytest.raises(UserError, match="was changed while"):  # nor are they kept
        np.asarray(tokens[2000:3000])
    where.store.write(where.key, data)
    assert np.array_equal(open_token_file(where), np.frombuffer(data[64:], "<u2"))


def test_chats_and_their_template_are_read_from_a_store(folder):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "more"}]
    (folder / "c.jsonl").write_text("".join(json.dumps({"chat": chat}) + "\n" for _ in range(99)))
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt }}"
    )
    upload(folder)
    fields = {"messages_field": "chat", "documents": "apart"}
    found = [
        sequences(f"{root}/c.jsonl", chat_template=f"{root}/t.jinja", **fields)
        for root in (folder, URL)
    ]
    for disk, store in zip(*found, strict=True):
        assert disk == store if isinstance(disk, dict) else (disk == store).all()
    missing = f"data.chat_template={URL}/no.jinja: there is no such object; name a Jinja file"
    with pytest.raises(UserError, match=missing):
        sequences(f"{URL}/c.jsonl", chat_template=f"{URL}/no.jinja", **fields)
