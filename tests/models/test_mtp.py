"""Modules that predict several tokens ahead: their batches, losses, parameters and costs."""

import math

import jax
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis import memory_model
from jaxptd.config import ModelConfig, nested
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.models.decoder import MTP_LOSS, losses, targets_ahead, tokens_ahead
from jaxptd.models.families import architecture_of, work_of
from jaxptd.models.stages import parameter_infos
from jaxptd.params import shardings
from tests.models.test_latent_attention import V3

ROW = np.array([[3, 4, 5, 6, 7]], np.int32)
MASKED = np.array([[-1, 5, 6, 7, 8]], np.int32)  # the first token is of a prompt


def test_modules_read_the_tokens_ahead_and_predict_those_behind_them() -> None:
    assert tokens_ahead(1, ROW).tolist() == [[4, 5, 6, 7, 0]]
    assert targets_ahead(1, MASKED).tolist() == [[5, 6, 7, 8, -1]]
    assert tokens_ahead(2, ROW).tolist() == [[5, 6, 7, 0, 0]]
    assert targets_ahead(2, MASKED).tolist() == [[6, 7, 8, -1, -1]]


def test_a_masked_target_ahead_is_left_out() -> None:
    target = np.array([[4, -1, 6, 7, 8]], np.int32)
    assert targets_ahead(1, target).tolist() == [[-1, 6, 7, 8, -1]]


def test_no_module_predicts_across_documents() -> None:
    """A token's target behind the end of its own document counts, as the model's own does."""
    segments = np.array([[0, 0, 1, 1, 1]], np.int32)
    target = np.array([[4, 5, 6, 7, 8]], np.int32)
    assert targets_ahead(1, target, segments).tolist() == [[5, -1, 7, 8, -1]]
    assert targets_ahead(2, target, segments).tolist() == [[-1, -1, 8, -1, -1]]
    assert tokens_ahead(1, ROW, segments).tolist() == [[4, 0, 6, 7, 0]]
    assert tokens_ahead(2, ROW, segments).tolist() == [[0, 0, 7, 0, 0]]


def test_modules_share_the_weight() -> None:
    one, two = (
        ModelConfig(vocab_size=13, mtp={"layers": count, "weight": 0.5})  # type: ignore[arg-type]
        for count in (1, 2)
    )
    assert losses(one)[MTP_LOSS].weight == 0.5
    assert {n: x.weight for n, x in losses(two).items() if n.startswith(MTP_LOSS)} == {
        "mtp_loss": 0.25,
        "mtp_loss_2": 0.25,
    }


def test_metrics_name_the_losses_and_evaluations_only_the_models_own() -> None:
    program = tiny.program(Layout(), **{"mtp.layers": 2, "mtp.weight": 0.5})
    state = program.init_state()
    batch = tiny.batch()
    params = jax.tree.map(np.asarray, state["params"])
    found = program.eval_step(state["params"], batch)
    assert set(found) == {"cross_entropy"}
    _, metrics = program.train_step(state, batch)
    terms = ("cross_entropy", "mtp_loss", "mtp_loss_2")
    assert float(metrics["loss"]) == pytest.approx(sum(float(metrics[n]) for n in terms), rel=1e-6)
    plain = tiny.program(Layout())
    own = {n: x for n, x in params.items() if not n.startswith("mtp_")}
    own = jax.device_put(own, shardings(plain.states.stored, plain.mesh))
    expected = plain.eval_step(own, batch)["cross_entropy"]
    assert float(found["cross_entropy"]["sum"]) == float(expected["sum"])


def test_a_batch_may_have_no_target_ahead() -> None:
    """Fine-tuning on one token at the end of each sequence, for instance."""
    program = tiny.program(Layout(), **{"mtp.layers": 1})
    batch = tiny.batch()
    last = np.where(np.arange(8) == 7, batch["targets"], -1)
    first = np.where(np.arange(8) == 0, batch["targets"], -1)  # which no token is one before
    for targets, some in ((last, True), (first, False)):
        _, metrics = program.train_step(program.init_state(), {**batch, "targets": targets})
        assert math.isfinite(float(metrics["grad_norm"]))
        assert (float(metrics["mtp_loss"]) > 0) is some


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, tp=2, sequence_parallel=True), {"remat": "dots", "dropout": 0.1}),
        slow(Layout(pp=2, cp=2, schedule="zb-h1"), {"documents": "apart", "num_layers": 4}),
        (Layout(pp=2, ep=2, zero=1), {**tiny.LATENT, "moe.balance_loss": 0.1}),
        slow(Layout(row=2, col=2), {"remat": "full"}),
        slow(Layout(cp=3, tp=2), {"seq_length": 10, "num_heads": 3, "hidden_size": 6}),
        slow(Layout(dp=2, ep=2, tp=2, zero=3), {**tiny.LATENT, "optimizer": "muon"}),
        slow(
            Layout(pp=2, dp=2, schedule="zb-v", zero=2), {"norm_order": "output", "num_layers": 4}
        ),
        slow(Layout(ulysses=2, tp=2), {"family": "gemma2", "remat": "attention"}),
        slow(Layout(tp=4, sequence_parallel=True, collective_matmul=True), {"scan_layers": False}),
        slow(Layout(pp=2, row=2, col=2, matmul2d="summa"), {"remat": "full"}),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_device(layout: Layout, choice: dict) -> None:
    hold(
        layout,
        **{"mtp.layers": 2, "micro_batches": 2 * layout.pp if layout.pp > 1 else 1, **choice},
    )


def test_published_numbers_of_parameters() -> None:
    """The layer of DeepSeek-V3's module has 11.5B parameters: README_WEIGHTS.md of its release."""
    model = ModelConfig(**nested(V3 | {"mtp.layers": 1}))
    (module,) = architecture_of(model).layers_behind
    both = 2 * model.hidden_size**2
    assert round(module.weights / 1e9, 1) == 11.5
    plain = ModelConfig(**nested(V3))
    more = work_of(model).flops - work_of(plain).flops
    tokens = model.seq_length
    head = model.hidden_size * (model.vocab_size or 0)
    of_module = 6 * module.multiplications + 3 * module.score_flops
    assert more == of_module + 6 * tokens * (both + head)
    assert work_of(model).tokens == work_of(plain).tokens == tokens


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, tp=2), Layout(row=2, col=2)], ids=str)
def test_formulas_know_the_parameters(layout: Layout) -> None:
    program = tiny.program(layout, **{"mtp.layers": 2})
    mine = {n: x for n, x in parameter_infos(program.config).items() if n.startswith("mtp_")}
    theirs = {n: x for n, x in program.infos.items() if n.startswith("mtp_")}
    assert mine.keys() == theirs.keys()
    for name, info in mine.items():
        own = theirs[name]
        assert (info.shape, info.stored_shape, info.spec) == (own.shape, own.stored_shape, own.spec)
        assert (info.stack, info.matrix, info.decay) == (own.stack, own.matrix, own.decay), name


def test_modules_are_counted_as_saved_for_one_micro_batch() -> None:
    program = tiny.program(Layout(), **{"mtp.layers": 2})
    (stack,) = architecture_of(program.config.model).stacks
    one = memory_model.layer(program.config, stack, "none")
    x = 4 * tiny.MODEL.seq_length * tiny.MODEL.hidden_size * 4  # half of eight sequences
    assert memory_model.behind(program.config) == 2 * (one + 2 * x)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"family": "bert", "mtp.layers": 1}, "model.mtp.layers=1 has no effect with the family b"),
        ({"mtp.weight": 0.1}, "model.mtp.weight=0.1 has no effect without model.mtp.layers"),
        ({"mtp.layers": -1}, "model.mtp.layers=-1 must be a number, 0 or more"),
        ({"mtp.layers": 8, "seq_length": 8}, "model.mtp.layers=8: no token of model.seq_length=8"),
        ({"mtp.layers": 1, "norm_order": "post"}, "model.mtp with model.norm_order=post: its mod"),
        (
            {"family": "mixtral", "mtp.layers": 1, "moe.upcycle": True},
            "model.mtp with model.moe.upcycle=true: a dense model has no weights for its modules",
        ),
    ],
    ids=str,
)
def test_what_modules_do_not_go_with_is_refused_in_a_line(fields: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        ModelConfig(**nested(fields))
    assert str(error.value).startswith(line)


def test_no_modules_are_no_section() -> None:
    assert ModelConfig(**nested({"mtp.layers": 0})) == ModelConfig()
