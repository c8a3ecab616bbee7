"""Formats that a file has whatever its name is, known by its first bytes."""

from pathlib import Path

from jaxptd.errors import UserError

LONGEST = 512  # bytes that are looked at
_POINTER = b"version https://git-lfs.github.com/spec/"
# First bytes -> what has them, and what to do.
_KNOWN = (
    (b"\x1f\x8b\x08", "compressed by gzip", "end its name in .gz, or decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "end its name in .zst, or decompress it"),
    (b"BZh", "compressed by bzip2", "end its name in .bz2, or decompress it"),
    (b"\xfd7zXZ\x00", "compressed by xz", "end its name in .xz, or decompress it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "an archive (7z)", "unpack it"),
    (b"PK\x03\x04", "a zip archive, as are .npz, .pt and .docx", "unpack it"),
    (b"PAR1", "parquet", "end its name in .parquet"),
    (b"ARROW1\x00\x00", "an Arrow file", "write it as .parquet or .jsonl"),
    (b"\x93NUMPY", "a numpy array", "write its ids with tofile, as uint16 or uint32, into a .bin"),
    (b"%PDF-", "a PDF", "extract its text"),
    (b"\xff\xfe", "text in UTF-16 or UTF-32", "convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it to UTF-8"),
    (_POINTER, "a pointer of Git LFS, not the file itself", "fetch it: git lfs pull"),
)


def check_signature(path: Path, start: bytes, *, ids: bool = False, inner: bool = False) -> None:
    """Raises UserError, with what to do, for a file that is no text, or no bare ids.

    Args:
        path: of the file.
        start: its first bytes, decompressed if its name says that it is compressed.
        ids: the file should hold ids, in which two bytes at the start tell nothing.
        inner: these bytes were decompressed.
    """
    for magic, what, remedy in _KNOWN:
        if start.startswith(magic) and not (ids and len(magic) == 2):
            if inner:
                what, remedy = f"{what}, once decompressed", "name the file that is in it"
            raise UserError(f"data.source: {path} is {what}; {remedy}")


def is_pointer(start: bytes) -> bool:
    """True for what Git has instead of a large file until `git lfs pull`."""
    return start.startswith(_POINTER)
