"""Resources read from a cubin's ELF sections: a small one by hand, and hostile ones."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv2mk.kernel.elf import Resources, resources

# Records of .nv.info, as the assembler writes them: format, attribute, size or value.
REGISTERS = bytes.fromhex("042f0800 07000000 60000000")  # 96, of symbol 7
FRAME = bytes.fromhex("04110800 07000000 00000000")
STACK = bytes.fromhex("04120800 07000000 00000000")
PARAMETER = bytes.fromhex("04170c00 00000000 01000800 00f02100")  # sized, and no pair
SHORT = bytes.fromhex("040a0400 02000000")  # sized, shorter than a pair
FLAG = bytes.fromhex("03500000")  # no payload

REFUSED = r"not a 64-bit ELF file|cannot be read as a cubin"


def make_elf(*sections: tuple[str, bytes, int]) -> bytes:
    """A 64-bit little-endian ELF file; sections are (name, bytes, size), in the file's order.

    The section table comes last, the names' section is its second entry.
    """
    sections = (("", b"", 0), (".shstrtab", b"", 0), *sections)
    names, name_at = b"", []
    for name, _, _ in sections:
        name_at.append(len(names))
        names += name.encode() + b"\0"
    body, table = names, b""
    for at, (name, data, size) in zip(name_at, sections, strict=True):
        data, size = (names, len(names)) if name == ".shstrtab" else (data, size)
        offset = 64 if name == ".shstrtab" else 64 + len(body)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        table += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, size, 0, 0, 1, 0)
        body += b"" if name == ".shstrtab" else data
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQ", 2, 190, 1, 0, 0, 64 + len(body))
    header += struct.pack("<IHHHHHH", 0, 64, 56, 0, 64, len(sections), 1)
    return header + body + table


def info(name: str, *records: bytes) -> tuple[str, bytes, int]:
    data = b"".join(records)
    return name, data, len(data)


def kernel_elf(**changed: bytes) -> bytes:
    """A cubin of one kernel, `k`, with some records changed."""
    general = {"registers": REGISTERS, "frame": FRAME, "stack": STACK, **changed}
    return make_elf(
        info(".nv.info", *general.values()),
        info(".nv.info.k", FLAG, PARAMETER, SHORT),
        (".text.k", b"\0" * 32, 32),
        (".nv.shared.k", b"", 1024),  # no bytes in the file
        (".nv.shared.reserved.0", b"", 64),
        (".nv.merc.nv.shared.reserved.0", b"", 4096),  # not this program's
    )


def test_resources_of_a_file_made_by_hand() -> None:
    assert len(REGISTERS) == 12
    expected = Resources(registers=96, local_memory=0, static_shared_memory=1088)
    assert resources(kernel_elf()) == expected


@pytest.mark.parametrize("name", ["frame", "stack"])
def test_a_frame_or_a_stack_is_local_memory(name: str) -> None:
    record = {"frame": FRAME, "stack": STACK}[name][:8] + (264).to_bytes(4, "little")
    assert resources(kernel_elf(**{name: record})).local_memory == 264


def test_registers_are_32_bits_little_endian() -> None:
    record = REGISTERS[:8] + bytes.fromhex("ff000000")
    assert resources(kernel_elf(registers=record)).registers == 255


def test_a_file_without_frame_or_shared_memory_has_none() -> None:
    expected = Resources(registers=96, local_memory=0, static_shared_memory=0)
    assert resources(make_elf(info(".nv.info", REGISTERS))) == expected


def test_registers_beside_a_kernels_own_records_count() -> None:
    """Where several sections tell, the most is what must fit."""
    more = REGISTERS[:8] + bytes.fromhex("66000000")
    file = make_elf(info(".nv.info", REGISTERS), info(".nv.info.k", more))
    assert resources(file).registers == 102


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n" + bytes(100),
        b"\x7fELF\x01" + kernel_elf()[5:],  # 32 bits
        bytes(4096),
        b"\x7fELF\x02" + bytes(200),
        make_elf(),
        make_elf(info(".nv.info", FRAME, STACK)),  # tells no registers
        make_elf(info(".nv.information", b""), info(".text.k", REGISTERS)),
    ],
)
def test_what_is_no_cubin_is_a_value_error(file: bytes) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        resources(file)


def test_a_truncated_file_is_a_value_error() -> None:
    whole = kernel_elf()
    for length in range(len(whole) - 24):
        with pytest.raises(ValueError, match=REFUSED):
            resources(whole[:length])
    # Of the last entry of the table, only what follows its size may be missing.
    assert resources(whole[:-24]) == resources(whole)


def accepts_or_refuses(file: bytes) -> None:
    """A result that could be one, or ValueError: no other error, and no end that never comes."""
    try:
        found = resources(file)
    except ValueError:
        return
    assert found.registers >= 0
    assert found.local_memory >= 0
    assert found.static_shared_memory >= 0


FILE = kernel_elf()
PLACES = st.integers(5, len(FILE) - 1)


# Masks leave the top bit alone, so that no offset passes 2^63: that is the test after this one.
@pytest.mark.usefixtures("alarm")
@settings(max_examples=400)
@given(st.lists(st.tuples(PLACES, st.integers(1, 127)), min_size=1, max_size=12))
def test_flipped_bytes_are_read_or_refused(flips: list[tuple[int, int]]) -> None:
    file = bytearray(FILE)
    for at, mask in flips:
        file[at] ^= mask
    accepts_or_refuses(bytes(file))


@pytest.mark.parametrize("at", [40 + 7, len(FILE) - 6 * 64 + 24 + 7])  # of the table, of .nv.info
def test_an_offset_past_63_bits_is_read_or_refused(at: int) -> None:
    file = bytearray(FILE)
    file[at] |= 0x80
    accepts_or_refuses(bytes(file))


@pytest.mark.usefixtures("alarm")
@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_random_bytes_behind_the_magic_are_read_or_refused(tail: bytes) -> None:
    tail = bytes(byte & 0x7F for byte in tail)
    accepts_or_refuses(b"\x7fELF\x02" + tail)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("at", "value"), [(58, 0), (60, 0xFFFF), (62, 0xFFFF), (60, 0)])
def test_an_odd_section_table_is_read_or_refused(at: int, value: int) -> None:
    """Size, number and names of its entries."""
    file = bytearray(FILE)
    file[at : at + 2] = value.to_bytes(2, "little")
    accepts_or_refuses(bytes(file))
