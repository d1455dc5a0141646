"""How voxels become colours: Neuroglancer's shaders, in GLSL, for what a volume's channels say.

A brightness range (low, high) is in stored values: low is black, or transparent, and high is full.
In the viewer it is a control with a histogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from beam_inference.arrays import AnyDtype

Range = tuple[float, float]

CLASS_COLORS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Colours of classes, in a cycle: Okabe and Ito's, which the colour-blind can tell apart."""


def grey(shown: Range, channel: int = 0) -> str:
    """One channel, in grey."""
    which = f", channel={channel}" if channel else ""
    return (
        f"#uicontrol invlerp normalized(range={_pair(shown)}{which})\nvoid main() {{ "
        "emitGrayscale(normalized()); }\n"
    )


def rgb(shown: Range, channels: Sequence[int] = (0, 1, 2)) -> str:
    """Three channels, as red, green and blue."""
    values = ", ".join(f"normalized(getDataValue({channel}))" for channel in channels)
    return (
        f"#uicontrol invlerp normalized(range={_pair(shown)})\nvoid main() {{ "
        f"emitRGB(vec3({values})); }}\n"
    )


def heat(shown: Range) -> str:
    """One probability, to lie over an image: transparent, red, yellow, white."""
    return f"""\
#uicontrol invlerp probability(range={_pair(shown)})
void main() {{
  float p = probability();
  emitRGBA(vec4(clamp(vec3(0.4, -0.8, -2.0) + vec3(1.6, 2.3, 3.0) * p, 0.0, 1.0), p));
}}
"""


def classes(shown: Range, channels: Sequence[int]) -> str:
    """Shader of class probabilities over an image: a colour each, as opaque as it is probable."""
    pairs = list(zip(channels, cycle(CLASS_COLORS), strict=False))
    controls = "".join(
        f'#uicontrol vec3 color{channel} color(default="{color}")\n' for channel, color in pairs
    )
    adding = "".join(
        f"  add(color{channel}, normalized(getDataValue({channel})));\n" for channel, _ in pairs
    )
    return f"""\
#uicontrol invlerp normalized(range={_pair(shown)})
{controls}vec3 mixed = vec3(0.0);
float total = 0.0;
void add(vec3 color, float p) {{ mixed += p * color; total += p; }}
void main() {{
{adding}  emitRGBA(vec4(mixed / max(total, 1e-6), min(total, 1.0)));
}}
"""


def mask_shader(color: str, dtype: AnyDtype, *, inverse: bool) -> str:
    """Shader of a mask over an image: a colour where it is not zero, or zero if ``inverse``."""
    value = "toRaw(getDataValue())"
    zero = "0u" if dtype.kind == "u" else "0"
    if dtype.kind == "f":
        value = "getDataValue()"
        zero = "0.0"
    elif dtype == np.uint64:
        value = "getDataValue().value"
        zero = "uvec2(0u)"
    return f"""\
#uicontrol vec3 color color(default="{color}")
void main() {{
  if ({value} {"==" if inverse else "!="} {zero}) emitRGB(color);
  else emitTransparent();
}}
"""


def _pair(shown: Range) -> str:
    return "[" + ", ".join(f"{value:.9g}" for value in shown) + "]"
