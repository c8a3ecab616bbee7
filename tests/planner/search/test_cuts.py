"""Division of layers over the stages of a pipeline."""

import pytest

from jaxptd.errors import UserError
from jaxptd.planner.search.space import StageSplits, cut


def test_the_last_part_has_fewer() -> None:
    assert cut(32, 4, "1f1b", None).sizes is None
    assert cut(32, 4, "1f1b", None, 2).sizes == (8, 9, 9, 6)
    found = cut(14, 4, "1f1b", None, 2)
    assert found == ((4, 4, 4, 2), 4 / 14, 2 / 14, 4 / 14, 4)
    # The last of zb-v's parts is on the first stage.
    assert cut(14, 2, "zb-v", None, 2) == ((4, 4, 4, 2), 6 / 14, 6 / 14, 8 / 14, 4)


def test_what_is_not_there_is_left_out() -> None:
    cuts = StageSplits([31], None)
    assert cuts.fewer(4, "1f1b", None, 3) == [0, 2, 3]  # 1 fewer is 31's normal split
    assert cuts.fewer(1, "1f1b", None, 3) == [0]
    assert StageSplits([4, 4], None).fewer(2, "1f1b", None, 3) == [0]
    assert StageSplits([8], (3, 5)).fewer(2, "1f1b", None, 3) == [0]
    assert StageSplits([3], None).fewer(4, "1f1b", None, 0) == []
    with pytest.raises(UserError, match="of 2 parts cannot give up 7 layers"):
        cut(4, 2, "1f1b", None, 7)
