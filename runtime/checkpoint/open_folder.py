"""Opens a model by its path: a folder with config.json, or a GGUF file read as one."""

from collections.abc import Callable
from pathlib import Path

from mycli.runtime.checkpoint.formats import Headers, is_quantized
from mycli.runtime.checkpoint.gguf_parts import is_gguf
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.utils.json_fields import Fields, read_object

MODELOPT_CONFIG = "hf_quant_config.json"  # ModelOpt up to 0.29 describes its weights here and not in config.json


def open_model_folder(path: Path, remote: Headers | None = None) -> ModelFolder:
    """Read config.json of the folder `path`, or the header of the GGUF file `path`.

    remote: the tensors of a model of which the folder holds only the small files.
    Raises NotFoundError for a missing GGUF file, ModelError naming the field, key or tensor at fault.
    """
    if is_gguf(path) and not path.is_dir():
        # Imported here: a folder of safetensors needs none of the dozen modules that read GGUF.
        from mycli.runtime.checkpoint.gguf.folder import GgufFolder

        return GgufFolder.open_file(path)
    record = path / MODELOPT_CONFIG
    raw = with_older_section(
        read_object(path / "config.json"), lambda: read_object(record) if record.is_file() else None
    )
    return ModelFolder.from_config(raw, path, remote)


def with_older_section(raw: Fields, read_modelopt: Callable[[], Fields | None]) -> Fields:
    """Return config.json with the description of quantized weights that older programs store elsewhere.

    read_modelopt: reads `MODELOPT_CONFIG`, None without that file; called only if config.json has no description.
    """
    if is_quantized(raw):
        return raw
    # Where vLLM looks too: compressed-tensors first called the section otherwise.
    values = dict(raw.values)
    section = values.pop("compression_config", None)
    if section is None and (modelopt := read_modelopt()) is not None:
        section = {**modelopt.values, "quant_method": "modelopt"}
    return raw if section is None else Fields({**values, "quantization_config": section}, raw.source)
