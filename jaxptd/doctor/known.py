"""Versions that are known to be bad: where, what happens, and who says so.

A row stays until the versions that this package allows (pyproject.toml) exclude all of its own.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

Versions = Mapping[str, str]  # by the name of the package

CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclasses.dataclass(frozen=True)
class Bad:
    """Versions of a package, from `first` to before `fixed`, that do harm somewhere.

    Args:
        packages: names under which it is installed.
        first: the first version that is known to be bad.
        fixed: the first one that is not.
        on: `gpu` or `cpu`, where it does harm.
        kinds: a pattern of the names of devices; empty for all of them.
        serious: ordinary training steps may be wrong or hang. Otherwise only rare ones.
        symptom: what happens.
        source: who says so: an address, or a file of this project.
    """

    packages: tuple[str, ...]
    first: str
    fixed: str
    on: str
    symptom: str
    source: str
    kinds: str = ""
    serious: bool = False

    def installed(self, versions: Versions) -> Iterator[tuple[str, str]]:
        """The packages among those installed that have a bad version, with it."""
        for name in self.packages:
            version = versions.get(name)
            if version and number(self.first) <= number(version) < number(self.fixed):
                yield name, version

    def applies(self, kinds: set[str], *, on_gpus: bool) -> bool:
        """True on such devices; kinds: JAX's names of this machine's."""
        if (self.on == "gpu") != on_gpus:
            return False
        return any(re.search(self.kinds, kind) for kind in kinds) if kinds else not self.kinds


def number(version: str) -> tuple[int, ...]:
    """A version as numbers that compare: `0.12.0.1` is (0, 12, 0, 1). Stops at the first word.

    >>> number("0.10.2") < number("0.11") <= number("0.11.0") < number("0.11.1rc1")
    True
    """
    words = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, words[0].split("."))) if words else ()
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return numbers


BAD = (
    Bad(
        ("jaxlib",),
        first="0.10.2",
        fixed="0.11.1",
        on="gpu",
        serious=True,
        symptom="a kernel into which XLA fuses two concatenations, one of the other's result, can "
        "compute wrong numbers without an error; steps with latent attention (DeepSeek) have such",
        source="https://github.com/jax-ml/jax/issues/40588",
    ),
    Bad(
        ("jaxlib",),
        first="0.11.0",
        fixed="0.12",
        on="gpu",
        kinds="A6000",
        serious=True,
        symptom="operations outside of jit, and steps after them, return wrong numbers or NaN",
        source="https://github.com/jax-ml/jax/issues/40633",
    ),
    Bad(
        ("jaxlib",),
        first="0.10.2",
        fixed="0.11.1",
        on="cpu",
        symptom="sums over arrays of 7 or 8 dims can crash or hang",
        source="https://github.com/jax-ml/jax/issues/39257",
    ),
    Bad(
        ("jax",),
        first="0.10",
        fixed="0.12",
        on="gpu",
        symptom="conditionals copy what they update, so pipelines run slower loops instead",
        source="jaxptd/pipeline/pools.py",
    ),
    Bad(
        CUDNN,
        first="9.11",
        fixed="9.13",
        on="gpu",
        kinds="H[12]00|GH200|H20",
        symptom="backward of attention is wrong where heads of values have another size than those "
        "of keys",
        source="https://github.com/NVIDIA/cudnn-frontend/pull/166",
    ),
    Bad(
        CUDNN,
        first="9.13",
        fixed="9.15",
        on="gpu",
        symptom="attention that is not causal, over more than 1,024 tokens, can read beyond its "
        "memory",
        source="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    Bad(
        CUDNN,
        first="9",
        fixed="9.26",
        on="gpu",
        kinds="H[12]00|GH200|H20",
        symptom="backward of masked attention that is not causal gives NaN where all scores of a "
        "token are below -88 and there are 64 keys more than a multiple of 128",
        source="https://github.com/pytorch/pytorch/issues/196678",
    ),
    Bad(
        NCCL,
        first="2.30.7",
        fixed="2.31.2",
        on="gpu",
        symptom="sends between two GPUs, and all-to-alls of different sizes, can hang",
        source="https://github.com/NVIDIA/jaxpp/issues/11",
    ),
)
