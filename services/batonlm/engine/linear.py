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
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

from batonlm.core.errors import InvalidArgument
from batonlm.engine.exact import BASE, MOST, NotExact, Product, in_tiles, prove, random_rows, tiled
from batonlm.engine.latent import LatentProjection
from batonlm.engine.lean import Conv1D

# Products call torch's operators by their overload, because exact mode watches the functions of
# torch that modelling code calls, and would confine a second time what is proven here already.
_linear = torch.ops.aten.linear.default
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which a matrix can lie in memory to be multiplied with."""

    name: str
    bind: Callable[[torch.Tensor, torch.Tensor | None], Product]
    """(weight [outputs, inputs], bias or None) -> the product, which may copy the weight."""
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


# int8: weights are scaled per output, activations per row. A row is scaled by its own largest
# element, never by the batch's, so that it does not change with its neighbours. The sum over inputs
# is one of integers, which has no order: rows are bit-equal for any number of rows, on any CPU,
# without a proof per size.

_LEVELS = 127
# No row or output may have scale 0, or its zeros would become 0 / 0.
_TINY = 1e-30
# Outputs fewer than an eighth of the inputs: routers and gates, whose errors weigh most, are among
# these layers, and all of them together cost little.
_NARROW = 8
_TRIED_ROWS = (1, 2, 4, 8, 16)
_CHECKED_OUTPUTS = 64
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_int8(device: torch.device) -> None:
    """Raises InvalidArgument(field="quantize") where int8 products do not exist or are not sound.

    Without VNNI, oneDNN adds pairs of products in 16 bits, which overflow without a sign.
    """
    if device.type != "cpu":
        raise InvalidArgument(
            f"quantize int8 is for CPUs; on {device.type} it does not exist yet", field="quantize"
        )
    features = torch.cpu.get_capabilities()
    if not (features.get("avx512_vnni") or features.get("avx_vnni") or features.get("amx_int8")):
        raise InvalidArgument(
            "quantize int8 needs a CPU with VNNI or AMX, which this one has not", field="quantize"
        )


def worth_quantizing(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] becomes int8; narrow ones stay as they are."""
    outputs, inputs = weight.shape
    return outputs * _NARROW >= inputs


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, inputs] -> int8 [n, inputs] and scales [n, 1]: rows are about their product.

    A row that holds a number that is none gets such a scale, so that its product shows it too.
    """
    scales = rows.abs().amax(1, keepdim=True).mul_(1 / _LEVELS).clamp_min_(_TINY)
    return (rows / scales).round_().to(torch.int8), scales


def _bind(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    # Packing takes the integers as they lie, whatever their strides say.
    integers, scales = quantize_rows(weight.detach().float().contiguous())
    packed = torch.ops.onednn.qlinear_prepack(integers, None)
    outputs, inputs = weight.shape
    by_output = scales[:, 0].contiguous()
    no_offset = torch.zeros(outputs, dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        quants, by_row = quantize_rows(flat if flat.dtype == torch.float32 else flat.float())
        output: torch.Tensor = multiply(
            quants, 1.0, 0, packed, by_output, no_offset, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        output.mul_(by_row)
        if bias is not None:
            output.add_(bias)
        return output.to(rows.dtype).view(*rows.shape[:-1], outputs)

    return product


INT8 = Form("int8", _bind, lambda dtype, device: device.type == "cpu")
"""oneDNN's packed int8 weights with a scale per output."""


def fewest_rows(form: Form, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """To how many rows fewer ones are padded: oneDNN has no fast product for few by few.

    (It takes milliseconds for one row by 256 outputs, and 30 microseconds for two.) Raises
    InvalidArgument when products are not those of the integers, as on CPUs whose sums overflow.
    """
    product = form.bind(weight, bias)
    rows = random_rows(weight.shape[1], torch.float32, weight.device, _TRIED_ROWS[-1])
    times = []
    for count in _TRIED_ROWS:
        some = rows[:count].to(weight.dtype)
        _check_sums(product(some), some, weight, bias)
        spent = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            product(some)
            spent = min(spent, time.perf_counter() - began)
        times.append(spent)
    return next(
        count for count, spent in zip(_TRIED_ROWS, times, strict=True) if spent <= 2 * times[-1]
    )


def _check_sums(
    output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    quants, by_row = quantize_rows(rows.float())
    integers, scales = quantize_rows(weight[:_CHECKED_OUTPUTS].detach().float())
    expected = (quants.double() @ integers.double().t()).float() * scales[:, 0] * by_row
    if bias is not None:
        expected = expected + bias[:_CHECKED_OUTPUTS]
    got = output[:, :_CHECKED_OUTPUTS].float()
    if not torch.allclose(got, expected, rtol=_ROUNDING[output.dtype], atol=1e-6):
        raise InvalidArgument(
            "quantize int8: this CPU's integer products are wrong", field="quantize"
        )


# fp8: weights are scaled per output and activations per row, as with int8, to the range of e4m3
# (4 bits of exponent, 3 of mantissa). Sums are floats, whose order the number of rows may change.

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Matrices of fewer columns or rows, or of other multiples, are not taken by a GPU's product.
_FP8_MULTIPLE = 16
_FP8_CAPABILITY = (8, 9)


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidArgument(field="quantize") where there are no fp8 products: on GPUs older than
    Ada and Hopper, and for models that compute in something else than bfloat16 there. On CPUs they
    are the definition, and slow."""
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise InvalidArgument("quantize fp8 needs dtype bfloat16 on a GPU", field="quantize")
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise InvalidArgument(
            "quantize fp8 needs a GPU of compute capability 8.9 or newer", field="quantize"
        )


def worth_fp8(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] becomes fp8."""
    return worth_quantizing(weight) and all(size % _FP8_MULTIPLE == 0 for size in weight.shape)


def quantize_rows_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, inputs] -> float8_e4m3fn [n, inputs] and float32 scales [n, 1]: rows are about their
    product. A row that holds a number that is none becomes one of none."""
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).mul_(1 / _LARGEST_FP8).clamp_min_(_TINY)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def _bind_fp8(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held, scales = quantize_rows_fp8(weight.detach())
    outputs, inputs = weight.shape
    columns, by_output = held.t(), scales.t().contiguous()
    by_row_and_output = ScalingType.RowWise

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        shape = *rows.shape[:-1], outputs
        if not len(flat):
            return rows.new_empty(shape)
        quants, by_row = quantize_rows_fp8(flat)
        output: torch.Tensor = scaled_mm(
            quants, columns, by_row, by_row_and_output, by_output, by_row_and_output,
            output_dtype=rows.dtype,
        )  # fmt: skip
        if bias is not None:
            output = output + bias
        return output.view(shape)

    return product


FP8 = Form("fp8", _bind_fp8, lambda dtype, device: True)
"""e4m3 weights with a scale per output."""


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
    """As in EngineConfig."""
    max_batch: int = 64
    """How many rows a step has when every sequence decodes; forms are compared up to there."""
    clock: Callable[[], float] = time.perf_counter
    """In seconds."""
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
            return Choice(INT8, fewest=fewest_rows(INT8, weight, bias))
        if self.quantize == "fp8" and worth_fp8(weight):
            if self.exact:
                raise NotExact("sums of fp8 products may depend on how many rows there are")
            return Choice(FP8)
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
        for name, _ in list(own.named_parameters(recurse=False)):
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
    own = dict(module.named_parameters(recurse=False))
    return set(own) == expected and all(own[name].dim() == 3 for name in names)


def _names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _bind_each(module: nn.Module, name: str, chooser: Chooser) -> list[Bound]:
    weights = module.get_parameter(name).detach()
    biases = module.get_parameter(f"{name}_bias").detach() if module.has_bias else None
    return [
        chooser.bind(
            weight.t() if module.is_transposed else weight,
            None if biases is None else biases[expert],
        )
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
        self, weight: torch.Tensor, bias: torch.Tensor | None, chooser: Chooser, *, most: int = MOST
    ):
        """weight: [outputs, inputs]. most: rows computed at once in exact mode. Raises NotExact."""
        super().__init__()
        self.weight = weight.detach().to("meta")
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


def swap(
    network: nn.Module, *, exact: bool, quantize: str = "none", max_batch: int = 64
) -> frozenset[int]:
    """Replaces nn.Linear, GPT-2's Conv1D and experts, and settles exact latent projections.

    quantize: as in EngineConfig. max_batch: how many sequences a step decodes at most. Returns the
    numbers of rows that all layers compute as they are; none when they do so with any. Raises
    NotExact when exact cannot be had; `loosen` then makes the best of it.
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
            if type(child) is nn.Linear:
                # Logits are computed for the rows that are sampled only, so never for many.
                most = logits_rows if child is head else MOST
                packed: nn.Module = PackedLinear(child.weight, child.bias, chooser, most=most)
            elif type(child) is Conv1D:
                packed = PackedLinear(child.weight.t(), child.bias, chooser)
            elif on_cpu and are_known_experts(child):
                packed = PackedExperts(child, chooser)
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
