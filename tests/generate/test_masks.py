"""Command that writes the masks of images."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxptd import Layout, Program, generate, make_mesh
from jaxptd.config import DataConfig
from jaxptd.errors import run_command
from jaxptd.vision import masks
from jaxptd.vision.png import read_png, write_png

PROGRAMS: dict[str, Any] = {}


def program(family: str) -> tuple[Program, Any]:
    """Tiny model with phantoms as its data and random parameters."""
    if family not in PROGRAMS:
        images = {"images.channels": 1, "images.classes": 4} if family != "gpt" else {}
        config = tiny.config(Layout(), family=family, **images)
        config = dataclasses.replace(config, data=DataConfig(source="shapes"))
        made = Program(config, make_mesh(config.layout))
        PROGRAMS[family] = made, drawn(made) if images else {}
    found: tuple[Program, Any] = PROGRAMS[family]
    return found


def drawn(program: Program) -> dict[str, Any]:
    """Draws parameters in numpy, which saves compiling `init_state`."""
    rng, abstract = np.random.default_rng(0), program.abstract_state["params"]
    return {
        name: jax.device_put(rng.normal(0, 0.3, x.shape).astype(x.dtype), x.sharding)
        for name, x in abstract.items()
    }


@pytest.fixture
def ask(tmp_path, monkeypatch, capfd):
    def run(*options: object, expect: int = 0, family: str = "swin-unet") -> str:
        monkeypatch.setattr(generate, "load_model", lambda *_, **__: program(family))
        argv = ["--run-dir", str(tmp_path), *map(str, options)]
        with pytest.raises(SystemExit) as end:
            run_command(functools.partial(generate.main, argv))
        out, err = capfd.readouterr()
        assert end.value.code == expect, err
        assert err.count("\n") == bool(expect)
        return err if expect else out

    return run


def test_masks_of_held_out_images(ask, tmp_path: Path) -> None:
    lines = ask("--samples", 2).splitlines()
    folder = tmp_path / "masks"
    names = ["held-out-0000", "held-out-0001"]
    assert lines == [f"{n} {folder / n}.png {folder / n}-overlay.png" for n in names]
    for name in names:
        mask = read_png((folder / f"{name}.png").read_bytes())
        assert mask.palette and mask.pixels.shape == (16, 16, 1)
        assert read_png((folder / f"{name}-overlay.png").read_bytes()).pixels.shape == (16, 16, 3)


def test_masks_of_files_where_they_are_asked_for(ask, tmp_path: Path) -> None:
    """A PNG and an array of the same pixels have the same mask."""
    inputs, out = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    image = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
    (inputs / "a.png").write_bytes(write_png(image))
    np.savez(inputs / "b.npz", image=image)
    found = json.loads(ask("--images", inputs, "--out", out, "--json"))
    assert [each["image"] for each in found] == ["a", "b"]
    assert found[0]["mask"] == str(out / "a.png")
    assert (out / "a.png").read_bytes() == (out / "b.png").read_bytes()
    assert ask("--images", inputs / "a.png", "--out", out, "--quiet") == (
        f"{out / 'a.png'} {out / 'a-overlay.png'}\n"
    )


def test_without_pillow_no_mask_is_computed(ask, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr(masks, "classes_of", None)
    line = (
        "a mask is a PNG, which needs Pillow; in the checkout of jaxptd, pip install -e '.[vision]'"
    )
    assert line in ask("--samples", 1, expect=2)
    assert not (tmp_path / "masks").exists()


def test_classes_of_whole_images_are_printed(ask, tmp_path: Path) -> None:
    name, number = ask("--samples", 1, family="swin").split()
    assert name == "held-out-0000" and 0 <= int(number) < 4
    assert not (tmp_path / "masks").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prompt", "a"], "--prompt is an option for text, but the model has model.family=swin"),
        (["--tokens", 3], "--tokens is an option for text"),
        (["--top-k", 3], "--top-k is an option for text"),
        (["--samples", 0], "--samples 0: use 1 to 10000 images"),
        (["--samples", 1, "--images", "x"], "--samples (held-out images) and --images are both"),
        (["--images", "none.png"], "none.png has no array 'image': [Errno 2] No such file"),
        (["--images", "DIR"], "has no .npz, .npy, .png file; name another folder"),
        (["--images", "DIR/a.png"], "a.png has no array 'image': it is not a PNG"),
        (
            ["--images", "DIR/b.png"],
            "b.png: image [8, 8, 1]; use [16, 16, 1], set by model.images.size",
        ),
        (["--images", "DIR/b.png", "DIR/b.png"], "two images are named b, as would be their"),
        (["--samples", 1, "--out", "DIR/c"], "c: File exists; name another directory"),
    ],
)
def test_bad_options_are_one_line(ask, tmp_path: Path, options: list, line: str) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    if options[1] != "DIR":
        (bad / "a.png").write_bytes(b"GIF89a")
        (bad / "b.png").write_bytes(write_png(np.zeros((8, 8), np.uint8)))
        (bad / "c").write_bytes(b"")
    given = [str(each).replace("DIR", str(bad)) for each in options]
    assert line in ask(*given, expect=2)


def test_options_of_images_are_none_of_text(ask) -> None:
    line = ask("--samples", 1, expect=2, family="gpt")
    assert "--samples is an option for images, but the model has model.family=gpt; " in line
