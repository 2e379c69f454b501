"""What agents of four libraries do with tools, from the question to the last answer.

`python with_agents.py LIBRARY` prints what was called and what was answered, as JSON.
"""

import json
import os
import sys

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

    agent = create_agent(ChatOpenAI(model=MODEL, temperature=0), tools=[get_weather, multiply])

    def ask(question):
        state = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 8})
        return state["messages"][-1].content

    return [ask(QUESTION), ask("What is 213 * 47?")]


def openai_agents():
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    agent = Agent(
        name="Assistant",
        instructions="You are a helpful assistant.",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI()),
        model_settings=ModelSettings(temperature=0),
        tools=[function_tool(get_weather), function_tool(multiply)],
    )
    questions = (QUESTION, "What is 213 * 47?")
    return [Runner.run_sync(agent, question, max_turns=4).final_output for question in questions]


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE))
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

    client = library.from_openai(openai.OpenAI(), mode=library.Mode.TOOLS)
    person = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=200,
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
answers = run[sys.argv[1]]()
print(json.dumps({"called": called, "answers": answers}))
