"""A checksum, for what is small: TensorStore has no door to its own, faster one."""

_POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes) -> bytes:
    """As files have it, with the lowest byte first."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]
