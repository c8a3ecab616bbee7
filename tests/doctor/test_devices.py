"""Devices: what the driver reports, what JAX finds, and one that computes other bits."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jaxptd.distributed.launchers import World
from jaxptd.doctor import devices
from jaxptd.doctor.nvidia import Found, driver, gpus_of
from jaxptd.doctor.page import Verdict

H200 = "NVIDIA H200, {driver}, 143771, {used}, {mode}, {errors}\n"
PLUGIN = {"jax-cuda13-plugin": "0.12.0"}
FINE = {"driver": "580.82.07", "used": "4", "mode": "Default", "errors": "0"}


def verdicts(found=PLUGIN, **changes) -> list[str]:
    rows = driver(H200.format_map(FINE) + H200.format_map(FINE | changes), found)
    return [f"{row.verdict} {row.name}" for row in rows if row.verdict is not Verdict.OK]


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"mode": "Prohibited"}, "problem GPU 1"),
        ({"mode": "Exclusive_Process"}, "note GPU 1"),
        ({"errors": "3"}, "problem GPU 1"),
        ({"used": "5000"}, "note GPU 1"),
        ({"used": "50000"}, "problem GPU 1"),
        ({"driver": "550.54.15"}, "problem driver"),
    ],
)
def test_what_the_driver_reports(changes, row) -> None:
    assert verdicts(**changes) == [row]


def test_a_driver_that_is_new_enough_or_says_little() -> None:
    assert verdicts() == verdicts(driver="580") == []
    assert verdicts(driver="550.54.15", found={"jax-cuda12-plugin": "0.12.0"}) == []
    assert verdicts(used="[N/A]", errors="[N/A]") == []
    assert [row.verdict for row in driver("", PLUGIN)] == [Verdict.NOTE]
    assert gpus_of("No devices were found\n") == []
    *_, row = driver(H200.format_map(FINE | {"used": "5000"}), PLUGIN)
    assert row.finding == "others use 4.9 GiB of 140.4 GiB"


def test_simulated_devices_of_a_config() -> None:
    found = Found()
    config = tiny.config(jaxptd_layout := tiny.Layout(tp=2, dp=2))
    rows = {row.name: row for row in devices.devices(config, World(), found, gpus=0)}
    assert (found.kinds, found.on_gpus, found.counts) == ({"cpu"}, False, [["cpu", 8]])
    assert rows["layout"].finding == f"{jaxptd_layout} on 4 simulated CPU devices"
    assert rows["arithmetic"].finding == "8 of 8 multiplied the same matrices"
    assert {row.verdict for row in rows.values()} == {Verdict.OK}
    (first, *_) = devices.devices(None, World(), found, gpus=8)
    assert first.verdict is Verdict.PROBLEM  # JAX uses none of the 8 GPUs


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as JAX shows it."""

    device_kind: str
    id: int = 0
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 2**37, "bytes_in_use": 2**30}


def test_kinds_and_their_memory() -> None:
    known, other = Gpu("NVIDIA H200"), Gpu("NVIDIA RTX 3080 Ti")
    assert Found([known]).on_gpus
    rows = list(devices._kinds(Found([known, known], [known]), 2))
    assert [row.finding for row in rows] == ["2 x NVIDIA H200", "128.0 GiB for JAX, 127.0 GiB free"]
    assert {row.verdict for row in rows} == {Verdict.OK}
    rows = list(devices._kinds(Found([known, other], [known]), 2))
    assert [str(row.verdict) for row in rows] == ["ok", "note", "note", "ok"]


def test_a_config_that_asks_for_the_cpu_needs_no_gpu() -> None:
    config = tiny.config(tiny.Layout(dp=2))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, platform="cpu"))
    (first, *_) = devices.devices(config, World(), Found(), gpus=8)
    assert (first.name, first.verdict) == ("devices", Verdict.OK)


def test_of_two_devices_that_differ_none_is_blamed() -> None:
    one, two = (Gpu("NVIDIA H200", n) for n in range(2))
    others = [Gpu("NVIDIA A100", n) for n in range(2, 5)]
    bits = dict.fromkeys(others, b"a")
    row = devices.agreement([one, two, *others], {one: b"a", two: b"b", **bits})
    assert row.verdict is Verdict.PROBLEM
    assert row.finding.endswith(f"different bits on {one}, {two}")
    assert row.remedy.startswith("the arithmetic of some of them is faulty")


def test_a_matmul_that_fails_is_a_problem(monkeypatch) -> None:
    def fail(local: object) -> None:
        raise RuntimeError("INTERNAL: no\n kernel image")

    monkeypatch.setattr(devices, "products", fail)
    *others, row = devices.devices(None, World(), Found(), gpus=0)
    assert [each.name for each in others] == ["devices"]
    assert (row.name, row.verdict) == ("arithmetic", Verdict.PROBLEM)
    assert row.finding == "INTERNAL: no kernel image"


def test_a_device_that_computes_other_bits_is_named() -> None:
    local = jax.local_devices()
    bits = dict(devices.products(local))
    assert devices.agreement(local, bits).verdict is Verdict.OK
    assert len({*bits.values()}) == 1
    numbers = np.frombuffer(bits[local[3]], np.float32).copy()
    assert np.isfinite(numbers).all()
    numbers.view(np.uint32)[17] ^= 1  # the last bit of one number
    row = devices.agreement(local, bits | {local[3]: numbers.tobytes()})
    assert row.verdict is Verdict.PROBLEM
    assert row.finding.endswith(f"different bits on {local[3]}")
    assert row.remedy.startswith("take it out of service")
