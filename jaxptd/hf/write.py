"""A run's weights as a Hugging Face directory: read one parameter at a time, written in shards.

OUT/config.json, generation_config.json, tokenizer.json, ...  (see `base.py`)
OUT/model.safetensors, or model-00001-of-00003.safetensors, ... and their index
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxptd.atomic_files import explained, shown
from jaxptd.data.tokenizer_folders import GENERATION
from jaxptd.errors import UserError
from jaxptd.hf.base import Files, as_json, base_of, tokenizer_files, write_files
from jaxptd.hf.dims import Rule
from jaxptd.hf.directory import CONFIG, EXTRA, INDEX, SINGLE
from jaxptd.hf.mapping import copies_of, rules_of
from jaxptd.hf.sizes import config_json, config_over_base, generation_json
from jaxptd.models.families import tokenizer_of
from jaxptd.run.saved import SavedParams

DTYPES: Mapping[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
METADATA = {"format": "pt"}  # without it transformers refuses the file


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: the names of its tensors, and their total bytes."""

    names: list[str]
    size: int


def write_directory(
    saved: SavedParams, out: Path, *, dtype: str | None = None, shard_size: int = 5 * 10**9
) -> list[Shard]:
    """Writes a run's weights.

    Args:
        saved: the weights and their run's config.
        out: the directory; must not exist yet.
        dtype: of the tensors. None keeps the saved precision.
        shard_size: maximum bytes of a file; a larger tensor gets its own file.

    Raises:
        UserError: the directory exists or cannot be written, or Hugging Face lacks such a model, or
            a parameter that its files lack is not zero.
    """
    require_new(out)
    kind = np.dtype(DTYPES[dtype]) if dtype else np.dtype(next(iter(saved.dtypes.values())))
    rules = rules_of(saved.config.model.family, saved.shapes)
    _check_zeros(saved, rules)
    copies = copies_of(saved.config.model.family, saved.shapes)
    shards = _shards(_sizes(saved, rules, kind, copies), shard_size)
    files = _small_files(saved, dtype=kind.name)
    with made_aside(out) as aside:
        write_files(aside, files)
        _write_shards(_tensors(saved, rules, kind, copies), shards, aside)
    return shards


def require_new(out: Path) -> None:
    """Raises UserError if there is such a file or folder."""
    if os.path.lexists(out):
        raise UserError(f"--out {shown(out)} exists; choose another name, or remove it")


@contextlib.contextmanager
def made_aside(out: Path) -> Iterator[Path]:
    """The name of a folder to make, which becomes `out` once it is whole."""
    aside = out.with_name(f".{out.name}.partial")
    with explained(f"--out {shown(out)}", "use a writable directory"):
        shutil.rmtree(aside, ignore_errors=True)
        try:
            yield aside
            os.replace(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _small_files(saved: SavedParams, *, dtype: str) -> Files:
    """The other files: those of the run's base, with the run's sizes."""
    config, base = saved.config, base_of(saved.run_dir, saved.config)
    if base is None:
        config_file = config_json(config.model, dtype=dtype, tokenizer=tokenizer_of(config))
        texts = {CONFIG: config_file, GENERATION: generation_json(config.model, config_file)}
        written = {name: as_json(each) for name, each in texts.items() if each}
        return written | tokenizer_files(config.data)
    ours = config_json(config.model, dtype=dtype, tokenizer=None)
    config_file = config_over_base(json.loads(base[CONFIG]), config.model, ours=ours)
    return base | {CONFIG: as_json(config_file)}


def _check_zeros(saved: SavedParams, rules: Mapping[str, list[Rule]]) -> None:
    """Raises UserError for a parameter without a tensor that is not zero."""
    for name in (name for name in saved.shapes if not rules[name]):
        if np.any(saved.read(name)):
            raise UserError(
                f"{name} is not zero, and models of Hugging Face's {saved.config.model.family} "
                "have no such parameter; export a model without it, or of another family"
            )


def _dtype_of(rule: Rule, saved: SavedParams, kind: np.dtype) -> np.dtype:
    """The precision of a rule's tensors."""
    return np.dtype(saved.dtypes[rule.ours]) if rule.exact else kind


def _with_copies(name: str, copies: Mapping[str, str]) -> list[str]:
    """The names under which files have a tensor."""
    return [name, *(copy for copy, real in copies.items() if real == name)]


def _sizes(
    saved: SavedParams, rules: Mapping[str, list[Rule]], kind: np.dtype, copies: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """The name and bytes of each tensor, in the order of writing; copies: as of `copies_of`."""
    for name, shape in saved.shapes.items():
        for rule in rules[name]:
            itemsize = _dtype_of(rule, saved, kind).itemsize
            size = int(np.prod(rule.shape(shape), dtype=np.int64)) * itemsize
            for each in rule.names(shape):
                yield from ((name, size) for name in _with_copies(each, copies))


def _tensors(
    saved: SavedParams, rules: Mapping[str, list[Rule]], kind: np.dtype, copies: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor with its name, as `_sizes`; only one parameter is in memory at a time."""
    for name in saved.shapes:
        x = saved.read(name)
        for rule in rules[name]:
            for each, tensor in rule.tensors(x - rule.plus if rule.plus else x).items():
                for copy in _with_copies(each, copies):
                    yield copy, tensor.astype(_dtype_of(rule, saved, kind))


def _shards(sizes: Iterable[tuple[str, int]], most: int) -> list[Shard]:
    """Splits the tensors, in order, into files with as many as fit."""
    shards: list[Shard] = []
    for name, size in sizes:
        if shards and shards[-1].size + size <= most:
            shards[-1] = Shard([*shards[-1].names, name], shards[-1].size + size)
        else:
            shards.append(Shard([name], size))
    return shards


def _write_shards(
    tensors: Iterator[tuple[str, np.ndarray]], shards: list[Shard], folder: Path
) -> None:
    names = [SINGLE]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in numbers]
        where: dict[str, str] = {}
        for file, shard in zip(names, shards, strict=True):
            where |= dict.fromkeys(shard.names, file)
        total = sum(shard.size for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(names, shards, strict=True):
        save_tensors(
            dict(next(tensors) for _ in shard.names), folder / file, beside=folder / CONFIG
        )


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path, *, beside: Path) -> None:
    """Writes a safetensors file with the permissions of another file.

    Raises:
        UserError: safetensors is missing.
    """
    try:
        from safetensors.numpy import save_file  # the optional extra
    except ImportError as error:
        raise UserError(f"{path.parent} {EXTRA}") from error
    save_file(dict(tensors), path, metadata=METADATA)
    shutil.copymode(beside, path)  # safetensors makes it readable by the owner only
