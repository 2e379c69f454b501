"""Conversations and tools to messages of baton.v1 and back."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.request.request import ChatPrompt, Message, Tool, ToolCall, ToolUse
from baton.v1 import tokenizer_pb2, types_pb2


def chat_to_proto(chat: ChatPrompt) -> tokenizer_pb2.Chat:
    """All that a chat template sees of it: no tools where none may be called."""
    tools = chat.tools if chat.tool_choice.use is not ToolUse.NONE else ()
    return tokenizer_pb2.Chat(
        messages=[message_to_proto(message) for message in chat.messages],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=[tool_to_proto(tool) for tool in tools],
        template_kwargs=chat.template_kwargs,
        template=chat.template,
    )


def chat_from_proto(message: tokenizer_pb2.Chat) -> ChatPrompt:
    return ChatPrompt(
        messages_from_proto(message.messages),
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
        tools=tools_from_proto(message.tools),
        template_kwargs=message.template_kwargs,
        template=message.template,
    )


def messages_from_proto(
    messages: Iterable[tokenizer_pb2.ChatMessage],
) -> tuple[Message, ...]:
    return tuple(
        Message(
            message.role,
            message.content,
            tool_calls=tuple(
                ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls
            ),
            tool_call_id=message.tool_call_id,
            name=message.name,
            reasoning=message.reasoning,
        )
        for message in messages
    )


def tools_from_proto(tools: Iterable[types_pb2.Tool]) -> tuple[Tool, ...]:
    return tuple(Tool(tool.name, tool.description, tool.parameters) for tool in tools)


def message_to_proto(message: Message) -> tokenizer_pb2.ChatMessage:
    calls = [
        types_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.tool_calls
    ]
    return tokenizer_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def tool_to_proto(tool: Tool) -> types_pb2.Tool:
    return types_pb2.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
