"""The compiler: NVRTC from the registry's wheels, through ctypes. Needs no GPU, driver or toolkit.

This file imports nothing but the standard library, so that `build.py` can run it as a worker of its
own: `python nvrtc.py` reads jobs from standard input. NVRTC compiles one program at a time in a
process, whatever the number of threads.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

COMPILER = ("nvidia-cuda-nvrtc-cu12", "12.9.86")
"""Distribution and version: the last NVRTC that targets sm_70. CUDA 13 does not."""

HEADERS = ("nvidia-cuda-runtime-cu12", "12.9.79")
"""Distribution and version of the CUDA headers."""

REQUIREMENTS = tuple(f"{name}=={version}" for name, version in (COMPILER, HEADERS))
"""What a machine that builds has to have installed."""

INSTALL = f"pip install {' '.join(REQUIREMENTS)}, or sm70-moe's extra nvrtc"

LIBRARY = "libnvrtc.so.12"


class CompileError(Exception):
    """A source does not compile, or the compiler cannot be used; the text is the compiler's log."""


class Compiler:
    """NVRTC, loaded. Raises CompileError if the pinned wheels are not there."""

    def __init__(self) -> None:
        for name, version in (COMPILER, HEADERS):
            check_installed(name, version)
        self.headers = package_folder("nvidia.cuda_runtime") / "include"
        self.library = ctypes.CDLL(str(package_folder("nvidia.cuda_nvrtc") / "lib" / LIBRARY))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, name: str, source: str, includes: Mapping[str, str], options: Sequence[str]) -> bytes:
        """A cubin of one source. `includes` are the headers that it may include, by name.

        `options` must name a real architecture (sm_70). Raises CompileError with the log.
        """
        program = ctypes.c_void_p()
        texts, names = _strings([*includes.values()]), _strings([*includes])
        self._call("nvrtcCreateProgram", program, source.encode(), name.encode(), len(includes), texts, names)
        try:
            given = _strings([*options, f"-I{self.headers}"])
            if self.library.nvrtcCompileProgram(program, len(given), given):
                raise CompileError(f"{name} ({' '.join(options)}):\n{self._log(program)}")
            return self._read("nvrtcGetCUBIN", program)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _call(self, function: str, program: ctypes.c_void_p, *arguments: object) -> None:
        code = getattr(self.library, function)(ctypes.byref(program), *arguments)
        if code:
            raise CompileError(f"{function}: {self.library.nvrtcGetErrorString(code).decode()}")

    def _read(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, f"{function}Size")(program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        if getattr(self.library, function)(program, content):
            raise CompileError(f"{function}: no result")
        return content.raw

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()


def check_installed(name: str, version: str) -> None:
    """Refuse another version than the pinned one: it would give other machine code under the same build id."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = "none"
    if found != version:
        raise CompileError(f"{name}: found {found}, accepted is {version}: {INSTALL}")


def missing() -> str:
    """Why nothing can be compiled here, with what to install; nothing if the pinned wheels are there."""
    try:
        for name, version in (COMPILER, HEADERS):
            check_installed(name, version)
    except CompileError as error:
        return str(error)
    return ""


def package_folder(package: str) -> Path:
    """Folder of an installed package that holds files, not code."""
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"{package}: not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def work() -> int:
    """Compile the jobs on standard input: {"includes", "jobs": [{"name", "source", "options", "out"}]}.

    Prints the name of each job that is done; for one without "out" its cubin in base64 instead. A failure ends
    it with the log on standard error.
    """
    order = json.load(sys.stdin)
    try:
        compiler = Compiler()
        for job in order["jobs"]:
            cubin = compiler.compile(job["name"], job["source"], order["includes"], job["options"])
            if job.get("out"):
                write(Path(job["out"]), cubin)
            print(job["name"] if job.get("out") else base64.b64encode(cubin).decode(), flush=True)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def write(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all: a build may be interrupted."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(work())
