"""One GPU through the CUDA driver: what it is, whether a kernel fits it, loading and launching.

Memory, streams and events are PyTorch's; the driver is called only for what PyTorch does not have.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv2mk.manifests.errors import NodeError
from dsv2mk.manifests.sidecar import Sidecar

#: Compute capability -> the architecture its cubins are compiled for.
ARCH_OF = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

_WITHOUT_GPU = "Without a GPU: dsv2mk generate DIR --backend reference"

_CTYPES = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceFacts:
    """What decides whether a kernel can run."""

    name: str
    capability: tuple[int, int]
    driver: int  # as cuDriverGetVersion counts: 12080 is 12.8
    multiprocessors: int
    shared_memory: int  # bytes that a CTA may have
    free_memory: int  # bytes
    identity: str = ""  # no other GPU has it

    @property
    def arch(self) -> str:
        """The architecture of cubins for this device. Raises NodeError if there is none."""
        if self.capability not in ARCH_OF:
            known = ", ".join(f"{a}.{b} ({arch})" for (a, b), arch in ARCH_OF.items())
            raise NodeError(
                f"{self.name}: compute capability",
                expected=known,
                found="{}.{}".format(*self.capability),
                fix=_WITHOUT_GPU,
            )
        return ARCH_OF[self.capability]


def facts_of(index: int) -> DeviceFacts:
    """Facts of a device of this process. Raises NodeError if there is none."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise NodeError(
            f"no CUDA device {index}",
            expected=f"a GPU of {' or '.join(ARCH_OF.values())}",
            found=f"{torch.cuda.device_count()} devices",
            fix=_WITHOUT_GPU,
        )
    properties: Any = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        free, _ = torch.cuda.mem_get_info()
    return DeviceFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        driver=_check(_driver().cuDriverGetVersion()),
        multiprocessors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        free_memory=free,
        identity=str(getattr(properties, "uuid", "")),
    )


def refuse_ranks(ranks: int, world: int) -> None:
    """Raise NodeError if so many processes cannot decode an artifact of so many ranks."""
    if world != ranks:
        raise NodeError(
            "world size",
            expected=f"{ranks}, one process a rank of the artifact",
            found=world,
            fix=f"torchrun --nproc_per_node={ranks} -m dsv2mk.runner ..."
            if ranks > 1
            else "Start it without torchrun",
        )


def refuse_misfit(sidecar: Sidecar, facts: DeviceFacts, *, ranks: int, world: int) -> None:
    """Raise NodeError if a cubin cannot run here, or not for this many ranks.

    ranks: of the artifact; world: processes of this launch.
    """
    recompile = f"Compile one: dsv2mk cubin --artifact DIR --arch {facts.arch}"
    if sidecar.arch != facts.arch:
        raise NodeError(
            f"the cubin is for another architecture than {facts.name}",
            expected=facts.arch,
            found=sidecar.arch,
            fix=recompile,
        )
    if facts.driver < sidecar.minimum_driver:
        raise NodeError(
            "the CUDA driver is too old for the cubin",
            expected=f"at least {_version(sidecar.minimum_driver)}",
            found=_version(facts.driver),
            fix="Install a newer driver",
        )
    if sidecar.topology.ranks != ranks:
        raise NodeError(
            "the cubin is for another number of ranks than the artifact",
            expected=ranks,
            found=sidecar.topology.ranks,
            fix=recompile,
        )
    refuse_ranks(ranks, world)
    needed = sidecar.shared_memory + sidecar.static_shared_memory
    if needed > facts.shared_memory:
        raise NodeError(
            f"bytes of shared memory of a CTA on {facts.name}",
            expected=f"at least {needed}",
            found=facts.shared_memory,
            fix=f"Take another GPU of {sidecar.arch}. {_WITHOUT_GPU}",
        )


def refuse_memory(needed: Mapping[str, int], free: int) -> None:
    """Raise NodeError if what is to be allocated does not fit; needed: bytes by purpose."""
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed.items())
        raise NodeError(
            "GPU memory",
            expected=f"{total / 1e9:.2f} GB free ({parts})",
            found=f"{free / 1e9:.2f} GB",
            fix="Stop what else uses the GPU, or take a shorter --context",
        )


def grid_size(sidecar: Sidecar, multiprocessors: int, per_multiprocessor: int, wanted: int) -> int:
    """CTAs to launch: as wanted; 0: one a multiprocessor, at most what the kernel allows.

    Raises NodeError if they cannot be co-resident, or are too few for the model.
    """
    most = min(multiprocessors * per_multiprocessor, sidecar.max_ctas)
    ctas = wanted or min(most, multiprocessors)
    if not sidecar.min_ctas <= ctas <= most:
        raise NodeError(
            "the grid cannot be co-resident, or is too small for the model",
            expected=f"{sidecar.min_ctas} to {most} CTAs",
            found=ctas,
            fix="Leave --ctas out, or free the GPU of other processes",
        )
    return ctas


class Kernel:
    """A cubin in the memory of one device."""

    def __init__(self, cubin: bytes, sidecar: Sidecar, index: int) -> None:
        self.sidecar = sidecar
        cuda = _driver()
        self.device = torch.device("cuda", index)
        torch.zeros(1, device=self.device)  # makes PyTorch's context the current one
        try:
            self._module = _check(cuda.cuModuleLoadData(cubin))
            entry = sidecar.entry.encode()
            self._function = _check(cuda.cuModuleGetFunction(self._module, entry))
        except NodeError as error:
            raise NodeError(f"the driver cannot load the cubin: {error.what}") from None
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(cuda.cuFuncSetAttribute(self._function, attribute, sidecar.shared_memory))
        self._types = tuple(_CTYPES[kind] for _, kind in sidecar.parameters)

    def most_per_multiprocessor(self) -> int:
        """CTAs that can be co-resident on a multiprocessor."""
        return int(
            _check(
                _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    self._function, self.sidecar.block, self.sidecar.shared_memory
                )
            )
        )

    def launch(self, ctas: int, arguments: Mapping[str, int]) -> None:
        """Launch on PyTorch's current stream; every parameter by name."""
        values = tuple(arguments[name] for name, _ in self.sidecar.parameters)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        _check(
            _driver().cuLaunchCooperativeKernel(
                self._function,
                *(ctas, 1, 1),
                *(self.sidecar.block, 1, 1),
                self.sidecar.shared_memory,
                stream,
                (values, self._types),
            )
        )


def _driver() -> Any:
    """The driver's bindings. Raises NodeError without them."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NodeError(
            f"the CUDA bindings cannot be imported: {error}",
            fix=f"pip install 'dsv2mk[gpu]'. {_WITHOUT_GPU}",
        ) from None
    return driver


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises NodeError with the driver's name of an error."""
    code, *values = result
    if int(code) != 0:
        raise NodeError(f"CUDA driver: {getattr(code, 'name', code)}")
    return values[0] if values else None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
