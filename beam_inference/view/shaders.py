"""How voxels become colours: Neuroglancer's shaders, in GLSL, for what a volume's channels say.

A brightness range (low, high) is in stored values: low is black, or transparent, and high is full.
In the viewer it is a control with a histogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from beam_inference.arrays import AnyDtype
from beam_inference.volumes.mask import KeptValues

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


def mask_shader(color: str, dtype: AnyDtype, kept: KeptValues, *, inverse: bool) -> str:
    """Shader of a mask over an image: a colour where it keeps something, or not if ``inverse``."""
    condition = _condition(dtype, kept)
    return f"""\
#uicontrol vec3 color color(default="{color}")
void main() {{
  if ({f"!({condition})" if inverse else condition}) emitRGB(color);
  else emitTransparent();
}}
"""


def _condition(dtype: AnyDtype, kept: KeptValues) -> str:
    """The condition, in GLSL, that a voxel of a mask has such a value."""
    if kept.equals is not None:
        return " || ".join(f"{_value(dtype)} == {_literal(value, dtype)}" for value in kept.equals)
    number = f"float({_value(dtype)})"
    if dtype == np.uint64:  # to seven digits, as all numbers here that are compared for size
        number = f"(float({_value(dtype)}.y) * 4294967296.0 + float({_value(dtype)}.x))"
    conditions = [] if kept.above is None else [f"{number} > {float(kept.above)!r}"]
    conditions += [] if kept.below is None else [f"{number} < {float(kept.below)!r}"]
    return " && ".join(conditions) or f"{_value(dtype)} != {_literal(0, dtype)}"


def _value(dtype: AnyDtype) -> str:
    if dtype.kind == "f":
        return "getDataValue()"
    return "getDataValue().value" if dtype == np.uint64 else "toRaw(getDataValue())"


def _literal(value: float, dtype: AnyDtype) -> str:
    """A value of a volume as GLSL writes it."""
    if dtype.kind == "f":
        return repr(float(value))
    if dtype == np.uint64:
        high, low = divmod(int(value), 2**32)
        return f"uvec2({low}u, {high}u)"
    return f"{int(value)}{'u' if dtype.kind == 'u' else ''}"


def _pair(shown: Range) -> str:
    return "[" + ", ".join(f"{value:.9g}" for value in shown) + "]"
