"""Memory of a virtual machine, made ready before it is measured."""

import mmap


def warm_memory(nbytes: int) -> None:
    """Touch memory and free it at once, so that a host has it ready.

    A virtual machine gives free memory back to its host after a second or so. To get it
    anew takes seconds for each GiB, which is the host's time and nobody's merit.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as m:
        m.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, len(m), mmap.PAGESIZE):
            m[start] = 1
