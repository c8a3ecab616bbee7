"""Rows of measured steps: the packaged ones, and bad files."""

from pathlib import Path

import pytest
from published import h100_row, table_1

from jaxptd.errors import UserError
from jaxptd.planner.rows import COLUMNS, paper_flops, read_rows

# Parameters in billions -> petaFLOP/s of all GPUs together, from table 1 of the paper.
PAPER = {1.7: 4.4, 3.6: 8.8, 7.5: 18.2, 18.4: 34.6, 39.1: 70.8, 76.1: 143.8, 145.6: 227.1}
PAPER |= {310.1: 297.4, 529.6: 410.2, 1008.0: 502.0}
GOOD = {
    "name": "mine", "program": "nemo", "hardware": "h100", "num_layers": "32",
    "hidden_size": "4096", "num_heads": "32", "num_kv_heads": "8", "ffn_hidden_size": "14336",
    "gated": "true", "vocab_size": "128256", "seq_length": "8192", "gpus": "8",
    "global_batch": "128", "micro_batch": "1", "tp": "1", "pp": "1", "virtual_stages": "1",
    "cp": "2", "zero": "1", "zero_group": "0", "sequence_parallel": "false", "remat": "none",
    "seconds": "12.91",
}  # fmt: skip


def file(folder: Path, **changes: str | None) -> Path:
    """A file of one row; a value of None leaves its column out."""
    cells = {name: cell for name, cell in {**GOOD, **changes}.items() if cell is not None}
    path = folder / "mine.csv"
    path.write_text(f"# mine\n{','.join(cells)}\n{','.join(cells.values())}\n")
    return path


def test_the_ten_rows_of_the_paper() -> None:
    rows = table_1()
    assert [row.name for row in rows] == [f"gpt-{size}b" for size in PAPER]
    for row, (billions, petaflops) in zip(rows, PAPER.items(), strict=True):
        model = row.shape.architecture
        (stack,) = model.stacks
        layer = stack.weights
        elements = stack.layers * layer + sum(end.weights for end in model.before)
        assert elements == pytest.approx(billions * 1e9, rel=0.035)  # it rounds 1.65 to 1.7
        assert row.flops / row.seconds == pytest.approx(petaflops * 1e15, rel=0.005)
        assert row.parallelism.remat == "full"


def test_flops_of_the_paper_by_its_other_formula() -> None:
    """Equation 3 is 4 (6 b s n + 6 b s^2 h L) minus the logits' part, which is not recomputed."""
    shape, batch = table_1()[0].shape, 512
    tokens = batch * shape.seq_length
    layers = 24 * shape.num_layers * shape.hidden_size**2
    scores = 4 * shape.num_layers * shape.seq_length * shape.hidden_size
    logits = 6 * shape.hidden_size * shape.vocab_size
    assert paper_flops(shape, batch) == pytest.approx(tokens * (4 * (layers + scores) + logits))


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    assert read_rows(file(tmp_path))[0].shape == h100_row().shape
    assert read_rows(file(tmp_path, remat="selective"))[0].parallelism.remat == "attention"
    assert read_rows(file(tmp_path, gated="0", ffn_hidden_size="0"))[0].shape.ffn == 4 * 4096
    row = read_rows(file(tmp_path, seconds=None, teraflops_per_gpu="400"))[0]
    assert row.seconds == pytest.approx(row.flops / 8 / 400e12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"program": "alpa"}, "row 1: program=alpa; use one of jaxptd, megatron-2021"),
        ({"num_layers": "x"}, "row 1: num_layers=x; use a whole number"),
        ({"num_layers": "1.5"}, "num_layers=1.5; use a whole number"),
        ({"num_layers": ""}, "num_layers=; use a whole number"),
        ({"num_layers": "0"}, "num_layers=0; use 1 to"),
        ({"tp": "-2"}, "tp=-2; use 1 to"),
        ({"gpus": "9" * 30}, "use 1 to"),
        ({"gpus": "9" * 5000}, "use"),
        ({"pp": "100000"}, "pp=100000; use 1 to 99999"),
        ({"gated": "maybe"}, "gated=maybe; use one of true, 1, yes, false"),
        ({"remat": "some"}, "remat=some; use one of selective, none, attention, dots, full"),
        ({"seconds": "0"}, "seconds=0; use a number above 0"),
        ({"seconds": "nan"}, "seconds=nan; use a number above 0"),
        ({"seconds": "inf"}, "seconds=inf; use a number above 0"),
        ({"seconds": "1e-300"}, "seconds=1e-300; use a number above 0 and below 1000000000"),
        ({"seconds": "fast"}, "seconds=fast; use a number"),
        ({"seconds": None}, "one of seconds and teraflops_per_gpu"),
        ({"teraflops_per_gpu": "3"}, "one of seconds and teraflops_per_gpu"),
        ({"tp": None}, "lacks the column tp"),
        ({"micro_batches": "3"}, "unknown column 'micro_batches'; did you mean micro_batch?"),
        ({"gpus": "9"}, "gpus=9 is not a multiple of tp x pp x cp = 2"),
        ({"gpus": "1"}, "gpus=1 is not a multiple of tp x pp x cp = 2"),
        ({"global_batch": "3"}, "global_batch=3 is not a multiple of dp x micro_batch = 4"),
        ({"tp": "4", "num_heads": "2", "num_kv_heads": "0"}, "does not split over tp=4"),
        ({"num_heads": "24"}, "hidden_size=4096 does not split over num_heads=24"),
        ({"num_kv_heads": "7"}, "num_heads=32 does not split over num_kv_heads=7"),
        ({"seq_length": "8191"}, "seq_length=8191 does not split over cp=2"),
        ({"virtual_stages": "2"}, "virtual_stages=2 without a pipeline"),
        ({"pp": "4", "num_layers": "1"}, "num_layers=1 are fewer than pp x virtual_stages"),
        ({"zero": "4"}, "zero=4 is not a stage"),
        ({"zero_group": "3"}, "zero_group=3 does not divide dp x ep x cp"),
        ({"name": "a,b"}, "not one value per column"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rows(file(tmp_path, **changes))
    message = str(caught.value)
    assert words in message
    assert "mine.csv" in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "lacks the column name"),
        (b"\xff\xfe\x00", "is not text"),
        (b"# only a comment\n", "lacks the column name"),
        (",".join((*COLUMNS, "seconds")).encode(), "has no rows"),
        (b"# " + b"a" * 10**6, "has more than 1000000 bytes"),
        (b"a\n" * 3000, "has more than 2000 rows"),
        (b"a" * 200_000, "is not CSV: field larger than field limit"),
        (b"a,\0b", "unknown column"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_rows(path)
    for other in ("no.csv", "."):
        with pytest.raises(UserError, match=r"No such file|is not a file on disk"):
            read_rows(tmp_path / other)
