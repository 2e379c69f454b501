"""`baton fetch`: copies a model into a folder that a node's pods share, once.

Needs no torch. Prints the model's folder on stdout and the progress on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from batonlm.cli.models import fetched, source_of
from batonlm.core.errors import Unavailable

WAIT_S = 3600.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("fetch")
    parser.add_argument("model", help="hub id (HF_TOKEN: for private ones) or folder")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="the cache")
    parser.add_argument("--revision", default="", help="of the hub: branch, tag or commit")
    parser.add_argument(
        "--tokenizer-only",
        action="store_true",
        help="without weights: what router, tokenizer and detokenizer read",
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
        )
    except OSError as error:
        raise Unavailable(f"{args.into} cannot be used: {error.strerror}") from error
    print(folder)
    return 0
