"""Writes random bfloat16 weights next to a model's `config.json`, to try its size without them.

`python examples/random_weights.py DIR`, where DIR contains the `config.json` of a Hugging Face
model, writes `DIR/model.safetensors` with all of the model's tensors in their shapes. Norm weights
are 1. Holds one copy of them in memory. Needs the `hf` extra.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxptd import Config, Layout, ModelConfig, Program, make_mesh
from jaxptd.config import nested
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.mapping import rules_of
from jaxptd.hf.sizes import read_sizes


def shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors that a `config.json` asks for."""
    sizes = json.loads((folder / "config.json").read_text())
    tied = sizes.get("tie_word_embeddings", FAMILIES[sizes["model_type"]].tied is not False)
    model = ModelConfig(**nested(read_sizes(sizes, tied=tied, where=folder)))
    infos = Program(Config(model), make_mesh(Layout())).infos
    ours = {name: info.shape for name, info in infos.items()}
    for name, rules in rules_of(model.family, ours).items():
        yield from ((n, rule.shape(ours[name])) for rule in rules for n in rule.names(ours[name]))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Random tensors by name: normal with standard deviation 0.02, and 1 in norms."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("weight") and ("norm" in name.lower() or "ln_" in name):
            return np.ones(shape, ml_dtypes.bfloat16)
        return (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)

    return {name: draw(name, shape) for name, shape in shapes(folder)}


def main(folder: Path) -> None:
    """Writes the file under a temporary name, then renames it."""
    found, aside = tensors(folder), folder / ".model.safetensors.partial"
    save_file(found, aside, metadata={"format": "pt"})
    aside.replace(folder / "model.safetensors")
    print(f"{len(found)} tensors, {sum(x.size for x in found.values()):,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
