"""A directory that is a bucket behind FUSE."""

import os
import pathlib
import warnings

import pytest

import eqx_ckpt
from support import mounted_bucket


def mounts(path: pathlib.Path, of: str) -> str:
    """What Linux says of mounts, with one of a type and source at a path."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return (
        "22 1 0:4096 / / rw - overlay overlay rw\n"
        f"36 22 {number} / /mnt/a\\040bucket rw,nosuid shared:1 - {of} rw\n"
        f"a line that is - {number}\n"
    )


@pytest.fixture
def said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The file that says what is mounted."""
    file = tmp_path / "mountinfo"
    monkeypatch.setattr(mounted_bucket, "_MOUNTS", str(file))
    monkeypatch.setattr(mounted_bucket, "_known", set())
    return file


@pytest.mark.parametrize(
    ("of", "program", "url"),
    [
        ("fuse.gcsfuse b", "gcsfuse", "gs://"),
        ("fuse.goofys b", "goofys", "s3://"),
        ("fuse mountpoint-s3", "mountpoint-s3", "s3://"),
    ],
)
def test_the_first_save_warns(
    tmp_path: pathlib.Path, said: pathlib.Path, of: str, program: str, url: str
) -> None:
    said.write_text(mounts(tmp_path, of))
    about = f"is on {program}, .* URL of the bucket, {url}"
    with pytest.warns(UserWarning, match=about):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "a", {"w": 1})
    with warnings.catch_warnings(record=True) as caught:
        eqx_ckpt.tree_serialise_leaves(tmp_path / "b", {"w": 1})
    assert not caught
    assert eqx_ckpt.load(tmp_path / "a") == {"w": 1}


@pytest.mark.parametrize(
    "of", ["ext4 s3fs", "fuse.sshfs s3fs", "fuse b", "fuse", "nfs4 b", None]
)
def test_others_do_not(
    tmp_path: pathlib.Path, said: pathlib.Path, of: str | None
) -> None:
    if of is not None:
        said.write_text(mounts(tmp_path, of))
    with warnings.catch_warnings(record=True) as caught:
        eqx_ckpt.tree_serialise_leaves(tmp_path / "a", {"w": 1})
    assert not caught
