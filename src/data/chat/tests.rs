use super::*;

fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(role, content)| Message::new(*role, *content)).collect()
}

fn render(template: &str, turns: &[(&str, &str)]) -> Result<String> {
    let tokens = [("bos_token", "<|begin|>"), ("eos_token", "<|end|>")];
    let tokens = tokens.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    ChatTemplate::new(template, tokens)?.render(&messages(turns), true)
}

/// A template in the style of Qwen2.5: a default system message and ChatML messages.
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

/// A template in the style of Qwen3: a namespace, reversed slices, Python string methods, a switch that may be undefined.
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

/// A template in the style of Llama 3: BOS, the date, trimmed content, the system message taken off the list.
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

/// The expected texts were rendered by transformers 5.23 from these templates.
#[test]
fn chat_templates_of_three_model_families_render() {
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
fn tojson_output_equals_pythons() {
    let turns = [("user", "<é> 'x'")];
    let expected = r#"[{"role": "user", "content": "<é> 'x'"}, 1, []]"#;
    let found = render("{{ [messages[0], 1, []] | tojson }}", &turns).unwrap();
    let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(parsed(&found), parsed(expected));
    assert!(found.contains(": \"<é> 'x'\"") && found.ends_with("}, 1, []]"), "{found}");
    assert_eq!(render("{{ [1, 2] | tojson(indent=2) }}", &turns).unwrap(), "[\n  1,\n  2\n]");
}

#[test]
fn hostile_chat_templates_end_with_an_error() {
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

/// The expected texts of scripts/golden_jinja.py were rendered by Python's Jinja. They cover constructs used in templates, and all filters,
/// tests and methods with values of every type. Where equal output is impossible, an error is expected; docs/templates.md lists these cases.
#[test]
fn templates_render_as_python_renders_them_or_are_refused() {
    #[derive(serde::Deserialize)]
    struct Golden {
        now: u64,
        messages: Vec<Message>,
        tokens: BTreeMap<String, String>,
        probes: Vec<Probe>,
        table: Vec<(String, String)>,
    }
    #[derive(serde::Deserialize)]
    struct Probe {
        template: String,
        output: Option<String>,
    }
    const REFUSED: &str = "{{ 7 % -3 }}";
    // What is constant becomes true or false.
    const DIFFERENT: &str = "True and None";
    let golden: Golden = serde_json::from_str(include_str!("../../../tests/golden/jinja.json")).unwrap();
    let render = |template: &str| {
        let made = ChatTemplate::at((golden.now, LIMITS), template, golden.tokens.clone());
        made.and_then(|made| made.render(&golden.messages, true)).map_err(|error| error.to_string())
    };
    let mut wrong = Vec::new();
    for Probe { template, output } in &golden.probes {
        let found = render(template);
        let expected = output.as_ref().filter(|_| template != REFUSED);
        if found.as_ref().ok() != expected {
            wrong.push(format!("{template}\n  ours:   {found:?}\n  Python: {output:?}"));
        }
    }
    let mut refused = BTreeMap::new();
    for (expression, output) in &golden.table {
        match render(&format!("{{{{ {expression} }}}}")) {
            Ok(found) if (found == *output) != (expression == DIFFERENT) => {}
            Ok(found) => wrong.push(format!("{expression}\n  ours:   {found:?}\n  Python: {output:?}")),
            Err(error) => *refused.entry(error).or_insert(0) += 1,
        }
    }
    let num_refused: usize = refused.values().sum();
    assert!(wrong.is_empty(), "{} are rendered otherwise:\n{}", wrong.len(), wrong.join("\n"));
    assert!(golden.table.len() > 2_500 && num_refused * 5 < golden.table.len(), "{num_refused} refused: {refused:#?}");
}

/// Nests or chains every construct more deeply than real templates do. Each must render or be rejected without a stack overflow.
#[test]
fn deeply_nested_templates_render_or_are_refused() {
    let parts: [(&str, &str, &str, &str); 16] = [
        ("{{ ", "-", "1", " }}"),
        ("{{ ", "not ", "1", " }}"),
        ("{{ 1", "|abs", "", " }}"),
        ("{{ a", ".b.b", "", " }}"),
        ("{{ a", "[0]", "", " }}"),
        ("{{ a", "()", "", " }}"),
        ("{{ 1", "~1", "", " }}"),
        ("{{ 1", "+1", "", " }}"),
        ("{{ 1", "*1", "", " }}"),
        ("{{ 1", "**1", "", " }}"),
        ("{{ 1", " and 1", "", " }}"),
        ("{{ 1", " is defined", "", " }}"),
        ("{{ 1", " if 1", "", " }}"),
        ("{{ ", "[", "1", " }}"),
        ("{{ ", "('%s' % ", "1", " }}"),
        ("{% if 1 %}", "{% elif 1 %}", "", "{% endif %}"),
    ];
    for (open, part, middle, close) in parts {
        for count in [100, 4_000, 30_000, 400_000] {
            let template = format!("{open}{}{middle}{close}", part.repeat(count));
            let _ = render(&template, &[("user", "x")]); // that it returns is the test
        }
    }
}

/// Values nested as deeply as the fuel of a loop allows are dropped, compared, printed and joined.
#[test]
fn deeply_nested_values_render_or_are_refused() {
    let nest = |times: usize, names: &[&str]| {
        let sets: String = names.iter().map(|n| format!("{{% set ns.{n} = [[[[[[[[[[ns.{n}]]]]]]]]]] %}}")).collect();
        format!("{{% set ns = namespace(l=[], m=[]) %}}{{% for i in range({times}) %}}{sets}{{% endfor %}}")
    };
    let endless = nest(99_999, &["l"]);
    assert!(render(&endless, &[("user", "x")]).unwrap_err().to_string().contains("fuel"));
    let one = ["ns.l", "ns.l ~ ''", "{ns.l: 1}", "ns.l | tojson", "ns.l | string", "[ns.l] | join", "ns.l | pprint"];
    let two = ["ns.l == ns.m", "ns.l < ns.m", "ns.l in [ns.m]", "[ns.l, ns.m] | sort", "[ns.l, ns.m] | unique | list"];
    let of_one = one.map(|expression| nest(10_000, &["l"]) + "{{ " + expression + " }}");
    let of_two = two.map(|expression| nest(5_000, &["l", "m"]) + "{{ " + expression + " }}");
    for template in of_one.iter().chain(&of_two) {
        let _ = render(template, &[("user", "x")]); // that it returns is the test
    }
}

#[test]
fn templates_with_unbounded_output_or_time_are_refused() {
    let grow = |expression: &str| {
        format!(
            "{{% set ns = namespace(x='aaaaaaaa') %}}{{% for i in range(99) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
        )
    };
    let mut templates: Vec<String> = [
        "ns.x + ns.x",
        "ns.x ~ ns.x",
        "ns.x * 99",
        "ns.x.replace('a', ns.x)",
        "[ns.x, ns.x] | join",
        "'%s%s' % (ns.x, ns.x)",
        "(ns.x | list) * 99 | list",
    ]
    .map(grow)
    .into();
    templates.extend([
        "{{ [1] * 1000000000000 | list }}".to_owned(),
        format!("{{% set x %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}", "a".repeat(100_000)),
    ]);
    for template in templates {
        let error = render(&template, &[("user", "x")]).map(|text| text.len()).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Files, "{template}: {error}");
    }
}

#[test]
fn a_template_that_exceeded_a_limit_stays_refused() {
    let template =
        ChatTemplate::new("{% set n = 200000000 %}{{ 5 in [messages | length] * n }}", BTreeMap::new()).unwrap();
    for _ in 0..2 {
        let error = template.render(&messages(&[("user", "x")]), true).unwrap_err().to_string();
        assert_eq!(error, "chat template: processing it takes more than 2 s of CPU time");
    }
}

/// Templates of vision-language models have two forms: some show only text in parts, and ignore plain strings. A role whose plain strings are
/// shown keeps them.
#[test]
fn content_is_passed_as_parts_if_the_template_needs_parts() {
    let loops = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}\
                 {% endfor %}{% endfor %}";
    let turns = [("system", "s"), ("user", "a b"), ("assistant", "c")];
    assert_eq!(render(loops, &turns).unwrap(), "<system>s<user>a b<assistant>c");
    let only_users = "{% for m in messages %}<{{ m.role }}>{% if m.role != 'user' %}{{ m.content }}{% else %}{{ m.content[0].text }}\
                      {% endif %}{% endfor %}";
    assert_eq!(render(only_users, &turns).unwrap(), "<system>s<user>a b<assistant>c");
    let either =
        "{% for m in messages %}{% if m.content is string %}text {{ m.content }}{% else %}parts{% endif %}{% endfor %}";
    assert_eq!(render(either, &turns).unwrap(), "text stext a btext c");
    let neither = "{% for m in messages %}{{ m.role }}{% endfor %} text";
    assert_eq!(render(neither, &turns).unwrap(), "systemuserassistant text");
}
