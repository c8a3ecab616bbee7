"""PNG files: pixels equal the stored values; damaged files and a missing Pillow are refused."""

import io
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxptd.config import DataConfig, ModelConfig
from jaxptd.errors import UserError
from jaxptd.vision.data import open_images, read_image
from jaxptd.vision.png import LONGEST, SIGNATURE, read_png, write_png

RNG = np.random.default_rng(0)
SHAPE = 9, 13
SMOOTH = np.add.outer(np.arange(SHAPE[0]), 3 * np.arange(SHAPE[1])) % 256


def saved(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "png", **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + checksum(name + content)


def checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


def rows(number: np.ndarray, bits: int) -> bytes:
    """Rows of values `[Y, X]` with this many bits, without a filter."""
    bit = np.unpackbits(number.astype(">u2")[..., None].view(np.uint8), axis=-1)[..., -bits:]
    return np.pad(np.packbits(bit.reshape(len(number), -1), axis=1), ((0, 0), (1, 0))).tobytes()


def encoded(number: np.ndarray, bits: int, *, kind: int = 0, interlaced: bool = False) -> bytes:
    """A file with one sample per pixel, encoded here because Pillow writes few kinds."""
    passes: Iterable[np.ndarray] = [number]
    if interlaced:
        places = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2)]
        places += [(0, 1, 2, 2), (1, 0, 2, 1)]
        passes = [number[y::down, x::right] for y, x, down, right in places]
    packed = zlib.compress(b"".join(rows(each, bits) for each in passes if each.size))
    height, width = number.shape
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, interlaced)
    parts = (
        (b"IHDR", header),
        (b"PLTE", bytes(768) * (kind == 3)),
        (b"IDAT", packed),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(chunk(*part) for part in parts if part[1] or part[0] == b"IEND")


@pytest.mark.parametrize("channels", [None, 2, 3, 4])
def test_pixels_are_read(channels: int | None) -> None:
    """Random pixels, and smooth ones for which Pillow uses all filters."""
    shape = SHAPE if channels is None else (*SHAPE, channels)
    for offset in (0, RNG.integers(0, 256, shape)):
        smooth = SMOOTH.reshape(*SHAPE, *[1] * (len(shape) - 2))
        pixels = ((smooth + offset) % 256 * np.ones(shape)).astype(np.uint8)
        found = read_png(saved(Image.fromarray(pixels)))
        np.testing.assert_array_equal(found.pixels, pixels.reshape(*SHAPE, -1))
        assert found.pixels.dtype == np.uint8 and not found.palette


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits"), [*((0, bits) for bits in (1, 2, 4, 8, 16)), *((3, n) for n in (1, 2, 4, 8))]
)
def test_gray_and_palettes_of_any_depth_are_the_numbers_in_the_file(
    kind: int, bits: int, interlaced: bool
) -> None:
    """Labels are stored like this; Pillow alone turns a two-bit 1 into 85."""
    for height, width in (SHAPE, (1, 3)):  # the smaller one has empty passes
        number = RNG.integers(0, 2**bits, (height, width))
        found = read_png(encoded(number, bits, kind=kind, interlaced=interlaced))
        np.testing.assert_array_equal(found.pixels[..., 0], number)
        assert found.palette == (kind == 3)
        assert found.pixels.dtype == (np.uint16 if bits == 16 else np.uint8)


def test_the_first_image_of_an_animation_is_read() -> None:
    first, second = (Image.fromarray(RNG.integers(0, 256, SHAPE, np.uint8)) for _ in range(2))
    for default in (False, True):
        data = saved(first, save_all=True, append_images=[second], default_image=default)
        np.testing.assert_array_equal(read_png(data).pixels[..., 0], np.asarray(first))


def test_what_is_written_is_read_by_others() -> None:
    gray, rgb = SMOOTH.astype(np.uint8), RNG.integers(0, 256, (*SHAPE, 3)).astype(np.uint8)
    for pixels in (gray, rgb):
        assert write_png(pixels) == write_png(pixels.copy())
        for found in (
            np.asarray(Image.open(io.BytesIO(write_png(pixels)))),
            read_png(write_png(pixels)).pixels,
        ):
            np.testing.assert_array_equal(np.squeeze(found), pixels)
    colors = [(0, 0, 0), (1, 2, 3), (9, 8, 7)]
    classes = gray % 3
    image = Image.open(io.BytesIO(write_png(classes.astype(np.int32), colors)))
    np.testing.assert_array_equal(np.asarray(image), classes)
    assert image.mode == "P" and image.getpalette() == [*sum(colors, ())]
    assert image.convert("RGB").getpixel((1, 0)) == (0, 0, 0)
    assert image.convert("RGB").getpixel((0, 1)) == (1, 2, 3)


def test_large_images_are_read_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)  # it warns above, refuses twice that
    assert read_png(DATA).pixels.shape == (*SHAPE, 1)


DATA = encoded(SMOOTH, 8)


def changed(form: str, *numbers: int) -> bytes:
    """DATA with the beginning of its header replaced."""
    new = struct.pack(form, *numbers)
    return DATA[:8] + chunk(b"IHDR", new + DATA[16 + len(new) : 29]) + DATA[33:]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "not a PNG"),
        (b"GIF89a", "not a PNG"),
        (SIGNATURE, "no header"),
        (DATA[:40], "damaged: "),
        (DATA[:-20], "damaged: "),
        (DATA[:-12], "damaged: "),
        (DATA[:-2], "cut off"),
        (DATA[:45] + b"\0" + DATA[46:], "damaged: .*checksum in b'IDAT"),
        (DATA[:23] + b"\7" + DATA[24:], "damaged: .*IHDR"),
        (changed(">II", 2**20, 9), f"9 x 1048576 pixels; each may be at most {LONGEST}"),
        (changed(">II", 13, 0), f"0 x 13 pixels; each may be at most {LONGEST}"),
        (changed(">II", 14, 9), "of 135 bytes of pixels"),
        (changed(">II", 13, 10), "it has 126 of 140 bytes of pixels"),
        (encoded(SMOOTH[:-1], 8)[:8] + DATA[8:33] + encoded(SMOOTH[:-1], 8)[33:], "112 of 126 by"),
        (changed(">IIBB", 13, 9, 8, 5), "pixels of type 5 with 8 bits"),
        (changed(">IIBB", 13, 9, 3, 0), "damaged: "),
        *((changed(">IIBB", 13, 9, 16, kind), "16 bits in each of several") for kind in (2, 4, 6)),
    ],
)
def test_damaged_files_are_named(data: bytes, line: str) -> None:
    with pytest.raises(ValueError, match=line) as error:
        read_png(data)
    assert "\n" not in str(error.value)


def test_any_damage_is_one_line() -> None:
    """Changed bytes with valid checksums give pixels or a ValueError."""
    files = DATA, encoded(SMOOTH % 4, 2, kind=3), saved(Image.fromarray(SMOOTH.astype(np.uint8)))
    outcomes = set()
    for place in range(8, max(map(len, files))):
        for data in files:
            whole = bytearray(data)
            whole[place % len(whole)] ^= 1 << place % 8
            end = 8
            while end + 8 < len(whole):  # checksums of all parts
                start, end = end, end + 12 + struct.unpack(">I", whole[end : end + 4])[0]
                whole[end - 4 : end] = checksum(whole[start + 4 : end - 4])
            try:
                outcomes.add(type(read_png(bytes(whole))))
            except ValueError as error:
                outcomes.add(type(error))
                assert "\n" not in str(error)
    assert outcomes == {ValueError, type(read_png(DATA))}


IMAGES = ModelConfig(
    family="swin-unet", images={"size": 16, "patch": 2, "window": 4, "depths": (2, 2)}
).images


def test_without_pillow_the_file_and_the_extra_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses when the data are opened, before a step is compiled; arrays need no Pillow."""
    for name in ("image", "label"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(write_png(np.eye(16)))
        np.save(tmp_path / name / "b.npy", np.eye(16))
    data = DataConfig(source=str(tmp_path), validation_fraction=0)
    monkeypatch.setitem(sys.modules, "PIL", None)
    line = r"a.png is a PNG, which needs Pillow; .*pip install -e '\.\[vision\]'"
    with pytest.raises(UserError, match=f"^data.source: .*image/{line}"):
        open_images(data, IMAGES, seed=0)
    with pytest.raises(UserError, match=f"^.*image/{line}"):
        read_image(tmp_path / "image" / "a.png", 16, 1)
    with pytest.raises(UserError, match="^writing a PNG needs Pillow"):
        write_png(np.eye(16))
    assert read_image(tmp_path / "image" / "b.npy", 16, 1).shape == (16, 16, 1)
    for name in ("image", "label"):
        (tmp_path / name / "a.png").unlink()
    train, _ = open_images(data, IMAGES, seed=0)
    np.testing.assert_array_equal(train.field("label", np.array([0]))[0], np.eye(16))
