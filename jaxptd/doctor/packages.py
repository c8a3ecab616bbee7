"""Checks of the packages: versions that this package needs, that fit together, known bad ones."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from jaxptd.doctor.known import BAD, Versions, number
from jaxptd.doctor.page import Row, Verdict, judged, note, problem
from jaxptd.doctor.system import nvidia_gpus

PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
NVIDIA = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
NAMES = (*NEEDED, *PLUGINS, *NVIDIA)
ABOUT = "jaxptd"
FIXES = (3, 12)  # the oldest Python with releases of JAX after 0.10


def versions() -> dict[str, str]:
    """The versions of the packages that matter, of those that are installed."""
    found = {}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ranges() -> dict[str, str]:
    """The versions of packages that this one allows, such as `>=0.10.2,<0.13`, by name."""
    try:
        lines = importlib.metadata.requires(ABOUT) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return {}
    plain = (re.fullmatch(r"([\w.-]+)\s*([<>=!~][^;]*)", line) for line in lines)
    return {match[1].lower(): match[2].strip() for match in plain if match}


def packages(found: Versions, allowed: Versions, *, gpus: int | None = None) -> list[Row]:
    """The rows of this section.

    Args:
        found: installed versions.
        allowed: as `ranges` gives them.
        gpus: number of NVIDIA GPUs. None asks the system.
    """
    gpus = nvidia_gpus() if gpus is None else gpus
    rows = [_row(name, found, allowed) for name in NEEDED]
    return [*rows, *_plugin(found, gpus), *_libraries(found)]


def _row(name: str, found: Versions, allowed: Versions) -> Row:
    version, wanted = found.get(name), allowed.get(name, "")
    if version is None:
        return problem(name, "not installed", f"pip install '{name}{wanted}'")
    if not within(version, wanted):
        finding = f"{version}, but {wanted} is needed"
        return problem(name, finding, f"pip install '{name}{wanted}'")
    return judged(name, version, bad=_other_than("jax", found, name) if name == "jaxlib" else "")


def within(version: str, wanted: str) -> bool:
    """True if a version is in a range such as `>=0.10.2,<0.13`.

    >>> within("0.12.0.1", ">=0.10.2,<0.13"), within("0.13", ">=0.10.2,<0.13")
    (True, False)
    """
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    for sign, limit in re.findall(r"(>=|<=|==|>|<)\s*([\w.]+)", wanted):
        if not compare[sign](number(version), number(limit)):
            return False
    return True


def _other_than(other: str, found: Versions, name: str) -> str:
    """The remedy where two packages of one release have different ones; else empty."""
    mine, its = found.get(name), found.get(other)
    if mine is None or its is None or number(mine)[:3] == number(its)[:3]:
        return ""
    return (
        f"install the same release of both (pip install {other}=={its} {name}=={its}): JAX does "
        f"not work with {other} {its} and {name} {mine}"
    )


def _plugin(found: Versions, gpus: int) -> Iterator[Row]:
    present = [name for name in PLUGINS if name in found]
    if not present:
        if gpus:
            remedy = "install the extra cuda13 (or cuda12, for an older driver) of jaxptd"
            yield problem("CUDA plugin", f"not installed, although there are {gpus} GPUs", remedy)
        else:
            yield Row("CUDA plugin", "not installed")
        return
    for name in present:
        yield judged(name, found[name], bad=_other_than("jaxlib", found, name))
    if len({re.sub(r"\D", "", name) for name in present}) > 1:
        remedy = "uninstall the plugin and the libraries of one of them"
        yield problem("CUDA plugin", "for CUDA 12 and for CUDA 13", remedy)


def _libraries(found: Versions) -> Iterator[Row]:
    yield from (Row(name, found[name]) for name in NVIDIA if name in found)


def known_bad(found: Versions, kinds: set[str], *, on_gpus: bool) -> list[Row]:
    """A row for each installed version that is known to be bad on such devices.

    Args:
        found: installed versions.
        kinds: JAX's names of the devices. Empty if they are unknown.
        on_gpus: whether they are GPUs.
    """
    rows = []
    for bad in BAD:
        if not bad.applies(kinds, on_gpus=on_gpus):
            continue
        for name, version in bad.installed(found):
            old = name.startswith("jax") and sys.version_info < FIXES
            python = f", with Python {'.'.join(map(str, FIXES))} or newer" * old
            remedy = f"use {name} {bad.fixed} or newer{python} ({bad.source})"
            make = problem if bad.serious else note
            rows.append(make(f"{name} {version}", bad.symptom, remedy))
    count = f"none of {len(BAD)} that are known to be bad somewhere"
    return rows or [Row("bad versions", count)]


def dangerous(found: Versions, kinds: set[str], *, on_gpus: bool) -> list[str]:
    """A sentence for each version with which steps of training may be wrong on such devices.

    Takes what `known_bad` takes.
    """
    rows = known_bad(found, kinds, on_gpus=on_gpus)
    bad = (row for row in rows if row.verdict is Verdict.PROBLEM)
    return [f"{row.name}: {row.finding}; {row.remedy}" for row in bad]
