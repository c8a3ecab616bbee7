"""One store: what it reads and writes, what it tries again, and how it says that it cannot."""

from pathlib import Path

import pytest
from turns import slow

from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd import stores
from jaxptd.stores import Store, StoreError, StorePath, is_url, place


def at(name: str, said: list[str] | None = None) -> StorePath:
    found = place(f"s3://{BUCKET}/{name}", say=(said if said is not None else []).append)
    assert isinstance(found, StorePath)
    return found


def test_a_url_is_no_path_on_disk_and_a_path_is_no_url() -> None:
    assert place("runs/a") == Path("runs/a")
    assert not any(
        map(is_url, ("runs/a", "/a/b", "s3:", "s3:/a", "a:b", "", "://a", Path("s3://a")))
    )
    with pytest.raises(TypeError):
        Path(place("memory://a/b"))  # type: ignore[arg-type]


def test_urls_are_taken_apart_as_paths_are() -> None:
    url = place("memory://bucket//run/tokens.bin/")
    assert isinstance(url, StorePath)
    assert str(url) == "memory://bucket/run/tokens.bin"
    assert (url.bucket, url.name, url.suffix) == ("bucket", "tokens.bin", ".bin")
    assert str(url.with_suffix(".idx")) == "memory://bucket/run/tokens.idx"
    assert str(url.parent / "a") == "memory://bucket/run/a"
    assert str(url.parent.parent.parent / "a") == "memory://bucket/a"  # of no other bucket


def test_objects_are_written_read_listed_and_deleted(s3: Faults) -> None:
    path = at("run")
    store = path.store
    assert store.listing(path.key) == {}
    store.write((path / "a").key, b"0123456789")
    store.write((path / "b/c").key, b"x")
    store.write(f"{path.key}2", b"another name that begins alike")
    assert store.read((path / "a").key) == b"0123456789"
    assert store.read_range((path / "a").key, 2, 5) == b"234"
    assert store.listing(path.key) == {(path / "a").key: 10, (path / "b/c").key: 1}
    assert store.glob(f"{path.key}/**") == [(path / "a").key, (path / "b/c").key]
    assert store.listing((path / "a").key) == {}
    assert store.size((path / "a").key) == 10
    assert store.size((path / "b").key) is None
    with store.open((path / "a").key) as file:
        assert file.read(3) + file.read() == b"0123456789"
    store.delete([(path / "a").key, (path / "missing").key])
    assert not store.exists((path / "a").key)
    with pytest.raises(FileNotFoundError, match="there is no s3://bucket/run/a"):
        store.read((path / "a").key)


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("PUT", "InternalError"),
        ("GET", "drop"),
        ("HEAD", "SlowDown"),
        ("PUT", "TooManyRequests"),
        *(slow(method, code) for method in ("PUT", "GET", "HEAD") for code in ("drop", "SlowDown")),
    ],
)
def test_what_passes_is_tried_again_and_said_once(s3: Faults, code: str, method: str) -> None:
    said: list[str] = []
    path = at("a", said)
    path.store.write(path.key, b"1")
    s3.times(2, code, method=method)
    if method == "PUT":
        path.store.write(path.key, b"2")
    elif method == "GET":
        assert path.store.read(path.key) == b"1"
    else:
        assert path.store.size(path.key) == 1
    assert len(said) == 1
    assert said[0].endswith("; trying again")
    assert "s3://bucket/a" in said[0]
    s3.times(2, code, method="GET")
    assert path.store.read(path.key) == (b"2" if method == "PUT" else b"1")
    assert len(said) == 2  # trouble of another time


def test_an_answer_that_is_too_short_is_asked_for_again(s3: Faults) -> None:
    said: list[str] = []
    path = at("a", said)
    path.store.write(path.key, b"0123456789")
    whole = path.store._system.cat_file
    answers = iter([b"01", b"012345"])
    path.store._system.cat_file = lambda *a, **b: next(answers, None) or whole(*a, **b)
    assert path.store.read_range(path.key, 0, 8) == b"01234567"
    assert said == ["could not read s3://bucket/a: 2 bytes came, not 8; trying again"]


def test_a_store_that_never_answers_well_is_given_up_with_its_last_answer(s3: Faults) -> None:
    waited: list[float] = []
    path = at("a")
    store = Store("s3", path.store._system, say=lambda line: None, wait=waited.append, waits=(1, 2))
    s3.times(99, "InternalError")
    with pytest.raises(StoreError, match=r"answered 500 .*gave up after 3 attempts"):
        store.write(path.key, b"1")
    assert waited == [1, 2]


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(
    s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "READ", 0.5)
    said: list[str] = []
    path = at("slow", said)
    path.store.write(path.key, b"1")
    s3.times(1, "hang", method="GET")
    assert path.store.read(path.key) == b"1"
    assert said == ["could not read s3://bucket/slow: no answer in time; trying again"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ExpiredToken", r"the credential has expired \(ExpiredToken\); renew it"),
        ("InvalidAccessKeyId", "missing or wrong, or may not do this"),
        ("AccessDenied", "missing or wrong, or may not do this"),
    ],
)
def test_a_wrong_credential_is_one_line_and_is_not_tried_again(
    s3: Faults, code: str, words: str
) -> None:
    path = at("a")
    s3.times(99, code)
    for use in (path.store.read, path.store.size, path.store.listing):
        s3.requests.clear()
        with pytest.raises(StoreError, match="credential"):
            use(path.key)
        assert len([key for _, key in s3.requests if key == path.key]) <= 1
    with pytest.raises(StoreError, match=words):
        path.store.write(path.key, b"")


def test_no_credential_is_one_line(s3: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(stores, "READ", 59.0)  # so that fsspec makes a client of its own
    said: list[str] = []
    path = at("a", said)
    with pytest.raises(StoreError, match=r"^could not write s3://bucket/a: the credential .*\)$"):
        path.store.write(path.key, b"")
    assert said == []


def test_a_missing_bucket_is_one_line(s3: Faults) -> None:
    path = place("s3://nobucket/a/b")
    assert isinstance(path, StorePath)
    words = "could not .* s3://nobucket/a.*: there is no such bucket; make it, or correct the name"
    for use in (lambda: path.store.write(path.key, b""), lambda: path.store.read(path.key)):
        with pytest.raises(StoreError, match=words):
            use()
    with pytest.raises(StoreError, match=words):
        path.store.listing(path.key)


def test_unknown_schemes_and_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="quux://a/b: no store has URLs with quux://"):
        place("quux://a/b")
    with pytest.raises(StoreError, match="train.run_dir=https://a/b: no store has"):
        place("https://a/b", field="train.run_dir")
    with pytest.raises(StoreError, match="s3:/// names no bucket"):
        place("s3:///")
    import fsspec

    def missing(scheme: str) -> None:
        raise ImportError("Please install it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StoreError, match=r"gs://a/b needs a package.*\.\[gs\]"):
        place("gs://a/b")
    with pytest.raises(StoreError, match=r"s3://a/b needs a package.*\.\[stores\]"):
        place("s3://a/b")


def test_what_is_fetched_stays_in_its_folder(s3: Faults, tmp_path: Path) -> None:
    path = at("run")
    path.store.write((path / "a/b").key, b"1")
    path.store.write(f"{path.key}/c", b"2")
    stores.fetch(path, tmp_path / "x")
    assert (tmp_path / "x/a/b").read_bytes() + (tmp_path / "x/c").read_bytes() == b"12"
    path.store.write(f"{path.key}/../d", b"3")
    with pytest.raises(StoreError, match="leads out of the folder"):
        stores.fetch(path, tmp_path / "y", [f"{path.key}/../d"])
    assert not (tmp_path / "d").exists()


def test_small_files_beside_weights_are_copied_and_no_others(
    s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL", 2)
    path = at("m")
    path.store.write((path / "large.json").key, b"[1]")
    copied = ("config.json", "merges.txt", "additional_chat_templates/a.jinja")
    for name in (*copied, "model.safetensors", "checkpoints/00000001/manifest.json", "more/t.txt"):
        path.store.write((path / name).key, b"{}")
    folder = stores.local_copy(path)
    found = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}
    assert found == set(copied)


def test_a_name_that_no_file_can_have_is_no_file() -> None:
    assert stores.size_of(Path("a" * 300)) is None


def test_work_that_has_not_begun_when_one_fails_is_left_out(s3: Faults) -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        raise StoreError(str(number))

    with pytest.raises(StoreError):
        at("a").store.each(work, range(99))
    assert len(begun) <= stores.AT_ONCE


def test_what_other_stores_raise_means_the_same() -> None:
    """S3 says nothing of a missing object that is deleted; others do, and some are only read."""
    path = place("memory://bucket/a")
    assert isinstance(path, StorePath)

    class System:
        def rm_file(self, key: str) -> None:
            raise FileNotFoundError(key)

        def pipe_file(self, key: str, data: bytes) -> None:
            raise NotImplementedError

    store = Store("memory", System())
    store.delete([path.key])
    with pytest.raises(StoreError, match="could not write memory://bucket/a: it can only be read"):
        store.write(path.key, b"")
