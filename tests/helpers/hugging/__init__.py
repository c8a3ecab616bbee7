"""Tiny directories of Hugging Face models with random weights, written without transformers."""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.hf.convert import main as convert
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import sizes_of

RANDOM_WEIGHTS = Path(__file__).parents[3] / "examples" / "random_weights.py"
SIZES = {"n_layer": 5, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 13}
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SIZES}


def gpt2_tensors(
    *, seed: int = 0, dtype: Any = np.float32, tied: bool = True, prefix: str = "transformer."
) -> dict[str, np.ndarray]:
    """The state dict of a GPT-2 of these sizes."""
    D, V, T = SIZES["n_embd"], SIZES["vocab_size"], SIZES["n_positions"]
    norm = {"weight": (D,), "bias": (D,)}
    block = {f"{name}.{each}": norm[each] for name in ("ln_1", "ln_2") for each in norm}
    matrices = {
        "attn.c_attn": (D, 3 * D),
        "attn.c_proj": (D, D),
        "mlp.c_fc": (D, 4 * D),
        "mlp.c_proj": (4 * D, D),
    }
    for name, shape in matrices.items():
        block |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    shapes = {f"{prefix}{table}.weight": (n, D) for table, n in (("wte", V), ("wpe", T))}
    layers = range(SIZES["n_layer"])
    shapes |= {f"{prefix}h.{i}.{name}": shape for i in layers for name, shape in block.items()}
    shapes |= {f"{prefix}ln_f.{name}": shape for name, shape in norm.items()}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}


def check_there_and_back(there: Path, tensors: dict[str, np.ndarray], folder: Path) -> Path:
    """Converts a directory to a run and back, asserts equal bits; returns the final directory."""
    run, out = folder / "run", folder / "out"
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(out), "--quiet"])
    back = Directory(out)
    assert set(back.shapes) == set(tensors)
    for name, x in tensors.items():
        whole = (slice(None),) * x.ndim
        assert back.tensor(name)[whole].tobytes() == x.tobytes(), name
    assert sizes_of(back) == sizes_of(Directory(there))
    return out


def random_directory(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes a `config.json` and matching random weights in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    runpy.run_path(str(RANDOM_WEIGHTS))["main"](folder)
    return folder


def write_directory(
    folder: Path,
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    base: Mapping[str, Any] = CONFIG,
    **config: Any,
) -> Path:
    """Writes a directory as transformers does; `config` overrides keys of config.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    numbers = {name: i % shards + 1 for i, name in enumerate(names)}
    pattern = f"model-{{:05d}}-of-{shards:05d}.safetensors"
    files = {name: pattern.format(number) for name, number in numbers.items()}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
