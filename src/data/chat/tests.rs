use std::process::Command;
use std::time::{Duration, Instant};

use super::*;

fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(role, content)| Message { role: role.to_string(), content: content.to_string() }).collect()
}

fn render(template: &str, turns: &[(&str, &str)]) -> Result<String> {
    let tokens = [("bos_token", "<|begin|>"), ("eos_token", "<|end|>")];
    let tokens = tokens.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    ChatTemplate::new(template, tokens)?.render(&messages(turns), true)
}

/// In the style of Qwen2.5's: a default system message, ChatML turns.
const CHATML: &str = r#"
{%- if tools %}
    {{- '<tools>' + (tools | tojson) }}
{%- endif %}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

/// In the style of Qwen3's: the namespace, reversed slices, Python's string methods, a switch that may be undefined.
const THINKING: &str = r#"
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_user == -1 and message.role == "user" and message.content is string and not message.content.startswith('<tool') %}
        {%- set ns.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last_user %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content.strip() + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"#;

/// In the style of Llama 3's: BOS, the date, trimmed content, the system message taken off the list.
const HEADERS: &str = r#"
{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Year known: " ~ ("yes" if date_string|int > 2000 else "no") ~ "\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant\n' }}
{%- endif %}
"#;

/// Expected texts are what transformers 5.23 renders from these templates.
#[test]
fn templates_of_the_three_families_render() {
    let turns = [("user", "1 < 2?")];
    assert_eq!(
        render(CHATML, &turns).unwrap(),
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n1 < 2?<|im_end|>\n<|im_start|>assistant\n"
    );
    let turns = [("user", " a "), ("assistant", "<think>\nx\n</think>\n\nb"), ("user", "c")];
    assert_eq!(
        render(THINKING, &turns).unwrap(),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    let turns = [("system", " s "), ("user", "u\n")];
    assert_eq!(
        render(HEADERS, &turns).unwrap(),
        "<|begin|><|header|>system\nYear known: yes\ns<|eot|><|header|>user\nu<|eot|><|header|>assistant\n"
    );
}

#[test]
fn blocks_leave_no_lines_and_markup_is_not_escaped() {
    let template = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n";
    assert_eq!(render(template, &[("user", "<a> & 'b'")]).unwrap(), "<a> & 'b'\n");
    let template = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{% endfor %}";
    assert_eq!(render(template, &[("user", "x")]).unwrap(), "x");
}

#[test]
fn tojson_writes_as_python_does() {
    let turns = [("user", "<é> 'x'")];
    let expected = r#"[{"role": "user", "content": "<é> 'x'"}, 1, []]"#;
    let found = render("{{ [messages[0], 1, []] | tojson }}", &turns).unwrap();
    let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(parsed(&found), parsed(expected));
    assert!(found.contains(": \"<é> 'x'\"") && found.ends_with("}, 1, []]"), "{found}");
    assert_eq!(render("{{ [1, 2] | tojson(indent=2) }}", &turns).unwrap(), "[\n  1,\n  2\n]");
}

#[test]
fn hostile_templates_end_with_an_error() {
    let turns = [("user", "x")];
    for (template, part) in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}", "fuel"),
        ("{% for a in range(9999) %}{{ 'aaaaaaaaaaaaaaaa' * 100 }}{% endfor %}", "renders to more than"),
        ("{{ 'a' * 9999999999 }}", "too large"),
        ("{{ [1] | tojson(indent=999999999999) }}", "too large"),
        ("{% include 'etc/passwd' %}", "chat template:"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% if %}", "chat template:"),
        ("{% set a = namespace() %}{% set a.a = a %}{{ a }}", "within one another"),
        ("{% set a = namespace() %}{% set a.a = a %}{{ a ~ a }}", "within one another"),
        ("{{ 'x'|format }}", "unknown filter"),
    ] {
        let error = render(template, &turns).unwrap_err().to_string();
        assert!(error.contains(part), "{template}: {error}");
    }
}

/// In a process of its own, which may have a GiB and not more.
#[test]
fn what_a_template_holds_is_bounded() {
    const CHILD: &str = "COLO_GRPO_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return hostile_templates_stay_small();
    }
    let line = "ulimit -d 1048576 && exec \"$0\" --exact data::chat::tests::what_a_template_holds_is_bounded";
    let mut child = Command::new("sh");
    let ended = child.args(["-c", line]).arg(std::env::current_exe().unwrap()).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
    assert!(ended.status.success() && said.contains("1 passed"), "{said}");
}

/// Each doubles what it has at every turn, or makes it at one stroke.
fn hostile_templates_stay_small() {
    let doubling = |body: &str| {
        format!(
            "{{% set n = namespace(a='aaaaaaaa', l=[1]) %}}{{% for i in range(64) %}}{body}{{% endfor %}}{{{{ n.a|length }}}}"
        )
    };
    let capture = "{% set b %}{{ n.a }}{{ n.a }}{% endset %}{% set n.a = b %}";
    let raw = format!("{{% set b %}}{{% for i in range(50000) %}}{}{{% endfor %}}{{% endset %}}", "a".repeat(4096));
    let kept = "{% set n.l = n.l + ['a' * 9000000] %}";
    let templates = [
        doubling("{% set n.a = n.a + n.a %}"),
        doubling("{% set n.a = n.a ~ n.a %}"),
        doubling("{% set n.a = [n.a, n.a]|join %}"),
        doubling("{% set n.a = n.a.replace('a', 'aa') %}"),
        doubling("{% set n.a = n.a|replace('a', n.a) %}"),
        doubling("{% set n.a = n.a.join([1, 1, 1]) %}"),
        doubling("{% set n.a = n.a * 2 %}"),
        doubling("{% set n.l = [n.l, n.l] %}"),
        doubling("{% set n.l = (n.l + n.l)|list %}"),
        doubling("{% set n.l = n.l * 9 %}{% set b = n.l|list %}"),
        doubling(capture),
        doubling(kept),
        "{% macro f(a) %}{{ f(a + a) }}{% endmacro %}{{ f('aaaaaaaaaaaaaaaa') }}".to_owned(),
        "{{ 'a'|indent(999999999999, true) }}".to_owned(),
        "{{ 'a'|indent(width=999999999999, first=true) }}".to_owned(),
        "{{ ([1] * 999999999999) ~ 'a' }}".to_owned(),
        "{% if 1 in [0] * 999999999999 * 999 %}{% endif %}".to_owned(),
        format!("{{{{ {} }}}}", vec!["'a' * 90000000"; 99].join(" ~ ")),
        raw,
    ];
    for template in &templates {
        let start = Instant::now();
        let error = render(template, &[("user", "x")]).unwrap_err().to_string();
        let shown = &template[..template.len().min(150)];
        assert!(error.contains("to render") || error.contains("within one another"), "{shown}: {error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{shown}: {:?}", start.elapsed());
    }
}

/// Measuring leaves loops, conditions and macros as they were.
#[test]
fn measured_templates_go_on_where_they_did() {
    let template = "{% macro say(m, end='.') -%}{{ m.role|upper ~ ': ' ~ m.content + end }}{%- endmacro -%}
{%- for m in messages if m.content or false -%}
{%- if loop.first %}<{% elif not loop.last %}|{% else %}>{% endif -%}
{{ say(m, end='!' if m.role == 'user' else '.') }}{% if m.content == 'stop' %}{% break %}{% endif %}
{%- else %}nothing{% endfor -%}
{%- for row in [[1, [2]], [3]] recursive %}{{ row if row is number else '(' ~ loop(row) ~ ')' }}{% endfor -%}
{%- block end %}{% set text %}{{ 1 + 2 * 3 }}{% endset %} {{ text * 2 }}{% endblock %}";
    let turns = [("user", "a"), ("assistant", ""), ("user", "b"), ("user", "stop"), ("user", "c")];
    assert_eq!(render(template, &turns).unwrap(), "<USER: a!|USER: b!|USER: stop!(1(2))(3) 77");
    assert_eq!(render("{% for m in [] %}{{ m }}{% else %}nothing{% endfor %}", &turns).unwrap(), "nothing");
}
