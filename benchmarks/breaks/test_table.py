"""Every break is of text that the code has, once."""

from benchmarks.breaks.__main__ import ALL, ROOT, broken


def test_every_break_can_be_made() -> None:
    for row in ALL:
        text = (ROOT / row.file).read_text()
        assert broken(text, row) != text
    assert len({row.name for row in ALL}) == len(ALL)
