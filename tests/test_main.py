"""`jaxptd`: the list of commands, the version, unknown names, and a quick start."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxptd
from jaxptd.__main__ import main
from jaxptd.commands.table import COMMANDS
from jaxptd.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--help-all"]])
def test_without_a_command_it_lists_them_with_a_line_each(capsys, argv):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS:
        assert [line for line in lines if line.split() == [command.name, *command.summary.split()]]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(capsys, option):
    assert main([option]) == 0
    assert capsys.readouterr().out.startswith(f"jaxptd {jaxptd.__version__} (jax ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian", "unknown command 'trian'; did you mean train?"),
        ("pipelines", "did you mean pipeline?"),
        ("zzz", "use one of train, launch, "),
        ("", "unknown command ''"),
        ("--verison", "unknown command '--verison'"),
        ("x" * 10_000, "use one of"),
    ],
)
def test_an_unknown_command_names_the_nearest(name, words):
    with pytest.raises(UserError) as caught:
        main([name])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_command_gets_the_other_arguments(capsys):
    main(["mesh", "--world-size", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["dp"] == [[0, 1]]


def test_every_command_can_be_loaded_and_has_a_parser():
    for command in COMMANDS:
        module = command.load()
        assert callable(module.main)
        assert module.parser().prog == f"jaxptd {command.name}"


def test_the_console_script_is_this_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jaxptd": "jaxptd.__main__:run"}


def test_only_the_module_that_is_asked_for_is_imported():
    code = (
        "import sys; from jaxptd.__main__ import main; main([]); main(['--version']);"
        "heavy = {'jax', 'numpy', 'flax', 'rich', 'jaxptd.train', 'jaxptd.mesh'};"
        "print(sorted(heavy & set(sys.modules)));"
        "main(['mesh', '--help'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "\n[]\n" in ended.stdout
    assert ended.stdout.count("usage: ") == 2, ended.stderr


def test_as_a_module():
    command = [sys.executable, "-m", "jaxptd", "meshh"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    line = "error: unknown command 'meshh'; did you mean mesh?\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe'"),
        ("JAX_NUM_CPU_DEVICES", "x", 'Invalid value "x"'),
    ],
)
@pytest.mark.parametrize("module", [["jaxptd", "mesh"], ["jaxptd.mesh"]], ids=" ".join)
def test_a_variable_that_jax_does_not_accept_is_a_line(name, value, words, module):
    """JAX raises on import, inside whichever command is called."""
    ended = subprocess.run(
        [sys.executable, "-m", *module, "--world-size", "4"],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"error: the environment has {name}={value}: {words}")
    assert ended.stderr.endswith("; unset or fix it\n")


def test_a_variable_that_jax_does_not_accept_is_a_user_error_in_python():
    program = "import jaxptd\ntry: jaxptd.make_mesh\nexcept jaxptd.UserError as error: print(error)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_ENABLE_X64": "maybe"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("the environment has JAX_ENABLE_X64=maybe: invalid truth")


def test_another_error_of_a_module_that_is_run_keeps_its_traceback():
    program = (
        "import sys; sys.argv[0] = '-m'; import jaxptd; sys.argv[0] = 'x'; raise ValueError('own')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: own\n")
    assert ended.stderr.startswith("Traceback")
