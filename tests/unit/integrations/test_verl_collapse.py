"""Collapse metrics on verl's `DataProto`: spans through a real agent loop, groups, scores."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moored.diagnostics.monitor import CollapseMonitor
from moored.errors import MooredError
from moored.integrations.verl_collapse import (
    _turns,
    batch_groups,
    read_spans,
    reply_spans,
    score_with,
)
from moored.types import Prompt, ScoreRequest
from tests.unit.verl_batches import LENGTHS, make_batch, needs_verl

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[3]
PIECES = ["<pad>", "<think>", "</think>", "go", " left", "up", "user: ", "\n"]
PROMPT = [6, 3]
# <think> go left </think> up | user: | <think> </think> | user: <think> | go </think>
RESPONSE = [1, 3, 4, 2, 5, 6, 1, 2, 6, 1, 3, 2]
MASK = [1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1]
SPANS = {"turns": [[0, 5], [6, 8], [10, 12]], "thinks": [[1, 3], [7, 7], [10, 11]]}


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] if i < len(PIECES) else "?" for i in ids)


def test_spans_are_found_reply_by_reply():
    # The observation before the third reply ends with the opening tag.
    assert reply_spans(PROMPT, RESPONSE, MASK, decode) == {"moored_spans": SPANS}


def test_a_prompt_may_open_the_reasoning():
    found = reply_spans([6, 1, 7], [3, 2, 5], [1, 1, 1], decode)["moored_spans"]
    assert found == {"turns": [[0, 3]], "thinks": [[0, 1]]}
    closed = reply_spans([6, 7], [3, 2, 5], [1, 1, 1], decode)["moored_spans"]
    assert closed == {"turns": [[0, 3]], "thinks": [None]}


def test_without_tags_whole_replies_are_reasoning():
    found = reply_spans(PROMPT, RESPONSE, MASK, None, tags=None)["moored_spans"]
    assert found["thinks"] == found["turns"] == SPANS["turns"]


def test_a_response_without_sampled_tokens_has_no_spans():
    empty = {"turns": [], "thinks": []}
    assert reply_spans(PROMPT, [], [], decode)["moored_spans"] == empty
    assert reply_spans(PROMPT, [6, 6], [0, 0], decode)["moored_spans"] == empty


def agent_outputs() -> list[Any]:
    """Two padded outputs of agent loops, as verl hands them to its `_postprocess`."""
    import torch
    from verl.experimental.agent_loop.agent_loop import (  # pyright: ignore[reportMissingImports]
        AgentLoopMetrics,
        _InternalAgentLoopOutput,
    )

    outputs = []
    for prompt in ([6, 3], [5]):
        padded = torch.tensor([[0] * (3 - len(prompt)) + prompt])
        response = torch.tensor([[*RESPONSE, 0]])
        outputs.append(
            _InternalAgentLoopOutput(
                prompt_ids=padded,
                response_ids=response,
                input_ids=torch.cat([padded, response], dim=1),
                position_ids=torch.zeros(1, 16, dtype=torch.long),
                response_mask=torch.tensor([[*MASK, 0]]),
                attention_mask=torch.tensor(
                    [[0] * (3 - len(prompt)) + [1] * (len(prompt) + 12) + [0]]
                ),
                reward_score=1.0,
                metrics=AgentLoopMetrics(),
                extra_fields={**reply_spans(prompt, RESPONSE, MASK, decode)},
            )
        )
    return outputs


@needs_verl
def test_spans_travel_through_verls_agent_loop_into_the_batch():
    from verl.experimental.agent_loop import (  # pyright: ignore[reportMissingImports]
        AgentLoopWorker,
    )

    worker: Any = SimpleNamespace(reward_loop_worker_handles=None)
    batch = AgentLoopWorker._postprocess(worker, agent_outputs())
    assert read_spans(batch) == [SPANS, SPANS]
    first, second = (group.trajectories[0].turns for group in batch_groups(batch))
    assert [turn.reasoning_ids.tolist() for turn in first] == [[3, 4], [], [3]]
    assert first[2].prompt.ids.tolist() == [6, 3, *RESPONSE[:10]]
    assert second[0].prompt.ids.tolist() == [5]
    assert first[1].completion_ids.tolist() == [1, 2]
    # The same without spans, by mask and tags.
    del batch.non_tensor_batch["moored_spans"]
    assert read_spans(batch) == [None, None]
    parsed = batch_groups(batch, decode)[0].trajectories[0].turns
    assert [turn.think_span for turn in parsed] == [turn.think_span for turn in first]


@needs_verl
def test_spans_travel_through_the_fields_of_the_v1_trainer():
    from verl import DataProto  # pyright: ignore[reportMissingImports]
    from verl.experimental.agent_loop.agent_loop import (  # pyright: ignore[reportMissingImports]
        AgentLoopMetrics,
        AgentLoopOutput,
    )
    from verl.utils.tensordict_utils import (  # pyright: ignore[reportMissingImports]
        list_of_dict_to_tensordict,
    )

    output = AgentLoopOutput(
        prompt_ids=PROMPT, response_ids=RESPONSE, response_mask=MASK, metrics=AgentLoopMetrics()
    )
    output.extra_fields.update(reply_spans(PROMPT, RESPONSE, MASK, decode))
    rows = list_of_dict_to_tensordict([output.as_dict(), output.as_dict()])
    fields = np.array(rows["extra_fields"].tolist(), dtype=object)
    batch = DataProto.from_dict(
        {"responses": rows["responses"]}, non_tensors={"extra_fields": fields}
    )
    assert read_spans(batch) == [SPANS, SPANS]


@needs_verl
def test_rows_lose_their_padding_and_groups_are_prompts():
    groups = batch_groups(make_batch(), tags=None)
    assert [len(group.trajectories) for group in groups] == [4, 4, 4]
    prompts = [group.trajectories[0].turns[0].prompt.ids.tolist() for group in groups]
    assert prompts == [[11, 12], [20, 21, 22], [32]]
    # Row 3 is the second of the first prompt: four tokens, the third written by a tool.
    turns = groups[0].trajectories[1].turns
    assert [turn.completion_ids.tolist() for turn in turns] == [[62, 63], [65]]
    assert turns[1].prompt.ids.tolist() == [11, 12, 62, 63, 64]
    batch = make_batch()
    del batch.batch["response_mask"]
    whole = [t.turns[0] for group in batch_groups(batch, tags=None) for t in group.trajectories]
    assert sorted(len(turn.completion_ids) for turn in whole) == sorted(LENGTHS)


@needs_verl
def test_what_cannot_be_read_is_said():
    batch = make_batch()
    with pytest.raises(MooredError, match="decode"):
        batch_groups(batch)
    long: Any = {"turns": [[0, 3]], "thinks": [None]}
    batch.non_tensor_batch["moored_spans"] = np.array([long] * 12, dtype=object)
    with pytest.raises(MooredError, match="row 0 reach token 3 of a response of 2"):
        batch_groups(batch)
    batch.non_tensor_batch["multi_modal_inputs"] = np.array([{}, {"pixels": 1}] * 6, dtype=object)
    with pytest.raises(MooredError, match="images"):
        batch_groups(batch)
    del batch.batch["prompts"]
    with pytest.raises(MooredError, match="no prompts"):
        batch_groups(batch)


@needs_verl
def test_a_monitor_measures_a_batch():
    """Each reasoning token has 0.8 under its own prompt and 0.1 under the two others: log 2.4."""
    batch = make_batch()

    def score_one(prompt: Prompt, ids: np.ndarray) -> np.ndarray:
        own = {11: 0, 20: 1, 32: 2}[int(prompt.ids[0])]
        # Row r has tokens 50 + 4 r, …, and prompt r % 3.
        return np.log(np.where((ids - 50) // 4 % 3 == own, 0.8, 0.1)).astype(float)

    def score(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [[score_one(r.prompt, ids) for ids in r.continuations] for r in requests]

    spans = [{"turns": [[0, 1]], "thinks": [[0, 1]]}] * 12
    batch.non_tensor_batch["moored_spans"] = np.array(spans, dtype=object)
    monitor = CollapseMonitor(score=score, views=("first_turn",), num_prompts=3)
    seen = monitor.measure(1, batch_groups(batch))
    assert seen.metrics["collapse_first_turn_sample/mi_estimate"] == pytest.approx(math.log(2.4))
    assert seen.metrics["collapse/valid_thinking_rate"] == 1.0


@needs_verl
def test_scores_go_through_verls_own_padding():
    """A 'model' whose next-token log-prob is -token - position / 100, run as verl's actor runs."""
    from verl.workers.utils.padding import (  # pyright: ignore[reportMissingImports]
        left_right_2_no_padding,
        no_padding_2_padding,
    )

    sizes = []

    def log_probs(batch: Any) -> Any:
        sizes.append(len(batch))
        data = left_right_2_no_padding(batch.to_tensordict())
        ids, positions = data["input_ids"].values(), data["position_ids"].values()
        # Position t predicts token t + 1.
        return no_padding_2_padding(-ids.roll(-1).float() - positions / 100, data)

    score = score_with(log_probs, divisor=2, batch_size=4)
    continuations = [np.array(ids) for ids in ([5], [6, 7], [8, 9, 1], [2], [3, 4])]
    (found,) = score([ScoreRequest(Prompt(np.array([40, 41, 42])), continuations)])
    for scored, ids in zip(found, continuations, strict=True):
        np.testing.assert_allclose(scored, -ids - (2 + np.arange(len(ids))) / 100, atol=1e-5)
    assert sizes == [4, 2]
    with pytest.raises(MooredError, match="multiple of divisor"):
        score_with(log_probs, divisor=3, batch_size=4)


@needs_verl
def test_the_documented_lines_run():
    text = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    filtering, collapse = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    updated: list[Any] = []
    names: dict[str, Any] = {
        "batch": make_batch(),
        "metrics": {},
        "step": 1,
        "trainer": SimpleNamespace(_update_actor=updated.append),
        "tokenizer": SimpleNamespace(decode=decode),
        "output": SimpleNamespace(extra_fields={}),
        "prompt_ids": PROMPT,
        "response_ids": RESPONSE,
        "response_mask": MASK,
    }
    exec(filtering, names)
    assert len(updated[0]) == 12 and names["metrics"]["filter/num_kept"] == 2
    exec(collapse, names)
    assert names["output"].extra_fields == {"moored_spans": SPANS}
    # No row of this batch holds tags.
    assert names["metrics"]["collapse/valid_thinking_rate"] == 0.0


def test_the_newest_observation_of_a_later_turn_begins_after_the_reply_before_it():
    prompt, response = np.array([1, 2]), np.array([10, 11, 3, 4, 12])
    spans: Any = {"turns": [[0, 2], [4, 5]], "thinks": [[0, 1], None]}
    first, second = _turns(prompt, response, spans)
    assert first.prompt.ids[first.observation_start :].tolist() == [1, 2]
    assert second.prompt.ids[second.observation_start :].tolist() == [3, 4]


def test_rows_of_two_data_sources_are_two_environments():
    batch = make_batch()
    batch.non_tensor_batch["data_source"] = np.array(["gsm8k", "math"] * 6, dtype=object)
    groups = batch_groups(batch, tags=None)
    assert {group.env for group in groups} == {"gsm8k", "math"}
    # Looks over both take groups of one id for one task.
    assert len({group.group_id for group in groups}) == len(groups)
    assert {group.env for group in batch_groups(make_batch(), tags=None)} == {"verl"}
