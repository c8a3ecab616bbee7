"""Unknown argument names: one line, with the name that was meant."""

import copy
import dataclasses
import inspect

import pytest

import jaxptd
from jaxptd import Config, Layout, ModelConfig, OptimizerConfig, TrainConfig, UserError
from jaxptd.errors import ArgumentError
from jaxptd.fields import checked

ROWS = [
    (lambda: Layout(tpp=2), "Layout has no field tpp; did you mean tp?"),
    (lambda: Layout(seq_parallel=True), "no field seq_parallel; did you mean sequence_parallel?"),
    (lambda: Layout(steps=2), "Layout has no field steps; see help(jaxptd.Layout)"),
    (lambda: ModelConfig(num_layer=2), "ModelConfig has no field num_layer; did you mean num_lay"),
    (lambda: TrainConfig(step=2), "TrainConfig has no field step; did you mean steps?"),
    (lambda: OptimizerConfig(learn_rate=1.0), "no field learn_rate; did you mean learning_rate?"),
    (lambda: jaxptd.DataConfig(sources=()), "DataConfig has no field sources; did you mean source"),
    (lambda: jaxptd.CheckpointConfig(evry=2), "no field evry; did you mean every?"),
    (lambda: jaxptd.ProcessesConfig(cont=2), "ProcessesConfig has no field cont; did you mean cou"),
    (lambda: Config(modle=ModelConfig()), "Config has no field modle; did you mean model?"),
    (lambda: Config(tp=2), "no field tp; it is a field of layout: layout=Layout(tp=...)"),
    (lambda: dataclasses.replace(Layout(), tpp=2), "Layout has no field tpp; did you mean tp?"),
    (lambda: Layout(**{"x" * 999: 2}), "xxx...; see help(jaxptd.Layout)"),
    (
        lambda: jaxptd.from_hf("m", layot=Layout()),
        "no argument layot; did you mean layout?",
    ),
    (lambda: jaxptd.from_hf("m", seq_len=8), "no argument seq_len; did you mean seq_length?"),
    (lambda: jaxptd.from_hf("m", zz=8), "no argument zz; see help(jaxptd.ModelConfig)"),
    (lambda: jaxptd.plan(Config(), gpuz=8), "jaxptd.plan has no argument gpuz; did you mean gpu"),
    (lambda: jaxptd.simulate(devises=8), "simulate has no argument devises; did you mean devices?"),
    (lambda: jaxptd.simulate(8, x=1), "jaxptd.simulate has no argument x; its arguments are dev"),
    (lambda: jaxptd.plan(Config()), "jaxptd.plan: missing a required"),
    (lambda: jaxptd.simulate(8, 9), "jaxptd.simulate: too many positional arguments; see help(jax"),
    (lambda: jaxptd.load_config("test-tiny", override=[]), "load_config has no argument override"),
]


@pytest.mark.parametrize(("call", "words"), ROWS, ids=[words for _, words in ROWS])
def test_a_name_that_is_no_argument_is_one_line(call, words) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 240
    with pytest.raises(TypeError):  # like Python's error
        call()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--layout.tpp=2", "unknown key layout.tpp; did you mean layout.tp?"),
        ("layout.tp=2", "unknown key layout.tp; write --layout.tp"),
        ("--tp=2", "unknown key tp; did you mean layout.tp?"),
        ("unheard", "unknown key unheard; see jaxptd train --help-all"),
    ],
)
def test_an_override_that_is_no_field_names_the_one_that_is_meant(option, words) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        jaxptd.load_config("test-tiny", [option])


def test_all_configs_say_it() -> None:
    sections = [field.type for field in dataclasses.fields(Config)]
    for each in (Config, *sections):
        with pytest.raises(ArgumentError, match=f"{each.__name__} has no field zz"):
            each(zz=1)


def test_right_arguments_make_what_they_made() -> None:
    layout = Layout(1, 2, tp=4)
    assert (layout.dp, layout.tp) == (2, 4) and layout == copy.deepcopy(layout)
    assert next(iter(inspect.signature(Layout).parameters)) == "pp"
    assert "self" not in str(inspect.signature(Layout))


def test_the_error_of_a_function_itself_is_its_own() -> None:
    @checked("f")
    def f(number: int) -> int:
        raise TypeError(f"{number} inside")

    with pytest.raises(TypeError, match=r"^1 inside$") as caught:
        f(1)
    assert not isinstance(caught.value, UserError)
