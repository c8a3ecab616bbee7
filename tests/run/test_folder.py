"""The run directory: whether it holds the same run, its files, and those of a killed run."""

import functools
import json
from pathlib import Path

import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, flat
from jaxptd.config.written import field_types
from jaxptd.errors import UserError
from jaxptd.run import folder as folder_module
from jaxptd.run.folder import RunDir, check_alike, difference

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"


@functools.cache
def config_with(*overrides: str) -> Config:
    return load_config(CONFIG, overrides)


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


@pytest.fixture
def run_dir(tmp_path):
    """A run of ten steps."""
    run = RunDir(tmp_path / "run")
    run.open(config_with(), step=0)
    for step in range(1, 11):
        run.log(row(step))
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- the same run or another ----------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "--layout.tp=2",
        "--layout.sequence_parallel=true",
        "--layout.collective_matmul=true --layout.sequence_parallel=true",
        "--layout.ring=rsa",
        *("--layout.latent_exchange=expanded", "--layout.latent_products=absorbed"),
        "--layout.replica_state=split",
        "--layout.row=2",
        "--layout.matmul2d=summa --layout.row=2",
        "--layout.matmul2d_slices=2 --layout.row=2",
        "--layout.attention2d=blocks",
        "--layout.pp=2",
        "--layout.schedule=zb-v --layout.pp=2",
        "--layout.virtual_stages=3 --layout.pp=2",
        "--layout.stage_layers=[1,1] --layout.pp=2",
        "--layout.zero=3",
        "--layout.offload=optimizer",
        "--model.remat=full",
        "--model.remat_layers=1",
        "--model.scan_layers=false",
        "--model.vocab_multiple=128",
        *("--model.attention=xla", "--model.kernels=triton"),
        "--train.steps=99",
        "--train.micro_batches=4",
        *("--train.max_skipped=3", "--train.check_steps=skipped"),
        "--optimizer.skip_above=5",
        "--train.log_every=0",
        "--train.eval_every=7",
        "--train.eval_batches=3",
        *("--train.patience=3", "--train.min_improvement=0.1 --train.patience=3"),
        "--train.sample_tokens=0",
        "--train.run_dir=elsewhere",
        *("--train.platform=auto", "--train.loggers=[csv]", "--train.profile=[1,2]"),
        *("--checkpoint.every=1", "--checkpoint.keep=9", "--checkpoint.keep_best=2"),
        "--checkpoint.best_metric=perplexity",
        *("--checkpoint.asynchronous=false", "--checkpoint.resume=never"),
        "--checkpoint.start=elsewhere",
        "--checkpoint.data=any",
        *("--checkpoint.memory_every=5", "--checkpoint.memory_dir=elsewhere"),
        "--processes.coordinator=node01:5000",
        *("--processes.count=2", "--processes.id=1", "--processes.wait=60"),
        "--processes.elastic=[1,2]",
        *("--processes.stuck_after=0", "--processes.slow_factor=3"),
        *("--processes.domain=1", "--processes.place=rack1"),
    ],
)
def test_what_a_resumed_run_may_change(override):
    changed = config_with(*override.split())
    assert changed != config_with()
    assert difference(changed, config_with()) is None


LLAMA3 = (
    "--model.positions=rope --model.rope.scaling=llama3 --model.rope.factor=2.0 "
    "--model.rope.original_length=32"
)
IMAGES = ("size=448", "channels=3", "classes=5", "patch=2", "window=14", "depths=[2,2,4,2]")
IMAGES += ("decoder_depths=[2,4,2]", "dice=batch", "drop_path=0.1")
LATENT = ("q_rank=0", "kv_rank=64", "nope_size=96", "rope_size=32", "value_size=64")
TARGETS = ("num_layers=3", "seq_length=8", "start_token=1", "relative_buckets=8")
TARGETS += ("relative_distance=40", "output_scale=0.5")
WHOLE = "--data.documents=whole"
OF_ADAPTERS = ("alpha=3.0", "targets=[mlp.up]", "rslora=true")
OF_CHATS = ("tools_field=functions", "chat_template=own.jinja", "chat_date=2026-12-31")
OF_CHATS += ("train_on=last",)
# Options that a field requires, without the field itself and those that need it.
NEEDED = {
    "model.rope.scaling": ["--model.positions=rope"],
    "data.restart_positions": ["--data.documents=apart"],
    "model.rope.window_theta": ["--model.positions=rope", "--model.window=5"],
    "model.mtp.layers": ["--model.mtp.layers=1"],
    "model.lora.rank": ["--model.lora.rank=1"],
    "model.preference.loss": ["--model.preference.loss=ipo", WHOLE],
}


@pytest.mark.parametrize(
    "override",
    [
        "--model.num_layers=3",
        *("--model.hidden_size=32", "--model.num_heads=2"),
        *("--model.num_kv_heads=2", "--model.head_size=6", "--model.head_sizes=[4,6]"),
        *("--model.max_positions=300", "--model.logit_softcap=30.0", "--model.z_loss=1e-4"),
        *(
            "--model.attention_scale=0.1",
            "--model.embedding_scale=2.0",
            "--model.residual_scale=0.5",
            "--model.logit_divisor=3.0",
            "--model.window=5",
            "--model.window_layers=[true,false] --model.window=5",
            "--model.attention_softcap=9.0",
            "--model.softcap_layers=[true,false] --model.attention_softcap=9.0",
            "--model.attention_sinks=true",
        ),
        *(f"--model.encoder_decoder.{each} --model.family=t5" for each in TARGETS),
        *("--model.norm=rmsnorm", "--model.norm_eps=1e-6", "--model.norm_order=post"),
        *("--model.activation=silu", "--model.gated=true"),
        *("--model.linear_bias=none", "--model.positions=rope"),
        "--model.rope.theta=5e5 --model.positions=rope",
        "--model.rope.scaling=linear --model.rope.factor=2.0 --model.positions=rope",
        f"--model.rope.factor=4.0 {LLAMA3}",
        f"--model.rope.original_length=64 {LLAMA3}",
        f"--model.rope.range=[1,8] {LLAMA3}",
        "--model.rope.attention_factor=1.5 --model.positions=rope --model.rope.scaling=yarn "
        "--model.rope.factor=4.0 --model.rope.original_length=64",
        "--model.rope.truncate=false --model.positions=rope --model.rope.scaling=yarn "
        "--model.rope.factor=4.0 --model.rope.original_length=64",
        "--model.rope.layers=[true,false] --model.positions=rope",
        "--model.rope.window_theta=9.0 --model.positions=rope --model.window=5",
        *("--model.qk_norm=true", "--model.qk_norm=whole"),
        *("--model.causal=false", "--model.token_types=2"),
        *("--model.seq_length=8", "--model.vocab_size=300"),
        *("--model.dropout=0.2", "--model.dtype=bfloat16", "--model.products=fp8"),
        *("--model.tie_embeddings=false", "--model.ffn_hidden_size=32", "--model.mlp=own"),
        *(f"--model.images.{each} --model.family=swin-unet" for each in IMAGES),
        *(f"--model.latent.{each} --model.family=deepseek_v2" for each in LATENT),
        *("--model.mtp.layers=2", "--model.mtp.weight=0.1 --model.mtp.layers=1"),
        *(f"--model.lora.{each} --model.lora.rank=4" for each in OF_ADAPTERS),
        "--model.lora.rank=2",
        f"--model.preference.loss=sigmoid {WHOLE}",
        f"--model.preference.beta=0.5 --model.preference.loss=ipo {WHOLE}",
        f"--data.rejected_field=worse --model.preference.loss=sigmoid {WHOLE}",
        "--data.augment=true",
        *("--data.source=other.txt", "--data.tokenizer=other.json"),
        "--data.validation_fraction=0.5",
        '--data.validation={"law":"other.txt"}',
        "--data.documents=apart",
        "--data.documents=whole",
        "--data.restart_positions=true --data.documents=apart",
        *("--data.special_tokens=text", "--data.begin_token=none"),
        *("--data.text_field=story", "--data.prompt_field=question"),
        *("--data.messages_field=chat", "--data.format=alpaca", "--data.too_long=cut"),
        *(f"--data.{each} --data.messages_field=chat" for each in OF_CHATS),
        *("--optimizer.learning_rate=0.02", "--optimizer.warmup_steps=6"),
        "--optimizer.warmup_fraction=0.1 --optimizer.warmup_steps=100",
        "--optimizer.decay=linear",
        "--optimizer.decay_steps=20",
        "--optimizer.cooldown_steps=3 --optimizer.decay=wsd",
        "--optimizer.min_learning_rate=0.001",
        "--optimizer.weight_decay=0.2",
        "--optimizer.epsilon=1e-6",
        "--optimizer.name=lion",
        "--optimizer.momentum=0.9 --optimizer.name=muon",
        *("--optimizer.beta1=0.8", "--optimizer.beta2=0.8", "--optimizer.grad_clip=2"),
        *("--optimizer.ema_decay=0.9", '--optimizer.rates={"tokens.*":0.5}'),
        "--optimizer.frozen=[embed.*]",
        *("--train.global_batch_size=16", "--train.seed=1"),
    ],
)
def test_what_makes_another_run_is_named_with_both_values(override):
    changed, *others = override.split()
    field = changed.removeprefix("--").partition("=")[0]
    configs = config_with(*others, changed), config_with(*NEEDED.get(field, others))
    found = difference(*configs)
    values = [flat(c)[field] for c in configs]
    assert found == f"{field} is {values[0]}, was {values[1]}"


def test_a_mixture_with_other_weights_is_another_run():
    mixtures = [config_with(f"--data.source={{{each}}}") for each in ("a: 1, b: 2", "b: 2, a: 1")]
    assert difference(*mixtures) is None
    other = config_with("--data.source={a: 1, b: 3}")
    assert difference(other, mixtures[0]) == (
        "data.source is {'a': 1.0, 'b': 3.0}, was {'a': 1.0, 'b': 2.0}"
    )


def test_processes_may_have_their_own_paths_but_not_their_own_weights(monkeypatch):
    found, meeting = [], folder_module.coordination
    monkeypatch.setattr(meeting, "check_alike", lambda name, facts, **_: found.append(facts))
    for source in ("{/a/x: 1, /a/y: 2}", "{/b/x: 1, /b/y: 2}", "{/a/x: 1, /a/y: 3}", "/a/x"):
        check_alike(config_with(f"--data.source={source}"), {"tokens": 5})
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0]["the weights of data.source"] == [1, 2]
    assert "the weights of data.source" not in found[3]


def test_every_field_is_one_or_the_other():
    """The two lists above name every field of a config, so a new field needs a decision."""
    marks = [
        test_what_a_resumed_run_may_change,
        test_what_makes_another_run_is_named_with_both_values,
    ]
    overrides = [each for test in marks for each in test.pytestmark[0].args[1]]
    named = {override.removeprefix("--").partition("=")[0] for override in overrides}
    fields = set(field_types())
    whole = ("layout.", "model.moe.")  # sections decided as a whole
    decided = {f for f in fields if f.startswith(whole)} | {"model.family"}
    assert fields - decided == {name for name in named if not name.startswith(whole)}


# ---- check ----------------------------------------------------------------------------------


def test_a_new_directory_is_fine_and_not_made_by_the_check(tmp_path):
    RunDir(tmp_path / "a" / "b").check(config_with())
    assert list(tmp_path.iterdir()) == []


def test_the_same_run_is_fine(run_dir):
    run_dir.check(config_with("--train.steps=99"))


def test_another_run_is_refused(run_dir):
    with pytest.raises(UserError, match=r"holds another run: train.seed is 1, was 0; use another"):
        run_dir.check(config_with("--train.seed=1"))


def test_never_refuses_a_run(run_dir):
    with pytest.raises(UserError, match="checkpoint.resume is never"):
        run_dir.check(config_with("--checkpoint.resume=never"))


def test_never_refuses_checkpoints_whose_config_is_lost(run_dir):
    run_dir.checkpoints.mkdir()
    (run_dir.path / "config.yaml").unlink()
    with pytest.raises(UserError, match="checkpoint.resume is never"):
        run_dir.check(config_with("--checkpoint.resume=never"))


def test_never_takes_a_directory_with_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDir(tmp_path).check(config_with("--checkpoint.resume=never"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["file", "file/run", "file/a/b"])
def test_a_file_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match="file is a file; name a directory"):
        RunDir(tmp_path / path).check(config_with())


def test_a_directory_that_cannot_be_written_is_found_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    RunDir(tmp_path.parent / "other").check(config_with())
    with pytest.raises(UserError, match="a/b: Permission denied; use a writable directory"):
        RunDir(tmp_path / "a" / "b").check(config_with())


def test_a_folder_of_checkpoints_that_cannot_be_written_is_found_too(run_dir, monkeypatch):
    run_dir.checkpoints.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != run_dir.checkpoints)
    with pytest.raises(UserError, match="Permission denied; use a writable directory"):
        run_dir.check(config_with())


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "x/" * 5000])
def test_a_path_the_system_refuses_is_one_line(tmp_path, name):
    run = RunDir(tmp_path / name)
    with pytest.raises(UserError, match="use a writable directory"):
        run.check(config_with())
    with pytest.raises(UserError, match="use a writable directory"):
        run.open(config_with(), step=0)


# ---- writing --------------------------------------------------------------------------------


def test_the_written_config_is_read_back_equal(run_dir):
    assert load_config(run_dir.path / "config.yaml") == config_with()
    found = sorted(path.name for path in run_dir.path.iterdir())
    assert found == ["config.yaml", "metrics.jsonl", "tensorboard"]


def test_metrics_are_one_object_a_line(run_dir):
    lines = (run_dir.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row(step) for step in range(1, 11)]
    assert run_dir.metrics() == [row(step) for step in range(1, 11)]


def test_going_on_from_a_step_drops_what_came_after_it(run_dir):
    run_dir.open(config_with("--train.steps=99"), step=7)
    run_dir.log(row(8, again=1.0))
    assert run_dir.metrics() == [*(row(step) for step in range(1, 8)), row(8, again=1.0)]
    assert load_config(run_dir.path / "config.yaml").train.steps == 99


def test_a_config_is_not_rewritten_if_the_metrics_cannot_be(run_dir, monkeypatch):
    before, write = contents(run_dir.path), Path.write_bytes

    def full(self, data):
        if "metrics" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device; use a writable"):
        run_dir.open(config_with("--train.steps=99"), step=3)
    assert contents(run_dir.path) == before


def test_a_write_that_fails_leaves_the_old_file_and_no_other(run_dir, monkeypatch):
    before = contents(run_dir.path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxptd.atomic_files.os.replace", full)
    with pytest.raises(UserError, match="No space left on device; use a writable"):
        run_dir.open(config_with("--train.steps=99"), step=3)
    assert contents(run_dir.path) == before
