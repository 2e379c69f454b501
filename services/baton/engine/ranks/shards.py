"""Builds a rank's network, reads its slices of the weights, and sums over ranks.

Models say themselves how their layers split (`base_model_tp_plan`): linear layers by outputs
(colwise) or by inputs (rowwise), whose results are summed over ranks. Anything else in a plan is
refused: split wrongly, it would answer wrongly.

The network is laid out without memory, its layers made as small as the rank's, and only then given
memory: a rank never holds what is another's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import distributed, nn

from baton.core.errors import InvalidArgument
from baton.engine.loader import Bar, Build, UnsupportedModel, check_files
from baton.engine.ranks.runner import FIELD

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)
"""Longer than ranks can be apart, which is most while they load. A rank that died ends the others'
waiting at once."""


class Group:
    """What ranks add up and agree on, over gloo: one rank's end. All ranks must call the same
    methods in the same order.

    Sums are made of gathered parts in the order of the ranks. gloo's own sum cuts a tensor into
    pieces and adds each in another order: a row's bits would then depend on how many rows there
    are.

    store: a file, not there yet, through which ranks of one machine find each other.
    """

    def __init__(self, rank: int, size: int, store: Path):
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        found = distributed.FileStore(str(store), size)  # type: ignore[attr-defined]
        self.rank, self.size = rank, size
        self._gloo = gloo(found, rank, size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on each. Half precision is added in float32."""
        parts = self._gather(part)
        if part.dtype.itemsize < 4:
            parts = [each.float() for each in parts]
        total = parts[0] + parts[1]
        for each in parts[2:]:
            total += each
        return total.to(part.dtype)

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(min(self._gather(torch.tensor([number], dtype=torch.int64))))

    def common(self, numbers: frozenset[int], limit: int) -> frozenset[int]:
        """What is in all ranks' sets of numbers from 0 up to `limit`."""
        mask = torch.zeros(limit + 1, dtype=torch.int64)
        mask[sorted(numbers)] = 1
        return frozenset(torch.stack(self._gather(mask)).amin(0).nonzero().flatten().tolist())

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._gloo.allgather([parts], [part]).wait()  # type: ignore[attr-defined]
        return parts


_COLWISE, _ROWWISE = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"
_KINDS = {_COLWISE, _ROWWISE, _WHOLE}
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice from `first` to `end` of a weight along `dim`."""

    dim: int
    first: int
    end: int


class SummedLinear(nn.Module):
    """A linear layer over a rank's inputs, summed over ranks; the bias is added once."""

    def __init__(self, linear: nn.Linear, group: Group):
        super().__init__()
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.linear = linear
        self.weight = linear.weight.detach().to("meta")
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., a rank's inputs] -> [..., outputs]."""
        total = self._group.sum(self.linear(x))
        return total if self.bias is None else total + self.bias


def check_split(settings: Any, size: int) -> dict[str, str]:
    """The plan of a model that splits over `size` ranks. Raises InvalidArgument, naming
    tensor_parallel."""
    text, name = settings.get_text_config(), settings.model_type
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise InvalidArgument(f"{name}: transformers has no plan to split it", field=FIELD)
    for pattern, kind in plan.items():
        if kind not in _KINDS:
            raise InvalidArgument(f"{name}: {pattern} ({kind}) is not split here", field=FIELD)
    heads = int(text.num_attention_heads)
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
    }
    for field, count in counts.items():
        if count % size:
            raise InvalidArgument(
                f"{name}: its {field} {count} is no multiple of {size}", field=FIELD
            )
    return plan


def shrink(network: nn.Module, plan: dict[str, str], rank: int, size: int) -> dict[str, Cut]:
    """Makes linear layers as small as a rank's; the network is on the meta device.

    Returns what is cut, by name of weight. Raises InvalidArgument, naming tensor_parallel, for a
    layer that does not divide or is not linear.
    """
    base = f"{network.base_model_prefix}."
    cuts: dict[str, Cut] = {}
    for name, module in list(network.named_modules()):
        kind = plan.get(_NUMBER.sub(".*", name.removeprefix(base)))
        if kind is None or kind == _WHOLE:
            continue
        if type(module) is not nn.Linear:
            raise InvalidArgument(f"{name} is no linear layer", field=FIELD)
        outputs, inputs = module.out_features, module.in_features
        whole = outputs if kind == _COLWISE else inputs
        if whole % size:
            raise InvalidArgument(f"the width {whole} of {name} does not divide", field=FIELD)
        share = whole // size
        cut = Cut(int(kind == _ROWWISE), rank * share, (rank + 1) * share)
        cuts[f"{name}.weight"] = cut
        if kind == _COLWISE:
            outputs = share
            cuts[f"{name}.bias"] = cut
        else:
            inputs = share
        dtype = module.weight.dtype
        has_bias = module.bias is not None
        smaller = nn.Linear(inputs, outputs, has_bias, device="meta", dtype=dtype)
        network.set_submodule(name, smaller)
    return cuts


def sum_up(network: nn.Module, plan: dict[str, str], group: Group) -> None:
    """Has layers that were split by inputs sum over ranks, once their weights are there."""
    base = f"{network.base_model_prefix}."
    for name, module in list(network.named_modules()):
        if plan.get(_NUMBER.sub(".*", name.removeprefix(base))) == _ROWWISE:
            assert isinstance(module, nn.Linear)
            network.set_submodule(name, SummedLinear(module, group))


def shard_builder(group: Group) -> Build:
    """What `loader.load` builds a rank's network with."""

    def build(_class: Any, folder: Path, settings: Any, dtype: torch.dtype, bar: Bar) -> nn.Module:
        plan = check_split(settings, group.size)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=dtype, attn_implementation="eager"
            )
        cuts = shrink(network, plan, group.rank, group.size)
        network.to_empty(device="cpu")
        network.tie_weights()
        _compute_buffers(network)
        _read(network, folder, cuts, bar)
        sum_up(network, plan, group)
        if (folder / "generation_config.json").is_file():
            network.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        eval_mode: nn.Module = network.eval().requires_grad_(False)
        return eval_mode

    return build


@torch.no_grad()
def _compute_buffers(network: nn.Module) -> None:
    """Buffers that are in no file: rotary frequencies, scales. The model knows how to make them;
    one that it does not make stays a NaN, and the model is refused."""
    stored = network.state_dict().keys()
    for prefix, module in network.named_modules():
        names = [name for name, _ in module.named_buffers(prefix, recurse=False)]
        own = [network.get_buffer(name) for name in names if name not in stored]
        if not own:
            continue
        if not all(buffer.is_floating_point() for buffer in own):
            raise _not_here(network, prefix)
        for buffer in own:
            buffer.fill_(torch.nan)
        network._init_weights(module)  # type: ignore[operator]
        if any(bool(buffer.isnan().any()) for buffer in own):
            raise _not_here(network, prefix)


@torch.no_grad()
def _read(network: nn.Module, folder: Path, cuts: dict[str, Cut], bar: Bar) -> None:
    wanted: dict[str, torch.Tensor] = dict(network.state_dict(keep_vars=True))
    done: set[int] = set()
    for file in check_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in wanted.keys() & set(tensors.keys()):
                target = wanted[name]
                part = _slice(tensors.get_slice(name), cuts.get(name))
                if part.shape != target.shape:
                    raise UnsupportedModel(f"model {folder.name}: {name} has another shape")
                target.copy_(part)
                done.add(id(target))
                bar.advance(part.nbytes)
    # Tied weights are one tensor under two names, and one of them is enough.
    lacking = [name for name, target in wanted.items() if id(target) not in done]
    if lacking:
        raise UnsupportedModel(f"model {folder.name} lacks weights, among them {lacking[0]}")
    bar.advance(bar.total)


def _slice(stored: Any, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        whole: torch.Tensor = stored[:]
        return whole
    part: torch.Tensor = (
        stored[cut.first : cut.end] if cut.dim == 0 else stored[:, cut.first : cut.end]
    )
    return part


def _not_here(network: nn.Module, name: str) -> InvalidArgument:
    kind = network.config.model_type  # type: ignore[union-attr]
    return InvalidArgument(f"{kind}: {name} cannot be made without the whole model", field=FIELD)
