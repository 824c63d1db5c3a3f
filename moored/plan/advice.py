"""What to change in a configuration that does not fit, with the least harm first.

Each piece of advice was planned again: it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from moored.config import Config
from moored.errors import MooredError
from moored.models.shapes import shape_of
from moored.plan.coefficients import MEASURED
from moored.plan.gpus import GIB, Gpu
from moored.plan.memory import vllm_shares
from moored.plan.plan import BATCH_SIZES, Plan, plan

MARGIN = 0.1
"""`train` refuses what is over by more, because plans are not exact."""
LORA_RANK = 64
"""The paper's."""
SMALL_LORA_RANK = 8
NOTHING_HELPS = (
    "none of the changes that `moored plan` tries makes it fit; take a smaller model or a larger "
    "GPU"
)

Options = Mapping[str, object]
"""Values by dotted name."""
Change = tuple[Options, str]
"""Options and what they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Options that make a plan fit."""

    options: Options
    why: str
    """What they cost."""
    peak_gib: float

    def text(self) -> str:
        return f"{words_of(self.options)} ({self.peak_gib:.1f} GiB: {self.why})"


def advice(found: Plan) -> list[Advice]:
    """Every single change that makes it fit; where none does, several that do together.

    [] where the plan fits already, and where nothing helps.
    """
    if found.fits:
        return []
    changes = [change for change in _changes(found) if _changed(found, [change]) is not None]
    singles = [_try(found, [change]) for change in changes]
    helpful = [single for single in singles if single is not None]
    # vLLM may need more than the sampler that it replaces: then the others do without it.
    others = [change for change in changes if "engine.sampler" not in change[0]]
    return helpful or _together(found, changes) or _together(found, others)


def _together(found: Plan, changes: Sequence[Change]) -> list[Advice]:
    """The fewest of the least harmful changes that fit, without those that are not needed."""
    counts = range(2, len(changes) + 1)
    taken = next((changes[:n] for n in counts if _try(found, changes[:n]) is not None), None)
    if taken is None:
        return []
    for change in reversed(taken):
        fewer = [other for other in taken if other is not change]
        taken = fewer if _try(found, fewer) is not None else taken
    best = _try(found, taken)
    return [] if best is None else [best]


def _changes(found: Plan) -> Iterator[Change]:
    """Options and what they cost, from what changes no result to what trains something else."""
    setup = found.setup
    tokens = _smaller_batch(found)
    if tokens is not None:
        yield {"engine.micro_batch_tokens": tokens}, "smaller matrices, a little slower"
    if not found.checkpointing:
        yield {"engine.gradient_checkpointing": True}, "updates take about a third longer"
    yield from _another_sampler(found)
    if not setup.states_on_host and not setup.lora_rank:
        yield {"optimizer.states": "host"}, "the optimiser works in main memory, slower"
    if setup.optimizer == "adamw" and not setup.lora_rank:
        yield {"optimizer.kind": "adamw_8bit"}, "moments of the optimiser are rounded"
    if setup.has_own_reference:
        yield {"algorithm.kl_coef": 0.0}, "no KL to the first policy"
    yield from _less_training(found)


def _less_training(found: Plan) -> Iterator[Change]:
    """What trains something else, or on less."""
    setup, config = found.setup, found.config
    if not setup.lora_rank:
        yield {"optimizer.lora_rank": LORA_RANK}, "only adapters are trained"
    elif setup.lora_rank > SMALL_LORA_RANK:
        yield {"optimizer.lora_rank": SMALL_LORA_RANK}, "smaller adapters"
    if setup.has_critic and config.rollout.group_size > 1:
        # By itself the name would turn KL on.
        options = {"algorithm.name": "grpo", "algorithm.kl_coef": config.algorithm.kl_coef}
        own = {"algorithm.advantage": None} if config.algorithm.advantage else {}
        yield options | own, "no critic"
    if setup.num_groups > 1:
        yield {"rollout.num_groups": -(-setup.num_groups // 2)}, "fewer prompts in a step"
    if setup.max_context > BATCH_SIZES[-1]:
        yield {"rollout.max_context": BATCH_SIZES[-1]}, "longer episodes are cut off"


def _smaller_batch(found: Plan) -> int | None:
    """The largest micro-batch below the one that is set that fits, or else the smallest."""
    given = found.setup.micro_batch_tokens
    sizes = [size for size in BATCH_SIZES if given is not None and size < given]
    for size in sizes:
        if _try(found, [({"engine.micro_batch_tokens": size}, "")]) is not None:
            return size
    return sizes[-1] if sizes else None


def _another_sampler(found: Plan) -> Iterator[Change]:
    """Instead of the plain one, which has room for all episodes at once or does not fit.

    The fast sampler has as many as fit, and computes with the learner's weights: vLLM, which has a
    copy of them, needs more.
    """
    if found.config.engine.sampler == "plain" and found.setup.shape.is_fast:
        yield {"engine.sampler": "auto"}, "moored's own sampler, which is faster too"
    engine = found.config.engine
    is_elsewhere = (engine.vllm.server or "").startswith("http")
    if found.setup.shape.is_fast or engine.sampler == "vllm" or is_elsewhere:
        return
    changes = [
        (
            {"engine.sampler": "vllm", "engine.vllm.memory_share": share},
            f"vLLM writes {rows} of {found.setup.most_rows} episodes at a time; it comes with "
            f"`pip install 'moored[vllm]'`",
        )
        for share, rows in vllm_shares(found.setup, found.gpu)
    ]
    # The largest share that leaves the learner its own, and as much free as micro-batches leave,
    # writes most episodes at a time.
    most_gib = MEASURED.memory.filled_share * found.gpu.memory_gib
    tried = ((change, _try(found, [change])) for change in reversed(changes))
    roomy = (change for change, advised in tried if advised and advised.peak_gib <= most_gib)
    best = next(roomy, changes[0] if changes else None)
    if best is not None:
        yield best


def _try(found: Plan, changes: Sequence[Change]) -> Advice | None:
    """What changes come to together; None where they do not fit or are refused."""
    config = _changed(found, changes)
    if config is None:
        return None
    try:
        planned = plan(config, found.setup.shape, found.gpu, lengths_of=found.lengths_of)
    except MooredError:
        # engine.vllm.tensor_parallel may not divide the heads, and counts with vLLM only; or the
        # episodes that were asked for are longer than the changed configuration allows.
        return None
    if not planned.fits or gib_refused_by_train(planned) is not None:
        return None
    why = "; ".join(why for _, why in changes)
    peak_gib = planned.memory.peak_bytes / GIB
    return Advice(options=_options_of(changes), why=why, peak_gib=peak_gib)


def _options_of(changes: Sequence[Change]) -> Options:
    return {name: value for own, _ in changes for name, value in own.items()}


def _changed(found: Plan, changes: Sequence[Change]) -> Config | None:
    """None where the configuration refuses the changes."""
    try:
        return with_options(found.config, _options_of(changes))
    except ValidationError:
        return None


def with_options(config: Config, options: Options) -> Config:
    """The configuration with other values for some dotted names; raises what it refuses."""
    data = config.model_dump()
    for name, value in options.items():
        *sections, option = name.split(".")
        own = data
        for section in sections:
            own = own[section]
        own[option] = value
    return Config.model_validate(data)


def _value(value: object) -> str:
    """As it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def verdict(found: Plan) -> str:
    """One line: fits, or does not and by how much."""
    memory, gpu = found.memory, found.gpu
    peak = f"{memory.peak_bytes / GIB:.1f} GiB in the {memory.peak_phase} phase"
    has = f"{gpu.memory_gib:.1f} GiB of {gpu.name}"
    if found.fits:
        return f"fits: {peak}, {100 * (1 + found.over):.0f} % of the {has}"
    return f"does not fit: {peak}, {100 * found.over:.0f} % more than the {has}"


def words_of(options: Options) -> str:
    """As they are written on the command line."""
    return " ".join(f"{name}={_value(value)}" for name, value in options.items())


def remedy(found: Plan) -> str:
    """What to do about a plan that does not fit, in one sentence."""
    pieces = advice(found)
    if pieces:
        return "set " + ", or ".join(piece.text() for piece in pieces)
    return NOTHING_HELPS


def refuse_what_cannot_fit(config: Config, gpu: Gpu) -> str | None:
    """Raise when a run needs clearly more memory than the GPU has, before anything is loaded.

    What may be too large is tried, with a warning; None where it fits. Models of unknown shape, and
    those that another engine computes, are let through.
    """
    found = plan_if_known(config, gpu)
    if found is None or found.fits:
        return None
    if found.over > MARGIN:
        raise MooredError(
            f"{config.model} {verdict(found)}; {remedy(found)}; `moored plan` shows every part"
        )
    pieces = advice(found)
    return (
        f"by plan {config.model} {verdict(found)}; plans may be {100 * MARGIN:.0f} % off, so it is "
        f"tried, and may end for lack of memory; "
        + (f"to be safe, set {pieces[0].text()}" if pieces else NOTHING_HELPS)
    )


def gib_refused_by_train(found: Plan) -> float | None:
    """What a run needs by its own plan where it refuses one that fits; None where it begins.

    It does not know the lengths that the plan was given, and assumes full micro-batches.
    """
    if found.lengths_of is None:
        return None
    known = plan(found.config, found.setup.shape, found.gpu)
    return known.memory.peak_bytes / GIB if known.over > MARGIN else None


def plan_if_known(config: Config, gpu: Gpu) -> Plan | None:
    """None for models of unknown shape, and where another engine than the local one computes."""
    if config.engine.kind != "local":
        return None
    try:
        shape = shape_of(config.model)
    except MooredError:
        return None
    return plan(config, shape, gpu)
