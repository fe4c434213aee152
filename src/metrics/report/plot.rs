//! Plots as inline SVG: lines with a moving average, or stacked bars.

use std::fmt::Write;

use super::{escape, number};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 210.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 24.0;

/// Maximum number of points of a line; longer lines are averaged over equal runs of points.
const MAX_POINTS: usize = 400;

/// Maximum number of stacked bars.
const MAX_BARS: usize = 80;

/// One plot.
#[derive(Debug)]
pub(super) struct Plot {
    pub title: String,
    pub shape: Shape,
    pub series: Vec<Series>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Lines,
    Stack,
}

/// One metric over the steps.
#[derive(Debug)]
pub(super) struct Series {
    pub label: String,
    /// Steps and values, sorted by step.
    pub points: Vec<(f64, f64)>,
    /// Whether it is drawn faintly under its moving average.
    pub is_smooth: bool,
    /// Whether every value is marked with a dot.
    pub has_marks: bool,
}

impl Plot {
    /// Renders the plot over the steps of the whole run.
    pub(super) fn render(&self, steps: (f64, f64)) -> String {
        let most = if self.shape == Shape::Stack { MAX_BARS } else { MAX_POINTS };
        let series: Vec<Vec<(f64, f64)>> = self.series.iter().map(|series| thinned(&series.points, most)).collect();
        let scale = Scale::new(steps, self.value_range(&series));
        let mut svg = scale.axes();
        for (index, points) in series.iter().enumerate() {
            match self.shape {
                Shape::Lines => self.series[index].draw(index, points, &scale, &mut svg),
                Shape::Stack => draw_bars(index, &series, &scale, &mut svg),
            }
        }
        format!(
            "<figure class=\"plot\" data-plot=\"{}\"><figcaption><h3>{}</h3>{}</figcaption>\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" tabindex=\"0\" aria-label=\"{}\">{svg}\
             <line class=\"rule\" y1=\"{TOP}\" y2=\"{}\"/></svg><div class=\"tip\" aria-live=\"polite\"></div></figure>\n",
            escape(&self.readout(&series, &scale)),
            escape(&self.title),
            self.legend(),
            escape(&self.description(&series)),
            HEIGHT - BOTTOM,
        )
    }

    /// The title and the newest value of every series, for screen readers.
    fn description(&self, series: &[Vec<(f64, f64)>]) -> String {
        let newest = self.series.iter().zip(series).filter_map(|(series, points)| {
            let (step, value) = points.last()?;
            Some(format!("{} {} at step {step}", series.label, number(*value)))
        });
        format!("{}: {}", self.title, newest.collect::<Vec<_>>().join(", "))
    }

    fn value_range(&self, series: &[Vec<(f64, f64)>]) -> (f64, f64) {
        let values: Vec<f64> = match self.shape {
            Shape::Lines => series.iter().flatten().map(|point| point.1).collect(),
            Shape::Stack => {
                let longest = series.iter().flatten();
                longest
                    .map(|(step, _)| series.iter().map(|points| value_at(points, *step)).sum())
                    .chain([0.0])
                    .collect()
            }
        };
        let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // Include zero unless the values are far from it; a single value is shown at half height.
        match (lowest, highest) {
            (0.0, 0.0) => (0.0, 1.0),
            _ if lowest == highest => (0.0_f64.min(2.0 * lowest), 0.0_f64.max(2.0 * highest)),
            _ => (if lowest >= 0.0 && lowest < 0.5 * highest { 0.0 } else { lowest }, highest),
        }
    }

    fn legend(&self) -> String {
        let is_title = |series: &Series| series.label.eq_ignore_ascii_case(&self.title);
        if self.series.len() == 1 && self.series.iter().all(is_title) {
            return String::new();
        }
        let entry = |(index, series): (usize, &Series)| {
            format!("<span><i class=\"s{index}\"></i>{}</span>", escape(&series.label))
        };
        format!("<p class=\"legend\">{}</p>", self.series.iter().enumerate().map(entry).collect::<String>())
    }

    /// The values shown at the pointer, as JSON for the page's script.
    fn readout(&self, series: &[Vec<(f64, f64)>], scale: &Scale) -> String {
        let lines = self.series.iter().zip(series).map(|(series, points)| {
            let points: Vec<_> = points.iter().map(|(step, value)| (step, number(*value))).collect();
            serde_json::json!({"label": series.label, "points": points})
        });
        let lines: Vec<_> = lines.collect();
        let (from, to) = scale.steps;
        serde_json::json!({"from": from, "to": to, "left": LEFT, "right": WIDTH - RIGHT, "lines": lines}).to_string()
    }
}

impl Series {
    fn draw(&self, index: usize, points: &[(f64, f64)], scale: &Scale, svg: &mut String) {
        if self.is_smooth && points.len() > 12 {
            path(svg, &format!("raw s{index}"), points, scale);
            path(svg, &format!("line s{index}"), &moving_average(points), scale);
        } else {
            path(svg, &format!("line s{index}"), points, scale);
        }
        if self.has_marks || points.len() == 1 {
            for (step, value) in points {
                let (x, y) = (scale.x(*step), scale.y(*value));
                let _ = write!(svg, "<circle class=\"dot s{index}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>");
            }
        }
    }
}

fn path(svg: &mut String, class: &str, points: &[(f64, f64)], scale: &Scale) {
    let mut commands = String::new();
    for (index, (step, value)) in points.iter().enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _ = write!(commands, "{letter}{:.1} {:.1}", scale.x(*step), scale.y(*value));
    }
    let _ = write!(svg, "<path class=\"{class}\" d=\"{commands}\"/>");
}

fn draw_bars(index: usize, series: &[Vec<(f64, f64)>], scale: &Scale, svg: &mut String) {
    let count = series.iter().map(Vec::len).max().unwrap_or(1);
    let width = ((WIDTH - LEFT - RIGHT) / count as f64 * 0.82).clamp(1.0, 28.0);
    for (step, value) in &series[index] {
        let below: f64 = series[..index].iter().map(|points| value_at(points, *step)).sum();
        let (top, bottom) = (scale.y(below + value), scale.y(below));
        // Keep bars inside the frame at both ends.
        let x = (scale.x(*step) - width / 2.0).clamp(LEFT, WIDTH - RIGHT - width);
        let height = (bottom - top).max(0.0);
        let _ = write!(
            svg,
            "<rect class=\"bar s{index}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
        );
    }
}

fn value_at(points: &[(f64, f64)], step: f64) -> f64 {
    points.iter().find(|point| point.0 == step).map_or(0.0, |point| point.1)
}

/// Reduces to at most `most` points: means over equal runs of points, placed at the last step of each run.
fn thinned(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let mean = |run: &[(f64, f64)]| {
        let sum: f64 = run.iter().map(|point| point.1).sum();
        (run[run.len() - 1].0, sum / run.len() as f64)
    };
    points.chunks(points.len().div_ceil(most).max(1)).map(mean).collect()
}

/// Mean over a centred window around each step, a tenth of the run wide (half of that at the ends), so that trends are not delayed.
fn moving_average(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = (points.len() / 20).max(2);
    let average = |index: usize| {
        let window = &points[index.saturating_sub(reach)..points.len().min(index + reach + 1)];
        (points[index].0, window.iter().map(|point| point.1).sum::<f64>() / window.len() as f64)
    };
    (0..points.len()).map(average).collect()
}

/// Maps steps and values to coordinates.
#[derive(Debug)]
struct Scale {
    steps: (f64, f64),
    values: (f64, f64),
    tick: f64,
}

impl Scale {
    fn new((from, to): (f64, f64), (lowest, highest): (f64, f64)) -> Self {
        let span = if highest > lowest { highest - lowest } else { lowest.abs().max(1e-9) * 0.2 };
        let (lowest, highest) =
            if highest > lowest { (lowest, highest) } else { (lowest - span / 2.0, highest + span / 2.0) };
        let tick = nice(span / 4.0);
        let values = ((lowest / tick).floor() * tick, (highest / tick - 1e-9).ceil() * tick);
        Self { steps: (from, to.max(from + 1.0)), values, tick }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (step - self.steps.0) / (self.steps.1 - self.steps.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value - self.values.0) / (self.values.1 - self.values.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    fn axes(&self) -> String {
        let mut svg = String::new();
        let count = ((self.values.1 - self.values.0) / self.tick).round() as i64;
        for index in 0..=count {
            let value = self.values.0 + index as f64 * self.tick;
            let value = if value.abs() < self.tick * 1e-6 { 0.0 } else { value };
            let (y, label) = (self.y(value), self.tick_label(value));
            let (right, text_x, text_y) = (WIDTH - RIGHT, LEFT - 8.0, y + 4.0);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"y\" x=\"{text_x}\" y=\"{text_y:.1}\">{label}</text>"
            );
        }
        let tick = nice((self.steps.1 - self.steps.0) / 6.0).max(1.0);
        let mut step = (self.steps.0 / tick).ceil() * tick;
        while step <= self.steps.1 {
            let (x, y) = (self.x(step), HEIGHT - 8.0);
            let _ = write!(svg, "<text class=\"x\" x=\"{x:.1}\" y=\"{y}\">{step}</text>");
            step += tick;
        }
        svg
    }
}

impl Scale {
    /// A label with enough decimals to distinguish neighbouring ticks.
    fn tick_label(&self, value: f64) -> String {
        let highest = self.values.0.abs().max(self.values.1.abs());
        if !(1e-2..1e4).contains(&highest) {
            return number(value);
        }
        let decimals = (0..8).find(|decimals| {
            let shifted = self.tick * 10.0_f64.powi(*decimals);
            (shifted - shifted.round()).abs() < 1e-6 * shifted.max(1.0) && shifted > 0.5
        });
        format!("{value:.*}", decimals.unwrap_or(8) as usize)
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `size`.
fn nice(size: f64) -> f64 {
    let power = 10.0_f64.powf(size.log10().floor());
    [1.0, 2.0, 2.5, 5.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|tick| *tick >= size * 0.999)
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_ticks_are_round_numbers_around_all_values() {
        assert_eq!([0.13, 0.3, 1.0, 7.0].map(nice), [0.2, 0.5, 1.0, 10.0]);
        let scale = Scale::new((0.0, 10.0), (0.03, 0.97));
        assert_eq!(scale.values, (0.0, 1.0));
        assert!(scale.y(0.97) > TOP && scale.y(0.03) < HEIGHT - BOTTOM);
        assert_eq!(scale.tick_label(0.5), "0.50");
        assert_eq!(Scale::new((0.0, 1.0), (0.9998, 1.0002)).tick_label(1.0), "1.0000");
        let flat = Scale::new((1.0, 1.0), (0.5, 0.5));
        assert!(flat.x(1.0).is_finite() && flat.y(0.5) > TOP && flat.y(0.5) < HEIGHT - BOTTOM);
    }

    #[test]
    fn the_plotted_moving_average_is_centred() {
        let line: Vec<_> = (0..200).map(|step| (f64::from(step), 2.0 * f64::from(step))).collect();
        assert_eq!(moving_average(&line)[10..190], line[10..190]);
    }

    #[test]
    fn thinning_a_plot_keeps_means_and_the_last_step() {
        let points: Vec<_> = (1..=1000).map(|step| (f64::from(step), f64::from(step % 2))).collect();
        let thin = thinned(&points, 100);
        assert_eq!((thin.len(), thin[99]), (100, (1000.0, 0.5)));
        assert_eq!(thinned(&points[..3], 100), points[..3]);
    }
}
