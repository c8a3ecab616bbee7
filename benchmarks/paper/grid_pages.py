"""Pages of table 2 and figures 7, 11 and 12 of Zhu and Dong: published, compiled, predicted."""

import textwrap
from collections.abc import Sequence

from benchmarks.lib.measure import gib
from benchmarks.paper import grid_times, published
from benchmarks.paper.grid_rows import MODELS, REMATS, SEQUENCES, Column, Found, filled, gpu
from jaxptd.analysis.report import versions
from jaxptd.compiling import PLUGINS
from jaxptd.config import Remat

WIDTH = 100
DIGITS = {"memory": 1, "time": 0}  # as published
INTRODUCTION = (
    f"Memory is of one GPU, of this library's steps with {SEQUENCES} sequences of 512 tokens a GPU "
    "in bfloat16, compiled for H200s: nothing was run or timed, and kernels of another GPU may "
    "need other workspace. What CUDA and its libraries hold themselves comes on top. Peak: all "
    "that a step needs, by what it keeps for backward (`model.remat`: `full` keeps the layers' "
    "inputs, `dots` results of products, `none` all). State: parameters and optimizer in float32. "
    "*Published*: measured by the paper's authors on RTX 4090 with 24 GiB, with other software; "
    "the paper does not say what is kept, nor in which precision. Where tp does not divide the "
    "heads there are fewer and wider ones."
)


# ---- columns ------------------------------------------------------------------------------------


def peaks() -> list[Column]:
    """Peak memory with each policy."""

    def column(remat: Remat) -> Column:
        return Column(f"peak GiB, `{remat}`", lambda found: gib(found.memory[remat].peak))

    return [column(remat) for remat in REMATS]


LAYOUT = Column("layout", lambda found: found.row.name)
OURS = Column("here", lambda found: f"`{found.row.layout}`")
GPUS = Column("GPUs", lambda found: str(found.row.gpus))
BATCH = Column("batch", lambda found: str(found.row.sequences))
HEADS = Column("heads", lambda found: str(found.row.config().model.num_heads))
SIZE = Column("model", lambda found: MODELS[found.row.model])
COUNTED = Column("billion parameters, counted", lambda found: f"{found.row.parameters / 1e9:.2f}")
STATE = Column("state GiB", lambda found: gib(found.memory["full"].state))
FITS = Column("fits 24 GiB with", lambda found: _names(found.fitting) or "nothing")
TABLE_2 = (
    *(LAYOUT, GPUS, BATCH, HEADS),
    Column("published GB", lambda found: _measured(found, "memory")),
    Column("published hours", lambda found: _measured(found, "time")),
    *(*peaks(), STATE, FITS),
)
FIGURE_7 = (
    *(LAYOUT, OURS, GPUS, SIZE, COUNTED),
    Column("published efficiency", lambda found: _efficiency(found)),
    *(*peaks(), FITS),
)
FIGURE_11 = (
    *(LAYOUT, OURS, GPUS),
    Column("published share", lambda found: f"{published.communication(found.row.name):.1%}"),
    *(*peaks(), FITS),
)


def _measured(found: Found, column: str) -> str:
    value = published.measured(found.row.name, column)
    return "cannot be trained" if value is None else f"{value:.{DIGITS[column]}f}"


def _efficiency(found: Found) -> str:
    value = published.weak_scaling(found.row.gpus, found.row.name)
    return "the base" if value is None else f"{value:.0%}"


def _names(remats: Sequence[str]) -> str:
    return ", ".join(f"`{remat}`" for remat in remats)


# ---- pages --------------------------------------------------------------------------------------


def table2(found: Sequence[Found]) -> str:
    """Table 2's page, in Markdown."""
    columns = (*TABLE_2, *grid_times.columns_of_table_2([*found]))
    sections = INTRODUCTION, grid_times.PREDICTED, filled(columns, found), RATIOS
    return _page(*sections, _without_room(found), _kept(found))


def figure7(found: Sequence[Found]) -> str:
    """Figure 7's page, in Markdown."""
    columns = (*FIGURE_7, *grid_times.columns_of_figure_7([*found]))
    sections = INTRODUCTION, grid_times.PREDICTED, FIGURE_7_WORDS, filled(columns, found)
    return _page(*sections, EFFICIENCY, _growth(found))


def figure11(found: Sequence[Found]) -> str:
    """The page of figures 11 and 12, in Markdown."""
    columns = (*FIGURE_11, *grid_times.columns_of_figure_11())
    sections = INTRODUCTION, grid_times.PREDICTED, filled(columns, found), _bound()
    times = grid_times.speedup_words([*found])
    return _page(*sections, times, grid_times.PAYS, grid_times.where_grids_pay(), CONCLUSION)


FIGURE_7_WORDS = (
    "Figure 7 has numbers only in the text beside it, for 4 and 8 GPUs. The text calls its lowest "
    "curve data parallelism on 4 GPUs (76%) and TP with DP on 8 (64%); the caption calls it TP + "
    "DP. Data parallelism alone has no room for a model of 2.5 B (table 2), so TP + DP is "
    "compiled. How it shares 8 GPUs is not said; here tp is 4."
)


RATIOS = (
    "Throughput is in sequences a second. Published: the hours of TP=4 over those of the row, as "
    "trainings of the same length, whatever the number of GPUs."
)
EFFICIENCY = (
    "The predicted efficiency is that of computing: FLOP/s of the model on each GPU, over those of "
    "one GPU with its own model."
)
CONCLUSION = (
    "Against tp a grid pays from 8 devices on, with fast links as with slow ones: what a device "
    "sends for activations falls with the side of the grid, and what it sends for weights does not "
    "grow with tokens. It pays in memory against tp without sequence parallelism, and it splits "
    "over more devices than there are heads. For this model all devices along tp or along a grid "
    "are too many: layouts with data parallel devices or stages are faster than both."
)


def _without_room(found: Sequence[Found]) -> str:
    """The rows that no policy makes fit, and why."""
    size = gpu().hbm_bytes
    lines = [
        f"{each.row.name} has no room with any policy: parameters and optimizer alone are "
        f"{each.memory['full'].state / 2**30:.1f} GiB, and {size / 2**30:.0f} are there."
        if each.memory["full"].state > size
        else f"{each.row.name} has no room with any policy."
        for each in found
        if not each.fitting
    ]
    same = {each.row.name for each in found if not each.fitting} == {
        each.row.name for each in found if published.measured(each.row.name, "memory") is None
    }
    agree = "These are" if same else "These are not"
    return " ".join([*lines, f"{agree} the rows that the paper could not train."])


def _kept(found: Sequence[Found]) -> str:
    """The published saving of a grid against the compiled one."""
    by_name = {each.row.name: each for each in found}
    tp, grid = by_name["TP=4"], by_name["TP2D=4"]
    gain = published.gain("memory")
    ours = (
        f"{grid.memory[remat].peak / tp.memory[remat].peak - 1:+.0%} with `{remat}`"
        for remat in REMATS
    )
    return (
        f"From TP=4 to TP2D=4 memory changes by {gain:+.0%}, published, and compiled by "
        f"{', '.join(ours)}."
    )


def _growth(found: Sequence[Found]) -> str:
    """The paper's definition of weak scaling, for the sizes of its models."""
    base = found[0]
    ratios = {
        each.row.gpus: each.row.parameters / base.row.parameters / each.row.gpus
        for each in found[1:]
    }
    sizes = " and ".join(f"{ratio:.0%} on {gpus} GPUs" for gpus, ratio in ratios.items())
    return (
        "The text defines the efficiency as the parameters of the largest model that can be "
        "trained over those of one GPU's model times the number of GPUs. For the models of its "
        f"table 3, as counted here, that is {sizes}, the same for every layout. So the published "
        "efficiencies, which differ by layout, are of something else, or of other models."
    )


def _bound() -> str:
    share = published.communication("TP")
    return (
        f"Without any communication a step with TP would be {1 / (1 - share):.2f} times as fast: "
        f"the published speedup of {published.speedup('GPT'):.2f} cannot come from communication "
        "(`paper_table4.md`)."
    )


def _page(*sections: str) -> str:
    filled_in = (
        each if each.startswith("|") else textwrap.fill(each, WIDTH, break_on_hyphens=False)
        for each in sections
    )
    return "\n\n".join([versions("flax", "optax", *PLUGINS.split()), *filled_in]) + "\n"
