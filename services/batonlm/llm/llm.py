"""LLM, a model that runs in this process, without servers: for offline work on many prompts.

It is made of the parts of the servers: a tokenizer's encoder, a decode worker's engine thread and
scheduler, a detokenizer's texts. So the same requests get the same tokens as from `baton up`.

    the caller's thread          an event loop on a thread of its own       the engine's thread
    Request ── encode ─► Job ──────────► grammar, deadline ───────────────► Scheduler, ModelRunner
    Answer  ◄── join ─── Job ◄────────── stop strings, text ◄────────────── tokens of each step

The caller's thread reads requests ahead as long as few are unfinished, so that an iterator of any
length takes bounded memory.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from queue import Empty
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast, overload

from batonlm.cli.layout import check_folder, resolve_model
from batonlm.cli.precision import FLOAT32, ModelShare, choose_here, read_weights
from batonlm.client.client import Answer
from batonlm.client.messages import Messages, Options, chat_request, generate_request
from batonlm.core.errors import (
    BatonError,
    InvalidArgument,
    install,
    model_not_found,
)
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.request.request import (
    Message,
    Request,
    Tool,
    ToolChoice,
)
from batonlm.core.request.validation import MAX_PROMPT_BYTES, validate
from batonlm.core.scheduler.sequence_table import Load
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.llm.engine import Engine
from batonlm.llm.job import Batch, Job
from batonlm.router.api.grpc.inference import chat_from_proto, generate_from_proto
from batonlm.router.api.translation import in_client_words
from batonlm.rpc.config import options_of, parse
from batonlm.tokenizer.encoder import CACHE_BYTES, Asked, Encoder, load_tokenizer
from batonlm.tokenizer.renderers import RENDER_CPU_S, Renderers
from batonlm.worker.hardware import usable_gpus
from batonlm.worker.options import DecodeConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

ENCODED_AT_ONCE = 64
"""Prompts that are taken from the caller and encoded together."""

AHEAD = 2
"""Sequences that are unfinished at once, as a multiple of those that can run."""

TOKENS_AHEAD = 1 << 18
"""Prompt tokens of unfinished requests from which on no more are taken: the longest prompt."""

MOST_READY = 4096
"""Answers that wait for an earlier one before no more requests are taken, see `LLM.answers`."""

LOOK_S = 1.0
"""Seconds between two looks at whether the engine lives, while its answers are awaited."""

_FORMS = ("json_object", "json_schema", "regex", "choice", "lark", "gbnf")
"""Options that become a request's grammar."""


class EngineOptions(TypedDict, total=False):
    """Options of the engine: those of a decode worker, see `baton-decode --help`."""

    dtype: str
    device: str
    threads: int
    quantize: str
    decoder: str
    graphs: bool
    exact: bool
    max_model_len: int
    """In tokens."""
    max_running: int
    """Sequences at once."""
    step_tokens: int
    """Most prompt tokens of a step."""
    block_size: int
    """In tokens."""
    kv_cache_dtype: str
    kv_memory_mib: int
    memory_share: float
    swap_host_mib: int
    speculation: str
    draft_model: str
    tensor_parallel: int
    pipeline_parallel: int
    adapters: Mapping[str, str | Path]
    """Folders of LoRA adapters by name, which requests may give as their model."""
    adapter_memory_mib: int
    adapter_host_mib: int


def _config(model: Path, name: str, given: EngineOptions) -> DecodeConfig:
    """Raises TypeError for an unknown option, InvalidArgument for a value that it cannot have."""
    known = options_of(DecodeConfig)
    values: dict[str, Any] = {}
    for option, value in given.items():
        if option not in EngineOptions.__annotations__:
            raise TypeError(f"LLM has no option {option!r}")
        if option == "adapters":
            adapters = cast("Mapping[str, str | Path]", value)
            values[option] = tuple(f"{name}={folder}" for name, folder in adapters.items())
            continue
        values[option] = parse(known[option], value, "LLM")
    return DecodeConfig(model=str(model), model_name=name, **values)


def _with_precision(config: DecodeConfig, folder: Path) -> DecodeConfig:
    """Where the options leave the precision and the share of memory open and a CPU computes, the
    first precision that fits, as `baton up` takes it. Raises InvalidArgument (`model`) when none
    fits."""
    given = config.dtype != "auto" or config.memory_share
    if given or sys.platform != "linux" or usable_gpus(config.device):
        return config
    threads = config.threads or len(os.sched_getaffinity(0))
    weights = read_weights(folder, config.draft_model)
    share = ModelShare(weights, 1, quantize=config.quantize)
    (chosen,) = choose_here([share], threads=threads)
    # Only numbers that were not asked for are worth a line to somebody who sees warnings.
    level = logging.INFO if chosen.precision == FLOAT32 else logging.WARNING
    log.log(level, "%s", chosen.words)
    return replace(config, dtype=chosen.precision.dtype, quantize=chosen.precision.quantize)


class LLM:
    """A model in this process. A context manager; `close` frees its memory.

        with LLM("Qwen/Qwen3-0.6B", dtype="bfloat16") as llm:
            for answer in llm.generate(prompts, max_tokens=64):
                print(answer.text)

    Several threads may call it at once: their requests share the batches. Ctrl-C ends the call that
    it interrupts, and the LLM can be used again.
    """

    def __init__(self, model: str = "", **options: Unpack[EngineOptions]) -> None:
        """Loads a model, which takes seconds to minutes. model: a folder, or a hub id; empty: the
        small bundled one. options: see EngineOptions.

        Raises TypeError for an unknown option, InvalidArgument naming the option of a value that
        cannot be used, also before a weight is read when the model does not fit into memory; and
        Unavailable when the hub cannot be reached.
        """
        for package in ("torch", "transformers", "safetensors"):
            if find_spec(package) is None:
                raise InvalidArgument(f"LLM needs {package}: {install('engine')}", field="model")
        folder, name = resolve_model(model)
        check_folder(folder)
        if draft := options.get("draft_model"):
            options["draft_model"] = str(resolve_model(draft)[0])
        config = _config(folder, name, options)
        _check_device(config.device)
        config = _with_precision(config, folder)
        self._engine = Engine(config)
        self._renderers = Renderers(cpu_s=RENDER_CPU_S, max_characters=MAX_PROMPT_BYTES)
        try:
            opened = self._engine.open()
            self._encoder = Encoder(
                load_tokenizer(folder),
                namespace=opened.tokenizer_digest,
                max_input_bytes=MAX_PROMPT_BYTES,
                max_cache_bytes=CACHE_BYTES,
                renderers=self._renderers,
            )
            self._vocabulary = Vocabulary.load(folder)
            self.model: ModelDescription = replace(
                opened, answer_format=self._encoder.answer_format
            )
            """Its name, its longest sequence in tokens (`max_model_len`), its vocabulary's size."""
        except BaseException:
            self.close()
            raise
        self._numbers = itertools.count()
        # A thread that computes must not outlive the interpreter's modules.
        atexit.register(self._engine.close)
        weakref.finalize(self, _forget, self._engine, self._renderers).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs, and frees the model's memory. Idempotent."""
        atexit.unregister(self._engine.close)
        self._engine.close()
        self._renderers.close()

    @property
    def load(self) -> Load:
        """What waits and runs now."""
        return self._engine.load

    @overload
    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        *,
        model: str = "",
        progress: bool | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        *,
        model: str = "",
        progress: bool | None = None,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[Answer | BatonError]: ...
    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        *,
        model: str = "",
        progress: bool | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Sequence[Answer | BatonError]:
        """Continues texts or lists of token ids; returns one answer for each, in order.

        model: the name of the adapter that computes them beside the model; "": none does. options:
        of all prompts, the same as of `batonlm.client.Client.generate`. progress: whether a bar is
        shown on stderr; None: on a terminal. return_exceptions: an error takes its
        answer's place; else the first one ends the call. Raises BatonError.
        """
        given: Iterable[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        outcomes = self._run(
            given,
            lambda prompt: self.request(prompt, model=model, **options),
            options,
            progress=progress,
            return_exceptions=return_exceptions,
        )
        return [*outcomes]

    @overload
    def chat(
        self,
        conversations: Messages | Iterable[Messages],
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        progress: bool | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    def chat(
        self,
        conversations: Messages | Iterable[Messages],
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        progress: bool | None = None,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[Answer | BatonError]: ...
    def chat(
        self,
        conversations: Messages | Iterable[Messages],
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        progress: bool | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Sequence[Answer | BatonError]:
        """Answers conversations; returns one answer for each, in order.

        conversations: each a list of messages (Message, or a mapping with role and content), or a
        text, which is one message of a user; or only one of these. For all else see `generate`.
        """
        given: Any = [conversations] if _is_one(conversations) else conversations
        outcomes = self._run(
            given,
            lambda one: self.chat_request(
                one, model=model, tools=tools, tool_choice=tool_choice, **options
            ),
            options,
            progress=progress,
            return_exceptions=return_exceptions,
        )
        return [*outcomes]

    def request(
        self, prompt: str | Sequence[int], *, model: str = "", **options: Unpack[Options]
    ) -> Request:
        """Returns a request for `answers`. model: see `generate`. Raises InvalidArgument naming the
        option."""
        with _named(options):
            return generate_from_proto(generate_request(prompt, model, options), None)

    def chat_request(
        self,
        messages: Messages,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        **options: Unpack[Options],
    ) -> Request:
        """Returns a request for `answers`. model: see `generate`. Raises InvalidArgument naming the
        option."""
        if isinstance(messages, Message | Mapping):
            raise InvalidArgument(
                "a conversation must be a list of messages, or a text", field="messages"
            )
        with _named(options):
            return chat_from_proto(chat_request(messages, model, tools, tool_choice, options), None)

    @overload
    def answers(
        self,
        requests: Iterable[Request],
        *,
        progress: bool | None = None,
        return_exceptions: Literal[False] = False,
    ) -> Iterator[Answer]: ...
    @overload
    def answers(
        self,
        requests: Iterable[Request],
        *,
        progress: bool | None = None,
        return_exceptions: Literal[True],
    ) -> Iterator[Answer | BatonError]: ...
    def answers(
        self,
        requests: Iterable[Request],
        *,
        progress: bool | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[Answer | BatonError]:
        """Yields the answers of any number of requests, in order, in bounded memory.

        Requests are taken ahead of their answers: up to AHEAD times what can run at once, and none
        while MOST_READY answers wait for an earlier one. All that is unfinished ends with the
        iterator. progress, return_exceptions: see `generate`. Raises BatonError.
        """
        return self._run(
            requests,
            lambda request: request,
            {},
            most_ready=MOST_READY,
            progress=progress,
            return_exceptions=return_exceptions,
        )

    def _run(
        self,
        given: Iterable[T],
        make: Callable[[T], Request],
        options: Mapping[str, object],
        *,
        most_ready: int = sys.maxsize,
        progress: bool | None,
        return_exceptions: bool,
    ) -> Iterator[Answer | BatonError]:
        """options: from which `make` makes requests; errors name them."""
        total = len(given) if isinstance(given, Sized) else None
        upcoming = enumerate(given)
        batch = Batch()
        ready: dict[int, Answer | BatonError] = {}
        more, index = True, 0
        try:
            with _bar(progress, total) as ended:
                while True:
                    while more and self._has_room(batch) and len(ready) < most_ready:
                        taken = list(islice(upcoming, ENCODED_AT_ONCE))
                        more = len(taken) == ENCODED_AT_ONCE
                        refused = self._begin(batch, taken, make)
                        ended(refused.values())
                        ready |= refused
                    while index in ready:
                        outcome = ready.pop(index)
                        if isinstance(outcome, BatonError):
                            worded = _in_option_words(outcome, options)
                            if not return_exceptions:
                                raise _numbered(worded, index) from outcome
                            outcome = worded
                        yield outcome
                        index += 1
                    if not more and not batch.num_open:
                        return
                    found = {
                        job.index: error or self._answer(job)
                        for job, error in self._await_ended(batch)
                    }
                    ended(found.values())
                    ready |= found
        finally:
            self._engine.cancel(batch)

    def _has_room(self, batch: Batch) -> bool:
        most = AHEAD * self._engine.max_running
        return batch.num_open < most and batch.num_tokens < TOKENS_AHEAD

    def _begin(
        self, batch: Batch, numbered: Sequence[tuple[int, T]], make: Callable[[T], Request]
    ) -> dict[int, Answer | BatonError]:
        """Makes, encodes and starts requests; returns what ended by that, by index."""
        outcomes: dict[int, Answer | BatonError] = {}
        jobs = []
        valid = []
        for index, given in numbered:
            try:
                request = make(given)
                adapter = self._adapter(request.model)
                valid.append((index, validate(request), adapter))
            except BatonError as error:
                outcomes[index] = error
        encoded = self._encoder.encode(
            [Asked(r.prompt, r.cache_salt, a.digest if a else "") for _, r, a in valid]
        )
        for (index, request, adapter), prompt in zip(valid, encoded, strict=True):
            try:
                if isinstance(prompt, BatonError):
                    raise prompt
                request_id = str(next(self._numbers))
                job = Job(
                    batch,
                    index,
                    request_id,
                    request,
                    prompt,
                    self.model,
                    adapter,
                    self._vocabulary,
                )
            except BatonError as error:
                outcomes[index] = error
                continue
            if job.attempts:
                jobs.append(job)
            else:
                outcomes[index] = self._answer(job)
        for job in jobs:
            batch.num_open += len(job.choices)
            batch.num_tokens += job.num_prompt_tokens
        self._engine.submit(jobs)
        return outcomes

    def _adapter(self, model: str) -> AdapterDescription | None:
        """The adapter that a request's `model` stands for: its name, or MODEL:NAME; None for the
        model alone. Raises ModelNotFound."""
        if model in ("", self.model.name):
            return None
        base, _, name = model.rpartition(":")
        found = self._engine.adapters.get(name)
        if found is None or base not in ("", self.model.name):
            raise model_not_found(model, [self.model.name, *self._engine.adapters])
        return found

    def _answer(self, job: Job) -> Answer:
        return job.answer(self._vocabulary, self._encoder)

    def _await_ended(self, batch: Batch) -> Iterator[tuple[Job, BatonError | None]]:
        """Waits for jobs that have ended. Raises BatonError when the engine is gone."""
        while True:
            try:
                found = [batch.ended.get(timeout=LOOK_S)]
                break
            except Empty:
                if batch.ended.empty():
                    self._engine.check()
        with suppress(Empty):
            while True:
                found.append(batch.ended.get_nowait())
        for job, error in found:
            batch.num_open -= len(job.choices)
            batch.num_tokens -= job.num_prompt_tokens
            yield job, error


@contextmanager
def _named(options: Options) -> Iterator[None]:
    """Errors name the option, and not the field of a message that it is sent in."""
    try:
        yield
    except BatonError as error:
        raise _in_option_words(error, options) from error


def _in_option_words(error: BatonError, options: Mapping[str, object]) -> BatonError:
    if not error.field:
        return error
    name = error.field.rpartition(".")[2]
    if name in ("grammar", "structured_output"):
        name = next((form for form in _FORMS if form in options), name)
    names = {"stop_strings": "stop", "skip_special_tokens": "keep_special_tokens"}
    return in_client_words(error, {error.field: names.get(name, name)})


def _is_one(conversations: object) -> bool:
    """Whether it is one conversation, and not several."""
    if isinstance(conversations, str):
        return True
    first = next(iter(conversations), None) if isinstance(conversations, Sequence) else None
    return isinstance(first, Message | Mapping)


def _numbered(error: BatonError, index: int) -> BatonError:
    """The error with the place of its request in what the caller gave."""
    text = f"{error.message} (request {index}, counted from 0)"
    return type(error)(text, field=error.field, retry_after_s=error.retry_after_s)


def _check_device(device: str) -> None:
    """Raises InvalidArgument when it is too late to choose a GPU."""
    torch = sys.modules.get("torch")
    if device != "cpu" and torch is not None and torch.cuda.is_initialized():
        raise InvalidArgument(
            "this program uses a GPU already, so none can be chosen any more: make the LLM first, "
            'or give device="cpu"',
            field="device",
        )


def _forget(engine: Engine, renderers: Renderers) -> None:
    """Frees what an LLM held that nobody closed. Runs on any thread, so it waits for none."""
    atexit.unregister(engine.close)
    engine.leave()
    renderers.close()


@contextmanager
def _bar(
    progress: bool | None, total: int | None
) -> Iterator[Callable[[Iterable[Answer | BatonError]], None]]:
    """Shows on stderr how many requests have ended. Yields a function for those that have."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda outcomes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as shown:
        task = shown.add_task("", total=total, tokens=0)
        tokens = 0

        def ended(outcomes: Iterable[Answer | BatonError]) -> None:
            nonlocal tokens
            for outcome in outcomes:
                if isinstance(outcome, Answer):
                    tokens += outcome.finished.completion_tokens
                shown.update(task, advance=1, tokens=tokens)

        yield ended
