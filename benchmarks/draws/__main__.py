"""Statistics of all random draws: dropout, initial values, the order of data, masks and spans.

`python -m benchmarks.draws`

Prints a table of tests. Each gives the probability that correct draws produce a result at least as
unlikely as the one found. All draws come from fixed seeds, so the table is the same each time.
Exits with 1 if a probability is below 1e-6 / the number of rows: the chance that this happens to
correct draws is one in a million.
"""

from collections.abc import Sequence

from benchmarks.draws import dropout, initial, masking, order, spans
from benchmarks.draws.statistics import SIGNIFICANCE, failing
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Tests all random draws and prints the table."""
    parser = Parser(prog="python -m benchmarks.draws", description=main.__doc__)
    parser.parse_args(argv)
    rows = [*dropout.rows(1024), *initial.rows(2**23, 64), *order.rows(4096, 256)]
    rows += [*masking.rows(2**15), *spans.rows(2**15)]
    wrong = failing(rows)
    cells = [["draws of", "property", "number", "probability", ""]]
    for row in rows:
        mark = "WRONG" if row in wrong else ""
        cells.append([row.of, row.what, f"{row.draws:,}", f"{row.p:.1e}", mark])
    print(table(cells))
    print(f"significance: {SIGNIFICANCE:g} for the table, {SIGNIFICANCE / len(rows):.1e} for a row")
    return int(bool(wrong))


if __name__ == "__main__":
    run_command(main)
