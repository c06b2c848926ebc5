"""Buckets of object stores, and `memory://`."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ..._format.sample_record import RECORD
from ..._types import Layout
from ..calls.tensorstore_calls import no_bucket, wait_for
from ..interface.committed_manifest import is_checkpoint
from ..interface.free_space import WhyTooFew
from ..interface.place import (
    Attempt,
    is_step_at,
    ONE_CHECKPOINT,
    ONE_RECORDING,
    run_of,
    Share,
    Shown,
    SoleWriter,
    Steps,
    Storage,
)
from ..interface.replacing import inside_of
from .bucket_attempt import BucketAttempt, BucketShare, whole_above
from .bucket_steps import BucketSteps
from .bucket_writer import BucketWriter
from .keyvalue_place import KeyValues
from .store_patience import LAST_PATIENCE, wait_patiently


logger = logging.getLogger("eqx_ckpt")


@dataclass(frozen=True, eq=False)
class Bucket(KeyValues):
    """A location in an S3 bucket, or in a storage that works like one."""

    scheme = "s3"
    max_key = 1024
    max_object = 5 * 2**30

    def begin(
        self,
        layout: Layout,
        arrays: Sequence[str],
        *,
        overwrite: bool,
        why_too_few: WhyTooFew,
    ) -> Attempt:
        return BucketAttempt(self, layout, overwrite)

    def join(self, shown: Shown, layout: Layout) -> Share:
        return BucketShare(self.at(shown.path), layout)

    def steps(self) -> Steps:
        return BucketSteps(self)

    def why_apart(self, base: Storage) -> str:
        """References stay in a run, whose deletions follow them."""
        is_one_run = run_of(base).spec == run_of(self).spec
        if is_one_run and is_step_at(self) and is_step_at(base):
            return ""
        return f"in a store, it and {self} have to be steps of one run"

    def whole_above(self) -> tuple[str, str]:
        return whole_above(self)

    def explain(self) -> str:
        return inside_of(*self.whole_above())

    def explain_run(self) -> str:
        if is_checkpoint(self):
            return ONE_CHECKPOINT
        return ONE_RECORDING if self.read(RECORD, 1) else self.explain()

    def writer(self) -> SoleWriter:
        return BucketWriter(self)

    def wait_for(self, future: Any, key: str = "", most: float | None = None) -> Any:
        return wait_patiently(self.spec, future, self.url(key), most)

    def is_listed(self, key: str) -> bool:
        # In a missing bucket every key is missing; only a listing shows the difference.
        import tensorstore as ts

        only = ts.KvStore.KeyRange(key, f"{key}\0")
        return bool(self.wait_for(self.open().list(only), key))


@dataclass(frozen=True, eq=False)
class GoogleBucket(Bucket):
    """A location in a bucket of Google Cloud Storage."""

    scheme = "gs"

    def list_keys(self, prefix: str = "") -> list[str]:
        # TensorStore reports a denied or failed listing as an empty one.
        keys = super().list_keys(prefix) or super().list_keys(prefix)
        self.wait_for(self.open().read("@"))
        return keys

    def is_listed(self, key: str) -> bool:
        """As in any bucket; raise if there is none.

        TensorStore reports every key in a missing bucket as missing. Google says
        without credentials whether a bucket exists.
        """
        # These imports take as long as that of NumPy.
        import urllib.error
        import urllib.request

        if super().is_listed(key):
            return True
        # TensorStore reports a denied or failed listing as an empty one.
        self.wait_for(self.open().read("@"))
        if super().is_listed(key):
            return True
        google = os.environ.get(
            "TENSORSTORE_GCS_HTTP_URL", "https://storage.googleapis.com"
        )
        place = f"{google.rstrip('/')}/storage/v1/b/{self.spec['bucket']}"
        try:
            urllib.request.urlopen(place, timeout=LAST_PATIENCE).close()
        except urllib.error.HTTPError as e:
            e.close()
            if e.code == HTTPStatus.NOT_FOUND:
                raise no_bucket(self.url()) from None
        except (OSError, ValueError) as e:
            bucket = self.spec["bucket"]
            logger.debug("Whether %s exists is not known: %s", bucket, e)
        return False


@dataclass(frozen=True, eq=False)
class Memory(Bucket):
    """A location in the memory of this process, for tests and examples."""

    scheme = "memory"
    is_shared = False
    max_key = max_object = math.inf

    def wait_for(self, future: Any, key: str = "", most: float | None = None) -> Any:
        return wait_for(future, self.url(key), most)

    def is_listed(self, key: str) -> bool:
        return False
