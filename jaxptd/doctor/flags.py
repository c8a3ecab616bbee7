"""Checks of environment variables that change what JAX, XLA and NCCL do."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxptd.config.xla import process_flags
from jaxptd.doctor.page import Row, Verdict, note
from jaxptd.errors import quoted
from jaxptd.layout import Layout

Environ = Mapping[str, str]
Rule = tuple[Callable[[str], bool], Verdict, str]

PREFIXES = ("XLA_", "JAX_", "NCCL_", "CUDA_", "GLOO_")
LIBRARIES = "LD_LIBRARY_PATH"
MOST = 0.95  # of a GPU's memory for JAX
LONGEST = 200  # characters of a value on a page


def _is_set(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _is_much(value: str) -> bool:
    try:
        return float(value) > MOST
    except ValueError:
        return False


FRACTION: Rule = (
    _is_much,
    Verdict.NOTE,
    f"use at most {MOST}: what is left is for NCCL, cuDNN and fragmentation",
)
SLOW_LINK = "unset it unless the links fail with it: it makes sums between GPUs slower"
# The only variables whose values a page shows, with what is wrong about some values.
SHOWN: Mapping[str, Rule | None] = {
    "XLA_FLAGS": None,
    "XLA_CLIENT_MEM_FRACTION": FRACTION,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": FRACTION,
    "XLA_PYTHON_CLIENT_PREALLOCATE": (
        lambda value: not _is_set(value),
        Verdict.NOTE,
        "unset it: memory that grows in pieces fragments, and large models run out of it earlier",
    ),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (
        lambda value: value == "platform",
        Verdict.PROBLEM,
        "unset it: each array would be allocated by the driver, which makes steps very slow",
    ),
    "JAX_PLATFORMS": None,
    "JAX_ENABLE_X64": (_is_set, Verdict.NOTE, "unset it: model.dtype decides the precision"),
    "JAX_DISABLE_JIT": (
        _is_set,
        Verdict.PROBLEM,
        "unset it: no step is compiled with it, and no layout runs",
    ),
    "JAX_DEBUG_NANS": (_is_set, Verdict.NOTE, "unset it when done: it waits for each step"),
    "JAX_COMPILATION_CACHE_DIR": None,
    "JAX_NUM_CPU_DEVICES": None,
    "JAX_DEFAULT_MATMUL_PRECISION": (
        lambda value: True,
        Verdict.NOTE,
        "unset it for full speed: matmuls take the precision of their inputs without it",
    ),
    "CUDA_VISIBLE_DEVICES": None,
    "CUDA_DEVICE_MAX_CONNECTIONS": None,
    "CUDA_LAUNCH_BLOCKING": (
        _is_set,
        Verdict.PROBLEM,
        "unset it: the host would wait for each kernel",
    ),
    "NCCL_DEBUG": (
        lambda value: value.upper() in ("INFO", "TRACE"),
        Verdict.NOTE,
        "use WARN when done: it prints much",
    ),
    "NCCL_SOCKET_IFNAME": None,
    "NCCL_IB_HCA": None,
    "NCCL_ALGO": None,
    "NCCL_PROTO": None,
    "NCCL_NVLS_ENABLE": None,
    "NCCL_P2P_DISABLE": (_is_set, Verdict.NOTE, SLOW_LINK),
    "NCCL_SHM_DISABLE": (_is_set, Verdict.NOTE, SLOW_LINK),
    "NCCL_IB_DISABLE": (_is_set, Verdict.NOTE, SLOW_LINK),
    "GLOO_SOCKET_IFNAME": None,
    "TF_CPP_MIN_LOG_LEVEL": None,
}
# Values with which JAX uses no GPU.
HIDING: Mapping[str, Callable[[str], bool]] = {
    "JAX_PLATFORMS": lambda value: value != "" and not re.search("cuda|gpu", value),
    "CUDA_VISIBLE_DEVICES": lambda value: value.strip() in ("", "-1"),
}


def flags(environ: Environ, layout: Layout, *, gpus: int) -> list[Row]:
    """The rows of this section.

    Args:
        environ: the environment's variables.
        layout: of the run; decides which flags this package sets.
        gpus: number of NVIDIA GPUs of this machine.
    """
    found = ((name, environ[name]) for name in SHOWN if name in environ)
    rows = [_row(name, value, gpus) for name, value in found if value or _hides(name, value, gpus)]
    rows += _overridden(environ.get("XLA_FLAGS", ""), layout)
    rows += _others(environ)
    path = environ.get(LIBRARIES, "")
    if gpus and re.search("cuda|cudnn|nccl", path, re.IGNORECASE):
        remedy = "unset it: JAX may load that CUDA instead of the one of its wheels"
        rows.append(note(LIBRARIES, "names a CUDA", remedy))
    return rows or [Row("variables", "none is set")]


def _row(name: str, value: str, gpus: int) -> Row:
    shown = quoted(value, LONGEST)
    if _hides(name, value, gpus):
        return note(name, shown or "empty", f"unset it to use the {gpus} GPUs of this machine")
    rule = SHOWN[name]
    if rule is None or not rule[0](value):
        return Row(name, shown)
    return Row(name, shown, rule[1], rule[2])


def _hides(name: str, value: str, gpus: int) -> bool:
    return gpus > 0 and name in HIDING and HIDING[name](value)


def _overridden(given: str, layout: Layout) -> Iterator[Row]:
    """A row for each flag that the environment sets and that this package sets otherwise.

    XLA takes the last value of a flag, and this package appends its own.
    """
    ours = parsed(" ".join(process_flags(layout)))
    for name, value in parsed(given).items():
        if name in ours and ours[name] != value:
            remedy = f"leave it out: jaxptd sets it to {ours[name]} on simulated devices"
            yield note("XLA_FLAGS", f"--{name}={value} has no effect", remedy)


def parsed(text: str) -> dict[str, str]:
    """The flags in `XLA_FLAGS`, by name; of one that is given twice the last value.

    >>> parsed("--xla_a=1 --xla_b --xla_a=2")
    {'xla_a': '2', 'xla_b': 'true'}
    """
    return {name: value or "true" for name, value in re.findall(r"--(\w+)(?:=(\S*))?", text)}


def _others(environ: Environ) -> Sequence[Row]:
    """One row with the names of further variables; their values stay here."""
    names = sorted(name for name in environ if name.startswith(PREFIXES) and name not in SHOWN)
    return [Row("other variables", ", ".join(names))] if names else []
