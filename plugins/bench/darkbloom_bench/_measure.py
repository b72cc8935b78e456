"""Measure workloads: warm both sides up, take them in turn, and compare medians.

Always true: both sides get the same jobs; the order within a repeat changes from one to the
next, so that a drift of the machine hits both; a ratio is one of medians, never a median of
ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from darkbloom_bench._jobs import Job, Trace
from darkbloom_bench._metrics import SAME_TOKENS, Figures, Metric, same_rows
from darkbloom_bench._sides import Side
from darkbloom_bench._workloads import Run, Workload

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one workload. ``ratio`` is ours by the peer's, of the medians over the repeats.

    ``peer`` and ``ratio`` are None without a peer, and where ``note`` says how it failed.
    ``ours_all`` and ``peer_all`` are the figures of the single repeats.
    """

    workload: str
    rows: int
    metric: str
    unit: str
    better: str
    ours: float
    peer: float | None
    ratio: float | None
    ours_all: tuple[float, ...]
    peer_all: tuple[float, ...] = ()
    note: str | None = None


def measure(
    workload: Workload, ours: Side, peer: Side | None, repeats: int, say: Say, settle: Callable[[], None]
) -> tuple[Cell, ...]:
    """Run every kind of run of ``workload`` ``repeats`` times on each side, after one that is not counted.

    ``settle`` is called before each run. What breaks our side is raised; what breaks the
    peer ends its part of the workload and is noted in the cells.
    """
    cells: list[Cell] = []
    note: str | None = None
    for run in workload.runs:
        pair = _Pair(workload, run, ours, peer if note is None else None, say, settle)
        pair.repeat(0, counted=False)
        for repeat in range(1, repeats + 1):
            pair.repeat(repeat)
        note = note or pair.note
        cells += pair.cells(note)
    return tuple(cells)


class _Pair:
    """The figures of one kind of run, of both sides."""

    def __init__(
        self,
        workload: Workload,
        run: Run,
        ours: Side,
        peer: Side | None,
        say: Say,
        settle: Callable[[], None],
    ) -> None:
        self._workload = workload
        self._run = run
        self._ours = ours
        self._peer = peer
        self._say = say
        self._settle = settle
        self._ours_all: list[Figures] = []
        self._peer_all: list[Figures] = []
        self.note: str | None = None

    def repeat(self, repeat: int, *, counted: bool = True) -> None:
        job = self._workload.job(self._run, repeat)
        if repeat % 2 == 0:
            ours, peer = self._run_ours(job), self._run_peer(job)
        else:
            peer, ours = self._run_peer(job), self._run_ours(job)
        figures = self._run.figures(ours)
        other = None if peer is None else self._run.figures(peer)
        if self._run.compare_tokens and peer is not None and other is not None:
            figures[SAME_TOKENS], other[SAME_TOKENS] = same_rows(ours, peer), len(peer.tokens)
        what = f"repeat {repeat}" if counted else "warm-up"
        self._say(f"{self._workload.name}, {self._run.name}, {what}: {_progress(figures, other)}")
        if counted:
            self._ours_all.append(figures)
            if other is not None:
                self._peer_all.append(other)

    def cells(self, note: str | None) -> list[Cell]:
        metrics = list(self._ours_all[0])
        complete = len(self._peer_all) == len(self._ours_all)
        cells = []
        for metric in metrics:
            mine = [figures[metric] for figures in self._ours_all if metric in figures]
            theirs = [figures[metric] for figures in self._peer_all] if complete else []
            cells.append(make_cell(self._workload, metric, mine, theirs, note))
        return cells

    def _run_ours(self, job: Job) -> Trace:
        self._settle()
        return self._ours.run(job)

    def _run_peer(self, job: Job) -> Trace | None:
        if self._peer is None:
            return None
        self._settle()
        try:
            return self._peer.run(job)
        except Exception as fault:  # the peer may break in any way; our figures are shown all the same
            self.note = f"{self._peer.name} failed: {type(fault).__name__}: {' '.join(str(fault).split())}"
            self._say(f"{self._workload.name}, {self._run.name}: {self.note}")
            self._peer = None
            return None


def make_cell(
    workload: Workload, metric: Metric, ours: Sequence[float], peer: Sequence[float], note: str | None = None
) -> Cell:
    """The medians of both sides' repeats, and their ratio."""
    mine = median(ours)
    theirs = median(peer) if peer else None
    return Cell(
        workload=workload.name,
        rows=workload.rows,
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        ours=mine,
        peer=theirs,
        ratio=mine / theirs if theirs else None,
        ours_all=tuple(ours),
        peer_all=tuple(peer),
        note=note,
    )


def _progress(ours: Figures, peer: Figures | None) -> str:
    metric = next(iter(ours))
    text = f"{metric.name} {ours[metric]:.4g}"
    return f"{text} {metric.unit}" if peer is None else f"{text} against {peer[metric]:.4g} {metric.unit}"
