"""A small client of Baton's gRPC API, blocking or asyncio. It starts no process and loads no model.

    from batonlm.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.chat("What is the capital of France?").text)

A call returns a stream at once. It yields events (`Accepted`, `Delta`, `Finished`); `text` and
`read()` consume the rest. Failures are BatonErrors with `message`, `field` and `retry_after_s`.
"""

from batonlm.client.client import Answer as Answer
from batonlm.client.client import AsyncClient as AsyncClient
from batonlm.client.client import AsyncStream as AsyncStream
from batonlm.client.client import Client as Client
from batonlm.client.client import Retries as Retries
from batonlm.client.client import Stream as Stream
from batonlm.client.messages import Options as Options
from batonlm.client.messages import Ranked as Ranked
from batonlm.client.messages import Scores as Scores
from batonlm.client.messages import Vectors as Vectors
from batonlm.core.errors import BatonError as BatonError
from batonlm.core.errors import Cancelled as Cancelled
from batonlm.core.errors import ContextLengthExceeded as ContextLengthExceeded
from batonlm.core.errors import DeadlineExceeded as DeadlineExceeded
from batonlm.core.errors import Internal as Internal
from batonlm.core.errors import InvalidArgument as InvalidArgument
from batonlm.core.errors import ModelNotFound as ModelNotFound
from batonlm.core.errors import Overloaded as Overloaded
from batonlm.core.errors import Quarantined as Quarantined
from batonlm.core.errors import Unauthenticated as Unauthenticated
from batonlm.core.errors import Unavailable as Unavailable
from batonlm.core.request.request import Accepted as Accepted
from batonlm.core.request.request import Delta as Delta
from batonlm.core.request.request import Event as Event
from batonlm.core.request.request import Finished as Finished
from batonlm.core.request.request import FinishReason as FinishReason
from batonlm.core.request.request import Message as Message
from batonlm.core.request.request import Tool as Tool
from batonlm.core.request.request import ToolChoice as ToolChoice
from batonlm.core.request.request import ToolUse as ToolUse
