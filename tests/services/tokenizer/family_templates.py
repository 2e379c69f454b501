"""Short chat templates that write an assistant's turn as those of model families do.

Markers, white space and order of an assistant's reasoning, content and calls are those of the
templates that the families publish with their models on Hugging Face (`chat_template.jinja`, or the
field of `tokenizer_config.json`):

    hermes         NousResearch/Hermes-3-Llama-3.1-8B, Qwen/Qwen3-8B, ibm-granite/granite-4.0
    qwen3_coder    Qwen/Qwen3-Coder-30B-A3B-Instruct (words of Python), Qwen/Qwen3.5 (of JSON)
    deepseek       deepseek-ai/DeepSeek-V3-0324, -R1, -V3.1; these join arguments as text
    glm            zai-org/GLM-4.5, GLM-4.7
    kimi_k2        moonshotai/Kimi-K2-Thinking
    llama          meta-llama/Llama-3.1-8B-Instruct, Llama-4-Scout-17B-16E-Instruct, and the
                   pythonic templates for Llama 3.2 and 4 in vLLM's examples
    mistral        mistralai/Mistral-7B-Instruct-v0.3, Magistral and Mistral Small 3.2
    harmony        openai/gpt-oss-20b, and the document on harmony in openai/harmony
    gemma          google/gemma-4-31b-it, google/functiongemma-270m-it
    granite        ibm-granite/granite-3.2-8b-instruct
    minimax        MiniMaxAI/MiniMax-M1-80k, MiniMax-M2
"""

# ruff: noqa: E501 - a line of a template stays on one line

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A family's template, and what it shows."""

    template: str
    tools: str
    """The name of the format of calls."""
    reasoning: str
    """The name of the format of reasoning."""
    end: str
    """What ends a turn; the model writes it as a token that stops it."""
    reasons: bool = True
    """Whether the template shows the reasoning of a turn with calls."""
    content: bool = True
    """Whether the template shows content before calls."""
    most_calls: int = 9
    """The template shows so many calls of one turn."""
    bare: str = ""
    """Where the template begins every turn of an assistant with reasoning: what stands there
    without any."""


def _turns(user: str, assistant: str, prompt: str, result: str) -> str:
    return (
        "{%- if tools %}{{ tools | tojson }}{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'user' %}" + user + "{%- elif m.role == 'assistant' %}" + assistant +
        "{%- else %}" + result + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}" + prompt + "{%- endif %}"
    )  # fmt: skip


_IM_USER = "{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
_IM_RESULT = "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
_THINK = "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"

_HERMES = _turns(
    _IM_USER,
    "{{- '<|im_start|>assistant\\n' }}" + _THINK + "{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- if (loop.first and m.content) or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}",
    "{{- '<|im_start|>assistant\\n' }}",
    _IM_RESULT,
)


def _qwen_coder(value: str) -> str:
    return _turns(
        _IM_USER,
        "{{- '<|im_start|>assistant\\n' }}" + _THINK + "{{- m.content }}"
        "{%- for c in m.tool_calls or [] %}"
        "{%- if loop.first %}{{- '\\n\\n' if m.content else '' }}{%- else %}{{- '\\n' }}{%- endif %}"
        "{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
        "{%- for k, v in c.function.arguments | items %}"
        "{{- '<parameter=' + k + '>\\n' }}" + value + "{{- '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}",
        _IM_RESULT,
    )


_PYTHON_WORDS = (
    "{{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
)
_JSON_WORDS = "{{- v if v is string else v | tojson }}"


def _deepseek(call: str, between: str) -> str:
    return _turns(
        "{{- '<｜User｜>' + m.content }}",
        "{{- '<｜Assistant｜>' }}{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
        "{{- m.content }}{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}"
        "{%- for tool in m.tool_calls %}{%- if not loop.first %}" + between + "{%- endif %}"
        "{{- '<｜tool▁call▁begin｜>' + " + call + " + '<｜tool▁call▁end｜>' }}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜>' }}{%- endif %}{{- '<｜end▁of▁sentence｜>' }}",
        "{{- '<｜Assistant｜>' }}",
        "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}",
    )


_DEEPSEEK_V3 = _deepseek(
    "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + "
    "tool['function']['arguments'] + '\\n' + '```'",
    "{{- '\\n' }}",
)
_DEEPSEEK_V31 = _deepseek(
    "tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']", ""
)


def _glm(before: str, pairs: str) -> str:
    return _turns(
        "{{- '<|user|>\\n' + m.content }}",
        "{{- '<|assistant|>' }}"
        "{%- if m.reasoning_content %}{{- '\\n<think>' + m.reasoning_content + '</think>' }}"
        "{%- else %}{{- '\\n<think></think>' }}{%- endif %}"
        "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
        "{%- for tc in m.tool_calls or [] %}{{- '"
        + before
        + "<tool_call>' + tc.function.name }}"
        + pairs
        + "</tool_call>{%- endfor %}{{- '<|user|>' }}",
        "{{- '<|assistant|>' }}",
        "{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
    )


_GLM_VALUE = "{{ v | tojson(ensure_ascii=False) if v is not string else v }}"
_GLM45 = _glm(
    "\\n",
    "\n{% set _args = tc.function.arguments %}\n{% for k, v in _args.items() %}\n"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _GLM_VALUE + "</arg_value>\n{% endfor %}\n",
)
_GLM47 = _glm(
    "",
    "{% set _args = tc.function.arguments %}{% for k, v in _args.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>" + _GLM_VALUE + "</arg_value>{% endfor %}",
)

_KIMI = _turns(
    "{{- '<|im_user|>user<|im_middle|>' + m.content + '<|im_end|>' }}",
    "{{- '<|im_assistant|>assistant<|im_middle|>' }}"
    "{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{{- m.content }}"
    "{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    "{%- for c in m.tool_calls %}{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}"
    "{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"
    "{{- '<|im_end|>' }}",
    "{{- '<|im_assistant|>assistant<|im_middle|>' }}",
    "{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + '<|im_end|>' }}",
)


def _llama(calls: str, header: tuple[str, str], end: str) -> str:
    begin, close = header
    head = f"'{begin}assistant{close}\\n\\n'"
    return _turns(
        "{{- '" + begin + "user" + close + "\\n\\n' + m.content + '" + end + "' }}",
        "{{- "
        + head
        + " }}{%- if m.tool_calls %}"
        + calls
        + "{%- else %}{{- m.content }}{%- endif %}"
        "{{- '" + end + "' }}",
        "{{- " + head + " }}",
        "{{- '" + begin + "ipython" + close + "\\n\\n' + m.content + '" + end + "' }}",
    )


_LLAMA_3_TAGS = ("<|start_header_id|>", "<|end_header_id|>")
_LLAMA_4_TAGS = ("<|header_start|>", "<|header_end|>")
_LLAMA_3 = _llama(
    '{#- Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. #}'
    "{%- for c in m.tool_calls %}{%- if not loop.first %}{{- '; ' }}{%- endif %}"
    "{{- '{\"name\": \"' + c.function.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- c.function.arguments | tojson }}{{- '}' }}{%- endfor %}",
    _LLAMA_3_TAGS,
    "<|eot_id|>",
)
_LLAMA_4 = _llama(
    "{{- '<|python_start|>' }}{{- m.content }}{{- '<|python_end|>' }}"
    "{%- for c in m.tool_calls %}{{- '{\"name\": \"' + c.function.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- c.function.arguments | tojson }}{{- '}' }}{%- endfor %}",
    _LLAMA_4_TAGS,
    "<|eot|>",
)


def _pythonic(begin: str, end: str) -> str:
    # Values as vLLM's templates write them: strings in quotes, and what else there is as JSON.
    return (
        "{#- [func_name1(params_name1=params_value1), func_name2(params)] #}{{- '" + begin + "[' }}"
        "{%- for c in m.tool_calls %}{{- c.function.name + '(' }}"
        "{%- for k, v in c.function.arguments | items %}{{- k + '=' }}{{- v | tojson }}"
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']" + end + "' }}"
    )


def _mistral(calls: str) -> str:
    return _turns(
        "{{- '[INST]' + m.content + '[/INST]' }}",
        "{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}"
        "{{- m.content }}{%- if m.tool_calls %}" + calls + "{%- endif %}{{- '</s>' }}",
        "",
        "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}",
    )


_MISTRAL_LIST = _mistral(
    "{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{- ', \"id\": \"' + c.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}"
)
_MISTRAL_NAMED = _mistral(
    "{%- for c in m.tool_calls %}{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{- c.function.arguments | tojson }}{%- endfor %}"
)

_HARMONY = _turns(
    "{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}",
    "{%- if m.tool_calls %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both') }}"
    "{%- elif m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{%- endif %}{%- set c = m.tool_calls[0].function %}{{- '<|start|>assistant to=functions.' + c.name }}"
    "{{- '<|channel|>commentary json<|message|>' + c.arguments | tojson + '<|call|>' }}"
    "{%- else %}{%- if m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- endif %}",
    "{{- '<|start|>assistant' }}",
    "{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}",
)


def _gemma(turn: tuple[str, str], call: tuple[str, str], quote: str, thinks: str) -> str:
    value = (
        "{%- macro value(v) -%}{%- if v is string -%}{{- '" + quote + "' + v + '" + quote + "' -}}"
        "{%- elif v is boolean -%}{{- 'true' if v else 'false' -}}"
        "{%- elif v is mapping -%}{{- '{' -}}{%- for k, w in v | dictsort -%}"
        "{{- k + ':' -}}{{- value(w) -}}{{- ',' if not loop.last else '' -}}{%- endfor -%}{{- '}' -}}"
        "{%- elif v is sequence -%}{{- '[' -}}{%- for w in v -%}{{- value(w) -}}"
        "{{- ',' if not loop.last else '' -}}{%- endfor -%}{{- ']' -}}"
        "{%- else -%}{{- v | tojson -}}{%- endif -%}{%- endmacro -%}"
    )
    return value + _turns(
        "{{- '" + turn[0] + "user\\n' + m.content + '" + turn[1] + "\\n' }}",
        "{{- '" + turn[0] + "model\\n' }}" + thinks + "{{- m.content }}"
        "{%- for c in m.tool_calls or [] %}{{- '" + call[0] + "call:' + c.function.name }}"
        "{{- value(c.function.arguments) }}{{- '"
        + call[1]
        + "' }}{%- endfor %}{{- '"
        + turn[1]
        + "\\n' }}",
        "{{- '" + turn[0] + "model\\n' }}",
        "{{- '<response>' + m.content }}",
    )


_GEMMA_4 = _gemma(
    ("<|turn>", "<turn|>"),
    ("<|tool_call>", "<tool_call|>"),
    '<|"|>',
    "{%- if m.reasoning_content %}{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{%- endif %}",
)
_FUNCTIONGEMMA = _gemma(
    ("<start_of_turn>", "<end_of_turn>"),
    ("<start_function_call>", "<end_function_call>"),
    "<escape>",
    "",
)

_GRANITE = _turns(
    "{{- '<|start_of_role|>user<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}",
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}"
    "{%- if m.reasoning_content %}{{- 'Here is my thought process:\\n\\n' + m.reasoning_content + '\\n\\nHere is my response:\\n\\n' }}{%- endif %}"
    "{{- m.content }}{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for c in m.tool_calls %}"
    "{{- '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}{{- '<|end_of_text|>\\n' }}",
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}",
    "{{- '<|start_of_role|>tool_response<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}",
)


def _minimax(calls: str) -> str:
    return _turns(
        "{{- ']~b]user\\n' + m.content + '[e~[\\n' }}",
        "{{- ']~b]ai\\n' }}"
        + _THINK
        + "{{- m.content }}{%- if m.tool_calls %}"
        + calls
        + "{%- endif %}{{- '[e~[\\n' }}",
        "{{- ']~b]ai\\n<think>\\n' }}",
        "{{- ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}",
    )


_MINIMAX_M2 = _minimax(
    "{{- '\\n<minimax:tool_call>\\n' }}{%- for c in m.tool_calls %}"
    "{{- '<invoke name=\"' + c.function.name + '\">' }}\n"
    "{% set _args = c.function.arguments %}{%- for k, v in _args.items() %}\n"
    "{{- '<parameter name=\"' + k + '\">' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}"
    "{{- '</parameter>' }}\n{% endfor %}{{- '</invoke>' ~ '\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}"
)
_MINIMAX_M1 = _minimax(
    "{{- '\\n<tool_calls>\\n' }}{%- for c in m.tool_calls %}"
    "{{- '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}\\n' }}"
    "{%- endfor %}{{- '</tool_calls>' }}"
)

_EOS = "<|im_end|>\n"
_V = "<｜end▁of▁sentence｜>"
FAMILIES: dict[str, Family] = {
    "hermes": Family(_HERMES, "hermes", "think", _EOS),
    "qwen3_coder": Family(_qwen_coder(_PYTHON_WORDS), "qwen3_coder", "think", _EOS),
    "qwen3.5": Family(_qwen_coder(_JSON_WORDS), "qwen3_coder", "think", _EOS),
    "deepseek_v3": Family(_DEEPSEEK_V3, "deepseek_v3", "think", _V),
    "deepseek_v31": Family(_DEEPSEEK_V31, "deepseek_v31", "think", _V),
    "glm45": Family(_GLM45, "glm45", "think", "<|user|>", bare="\n<think></think>"),
    "glm47": Family(_GLM47, "glm47", "think", "<|user|>", bare="\n<think></think>"),
    "kimi_k2": Family(_KIMI, "kimi_k2", "think", "<|im_end|>", bare="<think></think>"),
    "llama3": Family(_LLAMA_3, "llama3_json", "", "<|eot_id|>", reasons=False, content=False),
    "llama4": Family(_LLAMA_4, "llama4_json", "", "<|eot|>", reasons=False),
    "llama3 pythonic": Family(
        _llama(_pythonic("", ""), _LLAMA_3_TAGS, "<|eot_id|>"),
        *("pythonic", "", "<|eot_id|>", False, False),
    ),
    "llama4 pythonic": Family(
        _llama(_pythonic("<|python_start|>", "<|python_end|>"), _LLAMA_4_TAGS, "<|eot|>"),
        *("pythonic", "", "<|eot|>", False, False),
    ),
    "mistral list": Family(_MISTRAL_LIST, "mistral", "mistral", "</s>"),
    "mistral named": Family(_MISTRAL_NAMED, "mistral", "mistral", "</s>"),
    "harmony": Family(_HARMONY, "harmony", "harmony", "<|call|>", content=False, most_calls=1),
    "gemma4": Family(_GEMMA_4, "gemma4", "gemma4", "<turn|>\n"),
    "functiongemma": Family(_FUNCTIONGEMMA, "functiongemma", "", "<end_of_turn>\n", reasons=False),
    "granite": Family(_GRANITE, "granite", "granite", "<|end_of_text|>\n"),
    "minimax_m1": Family(_MINIMAX_M1, "minimax", "think", "[e~[\n"),
    "minimax_m2": Family(_MINIMAX_M2, "minimax_m2", "think", "[e~[\n"),
}
