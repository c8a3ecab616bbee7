"""Reads collectives from the text of compiled programs."""

import pytest

from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective

HLO = [
    (
        "%a = f32[8,4]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        ALL_GATHER,
        ("tp",),
        128,
    ),
    (
        "%a = bf16[8]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
        ALL_REDUCE,
        ("dp",),
        16,
    ),
    (
        "%a = (f32[2]{0}, f32[3]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3,4,5,6,7}}",
        ALL_REDUCE,
        ("dp", "tp"),
        20,
    ),
    (
        "%a = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
        REDUCE_SCATTER,
        ("tp",),
        32,
    ),
    (
        "%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
        ALL_GATHER,
        ("tp",),
        32,
    ),
    (
        "%a = f32[2]{0} all-reduce(%p), replica_groups=mesh['dp'=2,'tp'=4] {'tp'}, to_apply=%add",
        ALL_REDUCE,
        ("tp",),
        8,
    ),
    (
        "%a = (f32[2]{0}, f32[3]{0}) all-reduce-start(%p, %q), replica_groups=[2,4]<=[8]",
        ALL_REDUCE,
        ("tp",),
        20,
    ),
    (
        "%a = ((f32[2]{0}), f32[2]{0}) all-reduce-start(%p), replica_groups=[2,4]<=[8]",
        ALL_REDUCE,
        ("tp",),
        8,
    ),
    (
        "%a = ((f32[2]{0}, f32[3]{0}), (f32[2]{0}, f32[3]{0})) all-reduce-start(%p, %q), "
        "replica_groups=[2,4]<=[8]",
        ALL_REDUCE,
        ("tp",),
        20,
    ),
    (
        "%a = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,4},{4,0}}",
        "collective-permute",
        ("dp",),
        8,
    ),
    (
        "%a = ((f32[2]{0}, f32[4]{0}), (f32[2]{0}, f32[4]{0})) collective-permute-start(%p, %q), "
        "source_target_pairs={{0,4},{4,0}}",
        "collective-permute",
        ("dp",),
        24,
    ),
    (
        "%a = ((f32[8]{0}, f32[4]{0}), (f32[2]{0}, f32[1]{0})) reduce-scatter-start(%p, %q), "
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        REDUCE_SCATTER,
        ("tp",),
        48,
    ),
]


@pytest.mark.parametrize(("line", "kind", "axes", "size"), HLO)
def test_spellings_of_hlo(line: str, kind: str, axes: tuple, size: int) -> None:
    text = f"HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {{\n  {line}\n}}\n"
    assert list(collectives_from_hlo(text, {"dp": 2, "tp": 4})) == [Collective(kind, axes, 1, size)]


def test_groups_of_one_device_are_left_out() -> None:
    line = "%a = f32[2]{0} all-reduce(%p), replica_groups=[8,1]<=[8]"
    text = f"HloModule m\n\nENTRY %main () -> f32[] {{\n  {line}\n}}\n"
    assert list(collectives_from_hlo(text, {"dp": 2, "tp": 4})) == []
