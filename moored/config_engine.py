"""Options of the optimiser and of the engine: how weights are updated, and where."""

from __future__ import annotations

import typing

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from moored.names import ENGINES, SAMPLERS, Schedule


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class UpdateConfig(Section):
    """What training and a warm start have in common in how they update weights."""

    lr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """null: by the size of the model."""
    kind: typing.Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps its two moments in 8 bits each (needs torchao, which comes with
    `pip install 'moored[lowbit]'`): 2 bytes per parameter instead of 8."""
    states: typing.Literal["device", "host"] = "device"
    """`host` keeps float32 weights and moments of a GPU's model in main memory and updates them
    there: slower, 12 bytes per parameter less on the GPU."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient of an update."""
    lora_rank: int = Field(default=0, ge=0)
    """0 trains all weights."""
    lora_alpha: float = Field(default=64.0, gt=0.0)
    """LoRA weights count lora_alpha / lora_rank times."""


class OptimizerConfig(UpdateConfig):
    """How the policy is updated."""

    lr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """null: by the size of the model, 1e-4 below 50 million parameters, else the paper's 1e-6."""
    critic_lr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """null: by the size of the model, 3e-4 below 50 million parameters, else 1e-5."""
    schedule: Schedule = "constant"
    """How both learning rates fall from the end of the warm-up to the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps over which both learning rates rise to their value."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the learning rate that `linear` and `cosine` fall towards."""
    num_minibatches: int = Field(default=4, ge=1)
    """Updates per epoch; the samples of a step are dealt out among them."""
    num_epochs: int = Field(default=1, ge=1)
    """How often an update goes through the samples of a step."""


class EndpointConfig(Section):
    """An OpenAI-compatible server."""

    url: str | None = None
    """E.g. http://host:8000/v1."""
    api_key_env: str | None = None
    """Variable with the key; null: OPENAI_API_KEY, if it is set."""
    concurrency: int = Field(default=64, ge=1)
    """Requests at a time."""
    timeout_s: float = Field(default=300.0, gt=0.0, le=1e9)
    """How long a reply may take."""


class VllmConfig(Section):
    """vLLM as the sampler."""

    memory_share: float = Field(default=0.4, gt=0.0, lt=1.0)
    """Share of the GPU's memory for its copy of the weights, and keys and values; the learner has
    the rest."""
    cache_gib: float = Field(default=1.0, gt=0.0)
    """Main memory for keys and values on a CPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on a CPU, processes) of one machine that vLLM divides a model over. Its weights then
    come from files, as those of a server."""
    server: str | None = Field(default=None, pattern="^(start$|https?://)")
    """null: vLLM in the process of the run. `start`: a server of its own process, which the run
    starts and ends. http://host:8000: a server that runs already. Servers get weights as files."""
    folder: str | None = None
    """Where weights for a server, or for the processes of tensor_parallel, are written, which they
    have to see too; null: a temporary one."""


class RayConfig(Section):
    """A Ray cluster: one driver, sampler replicas, learner ranks, and actors of environments."""

    address: str | None = None
    """`auto` (the cluster this machine is part of) or `host:port`; null starts Ray on this machine
    for as long as the run lasts."""
    replicas: int | typing.Literal["auto"] = Field(default=1, union_mode="left_to_right")
    """Samplers, each with a copy of the weights; `auto` takes what the cluster has free, and more
    when nodes join."""
    learners: int = Field(default=1, ge=1)
    """Ranks that the learner is split over."""
    cpus: float = Field(default=1.0, gt=0.0)
    """CPUs of one replica, learner rank or environment actor, as Ray counts them."""
    replica_gpus: float | None = Field(default=None, ge=0.0)
    """GPUs of one replica; null: 1, or engine.vllm.tensor_parallel, where the cluster has GPUs and
    engine.device is not cpu."""
    learner_gpus: float | None = Field(default=None, ge=0.0)
    """GPUs of one learner rank; null: as for a replica."""
    env_actors: int = Field(default=0, ge=0)
    """Processes that environments live in, on nodes without GPUs where there are any; each has
    many, and answers `rollout.env_workers` calls at a time. 0: environments live in the driver."""
    publish: typing.Literal["store", "direct"] = "store"
    """How weights reach replicas: `store` through main memory and Ray's object store; `direct` from
    the learner's rank 0 by NCCL between GPUs, else by gloo. A replica that comes back then waits
    for the next step."""
    patience_s: float = Field(default=300.0, gt=0.0, le=1e9)
    """How long a run waits while no replica or no environment actor answers, or for the place of a
    lost learner rank."""

    @field_validator("replicas")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"a run needs at least 1 replica, got {value}")
        return value


class EngineConfig(Section):
    """Where and how the model is computed; nothing here changes a result except for rounding."""

    kind: typing.Annotated[str, AfterValidator(ENGINES.check)] = "local"
    """`local` (this process), `torchrun` (the model in shards, one for each process that torchrun
    starts), `ray` (a cluster), `endpoint` (a server; evaluates and scores only), or `module:attr`:
    called with the configuration, returns an `Engine`."""
    sampler: typing.Annotated[str, AfterValidator(SAMPLERS.check)] = "auto"
    """`fast` is for Llama-shaped models; `plain` runs any model through its own code: slow, to
    compare with; `auto` takes the fast one where it can; `vllm` is vLLM in this process, with a
    copy of the weights; `module:attr` makes one of your own, as `moored.engine.samplers.auto`."""
    learner: typing.Literal["auto", "plain"] = "auto"
    """`plain` does without tree attention and CUDA graphs: slow, to compare with."""
    device: str = "auto"
    """`auto` takes a GPU when there is one."""
    dtype: typing.Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; `auto` is bfloat16 on a GPU."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Bound on the tokens of a pass with gradients; without, a GPU takes up to four times as many.
    null: what fits the memory of a GPU, 4,096 on a CPU. Halved where that memory runs out."""
    row_tokens: int = Field(default=2048, ge=1)
    """Bound on one packed row where attention needs a mask."""
    gradient_checkpointing: bool | typing.Literal["auto"] = "auto"
    """Compute activations twice instead of keeping them: slower, in less memory. `auto` does so on
    a GPU where nothing fits without."""
    compile: bool = False
    """Compile the layers with torch.compile: slow to start, then faster."""
    endpoint: EndpointConfig = EndpointConfig()
    """For kind `endpoint`."""
    vllm: VllmConfig = VllmConfig()
    """For sampler `vllm`."""
    ray: RayConfig = RayConfig()
    """For kind `ray`."""

    @property
    def gpus_per_sampler(self) -> int:
        """Those that one sampler divides its model over, where there are GPUs."""
        return self.vllm.tensor_parallel if self.sampler == "vllm" else 1
