"""Messages survive the process boundary, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.faults import FaultKind, FaultPlan
from engine.core.messages import Cancel, Complete, Failed, Launch, Outputs, Progress, Shutdown, Stopped, Submit
from engine.core.wire import Decoder, encode
from engine.errors import (
    AdmissionRefusedError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    MemoryPlanError,
    NeverFitsError,
    StepFailedError,
    UnsupportedModelError,
)
from engine.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    Timeline,
    TokenLogprobs,
    TokenOutput,
    WaitReason,
)

TIMELINE = Timeline(1.0, 2.0, 3.0, 4.0, 5.0, 1, {WaitReason.SLOTS: 0.5})
MESSAGES = [
    Launch(EngineConfig(slots=3), 5.0, (FaultPlan(FaultKind.HANG, 7),)),
    Submit((EngineRequest("a", (1, 2, 3), SamplingParams(seed=1, logit_bias=((5, -1.0),)), 0.5, fork_of="b"),)),
    Cancel(("a", "b")),
    Complete(("c",)),
    Shutdown(2.5),
    Progress("weights", 0.5),
    Outputs((TokenOutput("a", (4,)), TokenOutput("b", (5, 6), (TokenLogprobs(5, -0.1, ((5, -0.1),)),)))),
    Outputs((TokenOutput("a", (), (), FinishReason.LENGTH, None, 10, 8, TIMELINE),)),
    Stopped(),
]


@given(st.data())
def test_any_cut_of_the_stream_gives_the_messages(data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = Decoder()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert got == MESSAGES


@pytest.mark.parametrize(
    "error",
    [
        MemoryPlanError("weights 3 + pool 2 > budget 4", "lower `slots`"),
        UnsupportedModelError("no slots", "another model"),
        InvalidParameterError("`top_k` is -1", "top_k"),
        ContextLengthError(9, 8),
        NeverFitsError(5, 4),
        AdmissionRefusedError("requests", 4, 5, 2.5),
        DeadlineExceededError("late"),
        StepFailedError("step"),
        EngineDeadError("dead"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_themselves(error: EngineError) -> None:
    (failed,) = Decoder().feed(encode(Failed(error)))
    (outputs,) = Decoder().feed(encode(Outputs((TokenOutput("a", finish_reason=FinishReason.ERROR, error=error),))))
    for arrived in (failed.error, outputs.outputs[0].error):
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)
        assert vars(arrived) == vars(error)
