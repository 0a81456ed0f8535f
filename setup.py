"""Builds ``popsim_torch._C``, the C++ library of the simulated IPU.

One build runs on every x86-64 processor with SSE 4.2: what computes is compiled once for each
target, all else for the lowest one, and the library chooses when it is loaded
(csrc/processor/target.h).

Other machines have one target, ``baseline``, and do without what they do not have: GNU's linker,
oneDNN, OpenMP.

Environment:
    POPSIM_TARGETS: the targets to build kernels for, separated by commas; ``all`` (the default), or
        ``own``: the highest one of this processor. ``baseline`` is that of other machines.
    POPSIM_WITHOUT_ONEDNN: set to 1 to build with ATen's kernels for dense math.
    POPSIM_WITHOUT_OPENMP: set to 1 to build for one thread.
    V: set to 1 to see the compiler's command lines, instead of how many files are compiled.
    POPSIM_SANITIZE: set to ``address`` for a slow build that stops where memory is misused.
"""

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent
ONEDNN_HEADERS = "onednn-devel-cpu-gomp"
ONEDNN_LIBRARY = "onednn-cpu-gomp"
# The wheel puts the library in the environment's lib/, three levels above the package, or four
# where the package is in lib64/.
ONEDNN_FOLDERS = ("$ORIGIN/../../..", "$ORIGIN/../../../../lib")


def vector_flags(capability: str, march: str = "") -> list[str]:
    """Return the flags of a target: the compiler's, and ``at::vec``'s capability."""
    flags = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    return [f"-march={march}", *flags] if march else flags


# What the compiler takes for the machine; these kernels need not be kept apart from other code.
BASELINE = "baseline"
# Elsewhere there is that one alone.
HAS_TARGETS = platform.system() == "Linux" and platform.machine() == "x86_64"
# From the lowest to the highest, as in csrc/processor/target.h.
TARGETS = {
    BASELINE: vector_flags("DEFAULT"),
    "sse4": vector_flags("DEFAULT", "x86-64-v2"),
    "avx2": vector_flags("AVX2", "x86-64-v3"),
    # GCC 12 finds uninitialised values in its own AVX-512 headers. The others look at all files.
    "avx512": [*vector_flags("AVX512", "x86-64-v4"), "-Wno-uninitialized"],
}
# What a compiler defines for a processor that has all of a target.
MACROS = {
    "avx512": {f"__AVX512{part}__" for part in ("F", "BW", "CD", "DQ", "VL")},
    "avx2": {f"__{part}__" for part in ("AVX2", "BMI", "BMI2", "F16C", "FMA", "LZCNT", "MOVBE")},
    "sse4": set[str](),
}

# The rooms that compute, and what of them is compiled once all the same: it calls no kernel.
KERNELS = ("csrc/dense/", "csrc/ops/")
COMMON = (
    "csrc/dense/available.cpp",
    "csrc/dense/onednn.cpp",
    "csrc/dense/onednn_convolution.cpp",
    "csrc/dense/onednn_piece.cpp",
    "csrc/ops/aten/",
    "csrc/ops/check.cpp",
    "csrc/ops/control/",
    "csrc/ops/custom/",
    "csrc/ops/host/",
    "csrc/ops/op_def.cpp",
    "csrc/ops/operands/all_bits.cpp",
    "csrc/ops/operands/aten_types.cpp",
    "csrc/ops/operands/strided_walk.cpp",
    "csrc/ops/order.cpp",
    "csrc/ops/registry.cpp",
    "csrc/ops/schema.cpp",
    "csrc/ops/work.cpp",
)
# The matrix units have kernels in one file; they are used where the processor has them.
UNITS = ("csrc/dense/tile/units.cpp", ["-mamx-tile", "-mamx-bf16", "-mavx512bf16"])


# The files of a folder are compiled as one, since most of the time goes to the headers that they
# share. These are compiled alone: names of their own parts are names in other files, too.
ALONE = (
    UNITS[0],
    "csrc/ops/attention/grad.cpp",
    "csrc/ops/matmul/serialized.cpp",
    "csrc/ops/recurrent/grad.cpp",
)

# The file beside the extension that popsim_torch/_native.py reads.
BUILT_FOR = "built_for.txt"

# What most kernels include, read once for each target. Other files gain nothing from such a header:
# what takes time in those of torch and pybind11 is done in each file again.
PRECOMPILED = """
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>
#pragma GCC diagnostic pop
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>
"""


def is_set(variable: str) -> bool:
    """Return whether an environment variable is 1."""
    return os.environ.get(variable) == "1"


def short_line(line: str, in_place: bool) -> str:
    """Return what to show of a line of ninja: the file instead of the command that compiles it.

    Args:
        line: The line.
        in_place: Each file is shown in the place of the one before; else none is.
    """
    command = re.match(r"(\[\d+/\d+\]) .* -c (\S+) -o ", line)
    start = "\r\033[K" if in_place else ""
    if command is None:
        return "" if line == "ninja: no work to do.\n" else start + line
    target = re.search(r"-DPOPSIM_KERNELS=popsim_kernels_(\w+)", line)
    suffix = f" ({target[1]})" if target else ""
    shown = f"{command[1]} {os.path.relpath(command[2], ROOT)}{suffix}"
    return start + shown if in_place else ""


@contextmanager
def short_output(title: str) -> Iterator[None]:
    """Shorten what is written to stdout meanwhile, by child processes, too.

    Args:
        title: Shown once, when the first file is compiled.
    """
    if is_set("V"):
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    in_place = os.isatty(stdout)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)

    def forward() -> None:
        compiles = False
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("[") and not compiles:
                    compiles = True
                    os.write(stdout, f"{title}\n".encode())
                os.write(stdout, short_line(line, in_place).encode())
        os.write(stdout, b"\r\033[K" if in_place and compiles else b"")

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)  # closes the last end that is written to
        thread.join()
        os.close(stdout)


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
    if is_set("POPSIM_WITHOUT_ONEDNN"):
        return None
    header = find_in_wheel(ONEDNN_HEADERS, "include/oneapi/dnnl/dnnl.hpp")
    library = find_in_wheel(ONEDNN_LIBRARY, "/libdnnl.so.3.2")
    if header is None or library is None:
        return None
    return header.parents[2], library


def defined_macros(*flags: str) -> set[str]:
    """Return the macros that the compiler defines with some flags."""
    command = [os.environ.get("CXX", "c++"), *flags, "-dM", "-E", "-x", "c++", os.devnull]
    return set(re.findall(r"#define (\w+)", subprocess.check_output(command, text=True)))


def own_target() -> str:
    """Return the highest target of this processor, as the compiler sees it."""
    if not HAS_TARGETS:
        return BASELINE
    defined = defined_macros("-march=native")
    return next(name for name, macros in MACROS.items() if macros <= defined)


def chosen_targets() -> list[str]:
    """Return the targets to build kernels for, from the lowest to the highest."""
    asked = os.environ.get("POPSIM_TARGETS", "all")
    names = [own_target()] if asked == "own" else [name for name in asked.split(",") if name]
    names = [] if asked == "all" else names
    known = list(TARGETS) if HAS_TARGETS else [BASELINE]
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(
            f"POPSIM_TARGETS={','.join(names)}: unknown {', '.join(sorted(unknown))}; "
            f"there are {', '.join(known)}"
        )
    if BASELINE in names and len(names) > 1:
        raise SystemExit(f"POPSIM_TARGETS={','.join(names)}: {BASELINE} goes with no other target")
    chosen = names or [name for name in known if not HAS_TARGETS or name != BASELINE]
    return [name for name in known if name in chosen]


def torch_release() -> str:
    """Return the release of PyTorch whose library the extension fits: ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def run_requirements() -> list[str]:
    """Return what the built package needs: the PyTorch that it is compiled for among it."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["dependency-groups"]["run"]
    if find_onednn() is None:
        listed = [line for line in listed if not line.startswith(ONEDNN_LIBRARY)]
    return [f"torch=={torch_release()}.*", *listed]


def all_sources() -> list[str]:
    """Return the C++ files, relative to this folder."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp"))


def is_kernel(source: str) -> bool:
    """Return whether a file is compiled for each target."""
    return source.startswith(KERNELS) and not source.startswith(COMMON)


def extension() -> CppExtension:
    """Describe the one extension module; the kernels' files come on top (``Build``)."""
    compile_args = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden"]
    # Two kernels that compute the same must round alike. Which products are added without being
    # rounded is written in the source (std::fma, at::vec::fmadd), not left to how a loop compiles.
    compile_args.append("-ffp-contract=off")
    # GCC 12 sees uninitialised values in its own AVX-512 headers, and notes that 4.6 passed vectors
    # otherwise; torch's headers have pragmas for clang, and compare signed and unsigned numbers.
    compile_args += ["-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    is_clang = "__clang__" in defined_macros()
    if not is_clang:
        compile_args += ["-Wno-maybe-uninitialized", "-Wno-psabi"]
    link_args = []
    if platform.system() == "Linux" and not is_set("POPSIM_WITHOUT_OPENMP"):
        compile_args.append("-fopenmp")
        link_args.append("-fopenmp")
    targets = chosen_targets()
    if targets != [BASELINE] and not is_clang:
        # Statics of inline functions belong to the objects of their target, as with clang.
        compile_args.append("-fno-gnu-unique")
    include_dirs = [str(ROOT / "csrc"), str(ROOT / "popsim_torch" / "include")]
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
        link_args += [f"-Wl,-rpath,{folder}" for folder in ONEDNN_FOLDERS]
    return CppExtension(
        "popsim_torch._C",
        [source for source in all_sources() if not is_kernel(source)],
        include_dirs=include_dirs,
        depends=sorted(
            str(path.relative_to(ROOT))
            for folder in ("csrc", "popsim_torch/include")
            for path in (ROOT / folder).rglob("*.h")
        ),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


# How the entry of an op begins.
OP_ENTRY = re.compile(r"^extern const OpDef (k\w+)\{", re.MULTILINE)
LISTED_OPS = "csrc/ops/listed.h"


def list_ops(root: Path) -> str:
    """Return a header that lists the ops: those compiled for each target, and those compiled once.

    Args:
        root: The folder that holds ``csrc``. An op's entry stands in a file of ``csrc/ops``.
    """
    names: dict[bool, list[str]] = {True: [], False: []}
    for path in (root / "csrc" / "ops").rglob("*.cpp"):
        source = path.relative_to(root).as_posix()
        names[is_kernel(source)] += OP_ENTRY.findall(path.read_text(encoding="utf-8"))
    lines = [
        "// Every op there is, found by setup.py in the files of this folder.",
        "#pragma once",
        "// clang-format off",
        "#define POPSIM_LIST_OP(entry) [] { extern const OpDef entry; return &entry; }(),",
    ]
    for macro, is_of_target in (("POPSIM_OPS_OF_TARGETS", True), ("POPSIM_COMMON_OPS", False)):
        lines.append(
            " \\\n  ".join(
                [f"#define {macro}(X)", *(f"X({n})" for n in sorted(names[is_of_target]))]
            )
        )
    return "\n".join([*lines, ""])


# The targets of the last build.
BUILT_TARGETS = "csrc/processor/built_targets.h"


def list_targets(targets: list[str]) -> str:
    """Return a header that lists the targets that there are kernels for."""
    names = "".join(f"{name}," for name in targets)
    each = " ".join(f"X({name})" for name in targets)
    return (
        "// The targets that this build has kernels for, written by setup.py.\n"
        "#pragma once\n"
        "// clang-format off\n"
        f'#define POPSIM_TARGETS "{names}"\n'
        f"#define POPSIM_FOR_EACH_TARGET(X) {each}\n"
    )


def write(path: Path, text: str) -> None:
    """Write a file that is compiled, if it is another one than before."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def together(sources: list[str], folder: Path) -> list[str]:
    """Return the files to compile: for each folder of sources one file that includes all of them.

    Args:
        sources: Relative to this checkout.
        folder: Where the files are written.
    """
    rooms: dict[str, list[str]] = {}
    for source in sources:
        rooms.setdefault(source if source in ALONE else os.path.dirname(source), []).append(source)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for room, own in rooms.items():
        if len(own) == 1:
            files += own
            continue
        file = folder / f"{room.removeprefix('csrc/').replace('/', '_')}.cpp"
        write(file, "".join(f'#include "{name.removeprefix("csrc/")}"\n' for name in own))
        files.append(os.path.relpath(file, ROOT))
    return files


class Build(BuildExtension):
    """Compiles the kernels for each target, then all else."""

    def build_extensions(self) -> None:
        """Compile, and show the files' names."""
        write(ROOT / LISTED_OPS, list_ops(ROOT))
        write(ROOT / BUILT_TARGETS, list_targets(chosen_targets()))
        targets = ", ".join(chosen_targets())
        title = (
            f"Compiling the C++ library, with kernels for {targets}. The first time takes minutes."
        )
        with short_output(title):
            super().build_extensions()

    def build_extension(self, ext: CppExtension) -> None:
        """Compile everything."""
        common = list(ext.extra_compile_args)
        folder = Path(self.build_temp).absolute()
        targets = chosen_targets()
        for target in targets:
            ext.extra_objects += self.build_kernels(ext, target, folder / target)
        ext.sources = together(ext.sources, folder / "rooms")
        floor = BASELINE if targets == [BASELINE] else "sse4"
        ext.extra_compile_args = [*common, *TARGETS[floor]]
        onednn = find_onednn()
        if onednn is not None and "bdist_wheel" not in self.distribution.commands:
            # Here the package is not in the environment. A wheel must not look into this one.
            ext.extra_link_args.append(f"-Wl,-rpath,{onednn[1].parent}")
        super().build_extension(ext)
        self.note_torch(ext)

    def copy_extensions_to_source(self) -> None:
        """Copy the library into this checkout (``--inplace``)."""
        super().copy_extensions_to_source()
        self.note_torch(self.extensions[0])

    def note_torch(self, ext: CppExtension) -> None:
        """Write beside the library which PyTorch it is for."""
        library = Path(self.get_ext_fullpath(ext.name))
        library.with_name(BUILT_FOR).write_text(f"{torch_release()}\n")

    def build_kernels(self, ext: CppExtension, target: str, folder: Path) -> list[str]:
        """Return the object files with the kernels of a target."""
        folder.mkdir(parents=True, exist_ok=True)
        flags = [
            *ext.extra_compile_args,
            *TARGETS[target],
            f"-DPOPSIM_KERNELS=popsim_kernels_{target}",
        ]
        sources = [source for source in all_sources() if is_kernel(source)]
        units, units_flags = UNITS
        groups = [(sources, flags)]
        if target == "avx512":
            sources.remove(units)
            groups.append(([units], flags + units_flags))
        if target != BASELINE:
            header = self.precompile(ext, flags, folder / "precompiled.h")
            groups = [(files, [*arguments, "-include", header]) for files, arguments in groups]
        objects: list[str] = []
        for number, (files, arguments) in enumerate(groups):
            objects += self.compiler.compile(
                together(files, folder / "rooms"),
                output_dir=str(folder / str(number)),
                include_dirs=ext.include_dirs,
                extra_postargs=arguments,
                depends=ext.depends,
            )
        return objects if target == BASELINE else [self.join(target, objects, folder)]

    def join(self, target: str, objects: list[str], folder: Path) -> str:
        """Return one object file that shows nothing but the target's table of kernels.

        Inline functions of headers are compiled for the target there: no other code may use them.
        """
        linked, kernels = str(folder / "linked.o"), str(folder / "kernels.o")
        linker = ["-r", "--force-group-allocation", "-o", linked, *objects]
        subprocess.run(["ld", *linker], check=True)
        keep = f"--keep-global-symbol=popsim_kernels_{target}"
        subprocess.run(["objcopy", keep, linked, kernels], check=True)
        return kernels

    def precompile(self, ext: CppExtension, flags: list[str], header: Path) -> str:
        """Write a header that GCC has already read when it is included with these flags."""
        includes = [f"-I{folder}" for folder in (*ext.include_dirs, *self.compiler.include_dirs)]
        command = [
            os.environ.get("CXX", "c++"),
            *self.compiler.compiler_so[1:],
            *includes,
            *flags,
            *("-x", "c++-header", str(header), "-o", f"{header}.gch"),
        ]
        # Another PyTorch has other headers under the same name.
        made_from = str((torch.__version__, PRECOMPILED, command))
        stamp = header.with_suffix(".txt")
        if not stamp.exists() or stamp.read_text() != made_from:
            header.write_text(PRECOMPILED)
            subprocess.run(command, check=True)
            stamp.write_text(made_from)
        return str(header)


if __name__ == "__main__":
    setup(
        ext_modules=[extension()],
        cmdclass={"build_ext": Build},
        install_requires=run_requirements(),
    )
