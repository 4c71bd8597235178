"""Files and batches as clients see them."""

from typing import Literal

import msgspec

from jaxllm.errors import refused
from jaxllm.openai.batch_endpoints import BATCH_ENDPOINTS
from jaxllm.openai.fields import read_fields
from jaxllm.openai.pooling.endpoints import POOLING_PATHS

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S = 24 * 3600
_MAX_METADATA = 16


class File(msgspec.Struct, kw_only=True):
    """A file that a client has uploaded, or that has a batch's results."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, kw_only=True):
    """Why a whole batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A file of requests on its way to files of answers and errors."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None

    @classmethod
    def read(cls, body: object) -> "BatchBody":
        fields = read_fields(body, cls)
        known = (*BATCH_ENDPOINTS, *POOLING_PATHS)
        if fields.endpoint not in known:
            raise refused("endpoint", fields.endpoint, f"use {' or '.join(known)}")
        if len(fields.metadata or ()) > _MAX_METADATA:
            raise refused(
                "metadata", f"{len(fields.metadata or ())} pairs", f"at most {_MAX_METADATA}"
            )
        return fields
