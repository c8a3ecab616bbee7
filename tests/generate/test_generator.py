"""Generates text with and without the cache on every layout, and samples tokens."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.commands.command_line import load_config
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.generate import Generator, Sampling, Writer
from jaxptd.layers.dropout import TokenInfo
from jaxptd.mesh import Axis, make_mesh
from jaxptd.models.model import run_layers
from jaxptd.params import shardings
from jaxptd.run.generator import CHUNK, NONE
from jaxptd.step import Program

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
VOCAB, LONGEST = 257, 16
GREEDY = Sampling(temperature=0)

TP2 = ("--layout.tp=2",)
TP3 = ("--layout.tp=3",)  # pads heads
TP4 = ("--layout.tp=4",)
CP2_TP2 = ("--layout.cp=2", *TP2)
ULYSSES = ("--layout.ulysses=2", *TP2)
SEQUENCE = ("--layout.ep=2", "--layout.tp=2", "--layout.sequence_parallel=true")
GRID = ("--layout.row=2", "--layout.col=2")
PIPELINE = ("--layout.pp=2", "--layout.tp=2")
FOLDED = ("--layout.pp=2", "--layout.schedule=zb-v", "--layout.stage_layers=[1,0,0,1]")
PIPELINES = [
    (*PIPELINE, "--layout.dp=2", "--layout.schedule=zb-h1"),
    ("--layout.pp=2", "--layout.schedule=interleaved", "--layout.stage_layers=[0,1,0,1]"),
    ("--layout.pp=2", "--layout.cp=2", "--layout.stage_layers=[0,2]"),
    ("--layout.pp=2", "--layout.row=2", "--layout.col=2", "--layout.matmul2d=cannon"),
]
QWEN = (
    *("--model.family=qwen3", "--model.num_kv_heads=2"),
    *("--model.window=5", "--model.attention_scale=0.7"),
)
BY_LAYER = (
    *QWEN,
    *("--model.window_layers=[false,true]", "--model.rope.window_theta=9"),
    *("--model.attention_softcap=0.2", "--model.softcap_layers=[true,false]"),
    "--model.attention_sinks=true",
)
GEMMA = (
    *("--model.family=gemma3_text", "--model.num_kv_heads=2", "--model.window=5"),
    *("--model.window_layers=[true,false]", "--model.rope.window_theta=9"),
    *("--model.logit_softcap=30", "--model.attention_softcap=0.2"),  # a low cap makes ties
)
WIDTHS = (
    *(*QWEN, "--model.head_sizes=[6,4]", "--model.window_layers=[false,true]"),
    "--model.num_layers=4",
)
GPT_OSS = (
    *("--model.family=gpt_oss", "--model.num_kv_heads=2", "--model.ffn_hidden_size=32"),
    *("--model.moe.num_experts=4", "--model.moe.top_k=2", "--model.window=5"),
    "--model.window_layers=[true,false]",
)
BLOCKS = ("--layout.row=2", "--layout.col=4", "--layout.attention2d=blocks")
ZERO3 = ("--layout.dp=2", "--layout.ep=2", "--layout.zero=3")
REPLICAS = ("--layout.replicas=2", "--layout.dp=2", "--layout.zero=1")
EXPERTS = (
    *("--model.family=mixtral", "--model.num_kv_heads=2", "--model.ffn_hidden_size=32"),
    *("--model.moe.num_experts=4", "--model.moe.top_k=2", "--model.tie_embeddings=false"),
)

LATENT = (
    *("--model.family=deepseek_v3", "--model.window=5", "--model.ffn_hidden_size=32"),
    *("--model.moe.num_experts=4", "--model.moe.top_k=2", "--model.moe.ffn_hidden_size=16"),
    *("--model.moe.num_groups=2", "--model.moe.top_groups=1", "--model.moe.first_dense=1"),
    *("--model.moe.shared_ffn_hidden_size=16", "--model.latent.q_rank=12"),
    *("--model.latent.kv_rank=10", "--model.latent.nope_size=4", "--model.latent.rope_size=4"),
    "--model.latent.value_size=5",
)


@functools.cache
def make_program(*overrides: str) -> Program:
    config = load_config(CONFIG, [f"--model.vocab_size={VOCAB}", *overrides])
    return Program(config, make_mesh(config.layout))


def model_options(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for option in overrides if option.startswith("--model."))


@functools.cache
def make_params(*overrides: str) -> dict:
    """Parameters that are large enough for the generated text to vary.

    Every layout of the model gets the same values.
    """
    program, model = make_program(*overrides), model_options(overrides)
    if overrides != model:
        stored = program.states.stored
        held = {name: stored[name].from_canonical(x) for name, x in make_params(*model).items()}
        return jax.device_put(held, shardings(stored, program.mesh))
    larger = {name: 3 * x for name, x in tiny.random_params(program).items()}
    return jax.device_put(larger, shardings(program.infos, program.mesh))


@functools.cache
def generator(sampling: Sampling, *overrides: str) -> Generator:
    return Generator(make_program(*overrides), VOCAB, sampling)


def write(prompt, tokens: int, *overrides: str, sampling: Sampling = GREEDY) -> list[int]:
    return generator(sampling, *overrides)(make_params(*overrides), prompt, tokens)


@functools.cache
def next_logits(*model: str):
    """Logits of the next token as a function of (ids[16], length), without a cache."""
    program = make_program(*model)

    def body(params, tokens_BT):
        token_info = TokenInfo(jnp.zeros(1, jnp.int32), jnp.arange(LONGEST, dtype=jnp.int32), None)
        built = program.resolved.blueprint.build(params)
        x_BTD, _ = run_layers(built, {"tokens": tokens_BT}, token_info)
        logits_BTV = built.output(x_BTD)
        return program.resolved.tensor_parallel.axes.gather(logits_BTV, 2)

    specs = (program.resolved.blueprint.specs, P(Axis.EP, Axis.CP))
    whole = jax.jit(
        jax.shard_map(body, mesh=program.mesh, in_specs=specs, out_specs=specs[1], check_vma=True)
    )
    return lambda ids, length: whole(make_params(*model), ids[None])[0, length - 1]


def written_without_cache(prompt: list[int], tokens: int, *model: str) -> list[int]:
    """Generates tokens from all text before them; a full text continues from its second half."""
    text = list(prompt)
    seen = list(prompt)
    for _ in range(tokens):
        if len(seen) >= LONGEST:
            seen = seen[-(LONGEST // 2) :]
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(seen)] = seen
        token = int(jnp.argmax(next_logits(*model)(padded, len(seen))))
        seen.append(token)
        text.append(token)
    return text[len(prompt) :]


PROMPTS = {
    "one token": [7],
    "some": [100, 101, 102, 32],
    "all but one": list(range(60, 75)),
    "full": list(range(60, 76)),
    "longer": list(range(60, 100)),
}


def two_halves_more(prompt: list[int]) -> int:
    """Number of tokens that fills a text twice; any other would compile another program."""
    return max(LONGEST - len(prompt), 0) + LONGEST


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_cache_gives_what_the_whole_prefix_gives(prompt):
    found = write(prompt, two_halves_more(prompt))
    assert found == written_without_cache(prompt, two_halves_more(prompt))
    assert len(set(found)) > 5  # a constant text would prove nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [TP3, TP4, SEQUENCE, GRID, PIPELINE, FOLDED, ZERO3],
    ids=["tp3", "tp4", "ep2 tp2 sp", "2x2", "pp2 tp2", "zb-v", "zero3"],
)
def test_every_layout_writes_the_same(layout):
    prompt = PROMPTS["some"]
    assert write(prompt, two_halves_more(prompt), *layout) == write(prompt, two_halves_more(prompt))


@pytest.mark.parametrize(
    "layout",
    [(), *map(slow, (TP3, TP4, GRID, BLOCKS, PIPELINE, CP2_TP2))],
    ids=str,
)
def test_groups_of_heads_that_are_turned_write_the_same(layout):
    """The cache holds rotated keys, of one kv head if devices outnumber them; windows are short."""
    prompt = PROMPTS["some"]
    found = write(prompt, two_halves_more(prompt), *QWEN, *layout)
    assert found == written_without_cache(prompt, two_halves_more(prompt), *QWEN)
    assert len(set(found)) > 5


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (BY_LAYER, ()),
        (WIDTHS, TP2),
        *(slow(model, ()) for model in (GEMMA, GPT_OSS)),
        *(slow(WIDTHS, x) for x in ((), GRID, PIPELINE, CP2_TP2)),
        *(slow(GPT_OSS, x) for x in (TP4, SEQUENCE, PIPELINE, CP2_TP2)),
        *(
            slow(model, x)
            for model in (BY_LAYER, GEMMA)
            for x in (TP4, GRID, PIPELINE, CP2_TP2, ULYSSES)
        ),
    ],
    ids=str,
)
def test_layers_of_two_kinds_write_the_same(model, layout):
    """Layers pick window, cap and angles by number, even in a pipeline; heads may have sinks."""
    prompt = PROMPTS["some"]
    found = write(prompt, two_halves_more(prompt), *model, *layout)
    assert found == written_without_cache(prompt, two_halves_more(prompt), *model)
    assert len(set(found)) > 5


@pytest.mark.parametrize(
    "layout",
    [ZERO3, REPLICAS, *map(slow, ((), SEQUENCE, (*PIPELINE, *ZERO3[1:]), (*TP2, *ZERO3[1:])))],
    ids=str,
)
def test_experts_write_the_same_on_every_layout(layout):
    prompt = PROMPTS["some"]
    found = write(prompt, two_halves_more(prompt), *EXPERTS, *layout)
    assert found == written_without_cache(prompt, two_halves_more(prompt), *EXPERTS)
    assert len(set(found)) > 5


@pytest.mark.parametrize("layout", [TP2, *map(slow, (SEQUENCE, PIPELINE, CP2_TP2))], ids=str)
def test_adapters_write_the_same_on_every_layout(layout):
    prompt, model = PROMPTS["some"], (*QWEN, "--model.lora.rank=3")
    found = write(prompt, two_halves_more(prompt), *model, *layout)
    assert found == written_without_cache(prompt, two_halves_more(prompt), *model)
    assert len(set(found)) > 5


@pytest.mark.parametrize(
    "layout", [(), TP2, *map(slow, (TP3, SEQUENCE, PIPELINE, CP2_TP2, ULYSSES))], ids=str
)
def test_a_cache_of_latent_vectors_writes_the_same(layout):
    """Training expands them to keys and values of all heads; the cache never does."""
    prompt = PROMPTS["some"]
    found = write(prompt, two_halves_more(prompt), *LATENT, *layout)
    assert found == written_without_cache(prompt, two_halves_more(prompt), *LATENT)
    assert len(set(found)) > 5
    caches = jax.eval_shape(make_program(*LATENT).resolved.blueprint.build, make_params(*LATENT))
    cache = jax.eval_shape(lambda: caches.empty_state(1))["blocks_1"]
    assert [x.shape[2:] for x in (cache.k, cache.v)] == [(LONGEST, 1, 10), (LONGEST, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [TP2, TP4, CP2_TP2, SEQUENCE, GRID, BLOCKS, ("--layout.cp=2", *GRID), *PIPELINES],
    ids=[
        *("tp2", "tp4", "cp2 tp2", "ep2 tp2 sp", "2x2", "2x4 blocks", "cp2 2x2"),
        *("pp2 dp2 tp2", "interleaved", "pp2 cp2", "pp2 2x2"),
    ],
)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_layout_writes_the_same_after_any_prompt(layout, prompt):
    assert write(prompt, 40, *layout) == written_without_cache(prompt, 40)


def test_so_many_tokens_as_asked_for():
    prompt = PROMPTS["some"]
    assert [len(write(prompt, tokens)) for tokens in (0, 1, 12, 20)] == [0, 1, 12, 20]


def ending(ends: tuple[int, ...], *overrides: str) -> Generator:
    return Generator(make_program(*overrides), VOCAB, GREEDY, ends)


@pytest.mark.parametrize(
    "layout", [(), *map(slow, (TP2, CP2_TP2, SEQUENCE, GRID, PIPELINE, FOLDED))], ids=str
)
def test_a_text_ends_where_an_end_is_drawn_and_nothing_is_computed_behind_it(layout):
    params, prompt = make_params(*layout), PROMPTS["some"]
    count = LONGEST - len(prompt)
    whole = written_without_cache(prompt, count + LONGEST)
    end = next(token for token in whole[2:] if token not in whole[:2])
    place = whole.index(end)
    made = ending((VOCAB + 5, end), *layout)
    assert 2 <= place < count  # the model does not run a second time
    assert made(params, prompt, count + LONGEST) == whole[:place]
    batch, given = made._batch([prompt]), np.full((count, 1), NONE, np.int32)
    ids = made._write(params, batch, made._keys([0], 1), given, np.int32(count))[:, 0]
    assert np.asarray(ids).tolist() == [*whole[:place], *[NONE] * (count - place)]


def test_an_end_that_is_drawn_first_adds_nothing_and_one_in_a_prompt_is_no_end(monkeypatch):
    monkeypatch.setattr("jaxptd.run.generator.SHAPES", 2)
    params, prompt = make_params(), PROMPTS["some"][:3]  # the last one is given
    first, other = written_without_cache(prompt, 1), written_without_cache(prompt[:2], 1)
    assert first != other != prompt[2:]  # this id is drawn where the last one is given
    assert ending((first[0],))(params, prompt, LONGEST - len(prompt)) == []
    assert [*ending((prompt[2], other[0])).generate_many(params, [prompt], [1])] == [(0, first)]
    assert [*ending((first[0],)).generate_many(params, [prompt], [1])] == [(0, [])]


# ---- sampling -------------------------------------------------------------------------------

FULL = PROMPTS["full"]  # continues from its half: one program


@pytest.mark.slow
def test_the_likeliest_one_is_greedy():
    greedy = write(FULL, 16)
    assert write(FULL, 16, sampling=Sampling(temperature=1, top_k=1)) == greedy
    assert write(FULL, 16, sampling=Sampling(temperature=1e-50)) == greedy
    assert write(FULL, 16, sampling=Sampling(temperature=1e-5)) == greedy


@pytest.mark.slow
def test_the_seed_decides():
    first = write(FULL, 16, sampling=Sampling(seed=1))
    assert write(FULL, 16, sampling=Sampling(seed=1)) == first
    assert write(FULL, 16, sampling=Sampling(seed=2)) != first


def drawn(logits: np.ndarray, sampling: Sampling, *, vocab_size: int) -> list[int]:
    """Ids drawn from the same logits with 200 keys."""
    generator = Generator(make_program(), vocab_size, sampling)
    draw = jax.shard_map(
        lambda logits, keys: jax.lax.map(lambda key: generator._draw(logits, key[None])[0], keys),
        mesh=make_program().mesh,
        in_specs=(P(), P()),
        out_specs=P(),
        check_vma=True,
    )
    keys = jax.random.split(jax.random.key(0), 200)
    return np.asarray(jax.jit(draw)(logits[None, None], keys)).tolist()


def test_only_the_k_likeliest_are_drawn_and_all_of_them():
    logits = np.array([0.0, 3.0, 1.0, 3.0, 2.0, -1.0], np.float32)
    assert set(drawn(logits, Sampling(2.0, top_k=3), vocab_size=6)) == {1, 3, 4}
    assert set(drawn(logits, Sampling(2.0, top_k=0), vocab_size=6)) == set(range(6))
    assert set(drawn(logits, Sampling(2.0, top_k=99), vocab_size=6)) == set(range(6))
    assert set(drawn(logits, Sampling(2.0, top_k=1), vocab_size=6)) == {1}  # the first of equals


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    counts = np.bincount(drawn(logits, Sampling(1.0, top_k=0), vocab_size=3))
    np.testing.assert_allclose(counts / 200, [0.1, 0.2, 0.7], atol=0.08)
    sharper = np.array([0.1, 0.2, 0.7]) ** 2 / np.sum(np.array([0.1, 0.2, 0.7]) ** 2)
    counts = np.bincount(drawn(logits, Sampling(0.5, top_k=0), vocab_size=3), minlength=3)
    np.testing.assert_allclose(counts / 200, sharper, atol=0.08)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sampling"),
    [(TP2, GREEDY), (TP4, Sampling(1.0, top_k=0)), (TP4, Sampling(1.0, top_k=5))],
    ids=["greedy", "all", "k"],
)
def test_padding_is_never_drawn(layout, sampling):
    """Logits of all tokens are negative; those of padding are 0."""
    program = make_program(*layout)
    held = program.infos["tokens.table"].stored_shape
    assert held[0] > VOCAB
    params = {name: jnp.zeros_like(p) for name, p in make_params(*layout).items()}
    params["norm.b"] = jnp.ones_like(params["norm.b"])
    params["tokens.table"] = jnp.where(
        jnp.arange(held[0])[:, None] < VOCAB, -2.0, params["tokens.table"]
    )
    found = Generator(program, VOCAB, sampling)(params, FULL, 8)
    assert max(found) < VOCAB


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**32},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
    ],
    ids=str,
)
def test_what_cannot_be_sampled_with(options):
    (field,) = options
    with pytest.raises(UserError, match=f"{field}={options[field]} must be "):
        Sampling(**options)


PENALTIES = [Sampling(0, repetition_penalty=each) for each in (1.5, 0.7)]


@pytest.mark.parametrize("sampling", PENALTIES, ids=["less likely", "more likely"])
def test_tokens_of_prompt_and_text_are_penalised(sampling):
    prompt, tokens = list(b"def "), 12
    text = list(prompt)
    for _ in range(tokens):
        ids = np.pad(np.array(text, np.int32), (0, LONGEST - len(text)))
        logits = np.array(next_logits()(ids, len(text)), np.float32)[:VOCAB]
        for token in set(text):
            by = np.float32(sampling.repetition_penalty)
            logits[token] = logits[token] * by if logits[token] < 0 else logits[token] / by
        text.append(int(np.argmax(logits)))
    assert write(prompt, tokens, sampling=sampling) == text[len(prompt) :]
    assert write(prompt, tokens) != text[len(prompt) :]


@pytest.mark.parametrize(
    "layout", [CP2_TP2, slow(PIPELINE), slow(GRID), slow(ZERO3), slow(REPLICAS)], ids=str
)
def test_every_layout_draws_the_same_with_all_settings(layout):
    sampling = Sampling(1.2, 30, 3, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    assert write(FULL, 12, *layout, sampling=sampling) == write(FULL, 12, sampling=sampling)


# ---- several texts ------------------------------------------------------------------------------

SEVERAL = [PROMPTS["some"], [7], [100, 101], [1, 2, 3], PROMPTS["some"][::-1]]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ((), ()),
        ((), (*TP2, "--layout.dp=2", "--layout.zero=3")),
        *(slow((), x) for x in (TP3, SEQUENCE, GRID, CP2_TP2, FOLDED, PIPELINES[0])),
        *(slow(EXPERTS, x) for x in (ZERO3, REPLICAS, SEQUENCE)),
        *(slow(LATENT, x) for x in (TP2, PIPELINE)),
    ],
    ids=str,
)
def test_texts_side_by_side_are_those_of_calls(model, layout):
    """Some end early, at an id that another one's prompt may have; each has its own random ids."""
    sampling, options = Sampling(temperature=1.5, repetition_penalty=1.2), (*model, *layout)
    tokens = [LONGEST - len(prompt) for prompt in SEVERAL]
    whole = [write(*each, *model, sampling=sampling) for each in zip(SEVERAL, tokens, strict=True)]
    end = next(token for token in whole[0][2:6] if token not in whole[0][:2] + whole[1])
    made = Generator(make_program(*options), VOCAB, sampling, (end,))
    found = dict(made.generate_many(make_params(*options), SEVERAL, tokens))
    cut = [text[: text.index(end)] if end in text else text for text in whole]
    assert [found[number] for number in range(len(SEVERAL))] == cut
    assert len(cut[0]) < tokens[0]
    assert len(cut[1]) == tokens[1]


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ((), ()),
        ((), PIPELINE),
        *(slow((), x) for x in (TP3, SEQUENCE, GRID, CP2_TP2, FOLDED, BLOCKS, ULYSSES)),
        *(slow(EXPERTS, x) for x in (ZERO3, REPLICAS, SEQUENCE)),
        *(slow(LATENT, x) for x in (TP2, PIPELINE)),
    ],
    ids=str,
)
def test_a_stream_gives_the_tokens_of_a_call_on_every_layout(model, layout):
    """A full text goes on from its half, so that two texts of several chunks are met."""
    sampling, prompt = Sampling(temperature=1), PROMPTS["some"]
    tokens, options = two_halves_more(prompt), (*model, *layout)
    stream = generator(sampling, *options).stream
    chunks = list(stream(make_params(*options), prompt, tokens))
    found = [token for ids in chunks for token in ids]
    assert found == write(prompt, tokens, *model, sampling=sampling)
    assert max(map(len, chunks)) == CHUNK < len(found)
    assert len(set(found)) > 5


def test_a_stream_draws_with_all_settings():
    sampling = Sampling(1.2, 30, 3, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    chunks = generator(sampling, *TP2).stream(make_params(*TP2), FULL, 12)
    assert [token for ids in chunks for token in ids] == write(FULL, 12, sampling=sampling)


def test_a_stream_ends_at_an_end_and_asks_the_model_for_no_more():
    prompt = PROMPTS["some"]
    whole = written_without_cache(prompt, 12)
    end = next(token for token in whole[2:] if token not in whole[:2])
    assert whole.index(end) < CHUNK < LONGEST - len(prompt)  # a second chunk has room
    found = list(ending((end,)).stream(make_params(), prompt, 12 + LONGEST))
    assert found == [whole[: whole.index(end)]]


# ---- text -----------------------------------------------------------------------------------


def text(prompt: str, tokens: int = 5) -> str:
    return Writer(make_program(), make_params(), ByteTokenizer(), GREEDY)(prompt, tokens)


@pytest.mark.slow
def test_text_begins_with_its_prompt():
    ids = write(list(b"def "), 5)
    assert text("def ") == "def " + ByteTokenizer().decode(ids)


def test_an_empty_prompt_starts_a_document():
    assert text("") == ByteTokenizer().decode(write([256], 5))


def test_a_prompt_that_the_model_has_no_ids_for():
    program = make_program("--model.vocab_size=64")
    with pytest.raises(
        UserError, match="has id 102, but the model knows only 0 to 63; leave 'f' out"
    ):
        Writer(program, {}, ByteTokenizer(), GREEDY)("def ", 1)
