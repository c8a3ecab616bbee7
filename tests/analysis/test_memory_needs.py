"""Steps that cannot fit are refused before they start; memory that runs out is explained."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
import tiny
from counting import calls

from jaxptd.analysis import hardware, memory_model, memory_needs, memory_report
from jaxptd.analysis.memory_needs import Needs, available, needs, require_fits
from jaxptd.analysis.peak import outside, peak
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.display import bytes_text
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

GPU = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100", memory_stats=lambda: {"bytes_limit": 73 * 10**9}
)


# Refusing a model of two trillion parameters takes 0.4 to 0.7 million function calls, depending on
# the version of Python. Tracing its step would take another 1.7 million.
MOST_CALLS = 1_500_000


def with_memory(monkeypatch, per_device: float, layout: Layout) -> None:
    """Gives this machine `per_device` bytes for each device of a layout."""
    total = int(per_device * layout.num_devices)
    monkeypatch.setattr(memory_needs, "host_memory", lambda: total)


def refusal(program: Program) -> str:
    with pytest.raises(UserError) as caught:
        require_fits(program)
    return str(caught.value)


def test_needs_follow_from_the_formulas() -> None:
    program = tiny.program(Layout(dp=2, tp=2))
    state = memory_model.state(program.config, program.resolved.zero)
    kept = memory_model.activations(program.config)
    found = needs(program.config, program.mesh)
    assert found == Needs(3 * state["parameters"], state["gradients"], kept)
    assert found.least == found.state + max(found.gradients, found.activations)


@pytest.mark.parametrize(
    ("layout", "choice", "narrow"),
    [
        (Layout(tp=2), {"micro_batches": 1}, True),
        (Layout(tp=2), {"micro_batches": 2}, False),
        (Layout(dp=2), {"micro_batches": 1}, False),
        (Layout(), {"micro_batches": 1, "scan_layers": False}, False),
    ],
    ids=str,
)
def test_gradients_that_nothing_sums_have_16_bits(
    layout: Layout, choice: dict, narrow: bool
) -> None:
    program = tiny.program(layout, dtype="bfloat16", **choice)
    state = memory_model.state(program.config, program.resolved.zero)
    # Each of the two layers has 4 D D in attention and 8 D D in the MLP.
    matrices = 2 * (4 + 8) * 16 * 16 // layout.tp
    found = needs(program.config, program.mesh)
    assert found.gradients == state["gradients"] - 2 * matrices * narrow


def test_the_report_has_gradients_as_they_are_held(monkeypatch) -> None:
    sizes = dict.fromkeys(("argument", "host_argument", "temp"), 0)
    compiled = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    step = SimpleNamespace(memory_analysis=lambda: compiled)
    monkeypatch.setattr(memory_report, "compile_to_read", lambda program: step)
    config = tiny.config(Layout(), dtype="bfloat16", micro_batches=1)
    parts = {row["part"]: row.get("formula") for row in memory_report.report(config)}
    assert parts["gradients"] == needs(config, make_mesh(config.layout)).gradients


def test_offloading_helps_on_accelerators_only() -> None:
    config = tiny.config(Layout(offload="optimizer"))
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[GPU]), local_devices=[GPU])
    assert needs(config, mesh).state == 0
    assert needs(config, make_mesh(Layout())).state > 0


def test_two_trillion_parameters_are_refused_by_formulas_alone() -> None:
    model = ModelConfig(num_layers=128, hidden_size=36864, num_heads=288, vocab_size=257)
    config = Config(model, Layout(dp=4), train=TrainConfig(global_batch_size=32))
    program = Program(config, make_mesh(config.layout))
    lines: list[str] = []
    assert calls(lambda: lines.append(refusal(program))) < MOST_CALLS
    (line,) = lines
    assert line.startswith("a training step needs at least 33.4 TB on a device (state 25.0 TB")
    assert "this machine has" in line
    assert line.endswith("is not enough, use a smaller model")


def test_on_gpus_the_line_has_the_predicted_peak(monkeypatch) -> None:
    program = tiny.program(Layout(dp=2))
    monkeypatch.setattr(memory_needs, "_on_cpu", lambda mesh: False)
    monkeypatch.setattr(memory_needs, "available", lambda mesh: 1)
    config, resolved = program.config, program.resolved
    found = peak(config, memory_model.state(config, resolved.zero), resolved.plan)
    beside = sum(each.bytes for each in outside(config.layout))
    words = f", by the model {bytes_text(found.total)} and {bytes_text(beside)} beside the step; "
    assert words in refusal(program)


def test_one_device_has_micro_batches_that_the_layout_splits(monkeypatch) -> None:
    program = tiny.program(Layout(), micro_batches=1, batch=64, vocab_size=200)
    with_memory(monkeypatch, needs(program.config, program.mesh).least - 1, Layout())
    with pytest.raises(UserError) as caught:
        require_fits(program, Layout(dp=4, ep=4))
    assert "on one device, which dp=4 ep=4 is compared with, needs at least" in str(caught.value)
    assert "train.micro_batches=4 (" in str(caught.value)
    words = r"on one device, which dp=4 ep=4 is .* train.micro_batches=4 "
    with (
        pytest.raises(UserError, match=words),
        memory_needs.out_of_memory_explained(program, Layout(dp=4, ep=4)),
    ):
        raise MemoryError
    assert "a training step needs at least" in refusal(program)
    assert "train.micro_batches=4 (" not in refusal(program)


def test_what_fits_is_not_refused(monkeypatch) -> None:
    program = tiny.program(Layout(dp=2))
    least = needs(program.config, program.mesh).least
    with_memory(monkeypatch, least, program.config.layout)
    assert require_fits(program) is None
    with_memory(monkeypatch, least - 1, program.config.layout)
    with pytest.raises(UserError, match="a training step needs at least"):
        require_fits(program)
    monkeypatch.setattr(memory_needs, "host_memory", lambda: None)  # memory unknown
    assert require_fits(program) is None


@pytest.mark.parametrize(
    ("layout", "choice", "share", "words"),
    [
        (Layout(ep=4), {"hidden_size": 64}, 0.5, "layout.zero=3"),
        (Layout(dp=2), {"seq_length": 64, "micro_batches": 1}, 0.9, "model.remat=full ("),
        (Layout(dp=2), {"seq_length": 64, "micro_batches": 1}, 0.9, "train.micro_batches=4 ("),
        (Layout(dp=4), {"hidden_size": 32, "seq_length": 64}, 0.35, " and "),
        (Layout(), {}, 0.01, "even "),
    ],
)
def test_the_line_names_settings_that_are_enough(layout, choice, share, words, monkeypatch) -> None:
    program = tiny.program(layout, **choice)
    least = needs(program.config, program.mesh).least
    with_memory(monkeypatch, share * least, layout)
    assert words in refusal(program)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.25])
def test_a_named_setting_needs_what_the_line_says(share, monkeypatch) -> None:
    layout = Layout(dp=4)
    program = tiny.program(layout, hidden_size=32, seq_length=64)
    now = memory_needs.Saving((), program.config, needs(program.config, program.mesh))
    for saving in memory_needs.savings(now, program.mesh):
        mesh = make_mesh(saving.config.layout)
        assert needs(saving.config, mesh) == saving.need
        with_memory(monkeypatch, saving.least, layout)
        require_fits(Program(saving.config, mesh))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 21474836480 bytes."
            ),
            "memory ran out for 21474836480 bytes more: by the formula a training step needs",
        ),
        (MemoryError("Unable to allocate 8.00 TiB for an array"), "ran out for 8.00 TiB more: "),
        (MemoryError(), "memory ran out: by the formula"),
    ],
)
def test_memory_that_runs_out_is_explained(error, words, monkeypatch) -> None:
    program = tiny.program(Layout(dp=2))
    monkeypatch.setattr(memory_needs, "host_memory", lambda: 10**9)
    with pytest.raises(UserError) as caught, memory_needs.out_of_memory_explained(program):
        raise error
    line = str(caught.value)
    assert words in line
    assert "this machine has 1.0 GB, 500.0 MB for each simulated device; use layout." in line
    assert "\n" not in line


def test_a_product_in_8_bits_that_the_cpu_does_not_have_is_explained() -> None:
    words = "UNIMPLEMENTED: Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"
    error = jax.errors.JaxRuntimeError(words)
    run = tiny.program(Layout(row=2, col=2), products="fp8")
    with pytest.raises(UserError) as caught, memory_needs.out_of_memory_explained(run):
        raise error
    assert str(caught.value).startswith("model.products=fp8 with layout (row=2 col=2")
    assert "on this CPU; use a newer jax" in str(caught.value)
    native = tiny.program(Layout(row=2, col=2))
    with pytest.raises(jax.errors.JaxRuntimeError), memory_needs.out_of_memory_explained(native):
        raise error


def test_other_errors_pass() -> None:
    program = tiny.program(Layout())
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError), memory_needs.out_of_memory_explained(program):
        raise error


def test_the_limit_of_a_gpu_is_what_this_process_may_use() -> None:
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[GPU]), local_devices=[GPU])
    assert available(mesh) == 73 * 10**9
    assert memory_needs._have(mesh, available(mesh)) == "a device has 73.0 GB; "


def test_a_container_has_its_limit(monkeypatch, tmp_path) -> None:
    whole = hardware.host_memory()
    for text, expected in (("max\n", whole), ("1000000\n", 1000000), (str(2**63), whole)):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(hardware, "CGROUPS", (str(tmp_path / "limit"), "/no/such/file"))
        assert hardware.host_memory() == expected
    monkeypatch.setattr(hardware.os, "sysconf", dataclasses.MISSING)
    monkeypatch.delattr(hardware.os, "sysconf")
    assert hardware.host_memory() is None
