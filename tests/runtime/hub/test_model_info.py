"""Test that a model's metadata is the same from a folder, the cache, and byte ranges of a hub."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from mycli.runtime.checkpoint.gguf.rope import llama3_factors
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.client import Hub, RetryPolicy, SearchResult, search_models
from mycli.runtime.hub.download import fetch_files, plan_download
from mycli.runtime.hub.integrity import drop_damaged, files_to_verify, verify_files
from mycli.runtime.hub.local import local_models
from mycli.runtime.hub.model_info import ModelInfo, check_supported, fetch_model_info, read_model_info
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.utils.json_fields import Fields
from tests.support import gguf_files
from tests.support.embedding_models import cross_encoder, encoder, qwen3_embedding, qwen3_reranker
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.paths import PICO
from tests.support.prediction import make_with_head

FILES = {path.name: path.read_bytes() for path in PICO.iterdir()}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with hub_server() as running:
        yield running


def local(folder: Path, **files: bytes) -> ModelInfo:
    for name, data in {**FILES, **files}.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return read_model_info(Source("m", folder))


def remote(server: HubServer, files: dict[str, bytes]) -> ModelInfo:
    server.add("org/pico", files)
    with Hub(server.address(), None, lambda text: None, RetryPolicy(base_delay=0.01)) as hub:
        return fetch_model_info(hub, "org/pico")


def test_pico() -> None:
    info = read_model_info(Source("pico", PICO))
    assert info.config.parameters() == 5_770_496 and info.bits_per_weight == 16.0 and info.scheme == "bfloat16"
    assert info.eos and info.template and info.record is None and not info.warnings
    assert info.predictor_bytes == 0


def test_an_encoder_has_no_end_of_a_reply_to_warn_of(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model")
    assert not read_model_info(resolve(str(folder))).warnings


def test_a_hub_is_asked_for_headers_only(server: HubServer, tmp_path: Path) -> None:
    here, there = read_model_info(Source("pico", PICO)), remote(server, FILES)
    assert there.tensors == here.tensors and there.config == here.config and there.template == here.template
    assert there.source.repo == "org/pico" and there.remote and not there.warnings
    ranges = [request.headers["Range"] for request in server.requests("storage:")]
    assert "bytes=0-65535" in ranges and len(FILES["model.safetensors"]) > 20 * 65536
    assert not server.requests("/tokenizer.json") and there.predictor_bytes == 0
    assert not (tmp_path / "hub").exists() and not there.source.folder.exists()


def test_a_head_that_predicts_has_the_same_size_on_a_hub(server: HubServer, tmp_path: Path) -> None:
    make_with_head(tmp_path, "qwen3_5-delta")
    here = read_model_info(Source("m", tmp_path))
    there = remote(server, {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()})
    assert there.predictor_bytes == here.predictor_bytes > 0
    assert there.tensors == here.tensors and not any(name.startswith("mtp.") for name in there.tensors)


def test_modules_of_an_embedding_model_are_not_its_weights(server: HubServer) -> None:
    modules = {"modules.json": b"[]", "2_Dense/model.safetensors": FILES["model.safetensors"]}
    there = remote(server, FILES | modules)
    assert {entry.file for entry in there.tensors.values()} == {"model.safetensors"}
    assert there.warnings == ("modules.json: has no Pooling module: the model will not load",)


@pytest.mark.parametrize("write", [encoder, qwen3_embedding, cross_encoder, qwen3_reranker])
def test_a_hub_says_what_a_model_is_for(write: Callable[[Path], Path], server: HubServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    here, there = read_model_info(Source("m", folder)), remote(server, files)
    assert (there.embedding, there.cross_encoder, there.score) == (here.embedding, here.cross_encoder, here.score)
    assert there.config == here.config and there.warnings == here.warnings
    assert here.embedding or here.cross_encoder or here.score


def test_a_model_of_modelopt_up_to_0_29(server: HubServer, tmp_path: Path) -> None:
    """Its weights are described outside of config.json."""
    tensors, name = load(FILES["model.safetensors"]), "model.layers.0.mlp.down_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(())}
    record = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    files = {"model.safetensors": save(tensors), "hf_quant_config.json": json.dumps(record).encode()}
    there, here = remote(server, FILES | files), local(tmp_path, **{k.replace(".", "__"): v for k, v in files.items()})
    assert (
        there.foreign_layouts == ["fp8"]
        and there.scheme == here.scheme == "e4m3-channel"
        and list(there.packings) == [name.removesuffix(".weight")]
    )


@pytest.mark.parametrize("quantization", [None, {"quant_algo": "FP8"}, {"quant_algo": 8}])
def test_a_file_of_modelopt_is_checked_before_weights_are_fetched(quantization: object, server: HubServer) -> None:
    record = {} if quantization is None else {"hf_quant_config.json": json.dumps({"quantization": quantization})}
    server.add("org/pico", FILES | {name: text.encode() for name, text in record.items()})
    refused = (
        pytest.raises(ModelError, match="cannot run here: .*quant_algo")
        if quantization == {"quant_algo": 8}
        else nullcontext()
    )
    with Hub(server.address(), None, print, RetryPolicy(base_delay=0.01)) as hub, refused:
        check_supported(hub, plan_download(hub, "org/pico"))
    assert not server.requests("storage:")


@pytest.mark.parametrize(
    ("size", "ranges"), [(65536, ["bytes=0-65535"]), (100_000, ["bytes=0-65535", "bytes=65536-99999"])]
)
def test_the_rest_of_a_header_is_read_if_it_is_longer_than_the_first_range(
    size: int, ranges: list[str], server: HubServer
) -> None:
    data = FILES["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    padded = data[8 : 8 + length].ljust(size - 8)
    long = len(padded).to_bytes(8, "little") + padded + data[8 + length :]
    assert remote(server, {**FILES, "model.safetensors": long}).nbytes == read_model_info(Source("pico", PICO)).nbytes
    read = [request.headers["Range"] for request in server.requests(hashlib.sha256(long).hexdigest())]
    assert read == ranges


def test_a_server_without_ranges_still_answers(server: HubServer) -> None:
    server.fail("storage:", Fault(ignore_range=True), times=3)
    assert remote(server, FILES).nbytes == read_model_info(Source("pico", PICO)).nbytes


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html>" * 100, b"\xff" * 2000, b"GGUF" * 500], ids=["html", "A3-length", "gguf"]
)
def test_a18_a_remote_file_that_is_no_safetensors(data: bytes, server: HubServer) -> None:
    with pytest.raises(ModelError):
        remote(server, {**FILES, "model.safetensors": data})


def test_what_will_not_load_is_shown_with_a_warning(tmp_path: Path) -> None:
    config = json.loads(FILES["config.json"])
    info = local(tmp_path, config__json=json.dumps({**config, "vocab_size": 5000, "auto_map": {"A": "b"}}).encode())
    assert any("will not load" in warning for warning in info.warnings)
    assert any("auto_map" in warning for warning in info.warnings)


def test_a_broken_tokenizer_hides_nothing_else(tmp_path: Path) -> None:
    info = local(tmp_path, tokenizer__json=b"{")
    assert any("tokenizer.json" in warning for warning in info.warnings)
    assert info.config.layers == 6 and info.template is not None


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "pico.gguf"
    keys = gguf_files.published_tokenizer(PICO, "smollm")
    factors = {"rope_freqs.weight": llama3_factors(64, 10000.0, 8.0, 1.0, 4.0, 512)}
    gguf_files.write_model(PICO, path, "llama", "Q8_0", json.loads(FILES["config.json"]), keys, factors)
    return path.read_bytes()


def test_a_gguf_file_of_a_hub_is_looked_at_fetched_found_and_checked(
    gguf_file: bytes, server: HubServer, tmp_path: Path
) -> None:
    """Check that only the named file is fetched, not the model's other sizes in the repository."""
    repo = {"pico-q8_0.gguf": gguf_file, "pico-q4_0.gguf": b"x" * 5000, "README.md": b"#", "config.json": b"{}"}
    server.add("org/files", repo)
    model = "org/files:pico-q8_0.gguf"
    with Hub(server.address(), None, lambda text: None, RetryPolicy(base_delay=0.01)) as hub:
        seen = fetch_model_info(hub, model)
        assert seen.config.parameters() == 5_770_496 and seen.scheme == "int8-g32" and seen.template and seen.eos
        assert seen.predictor_bytes == 0 and seen.config.rope_scaling.original_context == 512, "from a small tensor"
        assert not (tmp_path / "hub").exists()
        job = plan_download(hub, model)
        assert [file.name for file in job.files] == ["pico-q8_0.gguf"] and job.total_bytes == len(gguf_file)
        source = fetch_files(hub, job, force=False, advance=lambda count: None)
        with pytest.raises(NotFoundError, match="pico-q9.gguf"):
            plan_download(hub, "org/files:pico-q9.gguf")
        with pytest.raises(ModelError, match="but GGUF files, each a model"):
            plan_download(hub, "org/files")
    assert resolve(model) == source and source.folder.name == "pico-q8_0.gguf"
    info = read_model_info(source)
    assert info.tensors == seen.tensors and info.config == seen.config and not info.warnings
    with pytest.raises(NotFoundError, match="each a model of its own"):
        resolve("org/files")
    with pytest.raises(NotFoundError, match="partly downloaded: missing pico-q4_0.gguf"):
        resolve("org/files:pico-q4_0.gguf")
    assert [(stored.name, stored.problem) for stored in local_models() if stored.kind == "hub"] == [(model, "")]
    checked = verify_files(source, files_to_verify(source), lambda count: None)
    assert [(file.name, file.state) for file in checked] == [("pico-q8_0.gguf", "ok")]
    changed = bytearray(gguf_file)
    changed[-100] ^= 1
    source.folder.resolve().write_bytes(changed)
    damaged = verify_files(source, files_to_verify(source), lambda count: None)
    assert [file.state for file in damaged] == ["damaged"] and drop_damaged(source, damaged) == ["pico-q8_0.gguf"]
    with pytest.raises(NotFoundError, match="pico-q8_0.gguf"):
        resolve(model)


def test_gguf_files_in_folders_of_a_repository(gguf_file: bytes, server: HubServer) -> None:
    """Repositories keep the parts of large models in one folder for each quant."""
    part = "Q8_0/pico-Q8_0-00001-of-00001.gguf"
    repo = {
        part: gguf_file,
        "BF16/pico-BF16.gguf": b"x" * 5000,
        "imatrix_pico.gguf": b"x",
        "pico-mmproj-Q8_0.gguf": b"x",
    }
    server.add("org/folders", repo)
    with Hub(server.address(), None, lambda text: None, RetryPolicy(base_delay=0.01)) as hub:
        with pytest.raises(ModelError) as caught:
            plan_download(hub, "org/folders")
        assert caught.value.hint == f"give one: org/folders:BF16/pico-BF16.gguf, org/folders:{part}"
        with pytest.raises(NotFoundError) as missing:
            plan_download(hub, "org/folders:Q4_0")
        assert missing.value.hint == f"it holds BF16/pico-BF16.gguf, {part}"
        assert fetch_model_info(hub, "org/folders:Q8_0").source.name == f"org/folders:{part}"
        plan = plan_download(hub, "org/folders:Q8_0")
        source = fetch_files(hub, plan, force=False, advance=lambda count: None)
    assert resolve("org/folders:Q8_0") == resolve(f"org/folders:{part}") == source
    assert read_model_info(source).eos
    assert [(stored.name, stored.problem) for stored in local_models() if stored.kind == "hub"] == [(source.name, "")]
    checked = verify_files(source, files_to_verify(source), lambda count: None)
    assert [(file.name, file.state) for file in checked] == [(part, "ok")]


@pytest.mark.parametrize("name", ["org/files:../x.gguf", "org/files:a/b.gguf", "a/b/c:x.gguf", "files:x.gguf"])
def test_names_of_files_that_are_none(name: str, server: HubServer) -> None:
    with pytest.raises((NotFoundError, UsageError, ModelError)):
        resolve(name)


def test_a_search_reads_what_the_hub_leaves_out() -> None:
    """`gated` is false, "auto" or "manual"."""
    about = {"safetensors": {"total": 12}, "config": {"model_type": "llama"}, "downloads": 7, "gated": "manual"}
    answers = ({"id": "org/a", **about}, {"id": "org/b", "gated": False}, {"id": "org/c"}, {"id": "no name"})
    hub: Any = SimpleNamespace(list_models=lambda query: [Fields(answer, "hub") for answer in answers])
    assert search_models(hub, "a", 9) == [
        SearchResult("org/a", 7, 12, "llama", gated=True),
        SearchResult("org/b", 0, None, None, gated=False),
        SearchResult("org/c", 0, None, None, gated=False),
    ]
    assert [result.name for result in search_models(hub, "a", 1)] == ["org/a"]


@pytest.mark.parametrize("words", ["", "  ", "x" * 201], ids=["empty", "blank", "long"])
def test_words_that_cannot_be_searched_for_are_refused(words: str) -> None:
    queries: list[str] = []
    hub: Any = SimpleNamespace(list_models=lambda query: queries.append(query) or [])
    with pytest.raises(UsageError, match="no words to search for"):
        search_models(hub, words, 9)
    assert search_models(hub, "x" * 200, 9) == [] and len(queries) == 1
