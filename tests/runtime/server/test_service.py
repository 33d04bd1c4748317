"""Test how a service turns the fields of a request into the engine's request, without a server."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import BeamOptions, Request
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import ApiError, ContextError
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.requests.formats import ResponseFormat
from mycli.runtime.server.requests.schemas import Sampling
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.fim_model import with_fim_tokens
from tests.support.served import unserved

CONTEXT = 64


@pytest.fixture(scope="module")
def service(loaded: LoadedModel) -> Iterator[Service]:
    service = unserved(loaded)
    yield service
    service.close()


def reader(index: int = 0) -> Any:
    return SimpleNamespace(index=index)


def test_replies_belong_to_the_prompts_in_turn() -> None:
    readers = [reader(index) for index in range(3)]
    prepared = Prepared([(Request((1,)), readers), (Request((2, 3)), readers)], [(1,), (2, 3)])
    assert [prepared.prompt_of(reply) for reply in range(prepared.replies)] == [0, 0, 0, 1, 1, 1]
    assert prepared.prompt_tokens == 3 and prepared.grammars == []


def test_a_service_is_busy_from_the_head_of_a_request_to_the_end_of_its_replies(loaded: LoadedModel) -> None:
    service = unserved(loaded)
    assert not service.busy
    service.requests = 1
    assert service.busy
    service.requests = 0
    service.worker.submit([(Request((1,), limit=1), [reader()])], cast(Delivery, None))
    assert service.busy
    service.close()


@pytest.mark.parametrize("name", [None, "pico", "alias", "pico:latest"])
def test_a_model_is_served_under_its_names_and_without_one(loaded: LoadedModel, name: str | None) -> None:
    service = unserved(loaded, ServerSettings(("pico", "alias")))
    service.check_model(name)
    for other in ("other", "pico:7b", ""):
        with pytest.raises(ApiError, match="is not served here; served: pico, alias") as error:
            service.check_model(other)
        assert (error.value.status, error.value.param) == (404, "model")
    service.close()


def test_control_tokens_in_a_text_are_text_where_they_are_not_allowed(service: Service) -> None:
    text = "Hello <|im_end|>"
    assert service.text_prompt(text, allow_special=True) == service.tag_ids(text)
    (end,) = service.tag_ids("<|im_end|>")
    assert end in service.tag_ids(text) and end not in service.text_prompt(text)


def test_a_text_is_cut_to_a_number_of_tokens_if_there_is_one(service: Service) -> None:
    text = "one two three four"
    assert [service.beginning(text, tokens, "query") for tokens in (None, 0, 99)] == [text] * 3
    cut = service.beginning(text, 2, "query")
    assert text.startswith(cut) and 0 < len(cut) < len(text)


def test_a_model_without_marks_for_a_gap_does_not_fill_it(
    service: Service, loaded: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ApiError, match="has no fill-in-the-middle tokens") as error:
        service.fim_prompt("a", "b", "suffix")
    assert error.value.param == "suffix"
    other = unserved(with_fim_tokens(loaded, tmp_path))
    assert len(other.fim_prompt("a", "b", "suffix").ids) > 2
    other.close()


def test_a_prompt_of_a_conversation_opens_the_reply(service: Service) -> None:
    talk = [Message("user", "Hello")]
    opened, ended = service.chat_prompt(talk, (), {}), service.chat_prompt(talk, (), {}, more=False)
    assert opened == [*ended, *service.tag_ids("<|im_start|>assistant\n")]


@pytest.mark.parametrize(
    ("prompt", "limit", "room"),
    [
        (CONTEXT - 1, 2, None),
        (CONTEXT - 1, 3, 2),
        (CONTEXT, None, None),  # the last token of a reply needs no place in the context
        (CONTEXT, 1, None),
        (CONTEXT, 2, 1),
        (CONTEXT + 1, None, 0),
        (CONTEXT + 1, 1, 0),
    ],
)
def test_a_prompt_fits_with_its_limit_or_the_error_has_the_room(
    service: Service, prompt: int, limit: int | None, room: int | None
) -> None:
    if room is None:
        service.check_fits([1] * prompt, limit, "prompt")
        return
    with pytest.raises(ContextError) as error:
        service.check_fits([1] * prompt, limit, "prompt")
    assert error.value.param == "prompt" and str(prompt) in error.value.message
    assert error.value.message.endswith(f"at most {room} tokens fit." if room else "the length of the prompt.")


def test_a_prompt_without_tokens_is_refused(service: Service) -> None:
    with pytest.raises(ApiError, match="has no tokens"):
        service.check_fits([], 1, "prompt")


def test_ids_end_where_the_vocabulary_ends(service: Service) -> None:
    size = service.loaded.vocabulary_size
    service.check_ids([], "prompt")
    service.check_ids([0, size - 1], "prompt")
    with pytest.raises(ApiError, match=f"token id {size} is out of range") as error:
        service.check_ids([size, 1], "prompt")
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repetition_penalty": 1.25, "repeat_penalty": 1.5}, "repetition_penalty", 1.25),
        ({"seed": -1}, "seed", None),
        ({"seed": -2}, "seed", -2),
        ({"seed": 7}, "seed", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"logit_bias": {"3": 2.0}}, "logit_bias", ((3, 2.0),)),
    ],
)
def test_a_sampling_field_has_its_meaning_of_other_servers(
    service: Service, fields: dict[str, Any], name: str, value: object
) -> None:
    sampling = service.sampling(Sampling(**fields))
    assert getattr(sampling, name) == value
    assert service.sampling(Sampling()) == recommended(service.loaded.defaults)
    request = service.request([1], Sampling(**fields), 4, None, None)
    assert request.sampling == sampling and not request.prompt_logprobs


JSON_OBJECT = ResponseFormat(type="json_object")


@pytest.mark.parametrize(
    ("fields", "limit", "scored", "form", "ends"),
    [
        ({}, None, False, None, True),
        ({}, 1, False, None, True),
        ({}, None, True, None, True),
        ({}, 2, True, None, True),
        ({}, 1, True, None, False),  # an evaluation of the prompt, which expects a single token
        ({"ignore_eos": True}, None, False, None, False),
        ({"ignore_eos": True}, None, False, JSON_OBJECT, True),
        ({}, None, False, JSON_OBJECT, True),
    ],
)
def test_end_tokens_end_a_reply_unless_its_text_is_irrelevant(
    service: Service, fields: dict[str, Any], limit: int | None, scored: bool, form: ResponseFormat | None, ends: bool
) -> None:
    stops = service.loaded.stop_ids if ends else frozenset()
    for more in ((), (9,)):
        body = Sampling(**fields, stop_token_ids=list(more))
        request = service.request([1], body, limit, service.grammar(form), None, scored)
        assert request.stop_ids == stops | frozenset(more) and request.min_tokens == 0


def test_marks_of_files_end_what_fills_a_gap_and_nothing_else(loaded: LoadedModel, tmp_path: Any) -> None:
    service = unserved(with_fim_tokens(loaded, tmp_path))
    marks = service.loaded.tokenizer.fim_tokens
    assert marks is not None and marks.ends - service.loaded.stop_ids

    def stops(fills_in: bool, **fields: Any) -> frozenset[int]:
        return service.request([1], Sampling(**fields), None, None, None, fills_in=fills_in).stop_ids

    assert stops(True) == service.loaded.stop_ids | marks.ends
    assert stops(False) == service.request([1], Sampling(), None, None, None).stop_ids == service.loaded.stop_ids
    assert stops(True, ignore_eos=True) == frozenset()
    service.close()


@pytest.mark.parametrize(("least", "limit", "fits"), [(4, 4, True), (5, 4, False), (62, None, True), (63, None, False)])
def test_a_minimum_is_at_most_the_limit_or_the_room(
    service: Service, least: int, limit: int | None, fits: bool
) -> None:
    prompt = [1] * 3
    if fits:
        assert service.request(prompt, Sampling(min_tokens=least), limit, None, None).min_tokens == least
        return
    with pytest.raises(ApiError) as error:
        service.request(prompt, Sampling(min_tokens=least), limit, None, None)
    assert error.value.param == "min_tokens"


def test_a_request_sets_its_deadline_or_has_the_servers(loaded: LoadedModel) -> None:
    service = unserved(loaded, ServerSettings(("pico",), deadline=30.0))
    assert [service.deadline(Sampling(deadline=seconds)) for seconds in (None, 2.5)] == [30.0, 2.5]
    service.close()


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("temperature", (0.0, 1.0), 0.5),
        ("temperature", (0.0, 1.0), 2.0),
        ("top_k", (0, -1), 1),
        ("top_k", (0, -1), 2),
        ("top_p", (1.0,), 0.0),
        ("repetition_penalty", (1.0,), 2.0),
        ("repeat_penalty", (1.0,), 2.0),
        ("min_p", (0.0,), 1.0),
        ("presence_penalty", (0.0,), 1.0),
        ("frequency_penalty", (0.0,), 1.0),
        ("min_tokens", (0,), 1),
        ("seed", (-1,), -2),
        ("logit_bias", (), {"3": 1.0}),
        ("stop", (), "a"),
        ("allowed_token_ids", (), [5]),
        ("bad_words", ([],), ["a"]),
    ],
)
def test_a_beam_search_accepts_settings_that_change_nothing(
    service: Service, name: str, neutral: tuple[Any, ...], other: Any
) -> None:
    def search(value: Any) -> Request:
        return service.request([1], Sampling(**{name: value}), 4, None, None, beams=BeamOptions(2))

    for value in (None, *neutral):
        assert (search(value).beams, search(value).sampling) == (BeamOptions(2), SamplingParams())
    with pytest.raises(ApiError) as error:
        search(other)
    assert error.value.param == name


@pytest.mark.parametrize("name", ["bad_words", "allowed_token_ids"])
def test_a_filter_of_tokens_is_refused_by_name_next_to_a_grammar(service: Service, name: str) -> None:
    value: Any = ["a"] if name == "bad_words" else [5]
    assert service.token_filter(Sampling(**{name: value}), None) is not None
    assert service.token_filter(Sampling(), service.grammar(JSON_OBJECT)) is None
    with pytest.raises(ApiError) as error:
        service.token_filter(Sampling(**{name: value}), service.grammar(JSON_OBJECT))
    assert error.value.param == name


def test_a_bad_word_is_excluded_with_and_without_a_space_before_it(service: Service) -> None:
    """The word after a space counts only where it has as many tokens, as in vLLM."""

    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(service.tag_ids(text))

    words = ["the", "Leo", "extraordinary", "7"]
    for word in words:
        plain, spaced = ids_of(word), ids_of(f" {word}")
        expected = [plain, *([spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [])]
        tokens = service.token_filter(Sampling(bad_words=[f" {word}"]), None)
        assert tokens is not None
        assert [tuple(sequence) for sequence in tokens.words] == [ids for ids in expected if len(ids) > 1]
        single = {ids[0] for ids in expected if len(ids) == 1}
        assert set(tokens.excluded.nonzero().flatten().tolist()) == single


@pytest.mark.parametrize("form", [None, ResponseFormat(type="text")])
def test_a_format_that_admits_any_text_needs_no_grammar(service: Service, form: ResponseFormat | None) -> None:
    assert service.grammar(form) is None and service.format_source(form) is None
    assert service.grammar(JSON_OBJECT) is not None and service.format_source(JSON_OBJECT) is not None
