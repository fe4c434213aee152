#!/usr/bin/env python3
"""Golden texts for `src/data/chat`, made by Python's Jinja.

    pip install jinja2==3.1.6
    python scripts/golden_jinja.py      # writes tests/golden/jinja.json

The environment is the one that transformers 5 makes for chat templates: immutable and sandboxed, blocks trimmed, loop controls,
its `tojson`, `raise_exception` and `strftime_now`. Each probe is rendered with the same messages, special tokens and time; where
Python raises, the output is null. The test `data::chat::tests::probes_render_as_python_renders_them` holds our renderer to every
one of them.
"""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1721999109  # 2024-07-26 13:05:09 UTC, a Friday
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What's 1 < 2?\n"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"},
    {"role": "user", "content": 'say "ü"'},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

EXPRESSIONS = """
messages[0]
messages | tojson
messages[1].content | tojson
messages[3].content | tojson(ensure_ascii=true)
{'b': 1, 'a': {'z': none, 'y': true}} | tojson
{'b': 1, 'a': 2} | tojson(sort_keys=true)
{'b': [1, 2], 'a': {}} | tojson(indent=2)
[1, [], {}] | tojson(indent=4)
{'b': 1, 'a': [2, 3]} | tojson(separators=(',', ':'))
{'b': 1, 'a': [2, 3]} | tojson(separators=(',', ':'), indent=1, sort_keys=true)
{1: 2, none: 3} | tojson
[1.0, 1e20, 1e-7, 0.1, 1e16, 123456789.125] | tojson
'a/b<c>&\\u2028\\x7f' | tojson
undefined_name | tojson
[1, 'a', true, none, 2.5]
['it\\'s', 'a "b"', 'both \\' and "']
['a\\nb\\tc\\\\d', 'ü', '\\x00\\x1f\\x7f\\xa0']
{'a': 1, 'b': 'c', 3: [none]}
{}
[]
true
none
1e20
1e16
1e15
1e-4
1e-5
1.5e-9
100000000000000000000
0.1 + 0.2
7 / 2
6 / 2
7 // 2
-7 // 2
7 % 3
2 ** 10
-1
1.0
'%s' % 'a'
'%s and %d' % ('a', 3)
'%5.2f|%-5s|%05d|%x' % (1.5, 'ab', 42, 255)
'%s' % [1, 'a']
'%s%%' % messages[0].role
'%(a)s' % {'a': 'b'}
'a' ~ '%s' % 'b' ~ 'c'
'%s' % messages[1].content.strip() | upper
'%s' % 3 | string
'a.b.c'.partition('.')
'a.b.c'.rpartition('.')
'abc'.partition('.')
'a b c'.rsplit(' ', 1)
' a  b c '.rsplit()
'a,b,c'.rsplit(',')
'a b  c'.split()
'a,b,c'.split(',', 1)
'a,b,c'.split(',')[-1]
'xaxb'.removeprefix('x')
'axbx'.removesuffix('x')
'7'.zfill(3)
'-7'.zfill(4)
'a'.ljust(3) + '|'
'a'.rjust(3, '.')
'ab'.center(5, '*')
'äöü'.find('ü')
'abc'.find('z')
'abcabc'.rfind('b')
'aAbB'.swapcase()
'hello world'.title()
'hello'.capitalize()
'a-b'.replace('-', '+')
'abc'.startswith('ab')
'abc'.endswith(('x', 'c'))
''.isdigit()
'12'.isdigit()
'Ab'.isupper()
'AB1'.isupper()
'aaa'.count('a')
'abc'.count('')
'a\\nb'.splitlines()
', '.join(['a', 'b'])
[1, 'a', none] | join('-')
['a', 'b'] | join
[3, 1, 2] | sort
[3, 1, 2] | sort | first
'abc' | list
[1, 2] + [3]
messages | length
messages | map(attribute='role') | join(',')
messages | map(attribute='role') | list
messages | selectattr('role', 'equalto', 'user') | list | length
messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | list
messages[::-1][0].role
messages[-1]['content']
messages[1:3] | length
messages[0].content | trim
'abc'[1:]
'abc'[::-1]
'a' in 'abc'
'role' in messages[0]
'x' not in [1, 2]
messages[0].get('name')
messages[0].get('name', 'none given')
messages[0].items() | list
messages[0].keys() | list
messages[0] is mapping
messages is iterable
messages[0].content is string
messages is sequence
x is defined
x is undefined
none is none
3 is number
3 is odd
x | default('d')
'' | default('d', true)
x
x.y is defined
'a' ~ 1 ~ none ~ true
'x' * 3
range(3) | list
'A' | lower
'a b' | title
1.7 | int
'3' | int + 1
'1.5' | float
2.567 | round(1)
2 | round
[1, 2, 3] | sum
[1, 2, 3] | max
{'b': 1, 'a': 2} | dictsort
{'b': 1, 'a': 2} | items | list
[{'a': 1}, {'a': 2}] | tojson
dict(a=1, b='c')
dict(a=1) | tojson
[[1, 2], [3]] | string
'<b>' | e
'a' if true else 'b'
'a' if false
not true
1 < 2 < 3
1 == 1.0
[1] == [1]
'a' 'b'
bos_token + eos_token
strftime_now('%d %b %Y')
strftime_now('%j %U %W %w %u %V %G %g')
strftime_now('%I:%M %p %H %S %f')
strftime_now('%A, %B %e, %y')
strftime_now('%c|%x|%X|%D|%F|%T|%R|%r')
strftime_now('%-d.%-m. %C %h %s%%')
strftime_now('%Z%z|')
raise_exception('no')
messages.append(1)
1 / 0
'%d' % 'a'
namespace(a=1).a
(1, 2)
range(3)
{'a': 1}.items()
-7 % 3
7 % -3
'%s|%s' % (1.0, 1e20)
['a'] ~ ''
1e20 ~ ''
""".strip().splitlines()

BLOCKS = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend",
    "{%- for m in messages -%} {{- loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }} {%- endfor -%}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }},{% endfor %}",
    "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}",
    "{% macro f(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(1, y=3) }}",
    "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}",
    "{% filter upper %}abc{% endfilter %}",
    "{% raw %}{{ '%s' % 1 }}{% endraw %}",
    "{# '%s' % 1 #}a",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{{ loop_messages | length }}",
    "{{ '}}' }}{{ \"%}\" }}{{ {'a': {'b': 1}} }}",
    "{%- if true %}\n  a\n{%- endif %}\n\nb\n",
    "  {% if true +%}\n a\n  {%+ endif %}\n",
    "{% for a in [1, 2] %}{% for b in [3] %}{{ loop.depth }}{{ a }}{{ b }} {% endfor %}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}|{{ loop.nextitem.role if not loop.last }};{% endfor %}",
    # In the style of Mistral's: roles that alternate, BOS once, instructions in brackets.
    "{{ bos_token }}{% set loop_messages = messages[1:] %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
    # In the style of OLMo 2's: a line per turn, the end of text after an answer.
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    # In the style of Llama 3.1's tools: functions as indented JSON.
    "{%- set tools = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'b': 1, 'a': [1.5, none]}}}] %}"
    "{%- for t in tools %}\n    {{- t | tojson(indent=4) }}\n    {{- \"\\n\\n\" }}\n{%- endfor %}",
    # In the style of Qwen3's: reasoning cut from earlier answers.
    "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if message.role == 'user' and not(message.content.startswith('<t>') and message.content.endswith('</t>')) %}"
    "{%- set ns.last = index %}{%- break %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{%- set reasoning = '' %}{%- set content = message.content %}"
    "{%- if '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (reasoning if loop.index0 > ns.last else '') + content }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}",
]


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(format)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def render(template):
    try:
        return environment().from_string(template).render(
            messages=MESSAGES, tools=None, documents=None, add_generation_prompt=True, **TOKENS
        )
    except Exception:
        return None


def main():
    templates = ["{{ " + expression + " }}" for expression in EXPRESSIONS] + BLOCKS
    probes = [{"template": template, "output": render(template)} for template in templates]
    golden = {"now": NOW, "messages": MESSAGES, "tokens": TOKENS, "probes": probes}
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "jinja.json"
    path.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {len(probes)} probes")


if __name__ == "__main__":
    main()
