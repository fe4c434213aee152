//! Texts with secrets in all notations, and texts that must stay.

use super::{redact, redact_json};

#[test]
fn secrets_are_redacted_and_other_text_stays() {
    for (text, expected) in [
        ("HF_TOKEN=abc WANDB_API_KEY: xyz", "HF_TOKEN=[redacted] WANDB_API_KEY: [redacted]"),
        (r#"{"db_password": "a \"b\" c", "steps": 3}"#, r#"{"db_password": "[redacted]", "steps": 3}"#),
        ("{'api_key': 'a b', 'steps': 3}", "{'api_key': '[redacted]', 'steps': 3}"),
        (r#""{\"api_key\": \"abc\", \"n\": 1}""#, r#""{\"api_key\": \"[redacted]\", \"n\": 1}""#),
        ("https://me:pw@host/path?x=1", "https://[redacted]@host/path?x=1"),
        ("http://host/?access_token=abc&page=2", "http://host/?access_token=[redacted]&page=2"),
        ("http://host/a?sig=a%2Fb&key=c d", "http://host/a?sig=[redacted]&key=[redacted] d"),
        (
            "s3://b/o?X-Amz-Signature=0a&X-Amz-Credential=AK",
            "s3://b/o?X-Amz-Signature=[redacted]&X-Amz-Credential=[redacted]",
        ),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        (r#"-H "Authorization: abc def" -v"#, r#"-H "Authorization: [redacted]" -v"#),
        (r#"{"Authorization": "Basic YWI6Yw=="}"#, r#"{"Authorization": "Basic [redacted]"}"#),
        ("-H 'X-Api-Key: abc'", "-H 'X-Api-Key: [redacted]'"),
        ("Cookie: session=1; id=2", "Cookie: [redacted]"),
        ("passwd=abc pwd=x passphrase: y", "passwd=[redacted] pwd=[redacted] passphrase: [redacted]"),
        ("judge --api-key abc --top 3", "judge --api-key [redacted] --top 3"),
        (r#"["judge", "--api-key","abc", "x"]"#, r#"["judge", "--api-key","[redacted]", "x"]"#),
        (r#"["--password", "a b"]"#, r#"["--password", "[redacted]"]"#),
        ("['--token', 'abc']", "['--token', '[redacted]']"),
        ("--hub_token=abc", "--hub_token=[redacted]"),
        ("run/db_password=abc run/token: api_key: abc", "run/db_password=[redacted] run/token: api_key: [redacted]"),
        (r#"{"run/pwd": "abc"}"#, r#"{"run/pwd": "[redacted]"}"#),
    ] {
        assert_eq!(redact(text), expected);
    }
}

#[test]
fn tokens_of_known_formats_are_redacted_without_a_key_name() {
    let random = "Zx81Kq0PwLm3Rt5VbN7cYd9F";
    let upper = random.to_uppercase();
    let jwt = format!("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.{random}");
    let known =
        ["hf_", "sk-", "sk-proj-", "sk-ant-api03-", "ghp_", "gho_", "github_pat_", "glpat-", "xoxb-12-", "nvapi-"];
    let known = known.map(|prefix| format!("{prefix}{random}"));
    let others = [format!("AKIA{}", &upper[..16]), format!("AIza{random}{random}"), jwt];
    let key = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----".to_owned();
    for secret in known.into_iter().chain(others).chain([key]) {
        assert_eq!(redact(&format!("got {secret} here")), "got [redacted] here");
    }
}

#[test]
fn text_that_only_resembles_a_secret_stays() {
    let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    for text in [
        "num_tokens=100, key = 3, learning_rate: 1e-6, num_key_value_heads = 8, max_tokens: 4096",
        "eos_token: <|im_end|>, pad_token = <pad>, \"bos_token\": \"<s>\", next_token=5, num_input_tokens_seen: 9",
        r#"{"key_value_heads": 8, "tokenizer": "Qwen/Qwen2.5-7B-Instruct", "monkey": "x"}"#,
        "meta-llama/Llama-3.1-8B-Instruct, task-sk-learn-contributions-and-more, risk-averse-optimisation",
        "unknown key 'max_stepz'; did you mean 'max_steps'?",
        "train_file: expected a key among a, b; token 151643 is no word; the key: value pairs",
        "unexpected argument '--tokens' found; --max-token 5; --key <KEY>; --hub_token --push",
        "https://huggingface.co/Qwen/Qwen2.5-7B?page=2&sort=name#token",
        "git@github.com:owner/name.git, a@b.c",
        "password reset, secretary: x, the secret of it",
        "/etc/passwd: expected a file of rows, .jsonl or .json; keys/api.token:3: bad line; ./hub_token: missing",
        "{{ messages[0]['content'] }} {% if add_generation_prompt %}",
        "max_tokens=512 key_bias token_ids: [1, 2] tokenizer_class: Qwen2Tokenizer prompt_key=prompt reward_fn_key: data_source",
        "sort -u a:b; docker run -u 1000:1000 image; git push -u origin main; curl -sS https://h/p",
        "the token hello, a basic understanding, basic Understanding, pass: 3 of 4, forward_pass=0.2, HF_TOKEN=None",
        "key: model.layers.0.self_attn.q_proj.weight, rewards/numeric_answer/mean 0.5, to 100%25 of a%20b",
        "model-00001-of-00002.safetensors: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "hf_hub_download of sk-learn-contributions failed, glove-embedding-of-words, task-specific-reward-model",
        "step 3: warning: 2 of 16 samples have no reward and are masked: reward 'mine' (exception): ValueError: no number",
        "the bearer of news",
        hash,
    ] {
        assert_eq!(redact(text), text);
    }
}

#[test]
fn redaction_keeps_json_valid() {
    let mut value = serde_json::json!({
        "hub_token": "abc", "no_token": null, "list": ["ftp://u:p@h"], "n": 1, "db_password": 123, "api_key": ["a", {"b": "c"}],
        "command": ["judge", "--api-key", "abc", "--password", "--verbose", "--top", "3"], "eos_token": "</s>", "Cookie": "c",
    });
    redact_json(&mut value);
    let expected = serde_json::json!({
        "hub_token": "[redacted]", "no_token": null, "list": ["ftp://[redacted]@h"], "n": 1, "db_password": "[redacted]",
        "api_key": "[redacted]", "command": ["judge", "--api-key", "[redacted]", "--password", "--verbose", "--top", "3"],
        "eos_token": "</s>", "Cookie": "[redacted]",
    });
    assert_eq!(value, expected);
}

/// Every notation, each with a secret in the place of `§` that must be removed.
#[test]
fn every_notation_of_a_secret_is_redacted() {
    let letters = "ZxKqPwLmRtVbNcYdFgHjSeTuAiOkBvCzMn"; // as Hugging Face's, without a digit
    let random = "Zx81Kq0PwLm3Rt5VbN7cYd9FgHjS2eTuAiOkBvCz";
    let hex = "3fa94c07be12d58690ab3fa94c07be12d58690ab";
    let upper = "ZX81KQ0PWLM3RT5V";
    for (form, secret) in [
        ("got § here", format!("hf_{letters}")),
        ("got § here", format!("ghp_{random}")),
        ("got § here", format!("github_pat_{random}")),
        ("got § here", format!("glpat-{}", &random[..20])),
        ("got § here", format!("glrt-{}", &random[..20])),
        ("got § here", format!("sk-{random}")),
        ("got § here", format!("sk-proj-{random}")),
        ("got § here", format!("sk-ant-api03-{random}")),
        ("got § here", format!("sk-or-v1-{hex}")),
        ("got § here", format!("gsk_{random}")),
        ("got § here", format!("xai-{random}")),
        ("got § here", format!("r8_{random}")),
        ("got § here", format!("pplx-{random}")),
        ("got § here", format!("fw_{random}")),
        ("got § here", format!("tgp_v1_{random}")),
        ("got § here", format!("nvapi-{random}")),
        ("got § here", format!("lsv2_pt_{hex}")),
        ("got § here", format!("wandb_v1_{random}")),
        ("got § here", format!("dckr_pat_{}", &random[..27])),
        ("got § here", format!("AKIA{upper}")),
        ("AKIAZX81KQ0PWLM3RT5V §", format!("{}/{}", &random[..20], &random[..19])),
        ("AKIAZX81KQ0PWLM3RT5V:§", random.to_owned()),
        ("got § here", format!("AIza{random}")),
        ("got § here", format!("ya29.{random}")),
        ("got § here", format!("GOCSPX-{}", &random[..28])),
        ("got § here", format!("xoxb-12-{random}")),
        ("got § here", format!("xapp-1-A1-12-{hex}")),
        ("https://hooks.slack.com/services/§", format!("T000/B000/{}", &random[..24])),
        ("https://discord.com/api/webhooks/12/§", random.to_owned()),
        ("got § here", format!("sk_live_{}", &random[..24])),
        ("got § here", format!("whsec_{random}")),
        ("got § here", format!("npm_{random}")),
        ("got § here", format!("pypi-AgEIcHlwaS5vcmcC{random}")),
        ("got § here", format!("SG.{}.{random}", &random[..22])),
        ("got § here", format!("hvs.{random}")),
        ("got § here", format!("dapi{}", &hex[..32])),
        ("got § here", format!("123456789:AA{}", &random[..33])),
        ("got § here", format!("abc8Q~{}", &random[..34])),
        ("got § here", format!("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.{random}")),
        ("\x1b[31m§\x1b[0m", format!("ghp_{random}")),
        (r#"{"error": "bad\n§"}"#, format!("ghp_{random}")),
        ("next=https%3A%2F%2Fh%2F%3Fa%3D§", format!("ghp_{random}")),
        ("AccountName=a;AccountKey=§;EndpointSuffix=core", format!("{random}{random}==")),
        ("SharedAccessSignature=sv=1&sig=§", random.to_owned()),
        ("https://h/?sv=1&sig=§", "a%2Fbcd".into()),
        ("https://h/p?api_key=§&page=2", "abc".into()),
        ("https://h/p?access%5Ftoken=§&page=2", "abc".into()),
        ("https://h/cb?to=https%3A%2F%2Fg%2F%3Faccess_token%3D§%26page%3D2", "abc".into()),
        ("https://h/cb?to=https%253A%252F%252Fg%252F%253Fpassword%253D§", "abc".into()),
        ("postgres://me:§@host/db", "p@ss".into()),
        ("https://§@github.com/o/r.git", "token-of-old".into()),
        ("redis://:§@host:6379", "hunter2".into()),
        ("Authorization: Bearer §", "abc.def".into()),
        ("Authorization: token §", hex.to_owned()),
        ("-H 'Proxy-Authorization: Basic §'", "bWU6cHc=".into()),
        ("{'Authorization': 'Bearer §'}", "abc".into()),
        ("[('Authorization', 'Bearer §')]", "abc".into()),
        ("(b'x-api-key', b'§')", "abc".into()),
        ("header token §", hex.to_owned()),
        ("Bearer §", random.to_owned()),
        ("Basic §", "dXNlcjpwYXNzd29yZA==".into()),
        ("Cookie: session=§", "abc; id=2".into()),
        (r#"{"auths": {"https://index.docker.io/v1/": {"auth": "§"}}}"#, "dXNlcjpwYXNz".into()),
        ("//registry.npmjs.org/:_authToken=§", "abc".into()),
        ("_auth=§", "dXNlcjpwYXNz".into()),
        ("curl -u § https://h/", "me:pw".into()),
        ("curl -sSu § https://h/", "me:pw".into()),
        ("curl --user '§' https://h/", "me:pw".into()),
        ("['curl', '-u', '§']", "me:pw".into()),
        ("machine h login me password §", "pw".into()),
        ("machine h\n  login me\n  password §\n", "pw".into()),
        ("default login me password §", "pw".into()),
        ("sshpass -p § ssh h", "pw".into()),
        ("mysql -u root -p§ db", "pw".into()),
        ("docker login -u me -p §", "pw".into()),
        ("wandb login §", hex.to_owned()),
        ("judge --api-key § --top 3", "abc".into()),
        ("judge --token §", "abc".into()),
        ("['judge', '--password', '§']", "abc".into()),
        ("Incorrect API key provided: §", hex.to_owned()),
        ("invalid token: §.", hex.to_owned()),
        ("HF_TOKEN=§", "abc,def;g".into()),
        ("environ({'OPENAI_API_KEY': '§', 'HOME': '/root'})", "abc".into()),
        (r#"export AWS_SECRET_ACCESS_KEY="§""#, "a b".into()),
        (r#"{"client_secret": "§"}"#, r#"a \"b\" c"#.into()),
        (r#""{\"api_key\": \"§\", \"n\": 1}""#, "abc".into()),
        ("api_key = '''§'''", "a\nb".into()),
        ("api_key = SecretStr('§')", "abc".into()),
        ("password=b'§'", "abc".into()),
        ("password: §", "correct horse battery staple".into()),
        ("  db_password: §\nsteps: 3", "correct horse".into()),
        ("password: |\n  §\nsteps: 3", "abc".into()),
        ("api_keys: ['§', 'def']", "abc".into()),
        ("<password>§</password>", "a b".into()),
        ("- name: API_TOKEN\n  value: §", "abc".into()),
        (r#"{"name": "DB_PASSWORD", "value": "§"}"#, "abc".into()),
        ("SMTP_PASS=§", "abc".into()),
        ("API_KEY_2=§", "abc".into()),
        ("SECRET_KEY_BASE=§", "abc".into()),
        (r#""password"=>"§""#, "abc".into()),
        ("-----BEGIN RSA PRIVATE KEY-----\n§\n-----END RSA PRIVATE KEY-----", "abc".into()),
        (r#""private_key": "-----BEGIN PRIVATE KEY-----\n§\n-----END PRIVATE KEY-----\n""#, "abc".into()),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\n§", "b3BlbnNzaC1rZXktdjEA".into()),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n§\n-----END PGP PRIVATE KEY BLOCK-----", "abc".into()),
    ] {
        let text = form.replace('§', &secret);
        let redacted = redact(&text);
        assert!(!redacted.contains(&secret) && redacted.contains("[redacted]"), "{text} became {redacted}");
        assert_eq!(redact(&redacted), redacted, "of {text}");
    }
    // Nothing of a secret stays either, where something in it looks like its end.
    assert_eq!(redact("HF_TOKEN=abc,def;g x_key=a&b, c=d"), "HF_TOKEN=[redacted] x_key=[redacted], c=d");
    assert_eq!(redact("api_key = '''a\nb''' n=1"), "api_key = '''[redacted]''' n=1");
}
