"""What can be said of a model without loading it: its shape, size, end tokens, defaults, template, origin and card.

Reads configuration files and the headers of the weights, from a folder or, by ranges, from a hub. No torch.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, AdapterConfig
from mycli.runtime.checkpoint.gguf.files import MAX_SMALL_TENSOR, join_headers, unpack_floats
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.header import Reader, parse_gguf_header
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, header_bytes, parse_header
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import Download, plan_download, read_small
from mycli.runtime.hub.integrity import MAX_RECORD_BYTES
from mycli.runtime.hub.names import split_file
from mycli.runtime.hub.resolve import Source, custom_code_warning
from mycli.runtime.hub.store import RECORD, HubFile, holds_adapter
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.quantization.scheme import OWN_LAYOUT, Packing
from mycli.runtime.utils.json_fields import Fields, parse_object, read_object

# Small files that say what a model is; tokenizer.json is too large for a look.
_TELLING = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", RECORD)
_FIRST_READ = 1 << 16  # bytes of a shard: holds most headers whole


@dataclass(frozen=True)
class ModelInfo:
    """Everything that is said of a model. `record` is the content of mycli.json, None where the model has none."""

    source: Source
    config: ModelConfig
    packings: Mapping[str, Packing]
    tensors: Mapping[str, TensorEntry]
    defaults: GenerationDefaults
    eos: tuple[int, ...]
    template: str | None
    record: Fields | None
    warnings: tuple[str, ...]
    remote: bool  # the folder of `source` was for a moment only
    predictor_bytes: int = 0  # of a head that predicts further tokens; beside `tensors`

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _bytes_of(self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Over all parameters, embeddings and scales included."""
        return 8 * self.nbytes / self.config.parameters()

    @property
    def scheme(self) -> str:
        """int4-g128, several joined by +, or the dtype of a model that is not quantized."""
        return "+".join(sorted({packing.name for packing in self.packings.values()})) or self.config.dtype

    @property
    def foreign_layouts(self) -> list[str]:
        """The layouts of packed weights that quantizing does not write: awq, gguf."""
        return sorted({packing.layout for packing in self.packings.values()} - {OWN_LAYOUT})


def read_model_info(source: Source) -> ModelInfo:
    """What there is to say of a model on this machine. Raises ModelError for what is wrong with its files."""
    folder = open_model_folder(source.folder)
    warnings = list(folder.manifest.warnings)
    try:
        folder.checked_manifest()
    except ModelError as error:
        warnings.append(f"{error.message}: the model will not load")
    info = _gather(source, folder, folder.manifest.tensors, warnings, remote=False)
    head = folder.predictor
    return replace(info, predictor_bytes=0 if head is None else _bytes_of(head.manifest.tensors))


def _bytes_of(tensors: Mapping[str, TensorEntry]) -> int:
    return sum(entry.nbytes for entry in tensors.values())


def check_supported(hub: Hub, job: Download) -> None:
    """Raises ModelError where what `job` would bring cannot run here: its config or its header says so beforehand."""
    adapter = next((file for file in job.files if file.name == ADAPTER_CONFIG), None)
    if adapter is not None and holds_adapter(file.name for file in job.files):
        read = _read_object(hub, job, adapter)
        try:
            AdapterConfig.parse(read)
        except ModelError as error:
            raise ModelError(f"cannot be used here: {error.message}", code="fetch-anyway") from None
        return
    config = next((file for file in job.files if file.name == "config.json"), None)
    try:
        if split_file(job.model)[1] is not None:
            opened: ModelFolder = fetch_gguf(hub, job)
        elif config is None:
            raise ModelError(f"{job.repo} has no config.json")
        else:
            opened = ModelFolder.from_config(_read_object(hub, job, config))
        opened.packings  # noqa: B018  # raises for a layout of quantized weights that is not read
    except ModelError as error:
        raise ModelError(f"cannot run here: {error.message}", code="fetch-anyway") from None


def _read_object(hub: Hub, job: Download, file: HubFile) -> Fields:
    return parse_object(read_small(hub, job.repo, job.commit, file), f"{job.repo}: {file.name}")


def fetch_model_info(hub: Hub, model: str) -> ModelInfo:
    """What there is to say of a model on the hub, from its small files and the headers of its weights; nothing is kept.

    Raises what `plan_download` raises, and ModelError for what is wrong with the files.
    """
    job = plan_download(hub, model)
    if split_file(model)[1] is not None:
        gguf = fetch_gguf(hub, job)
        source = Source(model, gguf.path, job.repo, job.commit)
        return _gather(source, gguf, gguf.manifest.tensors, list(job.warnings), remote=True)
    tensors: dict[str, TensorEntry] = {}
    with tempfile.TemporaryDirectory(prefix="mycli-") as name:
        folder = Path(name)
        for file in job.files:
            if file.name in _TELLING:
                (folder / file.name).write_bytes(read_small(hub, job.repo, job.commit, file))
            elif file.name.endswith(".safetensors"):
                start = hub.read(job.repo, job.commit, file.name, 0, min(_FIRST_READ, file.size))
                length = header_bytes(start, file.size, file.name)
                if length > len(start):
                    start += hub.read(job.repo, job.commit, file.name, len(start), length - len(start))
                tensors.update(parse_header(start[:length], file.size, file.name))
        source = Source(model, folder, job.repo, job.commit)
        opened = open_model_folder(folder)
        used = opened.used(tensors)
        info = _gather(source, replace(opened, headers=used), used, list(job.warnings), remote=True)
        head = {name: entry for name, entry in tensors.items() if MTP_PART.local_name(name) is not None}
        return replace(info, predictor_bytes=0 if opened.config.mtp is None else _bytes_of(head))


def fetch_gguf(hub: Hub, job: Download) -> GgufFolder:
    """The header of a GGUF model on the hub, read by ranges; nothing is kept. Raises ModelError."""

    def reader(file: HubFile) -> Reader:
        return lambda offset, count: hub.read(job.repo, job.commit, file.name, offset, count)

    headers = [parse_gguf_header(reader(file), file.size, file.name) for file in job.files]
    files = {file.name: file for file in job.files}

    def floats(name: str) -> list[float]:
        entry = header.tensors[name]
        return unpack_floats(entry, reader(files[entry.file])(entry.offset, min(entry.nbytes, MAX_SMALL_TENSOR)))

    header = join_headers(headers)
    return GgufFolder.of_header(header, floats, Path(job.files[0].name))


def _gather(
    source: Source, opened: ModelFolder, tensors: Mapping[str, TensorEntry], warnings: list[str], *, remote: bool
) -> ModelInfo:
    folder, config = opened.path, opened.config
    code = custom_code_warning(folder)
    defaults, dropped = opened.generation
    warnings += [*([code] if code else []), *dropped]
    own: tuple[int, ...] = ()
    template = None
    try:
        found = opened.chat_template()
        template = None if found is None else found.source()
        if opened.has_tokenizer:
            own = opened.tokenizer().eos
    except ModelError as error:  # a tokenizer that cannot be used says nothing, but the rest is worth showing
        warnings.append(error.message)
    eos, lacking = stop_ids(defaults.eos, config.eos, own, config.vocab_size)
    record = folder / RECORD
    return ModelInfo(
        source=source,
        config=config,
        packings=opened.packings,
        tensors=tensors,
        defaults=defaults,
        eos=eos,
        template=template,
        record=read_object(record, MAX_RECORD_BYTES) if record.exists() else None,
        warnings=tuple([*warnings, *lacking]),
        remote=remote,
    )
