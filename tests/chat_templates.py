"""Chat templates in the manner of real models, and chats that make them take every branch."""

# Templates with what those of real models use: namespaces, slices, tests, macros, tool calls.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ["user", "assistant"] and not message.tool_calls %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}{{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] ' + message.content | string }}
    {%- else %}{{- raise_exception("only user, assistant and tool") }}{%- endif %}
{%- endfor %}
"""
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Köln", "days": 3, "exact": True}},
}
CHATS = {
    "short": [{"role": "user", "content": "why?"}],
    "turns": [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "no reason"},
        {"role": "user", "content": "how?"},
    ],
    "spaces and signs": [{"role": "user", "content": '  <a href="x">\n\n{{ 1 }} é 🙂\t '}],
    "tools": [
        {"role": "system", "content": "use tools"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "call00001"},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "thanks"},
    ],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " hi "}]}],
}


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}\n"
    "{% generation %}<{{ m['role'] }}> {{ m['content'] }}{{ sep_token }}{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
DEEPSEEK = """{% if not add_generation_prompt is defined %}
{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, system='') -%}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|Assistant|><|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] }}
            {{- '\\n```json\\n' }}{{ tool['function']['arguments'] | tojson }}{{ '\\n```' }}
        {%- endfor %}{{- '<|end|>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if message['reasoning_content'] is defined and loop.last %}
            {{- '<|Assistant|><think>' + message['reasoning_content'] + '</think>' + content }}
        {%- else %}
            {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}
            {%- endif %}{{- '<|Assistant|>' + content }}{{ eos_token }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '<|tool ' ~ message['name'] ~ ' ' ~ message['tool_call_id'] ~ '|>' }}
        {{- message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}
    {%- if thinking is defined and thinking %}{{ '<think>\\n' }}{%- endif %}{%- endif %}
"""
RAG = """{{ bos_token }}{% for document in documents or [] %}<doc {{ loop.index0 }}>
{%- for key, value in document.items() %} {{ key }}: {{ value }};{% endfor %}
{% endfor %}{% for tool in tools or [] %}<tool> {{ tool.function.name }}
{{ tool.function.parameters | tojson(indent=2) }}
{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}<{{ m.role }}{{ ' ' ~ m.name if m.name }}> {{ m.content }}{% endgeneration %}
{% else %}<{{ m.role }}{{ ' ' ~ m.name if m.name }}> {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"""
REAL = {
    "chatml": CHATML,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "qwen 3": QWEN3,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "rag": RAG,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, <as> told & measured",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["place"],
        },
    },
}
OPEN = {"role": "assistant", "content": "It is warm, \n"}
TEXTS = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
TAGS = {"b": [1, 2.5, None, True]}
CHATS |= {
    "no content": [
        {"role": "user", "content": "weather?", "name": "anna"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "warm", "tool_call_id": "call00001", "name": "weather"},
    ],
    "calls without a content": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": "warm", "tool_call_id": "call00001", "name": "weather"},
    ],
    "reasoning": [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "<think>old</think>so", "reasoning_content": "because"},
        {"role": "user", "content": "how?"},
        {"role": "assistant", "content": "like this", "reasoning": "now"},
    ],
    "texts": [
        {
            "role": "user",
            "content": TEXTS,
        }
    ],
    "open": [{"role": "user", "content": "weather?"}, OPEN],
    "extra keys": [{"role": "user", "content": "a", "tags": TAGS, "no": None}],
}
# What apply_chat_template is given beside the chat.
OPTIONS: dict[str, dict] = {
    "none": {},
    "no answer begins": {"add_generation_prompt": False},
    "tools": {"tools": [WEATHER]},
    "no tools": {"tools": []},
    "documents": {"documents": [{"title": "a", "text": "b é"}, {"text": "c"}]},
    "no thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True, "thinking": True},
    "a date": {"date_string": "1 Jan 2024", "bos_token": "<other>"},
    "goes on": {"continue_final_message": True},
    "goes on with tools": {"continue_final_message": True, "tools": [WEATHER]},
    "reasoning goes on": {"continue_final_message": "reasoning_content"},
}
