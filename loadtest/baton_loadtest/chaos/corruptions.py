"""`baton chaos kv corruptions`: KV chunks damaged in every possible way; all must be detected.

Two processes use a real transport. A hand-over with one injected fault must end with a typed error
and without unpacking a wrong byte, and the next, undisturbed one must transfer every byte. Then
whole requests run through router and workers with every second KV chunk damaged; their tokens must
be those of the same requests undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from dataclasses import replace

from baton_loadtest.chaos.cluster import cluster
from baton_loadtest.chaos.sides import Settings
from baton_loadtest.chaos.world import Broken, World, right
from baton_loadtest.drive import answers, random_prompts
from baton_loadtest.report import Result, at_most, compared
from batonlm.cli.http_client import total
from batonlm.cli.layout import APART, UpOptions
from batonlm.transfer.staging import ALIGNMENT

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 8

RULES = (
    "corrupt@sender.sealed:part=payload",
    "corrupt@sender.sealed:part=header",
    "stale@sender.sealed",
    "replay@sender.sealed:part=payload",
    "length@sender.sealed",
    "layout@sender.sealed",
)
"""One KV chunk per request, so none are swapped. Rules take turns at every second KV chunk that is
sealed."""


def with_settings(rule: str, **settings: int) -> str:
    """Returns a rule with more settings."""
    more = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{rule}{',' if ':' in rule else ':'}{more}"


def corrupted(args: argparse.Namespace) -> list[Result]:
    """Runs the same requests with and without faults."""
    every = 2 * len(RULES)
    rules = [with_settings(rule, at=2 * i + 4, every=every) for i, rule in enumerate(RULES)]
    faults = ";".join([f"seed={args.seed}", *rules])
    undisturbed, _ = asyncio.run(_run(args, ""))
    disturbed, refused = asyncio.run(_run(args, faults))
    equal = sum(ours == theirs for ours, theirs in zip(disturbed, undisturbed, strict=True))
    return [
        compared("whole requests with their own tokens", equal, "", args.requests, 1.0),
        # What was damaged is computed again by the decode worker, or handed over again.
        compared("KV chunks of these found damaged", refused, "", args.requests, 0.3),
    ]


async def _run(args: argparse.Namespace, faults: str) -> tuple[list[list[int]], float]:
    """Returns the tokens of each request, and the number of KV chunks detected as damaged."""
    options = UpOptions(decode=2, transport=args.transport, local_prefill_tokens=APART)
    async with cluster(options, faults=faults) as running:
        prompts = random_prompts(args.seed, args.requests, PROMPT_TOKENS)
        samples = await answers(running.grpc, prompts, OUTPUT_TOKENS, 1)
        refused = 0.0
        for child in running.children_of("decode"):
            found = await asyncio.to_thread(running.metrics, child.spec)
            refused += total(found, "baton_parcels_refused_total")
    return [sample.ids for sample in samples], refused


KV_CHUNKS = 4
INJECTIONS = {
    "bit flipped in a payload, sender's buffer": "corrupt@sender.sealed:part=payload",
    "bit flipped in a header, sender's buffer": "corrupt@sender.sealed:part=header",
    "bit flipped in a payload, landing buffer": "corrupt@receiver.read:part=payload",
    "bit flipped in a header, landing buffer": "corrupt@receiver.read:part=header",
    "two KV chunks swapped": "swap@sender.told",
    "another buffer read": "swap@transport.read",
    "stale instance id in the buffer": "stale@sender.sealed",
    "stale instance id announced": "stale@sender.told",
    "another hand-over's KV chunk in the buffer": "replay@sender.sealed",
    "another hand-over's payload in the buffer": "replay@sender.sealed:part=payload",
    "another hand-over's KV chunk announced": "replay@sender.told",
    "truncated": "truncate@transport.read",
    "wrong length in the buffer": "length@sender.sealed",
    "wrong length announced": "length@sender.told",
    "other layout in the buffer": "layout@sender.sealed",
    "other layout announced": "layout@sender.told",
}
HEADERS = {rule for rule in INJECTIONS.values() if rule.endswith("part=header")} | {
    f"{kind}@sender.sealed" for kind in ("stale", "length", "layout")
}
"""What damages the header in a buffer, where buffers in a device have none."""


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process has ended or does not answer."""
    settings = Settings(
        transport=args.transport, memory=args.memory, buffer_bytes=ALIGNMENT
    ).patient
    # The last KV chunk is a state.
    settings = replace(settings, positions=(KV_CHUNKS - 1) * 15, state_positions=15, chunk=15)
    draw = random.Random(args.seed)
    injected: Counter[str] = Counter()
    detected: Counter[str] = Counter()
    wrong = retried = 0
    injections = {
        name: rule
        for name, rule in INJECTIONS.items()
        if args.memory == "host" or rule not in HEADERS
    }
    with World(settings, draw, args.ucx_tls) as world:
        # A chunk can be replayed only after others were sent.
        for _ in range(3):
            world.hand_over()
        for number in range(args.count):
            name = list(injections)[number % len(injections)]
            found, bad = _inject(world, injections[name])
            injected[name] += 1
            detected[name] += found
            again = world.hand_over(sender={"faults": ""}, receiver={"faults": ""})
            retried += right(again, settings.moved)
            wrong += bad + again["wrong"]
        world.settle()
    results = [
        compared(f"found: {name}", detected[name], "", injected[name], 1.0)
        for name in injections
        if injected[name]
    ]
    return [
        compared("found, all kinds", detected.total(), "", injected.total(), 1.0),
        at_most("positions unpacked with a wrong byte", wrong, "", 0),
        compared("the next hand-over brought every byte", retried, "", args.count, 1.0),
        *results,
        *(corrupted(args) if args.requests else ()),
    ]


def _inject(world: World, rule: str) -> tuple[bool, int]:
    """Runs one hand-over with one fault. Returns whether it was detected, and the number of wrongly
    unpacked positions."""
    # No KV chunk follows the last one, with which it could be swapped.
    rule = with_settings(rule, at=world.draw.randint(1, KV_CHUNKS - 1))
    rule = f"seed={world.draw.getrandbits(30)};{rule}"
    at_sender = "@sender." in rule
    before = world.peers["sender" if at_sender else "receiver"].ask("state")["injected"]
    ended = world.hand_over(
        sender={"faults": rule if at_sender else ""},
        receiver={"faults": "" if at_sender else rule},
    )
    side = world.sender if at_sender else world.receiver
    if side.ask("state")["injected"] != before + 1:
        raise Broken(f"{rule} did not happen")
    return ended["outcome"] == "HandoverFailed", ended["wrong"] + ended["changed"]
