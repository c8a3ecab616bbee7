"""The command of the pipeline's benchmark, and what it compiles for GPUs."""

from pathlib import Path

import pytest

from benchmarks.pipeline import __main__ as pipeline
from benchmarks.pipeline import gpu as pipeline_gpu
from benchmarks.pipeline import memory as pipeline_memory
from benchmarks.pipeline.text import Tick
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

CONFIG = Path(__file__).parents[2] / "configs" / "gpt-145b.yaml"


def test_the_config_is_the_row_of_145_billion() -> None:
    found = parse(make_parser("x", ""), ["--config", str(CONFIG)])[0]
    model, layout, train = found.model, found.layout, found.train
    assert (model.num_layers, model.hidden_size, model.num_heads) == (80, 12288, 96)
    assert (layout.pp, layout.tp, layout.num_devices) == (8, 8, 1536)
    assert (train.global_batch_size, train.global_batch_size // layout.dp) == (2304, 96)
    parameters = 80 * 12 * 12288**2 + (51200 + 2048) * 12288
    assert parameters == pytest.approx(145.6e9, rel=1e-2)
    assert pipeline_gpu.activation(found) == (4, 2048 // 8, 12288)
    variants = [(c.layout.schedule, c.model.remat) for c in pipeline_gpu.variants(found)]
    assert variants == [
        ("1f1b", "full"),
        ("interleaved", "full"),
        ("1f1b", "dots"),
        ("interleaved", "dots"),
    ]


def test_rows_of_gpus() -> None:
    memory = (3 * 2**30, 2 * 2**30, 2**30)
    slots = {"saved_blocks": 4, "mail": 2, "between_blocks": 0}
    config = Config(layout=Layout(pp=2, schedule="gpipe"))
    one = pipeline_gpu.Compiled(config, slots, memory, 1.4, 22, Tick(7, 2, 0, 0, 2**19), [])
    assert one.needs == ["gpipe", "none", "4, 2", "3.00", "2.00", "1.00", "1"]
    assert one.at_a_tick == ["gpipe", "none", "22", "7", "2", "0", "0.0", "0.5", ""]
    assert len(one.needs) == len(pipeline_gpu.NEEDS)
    assert len(one.at_a_tick) == len(pipeline_gpu.TICKS)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "schedules", lambda: "a table\n")
    monkeypatch.setattr(pipeline_memory, "report", lambda: "memory\n")
    path = tmp_path / "pipeline.md"
    assert pipeline.main(["--out", str(path)]) == 0
    assert pipeline.main(["--memory", "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Pipelines\n") and text.count("\n## ") == 2
    assert text.index("a table") < text.index("memory")


def test_bad_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.md"
    for words, what in (
        (["--memory", "--time"], "--memory --time: each is a run of its own"),
        (["--time", "--steps", "0"], "--steps 0: use 1 or more"),
        (["--gpu"], "layout.pp=1 is no pipeline; use --config"),
    ):
        with pytest.raises(UserError, match=what):
            pipeline.main([*words, "--out", str(path)])
    assert not path.exists()
