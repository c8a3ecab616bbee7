"""Steps measured and published by others, from `benchmarks/published`."""

from pathlib import Path

from jaxptd.planner.rows import Row, read_rows

ROWS = Path(__file__).parents[2] / "benchmarks" / "published"


def table_1() -> list[Row]:
    """The ten rows of Megatron's table 1."""
    return read_rows(ROWS / "megatron_table1.csv")


def h100_row() -> Row:
    """The row that sets the H100's share of peak."""
    return read_rows(ROWS / "h100_calibration.csv")[0]
