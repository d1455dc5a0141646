"""Networks of 8-bit integers for OpenVINO, made by NNCF after training.

Inputs and weights of convolutions become integers; all else stays in float32: norms, activations,
sums of branches, and the first and the last convolution, which cost little and on which values
depend most. Nothing is trained, and no bias is corrected.

An input's range is taken from the calibration samples: the mean over samples of the quantiles that
leave out one value in ten thousand at either end. It is mapped onto 0 … 255. Weights are symmetric,
of seven bits: where a processor has no instructions for 8-bit products (AVX2), it adds two of them
in 16 bits, which eight bits would overflow. Integers are then added exactly on every processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from beam_inference.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from openvino import Model

_OUTLIERS = 1e-4
"""Share of an input's values, at either end, that its range leaves out."""

_CONVOLUTIONS = frozenset(
    {
        "Convolution",
        "ConvolutionBackpropData",
        "GroupConvolution",
        "GroupConvolutionBackpropData",
    }
)
_IN_INTEGERS = _CONVOLUTIONS | {
    "Clamp",
    "Concat",
    "Constant",
    "Convert",
    "MaxPool",
    "Pad",
    "Parameter",
    "Relu",
    "Reshape",
    "Result",
    "Slice",
    "Split",
    "Squeeze",
    "StridedSlice",
    "Transpose",
    "Unsqueeze",
    "VariadicSplit",
}
"""Types of operations that may take integers: convolutions, and those that move or select."""


def quantize_network(network: Model, samples: Sequence[NDArray[np.float32]]) -> Model:
    """Quantise a network of static shape.

    Args:
        network: in float32; is left as it is.
        samples: its inputs.

    Raises:
        EngineError: NNCF is absent, or the network has no convolution between the first and the
            last one.
    """
    try:
        import nncf
    except ImportError as error:
        raise EngineError(
            f"precision: int8 needs NNCF where the job is launched, and it cannot be imported "
            f"({error}): pip install 'beam-inference[int8]'"
        ) from None

    operations = network.get_ordered_ops()
    convolutions = [each for each in operations if each.get_type_name() in _CONVOLUTIONS]
    if len(convolutions) <= len(("first", "last")):
        raise EngineError(
            f"precision: int8 needs a network with convolutions between its first and its last "
            f"one, which stay in float32; this one has {len(convolutions)}: write precision: "
            "float32"
        )
    in_float = nncf.IgnoredScope(
        names=[convolutions[0].get_friendly_name(), convolutions[-1].get_friendly_name()],
        types=sorted({each.get_type_name() for each in operations} - _IN_INTEGERS),
    )
    return nncf.quantize(
        network,
        nncf.Dataset(list(samples)),
        subset_size=len(samples),
        preset=nncf.QuantizationPreset.MIXED,
        ignored_scope=in_float,
        advanced_parameters=_parameters(),
    )


def name_by_place(structure: bytes) -> bytes:
    """Name the layers of a network by their numbers, so that its bytes depend on its content only.

    OpenVINO names them and their outputs by what else the process has made before, and notes how
    they were made.

    Args:
        structure: of OpenVINO's own form, the file of XML.
    """
    root = ElementTree.fromstring(structure)
    root.set("name", "int8")
    for layer in root.iter("layer"):
        layer.set("name", f"layer_{layer.get('id')}")
    for port in root.iter("port"):
        port.attrib.pop("names", None)
    for parent in list(root.iter()):
        for note in parent.findall("rt_info"):
            parent.remove(note)
    return ElementTree.tostring(root)


def _parameters() -> Any:
    from nncf.quantization import advanced_parameters, range_estimator

    end = range_estimator.StatisticsCollectorParameters(
        statistics_type=range_estimator.StatisticsType.QUANTILE,
        aggregator_type=range_estimator.AggregatorType.MEAN,
        quantile_outlier_prob=_OUTLIERS,
    )
    return advanced_parameters.AdvancedQuantizationParameters(
        overflow_fix=advanced_parameters.OverflowFix.ENABLE,
        disable_bias_correction=True,
        activations_range_estimator_params=range_estimator.RangeEstimatorParameters(
            min=end, max=end
        ),
    )
