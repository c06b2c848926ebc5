"""Object stores: parsing URLs, endpoints and credentials."""

import errno
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from ..._errors import CheckpointError
from ..._types import as_text, check_flag, check_text, PathLike


SCHEMES = ("s3", "gs")


# A URL, perhaps one from which `pathlib` took a slash, or somebody both. One letter is
# a drive.
URL = re.compile(r"(?i:s3|gs|gcs|memory|file):|[^\W\d_][\w.+-]+:/|[^\W_]://")


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


# In an endpoint, where the name of the bucket goes.
BUCKET = "{bucket}"


_ENDPOINT = re.compile(r"https?://[^\s/?#@{}]+(/[^\s?#@{}]*)?")


# A user and a password before a host or a bucket; and what may be a signature.
_USER = re.compile(
    r"((?<=:/)/?|^(?!\w+:/))(?:[^/\s:@]*:(?!\d+(?:[/\s]|$))\S*|[^/\s]*)@"
)


# What AWS_NO_SIGN_REQUEST can say.
_ANONYMOUS = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0", ""), False),
}


_QUERY = re.compile(r"\?[^\s'\"]*=[^\s'\"]*")


def censored(text: str) -> str:
    """A text for people, without the secrets of URLs in it."""
    return _QUERY.sub("?***", _USER.sub(r"\1***@", text))


def local_path(path: PathLike) -> str:
    """The absolute path of a file or directory of another format; raise for a URL."""
    text = as_text(path)
    if not text:
        raise CheckpointError("'' is not a path. Pass that of a file or a directory.")
    if URL.match(text):
        raise CheckpointError(
            f"{censored(text)!r} is a URL, and this format is read from and written to "
            "local disks only. Pass a local path, and copy what is there with the "
            "store's own tools."
        )
    return os.path.abspath(absolute(text))


def absolute(text: str) -> str:
    """The path that a user means, from the root of the file system."""
    path = os.path.expanduser(text)
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        problem = "The current directory was removed: pass an absolute path"
        raise FileNotFoundError(errno.ENOENT, problem, text) from None


@dataclass(frozen=True)
class StorePath(os.PathLike[str]):
    """A location in an object store, accepted wherever a path is.

    The URL alone, as a string, is enough if the defaults fit. `store / "name"` is a
    location below it.

    **Attributes:**

    - `url`: `"s3://bucket/path"` or `"gs://bucket/path"`.
    - `endpoint`: the address of an S3 server other than Amazon's, such as
        `"http://127.0.0.1:9000"`; the default is `AWS_ENDPOINT_URL_S3` or
        `AWS_ENDPOINT_URL` of the environment. If the server wants the bucket in the
        host's name, `"https://{bucket}.host"`.
    - `region`: of the bucket; the default is `AWS_REGION` or `AWS_DEFAULT_REGION`, or
        else Amazon's answer.
    - `single_writer`: promises that no other process ever saves to the same location.
        An S3 server without conditional writes requires it: of two writers there,
        the last one would win.
    - `anonymous`: send no credentials, to read a public bucket of S3; the default is
        `AWS_NO_SIGN_REQUEST` of the environment. Google's are read so if the
        environment has none.

    !!! example

        ```python
        import eqx_ckpt

        run = eqx_ckpt.StorePath("s3://bucket/runs/a", endpoint="http://127.0.0.1:9000")
        assert str(run / "000100") == "s3://bucket/runs/a/000100"
        ```
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    single_writer: bool = False
    anonymous: bool = False

    def __post_init__(self) -> None:
        check_text("url", self.url)
        for option in ("endpoint", "region"):
            if getattr(self, option) is not None:
                check_text(option, getattr(self, option))
        check_flag("single_writer", self.single_writer)
        check_flag("anonymous", self.anonymous)
        if self.url.partition("://")[0] not in SCHEMES or "://" not in self.url:
            raise CheckpointError(
                f"{censored(self.url)!r} is not a URL of an object store. Pass "
                "`s3://bucket/path` or `gs://bucket/path`."
            )

    def __repr__(self) -> str:
        shown = {"endpoint": self.endpoint and censored(self.endpoint)}
        shown |= {"region": self.region, "single_writer": self.single_writer or None}
        shown |= {"anonymous": self.anonymous or None}
        options = [f", {k}={v!r}" for k, v in shown.items() if v is not None]
        return f"StorePath({censored(self.url)!r}{''.join(options)})"

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: PathLike) -> "StorePath":
        part = os.fspath(name)
        check_text("name", part)
        if not part.strip("/"):
            raise CheckpointError(
                f"{name!r} is not a name. Pass that of a location below {self}."
            )
        return replace(self, url=f"{self.url.rstrip('/')}/{part}")


def remote_kvstore(store: StorePath) -> dict[str, Any]:
    """The `kvstore` of a TensorStore spec for a URL of one of `SCHEMES`."""
    where = repr(censored(store.url))
    scheme, _, rest = store.url.partition("://")
    bucket, _, path = rest.partition("/")
    path = path.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise CheckpointError(
            f"{where} does not name a bucket. Pass `{scheme}://bucket/path`."
        )
    parts = path.split("/") if path else []
    if "\\" in path or not path.isprintable() or {"", ".", ".."} & {*parts}:
        raise CheckpointError(
            f"{where} has an empty part, a dot as a part, a backslash, or a character "
            "that does not print, which stores and their tools do not agree about. "
            "Choose another path."
        )
    place = {"bucket": bucket, "path": path + "/" if path else ""}
    if scheme == "s3":
        return {"driver": "s3", **place, **_s3_options(store)}
    if store.endpoint or store.region or store.single_writer or store.anonymous:
        raise CheckpointError(
            f"{where}: `endpoint`, `region`, `single_writer` and `anonymous` are for "
            "S3. For a server that speaks as Google's does, set "
            "TENSORSTORE_GCS_HTTP_URL. Google's public buckets are read without "
            "credentials where the environment has none."
        )
    return {"driver": "gcs", **place}


def _s3_options(store: StorePath) -> dict[str, Any]:
    env = os.environ.get
    endpoint = store.endpoint or env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
    region = store.region or env("AWS_REGION") or env("AWS_DEFAULT_REGION")
    options: dict[str, Any] = {
        "aws_credentials": {
            "type": "anonymous" if _is_anonymous(store) else _credentials(store.url)
        },
        # The store is asked, and no emulation that two writers could fall between.
        "use_conditional_write": not store.single_writer,
    }
    if endpoint:
        if not _ENDPOINT.fullmatch(endpoint.replace(BUCKET, "bucket", 1)):
            raise CheckpointError(
                f"The endpoint {censored(endpoint)!r} is not a URL. Pass "
                "`https://host:port`, or `https://{bucket}.host`. Who may use it is "
                "said by the environment, such as AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY."
            )
        options["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"
    if region:
        options["aws_region"] = region
    return options


def _is_anonymous(store: StorePath) -> bool:
    said = os.environ.get("AWS_NO_SIGN_REQUEST", "")
    if said.lower() not in _ANONYMOUS:
        raise CheckpointError(
            f"AWS_NO_SIGN_REQUEST is {said!r}. Set it to 'true' or 'false', or to "
            "nothing."
        )
    return store.anonymous or _ANONYMOUS[said.lower()]


def _credentials(url: str) -> str:
    """Find the credentials, in the order of Amazon's own tools.

    TensorStore's own search does the same, but logs to stderr what it did not find.
    """
    env = os.environ.get
    if env("AWS_ACCESS_KEY_ID") and env("AWS_SECRET_ACCESS_KEY"):
        return "environment"
    files = (
        env("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        env("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    if env("AWS_WEB_IDENTITY_TOKEN_FILE") or any(
        os.path.exists(os.path.expanduser(file)) for file in files
    ):
        return "default"
    if env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or env(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    ):
        return "ecs"
    if (env("AWS_EC2_METADATA_DISABLED") or "").lower() != "true":
        return "imds"
    raise PermissionError(
        errno.EACCES,
        f"No credentials for {url!r}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are "
        f"not set, there is neither {files[0]} nor {files[1]}, and "
        "AWS_EC2_METADATA_DISABLED forbids to ask the machine. Set the first two, or "
        "run `aws configure`. To read a public bucket, pass "
        "`eqx_ckpt.StorePath(url, anonymous=True)`, or set AWS_NO_SIGN_REQUEST=true",
    )
