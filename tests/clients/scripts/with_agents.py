"""What agents of four libraries do with tools, from the question to the last answer.

`python with_agents.py LIBRARY API` prints what was called and what was answered, as JSON. API:
`chat` or `responses`.
"""

import json
import os
import sys

LIBRARY, API = sys.argv[1:]
RESPONSES = API == "responses"
MODEL, BASE = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
WEATHER = "It is sunny and 21 degrees."
QUESTION = "What is the weather in Paris?"
PERSON = "Ada is 36 years old."
called = []


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    called.append(["get_weather", {"city": city}])
    return WEATHER


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    called.append(["multiply", {"a": a, "b": b}])
    return a * b


def langchain():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, temperature=0, use_responses_api=RESPONSES)
    agent = create_agent(model, tools=[get_weather, multiply])

    def ask(question):
        state = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 8})
        return state["messages"][-1].text

    return [ask(QUESTION), ask("What is 213 * 47?")]


def openai_agents():
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
    kind = OpenAIResponsesModel if RESPONSES else OpenAIChatCompletionsModel
    agent = Agent(
        name="Assistant",
        instructions="You are a helpful assistant.",
        model=kind(model=MODEL, openai_client=AsyncOpenAI()),
        model_settings=ModelSettings(temperature=0),
        tools=[function_tool(get_weather), function_tool(multiply)],
    )
    questions = (QUESTION, "What is 213 * 47?")
    return [Runner.run_sync(agent, question, max_turns=4).final_output for question in questions]


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    kind = OpenAIResponsesModel if RESPONSES else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE))
    agent = Agent(
        model, tools=[get_weather, multiply], model_settings={"temperature": 0, "max_tokens": 200}
    )
    limits = UsageLimits(request_limit=4)
    questions = (QUESTION, "What is 213 * 47?")
    return [agent.run_sync(question, usage_limits=limits).output for question in questions]


def instructor():
    import instructor as library
    import openai
    from pydantic import BaseModel, field_validator

    class Person(BaseModel):
        name: str
        age: int

        @field_validator("age")
        @classmethod
        def rounded(cls, age: int) -> int:
            called.append(["Person", {"age": age}])
            if age % 10:
                raise ValueError(f"age must be {round(age, -1)}")
            return age

    mode = library.Mode.RESPONSES_TOOLS if RESPONSES else library.Mode.TOOLS
    client = library.from_openai(openai.OpenAI(), mode=mode)
    most = {"max_output_tokens": 200} if RESPONSES else {"max_tokens": 200}
    person = client.create(
        model=MODEL,
        temperature=0,
        **most,
        response_model=Person,
        max_retries=2,
        messages=[{"role": "user", "content": PERSON}],
    )
    return [person.name, person.age]


run = {
    "langchain": langchain,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "instructor": instructor,
}
answers = run[LIBRARY]()
print(json.dumps({"called": called, "answers": answers}))
