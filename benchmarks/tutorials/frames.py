"""An animation of matplotlib's, which needs a script to play, as a picture that moves by itself."""

import base64
import io
import re
from typing import Any

import numpy as np

from jaxptd.plot.colors import INK

MILLISECONDS = 1200  # of a frame


def frames_of(html: str) -> list[bytes]:
    """The PNG frames in what `Animation.to_jshtml` returns; none in other HTML."""
    found = re.findall(r'frames\[\d+\] = "data:image/png;base64,([^"]+)"', html)
    return [base64.b64decode(each.replace("\\\n", "")) for each in found]


def moving(frames: list[bytes]) -> bytes:
    """An animated PNG of frames, played again and again, on a transparent background."""
    first, *rest = [_transparent(each) for each in frames]
    out = io.BytesIO()
    style = {"duration": MILLISECONDS, "loop": 0, "disposal": 1}
    first.save(out, format="PNG", save_all=True, append_images=rest, **style)
    return out.getvalue()


def _transparent(frame: bytes) -> Any:
    """The image of a frame without the white that matplotlib puts behind it.

    Each pixel between white and the color of lines and text has that color, and covers in part.
    """
    from PIL import Image  # comes with matplotlib

    pixels = np.array(Image.open(io.BytesIO(frame)).convert("RGBA"))
    ink = np.array([int(INK[i : i + 2], 16) for i in (1, 3, 5)])
    missing = 255 - pixels[..., :3].astype(int)
    share = missing[..., 0] / (255 - ink[0])
    between = (abs(missing - share[..., None] * (255 - ink)) < 6).all(-1) & (share < 1.03)
    pixels[between, :3] = ink
    pixels[between, 3] = np.clip(255 * share[between], 0, 255)
    return Image.fromarray(pixels)
