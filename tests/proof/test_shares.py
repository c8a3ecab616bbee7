"""Shares of cases, one per process. Imports little, as each process imports this file."""

import sys

import pytest

from jaxptd.proof.draw import Share, run_in_processes


def test_each_case_has_one_share_and_four_in_a_row_have_the_same() -> None:
    shares = [Share(number, 3) for number in range(3)]
    owners = [[share.number for share in shares if share.has(case)] for case in range(16)]
    assert owners == [[case // 4 % 3] for case in range(16)]


@pytest.mark.slow
def test_each_process_has_its_share() -> None:
    assert run_in_processes(_end, 2, 5) == [0, 5]


def _end(share: Share, factor: int) -> None:
    sys.exit(share.number * factor)
