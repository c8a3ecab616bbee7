"""Every name in a config appears in the framework's source or documentation."""

import csv

import pytest
from framework_layouts import FOLDER, read, some_of

from jaxptd.planner.frameworks.planning import FRAMEWORKS


def names(framework: str) -> set[str]:
    lines = (FOLDER / "names.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if line[0] != "#")
    return {row["name"] for row in rows if row["framework"] == framework}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_name_is_in_the_source_and_every_one_listed_is_printed(name: str) -> None:
    printed = set()
    for load, setup in some_of(name):
        printed |= set(read(name, FRAMEWORKS[name].write(load, setup).text))
    sections = {each for each in printed if name == "torchtitan" and "." not in each}
    assert printed - sections == names(name)
