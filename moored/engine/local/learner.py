"""Learner in this process: scores and updates a Hugging Face causal LM, with or without a critic.

The learner is blind to algorithms: a sample brings advantages and weights for each of its tokens,
an update minimises the weighted sum. Micro-batches only bound memory; they change no result.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from moored.engine.fast.graphs import HOST, Graphs, Outputs, Pass
from moored.engine.fast.tree_attention import use_tree_attention
from moored.engine.local.families import has_fixed_angles
from moored.engine.local.forward import hidden_states, trunk_of
from moored.engine.local.head import is_plain_head, token_logprobs
from moored.engine.local.state import Trained, export_model
from moored.engine.local.token_batch import MOST_PADDING, TokenBatch, loss_batch
from moored.errors import MooredError
from moored.training.batch import (
    LossSample,
    Packed,
    Sample,
    micro_batches,
    pack,
    to_line,
    to_tensors,
)
from moored.training.losses import LossOptions, TokenStream, policy_loss, value_loss
from moored.types import Prompt

MICRO_BATCH_TOKENS = (4096, 24576)
"""On a CPU, where activations should stay near the cores; on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How updates are made."""

    lr: float = 1e-6
    critic_lr: float = 1e-5
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_batch_tokens: int | None = None
    """Bound on the tokens of one forward pass; None: 4,096 on a CPU, 24,576 on a GPU."""
    row_tokens: int = 2048
    """Bound on one packed row where attention needs a mask, which is square in it."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are of the distribution that was sampled from."""
    bf16: bool = False
    """Compute in bfloat16 (the weights stay float32)."""
    compile: bool = False
    """Compile the layers: slow to start, then faster."""
    plain: bool = False
    """Attention by a mask and no CUDA graphs: slow, and the same but for rounding."""


class Critic(nn.Module):
    """A value for every position: a copy of the policy's trunk and a linear head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(trunk_of(model))
        width = next(reversed(list(self.trunk.parameters()))).shape[-1]
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: Packed) -> torch.Tensor:
        """(S,) value before each continuation token."""
        hidden = hidden_states(self.trunk, packed).float()
        # Not as a matrix product, which autocast would round to bfloat16.
        return (hidden * self.head.weight).sum(dim=-1) + self.head.bias


class LocalLearner:
    """Trains `model` in place."""

    def __init__(
        self,
        model: nn.Module,
        options: LearnerOptions | None = None,
        loss: LossOptions | None = None,
        *,
        with_critic: bool = False,
    ) -> None:
        self.model = model
        self.options = options or LearnerOptions()
        self.loss = loss or LossOptions()
        self._uses_tree = not self.options.plain and use_tree_attention(
            model, bf16=self.options.bf16
        )
        self.critic = Critic(model).to(self.device) if with_critic else None
        # A reference model exists only while KL is on.
        self.reference = copy.deepcopy(model).eval() if self.loss.kl_coef > 0.0 else None
        decay = self.options.weight_decay
        self._trained = [Trained("policy", model, self.options.lr, decay)]
        if self.critic is not None:
            self._trained.append(Trained("critic", self.critic, self.options.critic_lr, decay))
        self._version = 0
        if self.options.compile:
            for module in filter(None, (model, self.critic, self.reference)):
                _compile_layers(module)
        self._checkpointed = self._evaluate()
        self._graphs = Graphs(self.device) if self._can_record() else None

    def _can_record(self) -> bool:
        """Where no pass asks the device for a number or for its random state."""
        return (
            self.device.type == "cuda"
            and self._uses_tree
            and not self._checkpointed
            and has_fixed_angles(self.model.config)
            and is_plain_head(self.model)
        )

    def _evaluate(self) -> list[nn.Module]:
        """Leave training mode for good: dropout would make ratios differ from 1 at the start.

        Returns the layers with gradient checkpointing, which ask for that mode in updates.
        """
        found = []
        for module in filter(None, (self.model, self.critic, self.reference)):
            module.eval()
            found += [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
        return found

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for trained in self._trained for weight in trained.weights]

    @property
    def version(self) -> int:
        return self._version

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()

    @torch.no_grad()
    def score(self, prompt: Prompt, continuations: Sequence[np.ndarray]) -> list[np.ndarray]:
        prompts = [prompt] * len(continuations)
        return self._logprobs("policy", self.model, prompts, continuations)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the continuations under the reference model."""
        if self.reference is None:
            raise MooredError("there is no reference model because kl_coef is 0")
        prompts = [sample.prompt for sample in samples]
        ids = [sample.ids_T for sample in samples]
        return self._logprobs("reference", self.reference, prompts, ids)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        if self.critic is None:
            raise MooredError("this learner has no critic; algorithms with GAE need one")
        prompts = [sample.prompt for sample in samples]
        ids = [sample.ids_T for sample in samples]
        return self._map_tokens("values", prompts, ids, self.critic)

    def step(self, samples: Sequence[LossSample], *, lr_factor: float = 1.0) -> dict[str, float]:
        """One update of policy and critic; none of either when a number is not finite."""
        if not samples:
            raise MooredError("an update needs at least one sample")
        reference = None
        if self.reference is not None:
            reference = self.reference_logprobs([given.sample for given in samples])
        try:
            stats = self._add_up(samples, reference)
        except BaseException:
            # What was added up so far must not be part of another update.
            self._take_in(None)
            raise
        for trained in self._trained:
            norm = nn.utils.clip_grad_norm_(trained.module.parameters(), self.options.grad_clip)
            name = "grad_norm" if trained.module is self.model else f"{trained.name}_grad_norm"
            stats[name] = float(norm)
        is_sound = all(map(math.isfinite, stats.values()))
        self._take_in(lr_factor if is_sound else None)
        self._version += is_sound
        return {**stats, "lr": self.options.lr * lr_factor}

    def _take_in(self, lr_factor: float | None) -> None:
        for trained in self._trained:
            trained.update(lr_factor, keep_grads=self._graphs is not None)

    def _add_up(
        self, samples: Sequence[LossSample], reference: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Gradients of all samples into those of the weights; returns the parts of the loss."""
        if self._graphs is not None:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        sums: dict[str, torch.Tensor] = {}
        prompts = [given.sample.prompt for given in samples]
        ids = [given.sample.ids_T for given in samples]
        with _training(self._checkpointed):
            for packed in self._pack(prompts, ids):
                batch = loss_batch(packed, samples, reference, with_values=self.critic is not None)
                for name, value in self._run("update", self._add_gradients, batch).items():
                    sums[name] = sums[name] + value if name in sums else value.clone()
        return {name: float(value) for name, value in sums.items()}

    def _run(self, name: str, compute: Pass, batch: TokenBatch) -> Outputs:
        return compute(batch) if self._graphs is None else self._graphs.run(name, compute, batch)

    def _add_gradients(self, batch: TokenBatch) -> Outputs:
        """Add those of a micro-batch to the weights'; returns the parts of its loss for the log."""
        with self._autocast():
            loss, parts = self._policy_loss(batch)
            if self.critic is not None:
                parts["value_loss"] = self._critic_loss(self.critic, batch)
                loss = loss + parts["value_loss"]
        if self._graphs is None:
            loss.backward()
        else:
            # `backward` would add on the stream of the first pass, which no graph records.
            found = torch.autograd.grad(loss, self._weights, allow_unused=True)
            pairs = zip(self._weights, found, strict=True)
            grads = [(weight.grad, grad) for weight, grad in pairs if grad is not None]
            torch._foreach_add_(*map(list, zip(*grads, strict=True)))  # pyright: ignore
        return {name: value.detach() for name, value in parts.items()}

    def _policy_loss(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        streams = batch.streams
        logp, entropy = token_logprobs(
            self.model,
            hidden_states(trunk_of(self.model), batch.packed),
            batch.packed.targets,
            temperature=self.options.temperature,
            with_entropy=True,
        )
        stream = TokenStream(
            logp=logp,
            entropy=entropy,
            old_logp=streams["old_logprobs"],
            ref_logp=streams.get("reference"),
            advantages=streams["advantages"],
            weights=streams["weights"],
            sequence=streams["sequence"],
        )
        loss, parts = policy_loss(stream, self.loss)
        with torch.no_grad():
            log_ratio = logp - stream.old_logp
            ratio = log_ratio.exp()
            low, high = 1.0 - self.loss.clip_low, 1.0 + self.loss.clip_high
            clipped = ((ratio < low) | (ratio > high)).float()
            parts["clip_fraction"] = (stream.weights * clipped).sum()
            parts["old_policy_kl"] = (stream.weights * (ratio - 1.0 - log_ratio)).sum()
        return loss, parts

    def _critic_loss(self, critic: Critic, batch: TokenBatch) -> torch.Tensor:
        streams, values = batch.streams, critic(batch.packed)
        error = value_loss(values, streams["old_values"], streams["returns"], self.loss.value_clip)
        return (streams["weights"] * error).sum()

    def _pack(
        self, prompts: Sequence[Prompt], continuations: Sequence[np.ndarray]
    ) -> Iterator[Packed]:
        device, lengths = self.device, [len(ids) for ids in continuations]
        most = self.options.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type != "cpu"]
        if self._graphs is not None:
            device, most = HOST, int(most / MOST_PADDING)
        lay_out = to_line if self._uses_tree else to_tensors
        row_tokens = most if self._uses_tree else self.options.row_tokens
        rows = pack(prompts, lengths, max_tokens=row_tokens)
        for batch in micro_batches(rows, max_tokens=most, padded=not self._uses_tree):
            yield lay_out(batch, continuations, device)

    def _logprobs(
        self,
        name: str,
        model: nn.Module,
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        def logp(packed: Packed) -> torch.Tensor:
            hidden = hidden_states(trunk_of(model), packed)
            return token_logprobs(
                model,
                hidden,
                packed.targets,
                temperature=self.options.temperature,
                with_entropy=False,
            )[0]

        return self._map_tokens(name, prompts, continuations, logp)

    def _map_tokens(
        self,
        name: str,
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        of_tokens: Callable[[Packed], torch.Tensor],
    ) -> list[np.ndarray]:
        """Apply a per-token function to all continuations, micro-batch by micro-batch."""

        def compute(batch: TokenBatch) -> Outputs:
            with self._autocast():
                return {"values": of_tokens(batch.packed).float()}

        found: dict[int, np.ndarray] = {}
        for packed in self._pack(prompts, continuations):
            values = self._run(name, compute, TokenBatch(packed))["values"]
            found.update(packed.split(values[: len(packed.targets)].cpu().numpy()))
        return [found[i] for i in range(len(continuations))]

    def _autocast(self):
        if not self.options.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state; what `load` needs to go on as if nothing happened."""
        folder.mkdir(parents=True, exist_ok=True)
        for trained in self._trained:
            trained.save(folder)
        (folder / "learner.json").write_text(json.dumps({"version": self._version}) + "\n")

    def load(self, folder: Path) -> None:
        for trained in self._trained:
            trained.load(folder)
        self._version = json.loads((folder / "learner.json").read_text())["version"]

    def export(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, in the precision the sampler used."""
        export_model(self.model, folder, torch.bfloat16 if self.options.bf16 else torch.float32)


@contextmanager
def _training(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Training mode for a while."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _compile_layers(module: nn.Module) -> None:
    """Compile each decoder layer in place: they are alike, so one compilation serves all."""
    trunk = module.trunk if isinstance(module, Critic) else trunk_of(module)
    for stack in trunk.children():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            layer.compile(dynamic=True)
