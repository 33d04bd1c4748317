"""Maps the `quant_method` of a program that reuses another program's layout to that layout.

AutoRound writes GPTQ, AWQ and FP8; ModelOpt, Quark and FBGEMM write FP8. Other fields of the section tell which.
Imports no torch.
"""

from collections.abc import Callable, Mapping

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields

READABLE = (
    "AutoRound's GPTQ, AWQ and FP8 packings",
    "FP8 of FBGEMM and Quark, per row or tensor",
)
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def find_layout(section: Fields) -> tuple[str, Fields]:
    """Return the layout's name and the section in its terms. Raises ModelError for a field without a layout.

    Any other method is returned as a layout's name, which may not exist.
    """
    method = section.text("quant_method")
    translate = _METHODS.get(method)
    return (method.replace("-", "_"), section) if translate is None else translate(section)


def _refused(section: Fields, key: str, readable: str) -> ModelError:
    value = str(section.values.get(key))
    return section.fail(key, f"{value[:80]!r} is not supported", f"readable: {readable}")


def _auto_round(section: Fields) -> tuple[str, Fields]:
    # AutoRound before 0.5 wrote `backend` instead of `packing_format`.
    key = "packing_format" if section.has("packing_format") else "backend"
    packing, kind = section.text(key, "auto_round:auto_gptq"), section.text("data_type", "int")
    if kind in ("fp", "fp8", "fp8_e4m3", "fp8_e5m2") and section.integer("bits", 8, high=16) == 8:
        return "fp8", section
    if kind != "int":
        raise _refused(section, "data_type", READABLE[0])
    if "awq" in packing:
        return "awq", section
    if (
        not any(part in packing for part in ("gptq", "auto_round", "autoround", "exllama", "triton"))
        or "mlx" in packing
    ):
        raise _refused(section, key, READABLE[0])
    if section.has("act_bits") and section.integer("act_bits", high=32) <= 8:
        raise _refused(section, "act_bits", READABLE[0])
    for name in section.object("extra_config").values:
        layer = section.object("extra_config").object(name)
        if layer.has("sym") and layer.boolean("sym", True) != section.boolean("sym", True):
            raise layer.fail("sym", "differs from that of the other layers", f"readable: {READABLE[0]}, of one kind")
    # The formats named after AutoGPTQ store zero points less one, as version 1 does.
    version = "gptq" if "gptq" in packing and "gptqmodel" not in packing else "gptq_v2"
    return "gptq", Fields({**section.values, "checkpoint_format": version}, section.source)


def _modelopt(section: Fields) -> tuple[str, Fields]:
    if section.has("quantization"):  # as in hf_quant_config.json
        section = section.object("quantization")
        section = Fields({"ignore": section.values.get("exclude_modules"), **section.values}, section.source)
    if section.text("quant_algo").upper() not in _MODELOPT:
        raise _refused(section, "quant_algo", f"ModelOpt's {', '.join(_MODELOPT)}")
    return "modelopt", section


def _quark(section: Fields) -> tuple[str, Fields]:
    shared = section.object("global_quant_config")
    _check_quark(shared)
    unquantized = section.array("exclude", str)
    # Those with a quantized cache have sections of their own for k_proj and v_proj, with the same weights.
    for key in ("layer_quant_config", "layer_type_quant_config"):
        for name in section.object(key).values:
            layers = section.object(key).object(name)
            if layers.has("weight"):
                _check_quark(layers)
            else:
                unquantized.append(name)
    unquantized = [name.replace("*", "").removeprefix("re:") for name in unquantized]
    return "fp8", Fields({"modules_to_not_convert": unquantized}, section.source)


def _check_quark(section: Fields) -> None:
    if isinstance(section.values.get("weight"), list):
        raise _refused(section, "weight", READABLE[1])
    weight = section.object("weight")
    if weight.text("dtype", "") != "fp8_e4m3":
        raise _refused(weight, "dtype", READABLE[1])
    if weight.text("qscheme", "") not in ("per_tensor", "per_channel"):
        raise _refused(weight, "qscheme", READABLE[1])


_METHODS: Mapping[str, Callable[[Fields], tuple[str, Fields]]] = {
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "fbgemm_fp8": lambda section: ("fp8", section),
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "quark": _quark,
}
