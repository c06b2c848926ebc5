"""What is at the path of a checkpoint, and not of it."""

import re
from collections.abc import Iterable

from .._errors import CheckpointError, CorruptCheckpointError
from .manifest import DATABASE, foreign, MANIFEST
from .parse import from_bytes, START


_OWN_NAME = re.compile(rf"(.+/)?({MANIFEST}|c(\.\d+)*|{DATABASE})")


def strangers(
    keys: Iterable[str], manifest: bytes | None, where: str, *, on_disk: bool = False
) -> list[str]:
    """The keys among `keys` that do not belong to the checkpoint of a manifest.

    If the manifest is damaged, all files named like those of a checkpoint belong to it.
    After a crash, a file `on_disk` may be empty, cut, or end in zeros.
    """
    keys = list(keys)
    if manifest is None:
        return keys
    try:
        return foreign(keys, from_bytes(manifest, where))
    except CorruptCheckpointError:
        is_cut = on_disk and START.startswith(manifest.rstrip(b"\0"))
        is_ours = is_cut or b"eqx_ckpt" in manifest
        return [key for key in keys if not (is_ours and _OWN_NAME.fullmatch(key))]
    except CheckpointError:
        return keys
