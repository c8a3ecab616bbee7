"""Compiling the best layouts drops those that do not fit, and ranks the rest again."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from command_lines import refused

from jaxptd import plan as command
from jaxptd.analysis.peak import OUTSIDE
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.plan import plan
from jaxptd.planner.planning import Compiling
from jaxptd.planner.search.best import Candidate, Search
from jaxptd.planner.search.space import Space
from jaxptd.planner.steps.step import ConfigStep, Predictor
from jaxptd.planner.steps.traffic import Compiled, Figures, remade

H100 = Cluster(find_accelerator("h100"))
GPT = ModelConfig(
    num_layers=8,
    hidden_size=2048,
    num_heads=16,
    seq_length=2048,
    vocab_size=32000,
    dtype="bfloat16",
)
CONFIG = Config(model=GPT, train=TrainConfig(global_batch_size=32))
LIMIT = 70e9
FITS, TOO_LARGE = int(30e9), int(80e9)


@pytest.fixture(scope="module")
def ranking() -> list[Candidate]:
    space = Space(CONFIG, 8, {"layout.cp": 1})
    return list(itertools.islice(Search(space, H100, LIMIT), 5))


def moved(candidate: Candidate) -> float:
    return sum(t.bytes for t in candidate.step.terms if t.resource == "HBM" and not t.flops)


def as_predicted(candidate: Candidate, bytes: int = FITS, times: float = 1.0) -> Figures:
    return Figures(bytes, times * moved(candidate), {})


def compile_all(
    ranking: list[Candidate], figures: list[Figures], wanted: int
) -> tuple[tuple[Candidate, ...], list[str]]:
    """The best layouts and the printed lines; `figures` replaces the compiler, in rank order."""
    known = dict(zip(map(repr, (each.config for each in ranking)), figures, strict=True))
    said: list[str] = []
    made = Compiling(lambda config, memory: known[repr(config)], H100, LIMIT, said.append)
    return made.best(ranking, wanted), said


def test_what_does_not_fit_is_dropped(ranking: list[Candidate]) -> None:
    sizes = (TOO_LARGE, FITS, TOO_LARGE, FITS, FITS)
    figures = [as_predicted(*both) for both in zip(ranking, sizes, strict=True)]
    best, said = compile_all(ranking, figures, 2)
    assert [each.config for each in best] == [ranking[1].config, ranking[3].config]
    assert [" dropped, " in line for line in said] == [True, False, True, False]
    layout = ranking[0].config.layout
    assert said[0].startswith(f"compiled 1: {layout}: dropped, 75.6 GiB per device")
    assert best[0].compiled and best[0].compiled.bytes == FITS + sum(x.bytes for x in OUTSIDE)
    none, said = compile_all(ranking, [as_predicted(each, TOO_LARGE) for each in ranking], 2)
    assert (none, len(said)) == ((), 5)


def test_more_bytes_change_the_order(ranking: list[Candidate]) -> None:
    figures = [as_predicted(each, times=10.0 ** (4 - i)) for i, each in enumerate(ranking)]
    best, _ = compile_all(ranking, figures, 3)
    assert [each.config for each in best] == [ranking[i].config for i in (2, 1, 0)]
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert best[0].seconds > best[0].step.seconds


def test_a_layout_that_the_compiler_refuses_is_dropped(ranking: list[Candidate]) -> None:
    def measure(config: Config, memory: int) -> Figures:
        if config == ranking[0].config:
            raise UserError("XLA: no; use another layout")
        assert memory == H100.accelerator.hbm_bytes
        return as_predicted(ranking[1])

    said: list[str] = []
    (best,) = Compiling(measure, H100, LIMIT, said.append).best(ranking, 1)
    assert best.config == ranking[1].config
    assert said[0].endswith(": dropped, XLA: no; use another layout")


def test_a_step_as_predicted_stays_as_it_is(ranking: list[Candidate]) -> None:
    for each in ranking:
        alone = Predictor(H100, hiding=False)(ConfigStep(each.config))
        step = remade(each.step, alone, as_predicted(each))
        assert step.seconds == pytest.approx(each.step.seconds)


def test_collectives_are_hidden_as_compiled() -> None:
    pins = {"layout.tp": 4, "layout.collective_matmul": True, "layout.pp": 1}
    each = next(iter(Search(Space(CONFIG, 16, pins), H100, LIMIT)))
    alone = Predictor(H100, hiding=False)(ConfigStep(each.config))

    def sent(terms: object) -> float:
        return sum(t.seconds for t in terms if t.name == "layers, collective-permute over tp")  # type: ignore[attr-defined]

    def exposed(share: float) -> float:
        found = as_predicted(each)._replace(hidden={"tp": share})
        return sent(remade(each.step, alone, found).terms)

    whole = sent(alone.terms)
    assert whole > 0
    assert sent(each.step.terms) < whole
    assert exposed(0.0) == pytest.approx(whole)
    assert exposed(0.25) == pytest.approx(0.75 * whole)
    assert exposed(1.0) < 0.5 * whole


def test_the_share_that_is_shown_is_of_devices_that_share_a_layer() -> None:
    figures = Figures(0, 0.0, {"tp": 0.9, "cp+tp": 0.7, "replicas": 0.1, "replicas+dp": 0.2})
    assert Compiled(figures, 0, None).hidden == 0.7  # type: ignore[arg-type]


def test_each_link_is_hidden_by_the_same_kernels() -> None:
    """tp's collectives in a node run at the same time as ZeRO's between nodes."""
    pins = {"layout.tp": 8, "layout.collective_matmul": True, "layout.pp": 1, "layout.zero": 3}
    each = next(iter(Search(Space(CONFIG, 32, pins), H100, LIMIT)))
    alone = Predictor(H100, hiding=False)(ConfigStep(each.config))
    names = ("layers, collective-permute over tp", "parameters of layers, all-gather over dp")

    def sent(**hidden: float) -> list[float]:
        step = remade(each.step, alone, as_predicted(each)._replace(hidden=hidden))
        return [sum(t.seconds for t in step.terms if t.name == name) for name in names]

    tp, dp = sent(tp=0.0, dp=0.0)
    assert tp > 0 and dp > 0
    assert sent(tp=1.0, dp=1.0) == pytest.approx([sent(tp=1.0, dp=0.0)[0], sent(tp=0.0, dp=1.0)[1]])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_compiler", lambda: lambda *_: Figures(FITS, 5e12, {"tp": 0.5}))


WORDS = """
--model.num_layers 8 --model.hidden_size 2048 --model.num_heads 16 --model.vocab_size 32000
--model.dtype bfloat16 --train.global_batch_size 32
--gpus 8 --gpu h100 --compile 2 --layout.pp 1 --layout.cp 1
"""
OPTIONS = WORDS.split()
ONE = {"layout.pp": 1, "layout.cp": 1, "layout.tp": 1}


def test_the_command(fake: None, capsys: pytest.CaptureFixture) -> None:
    assert command.main([*OPTIONS, "--json"]) == 0
    out, err = capsys.readouterr()
    best = json.loads(out)["best"]
    assert [each["compiled"]["moved"] for each in best] == [5e12, 5e12]
    assert len(err.splitlines()) == 2
    assert command.main(OPTIONS) == 0
    out = capsys.readouterr().out
    assert "s/step compiled" in out and "GiB compiled" in out
    assert out.splitlines()[0].endswith(" tokens; compiled for H200s with 80.0 GiB")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def missing() -> None:
        raise UserError("the CUDA compiler is missing (none); pip install 'jaxptd[h200]'")

    found = SimpleNamespace(check_compiler=missing)
    monkeypatch.setattr(command, "later", {"compiler": found}.get)
    assert "pip install 'jaxptd[h200]'" in refused(capsys, command.main, OPTIONS)


def test_nothing_fits_once_compiled(fake: None) -> None:
    with pytest.raises(UserError, match="fits once it is compiled; use more GPUs"):
        plan(CONFIG, gpus=8, gpu="h100", pins=ONE, max_memory=0.36, compile=1)
    with pytest.raises(UserError, match="compile is 101; use 0 to 100"):
        plan(CONFIG, gpus=16, gpu="h100", compile=101)


def test_a_predicted_candidate_has_its_predicted_seconds(ranking: list[Candidate]) -> None:
    first = ranking[0]
    assert dataclasses.replace(first, compiled=None).seconds == first.step.seconds
