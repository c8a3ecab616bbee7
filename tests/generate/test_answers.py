"""Answers of an encoder-decoder: the prompt is the source, encoded once, and answers end."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd import Layout, UserError
from jaxptd.data.objectives import SPAN_TOKENS
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.generate import Generator, Sampling, Writer
from jaxptd.mesh import SAMPLE_AXES, SEQUENCE_AXES, Axis
from jaxptd.models.model import run_layers
from jaxptd.params import shardings
from jaxptd.step import Program
from jaxptd.step.batch import batch_specs

GREEDY = Sampling(temperature=0)
T5 = tiny.T5 | {"num_layers": 4}
LENGTH = 8
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 1, 12]]


@functools.cache
def weights() -> dict[str, np.ndarray]:
    """Canonical parameters that are large enough for answers to differ."""
    made = tiny.program(Layout(), **T5)
    return {n: 8 * np.asarray(x) for n, x in made.canonical(made.init_state()["params"]).items()}


def params_of(program: Program) -> Any:
    forms = program.states.stored
    held = {name: forms[name].from_canonical(weights()[name]) for name in program.infos}
    return jax.device_put(held, shardings(forms, program.mesh))


@functools.cache
def generator(layout: Layout) -> tuple[Generator, Any]:
    program = tiny.program(layout, **T5)
    return Generator(program, tiny.VOCAB, GREEDY), params_of(program)


def written(layout: Layout, prompt: list[int], tokens: int) -> list[int]:
    generate, params = generator(layout)
    return generate(params, prompt, tokens)


@functools.cache
def without_cache() -> list[list[int]]:
    """Answers both prompts, computing each token from the whole source and all tokens before it."""
    program = tiny.program(Layout(), batch=2, micro_batches=1, **T5)
    params, specs = params_of(program), batch_specs(program.config)

    def logits(params: Any, batch: Any) -> Any:
        model = program.resolved.blueprint.build(params)
        x, _ = run_layers(model, batch, program.body.micro_batches(batch, None)[1])
        return model.output(x)

    ins = (program.states.specs["params"], specs)
    whole = jax.shard_map(
        logits,
        mesh=program.mesh,
        in_specs=ins,
        out_specs=P(SAMPLE_AXES, SEQUENCE_AXES, Axis.TP),
        check_vma=True,
    )
    run, source = jax.jit(whole), np.zeros((2, 16), np.int32)
    for row, prompt in zip(source, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    mask = np.arange(source.shape[1]) < [[len(prompt)] for prompt in PROMPTS]
    targets = np.full((2, LENGTH), -1, np.int32)
    for i in range(LENGTH):
        batch = {"source": source, "source_mask": mask.astype(np.int32), "targets": targets}
        found = run(params, program.place(batch))[:, i, : tiny.VOCAB]
        targets[:, i] = jnp.argmax(found, -1)
    return targets.tolist()


@pytest.mark.parametrize(
    "layout",
    [
        slow(Layout()),
        slow(Layout(tp=2)),
        slow(Layout(tp=3)),
        slow(Layout(cp=2)),
        slow(Layout(ulysses=2)),
        slow(Layout(row=2, col=2)),
        slow(Layout(row=2, col=2, attention2d="blocks")),
        slow(Layout(pp=2)),
        slow(Layout(pp=2, schedule="interleaved")),
        slow(Layout(dp=2, zero=3)),
    ],
    ids=str,
)
def test_an_answer_is_that_of_the_whole_source(layout: Layout) -> None:
    """Answers have at most decoder_seq_length tokens, no matter how many are requested."""
    expected = without_cache()
    assert expected[0] != expected[1]
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert written(layout, prompt, 100) == answer


# ---- texts --------------------------------------------------------------------------------------

BYTES = ByteTokenizer(SPAN_TOKENS)
END, FIRST = BYTES.end_of_document, BYTES.token_id("<extra_id_0>")


@pytest.mark.slow
def test_an_answer_has_so_many_tokens() -> None:
    assert written(Layout(), PROMPTS[0], 3) == without_cache()[0][:3]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records the prompts' ids; every generator answers with "ab", an end and "c"."""
    found: list[list[int]] = []

    def answer(self: Generator, params: Any, prompt: list[int], tokens: int) -> list[int]:
        found.append(prompt)
        return list(itertools.takewhile(lambda token: token not in self.ends, [97, 98, END, 99]))

    monkeypatch.setattr(Generator, "__call__", answer)
    return found


def text(prompt: str) -> str:
    program = tiny.program(Layout(), **T5 | {"vocab_size": BYTES.vocab_size})
    return Writer(program, {}, BYTES, GREEDY)(prompt, 4)


def test_an_answer_is_returned_alone_up_to_its_end(asked: list[list[int]]) -> None:
    assert text("no") == "ab"
    assert text("") == "ab"
    assert asked == [[*b"no", END], [END]]


def test_a_prompt_may_name_special_tokens(asked: list[list[int]]) -> None:
    text("a<extra_id_0>b")
    text("a<extra_id_x>")
    assert asked == [[97, FIRST, 98, END], [*b"a<extra_id_x>", END]]


def test_a_prompt_that_is_longer_than_a_source_is_refused() -> None:
    program = tiny.program(Layout(), **T5)
    with pytest.raises(UserError, match="the prompt has 17 tokens, with its end, and a source"):
        Generator(program, tiny.VOCAB, GREEDY)({}, [1] * 17, 3)
