"""A small client of Baton's gRPC API, blocking or asyncio. It starts no process and loads no model.

    from baton.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.chat("What is the capital of France?").text)

A call returns a stream at once. It yields events (`Accepted`, `Delta`, `Finished`); `text` and
`read()` consume the rest. Failures are BatonErrors with `message`, `field` and `retry_after_s`.
"""

from baton.client.client import Answer as Answer
from baton.client.client import AsyncClient as AsyncClient
from baton.client.client import AsyncStream as AsyncStream
from baton.client.client import Client as Client
from baton.client.client import Retries as Retries
from baton.client.client import Stream as Stream
from baton.client.messages import Options as Options
from baton.core.errors import BatonError as BatonError
from baton.core.errors import Cancelled as Cancelled
from baton.core.errors import ContextLengthExceeded as ContextLengthExceeded
from baton.core.errors import DeadlineExceeded as DeadlineExceeded
from baton.core.errors import Internal as Internal
from baton.core.errors import InvalidArgument as InvalidArgument
from baton.core.errors import ModelNotFound as ModelNotFound
from baton.core.errors import Overloaded as Overloaded
from baton.core.errors import Quarantined as Quarantined
from baton.core.errors import Unauthenticated as Unauthenticated
from baton.core.errors import Unavailable as Unavailable
from baton.core.request.request import Accepted as Accepted
from baton.core.request.request import Delta as Delta
from baton.core.request.request import Event as Event
from baton.core.request.request import Finished as Finished
from baton.core.request.request import FinishReason as FinishReason
from baton.core.request.request import Message as Message
from baton.core.request.request import Tool as Tool
from baton.core.request.request import ToolChoice as ToolChoice
from baton.core.request.request import ToolUse as ToolUse
