"""Asks a running Baton with its own client: at once, as it comes, and several things at a time.

python examples/client.py [HOST:PORT]
"""

from __future__ import annotations

import asyncio
import sys

from batonlm.client import AsyncClient, BatonError, Client, Delta, Finished, InvalidArgument

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def at_once() -> None:
    with Client(ADDRESS) as client:
        print("models:", ", ".join(model.name for model in client.models()))
        print(client.chat("What is the capital of France?", temperature=0).text)


def as_it_comes() -> None:
    with Client(ADDRESS) as client, client.chat("Tell me a story.", max_tokens=60) as stream:
        for event in stream:
            match event:
                case Delta():
                    print(event.text, end="", flush=True)
                case Finished():
                    print(f"\n{event.completion_tokens} tokens, {event.cached_tokens} cached")
                    if event.stages is not None:
                        for stage, seconds in event.stages.spent().items():
                            print(f"  {stage:14} {seconds * 1e3:8.2f} ms")


async def at_a_time() -> None:
    async with AsyncClient(ADDRESS) as client:
        sums = [client.chat(f"What is {n} + {n}?", max_tokens=16, temperature=0) for n in range(4)]
        for answer in await asyncio.gather(*(stream.read() for stream in sums)):
            print(answer.text)


def what_goes_wrong() -> None:
    with Client(ADDRESS) as client:
        try:
            client.chat("Hello", temperature=9).read()
        except InvalidArgument as error:
            print(f"{error.field}: {error.message}")
        except BatonError as error:
            print(error.message, error.retry_after_s)


if __name__ == "__main__":
    at_once()
    as_it_comes()
    asyncio.run(at_a_time())
    what_goes_wrong()
