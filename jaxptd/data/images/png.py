"""PNG files of 8 or 16 bits a channel, and of palettes, read and written with numpy and zlib.

Interlaced files are not read. Letters: Y rows, X columns, S samples of a pixel.
Source: Portable Network Graphics (PNG) Specification, third edition, W3C.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAY, RGB, PALETTE = 0, 2, 3
_SAMPLES = {GRAY: 1, RGB: 3, PALETTE: 1, 4: 2, 6: 4}  # of a pixel, by type; 4 and 6 have alpha
_DEPTHS = {GRAY: (1, 2, 4, 8, 16), PALETTE: (1, 2, 4, 8)}  # bits of a sample; of others 8 and 16
LONGEST = 2**15  # pixels in a row, or rows
Color = tuple[int, int, int]


class Png(NamedTuple):
    """The pixels of a file.

    Args:
        pixels: uint8 or uint16, `[Y, X, S]`; of a file with a palette the numbers of its colors.
        palette: whether it has one.
    """

    pixels: np.ndarray
    palette: bool


class _Header(NamedTuple):
    width: int
    height: int
    depth: int
    kind: int

    @property
    def row_bytes(self) -> int:
        return -(-self.width * _SAMPLES[self.kind] * self.depth // 8)

    @property
    def pixel_bytes(self) -> int:
        """The distance of the bytes that filters compare."""
        return max(1, _SAMPLES[self.kind] * self.depth // 8)


def read_png(data: bytes) -> Png:
    """Reads a file's bytes. Raises ValueError if they are damaged, or of another kind."""
    header, packed = None, b""
    for name, content in _chunks(data):
        if name == b"IHDR":
            header = _header(content)
        elif name == b"IDAT":
            packed += content
    if header is None:
        raise ValueError("it has no header")
    wanted = header.height * (1 + header.row_bytes)
    try:
        lines = zlib.decompressobj().decompress(packed, wanted)
    except zlib.error as error:
        raise ValueError(f"its pixels are damaged: {error}") from error
    if len(lines) != wanted:
        raise ValueError(f"it has {len(lines)} of {wanted} bytes of pixels")
    rows = _unfiltered(np.frombuffer(lines, np.uint8).reshape(header.height, -1), header)
    return Png(_samples(rows, header), header.kind == PALETTE)


def write_png(pixels: np.ndarray, palette: Sequence[Color] = ()) -> bytes:
    """The bytes of a file with uint8 pixels `[Y, X, 3]`, or `[Y, X]`: gray, or of a palette."""
    kind = RGB if pixels.ndim == 3 else PALETTE if palette else GRAY
    height, width = pixels.shape[:2]
    lines = np.pad(pixels.astype(np.uint8).reshape(height, -1), ((0, 0), (1, 0)))  # no filter
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    chunks += [(b"PLTE", np.array(palette, np.uint8).tobytes())] * (kind == PALETTE)
    chunks += [(b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + name + content + _checksum(name, content)
        for name, content in chunks
    )


def _checksum(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(name + content))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields name and content of each chunk before the end."""
    if not data.startswith(SIGNATURE):
        raise ValueError("it is no PNG")
    place = len(SIGNATURE)
    while True:
        length, name = struct.unpack(">I4s", data[place : place + 8].ljust(8, b"\0"))
        content = data[place + 8 : place + 8 + length]
        place += length + 12
        if place > len(data):
            raise ValueError("it is cut off")
        if _checksum(name, content) != data[place - 4 : place]:
            raise ValueError(f"its part {name.decode('ascii', 'replace')} is damaged")
        if name == b"IEND":
            return
        yield name, content


def _header(content: bytes) -> _Header:
    if len(content) != 13:
        raise ValueError("its header is damaged")
    *sizes, _, _, interlaced = struct.unpack(">IIBBBBB", content)
    header = _Header(*sizes)
    if header.kind not in _SAMPLES or header.depth not in _DEPTHS.get(header.kind, (8, 16)):
        raise ValueError(f"it has pixels of type {header.kind} with {header.depth} bits a channel")
    if not 0 < header.width <= LONGEST or not 0 < header.height <= LONGEST:
        raise ValueError(f"it has {header.height} x {header.width} pixels; {LONGEST} are the most")
    if interlaced:
        raise ValueError("it is interlaced; save it without")
    return header


def _samples(rows: np.ndarray, header: _Header) -> np.ndarray:
    """Bytes of rows -> numbers `[Y, X, S]`."""
    if header.depth == 16:
        rows = rows.view(">u2").astype(np.uint16)
    elif header.depth < 8:
        bits = np.unpackbits(rows, axis=1).reshape(len(rows), -1, header.depth)
        rows = np.packbits(bits, axis=2)[..., 0] >> (8 - header.depth)
        rows = rows[:, : header.width]
    return rows.reshape(header.height, header.width, _SAMPLES[header.kind])


def _unfiltered(lines: np.ndarray, header: _Header) -> np.ndarray:
    """Lines of a filter's number and bytes -> the bytes of the pixels."""
    step = header.pixel_bytes
    rows = np.empty((header.height, header.row_bytes), np.uint8)
    before = np.zeros(header.row_bytes, np.uint8)
    for row, (kind, *_), line in zip(rows, lines[:, :1], lines[:, 1:], strict=True):
        if kind == 0:
            row[:] = line
        elif kind == 1:  # the byte before it in its row was subtracted
            for first in range(step):
                row[first::step] = np.cumsum(line[first::step], dtype=np.uint8)
        elif kind == 2:  # the byte above it
            row[:] = line + before
        elif kind in (3, 4):
            row[:] = _predicted(line.tolist(), before.tolist(), step, paeth=kind == 4)
        else:
            raise ValueError(f"it has a filter {kind}")
        before = row
    return rows


def _predicted(line: list[int], before: list[int], step: int, *, paeth: bool) -> list[int]:
    """Bytes from which a number was subtracted that follows from those before and above."""
    found = [0] * step
    above = [0] * step + before
    for place, byte in enumerate(line):
        left, up, corner = found[place], above[place + step], above[place]
        if paeth:
            guess = left + up - corner
            ways = abs(guess - left), abs(guess - up), abs(guess - corner)
            guess = (left, up, corner)[ways.index(min(ways))]
        else:
            guess = (left + up) // 2
        found.append((byte + guess) % 256)
    return found[step:]
