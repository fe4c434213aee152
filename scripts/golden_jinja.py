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

# Every filter, test and method of a string, list or dictionary that a template can use, over values of every kind.
FILTERS = """
abs capitalize center center(9) count default default('d') default('d',true) dictsort e escape first float float(2.5) forceescape
indent indent(2) indent(2,true) indent(2,true,true) indent(width='> ') int int(-1) int(base=16) items list join join('-') last length list lower max
min random replace('a','x') replace('a','x',1) replace('a','x',count=2) replace(1,2) reverse|list round round(1) round(2) round(1,'ceil')
round(0,'floor') round(method='ceil') safe slice(2)|list batch(2)|list sort sort(true) sort(reverse=true) string striptags sum title tojson trim trim('a') truncate
truncate(5) truncate(5,true) truncate(5,true,'') truncate(8,false,'..',0) unique|list upper urlencode urlize wordcount wordwrap(5) xmlattr filesizeformat pprint
format(1) attr('a') map('upper')|list select|list reject|list select('string')|list map('int')|list groupby(0)|list split bool lines zip chain
""".split()
TESTS = """
boolean callable defined divisibleby(2) escaped even false float integer iterable lower mapping none number odd sequence string true undefined upper
sameas(none) eq(1) ne(1) lt(2) gt(2) in([1,'a',2.5]) startingwith('a') safe filter test
""".split()
VALUES = """
'a'||''||'aAb a_b-c äé ß'||' one two  three\\n\\nfour '||'1'||'12.7'||' 0x1F '||'<a&"b>'||1||0||-3||2.5||-2.5||3.5||0.125||true||none||missing||[]||[1, 2, 3]
['b','A','a']||[3.5, 1]||{'b': 1, 'a': 'x y'}||(1, 'a')||range(3)||'a/b c?d=é'||'line1\\r\\nline2\\x0bline3'
""".strip().replace("\n", "||").split("||")
METHODS = """
upper() lower() title() capitalize() casefold() swapcase() strip() strip('a ') lstrip() rstrip('b') split() split('a') split(' ',1) split(none,1)
rsplit() rsplit('a',1) splitlines() splitlines(true) startswith('a') endswith(('x','b')) find('b') rfind('b') index('a') rindex('a') count('a')
count('a',1) replace('a','x') replace('a','x',1) replace('','-') join(['x','y']) partition('a') rpartition('a') removeprefix('a') removesuffix('b') zfill(6)
ljust(8,'.') rjust(8) center(9,'*') isdigit() isalpha() isalnum() isspace() islower() isupper() istitle() isnumeric() isdecimal() isascii() isidentifier()
isprintable() encode() expandtabs() translate({}) format(1,2) format_map({}) keys() values() items() get('a') get('z',1) copy() index(1) append(1) pop()
update({}) bit_length() is_integer() __class__ __len__() format('x')
""".split()
MORE = """
2.5|round
'a' is sequence
'aaa'|replace('a','b',2)
['a'] ~ ''
[1.5, none] ~ {'a': true} ~ (1, 2)
1 + 2 ~ 3
2 * 3 ~ 4
-1 ~ -2
'a' ~ 1 if true else 'b' ~ 2
'x' ~ [1] == 'x[1]'
('a' ~ 'b')|upper ~ 'c'
[1 ~ 2, 3 ~ [4]]
{'k': 'a' ~ [1]}
'a' ~ messages[0].role ~ messages|length
'a' ~ 6 / 4 ~ 7 % 4 ~ 7 // 2
'a' ~ -1 * 2
1e20 ~ 1e-7
(1,)
((1, 2), [3])
(1, 2)[0]
(1, 2)|length
(1, 2) == (1, 2)
1 in (1, 2)
1 if 2 in (1, 2) else 3
('a' if true else 'b')
(1 + 2) * 3
not (1, 2)
dict([('a', 1)])
range(1, 7, 2)
range(5, 0, -2)|list
range(0)
range(3)[1]
range(4)[-1]
range(2) is sequence
{'a': 1}.keys()
{'a': 1}.values()
{'a': [1]}.items()|list
{}.items()
{'a': 1}.items()|length
'a' in {'a': 1}.keys()
{'a': 1}.items()|first
{'b': 1, 'a': 2}|dictsort(reverse=true)
{'b': 1, 'a': 2}|dictsort(by='value')
{'b': 1, 'a': 2}|items|list
[{'a': 2}, {'a': 1}]|sort(attribute='a')
[{'a': 'x'}, {'a': 'y'}]|join(', ', attribute='a')
[{'a': 2}, {'a': 1}]|max(attribute='a')
[{'a': 2}, {'a': 1}]|sum(attribute='a')
[{'a': {'b': 1}}]|map(attribute='a.b')|list
{'a b': 'c/d', 'e': 1}|urlencode
[('a', 'b c')]|urlencode
'a b/c'|urlencode
'0x1f'|int(0, 16)
'1_000'|int
'42.9'|int
none|int(5)
'x'|float(1.5)
true|int
7 % -3
7 // -2
7 % 3
7.5 % 2
1 / 0
1 % 0
1 // 0
messages|length % 2
messages|length / 2
10 / (2 + 3)
10 // messages|length
2 ** 3 ** 2
'%s' % (1, )
'%s %s' % ('a', ['b'])
'a\\\nb'
'a\\x41\\u0042\\103\\d\\/\\a|'
"it\\'s \\"q\\""
'\\\\n'
'\\N{DASH}'
'\\ud83d\\ude00'
'\\U0001F600'
'\\é'
'<a>'|safe
'<a>'|safe ~ '<b>'
('<a>'|safe) + '<b>'
'<a>'|e
'<a>'|e + '<b>'
'{} and {}'.format('a', 1)
'{a} {0!r} {1:>4}'.format('x', 2, a='y')
'a,b'.split(',')|map('upper')|join('+')
[1, 2, 3][::-1]
[1, 2, 3][-2:]
'abc'[-1]
cycler('a', 'b').next()
joiner(', ')() ~ 'x'
lipsum()
debug()
messages|map('lower')
x is not defined
missing ~ 'a'
missing|length
missing|list
missing.a
missing or 'd'
none ~ true ~ false
True and None
1.0 ~ 1.50
100000000000000000000000 ~ ''
1 == 1.0
'a' < 'b'
[1] + [2]
'a' * 3
3 * 'a'
[1] * 2
{'a': 1} == {'a': 1.0}
""".replace("\\\n", "\0").strip().split("\n")
TABLE = [f"({value})|{name}" for value in VALUES for name in FILTERS]
TABLE += [f"({value}) is {name}" for value in VALUES for name in TESTS]
TABLE += [f"({value}).{name}" for value in VALUES for name in METHODS]
TABLE += [expression.replace("\0", "\\\n") for expression in MORE]

BLOCKS = [
    "a\r\nb\rc\n",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{{ (a, b) }}{% endfor %}",
    "{% for (a, b) in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}",
    "{% for x in (1, 2) %}{{ x }}{% endfor %}",
    "{% set x = (1, 2) %}{{ x }}{{ x[1] }}",
    "{% set x = 'a' ~ [1] ~ 'b' %}{{ x }}",
    "{% macro f(a, b=(1, 2)) %}{{ a ~ b }}{% endmacro %}{{ f([1]) }}{{ f(1, (3,)) }}",
    "{% if 'a' ~ 1 == 'a1' and not ('b' ~ 2) is none %}yes{% endif %}",
    "{% set ns = namespace(x=1) %}{% set ns.x = ns.x ~ [2] %}{{ ns.x }}",
    "{% call(x) f() %}{{ x }}{% endcall %}",
    "{{ 'a' if messages[0].role in ('system', 'developer') else 'b' }}",
    "{%- set a = 10 %}{{ a // 3 }}{{ a % 4 }}{{ a / 4 }}{{ (a - 1) % 4 }}{{ -a % 4 }}",
    "{{ '<a>' | safe -}} x",
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
        text = environment().from_string(template).render(
            messages=MESSAGES, tools=None, documents=None, add_generation_prompt=True, **TOKENS
        )
        text.encode()  # half of a pair is no text
        return text
    except Exception:
        return None


def main():
    templates = ["{{ " + expression + " }}" for expression in EXPRESSIONS] + BLOCKS
    probes = [{"template": template, "output": render(template)} for template in templates]
    # What Python refuses need not be refused here, and an address or a random choice is another each time.
    table = [(expression, render("{{ " + expression + " }}")) for expression in TABLE]
    table = [pair for pair in table if pair[1] is not None and " at 0x" not in pair[1] and not any(word in pair[0] for word in ("|random", "lipsum"))]
    golden = {"now": NOW, "messages": MESSAGES, "tokens": TOKENS, "probes": probes, "table": table}
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "jinja.json"
    lines = (",\n".join(json.dumps(row, ensure_ascii=False) for row in golden[key]) for key in ("probes", "table"))
    head = json.dumps({key: golden[key] for key in ("now", "messages", "tokens")}, ensure_ascii=False)[:-1]
    path.write_text("{},\n\"probes\": [\n{}\n],\n\"table\": [\n{}\n]}}\n".format(head, *lines))
    print(f"{path}: {len(probes)} probes, a table of {len(table)}")


if __name__ == "__main__":
    main()
