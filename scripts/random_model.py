"""Makes a model with random weights in a real one's shape, to try what such a model takes.

    python scripts/random_model.py qwen3-0.6b FOLDER

It has the bundled model's tokenizer and chat template, so most of its tokens have no text.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from baton_loadtest.bench.engines import SHAPES, TOKENIZER_FILES, build
from batonlm.cli.layout import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="must not exist")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    build({"settings": SHAPES[args.shape], "target": str(args.folder)})
    bundled = resolve_model("")[0]
    for name in (*TOKENIZER_FILES, "chat_template.jinja"):
        if (bundled / name).is_file():
            shutil.copy(bundled / name, args.folder)


if __name__ == "__main__":
    main()
