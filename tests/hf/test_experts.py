"""Loss, gradients and choices of models with experts equal those of transformers in float64.

The default tests read transformers' results from golden files; slow ones run transformers itself.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import experts, reference, write_directory
from turns import slow

import jaxptd
from jaxptd import Layout, Program, TrainConfig
from jaxptd.api.run import Run
from jaxptd.generate import Generator, Sampling

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "experts.json").read_text())
KINDS = list(experts.CONFIGS)
USUAL = "dots1"


def run_of(kind: str, folder: Path, layout: Layout, **keys: Any) -> Run:
    """The tiny model of a family, in float64."""
    tensors, config = experts.expert_tensors(kind), experts.CONFIGS[kind]
    there = write_directory(folder / kind, tensors, base=config, **keys)
    sizes: Any = {"seq_length": experts.LENGTH, "dtype": "float64", "platform": "cpu"}
    return jaxptd.from_hf(there, layout=layout, **sizes)


def counted(gradients: dict[str, Any]) -> np.ndarray:
    """Number of tokens of each expert, which stands in for the gradient of the choosing bias."""
    biases = [np.asarray(x) for name, x in gradients.items() if name.endswith("load_bias")]
    return np.concatenate(biases).astype(int)


LAYOUTS = [
    Layout(ep=4, tp=2, sequence_parallel=True),
    Layout(pp=2, ep=2, tp=2, schedule="zb-h1"),  # two layers: one for each stage
    Layout(ep=2, cp=2, zero=3),
    Layout(ep=2, tp=4, sequence_parallel=True, collective_matmul=True),  # kv heads are gathered
    Layout(ep=2, cp=2, tp=2),
    Layout(ep=2, cp=2, tp=2, sequence_parallel=True, ring="gather"),
    Layout(dp=2, cp=2, tp=2, ring="blockwise"),
    Layout(pp=2, ep=2, cp=2, schedule="zb-h1", zero=2),
]
NUMBERS = [(USUAL, Layout()), *(slow(kind, Layout()) for kind in KINDS if kind != USUAL)]
NUMBERS += [slow(kind, layout) for kind, layout in zip(KINDS, LAYOUTS, strict=True)]
NUMBERS += [slow(kind, layout) for kind, layout in zip(KINDS[::-1], LAYOUTS, strict=True)]


@pytest.mark.parametrize(("kind", "layout"), NUMBERS, ids=str)
def test_numbers_are_those_of_transformers(tmp_path: Path, kind: str, layout: Layout) -> None:
    golden = GOLDEN[kind]
    with jax.enable_x64(True):
        run = run_of(kind, tmp_path, layout)
        loss, gradients = run.loss_and_gradients(experts.inputs())
        found = jaxptd.hf.names(run.program, gradients)
    assert abs(loss - golden["loss"]) < 1e-12
    np.testing.assert_array_equal(counted(gradients), experts.counts_of(kind, golden["experts"]))
    found = {name: x for name, x in found.items() if not name.endswith(experts.BUFFER)}
    reference.check_summaries(found, golden["gradients"])


@pytest.mark.parametrize("kind", [slow(kind) if kind == USUAL else kind for kind in KINDS])
def test_losses_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    batch = experts.inputs()
    with jax.enable_x64(True):
        logits = run_of(kind, tmp_path, Layout()).logits(batch)
    targets, shifted = batch["targets"], logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert abs(-chosen[targets >= 0].mean() - GOLDEN[kind]["loss"]) < 1e-12


# ---- transformers itself -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_and_choice_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    batch = experts.inputs()
    with jax.enable_x64(True):
        run = run_of(kind, tmp_path, Layout())
        loss, gradients = run.loss_and_gradients(batch)
        found = jaxptd.hf.names(run.program, gradients)
        train = TrainConfig(global_batch_size=experts.ROWS)
        program = Program(dataclasses.replace(run.program.config, train=train), run.program.mesh)
        inputs = {name: x.astype(np.int32) for name, x in batch.items()}
        chosen, margins = program.choices(run.state["params"], inputs)
    expected_loss, expected, theirs = experts.computed(tmp_path / kind, batch)
    assert abs(loss - expected_loss) < 1e-12
    for number, layer in enumerate(experts.sparse_layers(kind)):
        ours = np.sort(chosen[:, :, layer].reshape(-1, chosen.shape[-1]))
        np.testing.assert_array_equal(ours, theirs[number])
        assert margins[:, :, layer].min() > 1e-6
    assert {name for name in found if not name.endswith(experts.BUFFER)} == set(expected)
    for name, x in expected.items():
        scale = max(float(np.linalg.norm(x)), 1e-6)  # an idle expert has no gradient
        assert np.linalg.norm(found[name] - x) < 1e-10 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_likeliest_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    prompt, more = [5, 17, 2], 8
    with jax.enable_x64(True):
        run = run_of(kind, tmp_path, Layout())
        generator = Generator(run.program, experts.VOCAB, Sampling(temperature=0))
        found = generator(dict(run.state["params"]), prompt, more)
    model = experts.load(tmp_path / kind)
    with experts.without_narrowing():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=more, do_sample=False)
    assert found == ids[0, len(prompt) :].tolist()
