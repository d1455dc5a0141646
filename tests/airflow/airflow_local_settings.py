"""Settings of Airflow for tests: it sends its requests to a stand-in instead of Dataflow.

Airflow reads this file from its config folder. The stand-in's URL is in ``DATAFLOW_STANDIN``. Other
services of Google are not touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from airflow.providers.google.cloud.hooks.dataflow import AsyncDataflowHook, DataflowHook
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import dataflow_v1beta3


class AwaitableClient:
    """A synchronous client of Google's whose methods can be awaited.

    The asynchronous clients speak only gRPC, which the stand-in does not.
    """

    def __init__(self, client: object) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **keywords)

        return call


def options(*_: object, **__: object) -> ClientOptions:
    return ClientOptions(api_endpoint=os.environ["DATAFLOW_STANDIN"])


async def rest_client(_: AsyncDataflowHook, kind: type) -> AwaitableClient:
    synchronous = getattr(dataflow_v1beta3, kind.__name__.replace("Async", ""))
    return AwaitableClient(
        synchronous(credentials=AnonymousCredentials(), client_options=options(), transport="rest")
    )


DataflowHook.get_client_options = options
AsyncDataflowHook.initialize_client = rest_client
