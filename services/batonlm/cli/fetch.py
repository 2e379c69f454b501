"""`baton fetch`: copies a model into a folder that a node's pods share, once.

Needs no torch. Prints the model's folder on stdout and the progress on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from batonlm.core.errors import Unavailable
from batonlm.registry.cache import WAIT_S, fetched
from batonlm.registry.sources import source_of


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("fetch")
    parser.add_argument("model", help="hub id (HF_TOKEN: for private ones), folder or s3://…")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="the cache")
    parser.add_argument("--revision", default="", help="of the hub: branch, tag or commit")
    parser.add_argument(
        "--tokenizer-only",
        action="store_true",
        help="without weights: what router, tokenizer and detokenizer read",
    )
    parser.add_argument(
        "--most-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="most that the cache holds: models that nobody uses make room (default: no bound)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=WAIT_S,
        metavar="S",
        help="longest wait for another process that fetches the same (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    # The library's progress bars would be drawn over this command's, a line for each file.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    source = source_of(args.model, args.revision)
    try:
        folder = fetched(
            source,
            args.into,
            lambda text: print(f"{source.name}: {text}", file=sys.stderr, flush=True),
            weights=not args.tokenizer_only,
            wait_s=args.wait_s,
            most_bytes=int(args.most_gib * (1 << 30)),
        )
    except OSError as error:
        raise Unavailable(f"{args.into} cannot be used: {error.strerror}") from error
    print(folder)
    return 0
