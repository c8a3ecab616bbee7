"""`jaxptd plan --print`: golden configs, output, files, and refusals."""

import json
import runpy
from pathlib import Path

import pytest
from command_lines import refused
from framework_layouts import FOLDER, read

from jaxptd import plan as command
from jaxptd.planner.frameworks.planning import FRAMEWORKS

MAKE = runpy.run_path(str(FOLDER / "make_golden.py"))
CASE = ["--config", "llama3-8b", "--gpus", "8", "--gpu", "h100"]


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("case", MAKE["CASES"])
def test_golden(case: str, name: str) -> None:
    """Golden files match; after an intended change, rewrite them with make_golden.py."""
    assert MAKE["printed"](case, name) == MAKE["path_of"](case, name).read_text()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_table_and_the_config_below_it(name: str, capsys: pytest.CaptureFixture) -> None:
    assert command.main([*CASE, "--print", name, "--top", "2", "--tokens", "1e12"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    lines = table.splitlines()
    assert lines[0].startswith(FRAMEWORKS[name].title)
    assert lines[0].endswith(
        "on 8 x h100, 8 a node, 73.6 GiB per device; global batch 128 x 8,192 tokens"
    )
    assert len(lines) == 6
    assert lines[4].startswith("± is 12% of the prediction")
    assert FRAMEWORKS[name].evidence in lines[5]
    days, _, config = rest.partition("\n\n")
    assert days.startswith("1,000,000,000,000 tokens: ")
    assert MAKE["path_of"]("llama3-8b-8", name).read_text().rstrip() in config


def test_another_row_and_its_parts(capsys: pytest.CaptureFixture) -> None:
    assert command.main([*CASE, "--print", "torchtitan", "--top", "2", "--explain", "2"]) == 0
    shown = capsys.readouterr().out
    assert "\nmemory\n" in shown
    assert command.main([*CASE, "--print", "torchtitan", "--top", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    first, second = made["best"]
    assert shown.rstrip().endswith(second["config"].rstrip())
    assert first["config"] != second["config"]
    assert sum(first["memory"].values()) == pytest.approx(first["bytes"])
    assert sum(term["seconds"] for term in first["terms"]) == pytest.approx(first["seconds"])
    assert first["seconds"] <= second["seconds"]
    assert made["framework"] == "torchtitan"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_file_is_the_frameworks_own(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{FRAMEWORKS[name].suffix}"
    command.main([*CASE, "--print", name, "--quiet", "--out", str(path)])
    assert path.read_text() == MAKE["path_of"]("llama3-8b-8", name).read_text()
    assert read(name, path.read_text())


def test_pins(capsys: pytest.CaptureFixture) -> None:
    pins = ["--layout.tp", "2", "--layout.pp", "2", "--layout.virtual_stages", "4"]
    command.main([*CASE, *pins, "--print", "megatron", "--model.remat", "full", "--quiet"])
    found = read("megatron", capsys.readouterr().out)
    assert found["--tensor-model-parallel-size"] == "2"
    assert found["--pipeline-model-parallel-size"] == "2"
    assert found["--num-virtual-stages-per-pipeline-rank"] == "4"
    assert found["--recompute-granularity"] == "full"
    command.main([*CASE, "--train.micro_batches", "8", "--print", "maxtext", "--quiet"])
    assert read("maxtext", capsys.readouterr().out)["gradient_accumulation_steps"] == 8


REFUSED = (
    (["--print", "megatrn"], "--print megatrn: this framework is not known; did you mean megatron"),
    (["--compile", "1"], "--compile covers jaxptd's own steps"),
    (["--imbalance", "1.5"], "--imbalance covers jaxptd's own steps"),
    (["--picture", "a.svg"], "--picture covers jaxptd's own steps"),
    (["--layout.zero", "1"], "--print megatron: layout.zero has no counterpart there; pin one of"),
    (["--model.remat", "dots"], "model.remat=dots: megatron has no such policy here; pin one of"),
    (["--explain", "9"], "--explain 9: use a row's number, 1 to 5"),
    (["--gpus", "12"], "12 GPUs are not whole nodes of 8"),
    (["--gpus", "1"], "no layout of megatron on 1 GPU fits; use more GPUs"),
    (["--layout.tp", "3"], "megatron has no layout of 8 GPUs; leave out a pin: --layout.tp"),
    (["--gpus", "152"], "megatron has no layout of 152 GPUs; use a number of GPUs that divides"),
    (
        ["--optimizer.name", "muon"],
        "optimizer.name=muon is not written as a setting of Megatron-LM",
    ),
    (["--optimizer.rates", "{'*': 2}"], "optimizer.rates is not written as a setting of Megatron"),
    (["--model.lora.rank", "8"], "adapters (model.lora) is not written as a setting"),
    (
        ["--model.preference.loss", "ipo", "--data.documents", "whole"],
        "pairs of answers (model.preference) is not written as a setting",
    ),
    (
        ["--optimizer.frozen", "[norm.w]"],
        "optimizer.frozen is not written as a setting of",
    ),
    (["--optimizer.ema_decay", "0.99"], "optimizer.ema_decay=0.99 is not written as a setting"),
    (["--model.products", "fp8"], "model.products=fp8 is not written as a setting of Megatron-LM"),
    (["--model.logit_softcap", "30"], "model.logit_softcap=30.0 is not written as a setting"),
    (["--print", "torchtitan", "--config", "gpt2-124m"], "model.family=gpt is none of llama"),
    (["--print", "torchtitan", "--model.window", "64"], "model.window=64, but these models have"),
    (
        ["--model.window", "64", "--model.window_layers", "[true, false]"],
        "a window in some layers only (model.window_layers) is not written as a setting",
    ),
    (
        ["--model.head_sizes", "[64, 128]"],
        "heads of several widths (model.head_sizes) is not written as a setting",
    ),
    (["--model.attention_sinks", "true"], "model.attention_sinks=true is not written as a setting"),
    (["--model.norm_order", "both"], "model.norm_order=both is not written as a setting"),
    (["--model.embedding_scale", "2"], "model.embedding_scale=2.0 is not written as a setting"),
    (["--model.residual_scale", "0.5"], "model.residual_scale=0.5 is not written as a setting"),
    (["--model.logit_divisor", "4"], "model.logit_divisor=4.0 is not written as a setting"),
    (["--model.attention_scale", "0.1"], "model.attention_scale=0.1 is not written as a setting"),
    (["--model.z_loss", "0.1"], "model.z_loss=0.1 is not written as a setting"),
    (["--model.activation", "relu"], "model.activation=relu with model.gated=true is not written"),
    (["--model.norm_order", "output"], "model.norm_order=output is not written as a setting"),
    (["--model.qk_norm", "whole"], "model.qk_norm=whole is not written as a setting"),
    (["--model.attention_softcap", "9"], "model.attention_softcap=9.0 is not written as a setting"),
    (
        ["--model.rope.layers", "[true, false]"],
        "rotary positions by layer (model.rope.layers, model.rope.window_theta) is not written",
    ),
    (
        ["--model.window", "64", "--model.rope.window_theta", "9"],
        "rotary positions by layer (model.rope.layers, model.rope.window_theta) is not written",
    ),
    (["--print", "maxtext", "--optimizer.decay", "linear"], "but it has cosine and wsd"),
    (["--print", "maxtext", "--model.remat", "none"], "pin one of dots (minimal_with_context)"),
    (["--config", "t5-small"], "model.family=t5 is not written as a setting of Megatron-LM"),
    (["--config", "swin-shapes"], "model.family=swin: its step time cannot be predicted yet"),
)


@pytest.mark.parametrize(
    ("options", "words"), REFUSED, ids=lambda each: "" if isinstance(each, str) else "".join(each)
)
def test_what_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    options = [str(tmp_path / each) if each == "a.svg" else each for each in options]
    default = [] if "--print" in options else ["--print", "megatron"]
    named = CASE if "--config" not in options else CASE[2:]
    base = named[:-4] if "--gpus" in options else named
    gpu = ["--gpu", "h100"] if "--gpus" in options else []
    assert words in refused(capsys, command.main, [*base, *gpu, *options, *default])


def test_experts(capsys: pytest.CaptureFixture) -> None:
    case = ["--config", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h100", "--layout.ep", "8"]
    for name, flag in (
        ("megatron", "--expert-model-parallel-size"),
        ("torchtitan", "parallelism.expert_parallel_degree"),
        ("maxtext", "ici_expert_parallelism"),
        ("deepspeed", "expert_parallel.autoep_size"),
    ):
        command.main([*case, "--print", name, "--quiet"])
        assert int(read(name, capsys.readouterr().out)[flag]) == 8


def test_the_configs_that_frameworks_read(tmp_path: Path) -> None:
    """`make_configs.py` writes the files that `read_configs.py` passes to the frameworks."""
    paths = runpy.run_path(str(FOLDER / "make_configs.py"))["write"](tmp_path, 1)
    assert {path.name.partition("-")[0] for path in paths} == set(FRAMEWORKS)
    for path in paths:
        assert read(path.name.partition("-")[0], path.read_text())
        assert int(path.stem.rpartition("-")[2]) in (8, 16, 32)
