"""Table 5 and figures 14 and 15: a Swin-UNet's memory on GPUs and in the host's memory, compiled.

Nothing is run. `configs/swin-unet-cardiac.yaml`, in float32 as Swin-Unet's code trains, is compiled
in the layouts of the table. Every row keeps what `model.remat: dots` keeps, since that is what
`layout.offload: activations` moves to the host.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, section 3.6.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence

from benchmarks.lib.compiler import QUICK_ON_GPUS, UNTRIED
from benchmarks.paper import published
from benchmarks.paper.memory import Memory, compiled_memory
from benchmarks.paper.models import parameters
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.compiling import PLUGINS
from jaxptd.config import Config
from jaxptd.layout import Layout

CONFIG = "swin-unet-cardiac"
WIDTH, GB = 100, 1e9  # as published
LIMITS = {"RTX 4090": 24 * 2**30, "V100": 32 * 2**30}
LAYOUTS = {
    "TP=2": Layout(tp=2),
    "TP=4": Layout(tp=4),
    "TP2D=4": Layout(row=2, col=2),
    "TP2D=4+CPU-offload": Layout(row=2, col=2, offload=("optimizer", "activations")),
}
GRID, OFFLOADED = list(LAYOUTS)[-2:]
# Options without which XLA spends minutes on tilings of kernels in Triton.
QUICK = UNTRIED | {
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}
QUICK_WORDS = (
    " `--quick`: XLA writes no softmax, norm or product in Triton, and compiles a row in a seventh "
    "of the time; memory differs from that of its own choice of kernels, by up to a fifth."
)
HEAD = ("layout", "here", "GPUs", "published GB", "GB of a GPU, compiled")
HEAD += ("published, % of the host's memory", "host GB of a GPU, compiled", "of all GPUs")


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout of the table with the memory of its compiled step.

    Args:
        name: of the layout in the paper.
        memory: of one GPU.
    """

    name: str
    memory: Memory

    @property
    def gpus(self) -> int:
        return LAYOUTS[self.name].num_devices

    @property
    def published(self) -> float:
        """Published GB of one GPU."""
        return published.segmentation(self.name, "memory")

    @property
    def cells(self) -> list[str]:
        """Its row of the table."""
        memory = self.memory
        return [
            self.name,
            f"`{LAYOUTS[self.name]}`",
            str(self.gpus),
            f"{self.published:.1f}",
            f"{memory.device / GB:.2f}",
            f"{published.segmentation(self.name, 'host memory'):.1f}",
            f"{memory.host / GB:.2f}",
            f"{self.gpus * memory.host / GB:.2f}",
        ]


def config(name: str) -> Config:
    """The config of a layout of the table."""
    base = load_config(CONFIG)
    model = dataclasses.replace(base.model, dtype="float32", remat="dots")
    return dataclasses.replace(base, model=model, layout=LAYOUTS[name])


def compiled(*, quick: bool) -> list[Row]:
    """Compiles every row, which takes minutes each, or with `QUICK` half a minute."""
    rows = []
    for name in LAYOUTS:
        rows.append(Row(name, compiled_memory(config(name), QUICK if quick else QUICK_ON_GPUS)))
        print(*rows[-1].cells, f"{rows[-1].memory.seconds:.0f} s", flush=True)
    return rows


# ---- page ---------------------------------------------------------------------------------------


def page(rows: Sequence[Row], *, quick: bool) -> str:
    """The page of results, in Markdown; quick: as the rows were compiled."""
    sections = (
        _introduction() + QUICK_WORDS * quick,
        _choices(),
        _order(rows),
        _offload(rows),
        _limits(rows),
    )
    first, second, *others = (
        textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in sections
    )
    made = table([HEAD, *(row.cells for row in rows)])
    return (
        "\n\n".join([versions("flax", "optax", *PLUGINS.split()), first, second, made, *others])
        + "\n"
    )


def _introduction() -> str:
    return (
        "Memory is of one GPU, and of what it has in the host's memory, during a step of this "
        "library, compiled for H200s: nothing was run or timed, and kernels of another GPU may "
        "need other workspace. What CUDA and its libraries hold themselves comes on top. Counted "
        "are arguments and temporaries. *Published*: measured by the paper's authors, with other "
        "software; figures 14 and 15 are pictures of the last row over time, and a compiled step "
        "needs the same every time."
    )


def _choices() -> str:
    base = load_config(CONFIG)
    model, images = base.model, base.model.images
    assert images is not None
    blocks, deepest = sum(images.depths) + sum(images.decoder_depths), images.depths[-1]
    return (
        "The paper names neither data set nor loss, nor batch, precision, or what its program "
        "keeps for backward. Here it is the published network of Swin-Unet "
        f"(`configs/{CONFIG}.yaml`): "
        f"{images.size} x {images.size} pixels, patches of {images.patch}, windows of "
        f"{images.window}, {model.hidden_size} hidden units and {model.num_heads} heads at the "
        f"first of {len(images.depths)} levels, {parameters(CONFIG) / 1e6:.1f} million "
        "parameters; 0.4 of the cross-entropy and 0.6 of a Dice loss; "
        f"{images.classes} classes, as ACDC has; {base.train.global_batch_size} images in a step, "
        "AdamW, float32, `remat: dots`. The paper says 12 layers: these are the network's "
        f"{blocks} blocks without the {deepest} of the deepest level."
    )


def _order(rows: Sequence[Row]) -> str:
    """Whether more memory is published wherever more is compiled."""
    turned = [
        f"{more.name} and {less.name}"
        for more, less in itertools.pairwise(rows)
        if more.memory.device <= less.memory.device
    ]
    steps = (
        f"{more.name} to {less.name}: {less.published / more.published - 1:+.0%} published, "
        f"{less.memory.device / more.memory.device - 1:+.0%} compiled"
        for more, less in itertools.pairwise(rows)
    )
    agrees = "The four are in the published order."
    differs = f"Not in the published order: {', '.join(turned)}."
    base = load_config(CONFIG)
    assert base.model.images is not None
    pixels = base.train.global_batch_size * base.model.images.size**2
    return (
        f"{differs if turned else agrees} {'; '.join(steps)}. TP cuts what is between the products "
        "of a pair: the residual stream, and the hidden units of all pixels before the last norm, "
        f"{4 * pixels * base.model.hidden_size / GB:.2f} GB an array, are whole on every GPU. A "
        "grid cuts these, too."
    )


def _offload(rows: Sequence[Row]) -> str:
    """What leaves a GPU, and how large the published host would be if it were all there."""
    by_name = {row.name: row for row in rows}
    grid, offloaded = by_name[GRID], by_name[OFFLOADED]
    saved = grid.published - offloaded.published
    share = sum(
        sign * published.segmentation(name, "host memory")
        for name, sign in ((OFFLOADED, 1), (GRID, -1))
    )
    return (
        f"Figure 14: {OFFLOADED} has {offloaded.memory.device / GB:.2f} GB on a GPU where {GRID} "
        f"has {grid.memory.device / GB:.2f}. Figure 15: it has {offloaded.memory.host / GB:.2f} GB "
        f"in the host's memory, {offloaded.gpus * offloaded.memory.host / GB:.2f} GB of all GPUs. "
        f"Published are {saved:.1f} GB less on a GPU and {share:.1f} % more of the host's memory: "
        f"if all of that came from {offloaded.gpus} GPUs, the host has "
        f"{100 * offloaded.gpus * saved / share:.0f} GB, a size that the paper does not name."
    )


def _limits(rows: Sequence[Row]) -> str:
    most = max(row.memory.device for row in rows)
    room = [name for name, size in LIMITS.items() if most <= size]
    sizes = ", ".join(f"{name}: {size / GB:.1f} GB" for name, size in LIMITS.items())
    return (
        f"Limits: {sizes}. The paper names RTX 4090 for its other experiments and no GPU for this "
        f"one; all rows have room on {' and '.join(room) or 'none of them'}."
    )
