//! A picture of the ratios: one bar per goal, the goal in the middle of all of them.

use std::fmt::Write as _;

use super::{Bound, Goal, Verdict};

/// One goal: how far it was passed (above 1) or missed.
pub struct Bar {
    name: String,
    part: f64,
    met: bool,
}

impl Bar {
    /// None for what was not measured or has no goal.
    pub fn of(goal: &Goal, verdict: &Verdict) -> Option<Bar> {
        let ratio = verdict.ratio?;
        let part = match goal.bound {
            Bound::AtLeast(bound) => ratio / bound,
            Bound::AtMost(bound) => bound / ratio.max(f64::MIN_POSITIVE),
            Bound::None => return None,
        };
        let name = goal.to.map_or(goal.of.to_owned(), |to| format!("{} / {to}", goal.of));
        Some(Bar { name, part, met: verdict.met })
    }
}

/// Pixels: the names' column, the bars' column, and a row.
const NAMES: f64 = 520.0;
const BARS: f64 = 480.0;
const ROW: f64 = 20.0;
/// A bar that passes its goal by more than this is cut.
const MOST: f64 = 2.0;

/// The picture as SVG.
pub fn draw(bars: &[Bar]) -> String {
    let (width, height) = (NAMES + BARS + 60.0, ROW * (bars.len() as f64 + 2.0));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, bar) in bars.iter().enumerate() {
        let y = ROW * (index as f64 + 1.0);
        let length = bar.part.clamp(0.0, MOST) / MOST * BARS;
        let colour = if bar.met { "#3a8f5c" } else { "#c2452d" };
        let name = bar.name.replace('&', "&amp;").replace('<', "&lt;");
        // Writing to a String does not fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{NAMES}\" y=\"{}\" width=\"{length:.1}\" height=\"{}\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{}\">{:.2}</text>",
            NAMES - 8.0,
            y + 14.0,
            y + 3.0,
            ROW - 6.0,
            NAMES + length + 6.0,
            y + 14.0,
            bar.part
        );
    }
    let goal = NAMES + BARS / MOST;
    let _ = writeln!(
        svg,
        "<line x1=\"{goal}\" y1=\"{}\" x2=\"{goal}\" y2=\"{}\" stroke=\"black\"/>\
         <text x=\"{goal}\" y=\"14\" text-anchor=\"middle\">goal</text>\n</svg>",
        ROW,
        height - ROW
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw__one_bar_per_goal_with_text_that_is_text() {
        let bar = |name: &str, part| Bar { name: name.into(), part, met: part >= 1.0 };
        let svg = draw(&[bar("a < b", 0.5), bar("c & d", 7.0)]);
        assert_eq!(svg.matches("<rect x=").count(), 2);
        assert!(svg.contains("a &lt; b") && svg.contains("c &amp; d"));
        assert!(svg.contains("width=\"120.0\"") && svg.contains("width=\"480.0\""));
    }
}
