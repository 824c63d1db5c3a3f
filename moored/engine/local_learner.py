"""Learner in this process: scores and updates a Hugging Face causal LM, with or without a critic.

The learner is blind to algorithms: a sample brings advantages and weights for each of its tokens,
an update minimises the weighted sum. Micro-batches only bound memory; they change no result.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from moored.batch import Packed, Sample, micro_batches, pack, to_line, to_tensors
from moored.engine.forward import hidden_states, trunk_of
from moored.engine.graphs import Graphs
from moored.engine.head import token_logprobs
from moored.engine.loss_batch import LossBatch, loss_batch
from moored.engine.state import Trained, export_model
from moored.engine.tree_attention import use_tree_attention
from moored.errors import MooredError
from moored.losses import LossOptions, TokenStream, policy_loss, value_loss
from moored.types import Prompt

MICRO_BATCH_TOKENS = (4096, 16384)
"""On a CPU, where activations should stay near the cores; on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How updates are made."""

    lr: float = 1e-6
    critic_lr: float = 1e-5
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_batch_tokens: int | None = None
    """Bound on the tokens of one forward pass; None: 4,096 on a CPU, 16,384 on a GPU."""
    row_tokens: int = 2048
    """Bound on one packed row where attention needs a mask, which is square in it."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are of the distribution that was sampled from."""
    bf16: bool = False
    """Compute in bfloat16 (the weights stay float32)."""
    compile: bool = False
    """Compile the layers: slow to start, then faster."""
    graphs: bool = True
    """On a GPU replay updates from CUDA graphs where the model's family allows it."""


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
        return self.head(hidden_states(self.trunk, packed)).squeeze(-1).float()


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
        self._uses_tree = use_tree_attention(model, bf16=self.options.bf16)
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
        self._add_gradients, self._layout_device = self._backward, self.device
        if self.options.graphs and self._can_record():
            weights = [weight for trained in self._trained for weight in trained.weights]
            self._add_gradients = Graphs(self._losses, weights).add_gradients
            self._layout_device = torch.device("cpu")

    def _can_record(self) -> bool:
        """Where no step of a pass asks the device for a number, or redraws random states."""
        checkpoints = (getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        return self.device.type == "cuda" and self._uses_tree and not any(checkpoints)

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
        return self._logprobs(self.model, [prompt] * len(continuations), continuations)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the continuations under the reference model."""
        if self.reference is None:
            raise MooredError("there is no reference model because kl_coef is 0")
        prompts = [sample.prompt for sample in samples]
        return self._logprobs(self.reference, prompts, [sample.ids_T for sample in samples])

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        if self.critic is None:
            raise MooredError("this learner has no critic; algorithms with GAE need one")
        _set_mode(self.critic)
        prompts = [sample.prompt for sample in samples]
        return self._map_tokens(prompts, [sample.ids_T for sample in samples], self.critic)

    def step(self, samples: Sequence[Sample], *, lr_factor: float = 1.0) -> dict[str, float]:
        """One update of policy and critic; none of either when a number is not finite."""
        if not samples:
            raise MooredError("an update needs at least one sample")
        reference = self.reference_logprobs(samples) if self.reference is not None else None
        sums: dict[str, torch.Tensor] = {}
        for trained in self._trained:
            _set_mode(trained.module, updating=True)
        ids = [sample.ids_T for sample in samples]
        prompts = [sample.prompt for sample in samples]
        for packed in self._pack(prompts, ids, self._layout_device):
            batch = loss_batch(packed, samples, reference, with_values=self.critic is not None)
            for name, value in self._add_gradients(batch).items():
                sums[name] = sums[name] + value if name in sums else value.clone()
        stats = {name: float(value) for name, value in sums.items()}
        for trained in self._trained:
            norm = nn.utils.clip_grad_norm_(trained.module.parameters(), self.options.grad_clip)
            name = "grad_norm" if trained.module is self.model else f"{trained.name}_grad_norm"
            stats[name] = float(norm)
        is_sound = all(map(math.isfinite, stats.values()))
        for trained in self._trained:
            trained.update(lr_factor if is_sound else None)
        self._version += is_sound
        return {**stats, "lr": self.options.lr * lr_factor}

    def _backward(self, batch: LossBatch) -> Mapping[str, torch.Tensor]:
        loss, parts = self._losses(batch)
        loss.backward()
        return parts

    def _losses(self, batch: LossBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Policy and critic loss of a micro-batch, and their parts for the log."""
        with self._autocast():
            loss, parts = self._policy_loss(batch)
            if self.critic is not None:
                parts["value_loss"] = self._critic_loss(self.critic, batch)
                loss = loss + parts["value_loss"]
        return loss, {name: value.detach() for name, value in parts.items()}

    def _policy_loss(self, batch: LossBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
            old_logp=batch.old_logprobs,
            ref_logp=batch.reference,
            advantages=batch.advantages,
            weights=batch.weights,
            sequence=batch.sequence,
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

    def _critic_loss(self, critic: Critic, batch: LossBatch) -> torch.Tensor:
        assert batch.old_values is not None and batch.returns is not None
        error = value_loss(
            critic(batch.packed), batch.old_values, batch.returns, self.loss.value_clip
        )
        return (batch.weights * error).sum()

    def _pack(
        self, prompts: Sequence[Prompt], continuations: Sequence[np.ndarray], device: torch.device
    ) -> Iterator[Packed]:
        lengths = [len(ids) for ids in continuations]
        most = self.options.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type != "cpu"]
        lay_out = to_line if self._uses_tree else to_tensors
        row_tokens = most if self._uses_tree else self.options.row_tokens
        rows = pack(prompts, lengths, max_tokens=row_tokens)
        for batch in micro_batches(rows, max_tokens=most, padded=not self._uses_tree):
            yield lay_out(batch, continuations, device)

    def _logprobs(
        self, model: nn.Module, prompts: Sequence[Prompt], continuations: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        _set_mode(model)

        def logp(packed: Packed) -> torch.Tensor:
            hidden = hidden_states(trunk_of(model), packed)
            return token_logprobs(
                model,
                hidden,
                packed.targets,
                temperature=self.options.temperature,
                with_entropy=False,
            )[0]

        return self._map_tokens(prompts, continuations, logp)

    def _map_tokens(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        of_tokens: Callable[[Packed], torch.Tensor],
    ) -> list[np.ndarray]:
        """Apply a per-token function to all continuations, micro-batch by micro-batch."""
        found: dict[int, np.ndarray] = {}
        for packed in self._pack(prompts, continuations, self.device):
            with self._autocast():
                values = of_tokens(packed)
            found.update(packed.split(values.float().cpu().numpy()))
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


def _set_mode(module: nn.Module, *, updating: bool = False) -> None:
    """Evaluation mode, also in updates: dropout would make ratios differ from 1 at the start.

    Only layers with gradient checkpointing are told of an update, since they look at this flag.
    """
    for layer in module.modules():
        layer.training = updating and bool(getattr(layer, "gradient_checkpointing", False))


def _compile_layers(module: nn.Module) -> None:
    """Compile each decoder layer in place: they are alike, so one compilation serves all."""
    trunk = module.trunk if isinstance(module, Critic) else trunk_of(module)
    for stack in trunk.children():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            layer.compile(dynamic=True)
