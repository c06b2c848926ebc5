"""A place in an object store, as a test gets it."""

from dataclasses import dataclass
from typing import Any

from . import s3
from .proxy import Proxy


@dataclass(frozen=True)
class Place:
    """Empty, in a bucket of its own, behind a proxy of its own."""

    bucket: str
    url: str  # with no slash at its end
    proxy: Proxy
    path: str = "run/"

    @property
    def endpoint(self) -> str:
        """The proxy's URL."""
        return self.proxy.url

    @property
    def spec(self) -> dict[str, Any]:
        """Of the `tensorstore.KvStore` there."""
        path = self.url.partition(f"//{self.bucket}/")[2] + "/"
        spec = {"driver": "gcs", "bucket": self.bucket, "path": path}
        if self.url.startswith("gs:"):
            return spec
        credentials = {"type": "environment"}
        return spec | {
            "driver": "s3",
            "endpoint": self.endpoint,
            "aws_region": s3.REGION,
            "aws_credentials": credentials,
        }
