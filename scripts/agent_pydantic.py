#!/usr/bin/env python3
"""Episodes of the calculator's task that the agent loop of pydantic-ai plays, which knows nothing of training:

    PYTHON -m pip install 'pydantic-ai-slim[openai]==2.68.0'
    colo-grpo --config configs/calculator.toml tools=[] agent=scripts/agent_pydantic.py:play reward.python=PYTHON

An agent of your own takes the place of the one here: all that it is given is the base_url.
"""

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


async def play(row, base_url):
    """The run's rewards judge the last answer, also of an episode that the loop gave up."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    try:
        await Agent(model, tools=[add]).run(row["prompt"][-1]["content"], usage_limits=UsageLimits(request_limit=3))
    except AgentRunError:
        pass  # a call of no tool, or one request too many
