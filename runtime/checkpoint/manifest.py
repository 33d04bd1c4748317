"""Which tensors a model folder holds, and whether they are the ones its config promises: all before memory is taken.

Knows names, shapes and places in files; values are `runtime.checkpoint.reader`'s. Reads headers only, opens no pickle,
and follows no path that an index names out of the folder. Does not import torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.safetensors_header import (
    INDEX,
    MAX_HEADER,
    MAX_VALUES,
    SINGLE,
    TensorEntry,
    damaged,
    header_bytes,
    parse_header,
)
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.sanitize import one_line

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NO_PICKLES = "pickles can run code and are never opened; convert it: https://huggingface.co/spaces/safetensors/convert"
_HARMLESS = ("rotary_emb.inv_freq",)  # computed from the config; old checkpoints store them too
_TELLING = (  # after what the layouts know
    (".bias", "a bias where config.json has none", "config.json and the weights belong to different models"),
)


@dataclass(frozen=True)
class Manifest:
    """The tensors of the safetensors files of `folder`; `files` by the names that `TensorEntry.file` uses.

    `warnings` are for a person: files that are not part of the model, links that leave the folder.
    """

    folder: Path
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, RegularFile]
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> "Manifest":
        """Read and check the headers of a folder: one `model.safetensors`, or the shards of its index.

        Raises NotFoundError where there is no folder, ModelError for everything else that is wrong, naming the file.
        """
        try:
            present = {path.name for path in folder.iterdir()}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise NotFoundError(f"{folder}: {reason}", code="name-or-pull") from None
        index = _read_index(folder) if INDEX in present else None
        if index is None and SINGLE not in present:
            raise _no_weights(present, folder)
        names = [SINGLE] if index is None else sorted(set(index.values()))
        missing = [name for name in names if name not in present]
        if missing:
            raise ModelError(f"{INDEX}: {_listed(missing)} missing in {folder}", code="pull-whole")
        files = {name: RegularFile.find(folder / name) for name in names}
        tensors: dict[str, TensorEntry] = {}
        for file in files.values():
            for name, entry in read_file_header(file).items():
                if name in tensors:
                    raise damaged(f"{name:.80}: both in {tensors[name].file} and in {file.name}")
                tensors[name] = entry
        if index is not None:
            _check_index(index, tensors)
        extra = sorted(name for name in present - set(names) if name.endswith(".safetensors"))
        warnings = [f"{_listed(extra)} not in {INDEX if index else SINGLE}: not used"] if extra else []
        warnings += [
            f"{file.name} is a link to {file.path}, outside the folder" for file in _strays(folder, files.values())
        ]
        return cls(folder, tensors, files, tuple(warnings))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def check(self, config: ModelConfig, packings: Mapping[str, Packing]) -> None:
        """Every tensor that `config` and `packings` promise is there with its exact shape, and no other.

        What stands in place of a packed weight, and what it may hold beside it, the layout says. Besides these, stored
        rotary frequencies and the `lm_head.weight` of a tied head pass. Raises ModelError naming the first tensors at
        fault. Reads what the layouts check: a few bytes of each weight at most.
        """
        promises = formats.stored_tensors(config, packings, self.tensors)
        expected = {name: (shape, dtypes) for name, shape, dtypes in promises}
        if config.tie_embeddings and "lm_head.weight" in self.tensors:
            expected["lm_head.weight"] = ((config.vocab_size, config.hidden_size), SAFETENSORS_FLOATS)
        harmless = (*_HARMLESS, *formats.ignored(packings))
        unexpected = [name for name in self.tensors if name not in expected and not name.endswith(harmless)]
        if unexpected:
            raise _unexpected(unexpected, packings)
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise _missing(missing)
        for name, (shape, dtypes) in expected.items():
            entry = self.tensors[name]
            if entry.shape != shape:
                raise _misshapen(entry, shape)
            if entry.dtype not in dtypes:
                raise damaged(f"{entry.file}: {name} is {entry.dtype}, expected {' or '.join(dtypes)}")
        self._check_fused(config, packings)
        for linear in formats.quantizable(config):
            if (packing := packings.get(linear.name)) is not None:
                formats.load(packing.layout).check(linear, packing, self)

    def content(self, name: str) -> bytes:
        """The bytes of a small tensor, as they are stored."""
        entry = self.tensors[name]
        return self.files[entry.file].read(entry.nbytes, entry.offset)

    def _check_fused(self, config: ModelConfig, packings: Mapping[str, Packing]) -> None:
        """Dense linears that share an input become one product, so their weights must be of one dtype."""
        for layer in range(config.layers):
            for linears in config.layer(layer).products().values():
                names = [f"{linear.name}.weight" for linear in linears if linear.name not in packings]
                for other in (self.tensors[name] for name in names[1:]):
                    first = self.tensors[names[0]]
                    if other.dtype != first.dtype:
                        raise ModelError(
                            f"{other.file}: {other.name} is {other.dtype}, but {first.name} is {first.dtype}",
                            "layers that share their input must be stored in one dtype",
                        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name:.80}" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def read_file_header(file: RegularFile) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name. Raises ModelError for what is none."""
    start = file.read(64)
    return parse_header(file.read(header_bytes(start, file.size, file.name)), file.size, file.name)


def _is_shard(name: str) -> bool:
    """A plain file name on every system: no path, drive, share, stream or control character."""
    plain = PureWindowsPath(name).name == name and ":" not in name and one_line(name, 255) == name
    return plain and name.endswith(".safetensors")


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor by the shard index. Raises ModelError for names that are not plain shard names."""
    file = RegularFile.find(folder / INDEX)
    data = file.read(MAX_HEADER + 1)
    if data.count(b",") > MAX_VALUES // 4:  # as many tensors as headers can have values for
        raise damaged(f"{INDEX}: more than the {MAX_VALUES // 4} values allowed")
    shards = parse_object(data, INDEX, MAX_HEADER).object("weight_map").values
    if not shards:
        raise damaged(f"{INDEX}: weight_map lists no tensors")
    for tensor, name in shards.items():
        if not isinstance(name, str) or not _is_shard(name):
            pickle = isinstance(name, str) and name.endswith(_PICKLES)
            hint = _NO_PICKLES if pickle else "the index names files by plain names that end in .safetensors"
            raise ModelError(f"{INDEX}: {tensor!r:.80} is said to be in {name!r:.80}, which is not a shard", hint)
    return dict(shards)


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    for name, shard in index.items():
        if name not in tensors:
            raise damaged(f"{INDEX}: {name!r:.80} should be in {shard}, but is in no shard")
        if tensors[name].file != shard:
            raise damaged(f"{INDEX}: {name:.80} should be in {shard}, but is in {tensors[name].file}")


def _no_weights(present: Collection[str], folder: Path) -> ModelError:
    shards = sorted(name for name in present if name.endswith(".safetensors"))
    pickles = sorted(name for name in present if name.endswith(_PICKLES))
    if shards:
        return ModelError(f"{folder}: {_listed(shards)} without {INDEX}", code="pull-whole")
    if pickles:
        return ModelError(f"{folder}: weights only as pickles ({_listed(pickles)})", _NO_PICKLES)
    if any(name.endswith(".gguf") for name in present):
        return ModelError(f"{folder}: weights only as GGUF", "use the repository that holds safetensors files")
    return ModelError(f"{folder}: no {SINGLE} and no {INDEX}", "name a folder that holds a whole model")


def _strays(folder: Path, files: Iterable[RegularFile]) -> Iterator[RegularFile]:
    """Files that lie elsewhere; the blobs to which a snapshot of the Hugging Face cache links belong to it."""
    real = folder.resolve()
    homes = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    return (file for file in files if file.path.parent not in homes)


def _unexpected(names: Sequence[str], packings: Mapping[str, Packing]) -> ModelError:
    """The error for tensors that config.json does not promise, led by those that tell why."""
    dense = [name for name in names if name.removesuffix(".weight") in packings]
    if dense:
        return ModelError(
            f"{_listed(dense)}: not quantized, but quantization_config covers it", "list it in its ignore"
        )
    for suffix, problem, hint in (*formats.telling(packings), *_TELLING):
        telling = [name for name in names if name.endswith(suffix)]
        if telling:
            return ModelError(f"{_listed(telling)}: {problem}", hint)
    return damaged(f"{_listed(names)}: not part of the model that config.json describes")


def _missing(names: Sequence[str]) -> ModelError:
    problem = f"{_listed(names)}: missing, though config.json describes a model that has it"
    if names == ["lm_head.weight"]:
        return ModelError(problem, "if the model ties its embeddings, config.json must say so: tie_word_embeddings")
    return damaged(problem)


def _misshapen(entry: TensorEntry, shape: Shape) -> ModelError:
    hint = "config.json and the weights belong to different models, or the file is damaged"
    if entry.name in ("model.embed_tokens.weight", "lm_head.weight") and entry.shape[1:] == shape[1:]:
        # Rows beyond the tokenizer's ids are padding and legal; rows beyond vocab_size are a contradiction.
        hint = f"vocab_size must be the number of rows, {entry.shape[0]}, of which the tokenizer may use fewer"
    return ModelError(f"{entry.file}: {entry.name} has shape {list(entry.shape)}, expected {list(shape)}", hint)
