"""`jaxptd plan calibrate`: the file that it writes, what it prints, and when it stops."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from command_lines import refused
from published import ROWS

from jaxptd import plan as command
from jaxptd.calibration.report import SHARES, Timed
from jaxptd.calibration.suite import (
    Attention,
    Exchange,
    Machine,
    Pass,
    Product,
    Sample,
    SampleSizes,
)
from jaxptd.calibration.timer import Timer, find_machine, table_name
from jaxptd.commands import calibrate as calibration
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster, accelerators, find_accelerator
from jaxptd.hardware.table import PACKAGED, read_figures

# Large enough to take longer than a few kernel launches, whose time the cost model includes.
TINY = SampleSizes(
    products=((256, 256, 256),), passes=(2**18,), attention=((64, 2),), exchanges=(2**18,)
)
MEASURED = set(SHARES) - {"network_share"}
ROW = ROWS / "h100_calibration.csv"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinks the samples of two devices so that they take no time."""
    monkeypatch.setattr(calibration, "CPU", TINY)
    quick = functools.partial(Timer, repetitions=2, long_enough=0.0)
    monkeypatch.setattr(calibration, "Timer", quick)
    monkeypatch.setattr(calibration.devices, "start", lambda: jax.devices()[:2])


@pytest.mark.usefixtures("tiny")
def test_a_calibration_is_a_hardware_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: 60.0))
    out = tmp_path / "here.yaml"
    assert command.main(["calibrate", "--out", str(out), "--gpu", "h200", "--json"]) == 0
    printed, shown = capsys.readouterr()
    found = json.loads(printed)
    assert shown.count("\n") == 1  # the next line comes after ten seconds; the clock stands still
    assert (found["out"], found["name"], found["simulated"]) == (str(out), "here", True)
    assert found["machine"]["devices"] == found["machine"]["node"] == 2
    assert len(found["samples"]) == 4 + 4 + 3
    figures = read_figures(out)["here"]
    table = read_figures(PACKAGED)["h200"]
    for name, figure in figures.items():
        if name in MEASURED:
            assert figure.kind == "measured"
            assert figure.source.startswith("CPU figures, not those of an accelerator: 20")
            share = found["shares"][name]
            assert 0 < share["lowest"] <= share["value"] <= share["highest"]
            assert figure.value == pytest.approx(share["value"], rel=1e-5)
        else:
            assert (figure.value, figure.kind) == (table[name].value, table[name].kind)
    assert figures["network_share"].source == "the A100's (h200; not measured: one node)"
    assert figures["attention_backward_share"].source.endswith("; kernel xla")
    assert f"jaxlib {jax.lib.__version__}" in figures["nvlink_share"].source
    assert "# CPU figures" in out.read_text()

    rows = tmp_path / "rows.csv"
    rows.write_text(ROW.read_text().replace(",h100,", ",here,"))
    code = command.main(["validate", "--rows", str(rows), "--hardware", str(out), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (code, row["hardware"]) == (1, "here")
    assert row["predicted"] > 100 * row["measured"]  # a CPU is slower than an H100

    again = ["calibrate", "--out", str(out), "--gpu", "h200", "--name", "other"]
    assert "exists; name another file" in refused(capsys, command.main, again)
    monkeypatch.setattr(calibration, "measure", nothing)
    assert "nothing was measured (out of time)" in refused(
        capsys, command.main, [*again, "--overwrite"]
    )
    assert "the hardware table has no cpu" in refused(
        capsys, command.main, ["calibrate", "--out", str(tmp_path / "new.yaml")]
    )
    assert set(accelerators(out)) == {"here"}
    assert sorted(tmp_path.iterdir()) == [out, rows]


@pytest.mark.usefixtures("tiny")
def test_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted times of A100s, divided by the limits of A100s, give the shares in the table."""
    monkeypatch.setattr(calibration, "measure", measured_a100)
    out = tmp_path / "a.yaml"
    argv = ["calibrate", "--out", str(out), "--gpu", "a100", "--name", "node-1"]
    assert command.main([*argv, "--quiet"]) == 0
    shares = capsys.readouterr().out.splitlines()
    assert shares[0] == "node-1"
    assert shares[2].split() == ["products_share", "0.819", "0.819", "0.819", "measured", "0.819"]
    assert shares[7].split() == ["network_share", "0.854", "-", "-", "fitted", "0.854"]
    assert len(shares) == 8
    values = {name: getattr(find_accelerator("node-1", out), name) for name in SHARES}
    assert values == {name: getattr(find_accelerator("a100"), name) for name in SHARES}
    assert command.main([*argv, "--overwrite"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-9:-1] == shares
    assert lines[-1] == f"wrote {out}; use it with --hardware {out}"
    assert any(line.split()[:3] == ["all-reduce", "of", "1024"] for line in lines)


def measured_a100(samples: list[Sample], *_: object, **__: object) -> object:
    """Times of two A100s on large samples, since tiny ones tell nothing."""
    a100 = Cluster(find_accelerator("a100"), 2)
    larger = {Pass: Pass(2**30), Product: Product(8192, 8192, 8192)}
    found = [larger.get(type(sample), sample) for sample in samples]
    found = [dataclasses.replace(x, size=2**30) if isinstance(x, Exchange) else x for x in found]
    found = [dataclasses.replace(x, length=8192) if isinstance(x, Attention) else x for x in found]
    return [Timed(sample, (sample.term(a100).seconds,) * 3) for sample in found], []


def nothing(samples: list[Sample], *_: object, **__: object) -> object:
    return [], [(sample, "out of time") for sample in samples]


class FakeTimer:
    """Advances a clock by a second per sample, and returns a known machine's times."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def __call__(self, sample: Sample) -> tuple[float, ...]:
        self.clock[0] += 1
        if isinstance(sample, Attention):
            raise RuntimeError("RESOURCE_EXHAUSTED:\n out of memory")
        return (sample.term(Cluster(find_accelerator("a100"), 2)).seconds,) * 3

    def agreed(self, value: str) -> str:
        return value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    yield now


def test_no_sample_begins_after_the_deadline(clock: list[float]) -> None:
    samples = [Product(64, 64, 64), Attention(16, 1), Pass(4096), Pass(8192), Pass(2048)]
    shown: list[str] = []
    timed, left = calibration.measure(samples, FakeTimer(clock), deadline=2.5, show=shown.append)
    assert [each.sample for each in timed] == [samples[0], samples[2]]
    assert left == [
        (samples[1], "RESOURCE_EXHAUSTED: out of memory"),
        (samples[3], "out of time"),
        (samples[4], "out of time"),
    ]
    assert shown[0] == "1 of 5: matmul [64, 64] x [64, 64]"
    assert (len(shown), shown[-1]) == (4, "")


def test_what_was_not_measured_says_why(clock: list[float]) -> None:
    """Attention fails on this A100, and time runs out before its last pass."""
    samples = [Product(8192, 8192, 8192), Attention(16, 1), Pass(2**30), Pass(2**31)]
    timed, left = calibration.measure(samples, FakeTimer(clock), deadline=2.5, show=lambda _: None)
    figures = read_figures(PACKAGED)["a100"]
    machine = Machine(devices=1, node=1)
    report = calibration.CalibrationReport(
        "a", "a100", figures, machine, "there", False, timed, left, "xla"
    )
    found = report.numbers()
    assert found["products_share"].value == pytest.approx(0.819)
    assert found["products_share"].source == (
        "there; minimum 0.819, median 0.819, maximum 0.819 of 3 repetitions of a program"
    )
    for name, reason in (
        ("nvlink_share", "one device per node"),
        ("network_share", "one node"),
        ("attention_forward_share", "RESOURCE_EXHAUSTED: out of memory"),
    ):
        assert found[name].source.endswith(f"(a100; not measured: {reason})")
    assert "elementwise pass over 2048 MiB" in report.yaml()
    assert "not timed: out of time" in report.yaml()
    assert "CPU" not in report.yaml()
    assert "measured" in str(report.tables()[0])
    fast = Timed(samples[0], (1e-9 + timed[0].median / 2,) * 3)
    twice = dataclasses.replace(report, timed=[fast], left=[])
    assert "above the limit of a100, so 1 is written" in twice.yaml()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100"),
        *((kind, None) for kind in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")),
        *((kind, None) for kind in ("NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "cpu", "")),
    ],
)
def test_a_device_is_found_in_the_table_by_its_name(kind: str, name: str | None) -> None:
    if name:
        assert table_name(kind, accelerators()) == name
        return
    with pytest.raises(
        UserError, match=r"the hardware table has no .*give --gpu, one of a100, h100"
    ):
        table_name(kind, accelerators())


def test_nodes_are_slices_or_processes() -> None:
    def devices(*nodes: int, name: str) -> list[object]:
        return [SimpleNamespace(**{"process_index": 0, name: node}) for node in nodes]

    assert find_machine(devices(0, 1, 0, 1, name="slice_index"), fp8=True) == Machine(4, 2, 0, True)
    assert find_machine(devices(0, 0, name="process_index"), fp8=False) == Machine(2, 2)
    with pytest.raises(UserError, match=r"nodes have \[1, 2\] devices"):
        find_machine(devices(0, 0, 1, name="slice_index"), fp8=False)
