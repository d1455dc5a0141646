"""How object stores are reached, and which URLs are refused: what stores need to know of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field, model_validator

from beam_inference.config.fields import (
    Count,
    Model,
    Url,
    refuse_credentials,
    refuse_overlong,
    refuse_unwritable,
)
from beam_inference.errors import ConfigError


class Gcs(Model):
    """Google Cloud Storage (``gs://``); credentials are Google's application default ones."""

    endpoint: Url | None = Field(
        None, description="another server of the same protocol; default $STORAGE_EMULATOR_HOST"
    )
    user_project: str | None = Field(
        None, description="who is billed, for buckets where the requester pays"
    )
    concurrency: Count | None = Field(
        None, description="requests at a time per process; TensorStore's default is 32"
    )


class S3(Model):
    """Amazon S3 and compatible stores (``s3://``)."""

    endpoint: Url | None = Field(
        None, description="of a compatible store; default $AWS_ENDPOINT_URL, else Amazon's"
    )
    region: str | None = Field(
        None, description="default $AWS_REGION; needed beside endpoint only if the store asks"
    )
    credentials: Literal["default", "environment", "profile", "imds", "ecs", "anonymous"] | None = (
        Field(
            None,
            description=(
                "where the workers find their keys; the keys themselves never stand in a job file"
            ),
        )
    )
    profile: str | None = Field(None, description="which profile, for credentials: profile")
    concurrency: Count | None = Field(
        None, description="requests at a time per process; TensorStore's default is 32"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile is not None and self.credentials != "profile":
            raise ValueError(
                "profile has an effect only with credentials: profile; remove it, or write that"
            )
        return self


class Http(Model):
    """Volumes and files served over ``http(s)://``, read-only."""

    concurrency: Count | None = Field(
        None, description="requests at a time per process; TensorStore's default is 32"
    )


class Storage(Model):
    """How object stores are reached.

    Nothing here changes the output's bytes, and nothing here is secret.
    """

    gcs: Gcs = Gcs()
    s3: S3 = S3()
    http: Http = Http()


def check_url(url: str, name: str | None = None) -> None:
    """Refuse a URL that carries credentials, or that is a path too long for any file system.

    Args:
        url: a URL, or a path.
        name: what it is, for the message, which does not repeat the URL.

    Raises:
        ConfigError: it carries credentials, or is too long.
    """
    _refuse(refuse_credentials, url, name)
    _refuse(refuse_overlong, url, name)


def check_writable(url: str) -> None:
    """Refuse a URL that can only be read from, or not be read back.

    Raises:
        ConfigError: it is of the web, ``http(s)://``, or has a bar or a backslash in its name.
    """
    _refuse(refuse_unwritable, url, url)


def _refuse(check: Callable[[str], None], url: str, name: str | None) -> None:
    try:
        check(url)
    except ValueError as error:
        raise ConfigError(str(error) if name is None else f"{name}: {error}") from None
