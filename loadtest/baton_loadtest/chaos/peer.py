"""One side of hand-overs as a process of its own, told what to do by lines of JSON on stdin.

Every line has a number `n`, and what is answered to it carries the same one. Arguments: ROLE
(sender or receiver) and SETTINGS as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from baton.rpc.lifecycle import die_with_parent
from baton_loadtest.chaos.receiver_side import CollectingSide
from baton_loadtest.chaos.sender_side import GivingSide
from baton_loadtest.chaos.settings import Settings
from baton_loadtest.chaos.side import Said, Side


async def serve(role: str, settings: Settings) -> None:
    """Answers until standard input ends."""
    made = GivingSide if role == "sender" else CollectingSide
    side: Side = made(role, settings)
    await side.open()
    say(n=0, instance_id=side.me.instance_id, address=side.me.address)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    tasks: set[asyncio.Task[None]] = set()

    async def answer(command: Said) -> None:
        try:
            said = await side.do(command)
        except Exception as error:
            said = {"failed": f"{type(error).__name__}: {error}"}
        say(n=command["n"], **said)

    while line := await lines.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(sys.argv[1], Settings(**json.loads(sys.argv[2]))))
    # Whatever is left belongs to an experiment that is over.
    os._exit(0)
