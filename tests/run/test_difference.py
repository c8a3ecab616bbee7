"""Configs describe the same run if one spells out a value that is null in the other."""

import dataclasses

from jaxptd.config import Config, ModelConfig
from jaxptd.run.folder import difference


def with_model(**fields) -> Config:
    return Config(model=ModelConfig(hidden_size=16, **fields))


def test_a_field_that_spells_out_what_null_stands_for_is_the_same():
    plain, spelled = with_model(), with_model(ffn_hidden_size=64, norm="layernorm", gated=False)
    assert difference(spelled, plain) is None
    assert difference(plain, spelled) is None
    other = dataclasses.replace(spelled, model=with_model(ffn_hidden_size=48).model)
    assert difference(other, plain) == "model.ffn_hidden_size is 48, was None"
