"""Parts of mappings are aligned, zero, apart from each other, and returned to the system when nothing uses them."""

from concurrent.futures import ThreadPoolExecutor

from outrider.verify.model.cpu.native.huge_pages import ALIGNMENT, SHARED_BYTES, HugePages

SIZES = (1, 63, 64, 65, 5000, 3 << 20, SHARED_BYTES // 2, SHARED_BYTES // 2 + 1, 40 << 20, 0)


def test_parts_are_aligned_zero_and_apart() -> None:
    memory = HugePages()
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(memory.take, SIZES * 3))
    assert [len(part) for part in parts] == [*SIZES * 3]
    assert all(part.ctypes.data % ALIGNMENT == 0 and not part.any() for part in parts)
    for number, part in enumerate(parts):
        part.fill(number % 256)
    assert all((part == number % 256).all() for number, part in enumerate(parts))
