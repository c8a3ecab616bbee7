"""Rules for Hugging Face tensors invert exactly, whole and in slices, without a device."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxptd.errors import UserError
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import (
    FAMILIES,
    Tensors,
    bert,
    deepseek,
    experts,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    olmo,
    t5,
)
from jaxptd.hf.mapping import rules_of

L, D, F, N, K, H, V, T, E = 3, 10, 14, 4, 2, 6, 13, 8, 4
NORMS = {"attention_norm.w": (D,), "mlp_norm.w": (D,)}
TABLES = {"tokens.table": (V, D), "norm.w": (D,)}
HEAD = {"head.table": (V, D)}
GPT2_ENDS = {"norm.b": (D,), "positions.table": (T, D)}
GPT2_BLOCK = {
    **NORMS,
    "attention_norm.b": (D,),
    "mlp_norm.b": (D,),
    "attention.qkv.w": (D, 3, N, H),
    "attention.qkv.b": (3, N, H),
    "attention.out.w": (N, H, D),
    "attention.out.b": (D,),
    "mlp.up.w": (D, F),
    "mlp.up.b": (F,),
    "mlp.down.w": (F, D),
    "mlp.down.b": (D,),
}
LLAMA_BLOCK = {
    **NORMS,
    "attention.qkv.w": (D, 3, N, H),
    "attention.qkv.b": (3, N, H),
    "attention.q.w": (D, N, H),
    "attention.q.b": (N, H),
    "attention.kv.w": (D, 2, K, H),
    "attention.kv.b": (2, K, H),
    "attention.q_norm.w": (H,),
    "attention.k_norm.w": (H,),
    "attention.out.w": (N, H, D),
    "attention.out.b": (D,),
    "mlp.up.w": (D, 2, F),
    "mlp.up.b": (2, F),
    "mlp.down.w": (F, D),
    "mlp.down.b": (D,),
}


BERT_ENDS = {
    **GPT2_ENDS,
    "types.w": (2, D),
    "transform.w": (D, D),
    "transform.b": (D,),
    "transform_norm.w": (D,),
    "transform_norm.b": (D,),
    "bias.b": (V,),
    "pooler.w": (D, D),
    "pooler.b": (D,),
    "pairs.table": (2, D),
    "pairs_bias.b": (2,),
}


def shapes(block: dict[str, tuple[int, ...]], **others: tuple[int, ...]) -> dict:
    return {**TABLES, **others, **{f"blocks.{name}": (L, *shape) for name, shape in block.items()}}


def t5_shapes(up: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Stacks of an encoder, and of a decoder with one layer less."""
    layer = {name: x for name, x in GPT2_BLOCK.items() if name.endswith(".w")} | {"mlp.up.w": up}
    cross = {"q.w": (D, N, H), "kv.w": (D, 2, N, H), "out.w": (N, H, D)}
    decoder = {**layer, "cross_norm.w": (D,), **{f"cross.{name}": x for name, x in cross.items()}}
    return {
        **TABLES,
        **HEAD,
        "common.source_norm.w": (D,),
        **{f"common.{name}_bias.table": (T, N) for name in ("encoder", "decoder")},
        **{f"encoder.{name}": (L, *x) for name, x in layer.items()},
        **{f"decoder.{name}": (L - 1, *x) for name, x in decoder.items()},
    }


def fused(tensors: Tensors) -> Tensors:
    """The tensors of the other form."""
    return dataclasses.replace(tensors, rules=tensors.alternatives)


OF_EXPERTS = {
    "blocks.mlp.up.w": (L, E, D, 2, F),
    "blocks.mlp.down.w": (L, E, F, D),
}
EXPERTS = {"blocks.mlp.router.w": (L, D, E), **OF_EXPERTS}
SHARED = {
    "blocks.mlp.shared.up.w": (L, D, 2, F),
    "blocks.mlp.shared.down.w": (L, F, D),
    "blocks.mlp.shared_gate.w": (L, D, 1),
}
SHAPES = {
    "gpt2": (gpt2.TENSORS, shapes(GPT2_BLOCK, **HEAD, **GPT2_ENDS)),
    "llama": (llama.TENSORS, shapes(LLAMA_BLOCK, **HEAD)),
    "bert": (bert.TENSORS, shapes(GPT2_BLOCK, **BERT_ENDS)),
    "t5": (t5.TENSORS, t5_shapes((D, F))),
    "t5-1.1": (t5.TENSORS, t5_shapes((D, 2, F))),
    "mixtral": (experts.MIXTRAL_TENSORS, EXPERTS),
    "mixtral-fused": (fused(experts.MIXTRAL_TENSORS), OF_EXPERTS),
    "qwen2_moe": (experts.QWEN2_TENSORS, EXPERTS | SHARED),
    "dots1": (
        experts.DOTS1_TENSORS,
        {name: shape for name, shape in SHARED.items() if "gate" not in name}
        | {"blocks.mlp.router.load_bias": (L, E)},
    ),
    "olmoe": (
        experts.OLMOE_TENSORS,
        {"blocks.attention.q_norm.w": (L, N, H), "blocks.attention.k_norm.w": (L, K, H)},
    ),
    "gemma3_text": (
        gemma.TENSORS,
        {f"blocks.{name}_output_norm.w": (L, D) for name in ("attention", "mlp")}
        | {"norm.w": (D,)},
    ),
    "gpt_oss": (
        gpt_oss.TENSORS,
        EXPERTS
        | {
            "blocks.attention.sinks": (L, N),
            "blocks.mlp.router.b": (L, E),
            "blocks.mlp.up.b": (L, E, 2, F),
            "blocks.mlp.down.b": (L, E, D),
        },
    ),
    "granitemoe": (experts.GRANITE_TENSORS, EXPERTS),
    "deepseek_v3": (
        deepseek.V3_TENSORS,
        {
            "blocks.attention.q_latent.w": (L, D, 8),
            "blocks.attention.q_latent.norm.w": (L, 8),
            "blocks.attention.q_up.w": (L, 8, N, H),
            "blocks.attention.kv_latent.w": (L, D, 9),
            "blocks.attention.kv_latent.norm.w": (L, 7),
            "blocks.attention.kv_up.w": (L, 7, N, 5),
            "blocks.attention.out.w": (L, N, 3, D),
            "blocks.mlp.router.load_bias": (L, E),
        },
    ),
    "deepseek_v2": (deepseek.V2_TENSORS, {"blocks.attention.q.w": (L, D, N, H)}),
    "qwen3_moe-fused": (fused(experts.QWEN3_TENSORS), OF_EXPERTS),
}
CASES = [
    pytest.param(tensors, name, shape, id=f"{family}-{name}")
    for family, (tensors, ours) in SHAPES.items()
    for name, shape in ours.items()
]
EACH = pytest.mark.parametrize(("tensors", "name", "shape"), CASES)


def rules_for(tensors: Tensors, name: str, rank: int | None = None) -> list[Rule]:
    """The rules of a parameter with this many dims, or any number."""
    return [r for r in tensors.rules if r.ours == name and rank in (None, r.rank)]


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


class Counted:
    """A tensor that counts the elements read from it."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.read = x, 0

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        found = self.x[slices]
        self.read += found.size
        return found


def read_back(rules: list[Rule], shape: tuple[int, ...], index: list[tuple[int, int]]) -> tuple:
    """A slice of a numbered parameter, read from its tensors, and the count of elements read."""
    x = numbered(shape)
    found, read = np.full([end - begin for begin, end in index], np.nan), 0
    for rule in rules:
        tensors = {name: Counted(t) for name, t in rule.tensors(x).items()}
        for numbers in np.ndindex(*shape[: rule.numbered]):
            tensor = tensors[rule.tensor_at(numbers)]
            assert tensor.x.shape == rule.shape(shape), rule.name
            place: list = [slice(None)] * len(shape)
            held = list(zip(numbers, index, strict=False))
            if not all(begin <= number < end for number, (begin, end) in held):
                continue
            place[: rule.numbered] = [number - begin for number, (begin, _) in held]
            if rule.entry:
                dim, number = rule.entry
                if not index[dim][0] <= number < index[dim][1]:
                    continue
                place[dim] = number - index[dim][0]
            found[tuple(place)] = rule.read(tensor, shape, rule.ranges(index))
            read += tensor.read
    return found, read


@EACH
def test_a_parameter_is_all_of_its_tensors(tensors, name, shape) -> None:
    rules = rules_for(tensors, name, len(shape))
    whole = [(0, size) for size in shape]
    found, read = read_back(rules, shape, whole)
    np.testing.assert_array_equal(found, numbered(shape))
    assert read == math.prod(shape)
    names = [each for rule in rules for each in rule.names(shape)]
    assert len(set(names)) == len(names)


@EACH
def test_any_slice_is_read_alone(tensors, name, shape) -> None:
    """A slice of one dim reads only its elements, plus at most half a rotated pair."""
    for dim, size in enumerate(shape):
        for begin, end in itertools.combinations(range(size + 1), 2):
            index = [(0, n) for n in shape]
            index[dim] = (begin, end)
            found, read = read_back(rules_for(tensors, name, len(shape)), shape, index)
            cut = tuple(slice(*each) for each in index)
            np.testing.assert_array_equal(found, numbered(shape)[cut])
            assert read <= found.size * (1 + 1 / (end - begin) * 2 * (shape[dim] == H))
            assert read == found.size or begin % 2 or end % 2


def test_a_slice_of_several_dims_is_read_alone() -> None:
    shape = (L, D, 3, N, H)
    index = [(1, 3), (2, 7), (1, 3), (1, 2), (2, 4)]
    for tensors in (gpt2.TENSORS, llama.TENSORS):
        found, read = read_back(rules_for(tensors, "blocks.attention.qkv.w"), shape, index)
        expected = numbered(shape)[tuple(slice(*each) for each in index)]
        np.testing.assert_array_equal(found, expected)
        assert read == expected.size


def test_rotated_pairs_are_neighbours_of_ours_and_half_a_head_apart_in_theirs() -> None:
    (rule,) = rules_for(llama.TENSORS, "blocks.attention.q_norm.w")
    (first, *_) = rule.tensors(np.arange(L * H).reshape(L, H)).values()
    assert first.tolist() == [0, 2, 4, 1, 3, 5]
    for tensors in (experts.OLMOE_TENSORS, olmo.TENSORS):  # a norm of all heads
        for name, heads in (("q_norm.w", N), ("k_norm.w", K)):
            (rule,) = rules_for(tensors, f"blocks.attention.{name}", 3)
            (first, *_) = rule.tensors(np.arange(L * heads * H).reshape(L, heads, H)).values()
            assert first.tolist() == [6 * n + i for n in range(heads) for i in (0, 2, 4, 1, 3, 5)]


def test_gpt2_multiplies_by_columns_and_llama_by_rows() -> None:
    w_LDF = numbered((L, D, F))
    (rule,) = rules_for(gpt2.TENSORS, "blocks.mlp.up.w")
    np.testing.assert_array_equal(rule.tensors(w_LDF)["transformer.h.1.mlp.c_fc.weight"], w_LDF[1])
    gate, up = rules_for(llama.TENSORS, "blocks.mlp.up.w")
    w_LD2F = numbered((L, D, 2, F))
    name = "model.layers.2.mlp.{}_proj.weight"
    np.testing.assert_array_equal(gate.tensors(w_LD2F)[name.format("gate")], w_LD2F[2, :, 0].T)
    np.testing.assert_array_equal(up.tensors(w_LD2F)[name.format("up")], w_LD2F[2, :, 1].T)


def test_queries_keys_and_values_are_where_they_are_multiplied() -> None:
    """A head's scores are the same with either order of its features."""
    rng = np.random.default_rng(0)
    w_LDNH, w_LD2KH, x_TD = (
        rng.integers(-9, 10, shape) for shape in ((1, D, N, H), (1, D, 2, K, H), (T, D))
    )
    by_name = {
        name: tensor
        for ours, x in (("q", w_LDNH), ("kv", w_LD2KH))
        for rule in rules_for(llama.TENSORS, f"blocks.attention.{ours}.w")
        for name, tensor in rule.tensors(x).items()
    }
    q, k, v = (x_TD @ by_name[f"model.layers.0.self_attn.{c}_proj.weight"].T for c in "qkv")
    q_TNH, k_TKH, v_TKH = q.reshape(T, N, H), k.reshape(T, K, H), v.reshape(T, K, H)
    ours_TNH = np.einsum("TD,DNH->TNH", x_TD, w_LDNH[0])
    ours_T2KH = np.einsum("TD,DCKH->TCKH", x_TD, w_LD2KH[0])
    group = [n // (N // K) for n in range(N)]
    scores = np.einsum("TNH,SNH->NTS", q_TNH, k_TKH[:, group])
    expected = np.einsum("TNH,SNH->NTS", ours_TNH, ours_T2KH[:, 0, group])
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(v_TKH, ours_T2KH[:, 1])


def test_every_family_has_tensors() -> None:
    families = FAMILIES.values()
    assert [each.name for each in families] == [
        "gpt",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "bert",
        "t5",
        "swin",
        "swin-unet",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "dots1",
        "granitemoe",
        "olmoe",
        "olmo2",
        "olmo3",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
    ]
    for family in families:
        names = [rule.name for rule in family.tensors.rules]
        heads = ("lm_head.", "cls.", "classifier.")
        assert all(name.startswith((family.tensors.prefix, *heads)) for name in names)


def test_rules_are_those_of_a_parameter_s_dims() -> None:
    """A gate, stored as entry 0, adds a dim to the matrix."""
    found = [
        {rule.name.rpartition(".")[0][-4:]: rule.entry for rule in rules}
        for rules in (rules_for(t5.TENSORS, "encoder.mlp.up.w", rank) for rank in (3, 4))
    ]
    assert found == [{"e.wi": None}, {"wi_0": (2, 0), "wi_1": (2, 1)}]
    (rule,) = rules_of("t5", {"encoder.mlp.up.w": (L, D, F)})["encoder.mlp.up.w"]
    assert rule.name.endswith(".wi.weight")
    with pytest.raises(
        UserError, match=r"blocks.mlp.up.w has no counterpart in .*model.family=gpt; "
    ):
        rules_of("gpt", {"blocks.mlp.up.w": (L, D, 2, F)})
