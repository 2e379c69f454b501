"""Builds a rank's network and reads its slices of the weights.

transformers says of most models how their layers split (`base_model_tp_plan`): linear layers by
outputs (colwise) or by inputs (rowwise), whose results are summed over ranks. What it does not say,
or says for training, stands in `_PLANS`. Beyond that

- heads of keys and values that are fewer than the ranks are kept by several ranks each;
- experts are shared out whole, each rank computes the tokens that chose its own;
- embedding and head are split by vocabulary; logits are gathered, so that all ranks have them;
- of stages each has consecutive layers; the first one has the embedding, the last one the head.

Anything else in a plan is refused: split wrongly, it would answer wrongly.

The network is laid out without memory, its layers made as small as the rank's, and only then given
memory on the rank's device: a rank never holds what is another's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.engine.checkpoint import Checkpoint, Slice, UnsupportedModel
from batonlm.engine.lean import transformers
from batonlm.engine.linear import are_known_experts
from batonlm.engine.loader import Bar, Build, Cutting, add_generation, compute_buffers
from batonlm.engine.ranks.group import Group
from batonlm.engine.ranks.runner import FIELD, STAGES, Place, layers_of

_COLWISE, _ROWWISE, _HEADS = "colwise", "rowwise", "heads"
_PAIR = "colwise_gather_output"
"""Of gate_up_proj alone: gate and up in one matrix, each split by outputs. (In the plan its results
are gathered, because transformers does not cut in two places.)"""
_IGNORED = {
    "replicated_with_grad_allreduce", "moe_tp_experts", "embedding_rowwise", "mla_kv_a_proj"
}  # fmt: skip
"""Weights that all ranks have, and what is split here without a plan."""
_ATTENTION = {
    f"layers.*.self_attn.{name}": kind
    for names, kind in (
        (("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), _COLWISE),
        (("o_proj",), _ROWWISE),
        (("sinks",), _HEADS),
    )
    for name in names
}
_PLANS = {name: _ATTENTION for name in ("deepseek_v3", "youtu", "axk1", "gpt_oss")}
_OF_KEYS_AND_VALUES = ("k_proj", "v_proj")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a stored weight: `ranges` along `dim`, one behind the other. What lies
    behind the weight's end is zeros."""

    dim: int
    ranges: tuple[tuple[int, int], ...]


def share(whole: int, part: int, parts: int) -> tuple[int, int]:
    """The range of one of equal parts."""
    size = whole // parts
    return part * size, (part + 1) * size


def check_split(settings: Any, place: Place) -> dict[str, str]:
    """The plan of a model that splits so. Raises InvalidArgument, naming tensor_parallel."""
    text, name = settings.get_text_config(), settings.model_type
    found: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    plan = {**found, **_PLANS.get(name, {})}
    if place.stages > 1 and set(getattr(text, "base_model_pp_plan", None) or {}) != _STAGED:
        raise _refused(name, "transformers has no plan to stage it", STAGES)
    if int(text.num_hidden_layers) < place.stages:
        raise _refused(name, f"it has fewer layers than {place.stages} stages", STAGES)
    if not plan:
        raise _refused(name, "transformers has no plan to split it")
    split = {}
    for pattern, kind in plan.items():
        if ".experts" in pattern or kind in _IGNORED:
            continue
        if kind == _PAIR and pattern.endswith(".gate_up_proj"):
            split[pattern] = _PAIR
        elif kind == "rowwise_split_input" and pattern.endswith(".mlp.down_proj"):
            split[pattern] = _ROWWISE
        elif kind in (_COLWISE, _ROWWISE, _HEADS):
            split[pattern] = kind
        else:
            raise _refused(name, f"{pattern} ({kind}) is not split here")
    heads, kv_heads = _heads(text)
    if heads % place.tensor:
        raise _refused(name, f"its num_attention_heads {heads} is no multiple of {place.tensor}")
    if kv_heads % place.tensor and place.tensor % kv_heads:
        raise _refused(
            name, f"its num_key_value_heads {kv_heads} and {place.tensor} do not divide each other"
        )
    return split


def kv_heads_of(text: Any, place: Place) -> tuple[int, int]:
    """The range of the heads of keys and values that a rank has. Several ranks have the same one
    where there are more ranks than heads."""
    _, kv_heads = _heads(text)
    first = place.part * kv_heads // place.tensor
    return first, first + max(1, kv_heads // place.tensor)


def _heads(text: Any) -> tuple[int, int]:
    heads = int(text.num_attention_heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads)


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


class SharedExperts(nn.Module):
    """Experts of which a rank has `count` from `first` on, summed over ranks."""

    def __init__(self, own: nn.Module, first: int, count: int, group: Group):
        super().__init__()
        self.own = own
        self._first, self._count, self._group = first, count, group

    def around(self, own: nn.Module) -> SharedExperts:
        """The same of other modules over the same experts."""
        return SharedExperts(own, self._first, self._count, self._group)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As an experts module of transformers: [tokens, hidden], chosen experts and their weights
        [tokens, k] -> [tokens, hidden]. A choice of another rank's expert has a weight of 0; its
        number is `count` for modules that skip it. Transformers' own compute expert 0 in vain."""
        local = top_k_index - self._first
        elsewhere = (local < 0) | (local >= self._count)
        skips = getattr(self.own, "skips", False)
        local = local.masked_fill(elsewhere, self._count if skips else 0)
        weights = top_k_weights.masked_fill(elsewhere, 0)
        return self._group.sum(self.own(hidden_states, local, weights))


class SplitEmbedding(nn.Module):
    """An embedding of which a rank has the rows from `first` on. The sum over ranks is exact: all
    but one of them add zeros."""

    def __init__(self, own: nn.Embedding, first: int, group: Group):
        super().__init__()
        self.own = own
        self._first, self._group = first, group

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., hidden]."""
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= self.own.num_embeddings)
        rows = self.own(local.masked_fill(elsewhere, 0))
        return self._group.sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class SplitHead(nn.Module):
    """The head over a rank's part of the vocabulary; logits are gathered."""

    def __init__(self, linear: nn.Linear, vocab_size: int, group: Group):
        super().__init__()
        self.linear = linear
        self._vocab_size, self._group = vocab_size, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab]."""
        return self._group.gather(self.linear(x))[..., : self._vocab_size]


_STAGED = {"embed_tokens", "layers", "norm"}
"""What models that can be staged consist of, below their base and beside the head."""


class ReceivedHidden(nn.Module):
    """In the embedding's place on all stages but the first: what the stage before has computed."""

    def __init__(self, hidden: int, dtype: torch.dtype, source: int, world: Group):
        super().__init__()
        self._hidden, self._dtype, self._source, self._world = hidden, dtype, source, world
        self._last: torch.Tensor | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        shape = (*token_ids.shape, self._hidden)
        self._last = torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        self._world.receive(self._last, self._source)
        return self._last

    def check(self, layer: nn.Module) -> None:
        """Has the first pass raise InvalidArgument if the stage's first layer does not get what
        was received: a model that scales its embeddings on their way would do so again."""

        def compare(_layer: nn.Module, args: tuple[Any, ...]) -> None:
            hook.remove()
            if args[0] is not self._last:
                raise _refused("embeddings", "the model changes them on their way", STAGES)

        hook = layer.register_forward_pre_hook(compare)


class SentHidden(nn.Module):
    """In the place of the last norm on all stages but the last."""

    def __init__(self, target: int, world: Group):
        super().__init__()
        self._target, self._world = target, world

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._world.send(hidden, self._target)
        return hidden


class NoHead(nn.Module):
    """In the head's place on all stages but the last: [..., hidden] -> [..., 0]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :0]


def shard_builder(place: Place, group: Group, world: Group, device: torch.device) -> Build:
    """What `loader.load` builds a rank's network with. group: of the stage; world: of all ranks."""

    def build(
        _class: Any, checkpoint: Checkpoint, settings: Any, dtype: torch.dtype, bar: Bar
    ) -> nn.Module:
        plan = check_split(settings, place)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                copy.deepcopy(settings), dtype=dtype, attn_implementation="eager"
            )
        sharding = _Sharding(network, plan, place, group, world)
        sharding.keep_own_layers()
        sharding.shrink()
        network.to_empty(device=device)
        sharding.tie()
        lacking = compute_buffers(network)
        if lacking is not None:
            raise _not_here(network, lacking)
        _read(sharding, checkpoint, dtype, bar)
        sharding.connect()
        add_generation(network, checkpoint.folder)
        eval_mode: nn.Module = network.eval().requires_grad_(False)
        return eval_mode

    return build


class Nobody(Group):
    """The group of a rank that is computed by shapes alone, on torch's meta device."""

    def __init__(self, size: int):
        self.rank, self.size = 0, size

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part] * self.size, -1)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        pass

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        pass


def cutting(place: Place) -> Cutting:
    """What makes of a network without memory that of a rank, which then runs on the meta device.

    Raises InvalidArgument, naming tensor_parallel or pipeline_parallel, for what does not split.
    """

    def cut(network: nn.Module, settings: Any) -> None:
        plan = check_split(settings, place)
        group, world = Nobody(place.tensor), Nobody(place.size)
        sharding = _Sharding(network, plan, place, group, world)
        sharding.keep_own_layers()
        sharding.shrink()
        sharding.tie()
        sharding.connect()

    return cut


class _Sharding:
    """A network on its way from the whole one without memory to a rank's."""

    def __init__(
        self, network: Any, plan: dict[str, str], place: Place, group: Group, world: Group
    ):
        self.network, self.place = network, place
        self._plan, self._group, self._world = plan, group, world
        self._text = network.config.get_text_config()
        self._base_name = network.base_model_prefix
        self._base = getattr(network, self._base_name)
        self.cuts: dict[str, Cut] = {}
        """Of weights by their name in the network; others are whole."""
        self.experts: dict[str, tuple[int, int]] = {}
        """The range of experts that is held, by name of the module."""
        self.tied = bool(getattr(self._text, "tie_word_embeddings", False))

    def keep_own_layers(self) -> None:
        """Drops what is another stage's. Layers keep their places until weights are read, by which
        their names are known."""
        place = self.place
        if place.stages == 1:
            return
        own = range(*layers_of(len(self._base.layers), place))
        for i in range(len(self._base.layers)):
            if i not in own:
                self._base.layers[i] = nn.Identity()
        if place.stage:
            self._base.embed_tokens = ReceivedHidden(
                int(self._text.hidden_size),
                self.network.dtype,
                place.rank - place.tensor,
                self._world,
            )
        if not place.is_last:
            self._base.norm = SentHidden(place.rank + place.tensor, self._world)
            self.network.lm_head = NoHead()

    def shrink(self) -> None:
        """Makes modules as small as a rank's. Raises InvalidArgument, naming tensor_parallel, for
        what does not divide."""
        place = self.place
        if place.tensor == 1:
            return
        for name, module in list(self.network.named_modules()):
            kind = self._kind(name)
            if kind is not None:
                self._shrink_linear(name, module, kind)
            elif name.endswith(".experts"):
                self._shrink_experts(name, module)
            elif hasattr(module, "num_key_value_groups"):
                first, end = kv_heads_of(self._text, place)
                heads, _ = _heads(self._text)
                module.num_key_value_groups = heads // place.tensor // (end - first)
                self._shrink_by_heads(name, module)
        self._shrink_vocabulary()

    def tie(self) -> None:
        """One weight for embedding and head, where a rank has both."""
        embedding, head = self._embedding(), self._head()
        if self.tied and embedding is not None and head is not None:
            head.weight = embedding.weight

    def connect(self) -> None:
        """Has modules sum and gather over ranks, once their weights are there."""
        network, group = self.network, self._group
        if self.place.tensor > 1:
            for name, module in list(network.named_modules()):
                if self._kind(name) == _ROWWISE:
                    network.set_submodule(name, SummedLinear(module, group))
                elif name in self.experts:
                    first, end = self.experts[name]
                    network.set_submodule(name, SharedExperts(module, first, end - first, group))
            vocab_size = int(self._text.vocab_size)
            if (embedding := self._embedding()) is not None:
                first = self.place.part * embedding.num_embeddings
                self._base.embed_tokens = SplitEmbedding(embedding, first, group)
            if (head := self._head()) is not None:
                self._set_head(SplitHead(head, vocab_size, group))
        if self.place.stages > 1:
            self._renumber()

    def source(self, name: str) -> str:
        """The name under which a weight is stored."""
        head, embedding = self._head(), self._embedding()
        if self.tied and head is not None and embedding is None:
            modules = {id(module): found for found, module in self.network.named_modules()}
            if name == f"{modules[id(head)]}.weight":
                return f"{self._base_name}.embed_tokens.weight"
        return name

    def _kind(self, name: str) -> str | None:
        return self._plan.get(_NUMBER.sub(".*", name.removeprefix(f"{self._base_name}.")))

    def _embedding(self) -> nn.Embedding | None:
        found = self._base.get_input_embeddings()
        return found if isinstance(found, nn.Embedding) else None

    def _head(self) -> nn.Linear | None:
        found = self.network.get_output_embeddings()
        return found if isinstance(found, nn.Linear) else None

    def _set_head(self, module: nn.Module) -> None:
        head = self._head()
        name = next(name for name, found in self.network.named_modules() if found is head)
        self.network.set_submodule(name, module)

    def _shrink_linear(self, name: str, module: nn.Module, kind: str) -> None:
        if type(module) is not nn.Linear:
            raise _refused(name, "it is no linear layer")
        outputs, inputs = module.out_features, module.in_features
        whole = inputs if kind == _ROWWISE else outputs // 2 if kind == _PAIR else outputs
        part, parts = self.place.part, self.place.tensor
        if name.endswith(_OF_KEYS_AND_VALUES):
            _, kv_heads = _heads(self._text)
            size = whole // kv_heads
            first, end = (head * size for head in kv_heads_of(self._text, self.place))
        elif whole % parts:
            raise _refused(name, f"its width {whole} is no multiple of {parts}")
        else:
            first, end = share(whole, part, parts)
        ranges = ((first, end), (whole + first, whole + end)) if kind == _PAIR else ((first, end),)
        cut = Cut(int(kind == _ROWWISE), ranges)
        self.cuts[f"{name}.weight"] = cut
        if kind == _ROWWISE:
            inputs = end - first
        else:
            outputs = (end - first) * len(ranges)
            self.cuts[f"{name}.bias"] = cut
        smaller = nn.Linear(
            inputs, outputs, module.bias is not None, device="meta", dtype=module.weight.dtype
        )
        self.network.set_submodule(name, smaller)

    def _shrink_experts(self, name: str, module: Any) -> None:
        count, parts = int(module.num_experts), self.place.tensor
        if not are_known_experts(module):
            raise _refused(name, "its experts are of an unknown form")
        if count % parts:
            raise _refused(name, f"its {count} experts are no multiple of {parts}")
        own = share(count, self.place.part, parts)
        self.experts[name] = own
        module.num_experts = count // parts
        for weight, tensor in list(module.named_parameters(recurse=False)):
            smaller = tensor.new_empty((count // parts, *tensor.shape[1:]))
            setattr(module, weight, nn.Parameter(smaller, requires_grad=False))
            self.cuts[f"{name}.{weight}"] = Cut(0, (own,))

    def _shrink_by_heads(self, name: str, module: nn.Module) -> None:
        for weight, tensor in list(module.named_parameters(recurse=False)):
            if self._kind(f"{name}.{weight}") == _HEADS:
                first, end = share(len(tensor), self.place.part, self.place.tensor)
                smaller = tensor.new_empty(end - first)
                setattr(module, weight, nn.Parameter(smaller, requires_grad=False))
                self.cuts[f"{name}.{weight}"] = Cut(0, ((first, end),))

    def _shrink_vocabulary(self) -> None:
        """Parts are of one size, so that all ranks compute products of one shape: the last part
        ends with rows of zeros where the vocabulary does not divide."""
        names = {id(module): name for name, module in self.network.named_modules()}
        rows = -(-int(self._text.vocab_size) // self.place.tensor)
        part = ((self.place.part * rows, (self.place.part + 1) * rows),)
        for module in (self._embedding(), self._head()):
            if module is None:
                continue
            name = names[id(module)]
            smaller = module.weight.new_empty(rows, module.weight.shape[1])
            module.weight = nn.Parameter(smaller, requires_grad=False)
            self.cuts[f"{name}.weight"] = Cut(0, part)
            if isinstance(module, nn.Embedding):
                # Padding is a matter of training, and its id may be beyond this part.
                module.num_embeddings, module.padding_idx = rows, None
            else:
                module.out_features = rows
                if module.bias is not None:
                    module.bias = nn.Parameter(module.bias.new_empty(rows), requires_grad=False)
                    self.cuts[f"{name}.bias"] = Cut(0, part)

    def _renumber(self) -> None:
        """A stage's layers count from 0: so do its KV and its attention."""
        first, end = layers_of(len(self._base.layers), self.place)
        self._base.layers = nn.ModuleList(list(self._base.layers)[first:end])
        for module in self._base.layers.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx -= first
        types = getattr(self._text, "layer_types", None)
        if types:
            self._text.layer_types = list(types[first:end])
        self._text.num_hidden_layers = end - first
        if isinstance(self._base.embed_tokens, ReceivedHidden):
            self._base.embed_tokens.check(self._base.layers[0])


_EXPERT_FILES = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
)
"""How checkpoints name one expert's matrices, which the network has in one weight for all."""
_FOLDERS = ((".mlp.", ".block_sparse_moe."),)
"""Parts of names that are others in checkpoints."""


@torch.no_grad()
def _read(sharding: _Sharding, checkpoint: Checkpoint, dtype: torch.dtype, bar: Bar) -> None:
    """Fills the rank's weights, on whichever device they are. Raises UnsupportedModel."""
    folder = checkpoint.folder
    with checkpoint.open(dtype) as stored:
        done: set[int] = set()
        lacking = []
        for name, target in sharding.network.state_dict(keep_vars=True).items():
            if id(target) in done:
                continue
            parts = list(_parts(sharding, name, target, stored))
            if not parts:
                lacking.append(name)
                continue
            for part, place in parts:
                if part.shape != place.shape:
                    raise UnsupportedModel(f"model {folder.name}: {name} has another shape")
                place.copy_(part)
                bar.advance(part.nbytes)
            done.add(id(target))
    if lacking:
        raise UnsupportedModel(f"model {folder.name} lacks weights, among them {lacking[0]}")
    bar.advance(bar.total)


def _parts(
    sharding: _Sharding, name: str, target: torch.Tensor, stored: dict[str, Slice]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a weight is made of: stored tensors, and where each belongs; nothing where it is not
    stored."""
    cut, name = sharding.cuts.get(name), sharding.source(name)
    found = _stored_name(name, stored)
    if found is not None:
        yield _slice(stored[found], cut, target), target
        return
    module, _, weight = name.rpartition(".")
    first = cut.ranges[0][0] if cut is not None else 0
    for family in _EXPERT_FILES:
        files = family.get(weight, ())
        names = [
            [_stored_name(f"{module}.{first + i}.{file}.weight", stored) for file in files]
            for i in range(len(target) if files else 0)
        ]
        if not names or any(each is None for row in names for each in row):
            continue
        for expert, row in zip(target, names, strict=True):
            done = 0
            for each in row:
                assert each is not None
                part = stored[each][...]
                yield part, expert.narrow(0, done, min(len(part), len(expert) - done))
                done += len(part)
        return


def _stored_name(name: str, stored: dict[str, Slice]) -> str | None:
    candidates = [name, *(name.replace(ours, theirs) for ours, theirs in _FOLDERS)]
    return next((each for each in candidates if each in stored), None)


def _slice(stored: Slice, cut: Cut | None, target: torch.Tensor) -> torch.Tensor:
    if cut is None:
        whole: torch.Tensor = stored[:]
        return whole
    end = stored.get_shape()[cut.dim]
    kept = [(min(first, end), min(last, end)) for first, last in cut.ranges]
    parts = [stored[a:b] if cut.dim == 0 else stored[:, a:b] for a, b in kept]
    part = torch.cat(parts, cut.dim) if len(parts) > 1 else parts[0]
    lacking = sum(last - first for first, last in cut.ranges) - part.shape[cut.dim]
    if not lacking:
        return part
    shape = [lacking if dim == cut.dim else size for dim, size in enumerate(part.shape)]
    return torch.cat((part, part.new_zeros(shape)), cut.dim)


def _refused(name: str, why: str, field: str = FIELD) -> InvalidArgument:
    return InvalidArgument(f"{name}: {why}", field=field)


def _not_here(network: nn.Module, name: str) -> InvalidArgument:
    kind = network.config.model_type  # type: ignore[union-attr]
    return _refused(str(kind), f"{name} cannot be made without the whole model")
