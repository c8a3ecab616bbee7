"""A picture of the least time that each scope of a step needs on an H200, from compiled steps."""

from matplotlib.figure import Figure

from benchmarks.gpu.compiled import CASES
from benchmarks.lib.compiler import compile_only, on_h200s
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import BANDWIDTH
from jaxptd.analysis.profiling import PEAK, least
from jaxptd.analysis.step_picture import picture

DRAWN = {"124m": "GPT-2 124M, 32 x 1024 tokens", "1.5b": "GPT-2 1.5B, 16 x 1024, remat full"}


def compiled_parts() -> Figure:
    compile_only()
    panels = {}
    for name, title in DRAWN.items():
        program = on_h200s(CASES[name].config)
        panels[title] = least(program, compile_step(program).as_text())
    rates = f"{PEAK / 1e12:g} TFLOP/s and {BANDWIDTH / 1e12:.1f} TB/s"
    return picture(panels, f"ms at {rates}:\ncompiled, not run")


PICTURES = {"step_parts.svg": compiled_parts}
