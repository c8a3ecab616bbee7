"""Breaks of the planner: each would predict another time without an error."""

from benchmarks.breaks.table import Break

COST, PUBLISHED = "tests/planner/cost", "tests/planner/published"
STEP, LINKS = f"{COST}/test_step.py", f"{COST}/test_links.py"
TRAFFIC = f"{PUBLISHED}/test_traffic.py"
VALIDATION = f"{PUBLISHED}/test_validation.py"
FIT = f"{PUBLISHED}/test_fit.py"

PLANNER = (
    # ---- kernels and links ----
    Break(
        "the last wave of tiles is free",
        "jaxptd/planner/cost/kernels.py",
        "math.ceil(waves) if waves <= FEW_WAVES",
        "waves if waves <= FEW_WAVES",
        f"{COST}/test_kernels.py",
    ),
    Break(
        "fused attention's backward as fast as forward",
        "jaxptd/planner/cost/kernels.py",
        "executed = flops * (BACKWARD if backward else 1)",
        "executed = flops",
        f"{COST}/test_kernels.py",
    ),
    Break(
        "an all-reduce passes once",
        "jaxptd/planner/cost/links.py",
        "RINGS = {ALL_REDUCE: 2,",
        "RINGS = {ALL_REDUCE: 1,",
        LINKS,
    ),
    Break(
        "a ring over nodes has every rail of a node",
        "jaxptd/hardware/topology.py",
        "min(nvlink, self.local_members(group) * self.rail)",
        "min(nvlink, self.node_size * self.rail)",
        "tests/hardware/test_topology.py",
    ),
    # ---- layers ----
    Break(
        "scores are counted by half where they are unfused",
        "jaxptd/planner/cost/attention.py",
        "attention.tokens // (spread.cp * spread.row), attention.key_tokens",
        "attention.tokens // (spread.cp * spread.row), attention.key_tokens // 2",
        STEP,
        "paper",
    ),
    Break(
        "full recomputation leaves attention out",
        "jaxptd/planner/cost/layer.py",
        '"full": self.forward,',
        '"full": self.products,',
        STEP,
        "remat or paper",
    ),
    Break(
        "the residual stream is not sharded by sequence parallelism",
        "jaxptd/planner/cost/setting.py",
        "sharded = self.spread.tp if self.spread.sequence_parallel else 1",
        "sharded = 1",
        STEP,
        "memory_traffic",
    ),
    # ---- a step ----
    Break(
        "hidden collectives are free",
        "jaxptd/planner/cost/exposed.py",
        "max(0.0, seconds - BESIDE * host)",
        "(0.0 if host else seconds)",
        STEP,
        "hidden",
    ),
    Break(
        "a pipeline never waits",
        "jaxptd/planner/cost/step.py",
        "waiting = pipelined(seconds, m, V) - m * max(seconds)",
        "waiting = 0.0 * V",
        STEP,
        "bubble or places",
    ),
    Break(
        "a bubble is as long with chunks",
        "jaxptd/planner/cost/pipeline.py",
        "(sum(stages) - slowest) / chunks",
        "(sum(stages) - slowest)",
        f"{COST}/test_pipeline.py {STEP}",
    ),
    Break(
        "an early slow stage by the formula",
        "jaxptd/planner/cost/pipeline.py",
        'if each[-1] == max(each) and name == "1f1b":',
        'if name == "1f1b":',
        f"{COST}/test_pipeline.py",
    ),
    Break(
        "all stages as fast as the first",
        "jaxptd/pipeline/statistics.py",
        "begin + length[stage][operation]",
        "begin + length[0][operation]",
        f"{COST}/test_pipeline.py",
    ),
    Break(
        "layers run once a step",
        "jaxptd/planner/cost/step.py",
        "return [*scaled(slowest.terms, m), Term(",
        "return [*slowest.terms, Term(",
        STEP,
        "paper",
    ),
    # ---- published programs ----
    Break(
        "full recomputation sums nothing again",
        "jaxptd/planner/published/traffic.py",
        'whole = setting.spread.remat == "full"',
        "whole = False",
        TRAFFIC,
        "two_sums",
    ),
    Break(
        "gradients are reduced under backward in pipelines, too",
        "jaxptd/planner/published/traffic.py",
        '(program.dp_under != "nothing" and spread.pp == 1)',
        'program.dp_under != "nothing"',
        TRAFFIC,
        "gradients_are_reduced",
    ),
    Break(
        "data parallelism next to tensor parallelism, whatever cp is",
        "jaxptd/planner/cost/setting.py",
        "inside = math.prod(sizes[axis] for axis in order[:first])",
        "inside = self.tp",
        TRAFFIC,
        "groups",
    ),
    Break(
        "TFLOP/s of one GPU read as those of all",
        "jaxptd/planner/published/rows.py",
        "row.flops / (spread.gpus * measured * 1e12)",
        "row.flops / (measured * 1e12)",
        f"{PUBLISHED}/test_rows.py",
    ),
    # ---- the fit ----
    Break(
        "a row is predicted by a fit that saw it",
        "jaxptd/planner/published/validation.py",
        "[fitted(accelerator, others) if held_out else whole for others in _others(rows)]",
        "[whole for _ in rows]",
        VALIDATION,
        "without_it",
    ),
    Break(
        "bars are of signed errors",
        "jaxptd/planner/published/validation.py",
        "if abs(each.error) > each.bar",
        "if each.error > each.bar",
        VALIDATION,
        "missed",
    ),
    Break(
        "shares leave their bounds",
        "jaxptd/planner/published/fit.py",
        "to = np.clip(x - np.linalg.solve(damped, slope), LOWEST, HIGHEST)",
        "to = x - np.linalg.solve(damped, slope)",
        FIT,
        "bounds",
    ),
    Break(
        "the table's shares are not those of the fit",
        "jaxptd/hardware/accelerators.yaml",
        "products_share: {value: 0.819, kind: fitted",
        "products_share: {value: 0.829, kind: fitted",
        VALIDATION,
        "hardware_table",
    ),
    Break(
        "a share above 1 is read",
        "jaxptd/hardware/table.py",
        'field.endswith("_share") and value > 1',
        'field.endswith("_share") and value > 2',
        "tests/hardware/test_table.py",
    ),
)
