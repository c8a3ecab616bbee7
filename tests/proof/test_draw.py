"""Cases cover every field and pair of values, and are the same each time."""

import itertools
import random
import shlex

import pytest

from jaxptd.commands.command_line import make_parser, parse
from jaxptd.config import Config, OptimizerConfig
from jaxptd.config.block import FAMILIES
from jaxptd.pipeline.table import check
from jaxptd.proof.compare import command_line, drawn_table, one_device_config
from jaxptd.proof.draw import SHARED, Draws, Pairs, general, made
from jaxptd.proof.values import (
    DRAWN,
    FIXED,
    HOW,
    NOT_DRAWN,
    OWN,
    fields,
    has_field,
    of_section,
)

CASES = 8


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    draws = Draws(7, 8, tmp_path_factory.mktemp("drawn"))
    return draws, list(itertools.islice(draws, CASES))


def test_every_field_is_drawn_or_fixed_or_named_as_not_drawn() -> None:
    groups = [set(DRAWN), set(FIXED), set(NOT_DRAWN)]
    assert set.union(*groups) == fields()
    assert sum(map(len, groups)) == len(fields())
    assert all(NOT_DRAWN.values())
    assert set(DRAWN) >= HOW


def test_a_case_follows_from_its_seed_and_number(drawn, tmp_path) -> None:
    few = 2
    wanted = [case.values for case in drawn[1][:few]]
    assert [case.values for case in itertools.islice(Draws(7, 8, tmp_path), few)] == wanted
    assert next(iter(Draws(4, 8, tmp_path))).values != wanted[0]


def test_cases_in_a_row_share_the_step_of_one_device(drawn) -> None:
    keys = [one_device_config(case.config) for case in drawn[1]]
    same = sum(a == b for a, b in itertools.pairwise(keys))
    assert CASES // SHARED <= same < CASES - 1


def test_every_case_has_new_pairs_and_its_devices(drawn) -> None:
    draws, cases = drawn
    assert all(2 <= case.config.layout.num_devices <= 8 for case in cases)
    assert any(case.refused for case in cases)
    assert any(case.config.layout.ep > 1 for case in cases)
    few = len(DRAWN) * (len(DRAWN) - 1) // 2
    assert few < len(draws.pairs.met) < draws.pairs.number
    assert not draws.pairs.new(cases[0].values)


EXPERTS = [family for family, row in FAMILIES.items() if "moe" in row]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_fewer_and_smaller_than_a_published_models(family: str, tmp_path) -> None:
    values = {name: of[0] for name, of in DRAWN.items()} | {"model.family": family}
    model = made(values, tmp_path).model
    assert model.moe.num_experts <= 8
    assert max(model.moe.ffn_hidden_size or 0, model.moe.shared_ffn_hidden_size) <= 20
    assert model.moe.shared_gate == FAMILIES[family]["moe"].shared_gate
    four = made(values | {"model.moe.num_experts": 4}, tmp_path).model
    assert four.moe.num_experts == 4


def test_cases_set_no_options_that_their_family_lacks(drawn) -> None:
    sections = {name for case in drawn[1] for name in DRAWN if of_section(name)}
    assert {"model.moe.top_k", "model.encoder_decoder.num_layers", "model.rope.theta"} <= sections
    for case in drawn[1]:
        for name in sections:
            assert has_field(case.config.model.family, name) or case.values[name] is None


def test_pairs_that_cannot_be_are_counted_apart() -> None:
    pairs = Pairs(random.Random(1))
    order = list(DRAWN)
    never, later = (
        tuple(sorted(((name, 2), ("layout.tp", 2)), key=lambda level: order.index(level[0])))
        for name in ("layout.row", "layout.ep")
    )
    pairs.refused |= {never, later}
    assert pairs.counts() == {"met": 0, "of": pairs.number - 2, "refused": 2}
    values = {name: of[0] for name, of in DRAWN.items()} | dict(later)
    pairs.add(values)  # it was possible after all
    met = len(DRAWN) * (len(DRAWN) - 1) // 2
    assert pairs.counts() == {"met": met, "of": pairs.number - 1, "refused": 1}


def test_the_command_of_a_case_is_its_config(drawn) -> None:
    for case in drawn[1][:3]:
        _, _, *options = shlex.split(command_line(case.config))
        fixed = [f"--{name}={value}" for name, value in FIXED.items()]
        assert parse(make_parser("verify", ""), [*options, *fixed])[0] == case.config


def test_a_command_spells_out_factors_by_pattern() -> None:
    rates = OptimizerConfig(rates={"*.w": 2.0})
    _, _, *options = shlex.split(command_line(Config(optimizer=rates)))
    assert parse(make_parser("verify", ""), options)[0].optimizer == rates


@pytest.mark.parametrize("kind", OWN)
def test_tables_that_are_drawn_are_schedules(kind: str) -> None:
    for stages, micro_batches in ((2, 3), (3, 1), (4, 4)):
        check(drawn_table(kind, stages=stages, micro_batches=micro_batches))


def test_sentences_that_differ_in_numbers_are_counted_together() -> None:
    one = "model.num_heads=30 does not split over layout.col=4 (1, 2, 3), or attention2d=blocks"
    other = "model.num_heads=3 does not split over layout.col=2 (1, 3), or attention2d=blocks"
    assert general(one) == general(other)
    assert "attention2d" in general(one)
