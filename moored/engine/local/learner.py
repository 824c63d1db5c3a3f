"""Learner in this process: scores and updates a Hugging Face causal LM, with or without a critic.

The learner is blind to algorithms: a sample brings advantages and weights for each of its tokens,
and an update minimises the weighted sum. Micro-batches only bound memory; they change no result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from moored.config import Config
from moored.engine.base import Event, TermGradients
from moored.engine.device import uses_bf16
from moored.engine.fast import graphs
from moored.engine.fast.layers import fuse_layers
from moored.engine.fast.tree_attention import use_tree_attention
from moored.engine.gradients import MAX_NUMBERS, Gradients, chosen_weights, term_products
from moored.engine.local.batches import default_tokens, forward_tokens
from moored.engine.local.files import POLICY, load_saved, save_whole
from moored.engine.local.parking import Parked, ReferenceOf, ahead, is_large
from moored.engine.local.precision import compute_in_bfloat16, in_float32
from moored.engine.local.state import Trained, export_model
from moored.engine.lora import make_reference, plain_model, plain_weights, without_adapters
from moored.engine.packing import (
    Packed,
    TokenBatch,
    columns,
    filler,
    loss_batch,
    micro_batches,
    num_tokens,
    pack,
    to_line,
    to_tensors,
    with_ends,
)
from moored.engine.passes import (
    Critic,
    OutOfMemoryError,
    compile_layers,
    compute_layers_twice,
    critic_pass,
    evaluation_mode,
    logprobs_pass,
    policy_pass,
    says_out_of_memory,
    token_stream,
    training_mode,
)
from moored.errors import MooredError
from moored.models.rates import rates_of
from moored.training.losses import Loss, policy_loss, ppo_clip, update_figures
from moored.training.samples import LossSample, Sample
from moored.types import Prompt, ScoreRequest

T = TypeVar("T")
TensorDict = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)
LEAST_TOKENS = 1024
"""Of a micro-batch, below which halving it frees little: an episode is never split."""


class LocalLearner:
    """Trains `model` in place, as `optimizer`, `algorithm` and `engine` of a configuration say.

    With `trains=False` it only scores, and has neither critic, reference nor optimiser.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config | None = None,
        *,
        with_critic: bool = False,
        loss: Loss = ppo_clip,
        trains: bool = True,
    ) -> None:
        self.model = model
        self.config = config or Config()
        self._loss = loss
        self.bf16 = uses_bf16(self.config.engine.dtype, self.device)
        is_plain = self.config.engine.learner == "plain"
        self._uses_tree = not is_plain and use_tree_attention(model, self.device, bf16=self.bf16)
        if self._uses_tree and self.device.type == "cuda" and not self.config.engine.compile:
            fuse_layers(model)
        if self.config.engine.gradient_checkpointing is True and trains:
            compute_layers_twice(plain_model(model))
        self.critic = Critic(model) if with_critic and trains else None
        # A reference model exists only while KL is on.
        has_kl = self.config.algorithm.kl_coef > 0.0
        self.reference = make_reference(model) if has_kl and trains else None
        self._shard()
        self._trained: list[Trained] = []
        optimizer = self.config.optimizer
        self._num_parameters = sum(weights.numel() for weights in model.parameters())
        self._rates = rates_of(optimizer, self._num_parameters)
        if trains:
            self._trained.append(self._train(POLICY, model, self._rates.lr))
        elif self._rounds:
            compute_in_bfloat16(model)
        if self.critic is not None:
            self._trained.append(self._train("critic", self.critic, self._rates.critic_lr))
        own = None if self.reference is model else self.reference
        if self._rounds and own is not None:
            compute_in_bfloat16(own)
        self._parked = None if own is None or not self._parks() else Parked(own)
        self._reference_here = self._parked.on_device if self._parked else nullcontext
        self._version = 0
        self.before_updates: Callable[[], None] | None = None
        """Called before the first update of a step, e.g. to make room for it."""
        self.on_event: Callable[[Event], None] = lambda event: logger.warning(event.text)
        modules = [m for m in (model, self.critic, self.reference) if m is not None]
        for module in modules if self.config.engine.compile else ():
            compile_layers(module)
        self._checkpointed = evaluation_mode(modules)
        self._graphs = graphs.Graphs(self.device) if self._can_record() else None
        kind, records = self.device.type, self._graphs is not None
        self._most_tokens = self.config.engine.micro_batch_tokens or default_tokens(kind)
        self._most_forward = forward_tokens(self._most_tokens, kind, can_record=records)

    def _train(self, name: str, module: nn.Module, lr: float) -> Trained:
        return Trained(name, module, lr, self.config.optimizer, bf16=self._rounds)

    def _shard(self) -> None:
        """Divide the weights of all modules among ranks; one process keeps them whole."""

    @property
    def _rounds(self) -> bool:
        """Matrices are rounded in place; False where each pass gets rounded copies."""
        return self.bf16

    def _parks(self) -> bool:
        """A reference of its own waits in main memory, and is on the GPU while it scores."""
        return self.device.type == "cuda" and is_large(self.model)

    def _forward(self, module: nn.Module, compute: Callable[[], T]) -> T:
        """Run what computes with the weights of `module`, while they are whole."""
        return compute()

    def _num_passes(self, own: int) -> int:
        """Passes that every rank has to make where this one needs `own`."""
        return own

    def _over_ranks(self, totals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts of a loss, added up over ranks."""
        return totals

    def _can_record(self) -> bool:
        """True where launches bound a pass, and none asks for a number or random state."""
        is_fit = self._uses_tree and not self._checkpointed
        return is_fit and self.device.type == "cuda" and graphs.can_record(self.model)

    @property
    def version(self) -> int:
        return self._version

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _temperature(self) -> float:
        """The sampler's: log-probabilities are of the distribution that was sampled from."""
        return self.config.rollout.temperature

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the policy, with adapters summed into the weights they sit on."""
        yield from plain_weights(self.model)

    def in_float32(self) -> AbstractContextManager[None]:
        """While it lasts, the policy computes in float32, layer by layer."""
        exact = self._trained[0].exact_weights if self._trained else {}
        return in_float32(self.model, exact)

    def damaged_weights(self) -> list[str]:
        return [
            name for name, weight in self.model.state_dict().items() if not weight.isfinite().all()
        ]

    @says_out_of_memory("scoring")
    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        if self.device.type == "cpu" and len(requests) > 1:
            # Larger batches gain nothing here, and so a score does not depend on other requests.
            return [scored for request in requests for scored in self.score([request])]
        prompts = [r.prompt for r in requests for _ in r.continuations]
        flat = [ids for r in requests for ids in r.continuations]
        images = [each for r in requests for each in r.images or [()] * len(r.continuations)]
        scored = iter(self._logprobs("policy", self.model, prompts, flat, images))
        return [[next(scored) for _ in r.continuations] for r in requests]

    @says_out_of_memory("scoring by the reference model")
    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the continuations under the reference model."""
        if self.reference is None:
            raise MooredError("there is no reference model because kl_coef is 0")
        prompts, ids, images = columns(samples)
        with self._reference_here(), without_adapters(self.reference):
            return self._logprobs("reference", self.reference, prompts, ids, images)

    @says_out_of_memory("values")
    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        if self.critic is None:
            raise MooredError("this learner has no critic; algorithms with GAE need one")
        found = columns(samples)
        return self._map_tokens("values", self.critic, self.critic, *found, at_ends=True)

    def step(
        self, minibatches: Iterable[Sequence[LossSample]], *, lr_factor: float = 1.0
    ) -> Iterator[dict[str, float]]:
        """One update of policy and critic per minibatch; none when a number is not finite."""
        if not self._trained:
            raise MooredError("this engine only scores; build it with trains=True to train")
        if self.before_updates is not None:
            self.before_updates()
        prepare = self._prepare
        if self._parked is not None:
            # All at once, before there are gradients: the GPU has room for the reference then.
            minibatches = list(minibatches)
            prepare = partial(prepare, reference=ahead(self.reference_logprobs, minibatches))
        prepared = ((samples, prepare(samples)) for samples in minibatches)
        found = next(prepared, None)
        while found is not None:
            samples, batches = found
            try:
                totals = self._update_sums(batches, partial(prepare, samples))
                # Laid out while the device computes.
                found = next(prepared, None)
            except BaseException:
                # The gradients summed so far must not be part of another update.
                self._take_in(None)
                raise
            yield self._finish(totals, lr_factor)

    def _update_sums(
        self, batches: Iterable[TokenBatch], again: Callable[[], Iterable[TokenBatch]]
    ) -> dict[str, torch.Tensor]:
        """`_add_up`, begun `again` in smaller micro-batches where the GPU's memory runs out."""
        while True:
            try:
                return self._add_up(batches)
            except OutOfMemoryError:
                self._take_in(None)
                if not self._halve():
                    raise
            # Only now is the error gone, which held what was computed so far. A recording cannot
            # use what the allocator keeps for later.
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            batches = again()

    def _halve(self) -> bool:
        """Have half as many tokens in a micro-batch from now on; False where that frees little."""
        if not self._can_halve or self._most_tokens < 2 * LEAST_TOKENS:
            return False
        self._most_tokens //= 2
        self._most_forward //= 2
        if self._graphs is not None:
            # Recordings hold the memory of their larger shapes.
            self._graphs = graphs.Graphs(self.device)
        text = f"out of GPU memory; micro-batches have {self._most_tokens:,} tokens from now on"
        figures = {"micro_batch_tokens": self._most_tokens}
        self.on_event(Event(kind="micro_batch_halved", text=text, figures=figures))
        return True

    @property
    def _can_halve(self) -> bool:
        return True

    @says_out_of_memory("an update")
    def _finish(self, totals: Mapping[str, torch.Tensor], lr_factor: float) -> dict[str, float]:
        """Wait for the gradients and apply them; returns the statistics of the update."""
        # One wait for the device instead of one per number.
        totals = self._over_ranks(dict(totals))
        found = torch.stack(list(totals.values())).tolist()
        stats = update_figures(dict(zip(totals, found, strict=True)))
        for trained in self._trained:
            norm = trained.clip_gradients(self.config.optimizer.grad_clip)
            name = "grad_norm" if trained.module is self.model else f"{trained.name}_grad_norm"
            stats[name] = float(norm)
        is_sound = all(map(math.isfinite, stats.values()))
        self._take_in(lr_factor if is_sound else None)
        self._version += is_sound
        return {**stats, "lr": self._rates.lr * lr_factor}

    @says_out_of_memory("measuring gradients")
    def term_gradients(
        self,
        groups: Sequence[Sequence[LossSample]],
        *,
        params: str = "all",
        max_numbers: int = MAX_NUMBERS,
    ) -> TermGradients:
        """As in `GradientLearner`; above `max_numbers` to store, gradients are projected."""
        terms = ["task"]
        terms += ["kl"] if self.reference is not None else []
        terms += ["entropy"] if self.config.algorithm.entropy_coef else []
        weights = chosen_weights(self.model, params)
        batches = (self._prepare(own, records=False) if own else () for own in groups)
        with self._reference_here(), training_mode(self._checkpointed):
            found = ((self._gradients(batch, terms, weights) for batch in part) for part in batches)
            return term_products(terms, weights, found, len(groups), max_numbers=max_numbers)

    def _gradients(
        self, batch: TokenBatch, terms: Sequence[str], weights: Sequence[nn.Parameter]
    ) -> Iterator[Gradients]:
        """Of each term of a micro-batch's loss; the weights' own `grad` stays as it is."""
        with self._autocast():
            found, _ = self._policy_loss(batch)
        for term in terms:
            is_last = term == terms[-1]
            yield torch.autograd.grad(
                found[term], weights, retain_graph=not is_last, allow_unused=True
            )

    def _take_in(self, lr_factor: float | None) -> None:
        for trained in self._trained:
            trained.update(lr_factor, keep_grads=self._graphs is not None)

    def _prepare(
        self,
        samples: Sequence[LossSample],
        *,
        reference: ReferenceOf | None = None,
        records: bool = True,
    ) -> Iterator[TokenBatch]:
        """Micro-batches of a minibatch; the first is laid out now, the others when asked for."""
        known, own = None, [given.sample for given in samples]
        if self.reference is not None:
            known = (reference or self.reference_logprobs)(own)
        batches = (
            loss_batch(packed, samples, known, with_values=self.critic is not None)
            for packed in self._pack(*columns(own), records=records)
        )
        first = next(batches, None)
        if first is None:
            raise MooredError("an update needs at least one sample")
        return chain([first], batches)

    @says_out_of_memory("an update")
    def _add_up(self, batches: Iterable[TokenBatch]) -> dict[str, torch.Tensor]:
        """Gradients of all samples into those of the weights; returns the parts of the loss."""
        if self._graphs is not None:
            for trained in self._trained:
                trained.reserve_gradients()
        totals: dict[str, torch.Tensor] = {}
        with training_mode(self._checkpointed):
            for batch in batches:
                for name, value in self._run("update", self._add_gradients, batch).items():
                    known = totals.get(name)
                    add = torch.maximum if name.endswith("_max") else torch.add
                    totals[name] = value.clone() if known is None else add(known, value)
        return totals

    def _run(self, name: str, compute: graphs.Pass, batch: TokenBatch) -> graphs.Outputs:
        return compute(batch) if self._graphs is None else self._graphs.run(name, compute, batch)

    def _add_gradients(self, batch: TokenBatch) -> graphs.Outputs:
        """Add a micro-batch's gradients to the weights'; returns the parts of its loss."""
        with self._autocast():
            terms, parts = self._policy_loss(batch)
        self._differentiate(reduce(torch.add, terms.values()), self._trained[0])
        # After the policy's activations are gone.
        if self.critic is not None:
            value_clip = self.config.algorithm.value_clip
            of_critic = partial(critic_pass, self.critic, batch, value_clip)
            with self._autocast():
                parts["value_loss"] = self._forward(self.critic, of_critic)
            self._differentiate(parts["value_loss"], self._trained[1])
        return {name: value.detach() for name, value in parts.items()}

    def _policy_loss(self, batch: TokenBatch) -> tuple[TensorDict, TensorDict]:
        """Terms of the policy's loss on a micro-batch, and its parts for the log."""
        compute = partial(policy_pass, self.model, batch.packed, temperature=self._temperature)
        stream = token_stream(batch, *self._forward(self.model, compute))
        return policy_loss(stream, self.config.algorithm, self._loss)

    def _differentiate(self, loss: torch.Tensor, trained: Trained) -> None:
        """Add the gradients of a loss to those of a module."""
        if self._graphs is None:
            loss.backward()
            return
        # `backward` would add on the stream of the first pass, which no graph records.
        found = torch.autograd.grad(loss, trained.weights, allow_unused=True)
        pairs = zip(trained.gradients(), found, strict=True)
        grads = [(total, grad) for total, grad in pairs if grad is not None]
        torch._foreach_add_(*map(list, zip(*grads, strict=True)))  # pyright: ignore

    def _pack(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        images: Sequence[tuple[object, ...]] | None = None,
        *,
        records: bool = True,
        keeps: bool = True,
    ) -> Iterator[Packed]:
        """Packed micro-batches; those for graphs (`records`) wait in the memory of the host.

        Not `keeps`: for passes that keep no activations.
        """
        device, lengths = self.device, [len(ids) for ids in continuations]
        most = self._most_tokens
        can_record = self._graphs is not None
        if can_record and records:
            device, most = graphs.HOST, int(most / graphs.MOST_PADDING)
        elif not keeps:
            most = self._most_forward
        lay_out = to_line if self._uses_tree else to_tensors
        row_tokens = most if self._uses_tree else self.config.engine.row_tokens
        rows = pack(prompts, lengths, max_tokens=row_tokens)
        batches = list(micro_batches(rows, max_tokens=most, padded=not self._uses_tree))
        num_fillers = self._num_passes(len(batches)) - len(batches)
        for batch in batches:
            yield lay_out(batch, continuations, device, images)
        for _ in range(num_fillers):
            yield filler(lay_out, device)

    def _logprobs(
        self,
        name: str,
        model: nn.Module,
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        images: Sequence[tuple[object, ...]] | None = None,
    ) -> list[np.ndarray]:
        of_tokens = partial(logprobs_pass, model, temperature=self._temperature)
        return self._map_tokens(name, model, of_tokens, prompts, continuations, images)

    def _map_tokens(
        self,
        name: str,
        module: nn.Module,
        of_tokens: Callable[[Packed], torch.Tensor],
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        images: Sequence[tuple[object, ...]] | None,
        *,
        at_ends: bool = False,
    ) -> list[np.ndarray]:
        """Apply a per-token function of `module` to all continuations, batch by batch.

        With `at_ends` also to what comes after the last token of each. Where the GPU's memory runs
        out it is done again in smaller batches.
        """
        while True:
            try:
                return self._map_once(
                    name, module, of_tokens, prompts, continuations, images, at_ends=at_ends
                )
            except torch.OutOfMemoryError:
                if not self._halve():
                    raise

    def _map_once(
        self,
        name: str,
        module: nn.Module,
        of_tokens: Callable[[Packed], torch.Tensor],
        prompts: Sequence[Prompt],
        continuations: Sequence[np.ndarray],
        images: Sequence[tuple[object, ...]] | None,
        *,
        at_ends: bool,
    ) -> list[np.ndarray]:

        def compute(batch: TokenBatch) -> graphs.Outputs:
            with self._autocast():
                values = self._forward(module, lambda: of_tokens(batch.packed))
            return {"values": values.float()}

        computed, found = [], {}
        work = num_tokens(prompts, continuations) * self._num_parameters
        records = self._graphs is not None and work < graphs.BUSY_WORK
        for packed in self._pack(prompts, continuations, images, records=records, keeps=False):
            batch = TokenBatch(with_ends(packed) if at_ends else packed)
            values = (self._run(name, compute, batch) if records else compute(batch))["values"]
            values = values[: len(batch.packed.targets)]
            # A graph writes to the same place again. Read at the end: the next batch is laid out
            # while the device computes.
            computed.append((packed, values.clone() if records else values))
        for packed, values in computed:
            found.update(packed.split(values.cpu().numpy()))
        return [found[i] for i in range(len(continuations))]

    def _autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state: what `load` needs to go on as if nothing happened."""
        save_whole(folder, self._trained, self._version)

    def load(self, folder: Path, *, policy_only: bool = False) -> None:
        self._version = load_saved(folder, self._trained, self.model, policy_only=policy_only)

    def export(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, in the precision the sampler used."""
        export_model(self.model, folder, torch.bfloat16 if self.bf16 else torch.float32)
