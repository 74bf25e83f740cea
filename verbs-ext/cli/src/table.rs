//! Plain tables for a terminal, and numbers as people read them.

/// Rows under a title line, each column as wide as its widest cell; the first column and those of `left` to the left.
pub fn table(titles: &[&str], left: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = titles
        .iter()
        .enumerate()
        .map(|(i, title)| {
            rows.iter().filter_map(|row| row.get(i)).map(|c| c.chars().count()).fold(title.len(), usize::max)
        })
        .collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut built = String::new();
        for (i, cell) in cells.enumerate() {
            let width = widths[i];
            built.push_str("  ");
            built += &if i == 0 || left.contains(&titles[i]) {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            };
        }
        text += built.trim_end();
        text.push('\n');
    };
    line(&mut titles.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// A count with a decimal unit, four significant digits at most.
pub fn scaled(count: f64, unit: &str) -> String {
    const PREFIXES: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut value = count;
    let mut prefix = 0;
    while value >= 999.95 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    if prefix == 0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {}{unit}", PREFIXES[prefix]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table__aligns_and_leaves_no_blanks_at_the_end() {
        let rows = [
            vec!["a".to_owned(), "1".to_owned(), "x".to_owned()],
            vec!["long".to_owned(), "22222".to_owned(), String::new()],
        ];
        let text = table(&["name", "n", "to"], &["to"], &rows);
        assert_eq!(text, "  name      n  to\n  a         1  x\n  long  22222\n");
    }

    #[test]
    fn scaled__switches_units_without_rounding_to_a_thousand() {
        let cases = [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (1000.0, "1.0 kB"),
            (999_949.0, "999.9 kB"),
            (999_950.0, "1.0 MB"),
        ];
        for (count, text) in cases {
            assert_eq!(scaled(count, "B"), text);
        }
    }
}
