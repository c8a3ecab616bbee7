"""The configs that come with jaxptd, found by name: `--config quickstart`."""

import os
from pathlib import Path

from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.fields.values import ImpossibleError, convert

SUFFIX = ".yaml"


def packaged_configs() -> dict[str, Path]:
    """Name -> YAML file, sorted by name; one in a subfolder has the name `folder/name`."""
    folder = _folder()
    found = folder.rglob(f"*{SUFFIX}")
    names = {path.relative_to(folder).as_posix().removesuffix(SUFFIX): path for path in found}
    return dict(sorted(names.items()))


def find_config(name: str) -> str:
    """Resolves what follows `--config`: a path as it is, else the name of a packaged config.

    Args:
        name: a path, in which `~` is expanded, or the name of a packaged config, with or without
            `.yaml`. A file of that name in the current directory comes first.

    Raises:
        UserError: there is neither such a file nor such a config, or no file can have the name.
    """
    name = _expanded(name)
    if os.path.isfile(name):
        return name
    configs = packaged_configs()
    stem = name.removesuffix(SUFFIX)
    if stem in configs:
        return str(configs[stem])
    if os.path.basename(name) != name:
        return name
    remedy = f"use the path of a file, or one of {', '.join(configs)}"
    raise UserError(
        f"{quoted(name) or '--config is empty'}: no such file, and no packaged config of that "
        f"name; {did_you_mean(stem, configs, otherwise=remedy)}"
    )


def _expanded(name: str) -> str:
    try:
        return convert(name, str)
    except ImpossibleError as error:
        raise UserError(f"--config={quoted(name)}: {error}") from error


def _folder() -> Path:
    """`jaxptd/configs` of an installed wheel; in a source checkout `configs` beside `jaxptd`."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
