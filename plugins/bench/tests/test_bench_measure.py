"""Sides are taken in turn, and ratios are those of medians."""

import json

import pytest
from darkbloom_bench._jobs import Arrival, Job, Trace
from darkbloom_bench._machine import Machine
from darkbloom_bench._measure import make_cell, measure
from darkbloom_bench._metrics import SAME_TOKENS, Metric
from darkbloom_bench._report import as_json
from darkbloom_bench._workloads import Run, Workload

RATE = Metric("rate", "tokens/s", "higher")


class ScriptedSide:
    """Takes the seconds of each run from a list, and tells ``calls`` of it."""

    def __init__(self, name, seconds, calls, tokens=(1, 2)):
        self.name, self.seconds, self.calls, self.tokens = name, list(seconds), calls, list(tokens)

    def run(self, job):
        self.calls.append((self.name, job.arrivals[0].prompt))
        seconds = self.seconds.pop(0)
        if isinstance(seconds, Exception):
            raise seconds
        return Trace(0.0, [0.0], [[0.0, seconds]], [self.tokens])


def job(source):
    return Job((Arrival((source.randrange(1000),), 2),))


WORKLOAD = Workload(
    "scripted",
    1,
    3,
    (Run("only", job, lambda trace: {RATE: 2 / trace.times[0][-1]}, compare_tokens=True),),
)


def measured(ours, peer, repeats=3):
    calls, said = [], []
    sides = [ScriptedSide("ours", ours, calls), peer and ScriptedSide("peer", peer, calls)]
    cells = measure(WORKLOAD, *sides, repeats, said.append, lambda: calls.append("settle"))
    return cells, calls, said


def test_the_ratio_is_one_of_medians_and_the_warm_up_is_not_counted():
    cells, _, _ = measured([100.0, 1.0, 2.0, 4.0], [100.0, 4.0, 8.0, 1.0])
    rate, same = cells
    assert (rate.ours, rate.peer, rate.ratio) == (1.0, 0.5, 2.0)
    assert rate.ours_all == (2.0, 1.0, 0.5)
    assert (same.metric, same.ours, same.peer) == (SAME_TOKENS.name, 1, 1)


def test_both_sides_get_the_same_jobs_in_changing_order_and_every_job_is_new():
    _, calls, _ = measured([1.0] * 4, [1.0] * 4)
    runs = [call for call in calls if call != "settle"]
    assert calls[::2] == ["settle"] * 8
    assert [name for name, _ in runs] == ["ours", "peer", "peer", "ours", "ours", "peer", "peer", "ours"]
    pairs = [(runs[index][1], runs[index + 1][1]) for index in range(0, 8, 2)]
    assert all(one == other for one, other in pairs)
    assert len(set(pairs)) == 4


def test_without_a_peer_there_is_no_ratio():
    (cell,), _, _ = measured([1.0] * 4, None)
    assert (cell.ours, cell.peer, cell.ratio) == (2.0, None, None)


def test_a_peer_that_fails_is_noted_and_ours_goes_on():
    cells, calls, said = measured([1.0] * 4, [1.0, 1.0, RuntimeError("out of\nnodes")])
    assert [cell.ours for cell in cells] == [2.0, 1]
    assert all(cell.peer is None and cell.ratio is None for cell in cells)
    assert cells[0].note == "peer failed: RuntimeError: out of nodes"
    assert any("out of nodes" in line for line in said)
    assert [name for name, _ in (call for call in calls if call != "settle")].count("peer") == 3


def test_a_fault_of_our_own_side_is_raised():
    with pytest.raises(ZeroDivisionError):
        measured([1.0, ZeroDivisionError()], [1.0] * 4)


def test_a_peer_of_zero_gives_no_ratio():
    assert make_cell(WORKLOAD, RATE, [1.0], [0.0]).ratio is None


def test_json_is_a_list_of_cells_that_say_where_they_come_from():
    cells, _, _ = measured([1.0] * 4, [2.0] * 4)
    machine = Machine("Processor", 2, "Linux x86_64", "0.32.4", "cpu", "OpenBLAS, preloaded")
    listed = json.loads(as_json(cells, "demo/gpt-oss", machine, 3))
    assert [cell["metric"] for cell in listed] == ["rate", SAME_TOKENS.name]
    assert (
        listed[0].items()
        >= {
            "workload": "scripted",
            "rows": 1,
            "ours": 2.0,
            "peer": 1.0,
            "ratio": 2.0,
            "unit": "tokens/s",
            "model": "demo/gpt-oss",
            "machine": "Processor, 2 cores, Linux x86_64, MLX 0.32.4 on cpu, BLAS: OpenBLAS, preloaded",
        }.items()
    )
