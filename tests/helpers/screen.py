"""The screen of a terminal, for tests of what stays on it."""

import re

CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


def screen(output: str, *, width: int) -> list[str]:
    """The lines that a terminal of this width shows after an output, without trailing spaces.

    Understands carriage returns, line feeds, cursor up, and erase line; colours are left out.
    """
    lines, row, column, place = [""], 0, 0, 0
    while place < len(output):
        if code := CODE.match(output, place):
            place = code.end()
            if code[2] == "A":
                row -= int(code[1] or 1)
            elif code[2] == "K":
                lines[row] = ""
            continue
        char = output[place]
        place += 1
        if char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
        else:
            if column == width:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row] = line[:column] + char + line[column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]
