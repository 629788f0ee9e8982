"""Resources that ptxas wrote into a cubin, read from the ELF file's `.nv.info` sections."""

import struct
from dataclasses import dataclass

# Attributes of an .nv.info record: [format u8, attribute u8, size u16], then, for format 4, a
# (symbol u32, value u32) pair.
_SIZED = 4
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F


@dataclass(kw_only=True, slots=True, frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor."""

    registers: int  # a thread
    local_memory: int  # bytes a thread: spills and arrays
    static_shared_memory: int  # bytes a CTA


def resources(cubin: bytes) -> Resources:
    """Resources of a cubin that holds one kernel. Raises ValueError if it is no such file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    try:
        found = list(_values(cubin))
        registers = max(value for attribute, value in found if attribute == _REGISTERS)
        stack = [v for attribute, v in found if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE)]
        shared = sum(size for name, _, size in _sections(cubin) if name.startswith(".nv.shared."))
        return Resources(
            registers=registers, local_memory=max(stack, default=0), static_shared_memory=shared
        )
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"cannot be read as a cubin: {error}") from None


def _sections(cubin: bytes) -> list[tuple[str, int, int]]:
    """(name, offset, size) of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    entries = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = entries[names][4]
    out = []
    for name, _, _, _, offset, length in entries:
        end = cubin.index(b"\0", start + name)
        out.append((cubin[start + name : end].decode(), offset, length))
    return out


def _values(cubin: bytes) -> list[tuple[int, int]]:
    """(attribute, value) of each sized record about a symbol."""
    out = []
    for name, offset, length in _sections(cubin):
        if not name.startswith(".nv.info"):
            continue
        end = offset + length
        while offset < end:
            form, attribute, size = struct.unpack_from("<BBH", cubin, offset)
            offset += 4
            if form == _SIZED:
                if size >= 8:
                    out.append((attribute, struct.unpack_from("<II", cubin, offset)[1]))
                offset += size
    return out
