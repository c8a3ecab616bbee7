"""Large plans: a published recipe ranks high, few programs are counted, a config is written."""

import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, from_dict, to_dict
from jaxptd.errors import UserError
from jaxptd.plan import plan
from jaxptd.planner.planning import Plan


@pytest.fixture(scope="module")
def small() -> Plan:
    config = load_config("gpt2-124m", ["--model.vocab_size=50304", "--model.dtype=bfloat16"])
    return plan(config, gpus=4, gpu="h100", top=2)


@pytest.mark.slow
def test_gpt3_on_4096_h100s() -> None:
    """NVIDIA's recipe, tp 4 and pp 8, is the best with stages; micro-batches are 2, not 1."""
    found = plan(load_config("gpt3-175b"), gpus=4096, gpu="h100", pins={"layout.pp": 8})
    assert found.counted < 1000  # counting all would take hours
    assert found.best[0].config.layout.tp == 4
    assert all(each.config.layout.dp * each.config.layout.cp > 1 for each in found.best)


def test_a_plan_in_words(small: Plan) -> None:
    first, second = small.best
    lines = str(small).splitlines()
    assert len(lines) == 5
    assert lines[0] == "4 x h100, 8 a node, 73.6 GiB per device; global batch 512 x 1,024 tokens"
    assert lines[4].startswith(f"± is {small.error:.0%} of the prediction")
    assert first.step.seconds <= second.step.seconds
    assert lines[3].endswith(f"{second.step.seconds / first.step.seconds - 1:.1%}")
    assert small.tokens_per_second(first) * 4 * first.step.seconds == pytest.approx(
        small.config.train.global_batch_size * small.config.model.seq_length
    )
    day = small.tokens_per_second(first) * 4 * 86400
    assert small.days(first, day) == pytest.approx(1)
    assert 0 < small.mfu(first) < 1
    rows = small.as_dict()["best"]
    assert sum(term["seconds"] for term in rows[0]["terms"]) == pytest.approx(rows[0]["seconds"])
    assert sum(rows[0]["memory"].values()) == rows[0]["bytes"]


def test_the_options_make_the_config(small: Plan) -> None:
    base = ["--model.vocab_size=50304", "--model.dtype=bfloat16"]
    for each in small.best:
        words = " ".join(small.options(each)).split()
        pairs = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        assert load_config("gpt2-124m", [*base, *pairs]) == each.config


def test_what_would_fit_is_said() -> None:
    config = load_config("llama3-8b", [])
    with pytest.raises(UserError, match=r"no layout of 1 GPU fits; \d+ do"):
        alone = dict.fromkeys(("layout.pp", "layout.cp", "layout.row", "layout.col"), 1)
        plan(config, gpus=1, gpu="v100", pins={"layout.offload": "none", **alone})
    with pytest.raises(UserError, match=r"without --layout.zero 0 one does"):
        ones = dict.fromkeys(("layout.tp", "layout.pp", "layout.row", "layout.col"), 1)
        plan(config, gpus=8, gpu="h100", pins={"layout.zero": 0, "layout.offload": "none", **ones})


def test_pins_that_no_choice_has_leave_nothing() -> None:
    """Offloaded activations are those that remat dots saves, so full remat excludes them."""
    pins = {"layout.offload": "activations", "model.remat": "full"}
    with pytest.raises(UserError, match="without --layout.offload activations one does"):
        plan(load_config("gpt2-124m", []), gpus=2, gpu="h100", pins=pins)


def test_gpus_without_fp8_are_named() -> None:
    config = load_config("llama3-8b", ["--model.products=fp8"])
    with pytest.raises(UserError, match="fp8: a100 has no 8-bit matmuls"):
        plan(config, gpus=8, gpu="a100")


def test_bad_arguments() -> None:
    for options, words in (
        ({"gpus": 0}, "gpus is 0"),
        ({"max_memory": 2.0}, "max_memory=2.0: use a share"),
        (
            {"pins": {"layout.tq": 2}},
            "`plan` cannot fix the field layout.tq; did you mean layout.tp",
        ),
        ({"pins": {"layout.tp": "x"}}, "layout.tp: expected a whole number"),
        ({"pins": {"layout.tp": 0}}, "layout.tp=0: an axis has at least one device"),
        ({"pins": {"layout.tp": 2, "layout.row": 2}}, "over tp or over a row x col grid, not both"),
        ({"pins": {"layout.schedule": "zbv"}}, "layout.schedule=zbv: use one of 1f1b"),
        ({"pins": {"model.remat_layers": 99}}, "model.remat_layers=99 is more than"),
        ({"pins": {"train.micro_batches": 0}}, "train.micro_batches=0 must be a number above 0"),
        ({"gpu": "h300"}, "no such accelerator"),
    ):
        with pytest.raises(UserError, match=words):
            plan(Config(), **{"gpus": 4, "gpu": "h100", **options})


def test_a_config_of_the_plan_is_whole(small: Plan) -> None:
    assert from_dict(to_dict(small.best[0].config)) == small.best[0].config
