"""Process groups of 16 devices, beside the lists that Megatron-LM documents, and layers of stages.

`python -m benchmarks.paper --groups`.
Source: Megatron-LM, `initialize_model_parallel` in `megatron/core/parallel_state.py`: 16 GPUs, 2
along tensor model parallel groups, 4 along pipelines; Narayanan et al., arXiv 2104.04473, 2.2.
"""

from jaxptd.analysis.report import table
from jaxptd.mesh import Layout, rank_groups
from jaxptd.pipeline.schedules import make_schedule

Groups = list[list[int]]
LAYOUT = Layout(pp=4, dp=2, tp=2)
# By the name that `jaxptd mesh` has: Megatron-LM's name, and its groups.
DOCUMENTED: dict[str, tuple[str, Groups]] = {
    "tp": ("tensor model parallel", [[n, n + 1] for n in range(0, 16, 2)]),
    "pp": ("pipeline model parallel", [[n, n + 4, n + 8, n + 12] for n in range(4)]),
    "dp": ("data parallel", [[n + m, n + m + 2] for n in range(0, 16, 4) for m in (0, 1)]),
    "model": ("model parallel", [[n + m for m in (0, 1, 4, 5, 8, 9, 12, 13)] for n in (0, 2)]),
    "embedding": ("embedding", [[n, n + 12] for n in range(4)]),
    "position_embedding": ("position embedding", [[n] for n in range(4)]),
}
HEAD = ("groups", "number", "documented", "here")
STAGES, CHUNKS, LAYERS = 2, 2, 8
WORDS = """\
*Documented*: the lists of Megatron-LM for 16 GPUs, two along tensor model parallel groups and four
along pipelines. *Here*: of `jaxptd mesh --world-size 16 --tp 2 --pp 4`. Ranks run over tp first,
then dp, then pp: there are 8 data parallel groups, each of 16 / (4 * 2) = 2 devices."""
PARTS = f"""\
Layers of stages: {LAYERS} layers on {STAGES} stages, plain and interleaved with {CHUNKS} chunks,
chunk k of stage r from layer `k L / V + r L / (p V)` on (Narayanan et al., 2.2)."""


def rows() -> list[list[str]]:
    """A row for each kind of group."""
    found = rank_groups(LAYOUT)
    return [
        [name, str(len(found[ours])), _text(groups), _verdict(groups, found[ours])]
        for ours, (name, groups) in DOCUMENTED.items()
    ]


def _text(groups: Groups) -> str:
    return " ".join(f"[{','.join(map(str, group))}]" for group in groups)


def _verdict(documented: Groups, found: Groups) -> str:
    return "the same" if documented == found else _text(found)


def layers_of(stage: int, chunks: int) -> list[list[int]]:
    """The layers of each chunk of a stage."""
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = make_schedule(name, stages=STAGES, micro_batches=STAGES)
    size = LAYERS // schedule.parts
    parts = (schedule.part(stage, chunk) for chunk in range(chunks))
    return [[*range(part * size, (part + 1) * size)] for part in parts]


def formula(stage: int, chunks: int) -> list[list[int]]:
    """The same by the published formula."""
    size = LAYERS // (STAGES * chunks)
    begins = (k * LAYERS // chunks + stage * size for k in range(chunks))
    return [[*range(begin, begin + size)] for begin in begins]


def page() -> str:
    """The page of results, in Markdown."""
    parts = [
        [str(stage), kind, _text(formula(stage, chunks)), _verdict(formula(stage, chunks), here)]
        for kind, chunks in (("plain", 1), ("interleaved", CHUNKS))
        for stage in range(STAGES)
        for here in [layers_of(stage, chunks)]
    ]
    head = ("stage", "schedule", "by the formula", "here")
    sections = WORDS, table([HEAD, *rows()]), PARTS, table([head, *parts])
    return "\n\n".join(sections) + "\n"
