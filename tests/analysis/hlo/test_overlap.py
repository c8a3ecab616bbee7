"""The work that overlaps with each collective of a scheduled program."""

from jaxptd.analysis.hlo.timeline import Move, Work, moves

SCHEDULE = """
%product (p0: f32[4,4], p1: f32[4,4]) -> f32[4,4] {
  %p0 = f32[4,4]{1,0} parameter(0)
  %p1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot = f32[4,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}
}

%visits (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %o = (f32[4,4]{1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %t = (s32[], f32[4,4]) tuple(%i, %x)
}

%round (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %a = (f32[4,4], f32[4,4]) collective-permute-start(%x), channel_id=1
  %b = ((f32[4,4]), f32[4,4]) collective-permute-start(%x), channel_id=2
  %w = (s32[], f32[4,4]) while(%p), condition=%c, body=%visits, b={"known_trip_count":{"n":"2"}}
  %a.done = f32[4,4]{1,0} collective-permute-done(%a), metadata={op_name="jit(f)/ppermute"}
  %n = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %b.done = f32[4,4]{1,0} collective-permute-done(%b), metadata={op_name="transpose(jvp())"}
  ROOT %t = (s32[], f32[4,4]) tuple(%i, %a.done)
}

ENTRY %main (x: f32[4,4], s: (s32[], f32[4,4])) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %s = (s32[], f32[4,4]) parameter(1)
  %w = (s32[], f32[4,4]) while(%s), condition=%c, body=%round, b={"known_trip_count":{"n":"5"}}
  %y = f32[4,4]{1,0} collective-permute(%x), metadata={op_name="transpose(rematted_computation)/x"}
  %a = (f32[4,4], f32[4,4]) collective-permute-start(%y), channel_id=3
  %n = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  ROOT %done = f32[4,4]{1,0} collective-permute-done(%a), metadata={op_name="jit(f)/ppermute"}
}
"""


def test_every_permute_is_found_with_what_it_lies_over() -> None:
    assert moves(SCHEDULE) == [
        Move("a.done", "forward", 64, 5, Work(attention=2)),
        Move("b.done", "backward", 64, 5, Work(attention=2, products=1)),
        Move("y", "forward again", 64, 1, Work()),
        Move("done", "forward", 64, 1, Work(products=1)),
    ]


def test_branches_count_with_the_heaviest() -> None:
    text = SCHEDULE.replace(
        "%n = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product\n  ROOT",
        "%n = (s32[], f32[4,4]) conditional(%i, %s, %s), branch_computations={%visits, %empty}\n"
        "  ROOT",
    )
    empty = "%empty (p: f32[4,4]) -> f32[4,4] {\n  %p = f32[4,4]{1,0} parameter(0)\n}\n"
    assert moves(empty + text)[-1].over == Work(attention=1)


GRID = """
%product (p0: f32[4,4], p1: f32[4,4]) -> f32[4,4] {
  %p0 = f32[4,4]{1,0} parameter(0)
  %p1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot = f32[4,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}
}

%layer (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %g = (f32[4,4], f32[8,4]) all-gather-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %n = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %g.done = f32[8,4]{1,0} all-gather-done(%g)
  %r = ((f32[4,4], f32[4,4]), (f32[2,4], f32[2,4])) reduce-scatter-start(%n, %n), \
replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
  %a = f32[4,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %o = (f32[4,4]{1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %r.done = (f32[2,4]{1,0}, f32[2,4]{1,0}) reduce-scatter-done(%r), metadata={op_name="transpose()"}
  ROOT %t = (s32[], f32[4,4]) tuple(%i, %n)
}

ENTRY %main (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %s = (s32[], f32[4,4]) parameter(0)
  ROOT %w = (s32[], f32[4,4]) while(%s), condition=%c, body=%layer, b={"known_trip_count":{"n":"5"}}
}
"""
SIZES = {"dp": 1, "row": 2, "col": 2}


def test_collectives_are_found_with_axes_and_what_they_lie_over() -> None:
    gathered, reduced, scattered = moves(GRID, SIZES)
    assert gathered == Move("g.done", "forward", 128, 5, Work(products=1), "all-gather", ("col",))
    assert reduced == Move("a", "forward", 64, 5, Work(), "all-reduce", ("row", "col"))
    assert scattered == Move(
        "r.done", "backward", 64, 5, Work(attention=1), "reduce-scatter", ("row",)
    )
    assert [each.sent(SIZES) for each in (gathered, reduced, scattered)] == [
        5 * 128 // 2,
        5 * 2 * 64 * 3 // 4,
        5 * 2 * 64 // 2,  # the result is half the operand
    ]


def test_a_group_of_one_device_moves_nothing() -> None:
    text = GRID.replace("{{0,1},{2,3}}", "{{0},{1},{2},{3}}")
    assert [each.name for each in moves(text, SIZES)] == ["a", "r.done"]
