"""What every learner computes of a packed micro-batch: log-probabilities, values, losses.

Plain functions of modules and tensors; the learner decides where they run and gathers gradients.
The head works on a chunk of tokens at a time, straight from hidden states: no [tokens x vocabulary]
tensor is ever built or kept, the backward pass computes each chunk's logits again.
A pass that needs more memory than there is says so in one sentence.
S continuation tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from moored.engine.packing import Packed, TokenBatch
from moored.errors import MooredError
from moored.training.losses import TokenStream, value_loss

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LOGITS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 28}
"""Elements of one chunk's logits: what fits the caches of a CPU; what keeps a GPU busy."""
MIN_CHUNK = 64
"""Fewest tokens for which a matrix product pays."""


def trunk_of(model: nn.Module) -> nn.Module:
    """The decoder without its head; LoRA layers sit inside it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    trunk = getattr(inner, cast(str, inner.base_model_prefix), None)
    if trunk is None:
        # As of Llama 4's text model, whose class names what it does not have.
        raise MooredError(
            f"models of type {cast(Any, inner).config.model_type!r} do not work with this engine, "
            f"which does not find their layers; choose one of the families in docs/models.md"
        )
    return trunk


def hidden_states(trunk: nn.Module, packed: Packed) -> torch.Tensor:
    """(S, width) output at the sources of `packed`."""
    if packed.images:
        raise MooredError(
            f"a batch holds {len(packed.images)} images, but this model reads text only; choose a "
            f"text view of the environment"
        )
    kind = packed.input_ids.device.type
    dtype = next(trunk.parameters()).dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    extra = {} if packed.tree is None else {"tree": packed.tree}
    if packed.segments is None:
        # Models hand on a mask of four dimensions as it is; beside a tree nothing reads it.
        mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=packed.input_ids.device)
    else:
        mask = tree_mask(packed.segments, dtype)
    # cuDNN builds a plan for every new shape, which takes longer than the attention itself.
    with sdpa_kernel(ATTENTION) if kind == "cuda" else nullcontext():
        output = trunk(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
    return output.reshape(-1, output.shape[-1]).index_select(0, packed.sources)


def tree_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, 1, L, L) additive mask: earlier tokens of the prompt or of the same continuation.

    A padding token sees itself, so that no row of the softmax is empty.
    """
    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    allowed = earlier & (own | prompt)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def token_logprobs(
    model: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probability of each target and entropy of its distribution, in float32."""
    head = _head(model)
    if is_plain_head(model):
        weight = cast(torch.Tensor, head.weight)
        return _Logprobs.apply(hidden, weight, targets, temperature, with_entropy)  # pyright: ignore[reportReturnType]
    parts = []
    for part in _chunks(hidden, cast(torch.Tensor, head.weight).shape[0]):
        args = (model, head, hidden[part], targets[part], temperature)
        parts.append(checkpoint(_chunk_logprobs, *args, use_reentrant=False))
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def scaled_logits(
    model: nn.Module, head: nn.Module, hidden: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Float32 logits divided by the temperature, with the model's own scaling and soft cap."""
    config = model.config
    logits = head(hidden).float()
    scale = getattr(config, "logits_scaling", None)
    if scale is not None:
        logits = logits / scale  # pyright: ignore[reportOperatorIssue]
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)  # pyright: ignore[reportOperatorIssue]
    return logits if temperature in (0.0, 1.0) else logits / temperature


def float_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight^T with float32 results, also of bfloat16 factors."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return torch.mm(hidden, weight.t()).float()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def _times(logits: torch.Tensor, factor: float) -> torch.Tensor:
    """In place, and skipped for 1, because it would go over all logits."""
    return logits if factor == 1.0 else logits.mul_(factor)


def _head(model: nn.Module) -> nn.Module:
    return cast(nn.Module, model.get_output_embeddings())  # pyright: ignore[reportCallIssue]


def is_plain_head(model: nn.Module) -> bool:
    """True when logits are hidden states times a matrix, and nothing else."""
    head = _head(model)
    is_linear = type(head) is nn.Linear and head.bias is None
    options = ("logits_scaling", "final_logit_softcapping")
    return is_linear and all(getattr(model.config, name, None) is None for name in options)


def _chunks(hidden: torch.Tensor, vocabulary: int) -> Iterator[slice]:
    most = LOGITS_PER_CHUNK.get(hidden.device.type, LOGITS_PER_CHUNK["cuda"])
    size = max(MIN_CHUNK, most // vocabulary)
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


def _chunk_logprobs(
    model: nn.Module,
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scaled_logits(model, head, hidden, temperature)
    log_z = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    # H = log Z - E[logit]
    return logp, log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


class _Logprobs(torch.autograd.Function):
    """The same for a head that is one matrix, with the derivatives written out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        ctx.dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        ctx.beta = 1.0 / (temperature or 1.0)
        ctx.set_materialize_grads(False)
        logp, log_z, entropy = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in "abc")
        factor, summarize = weight.to(ctx.dtype), _head_operations(kind)[0]
        for part in _chunks(hidden, len(weight)):
            logits = float_logits(hidden[part].to(ctx.dtype), factor)
            found = summarize(logits, targets[part], ctx.beta, with_entropy=with_entropy)
            log_z[part], logp[part], entropy[part] = found
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        slopes = _head_operations(hidden.device.type)[1]
        factor = weight.to(ctx.dtype)
        d_hidden = torch.empty_like(hidden)
        trains_weight = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        for part in _chunks(hidden, len(weight)):
            h = hidden[part].to(ctx.dtype)
            to_logp, to_entropy = (None if grad is None else grad[part] for grad in grads)
            d = slopes(
                float_logits(h, factor),
                targets[part],
                ctx.beta,
                log_z[part],
                entropy[part],
                to_logp,
                to_entropy,
                ctx.dtype,
            )
            d_hidden[part] = torch.mm(d, factor).to(hidden.dtype)
            if d_weight is not None:
                _add_product(d_weight, d.t(), h)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None


def _head_operations(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the loss needs of logits, and its derivative by them: as kernels on a GPU."""
    if kind != "cuda":
        return _summarize, _slopes
    from moored.engine.fast import head_kernels

    return head_kernels.summarize, head_kernels.slopes


def _summarize(
    logits: torch.Tensor, targets: torch.Tensor, beta: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """(N,) log Z, log-probability of the target, entropy; `beta` is 1 / temperature."""
    logits = _times(logits, beta)
    log_z = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    if not with_entropy:
        return log_z, logp, 0.0
    # H = log Z - E[logit]
    return log_z, logp, log_z - (logits - log_z[:, None]).exp_().mul_(logits).sum(dim=-1)


def _slopes(
    logits: torch.Tensor,
    targets: torch.Tensor,
    beta: float,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    to_logp: torch.Tensor | None,
    to_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(N, V) derivative by the logits, from those by log-probability and entropy."""
    log_p = _times(logits, beta).sub_(log_z[:, None])
    p = log_p.exp()
    d_logits = torch.zeros_like(p)
    if to_logp is not None:
        # d log p_t / d logit_j = [j = t] - p_j
        d_logits.addcmul_(p, to_logp[:, None], value=-1.0)
        d_logits.scatter_add_(-1, targets[:, None], to_logp[:, None])
    if to_entropy is not None:
        # d H / d logit_j = -p_j (log p_j + H)
        slope = log_p.add_(entropy[:, None]).mul_(p)
        d_logits.addcmul_(slope, to_entropy[:, None], value=-1.0)
    return _times(d_logits, beta).to(dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right in float32, also of bfloat16 factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(left, right)


class Critic(nn.Module):
    """A value for every position: a copy of the policy's trunk and a linear head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        trunk = trunk_of(model)
        # Frozen weights, under LoRA, are shared with the policy.
        shared = {id(weight): weight for weight in trunk.parameters() if not weight.requires_grad}
        self.trunk = copy.deepcopy(trunk, shared)
        # As wide as what the policy's own head reads: the last weight of a trunk may be any.
        own = cast(torch.Tensor, _head(model).weight)
        self.head = nn.Linear(own.shape[-1], 1, device=own.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: Packed) -> torch.Tensor:
        """(S,) value before each continuation token."""
        hidden = hidden_states(self.trunk, packed).float()
        # Not as a matrix product, which autocast would round to bfloat16.
        return (hidden * self.head.weight).sum(dim=-1) + self.head.bias


def logprobs_pass(model: nn.Module, packed: Packed, *, temperature: float) -> torch.Tensor:
    """(S,) log-probability of each target."""
    hidden = hidden_states(trunk_of(model), packed)
    return token_logprobs(
        model, hidden, packed.targets, temperature=temperature, with_entropy=False
    )[0]


def policy_pass(
    model: nn.Module, packed: Packed, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probability of each target and entropy of its distribution, for an update."""
    hidden = hidden_states(trunk_of(model), packed)
    return token_logprobs(model, hidden, packed.targets, temperature=temperature, with_entropy=True)


def token_stream(batch: TokenBatch, logp: torch.Tensor, entropy: torch.Tensor) -> TokenStream:
    """What the policy's loss needs of a micro-batch."""
    streams = batch.streams
    return TokenStream(
        logp=logp,
        entropy=entropy,
        old_logp=streams["old_logprobs"],
        ref_logp=streams.get("reference"),
        advantages=streams["advantages"],
        weights=streams["weights"],
        mean_weights=streams["mean_weights"],
        sequence=streams["sequence"],
    )


def critic_pass(critic: Critic, batch: TokenBatch, value_clip: float | None) -> torch.Tensor:
    """Value loss of a micro-batch."""
    streams, values = batch.streams, critic(batch.packed)
    error = value_loss(values, streams["old_values"], streams["returns"], value_clip)
    return (streams["mean_weights"] * error).sum()


def evaluation_mode(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Leave training mode for good: dropout would make ratios differ from 1 at the start.

    Returns the layers with gradient checkpointing, which ask for that mode in updates.
    """
    found = []
    for module in modules:
        module.eval()
        found += [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    return found


def compute_layers_twice(model: Any) -> None:
    """Keep only what goes into a layer; the backward pass computes the rest again."""
    # The old name, of transformers up to 5.22, warns in later releases.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


@contextmanager
def training_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Training mode inside the block."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def compile_layers(module: nn.Module) -> None:
    """Compile each decoder layer in place: they are alike, so one compilation serves all."""
    trunk = module.trunk if isinstance(module, Critic) else trunk_of(module)
    for stack in trunk.children():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            layer.compile(dynamic=True)


class OutOfMemoryError(MooredError):
    """The GPU has too little memory for what was requested."""


def says_out_of_memory(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: torch's error about memory becomes one sentence with a remedy."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(_explain(what)) from error

        return wrapped

    return decorate


def _explain(what: str) -> str:
    used = ""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = f" ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are in use)"
    return (
        f"out of GPU memory in {what}{used}; lower engine.micro_batch_tokens, rollout.max_context "
        f"or rollout.group_size, set engine.gradient_checkpointing=true, or train with "
        f"optimizer.lora_rank"
    )
