"""One engine per loaded model: the door for requests, and the thread that steps.

Always true: every accepted request ends with exactly one terminal event, and with it its
reservation, its lane and its buffers are given back, whichever way it ended.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import mlx.core as mx

from darkbloom_core.contracts import ChatCodec, FinishReason, LayerKind, LoadedModel, ModelDescription
from darkbloom_core.engine._admission import check_request, worst_case_bytes
from darkbloom_core.engine._fixed import find_size
from darkbloom_core.engine._kv import KvStore, lane_bytes, slab_bytes
from darkbloom_core.engine._live import Live
from darkbloom_core.engine._liveness import Wedge, WedgeMonitor
from darkbloom_core.engine._request import GenerationRequest
from darkbloom_core.engine._runner import Runner, StepFault
from darkbloom_core.engine._sampling import SampledRow
from darkbloom_core.engine._scheduler import Scheduler
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.engine._stream import OutputStream
from darkbloom_core.engine._text import TextPipeline
from darkbloom_core.engine._warmup import Allowed, Choices, warm_up
from darkbloom_core.errors import (
    CapacityExhausted,
    DarkbloomError,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    ModelNotReady,
    NeverFits,
    QueueFull,
    SettingsError,
)
from darkbloom_core.memory import Ledger

log = logging.getLogger(__name__)

SHARED_TOKENS = (512, 1024, 2048)
"""Lengths that the shared slab of full layers may have."""

LARGER_SIZES = 8
"""How many larger batch sizes deterministic mode tries if the lanes of the wanted one are not equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs; the settings table ``engine`` in the engine's own words.

    ``compiled``, ``chained`` and ``packed`` are chosen at warm-up where they are None;
    on the CPU backend None means not compiled, since the first compilation there runs a C++
    compiler for many seconds.
    """

    max_rows: int = 8
    waiting_limit: int = 64
    chunk_tokens: int = 256
    slice_seconds: float = 0.05
    event_buffer: int = 256
    progress_seconds: float = 120.0
    deterministic: bool = False
    compiled: bool | None = None
    chained: bool | None = None
    packed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """How an engine stands. Counters run since it was built; bytes are of KV."""

    running: int
    waiting: int
    kv_bytes_used: int
    kv_bytes_reserved: int
    kv_bytes_grant: int
    steps: int
    decode_steps: int
    prefill_tokens: int
    output_tokens: int
    largest_batch: int
    draining: bool
    healthy: bool
    wedge: Wedge
    choices: Choices | None


class Engine:
    """Continuous batching of one model.

    ``load`` runs on the engine's own thread, since MLX streams belong to threads. Call
    ``load_model``, then ``start`` with the KV grant, then ``submit``; ``close`` at the end.
    """

    def __init__(
        self, name: str, codec: ChatCodec, load: Callable[[], LoadedModel], options: EngineOptions
    ) -> None:
        self._name = name
        self._codec = codec
        self._load = load
        self._options = options
        self._changed = threading.Condition()
        self._inbox: list[Live] = []
        self._lives: dict[str, Live] = {}
        self._choices: Choices | None = None
        self._monitor = WedgeMonitor()
        self._news = False
        self._draining = False
        self._closing = False
        self._steps = 0
        self._ledger = Ledger(0)
        self._slab_bytes = 0
        self._ceiling_bytes = 0
        self._scheduler: Scheduler | None = None
        self._runner: Runner | None = None
        self._store: KvStore | None = None
        self._model: LoadedModel | None = None
        self._description: ModelDescription | None = None
        self._weight_bytes = 0
        self._fault: BaseException | None = None
        self._loaded = threading.Event()
        self._granted = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"engine {name}", daemon=True)

    # --- life, called by the slot -------------------------------------------------

    def load_model(self) -> int:
        """Start the thread and load the weights; returns their bytes. Raises what the family raised."""
        self._thread.start()
        self._loaded.wait()
        self._raise_fault()
        return self._weight_bytes

    def start(self, grant_bytes: int, ceiling_bytes: int | None = None) -> None:
        """Build the KV store within ``grant_bytes``, warm up, and begin to serve.

        ``ceiling_bytes`` is the most that the grant could ever become on this machine:
        what does not fit under it is refused for good. Raises ``CapacityExhausted`` if
        not even one row fits.
        """
        self._ledger.resize(grant_bytes)
        self._ceiling_bytes = max(grant_bytes, ceiling_bytes or 0)
        self._granted.set()
        self._ready.wait()
        self._raise_fault()

    def resize(self, grant_bytes: int) -> None:
        """Change the grant. Running requests are left alone; newcomers see it at once."""
        self._ledger.resize(max(0, grant_bytes - self._slab_bytes))
        self._ceiling_bytes = max(grant_bytes, self._ceiling_bytes)
        self._wake()

    def drain(self) -> None:
        """Take nothing new from now on."""
        with self._changed:
            self._draining = True

    def close(self) -> None:
        """Cancel what runs, end the thread, and free the weights. Idempotent."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        self._granted.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- requests, called from any thread ---------------------------------------

    def submit(self, request: GenerationRequest) -> OutputStream:
        """Check and admit a request; never blocks.

        Raises ``InvalidRequest``, ``ContextLengthExceeded``, ``NeverFits`` (for good),
        ``CapacityExhausted``, ``QueueFull`` or ``Draining`` (for now), with nothing
        reserved.
        """
        if self._description is None or not self._ready.is_set():
            raise ModelNotReady(f"{self._name} is not ready yet")
        check_request(request, self._description)
        self._check_fits(worst_case_bytes(request, self._description))
        live = self._new_live(request)
        with self._changed:
            if self._draining:
                raise Draining("the server is shutting down")
            if request.id in self._lives:
                raise InvalidRequest(f"a request with the id {request.id!r} is running already", param="id")
            if len(self._lives) >= self._options.max_rows + self._options.waiting_limit:
                raise QueueFull(f"{self._name} has {len(self._lives)} requests running and waiting")
            self._lives[request.id] = live
            self._inbox.append(live)
            self._news = True
            self._changed.notify_all()
        return live.stream

    def status(self) -> EngineStatus:
        """A snapshot; cheap, from any thread."""
        runner, scheduler, store = self._runner, self._scheduler, self._store
        running = len(scheduler.running) if scheduler else 0
        return EngineStatus(
            running=running,
            waiting=max(0, len(self._lives) - running),
            kv_bytes_used=store.allocated_bytes if store else 0,
            kv_bytes_reserved=self._ledger.reserved_bytes + self._slab_bytes,
            kv_bytes_grant=self._ledger.limit_bytes + self._slab_bytes,
            steps=self._steps,
            decode_steps=runner.decode_steps if runner else 0,
            prefill_tokens=runner.prefill_tokens if runner else 0,
            output_tokens=runner.output_tokens if runner else 0,
            largest_batch=runner.largest_batch if runner else 0,
            draining=self._draining,
            healthy=self._monitor.is_healthy(time.monotonic()),
            wedge=self._monitor.wedge(time.monotonic()),
            choices=self._choices,
        )

    def _check_fits(self, size_bytes: int) -> None:
        if size_bytes + self._slab_bytes > self._ceiling_bytes:
            raise NeverFits(
                f"the request may need {size_bytes} bytes of KV cache; "
                f"{self._name} can have at most {self._ceiling_bytes - self._slab_bytes} on this machine"
            )
        if size_bytes > self._ledger.limit_bytes:
            raise CapacityExhausted(
                f"the request may need {size_bytes} bytes of KV cache; "
                f"{self._name} has {self._ledger.limit_bytes} at present",
                retry_after_seconds=10,
            )

    def _new_live(self, request: GenerationRequest) -> Live:
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        prompt = request.prompt
        stream = OutputStream(lambda: self._cancel(live), self._wake, self._options.event_buffer)
        live = Live(
            request=request,
            sequence=Sequence(
                request.id, len(prompt.ids), request.max_tokens, request.priority, prompt.spans
            ),
            stream=stream,
            text=TextPipeline(self._codec.token_bytes, self._codec.control_ids, request.parser, request.stop),
            sampled=SampledRow(request.sampling, seed, request.choice, prompt.ids, []),
            submitted_at=time.monotonic(),
            progressed_at=time.monotonic(),
        )
        return live

    def _cancel(self, live: Live) -> None:
        live.cancelled = True
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    # --- the engine's thread ------------------------------------------------------

    def _main(self) -> None:
        try:
            self._model = self._load()
            self._description = self._model.description
            self._weight_bytes = self._model.weight_bytes
            self._loaded.set()
            self._granted.wait()
            if not self._closing:
                self._build(self._model, self._model.description)
                self._ready.set()
                self._serve()
        except BaseException as fault:  # handed to whoever waits for the load or the start
            self._fault = fault
            if self._ready.is_set():
                log.exception("the engine of %s died", self._name)
        finally:
            self._end_all()
            self._model = self._store = self._runner = None
            mx.synchronize()
            mx.clear_cache()
            mx.clear_streams()
            self._loaded.set()
            self._ready.set()

    def _build(self, model: LoadedModel, description: ModelDescription) -> None:
        grant, layers = self._ledger.limit_bytes, description.layers
        rows, lane = self._options.max_rows, lane_bytes(layers)
        while rows > 1 and rows * lane > grant // 2:
            rows //= 2
        if rows * lane > grant:
            raise CapacityExhausted(
                f"{self._name} needs {lane} bytes of KV cache for one row; its grant is {grant}"
            )
        fixed = self._fixed_size(model, rows) if self._options.deterministic else None
        lanes = fixed or rows
        self._store = KvStore(layers, lanes, _shared_tokens(layers, lanes, grant))
        self._slab_bytes = self._store.slab_bytes
        self._ledger.resize(grant - self._slab_bytes)
        self._choices = self._choose(model, self._store, rows, fixed)
        grid = self._options.chunk_tokens
        self._scheduler = Scheduler(
            max_rows=rows,
            layers=len(layers),
            grid=grid,
            pack_tokens=2 * grid if self._choices.packed else 0,
        )
        self._runner = Runner(model, self._store, self._choices, self._finish, self._break)

    def _choose(self, model: LoadedModel, store: KvStore, rows: int, fixed: int | None) -> Choices:
        options = self._options
        on_cpu = not (mx.metal.is_available() or mx.cuda.is_available())
        allowed = Allowed(
            compiled=False if fixed or (on_cpu and options.compiled is None) else options.compiled,
            chained=options.chained,
            packed=False if fixed else options.packed,
        )
        choices = warm_up(model, store, options.chunk_tokens, rows, allowed)
        log.info("%s warmed up: %s", self._name, choices)
        return replace(choices, fixed_size=fixed)

    def _fixed_size(self, model: LoadedModel, rows: int) -> int:
        size = find_size(model, rows, rows + LARGER_SIZES)
        if size is None:
            raise SettingsError(
                f"deterministic mode: no batch size from {rows} to {rows + LARGER_SIZES} gives equal bits "
                "in all its lanes on this device; try another engine.max_rows"
            )
        return size

    def _serve(self) -> None:
        assert self._runner is not None
        assert self._scheduler is not None
        assert self._store is not None
        progressed = True
        while True:
            with self._changed:
                while not (progressed or self._news or self._closing):
                    if not self._changed.wait(self._seconds_to_deadline()):
                        break
                if self._closing:
                    return
                self._news = False
                arrived, self._inbox = self._inbox, []
            for live in arrived:
                self._scheduler.add(live.sequence)
            self._note_cancellations_and_pauses()
            progressed = self._step(self._runner, self._scheduler, self._store)

    def _seconds_to_deadline(self) -> float | None:
        """Until the first request that does not get on must end; None without requests."""
        last = min((live.progressed_at for live in self._lives.values()), default=None)
        if last is None:
            return None
        return max(0.0, last + self._options.progress_seconds - time.monotonic()) + 0.001

    def _too_late(self, live: Live) -> DeadlineExceeded:
        where = "waiting" if live.row is None else "paused" if live.sequence.paused else "running"
        return DeadlineExceeded(f"no progress for {self._options.progress_seconds:g} seconds while {where}")

    def _note_cancellations_and_pauses(self) -> None:
        now = time.monotonic()
        for live in tuple(self._lives.values()):
            if live.cancelled:
                self._finish(live, "cancelled")
            elif now - live.progressed_at > self._options.progress_seconds:
                self._finish(live, "error", self._too_late(live))
            elif live.sequence.paused:
                live.sequence.paused = not live.stream.is_drained
            else:
                live.sequence.paused = live.stream.is_full

    def _step(self, runner: Runner, scheduler: Scheduler, store: KvStore) -> bool:
        """Do what the scheduler plans; False if there was nothing to do until something new happens."""
        for sequence in scheduler.admit(self._reserve):
            live = self._lives[sequence.id]
            live.admitted_at = live.progressed_at = time.monotonic()
            self._monitor.admitted(live.admitted_at)
            live.row = store.open_row(sequence.prompt_tokens, sequence.prompt_tokens + sequence.max_tokens)
        plan = scheduler.plan(self._layers_per_slice(runner))
        if plan.is_empty and runner.is_idle:
            return False
        self._monitor.step_began(time.monotonic())
        first_tokens = runner.first_tokens
        try:
            if plan.is_empty:
                runner.settle()
            if plan.decode:
                runner.decode(self._in_order_of_lane(plan.decode))
            if plan.prefill is not None:
                lives = [self._lives.get(sequence.id) for sequence in plan.prefill.sequences]
                left = tuple(live for live in lives if live is not None)
                if left:
                    runner.prefill(left, plan.prefill)
        except StepFault as fault:
            self._fail(fault, store)
        if runner.first_tokens > first_tokens:
            self._monitor.first_token()
        self._monitor.step_ended(time.monotonic())
        self._steps += 1
        return True

    def _in_order_of_lane(self, sequences: tuple[Sequence, ...]) -> tuple[Live, ...]:
        lives = [self._lives[sequence.id] for sequence in sequences]
        return tuple(sorted(lives, key=lambda live: live.row.lane if live.row is not None else -1))

    def _layers_per_slice(self, runner: Runner) -> int:
        if runner.layer_seconds is None:
            return 1
        return max(1, int(self._options.slice_seconds / runner.layer_seconds))

    def _reserve(self, sequence: Sequence) -> bool:
        live = self._lives.get(sequence.id)
        assert live is not None
        assert self._description is not None
        size = worst_case_bytes(live.request, self._description)
        return self._ledger.reserve(sequence.id, size)

    def _fail(self, fault: StepFault, store: KvStore) -> None:
        """End the sequences of a step that raised; the others go on, unless their storage broke too."""
        log.error("a step of %s failed: %s", self._name, fault, exc_info=fault.__cause__)
        members = fault.members if store.repair() else tuple(self._lives.values())
        for live in members:
            if not live.ended:
                self._finish(live, "error", GenerationFailed("the step that generated this output failed"))

    def _break(self, live: Live, fault: Exception) -> None:
        where = traceback.extract_tb(fault.__traceback__)[-1]  # the message itself could hold output
        kind = type(fault).__name__
        log.error("the output of a request of %s broke its parser: %s at %s:%s", self._name, kind, *where[:2])
        self._finish(live, "error", GenerationFailed("the output could not be parsed"))

    def _finish(self, live: Live, reason: FinishReason, error: DarkbloomError | None = None) -> None:
        """The one way out of the engine for a sequence."""
        assert self._scheduler is not None
        assert self._store is not None
        self._scheduler.remove(live.sequence)
        if live.row is not None:
            assert self._runner is not None
            self._runner.forget(live.row)
            self._store.close_row(live.row)
            live.row = None
            if not live.tokens:
                self._monitor.ended_without_token()
        self._ledger.release(live.sequence.id)
        with self._changed:
            del self._lives[live.request.id]
            if live in self._inbox:
                self._inbox.remove(live)
        live.end(reason, error)

    def _end_all(self) -> None:
        """When the thread ends, everything that is left ends too."""
        with self._changed:
            self._draining = True
            lives, self._lives, self._inbox = tuple(self._lives.values()), {}, []
        died = self._fault is not None
        for live in lives:
            self._ledger.release(live.sequence.id)
            live.row = None
            if died:
                live.end("error", GenerationFailed("the engine stopped"))
            else:
                live.end("cancelled", None)


def _shared_tokens(layers: Many[LayerKind], rows: int, grant_bytes: int) -> int:
    """How long a row may be in the shared slab of full layers: the longest that takes an eighth of the grant."""
    if rows == 1:
        return 0
    lanes = slab_bytes(layers, rows, 0)
    fitting = [
        tokens
        for tokens in SHARED_TOKENS
        if slab_bytes(layers, rows, tokens) - lanes <= (grant_bytes - lanes) // 8
    ]
    return max(fitting, default=0)
