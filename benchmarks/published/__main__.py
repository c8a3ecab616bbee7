"""`python -m benchmarks.published`: compares predictions with the times of Megatron's table 1."""

import json
from collections.abc import Sequence

from benchmarks.published.fit import fitted_table, table_1
from jaxptd.commands.validate import MISSED, lines
from jaxptd.common_options import add_words
from jaxptd.errors import Parser, run_command
from jaxptd.hardware import find_accelerator


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts Megatron's table 1 and prints the errors; exits with 1 if one exceeds its bar."""
    parser = Parser(prog="python -m benchmarks.published", description=main.__doc__)
    help_text = "predict each row with a model fitted to the others"
    parser.add_argument("--held-out", action="store_true", help=help_text)
    add_words(parser, json="rows, errors, bars and fitted shares", quiet="print the errors only")
    args = parser.parse_args(argv)
    found = fitted_table(table_1(), find_accelerator("a100"), held_out=args.held_out)
    if args.json:
        print(json.dumps(found.as_dict()))
        return MISSED if found.missed() else 0
    table, errors, *missed = lines(found)
    mean, worst = found.constant()
    shares = (f"{name.removesuffix('_share')} {x:.3f}" for name, x in found.shares.items())
    text = [
        table,
        f"{errors}; bar of the mean {found.mean_bar:.1%}",
        f"a constant TFLOP/s: mean error {mean:.1%}, worst {worst:.1%}",
        f"shares of peak fitted to all rows: {', '.join(shares)}",
        *missed,
    ]
    print("\n".join(text[int(args.quiet) :]))
    return MISSED if found.missed() else 0


if __name__ == "__main__":
    run_command(main)
