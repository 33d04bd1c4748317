"""Opens a model by its path: a folder with config.json, or a GGUF file read as one."""

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
    raw = read_object(path / "config.json")
    if not is_quantized(raw):
        raw = _with_older_section(raw, path)
    return ModelFolder.from_config(raw, path, remote)


def _with_older_section(raw: Fields, path: Path) -> Fields:
    # Where vLLM looks too: compressed-tensors first called the section otherwise.
    values = dict(raw.values)
    section = values.pop("compression_config", None)
    if section is None and (path / MODELOPT_CONFIG).is_file():
        section = {**read_object(path / MODELOPT_CONFIG).values, "quant_method": "modelopt"}
    return raw if section is None else Fields({**values, "quantization_config": section}, raw.source)
