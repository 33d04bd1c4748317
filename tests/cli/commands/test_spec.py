"""Test `spec check`, `spec verify`, and --draft on run, chat and bench."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.cli.commands import spec_verify
from mycli.cli.main import main, reorder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.diagnostics import speculation_benchmark
from mycli.runtime.diagnostics.prompts import prompts
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject, measure_speculation, textbook
from mycli.runtime.diagnostics.speculation_check import chi_squared, greedy_divergences, least_certain
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import LENGTHS, LONG_LENGTHS, draft_lengths
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import DraftModel, Proposer
from tests.support.command_line import Mycli
from tests.support.paths import DRAFT, PICO

CPU = ("--device", "cpu", "-q")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel.load(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return LoadedModel.load(open_model_folder(DRAFT), Placement(torch.device("cpu"), torch.float32))


def subject(target: LoadedModel, draft: LoadedModel | None) -> SpeculationSubject:
    def proposer() -> DraftModel | PromptLookup:
        return (
            PromptLookup()
            if draft is None
            else DraftModel(draft.runner, CacheShape.contiguous(300), target.runner.nbytes)
        )

    return SpeculationSubject(target.runner, proposer, target.vocabulary_size, target.stop_ids, 300)


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Create pico-draft with two token ids exchanged."""
    folder = tmp_path / "stranger"
    shutil.copytree(DRAFT, folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocab = raw["model"]["vocab"]
    names = {index: token for token, index in vocab.items()}
    vocab[names[700]], vocab[names[701]] = 701, 700
    path.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_check_says_that_a_pair_fits(mycli: Mycli) -> None:
    done = mycli("spec", "check", "pico", "pico-draft")
    assert done.returncode == 0 and "4,096 tokens" in done.stdout
    answer = json.loads(mycli("--json", "spec", "check", "pico", "pico-draft").stdout)
    assert answer["tokens"] == 4096 and answer["different"] == 0 and answer["rows"] == [4096, 4096]


@pytest.mark.parametrize(
    "arguments",
    [("spec", "check", "pico"), ("run", "pico", "Hi", "--draft"), ("chat", "pico", "--draft")],
    ids=lambda words: words[0] + words[1],
)
def test_a_stranger_is_refused_with_3_and_the_first_ids(
    arguments: tuple[str, ...], mycli: Mycli, stranger: Path
) -> None:
    """F15."""
    done = mycli(*arguments, str(stranger), input="Hi\n")
    assert done.returncode == 3 and "2 of 4096 ids differ (700 is " in done.stderr and done.stdout == ""


def test_verify_passes_on_the_shipped_pair(mycli: Mycli, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Tell me a story.\n\nThe man said that\n")
    call = ("spec", "verify", "pico", "pico-draft", "--prompts", str(tmp_path / "prompts.txt"), "--dtype", "fp32")
    answer = json.loads(mycli(*call, "-n", "12", "--draws", "500", "--json", *CPU).stdout)
    assert answer["prompts"] == 2 and answer["divergences"] == []
    assert answer["chi_squared"]["p_value"] > 1e-4 and answer["chi_squared"]["freedom"] > 5


def test_verify_fails_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spec_verify, "SMALLEST_P", 2.0)
    (tmp_path / "prompts.txt").write_text("Tell me a story.\n")
    call = ["spec", "verify", "pico", "pico-draft", "--prompts", str(tmp_path / "prompts.txt"), "-n", "4"]
    with pytest.raises(SystemExit) as end:
        main([*call, "--draws", "100", "--json", *CPU])
    answer = json.loads(capsys.readouterr().out)
    assert (
        end.value.code == 6
        and answer["prompts"] == 1
        and "distribution of sampled tokens differs" in answer["error"]["message"]
    )


def test_verify_needs_two_models(mycli: Mycli) -> None:
    assert mycli("spec", "verify", "pico", "ngram", *CPU).returncode == 2


def test_divergences_are_found_with_their_lead(
    loaded: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(loaded.tokenizer)["stories"][:2]
    assert list(greedy_divergences(subject(loaded, draft), asked, 10, 4)) == [None, None]
    best = Sampler.best
    # A faulty verification that takes the second most likely token of the third row.
    monkeypatch.setattr(Sampler, "best", lambda self, logits: [*best(self, logits)[:2], *logits[2:].topk(2)[1][:, 1]])
    found = list(greedy_divergences(subject(loaded, draft), asked, 10, 4))
    assert all(one is not None and one.margin > 0.001 and not one.tie and 0 < one.position < 10 for one in found)


@pytest.mark.slow
def test_a_wrong_distribution_is_found(
    loaded: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = subject(loaded, draft)
    prompt = least_certain(both, [ids for kind in prompts(loaded.tokenizer).values() for ids in kind])
    drawn = SamplingParams(temperature=1.0, top_k=8, seed=1)
    guess = DraftModel(draft.runner, CacheShape.contiguous(300), 1)
    assert chi_squared(both, guess, prompt, drawn, 1500).p_value > 1e-3
    monkeypatch.setattr(Sampler, "accept", lambda sampler, chances: len(chances))
    assert chi_squared(both, guess, prompt, drawn, 1500).p_value < 1e-6


def test_the_textbook_is_reproduced() -> None:
    for one in textbook():
        assert one.expected == pytest.approx((1 - one.acceptance ** (one.drafted + 1)) / (1 - one.acceptance))
        assert one.found == pytest.approx(one.expected, rel=0.06)


def test_compare_measures_both_ways(loaded: LoadedModel, draft: LoadedModel) -> None:
    asked = prompts(loaded.tokenizer)["stories"][:1]
    measured, made = subject(loaded, draft), list[int]()

    def new_proposer() -> Proposer:
        made.append(1)
        return measured.new_proposer()

    found = measure_speculation(replace(measured, new_proposer=new_proposer), asked, 24, 1)
    assert len(made) == 2 + len(found.lengths), "one for the lengths, then one for each engine: each has a cache"
    assert found.plain > 0 and found.drafted > 0
    assert [one.drafted for one in found.lengths] == list(LENGTHS), "those that the engine makes"
    assert replace(measured, new_proposer=PromptLookup).lengths() == LONG_LENGTHS
    assert all(one.acceptance > 0.5 and 1 < one.found <= 1 + one.drafted for one in found.lengths)


@pytest.fixture
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two draft lengths, not all that an engine chooses from, which takes seconds."""
    monkeypatch.setattr(speculation_benchmark, "SIMULATED_PASSES", 20)
    monkeypatch.setattr(speculation_benchmark, "draft_lengths", lambda *costs: draft_lengths(*costs)[:2])


@pytest.mark.usefixtures("few_lengths")
def test_bench_says_whether_it_pays(mycli: Mycli) -> None:
    done = mycli("bench", "draft", "pico", "pico-draft", "-n", "6", "-r", "1", "--json", *CPU)
    answer = json.loads(done.stdout)
    assert [row["text"] for row in answer["results"]] == ["chat", "stories", "book", "repetitive"]
    assert {row["verdict"] for row in answer["results"]} <= {"pays", "makes no difference", "does not pay"}
    assert len([row for row in answer["tokens_per_pass"] if row["text"] == "textbook"]) == 6
    assert answer["speedup"] > 0
    table = mycli("bench", "draft", "pico", "ngram", "-n", "6", "-r", "1", *CPU).stdout
    assert "speed-up" in table and "textbook" in table and "over all texts" in table
    assert mycli("bench", "pico", "--draft", "ngram", "--save", "x", *CPU).returncode == 2
    assert mycli("bench", "draft", "pico", "ngram", "-o", "csv", *CPU).returncode == 2


@pytest.mark.slow
@pytest.mark.usefixtures("few_lengths")
def test_bench_leaves_out_texts_whose_replies_end_at_once(mycli: Mycli, tmp_path: Path) -> None:
    folder = tmp_path / "ends"
    shutil.copytree(PICO, folder)
    first = {"chat": [342, 43, 1033], "stories": [1114, 1076, 35], "book": [400, 981, 675], "repetitive": [24, 15]}
    line = (
        "bench",
        "draft",
        str(folder),
        "ngram",
        "-n",
        "4",
        "-r",
        "1",
        "--json",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    )

    def run(*kinds: str) -> Any:
        stop = [token for kind in kinds for token in first[kind]]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
        return mycli(*line)

    partly = run("stories")
    assert [row["text"] for row in json.loads(partly.stdout)["results"]] == ["chat", "book", "repetitive"]
    assert "stories is not measured" in partly.stderr
    assert "ends every reply at the first token" in run(*first).stdout


def test_run_says_the_same_with_a_draft(mycli: Mycli) -> None:
    """F16: replies are equal with and without a draft; in fp32, where ties are rare."""
    call = ("run", "pico", "Tell me a story.", "-t", "0", "-n", "40", "--dtype", "fp32", "--json", "--logprobs", "2")
    plain, *drafted = (
        json.loads(mycli(*call, *CPU, "--draft", name).stdout) for name in ("none", "pico-draft", "ngram")
    )
    assert len(plain["text"]) > 50 and "draft" not in plain
    for reply in drafted:
        assert reply["text"] == plain["text"] and "draft" in reply
        assert [one["id"] for one in reply["logprobs"]] == [one["id"] for one in plain["logprobs"]]
        for one, other in zip(plain["logprobs"], reply["logprobs"], strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


def test_the_footer_of_a_chat_tells_of_the_draft(mycli: Mycli) -> None:
    done = mycli("chat", "pico", "-t", "0", "--draft", "pico-draft", "--device", "cpu", input="Tell me a story.\n")
    assert done.returncode == 0 and "· draft " in done.stderr


def test_constrained_output_is_not_speculated(mycli: Mycli) -> None:
    call = ("run", "pico", "How old is Leo?", "--regex", "Leo is [0-9]{1,2}", "--draft", "ngram", "--json", *CPU)
    answer = json.loads(mycli(*call).stdout)
    assert answer["text"].startswith("Leo is ") and answer["draft"]["passes"] == 0


def test_names_of_two_words(mycli: Mycli) -> None:
    assert reorder(["--json", "spec", "check", "a"]) == ["spec", "check", "--json", "a"]
    assert reorder(["run", "spec", "check"]) == ["run", "spec", "check"]
    for words in (["spec"], ["spec", "--help"]):
        assert "check" in mycli(*words).stdout and "verify" in mycli(*words).stdout
    wrong = mycli("spec", "cook")
    assert wrong.returncode == 2 and wrong.stderr == "error: no such command 'cook'\nhint: mycli spec --help\n"
