"""Reads and writes PNG files with Pillow (the `vision` extra).

Pillow changes some values (it scales 2- and 4-bit gray to 0 to 255, and cuts 16-bit channels to 8)
and fills missing rows with zeros. Since pixels are data and labels are integers, this also reads
the file's header, and refuses files whose values cannot be recovered.

Letters: Y rows, X columns, S samples of a pixel.
Source: Portable Network Graphics (PNG) Specification, third edition, W3C.
"""

import io
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxptd.errors import UserError, install

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAY, PALETTE = 0, 3
_SAMPLES = {GRAY: 1, 2: 3, PALETTE: 1, 4: 2, 6: 4}  # per pixel, by type; 4 and 6 have alpha
_STEPS = {2: 85, 4: 17}  # step between Pillow's values for gray of this many bits
LONGEST = 2**15  # most pixels in a row, or rows
# Each pass of an interlaced file: first column and row, and the steps to the next ones.
_PASSES = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
Color = tuple[int, int, int]


class Png(NamedTuple):
    """The pixels of a file.

    Args:
        pixels: uint8 or uint16, `[Y, X, S]`; with a palette, indices into it.
        palette: whether the file has a palette.
    """

    pixels: np.ndarray
    palette: bool


def pillow(what: str) -> Any:
    """Imports Pillow, which comes with an extra.

    Args:
        what: what needs it; begins the message.

    Raises:
        UserError: it is not installed.
    """
    try:
        import PIL.PngImagePlugin  # imports PIL.Image
    except ImportError as error:
        raise UserError(f"{what} needs Pillow; {install('vision')}") from error
    return PIL


def read_png(data: bytes) -> Png:
    """Reads a file's bytes.

    Raises:
        ValueError: they are damaged, or Pillow would change this kind of pixels.
        UserError: Pillow is not installed.
    """
    reader = pillow("reading a PNG").PngImagePlugin.PngImageFile  # only our limit of pixels applies
    header = _header(data)
    try:
        reader(io.BytesIO(data)).verify()  # checksums of all chunks; it cannot be loaded afterwards
        _check_rows(data, header)
        with reader(io.BytesIO(data)) as image:
            pixels = np.asarray(image)
    except (SyntaxError, OSError, EOFError, LookupError, zlib.error, struct.error) as error:
        raise ValueError(f"it is damaged: {error}") from error
    pixels = pixels.astype(np.uint16 if header.depth == 16 else np.uint8)
    if header.kind == GRAY:
        pixels //= _STEPS.get(header.depth, 1)
    shape = header.height, header.width, _SAMPLES[header.kind]
    return Png(pixels.reshape(shape), header.kind == PALETTE)


def write_png(pixels: np.ndarray, palette: Sequence[Color] = ()) -> bytes:
    """The bytes of a file with uint8 pixels: `[Y, X, 3]`, or `[Y, X]` in gray or with a palette.

    Raises:
        UserError: Pillow is not installed.
    """
    image = pillow("writing a PNG").Image.fromarray(pixels.astype(np.uint8))
    if palette:
        image.putpalette([*itertools.chain(*palette)])
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


class _Header(NamedTuple):
    width: int
    height: int
    depth: int  # bits of a sample
    kind: int
    interlaced: bool


def _header(data: bytes) -> _Header:
    """The header of a file that Pillow reads unchanged. Raises ValueError for others."""
    if not data.startswith(SIGNATURE):
        raise ValueError("it is not a PNG")
    if len(data) < 29 or data[12:16] != b"IHDR":
        raise ValueError("it has no header")
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if not 0 < width <= LONGEST or not 0 < height <= LONGEST:
        raise ValueError(f"it has {height} x {width} pixels; each may be at most {LONGEST}")
    if depth == 16 and kind != GRAY:
        raise ValueError("it has 16 bits in each of several channels; save it with 8, or as .npy")
    if kind not in _SAMPLES:
        raise ValueError(f"it has pixels of type {kind} with {depth} bits a channel")
    return _Header(width, height, depth, kind, bool(interlaced))


def _check_rows(data: bytes, header: _Header) -> None:
    """Raises ValueError if a file with intact chunks has fewer rows than its header says."""
    packed, name, place = [], b"", len(SIGNATURE)
    while name != b"IEND":
        length, name = struct.unpack(">I4s", data[place : place + 8])
        packed += [data[place + 8 : place + 8 + length]] * (name == b"IDAT")
        place += length + 12
    if place > len(data):
        raise ValueError("it is cut off")
    wanted, bits = 0, header.depth * _SAMPLES[header.kind]
    for left, top, right, down in _PASSES if header.interlaced else ((0, 0, 1, 1),):
        rows, columns = -((top - header.height) // down), -((left - header.width) // right)
        wanted += rows * (1 + -(-columns * bits // 8)) * (rows > 0 and columns > 0)
    unpacked = len(zlib.decompressobj().decompress(b"".join(packed), wanted))
    if unpacked != wanted:
        raise ValueError(f"it has {unpacked} of {wanted} bytes of pixels")
