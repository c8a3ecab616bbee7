"""Prints a completion script for bash, zsh or fish, made from the options of every command.

A script lists the options of this version: generate it again after an update.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from jaxptd.commands.help import first_words, is_shown
from jaxptd.commands.table import COMMANDS
from jaxptd.config.files import choices_of, packaged_configs
from jaxptd.errors import Parser, run_command

# ---- scripts -------------------------------------------------------------------------------------

Choices = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """One spelling of an option.

    Args:
        name: such as `--layout.tp`.
        help: a few words.
        takes_value: whether a value follows.
        choices: the values, if they can be listed.
        files: whether the value may be a file.
    """

    name: str
    help: str
    takes_value: bool
    choices: Choices
    files: bool


@dataclasses.dataclass(frozen=True)
class Completed:
    """A command, its options, and its positional words."""

    name: str
    summary: str
    options: Sequence[Option]
    words: Choices


def _quoted(text: str) -> str:
    """A word in single quotes, for any of the shells."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- bash ---------------------------------------------------------------------------------------

_BASH = """\
_jaxptd() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" words
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@commands" -- "$current"))
        return
    fi
    case "${COMP_WORDS[1]} $previous" in
@values
    esac
    case "${COMP_WORDS[1]} $current" in
@words
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _jaxptd jaxptd
"""


def bash(commands: Sequence[Completed]) -> str:
    """The script for bash."""
    values, words = [], []
    for command in commands:
        for option in command.options:
            if option.choices:
                values.append(_bash_values(command.name, option))
        names = " ".join(option.name for option in command.options)
        words.append(f'        "{command.name} -"*) words="{names}" ;;')
        if command.words:
            words.append(f'        "{command.name} "*) words="{" ".join(command.words)}" ;;')
    names = " ".join([*(command.name for command in commands), "--help", "--version"])
    text = _BASH.replace("@commands", names)
    return text.replace("@values", "\n".join(values)).replace("@words", "\n".join(words))


def _bash_values(command: str, option: Option) -> str:
    files = '; COMPREPLY+=($(compgen -f -- "$current"))' if option.files else ""
    values = f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current"))'
    return f'        "{command} {option.name}") {values}{files}; return ;;'


# ---- zsh ----------------------------------------------------------------------------------------

_ZSH = """\
#compdef jaxptd
_jaxptd() {
    if (( CURRENT == 2 )); then
        local -a commands=(
@commands
        )
        _describe command commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
@options
    esac
}
if [ "$funcstack[1]" = _jaxptd ]; then
    _jaxptd "$@"
else
    compdef _jaxptd jaxptd
fi
"""


def zsh(commands: Sequence[Completed]) -> str:
    """The script for zsh: a file named _jaxptd in a folder of $fpath."""
    names = (f"            {_quoted(f'{each.name}:{each.summary}')}" for each in commands)
    cases = []
    for command in commands:
        specs = [_zsh_option(option) for option in command.options]
        specs += [f"1:word:({' '.join(command.words)})"] * bool(command.words)
        lines = " \\\n".join(f"            {_quoted(spec)}" for spec in specs)
        cases.append(f"    {command.name})\n        _arguments \\\n{lines} ;;")
    text = _ZSH.replace("@commands", "\n".join(names))
    return text.replace("@options", "\n".join(cases))


def _zsh_option(option: Option) -> str:
    text = re.sub(r"([\[\]:])", r"\\\1", option.help)
    values = f"({' '.join(option.choices)})" if option.choices else "_files"
    if option.choices and option.files:
        values = f"{{compadd {' '.join(option.choices)}; _files}}"
    return f"*{option.name}[{text}]" + (f":value:{values}" if option.takes_value else "")


# ---- fish ---------------------------------------------------------------------------------------


def fish(commands: Sequence[Completed]) -> str:
    """The script for fish."""
    lines = ["-n __fish_use_subcommand -l version -d 'print the version'"]
    for command in commands:
        summary = _quoted(command.summary)
        lines.append(f"-n __fish_use_subcommand -f -a {command.name} -d {summary}")
        here = f"-n {_quoted(f'__fish_seen_subcommand_from {command.name}')}"
        lines += [f"{here} {_fish_option(option)}" for option in command.options]
        if command.words:
            lines.append(f"{here} -f -a {_quoted(' '.join(command.words))}")
    return "".join(f"complete -c jaxptd {line}\n" for line in lines)


def _fish_option(option: Option) -> str:
    text = f"-l {option.name.removeprefix('--')} -d {_quoted(option.help)}"
    if not option.takes_value:
        return text
    values = f" -a {_quoted(' '.join(option.choices))}" if option.choices else ""
    return f"{text} {'-r -F' if option.files else '-x'}{values}"


SCRIPTS: Mapping[str, Callable[[Sequence[Completed]], str]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a script that completes commands and options in a shell."""
    print(completion_script(parser().parse_args(argv).shell), end="")


def completion_script(shell: str) -> str:
    """The script for a shell, one of `SCRIPTS`."""
    lines = [
        Completed(command.name, command.summary, *_options_and_words(command.load().parser()))
        for command in COMMANDS
    ]
    return SCRIPTS[shell](lines)


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd completion bash > ~/.local/share/bash-completion/completions/jaxptd",
        "jaxptd completion zsh > ~/.zfunc/_jaxptd          (a folder of $fpath)",
        "jaxptd completion fish > ~/.config/fish/completions/jaxptd.fish",
    )
    parser = Parser(prog="jaxptd completion", description=main.__doc__, examples=examples)
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    return parser


def _options_and_words(parser: argparse.ArgumentParser) -> tuple[list[Option], Choices]:
    """The options that a parser's help shows, and its positional words."""
    options = [
        Option(
            name=name,
            help=first_words(action.help or ""),
            takes_value=action.nargs not in (0, "?"),
            choices=_choices(action),
            files=not _choices(action) or action.dest == "config",
        )
        for action in filter(is_shown, parser._actions)
        for name in action.option_strings
        if name.startswith("--")
    ]
    words = [_choices(action) for action in parser._actions if not action.option_strings]
    return options, sum(words, ())


def _choices(action: argparse.Action) -> Choices:
    """The values of an option that can be listed; the packaged configs for `--config`."""
    if action.dest == "config":
        return tuple(packaged_configs())
    if action.choices:
        return tuple(map(str, action.choices))
    return choices_of(getattr(action, "kind", None))


if __name__ == "__main__":
    run_command(main)
