"""The stand-in for NVIDIA's assembler, which XLA calls for kernels that nothing runs."""

import subprocess
from pathlib import Path

from benchmarks.lib.compiler import UNTRIED

PTXAS = Path(UNTRIED["xla_gpu_cuda_data_dir"]) / "bin" / "ptxas"


def test_it_tells_a_version_and_writes_the_file_that_is_asked_for(tmp_path: Path) -> None:
    asked = subprocess.run([PTXAS, "--version"], capture_output=True, text=True, check=True)
    assert "release 13" in asked.stdout
    made = tmp_path / "code"
    subprocess.run([PTXAS, tmp_path / "kernel.ptx", "-o", made, "-arch=sm_90a"], check=True)
    assert made.exists()
