"""How object stores are reached, and URLs, which carry no secrets: the part of the job that stores need to know."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from beam_inference.config.fields import Count, Model, Url


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
    """How object stores are reached; nothing here changes the output's bytes, and nothing here is secret."""

    gcs: Gcs = Gcs()
    s3: S3 = S3()
    http: Http = Http()
