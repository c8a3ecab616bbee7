"""Defects of pipelines: hops, slots, rows of layers, and what the ends of the model get."""

from benchmarks.breaks.table import PIPELINE, Break
from benchmarks.defects.cases import CHUNKS, PP, RECOMPUTED, SPLIT, STAGES, T5
from benchmarks.defects.table import Defect, Kind, known

TRAINING, EXECUTOR = "jaxptd/pipeline/training.py", "jaxptd/pipeline/executor.py"
PASSES, PLAN = "jaxptd/step/pipelined.py", "jaxptd/pipeline/plan.py"
TESTS = f"{PIPELINE} tests/pipeline/test_training.py"

PIPELINES = (
    # ---- hops ----
    Defect(
        Kind.STAGE,
        Break(
            "a hop ends one stage further",
            EXECUTOR,
            "lax.ppermute(x, Axis.PP, self.plan.hops.pairs[hop])",
            "lax.ppermute(x, Axis.PP, "
            "[(s, (t + 1) % lax.axis_size(Axis.PP)) for s, t in self.plan.hops.pairs[hop]])",
            TESTS,
        ),
        (STAGES,),
    ),
    Defect(
        Kind.STAGE,
        Break(
            "the pairs of a hop are turned round",
            "jaxptd/pipeline/hops.py",
            "both = list(zip(onward, back, strict=True))",
            "both = list(zip(onward, onward, strict=True))",
            "tests/pipeline/test_hops.py",
        ),
        (STAGES,),
    ),
    Defect(
        Kind.STAGE,
        Break(
            "what arrives is kept where the result was",
            EXECUTOR,
            'instruction[f"in_{hop}"]',
            'instruction["keep"]',
            TESTS,
        ),
        (PP,),
    ),
    # ---- micro-batches ----
    Defect(
        Kind.ACTIVATION,
        Break(
            "backward reads what the first micro-batch saved",
            TRAINING,
            "saved = kind.get(carry.saved, instruction[kind.saved], layer.offset)\n"
            "        found, x = kind.layer.backward",
            "saved = kind.get(carry.saved, 0 * instruction[kind.saved], layer.offset)\n"
            "        found, x = kind.layer.backward",
            TESTS,
        ),
        (PP,),
    ),
    Defect(
        Kind.ACTIVATION,
        Break(
            "the loss of the first micro-batch's targets",
            TRAINING,
            'micro, _ = self.micro_batch(instruction["micro"])',
            'micro, _ = self.micro_batch(0 * instruction["micro"])',
            TESTS,
        ),
        (PP,),
    ),
    Defect(
        Kind.ACTIVATION,
        Break(
            "the embedding's gradient goes to the first micro-batch's tokens",
            TRAINING,
            'micro, places = self.micro_batch(instruction["micro"])',
            'micro, places = self.micro_batch(0 * instruction["micro"])',
            TESTS,
        ),
        (PP,),
    ),
    Defect(
        Kind.ACTIVATION,
        Break(
            "slots are used again while they are read",
            PLAN,
            "while busy and busy[0][0] < value.start:",
            "while busy and busy[0][0] < value.start + 4:",
            f"tests/pipeline/test_plan.py {TESTS}",
        ),
        (STAGES,),
    ),
    Defect(
        Kind.ACTIVATION,
        Break(
            "W reads what B of the first micro-batch passed",
            TRAINING,
            "between = kind.get(carry.between, instruction[kind.between], layer.offset)",
            "between = kind.get(carry.between, 0 * instruction[kind.between], layer.offset)",
            TESTS,
        ),
        (SPLIT,),
    ),
    Defect(
        Kind.OFFLOAD,
        Break(
            "recomputation begins with another micro-batch's input",
            TRAINING,
            'get(carry.mail, instruction["input"])',
            'get(carry.mail, 0 * instruction["input"])',
            TESTS,
        ),
        (RECOMPUTED,),
    ),
    Defect(
        Kind.DROPOUT,
        Break(
            "a stage's dropout is that of the first micro-batch",
            EXECUTOR,
            '_, places = self.micro_batch(instruction["micro"])',
            '_, places = self.micro_batch(0 * instruction["micro"])',
            TESTS,
        ),
        (PP,),
    ),
    # ---- rows of layers ----
    Defect(Kind.ROWS, known("layers of a part in the wrong order"), (PP,)),
    Defect(Kind.ROWS, known("layers of all parts have the numbers of the first"), (PP,)),
    Defect(
        Kind.ROWS,
        known("backward goes through the encoder first"),
        (f"{PP} {T5} model.num_decoder_layers=1 model.num_layers=3",),
    ),
    Defect(
        Kind.ROWS,
        Break(
            "a chunk runs the rows of the first",
            "jaxptd/pipeline/placement.py",
            'found[of_stack("row", stack)] = rows[chunk]',
            'found[of_stack("row", stack)] = rows[0 * chunk]',
            TESTS,
        ),
        (CHUNKS,),
    ),
    Defect(
        Kind.ROWS,
        Break(
            "the chunks of a stage's stack in turned order",
            "jaxptd/pipeline/placement.py",
            "begin = stage * depth + begins[chunk]",
            "begin = stage * depth + begins[len(begins) - 1 - chunk]",
            "tests/pipeline/test_placement.py",
        ),
        (CHUNKS,),
    ),
    Defect(
        Kind.ROWS,
        Break(
            "gradients of a chunk are added to the rows of the first",
            TRAINING,
            'row = instruction[of_stack("row", layer.stack)] + layer.offset\n        summed',
            "row = layer.offset\n        summed",
            TESTS,
        ),
        (CHUNKS,),
    ),
    # ---- ends ----
    Defect(
        Kind.TIED,
        Break(
            "a tied table without its gradient as the output layer",
            TRAINING,
            "ends, x = vjp(jnp.ones_like(total))\n",
            "ends, x = vjp(jnp.ones_like(total))\n"
            '        ends = {**ends, "tokens.table": 0 * ends["tokens.table"]}\n',
            "tests/pipeline/test_training.py",
        ),
        (PP,),
    ),
    Defect(
        Kind.TIED,
        Break(
            "a tied table without its gradient as the embedding",
            TRAINING,
            "ends = run_without_dead_code(backward, self.arrays.ends, carry.x)\n",
            "ends = run_without_dead_code(backward, self.arrays.ends, carry.x)\n"
            '        ends = {**ends, "tokens.table": 0 * ends["tokens.table"]}\n',
            "tests/pipeline/test_training.py",
        ),
        (PP,),
    ),
    Defect(
        Kind.TIED,
        Break(
            "tied weights get the gradient of the first stage only",
            PASSES,
            "reduce_scatter(gradient, Axis.PP, dim)",
            "reduce_scatter(gradient * (lax.axis_index(Axis.PP) == 0), Axis.PP, dim)",
            "tests/pipeline/test_training.py",
        ),
        (PP,),
    ),
)
