"""The peer mlx-lm: its ``BatchGenerator``, in its own settings, greedy, never stopping by itself."""

# mypy: disable-error-code="no-untyped-call"
# because mlx-lm's methods have no annotations

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from darkbloom_bench._jobs import Job, Recorder, Trace
from darkbloom_bench._sides import check_complete


class MlxLm:
    """``model`` is a module of mlx-lm, evaluated. Runs in the thread that calls ``run``.

    ``rows`` is how many rows may decode at once, as many as our side may; prompts are
    batched and cut as mlx-lm does unless told otherwise.
    """

    name = "mlx-lm"

    def __init__(self, model: Any, rows: int) -> None:
        self._model = model
        self._rows = rows

    def run(self, job: Job) -> Trace:
        recorder = Recorder(job)
        generator = BatchGenerator(self._model, completion_batch_size=self._rows)
        row_of: dict[int, int] = {}
        try:
            while not recorder.is_over:
                due = recorder.take_due()
                if due:
                    arrivals = [job.arrivals[row] for row in due]
                    uids = generator.insert(
                        [list(arrival.prompt) for arrival in arrivals],
                        max_tokens=[arrival.max_tokens for arrival in arrivals],
                    )
                    row_of.update(zip(uids, due, strict=True))
                for response in generator.next()[1]:
                    if not recorder.is_over:
                        recorder.token(row_of[response.uid], response.token)
        finally:
            mx.synchronize(generator.stream)
            generator.close()
        check_complete(recorder)
        return recorder.trace
