"""A terminal's screen, for tests of what remains on it."""

import re

CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


def screen(output: str, *, width: int) -> list[str]:
    """Lines that a terminal of this width shows after some output, without trailing spaces.

    Understands carriage return, line feed, cursor up and erase line; drops colours.
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
