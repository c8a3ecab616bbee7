"""Memory of ring self-attention and of tensor parallelism: published formulas, compiled steps.

`python -m benchmarks.paper --ring`: elements of one layer with its gradients and its optimizer's
state, on one of N devices, and a picture of RingQK and RingAV: `ring_picture.py`.

Letters, as published: B sequences, L tokens, H hidden size, Z heads of size A, N devices.
Source: Li et al., arXiv 2105.13120, tables 1 and 2.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.paper.formulas.growth import Growth, growth, simulated
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.mesh import Layout
from jaxptd.run.devices import prepare

DEVICES, HEADS = 4, 4
FLOAT32 = 4  # bytes


class Size(NamedTuple):
    """B sequences of L tokens, H hidden."""

    B: int
    L: int
    H: int


SIZES = (Size(1, 64, 128), Size(4, 512, 64))  # on both sides of the break-even
LAYOUTS = {
    "tensor parallel": Layout(tp=DEVICES),
    "ring": Layout(cp=DEVICES, ring="rsa"),
}


def mlp(size: Size, N: int, *, ring: bool) -> float:
    """Elements of the MLP on a device: 8 H^2 parameters four times, and activations; table 1."""
    B, L, H = size
    return 32 * H**2 + 5 * B * L * H / N if ring else 32 * H**2 / N + 4 * B * L * H / N + B * L * H


def attention(size: Size, N: int, *, ring: bool, Z: int = HEADS) -> float:
    """Elements of multi-head attention on a device; its scores are B Z L^2 / N; table 2."""
    B, L, H = size  # H is Z A
    both = 4 * B * L * H / N + B * Z * L**2 / N
    return 16 * H**2 + both + B * L * H / N if ring else 16 * H**2 / N + both + B * L * H


def published(size: Size, N: int, *, ring: bool) -> float:
    """Elements of a layer, as published."""
    return mlp(size, N, ring=ring) + attention(size, N, ring=ring)


def break_even(H: int, N: int) -> float:
    """B L from which the ring needs less: 48 H^2 (1 - 1/N) = B L H (2 + 8/N - 10/N)."""
    return 48 * H * (1 - 1 / N) / (2 - 2 / N)


@dataclasses.dataclass(frozen=True)
class Row:
    """A size in a layout, with what one more layer costs."""

    name: str
    size: Size
    growth: Growth

    @property
    def cells(self) -> list[str]:
        found, ring = self.growth, self.name == "ring"
        figures = (
            published(self.size, DEVICES, ring=ring),
            (found.state + found.gradients + found.formula) / FLOAT32,
            found.total / FLOAT32,
        )
        return [*(str(n) for n in self.size), self.name, *(f"{n:,.0f}" for n in figures)]


def config(size: Size, layout: Layout) -> Config:
    """A GPT of these sizes, float32, with all kept."""
    model = ModelConfig(
        num_layers=2, hidden_size=size.H, num_heads=HEADS, seq_length=size.L, vocab_size=256
    )
    return Config(model, layout, train=TrainConfig(global_batch_size=size.B, platform="cpu"))


def compiled() -> list[Row]:
    """Compiles every size in both layouts for simulated devices."""
    rows = []
    for size in SIZES:
        for name, layout in LAYOUTS.items():
            made = config(size, layout)
            prepare(made)
            rows.append(Row(name, size, growth(made, simulated)))
            print(*rows[-1].cells, flush=True)
    return rows


HEAD = ("B", "L", "H", "layout", "published", "formula here", "compiled")
INTRODUCTION = f"""\
Elements of one layer on one of N = {DEVICES} devices: parameters, gradients, Adam's moments, and
what is kept for backward, with Z = {HEADS} heads. *Published*: Li et al., arXiv 2105.13120, tables
1 and 2, the sum of MLP and attention: `48 H^2 / N + 8 B L H / N + 2 B L H + B Z L^2 / N` with
tensor parallelism, `48 H^2 + 10 B L H / N + B Z L^2 / N` with a ring. *Formula here*: of this
library's layer. *Compiled*: steps of 4 layers less those of 2, halved, float32, for simulated
devices."""


def page(rows: Sequence[Row], picture: str = "") -> str:
    """The page of results, in Markdown; picture: a file to show, if any."""
    H = SIZES[-1].H
    words = f"""\
By the published sums a ring needs less memory from B L = 24 H on, whatever N is: from
{break_even(H, 4):,.0f} tokens for H = {H}. Here a tensor parallel layer keeps no scores, and
neither does the default ring (`zigzag`). `ring: rsa` is the published form, with complete rows: it
keeps their probabilities before and after dropout, `2 B Z L^2 / N`, and one `B L H / N` for each
norm, and two `4 B L H / N` in the MLP. Where tokens are few, temporary memory holds more than what
is kept."""
    sections = (
        versions("flax"),
        INTRODUCTION,
        f"![RingQK and RingAV step by step]({picture})" * bool(picture),
        table([HEAD, *(row.cells for row in rows)]),
        words,
    )
    return "\n\n".join(section for section in sections if section) + "\n"
