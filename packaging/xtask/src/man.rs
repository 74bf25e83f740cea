//! `cargo xtask man DIR`: a manual page for every function of `metaroce/metaroce.h`, made of what the header says, so that
//! there is one text.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::workspace::Workspace;

/// What holds for every function; the header's first comment says the same.
const RETURN: &str = "0, or an errno value: ENODEV for a context or queue pair of another device, EINVAL for NULL or a structure whose size is \
    too small, EOPNOTSUPP for bits of comp_mask that are not known, EIO in the child of a fork; and what is named above.";

/// A function of the header.
#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    /// One line.
    summary: String,
    /// Paragraphs.
    text: Vec<String>,
    /// Up to the semicolon, on one line.
    declaration: String,
}

/// Writes the pages; gives how many there are.
pub fn write(workspace: &Workspace, dir: &Path) -> Result<usize, String> {
    let header = header(workspace)?;
    fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let functions = functions(&header);
    for function in &functions {
        let path = dir.join(format!("{}.3", function.name));
        fs::write(&path, page(function, &functions, &header))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(functions.len())
}

fn header(workspace: &Workspace) -> Result<String, String> {
    let path = workspace.root.join("verbs-ext/include/metaroce/metaroce.h");
    fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The functions that have a comment of the form `name - summary`, in their order.
fn functions(header: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for block in header.split("/*\n * ").skip(1) {
        let Some((comment, after)) = block.split_once("\n */\n") else { continue };
        let lines = comment.lines().map(|line| line.trim_start_matches(" *").trim());
        let paragraphs = paragraphs(lines);
        let Some((name, summary)) = paragraphs.first().and_then(|first| first.split_once(" - ")) else {
            continue;
        };
        let declaration = after.split(';').next().unwrap_or_default();
        if !name.starts_with("metaroce_") || !declaration.contains(&format!("{name}(")) {
            continue;
        }
        let words: Vec<&str> = declaration.split_whitespace().collect();
        found.push(Function {
            name: name.to_owned(),
            summary: summary.to_owned(),
            text: paragraphs[1..].to_vec(),
            declaration: words.join(" "),
        });
    }
    found
}

/// Lines put together, between empty ones.
fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut all = vec![String::new()];
    for line in lines {
        match all.last_mut() {
            Some(last) if !line.is_empty() => {
                let gap = if last.is_empty() { "" } else { " " };
                *last += &format!("{gap}{line}");
            }
            _ => all.push(String::new()),
        }
    }
    all.retain(|paragraph| !paragraph.is_empty());
    all
}

/// A page in man's own macros.
fn page(function: &Function, all: &[Function], header: &str) -> String {
    let Function { name, summary, text, declaration } = function;
    let mut page = format!(".TH {} 3 \"\" metaroce \"metaroce programmer's manual\"\n", name.to_uppercase());
    let _ = writeln!(page, ".SH NAME\n{name} \\- {}", escaped(summary));
    let _ = writeln!(
        page,
        ".SH SYNOPSIS\n.nf\n.B #include <metaroce/metaroce.h>\n.PP\n.B {};\n.fi",
        escaped(declaration)
    );
    let _ = writeln!(page, ".SH DESCRIPTION");
    let _ = writeln!(page, "{}", escaped(&sentence(summary)));
    for paragraph in text {
        let _ = writeln!(page, ".PP\n{}", escaped(paragraph));
    }
    for definition in definitions(declaration, header) {
        let _ = writeln!(page, ".PP\n.nf\n{}\n.fi", escaped(definition));
    }
    if declaration.starts_with("int ") {
        let _ = writeln!(page, ".SH RETURN VALUE\n{}", escaped(RETURN));
    }
    let others: Vec<String> = all
        .iter()
        .filter(|other| other.name != *name)
        .map(|other| format!(".BR {} (3)", other.name))
        .collect();
    let _ = writeln!(page, ".SH SEE ALSO\n{}", others.join(",\n"));
    page
}

/// The summary as the description begins.
fn sentence(summary: &str) -> String {
    let mut letters = summary.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", letters.as_str())
}

/// The structures and enumerations that a declaration names, and those that their comments name, as the header has them.
fn definitions<'a>(declaration: &str, header: &'a str) -> Vec<&'a str> {
    let mut found = Vec::new();
    let mut pending = vec![declaration];
    while let Some(text) = pending.pop() {
        let words: Vec<&str> =
            text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).collect();
        for pair in words.windows(2) {
            let start = format!("\n{} {} {{\n", pair[0], pair[1]);
            if !matches!(pair[0], "struct" | "enum") || !pair[1].starts_with("metaroce_") {
                continue;
            }
            let Some(at) = header.find(&start) else { continue };
            let rest = &header[at + 1..];
            let definition = &rest[..rest.find("};").map_or(rest.len(), |end| end + 2)];
            if !found.contains(&definition) {
                found.push(definition);
                pending.push(definition);
            }
        }
    }
    found
}

/// Text that roff takes as it stands.
fn escaped(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn every_function_of_the_header_has_a_page_that_roff_takes() {
        let workspace = Workspace::find().unwrap();
        let header = header(&workspace).unwrap();
        let functions = functions(&header);
        let declared: Vec<&str> = header
            .lines()
            .filter(|line| line.starts_with("int ") || line.starts_with("void "))
            .filter_map(|line| line.split([' ', '(']).nth(1))
            .collect();
        let documented: Vec<&str> = functions.iter().map(|function| function.name.as_str()).collect();
        assert_eq!(documented, declared);
        let query = functions.iter().find(|function| function.name == "metaroce_query_plane").unwrap();
        let text = page(query, &functions, &header);
        for part in
            ["struct metaroce_plane {", "enum metaroce_admin {", ".SH RETURN VALUE", "EINVAL: there is none"]
        {
            assert!(text.contains(part), "no {part} in {text}");
        }
        let dir = std::env::temp_dir().join(format!("metaroce-man-{}", std::process::id()));
        assert_eq!(write(&workspace, &dir), Ok(declared.len()));
        if Command::new("groff").arg("--version").output().is_err() {
            println!("SKIP groff is not installed");
        } else {
            for name in declared {
                let mut command = Command::new("groff");
                command.args(["-man", "-Tutf8", "-ww", "-z"]).arg(dir.join(format!("{name}.3")));
                let done = exec::run("groff", &mut command, Duration::from_secs(20)).unwrap();
                assert!(done.success() && done.output.is_empty(), "{done}");
            }
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
