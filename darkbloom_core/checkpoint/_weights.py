"""The tensors of a checkpoint, from safetensors files alone, single or sharded.

Everything that can be wrong with the files is found from their headers, before a byte of
data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open

from darkbloom_core.checkpoint._config import check_folder, present, read_bytes, read_json
from darkbloom_core.contracts import Progress
from darkbloom_core.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMED_AT_MOST = 10
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ELEMENT_BITS = {"F4": 4, "BOOL": 8}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header of its ``file`` describes it. ``dtype`` is the format's word (``"BF16"``)."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def disk_bytes(self) -> int:
        bits = _ELEMENT_BITS.get(self.dtype) or int(re.findall(r"\d+", self.dtype)[0])
        for size in self.shape:
            bits *= size
        return bits // 8


class Weights:
    """The tensors of the checkpoint folder ``path``. Opening it reads the headers only.

    Raises ``CheckpointError`` naming the file if a file is missing, truncated or not
    safetensors, if index and shards disagree, or if there are only pickles.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        for file in _files(path):
            for name, info in _read_header(file):
                if name in self.tensors:
                    raise CheckpointError(f"{file}: tensor {name} is also in {self.tensors[name].file.name}")
                self.tensors[name] = info
        if not self.tensors:
            raise CheckpointError(f"{path}: the safetensors files hold no tensor")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def disk_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(info.disk_bytes for info in self.tensors.values())

    def load(
        self, progress: Progress | None = None, want: Callable[[str], bool] = lambda _: True
    ) -> dict[str, mx.array]:
        """Read the wanted tensors one by one into arrays that are evaluated and free of NaN and infinity.

        A tensor without axes is a bound and may be infinite. To keep the peak low while
        converting, pop what you convert out of the dict.
        ``progress`` is told bytes of the wanted tensors. Raises ``CheckpointError`` naming
        file and tensor if a value is not finite.
        """
        import mlx.core as mx

        wanted = {name: info for name, info in self.tensors.items() if want(name)}
        bytes_in_all = sum(info.disk_bytes for info in wanted.values())
        bytes_done = 0
        arrays: dict[str, mx.array] = {}
        for file in dict.fromkeys(info.file for info in wanted.values()):
            lazy = cast("dict[str, mx.array]", mx.load(str(file)))
            for name in [name for name, info in wanted.items() if info.file == file]:
                arrays[name] = array = lazy.pop(name)
                mx.eval(array)
                if mx.issubdtype(array.dtype, mx.floating) and not _holds_numbers(array):
                    raise CheckpointError(f"{file}: tensor {name} has values that are not finite numbers")
                bytes_done += wanted[name].disk_bytes
                if progress is not None:
                    progress(bytes_done, bytes_in_all)
        return arrays


def _holds_numbers(array: mx.array) -> bool:
    import mlx.core as mx

    good = mx.isfinite(array) if array.ndim else mx.logical_not(mx.isnan(array))
    return bool(good.all().item())


def check_tensors(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]], path: Path
) -> None:
    """Compare names and shapes; raise one ``CheckpointError`` that names up to ten tensors at fault."""
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if faults:
        more = f"; and {len(faults) - NAMED_AT_MOST} more" if len(faults) > NAMED_AT_MOST else ""
        raise CheckpointError(f"{path}: wrong tensors: {'; '.join(faults[:NAMED_AT_MOST])}{more}")


def _files(path: Path) -> list[Path]:
    """The safetensors files to read. ``model.safetensors`` comes before an index, as for transformers."""
    if present(path / SINGLE):
        return [path / SINGLE]
    shards = {file.name for file in path.iterdir() if _SHARD.fullmatch(file.name)}
    if present(path / INDEX):
        return _indexed(path, shards)
    if shards:
        return _numbered(path, shards)
    for file in sorted(path.iterdir()):
        if file.suffix in _PICKLES:
            raise CheckpointError(
                f"{file}: a pickle, which can run code when opened; convert the checkpoint to safetensors"
            )
    raise CheckpointError(f"{path / SINGLE}: no such file, and no {INDEX} either")


def _indexed(path: Path, shards: set[str]) -> list[Path]:
    index = path / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: no weight_map from tensors to files")
    named = set(weight_map.values())
    for file in sorted(named):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {file!r} is not the name of a safetensors file in this folder")
        if not present(path / file):
            raise CheckpointError(f"{path / file}: no such file, but {INDEX} names it")
    if left_over := sorted(shards - named):
        raise CheckpointError(f"{path / left_over[0]}: {INDEX} does not mention this shard")
    holds = {name: file for file in sorted(named) for name, _ in _read_header(path / file)}
    for name, file in weight_map.items():
        if holds.get(name) != file:
            raise CheckpointError(f"{path / file}: tensor {name} is not in it, but {INDEX} says so")
    if not_listed := sorted(holds.keys() - weight_map.keys()):
        raise CheckpointError(
            f"{index}: tensor {not_listed[0]} of {holds[not_listed[0]]} is not in the index"
        )
    return [path / file for file in sorted(named)]


def _numbered(path: Path, shards: set[str]) -> list[Path]:
    """Shards without an index: their names say how many there must be."""
    files = []
    match = _SHARD.fullmatch(min(shards))
    assert match is not None
    digits, count = len(match[1]), match[2]
    for number in range(1, int(count) + 1):
        file = path / f"model-{number:0{digits}d}-of-{count}.safetensors"
        if file.name not in shards:
            raise CheckpointError(
                f"{file}: no such file, but {min(shards)} says there are {int(count)} shards"
            )
        files.append(file)
    return files


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    if not file.is_file():
        read_bytes(file)  # raises with the reason
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                tensor = opened.get_slice(name)
                yield name, TensorInfo(tuple(tensor.get_shape()), tensor.get_dtype(), file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from error
