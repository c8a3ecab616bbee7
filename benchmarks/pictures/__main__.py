"""Draws the documentation's pictures, with the same bytes each time.

`python -m benchmarks.pictures [grid pipeline remat ring step] [--out docs/pictures]`

Needs matplotlib (the viz extra). `step` also needs XLA's compiler for GPUs, as described in
`benchmarks/gpu/compile_gpu.py`, and is drawn only if you name it. `jaxptd pipeline --picture` draws
schedules other than those of `pipeline`.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxptd.errors import Parser, UserError, run_command
from jaxptd.plot import drawing

SUBJECTS = ("grid", "pipeline", "remat", "ring")


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the documentation's pictures."""
    parser = Parser(prog="python -m benchmarks.pictures", description=main.__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="default: all but step")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="where to")
    options = parser.parse_args(argv)
    if unknown := [each for each in options.subjects if each not in (*SUBJECTS, "step")]:
        raise UserError(f"no pictures of {unknown[0]}; use {', '.join(SUBJECTS)} or step")
    save = drawing("jaxptd.plot.style").save_pictures
    for subject in options.subjects or SUBJECTS:
        save(drawing(f"benchmarks.pictures.{subject}").PICTURES, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
