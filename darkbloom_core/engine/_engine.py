"""One engine per loaded model: the door for those who load it and for those who ask it.

Always true: every accepted request ends with exactly one terminal event.
"""

from __future__ import annotations

import gc
import logging
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import mlx.core as mx

from darkbloom_core.contracts import ChatCodec, LoadedModel, ModelDescription, VisionSeam
from darkbloom_core.engine._admission import check_request, worst_case_bytes
from darkbloom_core.engine._build import SLABS, build
from darkbloom_core.engine._desk import Desk
from darkbloom_core.engine._live import Live
from darkbloom_core.engine._loop import Loop, end_all
from darkbloom_core.engine._options import EngineOptions, EngineStatus, PrefixOptions
from darkbloom_core.engine._pictures import PictureCache
from darkbloom_core.engine._request import GenerationRequest
from darkbloom_core.engine._reuse import Reuse
from darkbloom_core.engine._sampling import SampledRow
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.engine._stream import OutputStream
from darkbloom_core.engine._streams import own_stream
from darkbloom_core.engine._text import TextPipeline
from darkbloom_core.engine._threads import EngineThread
from darkbloom_core.engine._warmup import Choices
from darkbloom_core.errors import (
    CapacityExhausted,
    DarkbloomError,
    GenerationFailed,
    ModelNotReady,
    NeverFits,
)
from darkbloom_core.memory import Ledger, Share

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of one model.

    ``load`` runs on the engine's own thread, since MLX streams belong to threads. Call
    ``load_model``, then ``start`` with the KV grant, then ``submit``; ``close`` at the end.
    ``share`` is where KV is reserved; without one only the grant limits it. The engine
    closes it when its thread ends.
    """

    def __init__(
        self,
        name: str,
        codec: ChatCodec,
        load: Callable[[], LoadedModel],
        options: EngineOptions,
        share: Share | None = None,
    ) -> None:
        self._name = name
        self._codec = codec
        self._load = load
        self._options = options
        self._desk = Desk(name, options.max_rows + options.waiting_limit)
        self._share = share or Ledger().share(name)
        self._prefix: PrefixOptions | None = None
        self._slab_bytes = 0
        self._ceiling_bytes = 0
        self._description: ModelDescription | None = None
        self._model: LoadedModel | None = None
        self._weight_bytes = 0
        self._choices: Choices | None = None
        self._loop: Loop | None = None
        self._pictures: PictureCache | None = None
        self._fault: BaseException | None = None
        self._loaded = threading.Event()
        self._granted = threading.Event()
        self._ready = threading.Event()
        self._thread = EngineThread(self._main, f"engine {name}")

    # --- life, called by the slot -------------------------------------------------

    def load_model(self) -> int:
        """Start the thread and load the weights; returns their bytes. Raises what the family raised."""
        self._thread.start()
        self._loaded.wait()
        self._raise_fault()
        return self._weight_bytes

    def start(
        self, grant_bytes: int, ceiling_bytes: int | None = None, prefix: PrefixOptions | None = None
    ) -> None:
        """Build the KV store within ``grant_bytes``, warm up, and begin to serve.

        ``ceiling_bytes`` is the most that the grant could ever become on this machine:
        what does not fit under it is refused for good. ``prefix`` says how prompts'
        beginnings are reused; without it none is. Raises ``CapacityExhausted`` if not even
        one row fits.
        """
        self._prefix = prefix
        self._share.resize(grant_bytes)
        self._ceiling_bytes = max(grant_bytes, ceiling_bytes or 0)
        self._granted.set()
        self._ready.wait()
        self._raise_fault()

    def resize(self, grant_bytes: int) -> None:
        """Change the grant. Running requests are left alone; newcomers see it at once."""
        self._share.resize(grant_bytes)
        self._ceiling_bytes = max(grant_bytes, self._ceiling_bytes)
        reuse = self._reuse
        if reuse is not None:
            reuse.budget.fit()
        if self._pictures is not None:
            self._pictures.fit()
        self._desk.wake()

    def trim_cache(self, size_bytes: int) -> int:
        """Let the caches drop so many bytes, as far as they have them; gives how many are free now."""
        reuse, pictures = self._reuse, self._pictures
        freed = 0 if reuse is None else reuse.budget.trim(size_bytes)
        return freed + (0 if pictures is None else pictures.trim(max(0, size_bytes - freed)))

    @property
    def cache_bytes(self) -> int:
        """What the caches of prefixes and of pictures hold in memory, and give up to whoever needs it."""
        reuse, pictures = self._reuse, self._pictures
        seen_bytes = 0 if pictures is None else pictures.bytes_used
        return seen_bytes + (0 if reuse is None else reuse.stack.ram.bytes_used)

    def wake(self) -> None:
        """Memory became free: those that wait for some may be tried again."""
        self._desk.wake()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._desk.drain()

    def close(self, seconds: float | None = None) -> bool:
        """Cancel what runs, end the thread, and free the weights. Idempotent; False if the thread did not end.

        With ``seconds``, a thread that is stuck in a step is left behind after them: its
        requests end with an error now, its memory is free once it returns, if ever.
        """
        self._desk.close()
        self._granted.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._model = None
        reuse = self._reuse
        if not self._thread.is_alive():
            return True
        if reuse is not None:
            reuse.abandon()
        end_all(self._desk, self._share, GenerationFailed("the engine hung and was given up"))
        return False

    @property
    def model(self) -> LoadedModel:
        """What ``load_model`` loaded: another engine may be built over the same weights, which are evaluated."""
        assert self._model is not None
        return self._model

    @property
    def vision(self) -> VisionSeam | None:
        """How the model sees, or None. Sizes and pixels may be asked about from any thread."""
        model = self._model
        return None if model is None else model.vision

    @property
    def alive(self) -> bool:
        """Whether the thread still runs, and so still holds memory."""
        return self._thread.is_alive()

    @property
    def slab_bytes(self) -> int:
        """KV memory that is allocated whatever runs."""
        return self._slab_bytes

    # --- requests, called from any thread ---------------------------------------

    def submit(self, request: GenerationRequest) -> OutputStream:
        """Check and admit a request; never blocks.

        Raises ``InvalidRequest``, ``ContextLengthExceeded``, ``NeverFits`` (for good),
        ``CapacityExhausted``, ``QueueFull`` or ``Draining`` (for now), or
        ``GenerationFailed`` if the engine has failed, with nothing reserved.
        """
        if self._fault is not None:
            raise GenerationFailed(f"the engine of {self._name} has failed")
        if self._description is None or not self._ready.is_set():
            raise ModelNotReady(f"{self._name} is not ready yet")
        check_request(request, self._description, sees=self.vision is not None)
        self._check_fits(worst_case_bytes(request, self._description))
        live = self._new_live(request)
        self._desk.enter(live)
        return live.stream

    def status(self) -> EngineStatus:
        """A snapshot; cheap, from any thread."""
        loop, now = self._loop, time.monotonic()
        sequences = loop.scheduler.running if loop else ()
        requests = [live.request for live in self._desk.lives()]
        prefix = loop.reuse.status() if loop and loop.reuse else None
        cached = (prefix.reserved_bytes if prefix else 0) + (
            self._pictures.bytes_used if self._pictures else 0
        )
        return EngineStatus(
            running=len(sequences),
            waiting=max(0, len(requests) - len(sequences)),
            max_rows=loop.scheduler.max_rows if loop else 0,
            active_tokens=sum(each.prefilled + each.launched for each in sequences),
            committed_tokens=sum(len(each.prompt.ids) + each.max_tokens for each in requests),
            prefill_rate=loop.rates.prefill.value if loop else None,
            decode_rate=loop.rates.decode.value if loop else None,
            kv_bytes_used=loop.store.allocated_bytes if loop else 0,
            kv_bytes_reserved=self._share.reserved_bytes - cached,
            kv_bytes_grant=self._share.limit_bytes,
            live_arrays=loop.live_arrays if loop else 0,
            steps=loop.steps if loop else 0,
            decode_steps=loop.runner.decode_steps if loop else 0,
            prefill_tokens=loop.runner.prefill_tokens if loop else 0,
            output_tokens=loop.runner.output_tokens if loop else 0,
            largest_batch=loop.runner.largest_batch if loop else 0,
            draining=self._desk.draining,
            healthy=loop.monitor.is_healthy(now) if loop else self._fault is None,
            failed=self._fault is not None,
            wedge=loop.monitor.wedge(now) if loop else "none",
            choices=self._choices,
            prefix=prefix,
        )

    @property
    def _reuse(self) -> Reuse | None:
        loop = self._loop
        return None if loop is None else loop.reuse

    def _check_fits(self, size_bytes: int) -> None:
        if size_bytes + self._slab_bytes > self._ceiling_bytes:
            raise NeverFits(
                f"the request may need {size_bytes} bytes of KV cache; "
                f"{self._name} can have at most {self._ceiling_bytes - self._slab_bytes} on this machine"
            )
        present = max(0, self._share.limit_bytes - self._slab_bytes)
        if size_bytes > present:
            raise CapacityExhausted(
                f"the request may need {size_bytes} bytes of KV cache; {self._name} has {present} at present",
                retry_after_seconds=10,
            )

    def _new_live(self, request: GenerationRequest) -> Live:
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        prompt, now = request.prompt, time.monotonic()
        stream = OutputStream(self._desk.wake, self._options.event_buffer)
        return Live(
            request=request,
            sequence=Sequence(
                request.id,
                len(prompt.ids),
                request.max_tokens,
                request.priority,
                prompt.spans,
                {span.picture for span in prompt.spans},
            ),
            stream=stream,
            text=TextPipeline(self._codec.token_bytes, self._codec.control_ids, request.parser, request.stop),
            sampled=SampledRow(request.sampling, seed, request.choice, prompt.ids, []),
            submitted_at=now,
            progressed_at=now,
        )

    def _raise_fault(self) -> None:
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    # --- the engine's thread ------------------------------------------------------

    def _main(self) -> None:
        try:
            with own_stream():
                try:
                    self._load_and_serve()
                except BaseException as fault:  # handed to whoever waits for the load or the start
                    self._note(fault)
                finally:
                    self._let_go()
        except BaseException as fault:  # there is no stream, or the device failed at the end
            self._note(fault)
        finally:
            self._share.close()
            self._loaded.set()
            self._ready.set()

    def _load_and_serve(self) -> None:
        model = self._load()
        self._load = _loaded_before  # a loader may hold on to weights
        self._model, self._description, self._weight_bytes = model, model.description, model.weight_bytes
        self._loaded.set()
        self._granted.wait()
        if not self._desk.closing:
            self._serve(model)

    def _note(self, fault: BaseException) -> None:
        """Keep the first fault; the log has those that nobody waits for, or that are no answer to anybody."""
        if self._ready.is_set() or not isinstance(fault, DarkbloomError):
            # as text: a log that keeps the exception would keep its frames, and they the weights
            log.error("the engine of %s failed:\n%s", self._name, "".join(traceback.format_exception(fault)))
        self._fault = self._fault or without_frames(fault)

    def _let_go(self) -> None:
        """The last references: weights and KV go here."""
        died = self._fault is not None
        end_all(self._desk, self._share, GenerationFailed("the engine stopped") if died else None)
        is_alive = _reference(self._model)
        self._model = self._loop = None
        self._share.allocated = lambda: 0
        if self._pictures is not None:
            self._pictures.close()
        if is_alive() is not None:
            gc.collect()  # parts of some models refer to each other in circles
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _serve(self, model: LoadedModel) -> None:
        parts = build(self._name, model, self._share, self._options)
        self._slab_bytes = parts.store.slab_bytes
        self._choices = parts.choices
        self._share.knows = lambda key: key == SLABS or self._desk.find(key) is not None
        self._share.allocated = lambda: parts.store.allocated_bytes + self.cache_bytes
        self._pictures = PictureCache(self._share, self._options.picture_bytes)
        prefix = self._prefix
        if prefix is not None and model.description.context_tokens <= self._options.chunk_tokens:
            prefix = None  # no prompt has a whole chunk and a token more
        self._loop = Loop(
            self._name, model, parts, self._desk, self._share, self._options, prefix, self._pictures
        )
        self._ready.set()
        self._loop.serve()


def without_frames(fault: BaseException) -> BaseException:
    """``fault`` without its tracebacks, and those of what caused it: their frames would keep weights alive."""
    link: BaseException | None = fault
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return fault


def _reference(model: LoadedModel | None) -> Callable[[], object | None]:
    """Gives ``model`` for as long as it lives; one that cannot be watched counts as alive."""
    try:
        return weakref.ref(model) if model is not None else lambda: None
    except TypeError:
        return lambda: True


def _loaded_before() -> LoadedModel:
    raise AssertionError("an engine loads once")
