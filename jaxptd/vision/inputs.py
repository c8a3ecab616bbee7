"""The images that classes are asked of: held-out samples of a run, or files.

Letters: B images, S rows and columns.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.models.families import open_data_of, tokenizer_of
from jaxptd.vision.data import ENDINGS, read_image
from jaxptd.vision.family import images_of
from jaxptd.vision.masks import held_out

Inputs = tuple[list[str], np.ndarray]  # names, and images[B, S, S, channels]


def held_out_inputs(config: Config, count: int) -> Inputs:
    """The first held-out images of a run, as many as there are up to `count`.

    Raises:
        UserError: its data cannot be opened, or it holds no image out.
    """
    data = open_data_of(config, tokenizer_of(config)).validation
    if data is None:
        raise UserError("data.validation_fraction=0: the run holds no image out; use --images")
    count = min(count, data.windows_per_epoch)
    names = [f"held-out-{number:04d}" for number in range(count)]
    return names, held_out(config, data, "image", count)


def inputs_of(config: Config, paths: Sequence[Path]) -> Inputs:
    """The images of files, and of all files in folders; named as these without their endings.

    Raises:
        UserError: there are none, two have one name, or they are no images of the model's size.
    """
    files = [each for path in paths for each in _files(path)]
    names = [path.stem for path in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two images are named {twice[0]}, and so would be their masks; give them one by one"
        )
    images = images_of(config.model)
    found = [read_image(path, images.size, images.channels) for path in files]
    return names, np.stack(found)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix in ENDINGS)
    if not found:
        raise UserError(f"{path} has no {', '.join(ENDINGS)} file; name another folder")
    return found
