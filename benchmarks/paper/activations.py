"""Memory of a layer's activations: published formulas, this library's, and compiled steps.

`python -m benchmarks.paper --memory` covers tensor and sequence parallelism, in steps compiled for
H200s in bfloat16 with dropout 0.1 (Korthikanti et al., arXiv 2205.05198, table 2). `python -m
benchmarks.paper --ring` covers ring self-attention: the elements of one layer with its gradients
and optimizer state, in steps compiled for simulated devices (Li et al., arXiv 2105.13120, tables 1
and 2). The cost of one layer is half the difference between steps with 4 and with 2 layers.

Letters, as published: B sequences, L tokens, H hidden size, Z heads of size A, N devices.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.lib.compiler import UNTRIED, on_h200s
from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.memory_report import published_layer
from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import architecture_of
from jaxptd.run.devices import prepare
from jaxptd.step import Program

LAYERS = (2, 4)  # of the two steps that are compared


class Growth(NamedTuple):
    """Bytes of one more layer on one device."""

    state: int  # parameters and moments: arguments of the compiled step
    temporary: int  # the rest: gradients, and what the layer saves for backward
    gradients: int  # by this library's formula
    formula: int  # what it saves, by this library's formula

    @property
    def kept(self) -> int:
        """What is saved for backward, as compiled."""
        return self.temporary - self.gradients


def growth(config: Config) -> Growth:
    """Compiles a config with 2 and with 4 layers and halves the difference."""
    small, large = (_memory(config, layers) for layers in LAYERS)
    state, temporary, gradients = ((b - a) // 2 for a, b in zip(small, large, strict=True))
    (stack,) = architecture_of(config.model).stacks
    kept = memory_model.layer(config, stack, config.model.remat)
    return Growth(state, temporary, gradients, kept)


def _memory(config: Config, layers: int) -> tuple[int, int, int]:
    """Bytes of a compiled step's arguments and temporaries, and of gradients by the formula."""
    model = dataclasses.replace(config.model, num_layers=layers)
    made = dataclasses.replace(config, model=model)
    here = config.train.platform == "cpu"  # simulated devices, not absent H200s
    program: Any = Program(made, make_mesh(made.layout)) if here else on_h200s(made)
    found, zero = compile_step(program, UNTRIED).memory_analysis(), program.resolved.zero
    gradients = memory_model.state(made, zero)["gradients"] - memory_model.narrowed(made, zero)
    return found.argument_size_in_bytes, found.temp_size_in_bytes, gradients


# ---- tensor and sequence parallelism ------------------------------------------------------------

SEQUENCES = 8
GPT = {"hidden_size": 1024, "num_heads": 16, "seq_length": 1024, "vocab_size": 256}
MODEL = ModelConfig(num_layers=2, dtype="bfloat16", dropout=0.1, **GPT)
REMATS: tuple[Remat, ...] = ("none", "full")
LAYOUTS = (Layout(), Layout(tp=4), Layout(tp=4, sequence_parallel=True))
HEAD = ("layout", "`remat`", "published, with scores", "published, without", "formula here")
HEAD += ("compiled",)


def configs() -> list[Config]:
    """Every layout with every policy."""
    train = TrainConfig(global_batch_size=SEQUENCES)
    return [
        Config(dataclasses.replace(MODEL, remat=remat), layout, train=train)
        for layout in LAYOUTS
        for remat in REMATS
    ]


def rows() -> Iterator[list[str]]:
    """Compiles every layout with every policy, in about 15 s of CPU time each."""
    unit = SEQUENCES * MODEL.seq_length * MODEL.hidden_size
    for config in configs():
        remat, found = config.model.remat, growth(config)
        # A flash kernel never saves scores, just as no kernel does with the policy `attention`.
        without = published_layer(config, "attention" if remat == "none" else remat)
        sizes = (published_layer(config, remat), without, found.formula, found.kept)
        yield [f"`{config.layout}`", f"`{remat}`", *(f"{(x or 0) / unit:.2f}" for x in sizes)]


# ---- ring self-attention ------------------------------------------------------------------------

DEVICES, HEADS = 4, 4
FLOAT32 = 4  # bytes


class Size(NamedTuple):
    """B sequences of L tokens, H hidden."""

    B: int
    L: int
    H: int


SIZES = (Size(1, 64, 128), Size(4, 512, 64))  # on both sides of the break-even
RING_LAYOUTS = {"tensor parallel": Layout(tp=DEVICES), "ring": Layout(cp=DEVICES, ring="rsa")}
RING_HEAD = ("B", "L", "H", "layout", "published", "formula here", "compiled")


def published(size: Size, N: int, *, ring: bool, Z: int = HEADS) -> float:
    """Elements of MLP and attention on a device, as published; scores are B Z L^2 / N."""
    B, L, H = size  # H is Z A
    if ring:
        return 48 * H**2 + 10 * B * L * H / N + B * Z * L**2 / N
    return 48 * H**2 / N + 8 * B * L * H / N + 2 * B * L * H + B * Z * L**2 / N


def break_even(H: int, N: int) -> float:
    """The B L where the ring starts to need less: 48 H^2 (1 - 1/N) = B L H (2 + 8/N - 10/N)."""
    return 48 * H * (1 - 1 / N) / (2 - 2 / N)


def ring_config(size: Size, layout: Layout) -> Config:
    """A GPT of these sizes in float32, without recomputation."""
    model = ModelConfig(
        num_layers=2, hidden_size=size.H, num_heads=HEADS, seq_length=size.L, vocab_size=256
    )
    return Config(model, layout, train=TrainConfig(global_batch_size=size.B, platform="cpu"))


def ring_rows() -> Iterator[list[str]]:
    """Compiles every size in both layouts for simulated devices."""
    for size in SIZES:
        for name, layout in RING_LAYOUTS.items():
            config = ring_config(size, layout)
            prepare(config)
            found = growth(config)
            figures = (
                published(size, DEVICES, ring=name == "ring"),
                (found.state + found.gradients + found.formula) / FLOAT32,
                (found.state + found.temporary) / FLOAT32,
            )
            yield [*map(str, size), name, *(f"{n:,.0f}" for n in figures)]
