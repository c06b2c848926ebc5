"""What a user says of a second place for the steps of a run."""

import numbers
from collections.abc import Sequence

from .._distributed.meeting import check_timeout, TIMEOUT
from .._steps.retention import checked_keep, Keep
from .._steps.save_times import checked_when, When
from .._steps.save_when_idle import WhenIdle
from .._storage.locate import locate
from .._types import is_real, PathLike, shown, wrong


class Mirror:
    """A second place for the steps of a run, usually a bucket.

    A [`eqx_ckpt.CheckpointManager`][] with a `mirror` saves each step to its own
    directory, and copies the steps that are due to the mirror, in the background. There
    they are an ordinary run.

    **Attributes:**

    - `path`, `when`, `keep`, `bytes_per_second`, `timeout`: the arguments.

    !!! example

        ```python
        import eqx_ckpt

        mirror = eqx_ckpt.Mirror("backup/a", keep=eqx_ckpt.keep_last(3))
        keep = eqx_ckpt.keep_last(1)
        with eqx_ckpt.CheckpointManager("runs/a", keep=keep, mirror=mirror) as manager:
            for step in (100, 200):
                manager.save(step, {"step": step})
        assert manager.mirrored()[-1] == 200
        ```
    """

    def __init__(
        self,
        path: PathLike,
        *,
        when: When | Sequence[When] | None = None,
        keep: Keep | Sequence[Keep] | None = None,
        bytes_per_second: float | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """**Arguments:**

        - `path`: a directory or a location in an object store, other than that of the
            manager.
        - `when`: which saved steps are due for the mirror, as the `when` of
            [`eqx_ckpt.CheckpointManager`][], where `last` is the newest one that was
            due and not deleted; by default, all that are newer than `last`; for `[]`,
            none. The step that is saved after SIGTERM is due in any case, and so is
            one that is saved when the mirror has newer ones, but for `[]`: its upload
            fails, unless they have the same history. While a step is uploaded, only
            the newest one that is due waits.
        - `keep`: which steps to keep in the mirror, as the `keep` of the manager.
        - `bytes_per_second`: the most that an upload sends; by default, all it can.
        - `timeout`: how many seconds `close` waits for an upload.
        """
        locate(path)
        check_timeout(timeout)
        is_free = bytes_per_second is None
        if not is_free and not (is_real(bytes_per_second) and bytes_per_second > 0):
            raise wrong(bytes_per_second, numbers.Real)(
                f"`bytes_per_second` is {shown(bytes_per_second)}. Pass a positive "
                "number, or `None` for no bound."
            )
        self.path = path
        self.when = None if when is None else checked_when(when)
        if any(isinstance(function, WhenIdle) for function in self.when or ()):
            raise ValueError(
                "`when` has a function of `save_when_idle`, which measures the saves "
                "of a manager, and no uploads. Pass it to the manager. While a step is "
                "uploaded, the newest one waits anyway."
            )
        self.keep = checked_keep(keep)
        self.bytes_per_second = bytes_per_second
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"Mirror({locate(self.path).url()!r})"
