"""Linear layers with weights packed once for this CPU, in the form that is fastest for their shape.

A form is one copy of the weights and the product that reads it. `swap` replaces every linear layer
and, on CPUs, all experts of a model in place, one at a time, so that memory never holds two copies
of the whole model.

The form is chosen at load, once per shape. In exact mode bits come first, and bits must not hang on
a timing: two workers on the same kind of machine may time differently, but must agree. So a rule
that looks at the shape alone names the *base*, and only forms that were proven to give the base's
bits compete on time.

There is one copy of a weight. A second one, for steps of one or two rows, would make the linear
layers of those a sixth faster and the model twice as large.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from batonlm.engine.exact import BASE, MOST, NotExact, Product, in_tiles, prove, random_rows, tiled
from batonlm.engine.kept import KeptLinear, KeptWeight, stacks_of
from batonlm.engine.latent import LatentProjection
from batonlm.engine.lean import Conv1D
from batonlm.engine.quantized import (
    bind_fp8,
    bind_int4,
    bind_int8,
    bind_int8_weights,
    bind_rounding8,
    fewest_rows,
    fits,
)

# Products call torch's operators by their overload, because exact mode watches the functions of
# torch that modelling code calls, and would confine a second time what is proven here already.
_linear = torch.ops.aten.linear.default
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which a matrix can lie in memory to be multiplied with."""

    name: str
    bind: Callable[[Any, torch.Tensor | None], Product]
    """(weight [outputs, inputs], bias or None) -> the product, which may copy the weight. The
    weight is a tensor or, of forms that say so, a `KeptWeight`."""
    fits: Callable[[torch.dtype, torch.device], bool]
    """Whether tensors of this dtype on this device can be bound."""


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held = weight.detach().contiguous()

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _linear(rows, held, bias)
        return output

    return product


def _transposed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held = weight.detach().t().contiguous()
    inputs, outputs = held.shape

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        output: torch.Tensor = _mm(flat, held) if bias is None else _addmm(bias, flat, held)
        return output.view(*rows.shape[:-1], outputs)

    return product


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
        return output

    return product


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


PLAIN = Form("plain", _plain, lambda dtype, device: True)
"""As it came, [outputs, inputs]: read best one or two rows at a time."""

TRANSPOSED = Form(
    "transposed", _transposed, lambda dtype, device: dtype == torch.float32 and device.type == "cpu"
)
"""[inputs, outputs]: best for small matrices, because a call of it costs least."""

PACKED = Form("packed", _packed, _packs)
"""In oneDNN's blocks: best from about four rows on."""


INT8 = Form("int8", bind_int8, lambda dtype, device: device.type == "cpu")
"""Weights and activations in 8 bits: see `quantized`, as for all that follow."""

INT8_WEIGHTS = Form("int8-weights", bind_int8_weights, lambda dtype, device: device.type == "cpu")

INT4 = Form("int4", bind_int4, lambda dtype, device: device.type == "cpu")

FP8 = Form("fp8", bind_fp8, lambda dtype, device: True)

KEPT = Form("as stored", lambda kept, bias: kept.bind(bias), lambda dtype, device: True)
"""A `KeptWeight`, by torch's product of its codes or tile by tile."""

KEPT_INT8 = Form(
    "int8 as stored",
    lambda kept, bias: kept.bind_rounding(bind_rounding8, bias),
    lambda dtype, device: device.type == "cpu",
)
"""The same of 8 bits, with activations in 8 bits, too."""

QUANTIZED = {form.name: form for form in (INT8, INT8_WEIGHTS, INT4, FP8)}
"""By what `quantized.settle` returns."""


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
    """How products with weights of one shape are computed."""

    form: Form
    sizes: frozenset[int] | None = None
    """The numbers of rows to compute at once; None when any is right."""
    fewest: int = 1
    """Fewer rows are padded to so many."""


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
    """Binds weights, timing and proving a shape when it is seen first."""

    exact: bool
    """Whether rows must not depend on how many there are."""
    quantize: str = "none"
    """As `quantized.settle` returns it."""
    max_batch: int = 64
    """How many rows a step has when every sequence decodes; forms are compared up to there."""
    clock: Callable[[], float] = time.perf_counter
    """In seconds."""
    _known: dict[tuple[object, ...], Choice] = field(default_factory=dict)
    _bound: Counter[str] = field(default_factory=Counter)

    def bind(
        self, weight: torch.Tensor | KeptWeight, bias: torch.Tensor | None, *, most: int = MOST
    ) -> Bound:
        """weight: [outputs, inputs]. most: rows that are computed at once, in exact mode.

        Raises NotExact in exact mode when this shape's rows depend on their neighbours.
        """
        kept = weight.form if isinstance(weight, KeptWeight) else ""
        key = (*weight.shape, weight.dtype, bias is None, most, kept)
        outputs, inputs = weight.shape
        if key not in self._known:
            began = self.clock()
            if isinstance(weight, KeptWeight):
                self._known[key] = self._choose_kept(weight, most)
            else:
                self._known[key] = self._choose(weight.detach(), bias, most)
            log.debug(
                "weights %d x %d: %s, in %.0f ms",
                outputs,
                inputs,
                self._known[key].form.name,
                1000 * (self.clock() - began),
            )
        choice = self._known[key]
        self._bound[kept or choice.form.name] += 1
        return Bound(choice.form.bind(weight, bias), inputs, outputs, choice)

    def summary(self) -> str:
        """How many weights were bound in which form, for one line at load."""
        return ", ".join(f"{count} {name}" for name, count in self._bound.most_common())

    def _choose(self, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> Choice:
        form = QUANTIZED[self.quantize] if fits(weight, self.quantize) else None
        if form is INT8:
            return Choice(INT8, fewest=fewest_rows(INT8.bind, weight, bias))
        if form is FP8 and self.exact:
            raise NotExact("sums of fp8 products may depend on how many rows there are")
        if form is not None:
            # In the type in which these forms multiply, so that no rounding hides another order.
            rows = random_rows(weight.shape[1], torch.bfloat16, weight.device, most)
            return _proven([form], weight, bias, rows)[0] if self.exact else Choice(form)
        forms = [form for form in _FORMS if form.fits(weight.dtype, weight.device)]
        small = weight.numel() <= _SMALL
        if self.exact:
            choices = _exact(forms, weight, bias, most, small=small)
        elif small:
            choices = [Choice(form) for form in forms]
        else:
            return Choice(PLAIN if self.max_batch <= _FEW_ROWS else forms[0])
        return self._fastest(choices, weight, bias)

    def _choose_kept(self, weight: KeptWeight, most: int) -> Choice:
        """The only form of such a weight: by its product of 8 bits where it is to round rows."""
        if self.quantize == "int8" and weight.is_by_output:
            return Choice(KEPT_INT8, fewest=fewest_rows(bind_int8, weight.dense(), None))
        if not self.exact:
            return Choice(KEPT)
        rows = random_rows(weight.inputs, weight.dtype, torch.device("cpu"), most)
        proven = weight if weight.has_own_product else weight.sample()
        return _proven([KEPT], proven, None, rows)[0]

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
    others = (form for form in forms if form is not base)
    return _proven([base, *others], weight, bias, rows, every=small)


def _proven(
    forms: list[Form],
    weight: torch.Tensor | KeptWeight,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    *,
    every: bool = False,
) -> list[Choice]:
    """The first form that can be proven with `rows`, and if `every` those that give its bits."""
    found: list[Choice] = []
    refused: list[NotExact] = []
    expected = None
    for form in forms:
        if found and not every:
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


_KINDS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class PackedExperts(nn.Module):
    """Experts of a mixture model, one packed matrix each. Takes the place of a module that
    `are_known_experts`, whose weights it takes away.

    Tokens are sorted by expert once, and every expert that was chosen multiplies its rows. The
    batched forms that transformers has for GPUs are up to 60 times slower on CPUs, and make a
    token's bits depend on how many others chose its expert.

    What lies between the two products (gates, clamps, activations) stays the module's own.
    """

    skips = True
    """A choice of a number behind the experts', which is another rank's, adds nothing."""

    def __init__(self, own: nn.Module, chooser: Chooser):
        """Raises NotExact in exact mode when an expert's rows depend on their neighbours."""
        super().__init__()
        self.own = own
        into, out_of = _names(own)
        self._into = _bind_each(own, into, chooser)
        self._out_of = _bind_each(own, out_of, chooser)
        for name in (*dict(own.named_parameters(recurse=False)), *stacks_of(own)):
            delattr(own, name)

    @property
    def products(self) -> list[Bound]:
        return [*self._into, *self._out_of]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden], chosen experts and their weights [tokens, k] -> [tokens, hidden].

        A token's experts are added in the order they were chosen in, so that its bits do not depend
        on how the others chose.
        """
        tokens, choices = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        experts = len(self._into)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=experts)[:experts].tolist()
        active = [expert for expert, count in enumerate(counts) if count]
        shares = [counts[expert] for expert in active]
        order = order[: sum(shares)]
        if not active:
            return torch.zeros_like(hidden_states)
        rows = hidden_states[order.div(choices, rounding_mode="floor")]
        inner = self._between(_each(self._into, active, rows, shares))
        outer = _each(self._out_of, active, inner, shares)
        if getattr(self.own, "has_post_expert_norm", False):
            outer = self.own.post_expert_norm(outer)  # type: ignore[operator]
        by_choice = outer.new_zeros(tokens * choices, outer.shape[1])
        by_choice[order] = outer
        weighted = by_choice.view(tokens, choices, -1) * top_k_weights.unsqueeze(-1)
        total = weighted[:, 0]
        for choice in range(1, choices):
            total = total + weighted[:, choice]
        return total.to(hidden_states.dtype)

    def _between(self, inner: torch.Tensor) -> torch.Tensor:
        if self.own.has_gate:
            gated: torch.Tensor = self.own._apply_gate(inner)  # type: ignore[operator]
            return gated
        active: torch.Tensor = self.own.act_fn(inner)  # type: ignore[operator]
        return active


def are_known_experts(module: nn.Module) -> bool:
    """Whether this is a module of experts whose attributes describe how its weights lie, and that
    has no other weights."""
    if not all(isinstance(getattr(module, kind, None), bool) for kind in _KINDS):
        return False
    names = _names(module)
    expected = {*names, *(f"{name}_bias" for name in names if module.has_bias)}
    own: dict[str, Any] = {**dict(module.named_parameters(recurse=False)), **stacks_of(module)}
    return set(own) == expected and all(len(own[name].shape) == 3 for name in names)


def _names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _bind_each(module: nn.Module, name: str, chooser: Chooser) -> list[Bound]:
    biases = module.get_parameter(f"{name}_bias").detach() if module.has_bias else None
    weights: Sequence[torch.Tensor | KeptWeight]
    if stack := stacks_of(module).get(name):
        weights = stack.matrices
    else:
        packed = module.get_parameter(name).detach()
        weights = list(packed.transpose(1, 2) if module.is_transposed else packed)
    return [
        chooser.bind(weight, None if biases is None else biases[expert])
        for expert, weight in enumerate(weights)
    ]


def _each(
    products: list[Bound], active: list[int], rows: torch.Tensor, shares: list[int]
) -> torch.Tensor:
    """Rows sorted by expert, each expert's share through its product."""
    pieces = zip(active, torch.split(rows, shares), strict=True)
    return torch.cat([products[expert](piece) for expert, piece in pieces])


log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """Does what nn.Linear does, in the form that the chooser finds best.

    `weight` is left behind as a shape without memory, because some models look at its dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor | KeptWeight,
        bias: torch.Tensor | None,
        chooser: Chooser,
        *,
        most: int = MOST,
    ):
        """weight: [outputs, inputs]. most: rows computed at once in exact mode. Raises NotExact."""
        super().__init__()
        self.weight = torch.empty(tuple(weight.shape), dtype=weight.dtype, device="meta")
        self.bias = bias
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._product = chooser.bind(weight, bias, most=most)

    @property
    def products(self) -> list[Bound]:
        return [self._product]

    @property
    def sizes(self) -> frozenset[int] | None:
        """Numbers of rows that are computed without cutting or padding; None: any."""
        return self._product.choice.sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self._product(x)


@runtime_checkable
class Rounding(Protocol):
    """Experts of a GPU, which round their own weights. (Their kernels are not on every machine.)"""

    def round_weights(self) -> None:
        """Keeps weights in fp8 from now on."""


_NOT_CALLED = {("LongcatFlashTopkRouter", "classifier")}
"""Linear layers, by class and name, whose module multiplies by their weight itself."""


def swap(
    network: nn.Module, *, exact: bool, quantize: str = "none", max_batch: int = 64
) -> frozenset[int]:
    """Replaces nn.Linear, GPT-2's Conv1D and experts, and settles exact latent projections.

    quantize: as `quantized.settle` returns it. max_batch: how many sequences a step decodes at
    most. Returns the numbers of rows that all layers compute as they are; none when they do so with
    any. Raises NotExact when exact cannot be had; `loosen` then makes the best of it.
    """
    common: set[int] | None = None
    chooser = Chooser(exact=exact, quantize=quantize, max_batch=max_batch)
    head = getattr(network, "get_output_embeddings", lambda: None)()
    # A rank's head is a module around its part of it.
    head = getattr(head, "linear", head)
    on_cpu = all(weight.device.type != "cuda" for weight in network.parameters())
    logits_rows = min(MOST, max(BASE, max_batch))
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if (type(parent).__name__, name) in _NOT_CALLED:
                continue
            if type(child) is nn.Linear:
                # Logits are computed for the rows that are sampled only, so never for many.
                most = logits_rows if child is head else MOST
                packed: nn.Module = PackedLinear(child.weight, child.bias, chooser, most=most)
            elif type(child) is KeptLinear:
                most = logits_rows if child is head else MOST
                packed = PackedLinear(child.kept, child.bias, chooser, most=most)
            elif type(child) is Conv1D:
                packed = PackedLinear(child.weight.t(), child.bias, chooser)
            elif on_cpu and are_known_experts(child):
                packed = PackedExperts(child, chooser)
            elif quantize == "fp8" and isinstance(child, Rounding):
                child.round_weights()
                continue
            elif exact and isinstance(child, LatentProjection):
                sizes = child.prove()
                common = set(sizes) if common is None else common & sizes
                continue
            else:
                continue
            setattr(parent, name, packed)
            if isinstance(packed, PackedLinear) and child is not head and packed.sizes is not None:
                common = set(packed.sizes) if common is None else common & packed.sizes
    log.info("weights: %s", chooser.summary())
    return frozenset(common or ())


def loosen(network: nn.Module, *, quantize: str = "none", max_batch: int = 64) -> None:
    """Gives exactness up after NotExact: swaps what was not swapped yet, and computes any rows."""
    for module in network.modules():
        if isinstance(module, (PackedLinear, PackedExperts)):
            for product in module.products:
                product.loosen()
        elif isinstance(module, LatentProjection):
            module.loosen()
    swap(network, exact=False, quantize=quantize, max_batch=max_batch)
