"""Layouts that equal one device, and the command that verifies them."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import jax
import pytest
import tiny
from one_device import report, verified
from turns import latin, slow

from jaxptd import verify
from jaxptd.analysis import verification
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, RingKind

QWEN = {"family": "qwen3", "num_kv_heads": 2}


@pytest.mark.parametrize(
    "layout",
    [
        slow(Layout(dp=2, ep=2)),
        slow(Layout(tp=4)),
        slow(tiny.SEQUENCE_PARALLEL),
        slow(Layout(cp=8, ring="rsa")),
        slow(Layout(cp=8, ring="gather")),
    ],
    ids=str,
)
def test_layouts_are_equal_to_one_device(layout: Layout) -> None:
    hold(layout)


@pytest.mark.slow
def test_more_devices_than_kv_heads_are_equal_to_one_device() -> None:
    hold_fast(tiny.SEQUENCE_PARALLEL, **QWEN)


@pytest.mark.parametrize(
    "layout",
    [
        slow(tiny.CONTEXT_PARALLEL),
        slow(Layout(cp=2, row=2, col=2)),
        slow(Layout(cp=4)),
        slow(Layout(cp=4, ring="blockwise")),
    ],
    ids=str,
)
def test_rings_are_equal_to_one_device_with_documents_kept_apart(layout: Layout) -> None:
    hold(layout, documents="apart")


TOKENS = Layout(cp=2, ring="gather", balance="tokens")


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (dataclasses.replace(TOKENS, dp=2), {}),
        slow(dataclasses.replace(TOKENS, dp=2, zero=3), {"window": 3, "remat": "full"}),
        slow(dataclasses.replace(TOKENS, ulysses=2, tp=2, sequence_parallel=True), {}),
        slow(dataclasses.replace(TOKENS, pp=2, dp=2, schedule="zb-v"), {"num_layers": 4}),
        slow(dataclasses.replace(TOKENS, cp=4), {"family": "llama", "num_kv_heads": 2}),
        slow(dataclasses.replace(TOKENS, ep=2, tp=2), tiny.MOE),
        slow(dataclasses.replace(TOKENS, dp=2), tiny.LATENT),
        slow(dataclasses.replace(TOKENS, dp=2), {"restart_positions": True}),
        slow(Layout(pp=2, tp=2, balance="samples"), {"num_layers": 4, "restart_positions": True}),
        slow(Layout(replicas=2, dp=2, tp=2, zero=1, balance="samples"), {}),
        slow(Layout(dp=2, cp=2, row=2, balance="samples"), {}),
        slow(Layout(pp=2, dp=2, balance="samples", zero=2), {"num_layers": 4}),
    ],
    ids=str,
)
def test_arranged_documents_are_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold_fast(layout, documents="apart", micro_batches=2, **choice)


@pytest.mark.slow
def test_choices_of_arranged_tokens_are_those_of_one_device() -> None:
    """In float32 routers take the choices of one device, in the order of its batch."""
    found = verified(dataclasses.replace(TOKENS, dp=2), "float32", documents="apart", **tiny.MOE)
    assert found.wrong == []
    assert found.worst_gradient <= 1e-6


GRID = Layout(row=2, col=2)
UNEVEN = {"hidden_size": 15, "num_heads": 3, "ffn_hidden_size": 23}  # not divisible by any grid


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [dataclasses.replace(GRID, dp=2), Layout(row=2, col=4, matmul2d_slices=2)],
    ids=str,
)
def test_grids_are_equal_to_one_device(layout: Layout) -> None:
    hold(layout)


@pytest.mark.slow
@pytest.mark.parametrize("matmul2d", ["fox", "cannon"])
def test_a_grid_pads_what_it_does_not_divide(matmul2d) -> None:
    layout = dataclasses.replace(GRID, matmul2d=matmul2d, attention2d="blocks")
    hold(layout, documents="apart", **UNEVEN)


FOUR = {"num_layers": 4, "micro_batches": 4}
CP_BLOCKS = Layout(cp=2, row=2, col=2, attention2d="blocks")


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(tp=4, sequence_parallel=True), {}),
        slow(dataclasses.replace(tiny.CONTEXT_PARALLEL, zero=3), {"documents": "apart"}),
        slow(Layout(tp=2, sequence_parallel=True, collective_matmul=True), {"remat": "dots"}),
        slow(Layout(cp=4, ring="rsa"), {"dropout": 0.1}),
        slow(Layout(cp=2, tp=4, ring="gather", zero=2), {"dropout": 0.1, "documents": "apart"}),
        slow(Layout(row=4, col=2, ring="gather"), {"window": 3, "remat": "full"}),
        slow(Layout(pp=2, cp=2, row=2, ring="gather", schedule="zb-v"), FOUR | {"window": 5}),
        slow(Layout(cp=2, tp=2, ring="blockwise"), {"remat": "attention", "linear_bias": "qkv"}),
        slow(Layout(dp=2, row=2, col=2), {"tie_embeddings": False}),
        slow(Layout(row=2, col=4), {"dropout": 0.1}),
        slow(Layout(row=4, col=2, matmul2d="summa", zero=0), {"remat": "full"}),
        slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="cannon"), {"head_size": 6}),
        slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"), {"dropout": 0.1}),
        slow(CP_BLOCKS, {"dropout": 0.1, "documents": "apart"}),
        slow(dataclasses.replace(CP_BLOCKS, ring="rsa", zero=3), {"window": 3, "remat": "dots"}),
        slow(dataclasses.replace(CP_BLOCKS, pp=2, row=1, schedule="zb-v"), FOUR),
        slow(Layout(pp=2, tp=4, schedule="zb-v"), FOUR),
        slow(Layout(pp=2, row=2, col=2, schedule="zb-h1"), FOUR | {"remat": "dots"}),
        slow(Layout(pp=2, ep=2, cp=2, schedule="interleaved", zero=2), FOUR | {"dropout": 0.1}),
        slow(Layout(dp=2, tp=2, offload="optimizer", zero=1), {}),
        slow(Layout(tp=2, offload="activations"), {"remat": "dots"}),
    ],
    ids=str,
)
def test_every_engine_runs_blocks_of_other_options(layout: Layout, choice: dict) -> None:
    with jax.enable_x64(True):
        found = verification.verify(tiny.config(layout, **QWEN, **choice), dtype="float64")
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


GEMMA = {"family": "gemma2", "num_kv_heads": 2, "window": 3, "window_layers": (True, False)}
GEMMA |= {"attention_softcap": 0.5, "softcap_layers": (False, True), "dropout": 0.1}
WIDTHS = {"family": "qwen3", "num_kv_heads": 2, "num_layers": 4, "head_sizes": (2, 6), "window": 3}
WIDTHS |= {"window_layers": (True, False), "dropout": 0.1}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_divisor": 2.0}
HEAD = {"z_loss": 0.1, "logit_softcap": 2.0, "max_positions": 12} | SCALES


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(pp=2, dp=2, tp=2, schedule="zb-h1", zero=2), FOUR | {"norm_order": "post"}),
        slow(Layout(pp=2, row=2, col=2), FOUR | {"norm_order": "post", "remat": "full"}),
        slow(Layout(tp=2, offload="activations"), {"norm_order": "post", "remat": "dots"}),
        slow(Layout(dp=2, cp=2, ring="rsa"), {"norm_order": "post", "dropout": 0.1}),
        slow(Layout(cp=2, tp=2, zero=3), {"tie_embeddings": False}),
        (Layout(tp=2, sequence_parallel=True), GEMMA),
        slow(Layout(tp=2, offload="activations"), GEMMA | {"remat": "dots"}),
        (Layout(pp=2, tp=2, schedule="zb-h1"), WIDTHS | {"micro_batches": 4, "remat": "dots"}),
        *(
            slow(each, WIDTHS)
            for each in (
                Layout(dp=2, cp=2, zero=3),
                Layout(cp=2, ulysses=2, tp=2),
                Layout(cp=4, ring="rsa"),
                Layout(row=2, col=2, attention2d="blocks"),
                Layout(replicas=2, dp=2, tp=2, zero=2, sequence_parallel=True),
                Layout(dp=2, offload=("optimizer", "parameters")),
            )
        ),
        slow(
            Layout(pp=2, stage_layers=(6, 3)), WIDTHS | {"num_layers": 9, "head_sizes": (2, 2, 6)}
        ),
        slow(Layout(tp=2, offload="activations"), WIDTHS | {"remat": "dots"}),
        slow(Layout(dp=2, tp=2), WIDTHS | {"mtp.layers": 2}),
        slow(Layout(pp=2, row=2, col=2), FOUR | {"norm_order": "both", "remat": "full"}),
        slow(Layout(row=2, col=2, attention2d="blocks"), {"norm_order": "both"}),
        slow(dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True), GEMMA),
        slow(Layout(row=2, col=2, attention2d="blocks"), UNEVEN),
        slow(dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True), {}),
    ],
    ids=str,
)
def test_a_head_of_other_options_is_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold_fast(layout, **HEAD, **choice)


@pytest.mark.slow
def test_an_encoder_decoder_with_scales_is_equal_to_one_device() -> None:
    scales = {name: x for name, x in SCALES.items() if name != "logit_divisor"}
    hold_fast(Layout(cp=2, tp=2, ring="blockwise"), **tiny.T5, **scales)


RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)
FAST = {"scan_layers": False, "vocab_multiple": 32}


@pytest.mark.slow
def test_collective_matmul_is_equal_to_one_device() -> None:
    found = verified(RING_STEPS, vocab_multiple=32)
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        slow(Layout()),
        RING_STEPS,
        slow(dataclasses.replace(RING_STEPS, dp=1, cp=2, ring="blockwise", zero=2)),
        slow(dataclasses.replace(GRID, dp=2)),
    ],
    ids=str,
)
def test_bfloat16_is_float32_on_one_device_but_for_its_roundings(layout: Layout) -> None:
    """Compares the fast kernels and recomputation with the plain step."""
    found = verified(layout, "bfloat16", **FAST, remat="dots")
    assert found.wrong == []
    assert 1e-3 <= found.worst_gradient <= 0.05
    assert "in bfloat16, which computes in float32" in found.verdict


def test_the_command_adds_bfloat16_where_the_config_computes_in_it(capsys, monkeypatch) -> None:
    row = verify.Row("norm.b", "gradient", 0.0, 1.0)
    monkeypatch.setattr(verify, "prepare", lambda config, double: "no device")
    monkeypatch.setattr(
        verify, "verify", lambda config, dtype: verify.Report(config.layout, dtype, [row])
    )
    path = str(Path(__file__).parents[1] / "configs" / "test-tiny.yaml")
    command = ["--config", path, "--quiet", "--layout.tp", "2", "--model.dtype", "bfloat16"]
    assert verify.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "equal to one device in float64",
        "equal to one device in float32",
        "equal to one device in bfloat16, which computes in float32",
    ]


@pytest.mark.parametrize("error", [0.0, 2.0])
def test_the_command_prints_every_comparison_as_json(capsys, monkeypatch, error) -> None:
    row = verify.Row("norm.b", "gradient", error, 1.0)
    monkeypatch.setattr(verify, "prepare", lambda config, double: "no device")
    monkeypatch.setattr(
        verify, "verify", lambda config, dtype: verify.Report(config.layout, dtype, [row])
    )
    equal = error < 1
    assert verify.main(["--config", "test-tiny", "--layout.tp", "2", "--json"]) == int(not equal)
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["devices"], found["equal"]) == ("tp=2", "no device", equal)
    assert [report["dtype"] for report in found["reports"]] == ["float64", "float32"]
    (plain,) = found["reports"][0]["rows"]
    expected = {"name": "norm.b", "what": "gradient", "error": error, "allowed": 1.0}
    assert plain == {**expected, "equal": equal}


@pytest.mark.parametrize("option", ["attention=cudnn", "kernels=triton"])
def test_kernels_are_refused_before_anything_runs(option, monkeypatch) -> None:
    monkeypatch.setattr(verify, "prepare", lambda config, double: "no device")
    monkeypatch.setattr(verify, "verify", None)
    command = ["--config", "test-tiny", "--model.dtype", "bfloat16", f"--model.{option}"]
    with pytest.raises(UserError, match=f"model.{option}: it needs an NVIDIA GPU"):
        verify.main([*command, "--model.dropout", "0"])


@pytest.mark.slow
def test_a_pipeline_is_equal_to_one_device() -> None:
    """Covers one pipeline; tests/pipeline has more."""
    found = verified(Layout(pp=2, dp=2, schedule="zb-h1"))
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


def hold(layout: Layout, **choice) -> None:
    """Checks both precisions, as the command does, and the verdict's words."""
    double = verified(layout, **choice)
    assert double.wrong == []
    assert double.worst_gradient <= 1e-12
    assert "equal to one device in float64" in double.verdict
    single = verified(layout, "float32", **choice)
    assert single.wrong == []
    assert single.worst_gradient <= 1e-6


def hold_fast(layout: Layout, **choice) -> None:
    """Checks float64 with one device's cached step, for matmuls in many layouts."""
    found = report(layout, "float64", **{"dropout": 0.1, **choice})
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(dp=2, tp=2), Layout(dp=2, tp=4), Layout(tp=2, sequence_parallel=True)],
    ids=str,
)
@pytest.mark.parametrize("choice", [{}, {"scan_layers": False, "remat": "dots"}], ids=str)
def test_more_layouts_are_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold_fast(layout, **choice)


RINGS = [
    Layout(cp=2),
    Layout(cp=4),
    Layout(cp=8),
    Layout(cp=2, ep=2),
    Layout(cp=4, tp=2),
    Layout(cp=2, tp=4, sequence_parallel=True),
    Layout(cp=4, tp=2, sequence_parallel=True),
    tiny.CONTEXT_PARALLEL,
]
MODELS = [
    {"seq_length": 16, "dropout": 0.0, "documents": "joined"},
    {"seq_length": 16, "dropout": 0.1, "documents": "apart"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ring", "model"), latin(RINGS, get_args(RingKind), MODELS), ids=str
)
def test_every_ring_is_equal_to_one_device(layout, ring, model) -> None:
    hold_fast(dataclasses.replace(layout, ring=ring), **model)


GRIDS = [
    GRID,
    dataclasses.replace(GRID, dp=2),
    dataclasses.replace(GRID, cp=2),
    *(Layout(row=2, col=4, ring=ring) for ring in get_args(RingKind)),
    Layout(row=4, col=2),
    Layout(row=1, col=4),
    Layout(row=4, col=1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "matmul2d", "model"),
    latin(GRIDS, ("gather", "summa", "fox", "cannon"), MODELS),
    ids=str,
)
def test_every_grid_is_equal_to_one_device(layout, matmul2d, model) -> None:
    if layout.row != layout.col and matmul2d in ("fox", "cannon"):
        layout = dataclasses.replace(layout, matmul2d_slices=2)
    else:
        layout = dataclasses.replace(layout, matmul2d=matmul2d)
    hold_fast(layout, **model)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
@pytest.mark.parametrize("matmul2d", ["gather", "summa", "fox", "cannon"])
def test_blocks_of_attention_are_equal_to_one_device(matmul2d, remat) -> None:
    layout = dataclasses.replace(GRID, dp=2, matmul2d=matmul2d, attention2d="blocks")
    hold_fast(layout, remat=remat, documents="apart", tie_embeddings=False, **UNEVEN)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"remat": r} for r in ("dots", "attention", "full")], ids=str)
@pytest.mark.parametrize("ring", get_args(RingKind))
def test_rings_with_an_odd_number_of_heads_and_less_kept(ring, choice) -> None:
    hold_fast(Layout(cp=4, ring=ring), num_heads=3, hidden_size=12, **choice)
