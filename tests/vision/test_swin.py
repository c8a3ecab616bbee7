"""Swin and Swin-UNet: steps equal one device's on layouts; unsupported options are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from one_device import hold, verified

from jaxptd import (
    Config,
    Layout,
    ModelConfig,
    Program,
    TrainConfig,
    UserError,
    make_mesh,
    train,
)
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.analysis.jaxprs import traced
from jaxptd.config import nested
from jaxptd.models.families import work_of
from jaxptd.run.folder import RunDir
from jaxptd.vision.png import read_png
from jaxptd.vision.windows import Windows

DROPS = {"family": "swin-unet", "dropout": 0.1, "images.drop_path": 0.3}
ONE = {"micro_batches": 1}
TOGETHER = {"images.dice": "batch", **ONE}
# Three levels: the last is one window; on cp=4 the second has fewer rows of windows than devices.
LARGE = {"images.size": 32, "images.depths": (2, 2, 2), "images.decoder_depths": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(cp=2, tp=2, sequence_parallel=True), {"remat": "dots"}),
        (Layout(tp=2, sequence_parallel=True), {"remat": "dots"}),
        (Layout(dp=2, cp=2, tp=2, sequence_parallel=True, zero=3), {"remat": "full", **ONE}),
        (Layout(cp=4, zero=2), {"remat": "attention", **ONE, **LARGE}),
        (Layout(cp=2, offload="optimizer"), {"scan_layers": False}),
        (Layout(cp=2, row=2, col=2, attention2d="blocks"), {"remat": "full"}),
        (Layout(cp=2, row=2, col=2, matmul2d="cannon", zero=1), ONE | LARGE),
        (Layout(row=2, col=2), {}),
        (Layout(tp=4), {"remat": "attention"}),
        (Layout(dp=2, zero=3), {"remat": "full", **ONE}),
        (Layout(dp=2, tp=2, sequence_parallel=True, collective_matmul=True, zero=2), ONE),
        (Layout(row=2, col=2, attention2d="blocks"), {}),
        (Layout(row=2, col=4, matmul2d="summa"), {"remat": "full"}),
        (Layout(row=2, col=2, matmul2d="fox"), {"optimizer": "muon"}),
        (Layout(row=2, col=2, dp=2, matmul2d="cannon", zero=1), {}),
        (Layout(row=2, col=2, matmul2d_slices=3), {"optimizer": "adafactor"}),
        (Layout(tp=2, offload="optimizer"), {"scan_layers": False}),
        (Layout(tp=2, offload="activations"), {"remat": "dots"}),
        (Layout(dp=2, tp=2, sequence_parallel=True), TOGETHER),
        (Layout(dp=2, cp=2, zero=3), TOGETHER),
        (Layout(dp=2, row=2, col=2, zero=2), TOGETHER),
    ],
    ids=str,
)
def test_a_step_equals_one_devices(layout: Layout, choice: dict[str, Any]) -> None:
    """Pads 3 heads to 4 on two devices, and 6 hidden units to 8 on four."""
    hold(layout, **DROPS | choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (Layout(tp=2, sequence_parallel=True), 16),
        (Layout(row=2, col=2), 16),
        (Layout(cp=2, row=2, col=2), 16),
        (Layout(cp=2, tp=2, sequence_parallel=True), 32),
    ],
    ids=str,
)
def test_a_classifier_is_verified(layout: Layout, size: int) -> None:
    """Uses the noise of several steps, as gradients of few images sum few, equal numbers.

    On cp=2, small images have a whole last level, large ones have it in strips.
    """
    found = verified(layout, family="swin", **{"images.drop_path": 0.3, "images.size": size})
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


@pytest.mark.slow
def test_temporary_bytes_of_a_large_image_fall_as_cp_grows() -> None:
    """No device holds a whole image; shifting strips by a gather would need 0.55 of the bytes."""
    sizes = {"images.size": 512, "images.window": 2, "images.depths": (2,), "remat": "full"}
    sizes |= {"hidden_size": 16, "ffn_hidden_size": 8, "num_heads": 1}
    one = {"family": "swin", "batch": 1, "micro_batches": 1, **sizes}
    programs = (tiny.program(Layout(cp=cp), **one) for cp in (2, 4))
    halves, quarters = (
        traced(program).lower().compile().memory_analysis().temp_size_in_bytes
        for program in programs
    )
    assert quarters <= 0.51 * halves


@pytest.mark.parametrize("family", ["swin", "swin-unet"])
def test_flops_are_those_of_every_matrix_and_score(family: str) -> None:
    """Six per weight and patch that it multiplies, twelve per element of a query and key patch."""
    program = tiny.program(Layout(), family=family)
    patches, weights = {0: 64, 1: 16}, 0
    for name, info in program.infos.items():
        if not info.decay:
            continue
        level = next((int(digit) for digit in name.partition(".")[0] if digit.isdigit()), 0)
        level += name.startswith("expand")
        pixels = {"swin": 1, "swin-unet": 256}[family]
        each = pixels if name.startswith("head") else patches[level]
        weights += each * int(np.prod(info.shape))
    blocks = {"swin": (4, 2), "swin-unet": (4 + 2, 2)}[family]
    scores = sum(n * patches[i] * 12 * 6 * 2**i * 16 for i, n in enumerate(blocks))
    assert work_of(program.config.model) == (64, 6 * weights + scores)


def test_windows_are_split_and_joined() -> None:
    windows = Windows(8, 4, 2)
    x = np.arange(2 * 8 * 8 * 3).reshape(2, 8, 8, 3)
    split = np.asarray(windows.split(x))
    np.testing.assert_array_equal(split[1, 2].reshape(4, 4, 3), x[1, 4:, :4])
    np.testing.assert_array_equal(windows.join(split), x)


def test_a_shifted_window_sees_neighbours_only() -> None:
    """The window in the corner contains parts of all four corners of the image."""
    seen = np.asarray(Windows(8, 4, 2).seen(np.arange(8)))
    assert seen[0].all()
    corner = seen[3].reshape(4, 4, 4, 4)
    assert corner[0, 0, :2, :2].all()
    assert corner[0, 0].sum() == 4


IMAGE = {"family": "swin-unet", "hidden_size": 6, "num_heads": 3, "images.size": 16}
IMAGE |= {"images.patch": 2, "images.window": 4, "images.depths": (2, 2)}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"images.size": 20},
            "model.images.size=20 makes 10 rows of patches at level 0, which wind",
        ),
        ({"images.size": 18, "images.window": 3}, "model.images.size=18 does not split into patch"),
        (
            {"images.depths": (2, 3)},
            r"model.images.depths=\[2, 3\]: every second block of a level sh",
        ),
        ({"images.depths": (2,)}, r"model.images.depths=\[2\] has 1 levels; use 2 or more"),
        (
            {"images.decoder_depths": (2, 2)},
            r"model.images.decoder_depths=\[2, 2\]: model.images.dep",
        ),
        ({"images.classes": 1}, "model.images.classes=1: use 2 or more"),
        ({"images.window": 0}, "model.images.window=0 must be a number above 0"),
        ({"family": "gpt"}, "model.images.size=16 has no effect with the family gpt; leave it ou"),
        ({"images.drop_path": 1.0}, "model.images.drop_path=1.0"),
        (
            {"family": "swin", "images.dice": "image"},
            "model.images.dice=image has no effect with the family swin, whose loss has no Dice",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        ModelConfig(**nested(IMAGE | fields))


def test_the_dice_loss_of_a_batch_has_no_micro_batches() -> None:
    model, train = (
        ModelConfig(**nested(IMAGE | {"images.dice": "batch"})),
        TrainConfig(micro_batches=2),
    )
    with pytest.raises(
        UserError, match="model.images.dice=batch covers all images of a step, but t"
    ):
        Program(Config(model, train=train), make_mesh(Layout()))


def test_dropped_paths_are_of_images() -> None:
    with pytest.raises(
        UserError, match="model.images.drop_path=0.1 has no effect with the family gpt"
    ):
        ModelConfig(images={"drop_path": 0.1})


@pytest.mark.parametrize(
    ("fields", "layout", "line"),
    [
        ({"seq_length": 8}, Layout(), "model.seq_length=8 has no effect with the family swin-unet"),
        ({"products": "fp8"}, Layout(), "model.products=fp8 has no effect with the family swin-u"),
        ({}, Layout(pp=2), "layout.pp=2: levels of the family swin-unet do not split over stages"),
        ({}, Layout(cp=4), "layout.cp=4 cuts images into strips of whole windows, and level 0 has"),
        (
            {},
            Layout(dp=2, cp=2),
            "layout.cp=2: level 1 has 1 rows of windows, too few for strips, so .* multiple of 4",
        ),
        ({}, Layout(ulysses=2), "layout.ulysses=2 splits sequences; images are split in strips"),
        ({}, Layout(cp=2, ring="rsa"), "layout.ring=rsa is for keys of a sequence, which images"),
        (
            {},
            Layout(row=4, col=2),
            "layout.row=4 shares the images of a micro-batch, but there are",
        ),
        (
            {},
            Layout(tp=4, sequence_parallel=True),
            "layout.tp=4 with layout.sequence_parallel=true shares the images",
        ),
    ],
)
def test_layouts_that_images_do_not_have_are_refused(
    fields: dict[str, Any], layout: Layout, line: str
) -> None:
    model, size = ModelConfig(**nested(IMAGE | fields)), TrainConfig(global_batch_size=2)
    with pytest.raises(UserError, match=line):
        Program(Config(model, layout, train=size), make_mesh(layout))


def test_a_batch_has_images_and_labels() -> None:
    program = tiny.program(Layout(dp=2), family="swin-unet")
    batch = random_batch(program.config)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "image": ((8, 16, 16, 2), np.float32),
        "label": ((8, 16, 16), np.int32),
    }
    program.place(batch)
    for name, wrong, line in (
        ("image", batch["image"].astype(int), "a batch holds image of int64; use an array of f"),
        ("label", batch["label"] + 3, "a batch holds label with 5; use .* model.images.classes=3"),
        ("image", batch["image"][:, :8], "use .* train.global_batch_size x model.images.size x mo"),
    ):
        with pytest.raises(UserError, match=line):
            program.place(batch | {name: wrong})


@pytest.mark.slow
def test_phantoms_are_learned_scored_and_shown(tmp_path: Path, capsys) -> None:
    sizes = ["--model.hidden_size=8", "--model.images.size=32", "--model.images.depths=[2,2]"]
    run = ["--train.steps=4", "--train.eval_every=4", "--train.eval_batches=1"]
    where = [f"--train.run_dir={tmp_path}", "--checkpoint.every=0", "--train.log_every=1"]
    assert train.main(["--config", "swin-unet-shapes", *sizes, *run, *where]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{tmp_path / 'predictions.png'}: 8 held-out images")
    assert read_png((tmp_path / "predictions.png").read_bytes()).pixels.shape == (1056, 396, 3)
    row = RunDir(tmp_path).metrics()[-1]
    for score in ("validation_dice", "validation_hd95"):
        scores = [row[f"{score}_{number}"] for number in (1, 2, 3)]
        assert row[score] == pytest.approx(sum(scores) / 3, rel=1e-5)
    assert "perplexity" not in row
    assert row["loss"] == pytest.approx(row["cross_entropy"] + row["dice_loss"], rel=1e-5)
    assert "dice" not in row
