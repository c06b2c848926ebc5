"""Copies by the processes of a job; see jobs.py."""

from typing import Any

import eqx_ckpt


class Counting(eqx_ckpt.interop.Source):
    """An archive of NumPy, and how many bytes of it were read."""

    def __init__(self, path: str) -> None:
        self._source = eqx_ckpt.interop.open_npz(path)
        self.nbytes = 0

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        return self._source.manifest

    def read(self, reads: Any, damage: Any, report: Any = None) -> Any:
        self.nbytes += sum(read.nbytes for read in reads)
        return self._source.read(reads, damage, report)

    def __str__(self) -> str:
        return str(self._source)


def archive(path: str, target: str, layout: Any) -> int:
    """Copy an archive; return how many bytes this process has read."""
    source = Counting(path)
    eqx_ckpt.copy(source, target, layout=layout, timeout=20.0)
    return source.nbytes


def caught(path: str, target: str) -> tuple[str, str]:
    """What the copy of a checkpoint raises."""
    try:
        eqx_ckpt.copy(path, target, timeout=20.0)
    except Exception as e:
        return type(e).__name__, str(e)
    return "", ""
