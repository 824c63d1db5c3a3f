"""Every number of a plan that was measured or copied from the engine, each with its source.

To calibrate: run `benchmarks/plan.py` on a GPU, compare, and change the number here.
"""

from __future__ import annotations

from dataclasses import dataclass

from moored.plan.gpus import GIB

MIB = 2**20
RECORDED_TO = 300_000_000
"""`MAX_RECORDED` of engine/fast/graphs.py: parameters of the largest model whose passes are CUDA
graphs, which keep their memory and are launched at once."""
RELEASED_FROM = 1_000_000_000
"""Of engine/local/parking.py: parameters of the smallest model whose updates use the memory of keys
and values, and whose reference waits in main memory."""
FORWARD_TIMES, FORWARD_TOKENS = 4, 24576
"""Of engine/local/batches.py: passes without gradients have so many times the tokens of others, up
to a bound."""


def forward_tokens(tokens: int, times: int = FORWARD_TIMES) -> int:
    """Most tokens of a pass without gradients, where passes with them have `tokens`."""
    return max(tokens, min(times * tokens, FORWARD_TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCoefficients:
    """Bytes that do not follow from the shape of the model."""

    context_bytes: int = int(0.6 * GIB)
    """CUDA context and loaded kernels, outside of torch's allocator: about 0.6 GiB on an H200."""
    workspace_bytes: int = 256 * MIB
    """cuBLAS takes 32 MiB for each of a few streams on Hopper; flash attention some sums."""
    reserve_share: float = 0.04
    """Of what comes and goes in a phase: blocks of the allocator that do not fit together."""
    filled_share: float = 0.92
    """Of the GPU's memory, up to which micro-batches are chosen: a plan may be a little short."""
    cache_share: float = 0.6
    """`CACHE_SHARE` of engine/fast/sampler.py: of the free memory, for keys and values."""
    min_sharers: int = 4
    """`MIN_SHARERS` of engine/fast/slots.py: one more slot for each so many rows."""
    min_rows: int = 8
    """`MIN_ROWS` of engine/fast/sampler.py."""
    recorded_tokens: int = 8192
    """`MAX_RECORDED_TOKENS` of engine/fast/rows.py: prompts of so many tokens are recorded. What
    recordings hold stays during updates: 0.72 GiB at 1.5 B, of which this counts 0.56."""
    prefill_tokens: int = 32768
    """`PREFILL_TOKENS` of engine/fast/stream.py."""
    logits_per_chunk: int = 1 << 28
    """`LOGITS_PER_CHUNK["cuda"]` of engine/passes.py."""
    recorded_to: int = RECORDED_TO
    forward_times: int = FORWARD_TIMES
    busy_work: float = 4e12
    """`BUSY_WORK` of engine/fast/graphs.py: tokens times parameters from which on passes without
    gradients of recorded models are not recorded, and larger."""
    released_from: int = RELEASED_FROM
    scale_bytes: float = 2 * 4 / 256
    """Of 8-bit moments, for each parameter: a float32 for 256 numbers of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCoefficients:
    """How near to the limits of a GPU each kind of work comes."""

    matrix_share: float = 775 / 989
    """Large bfloat16 products reach 775 of the 989 Tflop/s of an H200's data sheet. All other
    shares of the matrix rate are of this."""
    decode_layer_s: float = 0.0152e-3
    """Kernels of one layer of a decoding step that the bounds below leave out. This and the next
    three were fitted to steps of 16, 128 and 1,024 rows of 576 tokens on an H200, which they
    reproduce within 11 % from 0.5 to 3 billion parameters and within 15 % at 0.1
    (benchmarks/results/decode_h200.json)."""
    decode_matrix_share: float = 0.81
    """Of the bandwidth (few rows) or the matrix rate (many)."""
    decode_cache_share: float = 0.75
    """Of the bandwidth, while attention reads keys and values: alone it reached 0.69 at 0.5 B and
    0.79 at 3 B with 128 rows."""
    vllm_row_s: float = 22e-6
    """What vLLM 0.26 adds to a decoding step for each row, beside what moored's own sampler takes:
    with log-probabilities its steps took 4.0 and 29 ms at 0.5 B (128 and 1,024 rows) and 4.7 and 39
    ms at 3 B, measured on one H200 with random weights. This gives 3.7, 27, 5.8 and 40 ms."""
    draw_passes: float = 3.0
    """How often drawing a token goes over its float32 logits."""
    prefill_share: float = 0.88
    """Of the matrix rate, for a large model; smaller ones get `share_of_size` of this and of the
    next two. The fast sampler read prompts of 512 tokens at 59 % with 0.5 B and 74 % with 3 B
    (this and the next three: sizes_h200.json, with attention counted)."""
    forward_share: float = 0.69
    """Passes of the learner without gradients, with fused layers. Measured with layers of
    transformers alone: 33 % at 0.5 B. With sums made by norms 0.5 B reached 51 %, 135 million
    parameters 35 % (benchmarks/results/sizes_h200.json)."""
    update_share: float = 0.62
    """Forward and backward passes with fused layers: 37 % at 0.5 B and 56 % at 3 B."""
    unfused_share: float = 0.8
    """Of the two above, with other layers: with those of transformers updates reached 29 % at 0.5 B
    and 45 % at 3 B, with compiled ones 29 % and 54 %."""
    half_size: float = 0.35e9
    """Parameters of the model that gets half of a large one's share."""
    recorded_times: float = 1.25
    """How many times as fast as that updates of models are that are CUDA graphs: 135 million
    parameters take 0.675 s for a step that would be planned at 0.88 s (plan_h200.json)."""
    launch_layer_s: float = 1.5e-3
    """Of the host, for one layer of a forward pass that is not recorded; backwards twice as long.
    PPO with critic and KL on 3 B in micro-batches of two trajectories was bound by it on an H200:
    3.5 s for 64 forward passes of 36 layers, 22.3 s for 64 updates of both models
    (benchmarks/results/plan_h200.json)."""
    recorded_to: int = RECORDED_TO
    released_from: int = RELEASED_FROM
    timed_from: int = 100_000_000
    """Parameters of the smallest model whose steps are timed. Host and short kernels bound those of
    smaller ones: the rates above are of 135 million and more, and would give `mini` a GRPO step
    with rollouts over three times too short and updates a quarter too long
    (train_step_h200.json)."""
    optimizer_share: float = 0.8
    """Of the bandwidth, for an AdamW update."""
    host_copy_bytes_s: float = 50e9
    """Between GPU and pinned main memory over PCIe 5."""
    host_update_bytes_s: float = 100e9
    """AdamW on the processor is bound by main memory."""

    def share_of_size(self, num_parameters: int) -> float:
        """Launches and narrow matrices cost small models most of the rate."""
        return num_parameters / (num_parameters + self.half_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """All of them."""

    memory: MemoryCoefficients = MemoryCoefficients()
    speed: SpeedCoefficients = SpeedCoefficients()


MEASURED = Coefficients()
"""What plans use."""
