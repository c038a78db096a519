"""CUDA itself: loading through `cuda.core`, launching through the bindings under it.

The bindings are called directly for the launch: arguments are packed once and configurations kept, so
that a launch costs little host time. Imports of CUDA packages happen when a `CudaDriver` is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.driver import Config, Fire
from sm70_moe.kernels.native.refusal import LaunchRefused
from sm70_moe.kernels.native.residency import Residency

DEFAULT_STREAM = 1
"""CU_STREAM_LEGACY, which is what torch means by stream 0; 0 itself may be set to mean another one."""

STATIC_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may have without asking (every architecture)."""


class CudaDriver:
    """The driver of this machine. Raises BackendError if cuda.core, the bindings or the driver are missing."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
            from cuda.core import Device, ObjectCode  # only cu12 or cu13 of it is loaded, as the bindings are
        except ImportError as error:
            hint = "install sm70-moe with the extra cuda12 or cuda13: pip install '.[cuda12]' in its checkout"
            raise BackendError(f"native kernels need cuda.core and cuda.bindings ({error}): {hint}") from error
        self._cuda: Any = driver
        self._device: Any = Device
        self._code: Any = ObjectCode
        try:
            started = driver.cuInit(0)
        except Exception as error:  # the bindings did not find the driver's library
            raise BackendError(f"native kernels need NVIDIA's driver: {error}") from error
        self._check("start CUDA", *started)

    def architecture(self, device: int) -> str:
        """ "sm_70" for compute capability 7.0. Raises LaunchRefused with the driver's text."""
        try:
            major, minor = self._device(device).compute_capability
        except Exception as error:  # cuda.core has its own classes, which differ between versions
            raise LaunchRefused(f"device {device}: {error}") from error
        return f"sm_{major}{minor}"

    def load(self, device: int, image: bytes, kernel: str) -> Any:
        """Load a cubin and its kernel now: a lazy load would fall into a graph's capture."""
        with self.current(device):
            try:
                code = self._code.from_cubin(image)
                found = code.get_kernel(kernel)
            except Exception as error:
                raise LaunchRefused(f"kernel {kernel!r} does not load on device {device}: {error}") from error
            self._check(kernel, *self._cuda.cuKernelGetFunction(found.handle))
        return _Loaded(kernel, code, found)

    def threads(self, device: int, kernel: object) -> int:
        """See `launch.Driver`."""
        assert isinstance(kernel, _Loaded)
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        handle = self._check("device", *self._cuda.cuDeviceGet(device))
        found = self._check(kernel.name, *self._cuda.cuKernelGetAttribute(attribute, kernel.found.handle, handle))
        return int(found)

    def residency(self, device: int, kernel: object, threads: int, shared: int) -> Residency:
        """See `launch.Driver`. A kernel that has no block of this size anywhere has 0, and no error."""
        assert isinstance(kernel, _Loaded)
        attributes = self._cuda.CUdevice_attribute
        handle = self._check("device", *self._cuda.cuDeviceGet(device))

        def asked(attribute: Any) -> int:
            return int(self._check("device", *self._cuda.cuDeviceGetAttribute(attribute, handle)))

        with self.current(device):
            function = self._cuda.CUfunction(int(kernel.found.handle))
            each = self._check(
                f"occupancy of {kernel.name}",
                *self._cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared),
            )
        return Residency(
            cooperative=bool(asked(attributes.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)),
            multiprocessors=asked(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            each=int(each),
        )

    def prepare(self, device: int, kernel: object, config: Config) -> Fire:
        """A function that launches; see `launch.Fire`."""
        assert isinstance(kernel, _Loaded)
        if config.shared > STATIC_SHARED:
            self._allow_shared(device, kernel, config.shared)
        launch, stream_type, results = self._cuda.cuLaunchKernelEx, self._cuda.CUstream, self._cuda.CUresult
        success, no_context = results.CUDA_SUCCESS, results.CUDA_ERROR_INVALID_CONTEXT
        function = self._cuda.CUfunction(int(kernel.found.handle))  # a cast, as CUDA documents it
        made, last = self._config(config), -1

        def fire(stream: int, parameters: int) -> None:
            nonlocal last
            if stream != last:
                made.hStream = stream_type(stream or DEFAULT_STREAM)
                last = stream
            (code,) = launch(made, function, parameters, 0)
            if code == no_context:  # a thread that has not used this device yet
                with self.current(device):
                    (code,) = launch(made, function, parameters, 0)
            if code != success:
                self._refuse(kernel.name, code, config)

        return fire

    @contextmanager
    def arena(self, device: int) -> Iterator[_Memory]:
        """Memory of a device, freed at the end; the device is current meanwhile."""
        with self.current(device):
            memory = _Memory(self._cuda, self._check)
            try:
                yield memory
            finally:
                memory.free()

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make a device's primary context current, as torch uses it, and put back what was current."""
        before = self._check("context", *self._cuda.cuCtxGetCurrent())
        try:
            self._device(device).set_current()
        except Exception as error:
            raise LaunchRefused(f"device {device}: {error}") from error
        try:
            yield
        finally:
            self._check("context", *self._cuda.cuCtxSetCurrent(before))

    def _config(self, config: Config) -> Any:
        cuda = self._cuda
        made = cuda.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = config.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = config.threads, 1, 1
        made.sharedMemBytes = config.shared
        attributes = []
        if config.dependent:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if config.cooperative:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        made.attrs, made.numAttrs = attributes, len(attributes)
        return made

    def _allow_shared(self, device: int, kernel: _Loaded, size: int) -> None:
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = self._check("device", *self._cuda.cuDeviceGet(device))
        self._check(
            f"{size} bytes of shared memory for {kernel.name}",
            *self._cuda.cuKernelSetAttribute(attribute, size, kernel.found.handle, handle),
        )

    def _check(self, what: str, code: Any, *results: Any) -> Any:
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise LaunchRefused(f"{what}: {self._text(code)}")
        return results[0] if results else None

    def _refuse(self, name: str, code: Any, config: Config) -> None:
        raise LaunchRefused(
            f"kernel {name!r} with grid {config.grid}, {config.threads} threads, {config.shared} bytes of shared "
            f"memory: {self._text(code)}"
        )

    def _text(self, code: Any) -> str:
        """Name and words of a driver's error."""
        _, name = self._cuda.cuGetErrorName(code)
        _, words = self._cuda.cuGetErrorString(code)
        return f"{(name or b'?').decode()}: {(words or b'?').decode()}"


class _Loaded:
    """A kernel, and the module that must live as long."""

    __slots__ = ("code", "found", "name")

    def __init__(self, name: str, code: Any, found: Any) -> None:
        self.name, self.code, self.found = name, code, found


class _Memory:
    """Allocations of one self-test run."""

    def __init__(self, cuda: Any, check: Callable[..., Any]) -> None:
        self._cuda, self._check = cuda, check
        self._held: list[Any] = []

    def put(self, array: NDArray[Any]) -> int:
        """Copy an array to new memory; its address. Raises LaunchRefused if there is no room."""
        whole = np.ascontiguousarray(array)
        address = self._check(f"{whole.nbytes} bytes of memory", *self._cuda.cuMemAlloc(max(1, whole.nbytes)))
        self._held.append(address)
        self._check("copy to the device", *self._cuda.cuMemcpyHtoD(address, whole.ctypes.data, whole.nbytes))
        return int(address)

    def get(self, address: int, array: NDArray[Any]) -> None:
        """Wait for everything before, and copy into the array."""
        self._check("kernel", *self._cuda.cuCtxSynchronize())
        self._check("copy from the device", *self._cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))

    def free(self) -> None:
        for address in self._held:
            self._cuda.cuMemFree(address)  # after a fault in a kernel this fails too: nothing to add
