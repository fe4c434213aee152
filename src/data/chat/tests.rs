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
    ] {
        let error = render(template, &turns).unwrap_err().to_string();
        assert!(error.contains(part), "{template}: {error}");
    }
}
