"""Chooses the form of every weight at load, once per shape.

In exact mode bits come first, and bits must not hang on a timing: two workers on the same kind of
machine may time differently, but must agree. So a rule that looks at the shape alone names the
*base*, and only forms that were proven to give the base's bits compete on time.

There is one copy of a weight. A second one, for steps of one or two rows, would make the linear
layers of those a sixth faster and the model twice as large.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.engine.forms import PACKED, PLAIN, TRANSPOSED, Form
from baton.engine.int8 import fewest_rows, quantized, worth_quantizing
from baton.engine.products import MOST, NotExact, Product, in_tiles, prove, random_rows, tiled

log = logging.getLogger(__name__)

_FORMS = (PACKED, TRANSPOSED, PLAIN)
# Matrices of at most so many elements (1 MiB in float32) are timed. Larger ones come from memory
# while a model runs, and in a loop over one of them they would not: what such timings preferred was
# up to 30 % slower in whole steps. For those the forms are in order of merit.
_SMALL = 1 << 18
# As many rows are read faster from a large matrix as it is than from its packed form.
_FEW_ROWS = 2
_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 3
# Read between timings, so that weights do not come from the core's own cache.
_CACHE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """sizes: the row counts to compute in, or None when any is right. fewest: pad to so many."""

    form: Form
    sizes: frozenset[int] | None = None
    fewest: int = 1


@dataclass(slots=True)
class Bound:
    """A product over one weight, cut and padded as its choice says."""

    product: Product
    inputs: int
    outputs: int
    choice: Choice

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        choice = self.choice
        count = x.numel() // self.inputs
        if choice.sizes is None:
            if count >= choice.fewest:
                return self.product(x)
            sizes = frozenset((choice.fewest,))
        elif count in choice.sizes:
            return self.product(x)
        else:
            sizes = choice.sizes
        output = tiled(self.product, x.reshape(-1, self.inputs), sizes)
        return output.view(*x.shape[:-1], self.outputs)

    def loosen(self) -> None:
        """Gives exactness up: from now on any number of rows is computed at once."""
        if self.choice.sizes is not None:
            self.choice = Choice(self.choice.form)


@dataclass(slots=True)
class Chooser:
    """Binds weights, timing and proving a shape when it is seen first.

    exact: rows must not depend on how many there are. quantize: as in EngineConfig. max_batch: how
    many rows a step has when every sequence decodes; forms are compared up to there. clock: in
    seconds.
    """

    exact: bool
    quantize: str = "none"
    max_batch: int = 64
    clock: Callable[[], float] = time.perf_counter
    _known: dict[tuple[object, ...], Choice] = field(default_factory=dict)
    _bound: Counter[str] = field(default_factory=Counter)

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None, *, most: int = MOST) -> Bound:
        """weight: [outputs, inputs]. most: rows that are computed at once, in exact mode.

        Raises NotExact in exact mode when this shape's rows depend on their neighbours.
        """
        key = (*weight.shape, weight.dtype, bias is None, most)
        outputs, inputs = weight.shape
        if key not in self._known:
            began = self.clock()
            self._known[key] = self._choose(weight.detach(), bias, most)
            log.debug(
                "weights %d x %d: %s, in %.0f ms",
                outputs,
                inputs,
                self._known[key].form.name,
                1000 * (self.clock() - began),
            )
        choice = self._known[key]
        self._bound[choice.form.name] += 1
        return Bound(choice.form.bind(weight, bias), inputs, outputs, choice)

    def summary(self) -> str:
        """How many weights were bound in which form, for one line at load."""
        return ", ".join(f"{count} {name}" for name, count in self._bound.most_common())

    def _choose(self, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> Choice:
        if self.quantize == "int8" and worth_quantizing(weight):
            form = quantized()
            return Choice(form, fewest=fewest_rows(form, weight, bias))
        forms = [form for form in _FORMS if form.fits(weight.dtype, weight.device)]
        small = weight.numel() <= _SMALL
        if self.exact:
            choices = _exact(forms, weight, bias, most, small=small)
        elif small:
            choices = [Choice(form) for form in forms]
        else:
            return Choice(PLAIN if self.max_batch <= _FEW_ROWS else forms[0])
        return self._fastest(choices, weight, bias)

    def _fastest(
        self, choices: list[Choice], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Choice:
        """The choice with the least sum of times, each relative to the fastest with as many rows.

        So that one row counts as much as 64 do: it is what a lone user waits for.
        """
        if len(choices) == 1:
            return choices[0]
        outputs, inputs = weight.shape
        bound = [Bound(each.form.bind(weight, bias), inputs, outputs, each) for each in choices]
        evict = torch.ones(_CACHE_BYTES // 4, device=weight.device)
        scores = [0.0] * len(choices)
        for count in _TIMED_ROWS:
            if count > self.max_batch and count > 1:
                break
            rows = random_rows(inputs, weight.dtype, weight.device, count)[:count]
            times = [float("inf")] * len(choices)
            for _ in range(_REPEATS):
                for i, product in enumerate(bound):
                    evict.sum()
                    began = self.clock()
                    product(rows)
                    times[i] = min(times[i], self.clock() - began)
            for i, spent in enumerate(times):
                scores[i] += spent / min(times)
        return choices[scores.index(min(scores))]


def _exact(
    forms: list[Form],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    most: int,
    *,
    small: bool,
) -> list[Choice]:
    """The base form and those that give its bits, with the row counts for which they do. The base
    is the first in a fixed order that can be proven on this kind of machine."""
    base = TRANSPOSED if small and TRANSPOSED in forms else forms[0]
    rows = random_rows(weight.shape[1], weight.dtype, weight.device, most)
    found: list[Choice] = []
    refused: list[NotExact] = []
    expected = None
    for form in (base, *(form for form in forms if form is not base)):
        if found and not small:
            break
        product = form.bind(weight, bias)
        try:
            wanted = in_tiles(product, rows) if expected is None else expected
            found.append(Choice(form, prove(product, rows, wanted)))
        except NotExact as error:
            refused.append(error)
        else:
            expected = wanted
    if not found:
        raise refused[0]
    return found
