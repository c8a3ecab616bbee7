"""Memory grows with the tokens of a device; the work that overlaps with permutes is read right."""

from pathlib import Path

import pytest

from benchmarks.context import long_context, overlap
from benchmarks.context.overlap import Permute, Work
from benchmarks.lib.compiler import compiler_options
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.config import Config
from jaxptd.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def points() -> long_context.Points:
    wanted = {("zigzag", 2): (8192, 32768), ("zigzag", 4): (32768,), ("rsa", 2): (1024, 2048)}
    return {
        (ring, cp): {length: long_context.temporary_bytes(length, cp, ring) for length in lengths}
        for (ring, cp), lengths in wanted.items()
    }


@pytest.mark.slow
def test_memory_of_a_ring_is_linear_and_of_rsa_quadratic(points: long_context.Points) -> None:
    assert 0.7 < long_context.exponent(points["zigzag", 2]) < 1.1
    assert 1.7 < long_context.exponent(points["rsa", 2]) < 2.1


@pytest.mark.slow
def test_twice_the_devices_need_half_the_memory_each(points: long_context.Points) -> None:
    assert 1.4 < points["zigzag", 2][32768] / points["zigzag", 4][32768] < 2.1


def test_exponent_is_the_slope_of_the_longest_two() -> None:
    assert long_context.exponent({1: 7, 2: 10, 8: 10 * 4**3}) == pytest.approx(3)


def test_table_and_picture_repeat(tmp_path: Path) -> None:
    points = {("zigzag", 1): {64: 2**20, 128: 2**21}, ("rsa", 8): {32: 2**20, 64: 2**22}}
    head, ring, rsa = long_context.rows(points)
    assert head == ["ring", "cp", "T=32", "T=64", "T=128", "grows as"]
    assert ring == ["zigzag", "1", "", "1.0", "2.0", "T^1.00"]
    assert rsa == ["rsa", "8", "1.0", "4.0", "", "T^2.00"]
    drawn = [tmp_path / "a" / "x.svg", tmp_path / "y.svg"]
    for path in drawn:
        long_context.draw(points, path)
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    assert b"<dc:date>" not in drawn[0].read_bytes()


def config(name: str, *words: str) -> Config:
    return parse(make_parser("x", ""), ["--config", str(CONFIGS / name), *words])[0]


@pytest.fixture
def gib_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the compiler: a step needs ten GiB, and one for each 1024 tokens and 1000 ids."""

    def need(config: Config) -> long_context.Need:
        tokens, ids = config.model.seq_length / 1024, (config.model.vocab_size or 0) / 1000
        return long_context.Need(config, 10 + tokens * ids / 50, 10, tokens * ids / 50)

    monkeypatch.setattr(long_context, "need", need)


def test_lengths_double_until_one_does_not_fit(gib_a_thousand: None) -> None:
    long = config("gpt-1.3b-131k.yaml", "--model.vocab_size", "50000")
    found = list(long_context.longest(long))
    assert [each.config.model.seq_length for each in found] == [2**17, 2**18]
    assert [each.fits for each in found] == [True, False]
    page = long_context.on_gpus(long)
    assert "Longest that fits: T=131,072. With half the vocabulary the peak there is" in page
    assert "Nothing fits." in long_context.on_gpus(long_context.with_model(long, seq_length=2**20))


def test_cudnns_own_memory_counts() -> None:
    """The workspace is a float32 for each of 16,384 tokens and 2048 hidden units."""
    long = config("gpt-1.3b-131k.yaml")
    found = long_context.Need(long, long_context.H200 - 0.1, 0, 0)
    assert found.workspace == 16384 * 2048 * 4 / 2**30 and not found.fits
    assert long_context.Need(long, long_context.H200 - 0.2, 0, 0).fits


def test_long_configs_hold_what_their_names_say() -> None:
    tiny, large = config("long-32k.yaml"), config("gpt-1.3b-131k.yaml")
    assert (tiny.model.seq_length, tiny.layout.cp, tiny.layout.ring) == (32768, 8, "zigzag")
    assert (large.model.seq_length, large.layout.cp) == (131072, 8)
    width, layers = large.model.hidden_size, large.model.num_layers
    matrices = layers * 12 * width**2 + large.model.vocab_size * width
    assert round(matrices / 1e9, 1) == 1.3


# ---- permutes over work ----------------------------------------------------------------------


def test_permutes_that_are_alike_are_one_row() -> None:
    found = [Permute(name, "forward", 2**20, 3, Work(2)) for name in "ab"]
    found.append(Permute("c", "backward", 2**21, 1, Work()))
    assert overlap.rows(found) == [
        ("forward", "6", "1", "2", "0", "attention"),
        ("backward", "1", "2", "0", "0", "nothing"),
    ]
    words = "over attention 6 (6 MiB), over products 0 (0 MiB), over nothing 1 (2 MiB)."
    assert words in overlap.summary(found)


def test_compiler_option_without_a_value_is_refused() -> None:
    assert compiler_options(["a=b=c", "d=1"]) == {"a": "b=c", "d": "1"}
    with pytest.raises(UserError, match="--compiler fast: write it as name=value"):
        compiler_options(["fast"])
