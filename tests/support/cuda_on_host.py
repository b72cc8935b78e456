"""Runs the CUDA kernels of this project on the host: their own text, each thread of it, compiled by g++.

Inside ``with`` MLX's ``cuda_kernel`` leads here, and CUDA seems to be there; so what calls a
kernel (its grid, template, shared memory) is the project's own code. All kernels are compiled
at once: first ``rehearse`` what will be asked for, then ``compile``. ``cuda_on_host.h`` says
what is checked while they run; here, that nothing is written beside an output.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from darkbloom_core.engine import _decode_cuda
from darkbloom_core.experts import _choice, _mxfp4_cuda
from darkbloom_core.fused import _heads, _residual

RUNTIME = Path(__file__).with_suffix(".h")
MARGIN_BYTES = 256
"""Around every array: ones, which are a NaN, or an index far outside."""

TYPES = {
    mx.bfloat16: ("bfloat16", np.uint16),
    mx.float32: ("float", np.float32),
    mx.int32: ("int", np.int32),
    mx.uint32: ("unsigned int", np.uint32),
    mx.uint8: ("unsigned char", np.uint8),
}
"""Of C++, and of NumPy, which has no bfloat16."""


MADE = (
    _mxfp4_cuda._product,
    _mxfp4_cuda._list_kernel,
    _choice._choose,
    _choice._mix,
    _residual._kernel,
    _heads._kernel,
    _decode_cuda._attend,
)
"""What keeps kernels: MLX's and those of the host must not get mixed."""


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("shape", ctypes.POINTER(ctypes.c_int)),
        ("dimensions", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("arrays", ctypes.POINTER(_Array)),
        ("count", ctypes.c_int),
    )


class _Held:
    """An array, aligned as a GPU's are, with a margin on both sides. All ones until something is written."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        size = math.prod(shape) * dtype.size
        self._room = np.full(size + 3 * MARGIN_BYTES, 0xFF, np.uint8)
        self._first = MARGIN_BYTES + -self._room.ctypes.data % MARGIN_BYTES
        self._end = self._first + size
        self.values = self._room[self._first : self._end].view(TYPES[dtype][1]).reshape(shape)
        self._shape = (ctypes.c_int * len(shape))(*shape)
        self.described = _Array(self.values.ctypes.data, size, self._shape, len(shape))

    @classmethod
    def copy_of(cls, array: mx.array) -> _Held:
        copy = cls(array.shape, array.dtype)
        copy.values[...] = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        return copy

    def is_alone(self) -> bool:
        """Nobody wrote into the margins."""
        return bool((self._room[: self._first] == 0xFF).all() and (self._room[self._end :] == 0xFF).all())


@dataclass(frozen=True)
class _Kernel:
    """What is handed to MLX once. Called as MLX's kernels are."""

    host: CudaOnHost
    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    shared_memory: int = 0

    def __call__(self, **call: Any) -> list[mx.array]:
        return self.host._call(self, **call)

    def text(self, name: str, template: Sequence[tuple[str, Any]], types: Sequence[str]) -> str:
        """The function as MLX builds it, and one that launches it."""
        parameters, arguments = [], []
        names = [*self.input_names, *self.output_names]
        for at, (each, of_type) in enumerate(zip(names, types, strict=True)):
            is_input = at < len(self.input_names)
            parameters.append(f"{'const ' if is_input else ''}{of_type}* {each}")
            arguments.append(f"({of_type}*)launch.arrays[{at}].data")
            if is_input and f"{each}_shape" in self.source:
                parameters.append(f"const int* {each}_shape")
                arguments.append(f"launch.arrays[{at}].shape")
            if is_input and f"{each}_ndim" in self.source:
                parameters.append(f"int {each}_ndim")
                arguments.append(f"launch.arrays[{at}].dimensions")
        lines = "\n".join(_constant(*each) for each in template)
        return (
            f"static void {name}({', '.join(parameters)}) {{\n{lines}\n{_for_the_host(self.source)}\n}}\n"
            f'extern "C" const char* run_{name}(const Launch& launch) {{\n'
            f"  return run_grid(launch, [&] {{ {name}({', '.join(arguments)}); }});\n}}\n"
        )


class CudaOnHost:
    """A context in which the project's CUDA kernels run on the host."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, ...], str] = {}
        self._headers: list[str] = []
        self._texts: list[str] = []
        self._library: ctypes.CDLL | None = None

    def __enter__(self) -> CudaOnHost:
        self._patches = [
            patch.object(mx.fast, "cuda_kernel", lambda **given: _Kernel(self, **given)),
            patch.object(mx.cuda, "is_available", lambda: True),
        ]
        for each in self._patches:
            each.start()
        _forget_kernels()
        return self

    def __exit__(self, *fault: object) -> None:
        for each in self._patches:
            each.stop()
        _forget_kernels()

    def rehearse(self, ask: Callable[[], Any]) -> None:
        """Takes down which kernels it calls; these give zeros."""
        with self:
            ask()

    def compile(self, folder: Path) -> None:
        """All that were rehearsed."""
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        parts = [f'#include "{RUNTIME}"', *map(_for_the_host, self._headers), *self._texts]
        source.write_text("\n".join(parts), encoding="utf-8")
        command = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
        done = subprocess.run([*command, source, "-o", library], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        self._library = ctypes.CDLL(str(library))

    def _call(
        self,
        kernel: _Kernel,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        dtypes = [*(each.dtype for each in inputs), *output_dtypes]
        types = tuple(TYPES[each][0] for each in dtypes)
        key = (kernel.name, kernel.source, tuple(template), types)
        outputs = list(zip(output_shapes, output_dtypes, strict=True))
        if self._library is None:
            if key not in self._names:
                self._names[key] = f"{kernel.name}_{len(self._names)}"
                self._texts.append(kernel.text(self._names[key], template, types))
            if kernel.header not in self._headers:
                self._headers.append(kernel.header)
            return [mx.zeros(*each) for each in outputs]
        assert key in self._names, f"rehearse first: {kernel.name} with {template} of {types}"
        run = self._library[f"run_{self._names[key]}"]
        run.argtypes, run.restype = [ctypes.POINTER(_Launch)], ctypes.c_char_p
        held = [_Held.copy_of(each) for each in inputs]
        found = [_Held(*each) for each in outputs]
        arrays = [each.described for each in (*held, *found)]
        threads = list(zip(grid, threadgroup, strict=True))
        launch = _Launch(
            (ctypes.c_uint * 3)(*(-(-all_of // block) for all_of, block in threads)),
            (ctypes.c_uint * 3)(*(min(all_of, block) for all_of, block in threads)),
            kernel.shared_memory,
            (_Array * len(arrays))(*arrays),
            len(arrays),
        )
        wrong = run(launch)
        assert wrong is None, f"{kernel.name}: {wrong.decode()}"
        assert all(each.is_alone() for each in found), f"{kernel.name} writes beside its outputs"
        return [_to_mlx(each.values, dtype) for each, dtype in zip(found, output_dtypes, strict=True)]


def _forget_kernels() -> None:
    for made in MADE:
        made.cache_clear()


def _to_mlx(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(values)
    return array.view(dtype) if dtype == mx.bfloat16 else array


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value][0]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


def _for_the_host(text: str) -> str:
    """Instructions become calls of functions of their names, and the block's memory that of the runtime."""
    text = re.sub(r"asm(?: volatile)?\((.*?)\);", _as_call, text, flags=re.DOTALL)
    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", text
    )
    assert "asm" not in text, "an instruction in a form that is not understood here"
    return text


def _as_call(statement: re.Match[str]) -> str:
    """``asm("add.u32 %0, %1, 2;" : "=r"(a) : "r"(b));`` is ``add_u32(a, b, 2);``."""
    template, *rest = re.findall(r'"[^"]*"(?:\([^()]*\))?', statement[1])
    instruction, _, operands = template.strip('";').partition(" ")
    values = [each.partition("(")[2].removesuffix(")") for each in rest]
    filled = re.sub(r"%(\d+)", lambda at: values[int(at[1])], re.sub(r"[][{}]", "", operands))
    return f"{re.sub('[.:]+', '_', instruction)}({filled});"
