"""Writes the results of transformers for the tiny models of tests/helpers/hugging.

    PYTHONPATH=tests/helpers python tests/golden/make_hugging_face.py [NAME ...]

Needs torch and transformers; made with transformers 5.23.0 and torch 2.15.0, `swin` and `experts`
with 5.24.0 and 2.14.1.
"""

import sys
import tempfile
from pathlib import Path

from hugging import encoders, experts, gpt2_tensors, reference, write_directory

LENGTH = 11  # odd, and less than the 16 positions

HERE = Path(__file__).parent


def gpt2(folder: Path) -> None:
    directory = write_directory(folder, gpt2_tensors())
    reference.write_golden(directory, HERE / "gpt2.json", length=LENGTH, vocab_size=13)


def encoder(name: str, folder: Path) -> None:
    tensors, config = encoders.TINY[name]
    directory = write_directory(folder, tensors(), base=config)
    encoders.write_golden(name, directory, HERE / f"{name}.json")


def with_experts(folder: Path) -> None:
    """Writes all families with experts to one file, since they have many tensors."""
    directories = {
        kind: write_directory(folder / kind, experts.expert_tensors(kind), base=config)
        for kind, config in experts.CONFIGS.items()
    }
    experts.write_golden(directories, HERE / "experts.json")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["gpt2", *encoders.TINY, "experts"]
    with tempfile.TemporaryDirectory() as folder:
        if "gpt2" in chosen:
            gpt2(Path(folder) / "gpt2")
        if "experts" in chosen:
            with_experts(Path(folder))
        for name in encoders.TINY:
            if name in chosen:
                encoder(name, Path(folder) / name)
