"""Reads the configs of `make_configs.py` with a framework's code, on a CPU; runs no training.

    python tests/planner/frameworks/read_configs.py megatron FOLDER

Run it where the framework can be imported: Megatron-LM at d98e8a6, torchtitan v0.2.2, MaxText at
e591f30 or DeepSpeed 0.19.6. It imports nothing of jaxptd. On 30 November 2026 all 432 passed;
packages that only training with MaxText needs were replaced by empty ones.
"""

import contextlib
import io
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

NODE = 8


def megatron(path: Path, gpus: int) -> None:
    """Parses the flags, validates them, and makes the config of the model."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # that of an H100
    properties = type("Properties", (), {"major": 9, "minor": 0, "name": "H100"})
    torch.cuda.get_device_properties = lambda *_: properties
    from megatron.training import arguments

    text = path.read_text().replace("\\\n", " ")
    words = shlex.split(text.split("pretrain_gpt.py")[1])
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "128256"]
    os.environ |= {"WORLD_SIZE": str(gpus), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv = ["pretrain_gpt.py", *words, *mock]
    made = arguments.validate_args(arguments.parse_args())
    made.apply_rope_fusion = False  # needs Transformer Engine, which needs a GPU
    arguments.core_transformer_config_from_args(made)


def torchtitan(path: Path, gpus: int) -> None:
    """Reads the file, checks the degrees, and splits the layers over the stages."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    parallelism = ConfigManager().parse_args([f"--job.config_file={path}"]).parallelism
    axes = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    axes += ("tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    ParallelDims(*(getattr(parallelism, f"{axis}_degree") for axis in axes), world_size=gpus)
    if parallelism.pipeline_parallel_degree > 1:
        layers = 30 if path.stem.split("-")[-3] == "1" else 32  # of the second of `MODELS`
        ends = (
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
        )
        stages = math.ceil((layers + sum(ends)) / parallelism.pipeline_parallel_layers_per_stage)
        assert stages % parallelism.pipeline_parallel_degree == 0
        generate_llm_fqn_per_model_part(stages, layers, *ends)


def maxtext(path: Path, gpus: int) -> None:
    """Initializes a config as a run does, with simulated devices and slices."""
    import jax
    from maxtext.configs import pyconfig

    jax.devices = lambda *_, **__: [None] * gpus
    more = ("run_name=x", "base_output_directory=out", "dataset_type=synthetic")
    more += ("skip_jax_distributed_system=true", f"num_slices={gpus // NODE}")
    pyconfig.initialize(["", str(path), *more])


def deepspeed(path: Path, gpus: int) -> None:
    """Reads the file."""
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(str(path))


READERS: dict[str, Callable[[Path, int], None]] = {
    each.__name__: each for each in (megatron, torchtitan, maxtext, deepspeed)
}


def main(name: str, folder: Path) -> int:
    """Reads every config of a framework; returns 1 if any is refused."""
    paths, refused = sorted(folder.glob(f"{name}-*")), 0
    for path in paths:
        quiet = io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                READERS[name](path, int(path.stem.rpartition("-")[2]))
        except (Exception, SystemExit) as error:
            refused += 1
            print(f"{path.name}: {type(error).__name__}: {error}\n{quiet.getvalue()[-300:]}")
    print(f"{name}: {len(paths) - refused} of {len(paths)} configs accepted")
    return int(refused > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
