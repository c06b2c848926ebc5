"""What fuzzers found: for each target a zip file of inputs."""

import zipfile
from collections.abc import Iterator
from pathlib import Path


CORPUS = Path(__file__).parent / "corpus"


def inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """The inputs of a target, which may have none."""
    if not (file := CORPUS / f"{name}.zip").exists():
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.namelist():
            yield entry, archive.read(entry)


def unpack(name: str, folder: Path) -> None:
    for entry, data in inputs(name):
        (folder / entry).write_bytes(data)


def pack(name: str, folder: Path) -> None:
    """Keep the files of a folder; equal ones become equal bytes."""
    files = sorted(folder.iterdir())
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes())
