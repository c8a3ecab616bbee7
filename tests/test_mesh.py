"""Rank groups against the literature and the definition of a group; the mesh; the command."""

import itertools
import json
import math
import subprocess
import sys

import jax
import pytest
from command_lines import refused
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxptd import plot
from jaxptd.commands.mesh import main
from jaxptd.errors import UserError
from jaxptd.mesh import (
    MAX_WORLD_SIZE,
    Axis,
    Layout,
    draw,
    draw_links,
    make_mesh,
    rank_groups,
    ranks_along,
)

# The groups that Megatron-LM's documentation lists for 16 devices, tp=2, pp=4 and therefore dp=2.
LITERATURE = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[rank] for rank in range(16)],
    "dp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    "dp_cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "ep": [[rank] for rank in range(16)],
    "tp_dp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "tp_ep": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "dp_modulo_ep": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "replicas": [[rank] for rank in range(16)],
    "ulysses": [[rank] for rank in range(16)],
    "row": [[rank] for rank in range(16)],
    "col": [[rank] for rank in range(16)],
    "model": [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
    "embedding": [[0, 12], [1, 13], [2, 14], [3, 15]],
    "position_embedding": [[0], [1], [2], [3]],
}
ARGV = ["--world-size", "16", "--tp", "2", "--pp", "4"]


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxptd.mesh", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


# --- Groups


def test_groups_are_those_of_the_literature():
    groups = rank_groups(Layout(pp=4, dp=2, tp=2))
    assert groups == LITERATURE
    assert list(groups) == list(LITERATURE)


def test_the_decoder_begins_at_the_split_rank_as_in_megatron():
    """Documented: with 8 stages and split rank 3, the encoder has 0 to 2, the decoder 3 to 7.

    Embeddings are on the first stage, the decoder's first and the last; position embeddings are on
    the first two of these.
    """
    groups = rank_groups(Layout(pp=8), split_rank=3)
    assert groups["encoder"] == [[0, 1, 2]]
    assert groups["decoder"] == [[3, 4, 5, 6, 7]]
    assert groups["embedding"] == [[0, 3, 7]]
    assert groups["position_embedding"] == [[0, 3]]


# Additions to LITERATURE with split rank 2, and the embedding groups with 1 and 3, as obtained from
# `initialize_model_parallel` of megatron-core 0.12.0 on each of 16 ranks; its
# `is_pipeline_stage_before_split` gives encoder and decoder.
SPLIT = {
    "embedding": [[0, 8, 12], [1, 9, 13], [2, 10, 14], [3, 11, 15]],
    "position_embedding": [[0, 8], [1, 9], [2, 10], [3, 11]],
    "encoder": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "decoder": [[8, 12], [9, 13], [10, 14], [11, 15]],
}
EMBEDDING = {
    1: ([[0, 4, 12], [1, 5, 13], [2, 6, 14], [3, 7, 15]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    3: ([[0, 12], [1, 13], [2, 14], [3, 15]], [[0, 12], [1, 13], [2, 14], [3, 15]]),
}


def test_groups_of_an_encoder_and_a_decoder_are_megatrons():
    groups = rank_groups(Layout(pp=4, dp=2, tp=2), split_rank=2)
    assert groups == LITERATURE | SPLIT
    assert list(groups)[-2:] == ["encoder", "decoder"]
    for split_rank, expected in EMBEDDING.items():
        groups = rank_groups(Layout(pp=4, dp=2, tp=2), split_rank=split_rank)
        assert (groups["embedding"], groups["position_embedding"]) == expected


@pytest.mark.parametrize(("tp", "ep", "dp", "pp"), [(2, 2, 2, 2), (1, 4, 1, 3), (3, 2, 3, 1)])
def test_groups_of_experts_are_megatrons(tp, ep, dp, pp):
    """Repeats the loops in megatron-core 0.5.0's `initialize_model_parallel`; dp contains ep."""
    tensor_and_data, tensor_and_expert = tp * ep * dp, tp * ep
    starts = range(0, tensor_and_data * pp, tensor_and_data)
    groups = rank_groups(Layout(pp=pp, dp=dp, ep=ep, tp=tp))
    assert groups["tp_ep"] == [
        [*range(i + j * tensor_and_expert, i + (j + 1) * tensor_and_expert)]
        for i in starts
        for j in range(dp)
    ]
    assert groups["dp_modulo_ep"] == [
        [*range(i + j, i + tensor_and_data, tensor_and_expert)]
        for i in starts
        for j in range(tensor_and_expert)
    ]
    assert groups["tp_dp"] == [[*range(i, i + tensor_and_data)] for i in starts]
    assert groups["dp"] == [
        [*range(i + j, i + tensor_and_data, tp)] for i in starts for j in range(tp)
    ]


SIZES = st.integers(1, 3)
TENSOR = st.one_of(
    st.fixed_dictionaries({"tp": SIZES, "ulysses": st.integers(1, 2)}),
    st.fixed_dictionaries({"row": SIZES, "col": SIZES}),
)
OTHERS = st.fixed_dictionaries(dict.fromkeys(("pp", "replicas", "dp", "ep", "cp"), SIZES))
LAYOUTS = st.builds(lambda others, tensor: Layout(**others, **tensor), OTHERS, TENSOR)
# tp varies fastest, then cp, ep, dp, pp; a grid takes the place of tp, and col varies faster than
# row. Megatron counts ep and replicas in dp, and ulysses in cp.
FASTEST_FIRST = ["tp", "col", "row", "ulysses", "cp", "ep", "dp", "replicas", "pp"]
ALONG = {
    **{axis.value: {axis.value} for axis in Axis},
    "dp": {"replicas", "dp", "ep"},
    "cp": {"cp", "ulysses"},
    "dp_cp": {"replicas", "dp", "ep", "cp", "ulysses"},
    "tp_dp": {"replicas", "dp", "ep", "tp"},
    "tp_ep": {"ep", "tp"},
    "dp_modulo_ep": {"replicas", "dp", "cp", "ulysses"},
    "model": {"pp", "row", "col", "tp"},
}


def coordinates(layout: Layout) -> list[dict[str, int]]:
    """Each rank's coordinate along each axis, counted in Megatron's order."""
    ranges = [range(getattr(layout, axis)) for axis in reversed(FASTEST_FIRST)]
    return [
        dict(zip(reversed(FASTEST_FIRST), place, strict=True))
        for place in itertools.product(*ranges)
    ]


def test_the_picture_of_two_devices_for_heads():
    assert draw(Layout(ulysses=2, tp=2)).splitlines()[2:4] == [
        "dp 0 cp 0 ulysses 0 | 0 1  |",
        "dp 0 cp 0 ulysses 1 | 2 3  |",
    ]


@given(LAYOUTS)
def test_groups_partition_the_ranks_and_differ_along_their_axes_only(layout):
    places, groups = coordinates(layout), rank_groups(layout)
    for name, axes in ALONG.items():
        size = math.prod(getattr(layout, axis) for axis in axes)
        assert sorted(rank for group in groups[name] for rank in group) == list(range(len(places)))
        assert {len(group) for group in groups[name]} == {size}
        for group in groups[name]:
            others = [{a: i for a, i in places[r].items() if a not in axes} for r in group]
            assert all(other == others[0] for other in others)


@given(LAYOUTS)
def test_groups_ascend_and_are_ordered_by_their_first_rank(layout):
    for groups in rank_groups(layout).values():
        assert all(group == sorted(group) for group in groups)
        firsts = [group[0] for group in groups]
        assert firsts == sorted(set(firsts))


@given(LAYOUTS)
def test_embedding_groups_are_the_ends_of_the_pipelines(layout):
    groups = rank_groups(layout)
    ends = [[stages[0], stages[-1]] for stages in groups["pp"]]
    assert groups["embedding"] == (ends if layout.pp > 1 else [end[:1] for end in ends])
    assert groups["position_embedding"] == [[stages[0]] for stages in groups["pp"]]


def test_ranks_along_takes_axes_in_any_order():
    layout = Layout(pp=2, dp=2, tp=2)
    assert ranks_along(layout, Axis.TP, Axis.DP) == ranks_along(layout, Axis.DP, Axis.TP)
    assert ranks_along(layout, Axis.TP, Axis.DP) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- The mesh


def test_a_mesh_has_every_axis_and_ranks_in_order():
    mesh = make_mesh(Layout(dp=2, tp=2))
    assert mesh.axis_names == ("pp", "replicas", "dp", "ep", "cp", "ulysses", "row", "col", "tp")
    assert mesh.devices.shape == (1, 1, 2, 1, 1, 1, 1, 1, 2)
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_of_given_devices():
    devices = jax.devices()[::-1]
    assert make_mesh(Layout(dp=8), devices).devices.flatten().tolist() == devices


def test_too_few_devices_is_a_user_error():
    with pytest.raises(
        UserError, match=r"dp=3 tp=3.* needs 9 devices, there are 8; .*jaxptd.simulate\(9\)"
    ):
        make_mesh(Layout(dp=3, tp=3))


# --- The picture


def test_the_picture_of_four_stages():
    assert draw(Layout(pp=4, dp=2, tp=2)).splitlines() == [
        "            pp 0    pp 1    pp 2    pp 3",
        "          +-------+-------+-------+-------+",
        "dp 0 cp 0 |  0  1 |  4  5 |  8  9 | 12 13 |",
        "dp 1 cp 0 |  2  3 |  6  7 | 10 11 | 14 15 |",
        "          +-------+-------+-------+-------+",
        "          in each box: tp 2",
    ]


def test_the_picture_of_two_devices_for_experts():
    assert draw(Layout(ep=2, cp=2, tp=2)).splitlines() == [
        "                 pp 0",
        "               +------+",
        "dp 0 ep 0 cp 0 | 0 1  |",
        "dp 0 ep 0 cp 1 | 2 3  |",
        "dp 0 ep 1 cp 0 | 4 5  |",
        "dp 0 ep 1 cp 1 | 6 7  |",
        "               +------+",
        "               in each box: tp 2",
    ]


@given(LAYOUTS)
def test_every_picture_shows_each_rank_once_in_lines_of_one_length(layout):
    title, *rows, caption = draw(layout).splitlines()
    assert len({len(row) for row in rows}) == 1
    body = [row.partition("|")[2] for row in rows if "|" in row]
    shown = [int(word) for row in body for word in row.replace("|", " ").split()]
    assert sorted(shown) == list(range(layout.num_devices))
    assert title.count("pp") == layout.pp
    assert "x" in caption or f"tp {layout.tp}" in caption


def test_a_picture_with_ten_and_more_replicas_lines_up():
    rows = draw(Layout(dp=11, row=2, col=2)).splitlines()
    assert len({len(row) for row in rows[1:-1]}) == 1
    assert rows[-1].endswith("row 2 x col 2")


# --- The command


def test_json_is_the_groups(capsys):
    main([*ARGV, "--json"])
    out = capsys.readouterr().out
    assert json.loads(out) == LITERATURE
    assert out.count("\n") == 1


def test_text_lists_the_groups(capsys):
    main(ARGV)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 devices: pp=4 dp=2 tp=2 1f1b"
    assert "dp: [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]" in lines
    assert "model: [0,1,4,5,8,9,12,13] [2,3,6,7,10,11,14,15]" in lines
    assert draw(Layout(pp=4, dp=2, tp=2)) in "\n".join(lines)


def test_the_layout_of_a_config_or_a_run(capsys, tmp_path):
    main(["--config", "quickstart"])
    assert capsys.readouterr().out.startswith("4 devices: dp=2 tp=2 sequence_parallel\n")
    main(["--config", "quickstart", "--layout.pp", "2", "--world-size", "32"])
    assert capsys.readouterr().out.startswith("32 devices: pp=2 dp=8 tp=2 1f1b sequence_par")
    (tmp_path / "config.yaml").write_text("layout: {cp: 4}\n")
    main(["--run-dir", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["cp"] == [[0, 1, 2, 3]]


def test_the_split_rank_as_an_option(capsys):
    main([*ARGV, "--split-rank", "2", "--json"])
    assert json.loads(capsys.readouterr().out) == LITERATURE | SPLIT


def test_quiet_prints_the_groups_only(capsys):
    main([*ARGV, "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(LITERATURE)


def test_a_picture_of_the_mesh(capsys, tmp_path):
    main([*ARGV, "--picture", str(tmp_path / "mesh.svg"), "--json"])
    assert json.loads(capsys.readouterr().out) == LITERATURE
    assert ">15<" in (tmp_path / "mesh.svg").read_text()


def test_experts_take_their_share_of_the_devices(capsys):
    main(["--world-size", "12", "--ep", "2", "--tp", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == rank_groups(Layout(dp=2, ep=2, tp=3))
    assert found["ep"] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


@pytest.mark.parametrize("given_dp", [[], ["--dp", "2"]])
def test_dp_is_the_quotient_unless_it_is_given(capsys, given_dp):
    main(["--world-size", "12", "--tp", "3", "--cp", "2", *given_dp])
    assert capsys.readouterr().out.startswith("12 devices: dp=2 cp=2 tp=3 zigzag\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--world-size", "10", "--tp", "4"], ["world size 10", "tp=4", "multiple of 4"]),
        (["--world-size", "2", "--tp", "2", "--pp", "2"], ["world size 2", "tp=2", "pp=2"]),
        (["--world-size", "18", "--dp", "3"], ["world size 18", "dp=3", "world size 3"]),
        (["--world-size", "0"], ["world size 0", "1 to"]),
        (["--world-size", "-4"], ["world size -4", "1 to"]),
        (["--world-size", str(MAX_WORLD_SIZE + 1)], [str(MAX_WORLD_SIZE)]),
        (["--world-size", "4", "--tp", "0"], ["tp=0", "use 1 or more"]),
        (["--world-size", "8", "--tp", "2", "--row", "2"], ["tp=2", "row=2", "set tp=1"]),
        (["--world-size", "four"], ["--world-size", "four"]),
        (["--tp", "2"], ["--world-size", "required"]),
        (["--world-size", "6", "--ep", "4"], ["world size 6", "ep=4", "multiple of 4"]),
        ([*ARGV, "--split-rank", "4"], ["split rank 4", "layout.pp=4", "use 1 to 3"]),
        ([*ARGV, "--split-rank", "0"], ["split rank 0", "use 1 to 3"]),
        (["--world-size", "4", "--split-rank", "1"], ["split rank 1", "layout.pp of 2 or more"]),
    ],
)
def test_bad_sizes_are_one_line_and_exit_code_2(capsys, argv, words):
    err = refused(capsys, main, argv)
    assert all(word in err for word in words), err


@pytest.mark.slow
def test_as_a_command():
    good = run([*ARGV, "--json"])
    assert (good.returncode, good.stderr, json.loads(good.stdout)) == (0, "", LITERATURE)
    bad = run(["--world-size", "10", "--tp", "4"])
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


# --- Nodes


def test_the_command_shows_nodes_and_which_axes_leave_them(capsys, tmp_path):
    picture = tmp_path / "mesh.svg"
    main([*ARGV, "--node", "4", "--picture", str(picture)])
    out = capsys.readouterr().out
    assert "in nodes of 4 devices:\ntp 2  neighbours      inside a node, by NVLink\n" in out
    assert "node: [0,1,2,3] [4,5,6,7] [8,9,10,11] [12,13,14,15]" in out
    assert "every other node of 4 is paler" in picture.read_text()
    main([*ARGV, "--node", "4", "--json"])
    groups = json.loads(capsys.readouterr().out)
    assert groups.pop("node") == [[*range(first, first + 4)] for first in range(0, 16, 4)]
    assert groups == LITERATURE


@pytest.mark.parametrize("node", [0, -8])
def test_a_node_has_a_device(node, capsys):
    line = refused(capsys, main, [*ARGV, "--node", str(node)])
    assert line == f"error: node={node}: a node has 1 device or more\n"
    for show in (draw_links, plot.mesh):
        with pytest.raises(UserError, match="a node has 1 device or more"):
            show(Layout(tp=4), node=node)
