"""The picture of RingQK and RingAV: which block each device multiplies at each step.

Letters: n devices; Q, K, V blocks of a quarter of the sequence each.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from jaxptd.plot.colors import COLORS, INK
from jaxptd.plot.style import new_picture, save_pictures, styled

DEVICES = 4
PICTURE = "paper_ring.svg"


def block(device: int, step: int, n: int = DEVICES) -> int:
    """The block of keys, or of values, that a device has at a step: each passes its to the next."""
    return (device - step) % n


@styled
def picture() -> Figure:
    """Draws the rows of scores that each device completes, and the sums that it makes of values."""
    figure = new_picture(9, 4.9)
    for axes, letter in zip(figure.subfigures(2, 1), "KV", strict=True):
        product = "RingQK: scores = Q Kᵀ" if letter == "K" else "RingAV: output = softmax(scores) V"
        words = f"{product}; between steps each device passes its {letter} to the next"
        axes.suptitle(words, x=0.01, ha="left", color=INK)
        for step, panel in enumerate(axes.subplots(1, DEVICES)):
            _step(panel, step, letter)
    return figure


def _step(axes: Axes, step: int, letter: str) -> None:
    """Draws one step: a row of blocks a device, those that are done, and the one that is made."""
    for device in range(DEVICES):
        for at in range(DEVICES):
            done = at in {block(device, earlier) for earlier in range(step)}
            now = at == block(device, step)
            color = COLORS[at] if now or done else "none"
            alpha = 1.0 if now else 0.35
            axes.add_patch(Rectangle((at, device), 0.92, 0.86, fc=color, ec=INK, alpha=alpha, lw=1))
        at = block(device, step)
        words = f"{letter}{at}"
        axes.text(at + 0.46, device + 0.43, words, ha="center", va="center", color="white")
    if step:
        arrow = FancyArrowPatch((-0.3, 0.4), (-0.3, DEVICES - 0.6), arrowstyle="->", color=INK)
        arrow.set_mutation_scale(12)
        axes.add_patch(arrow)
    axes.set(xlim=(-0.6, DEVICES), ylim=(DEVICES, -0.1), aspect="equal", xticks=[])
    axes.set_yticks([device + 0.43 for device in range(DEVICES)])
    axes.set_yticklabels([f"device {device}" if step == 0 else "" for device in range(DEVICES)])
    axes.tick_params(length=0)
    axes.set_xlabel(f"step {step}")
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw(directory: Path) -> None:
    """Writes the picture, with the same bytes each time."""
    save_pictures({PICTURE: picture}, directory)
