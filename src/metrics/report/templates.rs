//! Templates for parts of the page, in this folder; they escape all values.

use std::sync::LazyLock;

use minijinja::Environment;
use serde::Serialize;

static TEMPLATES: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut templates = Environment::new();
    for (name, text) in [
        ("page.html", include_str!("page.html")),
        ("tiles.html", include_str!("tiles.html")),
        ("completions.html", include_str!("completions.html")),
        ("metrics.html", include_str!("metrics.html")),
        ("config.html", include_str!("config.html")),
    ] {
        templates.add_template(name, text).expect("a template of this folder");
    }
    templates
});

/// Renders a template with its values.
pub(super) fn render(name: &str, values: impl Serialize) -> String {
    let rendered = TEMPLATES.get_template(name).and_then(|template| template.render(values));
    rendered.expect("a template of this folder, with the values that it names")
}

/// The beginning of a text.
#[derive(Debug, Serialize)]
pub(super) struct Excerpt<'a> {
    text: &'a str,
    /// Number of bytes left out.
    num_more: usize,
}

impl<'a> Excerpt<'a> {
    /// At most `max_characters` characters.
    pub fn of(whole: &'a str, max_characters: usize) -> Self {
        let end = whole.char_indices().nth(max_characters).map_or(whole.len(), |(end, _)| end);
        Self { text: &whole[..end], num_more: whole.len() - end }
    }
}
