"""Builds ``popsim_torch._C``, the C++ library of the simulated IPU.

Environment:
    POPSIM_MARCH: value for the compiler's ``-march`` (default ``native``; the empty string leaves
        the compiler's baseline, for a build that has to run on other machines).
    POPSIM_WITHOUT_ONEDNN: set to 1 to build with ATen's kernels for dense math.
    POPSIM_SANITIZE: set to ``address`` for a slow build that stops where memory is misused.
"""

import os
import subprocess
from importlib import metadata
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
ONEDNN_HEADERS = "onednn-devel-cpu-gomp"
ONEDNN_LIBRARY = "onednn-cpu-gomp"


def find_in_wheel(package: str, suffix: str) -> Path | None:
    """Return the installed file of ``package`` whose path ends in ``suffix``."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate())).resolve()
        if str(path).endswith(suffix):
            return path
    return None


def find_onednn() -> tuple[Path, Path] | None:
    """Return oneDNN's include folder and library file, or None to build without it."""
    if os.environ.get("POPSIM_WITHOUT_ONEDNN") == "1":
        return None
    header = find_in_wheel(ONEDNN_HEADERS, "include/oneapi/dnnl/dnnl.hpp")
    library = find_in_wheel(ONEDNN_LIBRARY, "/libdnnl.so.3.2")
    if header is None or library is None:
        return None
    return header.parents[2], library


def vector_flags(march: str) -> list[str]:
    """Return the ``at::vec`` capability that the compiler's target offers."""
    flags = [f"-march={march}"] if march else []
    compiler = os.environ.get("CXX", "g++")
    macros = subprocess.run(
        [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if all(f"__AVX512{part}__" in macros for part in ("F", "BW", "DQ", "VL")):
        capability = "AVX512"
    elif "__AVX2__" in macros and "__FMA__" in macros:
        capability = "AVX2"
    else:
        capability = "DEFAULT"
    return [*flags, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]


def extension() -> CppExtension:
    """Describe the one extension module."""
    compile_args = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden"]
    # Two kernels that compute the same must round alike. Which products are added without being
    # rounded is written in the source (std::fma, at::vec::fmadd), not left to how a loop compiles.
    compile_args.append("-ffp-contract=off")
    # GCC 12 sees uninitialised values in its own AVX-512 headers; torch's have pragmas for clang.
    compile_args += ["-Wall", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"]
    compile_args += vector_flags(os.environ.get("POPSIM_MARCH", "native"))
    include_dirs = [str(ROOT / "csrc")]
    link_args = ["-fopenmp"]
    sanitizer = os.environ.get("POPSIM_SANITIZE")
    if sanitizer:
        compile_args += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-O1", "-g1"]
        link_args.append(f"-fsanitize={sanitizer}")
    onednn = find_onednn()
    if onednn is not None:
        include, library = onednn
        # Before torch's own include folder, which holds headers of another oneDNN.
        include_dirs.append(str(include))
        compile_args.append("-DPOPSIM_HAVE_ONEDNN=1")
        link_args.append(str(library))
        # The wheel puts the library in the environment's lib/, three levels above the package.
        link_args += ["-Wl,-rpath,$ORIGIN/../../..", f"-Wl,-rpath,{library.parent}"]
    return CppExtension(
        "popsim_torch._C",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")),
        include_dirs=include_dirs,
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
