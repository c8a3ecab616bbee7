"""Three steps of torch's AdamW from the same weights, and transformers' greedy texts.

transformers computes RMSNorm, rotary angles and softmax in float32, so only GPT-2 is compared in
float64. Greedy texts are also compared for a Llama.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import reference

import jaxptd
from jaxptd import Layout, OptimizerConfig, Program
from jaxptd.generate import Generator, Sampling
from jaxptd.hf.convert import main as convert
from jaxptd.hf.directory import Directory
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Tensors = dict[str, np.ndarray]

VOCAB, LENGTH, STEPS = 37, 32, 3
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, warmup_steps=0, decay="constant", weight_decay=0.1, grad_clip=0
)
PLACES = [Layout(), Layout(tp=2), Layout(pp=2), Layout(row=2, col=2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each model, with random norms and biases, so that they matter."""
    torch.manual_seed(0)
    found = {}
    for name, sizes in reference.SIZES.items():
        config = transformers.AutoConfig.for_model(name, vocab_size=VOCAB, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        found[name] = tmp_path_factory.mktemp("hf") / name
        model.save_pretrained(found[name])
    return found


# ---- training ----------------------------------------------------------------------------------


def by_torch(folder: Path, dtype: str, decayed: set[str]) -> Tensors:
    """Weights after three steps of `torch.optim.AdamW` in this precision."""
    model = reference.load(folder).to(getattr(torch, dtype))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    adam = torch.optim.AdamW(groups, OPTIMIZER.learning_rate, betas, OPTIMIZER.epsilon)
    for number in range(STEPS):
        inputs = {name: torch.tensor(x) for name, x in batch(number).items()}
        logits = model(input_ids=inputs["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs["targets"].flatten(), ignore_index=-1
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {name: p.detach().numpy() for name, p in named.items()}


def batch(number: int) -> Tensors:
    """Every step's batch has the same rows, rolled by a different number of tokens."""
    found = reference.batch(VOCAB, LENGTH, rows=8)
    return {name: np.roll(x, number, axis=1) for name, x in found.items()}


def exported(folder: Path, out: Path, dtype: Any, layout: Layout) -> tuple[Tensors, set[str]]:
    """Our weights after three steps, as `convert --to-hf` writes them, and the names that decay."""
    run = jaxptd.from_hf(folder, layout=layout, dtype=dtype, platform="cpu")
    config = run.program.config
    train = dataclasses.replace(config.train, global_batch_size=8)
    config = dataclasses.replace(config, optimizer=OPTIMIZER, train=train)
    program = Program(config, run.program.mesh)
    state = program.states.new(dict(run.state["params"]))
    for number in range(STEPS):
        inputs = {name: x.astype(np.int32) for name, x in batch(number).items()}
        state, _ = program.train_step(state, program.place(inputs))
    checkpoints = RunCheckpoints(program, RunDir(out / "run"), print)
    checkpoints.save(state, STEPS, None)
    checkpoints.store.wait()
    convert(["--to-hf", str(out / "run"), "--out", str(out / "hf"), "--quiet"])
    there = Directory(out / "hf")
    found = {n: there.tensor(n)[(slice(None),) * len(s)] for n, s in there.shapes.items()}
    canonical = {
        name: np.asarray(x)
        for name, x in program.canonical(state["params"]).items()
        if program.infos[name].decay
    }
    return found, set(jaxptd.hf.names(program, canonical))


def distance(a: Tensors, b: Tensors) -> float:
    """The norm of the difference of all weights."""
    squares = (np.sum((a[name].astype(np.float64) - b[name]) ** 2) for name in b)
    return float(np.sqrt(sum(squares)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2, zero=1)], ids=str)
def test_three_steps_and_an_export_are_torch_s(folders, tmp_path, layout) -> None:
    folder = folders["gpt2"]
    with jax.enable_x64(True):
        found, decayed = exported(folder, tmp_path / "double", "float64", layout)
    expected = by_torch(folder, "float64", decayed)
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-9, err_msg=name)
    single, _ = exported(folder, tmp_path / "single", "float32", layout)
    theirs = by_torch(folder, "float32", decayed)
    steps = STEPS * OPTIMIZER.learning_rate
    for each in (single, theirs):  # the gradient of a key's bias is rounding noise of any sign
        for name in (name for name in each if name.endswith("c_attn.bias")):
            keys = np.array_split(each[name] - expected[name], 3)[1]
            assert np.abs(keys).max() <= 2 * steps
            each[name] = each[name] - np.concatenate([0 * keys, keys, 0 * keys])
    print(distance(single, expected), distance(theirs, expected))
    assert 0 < distance(single, expected) <= 2 * distance(theirs, expected)


# ---- texts -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", PLACES, ids=str)
@pytest.mark.parametrize("name", reference.SIZES)
def test_twenty_likeliest_tokens_are_those_of_transformers(folders, name, layout) -> None:
    prompt = [5, 17, 2]
    model = reference.load(folders[name])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": VOCAB}
    ids = model.generate(torch.tensor([prompt]), **options)
    run = jaxptd.from_hf(folders[name], layout=layout, platform="cpu")
    generator = Generator(run.program, VOCAB, Sampling(temperature=0))
    assert generator(dict(run.state["params"]), prompt, 20) == ids[0, len(prompt) :].tolist()
