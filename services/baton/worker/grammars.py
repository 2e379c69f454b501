"""Opens what a worker follows grammars with; knows no grammar."""

from __future__ import annotations

import logging
from pathlib import Path

from baton.core.errors import InvalidArgument
from baton.core.request.model import ModelDescription
from baton.grammar.book import GrammarBook
from baton.grammar.vocabulary import load
from baton.rpc.model_folder import special_tokens
from baton.worker.options import WorkerOptions

log = logging.getLogger(__name__)


def open_book(options: WorkerOptions, model: ModelDescription) -> GrammarBook:
    """May take a second. A model without a tokenizer in its folder follows no grammars."""
    folder = Path(options.model)
    if not (folder / "tokenizer.json").is_file():
        return GrammarBook(None)
    try:
        tokenizer = load(
            folder,
            special=special_tokens(folder).values(),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
    except InvalidArgument as error:
        log.warning("%s; requests for structured output will be refused", error.message)
        return GrammarBook(None)
    return GrammarBook(tokenizer)
