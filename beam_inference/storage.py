"""How object stores are reached, and URLs, which carry no secrets: the part of the job that stores need to know."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

_FARTHEST = 2**40  # TensorStore's coordinates are 64 bits; sums of ours must stay well inside
Integer = Annotated[int, Strict(), Field(ge=-_FARTHEST, le=_FARTHEST)]
Count = Annotated[int, Strict(), Field(gt=0, le=_FARTHEST)]
Natural = Annotated[int, Strict(), Field(ge=0, le=_FARTHEST)]


def _as_path(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path")
    if isinstance(value, str):
        refuse_credentials(value)
    return value


def holds_credentials(text: str) -> bool:
    """Whether a URL, as it is or percent-decoded, carries a password, a signature or a token."""
    return any(_CREDENTIALS_IN_URL.search(each) is not None for each in (text, unquote(text)))


def refuse_credentials(url: str) -> None:
    """Refuse a URL that carries credentials; the message does not repeat it. Raises ValueError."""
    if holds_credentials(url):
        raise ValueError(
            "this URL holds credentials (user:password@, or a signature or token after ?). What a job names is "
            "recorded beside its output and told in messages, where others can read it. Let the store find its "
            "credentials, see docs/object-stores.md"
        )


def _as_writable(value: object) -> object:
    if isinstance(value, str) and re.match("https?://", value):
        raise ValueError("http(s):// can only be read from; write to a local folder, gs:// or s3://")
    return _as_path(value)


_CREDENTIALS_IN_URL = re.compile(
    r"://[^/@]*@|://[^/]*:(?!\d+(/|$))[^@]*@"  # a secret may hold a slash, and a port is none
    r"|[?&][^=&]*(signature|token|credential|secret|password|passwd|pwd|key|sig|auth|jwt|code)[^=&]*=",
    re.IGNORECASE,
)
Url = Annotated[str, BeforeValidator(_as_path)]
WritableUrl = Annotated[str, BeforeValidator(_as_writable)]


class Model(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class Gcs(Model):
    """Google Cloud Storage (``gs://``); credentials are Google's application default ones."""

    endpoint: Url | None = Field(
        None, description="another server of the same protocol; default $STORAGE_EMULATOR_HOST"
    )
    user_project: str | None = Field(None, description="who is billed, for buckets where the requester pays")
    concurrency: Count | None = Field(None, description="requests at a time per process; TensorStore's default is 32")


class S3(Model):
    """Amazon S3 and compatible stores (``s3://``)."""

    endpoint: Url | None = Field(None, description="of a compatible store; default $AWS_ENDPOINT_URL, else Amazon's")
    region: str | None = Field(None, description="default $AWS_REGION; needed beside endpoint only if the store asks")
    credentials: Literal["default", "environment", "profile", "imds", "ecs", "anonymous"] | None = Field(
        None, description="where the workers find their keys; the keys themselves never stand in a job file"
    )
    profile: str | None = Field(None, description="which profile, for credentials: profile")
    concurrency: Count | None = Field(None, description="requests at a time per process; TensorStore's default is 32")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile is not None and self.credentials != "profile":
            raise ValueError("profile has an effect only with credentials: profile; remove it, or write that")
        return self


class Http(Model):
    """Volumes and files served over ``http(s)://``, read-only."""

    concurrency: Count | None = Field(None, description="requests at a time per process; TensorStore's default is 32")


class Storage(Model):
    """How object stores are reached; nothing here changes the output's bytes, and nothing here is secret."""

    gcs: Gcs = Gcs()
    s3: S3 = S3()
    http: Http = Http()
