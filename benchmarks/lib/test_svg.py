"""The pictures of the documentation are those that their commands draw."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.context import pictures as context
from benchmarks.grid import pictures as grid
from benchmarks.lib.svg import words
from benchmarks.memory import remat_pictures

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.parametrize(
    ("draw", "count"),
    [
        (context.draw, 2),
        pytest.param(grid.draw, 4, marks=pytest.mark.slow),
        (remat_pictures.draw, 1),
    ],
    ids=["context", "grid", "memory"],
)
def test_the_pictures_of_the_pages_are_current(
    draw: Callable[[Path], None], count: int, tmp_path: Path
) -> None:
    draw(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == count
    for path in drawn:
        assert words(path) == words(PICTURES / path.name)
        assert words(path)


def test_everything_that_a_layer_keeps_is_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    config = remat_pictures.Config(model=remat_pictures.MODEL)
    kept = sum(remat_pictures.by_group(config).values())
    (stack,) = remat_pictures.architecture_of(config.model).stacks
    every = list(remat_pictures.kept_by_layer(config, stack))
    for policy, size in zip(remat_pictures.POLICIES, kept, strict=True):
        assert size == sum(each.bytes * each.times.get(policy, 0) for each in every)
    monkeypatch.delitem(remat_pictures.GROUPS, "q, k, v")
    with pytest.raises(ValueError, match="not enough values"):
        remat_pictures.by_group(config)
