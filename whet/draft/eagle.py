"""The EAGLE-style drafter: one decoder layer that guesses the target's next hidden state, and so its next tokens.

`rollout.guesser` drafts with it, `draft.training` trains it. A pair is (h_t, x_{t+1}): the target's last hidden state
after token t, past its final norm, and the token that came next. The layer's output stands for h_{t+1}, and the
target's own head turns it into a guess of x_{t+2}. The pair of t lies at position t, so keys and values lie in pages
parallel to the target's, under its own table.

    x = fc [embedding(x_{t+1}), h_t];  x = x + attention(x);  x = x + mlp(norm(x));  logits = head(x)

That is EAGLE-1 (arXiv 2401.15077) as it is served: no norm before the attention, none after the layer, no bias. It is a
Llama layer in the target's sizes whatever the family (OURS), which both vLLM and SGLang load. Embedding, head and
rotary angles are the target's very tensors: read, never trained. `extend` and `draft` read nothing on the host and take
sizes from shapes alone, so they can be captured as a graph.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from whet.errors import WhetError
from whet.model.head import Head, head_of
from whet.model.ops import FAMILIES, PLAIN
from whet.model.packing import Boundaries, attention

# Shapes: B rows, T pairs, `width` hidden size of the target, d head size.


@dataclass(frozen=True, slots=True)
class EagleTarget:
    """The parts of the target that the drafter reads, which are never trained, saved or published, and its sizes."""

    embedding: Tensor
    head: Head
    rotary: nn.Module
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int  # size of one head
    eps: float


class EagleHead(nn.Module):
    """Its parameters are what is trained, and its whole state dict."""

    def __init__(
        self,
        target: EagleTarget,
        *,
        draft_ids: Tensor | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dtype = dtype or target.embedding.dtype
        self._borrowed = [target]  # in a list, or the rotary module would become a submodule
        device = target.embedding.device
        width = target.hidden
        inner = target.inner
        attended = target.heads * target.dim
        random = torch.Generator().manual_seed(seed)

        def fresh(*size: int) -> nn.Parameter:
            """Outputs as large as inputs (OURS): a drafter learns in a fraction of the tokens that it needs from the
            0.02 of most configs."""
            return nn.Parameter(
                (torch.randn(size, generator=random) * size[1] ** -0.5).to(device, self.dtype)
            )

        self.fc = fresh(width, 2 * width)
        self.qkv = fresh(attended + 2 * target.kv_heads * target.dim, width)
        self.out = fresh(width, attended)
        self.norm = nn.Parameter(torch.ones(width, device=device, dtype=self.dtype))
        self.gate_up = fresh(2 * inner, width)
        self.down = fresh(width, inner)
        # The target's ids of the draft vocabulary, or None where it is all of them.
        self.draft_ids = None if draft_ids is None else draft_ids.to(device, torch.int64)
        self.draft_head = target.head  # or its rows for the draft vocabulary
        if self.draft_ids is not None:
            bias = None if target.head.bias is None else target.head.bias[self.draft_ids]
            self.draft_head = replace(
                target.head, weight=target.head.weight[self.draft_ids], bias=bias
            )
        self.keys, self.values, self.angles = torch.empty(0), torch.empty(0), torch.empty(0)
        # what `extend` and `draft` compute with; kernels may be handed in before a capture
        self.ops = PLAIN

    @property
    def target(self) -> EagleTarget:
        return self._borrowed[0]

    def copy(self, dtype: torch.dtype | None = None) -> EagleHead:
        """A copy with its own parameters and the same target and draft vocabulary, for a trainer."""
        twin = EagleHead(self.target, dtype=dtype or self.dtype)
        twin.draft_ids, twin.draft_head, twin.ops = self.draft_ids, self.draft_head, self.ops
        twin.take(self)
        return twin

    @torch.no_grad()
    def take(self, other: EagleHead) -> None:
        """Copy the parameters of `other` in place: graphs that were captured with ours stay valid."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the draft vocabulary's rows of the target's head again, in place, after the target changed."""
        if self.draft_ids is None:
            return
        ours = self.draft_head
        theirs = self.target.head
        torch.index_select(theirs.weight.detach(), 0, self.draft_ids, out=ours.weight)
        if ours.bias is not None and theirs.bias is not None:
            torch.index_select(theirs.bias.detach(), 0, self.draft_ids, out=ours.bias)

    @torch.no_grad()
    def speak(self, ids: Tensor | None) -> None:
        """Change to another draft vocabulary of the same size, in place: graphs and trainers share it."""
        assert self.draft_ids is not None and ids is not None and len(ids) == len(self.draft_ids)
        self.draft_ids.copy_(ids)
        self.refresh()

    def forward(self, hidden: Tensor, ids: Tensor, position: Tensor, packed: Boundaries) -> Tensor:
        """Guesses [T, width] of h_{t+1} for packed pairs: hidden [T, width] of t, ids and position [T]."""
        target = self.target
        x = self._fuse(hidden, ids)
        parts = F.linear(x, self.qkv).unflatten(1, (-1, target.dim)).transpose(0, 1)[None]
        query, key, value = parts.split([target.heads, target.kv_heads, target.kv_heads], 1)
        query, key = apply_rotary_pos_emb(query, key, *target.rotary(x[None], position[None]))
        mixed, _ = attention(self, query, key, value, None, packed=packed, scaling=target.dim**-0.5)
        return self._finish(mixed[0].flatten(1), x)

    def logits(self, features: Tensor) -> Tensor:
        """Logits over the draft vocabulary, in fp32 (fp64 for fp64)."""
        return self.draft_head.logits(features.to(self.draft_head.weight.dtype))

    @torch.no_grad()
    def attach(self, keys: Tensor, values: Tensor, context: int) -> None:
        """Set the pages that `extend` writes and reads, [pages, kv heads, page, d]; the last one takes padding. Angles
        are computed for positions below `context`; later positions share the last one's."""
        self.keys = keys
        self.values = values
        places = torch.arange(context, device=self.fc.device)
        self.angles = torch.cat(self.target.rotary(self.fc[None, :1], places[None]), -1)[0]

    @torch.no_grad()
    def extend(
        self,
        hidden: Tensor,
        ids: Tensor,
        position: Tensor,
        row: Tensor,
        table: Tensor,
        length: Tensor,
        starts: Tensor,
        most: int,
        angles: Tensor | None = None,
    ) -> Tensor:
        """Guesses [T, width] of h_{t+1} for T new pairs, whose keys and values go to the pages of their rows.

        hidden [T, width] of t; ids [T], the tokens t + 1; position [T], t; the rest as in `whet.model.ops`, with length
        the pairs of each row, the new ones included; angles [T, 2 d] where they are known. Call it over all verified
        places: pairs past the accepted ones write what is overwritten before it is read, since no length counts them.
        """
        if angles is None:
            angles = self.angles.index_select(0, position.clamp(max=len(self.angles) - 1))
        target = self.target
        x = self._fuse(hidden, ids)
        cos, sin = angles.chunk(2, -1)
        pages = (self.keys, self.values, table)
        heads = {"heads": target.heads, "kv_heads": target.kv_heads}
        query = self.ops.rope_write(F.linear(x, self.qkv), cos, sin, *pages, row, position, **heads)
        mixed = self.ops.paged_attention(
            query, *pages, length, starts, most=most, scaling=target.dim**-0.5
        )
        return self._finish(mixed.flatten(1), x)

    @torch.no_grad()
    def draft(
        self, feature: Tensor, position: Tensor, row: Tensor, table: Tensor, steps: int
    ) -> Tensor:
        """The likeliest tokens after the newest, int32 [B, steps], each fed back for the next.

        feature [B, width]: what `extend` gave for each row's last pair; position int32 [B]: the number of its pairs;
        row int32 [B]: its own number, or -1 for padding. Places up to position + steps - 2 are written, so the table
        must hold pages of the row's own for them; places past the table are left out, and their drafts are useless.
        """
        room = min(table.shape[1] * self.keys.shape[2], len(self.angles))
        starts = torch.arange(len(row) + 1, dtype=torch.int32, device=row.device)
        # All places at once, since a small kernel takes as long to launch as a large one.
        place = position + torch.arange(steps - 1, dtype=torch.int32, device=row.device)[:, None]
        out = (row < 0) | (place >= room)
        place = place.masked_fill(out, 0)
        rows = row.expand_as(out).masked_fill(out, -1)
        lengths = (place + 1).masked_fill(out, 0)
        angles = self.angles[place]
        drafted = [self.choose(feature)]
        for i in range(steps - 1):
            feature = self.extend(
                feature, drafted[-1], place[i], rows[i], table, lengths[i], starts, 1, angles[i]
            )
            drafted.append(self.choose(feature))
        return torch.stack(drafted, 1)

    def choose(self, feature: Tensor) -> Tensor:
        """The likeliest token of the draft vocabulary, by its id in the target's, int32 [B]."""
        head = self.draft_head  # scale and soft-cap do not change which logit is the largest
        best = F.linear(feature.to(head.weight.dtype), head.weight, head.bias).argmax(-1)
        return (best if self.draft_ids is None else self.draft_ids[best]).to(torch.int32)

    def _fuse(self, hidden: Tensor, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids, self.target.embedding)
        return F.linear(torch.cat((embedded.to(self.dtype), hidden.to(self.dtype)), -1), self.fc)

    def _finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        x = torch.addmm(x, mixed, self.out.T)
        normed = F.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype), self.target.eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate) * up, self.down.T)


def eagle_head(
    model: Any, *, draft_ids: Tensor | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> EagleHead:
    """Make a drafter with random weights for a Hugging Face causal model, sharing its embedding and head. `draft_ids`:
    the tokens that it may propose (`draft_vocabulary`), all of them where None."""
    refuse_undraftable(model)
    config = model.config
    head = head_of(model)
    target = EagleTarget(
        embedding=model.get_input_embeddings().weight.detach(),
        head=replace(
            head,
            weight=head.weight.detach(),
            bias=None if head.bias is None else head.bias.detach(),
        ),
        rotary=model.model.rotary_emb,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
    )
    return EagleHead(target, draft_ids=draft_ids, dtype=dtype, seed=seed)


def undraftable(model: Any) -> str | None:
    """Why a model cannot have an EAGLE drafter, in a few words; its weights may be on the meta device."""
    name = type(model).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(sorted(FAMILIES))}"
    activation = model.config.hidden_act
    return None if activation in ("silu", "swish") else f"its activation is {activation}, not silu"


def refuse_undraftable(model: Any) -> None:
    if reason := undraftable(model):
        raise WhetError(
            f"No EAGLE drafter can be made for this model: {reason}; choose a drafter without a model."
        )


def draft_vocabulary(counts: np.ndarray, size: int) -> Tensor | None:
    """The `size` most frequent ids, ascending, int64; ties go to the smaller id. None where `size` covers the
    vocabulary, so that no rows of the head are copied."""
    if size >= counts.size:
        return None
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])).to(torch.int64)


# ---- the trained drafter as a folder that vLLM or SGLang load as an EAGLE drafter of the same target
#
# The layout follows the loaders, which both prepend "model." to every name; embedding and head are never written:
#
#   vLLM    vllm/model_executor/models/llama_eagle.py, transformers_utils/configs/eagle.py. fc without bias and no norm
#           before the attention; an unknown name is an error. The class is "Eagle" + architectures[0], so the config
#           says LlamaForCausalLM. Embedding and head are the target's. It proposes from the whole vocabulary.
#   SGLang  python/sglang/srt/models/llama_eagle.py, speculative/eagle_worker.py. fc with a bias, which keeps random
#           numbers where the file has none: zeros are written. LlamaForCausalLMEagle by name. Tied embeddings must be
#           off: a reduced head would else replace the embedding. It reads a draft vocabulary from a pickle
#           (`--speculative-token-map`), which whet neither writes nor reads.

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FOLDER = "drafter"  # in a checkpoint and in an export
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
BIAS = "fc.bias"
NAMES = (  # what both loaders read, in the order of `layout` and `named_weights`
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
)
# Settings of the target that the drafter has too.
SHARED = ("max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def layout(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the loader of the config's architecture expects, no more and no less."""
    width = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config["head_dim"]
    query = config["num_attention_heads"] * dim
    key = config["num_key_value_heads"] * dim
    attention = ((query, width), (key, width), (key, width), (width, query))
    shapes = (
        (width, 2 * width),
        *attention,
        (width,),
        (inner, width),
        (inner, width),
        (width, inner),
    )
    table: dict[str, tuple[int, ...]] = dict(zip(NAMES, shapes, strict=True))
    if config["architectures"] == [ARCHITECTURES["sglang"]]:
        table[BIAS] = (width,)
    return table


def write_drafter(folder: Path, head: EagleHead, target_config: Any) -> None:
    """Write the weights, in the type of `head`, and the config, for vLLM; `copy_drafter` brings them to SGLang."""
    tensors = {
        name: tensor.cpu().clone().contiguous() for name, tensor in named_weights(head).items()
    }
    # A Llama config of one layer, with the rotary settings in the old and the new form of transformers.
    target = head.target
    rope = dict(target_config.rope_parameters)
    scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
    config = {
        "model_type": "llama",
        "hidden_size": target.hidden,
        "intermediate_size": target.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.eps,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaled,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{name: getattr(target_config, name) for name in SHARED},
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    _write(folder, tensors, config, "vllm")


def copy_drafter(source: Path, folder: Path, *, engine: str = "vllm") -> None:
    """Copy a written drafter for the same engine or the other, with its weights bit by bit."""
    check_engine(engine)
    _write(folder, _read_tensors(source), _read_config(source), engine)


def check_engine(engine: str) -> None:
    if engine not in ARCHITECTURES:
        raise WhetError(
            f"A drafter can be written for {' or '.join(ARCHITECTURES)}, not for {engine!r}."
        )


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], engine: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "sglang":
        tensors = {**tensors, BIAS: torch.zeros_like(tensors["fc.weight"][:, 0])}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(
        json.dumps({**config, "architectures": [ARCHITECTURES[engine]]}, indent=2) + "\n"
    )


def named_weights(head: EagleHead) -> dict[str, Tensor]:
    """The parameters by the loaders' names: views of them, without gradients."""
    target = head.target
    query, key, value = head.qkv.detach().split(
        [target.heads * target.dim, *[target.kv_heads * target.dim] * 2]
    )
    gate, up = head.gate_up.detach().chunk(2)
    parts = (head.fc, query, key, value, head.out, head.norm, gate, up, head.down)
    return {name: part.detach() for name, part in zip(NAMES, parts, strict=True)}


def check_layout(folder: Path) -> None:
    """Raise one sentence about the first thing in the folder that its engine would not load."""
    wanted = layout(_read_config(folder))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WhetError(f"{folder / WEIGHTS} cannot be read: {error}.") from error
    wrong = {
        "lacks": [name for name in wanted if name not in shapes],
        "has, which the loader does not know,": [name for name in shapes if name not in wanted],
        "has in another shape": [n for n, s in shapes.items() if n in wanted and s != wanted[n]],
    }
    for what, names in wrong.items():
        if names:
            raise WhetError(f"The drafter in {folder} {what} {names[0]}; write it again.")


@torch.no_grad()
def read_drafter(folder: Path, head: EagleHead) -> None:
    """Read the weights of a written drafter into `head`, in place."""
    saved = _read_tensors(folder)
    mine = named_weights(head)
    for name, tensor in mine.items():
        if saved[name].shape != tensor.shape:
            raise WhetError(
                f"The drafter in {folder} is of another target: {name} has another shape."
            )
    theirs = _read_config(folder).get("vocab_size")
    ours = len(head.target.head.weight)
    if theirs is not None and theirs != ours:  # two models may have one shape
        raise WhetError(
            f"The drafter in {folder} is of another target: it has {theirs} tokens, and this one {ours}."
        )
    for name, tensor in mine.items():
        tensor.copy_(saved[name])


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights that every engine reads. SGLang's bias must be zero."""
    check_layout(folder)
    tensors = load_file(folder / WEIGHTS)
    if BIAS in tensors and tensors.pop(BIAS).any():
        raise WhetError(
            f"The drafter in {folder} has a bias, which vLLM would not load; it is not one of whet's."
        )
    return tensors


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise WhetError(f"There is no drafter in {folder}: it holds no {CONFIG}.")
    try:
        config = json.loads((folder / CONFIG).read_text())
        known = config["architectures"] in [[name] for name in ARCHITECTURES.values()]
        sizes = (
            "hidden_size",
            "intermediate_size",
            "head_dim",
            "num_attention_heads",
            "num_key_value_heads",
        )
        whole = (
            known
            and config["num_hidden_layers"] == 1
            and all(isinstance(config[name], int) for name in sizes)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhetError(f"{folder / CONFIG} is not the config of a drafter: {error!r}.") from error
    if "hot_vocab_size" in config:
        raise WhetError(
            f"The drafter in {folder} has a vocabulary of its own in a pickle, which whet does not read."
        )
    if not whole or config.get("tie_word_embeddings") is not False:
        raise WhetError(
            f"{folder / CONFIG} is not the config of an EAGLE drafter that vLLM or SGLang load."
        )
    assert isinstance(config, dict)
    return config
