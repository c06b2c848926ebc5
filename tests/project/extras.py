"""What each extra of the package is for. `python extras.py` uses all of them.

It prints those that are installed: they work. The others say how to install them.
This file needs nothing but the package: it also runs where only a wheel is installed.
"""

import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

import eqx_ckpt
from eqx_ckpt.__main__ import main


def save() -> None:
    eqx_ckpt.tree_serialise_leaves("ckpt", {"w": np.ones(3)}, overwrite=True)


def samples() -> eqx_ckpt.recording.Samples:
    with eqx_ckpt.recording.Recording("chain", {"x": np.zeros(3)}) as recording:
        recording.extend({"x": np.ones((2, 3))})
        recording.commit()
    return eqx_ckpt.recording.Samples("chain")


def use_cli() -> None:
    save()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(["verify", "ckpt"])
    if status == 2:
        raise ImportError(said.getvalue())
    assert status == 0


def use_hdf5() -> None:
    assert samples().to_hdf5("chain.h5").is_file()


def use_orbax() -> None:
    save()
    assert eqx_ckpt.interop.to_orbax("ckpt", "orbax").is_dir()


def use_progress() -> None:
    eqx_ckpt.tree_serialise_leaves("bar", {"w": np.ones(3)}, progress=True)


def use_report() -> None:
    save()
    eqx_ckpt.inspect.write_report("ckpt", "page.html")


def use_xarray() -> None:
    assert samples().to_datatree()["x"].shape == (2, 3)


# The package that each extra installs, and a use of it in an empty directory.
EXTRAS: dict[str, tuple[str, Callable[[], None]]] = {
    "cli": ("typer", use_cli),
    "hdf5": ("h5py", use_hdf5),
    "orbax": ("orbax.checkpoint", use_orbax),
    "progress": ("tqdm", use_progress),
    "report": ("plotly", use_report),
    "xarray": ("xarray", use_xarray),
}


def is_installed(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    found = not parent or importlib.util.find_spec(parent) is not None
    return found and importlib.util.find_spec(module) is not None


def says_how_to_install(extra: str) -> bool:
    """Whether a use of an extra that is missing names the command that installs it."""
    try:
        EXTRAS[extra][1]()
    except ImportError as e:
        return f"`pip install 'eqx-ckpt[{extra}]'`" in str(e)
    return False


@contextlib.contextmanager
def empty_directory() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        yield


if __name__ == "__main__":
    assert "site-packages" in os.path.dirname(eqx_ckpt.__file__), eqx_ckpt.__file__
    for extra, (module, use) in EXTRAS.items():
        with empty_directory():
            if is_installed(module):
                use()
                print(extra)
            else:
                assert says_how_to_install(extra), extra
