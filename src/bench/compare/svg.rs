//! Standalone SVG pictures: stacked bars and lines.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LABELS: f64 = 240.0;
const ROW: f64 = 24.0;
const HEIGHT: f64 = 320.0;
/// Narrower bars are not drawn.
const LEAST_WIDTH: f64 = 0.3;
const EDGE: f64 = 44.0;
const COLORS: [&str; 9] =
    ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e"];

/// Consecutive parts of a time.
#[derive(Debug)]
pub(super) struct Bar {
    pub name: String,
    /// Start time of the first part.
    pub start: f64,
    pub parts: Vec<(&'static str, f64)>,
    /// Total time; the time before and after the parts is waiting.
    pub total: f64,
}

/// A line of values by step.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartLine {
    /// Label in the legend.
    pub label: String,
    /// Steps and values.
    pub points: Vec<(f64, f64)>,
}

/// Draws bars from a common zero, in seconds.
pub(super) fn bars(bars: &[Bar]) -> String {
    let longest = bars.iter().map(|bar| bar.total).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LABELS - 80.0) / longest;
    let mut names: Vec<&str> = Vec::new();
    for (name, seconds) in bars.iter().flat_map(|bar| &bar.parts) {
        if seconds * scale >= LEAST_WIDTH && !names.contains(name) {
            names.push(name);
        }
    }
    let mut body = legend(&names);
    for (index, bar) in bars.iter().enumerate() {
        let y = 40.0 + ROW * index as f64;
        let (mut x, end) = (LABELS + bar.start * scale, LABELS + bar.total * scale);
        let _ = write!(
            body,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABELS}\" y=\"{y}\" width=\"{:.1}\" height=\"17\" fill=\"none\" stroke=\"#bbb\"/>",
            LABELS - 8.0,
            y + 14.0,
            escaped(&bar.name),
            end - LABELS
        );
        for (name, seconds) in &bar.parts {
            let Some(index) = names.iter().position(|known| known == name) else { continue };
            let (color, width) = (COLORS[index % COLORS.len()], seconds * scale);
            let _ = write!(body, "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"17\" fill=\"{color}\"/>");
            x += width;
        }
        // The parts are those of the slowest ranks, and may exceed the step's total.
        let _ = write!(body, "<text x=\"{:.1}\" y=\"{}\">{:.2} s</text>", end.max(x) + 6.0, y + 14.0, bar.total);
    }
    picture(50.0 + ROW * bars.len() as f64, &body)
}

/// Draws lines over a common range of steps.
pub(super) fn lines(title: &str, lines: &[ChartLine]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let range = |of: fn(&(f64, f64)) -> f64| {
        let values = || points().map(of);
        (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max))
    };
    let ((first, last), (low, high)) = (range(|point| point.0), range(|point| point.1));
    let x = |step: f64| EDGE + (step - first) / (last - first).max(1.0) * (WIDTH - 2.0 * EDGE);
    let y = |value: f64| HEIGHT - EDGE - (value - low) / (high - low).max(1e-9) * (HEIGHT - 2.0 * EDGE);
    let names: Vec<&str> = lines.iter().map(|line| line.label.as_str()).collect();
    let mut body = legend(&names);
    for (index, line) in lines.iter().enumerate() {
        let path: Vec<String> =
            line.points.iter().map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(*value))).collect();
        let color = COLORS[index % COLORS.len()];
        let _ = write!(
            body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\"/>",
            path.join(" ")
        );
    }
    for (value, at) in [(low, y(low)), (high, y(high))] {
        let _ = write!(body, "<text x=\"4\" y=\"{:.1}\">{value:.3}</text>", at + 4.0);
    }
    let _ = write!(body, "<text x=\"{EDGE}\" y=\"{}\">{} from {first} to {last}</text>", HEIGHT - 12.0, escaped(title));
    picture(HEIGHT, &body)
}

/// A legend of names and colours, in as many rows as needed.
fn legend(names: &[&str]) -> String {
    let mut text = String::new();
    let (mut x, mut y) = (8.0, 10.0);
    for (index, name) in names.iter().enumerate() {
        let width = 30.0 + 6.6 * name.len() as f64;
        if x + width > WIDTH {
            (x, y) = (8.0, y + 15.0);
        }
        let color = COLORS[index % COLORS.len()];
        let _ = write!(
            text,
            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"11\" height=\"11\" fill=\"{color}\"/><text x=\"{:.1}\" y=\"{}\">{}</text>",
            x + 15.0,
            y + 10.0,
            escaped(name)
        );
        x += width;
    }
    text
}

fn picture(height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>{body}</svg>\n"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
