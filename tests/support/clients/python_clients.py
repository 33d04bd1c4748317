"""One turn, a tool loop and a structured answer with each Python client: python python_clients.py NAME URL MODEL.

The server forces a tool call in the first turn of a conversation with tools. Exits with an error if a client does not
complete; the model's text is not checked.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

QUESTION = "Which files are there?"


class Answer(BaseModel):
    """A structured answer."""

    name: str
    size: int


def list_files(path: str) -> str:
    """List the files of a folder.

    Args:
        path: The folder.
    """
    called.append(path)
    return "a.txt, b.txt"


called: list[str] = []


def openai_agents(url: str, model: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        settings = ModelSettings(temperature=0, max_tokens=200)
        common: dict[str, Any] = {"model": kind(model, client), "model_settings": settings}
        agent = Agent(name="a", instructions="Be brief.", tools=[function_tool(list_files)], **common)
        assert Runner.run_sync(agent, QUESTION).final_output
        typed = Agent(
            name="b", instructions="Be brief.", tools=[function_tool(list_files)], output_type=Answer, **common
        )
        assert isinstance(Runner.run_sync(typed, QUESTION).final_output, Answer)


def pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    models: list[Any] = [
        OpenAIChatModel(model, provider=provider),
        OpenAIResponsesModel(model, provider=provider),
        AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="any")),
    ]
    settings: Any = {"max_tokens": 200, "temperature": 0}
    for one in models:
        assert Agent(one, tools=[list_files], model_settings=settings).run_sync(QUESTION).output
        agent = Agent(one, output_type=ToolOutput(Answer), model_settings=settings)
        assert isinstance(agent.run_sync(QUESTION).output, Answer)
        if not isinstance(one, AnthropicModel):  # the client uses another format for models that are not Anthropic's
            agent = Agent(one, output_type=NativeOutput(Answer), tools=[list_files], model_settings=settings)
            assert isinstance(agent.run_sync(QUESTION).output, Answer)


def langchain_openai(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        chat = ChatOpenAI(
            model=model, base_url=f"{url}/v1", api_key="any", temperature=0, max_tokens=200, use_responses_api=responses
        )
        assert chat.invoke(QUESTION).text and "".join(chunk.text for chunk in chat.stream(QUESTION))
        assert chat.bind_tools([list_files], tool_choice="required").invoke(QUESTION).tool_calls
        for method in ("json_schema", "function_calling"):
            assert isinstance(chat.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)


def langchain_anthropic(url: str, model: str) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key="any", max_tokens=200)
    assert chat.invoke(QUESTION).text and "".join(chunk.text for chunk in chat.stream(QUESTION))
    assert chat.bind_tools([list_files], tool_choice="any").invoke(QUESTION).tool_calls
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)


def langgraph(url: str, model: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="any", temperature=0, max_tokens=200)
    state = create_agent(chat, tools=[list_files]).invoke({"messages": [("user", QUESTION)]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]


def litellm(url: str, model: str) -> None:
    import litellm as client

    talk = [{"role": "user", "content": QUESTION}]
    for prefix, base in (("openai", f"{url}/v1"), ("anthropic", url), ("hosted_vllm", f"{url}/v1")):
        common: dict[str, Any] = {"model": f"{prefix}/{model}", "api_base": base, "api_key": "any", "max_tokens": 200}
        assert client.completion(messages=talk, **common).choices[0].message.content
        stream = client.completion(messages=talk, stream=True, **common)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    long = [{"role": "user", "content": "word " * 200_000}]
    try:
        client.completion(model=f"openai/{model}", api_base=f"{url}/v1", api_key="any", messages=long)
    except client.ContextWindowExceededError:
        return
    raise AssertionError("the context error is not recognized")


def instructor(url: str, model: str) -> None:
    import instructor as client
    from openai import OpenAI

    for mode in (client.Mode.TOOLS, client.Mode.JSON_SCHEMA):  # other modes only describe the schema to the model
        chat = client.from_openai(OpenAI(base_url=f"{url}/v1", api_key="any"), mode=mode)
        answer = chat.chat.completions.create(
            model=model, response_model=Answer, messages=[{"role": "user", "content": QUESTION}], max_tokens=300
        )
        assert isinstance(answer, Answer)


def smolagents(url: str, model: str) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    chat = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="any", max_tokens=200)
    assert chat([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]).content
    agent = ToolCallingAgent(tools=[tool(list_files)], model=chat, max_steps=3)
    agent.run(QUESTION)


def llama_index(url: str, model: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
        context_window=100_000,
    )
    assert chat.complete(QUESTION).text and "".join(part.delta or "" for part in chat.stream_complete(QUESTION))
    assert isinstance(chat.as_structured_llm(Answer).complete(QUESTION).raw, Answer)

    async def run() -> None:
        assert str(await FunctionAgent(tools=[list_files], llm=chat, streaming=True).run(QUESTION))

    asyncio.run(run())


def haystack(url: str, model: str) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    chat = OpenAIChatGenerator(
        model=model,
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token("any"),
        generation_kwargs={"max_completion_tokens": 200},
    )
    assert chat.run([ChatMessage.from_user(QUESTION)])["replies"][0].text
    agent = Agent(chat_generator=chat, tools=[create_tool_from_function(list_files)])
    assert agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"][-1].text


def autogen(url: str, model: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown"}
    info["structured_output"] = True

    async def run() -> None:
        client = OpenAIChatCompletionClient(
            model=model, base_url=f"{url}/v1", api_key="any", model_info=info, max_tokens=200
        )
        agent = AssistantAgent("a", client, tools=[list_files], reflect_on_tool_use=True)
        assert (await agent.run(task=QUESTION)).messages[-1]
        await client.close()

    asyncio.run(run())


def outlines(url: str, model: str) -> None:
    import outlines as client
    from openai import OpenAI

    openai = OpenAI(base_url=f"{url}/v1", api_key="any")
    for build in (client.from_openai, client.from_vllm, client.from_sglang):
        chat = build(openai, model)
        limit: dict[str, Any] = {"max_tokens": 200}
        assert Answer.model_validate_json(chat(QUESTION, Answer, **limit))
        assert chat(QUESTION, **limit)
        if build is not client.from_openai:
            assert chat(QUESTION, client.types.Regex("[0-9]{3}"), **limit).isdigit()
            assert chat(QUESTION, client.types.Choice(["yes", "no"]), **limit) in ("yes", "no")
            grammar = client.types.CFG(
                'root ::= "yes" | "no"' if build is client.from_sglang else 'start: "yes" | "no"'
            )
            assert chat(QUESTION, grammar, **limit) in ("yes", "no")


def dspy(url: str, model: str) -> None:
    import dspy as client

    chat = client.LM(f"openai/{model}", api_base=f"{url}/v1", api_key="any", max_tokens=200, cache=False)
    assert chat(QUESTION)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}}
    assert Answer.model_validate_json(chat(QUESTION, response_format=form)[0])


def mistralai(url: str, model: str) -> None:
    try:
        from mistralai.client import Mistral
    except ImportError:
        from mistralai import Mistral

    client = Mistral(api_key="any", server_url=url)
    assert client.models.list().data
    talk: Any = [{"role": "user", "content": QUESTION}]
    answer = client.chat.complete(model=model, messages=talk, max_tokens=200)
    assert answer.choices[0].message.content
    tool = {
        "type": "function",
        "function": {
            "name": "list_files",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    call = client.chat.complete(model=model, messages=talk, tools=[tool], tool_choice="any", max_tokens=200)
    assert call.choices[0].message.tool_calls
    with client.chat.stream(model=model, messages=talk, max_tokens=20) as stream:
        assert list(stream)


def guidance(url: str, model: str) -> None:
    from guidance import assistant, gen, models, user

    chat = models.OpenAI(model, base_url=f"{url}/v1", api_key="any")
    with user():
        chat += QUESTION
    with assistant():
        chat += gen("answer", max_tokens=20)
    assert chat["answer"]


def semantic_kernel(url: str, model: str) -> None:
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Files:
        @kernel_function
        def list_files(self, path: str) -> str:
            """List the files of a folder."""
            return list_files(path)

    async def run() -> None:
        service = OpenAIChatCompletion(ai_model_id=model, async_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="any"))
        agent = ChatCompletionAgent(service=service, name="a", instructions="Be brief.", plugins=[Files()])
        assert str(await agent.get_response(messages=QUESTION))

    asyncio.run(run())


def llm(url: str, model: str) -> None:
    from llm.default_plugins.openai_models import Chat

    chat = Chat(model_id="own", model_name=model, api_base=f"{url}/v1", supports_tools=True, supports_schema=True)
    chat.key = "any"
    assert chat.prompt(QUESTION, stream=False).text() and "".join(chat.prompt(QUESTION))
    assert Answer.model_validate_json(chat.prompt(QUESTION, schema=Answer, stream=False).text())
    assert chat.chain(QUESTION, tools=[list_files], key="any").text()


def langchain_ollama(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama

    chat = ChatOllama(model=model, base_url=url, num_predict=32, temperature=0)
    assert chat.invoke([HumanMessage(QUESTION)]).response_metadata["done"]
    assert "".join(str(part.content) for part in chat.stream(QUESTION)) is not None
    assert chat.bind_tools([tool(list_files)]).invoke(QUESTION).usage_metadata is not None
    shaped = chat.with_structured_output(Answer.model_json_schema(), method="json_schema", include_raw=True)
    assert shaped.invoke(QUESTION)["raw"].content.startswith("{")


def litellm_ollama(url: str, model: str) -> None:
    import litellm

    for prefix in ("ollama", "ollama_chat"):
        arguments: dict[str, Any] = {"model": f"{prefix}/{model}", "api_base": url, "max_tokens": 24}
        messages = [{"role": "user", "content": QUESTION}]
        reply = litellm.completion(messages=messages, **arguments)
        assert reply.usage.completion_tokens > 0
        parts = list(litellm.completion(messages=messages, stream=True, **arguments))
        assert parts[-1].choices[0].finish_reason


def aider(url: str, model: str) -> None:
    options = ["--model", f"openai/{model}", "--openai-api-base", f"{url}/v1", "--no-git", "--yes", "--no-check-update"]
    options += ["--no-show-model-warnings", "--no-analytics", "--message", QUESTION]
    done = subprocess.run([sys.executable, "-m", "aider", *options], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr


def llm_ollama(url: str, model: str) -> None:
    os.environ["OLLAMA_HOST"] = url
    import llm as client

    chat = client.get_model(f"ollama/{model}")  # Ollama's name after its own prefix
    assert chat.prompt(QUESTION, stream=False, num_predict=24).text()
    assert "".join(chat.prompt(QUESTION, num_predict=24))
    assert chat.prompt(QUESTION, schema=Answer.model_json_schema(), stream=False, num_predict=64).text().startswith("{")
    assert chat.prompt(QUESTION, tools=[list_files], stream=False, num_predict=24).text() is not None


# Client -> the packages that it needs, and whether its tool must have been called.
CLIENTS: dict[str, tuple[Callable[[str, str], None], tuple[str, ...], bool]] = {
    "openai-agents": (openai_agents, ("openai-agents",), True),
    "pydantic-ai": (pydantic_ai, ("pydantic-ai-slim[openai,anthropic]",), True),
    "langchain-openai": (langchain_openai, ("langchain-openai",), False),
    "langchain-anthropic": (langchain_anthropic, ("langchain-anthropic",), False),
    "langgraph": (langgraph, ("langgraph", "langchain", "langchain-openai"), True),
    "litellm": (litellm, ("litellm",), False),
    "instructor": (instructor, ("instructor",), False),
    "smolagents": (smolagents, ("smolagents[openai]",), False),
    "llama-index": (llama_index, ("llama-index-core", "llama-index-llms-openai-like"), True),
    "haystack": (haystack, ("haystack-ai",), True),
    "autogen-agentchat": (autogen, ("autogen-agentchat", "autogen-ext[openai]"), True),
    "outlines": (outlines, ("outlines", "openai"), False),
    "dspy": (dspy, ("dspy",), False),
    "mistralai": (mistralai, ("mistralai",), False),
    "guidance": (guidance, ("guidance", "openai"), False),
    "semantic-kernel": (semantic_kernel, ("semantic-kernel",), True),
    "llm": (llm, ("llm",), True),
    "aider": (aider, ("aider-chat",), False),
    "langchain-ollama": (langchain_ollama, ("langchain-ollama",), False),
    "litellm ollama": (litellm_ollama, ("litellm",), False),
    "llm-ollama": (llm_ollama, ("llm", "llm-ollama"), False),
}

if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "any")
    run_client, _, calls_tool = CLIENTS[sys.argv[1]]
    run_client(sys.argv[2], sys.argv[3])
    assert called or not calls_tool, "the tool was not called"
    print("completed")
