"""Breaks of planned layouts, packaged configs and pages beside papers: other figures, no error."""

from benchmarks.breaks.table import Break

PAPER = "benchmarks/paper"

PLANS = (
    # ---- this library's own steps, and the search ----
    Break(
        "a candidate leaves the heap before others are compared with it",
        "jaxptd/planner/search/best.py",
        "yield candidate.step.seconds, candidate",
        "yield 0.0, candidate",
        "tests/planner/search/test_best.py",
        "nothing_is_faster",
    ),
    Break(
        "the first choice is the only one, though it does not fit",
        "jaxptd/planner/search/best.py",
        "elif what[1].choice == first:",
        "elif what[1].choice is None:",
        "tests/planner/search/test_best.py",
        "nothing_is_faster",
    ),
    Break(
        "bounds count what a stage sends twice",
        "jaxptd/planner/search/bounds.py",
        "hops=chunks * self.cost.hop if p > 1 else 0.0,",
        "hops=9 * chunks * self.cost.hop if p > 1 else 0.0,",
        "tests/planner/search/test_best.py",
        "bounds_are_below",
    ),
    Break(
        "an outline's interleaved stage holds as much as that of 1f1b",
        "jaxptd/planner/own/outline.py",
        "return min(m * V, (V + 1) * p - 1)",
        "return min(m * V, V * p)",
        "tests/planner/own/test_outline.py",
    ),
    Break(
        "a permute over nodes uses all rails of a node",
        "jaxptd/planner/cost/links.py",
        "rate = cluster.rail",
        "rate = cluster.bandwidth(group)",
        "tests/planner/cost/test_links.py",
        "permute",
    ),
    Break(
        "collectives of all stages are sent by one",
        "jaxptd/planner/own/traffic.py",
        '1 if "pp" in each.axes else layout.pp',
        "1",
        "tests/planner/own/test_traffic.py",
    ),
)

PAPERS = (
    Break(
        "configs of subfolders are not found",
        "jaxptd/config/packaged.py",
        'found = folder.rglob(f"*{SUFFIX}")',
        'found = folder.glob(f"*{SUFFIX}")',
        "tests/config/test_packaged.py",
    ),
    Break(
        "a packaged config comes before a file of its name",
        "jaxptd/config/packaged.py",
        "if os.path.isfile(name):",
        "if os.path.isfile(name) and name not in packaged_configs():",
        "tests/config/test_packaged.py",
    ),
    Break(
        "options that are no fields have no defaults",
        "jaxptd/config/command_line.py",
        "tree = _other_defaults(parser) | values.as_dict()",
        "tree = {PRINT.removeprefix('--'): False} | values.as_dict()",
        "tests/test_comms.py",
    ),
    Break(
        "the paper's FLOPs without logits",
        "jaxptd/planner/published/rows.py",
        "more = 1 + T / (6 * D) + shape.vocab_size / (16 * L * D)",
        "more = 1 + T / (6 * D)",
        f"{PAPER}/test_weak_scaling.py",
        "products",
    ),
    Break(
        "the rate of one GPU as that of all",
        f"{PAPER}/weak_scaling.py",
        "return self.row.flops / self.seconds / PETA",
        "return self.row.flops / self.seconds / self.gpus / PETA",
        f"{PAPER}/test_weak_scaling.py",
    ),
    Break(
        "a step fits where its state does",
        f"{PAPER}/memory.py",
        "return self.peak <= size",
        "return self.state <= size",
        f"{PAPER}/test_grid_rows.py",
    ),
    Break(
        "as many sequences on 8 GPUs as on 4",
        f"{PAPER}/grid_rows.py",
        "return SEQUENCES * self.gpus",
        "return SEQUENCES * 4",
        f"{PAPER}/test_grid_rows.py",
    ),
    # ---- messages beside layers ----
    Break(
        "stages hide messages of ZeRO's layers, too",
        "jaxptd/planner/own/traffic.py",
        '"nothing" if layout.pp > 1 else "other layers"',
        '"other layers"',
        "tests/planner/own/test_step.py",
    ),
    Break(
        "messages on one link hide none on another",
        "jaxptd/planner/own/compiled.py",
        "for (_, on), s in beside.items() if on == link)",
        "for s in beside.values())",
        "tests/planner/test_compiled.py",
    ),
    Break(
        "a bound has messages of layers that these hide",
        "jaxptd/planner/search/bounds.py",
        "beside = BESIDE * layers if self.axes.pp == 1 else 0.0",
        "beside = 0.0",
        "tests/planner/search/test_best.py",
    ),
    Break(
        "what one micro-batch sends is beside all of them",
        "jaxptd/planner/cost/exposed.py",
        "runs = min(1.0, max(each.count for each, _ in members))",
        "runs = 1.0",
        "tests/planner/own/test_step.py",
    ),
    Break(
        "a bound has messages of layers that the first and the last micro-batch hide",
        "jaxptd/planner/search/bounds.py",
        "alone = whole if axes.pp > 1 else max(whole - cost.matrices, 0.0)",
        "alone = whole",
        "tests/planner/search/test_best.py",
    ),
    # ---- what was timed on a GPU ----
    Break(
        "float32 is TF32 on GPUs",
        "jaxptd/matmul/precision.py",
        'if not on_gpus(mesh) or dtype not in ("float32", "float64"):',
        "if True:",
        "tests/matmul/test_precision.py",
    ),
    Break(
        "attention takes as long for a number of its head as a product",
        "jaxptd/analysis/hlo/timeline.py",
        "rate = self.rates.attention * head_size(each)",
        "rate = self.rates.attention",
        "tests/analysis/hlo/test_timeline.py",
    ),
    Break(
        "a score of a small head takes less time",
        "jaxptd/planner/cost/kernels.py",
        "share * min(head_size, FULL_HEAD) / FULL_HEAD",
        "share",
        "tests/planner/cost/test_kernels.py",
    ),
    Break(
        "a product of few tiles leaves multiprocessors idle",
        "jaxptd/planner/cost/kernels.py",
        "PARTS if tiles < a.multiprocessors",
        "PARTS if tiles < 1",
        "tests/planner/cost/test_kernels.py",
    ),
)
