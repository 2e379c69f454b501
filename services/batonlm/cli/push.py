"""`baton push`: puts a model, or an adapter, into an object store, under a name and a version.

Prints what it is called there on stdout and the progress on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from batonlm.core.errors import InvalidArgument
from batonlm.registry.cache import in_use
from batonlm.registry.object_store import object_source


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("push")
    parser.add_argument("folder", type=Path, help="of a model, or of an adapter")
    parser.add_argument(
        "url",
        metavar="s3://BUCKET/NAME@VERSION",
        help="where it is to be; AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on say whose store",
    )


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    folder = Path(os.path.abspath(args.folder.expanduser()))
    if not folder.is_dir():
        raise InvalidArgument(f"there is no folder {args.folder}", field="folder")
    with in_use(folder):
        object_source(args.url).push(folder, lambda text: print(text, file=sys.stderr, flush=True))
    print(args.url.rstrip("/"))
    return 0
