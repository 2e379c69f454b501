"""Runs a real prefill or decode worker with a fake runner, injected KV faults or a poison token.

    python -m batonlm.testing.worker decode --model FOLDER --kv-faults 'drop@sender.told:at=3'

All other options are those of the worker. `tokenizer` and `detokenizer` run those processes as they
are. The environment variable BATON_TEST_CONSTANTS replaces constants of any of these processes:

    BATON_TEST_CONSTANTS=batonlm.detokenizer.__main__.MAX_TEXTS=40
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import ModelRunner, StepPlan
from batonlm.decode.__main__ import serve as serve_decode
from batonlm.prefill.__main__ import serve as serve_prefill
from batonlm.rpc.config import load, option
from batonlm.rpc.lifecycle import run
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.testing.fake_runner import FakeRunner
from batonlm.testing.faults import FaultInjector, parse
from batonlm.transfer.staging import NO_FAULTS, Faults
from batonlm.worker.engine import Loading, OpenRunner, open_runner
from batonlm.worker.options import DecodeConfig, PrefillConfig, WorkerOptions

CONSTANTS_VARIABLE = "BATON_TEST_CONSTANTS"

FAKE_BLOCKS = 4096
"""Number of blocks in a fake runner's pool."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DisturbanceOptions:
    """Options added to those of a serving worker. Not slotted, so that it can be a mixin."""

    runner: str = option("fake", "what runs steps", choices=("fake", "torch"))
    fake_step_ms: float = option(0.0, "time of a step, when it is fake", unit="ms", minimum=0.0)
    fake_token_ms: float = option(
        0.0, "more time of a fake step, for each token in it", unit="ms", minimum=0.0
    )
    fake_state_positions: int = option(
        0, "positions that a sequence's state takes, when steps are fake; 0: none", minimum=0
    )
    kv_faults: str = option("", "what goes wrong with hand-overs; see 'baton chaos kv points'")
    poison_token: int = option(
        -1,
        "prompts that begin with this token end this process, when steps are fake, to test "
        "quarantine; -1: none",
        minimum=-1,
    )


@dataclass(frozen=True)
class DisturbedPrefillConfig(DisturbanceOptions, PrefillConfig):
    """One prefill worker, for tests and experiments."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for options that do not fit together."""
        PrefillConfig.__post_init__(self)
        parse(self.kv_faults)


@dataclass(frozen=True)
class DisturbedDecodeConfig(DisturbanceOptions, DecodeConfig):
    """One decode worker, for tests and experiments."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for options that do not fit together."""
        DecodeConfig.__post_init__(self)
        parse(self.kv_faults)


class PoisonedRunner(FakeRunner):
    """A fake runner that kills its process when a step computes an input that begins with the
    poison token, as a machine fault would. The token has no effect at other positions."""

    poison_token = -1

    def submit(self, plan: StepPlan) -> None:
        if any(c.first_position == 0 and c.token_ids[0] == self.poison_token for c in plan.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan)


def open_disturbed(options: WorkerOptions, loading: Loading) -> ModelRunner:
    """Creates the runner that the options select. Raises InvalidArgument."""
    assert isinstance(options, DisturbanceOptions)
    if options.kv_faults:
        log.warning("THIS WORKER BREAKS HAND-OVERS ON PURPOSE (kv_faults): %s", options.kv_faults)
    if options.runner == "torch":
        return open_runner(options, loading)
    if options.tensor_parallel * options.pipeline_parallel > 1:
        raise InvalidArgument("the fake runner has one rank", field="tensor_parallel")
    folder = Path(options.model)
    runner = PoisonedRunner(
        num_blocks=FAKE_BLOCKS,
        block_size=options.block_size,
        name=options.model_name or folder.name,
        tokenizer_digest=tokenizer_digest(folder) if folder.is_dir() else "",
        wire_dtype=options.kv_wire_dtype,
        step_seconds=options.fake_step_ms / 1000,
        token_seconds=options.fake_token_ms / 1000,
        state_positions=options.fake_state_positions,
    )
    if options.poison_token >= 0:
        log.warning("THIS WORKER DIES OF TOKEN %d ON PURPOSE", options.poison_token)
        runner.poison_token = options.poison_token
    return runner


def replace_constants(text: str) -> None:
    """Replaces numbers that modules read while they run. text: `module.NAME=number`, comma
    separated. Raises ImportError, AttributeError and ValueError for what is not there."""
    for item in filter(None, text.split(",")):
        path, _, number = item.partition("=")
        module_name, _, name = path.rpartition(".")
        module = import_module(module_name)
        setattr(module, name, type(getattr(module, name))(number))
        log.warning("A CONSTANT IS REPLACED: %s", item)


def main(role: str, flags: Sequence[str], opener: OpenRunner = open_disturbed) -> int:
    """Runs the worker until it ends and returns its exit code. opener: creates the runner."""
    prog = f"baton-testing-{role}"
    replace_constants(os.environ.get(CONSTANTS_VARIABLE, ""))
    match role:
        case "prefill":
            prefill = load(DisturbedPrefillConfig, flags, prog=prog)
            return serve_prefill(prefill, opener, _faults(prefill))
        case "decode":
            decode = load(DisturbedDecodeConfig, flags, prog=prog)
            return serve_decode(decode, opener, _faults(decode))
        case "tokenizer":
            from batonlm.tokenizer.__main__ import serve as serve_tokenizer
            from batonlm.tokenizer.config import TokenizerConfig

            return run(serve_tokenizer(load(TokenizerConfig, flags, prog=prog)))
        case "detokenizer":
            from batonlm.detokenizer.__main__ import serve as serve_detokenizer
            from batonlm.detokenizer.config import DetokenizerConfig

            return run(serve_detokenizer(load(DetokenizerConfig, flags, prog=prog)))
    workers = "prefill, decode, tokenizer or detokenizer"
    print(f"{role!r} is no worker: say {workers}", file=sys.stderr)
    return 2


def _faults(options: DisturbanceOptions) -> Faults:
    return FaultInjector(parse(options.kv_faults)) if options.kv_faults else NO_FAULTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]))
