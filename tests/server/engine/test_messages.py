"""Messages are encoded and decoded without loss."""

import pytest

from outrider.server.engine import messages
from outrider.server.engine.messages import FromWorker, StepReport, StepTrace, ToWorker
from outrider.verify.sampling_params import SamplingParams

SHORT = [messages.Cancel("r"), messages.Pause("r"), messages.Resume("r"), messages.Forget("p", "s"), messages.Shutdown()]
TRACE = StepTrace([5, 6], [-1, 0], [0.5, 0.25], ["trigram", "lookup"], [0], None, 4, 1.5, 1.2)
REPORT = StepReport(0.1, 0.2, 0.3, {"trigram": 4}, {"trigram": 1}, TRACE)


@pytest.mark.parametrize(
    "message", [messages.Request("r", [1, 2], SamplingParams(seed=(1 << 64) - 1), 5, ("x",), "s", True, "none", 3), *SHORT]
)
def test_messages_to_the_worker_round_trip(message: ToWorker) -> None:
    assert messages.decode_to_worker(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(10, "cpu", "float32", 1.0, 2, 1000, 2, "off", 4.5, "int8", messages.Memory(10, 11, 12, None)),
        messages.Refused("no"),
        messages.TokenEvent("r", [1], "é", "stop", REPORT, 3),
        messages.Failed("r", "no"),
        messages.Status(1, 0.5),
    ],
)
def test_messages_from_the_worker_round_trip(message: FromWorker) -> None:
    assert messages.decode_from_worker(messages.encode(message)) == message
