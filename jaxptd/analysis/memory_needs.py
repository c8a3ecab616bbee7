"""Checks whether a training step fits in memory, and names settings that help.

Needs follow from the formulas of `memory_model.py`; nothing is compiled. A step whose lower bound
does not fit is refused before it starts; one that runs out of memory all the same gets an
explanation. On GPUs that line also states the predicted peak (`peak/`).
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxptd.analysis import memory_model
from jaxptd.analysis.hardware import host_memory, memory_limit
from jaxptd.analysis.peak import outside, peak
from jaxptd.config import Config
from jaxptd.display import bytes_text
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.models.families import has_times
from jaxptd.step import Program
from jaxptd.step.resolved import resolve

MOST = 3  # settings that a message names
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|[Oo]ut of memory|Unable to allocate|bad_alloc")
# DotThunk multiplies on CPUs. jaxlib 0.10 occasionally leaves its operands in bfloat16.
_NO_PRODUCT = re.compile("DotThunk|BF16 x BF16 = F32")
_SIZE = re.compile(r"allocat\w+ ([\d.]+ ?[kKMGT]i?B|\d+ bytes)")


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a training step takes on one device, by the formulas.

    Args:
        state: parameters and the optimizer's moments.
        gradients: with parameters gathered for the whole step.
        activations: all that is saved for backward, or waits for a pipeline's stage.
    """

    state: int
    gradients: int
    activations: int

    @property
    def least(self) -> int:
        """A lower bound, as gradients appear while backward frees activations."""
        return self.state + max(self.gradients, self.activations)

    def __str__(self) -> str:
        parts = dataclasses.asdict(self).items()
        each = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
        return f"{bytes_text(self.least)} on a device ({each})"


def needs(config: Config, mesh: Any) -> Needs:
    """Predicts the bytes that one step of a config takes on each device of a mesh."""
    zero = resolve(config, mesh).zero
    state = memory_model.state(config, zero)
    hosted = 0 if _on_cpu(mesh) else memory_model.hosted(config.layout, state)
    return Needs(
        state=state["parameters"] + state["optimizer"] - hosted,
        gradients=state["gradients"] - memory_model.narrowed(config, zero) + state["gathered"],
        activations=_activations(config, mesh),
    )


def _activations(config: Config, mesh: Any) -> int:
    on_host = "activations" in config.layout.offloaded and not _on_cpu(mesh)
    plan = resolve(config, mesh).plan
    waiting = memory_model.mail(config, plan) if plan else 0
    return (0 if on_host else memory_model.activations(config, plan)) + waiting


def available(mesh: Any) -> int | None:
    """Bytes available to each device of a mesh in this process; None: unknown.

    Simulated devices share the host's memory.
    """
    if _on_cpu(mesh):
        memory = host_memory()
        return memory and memory // len(mesh.local_devices)
    return memory_limit(mesh.local_devices[0])


def require_fits(program: Program, spread: Layout | None = None) -> None:
    """Refuses a step that cannot fit, before anything is compiled or allocated.

    Args:
        program: holds the step.
        spread: a layout to compare this one's step with, for the same micro-batches.

    Raises:
        UserError: the step cannot fit; names its lower bound, the memory available, and settings
            that help.
    """
    need, there = needs(program.config, program.mesh), available(program.mesh)
    if there is not None and need.least > there:
        needed = f"at least {need}{_peak(program)}"
        remedy = _remedy(program, there, spread)
        raise UserError(f"{_step(program, spread)} needs {needed}; {remedy}")


def _step(program: Program, spread: Layout | None) -> str:
    """Names a step, and the layout that it is compared with."""
    alone = spread and spread.num_devices > program.config.layout.num_devices
    return "a training step" + f" on one device, which {spread} is compared with," * bool(alone)


def _peak(program: Program) -> str:
    """Words for the peak that the model predicts; empty on CPUs, which it does not cover.

    Also empty for families whose parts it does not cover.
    """
    if _on_cpu(program.mesh) or not has_times(program.config.model):
        return ""
    config, resolved = program.config, program.resolved
    predicted = peak(config, memory_model.state(config, resolved.zero), resolved.plan)
    beside = sum(each.bytes for each in outside(config.layout))
    return f", by the model {bytes_text(predicted.total)} and {bytes_text(beside)} beside the step"


@contextlib.contextmanager
def out_of_memory_explained(program: Program, spread: Layout | None = None) -> Iterator[None]:
    """Turns running out of memory into an error that names needs and settings that help.

    The same for an 8-bit matmul that this XLA cannot compute on CPUs.

    spread: as in `require_fits`.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if program.config.model.products == "fp8" and _NO_PRODUCT.search(str(error)):
            raise UserError(
                f"model.products=fp8 with layout ({program.config.layout}): jax {jax.__version__} "
                "cannot multiply 8-bit numbers on this CPU; use a newer jax (Python 3.12 or "
                "later), GPUs, or model.products=native"
            ) from error
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        size = _SIZE.search(str(error))
        asked = f" for {size[1]} more" if size else ""
        need, there = needs(program.config, program.mesh), available(program.mesh)
        raise UserError(
            f"memory ran out{asked}: by the formula {_step(program, spread)} needs {need}"
            f"{_peak(program)}, besides what XLA takes for itself; "
            f"{_remedy(program, there, spread)}"
        ) from error


def _on_cpu(mesh: Any) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


# ---- settings that help ----------------------------------------------------------------------

Fields = dict[str, dict[str, Any]]  # by section


@dataclasses.dataclass(frozen=True)
class Saving:
    """Changed settings as a user writes them, the resulting config, and its step's needs.

    replicas: the least number of replicas over which micro-batches split.
    """

    names: tuple[str, ...]
    config: Config
    need: Needs
    replicas: int = 1

    @property
    def least(self) -> int:
        return self.need.least

    def __str__(self) -> str:
        *most, last = self.names
        return f"{', '.join(most)}{' and ' * bool(most)}{last} ({bytes_text(self.least)})"


def savings(before: Saving, mesh: Any) -> list[Saving]:
    """Further settings with which a step needs less on the same devices, best first."""
    config, need, candidates = before.config, before.need, []
    for names, fields in _others(before, on_cpu=_on_cpu(mesh)):
        with contextlib.suppress(UserError):
            other = _with(config, fields)
            less = (
                needs(other, mesh)
                if "layout" in fields
                else dataclasses.replace(need, activations=_activations(other, mesh))
            )
            candidates.append(Saving((*before.names, *names), other, less, before.replicas))
    return sorted((each for each in candidates if each.least < before.least), key=lambda x: x.least)


def _remedy(program: Program, there: int | None, spread: Layout | None) -> str:
    """Names the available memory, and the settings that save most."""
    mesh = program.mesh
    replicas = spread.sample_shards if spread else 1
    now = Saving((), program.config, needs(program.config, mesh), replicas)
    smaller = "use a smaller model" + ("" if _on_cpu(mesh) else ", or more devices")
    alone = savings(now, mesh)[:MOST]
    enough = [each for each in alone if there is None or each.least <= there]
    together = [] if enough else _together(alone, mesh, there or 0)
    if together and there and together[0].least <= there:
        enough = together
    if enough:
        return f"{_have(mesh, there)}use {' or '.join(map(str, enough))}"
    even = f"even {together[0]} is not enough, " if together else ""
    return f"{_have(mesh, there)}{even}{smaller}"


def _together(alone: list[Saving], mesh: Any, there: int) -> list[Saving]:
    """Adds the next best setting until they suffice or nothing more helps."""
    best = alone[:1]
    for _ in range(MOST - 1):
        if best and best[0].least > there:
            best = savings(best[0], mesh)[:1] or best
    return best


def _have(mesh: Any, there: int | None) -> str:
    if there is None:
        return ""
    number = len(mesh.local_devices)
    if not _on_cpu(mesh):
        return f"a device has {bytes_text(there)}; "
    each = f", {bytes_text(there)} for each simulated device" if number > 1 else ""
    return f"this machine has {bytes_text(there * number)}{each}; "


def _others(before: Saving, *, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], Fields]]:
    """Settings to try, as a user writes them."""
    config = before.config
    layout, train = config.layout, config.train
    if layout.zero_shards > 1 and layout.zero < 3:
        yield ("layout.zero=3",), {"layout": {"zero": 3}}
    if layout.dp > 1 and not layout.has_grid:
        tp = layout.tp * layout.dp
        yield (f"layout.tp={tp}", "layout.dp=1"), {"layout": {"tp": tp, "dp": 1}}
    if not layout.offloaded and not on_cpu:
        yield ("layout.offload=optimizer",), {"layout": {"offload": "optimizer"}}
    if layout.offloaded == {"optimizer"} and not on_cpu:
        both = "layout.offload=[optimizer,parameters]"
        yield (both,), {"layout": {"offload": ("optimizer", "parameters")}}
    if config.model.remat != "full":
        yield ("model.remat=full",), {"model": {"remat": "full", "remat_layers": None}}
    more = _more_micro_batches(config, before.need, max(layout.sample_shards, before.replicas))
    if more > train.micro_batches:
        yield (f"train.micro_batches={more}",), {"train": {"micro_batches": more}}


def _more_micro_batches(config: Config, need: Needs, replicas: int) -> int:
    """The least number with which activations take no more than gradients, if any."""
    sequences = config.train.global_batch_size // replicas
    wanted = config.train.micro_batches * need.activations / max(need.gradients, 1)
    return min(
        (n for n in range(1, sequences + 1) if sequences % n == 0 and n >= wanted),
        default=sequences,
    )


def _with(config: Config, fields: Fields) -> Config:
    """The config with other fields. Raises UserError if they conflict."""
    sections = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in fields.items()
    }
    return dataclasses.replace(config, **sections)
