"""libcuda through ctypes: enough to load cubins and launch them on a torch stream, with no package but torch."""

from __future__ import annotations

import ctypes

import torch

PARAMETER = {"p": ctypes.c_uint64, "i": ctypes.c_int32}
DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MOST_THREADS, REGISTERS, MOST_DYNAMIC, CARVEOUT = 0, 4, 8, 9


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Cuda:
    """The driver, on torch's context."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.lib = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {code} {text.value!r}")

    def module(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module


class Kernel:
    """One function of a module. `kinds`: p (address) or i (number) for each parameter."""

    def __init__(self, cuda: Cuda, module: ctypes.c_void_p, name: str, kinds: str, carveout: int | None = None) -> None:
        self.cuda, self.name, self.kinds = cuda, name, kinds
        self.function = ctypes.c_void_p()
        cuda.call("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
        self.threads = self.attribute(MOST_THREADS)
        if carveout is not None:
            self.prefer(carveout)

    def prefer(self, percent: int) -> None:
        """Share of a multiprocessor's memory that is to be shared memory."""
        self.cuda.call("cuFuncSetAttribute", self.function, CARVEOUT, percent)

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.cuda.call("cuFuncGetAttribute", ctypes.byref(value), which, self.function)
        return value.value

    def launch(
        self, grid: tuple[int, ...], threads: int, *arguments: int, shared: int = 0, dependent: bool = False
    ) -> None:
        """On torch's current stream."""
        assert len(arguments) == len(self.kinds), (self.name, len(arguments))
        values = [PARAMETER[kind](value) for kind, value in zip(self.kinds, arguments, strict=True)]
        table = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        config = Config()
        config.grid[:] = (*grid, 1, 1, 1)[:3]
        config.block[:] = (threads, 1, 1)
        config.shared = shared
        config.stream = torch.cuda.current_stream().cuda_stream
        if shared > 48 << 10:
            self.cuda.call("cuFuncSetAttribute", self.function, MOST_DYNAMIC, shared)
        if dependent:
            attribute = Attribute(id=DEPENDENT, value=(1).to_bytes(64, "little"))
            config.attributes, config.count = ctypes.pointer(attribute), 1
        self.cuda.call("cuLaunchKernelEx", ctypes.byref(config), self.function, table, None)
