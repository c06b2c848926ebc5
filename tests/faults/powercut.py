"""A real power cut, on a file system of its own: a file, mounted through a loop device.

FS_IOC_SHUTDOWN stops a file system at once and throws away all that it had not yet
written; the next mount replays the journal, as after a power cut.
"""

import fcntl
import os
import pathlib
import shutil
import struct
import subprocess
import time
from types import TracebackType


_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, u32)
_NO_LOG_FLUSH = 2
_FORCE = {"ext4": "-F", "xfs": "-f"}


class PowerCut:
    """A mounted file system, `disk`, whose power can be cut.

    `with PowerCut("ext4", directory) as power: save(power.disk); power.cut()`
    """

    def __init__(self, kind: str, directory: pathlib.Path) -> None:
        self.kind = kind
        self.image = directory / f"{kind}.img"
        self.disk = directory / f"{kind}.mnt"

    def __enter__(self) -> "PowerCut":
        self.disk.mkdir()
        with self.image.open("wb") as image:
            image.truncate(400 * 2**20)  # mkfs.xfs refuses less than 300 MB; sparse
        _sh(f"mkfs.{self.kind}", "-q", _FORCE[self.kind], self.image)
        self._mount()
        return self

    def commit_journal(self) -> None:
        """What an fsync of another process does: names become safe, data does not."""
        with (self.disk / ".other").open("w") as other:
            other.write("x")
            other.flush()
            os.fsync(other.fileno())

    def cut(self) -> None:
        """Cut the power, and mount again what is left."""
        descriptor = os.open(self.disk, os.O_RDONLY)
        try:
            flags = struct.pack("I", _NO_LOG_FLUSH)
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, flags)
        finally:
            os.close(descriptor)
        unmount(self.disk)
        self._mount()

    def lose_data(self) -> None:
        """From now on all but the names, sizes and last bytes of files is lost.

        Reading it fails with EIO. The file system is of no use after this.
        """
        unmount(self.disk)
        _sh("mount", "-o", "loop,ro", self.image, self.disk)
        for path in self.disk.rglob("*"):
            path.stat()
            if path.is_file():
                _read_end(path)
        os.truncate(self.image, 0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.disk.is_mount():
            unmount(self.disk)  # which also frees the loop device
        self.image.unlink()
        self.disk.rmdir()

    def _mount(self) -> None:
        _sh("mount", "-o", "loop", self.image, self.disk)


def _read_end(path: pathlib.Path) -> None:
    """Read the last bytes of a file, and little else (a small file is one page)."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, 4, max(0, os.fstat(descriptor).st_size - 4))
    os.close(descriptor)


def unmount(directory: pathlib.Path) -> None:
    """Unmount, once nobody has a file open there.

    A thread of TensorStore may close a file a moment after its content was delivered.
    """
    for _ in range(600):
        if not subprocess.run(["umount", directory], capture_output=True).returncode:
            return
        time.sleep(0.05)
    _sh("umount", directory)


def missing(kind: str, directory: pathlib.Path) -> str:
    """Why the power cannot be cut here, or ''."""
    if os.geteuid():
        return "mounting needs root"
    if not shutil.which(f"mkfs.{kind}"):
        return f"there is no mkfs.{kind}"
    try:
        with PowerCut(kind, directory) as power:
            power.cut()
    except (OSError, subprocess.CalledProcessError) as e:
        reason = getattr(e, "stderr", "") or str(e)
        return f"no power cut of {kind} here: {reason.splitlines()[0]}"
    return ""


def _sh(*command: str | os.PathLike[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
