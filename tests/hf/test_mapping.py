"""Every tensor of a file is mapped, or known to hold no parameter, or named in an error."""

import re

import pytest

from jaxptd.errors import UserError
from jaxptd.hf.mapping import map_tensors, rules_of, tensors_of

D, V, T, L = 4, 11, 6, 2
OURS = {
    "tokens.table": (V, D),
    "positions.table": (T, D),
    "norm.w": (D,),
    "blocks.mlp.down.b": (L, D),
}
FOUND = {
    "transformer.wte.weight": [V, D],
    "transformer.wpe.weight": [T, D],
    "transformer.ln_f.weight": [D],
    "transformer.h.0.mlp.c_proj.bias": [D],
    "transformer.h.1.mlp.c_proj.bias": [D],
}


def mapped(found: dict):
    return map_tensors("gpt", OURS, found, where="DIR")


def refusal(found: dict) -> str:
    with pytest.raises(UserError) as error:
        mapped(found)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_names_are_those_of_the_file() -> None:
    assert set(mapped(FOUND).names.values()) == set(FOUND)
    short = {name.removeprefix("transformer."): shape for name, shape in FOUND.items()}
    assert set(mapped(short).names) == set(FOUND)
    assert set(mapped(short).names.values()) == set(short)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_are_ignored_by_name(prefix: str) -> None:
    masks = {f"{prefix}h.1.attn.bias": [1, 1, T, T], f"{prefix}h.0.attn.masked_bias": []}
    assert mapped(FOUND | masks).ignored == list(masks)


def test_a_longer_table_of_positions_is_cut_but_no_other() -> None:
    assert mapped(FOUND | {"transformer.wpe.weight": [T + 3, D]})
    line = refusal(FOUND | {"transformer.wpe.weight": [T - 1, D]})
    assert line.startswith("DIR: transformer.wpe.weight is [5, 4], but the model needs [6, 4]; ")
    line = refusal(FOUND | {"transformer.wte.weight": [V + 1, D]})
    assert line.startswith("DIR: transformer.wte.weight is [12, 4], but the model needs [11, 4]; ")


@pytest.mark.parametrize("shape", [[], [D], [V, D, 1], [D, V]])
def test_another_shape_is_refused_by_name(shape: list[int]) -> None:
    line = refusal(FOUND | {"transformer.wte.weight": shape})
    assert line.startswith(f"DIR: transformer.wte.weight is {shape}, but the model needs [11, 4]; ")


def test_what_nobody_asked_for_is_refused_by_name() -> None:
    line = refusal(FOUND | {"transformer.h.2.mlp.c_proj.bias": [D], "score.weight": [D]})
    assert line.startswith("DIR has transformer.h.2.mlp.c_proj.bias, score.weight, unknown to ")
    many = {f"lora.{i}\n": [1] for i in range(9)}
    assert "lora.0\\n, lora.1\\n, lora.2\\n and 6 more" in refusal(FOUND | many)


def test_what_is_missing_is_named() -> None:
    found = {name: shape for name, shape in FOUND.items() if ".1." not in name}
    assert refusal(found).startswith("DIR has no tensor transformer.h.1.mlp.c_proj.bias; use a ")


def test_a_tensor_with_and_without_its_prefix_is_one_too_many() -> None:
    line = refusal(FOUND | {"wte.weight": [V, D]})
    assert (
        line == "DIR has transformer.wte.weight and wte.weight, two names of one tensor; remove one"
    )


def test_parameters_and_families_without_a_place_are_named() -> None:
    with pytest.raises(
        UserError, match=r"model.family=bloom has no Hugging Face format; use one of"
    ):
        rules_of("bloom", {})
    with pytest.raises(UserError, match=r"mlp.gate.w has no counterpart in .*model.family=gpt; "):
        rules_of("gpt", {"mlp.gate.w": (2,)})


def test_a_prefix_may_be_there_twice() -> None:
    longer = {f"transformer.{name}": shape for name, shape in FOUND.items()}
    assert set(mapped(longer).names.values()) == set(longer)
    assert "two names of one tensor; remove one" in refusal(FOUND | longer)


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached"])
@pytest.mark.parametrize("prefix", ["", "layers.11.self_attn."])
def test_what_old_files_keep_of_rotations_is_left_out(name: str, prefix: str) -> None:
    (pattern,) = tensors_of("llama").ignored
    assert re.fullmatch(pattern, f"{prefix}rotary_emb.{name}")
