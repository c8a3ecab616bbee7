"""Defects of a run around its steps: checkpoints, data, evaluation. No step computes anything else.

Where cases are given, the defect is in a conversion that `verify` uses, too.
"""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import CHUNKS, TP
from benchmarks.defects.table import Defect, Kind, Reach, known

CANONICAL = "tests/checkpoint/test_canonical.py"
INVERSE = "tests/zero/test_shards.py"
RUN = Reach.RUN

RUNS = (
    Defect(
        Kind.CHECKPOINT,
        Break(
            "layers of the canonical form as stages hold them",
            "jaxptd/params.py",
            "ordered = x if self.rows is None else x[np.array(self.rows)]",
            "ordered = x if self.rows is None else x[np.sort(self.rows)]",
            INVERSE,
        ),
        (CHUNKS,),
        RUN,
    ),
    Defect(
        Kind.CHECKPOINT,
        Break(
            "the canonical form keeps padding, and not its last numbers",
            "jaxptd/params.py",
            "return ordered[tuple(slice(n) for n in self.shape)]",
            "return ordered[tuple(slice(-n, None) for n in self.shape)]",
            INVERSE,
        ),
        (TP,),
        RUN,
    ),
    Defect(
        Kind.CHECKPOINT,
        Break(
            "second moments are restored as first ones",
            "jaxptd/checkpoint/canonical.py",
            'leaves = [canonical["optimizer"][name] for name in _optimizer_names(program)]',
            'leaves = [canonical["optimizer"][name.replace("mu", "nu")] for name in '
            "_optimizer_names(program)]",
            CANONICAL,
        ),
        (),
        RUN,
    ),
    Defect(Kind.CHECKPOINT, known("what is outside of a block is written, too"), (), RUN),
    Defect(Kind.CHECKPOINT, known("a shard begins with a whole entry"), (), RUN),
    Defect(
        Kind.DATA,
        Break(
            "the data cursor is one sample ahead",
            "jaxptd/api/training.py",
            "first = (step - 1) * self.config.train.global_batch_size",
            "first = (step - 1) * self.config.train.global_batch_size + 1",
            "tests/api/test_run.py",
        ),
        (),
        RUN,
    ),
    Defect(
        Kind.DATA,
        Break(
            "a resumed run reads its last batch again",
            "jaxptd/api/training.py",
            "first = (step - 1) * self.config.train.global_batch_size",
            "first = (step - 1 - (step == done + 1 > 1)) * self.config.train.global_batch_size",
            "tests/train/test_resumed.py",
        ),
        (),
        RUN,
    ),
    Defect(Kind.DATA, known("samples share draws"), (), RUN),
    Defect(
        Kind.DATA,
        Break(
            "a document's end begins the next one",
            "jaxptd/data/batches.py",
            "return (np.cumsum(ends, axis=1) - ends).astype(np.int32)",
            "return np.cumsum(ends, axis=1).astype(np.int32)",
            "tests/data/test_batches.py",
        ),
        (),
        RUN,
    ),
    Defect(
        Kind.EVALUATION,
        Break(
            "an evaluation counts a sample twice",
            "jaxptd/run/evaluation.py",
            "inside = (sample_B < beyond)",
            "inside = (sample_B <= beyond)",
            "tests/run/test_batches.py tests/api/test_run.py",
        ),
        (),
        RUN,
    ),
    Defect(
        Kind.EVALUATION,
        Break(
            "an evaluation's losses are summed over dp once more",
            "jaxptd/step/body.py",
            '{"sum": sums[name], "targets"',
            '{"sum": sums[name] * lax.axis_size(Axis.DP), "targets"',
            "tests/step/test_program.py",
            "evaluation",
        ),
        (),
        RUN,
    ),
    Defect(Kind.EVALUATION, known("padding of whole batches counts"), (), RUN),
)
