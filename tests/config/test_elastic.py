"""A run on fewer processes than its layout is for."""

import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.config.elastic import for_processes, possible_counts
from jaxptd.errors import UserError


def config(*overrides: str):
    given = ("train.micro_batches=1", *overrides)
    return load_config("test-tiny", [f"--{each}" for each in given])


@pytest.mark.parametrize(
    ("fields", "count", "dp", "micro_batches"),
    [
        ("elastic=[1,4] dp=4", 4, 4, 1),
        ("elastic=[1,4] dp=4", 2, 2, 2),
        ("elastic=[1,4] dp=4", 1, 1, 4),
        ("elastic=[1,4] dp=4 batch=24", 3, 3, 2),  # 6 samples before, 4 now: never more
        ("elastic=[1,4] dp=4 batch=24 micro=3", 3, 3, 4),
        ("elastic=[1,2] dp=4", 1, 2, 2),
        ("elastic=[1,2] dp=2 tp=2", 1, 1, 2),
        ("elastic=[1,2] dp=2 pp=2 micro=2", 1, 1, 4),
    ],
)
def test_dp_shrinks_and_micro_batches_grow(fields, count, dp, micro_batches):
    names = {"batch": "train.global_batch_size", "micro": "train.micro_batches"}
    names |= {"elastic": "processes.elastic"}
    given = [each.partition("=") for each in fields.split()]
    full = config(*(f"{names.get(name, f'layout.{name}')}={x}" for name, _, x in given))
    shrunk = for_processes(full, count)
    assert (shrunk.layout.dp, shrunk.train.micro_batches) == (dp, micro_batches)
    assert shrunk.train.global_batch_size == full.train.global_batch_size
    most = full.processes.elastic[1]
    assert shrunk.layout.num_devices * most == full.layout.num_devices * count
    assert shrunk.processes.elastic is None  # it is not shrunk twice
    samples = [
        x.train.global_batch_size / x.layout.sample_shards / x.train.micro_batches
        for x in (shrunk, full)
    ]
    assert samples[0] <= samples[1]


def test_without_it_nothing_changes():
    full = config("layout.dp=4")
    assert for_processes(full, 3) is full


ELASTIC = ("processes.elastic=[1,4]", "layout.dp=4")


@pytest.mark.parametrize(
    ("overrides", "count", "line"),
    [
        (ELASTIC, 5, "there are 5 processes; start 1 or 2 or 4 processes"),
        (ELASTIC, 0, "there are 0 processes"),
        (ELASTIC, 3, "does not split over layout.dp=3; start 1 or 2 or 4 processes"),
        (("processes.elastic=[2,4]", "layout.dp=4"), 1, "but there is 1 process; start 2 or 4"),
        (("processes.elastic=[1,2]",), 2, "layout.dp=1 does not shrink to 1/2 of it"),
        (("processes.elastic=[1,3]", "layout.dp=2"), 3, "layout.dp=2 does not shrink to 1/3"),
    ],
)
def test_what_cannot_shrink_is_refused(overrides, count, line):
    with pytest.raises(UserError) as caught:
        for_processes(config(*overrides), count)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bounds", ["[]", "[1]", "[0,2]", "[3,2]", "[1,2,3]"])
def test_bounds_that_are_none_are_refused(bounds):
    with pytest.raises(UserError, match=r"processes.elastic=.*: give the fewest and the most"):
        config(f"processes.elastic={bounds}")


def test_the_numbers_that_are_possible():
    assert possible_counts(config("processes.elastic=[2,6]", "layout.dp=4")) == [3, 6]
    assert possible_counts(config("processes.elastic=[4,6]", "layout.dp=2")) == [6]
    assert possible_counts(config(f"processes.elastic=[1,{2**31 - 1}]")) == [2**31 - 1]  # at once
    assert possible_counts(config(*ELASTIC)) == [1, 2, 4]
    assert possible_counts(config(*ELASTIC, "train.global_batch_size=24")) == [1, 2, 3, 4]
