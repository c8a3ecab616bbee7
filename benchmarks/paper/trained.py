"""Figures 8 to 10 and 13: losses of small models trained in both of the paper's layouts.

`jaxptd.train` trains every model on four simulated devices, once with TP=4 and once on a 2 x 2
grid: GPT, BERT and T5 on the bytes of the Python standard library's source, in float32 and again in
float64; a Swin-UNet on phantoms of a heart in float64. In float64 the curves could differ only if
one layout computed something else. Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5),
2025, sections 3.5 and 3.6.
"""

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxptd
from benchmarks.lib.pages import joined
from benchmarks.paper.published import MODELS, PaperModel
from jaxptd.analysis.report import table, versions
from jaxptd.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Images,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    nested,
)
from jaxptd.layout import Layout
from jaxptd.vision.data import SHAPES
from jaxptd.vision.masks import held_out

LAYOUTS = (Layout(tp=4), Layout(row=2, col=2, ring="blockwise"))
SMALL = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "seq_length": 64}
BATCH = 8
DTYPES = ("float32", "float64")
NEVER = CheckpointConfig(every=0)
PACKAGES = ("flax", "optax")


def _train(steps: int, run_dir: Path, **more: Any) -> TrainConfig:
    same: dict[str, Any] = {"global_batch_size": BATCH, "log_every": 1, "sample_tokens": 0}
    return TrainConfig(steps=steps, run_dir=str(run_dir), platform="cpu", **same, **more)


def _run(config: Config) -> Any:
    """Trains a config.

    Raises:
        KeyboardInterrupt: a signal stopped the training.
    """
    start = time.perf_counter()
    run = jaxptd.train(config, quiet=True)
    if run.stopped:
        raise KeyboardInterrupt
    name, seconds = config.model.family, time.perf_counter() - start
    print(f"{name} {config.layout}: {run.metrics['loss'][-1]:.4f}, {seconds:.0f} s", flush=True)
    return run


# ---- figures 8 to 10 ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Curves:
    """The losses of one model with TP=4 and on the grid, at every step, in nats per target."""

    name: str
    dtype: str
    tp: np.ndarray
    tp2d: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        return np.abs(self.tp - self.tp2d)

    @property
    def row(self) -> list[str]:
        found = self.differences
        ends = [f"{self.tp[0]:.4f}", f"{self.tp[-1]:.4f}"]
        step = int(found.argmax()) + 1
        return [self.name, self.dtype, *ends, f"{found.max():.1e}", str(step)]


def losses(model: PaperModel, layout: Layout, *, dtype: str, steps: int) -> np.ndarray:
    """Trains a small model of a family and returns the loss of each step."""
    small = ModelConfig(family=model.family, dtype=dtype, **nested({**SMALL, **model.small}))
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=30)
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(dtype == "float64"):
        train = _train(steps, Path(folder) / "run", eval_every=0)
        run = _run(Config(small, layout, optimizer=optimizer, train=train, checkpoint=NEVER))
        return np.asarray(run.metrics["loss"])


def trained(
    models: Sequence[PaperModel] = MODELS[:1], dtypes: Sequence[str] = DTYPES[:1], *, steps: int
) -> list[Curves]:
    """Trains models in both layouts; by default the GPT of figures 8 and 9."""
    return [
        Curves(m.name, dtype, *(losses(m, each, dtype=dtype, steps=steps) for each in LAYOUTS))
        for dtype in dtypes
        for m in models
    ]


def _shown(steps: int, rows: int) -> list[int]:
    """The steps to show in a table with this many rows after the first."""
    return sorted({1, *(steps * i // rows for i in range(1, rows + 1))} - {0})


def figure_9(found: Sequence[Curves]) -> str:
    """The table of figures 8 and 9: loss and perplexity of GPT."""
    both = found[0].tp, found[0].tp2d
    rows = [["step", "loss, TP=4", "loss, 2 x 2", "perplexity, TP=4", "perplexity, 2 x 2"]]
    for n in _shown(both[0].size, 6):
        perplexities = (f"{np.exp(x[n - 1]):.2f}" for x in both)
        rows.append([str(n), *(f"{x[n - 1]:.4f}" for x in both), *perplexities])
    words = f"The largest difference between losses is {found[0].differences.max():.1e}."
    return joined(versions(*PACKAGES), words, table(rows))


def figure_10(found: Sequence[Curves]) -> str:
    """The tables of figure 10: differences between the layouts, and losses in float32."""
    head = ["model", "precision", "loss of step 1", "of the last step", "largest difference"]
    narrow = [each for each in found if each.dtype == DTYPES[0]]
    names = [f"{each.name}, {name}" for each in narrow for name in ("TP=4", "2 x 2")]
    columns = [x for each in narrow for x in (each.tp, each.tp2d)]
    shown = _shown(columns[0].size, 10)
    rows = [[str(step), *(f"{x[step - 1]:.4f}" for x in columns)] for step in shown]
    differences = table([[*head, "in step"], *(each.row for each in found)])
    return joined(versions(*PACKAGES), differences, table([["step", *names], *rows]))


# ---- figure 13 ----------------------------------------------------------------------------------

SWIN_LAYOUTS = {"TP=4": Layout(tp=4), "TP2D=4": Layout(row=2, col=2, matmul2d="gather")}
IMAGES = Images(32, 1, 4, patch=2, window=4, depths=(2, 2), decoder_depths=(2,), dice="image")
SWIN = ModelConfig(family="swin-unet", hidden_size=16, num_heads=2, dtype="float64", images=IMAGES)
EVALUATIONS, CHECKED, HEARTS = 4, 16, 3  # per run; batches in each; hearts drawn
# With 4e-3 training is unstable: from step 17 on, rounding errors double in each step.
SWIN_OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=20)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses; Dice coefficients, NaN where not evaluated; classes `[HEARTS, rows, columns]`."""

    loss: np.ndarray
    dice: np.ndarray
    found: np.ndarray


@dataclasses.dataclass(frozen=True)
class Hearts:
    """Held-out hearts `[HEARTS, rows, columns(, 1)]`, and what each layout found in them."""

    image: np.ndarray
    label: np.ndarray
    trained: Mapping[str, Trained]

    @property
    def evaluated(self) -> np.ndarray:
        """The steps with an evaluation, counted from 1."""
        first, *_ = self.trained.values()
        return np.flatnonzero(np.isfinite(first.dice)) + 1

    def difference(self, name: str) -> float:
        """The largest difference between the two layouts in the values of a column."""
        tp, tp2d = (getattr(each, name) for each in self.trained.values())
        return float(np.nanmax(np.abs(tp - tp2d)))

    @property
    def same_pixels(self) -> float:
        """The share of pixels in which both layouts found the same class."""
        tp, tp2d = (each.found for each in self.trained.values())
        return float(np.mean(tp == tp2d))


def hearts(steps: int) -> Hearts:
    """Trains in both layouts and segments the first held-out hearts."""
    found, image, label = dict[str, Trained](), np.empty(0), np.empty(0)
    for name, layout in SWIN_LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
            every = max(1, steps // EVALUATIONS)
            train = _train(steps, Path(folder) / "run", eval_every=every, eval_batches=CHECKED)
            data = DataConfig(source=SHAPES)
            config = Config(SWIN, layout, data=data, optimizer=SWIN_OPTIMIZER, train=train)
            run = _run(dataclasses.replace(config, checkpoint=NEVER))
            image, label = (
                held_out(run.config, run.data.validation, field, HEARTS)
                for field in ("image", "label")
            )
            columns = run.metrics["loss"], run.metrics["validation_dice"]
            found[name] = Trained(*columns, run.classes(image))
    return Hearts(image, label, found)


def figure_13(found: Hearts) -> str:
    """The table of figure 13: losses and Dice coefficients, and how the layouts differ."""
    head = ["step", *(f"{what}, {name}" for what in ("loss", "mean Dice") for name in SWIN_LAYOUTS)]
    both = found.trained.values()
    columns = [*(each.loss for each in both), *(each.dice for each in both)]
    rows = [[str(step), *(f"{x[step - 1]:.4f}" for x in columns)] for step in found.evaluated]
    words = (
        f"Largest difference in loss {found.difference('loss'):.1e}, in Dice coefficient "
        f"{found.difference('dice'):.1e}; the same class in {found.same_pixels:.2%} of the pixels."
    )
    return joined(versions(*PACKAGES), words, table([head, *rows]))
