"""Completion scripts, generated once; bash runs the one for bash."""

import argparse
import re
import subprocess

import pytest

from jaxptd.commands.completion import SCRIPTS, completion_script, main
from jaxptd.commands.table import COMMANDS
from jaxptd.config.files import packaged_configs


@pytest.fixture(scope="module")
def scripts():
    """Completion script of each shell."""
    return {shell: completion_script(shell) for shell in SCRIPTS}


def completed(script: str, *words: str) -> list[str]:
    """Completions that bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jaxptd\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_bash_completes_commands_options_and_values(scripts):
    bash = scripts["bash"]
    names = [command.name for command in COMMANDS]
    assert completed(bash, "jaxptd", "") == [*names, "--help", "--version"]
    assert completed(bash, "jaxptd", "pi") == ["pipeline"]
    assert completed(bash, "jaxptd", "train", "--layout.z") == ["--layout.zero"]
    assert completed(bash, "jaxptd", "train", "--layout.zero", "") == ["0", "1", "2", "3"]
    assert completed(bash, "jaxptd", "train", "--model.gated", "") == ["true", "false", "null"]
    assert completed(bash, "jaxptd", "plan", "--model.norm", "n") == ["null"]
    assert completed(bash, "jaxptd", "generate", "--platform", "c") == ["cpu"]
    assert completed(bash, "jaxptd", "verify", "--config", "quick") == ["quickstart"]
    assert completed(bash, "jaxptd", "completion", "") == ["bash", "zsh", "fish"]
    assert completed(bash, "jaxptd", "mesh", "READ") == []  # bash itself completes files


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_command_and_every_option_is_in_every_script(scripts, shell):
    script = scripts[shell]
    for command in COMMANDS:
        assert command.name in script
        shown = [x for x in command.load().parser()._actions if x.help != argparse.SUPPRESS]
        options = [name for action in shown for name in action.option_strings]
        names = [name for name in options if name.startswith("--") and not name.endswith("+")]
        sections = {name.partition(".")[0] for name in names if "." in name}
        for name in set(names) - sections:
            spelled = name if shell != "fish" else f"-l {name.removeprefix('--')}"
            assert re.search(rf"(?<!\w){spelled}(?![\w.-])", script), name
    for name in packaged_configs():
        assert name in script


def test_words_of_a_help_text_that_a_shell_would_read_are_quoted(scripts):
    assert "source'\\''s" not in scripts["bash"]
    assert "Python standard library'\\''s source text" in scripts["fish"]
    assert "Python standard library'\\''s source text" in scripts["zsh"]


def test_the_command_prints_a_script(scripts, capsys):
    main(["fish"])
    assert capsys.readouterr().out == scripts["fish"]
