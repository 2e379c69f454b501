"""`baton bench cascade`: what asking a small model first keeps of a large one's answers.

The large model is the bundled one, the small one the same with noise in its weights, so that it is
worse and no faster: what counts is the share of questions that the large one is asked. Both answer
the bundled model's evaluation set; policies are chosen on one part of it, and the rest is asked
again under a name that cascades by them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from baton_loadtest.bench.options import option
from baton_loadtest.launch import RunningBaton, call, fleet, say
from baton_loadtest.report import Chart, Line, Report, Result, compared
from batonlm.cli.layout import UpOptions, resolve_model
from batonlm.cli.route_train import AT_ONCE, LONGEST_ANSWER, Question, asked, examples
from batonlm.client import Answer, Client
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.aliases import Alias, render
from batonlm.core.routing.cascade import Cascade, Policy, PolicyKind
from batonlm.core.routing.cascade_training import Curve, divided, trained

PLOTS = True
OPTIONS = (
    option(
        "--questions", 600, "of the evaluation set; those with tools or more turns are left out"
    ),
    option("--noise", 0.3, "of the small model's weights, by their own deviation"),
    option("--tokens", 32, "of an answer that its confidence is of"),
    option("--quality", 0.95, "part of the large model's score that policies keep"),
)
MAKE_S, ANSWER_S = 120.0, 300.0
FOLLOW_S = 3.0
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError, also outside of a checkout, which has the evaluation set."""
    if not (SCRIPTS / "model" / "corpus.py").exists():
        raise InvalidArgument("needs a checkout of Baton: the questions are there")
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "scripts": str(SCRIPTS),
            "folder": str(Path(folder, "small")),
            "noise": args.noise,
            "seed": args.seed,
            "questions": args.questions,
        }
        made = call(make, job, threads=1, deadline_s=MAKE_S)
        questions = [Question(prompt, right) for prompt, right in made["questions"]]
        return asyncio.run(_measure(args, Path(folder), questions))


async def _measure(args: argparse.Namespace, folder: Path, questions: list[Question]) -> Report:
    aliases = folder / "aliases.json"
    aliases.write_text(render({"auto": Alias((("small", 1),))}))
    options = UpOptions(
        model=f"small={folder / 'small'}",
        more_models=(f"large={resolve_model('')[0]}",),
        prefill=0,
        aliases=str(aliases),
    )
    results, lines = [], []
    async with fleet(options) as running:
        address = _grpc(running)
        with Client(address, timeout_s=ANSWER_S) as client:
            known = await asyncio.to_thread(asked, client, questions, "small", "large", args.tokens)
            say(f"{len(known)} questions asked of both")
            for kind in PolicyKind:
                policy, curve = trained(
                    kind, examples(known, kind), tokens=args.tokens, quality=args.quality
                )
                results += _told(kind, policy, curve)
                lines.append(_line(kind.value, curve))
                alias = Alias((("small", 1),), cascade=Cascade("large", policy))
                aliases.write_text(render({"auto": alias}))
                await asyncio.sleep(FOLLOW_S)
                parts = divided(examples(known, PolicyKind.CLASSIFIER))
                prompts = {each.prompt for each in parts.test}
                held_out = [each for each in known if each.prompt in prompts]
                score, share = await asyncio.to_thread(_really, client, held_out)
                results += [
                    compared(f"{kind.value}: score, asked again", score, "", curve.large),
                    Result(f"{kind.value}: share, asked again", share, ""),
                ]
    results.insert(0, Result("questions", len(known), ""))
    results.insert(1, compared("score of the small model", curve.small, "", curve.large))
    ends = Line("by chance", (0.0, 1.0), (curve.small, curve.large))
    chart = Chart("Asking a small model first", "share asked of the large model", "score",
                  (*lines, ends))  # fmt: skip
    return Report(results, (chart,))


def _told(kind: PolicyKind, policy: Policy, curve: Curve) -> list[Result]:
    at = curve.at(policy.threshold)
    return [
        Result(f"{kind.value}: advantage recovered, mean of all shares",
               curve.recovered() or 0.0, "", 0.5, (curve.recovered() or 0.0) / 0.5),
        Result(f"{kind.value}: share asked of the large model", at.share, ""),
        compared(f"{kind.value}: score, held out", at.score, "", curve.random(at.share)),
    ]  # fmt: skip


def _line(name: str, curve: Curve) -> Line:
    points = curve.points
    return Line(name, [point.share for point in points], [point.score for point in points])


def _really(client: Client, questions: Sequence[Question]) -> tuple[float, float]:
    """Asks the cascade. Returns its score, and the share that the large model answered."""

    def ask(question: Question) -> Answer:
        return client.chat(
            question.prompt, model="auto", temperature=0.0, max_tokens=LONGEST_ANSWER
        ).read()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, questions))
    pairs = zip(answers, questions, strict=True)
    good = sum(answer.text.strip() == (each.right or "").strip() for answer, each in pairs)
    large = sum(answer.accepted.model == "large" for answer in answers)
    return good / len(questions), large / len(questions)


def _grpc(running: RunningBaton) -> str:
    return next(spec.grpc for spec in running.layout.processes if spec.role == "router")


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Saves the small model, and returns questions with their answers. job: scripts, folder, noise,
    seed, questions."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    bundled, _ = resolve_model("")
    folder = Path(job["folder"])
    shutil.copytree(bundled, folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(job["seed"])
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = torch.randn(weight.shape, generator=draw) * weight.float().std()
            weights[name] = (weight.float() + job["noise"] * noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    sys.path.insert(0, job["scripts"])
    from model.corpus import evaluation_set

    found: dict[str, str] = {}
    for example in evaluation_set(job["seed"] + 1, job["questions"]):
        if not example.tools and len(example.messages) == 1:
            found.setdefault(example.messages[0]["content"], example.answer)
    return {"questions": list(found.items())}
