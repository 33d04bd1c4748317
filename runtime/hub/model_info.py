"""Metadata of a model without loading it: config, sizes, stop tokens, sampling defaults, chat template.

Reads configuration files and the headers of the weights, from a folder or by byte ranges from a hub. No torch.
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
from mycli.runtime.checkpoint.open_folder import MODELOPT_CONFIG, open_model_folder, with_older_section
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, header_bytes, parse_header
from mycli.runtime.checkpoint.sentence_transformers import (
    MODULE_FILE,
    SETTINGS_FILES,
    CrossEncoderSpec,
    EmbeddingSpec,
    ScoreSpec,
)
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import DownloadPlan, plan_download, read_small_file
from mycli.runtime.hub.names import split_file
from mycli.runtime.hub.resolve import Source, custom_code_warning
from mycli.runtime.hub.store import MAX_RECORD_BYTES, RECORD, HubFile, has_adapter_files
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.quantization.scheme import OWN_LAYOUT, Packing
from mycli.runtime.utils.json_fields import Fields, parse_object, read_object

# Without tokenizer.json, which is too large to fetch for a summary.
_METADATA_FILES = (
    "config.json",
    MODELOPT_CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    RECORD,
    *SETTINGS_FILES,
)
# Bytes of a shard read first: contains most headers entirely, so one request per shard is enough.
_FIRST_READ = 1 << 16


@dataclass(frozen=True)
class ModelInfo:
    """Metadata of a model; record: the content of mycli.json, if there is one."""

    source: Source
    config: ModelConfig
    packings: Mapping[str, Packing]
    tensors: Mapping[str, TensorEntry]
    defaults: GenerationDefaults
    eos: tuple[int, ...]
    template: str | None
    record: Fields | None
    warnings: tuple[str, ...]
    remote: bool  # `source.folder` was temporary and is gone
    predictor_bytes: int = 0  # of an MTP head; not in `tensors`
    # Of a model of embeddings, of a reranker with a head of its own, and of one that answers by a token.
    embedding: EmbeddingSpec | None = None
    cross_encoder: CrossEncoderSpec | None = None
    score: ScoreSpec | None = None

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits per parameter of the whole model, embeddings and scales included."""
        return 8 * self.nbytes / self.config.parameters()

    @property
    def scheme(self) -> str:
        """The quantization schemes joined by "+", such as int4-g128, or the dtype of an unquantized model."""
        return "+".join(sorted({packing.name for packing in self.packings.values()})) or self.config.dtype

    @property
    def foreign_layouts(self) -> list[str]:
        """The layouts of packed weights other than mycli's own, such as awq and gguf."""
        return sorted({packing.layout for packing in self.packings.values()} - {OWN_LAYOUT})


def read_model_info(source: Source) -> ModelInfo:
    folder = source.open()
    warnings = list(folder.manifest.warnings)
    try:
        folder.checked_manifest()
    except ModelError as error:
        warnings.append(f"{error.message}: the model will not load")
    info = _gather(source, folder, folder.manifest.tensors, warnings, remote=False)
    head = folder.mtp_head
    return replace(info, predictor_bytes=0 if head is None else _bytes_of(head.manifest.tensors))


def _bytes_of(tensors: Mapping[str, TensorEntry]) -> int:
    return sum(entry.nbytes for entry in tensors.values())


def check_supported(hub: Hub, plan: DownloadPlan) -> None:
    """Raise ModelError, before weights are fetched, if the model's config or GGUF header is not supported."""
    files = {file.name: file for file in plan.files}
    problem = "cannot run here"
    try:
        if has_adapter_files(files):
            problem = "cannot be used here"
            AdapterConfig.parse(_read_object(hub, plan, files[ADAPTER_CONFIG]))
            return
        if split_file(plan.model)[1] is not None:
            folder: ModelFolder = fetch_gguf(hub, plan)
        elif "config.json" in files:
            modelopt = files.get(MODELOPT_CONFIG)
            raw = with_older_section(
                _read_object(hub, plan, files["config.json"]),
                lambda: None if modelopt is None else _read_object(hub, plan, modelopt),
            )
            folder = ModelFolder.from_config(raw)
        else:
            raise ModelError(f"{plan.repo} has no config.json")
        folder.packings  # noqa: B018  # raises for an unsupported layout of quantized weights
    except ModelError as error:
        if error.code == "give-adapter":  # a GGUF file
            return
        raise ModelError(f"{problem}: {error.message}", code="fetch-anyway") from None


def _read_object(hub: Hub, plan: DownloadPlan, file: HubFile) -> Fields:
    return parse_object(read_small_file(hub, plan.repo, plan.commit, file), f"{plan.repo}: {file.name}")


def fetch_model_info(hub: Hub, model: str) -> ModelInfo:
    """Return the metadata of a model on the hub; nothing is stored.

    Raises what `plan_download` raises, and ModelError for invalid files.
    """
    plan = plan_download(hub, model)
    if split_file(plan.model)[1] is not None:
        gguf = fetch_gguf(hub, plan)
        source = Source(plan.model, gguf.path, plan.repo, plan.commit)
        return _gather(source, gguf, gguf.manifest.tensors, list(plan.warnings), remote=True)
    tensors: dict[str, TensorEntry] = {}
    with tempfile.TemporaryDirectory(prefix="mycli-") as name:
        for file in plan.files:
            module = MODULE_FILE.fullmatch(file.name) is not None
            if file.name in _METADATA_FILES or (module and file.name.endswith(".json")):
                path = Path(name) / file.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(read_small_file(hub, plan.repo, plan.commit, file))
            elif file.name.endswith(".safetensors") and not module:
                header = hub.read(plan.repo, plan.commit, file.name, 0, min(_FIRST_READ, file.size))
                length = header_bytes(header, file.size, file.name)
                if length > len(header):
                    header += hub.read(plan.repo, plan.commit, file.name, len(header), length - len(header))
                tensors |= parse_header(header[:length], file.size, file.name)
        folder = open_model_folder(Path(name), tensors)
        source = Source(model, folder.path, plan.repo, plan.commit)
        warnings = [*plan.warnings, *folder.skipped_parts(tensors)]
        info = _gather(source, folder, folder.headers or {}, warnings, remote=True)
        head = {name: entry for name, entry in tensors.items() if MTP_PART.local_name(name) is not None}
        return replace(info, predictor_bytes=0 if folder.config.mtp is None else _bytes_of(head))


def fetch_gguf(hub: Hub, plan: DownloadPlan) -> GgufFolder:
    """Return the header of a GGUF model on the hub, read by byte ranges; nothing is stored. Raises ModelError."""

    def reader(file: HubFile) -> Reader:
        return lambda offset, count: hub.read(plan.repo, plan.commit, file.name, offset, count)

    header = join_headers([parse_gguf_header(reader(file), file.size, file.name) for file in plan.files])
    files = {file.name: file for file in plan.files}

    def floats(name: str) -> list[float]:
        entry = header.tensors[name]
        return unpack_floats(entry, reader(files[entry.file])(entry.offset, min(entry.nbytes, MAX_SMALL_TENSOR)))

    return GgufFolder.from_header(header, floats, Path(plan.files[0].name))


def _gather(
    source: Source, folder: ModelFolder, tensors: Mapping[str, TensorEntry], warnings: list[str], *, remote: bool
) -> ModelInfo:
    config = folder.config
    if code := custom_code_warning(folder.path):
        warnings.append(code)
    defaults, dropped = folder.generation
    warnings += dropped
    tokenizer_eos: tuple[int, ...] = ()
    template = None
    try:
        chat_template = folder.chat_template()
        template = None if chat_template is None else chat_template.source()
        if folder.has_tokenizer:
            tokenizer_eos = folder.tokenizer().eos
    except ModelError as error:
        # An unusable tokenizer must not hide the rest.
        warnings.append(error.message)
    eos, invalid = stop_ids(defaults.eos, config.eos, tokenizer_eos, config.vocab_size)
    record = folder.path / RECORD
    info = ModelInfo(
        source=source,
        config=config,
        packings=folder.packings,
        tensors=tensors,
        defaults=defaults,
        eos=eos,
        template=template,
        record=read_object(record, MAX_RECORD_BYTES) if record.exists() else None,
        warnings=tuple(warnings if config.bidirectional else [*warnings, *invalid]),
        remote=remote,
    )
    try:
        return replace(info, embedding=folder.embedding, cross_encoder=folder.cross_encoder, score=folder.score)
    except ModelError as error:
        problem = error.message.removeprefix(f"{folder.path}/") if remote else error.message
        return replace(info, warnings=(*info.warnings, f"{problem}: the model will not load"))
