"""Events reach every sink; a sink that raises is counted, logged once and stops nothing. The list is closed."""

import dataclasses
import logging
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from darkbloom_core import contracts
from darkbloom_core.contracts import EVENT_TYPES, RequestRefused, SinkFailed
from darkbloom_core.telemetry import SinkEmitter

EVENT = RequestRefused(status=404, error_code="model_not_found")


class RecordingSink:
    def __init__(self, name):
        self.name = name
        self.events = []
        self.closed = 0

    def emit(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1


class BrokenSink:
    def __init__(self, name="broken", error=None):
        self.name = name
        self.error = error or RuntimeError("no")

    def emit(self, event):
        raise self.error

    def close(self):
        raise self.error


def test_every_sink_gets_every_event_in_order():
    first, second = RecordingSink("first"), RecordingSink("second")
    emitter = SinkEmitter([first, second])
    refusals = [RequestRefused(status=status, error_code="x") for status in (400, 404, 413)]
    for refusal in refusals:
        emitter.emit(refusal)
    assert first.events == second.events == refusals
    assert emitter.failures == {"first": 0, "second": 0}


def test_no_sink_at_all_is_fine():
    emitter = SinkEmitter()
    emitter.emit(EVENT)
    emitter.close()
    assert emitter.failures == {}


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1)])
def test_a_sink_that_raises_is_counted_logged_once_and_told_to_the_others(error, caplog):
    before, after = RecordingSink("before"), RecordingSink("after")
    emitter = SinkEmitter([before, BrokenSink(error=error), after])
    for _ in range(3):
        emitter.emit(EVENT)
    assert emitter.failures == {"before": 0, "broken": 3, "after": 0}
    assert before.events.count(EVENT) == after.events.count(EVENT) == 3
    assert (
        before.events.count(SinkFailed(sink="broken")) == after.events.count(SinkFailed(sink="broken")) == 3
    )
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "broken" in record.getMessage()


def test_two_sinks_that_raise_at_everything_come_to_an_end():
    emitter = SinkEmitter([BrokenSink("a"), BrokenSink("b")])
    emitter.emit(EVENT)
    assert emitter.failures == {"a": 2, "b": 2}  # the event itself, and being told of the other


def test_close_closes_each_sink_once_and_nothing_is_emitted_after_it():
    sound = RecordingSink("sound")
    emitter = SinkEmitter([BrokenSink(), sound])
    emitter.close()
    emitter.close()
    emitter.emit(EVENT)
    assert sound.closed == 1
    assert sound.events == []
    assert emitter.failures == {"broken": 1, "sound": 0}


def test_a_sink_whose_name_raises_goes_by_its_type():
    class Nameless(BrokenSink):
        name = property(lambda self: 1 / 0, lambda self, value: None)

    emitter = SinkEmitter([Nameless()])
    emitter.emit(EVENT)
    assert emitter.failures == {"Nameless": 1}


def test_failures_from_many_threads_are_all_counted():
    emitter = SinkEmitter([BrokenSink()])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: emitter.emit(EVENT), range(400)))
    assert emitter.failures == {"broken": 400}


# --- the closed list of events ---------------------------------------------------------------

NAMED_TEXTS = {
    "model": "the served name of a model",
    "family": "a family's name",
    "request_id": "an id that the server made up",
    "trace_parent": "the trace context header: numbers in hexadecimal",
    "error_code": "a code of the exception tree",
    "plugin": "an entry point's name",
    "distribution": "a package's name",
    "state": "a plugin's state",
    "sink": "a sink's name",
    "tier": "a cache tier's name",
}
"""The only fields that may hold text that the type does not list. None comes from a prompt or an output."""

ADVICE = (
    "Telemetry carries no text of users, no tokens, hashes or tenants: use a number, a Literal, or, for a "
    "name that the operator or the server chose, add the field to NAMED_TEXTS here and to docs/telemetry.md."
)


def leaves(annotation):
    """The plain types that a field's annotation is made of."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, tuple):
        for part in typing.get_args(annotation):
            if part is not Ellipsis:
                yield from leaves(part)
    else:
        yield annotation


@pytest.mark.parametrize("event", EVENT_TYPES, ids=lambda event: event.__name__)
def test_every_field_of_an_event_is_plain_and_holds_no_free_text(event):
    assert dataclasses.is_dataclass(event)
    assert event.__dataclass_params__.frozen
    for name, annotation in typing.get_type_hints(event).items():
        for leaf in leaves(annotation):
            if leaf is str:
                assert name in NAMED_TEXTS, f"{event.__name__}.{name} is free text. {ADVICE}"
            elif typing.get_origin(leaf) is typing.Literal:
                assert all(isinstance(value, str) for value in typing.get_args(leaf))
            else:
                assert leaf in (int, float, bool, types.NoneType), (
                    f"{event.__name__}.{name}: {leaf}. {ADVICE}"
                )


def test_the_list_of_event_types_is_the_event_union_and_all_are_exported():
    assert set(EVENT_TYPES) == set(typing.get_args(contracts.Event))
    assert {event.__name__ for event in EVENT_TYPES} <= set(contracts.__all__)


def test_every_event_and_every_field_is_on_the_telemetry_page():
    page = (Path(__file__).resolve().parent.parent / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for event in EVENT_TYPES:
        section = page.partition(f"### {event.__name__}\n")[2].partition("\n#")[0]
        assert section, f"docs/telemetry.md needs a section '### {event.__name__}'"
        for field in dataclasses.fields(event):
            assert f"`{field.name}`" in section, (
                f"docs/telemetry.md does not explain {event.__name__}.{field.name}"
            )
