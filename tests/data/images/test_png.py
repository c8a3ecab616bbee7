"""PNG files: read as Pillow reads them, and written so that it reads them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxptd.data.images.png import SIGNATURE, read_png, write_png

RNG = np.random.default_rng(0)
SHAPE = 9, 13
SMOOTH = np.add.outer(np.arange(SHAPE[0]), 3 * np.arange(SHAPE[1])) % 256


def saved(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "png", **options)
    return file.getvalue()


@pytest.mark.parametrize("channels", [None, 2, 3, 4])
def test_pixels_are_read(channels: int | None) -> None:
    """Smooth pixels, for which Pillow uses all filters, and random ones."""
    shape = SHAPE if channels is None else (*SHAPE, channels)
    for offset in (0, RNG.integers(0, 256, shape)):
        smooth = SMOOTH.reshape(*SHAPE, *[1] * (len(shape) - 2))
        pixels = ((smooth + offset) % 256 * np.ones(shape)).astype(np.uint8)
        found = read_png(saved(Image.fromarray(pixels)))
        np.testing.assert_array_equal(found.pixels, pixels.reshape(*SHAPE, -1))
        assert found.pixels.dtype == np.uint8 and not found.palette


@pytest.mark.parametrize("kind", range(5))
def test_each_filter_is_undone(kind: int) -> None:
    """Files with one filter, that Pillow reads alike."""
    lines = RNG.integers(0, 256, (SHAPE[0], 3 * SHAPE[1]), np.uint8)
    whole = np.pad(lines, ((0, 0), (1, 0)), constant_values=kind)
    data = write_png(np.zeros((*SHAPE, 3), np.uint8))
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    packed = b"IDAT" + zlib.compress(whole.tobytes())
    middle = struct.pack(">I", len(packed) - 4) + packed + struct.pack(">I", zlib.crc32(packed))
    data = data[:start] + middle + data[end:]
    wanted = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(read_png(data).pixels, wanted)


def test_other_depths_are_read() -> None:
    wide = RNG.integers(0, 2**16, SHAPE).astype(np.uint16)
    np.testing.assert_array_equal(read_png(saved(Image.fromarray(wide))).pixels[..., 0], wide)
    for bits in (1, 2, 4, 8):
        number = RNG.integers(0, 2**bits, SHAPE).astype(np.uint8)
        image = Image.new("P", SHAPE[::-1])
        image.putpalette([*range(2**bits)] * 3)
        image.putdata(number.ravel().tolist())
        found = read_png(saved(image, bits=bits))
        assert found.palette
        np.testing.assert_array_equal(found.pixels[..., 0], number)


def test_what_is_written_is_read_by_others() -> None:
    gray, rgb = SMOOTH.astype(np.uint8), RNG.integers(0, 256, (*SHAPE, 3)).astype(np.uint8)
    for pixels in (gray, rgb):
        for found in (
            np.asarray(Image.open(io.BytesIO(write_png(pixels)))),
            read_png(write_png(pixels)).pixels,
        ):
            np.testing.assert_array_equal(np.squeeze(found), pixels)
    classes = gray % 3
    image = Image.open(io.BytesIO(write_png(classes, [(0, 0, 0), (1, 2, 3), (9, 8, 7)])))
    np.testing.assert_array_equal(np.asarray(image), classes)
    assert image.convert("RGB").getpixel((1, 0)) == (0, 0, 0)
    assert image.convert("RGB").getpixel((0, 1)) == (1, 2, 3)


DATA = write_png(SMOOTH.astype(np.uint8))


def changed(form: str, *numbers: int) -> bytes:
    """DATA with other numbers at the beginning of its header."""
    new = struct.pack(form, *numbers)
    header = b"IHDR" + new + DATA[16 + len(new) : 29]
    return DATA[:12] + header + struct.pack(">I", zlib.crc32(header)) + DATA[33:]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"GIF89a", "no PNG"),
        (SIGNATURE, "cut off"),
        (DATA[:-20], "cut off"),
        (DATA[:45] + b"\0" + DATA[46:], "its part IDAT is damaged"),
        (changed(">II", 2**20, 9), "9 x 1048576 pixels; 32768 are the most"),
        (changed(">II", 14, 9), "of 135 bytes of pixels"),
        (changed(">IIBBB", 13, 9, 8, 5, 0), "pixels of type 5 with 8 bits"),
        (changed(">IIBBBBB", 13, 9, 8, 0, 0, 0, 1), "it is interlaced; save it without"),
    ],
)
def test_damaged_files_are_named(data: bytes, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        read_png(data)
