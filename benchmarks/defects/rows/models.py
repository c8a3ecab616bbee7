"""Defects of models and layers, most of which one device would compute alike."""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import BERT, CP, PP, QWEN, ROW_COL, SP, T5, TP
from benchmarks.defects.table import Defect, Kind, Reach, known

DENSE = "tests/layers/test_dense.py"

MODELS = (
    Defect(Kind.NORM, known("norm's gradient without the mean of g n"), (SP,), Reach.BOTH),
    Defect(
        Kind.TIED,
        Break(
            "a tied table has the gradient of its look-up only",
            "jaxptd/layers/embedding.py",
            "return self.form.logits(x_BTD, self.table[...].T)",
            "return self.form.logits(x_BTD, jax.lax.stop_gradient(self.table[...]).T)",
            "tests/layers/test_dense.py",
        ),
        (TP,),
        Reach.BOTH,
    ),
    Defect(
        Kind.DROPOUT,
        Break(
            "both outputs of a layer have one mask",
            "jaxptd/layers/block.py",
            "places.at(layer, Site.MLP_OUTPUT)",
            "places.at(layer, Site.ATTENTION_OUTPUT)",
            "tests/layers/test_dropout.py",
        ),
        (TP,),
        Reach.BOTH,
    ),
    # ---- dropout ----
    Defect(Kind.DROPOUT, known("tokens of the residual stream not sharded for dropout"), (SP,)),
    Defect(
        Kind.DROPOUT,
        Break(
            "heads of dropout by local number",
            "jaxptd/layers/axes.py",
            "return _numbers(self.inner if self.head_dim == 0 else None, size)",
            "return _numbers(None, size)",
            "tests/layers/test_contract.py",
            "attention and tp",
        ),
        (TP,),
    ),
    Defect(Kind.DROPOUT, known("samples of all devices have the same numbers"), ("layout.dp=4",)),
    Defect(
        Kind.DROPOUT,
        Break(
            "samples of all micro-batches have the numbers of the first",
            "jaxptd/step/passes.py",
            "return shared.of(self.sample, self.segments)",
            "return shared.of(self.sample % self.sample.shape[0], self.segments)",
            "tests/step/test_program.py tests/zero/test_zero.py",
        ),
        ("layout.dp=4",),
    ),
    Defect(
        Kind.DROPOUT,
        Break(
            "layers of dropout by the row of a stage",
            "jaxptd/pipeline/placement.py",
            'found[of_stack("layer", stack)] = before + (np.cumsum(sizes) - sizes)[part]',
            'found[of_stack("layer", stack)] = rows[chunk]',
            "tests/pipeline/test_executor.py tests/pipeline/test_training.py",
        ),
        (PP,),
    ),
    # ---- families ----
    Defect(
        Kind.FAMILY,
        # The tests that see it are slow; these are the default ones that are nearest.
        known("what devices owe of a bias table on a grid of blocks is not summed")._replace(
            tests="tests/analysis/test_traffic.py", select="blocks"
        ),
        (f"{ROW_COL} layout.attention2d=blocks {T5}",),
        explained="the type of the table says that its gradient is a sum, and autodiff makes it "
        "at each layer; only the bytes are more",
    ),
    Defect(
        Kind.FAMILY,
        known("the sum over heads of a norm's gradient in every layer"),
        (f"{TP} {QWEN}",),
        explained="the same sum, in every layer and not once a step; only the bytes are more",
    ),
    Defect(
        Kind.FAMILY,
        known("every device has the first token of a pair"),
        (f"{CP} {BERT}",),
    ),
    Defect(Kind.FAMILY, known("padding is seen"), (f"{CP} {BERT}",), Reach.BOTH),
    Defect(
        Kind.FAMILY,
        known("cross-attention sees the padding of a source"),
        (f"{CP} {T5}",),
        Reach.BOTH,
    ),
    Defect(
        Kind.FAMILY,
        known("common parameters get the gradient of one layer"),
        (f"{PP} {T5} model.num_decoder_layers=4",),
    ),
    Defect(
        Kind.FAMILY,
        Break(
            "an encoder-decoder's source has the samples of the first device",
            "jaxptd/layers/dropout.py",
            "source = self.source and self.source.of(sample_B, tuple(before))",
            "source = self.source and self.source.of(sample_B * 0, tuple(before))",
            "tests/layers/test_dropout.py",
        ),
        (f"layout.dp=4 {T5}",),
        Reach.BOTH,
    ),
)
